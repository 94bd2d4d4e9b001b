"""What the scheduler knows of tiers: places beside the device's memory that keep the contents of blocks by name.

A block is stored once it is full and sound. A sequence that starts goes on from what is found of its next blocks. Both
are plans only, which a runner carries out before the step: first the stores, then the loads, as a block that is stored
may be the one that is loaded to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hibachi.engine.scheduler.blocks import BlockPool
from hibachi.engine.scheduler.names import extended, state_name
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import EntryLoad, EntryLoads, RowTable


class Tiers:
    """The names of one scheduler's blocks, and what is found under them.

    root: names all that bits depend on besides tokens. find: what is kept under a name, in a form that the runner
    takes; None means nothing, or nothing yet.
    """

    def __init__(self, root: bytes, find: Callable[[bytes], Any | None]) -> None:
        self.root, self._find = root, find
        self.blocks: list[EntryLoad] = []
        self.states: list[EntryLoad] = []
        self.stored_states: list[tuple[int, bytes]] = []  # (checkpoint, name)

    def names(self, seq: Seq, n: int) -> list[bytes]:
        """Of the first n blocks of a sequence, or of as many as have keys."""
        if seq.root != self.root:
            seq.names, seq.root = [], self.root
        return extended(seq.names, self.root, seq.salt, seq.keys or (), n)

    def found(self, seq: Seq, start: int, most: int) -> list[Any]:
        """The contents of the blocks of a sequence from `start` on, as far as they are here without a gap."""
        found = []
        for name in self.names(seq, most)[start:most]:
            if (data := self._find(name)) is None:
                break
            found.append(data)
        return found

    def state(self, seq: Seq, start: int, most: int) -> tuple[int, Any] | None:
        """(blocks, state) after the most blocks, more than `start`, for which a state is kept."""
        names = self.names(seq, most)
        for n in range(min(most, len(names)), start, -1):
            if (data := self._find(state_name(names[n - 1]))) is not None:
                return n, data
        return None

    def renew(self, root: bytes) -> None:
        """Go on under other names; what was to be moved is not."""
        self.root = root
        self.forget()

    def take_loads(self, pool: BlockPool | None, table: RowTable) -> EntryLoads:
        """What is to be loaded before the next step, but into what has got other contents since."""
        blocks = [load for load in self.blocks if pool and pool.publishes(load.at, load.of)]
        states = [load for load in self.states if table.generation[load.at] == load.of]
        self.blocks, self.states = [], []
        return EntryLoads(blocks, states)

    def forget(self) -> None:
        self.blocks, self.states, self.stored_states = [], [], []
