"""Choosing kernels by timing them: candidates are compared with the reference, timed on a model's shapes, and ranked.

What was chosen is kept in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache), under a name made of all that it
depends on: machine, versions, threads, candidates and shapes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, astuple, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from hibachi.decode.sampling import best
from hibachi.errors import ConfigError
from hibachi.model.arch import Arch
from hibachi.plan.lower import lower
from hibachi.tensor.array_backend import ArrayBackend, HostArray
from hibachi.tensor.cache import Paged, StepInputs
from hibachi.tensor.kernels import OPERATIONS, Candidate, candidates, compose, fitting
from hibachi.tensor.numpy_backend import NumpyBackend

_log = logging.getLogger("hibachi.autotune")
BUDGETS = {"off": 0.0, "1s": 1.0, "full": 20.0}  # seconds of measuring
ROWS = (1, 16, 64, 256)  # of the products that are timed
_COLD = 128 << 20  # bytes of weights that take turns, as in a step they come from memory
_BLOCK = 16
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
    difference from the reference, of the largest number. why_not: why it was not taken; None: it was."""

    operation: str
    name: str
    times: dict[str, float]
    error: float | None
    why_not: str | None


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend made of the fastest kernels, and the trials. known: they were read, not measured now."""

    backend: ArrayBackend
    trials: list[Trial]
    known: bool = False


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


def choose(
    backend: ArrayBackend,
    sizes: Sizes,
    *,
    deterministic: bool,
    rounding: bool = False,
    budget: float = 1.0,
    refresh: bool = False,
) -> Choice:
    """The fastest kernels for a model on this backend. budget: seconds to measure for, if nothing is known; 0: do not
    measure, take the last that serve every operation. refresh: measure though something is known.

    deterministic: of those alone that do not depend on the batch. rounding: weights may lose digits. Raises
    UnsupportedOperation for a backend without deterministic kernels.
    """
    found = candidates(backend)
    allowed = fitting(found, deterministic=deterministic, rounding=rounding)
    if not allowed:
        return Choice(backend.invariant() if deterministic else backend, [])
    path = _place(backend, sizes, found, deterministic, rounding)
    trials = None if refresh else _read(path)
    known = trials is not None
    if trials is None:
        if not budget:
            return Choice(_unmeasured(backend, allowed, deterministic), [])
        trials = _measure(backend, sizes, found, allowed, budget, deterministic, rounding)
        _write(path, trials)
    taken = {t.operation: t.name for t in trials if t.why_not is None}
    chosen = {op: c for op, some in allowed.items() for c in some if c.name == taken.get(op)}
    return Choice(compose(backend, chosen), trials, known)


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
    found: list[Candidate],
    allowed: dict[str, list[Candidate]],
    budget: float,
    deterministic: bool,
    rounding: bool,
) -> list[Trial]:
    trials: list[Trial] = []
    tried = sum(map(len, allowed.values()))
    for operation in OPERATIONS:
        mine = [c for c in found if c.operation == operation]
        fit = allowed.get(operation, [])
        made: list[Trial] = []
        for c in mine:
            trial = _unfit(c, deterministic, rounding)
            if c in fit:
                trial = _try(backend, c, sizes, budget / tried)
            made.append(trial)
        ranked = [t for t in made if t.why_not is None]
        if ranked:
            best = min(ranked, key=lambda t: _mean(t.times.values()))
            for t in ranked:
                if t is not best:
                    t.why_not = f"{_mean(t.times.values()) / _mean(best.times.values()):.2f} times the fastest"
        trials += made
    return trials


def _mean(times: Iterable[float]) -> float:
    """Geometric: each case counts alike, however long it takes."""
    logs = [math.log(max(t, 1e-9)) for t in times]
    return math.exp(sum(logs) / len(logs)) if logs else math.inf


def _try(backend: ArrayBackend, candidate: Candidate, sizes: Sizes, seconds: float) -> Trial:
    trial = Trial(candidate.operation, candidate.name, {}, None, None)
    try:
        made = compose(backend, {candidate.operation: candidate})
        with made.guard():
            trial.error = _CHECKS[candidate.operation](made, sizes)
            limit = _ROUNDED if candidate.rounds else NEAR.get(sizes.dtype, 1e-4)
            if not trial.error <= limit:
                trial.why_not = f"its results are off by {trial.error:.1e}, more than {limit:.0e}"
                return trial
            cases = _CASES[candidate.operation](made, sizes)
            for case, (call, times) in cases.items():
                trial.times[case] = 1e3 * times * _best(made, call, seconds / len(cases))
    except Exception as e:  # whatever a kernel does here, there are others
        trial.why_not = f"{type(e).__name__}: {e}"
    return trial


def _best(backend: ArrayBackend, call: Callable[[], Any], seconds: float) -> float:
    """The shortest time of a call, in seconds, after one that does not count."""
    least, end = math.inf, time.perf_counter() + seconds
    backend.get(call())
    while True:
        began = time.perf_counter()
        backend.get(call())
        now = time.perf_counter()
        least = min(least, now - began)
        if now > end:
            return least


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
    cases: Cases = {}
    for rows in ROWS:
        inputs = [b.put(_random(rows, k), sizes.dtype) for _, k in shapes]

        def layers(inputs: list[Any] = inputs) -> Any:
            return [b.linear(x, w) for layer in weights for x, w in zip(inputs, layer, strict=True)][-1]

        cases[f"{rows} rows"] = layers, sizes.layers / copies
    for rows in (1, 64):
        x = b.put(_random(rows, sizes.head[1]), sizes.dtype)
        cases[f"head, {rows}"] = (lambda x=x: b.logits(x, head)), 1  # type: ignore[misc]
    return cases


def _inputs(b: ArrayBackend, starts: list[int], each: list[int]) -> tuple[StepInputs[Any], int]:
    """A step's inputs, and the blocks that it needs."""
    n, width = len(starts), -(-max(s + q for s, q in zip(starts, each, strict=True)) // _BLOCK)
    table = np.arange(1, 1 + n * width, dtype=np.int32).reshape(n, width)
    every = np.ones(n, bool)
    packed = lower(
        np.arange(n), np.array(starts, np.int32), np.array(each, np.int32), every, table, _BLOCK, tiles=b.tiles
    )
    names = [f.name for f in fields(packed)]
    arrays = b.put_all([np.zeros(sum(each), np.int32), *(getattr(packed, name) for name in names)])
    return StepInputs(arrays[0], **dict(zip(names, arrays[1:], strict=True))), 1 + n * width


def _attend(b: ArrayBackend, sizes: Sizes, starts: list[int], each: list[int]) -> Callable[[], Any]:
    x, blocks = _inputs(b, starts, each)
    spec = Paged(sizes.kv_heads, sizes.head_dim, sizes.head_dim, dtype=sizes.dtype)
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    q, k, v = (b.put(_random(sum(each), n, sizes.head_dim, seed=i), sizes.dtype) for i, n in enumerate(heads))
    cache = b.make_cache(spec, blocks=blocks, block_size=_BLOCK, rows=1, dtype=sizes.dtype)
    return lambda: b.attend(q, k, v, cache, x)[0]


def _attention_cases(b: ArrayBackend, sizes: Sizes) -> Cases:
    steps = {
        "1 x 256": ([255], [1]),
        "16 x 256": ([255] * 16, [1] * 16),
        "64 x 256": ([255] * 64, [1] * 64),
        "prompt of 256": ([0], [256]),
    }
    return {name: (_attend(b, sizes, *step), sizes.layers) for name, step in steps.items()}


def _activations(b: ArrayBackend, sizes: Sizes, rows: int) -> Callable[[], list[Any]]:
    hidden, wide = sizes.head[1], sizes.matrices[2][0]
    x, inner = b.put(_random(rows, hidden), sizes.dtype), b.put(_random(rows, wide, seed=1), sizes.dtype)
    w = b.put(_random(hidden, seed=2), sizes.dtype)
    qk = b.put(_random(rows, sizes.heads + sizes.kv_heads, sizes.head_dim, seed=3), sizes.dtype)
    half = sizes.head_dim // 2
    turns = [b.put(_random(rows, 1, half, seed=4 + i), sizes.dtype) for i in range(2)]
    return lambda: [b.rms_norm(x, w, 1e-5), b.gated(inner, "silu"), b.rope(qk[..., : 2 * half], *turns)]


def _activation_cases(b: ArrayBackend, sizes: Sizes) -> Cases:
    calls = {f"{rows} rows": _activations(b, sizes, rows) for rows in (1, 64, 256)}
    return {name: (lambda call=call: call()[-1], sizes.layers) for name, call in calls.items()}  # type: ignore[misc]


def _sampling_cases(b: ArrayBackend, sizes: Sizes) -> Cases:
    logits = {rows: b.put(_random(rows, sizes.head[0]), "float32") for rows in (1, 64)}
    return {f"greedy, {rows}": (lambda x=x: best(b, x)[0], 1) for rows, x in logits.items()}  # type: ignore[misc]


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


def _place(backend: ArrayBackend, sizes: Sizes, found: list[Candidate], deterministic: bool, rounding: bool) -> Path:
    facts = [
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
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "hibachi" / f"kernels-{key}.json"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), platform.machine())


def _read(path: Path) -> list[Trial] | None:
    try:
        return [Trial(**each) for each in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):  # not there, or of another version: measure
        return None


def _write(path: Path, trials: list[Trial]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(f".{os.getpid()}")
        made.write_text(json.dumps([asdict(t) for t in trials], indent=1))
        made.replace(path)
    except OSError as e:
        _log.info("The choice of kernels is not kept: %s", e)


def table(trials: list[Trial]) -> str:
    """A line for each candidate: its times, its error, and why it was not taken."""
    lines = []
    for operation in dict.fromkeys(t.operation for t in trials):
        mine = [t for t in trials if t.operation == operation]
        cases = list(next((t.times for t in mine if t.times), {}))
        lines.append(f"{operation:14}" + "".join(f"{case:>14}" for case in cases) + f"{'error':>8}")
        for t in mine:
            cells = "".join(f"{t.times[case]:11.3f} ms" if case in t.times else f"{'':14}" for case in cases)
            error = "" if t.error is None else f"{t.error:.0e}"
            lines.append(f"  {t.name:12}{cells}{error:>8}  {t.why_not or '<- taken'}")
    return "\n".join(lines)
