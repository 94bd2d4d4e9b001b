"""Choosing by timing: candidates are compared with the reference, timed on a model's shapes, and ranked: kernels, the
sizes that steps are padded to, and the dtype where nobody names one.

What was chosen is kept in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache), under a name made of all that it
depends on: machine, versions, threads, candidates and shapes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from hibachi.decode.sampling import best
from hibachi.engine.stepcost import padded, rows_named, steps
from hibachi.errors import ConfigError, UnsupportedOperation
from hibachi.model.arch import Arch
from hibachi.plan.lower import lower
from hibachi.tensor.array_backend import ArrayBackend, HostArray
from hibachi.tensor.cache import Paged, StepInputs
from hibachi.tensor.kept import cache_folder, move
from hibachi.tensor.kernels import OPERATIONS, Candidate, candidates, compose, fitting, ladders, own
from hibachi.tensor.numpy_backend import NumpyBackend

_log = logging.getLogger("hibachi.autotune")
BUDGETS = {"off": 0.0, "1s": 1.0, "full": 20.0}  # seconds of measuring
DTYPES = ("float32", "bfloat16")  # that are timed where nobody names one
STEP = ("linear", "attention")  # what a step is judged by
ROWS = (1, 16, 64, 256)  # of the products that are timed
_MOST = 1 << 20  # bytes of what is kept; some thousand in fact
_FORMAT = 3  # of what is kept; another one where other cases are timed
_BEHIND = 3  # times the fastest
_COLD = 64 << 20  # bytes of weights that take turns, as in a step they come from memory
NEAR = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2, "float64": 1e-8}  # of the largest number
_ROUNDED = 6e-2  # where weights lose digits


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the time of a model's operations depends on. matrices: (out, in, how many), the head apart."""

    dtype: str
    matrices: tuple[tuple[int, int, int], ...]
    head: tuple[int, int]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


def sizes_of(arch: Arch, dtype: str) -> Sizes:
    """The sizes of a decoder; of a mixture of experts, those of one expert."""
    inner = arch.experts.intermediate if arch.experts else arch.intermediate
    q, kv, n = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim, len(arch.layers)
    wide = inner * (2 if arch.gated else 1)
    hidden = arch.hidden_size
    matrices = ((q + 2 * kv, hidden, n), (hidden, q, n), (wide, hidden, n), (hidden, inner, n))
    return Sizes(dtype, matrices, (arch.vocab_size, hidden), n, arch.heads, arch.kv_heads, arch.head_dim)


