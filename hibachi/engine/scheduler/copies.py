"""Prefixes for models that keep a cache of their own: a sequence that starts gets copies of what was computed before.

Blocks only count memory there. The contents of a block that a row holds lie in the row's past, and those of an idle
block by themselves, where the runner keeps them. So two rows never hold one block: an idle block that a sequence finds
becomes its own, and for a block that a running row holds it gets another one, for the copy.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeAlias

from hibachi.engine.scheduler.blocks import BlockPool
from hibachi.engine.scheduler.sequence import Seq


class CopySource(NamedTuple):
    """Where the contents of a block lie. node: their name in the trie. lender: the row that has them; -1: none has."""

    node: Hashable
    lender: int


Copied: TypeAlias = "tuple[Seq, list[CopySource]]"  # of each of its first blocks
Left: TypeAlias = "tuple[int, Seq, list[tuple[int, int, Hashable]]]"  # (its row, it, (place, block, node) of idle ones)


class Copies:
    """Says what starting sequences copy, and what is kept of those that leave."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._left: dict[int, Left] = {}  # by row: the last that has left it

    def sound(self, found: Sequence[int], at_work: Sequence[Seq]) -> int | None:
        """How many of the blocks of a prefix, counted from the first, may be copied: those that are known to be sound.
        None means to wait: one of `at_work` computes the next, and will have done so after this step or some more.
        """
        unsound = self._pool.unsound(found)
        n = found.index(unsound[0]) if unsound else len(found)
        if n < len(found) and any(seq.blocks[n : n + 1] == [found[n]] for seq in at_work):
            return None
        return n

    def idle(self, found: Sequence[int]) -> list[int]:
        """Those that the sequence takes over."""
        return [block for block in found if self._pool.is_idle(block)]

    def sources(self, found: Sequence[int], running: Sequence[Seq]) -> list[CopySource]:
        """Where the contents of the blocks lie, asked before any of them is taken over."""
        sources, last = [], None
        for n, block in enumerate(found):
            lender = None
            if not self._pool.is_idle(block):
                near = running if last is None else [last, *running]  # mostly one row has them all
                lender = last = next(seq for seq in near if seq.row >= 0 and seq.blocks[n : n + 1] == [block])
            sources.append(CopySource(self._pool.node(block), -1 if lender is None else lender.row))
        return sources

    def given(self, found: Sequence[int], idle: Sequence[int], more: Sequence[int]) -> list[int]:
        """The blocks of a sequence that takes over the idle ones of those that it found, and got `more`."""
        own, theirs = iter(more), set(idle)
        return [block if block in theirs else next(own) for block in found] + list(own)

    def leave(self, seq: Seq, row: int, blocks: Sequence[int]) -> None:
        """A sequence has left its row, and released these blocks."""
        idle = [(n, block, self._pool.node(block)) for n, block in enumerate(blocks) if self._pool.is_idle(block)]
        self._left[row] = row, seq, idle

    def take_left(self) -> list[Left]:
        """The sequences that left since the last call, and where what is to be kept of them lies."""
        left, self._left = [*self._left.values()], {}
        return left
