"""Several engines behind a router, on one clock.

An engine's uneventful steps are looked ahead and left there until they end, or until a request is sent to it: then as
many are taken as had begun. So an engine costs something only when something happens in it, and a thousand of them cost
as much as one with as many requests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Protocol

import numpy as np

from hibachi.engine.simulator.replay import TraceReplay
from hibachi.engine.simulator.trace import PICOSECONDS


class Placement(Protocol):
    """Says where requests go. They and the engines go by their numbers, and now is seconds."""

    def place(self, i: int, now: float) -> int | None:
        """The engine that gets request i; None: none has room for one more."""

    def emitted(self, engine: int, seconds: float) -> None:
        """A request had its first token, so long after it came to the engine."""

    def ended(self, engine: int) -> None:
        """A request of this engine is over."""


def replay_fleet(engines: Sequence[TraceReplay], router: Placement, fast: bool = True) -> None:
    """Replay the trace of these engines, which share an outcome. Where none has room, requests wait in line. fast: as
    of `TraceReplay.run`. Raises InvalidTrace.
    """
    trace, outcome = engines[0].trace, engines[0].outcome
    sent = np.zeros(len(trace), np.int64)
    line: deque[int] = deque()
    ends: list[tuple[float, int]] = []  # a heap; an entry counts if it is the end of that engine still
    clock, next_ = 0, 0

    def send() -> None:
        """To engines, as far as there is room."""
        while line and (to := router.place(line[0], clock / PICOSECONDS)) is not None:
            i, engine = line.popleft(), engines[to]
            sent[i] = clock
            if clock < (end := engine.end):
                engine.cut(clock)
                if engine.end < end:
                    heappush(ends, (engine.end, to))
            if not engine.add(i, int(engine.end)):
                router.ended(to)

    while ends or next_ < len(trace):
        comes = int(trace.arrival[next_]) if next_ < len(trace) else math.inf
        now = int(min(comes, ends[0][0] if ends else math.inf))
        if line:
            outcome.timeline.add(clock, now, len(line), 0, 0)
        clock = now
        due: dict[int, None] = {}
        while ends and ends[0][0] == clock:
            end, which = heappop(ends)
            engine = engines[which]
            if engine.end != end:
                continue
            engine.settle()
            due[which] = None
            for waited in (clock - sent[engine.emitted]).tolist():
                router.emitted(which, waited / PICOSECONDS)
            for _ in engine.finished:
                router.ended(which)
                send()
        while next_ < len(trace) and trace.arrival[next_] == clock:
            line.append(next_)
            next_ += 1
            send()
        for which in due:
            engines[which].begin(clock, fast)
            if engines[which].end < math.inf:
                heappush(ends, (engines[which].end, which))
    outcome.clock = clock
    for engine in engines:
        engine.close()
