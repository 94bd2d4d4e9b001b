"""Chooses the kernels, sizes of steps and dtype of a model: by a rule, by a file, or by timing, if asked for.

The rule: hibachi's kernels wherever they load, in the dtype of the checkpoint. Without them, on a CPU, float32.

Timing by itself takes only what gives the same bits. With a file it takes whatever is the fastest, and writes that
down, so that another machine, given the file, does the same.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hibachi.backend.array_backend import ArrayBackend
from hibachi.backend.candidates import (
    LADDERS,
    OPERATIONS,
    AllowedKernels,
    Candidate,
    candidates,
    compose,
    fitting,
    ladders,
    own,
)
from hibachi.common.phases import phase
from hibachi.errors import ConfigError, UnsupportedOperation
from hibachi.llm.model.arch import Arch
from hibachi.llm.tune import store as kept
from hibachi.llm.tune.cases import CASES, Cases, ModelSizes, sizes_of
from hibachi.llm.tune.correctness import CHECKS, NEAR
from hibachi.llm.tune.load import WORTH_TELLING, Watch
from hibachi.llm.tune.stepcost import padded
from hibachi.llm.tune.trial import STEP, KernelTrial, rank, steps_of, taken_of, untimed

log: logging.Logger = logging.getLogger("hibachi.autotune")
BUDGETS = {"off": 0.0, "1s": 1.0, "full": 20.0}  # seconds of measuring
DTYPES = ("float32", "bfloat16")  # dtypes that are timed where none is given
_BEHIND = 3  # times the fastest
_ROUNDED = 6e-2  # where weights lose digits


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A backend, the dtype to compute in, and the trials that led there; by the rule or by a file there are none."""

    backend: ArrayBackend
    dtype: str
    trials: list[KernelTrial]


def seconds_of(budget: str | float | None) -> float:
    """Seconds to measure for; None means none, or what the environment variable HIBACHI_AUTOTUNE says.

    Raises ConfigError.
    """
    budget = os.environ.get("HIBACHI_AUTOTUNE", "off") if budget is None else budget
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
    arch: Arch | None,
    dtype: str | None,
    *,
    stored: str | None,
    allowed: AllowedKernels,
    budget: float = 0.0,
    file: str | Path | None = None,
    portable: bool = True,
) -> KernelChoice:
    """What a model is computed with. arch: of a decoder; None means of another model, which has nothing to choose from.
    portable: what array libraries may compute in several ways, the backend computes.

    dtype: None means by the rule, or with a file the one in which steps take the least time. stored: the dtype of the
    checkpoint. budget: seconds to measure for; 0 means go by the rule. file: what it says, if it is there; else it is
    written.

    Raises ConfigError for a file of another model, or whose kernels are not to be had here; UnsupportedOperation for a
    backend that has no deterministic kernels.
    """
    if file is not None and arch is not None and Path(file).exists():
        return _as_kept(backend, arch, Path(file), allowed.deterministic)
    if not budget or arch is None:
        if file is not None:
            raise ConfigError(
                f"There is no file {file} to take kernels from; expected one that --autotune has written. Measure now: "
                f"--kernels {file} --autotune full."
            )
        if not portable and backend.shapes.compiled:  # what it computes itself, XLA computes as the shapes have it
            backend = backend.plain()
        made = backend.invariant() if allowed.deterministic else backend
        by_rule = stored if stored is not None and portable and backend.suits(stored, arch) else "float32"
        return KernelChoice(made, dtype or by_rule, [])
    if file is None:
        ruled = settle(backend, arch, dtype, stored=stored, allowed=allowed)
        return choose(ruled.backend, sizes_of(arch, ruled.dtype), allowed, budget=budget, alike=True)
    choice = _fastest(backend.plain(), arch, dtype, stored, budget, allowed)
    kept.write(Path(file), sizes_of(arch, choice.dtype), allowed.deterministic, choice.trials)
    return choice


def _as_kept(backend: ArrayBackend, arch: Arch, file: Path, deterministic: bool) -> KernelChoice:
    sizes, was_deterministic, taken = kept.read(file)
    if sizes != sizes_of(arch, sizes.dtype):
        raise ConfigError(f"{file} was measured for another model: {sizes}. Measure this one into another file.")
    if deterministic and not was_deterministic:
        raise ConfigError(f"{file} was measured with deterministic=False. Pass that, or measure anew.")
    plain = backend.plain()
    offered = {(c.operation, c.name): c for c in [*candidates(plain), *ladders(plain)]}
    base = plain.invariant() if deterministic and not any(op in OPERATIONS for op, _ in offered) else plain
    alone = {op: own(base, op).name for op in OPERATIONS}  # what the backend has one way for
    chosen = {}
    for operation, name in taken.items():
        candidate = offered.get((operation, name))
        if candidate is None and alone.get(operation) == name:
            continue
        why = "is not known here" if candidate is None else candidate.why_not
        if candidate is None or why:
            raise ConfigError(f"{file} takes {name} for {operation}: {why}. Measure anew, into another file.")
        chosen[operation] = candidate
    return KernelChoice(compose(base, chosen), sizes.dtype, [])


