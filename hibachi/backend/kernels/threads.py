"""How many threads the kernels' team may have."""

from __future__ import annotations

import math
import os
from pathlib import Path

_SWITCHES = ("HIBACHI_THREADS", "OMP_NUM_THREADS")


def most_threads(set_by_library: int | None = None) -> int:
    """The least of: what $HIBACHI_THREADS or $OMP_NUM_THREADS says, else what the array library was set to; the
    processors that this process may use; the whole processors of its quota, one at least."""
    return max(1, min(_said() or set_by_library or MOST, processors(), quota() or MOST))


MOST = 256


def _said() -> int | None:
    return next((int(n) for name in _SWITCHES if (n := os.environ.get(name, "").split(",")[0]).isdecimal()), None)


def why_so_many() -> str:
    """`most_threads` in words."""
    n, asked, limit = most_threads(), _said(), quota()
    found = f"{n} thread{'s' * (n > 1)}: {processors()} of {os.cpu_count()} processors may be used"
    found += "" if limit is None else f", a quota of {limit}"
    return found + ("" if asked is None else f", {asked} asked for by the environment")


def processors() -> int:
    """That this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on macOS and Windows
        return os.cpu_count() or 1


def quota(root: Path = Path("/")) -> int | None:
    """Whole processors that the process's control group may use at once, rounded down, 1 at least; None means no limit.

    Of cgroups version 2 and 1, and of all groups above it. root: where /proc and /sys are.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(errors="replace").splitlines()
    except OSError:  # not on Linux
        return None
    found: list[float] = []
    for line in lines:
        number, _, named = line.partition(":")
        controllers, there, path = named.partition(":")
        if not (number.isdecimal() and there):  # what is no line of this file
            continue
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" if not controllers else _mounted(root, controllers)
        at = top / path.lstrip("/")
        # A container may see the path of the machine, but its own group at the top.
        for folder in (at, *at.parents) if at.is_relative_to(top) else (top,):
            if (limit := _limit(folder)) is not None:
                found.append(limit)
            if folder == top:
                break
    return max(1, int(min(found))) if found else None


def _mounted(root: Path, controllers: str) -> Path:
    """Where version 1 shows these controllers."""
    base = root / "sys/fs/cgroup"
    return next((p for p in (base / controllers, base / "cpu,cpuacct", base / "cpu") if p.is_dir()), base / "cpu")


def _limit(folder: Path) -> float | None:
    """Processors that one group may use at once; None means it has no limit, or does not say."""
    try:
        if (two := folder / "cpu.max").exists():
            allowed, period = two.read_text().split()[:2]
        else:
            allowed, period = ((folder / f"cpu.cfs_{n}_us").read_text().strip() for n in ("quota", "period"))
        limit = float(allowed) / float(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no number
        return None
    return limit if 0 < limit < math.inf else None  # -1: none
