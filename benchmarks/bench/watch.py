"""The use of the machine's processors while something is measured."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

CONTENDED = 0.03  # of the machine's processor time, used by others: above, a figure is marked
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Use:
    """Use of the machine between two moments.

    cpu_seconds: of the watched processes, their children included. others: the share of the machine's processors that
    other processes had, waiting for a hypervisor included. peak_rss_mib: the most memory that each of the processes had
    since its start, added up. None means this system does not say.
    """

    seconds: float
    cpu_seconds: float | None
    others: float | None
    peak_rss_mib: float | None

    @property
    def contended(self) -> bool:
        return self.others is not None and self.others > CONTENDED


class Watch:
    """Watches a process and its descendants, from /proc: `Watch(pid)`, work, `use()`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began, self._busy, self._own = time.perf_counter(), _busy(), _tree(pid)

    def use(self) -> Use:
        seconds, busy, own = time.perf_counter() - self._began, _busy(), _tree(self._pid)
        if busy is None or self._busy is None or own is None or self._own is None:
            return Use(seconds, None, None, None)
        cpu = own[0] - self._own[0]
        others = (busy - self._busy - cpu) / (seconds * (os.cpu_count() or 1))
        return Use(seconds, cpu, min(max(0.0, others), 1.0), own[1] / 2**20)


def _busy() -> float | None:
    """Seconds of all processors together that were not idle, since the machine started."""
    try:
        with (_PROC / "stat").open() as f:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, f.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _tree(pid: int) -> tuple[float, int] | None:
    """(processor seconds, sum of the peaks of resident memory in bytes) of a process and its descendants."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    try:
        found = [int(p.name) for p in _PROC.iterdir() if p.name.isdigit()]
    except OSError:
        return None
    for each in found:
        try:
            stat = (_PROC / str(each) / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        children.setdefault(int(stat[1]), []).append(each)
        ticks[each] = sum(map(int, stat[11:15]))  # its own, and of children that have ended
    if pid not in ticks:
        return None
    total, peak, todo = 0, 0, [pid]
    while todo:
        each = todo.pop()
        total += ticks[each]
        peak += _peak(each)
        todo += children.get(each, [])
    return total / os.sysconf("SC_CLK_TCK"), peak


def _peak(pid: int) -> int:
    try:
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
