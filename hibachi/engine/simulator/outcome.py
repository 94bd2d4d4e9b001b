"""What a replay leaves behind: times of each request, gaps between tokens, and the state of the engine over time."""

from __future__ import annotations

import math
from array import array
from typing import Any

import numpy as np

from hibachi.engine.scheduler.step import Ints
from hibachi.engine.simulator.trace import PICOSECONDS, Numbers

NEVER = -1
_FINE = 1000  # bins of the histogram of gaps in a factor of e: percentiles are right within 0.1 %
_ROOM = 1 << 18


class Gaps:
    """A histogram of times between two tokens of a request, in picoseconds, on a logarithmic scale."""

    def __init__(self) -> None:
        self.counts: Numbers = np.zeros(0, np.int64)
        self._values = np.zeros(_ROOM, np.int64)
        self._filled = 0
        self._runs: list[tuple[int, int, int, int]] = []
        self._run_values = 0

    def add(self, values: Numbers) -> None:
        if self._filled + len(values) > _ROOM:
            self.fold()
        self._values[self._filled : self._filled + len(values)] = values
        self._filled += len(values)

    def add_run(self, first: int, growth: int, steps: int, times: int) -> None:
        """first, first + growth, ... : `steps` gaps, each of them `times` times."""
        self._runs.append((first, growth, steps, times))
        self._run_values += steps
        if self._run_values > _ROOM:
            self.fold()

    def fold(self) -> None:
        """Move what was noted into the histogram."""
        values, weight = [self._values[: self._filled]], [np.ones(self._filled, np.int64)]
        if self._runs:
            first, growth, steps, times = np.array(self._runs, np.int64).T
            start = np.cumsum(steps) - steps
            place = np.arange(int(steps.sum())) - np.repeat(start, steps)
            values.append(np.repeat(first, steps) + place * np.repeat(growth, steps))
            weight.append(np.repeat(times, steps))
        bins = np.rint(_FINE * np.log(np.maximum(np.concatenate(values), 1))).astype(np.int64)
        counts = np.bincount(bins, np.concatenate(weight), len(self.counts)).astype(np.int64)
        counts[: len(self.counts)] += self.counts
        self.counts = counts
        self._filled, self._runs, self._run_values = 0, [], 0

    def percentiles(self, at: Any) -> Numbers:
        """Seconds, for each percentile of `at` (0 to 100); NaN without any gap."""
        self.fold()
        total = int(self.counts.sum())
        if not total:
            return np.full(len(at), math.nan)
        rank = np.minimum(np.asarray(at) / 100 * total, total - 1)
        bins = np.searchsorted(np.cumsum(self.counts), rank, side="right")
        return np.asarray(np.exp(bins / _FINE) / PICOSECONDS)


class Timeline:
    """Queue, rows and blocks in use over time, as steps. Entries at the same time, of several engines, add up; where
    there is none, all are idle.
    """

    begin: array[int]
    end: array[int]
    waiting: array[int]
    running: array[int]
    blocks: array[int]

    def __init__(self) -> None:
        self.begin, self.end = array("q"), array("q")  # picoseconds
        self.waiting, self.running, self.blocks = array("i"), array("i"), array("i")

    def add(self, begin: int, end: int, waiting: int, running: int, blocks: int) -> None:
        self.begin.append(begin)
        self.end.append(end)
        self.waiting.append(waiting)
        self.running.append(running)
        self.blocks.append(blocks)

    def _levels(self, what: str) -> tuple[Numbers, Numbers]:
        """Times in order, and the sum of all entries from each on."""
        value = np.array(getattr(self, what))
        at = np.concatenate([[0], self.end, self.begin])  # who goes, before who comes at that time
        order = np.argsort(at, kind="stable")
        return at[order], np.cumsum(np.concatenate([[0], -value, value])[order])

    def means(self, what: str, edges: Numbers) -> Numbers:
        """The mean of "waiting", "running" or "blocks" between each two edges (picoseconds), weighted by time."""
        at, level = self._levels(what)
        sums = np.concatenate([[0.0], np.cumsum(level[:-1] * (np.diff(at) / PICOSECONDS))])
        return np.asarray(np.diff(np.interp(edges, at, sums)) / (np.diff(edges) / PICOSECONDS))

    def most(self, what: str) -> int:
        """The largest sum at any time."""
        return int(self._levels(what)[1].max())


class SimOutcome:
    """All that a replay of n requests leaves behind. Times are int64 picoseconds; NEVER where it did not come to it."""

    def __init__(self, n: int) -> None:
        self.started: Ints = np.full(n, NEVER, np.int64)  # got a row for the first time
        self.first: Ints = np.full(n, NEVER, np.int64)  # first token
        self.last: Ints = np.full(n, NEVER, np.int64)  # last token
        self.refused: dict[str, int] = {}  # cause -> requests
        self.gaps: Gaps = Gaps()
        self.timeline: Timeline = Timeline()
        self.steps = self.planned = 0  # all steps; those that the scheduler planned one by one
        self.prompt_tokens = self.computed_tokens = self.new_tokens = 0
        self.proposed_tokens = self.accepted_tokens = 0  # of the computed ones; of the new ones
        self.hit_tokens = self.evictions = self.preemptions = 0
        self.host_hit_tokens = self.disk_hit_tokens = 0  # of hit_tokens; what was read from disk counts once as that
        self.loads = self.disk_loads = 0  # blocks: to the device, and before that from disk to host memory
        self.clock = 0  # when the last request ended