@dataclass(slots=True)
class Trial:
    """What became of a candidate. times: milliseconds of a step's operations of this kind, by case. error: its largest
    difference from the reference, of the largest number. why_not: why it was not taken; None: it was. note: what else
    there is to say."""

    operation: str
    name: str
    times: dict[str, float]
    error: float | None
    why_not: str | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend made of the fastest kernels, the dtype to compute in, and the trials. known: they were read, not
    measured now. kernels: of some operations there were candidates; else the backend has one way for each."""

    backend: ArrayBackend
    dtype: str
    trials: list[Trial]
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
) -> Choice:
    """`choose` for a decoder; dtype None: also the dtype in which its steps take the least time.

    stored: the dtype of the checkpoint. Where it has more digits than a candidate, that one takes rounding=True.
    float32 may always be taken, and is where nothing was measured. deterministic, budget, refresh: as in `choose`.
    """
    how: dict[str, Any] = {"deterministic": deterministic, "rounding": rounding}
    every = OPERATIONS if refresh else ()
    if dtype is not None:
        choice = choose(backend, sizes_of(arch, dtype), budget=budget, refresh=refresh, alone=every, **how)
        said = [Trial("dtype", dtype, _steps(choice.trials), None, None, "as asked for")]
        return replace(choice, trials=[*said, *choice.trials])
    found = [_dtype(backend, name, stored) for name in DTYPES]
    allowed = fitting(found, deterministic=False, rounding=rounding).get("dtype", [])
    sizes = sizes_of(arch, "float32")
    if [c.name for c in allowed] == ["float32"]:
        choice = choose(backend, sizes, budget=budget, refresh=refresh, alone=every, **how)
        said = [_unfit(c, False, rounding) for c in found]
        said[0].times = _steps(choice.trials)
        return replace(choice, trials=said + choice.trials)
    path = _place(backend, replace(sizes, dtype="any"), [*found, *candidates(backend)], deterministic, rounding)
    trials = None if refresh else _read(path, found)
    if trials is None and not budget:
        return choose(backend, sizes, budget=budget, **how)
    measured = {}
    if trials is None:
        trials = [_unfit(c, False, rounding) for c in found]
        for trial in [t for t in trials if t.why_not is None]:
            # Also what is known is measured now, so that the same machine is asked for both.
            part = budget / len(allowed)
            choice = choose(backend, sizes_of(arch, trial.name), budget=part, refresh=True, alone=every or STEP, **how)
            measured[trial.name], trial.times = choice, _steps(choice.trials)
            if not trial.times:
                trial.why_not = _why_untimed(choice.trials)
        _rank(trials)
        _write(path, trials)
    taken = next((t.name for t in trials if t.why_not is None), "float32")
    choice = measured.get(taken) or choose(backend, sizes_of(arch, taken), budget=budget, alone=STEP, **how)
    return replace(choice, trials=trials + choice.trials)


def _why_untimed(trials: Sequence[Trial]) -> str:
    """Why a step's time is not known: no candidate for one of its parts was taken."""
    taken = _taken(trials)
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
    sizes: Sizes,
    *,
    deterministic: bool,
    rounding: bool = False,
    budget: float = 1.0,
    refresh: bool = False,
    alone: Iterable[str] = (),
) -> Choice:
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
    path = _place(backend, sizes, found, deterministic, rounding)
    trials = None if refresh else _read(path, found)
    known = trials is not None
    if trials is None and (not budget or not timed):
        made = _unmeasured(backend, kernels, deterministic) if kernels else plain
        return Choice(made, sizes.dtype, [], kernels=False)
    if trials is None:
        trials = _measure(plain, sizes, found, allowed, timed, budget, deterministic, rounding)
        _write(path, trials)
    taken = {t.operation: t.name for t in trials if t.why_not is None}
    offered = kernels | {op: some for op, some in allowed.items() if op == "buckets"}
    chosen = {op: c for op, some in offered.items() for c in some if c.name == taken.get(op)}
    if chosen:
        said = ", ".join(f"{op} {c.name}" for op, c in chosen.items())
        _log.info("Chosen for %s%s: %s.", sizes.dtype, ", as kept" if known else " by timing them", said)
    return Choice(compose(plain, chosen), sizes.dtype, trials, known, bool(kernels))


def _unmeasured(backend: ArrayBackend, allowed: dict[str, list[Candidate]], deterministic: bool) -> ArrayBackend:
    """The last set of kernels that serves every operation, as candidates are listed from the plainest on."""
    names = [{c.name for c in some if not c.rounds} for some in allowed.values()]
    whole = [c.name for c in next(iter(allowed.values())) if all(c.name in each for each in names)]
    if whole:
        return compose(backend, {op: c for op, some in allowed.items() for c in some if c.name == whole[-1]})
    return backend.invariant() if deterministic else backend


def _unfit(c: Candidate, deterministic: bool, rounding: bool) -> Trial:
    why = c.why_not
    if why is None and deterministic and not c.invariant:
        why = "depends on the batch"
    if why is None and c.rounds and not rounding:
        why = "weights lose digits; --quantization auto"
    return Trial(c.operation, c.name, {}, None, why)


def _measure(
    backend: ArrayBackend,
    sizes: Sizes,
    found: Sequence[Candidate],
    allowed: dict[str, list[Candidate]],
    timed: set[str],
    budget: float,
    deterministic: bool,
    rounding: bool,
) -> list[Trial]:
    trials: list[Trial] = []
    tried = sum(len(some) for op, some in allowed.items() if op in timed)
    for operation in OPERATIONS:
        made: list[Trial] = []
        ready: list[_Ready] = []
        for c in [c for c in found if c.operation == operation]:
            trial = _unfit(c, deterministic, rounding)
            if c in allowed.get(operation, []) and operation in timed:
                trial, cases = _prepare(backend, c, sizes)
                ready += cases
            made.append(trial)
        _time(ready, budget / tried)
        _rank(made)
        if [t.why_not for t in made] == [None]:
            made[0].note = "the only one"
        trials += made
    return trials + _ladders(backend, found, allowed, trials)


def _ladders(
    backend: ArrayBackend, found: Sequence[Candidate], allowed: dict[str, list[Candidate]], trials: list[Trial]
) -> list[Trial]:
    """The trials of the sizes that steps may be padded to, from the times of the kernels that were taken."""
    times = _taken(trials)
    taken = {op: name for op, name in ((t.operation, t.name) for t in trials if t.why_not is None)}
    chosen = {op: c for op, some in allowed.items() for c in some if c.name == taken.get(op)}
    made = compose(backend, chosen)
    out = []
    for c in [c for c in found if c.operation == "buckets"]:
        trial = _unfit(c, False, False)
        if trial.why_not is None:
            ladder: tuple[int, int] = c.source.buckets  # type: ignore[attr-defined]
            trial.times, count = padded(times, ladder, made.tiles[1], any_width=made.any_width)
            trial.note = f"{count} programs" if count else ""
            trial.why_not = None if count else "nothing was measured"
        out.append(trial)
    _rank(out)
    return out


