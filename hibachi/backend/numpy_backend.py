"""NumPy: the backend that needs nothing else, and the definition that every other one is compared with."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import array_api_compat.numpy as xp
import numpy as np
from typing_extensions import override

from hibachi.backend import masks
from hibachi.backend.array_backend import Array, ArrayBackend, HostArray, LayerCache
from hibachi.backend.attention_terms import by_distance, terms
from hibachi.backend.host_arrays import PackedWeight, address_of
from hibachi.backend.kernels.library import state, why_missing
from hibachi.backend.layout import StepInputs
from hibachi.backend.native import Int4Backend, Int8Backend, NativeBackend, PagedCache
from hibachi.backend.program import whole
from hibachi.errors import ConfigError, UnsupportedOperation


class NumpyBackend(ArrayBackend):
    """native: False goes without hibachi's kernels, which are used wherever they are to be had. They depend on the
    batch in no bit, so the backend is deterministic then. See `hibachi.backend.kernels.library`."""

    name = "numpy"
    native = False
    """hibachi's kernels are used."""

    def __new__(cls, device: Any = None, native: bool | None = None) -> NumpyBackend:
        return object.__new__(_starts_as(native) if cls is NumpyBackend else cls)

    def __getnewargs__(self) -> tuple[Any, bool]:
        return self.device, self.native  # a copy is of the same class

    def __init__(self, device: Any = None, native: bool | None = None) -> None:
        if device not in (None, "cpu"):
            raise ConfigError(f"NumPy has one device: expected 'cpu' (or None); got {device!r}. Leave it out.")
        super().__init__(xp)

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
        made = _QUANTIZED.get(how)
        if made is None or (why := why_missing()):
            raise UnsupportedOperation(
                f"NumPy itself has no fast product of integers; expected {' or '.join(_QUANTIZED)}, with hibachi's "
                f"kernels{'' if made is None else f', which are missing: {why}'}; got {how}. Pass quantization=None."
            )
        return made()

    @override
    def put_weight(self, w: HostArray, dtype: str) -> Array:
        # Stored as [in, out], shown as [out, in]: OpenBLAS multiplies small batches up to 2x faster this way round.
        return np.ascontiguousarray(w.T, dtype=self.dtype(dtype)).T

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
        bias: Array | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, LayerCache]:
        # The kernel of the base class step by step, in half as many calls and without copies of the scores.
        bias, sinks = terms(self, bias, sinks, q.shape[1])
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
        by_head = scores.reshape(tiles, kv_heads, -1, tile, span)
        if bias is not None:
            by_head += by_distance(xp, bias, at - seen, kv_heads)
        np.copyto(by_head, -np.inf, where=hidden[:, None, None])
        most = scores.max(axis=-1, keepdims=True)
        if sinks is not None:
            sinks = sinks.reshape(kv_heads, -1, 1).repeat(tile, axis=1)
            np.maximum(most, sinks, out=most)
        scores -= most
        np.exp(scores, out=scores)
        total = self._totals(scores)
        if sinks is not None:
            total += np.exp(sinks - most)
        scores /= total
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
        y = x @ w.T
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
    def keep_bits(self, x: Array, bits: HostArray) -> Array:
        np.copyto(x, -np.inf, where=masks.forbidden(bits, x.shape))
        return x

    @override
    def invariant(self) -> ArrayBackend:
        if not self.is_plain(NumpyBackend):  # operations of a user's own class are not replaced
            return super().invariant()
        return InvariantNumpyBackend()

    @override
    def versions(self) -> dict[str, str]:
        return {"library": f"numpy {np.__version__}", "device": "cpu"}

    @override
    def fingerprint(self) -> str:
        if self.numerics:
            return super().fingerprint()
        given = (os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"))
        threads = next(filter(None, given), None) or os.cpu_count()
        return super().fingerprint().replace("; kernels", f", {threads} threads; kernels")

    @override
    def remarks(self) -> list[str]:
        return [f"hibachi's kernels: {'' if self.native else 'not in use here; '}{state()}"]


LANES = 32  # sums that the weights of a row are added up in
PIECE = 256  # cached positions that attention multiplies with at once; it looks at a multiple of this


class InvariantNumpyBackend(NumpyBackend):
    """`NumpyBackend(native=False).invariant()`: with kernels whose results do not depend on what else is in the batch.

    A BLAS multiplies a single row always alike, but rows of a matrix as their number and place have it. So products are
    made of single rows, and attention of single rows and pieces of one length, which takes longer.
    """

    deterministic = True
    kernels = "single rows"

    @override
    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        rows = self.row_major(x).reshape(-1, x.shape[-1])
        y = np.matmul(rows[:, None, :], w.T)[:, 0, :].reshape(*x.shape[:-1], w.shape[0])
        return y if b is None else y + b

    @override
    def _blocks(self, blocks: int, block_size: int) -> int:
        return blocks + -blocks % (PIECE // math.gcd(PIECE, block_size))

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
        out = np.empty((*q.shape[:-1], k.shape[-2]), q.dtype)
        for at in range(0, k.shape[-2], PIECE):
            some = k[..., at : at + PIECE, :].swapaxes(-1, -2)
            out[..., at : at + PIECE] = np.matmul(q[..., None, :], some[..., None, :, :])[..., 0, :]
        return out

    @override
    def _totals(self, e: Array) -> Array:
        # In lanes, as NumPy's sum along a row depends on its length, and behind a short one there are zeros.
        return e.reshape(*e.shape[:-1], -1, LANES).sum(axis=-2).sum(axis=-1, keepdims=True)

    @override
    def _weighted(self, weights: Array, v: Array) -> Array:
        out = np.zeros((*weights.shape[:-1], v.shape[-1]), v.dtype)
        for at in range(0, weights.shape[-1], PIECE):
            some, of = weights[..., at : at + PIECE], v[..., at : at + PIECE, :]
            out += np.matmul(some[..., None, :], of[..., None, :, :])[..., 0, :]
        return out


BFLOAT16: np.dtype[Any] = np.dtype([("bfloat16", np.uint16)])
"""NumPy has no such numbers: these are their bits, with which it computes nothing, so that nothing wrong comes out."""


class NativeNumpyBackend(NativeBackend, InvariantNumpyBackend):
    """NumPy's arrays and hibachi's kernels. bfloat16 is for models whose steps are fused: NumPy itself has none.

    Raises NativeUnavailable where there are no kernels.
    """

    kernels = NativeBackend.kernels
    quantizations = ("int8", "int4")

    def __init__(self, device: Any = None, native: bool | None = None) -> None:
        super().__init__(device)
        self.begin()

    @override
    def dtype(self, name: str) -> Any:
        return BFLOAT16 if name == "bfloat16" else np.dtype(super().dtype(name))

    @override
    def address(self, t: Array) -> int:
        return address_of(t)

    @override
    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.empty(shape, dtype)

    @override
    def from_host(self, t: HostArray, dtype: Any) -> Array:
        return t.view(dtype)

    @override
    def strides(self, t: Array) -> tuple[int, ...]:
        return tuple(n // t.itemsize for n in t.strides)

    @override
    def row_major(self, t: Array) -> Array:
        if type(t) is np.ndarray and t.flags.c_contiguous and t.flags.aligned:
            return t  # a tenth of the time that NumPy takes to find that out
        return np.require(t, requirements=["C", "A"])

    @override
    def put(self, a: HostArray, dtype: str | None = None) -> Array:
        if dtype != "bfloat16":
            return super().put(a, dtype)
        if a.dtype == BFLOAT16:
            return a
        bits = np.asarray(a, np.float32, order="C").view(np.uint32)
        near = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16  # to the nearest, ties to even
        return np.where(np.isnan(a), np.uint16(0x7FC0), near.astype(np.uint16)).view(BFLOAT16)

    def _narrow(self, t: Array, dtype: Any) -> Array:
        """float64, which NumPy makes of float32 and integers, as the float32 that was meant."""
        return t.astype(dtype) if t.dtype == np.float64 and dtype == np.float32 else t

    @override
    def _linear(self, x: Array, w: PackedWeight, b: Array | None, dtype: Any, leaves: int = 1) -> Array:
        return super()._linear(self._narrow(x, w.dtype), w, b, dtype, leaves)

    @override
    def attend(
        self, q: Array, k: Array, v: Array, cache: LayerCache, x: StepInputs[Array], **how: Any
    ) -> tuple[Array, LayerCache]:
        if isinstance(cache, PagedCache):
            q, k, v = (self._narrow(t, cache.keys.dtype) for t in (q, k, v))
        return super().attend(q, k, v, cache, x, **how)

    @override
    def suits(self, dtype: str, arch: Any) -> bool:
        return super().suits(dtype, arch) and (dtype != "bfloat16" or (arch is not None and whole(arch)))

    @override
    def fuse(self, decoder: Any) -> Any:
        found = super().fuse(decoder)
        if decoder.dtype == "bfloat16" and (found is None or not whole(decoder.arch)):
            raise UnsupportedOperation(
                "NumPy has no arithmetic in bfloat16, and this model computes some of its steps outside of hibachi's "
                "kernels. Pass dtype='float32', or take the backend torch or jax."
            )
        return found

    @override
    def plain(self) -> ArrayBackend:
        return NumpyBackend(native=False)

    @override
    def get(self, t: Array) -> HostArray:
        if t.dtype != BFLOAT16:
            return super().get(t)
        wide: HostArray = (t.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return wide


class Int8NumpyBackend(Int8Backend, NativeNumpyBackend):
    """`NumpyBackend().quantized("int8")`."""

    kernels = Int8Backend.kernels


class Int4NumpyBackend(Int4Backend, NativeNumpyBackend):
    """`NumpyBackend().quantized("int4")`."""

    kernels = Int4Backend.kernels


_QUANTIZED: dict[str, type[NumpyBackend]] = {"int8": Int8NumpyBackend, "int4": Int4NumpyBackend}


def _starts_as(native: bool | None) -> type[NumpyBackend]:
    if native is None:
        native = why_missing() is None
    return NativeNumpyBackend if native else NumpyBackend
