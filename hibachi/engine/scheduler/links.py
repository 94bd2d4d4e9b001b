"""Sequences that are linked: whether they fit at all, which of them a step waits for, and what a fork moves.

See `hibachi.engine.scheduler.sequence.Link`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hibachi.engine.scheduler.sequence import Link, Seq
from hibachi.engine.scheduler.step import Ints, Limits
from hibachi.errors import InvalidRequest


def tail(limits: Limits, seq: Seq, *, early: bool) -> int:
    """Blocks that each further sequence needs of its own to go on from a prompt that another has computed. early: but
    for its last token.
    """
    length = seq.length or seq.prompt_len
    if not limits.blocks:
        return 0
    if limits.rows_apart:
        return -(-length // limits.block_size)
    last = seq.end - 1 if limits.reserve_all else length
    return -(-last // limits.block_size) - (length - early) // limits.block_size


def most_alike(limits: Limits, prompt_len: int, max_new: int | None, *, early: bool = False) -> int:
    """How many sequences of one prompt may be linked: rows and memory hold as many at once."""
    seq = Seq(prompt_len, max_new)
    seq.end = limits.fit(prompt_len, max_new)
    each = tail(limits, seq, early=early)
    if not each:
        return limits.rows
    first = -(-(seq.end - 1 if limits.reserve_all else prompt_len) // limits.block_size)
    return max(1, min(limits.rows, 1 + (limits.blocks - 1 - first) // each))


def check_fits(limits: Limits, link: Link) -> None:
    """Check that the sequences of a link can run at once. Raises InvalidRequest."""
    n = len(link.seqs)
    if n > limits.rows:
        raise InvalidRequest.about(
            ("n",),
            f"Linked sequences run at once: expected at most max_num_seqs={limits.rows}; got {n}. Ask for fewer, or "
            f"give the engine more rows.",
        )
    if not limits.blocks:
        return
    size, usable = limits.block_size, limits.blocks - 1
    if link.parts:
        first = link.seqs[0]
        need = -(-(first.end - 1 if limits.reserve_all else first.prompt_len) // size)
        need += (n - 1) * tail(limits, first, early=link.early)
    else:  # each may have to compute all of its tokens again
        need = sum(-(-(seq.end - 1) // size) for seq in link.seqs)
    if need > usable:
        raise InvalidRequest.about(
            ("n",),
            f"{n} linked sequences need {need * size} positions of the cache at once; it has {usable * size}. Ask for "
            f"fewer, or for fewer new tokens, or give the engine more kv_cache_memory_bytes.",
        )


def tokens_of(link: Link) -> tuple[int, int]:
    """The tokens of linked sequences at their end, and at their start: of one prompt for all that have the same."""
    begun = link.seqs[0].prompt_len if link.alike else sum(seq.prompt_len for seq in link.seqs)
    return begun + sum(seq.end - seq.prompt_len for seq in link.seqs), begun


def waited(seqs: Sequence[Seq], q: Ints, left: Ints) -> Ints:
    """What rows compute, where some draw together with others: their last tokens only when all of them can.

    q [n]: what they would compute, of `left` [n] tokens.
    """
    links: dict[int, list[int]] = {}
    for i, seq in enumerate(seqs):
        if seq.link is not None and seq.link.waits and not seq.vacant:
            links.setdefault(id(seq.link), []).append(i)
    for group in links.values():
        link = seqs[group[0]].link
        assert link is not None
        if not link.together or not (q[group] == left[group]).all() or left[group].max() > 1:
            q[group] = np.minimum(q[group], left[group] - 1)
    return q


def others_of(seq: Seq) -> Sequence[Seq]:
    """The sequences that go on from this one with its first new token."""
    link = seq.link
    if link is None or not link.alike or link.forked or seq.vacant:
        return ()
    return [each for each in link.seqs if each.vacant]
