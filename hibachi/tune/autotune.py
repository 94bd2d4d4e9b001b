"""Choosing by timing: candidates are compared with the reference, timed on a model's shapes, and ranked: kernels, the
sizes that steps are padded to, and the dtype where nobody names one.

What was chosen is kept in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache), under a name made of all that it
depends on: machine, versions, threads, candidates and shapes.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hibachi.errors import ConfigError, UnsupportedOperation
from hibachi.model.arch import Arch
from hibachi.tensor.array_backend import ArrayBackend
from hibachi.tensor.candidates import LADDERS, OPERATIONS, Candidate, candidates, compose, fitting, ladders, own
from hibachi.tune.cases import CASES, Cases, ModelSizes, sizes_of
from hibachi.tune.kept import place_of, read, write
from hibachi.tune.right import CHECKS, NEAR
from hibachi.tune.stepcost import padded
from hibachi.tune.trial import STEP, KernelTrial, rank, steps_of, taken_of, unfit

log: logging.Logger = logging.getLogger("hibachi.autotune")
BUDGETS = {"off": 0.0, "1s": 1.0, "full": 20.0}  # seconds of measuring
DTYPES = ("float32", "bfloat16")  # that are timed where nobody names one
_BEHIND = 3  # times the fastest
_ROUNDED = 6e-2  # where weights lose digits


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A backend made of the fastest kernels, the dtype to compute in, and the trials. known: they were read, not
    measured now. kernels: of some operations there were candidates; else the backend has one way for each."""

    backend: ArrayBackend
    dtype: str
    trials: list[KernelTrial]
    known: bool = False
    kernels: bool = False


def seconds_of(budget: str | float | None) -> float:
    """Seconds to measure for; None: a second, or what the environment variable HIBACHI_AUTOTUNE says.

    Raises ConfigError.
    """
    budget = os.environ.get("HIBACHI_AUTOTUNE", "1s") if budget is None else budget
    if isinstance(budget, str):
        if budget in BUDGETS:
            return BUDGETS[budget]
        try:
            budget = float(budget.removesuffix("s"))
        except ValueError:
            budget = -1.0
    if not 0 <= budget < math.inf:
        raise ConfigError(f"autotune must be 'off', 'full' or seconds such as '1s'; got {budget!r}.")
    return float(budget)


def settle(
    backend: ArrayBackend,
    arch: Arch,
    dtype: str | None,
    *,
    stored: str | None,
    deterministic: bool,
    rounding: bool = False,
    budget: float = 1.0,
    refresh: bool = False,
) -> KernelChoice:
    """`choose` for a decoder; dtype None: also the dtype in which its steps take the least time.

    stored: the dtype of the checkpoint. Where it has more digits than a candidate, that one takes rounding=True.
    float32 may always be taken, and is where nothing was measured. deterministic, budget, refresh: as in `choose`.
    """
    how: dict[str, Any] = {"deterministic": deterministic, "rounding": rounding}
    every = OPERATIONS if refresh else ()
    if dtype is not None:
        choice = choose(backend, sizes_of(arch, dtype), budget=budget, refresh=refresh, alone=every, **how)
        said = [KernelTrial("dtype", dtype, steps_of(choice.trials), None, None, "as asked for")]
        return replace(choice, trials=[*said, *choice.trials])
    found = [_dtype(backend, name, stored) for name in DTYPES]
    allowed = fitting(found, deterministic=False, rounding=rounding).get("dtype", [])
    sizes = sizes_of(arch, "float32")
    if [c.name for c in allowed] == ["float32"]:
        choice = choose(backend, sizes, budget=budget, refresh=refresh, alone=every, **how)
        said = [unfit(c, False, rounding) for c in found]
        said[0].times = steps_of(choice.trials)
        return replace(choice, trials=said + choice.trials)
    path = place_of(backend, replace(sizes, dtype="any"), [*found, *candidates(backend)], deterministic, rounding)
    trials = None if refresh else read(path, found)
    if trials is None and not budget:
        return choose(backend, sizes, budget=budget, **how)
    measured = {}
    if trials is None:
        trials = [unfit(c, False, rounding) for c in found]
        for trial in [t for t in trials if t.why_not is None]:
            # Also what is known is measured now, so that the same machine is asked for both.
            part = budget / len(allowed)
            choice = choose(backend, sizes_of(arch, trial.name), budget=part, refresh=True, alone=every or STEP, **how)
            measured[trial.name], trial.times = choice, steps_of(choice.trials)
            if not trial.times:
                trial.why_not = _why_untimed(choice.trials)
        rank(trials)
        write(path, trials)
    taken = next((t.name for t in trials if t.why_not is None), "float32")
    choice = measured.get(taken) or choose(backend, sizes_of(arch, taken), budget=budget, alone=STEP, **how)
    return replace(choice, trials=trials + choice.trials)