def _rank(trials: Sequence[Trial]) -> None:
    """All but the fastest say why they are not taken."""
    ranked = [t for t in trials if t.why_not is None]
    if not ranked:
        return
    fastest = min(ranked, key=lambda t: _mean(t.times.values()))
    for t in ranked:
        if t is not fastest:
            times = _mean(t.times.values()) / _mean(fastest.times.values())
            t.why_not = f"{times:.2f} times the fastest" if t.times else "nothing was measured"


def _taken(trials: Iterable[Trial]) -> dict[str, dict[str, float]]:
    """The times of what was taken, by operation."""
    return {t.operation: t.times for t in trials if t.why_not is None}


def _steps(trials: Iterable[Trial]) -> dict[str, float]:
    return steps(_taken(trials))


def _mean(times: Iterable[float]) -> float:
    """Geometric: each case counts alike, however long it takes."""
    logs = [math.log(max(t, 1e-9)) for t in times]
    return math.exp(sum(logs) / len(logs)) if logs else math.inf


@dataclass(slots=True)
class _Ready:
    """A candidate that is right, and the calls that are to be timed."""

    trial: Trial
    backend: ArrayBackend
    cases: Cases


def _prepare(backend: ArrayBackend, candidate: Candidate, sizes: Sizes) -> tuple[Trial, list[_Ready]]:
    trial = Trial(candidate.operation, candidate.name, {}, None, None)
    try:
        made = compose(backend, {candidate.operation: candidate})
        with made.guard():
            trial.error = _CHECKS[candidate.operation](made, sizes)
            limit = _ROUNDED if candidate.rounds else NEAR.get(sizes.dtype, 1e-4)
            if trial.error <= limit:
                return trial, [_Ready(trial, made, _CASES[candidate.operation](made, sizes))]
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


# ---- what is called ------------------------------------------------------------------------------------------------

Cases = dict[str, tuple[Callable[[], Any], float]]  # by name: a call, and how many of it a step has


def _random(*shape: int, seed: int = 0) -> HostArray:
    """Normal numbers, of which a few thousand repeat: fast to make."""
    some = np.random.default_rng(seed).standard_normal(65_521, np.float32)
    return np.resize(some, shape)


