"""Merges of a vocabulary that comes without any: every way in which a token is two others, one behind the other."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hibachi.errors import InvalidModelFiles

LONGEST = 512  # characters of a token that others make; those of trained vocabularies have a few dozen
_MOST_TEXT = 1 << 23  # characters of all of them, as each is cut everywhere; 256k tokens have 2 million
_MOST_PAIRS = 1 << 18  # and 8 for each token; trained vocabularies have 2 or 3


def cuts(tokens: Collection[str], where: str) -> Iterator[tuple[str, int]]:
    """(token, how many of its characters the first of two others has), for each way that there is.

    where: begins the message of the InvalidModelFiles that it raises for tokens that would take for ever.
    """
    most = _MOST_PAIRS + 8 * len(tokens)
    longest, total = max(tokens, key=len, default=""), sum(map(len, tokens))
    if len(longest) > LONGEST:
        raise _refusal(where, f"at most {LONGEST} characters a token; got {len(longest)}: {longest[:20]!r} ...")
    if total > _MOST_TEXT:
        raise _refusal(where, f"at most {_MOST_TEXT} characters of tokens; got {total}")
    there = set(tokens)
    for token in tokens:
        for at in range(1, len(token)):
            if token[:at] in there and token[at:] in there:
                most -= 1
                yield token, at
        if most < 0:
            raise _refusal(where, f"at most {_MOST_PAIRS} ways to cut {len(tokens)} tokens, and 8 for each; got more")


def _refusal(where: str, what: str) -> InvalidModelFiles:
    return InvalidModelFiles(
        f"{where}: it has no merges, so they are found by cutting its tokens, and that takes {what}. Copy or download "
        f"the file again."
    )
