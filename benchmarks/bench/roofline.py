"""What the machine could do at best: measured memory bandwidth and matrix products, and the work at these rates.

A step takes at least as long as its weights take to be read or its products to be computed, whichever is longer, and
then its keys and values must be read (Williams, Waterman & Patterson 2009, applied to each step).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hibachi.backend.array_backend import ArrayBackend
from hibachi.llm.model.arch import Arch
from hibachi.llm.model.arch import shapes as tensor_shapes
from hibachi.testing.bench.work import TimedRequest

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int8": 1, "int4": 18 / 32}  # int4: with its scales
ROWS = (1, 16, 64, 256)
_READ = 256 << 20  # bytes: more than a cache holds
_COLD = 64 << 20  # bytes of weights that take turns, so that they come from memory as in a step
_SECONDS = 0.4


@dataclass(frozen=True, slots=True)
class Ceilings:
    """bandwidth: bytes a second, reading. products: rows -> floating-point operations a second of x [rows, n] @ w.T"""

    bandwidth: float
    products: dict[int, float]

    def as_json(self) -> dict[str, Any]:
        return {"bandwidth": self.bandwidth, "products": {str(n): rate for n, rate in self.products.items()}}


def measure(backend: ArrayBackend, dtype: str, size: tuple[int, int] = (3072, 576)) -> Ceilings:
    """The best of many tries, with all threads of the library. size: of the weights that are multiplied with."""
    bandwidth = _bandwidth(backend)
    rng, (n, k) = np.random.default_rng(0), size
    plain = rng.standard_normal(size, np.float32)
    copies = max(1, int(_COLD / (n * k * BYTES[dtype])))
    weights = [backend.put_weight(plain, dtype) for _ in range(copies)]
    products = {}
    for rows in ROWS:
        h = backend.put(rng.standard_normal((rows, k), np.float32), dtype)

        def multiply(h: Any = h) -> None:
            for w in weights:
                y = backend.linear(h, w)
            backend.get(y[:1, :1])

        products[rows] = 2 * rows * n * k * copies / _best(multiply)
    return Ceilings(bandwidth, products)


def _bandwidth(backend: ArrayBackend) -> float:
    x = backend.put(np.ones(_READ // 4, np.float32))
    return _READ / _best(lambda: backend.get(backend.xp.sum(x)))


def _best(call: Callable[[], Any]) -> float:
    """The shortest time of a call, in seconds."""
    call()
    least, end = math.inf, time.perf_counter() + _SECONDS
    while (began := time.perf_counter()) < end:
        call()
        least = min(least, time.perf_counter() - began)
    return least


@dataclass(frozen=True, slots=True)
class LeastTime:
    """The least seconds that a work can take. prefill: of them, until the last prompt is computed."""

    seconds: float
    prefill: float
    steps: int
    tokens_per_second: float


def bound(
    arch: Arch,
    requests: Sequence[TimedRequest],
    ceilings: Ceilings,
    dtype: str,
    rows: int,
    *,
    shared: int = 0,
    known: int = 0,
    weights: str | None = None,
) -> LeastTime:
    """For a decoder without experts, all requests at once. dtype: of keys and values, and of matrices unless `weights`
    names another; the few scales of int8 are left out. shared: tokens that all prompts begin with and that are computed
    once; known: of these, those that are computed already."""
    size, peak = BYTES[dtype], max(ceilings.products.values())
    body, head = _weights(arch)
    read = (body + head) * BYTES[weights or dtype] / ceilings.bandwidth
    token = 2 * len(arch.layers) * arch.kv_heads * arch.head_dim * size  # bytes of keys and values
    prompts = shared - known + sum(len(r.prompt) - shared for r in requests)
    prefill = max(read, (2 * body * prompts + 2 * head * len(requests)) / peak)
    seconds, steps = prefill, 0
    waiting = [[len(r.prompt) + 1, r.max_tokens - 1] for r in requests]
    live: list[list[int]] = []
    while waiting or live:
        while waiting and len(live) < rows:
            live.append(waiting.pop(0))
        live = [each for each in live if each[1] > 0]
        if not live:
            continue
        computed = 2 * (body + head) * len(live) / peak
        seconds += max(read, computed) + token * sum(length for length, _ in live) / ceilings.bandwidth
        steps += 1
        for each in live:
            each[0] += 1
            each[1] -= 1
    return LeastTime(seconds, prefill, steps, sum(r.max_tokens for r in requests) / seconds)


def _weights(arch: Arch) -> tuple[int, int]:
    """(numbers in the matrices of the layers, in the head)."""
    required, _ = tensor_shapes(arch)
    body = sum(math.prod(dims) for name, dims in required.items() if name.startswith("layers.") and len(dims) > 1)
    return body, arch.vocab_size * arch.hidden_size
