"""NumPy: the backend that needs nothing else, and the definition that every other one is compared with."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import array_api_compat.numpy as xp
import numpy as np
from typing_extensions import override

from hibachi.errors import ConfigError, UnsupportedOperation
from hibachi.tensor.array_backend import Array, ArrayBackend, HostArray, LayerCache
from hibachi.tensor.layout import StepInputs


class NumpyBackend(ArrayBackend):
    name = "numpy"

    def __init__(self, device: Any = None) -> None:
        if device not in (None, "cpu"):
            raise ConfigError(f"NumPy has one device: expected 'cpu' (or None); got {device!r}. Leave it out.")
        super().__init__(xp)
        self._tiled = _small_products_are_fast()
        self.prefers_invariant = self._tiled and type(self) is NumpyBackend

    @override
    def owns(self, t: Any) -> bool:
        return isinstance(t, (np.ndarray, np.generic))  # indexing an array of rank 1 gives a generic

    @override
    def unfit(self, t: Array) -> str | None:
        return "masked" if isinstance(t, np.ma.MaskedArray) else None

    @override
    def put_all(self, arrays: Sequence[HostArray]) -> list[Array]:
        return [a.copy() for a in arrays]

    @override
    def copy(self, t: Array) -> Array:
        return np.array(t, order="C")

    @override
    def quantized(self, how: str) -> ArrayBackend:
        raise UnsupportedOperation(
            f"NumPy has no fast product of integers (OpenBLAS multiplies floats), so weights in {how} would be many "
            f"times slower than float32. Pass quantization=None, or take the backend torch on the CPU, or jax."
        )

    @override
    def put_weight(self, w: HostArray, dtype: str) -> Array:
        # Stored as [in, out], shown as [out, in]: OpenBLAS multiplies small batches up to 2x faster this way round.
        # Or in tiles [n, in, out / n], each small enough for a product with _FEW rows to be a small one.
        size = w.shape[1]
        width = 64 if size <= 640 else 32 if size <= 1280 else 16
        if self._tiled and dtype == "float32" and w.shape[0] % width == 0:
            return np.ascontiguousarray(w.reshape(-1, width, size).transpose(0, 2, 1), dtype=dtype)
        return np.ascontiguousarray(w.T, dtype=dtype).T

    @override
    def weight_rows(self, w: Array, idx: Array) -> Array:
        return w[idx] if w.ndim == 2 else w[idx // w.shape[2], :, idx % w.shape[2]]

    @override
    def take(self, t: Array, idx: Array) -> Array:
        return t[idx]

    @override
    def row_major(self, t: Array) -> Array:
        return np.asarray(t, order="C")

    @override
    def scatter_rows(self, dst: Array, idx: Array, src: Array) -> Array:
        dst[idx] = src
        return dst

    @override
    def storable(self, k: Array, v: Array, dtype: Any) -> tuple[Array, Array]:
        if v.dtype == dtype and np.isfinite(v).all():
            return k, v
        with np.errstate(over="ignore"):  # what the cache's dtype cannot hold is looked for
            return (k, v) if np.isfinite(v.astype(dtype)).all() else super().storable(k, v, dtype)

    @override
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
        (kv_heads, dim), v_dim = k.shape[1:], v.shape[2]
        blocks = x.block_table.shape[1]
        more = self._blocks(blocks, keys.shape[1]) - blocks
        table = np.pad(x.block_table, ((0, 0), (0, more))) if more else x.block_table
        table = table[x.tile_row]  # [N, blocks]
        span = table.shape[1] * keys.shape[1]
        kt = keys[table].reshape(tiles, span, kv_heads, dim).transpose(0, 2, 1, 3)
        vt = values[table].reshape(tiles, span, kv_heads, v_dim).transpose(0, 2, 1, 3)
        qt = self.row_major(q)[x.tile_q].reshape(tiles, tile, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
        scores = self._scores(qt.reshape(tiles, kv_heads, -1, dim), kt)  # [N, kv_heads, group * tile, span]
        scores = self.float32(scores)
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
        scores /= self._totals(scores)
        out = self._weighted(scores.astype(v.dtype, copy=False), vt)
        out = out.reshape(tiles, kv_heads, -1, tile, v_dim).transpose(0, 3, 1, 2, 4)
        return out.reshape(tiles * tile, q.shape[1], v_dim)[x.tile_of], (keys, values)

    def _blocks(self, blocks: int, block_size: int) -> int:
        """How many blocks of each row `attend` looks at, where a table has `blocks`; block 0 fills it up."""
        return blocks

    def _scores(self, q: Array, k: Array) -> Array:
        """q [..., rows, dim] @ k [..., span, dim] turned -> [..., rows, span], in memory row by row."""
        return q @ k.swapaxes(-1, -2)

    def _totals(self, e: Array) -> Array:
        """[..., rows, span] -> [..., rows, 1]: the sum of each row."""
        return e.sum(axis=-1, keepdims=True)

    def _weighted(self, weights: Array, v: Array) -> Array:
        """weights [..., rows, span] @ v [..., span, dim] -> [..., rows, dim]."""
        return weights @ v

    @override
    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        y = x @ w.T if w.ndim == 2 else _multiply_tiles(x, w)
        return y if b is None else y + b

    @override
    def rms_norm(self, x: Array, w: Array, eps: float) -> Array:
        f = self.float32(x)
        size = np.vecdot(f, f)[..., None]
        size /= x.shape[-1]
        size += eps
        f = f / np.sqrt(size, out=size)
        return f.astype(x.dtype, copy=False) * w

    @override
    def silu(self, x: Array) -> Array:
        e = -x
        with np.errstate(over="ignore"):  # exp(-x) may be inf, and x / inf is the right answer
            np.exp(e, out=e)
        e += 1
        return x / e

    @override
    def softmax(self, x: Array) -> Array:
        e = x - x.max(axis=-1, keepdims=True)
        np.exp(e, out=e)
        e /= e.sum(axis=-1, keepdims=True)
        return e

    @override
    def top(self, x: Array, k: int) -> tuple[Array, Array]:
        some = np.argpartition(x, -k, axis=-1)[:, -k:]
        values = np.take_along_axis(x, some, axis=-1)
        order = np.argsort(values, axis=-1)[:, ::-1]
        return np.take_along_axis(values, order, axis=-1), np.take_along_axis(some, order, axis=-1)

    @override
    def invariant(self) -> ArrayBackend:
        if not self.is_plain(NumpyBackend):  # what a class of somebody's own computes, is not ours to replace
            return super().invariant()
        return InvariantNumpyBackend()

    @override
    def versions(self) -> dict[str, str]:
        return {"library": f"numpy {np.__version__}", "device": "cpu"}

    @override
    def fingerprint(self) -> str:
        given = (os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"))
        threads = next(filter(None, given), None) or os.cpu_count()
        return super().fingerprint().replace("; kernels", f", {threads} threads; kernels")


_FEW = 32  # rows
SMALL = 10**6  # multiplications in a product that OpenBLAS takes for a small one
LANES = 32  # the positions that attention looks at are a multiple of this
PIECE = 256  # cached positions that attention multiplies with at once


class InvariantNumpyBackend(NumpyBackend):
    """`NumpyBackend().invariant()`: with kernels whose results do not depend on what else is in the batch.

    OpenBLAS has three ways to multiply, and they round differently: one for a single row, one for small matrices (on
    processors with AVX-512), which adds up each number of the result in order, and one for large ones, in which a row's
    result depends on where it stands. So here every product is cut into small ones of two rows at least. Elsewhere it
    is made of single rows, which takes longer.
    """

    deterministic = True

    def __init__(self, device: Any = None) -> None:
        super().__init__(device)
        self.kernels = "small products" if self._tiled else "single rows"

    @override
    def put_weight(self, w: HostArray, dtype: str) -> Array:
        weight = super().put_weight(w, dtype)
        if weight.ndim == 3 and 2 * weight[0].size > SMALL:
            return np.ascontiguousarray(w.T, dtype=dtype).T
        return weight

    @override
    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        rows = self.row_major(x).reshape(-1, x.shape[-1])
        if w.ndim == 3:
            n, _, width = w.shape
            y = np.empty((len(rows), n * width), np.result_type(x, w))
            _small(rows, w, y.reshape(len(rows), n, width).transpose(1, 0, 2))
        else:
            y = np.matmul(rows[:, None, :], w.T)[:, 0, :]
        y = y.reshape(*x.shape[:-1], y.shape[-1])
        return y if b is None else y + b

    @override
    def _blocks(self, blocks: int, block_size: int) -> int:
        return blocks + -blocks % (LANES // math.gcd(LANES, block_size))

    @override
    def rms_norm(self, x: Array, w: Array, eps: float) -> Array:
        return super().rms_norm(self.row_major(x), w, eps)

    @override
    def layer_norm(self, x: Array, w: Array, b: Array | None, eps: float) -> Array:
        return super().layer_norm(self.row_major(x), w, b, eps)

    @override
    def softmax(self, x: Array) -> Array:
        return super().softmax(self.row_major(x))

    @override
    def _scores(self, q: Array, k: Array) -> Array:
        if not self._tiled:
            return np.matmul(q[..., None, :], k.swapaxes(-1, -2)[..., None, :, :])[..., 0, :]
        # The other way round, as a product with a turned matrix is not a small one. It takes 16 columns at once.
        rows, dim = q.shape[-2:]
        columns = np.zeros((*q.shape[:-2], dim, -(-rows // 16) * 16), q.dtype)
        columns[..., :rows] = q.swapaxes(-1, -2)
        turned = np.empty((*k.shape[:-1], columns.shape[-1]), q.dtype)
        _small(k, columns, turned)
        return np.ascontiguousarray(turned[..., :rows].swapaxes(-1, -2))

    @override
    def _totals(self, e: Array) -> Array:
        # In lanes, as NumPy's sum along a row depends on its length, and behind a short one there are zeros.
        return e.reshape(*e.shape[:-1], -1, LANES).sum(axis=-2).sum(axis=-1, keepdims=True)

    @override
    def _weighted(self, weights: Array, v: Array) -> Array:
        dim = v.shape[-1]
        if self._tiled and dim % 16:  # with few columns, the order of a sum depends on the number of rows
            v = np.concatenate([v, np.zeros((*v.shape[:-1], -dim % 16), v.dtype)], axis=-1)
        out = np.zeros((*weights.shape[:-1], v.shape[-1]), v.dtype)
        part = np.empty_like(out)
        for at in range(0, weights.shape[-1], PIECE):
            some, of = weights[..., at : at + PIECE], v[..., at : at + PIECE, :]
            if self._tiled:
                _small(some, of, part)
            else:
                part = np.matmul(some[..., None, :], of[..., None, :, :])[..., 0, :]
            out += part
        return out[..., :dim]


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


def _small(a: Array, b: Array, out: Array) -> None:
    """a [..., rows, k] @ b [..., k, columns] into out, in small products of two rows or more."""
    rows, most = a.shape[-2], max(2, SMALL // (b.shape[-1] * b.shape[-2]))
    if rows == 1:
        out[...] = np.matmul(np.repeat(a, 2, axis=-2), b)[..., :1, :]
        return
    for i in range(0, rows, most):
        i = min(i, rows - 2)  # not a single row at the end
        np.matmul(a[..., i : i + most, :], b, out=out[..., i : i + most, :])
