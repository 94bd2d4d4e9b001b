"""NumPy: the backend that needs nothing else, and the definition that every other one is compared with."""

from __future__ import annotations

from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from hibachi.tensor.array_backend import Array, ArrayBackend, HostArray, LayerCache
from hibachi.tensor.cache import StepInputs


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

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        cache: LayerCache,
        x: StepInputs[Array],
        *,
        scale: float | None = None,
    ) -> tuple[Array, LayerCache]:
        # The kernel of the base class step by step, in half as many calls and without copies of the scores.
        keys, values = self.write_cache(cache[0], x.slot, k), self.write_cache(cache[1], x.slot, v)
        tiles, tile = x.tile_q.shape
        kv_heads, dim = k.shape[1:]
        table = x.block_table[x.tile_row]  # [N, blocks]
        span = table.shape[1] * keys.shape[1]
        kt = keys[table].reshape(tiles, span, kv_heads, dim).transpose(0, 2, 3, 1)
        vt = values[table].reshape(tiles, span, kv_heads, v.shape[2]).transpose(0, 2, 1, 3)
        qt = q[x.tile_q].reshape(tiles, tile, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
        scores = self.float32(qt.reshape(tiles, kv_heads, -1, dim) @ kt)  # [N, kv_heads, group * tile, span]
        scores *= dim**-0.5 if scale is None else scale
        hidden = np.arange(span, dtype=np.int32) > x.pos[x.tile_q][:, :, None]
        np.copyto(scores.reshape(tiles, kv_heads, -1, tile, span), -np.inf, where=hidden[:, None, None])
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        out = scores.astype(v.dtype, copy=False) @ vt
        out = out.reshape(tiles, kv_heads, -1, tile, v.shape[2]).transpose(0, 3, 1, 2, 4)
        return out.reshape(tiles * tile, q.shape[1], v.shape[2])[x.tile_of], (keys, values)

    def rms_norm(self, x: Array, w: Array, eps: float) -> Array:
        f = self.float32(x)
        size = np.vecdot(f, f)[..., None]
        size /= x.shape[-1]
        size += eps
        f = f / np.sqrt(size, out=size)
        return f.astype(x.dtype, copy=False) * w

    def silu(self, x: Array) -> Array:
        e = -x
        with np.errstate(over="ignore"):  # exp(-x) may be inf, and x / inf is the right answer
            np.exp(e, out=e)
        e += 1
        return x / e

    def softmax(self, x: Array) -> Array:
        e = x - x.max(axis=-1, keepdims=True)
        np.exp(e, out=e)
        e /= e.sum(axis=-1, keepdims=True)
        return e

    def versions(self) -> dict[str, str]:
        return {"library": f"numpy {np.__version__}", "device": "cpu"}
