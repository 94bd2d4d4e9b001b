"""Which entries a place of bounded bytes keeps. Names and sizes only: no contents, no clock."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import count

from hibachi.errors import ConfigError

EVICTIONS = "lru", "frequency", "importance"


class Keeper:
    """What is kept in `capacity` bytes, and which entries make way for a new one.

    policy: who goes first. "lru": the one that was used longest ago. "frequency": the one with the fewest uses; of
    equal ones, the one that was used longest ago. "importance": the least important; of equal ones as "frequency".
    To be stored counts as the first use.

    window: the entries that were used most recently, this many of those kept, never make way. So where it is as large
    as what is kept, nothing makes way, and a new entry that finds no room is refused. The default, 0, refuses only
    where the rest is pinned, and what is larger than the place.

    used: bytes that are kept. Each method takes O(log n) on average over calls. From one thread at a time. Raises
    ConfigError.
    """

    capacity: int
    used: int

    def __init__(self, capacity: int, policy: str = "lru", window: int = 0) -> None:
        if policy not in EVICTIONS:
            raise ConfigError(f"The eviction is one of {', '.join(EVICTIONS)}; got {policy!r}.")
        if not isinstance(window, int) or isinstance(window, bool) or window < 0:
            raise ConfigError(f"The recency window is a number of entries, 0 or more; got {window!r}.")
        self.capacity, self._policy, self._window = capacity, policy, window
        self.weighs = policy == "importance"  # else the importance of an entry counts for nothing
        self._clock = count()
        self.clear()

    def __contains__(self, name: object) -> bool:
        return name in self._rest or name in self._recent

    def __iter__(self) -> Iterator[bytes]:
        """Names, the one that was used longest ago first."""
        yield from self._rest
        yield from self._recent

    def admit(self, name: bytes, size: int, importance: float = 0.0) -> list[bytes] | None:
        """The names that make way for an entry of `size` bytes, in their order; they are forgotten already. None: it
        is refused, and nothing has changed.

        A name that is kept already was used, and keeps its size and importance. An importance that is no number is
        less than any.
        """
        if name in self:
            self.use(name)
            return []
        if self.used + size - self._free > self.capacity:
            return None
        gone: list[bytes] = []
        while self.used + size > self.capacity:
            *was, first = self._heap[0]
            if not first.free:
                heapq.heappop(self._heap)
                first.queued = False
            elif (now := self._ranked(first))[:3] != tuple(was):
                heapq.heapreplace(self._heap, now)
            else:
                gone.append(first.name)
                self.drop(first.name)
        self.used += size
        self._touch(_Kept(name, size, importance if importance == importance else -float("inf")))
        return gone

    def use(self, name: bytes) -> None:
        """The entry was used now. Nothing happens if it is not kept."""
        if (entry := self._rest.pop(name, None) or self._recent.pop(name, None)) is not None:
            self._touch(entry)

    def drop(self, name: bytes) -> None:
        """Forget an entry, though it be pinned. Nothing happens if it is not kept."""
        entry = self._rest.pop(name, None)
        if entry is None and (entry := self._recent.pop(name, None)) is not None and self._rest:
            _, follows = self._rest.popitem()  # the window is of the most recent ones that are left
            self._recent[follows.name] = follows
            self._recent.move_to_end(follows.name, last=False)
            self._settle(follows)
        if entry is not None:
            self.used -= entry.size
            self._settle(entry)

    def clear(self) -> None:
        """Forget all entries. The counters stay."""
        self._rest: OrderedDict[bytes, _Kept] = OrderedDict()  # in order of use, and then the window in the same
        self._recent: OrderedDict[bytes, _Kept] = OrderedDict()
        self.used = self._free = 0  # free: bytes that may make way
        self._heap: list[tuple[float, int, int, _Kept]] = []

    def pin(self, name: bytes) -> bool:
        """Until `unpin` was called as often, the entry does not make way. Returns whether it is kept."""
        if (entry := self._rest.get(name) or self._recent.get(name)) is not None:
            entry.pins += 1
            self._settle(entry)
        return entry is not None

    def unpin(self, name: bytes) -> None:
        """Take back one `pin`. Nothing happens without one."""
        if (entry := self._rest.get(name) or self._recent.get(name)) is not None and entry.pins:
            entry.pins -= 1
            self._settle(entry)

    def weigh(self, names: Iterable[bytes], importance: float) -> None:
        """Entries have another importance from now on. Those that are not kept change nothing. Takes O(n)."""
        for name in names:
            if (entry := self._rest.get(name) or self._recent.get(name)) is not None:
                entry.importance = importance
        self._rank()

    def _touch(self, entry: _Kept) -> None:
        entry.uses += 1
        entry.last = next(self._clock)
        self._recent[entry.name] = entry
        self._settle(entry)
        if len(self._recent) > self._window:
            _, entry = self._recent.popitem(last=False)
            self._rest[entry.name] = entry
            self._settle(entry)

    def _settle(self, entry: _Kept) -> None:
        """See whether it may make way, after a change."""
        free = not entry.pins and entry.name in self._rest
        self._free += entry.size * (free - entry.free)
        entry.free = free
        if free and not entry.queued:
            entry.queued = True
            heapq.heappush(self._heap, self._ranked(entry))
            if len(self._heap) > 2 * len(self._rest) + 64:  # most are of entries that were dropped, or are held
                self._rank()

    def _rank(self) -> None:
        for *_, left in self._heap:
            left.queued = left.free
        self._heap = [self._ranked(left) for *_, left in self._heap if left.free]
        heapq.heapify(self._heap)

    def _ranked(self, entry: _Kept) -> tuple[float, int, int, _Kept]:
        """The least makes way first. It only grows, so an entry stands in the heap once, and moves when it is met."""
        if self._policy == "lru":
            return 0.0, 0, entry.last, entry
        return entry.importance if self._policy == "importance" else 0.0, entry.uses, entry.last, entry


class _Kept:
    __slots__ = ("free", "importance", "last", "name", "pins", "queued", "size", "uses")

    def __init__(self, name: bytes, size: int, importance: float) -> None:
        self.name, self.size, self.importance = name, size, importance
        self.uses = self.last = self.pins = 0
        self.free = False  # it may make way
        self.queued = False  # it stands in the heap
