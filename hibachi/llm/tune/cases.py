"""The calls that are timed, on a model's shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from hibachi.backend.array_backend import ArrayBackend, HostArray
from hibachi.backend.layout import Paged, StepInputs
from hibachi.engine.sampling.draw import best
from hibachi.engine.scheduler.lower import lower
from hibachi.llm.model.arch import Arch
from hibachi.llm.tune.stepcost import rows_named

ROWS = (1, 16, 64, 256)  # of the products that are timed
_COLD = 64 << 20  # bytes of weights that take turns, as in a step they come from memory


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What the time of a model's operations depends on. matrices: (out, in, how many), the head apart."""

    dtype: str
    matrices: tuple[tuple[int, int, int], ...]
    head: tuple[int, int]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


def sizes_of(arch: Arch, dtype: str) -> ModelSizes:
    """The sizes of a decoder; of a mixture of experts, those of one expert."""
    inner = arch.experts.intermediate if arch.experts else arch.intermediate
    q, kv, n = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim, len(arch.layers)
    wide = inner * (2 if arch.gated else 1)
    hidden = arch.hidden_size
    matrices = ((q + 2 * kv, hidden, n), (hidden, q, n), (wide, hidden, n), (hidden, inner, n))
    return ModelSizes(dtype, matrices, (arch.vocab_size, hidden), n, arch.heads, arch.kv_heads, arch.head_dim)


Cases = dict[str, tuple[Callable[[], Any], float]]  # by name: a call, and how many of it a step has


def _of(n: int, call: Callable[..., Any], *given: Any) -> Any:
    """Output n of a call."""
    return call(*given)[n]


def random(*shape: int, seed: int = 0) -> HostArray:
    """Normal numbers, of which a few thousand repeat: fast to make."""
    some = np.random.default_rng(seed).standard_normal(65_521, np.float32)
    return np.resize(some, shape)


def _linear_cases(b: ArrayBackend, sizes: ModelSizes) -> Cases:
    shapes = [(n, k) for n, k, _ in sizes.matrices]
    copies = max(1, min(sizes.layers, _COLD // sum(4 * n * k for n, k in shapes)))
    weights = [[b.put_weight(random(*shape), sizes.dtype) for shape in shapes] for _ in range(copies)]
    head = b.put_weight(random(*sizes.head), sizes.dtype)
    logits = b.compile(b.logits)

    def multiply(inputs: list[Any], weights: list[list[Any]]) -> list[Any]:
        return [b.linear(x, w) for layer in weights for x, w in zip(inputs, layer, strict=True)]

    layers = b.compile(multiply)
    cases: Cases = {}
    for rows in ROWS:
        inputs = [b.put(random(rows, k), sizes.dtype) for _, k in shapes]

        cases[rows_named(rows)] = partial(_of, -1, layers, inputs, weights), sizes.layers / copies
    for rows in (1, 64):
        x = b.put(random(rows, sizes.head[1]), sizes.dtype)
        cases[f"head, {rows}"] = partial(logits, x, head), 1
    return cases


def _inputs(b: ArrayBackend, starts: list[int], each: list[int], shared: int = 0) -> tuple[StepInputs[Any], int]:
    """A step's inputs, and the blocks that it needs. shared: blocks that all rows begin with."""
    size = b.block_size
    n, width = len(starts), -(-max(s + q for s, q in zip(starts, each, strict=True)) // size)
    table = np.arange(1, 1 + n * width, dtype=np.int32).reshape(n, width)
    table[:, :shared] = table[0, :shared]
    every = np.ones(n, bool)
    packed = lower(
        np.arange(n), np.array(starts, np.int32), np.array(each, np.int32), every, table, size, tiles=b.shapes.choices
    )
    names = [f.name for f in fields(packed)]
    arrays = b.put_all([np.zeros(sum(each), np.int32), *(getattr(packed, name) for name in names)])
    return StepInputs(arrays[0], **dict(zip(names, arrays[1:], strict=True))), 1 + n * width


def attend_call(
    b: ArrayBackend, sizes: ModelSizes, starts: list[int], each: list[int], shared: int = 0
) -> Callable[[], Any]:
    x, blocks = _inputs(b, starts, each, shared)
    spec = Paged(sizes.kv_heads, sizes.head_dim, sizes.head_dim, dtype=sizes.dtype)
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    q, k, v = (b.put(random(sum(each), n, sizes.head_dim, seed=i), sizes.dtype) for i, n in enumerate(heads))
    held = [b.make_cache(spec, blocks=blocks, block_size=b.block_size, rows=1, dtype=sizes.dtype)]
    step = b.compile(b.attend, donate=(3,))

    def attend() -> Any:
        out, held[0] = step(q, k, v, held[0], x)
        return out

    return attend


def _attention_cases(b: ArrayBackend, sizes: ModelSizes) -> Cases:
    steps: dict[str, tuple[list[int], list[int], int]] = {
        "1 x 256": ([255], [1], 0),
        "16 x 256": ([255] * 16, [1] * 16, 0),
        "64 x 256": ([255] * 64, [1] * 64, 0),
        "64, 240 shared": ([255] * 64, [1] * 64, 240 // b.block_size),
        "prompt of 256": ([0], [256], 0),
    }
    return {name: (attend_call(b, sizes, *step), sizes.layers) for name, step in steps.items()}


def activations_call(b: ArrayBackend, sizes: ModelSizes, rows: int) -> Callable[[], list[Any]]:
    hidden, wide = sizes.head[1], sizes.matrices[2][0]
    x, inner = b.put(random(rows, hidden), sizes.dtype), b.put(random(rows, wide, seed=1), sizes.dtype)
    w = b.put(random(hidden, seed=2), sizes.dtype)
    qk = b.put(random(rows, sizes.heads + sizes.kv_heads, sizes.head_dim, seed=3), sizes.dtype)
    half = sizes.head_dim // 2
    turns = [b.put(random(rows, 1, half, seed=4 + i), sizes.dtype) for i in range(2)]

    def all_of_them(x: Any, w: Any, inner: Any, qk: Any, cos: Any, sin: Any) -> list[Any]:
        return [b.rms_norm(x, w, 1e-5), b.gated(inner, "silu"), b.rope(qk[..., : 2 * half], cos, sin)]

    step = b.compile(all_of_them)
    return lambda: step(x, w, inner, qk, *turns)


def _activation_cases(b: ArrayBackend, sizes: ModelSizes) -> Cases:
    calls = {rows_named(rows): activations_call(b, sizes, rows) for rows in (1, 64, 256)}
    return {name: (partial(_of, -1, call), sizes.layers) for name, call in calls.items()}


def _sampling_cases(b: ArrayBackend, sizes: ModelSizes) -> Cases:
    logits = {rows: b.put(random(rows, sizes.head[0]), "float32") for rows in (1, 64)}
    draw = b.compile(lambda x: best(b, x))
    return {f"greedy, {rows}": (partial(_of, 0, draw, x), 1) for rows, x in logits.items()}


CASES: dict[str, Callable[[ArrayBackend, ModelSizes], Cases]] = {
    "linear": _linear_cases,
    "attention": _attention_cases,
    "activations": _activation_cases,
    "sampling": _sampling_cases,
}