def _fastest(
    backend: ArrayBackend, arch: Arch, dtype: str | None, stored: str | None, budget: float, allowed: AllowedKernels
) -> KernelChoice:
    """The fastest kernels, whatever their bits; dtype None: and the fastest dtype that the checkpoint allows."""
    if dtype is not None:
        choice = choose(backend, sizes_of(arch, dtype), allowed, budget=budget, alone=OPERATIONS)
        said = [KernelTrial("dtype", dtype, steps_of(choice.trials), None, None, "as asked for")]
        return replace(choice, trials=[*said, *choice.trials])
    found = [_dtype(backend, name, stored) for name in DTYPES]
    dtypes = replace(allowed, deterministic=False)
    trials, measured = [untimed(c, dtypes) for c in found], {}
    share = budget / max(len(fitting(found, dtypes).get("dtype", [])), 1)
    for trial in [t for t in trials if t.why_not is None]:
        sizes = sizes_of(arch, trial.name)
        measured[trial.name] = choice = choose(backend, sizes, allowed, budget=share, alone=OPERATIONS)
        trial.times = steps_of(choice.trials)
        if not trial.times:
            trial.why_not = _why_untimed(choice.trials)
    rank(trials)
    taken = next((t.name for t in trials if t.why_not is None), "float32")
    return replace(measured[taken], trials=trials + measured[taken].trials)


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
    allowed: AllowedKernels,
    *,
    budget: float = 1.0,
    alike: bool = False,
    alone: Iterable[str] = (),
) -> KernelChoice:
    """The fastest kernels for a model on this backend. budget: seconds to measure for.

    alike: of those alone whose bits are the backend's. alone: operations that are timed where there is nothing to
    choose, too. Raises UnsupportedOperation for a backend that has no deterministic kernels.
    """
    start = backend.plain()
    found = candidates(start)
    if alike:
        found = [c for c in found if c.bits is not None and c.bits == backend.numerics and not c.rounds]
    kernels = fitting(found, allowed)
    if not kernels:
        start = backend.invariant() if allowed.deterministic else backend
    there = {c.operation for c in found if c.operation in kernels}
    found += [own(start, op) for op in OPERATIONS if op not in there]
    found += ladders(backend)
    offered = fitting(found, allowed)
    timed = {op for op, some in kernels.items() if len(some) > 1} | set(alone)
    if "buckets" in offered or kernels:
        timed |= set(STEP)
    if not timed:
        return KernelChoice(start if not kernels else backend, sizes.dtype, [])
    watch = Watch()
    trials = _measure(start, sizes, found, offered, timed, budget, allowed)
    if (others := watch.others()) is not None and others > WORTH_TELLING:
        log.warning("Others had %.1f processors while kernels were timed. Measure again when they are free.", others)
    taken = {t.operation: t.name for t in trials if t.why_not is None}
    kernels |= {op: some for op, some in offered.items() if op == "buckets"}
    chosen = {op: c for op, some in kernels.items() for c in some if c.name == taken.get(op)}
    if chosen:
        log.info("Chosen for %s by timing: %s.", sizes.dtype, ", ".join(f"{op} {c.name}" for op, c in chosen.items()))
    return KernelChoice(compose(start, chosen), sizes.dtype, trials)


def _measure(
    backend: ArrayBackend,
    sizes: ModelSizes,
    found: Sequence[Candidate],
    offered: dict[str, list[Candidate]],
    timed: set[str],
    budget: float,
    allowed: AllowedKernels,
) -> list[KernelTrial]:
    trials: list[KernelTrial] = []
    tried = sum(len(some) for op, some in offered.items() if op in timed)
    timed_already = 0
    with phase(f"timing kernels in {sizes.dtype}", tried) as p:
        for operation in OPERATIONS:
            made: list[KernelTrial] = []
            ready: list[_Ready] = []
            p.update(timed_already, f"timing kernels in {sizes.dtype}: {operation}")
            for c in [c for c in found if c.operation == operation]:
                trial = untimed(c, allowed)
                if c in offered.get(operation, []) and operation in timed:
                    trial, cases = _prepare(backend, c, sizes)
                    ready += cases
                    timed_already += 1
                made.append(trial)
            _time(ready, budget / tried)
            rank(made)
            if [t.why_not for t in made] == [None]:
                made[0].note = "the only one"
            trials += made
    return trials + _ladders(backend, found, offered, trials)


def _ladders(
    backend: ArrayBackend, found: Sequence[Candidate], offered: dict[str, list[Candidate]], trials: list[KernelTrial]
) -> list[KernelTrial]:
    """The trials of the sizes that steps may be padded to, from the times of the kernels that were taken."""
    times = taken_of(trials)
    taken = {op: name for op, name in ((t.operation, t.name) for t in trials if t.why_not is None)}
    chosen = {op: c for op, some in offered.items() for c in some if c.name == taken.get(op)}
    made = compose(backend, chosen)
    out = []
    for c in [c for c in found if c.operation == "buckets"]:
        trial = untimed(c, AllowedKernels(deterministic=False))
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
    each candidate. They take turns, so that disturbances of the machine affect all alike; a candidate far behind is
    dropped.
    """
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
