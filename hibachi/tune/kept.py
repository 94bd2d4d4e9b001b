"""Choices that were made before, in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, astuple
from importlib.metadata import version
from pathlib import Path

from hibachi.tensor.array_backend import ArrayBackend
from hibachi.tensor.cachefolder import cache_folder, move
from hibachi.tensor.candidates import Candidate
from hibachi.tune.cases import ModelSizes
from hibachi.tune.trial import KernelTrial

log: logging.Logger = logging.getLogger("hibachi.autotune")
_MOST = 1 << 20  # bytes of what is kept; some thousand in fact
_FORMAT = 3  # of what is kept; another one where other cases are timed


def place_of(
    backend: ArrayBackend, sizes: ModelSizes, found: list[Candidate], deterministic: bool, rounding: bool
) -> Path | None:
    """Where the choice is kept; None: nowhere, says the log."""
    facts = [
        _FORMAT,
        version("hibachi"),
        backend.name,
        sorted(backend.versions().items()),
        _processor(),
        astuple(sizes),
        [(c.operation, c.name, c.why_not is None) for c in found],
        deterministic,
        rounding,
    ]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    try:
        return cache_folder() / f"kernels-{key}.json"
    except OSError as e:
        log.warning("The choice of kernels is not kept: %s", e)
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), platform.machine())


def read(path: Path | None, found: Iterable[Candidate]) -> list[KernelTrial] | None:
    """The trials of these candidates as they were kept; None: there are none, or none of use, which the log says."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            data = file.read(_MOST + 1)
        if len(data) > _MOST:
            raise ValueError(f"it has more than {_MOST} bytes")
        kept = json.loads(data)
        if not isinstance(kept, list):
            raise ValueError(f"expected a list of trials; got {type(kept).__name__}")
        trials = [KernelTrial(**each) for each in kept]
        if not all(map(_is_sound, trials)):
            raise ValueError("a trial has a value of the wrong type")
        if sorted((t.operation, t.name) for t in trials) != sorted((c.operation, c.name) for c in found):
            raise ValueError("these are not the trials of the candidates here")
        return trials
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as e:
        log.warning("The choice of kernels in %s cannot be used, it is made anew: %.200s", path, e)
        return None


def _is_sound(t: KernelTrial) -> bool:
    """Are all its values of their types? Times are finite: the choice was made by them."""
    times = list(t.times.values()) if isinstance(t.times, dict) else [None]
    error = 0.0 if t.error is None else t.error
    words = (t.operation, t.name, t.note, "" if t.why_not is None else t.why_not)
    numbers = all(type(n) in (int, float) for n in (*times, error))
    return numbers and all(isinstance(w, str) for w in words) and all(0 <= n < math.inf for n in times) and error >= 0


def write(path: Path | None, trials: list[KernelTrial]) -> None:
    if path is None:
        return
    made = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(json.dumps([asdict(t) for t in trials], indent=1))
        move(made, path)
    except OSError as e:
        log.warning("The choice of kernels is not kept, so the next start makes it again: %s", e)
        with suppress(OSError):
            made.unlink()
