"""NumPy: the backend that needs nothing else, and the definition that every other one is compared with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from hibachi.errors import ConfigError, UnsupportedOperation
from hibachi.tensor.array_backend import Array, ArrayBackend, HostArray, LayerCache
from hibachi.tensor.cache import StepInputs


class NumpyBackend(ArrayBackend):
    name = "numpy"

    def __init__(self, device: Any = None) -> None:
        if device not in (None, "cpu"):
            raise ConfigError(f"NumPy has one device: expected 'cpu' (or None); got {device!r}. Leave it out.")
        super().__init__(xp)
        self._tiled = _small_products_are_fast()
        self.prefers_invariant = self._tiled and type(self) is NumpyBackend

    def owns(self, t: Any) -> bool:
        return isinstance(t, (np.ndarray, np.generic))  # indexing an array of rank 1 gives a generic

    def unfit(self, t: Array) -> str | None:
        return "masked" if isinstance(t, np.ma.MaskedArray) else None

    def put_all(self, arrays: Sequence[HostArray]) -> list[Array]:
        return [a.copy() for a in arrays]

    def copy(self, t: Array) -> Array:
        return np.array(t, order="C")

    def quantized(self, how: str) -> ArrayBackend:
        raise UnsupportedOperation(
            f"NumPy has no fast product of integers (OpenBLAS multiplies floats), so weights in {how} would be many "
            f"times slower than float32. Pass quantization=None, or take the backend torch on the CPU, or jax."
        )

    def put_weight(self, w: HostArray, dtype: str) -> Array:
        # Stored as [in, out], shown as [out, in]: OpenBLAS multiplies small batches up to 2x faster this way round.
        # Or in tiles [n, in, out / n], each small enough for a product with _FEW rows to be a small one.
        size = w.shape[1]
        width = 64 if size <= 640 else 32 if size <= 1280 else 16
        if self._tiled and dtype == "float32" and w.shape[0] % width == 0:
            return np.ascontiguousarray(w.reshape(-1, width, size).transpose(0, 2, 1), dtype=dtype)
        return np.ascontiguousarray(w.T, dtype=dtype).T

    def weight_rows(self, w: Array, idx: Array) -> Array:
        return w[idx] if w.ndim == 2 else w[idx // w.shape[2], :, idx % w.shape[2]]

    def take(self, t: Array, idx: Array) -> Array:
        return t[idx]

    def row_major(self, t: Array) -> Array:
        return np.asarray(t, order="C")

    def scatter_rows(self, dst: Array, idx: Array, src: Array) -> Array:
        dst[idx] = src
        return dst

    def storable(self, k: Array, v: Array, dtype: Any) -> tuple[Array, Array]:
        if v.dtype == dtype and np.isfinite(v).all():
            return k, v
        with np.errstate(over="ignore"):  # what the cache's dtype cannot hold is looked for
            return (k, v) if np.isfinite(v.astype(dtype)).all() else super().storable(k, v, dtype)

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        cache: LayerCache,
        x: StepInputs[Array],
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> tuple[Array, LayerCache]:
        # The kernel of the base class step by step, in half as many calls and without copies of the scores.
        k, v = self.storable(k, v, cache[1].dtype)
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
        if softcap is not None:
            scores /= softcap
            np.tanh(scores, out=scores)
            scores *= softcap
        at, seen = x.pos[x.tile_q][:, :, None], np.arange(span, dtype=np.int32)
        hidden = seen > at if window is None else (seen > at) | (seen <= at - window)
        np.copyto(scores.reshape(tiles, kv_heads, -1, tile, span), -np.inf, where=hidden[:, None, None])
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        out = scores.astype(v.dtype, copy=False) @ vt
        out = out.reshape(tiles, kv_heads, -1, tile, v.shape[2]).transpose(0, 3, 1, 2, 4)
        return out.reshape(tiles * tile, q.shape[1], v.shape[2])[x.tile_of], (keys, values)

    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        y = x @ w.T if w.ndim == 2 else _multiply_tiles(x, w)
        return y if b is None else y + b

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

    def top(self, x: Array, k: int) -> tuple[Array, Array]:
        some = np.argpartition(x, -k, axis=-1)[:, -k:]
        values = np.take_along_axis(x, some, axis=-1)
        order = np.argsort(values, axis=-1)[:, ::-1]
        return np.take_along_axis(values, order, axis=-1), np.take_along_axis(some, order, axis=-1)

    def invariant(self) -> ArrayBackend:
        from hibachi.tensor.numpy_invariant import InvariantNumpyBackend  # it inherits from this class

        if type(self) is not NumpyBackend:  # what a class of somebody's own computes, is not ours to replace
            return super().invariant()
        return InvariantNumpyBackend()

    def versions(self) -> dict[str, str]:
        return {"library": f"numpy {np.__version__}", "device": "cpu"}

    def fingerprint(self) -> str:
        given = (os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"))
        threads = next(filter(None, given), None) or os.cpu_count()
        return super().fingerprint().replace("; kernels", f", {threads} threads; kernels")


_FEW = 32  # rows


def _small_products_are_fast() -> bool:
    """Does NumPy multiply small matrices without copying them first? OpenBLAS does, on processors with AVX-512.

    Otherwise it copies the whole weight at each product, which for few rows takes longer than the product.
    """
    config = np.show_config(mode="dicts")
    simd, blas = config.get("SIMD Extensions", {}), config.get("Build Dependencies", {}).get("blas", {})
    found = {*simd.get("baseline", ()), *simd.get("found", ())}
    return "openblas" in blas.get("name", "") and bool(found & {"X86_V4", "AVX512_SKX"})


def _multiply_tiles(x: Array, w: Array) -> Array:
    """x [..., in], w [n, in, width] -> [..., n * width]."""
    n, size, width = w.shape
    rows = x.reshape(-1, size)
    if len(rows) > _FEW:  # one product, by all threads, is worth the copy
        y = rows @ w.transpose(1, 0, 2).reshape(size, -1)
    else:
        y = np.empty((len(rows), n * width), np.result_type(x, w))
        np.matmul(rows, w, out=y.reshape(len(rows), n, width).transpose(1, 0, 2))
    return y.reshape(*x.shape[:-1], n * width)
