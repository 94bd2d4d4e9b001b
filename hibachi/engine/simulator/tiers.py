"""Tiers of names in a simulated run: an engine's policy on a clock that is not real, without threads or data."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from typing_extensions import override

from hibachi.engine.scheduler.names import NAME_BYTES
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import EntryStores, StepPlan
from hibachi.engine.scheduler.tiers import Tiers
from hibachi.engine.simulator.outcome import NEVER, SimOutcome
from hibachi.engine.simulator.trace import PICOSECONDS
from hibachi.engine.tiers.host import HostTier, Wish
from hibachi.engine.tiers.keeping import Keeper
from hibachi.engine.tiers.waiting import PendingLoads


class _Disk:
    """A `KVStore` of names. now: the time, by the clock of who reads. each: seconds that an entry takes."""

    def __init__(self, blocks: int, each: float) -> None:
        self.now, self._each, self._keeper = 0.0, each, Keeper(max(blocks, 1))

    def has(self, names: Sequence[bytes]) -> list[bool]:
        return [name in self._keeper for name in names]

    def get(self, names: Sequence[bytes]) -> list[bytes | None]:
        found = [name if name in self._keeper else None for name in names]
        for name in filter(None, found):
            self._keeper.use(name)
            self.now += self._each
        return found

    def put(self, entries: Sequence[tuple[bytes, bytes]]) -> None:
        for name, _ in entries:
            self._keeper.admit(name, 1)

    def drop(self) -> None:
        self._keeper.clear()

    def close(self) -> None:
        pass


class SimTiers(HostTier):
    """Host memory and a disk for the blocks of a scheduler; the data of an entry is its name. What is stored is there
    at once. One reader reads from disk, for one request after the other.

    host, disk: blocks; without a disk, 0. host_load, disk_load: seconds that a block takes to the device, and from disk
    to host memory. eviction: as of `KVTiers`. clock, in methods: picoseconds.
    """

    def __init__(
        self, scheduler: Scheduler, host: int, disk: int, host_load: float, disk_load: float, eviction: str
    ) -> None:
        self._disk = _Disk(disk, disk_load)
        super().__init__(Keeper(host * NAME_BYTES, eviction), [("disk", self._disk)] if disk else [])
        self._clock = lambda: self._disk.now
        self._waiting = PendingLoads[Seq](self, self._go_on)
        self._scheduler, self._load = scheduler, round(host_load * PICOSECONDS)
        self._wishes: deque[tuple[float, Wish]] = deque()  # and when each came
        self._reads: deque[tuple[float, Callable[[], None]]] = deque()  # what comes of a wish, and when
        self._idle = 0.0  # when the reader had nothing to do
        self._from_disk: set[bytes] = set()  # entries that were not loaded since they came from there
        scheduler.tiers = Tiers(b"simulated", self.find)

    @override
    def bring(self, wish: Wish) -> None:
        self._wishes.append((self._disk.now, wish))

    @override
    def _put(self, name: bytes, data: bytes, importance: float = 0.0) -> None:
        self._from_disk.add(name)
        self._reads.append((self._disk.now, partial(super()._put, name, data, importance)))

    def begin(self, seq: Seq, clock: int) -> bool:
        """Whether a request that comes now waits for the disk."""
        self._disk.now = clock / PICOSECONDS
        return self._waiting.begin(seq, seq, self._scheduler, self._disk.now)

    def move(self, clock: int) -> float:
        """Do all that happens until now; returns when there is more to do, infinity for never."""
        self._keep_all(self._scheduler.take_stores())
        now = clock / PICOSECONDS
        while self._reads or self._wishes:
            if not self._reads:
                came, wish = self._wishes.popleft()
                self._disk.now = max(self._idle, came)
                self._bring(wish)
                self._reads.append((self._disk.now, partial(wish.done, None)))
            if self._reads[0][0] > now:
                break
            self._idle, do = self._reads.popleft()
            do()
        for seq in self._waiting.late(now):
            self._go_on(seq)
        times = [at for at, _ in self._reads] + [math.inf if (late := self._waiting.next_time()) is None else late]
        return (min(times) + 1e-9) * PICOSECONDS  # more than times are rounded by

    def before(self, plan: StepPlan, took: int, outcome: SimOutcome) -> int:
        """Store and load what a step asks for, which takes so long by itself; returns how long it takes with that."""
        assert plan.stores and plan.loads
        self._keep_all(plan.stores)
        new = {block for seq in plan.fresh if outcome.started[seq.owner] == NEVER for block in seq.blocks}
        for block, _, name in plan.loads.blocks:
            tokens = self._scheduler.limits.block_size if block in new else 0
            outcome.disk_hit_tokens += tokens * (name in self._from_disk)
            outcome.host_hit_tokens += tokens * (name not in self._from_disk)
            self._from_disk.discard(name)
        outcome.loads += len(plan.loads.blocks)
        took += self._load * len(plan.loads.blocks)
        self._waiting.took(plan, took / PICOSECONDS)
        return took

    def _keep_all(self, stores: EntryStores) -> None:
        for _, name in stores.blocks:
            self._from_disk.discard(name)
            super()._put(name, name)
            self._disk.put([(name, name)])

    def _go_on(self, seq: Seq, failed: Exception | None = None) -> None:
        if self._waiting.end(seq):
            self._scheduler.free(seq)
