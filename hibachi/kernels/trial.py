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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hibachi.cachefolder import move
from hibachi.kernels.abi import Kernels
from hibachi.kernels.threads import most_threads

ROWS = (1, 8, 16, 64)
"""Rows of a product, one of each kind that has a distance of its own (linear.h)."""
DEFAULT = (10, 40, 40, 40)
_DISTANCES = (0, 10, 40)  # steps of the depth; 0: memory is not asked for
_DEPTH, _WEIGHTS, _MOMENT, _TURNS = 576, 48 << 20, 1.5e-3, 9  # bytes; seconds of a product; how often each is timed
_ENOUGH = 1.03  # what a default must lose to another by
_log = logging.getLogger("hibachi.kernels")


@dataclass(frozen=True)
class Choice:
    """What a trial found. rates: of each variant, products of `ROWS` rows by all threads, in GFLOP/s."""

    processor: str
    libraries: dict[str, str]
    variant: str
    distances: tuple[int, ...]
    rates: dict[str, tuple[float, ...]]

    def __str__(self) -> str:
        own, *others = sorted(self.rates, key=lambda name: name != self.variant)
        found = ", ".join(f"{r:.0f}" for r in self.rates[own])
        rest = "".join(f"; {name} has {', '.join(f'{r:.0f}' for r in self.rates[name])}" for name in others)
        return (
            f"GFLOP/s with {', '.join(map(str, ROWS))} rows: {found}{rest}; memory is asked for "
            f"{', '.join(map(str, self.distances))} steps ahead"
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
        made = file.with_suffix(f".{time.monotonic_ns()}")
        made.write_text(json.dumps(asdict(found), indent=1))
        move(made, file)
    except OSError as e:
        _log.warning(
            "%s cannot be written (%s): which kernels are the fastest is measured anew at each start.", file, e
        )
    return found


def _kept(file: Path, name: str, libraries: Mapping[str, str]) -> Choice | None:
    try:
        held: Any = json.loads(file.read_text())
        rates = {str(v): tuple(map(float, r)) for v, r in held["rates"].items()}
        kept = Choice(held["processor"], held["libraries"], held["variant"], tuple(held["distances"]), rates)
        if [*map(type, kept.distances)] != [int] * len(ROWS) or not all(0 <= d <= 4096 for d in kept.distances):
            raise ValueError(f"distances {kept.distances}")
        if {len(r) for r in rates.values()} != {len(ROWS)} or rates.keys() != kept.libraries.keys():
            raise ValueError(f"rates {rates}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
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
    """Times all candidates in turn, with all distances; the least of several times counts, as others may be at work.

    With all threads, as they share what memory gives: what is best for one of them alone is not for all.
    """
    random = np.random.default_rng(0)
    panels = _WEIGHTS // (2 * 48 * _DEPTH)
    w = random.integers(0x3D00, 0x3E00, panels * 48 * _DEPTH, dtype=np.uint16)
    x = random.integers(0x3D00, 0x3E00, (max(ROWS), _DEPTH), dtype=np.uint16)
    y = np.empty((max(ROWS), panels * 48), np.uint16)
    best: dict[tuple[str, int, int], float] = {}
    at = 0
    for run in candidates.values():
        run.set_threads(most_threads())
    for _ in range(_TURNS):
        for variant, run in candidates.items():
            for i, rows in enumerate(ROWS):
                for distance in _DISTANCES:
                    where = variant, i, distance
                    known = best.get(where, math.inf)
                    few = 2 if known == math.inf else max(2, min(panels // 2, int(_MOMENT / known)))
                    at = 0 if at + few > panels else at
                    _set(run, [distance] * len(ROWS))
                    began = time.perf_counter()
                    run.linear(
                        *(
                            1,
                            1,
                            0,
                            x.ctypes.data,
                            _DEPTH,
                            w.ctypes.data + 2 * at * 48 * _DEPTH,
                            None,
                            None,
                            y.ctypes.data,
                        ),
                        *(rows, few * 48, _DEPTH),
                    )
                    best[where] = min(known, max(1e-9, (time.perf_counter() - began) / few))
                    at += few
    distances, rates = {}, {}
    for variant in candidates:
        distances[variant] = tuple(_quickest(best, variant, i) for i in range(len(ROWS)))
        rates[variant] = tuple(
            2e-9 * rows * 48 * _DEPTH / best[variant, i, distances[variant][i]] for i, rows in enumerate(ROWS)
        )
    first, *others = candidates
    chosen = first
    for other in others:
        if math.prod(rates[other]) > math.prod(r * _ENOUGH for r in rates[chosen]):
            chosen = other
    return Choice(name, dict(libraries), chosen, distances[chosen], rates)


def _quickest(best: Mapping[tuple[str, int, int], float], variant: str, i: int) -> int:
    """The default, unless another distance is clearly quicker."""
    quickest = min(_DISTANCES, key=lambda d: best[variant, i, d])
    usual = DEFAULT[i]
    return quickest if best[variant, i, usual] > _ENOUGH * best[variant, i, quickest] else usual


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
