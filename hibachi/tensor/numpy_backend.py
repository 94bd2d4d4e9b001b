"""NumPy: the backend that needs nothing else, and the definition that every other one is compared with."""

from __future__ import annotations

from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from hibachi.tensor.array_backend import Array, ArrayBackend, HostArray


class NumpyBackend(ArrayBackend):
    name = "numpy"

    def __init__(self) -> None:
        super().__init__(xp)

    def owns(self, t: Any) -> bool:
        return isinstance(t, (np.ndarray, np.generic))  # indexing an array of rank 1 gives a generic

    def put_weight(self, w: HostArray, dtype: str) -> Array:
        # Stored as [in, out], shown as [out, in]: OpenBLAS multiplies small batches up to 2x faster this way round.
        return np.ascontiguousarray(w.T, dtype=dtype).T

    def take(self, t: Array, idx: Array) -> Array:
        return t[idx]

    def scatter_rows(self, dst: Array, idx: Array, src: Array) -> Array:
        dst[idx] = src
        return dst

    def silu(self, x: Array) -> Array:
        with np.errstate(over="ignore"):  # exp(-x) may be inf, and x / inf is the right answer
            return x / (1 + np.exp(-x))

    def softmax(self, x: Array) -> Array:
        e = x - x.max(axis=-1, keepdims=True)
        np.exp(e, out=e)
        e /= e.sum(axis=-1, keepdims=True)
        return e

    def versions(self) -> dict[str, str]:
        return {"library": f"numpy {np.__version__}", "device": "cpu"}
