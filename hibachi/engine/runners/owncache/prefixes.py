"""Prefixes of pasts: what ended requests have computed is kept in blocks of positions, and rows that start get copies.

Which blocks are kept, and which a row starts with, is up to `hibachi.engine.scheduler.copies`; here are the arrays.
Whatever is missing here costs time only: a row whose past is not there is computed again from its tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np

from hibachi.backend.array_backend import Array, HostArray
from hibachi.engine.runners.calls import drop_frames
from hibachi.engine.runners.entries import Entries, Kind, arrays_of
from hibachi.engine.runners.owncache.layout import Layout, Past
from hibachi.engine.scheduler.blocks import BlockPool
from hibachi.engine.scheduler.copies import Copied, Copies, CopySource
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import EntryLoads, EntryStores
from hibachi.errors import text_of

log: logging.Logger = logging.getLogger("hibachi.engine")


class Prefixes:
    """The blocks that are kept, by their nodes in the pool's trie.

    template: a past of the model, for all in it that is no position of a row. pool, copies: of the scheduler.
    """

    def __init__(self, layout: Layout, template: Past, pool: BlockPool, copies: Copies) -> None:
        self._layout, self._template, self._pool, self._copies = layout, template, pool, copies
        self._size = pool.block_size
        self.flush: Callable[[], None] = lambda: None  # keeps what is wanted of rows that have gone
        self.kept: dict[Hashable, tuple[int, list[Array]]] = {}
        """{node: (block, its arrays)}"""
        self._taken = pool.taken

    def __len__(self) -> int:
        return len(self.kept)

    def keep_left(self, of: Mapping[int, Past], seqs: Mapping[int, Seq]) -> None:
        """Keep what is wanted of the rows that have gone. of: the pasts that they are still in. seqs: whose."""
        for row, seq, idle in self._copies.take_left():
            past = of.get(row)
            if past is not None and seqs.get(row) is seq:
                with self._or_not("kept"):
                    self.keep(past, row, idle)

    def begin(self, copied: Sequence[Copied], of: dict[int, Past], width: Callable[[int], int]) -> None:
        """Give rows that start the positions that were found computed. of: it gets their pasts. width: of a past with
        so many positions.
        """
        for seq, sources in copied:
            with self._or_not("copied"):
                past = self.past(seq.row, sources, of, width(len(sources) * self._size))
                if past is not None:
                    of[seq.row] = past

    @contextmanager
    def _or_not(self, what: str) -> Iterator[None]:
        """What fails here costs time only."""
        try:
            with self._layout.backend.guard():
                yield
        except Exception as e:
            log.info("%s: a prefix could not be %s: %s", self._layout.name, what, text_of(e))
            drop_frames(e)

    def keep(self, past: Past, row: int, idle: Sequence[tuple[int, int, Hashable]]) -> None:
        """Copy blocks of a row that has gone. idle: (number of the block in its row, block, node)."""
        place = past.place(row)
        for n, block, node in idle:
            end = (n + 1) * self._size
            if node in self.kept or end > past.counts[place] or not self._pool.publishes(block, node):
                continue
            found = self._layout.cut(past, place, end - self._size, end)
            self.kept[node] = block, [None if a is None else self._layout.backend.copy(a) for a in found]

    def past(self, row: int, sources: Sequence[CopySource], of: Mapping[int, Past], width: int) -> Past | None:
        """The past of a row that starts with the blocks of these sources, `width` positions wide; None if one is not
        there, or not finite. of: the pasts that rows are in.
        """
        blocks = []
        for n, source in enumerate(sources):
            if source.lender < 0:
                _, arrays = self.kept.pop(source.node, (0, None))  # it moves into the row's past
            else:
                past, end = of.get(source.lender), (n + 1) * self._size
                place = 0 if past is None else past.place(source.lender)
                there = past is not None and past.counts[place] >= end
                arrays = self._layout.cut(past, place, end - self._size, end) if past is not None and there else None
            if arrays is None:
                return None
            blocks.append(arrays)
        begun = self._layout.begun(self._template, blocks, row, len(blocks) * self._size, width)
        return begun if self._layout.finite(begun) else None

    # ---- what tiers keep ---------------------------------------------------------------------------------------

    def entry_kinds(self) -> tuple[list[Kind], list[Kind]]:
        """See `EntrySource`. An entry is one block of each array that has positions."""
        return self._kinds, []

    def outgoing(self, stores: EntryStores) -> tuple[list[Entries], list[Entries]]:
        """See `EntrySource`; of what is kept."""
        self.flush()
        b, n = self._layout.backend, len(self._like)
        found = [(name, self.kept.get(self._pool.node(block), (0, None))[1]) for block, name in stores.blocks]
        there = [(name, [a for a in arrays if a is not None]) for name, arrays in found if arrays is not None]
        if not there:
            return [], []
        with b.guard():
            read = b.fetch([b.bits(array) for _, arrays in there for array in arrays])

        def arrays() -> list[HostArray]:
            flat = read()
            return [np.stack([flat[i * n + k] for i in range(len(there))]) for k in range(n)]

        return [Entries([name for name, _ in there], arrays)], []

    def incoming(self, loads: EntryLoads) -> None:
        """See `EntrySource`."""
        b = self._layout.backend
        with b.guard():
            for load in loads.blocks:
                held = arrays_of([load.data], self._kinds, 1)
                given = iter([b.of_bits(b.put(a[0]), like) for a, like in zip(held, self._like, strict=True)])
                self.kept[load.of] = load.at, [next(given) if leaf.parted else None for leaf in self._layout.leaves]

    @cached_property
    def _like(self) -> list[Array]:
        return self._layout.block(self._size)

    @cached_property
    def _kinds(self) -> list[Kind]:
        b = self._layout.backend
        with b.guard():
            return [Kind(a.shape, a.dtype) for a in b.fetch([b.bits(array) for array in self._like])()]

    def drop(self) -> None:
        """Free what the scheduler has given to others."""
        if self._pool.taken != self._taken:
            self._taken = self._pool.taken
            self.kept = {node: kept for node, kept in self.kept.items() if self._pool.keeps(kept[0], node)}

    def clear(self) -> None:
        self.kept.clear()
