"""Whether others had the processors meanwhile: what was timed then says little."""

from __future__ import annotations

import os
import time
from pathlib import Path

WORTH_TELLING = 0.1  # of a processor


class Watch:
    """Counts from when it was made. root: where /proc is."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._stat = root / "proc/stat"
        self._began = time.perf_counter(), time.process_time(), self._busy()

    def others(self) -> float | None:
        """How many processors, of those that this process may use, other processes had on average; None means the
        system does not say."""
        began, used, busy = self._began
        now, took = self._busy(), time.perf_counter() - began
        if busy is None or now is None or took <= 0:
            return None
        return max(0.0, (now - busy - (time.process_time() - used)) / took)

    def _busy(self) -> float | None:
        """Seconds for which these processors did anything, also for other guests of the machine."""
        try:
            ours = {f"cpu{n}" for n in os.sched_getaffinity(0)}
            lines = [line.split() for line in self._stat.read_text().splitlines()]
            ticks = [list(map(int, words[1:9])) for words in lines if words and words[0] in ours]
            idle_and_waiting = (3, 4)
            found = sum(n for some in ticks for i, n in enumerate(some) if i not in idle_and_waiting)
            return found / os.sysconf("SC_CLK_TCK") if ticks else None
        except (OSError, ValueError, AttributeError):  # not on Linux
            return None
