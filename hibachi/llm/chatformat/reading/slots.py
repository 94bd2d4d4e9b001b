"""Fixed texts and the slots between them, found in a text that may still grow.

Each function answers of the text so far, and never changes its mind when more comes: `NO`, `WAIT` (more text is
needed), or where it ends. Blanks are left out on both sides, as models are free with them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from hibachi.llm.chatformat.format import Slot

NO: Final = -1
WAIT: Final = -2
SLOT: Final = 256
"""Characters that a name, an id, and a run of blanks within a call have at most."""

BLANKS: Final = " \t\r\n"
_BLANKS = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"""[^\x00-\x20"'`<>{}()\[\]|,;]""")
_JSON = re.compile(r"""[{}\[\]]|"(?:[^"\\]|\\.)*"?""", re.DOTALL)
_AHEAD = 8_192  # characters of arguments that are read before the name of their call

Finder: TypeAlias = Callable[[str, int], int]
"""Says where something that begins at a position of a text ends, or NO or WAIT."""


class Fit(NamedTuple):
    """Parts that fit. end: the position behind them, or where the arguments among them begin."""

    end: int
    name: str = ""
    id: str | None = None


def bare(text: str) -> str:
    """`text` without its blanks, as `match` wants it."""
    return "".join(text.split())


def skip(text: str, at: int) -> int:
    """The position of the first character from `at` on that is no blank."""
    found = _BLANKS.match(text, at)
    return at if found is None else found.end()


def match(wanted: str, text: str, at: int) -> int:
    """Where `wanted` (without blanks) ends, if the text has it at `at`."""
    for letter in wanted:
        while (here := text[at : at + 1]) and here in BLANKS:
            start, at = at, skip(text, at)
            if at - start > SLOT:
                return NO
        if not here:
            return WAIT
        if here != letter:
            return NO
        at += 1
    return at


def best(*ends: int) -> int:
    """Of what several gave for the same text: the farthest end, or else WAIT if one may still come."""
    return max(ends) if max(ends) >= 0 or WAIT not in ends else WAIT


def held(text: str, wanted: str, start: int = 0) -> int:
    """How many characters at the end of `text`, from `start` on, are the beginning of `wanted`, and not all of it."""
    if not wanted:
        return 0
    most = min(len(wanted) - 1, len(text) - start)
    at = text.find(wanted[0], len(text) - most) if most > 0 else -1
    while at >= 0:
        if wanted.startswith(text[at:]):
            return len(text) - at
        at = text.find(wanted[0], at + 1)
    return 0


def merged(parts: Sequence[str | Slot]) -> tuple[str | Slot, ...]:
    """Parts whose texts have no blanks, none is empty, and none stands beside another."""
    out: list[str | Slot] = []
    for part in parts:
        if isinstance(part, Slot):
            out.append(part)
        elif text := bare(part):
            if out and isinstance(out[-1], str):
                out[-1] += text
            else:
                out.append(text)
    return tuple(out)


def fit(
    parts: Sequence[str | Slot], text: str, at: int, then: Finder, names: frozenset[str] = frozenset()
) -> Fit | int:
    """Where `merged` parts end that begin at `at`, or NO or WAIT. then: what must come behind them.

    names: those that may have any character. Arguments among the parts are an object in JSON.
    """
    name, ident, begun = "", None, -1
    for i, part in enumerate(parts):
        if isinstance(part, str):
            at = match(part, text, at)
            if at < 0:
                return at
            continue
        at = skip(text, at)
        if part is Slot.ARGUMENTS:
            begun, at = at, _object(text, at)
            if at < 0:
                return at
            continue
        longer = _beyond(names, parts[i + 1 : i + 2]) if part is Slot.NAME else ()
        end = _slot(text, at, _follows(parts, i, then), names, longer)
        if end < 0:
            return end
        value, at = text[at:end].strip(), end
        if part is Slot.NAME:
            if not value or (name and value != name) or (value not in names and len(value.split()) > 1):
                return NO
            name = value
        elif part is Slot.ID:
            ident = value or None
        elif part is Slot.NUMBER and not value.isdecimal():
            return NO
    behind = then(text, at)
    return behind if behind < 0 else Fit(at if begun < 0 else begun, name, ident)


def _object(text: str, at: int) -> int:
    """Where an object in JSON ends."""
    if text[at : at + 1] != "{":
        return NO if at < len(text) else WAIT
    depth = 0
    for found in _JSON.finditer(text, at, at + _AHEAD):
        depth += (found[0] in "{[") - (found[0] in "}]")
        if not depth:
            return found.end()
    return WAIT if len(text) - at < _AHEAD else NO


def _follows(parts: Sequence[str | Slot], i: int, then: Finder) -> Finder:
    following = parts[i + 1] if i + 1 < len(parts) else None
    if following is None:
        return then
    if isinstance(following, Slot):
        raise ValueError(f"Expected a text between the slots of a call, got {parts[i]} and {following} side by side.")
    return lambda text, at: match(following, text, at)


def _slot(text: str, start: int, follows: Finder, names: frozenset[str], longer: Sequence[str]) -> int:
    odd = _letters(names)
    for name in longer:
        if text.startswith(name, start) and follows(text, start + len(name)) != NO:
            return start + len(name)
        if len(text) - start < len(name) and name.startswith(text[start:]):
            return WAIT
    for at in range(start, min(start + SLOT, len(text))):
        found = follows(text, at)
        if found != NO:
            return WAIT if found == WAIT else at
        here = text[at]
        if here not in BLANKS and not _WORD.match(here) and here not in odd:
            return NO
    return WAIT if len(text) - start < SLOT else NO


@lru_cache(maxsize=64)
def _beyond(names: frozenset[str], following: Sequence[str | Slot]) -> Sequence[str]:
    """Names that hold the text that follows one, such as "a:b" of "a:b:0", the longest first."""
    found = [name for name in names if any(isinstance(part, str) and part in name for part in following)]
    return sorted(found, key=len, reverse=True)


@lru_cache(maxsize=64)
def _letters(names: frozenset[str]) -> frozenset[str]:
    """All letters of some names, of which there may be a hundred thousand."""
    return frozenset("".join(names))
