"""NumPy with kernels whose results do not depend on what else is in the batch.

OpenBLAS has three ways to multiply, and they round differently: one for a single row, one for small matrices (on
processors with AVX-512), which adds up each number of the result in order, and one for large ones, in which a row's
result depends on where it stands. So here every product is cut into small ones of two rows at least. Elsewhere it is
made of single rows, which takes longer.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hibachi.tensor.array_backend import Array, HostArray, LayerCache
from hibachi.tensor.cache import StepInputs
from hibachi.tensor.numpy_backend import NumpyBackend

SMALL = 10**6  # multiplications in a product that OpenBLAS takes for a small one
LANES = 32  # the positions that attention looks at are a multiple of this
PIECE = 256  # cached positions that attention multiplies with at once


class InvariantNumpyBackend(NumpyBackend):
    """`NumpyBackend` with kernels that do not depend on the batch: `NumpyBackend().invariant()`."""

    deterministic = True

    def __init__(self, device: Any = None) -> None:
        super().__init__(device)
        self.kernels = "small products" if self._tiled else "single rows"

    def put_weight(self, w: HostArray, dtype: str) -> Array:
        weight = super().put_weight(w, dtype)
        if weight.ndim == 3 and 2 * weight[0].size > SMALL:
            return np.ascontiguousarray(w.T, dtype=dtype).T
        return weight

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
        # The kernel of the base class, with products in shapes that are safe.
        k, v = self.storable(k, v, cache[1].dtype)
        keys, values = self.write_cache(cache[0], x.slot, k), self.write_cache(cache[1], x.slot, v)
        tiles, tile = x.tile_q.shape
        (kv_heads, dim), v_dim = k.shape[1:], v.shape[2]
        more = -x.block_table.shape[1] % (LANES // math.gcd(LANES, keys.shape[1]))
        table = np.pad(x.block_table, ((0, 0), (0, more)))[x.tile_row]  # [N, blocks]
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
        place, seen = x.pos[x.tile_q][:, :, None], np.arange(span, dtype=np.int32)
        hidden = seen > place if window is None else (seen > place) | (seen <= place - window)
        np.copyto(scores.reshape(tiles, kv_heads, -1, tile, span), -np.inf, where=hidden[:, None, None])
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        # In lanes, as NumPy's sum along a row depends on its length, and behind a short one there are zeros.
        scores /= scores.reshape(*scores.shape[:-1], -1, LANES).sum(axis=-2).sum(axis=-1, keepdims=True)
        weights = scores.astype(v.dtype, copy=False)
        out = self._weighted(weights, vt)
        out = out.reshape(tiles, kv_heads, -1, tile, v_dim).transpose(0, 3, 1, 2, 4)
        return out.reshape(tiles * tile, q.shape[1], v_dim)[x.tile_of], (keys, values)

    def rms_norm(self, x: Array, w: Array, eps: float) -> Array:
        return super().rms_norm(self.row_major(x), w, eps)

    def layer_norm(self, x: Array, w: Array, b: Array | None, eps: float) -> Array:
        return super().layer_norm(self.row_major(x), w, b, eps)

    def softmax(self, x: Array) -> Array:
        return super().softmax(self.row_major(x))

    def _scores(self, q: Array, k: Array) -> Array:
        """q [..., rows, dim] @ k [..., span, dim] turned -> [..., rows, span], in memory row by row."""
        if not self._tiled:
            return np.matmul(q[..., None, :], k.swapaxes(-1, -2)[..., None, :, :])[..., 0, :]
        # The other way round, as a product with a turned matrix is not a small one. It takes 16 columns at once.
        rows, dim = q.shape[-2:]
        columns = np.zeros((*q.shape[:-2], dim, -(-rows // 16) * 16), q.dtype)
        columns[..., :rows] = q.swapaxes(-1, -2)
        turned = np.empty((*k.shape[:-1], columns.shape[-1]), q.dtype)
        _small(k, columns, turned)
        return np.ascontiguousarray(turned[..., :rows].swapaxes(-1, -2))

    def _weighted(self, weights: Array, v: Array) -> Array:
        """weights [..., rows, span] @ v [..., span, dim] -> [..., rows, dim]."""
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


def _small(a: Array, b: Array, out: Array) -> None:
    """a [..., rows, k] @ b [..., k, columns] into out, in small products of two rows or more."""
    rows, most = a.shape[-2], max(2, SMALL // (b.shape[-1] * b.shape[-2]))
    if rows == 1:
        out[...] = np.matmul(np.repeat(a, 2, axis=-2), b)[..., :1, :]
        return
    for i in range(0, rows, most):
        i = min(i, rows - 2)  # not a single row at the end
        np.matmul(a[..., i : i + most, :], b, out=out[..., i : i + most, :])