def _why_untimed(trials: Sequence[KernelTrial]) -> str:
    """Why a step's time is not known: no candidate for one of its parts was taken."""
    taken = taken_of(trials)
    said = next(
        (f"{t.operation}: {t.why_not}" for t in trials if t.operation in STEP and t.operation not in taken), None
    )
    return said or "nothing was measured"


def _dtype(backend: ArrayBackend, name: str, stored: str | None) -> Candidate:
    try:
        backend.dtype(name)
        why = None
    except UnsupportedOperation:
        why = f"{backend.name} has none"
    return Candidate("dtype", name, object, rounds=name not in ("float32", stored), why_not=why)


def choose(
    backend: ArrayBackend,
    sizes: ModelSizes,
    *,
    deterministic: bool,
    rounding: bool = False,
    budget: float = 1.0,
    refresh: bool = False,
    alone: Iterable[str] = (),
) -> KernelChoice:
    """The fastest kernels for a model on this backend. budget: seconds to measure for, if nothing is known; 0: do not
    measure, take the last that serve every operation. refresh: measure though something is known.

    deterministic: of those alone that do not depend on the batch. rounding: weights may lose digits. alone: operations
    that are timed where there is nothing to choose, too. Raises UnsupportedOperation for a backend that has no
    deterministic kernels.
    """
    found = candidates(backend)
    kernels = fitting(found, deterministic=deterministic, rounding=rounding)
    plain = backend.invariant() if deterministic and not kernels else backend
    there = {c.operation for c in found if c.operation in kernels}
    found += [own(plain, op) for op in OPERATIONS if op not in there]
    found += ladders(plain)
    allowed = fitting(found, deterministic=deterministic, rounding=rounding)
    pads = "buckets" in allowed
    timed = {op for op, some in kernels.items() if len(some) > 1} | set(STEP if pads or kernels else ()) | set(alone)
    path = place_of(backend, sizes, found, deterministic, rounding)
    trials = None if refresh else read(path, found)
    known = trials is not None
    if trials is None and (not budget or not timed):
        made = _unmeasured(backend, kernels, deterministic) if kernels else plain
        return KernelChoice(made, sizes.dtype, [], kernels=False)
    if trials is None:
        trials = _measure(plain, sizes, found, allowed, timed, budget, deterministic, rounding)
        write(path, trials)
    taken = {t.operation: t.name for t in trials if t.why_not is None}
    offered = kernels | {op: some for op, some in allowed.items() if op == "buckets"}
    chosen = {op: c for op, some in offered.items() for c in some if c.name == taken.get(op)}
    if chosen:
        said = ", ".join(f"{op} {c.name}" for op, c in chosen.items())
        log.info("Chosen for %s%s: %s.", sizes.dtype, ", as kept" if known else " by timing them", said)
    return KernelChoice(compose(plain, chosen), sizes.dtype, trials, known, bool(kernels))


def _unmeasured(backend: ArrayBackend, allowed: dict[str, list[Candidate]], deterministic: bool) -> ArrayBackend:
    """The last set of kernels that serves every operation, as candidates are listed from the plainest on."""
    names = [{c.name for c in some if not c.rounds} for some in allowed.values()]
    whole = [c.name for c in next(iter(allowed.values())) if all(c.name in each for each in names)]
    if whole:
        return compose(backend, {op: c for op, some in allowed.items() for c in some if c.name == whole[-1]})
    return backend.invariant() if deterministic else backend


