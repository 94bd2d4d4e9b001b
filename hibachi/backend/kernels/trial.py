"""Which variant of the kernels is the fastest on this processor, and how far ahead it asks for memory.

Variants, and distances of prefetch, give the same bits: so a stopwatch may choose among them. A trial is made once for
a processor, with weights that are not in its caches and 1, 8, 16 and 64 rows; what it found is kept in a file.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hibachi.backend.kernels.abi import Kernels
from hibachi.backend.kernels.threads import most_threads
from hibachi.common.cachefolder import keep

ROWS = (1, 8, 16, 64)
"""Rows of a product, one of each kind that has a distance of its own (linear.h)."""
NEXT = -1
DEFAULT = (10, 40, 40, NEXT)
_DISTANCES = (NEXT, 0, 10, 20, 40)  # see linear.h: steps of the depth; 0: memory is not asked for
_DEPTH, _WEIGHTS, _MOMENT = 576, 48 << 20, 1.5e-3  # bytes; seconds of a product
_TURNS, _QUIET, _MOST_TURNS = 7, 4, 40  # how often each is timed: until nothing fell for some turns
_ENOUGH = 1.05  # what a default must lose to another by
_log = logging.getLogger("hibachi.kernels")


@dataclass(frozen=True)
class Choice:
    """What a trial found. rates: of each variant, products of `ROWS` rows by one thread, in GFLOP/s."""

    processor: str
    libraries: dict[str, str]
    variant: str
    distances: tuple[int, ...]
    rates: dict[str, tuple[float, ...]]

    def __str__(self) -> str:
        own, *others = sorted(self.rates, key=lambda name: name != self.variant)
        found = ", ".join(f"{r:.0f}" for r in self.rates[own])
        rest = "".join(f"; {name} has {', '.join(f'{r:.0f}' for r in self.rates[name])}" for name in others)
        ahead = ", ".join("by panels" if d == NEXT else f"{d} steps" for d in self.distances)
        return (
            f"GFLOP/s of a thread with {', '.join(map(str, ROWS))} rows: {found}{rest}; memory is asked for {ahead} "
            f"ahead"
        )


def settled(candidates: Mapping[str, Kernels], libraries: Mapping[str, str], folder: Path) -> Choice:
    """What was found on this processor earlier, or is found now. candidates: by name, the one to prefer first.

    libraries: a name for the contents of each. A file that cannot be used or written is told in the log.
    """
    name = processor()
    told = "-".join([name.lower(), *candidates])
    file = folder / f"choice-{''.join(c if c.isalnum() else '-' for c in told)}.json"
    if (kept := _kept(file, name, libraries)) is not None:
        return kept
    found = trial(candidates, libraries, name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        keep(file, json.dumps(asdict(found), indent=1))
    except OSError as e:
        _log.warning(
            "%s cannot be written (%s): which kernels are the fastest is measured anew at each start.", file, e
        )
    return found


def _kept(file: Path, name: str, libraries: Mapping[str, str]) -> Choice | None:
    try:
        if file.exists() and not file.is_file():  # a named pipe would be waited for
            raise ValueError("no ordinary file")
        held: Any = json.loads(file.read_text())
        rates = {str(v): tuple(map(float, r)) for v, r in held["rates"].items()}
        kept = Choice(held["processor"], held["libraries"], held["variant"], tuple(held["distances"]), rates)
        if [*map(type, kept.distances)] != [int] * len(ROWS) or not all(NEXT <= d <= 4096 for d in kept.distances):
            raise ValueError(f"distances {kept.distances}")
        if {len(r) for r in rates.values()} != {len(ROWS)} or rates.keys() != kept.libraries.keys():
            raise ValueError(f"rates {rates}")
        if not all(0 < rate < math.inf for r in rates.values() for rate in r):
            raise ValueError(f"rates {rates}")
        if {type(kept.processor), type(kept.variant)} != {str}:
            raise ValueError(f"names {kept.processor!r}, {kept.variant!r}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as e:
        _log.warning("%s is damaged (%s: %s): what it held is measured anew.", file, type(e).__name__, e)
        return None
    if kept.processor != name:
        _log.warning("%s is of another processor, %r; this is %r, which is measured now.", file, kept.processor, name)
        return None
    if kept.variant not in libraries:
        _log.warning("%s names %s, which this processor cannot use; the others are measured.", file, kept.variant)
        return None
    return kept if kept.libraries == dict(libraries) else None  # of another version, or of others asked for


def trial(candidates: Mapping[str, Kernels], libraries: Mapping[str, str], name: str) -> Choice:
    """Times all candidates by one thread each, for which others at work matter least; then the distances of the fastest
    by all threads, as they share what memory gives."""
    work = _Work()
    rates = {}
    best = work.timed(candidates, DEFAULT, threads=1)
    for variant in candidates:
        rates[variant] = tuple(
            2e-9 * rows * 48 * _DEPTH / best[variant, rows, DEFAULT[i]] for i, rows in enumerate(ROWS)
        )
    chosen, *others = candidates
    for other in others:
        if math.prod(rates[other]) > math.prod(r * _ENOUGH for r in rates[chosen]):
            chosen = other
    found = work.timed({chosen: candidates[chosen]}, _DISTANCES, threads=most_threads())
    distances = []
    for rows, usual in zip(ROWS, DEFAULT, strict=True):
        quickest = min(_DISTANCES, key=lambda d: found[chosen, rows, d])
        loses = found[chosen, rows, usual] > _ENOUGH * found[chosen, rows, quickest]
        distances.append(quickest if loses else usual)
    return Choice(name, dict(libraries), chosen, tuple(distances), rates)


class _Work:
    """Products with weights that take turns, so that they come from memory as in a step."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.panels = _WEIGHTS // (2 * 48 * _DEPTH)
        self.w = random.integers(0x3D00, 0x3E00, self.panels * 48 * _DEPTH, dtype=np.uint16)
        self.x = random.integers(0x3D00, 0x3E00, (max(ROWS), _DEPTH), dtype=np.uint16)
        self.y = np.empty((max(ROWS), self.panels * 48), np.uint16)
        self.at = 0

    def timed(
        self, candidates: Mapping[str, Kernels], distances: Iterable[int], *, threads: int
    ) -> dict[tuple[str, int, int], float]:
        """Seconds for a panel by (variant, rows, distance): the least of several turns, of more while they still fall,
        as others may be at work."""
        best: dict[tuple[str, int, int], float] = {}
        cases = [(v, rows, d) for v in candidates for rows in ROWS for d in sorted({*distances})]
        for run in candidates.values():
            run.set_threads(threads)
        fell, turn = 0, 0
        while turn < _TURNS or (turn < fell + _QUIET and turn < _MOST_TURNS):
            turn += 1
            for case in cases:
                known = best.get(case, math.inf)
                took = self._once(candidates[case[0]], *case[1:], known)
                if took < 0.98 * known:
                    fell = turn
                best[case] = min(known, took)
        return best

    def _once(self, run: Kernels, rows: int, distance: int, known: float) -> float:
        few = 2 if known == math.inf else max(2, min(self.panels // 2, int(_MOMENT / known)))
        self.at = 0 if self.at + few > self.panels else self.at
        _set(run, [distance] * len(ROWS))
        began = time.perf_counter()
        run.linear(
            *(1, 1, 0, self.x.ctypes.data, _DEPTH, self.w.ctypes.data + 2 * self.at * 48 * _DEPTH, None, None),
            *(self.y.ctypes.data, rows, few * 48, _DEPTH, 1),
        )
        self.at += few
        return max(1e-9, (time.perf_counter() - began) / few)


def use(run: Kernels, choice: Choice) -> None:
    """Let a library have the distances of a choice."""
    _set(run, choice.distances)


def _set(run: Kernels, distances: Any) -> None:
    found = np.array(distances, np.int64)
    run.set_distances(found.ctypes.data)


def processor(root: Path = Path("/")) -> str:
    """The name of this processor, with what tells it from its kin. root: where /proc is."""
    known = cpuinfo(root)
    told = [known.get("model name", platform.processor() or platform.machine())]
    told += [known[key] for key in ("cpu family", "model", "stepping") if key in known]
    return " ".join(told)


def cpuinfo(root: Path = Path("/")) -> dict[str, str]:
    """What Linux says of the first processor; {} elsewhere."""
    try:
        lines = (root / "proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