def _linear_cases(b: ArrayBackend, sizes: Sizes) -> Cases:
    shapes = [(n, k) for n, k, _ in sizes.matrices]
    copies = max(1, min(sizes.layers, _COLD // sum(4 * n * k for n, k in shapes)))
    weights = [[b.put_weight(_random(*shape), sizes.dtype) for shape in shapes] for _ in range(copies)]
    head = b.put_weight(_random(*sizes.head), sizes.dtype)
    logits = b.compile(b.logits)

    def multiply(inputs: list[Any], weights: list[list[Any]]) -> list[Any]:
        return [b.linear(x, w) for layer in weights for x, w in zip(inputs, layer, strict=True)]

    layers = b.compile(multiply)
    cases: Cases = {}
    for rows in ROWS:
        inputs = [b.put(_random(rows, k), sizes.dtype) for _, k in shapes]

        cases[rows_named(rows)] = (lambda x=inputs: layers(x, weights)[-1]), sizes.layers / copies  # type: ignore[misc]
    for rows in (1, 64):
        x = b.put(_random(rows, sizes.head[1]), sizes.dtype)
        cases[f"head, {rows}"] = (lambda x=x: logits(x, head)), 1  # type: ignore[misc]
    return cases


def _inputs(b: ArrayBackend, starts: list[int], each: list[int], shared: int = 0) -> tuple[StepInputs[Any], int]:
    """A step's inputs, and the blocks that it needs. shared: blocks that all rows begin with."""
    size = b.block_size
    n, width = len(starts), -(-max(s + q for s, q in zip(starts, each, strict=True)) // size)
    table = np.arange(1, 1 + n * width, dtype=np.int32).reshape(n, width)
    table[:, :shared] = table[0, :shared]
    every = np.ones(n, bool)
    packed = lower(
        np.arange(n), np.array(starts, np.int32), np.array(each, np.int32), every, table, size, tiles=b.tiles
    )
    names = [f.name for f in fields(packed)]
    arrays = b.put_all([np.zeros(sum(each), np.int32), *(getattr(packed, name) for name in names)])
    return StepInputs(arrays[0], **dict(zip(names, arrays[1:], strict=True))), 1 + n * width


def _attend(b: ArrayBackend, sizes: Sizes, starts: list[int], each: list[int], shared: int = 0) -> Callable[[], Any]:
    x, blocks = _inputs(b, starts, each, shared)
    spec = Paged(sizes.kv_heads, sizes.head_dim, sizes.head_dim, dtype=sizes.dtype)
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    q, k, v = (b.put(_random(sum(each), n, sizes.head_dim, seed=i), sizes.dtype) for i, n in enumerate(heads))
    held = [b.make_cache(spec, blocks=blocks, block_size=b.block_size, rows=1, dtype=sizes.dtype)]
    step = b.compile(b.attend, donate=(3,))

    def attend() -> Any:
        out, held[0] = step(q, k, v, held[0], x)
        return out

    return attend


def _attention_cases(b: ArrayBackend, sizes: Sizes) -> Cases:
    steps: dict[str, tuple[list[int], list[int], int]] = {
        "1 x 256": ([255], [1], 0),
        "16 x 256": ([255] * 16, [1] * 16, 0),
        "64 x 256": ([255] * 64, [1] * 64, 0),
        "64, 240 shared": ([255] * 64, [1] * 64, 240 // b.block_size),
        "prompt of 256": ([0], [256], 0),
    }
    return {name: (_attend(b, sizes, *step), sizes.layers) for name, step in steps.items()}


def _activations(b: ArrayBackend, sizes: Sizes, rows: int) -> Callable[[], list[Any]]:
    hidden, wide = sizes.head[1], sizes.matrices[2][0]
    x, inner = b.put(_random(rows, hidden), sizes.dtype), b.put(_random(rows, wide, seed=1), sizes.dtype)
    w = b.put(_random(hidden, seed=2), sizes.dtype)
    qk = b.put(_random(rows, sizes.heads + sizes.kv_heads, sizes.head_dim, seed=3), sizes.dtype)
    half = sizes.head_dim // 2
    turns = [b.put(_random(rows, 1, half, seed=4 + i), sizes.dtype) for i in range(2)]

    def all_of_them(x: Any, w: Any, inner: Any, qk: Any, cos: Any, sin: Any) -> list[Any]:
        return [b.rms_norm(x, w, 1e-5), b.gated(inner, "silu"), b.rope(qk[..., : 2 * half], cos, sin)]

    step = b.compile(all_of_them)
    return lambda: step(x, w, inner, qk, *turns)  # type: ignore[no-any-return]


def _activation_cases(b: ArrayBackend, sizes: Sizes) -> Cases:
    calls = {rows_named(rows): _activations(b, sizes, rows) for rows in (1, 64, 256)}
    return {name: (lambda call=call: call()[-1], sizes.layers) for name, call in calls.items()}  # type: ignore[misc]


def _sampling_cases(b: ArrayBackend, sizes: Sizes) -> Cases:
    logits = {rows: b.put(_random(rows, sizes.head[0]), "float32") for rows in (1, 64)}
    draw = b.compile(lambda x: best(b, x))
    return {f"greedy, {rows}": (lambda x=x: draw(x)[0], 1) for rows, x in logits.items()}  # type: ignore[misc]


_CASES: dict[str, Callable[[ArrayBackend, Sizes], Cases]] = {
    "linear": _linear_cases,
    "attention": _attention_cases,
    "activations": _activation_cases,
    "sampling": _sampling_cases,
}


# ---- is it right? --------------------------------------------------------------------------------------------------


def _off(b: ArrayBackend, got: Any, want: HostArray) -> float:
    """The largest difference, of the largest number; infinite if something is not a number."""
    off = float(np.abs(np.asarray(b.get(got), np.float64) - want).max() / max(float(np.abs(want).max()), 1e-9))
    return off if math.isfinite(off) else math.inf


def _rounded(b: ArrayBackend, a: HostArray, dtype: str) -> HostArray:
    """As the backend holds it."""
    return np.asarray(b.get(b.put(a, dtype)), np.float32)


def _check_linear(b: ArrayBackend, sizes: Sizes) -> float:
    worst = 0.0
    for n, k, _ in sizes.matrices:
        w, x = _random(min(n, 1024), k), _random(5, k, seed=1)  # of a large one, a part says as much
        got = b.linear(b.put(x, sizes.dtype), b.put_weight(w, sizes.dtype))
        want = _rounded(b, x, sizes.dtype).astype(np.float64) @ _rounded(b, w, sizes.dtype).T.astype(np.float64)
        worst = max(worst, _off(b, got, want))
    return worst


def _check_attention(b: ArrayBackend, sizes: Sizes) -> float:
    step = [0, 0, 0], [1, 40, 5]
    reference = NumpyBackend()
    want = _attend(reference, Sizes(**asdict(sizes) | {"dtype": "float32"}), *step)()
    return _off(b, _attend(b, sizes, *step)(), want)


def _check_activations(b: ArrayBackend, sizes: Sizes) -> float:
    reference = _activations(NumpyBackend(), Sizes(**asdict(sizes) | {"dtype": "float32"}), 3)()
    got = _activations(b, sizes, 3)()
    return max(_off(b, g, want) for g, want in zip(got, reference, strict=True))


def _check_sampling(b: ArrayBackend, sizes: Sizes) -> float:
    logits = _random(7, sizes.head[0], seed=5)
    places, finite = best(b, b.put(logits, "float32"))
    right = np.array_equal(b.get(places), logits.argmax(axis=1)) and bool(b.get(finite).all())
    return 0.0 if right else math.inf


_CHECKS: dict[str, Callable[[ArrayBackend, Sizes], float]] = {
    "linear": _check_linear,
    "attention": _check_attention,
    "activations": _check_activations,
    "sampling": _check_sampling,
}


# ---- what is known -------------------------------------------------------------------------------------------------


def _place(
    backend: ArrayBackend, sizes: Sizes, found: list[Candidate], deterministic: bool, rounding: bool
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
        _log.warning("The choice of kernels is not kept: %s", e)
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), platform.machine())


def _read(path: Path | None, found: Iterable[Candidate]) -> list[Trial] | None:
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
        trials = [Trial(**each) for each in kept]
        if not all(map(_is_sound, trials)):
            raise ValueError("a trial has a value of the wrong type")
        if sorted((t.operation, t.name) for t in trials) != sorted((c.operation, c.name) for c in found):
            raise ValueError("these are not the trials of the candidates here")
        return trials
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as e:
        _log.warning("The choice of kernels in %s cannot be used, it is made anew: %.200s", path, e)
        return None


def _is_sound(t: Trial) -> bool:
    """Are all its values of their types? Times are finite: the choice was made by them."""
    times = list(t.times.values()) if isinstance(t.times, dict) else [None]
    error = 0.0 if t.error is None else t.error
    words = (t.operation, t.name, t.note, "" if t.why_not is None else t.why_not)
    numbers = all(type(n) in (int, float) for n in (*times, error))
    return numbers and all(isinstance(w, str) for w in words) and all(0 <= n < math.inf for n in times) and error >= 0


def _write(path: Path | None, trials: list[Trial]) -> None:
    if path is None:
        return
    made = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(json.dumps([asdict(t) for t in trials], indent=1))
        move(made, path)
    except OSError as e:
        _log.warning("The choice of kernels is not kept, so the next start makes it again: %s", e)
        with suppress(OSError):
            made.unlink()


def table(trials: list[Trial]) -> str:
    """A line for each candidate: milliseconds by case, its error, and why it was not taken."""
    out = []
    for operation in dict.fromkeys(t.operation for t in trials):
        rows = _joined([t for t in trials if t.operation == operation])
        cases = list(next((t.times for t in rows if t.times), {}))
        errors = any(t.error is not None for t in rows)
        head = [operation, *cases, *(["error"] if errors else []), ""]
        lines = [head]
        for t in rows:
            said = t.why_not or "<- taken"
            cells = [f"{t.times[case]:.3f}" if case in t.times else "" for case in cases]
            off = [] if not errors else ["" if t.error is None else f"{t.error:.0e}"]
            lines.append([f"  {t.name}", *cells, *off, f"{said} ({t.note})" if t.note else said])
        widths = [max(14 if i == 0 else 0, *(len(line[i]) for line in lines)) for i in range(len(head) - 1)]
        for line in lines:
            cells = [f"{line[0]:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(line[1:-1], widths[1:], strict=True))]
            out.append("  ".join([*cells, line[-1]]).rstrip())
    return "\n".join(out)


def _joined(trials: list[Trial]) -> list[Trial]:
    """Those that cannot be had for one reason in one line."""
    out: list[Trial] = []
    for t in trials:
        before = out[-1] if out else None
        if before is not None and before.why_not is not None and before.why_not == t.why_not and not t.times:
            out[-1] = replace(before, name=f"{before.name}, {t.name}")
        else:
            out.append(t)
    return out
