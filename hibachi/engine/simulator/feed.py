"""Which request of a trace is handed to the scheduler next, and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from hibachi.engine.scheduler.compose import Composer
from hibachi.engine.simulator.trace import Trace

ORDERS = ("file", "composed")
WINDOW = 4096


class Feed(Protocol):
    """Hands out the requests of a trace by their numbers."""

    @property
    def next(self) -> float:
        """When the next one comes by itself, in picoseconds; infinity means none does."""

    def take(self, clock: int, held: int) -> int | None:
        """The next request for a scheduler that holds this many; None means none yet. clock: picoseconds."""


class Arrivals:
    """Each request when it arrives."""

    def __init__(self, trace: Trace) -> None:
        self._arrival: list[float] = [*trace.arrival.tolist(), math.inf]
        self._i = 0

    @property
    def next(self) -> float:
        return self._arrival[self._i]

    def take(self, clock: int, held: int) -> int | None:
        if self.next > clock:
            return None
        self._i += 1
        return self._i - 1


class Offline:
    """All requests are there at the start, and the scheduler holds at most `most` of them: the next comes when one has
    ended.

    order: one of ORDERS; composed: taken by a `Composer` from a rolling window of this many requests. keys: for each
    request, what its prompt begins with.
    """

    next: float = math.inf

    def __init__(
        self, trace: Trace, most: int, order: str, window: int, keys: Callable[[int], Sequence[Hashable] | None]
    ) -> None:
        self._longest = (trace.prompt + trace.output).tolist()
        self._most, self._keys = most, keys
        self._rows = Composer()
        self._window = window if order == "composed" else 0
        self._i = 0

    def take(self, clock: int, held: int) -> int | None:
        if held >= self._most:
            return None
        n, rows = len(self._longest), self._rows
        while self._i < n and len(rows) < self._window:
            rows.add(self._i, self._keys(self._i) or (), self._longest[self._i])
            self._i += 1
        if rows:
            return rows.take()
        if self._i == n:
            return None
        self._i += 1
        return self._i - 1
