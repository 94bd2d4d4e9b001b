"""Is a candidate right? Its results beside the reference's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from hibachi.backend.array_backend import ArrayBackend, HostArray
from hibachi.backend.numpy_backend import NumpyBackend
from hibachi.engine.sampling.draw import best
from hibachi.llm.tune.cases import ModelSizes, activations_call, attend_call, random

NEAR = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2, "float64": 1e-8}  # of the largest number


def _off(b: ArrayBackend, got: Any, want: HostArray) -> float:
    """The largest difference, of the largest number; infinite if something is not a number."""
    off = float(np.abs(np.asarray(b.get(got), np.float64) - want).max() / max(float(np.abs(want).max()), 1e-9))
    return off if math.isfinite(off) else math.inf


def _rounded(b: ArrayBackend, a: HostArray, dtype: str) -> HostArray:
    """As the backend holds it."""
    return np.asarray(b.get(b.put(a, dtype)), np.float32)


def _check_linear(b: ArrayBackend, sizes: ModelSizes) -> float:
    worst = 0.0
    for n, k, _ in sizes.matrices:
        w, x = random(min(n, 1024), k), random(5, k, seed=1)  # of a large one, a part says as much
        got = b.linear(b.put(x, sizes.dtype), b.put_weight(w, sizes.dtype))
        want = _rounded(b, x, sizes.dtype).astype(np.float64) @ _rounded(b, w, sizes.dtype).T.astype(np.float64)
        worst = max(worst, _off(b, got, want))
    return worst


def _check_attention(b: ArrayBackend, sizes: ModelSizes) -> float:
    step = [0, 0, 0], [1, 40, 5]
    reference = NumpyBackend()
    want = attend_call(reference, ModelSizes(**asdict(sizes) | {"dtype": "float32"}), *step)()
    return _off(b, attend_call(b, sizes, *step)(), want)


def _check_activations(b: ArrayBackend, sizes: ModelSizes) -> float:
    reference = activations_call(NumpyBackend(), ModelSizes(**asdict(sizes) | {"dtype": "float32"}), 3)()
    got = activations_call(b, sizes, 3)()
    return max(_off(b, g, want) for g, want in zip(got, reference, strict=True))


def _check_sampling(b: ArrayBackend, sizes: ModelSizes) -> float:
    logits = random(7, sizes.head[0], seed=5)
    places, finite = best(b, b.put(logits, "float32"))
    right = np.array_equal(b.get(places), logits.argmax(axis=1)) and bool(b.get(finite).all())
    return 0.0 if right else math.inf


CHECKS: dict[str, Callable[[ArrayBackend, ModelSizes], float]] = {
    "linear": _check_linear,
    "attention": _check_attention,
    "activations": _check_activations,
    "sampling": _check_sampling,
}
