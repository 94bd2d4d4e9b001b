"""Host memory as a tier, and the threads between it and the stores.

The engine's thread only hands over: one thread reads from the device what is to be kept, one for each store writes it
there, and one brings what a waiting request may find in the stores. Host memory is bounded, and so is what waits to be
written: a slow store costs entries of its own, and no step waits for it. Whatever fails is a miss.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from queue import SimpleQueue
from typing import Any, Protocol

from hibachi.engine.scheduler.names import chained
from hibachi.engine.tiers.keeping import Keeper
from hibachi.engine.tiers.store import KVStore
from hibachi.errors import InvalidRequest, text_of

log: logging.Logger = logging.getLogger("hibachi.engine")
AT_ONCE = 8  # entries that are asked for in one call
FADE = 0.8  # weight of an older measurement
TOLD_EVERY = 60.0  # seconds between lines about one store that fails
EVENTS = 1 << 14  # the last ones are kept for who asks
GIVEN = 1 << 16  # names whose importance somebody has said
CLOSE_WITHIN = 5.0  # seconds that `close` waits for stores: an engine has twice as many
AHEAD = 1 << 28  # bytes that may wait to be written, at least; else as many as host memory has

Event = Callable[[str, str, bytes], None]  # "stored" or "removed", the tier, the name


class Outgoing(Protocol):
    """What was read from the device: see `hibachi.engine.runners.entries.Entries`."""

    @property
    def names(self) -> list[bytes]: ...

    def data(self) -> list[bytes]: ...

    def importance(self) -> list[float]: ...


@dataclass(slots=True)
class TierCounts:
    """Counters from the start on. Entries are of one block or one state each."""

    stored: int = 0  # entries put into host memory
    dropped: int = 0  # that were to be stored, while too many waited
    brought: int = 0  # from stores into host memory
    slower: int = 0  # requests for which computing was expected to be faster than loading


@dataclass(slots=True)
class Wish:
    """What a request would begin with. names: of its blocks, in order. states: of recurrent states, the longest first;
    it needs one of them and the blocks before it. compute: seconds that computing an entry takes; None means nobody
    knows. until: when it waits no longer, by the tier's clock. done: told that all has come that will, with the error
    of a store if there was one.
    """

    names: list[bytes]
    states: list[bytes]
    compute: float | None
    until: float
    done: Callable[[Exception | None], None]


class _WorkQueue:
    """A thread, which begins with the first work, and what waits for it. ahead: bytes of that."""

    def __init__(self, name: str) -> None:
        self._name, self._lock, self.ahead = name, threading.Lock(), 0
        self._works: SimpleQueue[tuple[Callable[[], object], int] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._over = False

    def put(self, work: Callable[[], object], size: int = 0) -> None:
        with self._lock:
            self.ahead += size
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._works.put((work, size))

    def _run(self) -> None:
        while (next_ := self._works.get()) is not None and not self._over:
            work, size = next_
            try:
                work()
            except Exception:
                log.exception("what tiers keep could not be moved")
            del work, next_
            with self._lock:
                self.ahead -= size

    def end(self, until: float) -> bool:
        """Do what waits, but nothing more after `until`; returns whether the thread is gone."""
        self._works.put(None)
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
            self._over = self._thread.is_alive()
        return not self._over


@dataclass(slots=True)
class _StoreBehind:
    """A store, and what is known of it. pace: seconds that an entry takes; None means nobody knows. generation: that it
    was known to have.
    """

    store: KVStore
    name: str
    pace: float | None = None
    generation: int | None = None
    error: Exception | None = None  # of its last call
    told: float = field(default=-TOLD_EVERY)
    out: _WorkQueue = field(default_factory=partial(_WorkQueue, "hibachi-tiers-store"))


class HostTier:
    """Entries in host memory by name. stores: (name, store) of those behind it, the quickest first.

    keeper: of the bytes that there are. event: told what is stored and removed. Threads begin with the first work.
    """

    counts: TierCounts

    def __init__(self, keeper: Keeper, stores: Sequence[tuple[str, KVStore]] = (), event: Event | None = None) -> None:
        self.counts = TierCounts()
        self._keeper, self._event = keeper, event
        self._clock: Callable[[], float] = time.monotonic
        self._sources = [_StoreBehind(store, name) for name, store in stores]
        self._lock = threading.Lock()
        self._entries: dict[bytes, bytes] = {}
        self._pinned: dict[bytes, int] = {}  # bytes of each, here or not
        self._importance = 0.0  # of a usual entry
        self._given: dict[bytes, float] = {}  # the importance of each that was named, here or not
        self._events: deque[tuple[int, str, str, bytes]] = deque(maxlen=EVENTS)
        self._told = 0
        self._out, self._in = _WorkQueue("hibachi-tiers-out"), _WorkQueue("hibachi-tiers-in")
        self._most = max(AHEAD, keeper.capacity)
        self._counter, self._generation = b"", 0  # the name of what says the generation, and this process's own

    @property
    def used(self) -> int:
        """Bytes in host memory."""
        return self._keeper.used

    @property
    def stores(self) -> bool:
        return bool(self._sources)

    # ---- of the engine's thread --------------------------------------------------------------------------------

    def has(self, name: bytes) -> bool:
        with self._lock:
            return name in self._entries

    def find(self, name: bytes) -> bytes | None:
        """What is kept under a name; it counts as used."""
        with self._lock:
            data = self._entries.get(name)
            if data is not None:
                self._keeper.use(name)
            return data

    def keep(self, entries: Outgoing, size: int, *, now: bool) -> None:
        """Keep what was read from the device. size: bytes of all. now: the device need not be waited for."""
        if now:
            self._store(entries, size, self._generation)
        elif self._out.ahead > self._most // 4:  # what is not read yet lies on the device
            self.counts.dropped += len(entries.names)
        else:
            self._out.put(partial(self._store, entries, size, self._generation), size)

    def bring(self, wish: Wish) -> None:
        """Bring what a request wishes into host memory, in the background."""
        self._in.put(lambda: wish.done(self._bring(wish)))

    def warm(self) -> None:
        """Bring what stores say was written last into host memory, in the background: a process that starts has it
        before the first request.
        """
        for source in self._sources:
            if callable(latest := getattr(source.store, "latest", None)):
                source.out.put(partial(self._fill, source, iter(latest(self._keeper.capacity))))

    def weigh(self, names: Iterable[bytes], importance: float) -> None:
        """Entries of these names have this importance, now or when they come; of names that are not here the last ones
        are remembered. Raises InvalidRequest. Callable from any thread.
        """
        if not self._keeper.weighs:
            raise InvalidRequest("Here no entry is kept for its importance. Choose the eviction importance.")
        if not math.isfinite(importance):
            raise InvalidRequest(f"An importance must be a finite number; got {importance}.")
        with self._lock:
            self._given.update(dict.fromkeys(names, importance))
            for name in list(self._given)[: max(0, len(self._given) - GIVEN)]:
                del self._given[name]
            self._keeper.weigh(names, importance)

    def pin(self, names: Mapping[bytes, int], *, on: bool) -> None:
        """Keep entries of these names, now or when they come, until on=False says that they may make way again.

        names: with the bytes of each. Raises InvalidRequest for more than half of the host memory. Callable from any
        thread.
        """
        with self._lock:
            changed = {name: size for name, size in names.items() if (name in self._pinned) != on}
            most = self._keeper.capacity // 2
            if on and (wanted := sum(self._pinned.values()) + sum(changed.values())) > most:
                raise InvalidRequest(
                    f"At most half of the host memory can be pinned: expected up to {most} bytes; with this prompt it "
                    f"would be {wanted}. Unpin another, or allow more host_bytes."
                )
            for name, size in changed.items():
                if on:
                    self._pinned[name] = size
                else:
                    del self._pinned[name]
                if name in self._entries:
                    (self._keeper.pin if on else self._keeper.unpin)(name)

    def events(self, since: int) -> list[tuple[int, str, str, str]]:
        """The last events from number `since` on: (number, "stored" or "removed", tier, name in hexadecimal digits)."""
        with self._lock:
            events = list(self._events)
        return [(n, what, tier, name.hex()) for n, what, tier, name in events if n >= since]

    def _note(self, what: str, tier: str, names: Sequence[bytes]) -> list[tuple[str, str, bytes]]:
        """Number events as they happen, the lock being held; returns what is to be told without it."""
        told = [(what, tier, name) for name in names]
        for each in told:
            self._events.append((self._told, *each))
            self._told += 1
        return told

    def _tell(self, told: list[tuple[str, str, bytes]]) -> None:
        if self._event is None:
            return
        for each in told:
            try:
                self._event(*each)
            except Exception as e:
                log.warning("on_event failed: %s", text_of(e))

    def generation(self, root: bytes) -> int:
        """When all was forgotten last, as far as the stores know: 0 is never. root: of the names of generation 0."""
        self._counter = chained(root, b"generation")
        for source in self._sources:
            self._generation = max(self._generation, self._asked(source) or 0)
        return self._generation

    def _asked(self, source: _StoreBehind) -> int | None:
        """The generation that a store knows; None: it did not answer."""
        got, error = self._call(source, "get", [self._counter])
        if error is not None or not got:
            return None
        source.generation = int.from_bytes(got[0] or b"", "little")
        return source.generation

    def _ready(self, source: _StoreBehind) -> bool:
        """Whether a store may be used: it has forgotten what this process has, and nothing that this one still has."""
        generation = self._generation
        if source.generation != generation and (known := self._asked(source)) is not None:
            if known > generation:
                self._warn(source, "was reset by another process since, and is used again after a restart")
            elif known < generation and self._call(source, "drop")[1] is None:
                self._count(source, generation)
        return source.generation == self._generation

    def _count(self, source: _StoreBehind, generation: int) -> None:
        if self._call(source, "put", [(self._counter, generation.to_bytes(8, "little"))])[1] is None:
            source.generation = generation

    def forget(self, generation: int) -> None:
        """Nothing that was kept until now is found again; the stores drop what they have, and remember when."""
        with self._lock:
            self._generation = generation
            self._entries.clear()
            self._keeper.clear()
            self._pinned.clear()
            self._given.clear()
            told = self._note("removed", "all", [b""])
        self._tell(told)
        for source in self._sources:
            source.out.put(partial(self._ready, source))

    def clear(self) -> None:
        """Host memory has nothing; stores keep what they have."""
        with self._lock:
            told = self._note("removed", "host", list(self._entries))
            self._entries.clear()
            self._keeper.clear()
        self._tell(told)

    def close(self, timeout: float = CLOSE_WITHIN) -> None:
        """Write what still waits, for at most so many seconds, and close the stores."""
        end = time.monotonic() + timeout
        idle = self._in.end(end) & self._out.end(end)
        for source in self._sources:
            if not source.out.end(end):
                log.warning("%d bytes were not written to %s within %g s", source.out.ahead, source.name, timeout)
            elif idle:  # else somebody is in a store
                self._call(source, "close")

    # ---- of the threads ----------------------------------------------------------------------------------------

    def _held(self, entries: Outgoing) -> list[tuple[bytes, bytes]]:
        """Put into host memory what was read from the device; returns it."""
        try:
            worth = entries.importance() if self._keeper.weighs else [0.0] * len(entries.names)
            found = list(zip(entries.names, entries.data(), worth, strict=True))
        except Exception as e:  # a device that is lost
            log.info("what was to be kept could not be read: %s", text_of(e))
            return []
        for name, data, importance in found:
            self._put(name, data, importance)
        return [(name, data) for name, data, _ in found]

    def _store(self, entries: Outgoing, size: int, generation: int) -> None:
        pairs = self._held(entries) if generation == self._generation else []
        for source in self._sources if pairs else ():
            if source.out.ahead > self._most:
                self.counts.dropped += len(pairs)
            else:
                source.out.put(partial(self._write, source, pairs, generation), size)

    def _write(self, source: _StoreBehind, pairs: list[tuple[bytes, bytes]], generation: int) -> None:
        if generation == self._generation and self._ready(source) and self._call(source, "put", pairs)[1] is None:
            with self._lock:
                told = self._note("stored", source.name, [name for name, _ in pairs])
            self._tell(told)
            if generation and self._call(source, "get", [self._counter])[0] == [None]:  # it made way
                self._count(source, generation)

    def _fill(self, source: _StoreBehind, names: Iterator[bytes]) -> None:
        """Some entries at a time, between what is to be written, as long as there is room."""
        some = list(islice(names, AT_ONCE))
        missing = [name for name in some if not self.has(name)]
        got = self._call(source, "get", missing)[0] if missing and self._ready(source) else None
        for name, data in zip(missing, got or (), strict=False):
            if data is not None and self._keeper.used + len(data) <= self._keeper.capacity:
                self._put(name, data, self._importance)
                self.counts.brought += 1
        if some and self._keeper.used < self._keeper.capacity:
            source.out.put(partial(self._fill, source, names))

    def _put(self, name: bytes, data: bytes, importance: float = 0.0) -> None:
        self._importance = FADE * self._importance + (1 - FADE) * importance  # of what comes back nobody knows its own
        with self._lock:
            gone = self._keeper.admit(name, len(data), self._given.get(name, importance))
            for each in gone or ():
                del self._entries[each]
            if gone is not None:
                if name in self._pinned and name not in self._entries:
                    self._keeper.pin(name)
                self._entries[name] = data
                self.counts.stored += 1
            told = [] if gone is None else self._note("removed", "host", gone) + self._note("stored", "host", [name])
        self._tell(told)

    def _bring(self, wish: Wish) -> Exception | None:
        """Returns the error of a store that failed."""
        failed: Exception | None = None
        names, sources = list(wish.names), []
        for source in self._sources:
            if self._clock() >= wish.until:
                return failed
            if self._ready(source):
                sources.append(source)
            else:
                failed = source.error
        if wish.states:
            state = None
            for source in sources:
                here, error = self._call(source, "has", wish.states)
                failed = failed or error
                state = next((n for n, there in zip(wish.states, here or (), strict=False) if there), state)
            if state is None:
                return failed
            names.append(state)
        room = self._keeper.capacity
        for source in sources:
            names = [name for name in names if not self.has(name)]
            if not names:
                break
            there, error = self._call(source, "has", names)
            failed = failed or error
            known = list(zip(names, there or (), strict=False))
            if not wish.states:  # what comes behind a gap is of no use
                known = list(takewhile(lambda pair: pair[1], known))
            wanted = [name for name, is_there in known if is_there]
            if not wanted:
                continue
            if source.pace is not None and wish.compute is not None and source.pace > wish.compute:
                self.counts.slower += 1
                if self.counts.slower == 1:
                    log.info("the store %s is slower than computing, so it is not waited for", source.name)
                source.pace *= 0.99  # it is tried again some day
                continue
            for at in range(0, len(wanted), AT_ONCE):
                if self._clock() >= wish.until:
                    return failed
                some, began = wanted[at : at + AT_ONCE], self._clock()
                got, error = self._call(source, "get", some)
                failed = failed or error
                found = [(name, data) for name, data in zip(some, got or (), strict=False) if data is not None]
                for name, data in found:
                    if (room := room - len(data)) < 0:  # its end would take the place of its beginning
                        return failed
                    self._put(name, data, self._importance)
                    self.counts.brought += 1
                if found:
                    pace = (self._clock() - began) / len(found)
                    if source.pace is None:
                        takes = "unknown" if wish.compute is None else f"{wish.compute:.2g} s"
                        log.info("the store %s gives an entry in %.2g s; computing one: %s", source.name, pace, takes)
                    source.pace = pace if source.pace is None else FADE * source.pace + (1 - FADE) * pace
                if len(found) < len(some):
                    break
        return failed

    def _call(self, source: _StoreBehind, method: str, *given: Any) -> tuple[Any, Exception | None]:
        """What a method of a store returns, and the error that it raised."""
        try:
            found = getattr(source.store, method)(*given)
            source.error = None
            return found, None
        except Exception as e:
            source.error = e
            self._warn(source, f"failed in {method}: {text_of(e)}; what it has is computed")
            return None, e

    def _warn(self, source: _StoreBehind, what: str) -> None:
        if (now := self._clock()) - source.told >= TOLD_EVERY:
            source.told = now
            log.warning("the store %s %s", source.name, what)