def _measure(
    backend: ArrayBackend,
    sizes: ModelSizes,
    found: Sequence[Candidate],
    allowed: dict[str, list[Candidate]],
    timed: set[str],
    budget: float,
    deterministic: bool,
    rounding: bool,
) -> list[KernelTrial]:
    trials: list[KernelTrial] = []
    tried = sum(len(some) for op, some in allowed.items() if op in timed)
    for operation in OPERATIONS:
        made: list[KernelTrial] = []
        ready: list[_Ready] = []
        for c in [c for c in found if c.operation == operation]:
            trial = unfit(c, deterministic, rounding)
            if c in allowed.get(operation, []) and operation in timed:
                trial, cases = _prepare(backend, c, sizes)
                ready += cases
            made.append(trial)
        _time(ready, budget / tried)
        rank(made)
        if [t.why_not for t in made] == [None]:
            made[0].note = "the only one"
        trials += made
    return trials + _ladders(backend, found, allowed, trials)


def _ladders(
    backend: ArrayBackend, found: Sequence[Candidate], allowed: dict[str, list[Candidate]], trials: list[KernelTrial]
) -> list[KernelTrial]:
    """The trials of the sizes that steps may be padded to, from the times of the kernels that were taken."""
    times = taken_of(trials)
    taken = {op: name for op, name in ((t.operation, t.name) for t in trials if t.why_not is None)}
    chosen = {op: c for op, some in allowed.items() for c in some if c.name == taken.get(op)}
    made = compose(backend, chosen)
    out = []
    for c in [c for c in found if c.operation == "buckets"]:
        trial = unfit(c, False, False)
        if trial.why_not is None:
            trial.times, count = padded(times, replace(made.shapes, ladder=LADDERS[c.name]))
            trial.note = f"{count} programs" if count else ""
            trial.why_not = None if count else "nothing was measured"
        out.append(trial)
    rank(out)
    return out


@dataclass(slots=True)
class _Ready:
    """A candidate that is right, and the calls that are to be timed."""

    trial: KernelTrial
    backend: ArrayBackend
    cases: Cases


def _prepare(backend: ArrayBackend, candidate: Candidate, sizes: ModelSizes) -> tuple[KernelTrial, list[_Ready]]:
    trial = KernelTrial(candidate.operation, candidate.name, {}, None, None)
    try:
        made = compose(backend, {candidate.operation: candidate})
        with made.guard():
            trial.error = CHECKS[candidate.operation](made, sizes)
            limit = _ROUNDED if candidate.rounds else NEAR.get(sizes.dtype, 1e-4)
            if trial.error <= limit:
                return trial, [_Ready(trial, made, CASES[candidate.operation](made, sizes))]
            trial.why_not = f"its results are off by {trial.error:.1e}, more than {limit:.0e}"
    except Exception as e:  # whatever a kernel does here, there are others
        trial.why_not = f"{type(e).__name__}: {e}"
    return trial, []


def _time(ready: list[_Ready], seconds: float) -> None:
    """Fill in the times of the candidates for one operation: the shortest of each case, in milliseconds. seconds: for
    each candidate. They take turns, so that what disturbs the machine disturbs them alike; who is far behind is out."""
    for case in list(ready[0].cases) if ready else []:
        least: dict[int, float] = {}
        end = time.perf_counter() + len(ready) * seconds / len(ready[0].cases)
        racing = ready
        for turn in itertools.count():
            for each in [r for r in racing if r.trial.why_not is None]:
                call, times = each.cases[case]
                try:
                    with each.backend.guard():
                        began = time.perf_counter()
                        each.backend.get(call())
                        took = 1e3 * times * (time.perf_counter() - began)
                except Exception as e:
                    each.trial.why_not, each.trial.times = f"{type(e).__name__}: {e}", {}
                    continue
                if turn:  # the first call does not count: it may compile, and its memory is new
                    each.trial.times[case] = min(took, each.trial.times.get(case, math.inf))
                    least[id(each)] = each.trial.times[case]
            if turn:
                best = min(least.values(), default=0.0)
                racing = [r for r in racing if least.get(id(r), math.inf) < _BEHIND * best]
                if time.perf_counter() > end or not racing:
                    break
