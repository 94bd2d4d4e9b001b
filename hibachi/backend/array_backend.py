"""A backend derived from an array-API namespace: correct on any library, overridden where a library does better.

The first half are the nine operations with their checks; the second half is what the engine and the decoder need.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from typing_extensions import override

from hibachi.backend import masks
from hibachi.backend.attention_terms import by_distance, terms
from hibachi.backend.group import MOST_LEAVES, RankGroup, RankPlace, check_leaves, share, tree
from hibachi.backend.layout import Paged, State, StepInputs
from hibachi.backend.library import Library
from hibachi.backend.packing import Rows, joined
from hibachi.errors import ConfigError, InvalidTensorOperation, UnsupportedOperation

Array: TypeAlias = Any  # an array of the library below
LayerCache: TypeAlias = Any  # what make_cache returned for a layer; private to the backend
HostArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def array_type(example: Any) -> Any:
    """What arrays of the library of this one are, for `isinstance`: NumPy's indexing and sums give scalars as well."""
    return (np.ndarray, np.generic) if type(example) is np.ndarray else type(example)


class ArrayBackend(Library):
    """All operations of a backend over one array-API namespace `xp` (2023.12 or newer).

    A new library is served by `ArrayBackend(namespace)` as it is; subclasses override what is faster natively.
    """

    xp: Any
    device: Any

    block_size: int = 16
    """Positions in a cache block, where the user does not say."""
    draws: bool = False
    """`draw` and `mass` are to be called: whose parameters rows have makes no difference to them."""
    immutable: bool = False
    """No array is ever written to, so what a call has returned stays as it is."""
    quantization: str = "none"
    """What `put_weight` makes of matrices: "none", the dtype that it is given; else as in `quantized`."""
    quantizations: tuple[str, ...] = ()
    """What `quantized` can do here."""
    leaves: int = 1
    """Into how many sums products of `linear_reduce` are cut, whoever has them: see `hibachi.backend.group`."""
    group: RankGroup | None = None
    """The processes that compute a model together, this one among them; None means it is alone."""

    def __init__(self, xp: Any, *, name: str | None = None, device: Any = None) -> None:
        self.xp, self.device = xp, device
        self.name = name or (self.name if type(self) is not ArrayBackend else xp.__name__)
        self._array_type: Any = array_type(xp.zeros((), dtype=xp.int32))
        self._programs: dict[Hashable, Callable[..., Any]] = {}

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, device={str(self.device) if self.device else 'default'})"

    @override
    def __getstate__(self) -> dict[str, Any]:
        """What a copy begins with: it may be given another `compile`, so it makes its own programs."""
        return self.__dict__ | {"_programs": {}}

    @property
    def draw_rows(self) -> int | None:
        """Fixed batch size for sampling, because a draw's bits may depend on it. None means any size.

        Greedy tokens do not depend on it, and are taken of all rows at once.
        """
        return self.shapes.sizes[0] if self.shapes.sizes else None

    def owns(self, t: Any) -> bool:
        """Is this an array of this library?"""
        return isinstance(t, self._array_type)

    def is_plain(self, cls: type[ArrayBackend]) -> bool:
        """Whether this is exactly a `cls`: not a user's subclass, and without kernels chosen from elsewhere."""
        return type(self) is cls and self.kernels == cls.kernels

    def unfit(self, t: Array) -> str | None:
        """What keeps an array of this library from being computed with like any other ("sparse"); None means nothing
        does."""
        return None

    @classmethod
    def for_array(cls, t: Any) -> ArrayBackend | None:
        """A backend for this array's library and device, or None if the array is foreign."""
        make: Any = cls  # subclasses bind their namespace
        backend: ArrayBackend = make()
        return backend if backend.owns(t) else None

    # ---- the nine operations -----------------------------------------------------------------------------------

    def shape(self, t: Array) -> tuple[int, ...]:
        self._arrays("shape", t)
        return tuple(int(n) for n in t.shape)

    def cat(self, ts: Sequence[Array], dim: int) -> Array:
        if not isinstance(ts, (list, tuple)) or not ts:
            got = "none" if isinstance(ts, (list, tuple)) else type(ts).__qualname__
            raise InvalidTensorOperation(
                "cat", expected="a list of arrays", got=got, mend="Pass at least one, in a list"
            )
        first = self.shape(self._arrays("cat", *ts))
        self._dim("cat", first, dim)
        for t in ts[1:]:
            shape = self.shape(t)
            if len(shape) != len(first) or any(
                a != b for d, (a, b) in enumerate(zip(first, shape, strict=True)) if d != dim
            ):
                raise InvalidTensorOperation(
                    "cat",
                    expected=f"shapes equal to {first} except in dimension {dim}",
                    got=f"{shape}",
                    mend="Pad, slice or unsqueeze the arrays before joining them",
                )
        self._one_dtype("cat", ts)
        return self.xp.concat(ts, axis=int(dim))

    def eq(self, a: Array, b: Array) -> Array:
        self._arrays("eq", a, b)
        if self.shape(a) != self.shape(b):
            raise InvalidTensorOperation(
                "eq",
                expected=f"two arrays of shape {self.shape(a)}",
                got=f"{self.shape(b)}",
                mend="Repeat the smaller one first: nothing is broadcast",
            )
        self._one_dtype("eq", [a, b])
        return a == b

    def vectorize_dim(self, t: Array, dim: int) -> list[Array]:
        self._dim("vectorize_dim", self.shape(self._arrays("vectorize_dim", t)), dim)
        return list(self.xp.unstack(t, axis=int(dim))) if t.shape[dim] else []

    def slice(self, t: Array, dim: int, start: int, length: int) -> Array:
        shape = self.shape(self._arrays("slice", t))
        self._dim("slice", shape, dim)
        if not (_is_int(start) and _is_int(length) and start >= 0 and length >= 0 and start + length <= shape[dim]):
            raise InvalidTensorOperation(
                "slice",
                expected=f"start >= 0, length >= 0 and start + length <= {shape[dim]} (size of dimension {dim})",
                got=f"start {start!r}, length {length!r} on shape {shape}",
                mend="Take a range inside the array",
            )
        return t[(slice(None),) * dim + (slice(start, start + length), ...)]

    def idx_where_all_true(self, t: Array, dim: int) -> list[int]:
        shape = self.shape(self._arrays("idx_where_all_true", t))
        self._dim("idx_where_all_true", shape, dim)
        if not self.xp.isdtype(t.dtype, "bool"):
            raise InvalidTensorOperation(
                "idx_where_all_true",
                expected="an array of bool",
                got=f"dtype {t.dtype}",
                mend="Compare first, for example with eq",
            )
        rest = tuple(d for d in range(len(shape)) if d != dim)
        rows = self.xp.all(t, axis=rest) if rest else t
        return [int(i) for i in np.flatnonzero(self.get(rows))]

    def pop(self, t: Array, dim: int, index: int) -> Array:
        shape = self.shape(self._arrays("pop", t))
        self._dim("pop", shape, dim)
        if not (_is_int(index) and 0 <= index < shape[dim]):
            raise InvalidTensorOperation(
                "pop",
                expected=f"0 <= index < {shape[dim]}",
                got=f"index {index!r}",
                mend=f"Index {index} is out of bounds for dimension {dim} with size {shape[dim]}: take one inside",
            )
        before = self.slice(t, dim, 0, index)
        return self.cat([before, self.slice(t, dim, index + 1, shape[dim] - index - 1)], dim)

    def repeat(self, t: Array, dim: int, times: int) -> Array:
        shape = self.shape(self._arrays("repeat", t))
        self._dim("repeat", shape, dim)
        if not (_is_int(times) and times >= 0):
            raise InvalidTensorOperation(
                "repeat",
                expected="times >= 0",
                got=f"times {times!r}",
                mend="Pass how often the array is laid down",
            )
        return self.xp.tile(t, tuple(int(times) if d == dim else 1 for d in range(len(shape))))

    def unsqueeze(self, t: Array, dim: int) -> Array:
        rank = len(self.shape(self._arrays("unsqueeze", t)))
        if not (_is_int(dim) and 0 <= dim <= rank):
            raise InvalidTensorOperation(
                "unsqueeze",
                expected=f"0 <= dim <= {rank}",
                got=f"dim {dim!r}",
                mend="Dimensions count from the left",
            )
        return self.xp.expand_dims(t, axis=int(dim))

    def _arrays(self, op: str, *ts: Any) -> Any:
        """Check that all are arrays of this library; returns the first."""
        for t in ts:
            if not self.owns(t):
                raise InvalidTensorOperation(
                    op,
                    expected=f"an array of {self.name}",
                    got=f"{type(t).__module__}.{type(t).__qualname__}",
                    mend="Convert it with backend.put(numpy_array)",
                )
        return ts[0]

    def _dim(self, op: str, shape: tuple[int, ...], dim: int) -> None:
        if not (_is_int(dim) and 0 <= dim < len(shape)):
            raise InvalidTensorOperation(
                op,
                expected=f"0 <= dim < {len(shape)}" if shape else "an array of rank 1 or higher",
                got=f"dim {dim!r} on shape {shape}",
                mend="Dimensions count from the left; negative ones are refused",
            )

    def _one_dtype(self, op: str, ts: Sequence[Array]) -> None:
        for t in ts[1:]:
            if t.dtype != ts[0].dtype:
                raise InvalidTensorOperation(
                    op,
                    expected=f"one dtype, {ts[0].dtype} as in the first array",
                    got=f"{t.dtype}",
                    mend="Convert the arrays first: nothing is promoted",
                )

    # ---- movement ----------------------------------------------------------------------------------------------

    def dtype(self, name: str) -> Any:
        """The library's dtype of this name ("float32"). Raises UnsupportedOperation where it has none."""
        found = getattr(self.xp, name, None)
        if found is None:
            raise UnsupportedOperation(f"{self.name} has no dtype {name!r}; choose another, for example float32.")
        return found

    def put(self, a: HostArray, dtype: str | None = None) -> Array:
        """Host array -> array of this library on its device, cast to `dtype` if given."""
        return self.xp.asarray(a, dtype=self.dtype(dtype) if dtype else None, device=self.device)

    def put_all(self, arrays: Sequence[HostArray]) -> list[Array]:
        """`put` of several small integer arrays. What comes back may be written to: it shares memory neither with
        `arrays` nor among itself."""
        return [self.put(a.copy()) for a in arrays]

    def get(self, t: Array) -> HostArray:
        """Array -> host array; waits for the device."""
        return np.asarray(t)

    def peek(self, t: Array) -> HostArray | None:
        """`get` if that waits for nothing; None: a device may still be at work on it, or a compiler traces it."""
        return None if self.asynchronous or self.shapes.compiled else self.get(t)

    def copy(self, t: Array) -> Array:
        """The same numbers in memory of their own, row by row."""
        return self.xp.asarray(self.row_major(t), copy=True)

    def row_major(self, t: Array) -> Array:
        """The same array, in memory row by row ("C order"), copied if it is not.

        Libraries sum another way where it is not, and an array of one row always is: with the outputs of
        `(w @ x.T).T`, a request would get other bits alone than in company.
        """
        return self.xp.reshape(self.xp.reshape(t, (-1,)), t.shape)

    def fetch(self, arrays: Sequence[Array]) -> Callable[[], list[HostArray]]:
        """Begin to copy arrays to the host; what is returned gives them, and waits for what was asked for until now."""
        return lambda: [self.get(t) for t in arrays]

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        return self.xp.zeros(shape, dtype=self.dtype(dtype), device=self.device)

    def put_weight(self, w: HostArray, dtype: str) -> Array:
        """Like `put`, for a matrix [out, in] that `linear` will multiply with.

        The form is the backend's own: only `linear` and `weight_rows` know it.
        """
        return self.put(w, dtype)

    def put_rows(self, parts: Sequence[Rows], dtype: str) -> Array:
        """`put_weight` of matrices [n, in] one below the other, of which those in files are read here. A backend that
        does more with them, or whose `put_weight` is to see none of them, has its own.
        """
        return self.put_weight(joined(parts), dtype)

    def put_vocabulary(self, parts: Sequence[Rows], dtype: str) -> Array:
        """`put_rows` of embeddings or the head, whose rows tokens are told apart by: see `Int4Backend`."""
        return self.put_rows(parts, dtype)

    def put_precise(self, w: HostArray, dtype: str) -> Array:
        """`put_weight` of a small matrix on which much depends, such as a router: it is never quantised."""
        return self.put_weight(w, dtype)

    def put_columns(self, parts: Sequence[Rows], dtype: str, first: int, end: int) -> Array:
        """`put_rows`, of which this process has columns `first` to before `end`. What is rounded is rounded as in the
        whole matrix.
        """
        return self.put_weight(joined(parts)[:, first:end], dtype)

    def weight_rows(self, w: Array, idx: Array) -> Array:
        """Rows `idx` of any shape of a weight [out, in] from `put_weight`: idx.shape + (in,).

        So an embedding that is the output head as well is kept once.
        """
        return self.take(w, idx)

    def take(self, t: Array, idx: Array) -> Array:
        """Rows of `t` [n, ...] at integer indices `idx` of any shape: idx.shape + t.shape[1:]."""
        rows = self.xp.take(t, self.xp.reshape(idx, (-1,)), axis=0)
        return self.xp.reshape(rows, (*idx.shape, *t.shape[1:]))

    def scatter_rows(self, dst: Array, idx: Array, src: Array) -> Array:
        """`dst` [n, ...] with rows `idx` [m] replaced by `src` [m, ...]; of a repeated index, any. May reuse `dst`.

        This default never writes, so that it is right on immutable arrays as well; it costs a pass over `dst`.
        """
        if not idx.shape[0]:
            return dst
        source = np.full(dst.shape[0], -1, np.int64)
        source[self.get(idx)] = np.arange(idx.shape[0])
        hit = self.xp.reshape(self.put(source >= 0), (-1, *(1,) * (dst.ndim - 1)))
        return self.xp.where(hit, self.take(src, self.put(np.maximum(source, 0))), dst)

    # ---- cache and attention -----------------------------------------------------------------------------------

    def make_cache(self, spec: Paged | State, *, blocks: int, block_size: int, rows: int, dtype: str) -> LayerCache:
        """Memory of one layer. Paged: keys [blocks, block_size, kv_heads, k_dim] and values; State: [rows, *shape]."""
        dtype = spec.dtype or dtype
        if isinstance(spec, State):
            return self.zeros((rows, *spec.shape), dtype)
        shape = (blocks, block_size, spec.kv_heads)
        return self.zeros((*shape, spec.k_dim), dtype), self.zeros((*shape, spec.v_dim), dtype)

    def positions(self, cache: LayerCache, blocks: Sequence[int] | None = None) -> list[HostArray]:
        """Keys and values of a paged layer by position: float32 copies [blocks, block_size, kv_heads, dim] on the host;
        []: it is not one that `make_cache` made. blocks: only these, in this order; None means all."""
        if not isinstance(cache, tuple) or not all(self.owns(half) for half in cache):
            return []
        some = cache if blocks is None else [self._some_blocks(half, blocks) for half in cache]
        return [np.array(self.get(self.float32(half))) for half in some]

    def _some_blocks(self, half: Array, blocks: Sequence[int] | None) -> Array:
        """Some blocks of an array [blocks, ...], or all."""
        return half if blocks is None else self.take(half, self.put(np.array(blocks, np.int32)))

    def copy_blocks(self, cache: LayerCache, source: Array, to: Array) -> LayerCache:
        """A paged layer whose blocks `to` [m] have got what its blocks `source` [m] have, int32; blocks of the two
        differ, but for block 0. May reuse the cache's memory. Raises UnsupportedOperation for a layer that
        `make_cache` did not make.
        """
        return self.with_halves(cache, [self.copy_rows(half, source, to) for half in self.halves(cache)])

    def read_blocks(self, cache: LayerCache, blocks: Array) -> list[Array]:
        """What a paged layer has in its blocks int32 [n], as its bits lie: arrays [n, ...] in memory of their own, of
        dtypes that `get` keeps. Raises UnsupportedOperation as `halves` does.
        """
        return [self.bits(self.take(half, blocks)) for half in self.halves(cache)]

    def write_blocks(self, cache: LayerCache, blocks: Array, held: Sequence[Array]) -> LayerCache:
        """A paged layer whose blocks int32 [n] hold what `read_blocks` gave of such a layer. Of a repeated block, any.
        May reuse the cache's memory.
        """
        halves = zip(self.halves(cache), held, strict=True)
        return self.with_halves(cache, [self.scatter_rows(h, blocks, self.of_bits(b, h)) for h, b in halves])

    def halves(self, cache: LayerCache) -> Sequence[Array]:
        """The arrays [blocks, ...] of which a paged layer consists. Raises UnsupportedOperation for a layer that
        `make_cache` did not make.
        """
        if isinstance(cache, tuple) and all(self.owns(half) for half in cache):
            return cache
        if callable(own := getattr(cache, "halves", None)):  # a layout of its own
            found: Sequence[Array] = own()
            return found
        raise UnsupportedOperation(
            f"{self!r} keeps keys and values in a form of its own: expected it to have `halves()` and "
            f"`with_halves(halves)`. Give it both: sequences go on from one another so, and from what tiers keep."
        )

    def with_halves(self, cache: LayerCache, halves: Sequence[Array]) -> LayerCache:
        """A paged layer like this one, of these arrays."""
        return tuple(halves) if isinstance(cache, tuple) else cache.with_halves(halves)

    def bits(self, t: Array) -> Array:
        """The same memory in a dtype that NumPy has."""
        return t

    def of_bits(self, t: Array, like: Array) -> Array:
        """The array of the dtype of `like` that `bits` made `t` of."""
        return t

    def copy_rows(self, array: Array, source: Array, to: Array) -> Array:
        """`array` [n, ...] whose rows `to` [m] have got what its rows `source` [m] have. May reuse its memory."""
        return self.scatter_rows(array, to, self.take(array, source))

    def write_cache(self, cache: Array, slot: Array, rows: Array) -> Array:
        """One half of a paged cache [blocks, block_size, ...] with positions `slot` [T] set to `rows` [T, ...]."""
        flat = self.xp.reshape(cache, (-1, *cache.shape[2:]))
        return self.xp.reshape(self.scatter_rows(flat, slot, rows), cache.shape)

    def storable(self, k: Array, v: Array, dtype: Any) -> tuple[Array, Array]:
        """New keys and values [T, kv_heads, dim] as `attend` writes them: a value that is not finite in the cache's
        dtype as zeros, and its key as NaN.

        So it makes NaN of what sees it, and of nothing else. The scores of hidden positions are replaced, but their
        values are multiplied by 0, and 0 * NaN is NaN: of what another request left where a row has not written yet,
        of padding in block 0, and of the tokens that come later in the same chunk.
        """
        xp = self.xp
        good = xp.all(xp.isfinite(xp.astype(v, dtype, copy=False)), axis=-1, keepdims=True)
        nan, zero = (xp.full((1, 1, 1), x, dtype=t.dtype, device=self.device) for x, t in ((math.nan, k), (0.0, v)))
        return xp.where(good, k, nan), xp.where(good, v, zero)

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
        """Write k and v into the paged cache at x.slot, then causal attention of q over the row's whole cache.

        q [T, heads, k_dim], k [T, kv_heads, k_dim], v [T, kv_heads, v_dim]; heads is a multiple of kv_heads.
        scale: of the scores; None means k_dim ** -0.5. window: a query sees the last `window` positions, its own among
        them; None means all. softcap: scores become softcap * tanh(score / softcap). Returns ([T, heads, v_dim],
        cache).

        bias: floating [heads, n], n >= 2, added to the scores after that: entry d where the query is d positions after
        the key. Beyond the last entry it goes on in a straight line through the last two. So [0, -slope] is ALiBi
        (Press et al. 2022), and a table that ends with the same number twice holds it, as T5's (Raffel et al. 2020).
        sinks: floating [heads], scores of a position without a value, which takes its share of the softmax (Xiao et al.
        2024); neither scaled nor capped nor biased. Both are computed with in float32. Raises ValueError for others.

        The order is part of the contract: requests of one step may share blocks that are written in that step.

        So is that positions which are hidden from a token have no influence on it, whatever was written there: blocks
        are not cleared between two owners, and what the last one left may be NaN. See `storable`.

        The reference kernel gathers the blocks of each query tile and folds the query group into the matrix rows.
        """
        xp = self.xp
        heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
        group = heads // kv_heads
        bias, sinks = terms(self, bias, sinks, heads)
        k, v = self.storable(k, v, cache[1].dtype)
        keys, values = self.write_cache(cache[0], x.slot, k), self.write_cache(cache[1], x.slot, v)
        tiles, tile = x.tile_q.shape
        table = self.take(x.block_table, x.tile_row)  # [N, blocks]
        span = table.shape[1] * keys.shape[1]
        kt = xp.reshape(self.take(keys, table), (tiles, span, kv_heads, dim))
        vt = xp.reshape(self.take(values, table), (tiles, span, kv_heads, v.shape[2]))
        kt, vt = xp.permute_dims(kt, (0, 2, 3, 1)), xp.permute_dims(vt, (0, 2, 1, 3))
        qt = xp.reshape(self.take(q, x.tile_q), (tiles, tile, kv_heads, group, dim))
        qt = xp.reshape(xp.permute_dims(qt, (0, 2, 3, 1, 4)), (tiles, kv_heads, group * tile, dim))
        scores = self.float32(xp.matmul(qt, kt)) * (dim**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = xp.tanh(scores / softcap) * softcap
        at = self.take(x.pos, x.tile_q)[:, :, None]  # [N, tile, 1] position of each query
        seen = self._positions(span)[None, None, :]
        hidden = seen > at if window is None else xp.logical_or(seen > at, seen <= at - window)
        scores = xp.reshape(scores, (tiles, kv_heads, group, tile, span))
        if bias is not None:
            scores = scores + by_distance(xp, bias, at - seen, kv_heads)
        scores = xp.where(hidden[:, None, None, :, :], self._scalar(-math.inf), scores)
        if sinks is None:
            weights = self.softmax(scores)
        else:
            sink = xp.broadcast_to(xp.reshape(sinks, (1, kv_heads, group, 1, 1)), (*scores.shape[:-1], 1))
            weights = self.softmax(xp.concat([scores, sink], axis=-1))[..., :span]
        weights = xp.astype(weights, v.dtype)
        out = xp.matmul(xp.reshape(weights, (tiles, kv_heads, group * tile, span)), vt)
        out = xp.permute_dims(xp.reshape(out, (tiles, kv_heads, group, tile, v.shape[2])), (0, 3, 1, 2, 4))
        return self.take(xp.reshape(out, (tiles * tile, heads, v.shape[2])), x.tile_of), (keys, values)

    def _positions(self, n: int) -> Array:
        return self.xp.arange(n, dtype=self.xp.int32, device=self.device)

    def _scalar(self, value: float) -> Array:
        # Made on the device: what is copied to it from the host cannot be recorded as a part of a step.
        return self.xp.full((), value, dtype=self.xp.float32, device=self.device)

    # ---- math --------------------------------------------------------------------------------------------------

    def float32(self, x: Array) -> Array:
        return self.xp.astype(x, self.xp.float32, copy=False)

    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        """x [..., in], w [out, in] (from `put_weight`), b [out] -> [..., out]."""
        y = self.xp.matmul(x, self.xp.matrix_transpose(w))
        return y if b is None else y + b

    def in_leaves(self, leaves: int, group: RankGroup | None = None) -> Self:
        """The same backend with `linear_reduce` cut so. Raises UnsupportedOperation."""
        found = copy.copy(self)
        found.leaves, found.group = leaves, group
        if leaves > 1 and found.numerics is not None:
            found.numerics = f"{found.numerics}/{leaves}"
        return found

    def join(self, size: int, stages: int, timeout: float | None, opening: bytes) -> RankGroup:
        """Meet the other processes that compute a model with this one, `size` in each of so many stages; start them if
        nobody has.

        timeout: seconds that one of them may be late. opening: pickled (function, arguments, keyword arguments) that a
        started process calls. Raises UnsupportedOperation, ConfigError.
        """
        raise UnsupportedOperation(
            f"A model over several processes takes the backend torch; got {self!r}. Pass backend='torch', or "
            f"tensor_parallel_size=1 and pipeline_parallel_size=1."
        )

    def together(
        self,
        size: int,
        leaves: int | None = None,
        *,
        stages: int = 1,
        timeout: float | None = 120.0,
        opening: bytes = b"",
    ) -> Self:
        """This backend as that of one of `size` processes that compute each stage of a model together, whose sums are
        cut into so many leaves; None means one each. Other arguments and errors as of `join`.
        """
        leaves = check_leaves(leaves, size)
        return self.in_leaves(leaves, self.join(size, stages, timeout, opening) if size * stages > 1 else None)

    @property
    def place(self) -> RankPlace:
        """Where this process stands among those that compute a model together."""
        return RankPlace(0, 1, 0, 1) if self.group is None else self.group.place

    def shard(self, params: Mapping[str, HostArray], specs: Mapping[str, str], dtype: str) -> dict[str, Array]:
        """The part of a model's params that this process has.

        specs: by name "rows", of a matrix [out, in] or a vector whose outputs this process has a share of; "columns",
        of a matrix that `linear_reduce` multiplies with; "matrix", whole, for `linear`. Others are whole as well.

        Raises ConfigError for columns that cannot be cut into the leaves.
        """
        _, _, rank, size = self.place
        found = {}
        for name, array in params.items():
            how = specs.get(name, "")
            if how == "columns" and array.shape[-1] % self.leaves:
                fit = [n for n in range(1, MOST_LEAVES + 1) if array.shape[-1] % n == 0]
                raise ConfigError(
                    f"tp_leaves={self.leaves}: the columns of {name} are cut into as many equal parts; it has "
                    f"{array.shape[-1]}. Expected one of {', '.join(map(str, fit))}."
                )
            mine = share(array.shape[-1 if how == "columns" else 0], rank, size)
            if how == "columns":
                found[name] = self.put_columns([array], dtype, mine.start, mine.stop)
            else:
                part = array[mine] if how == "rows" else array
                matrix = part.ndim == 2 and how in ("rows", "matrix")
                found[name] = self.put_weight(part, dtype) if matrix else self.put(part, dtype)
        return found

    def gather(self, x: Array, columns: int) -> Array:
        """What each process has of an output [n, columns], such as logits, side by side; on rank 0, which reads it."""
        return x if self.group is None or self.place.tp_size == 1 else self.group.gather(x, columns)

    @property
    def local_leaves(self) -> int:
        """Those of this process."""
        return self.leaves // self.place.tp_size

    def linear_reduce(self, x: Array, w: Array, b: Array | None = None) -> Array:
        """`linear` of which each process of a stage has some columns, of x and of w (from `put_columns`): the sums of
        the leaves are float32, are added up over these processes (`hibachi.backend.group`), and rounded once.
        """
        if self.leaves == 1:
            return self.linear(x, w, b)
        if self.group is None or self.place.tp_size == 1:
            return self.linear_leaves(x, w, b)
        y = self.group.sum(self.linear_leaves(x, w, wide=True))
        return self.xp.astype(y if b is None else y + self.float32(b), x.dtype, copy=False)

    def linear_leaves(self, x: Array, w: Array, b: Array | None = None, *, wide: bool = False) -> Array:
        """The columns of this process, as a tree of `local_leaves`. wide: in float32."""
        y = tree(self._leaves(x, w, self.local_leaves))
        y = y if b is None else y + self.float32(b)
        return y if wide else self.xp.astype(y, x.dtype, copy=False)

    def _leaves(self, x: Array, w: Array, leaves: int) -> list[Array]:
        f = self.float32
        return [self.linear(f(x[..., span]), f(w[:, span])) for span in _spans(x, leaves)]

    def logits(self, x: Array, w: Array, b: Array | None = None) -> Array:
        """`linear` in float32: of an output head. Not rounded to the dtype of x where the library can."""
        return self.float32(self.linear(x, w, b))

    def rms_norm(self, x: Array, w: Array, eps: float) -> Array:
        """x / sqrt(mean(x^2) + eps) * w over the last axis, computed in float32 (Zhang & Sennrich 2019)."""
        f = self.float32(x)
        scaled = f / self.xp.sqrt(self.xp.mean(f * f, axis=-1, keepdims=True) + eps)
        return self.xp.astype(scaled, x.dtype, copy=False) * w

    def rms_norm_reduce(self, xs: Sequence[Array], ws: Sequence[Array], eps: float) -> list[Array]:
        """`rms_norm` of each x [T, n] by its w [n], of whose columns each process of a stage has as many: the sums of
        squares are added up as those of `linear_reduce`, within a leaf by halves, all in one exchange.
        """
        if self.leaves == 1:
            return [self.rms_norm(x, w, eps) for x, w in zip(xs, ws, strict=True)]
        xp, f, n = self.xp, self.float32, self.local_leaves
        sums = xp.stack([tree([_squares(xp, f(x[:, leaf])) for leaf in _spans(x, n)]) for x in xs], axis=-1)
        sums, found = self._summed(sums), []
        for i, (x, w) in enumerate(zip(xs, ws, strict=True)):
            mean = sums[:, i : i + 1] * (n / (x.shape[1] * self.leaves)) + eps
            # PyTorch's roots of float32 are not always the nearest numbers; rounded from float64 they are.
            root = f(xp.sqrt(xp.astype(mean, xp.float64) if self.deterministic else mean))
            found.append(xp.astype(f(x) / root * f(w), x.dtype, copy=False))
        return found

    def layer_norm(self, x: Array, w: Array, b: Array | None, eps: float) -> Array:
        """(x - mean) / sqrt(variance + eps) * w + b over the last axis, in float32 (Ba, Kiros & Hinton 2016)."""
        f = self.float32(x)
        f = f - self.xp.mean(f, axis=-1, keepdims=True)
        scaled = f / self.xp.sqrt(self.xp.mean(f * f, axis=-1, keepdims=True) + eps)
        y = self.xp.astype(scaled, x.dtype, copy=False) * w
        return y if b is None else y + b

    def gelu(self, x: Array) -> Array:
        """x times the normal distribution function of x (Hendrycks & Gimpel 2016).

        The error function by formula 7.1.26 of Abramowitz & Stegun: absolute error below 2e-7.
        """
        z = self.xp.abs(x) * math.sqrt(0.5)
        t = 1 / (1 + 0.3275911 * z)
        series = 0.0
        for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
            series = (series + coefficient) * t
        tail = 0.5 * series * self.xp.exp(-z * z)  # of the distribution, beyond |x|
        return x * self.xp.where(x >= 0, 1 - tail, tail)

    def gelu_tanh(self, x: Array) -> Array:
        """The approximation of `gelu` that GPT-2 and Gemma are trained with, by a tanh."""
        return 0.5 * x * (1 + self.xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))

    def silu(self, x: Array) -> Array:
        """x * sigmoid(x)."""
        e = self.xp.exp(-self.xp.abs(x))  # never overflows
        return x * self.xp.where(x >= 0, self.xp.ones_like(x), e) / (1 + e)

    def gated(self, x: Array, activation: str) -> Array:
        """act(first half of the last axis) * second half: [..., 2 n] -> [..., n]. activation: the operation's name."""
        n = x.shape[-1] // 2
        return getattr(self, activation)(x[..., :n]) * x[..., n:]

    def softmax(self, x: Array) -> Array:
        """Over the last axis."""
        e = self.xp.exp(x - self.xp.max(x, axis=-1, keepdims=True))
        return e / self.xp.sum(e, axis=-1, keepdims=True)

    def route(self, x: Array, k: int, *, normalised: bool) -> tuple[Array, Array]:
        """The k largest of the softmax of each row of x [T, experts], and their places: float32 and integers [T, k].

        normalised: divided by their sum. Of equal values, any.
        """
        weights, chosen = self.top(self.softmax(self.float32(x)), k)
        return (weights / self.xp.sum(weights, axis=-1, keepdims=True) if normalised else weights), chosen

    def experts(
        self,
        x: Array,
        chosen: Array,
        weights: Array,
        into: Sequence[Array],
        out: Sequence[Array],
        activation: str,
        *,
        gated: bool,
        leaves: int = 0,
    ) -> Array:
        """A mixture of experts (Shazeer et al. 2017): sum over e of weight_e * out_e(act(into_e(x))): [T, hidden].

        x [T, hidden]; chosen, weights [T, k]: the experts of each token and what they count, of `route`; into, out: of
        each expert a weight from `put_weight`, [inner, hidden], or [2 * inner, hidden] if it is gated, and [hidden,
        inner]; activation: the operation's name. leaves: the columns of `out` are cut into so many, each of which is
        mixed by itself; then all are added up as a tree, in float32, which the result is. 0: they are not cut.
        """

        def act(t: Array) -> Array:
            found: Array = self.gated(t, activation) if gated else getattr(self, activation)(t)
            return found

        dtype = self.xp.float32 if leaves else x.dtype
        mixed = [self.xp.zeros(x.shape, dtype=dtype, device=self.device) for _ in range(leaves or 1)]
        choice = None if self.shapes.compiled else self.get(chosen)  # once, as a device is waited for
        for e, (w_in, w_out) in enumerate(zip(into, out, strict=True)):
            rows = None if choice is None else np.flatnonzero((choice == e).any(axis=-1)).astype(np.int32)
            if rows is not None and not len(rows):
                continue
            share = self.xp.where(chosen == e, weights, self.xp.zeros_like(weights))
            share = self.xp.astype(self.xp.sum(share, axis=-1, keepdims=True), dtype, copy=False)  # 0: not chosen
            at = None if rows is None else self.put(rows)  # only the tokens that chose it
            inner = act(self.linear(x if at is None else self.take(x, at), w_in))
            parts = self._leaves(inner, w_out, leaves) if leaves else [self.linear(inner, w_out)]
            for i, (y, part) in enumerate(zip(mixed, parts, strict=True)):
                if at is None:
                    mixed[i] = y + part * share
                else:
                    mixed[i] = self.scatter_rows(y, at, self.take(y, at) + part * self.take(share, at))
        return tree(mixed)

    def experts_reduce(self, x: Array, *mixture: Any, gated: bool) -> Array:
        """`experts` of each of which a process of a stage has some units: rows into it, columns out of it (from
        `put_columns`). Otherwise as `linear_reduce`.
        """
        if self.leaves == 1:
            return self.experts(x, *mixture, gated=gated)
        y = self._summed(self.experts(x, *mixture, gated=gated, leaves=self.local_leaves))
        return self.xp.astype(y, x.dtype, copy=False)

    def _summed(self, x: Array) -> Array:
        """x of all processes of a stage, added up."""
        return x if self.group is None or self.place.tp_size == 1 else self.group.sum(x)

    def top(self, x: Array, k: int) -> tuple[Array, Array]:
        """The k largest of each row of x [n, m], largest first, and their places: [n, k] and integers [n, k].

        1 <= k <= m. Of equal values at the border, any.
        """
        places = self.xp.argsort(x, axis=-1, descending=True)[:, :k]
        starts = self._positions(x.shape[0])[:, None] * x.shape[1]
        flat = self.xp.astype(places, self.xp.int32, copy=False) + starts
        return self.take(self.xp.reshape(x, (-1,)), flat), places

    def best(self, x: Array) -> tuple[Array, Array] | None:
        """Of each row of x [n, m] where its largest number is, the first one among equals, int32 [n], and that number
        [n], NaN if there is one in the row; None means there is no better way than to look twice."""
        return None

    def best_on_host(self, x: Array) -> tuple[HostArray, HostArray] | None:
        """`best` in arrays of the host; None means that there is no shorter way than to fetch it."""
        return None

    def draw(self, x: Array, how: Sequence[Array]) -> tuple[Array, Array]:
        """A token of each row of x float32 [n, m], int32 [n], and the row's largest number [n], NaN if there is one.

        how: `hibachi.engine.sampling.draw.How`, which says what is drawn. Only where it `draws`.
        """
        raise NotImplementedError

    def mass(self, x: Array) -> tuple[Array, Array]:
        """The largest number of each row of x float32 [n, m], and the sum of exp(number - largest): [n] both. Only
        where it `draws`."""
        raise NotImplementedError

    def keep_bits(self, x: Array, bits: HostArray) -> Array:
        """Logits x float32 [m, V] with -inf for the tokens that may not come. May overwrite `x`.

        bits: uint32 [m, ceil(V / 32)] on the host: bit t % 32 of word t // 32 says whether token t may come. They must
        stay as they are until the result was read. Raises ValueError for others.
        """
        given = self.put(masks.as_bytes(masks.checked(bits, x.shape)))
        found: Array = self.program(masks.keep)(x, given)
        return found

    def kept_rows(self, logits: Array, at: HostArray, bits: HostArray | None = None) -> tuple[Array, Array]:
        """Rows `at`, int32 [m] on the host, of logits [n, V]: a copy in float32, [m, V], with -inf as in `keep_bits`.
        And whether each of these rows was finite, bool [m]: no NaN, no infinity, and not -inf alone.

        bits: as in `keep_bits`; None means that all tokens may come.
        """
        x, finite = self.program(masks.copied)(logits, self.put(at))
        return x if bits is None else self.keep_bits(x, bits), finite

    def rope(self, x: Array, cos: Array, sin: Array) -> Array:
        """Rotary position embedding (Su et al. 2021), halves paired as in Hugging Face.

        x [T, heads, dim]; cos, sin [T, 1, dim / 2].
        """
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        return self.xp.concat([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def scan(
        self, step: Callable[[Array, tuple[Array, ...]], tuple[Array, Array]], state: Array, over: tuple[Array, ...]
    ) -> tuple[Array, Array]:
        """`state, y = step(state, (one row of each array))` for each of the first axis' rows in turn.

        over: arrays [S, ...], S >= 1. Returns the last state and all y, [S, ...].
        """
        outputs = []
        for i in range(over[0].shape[0]):
            state, y = step(state, tuple(t[i, ...] for t in over))
            outputs.append(y)
        return state, self.xp.stack(outputs)

    def convolve(self, past: Array, x: Array, w: Array, b: Array | None = None) -> tuple[Array, Array]:
        """silu of a convolution over the last tokens of each channel by itself, as in Mamba (Gu & Dao 2023).

        x [B, S, dim]; past [B, n - 1, dim]: the inputs before; w [n, dim], the last one for the token itself; b [dim].
        Returns [B, S, dim], and what is past for the next token.
        """
        tokens, seen = x.shape[1], self.xp.concat([past, x], axis=1)
        y = seen[:, :tokens, :] * w[0, :]
        for i in range(1, w.shape[0]):
            y = y + seen[:, i : i + tokens, :] * w[i, :]
        return self.silu(y if b is None else y + b), seen[:, tokens:, :]

    def selective_scan(
        self, state: Array, x: Array, dt: Array, gate: Array, write: Array, read: Array, decay: Array, skip: Array
    ) -> tuple[Array, Array]:
        """Mamba's scan over time (Gu & Dao 2023). For each token, step = softplus(dt), and

            state = state * exp(step * decay) + step * x * write
            y = (sum over n of state * read, plus x * skip) * silu(gate)

        x, dt, gate [B, S, dim]; write, read [B, S, n]. state [B, n, dim], decay [n, dim] (negative) and skip [dim] are
        float32, and so is all that is summed up. Returns y [B, S, dim], of x's dtype, and the last state.
        """
        xp, wide = self.xp, [self.float32(t) for t in (dt, x, write, read)]
        wide[0] = xp.log1p(xp.exp(-xp.abs(wide[0]))) + xp.clip(wide[0], min=0.0)

        def advance(state: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
            """One token of each row: state [B, n, dim]; dt, x [B, dim]; write, read [B, n]."""
            dt, x, write, read = now
            kept = state * xp.exp(dt[:, None, :] * decay)
            state = kept + (dt * x)[:, None, :] * write[:, :, None]
            return state, xp.sum(state * read[:, :, None], axis=1)

        state, y = self.scan(advance, state, tuple(xp.permute_dims(t, (1, 0, 2)) for t in wide))
        y = xp.permute_dims(y, (1, 0, 2)) + wide[1] * skip
        return xp.astype(y, x.dtype, copy=False) * self.silu(gate), state

    # ---- execution ---------------------------------------------------------------------------------------------

    def settle(self, arrays: Sequence[Array]) -> None:
        """Compute what a lazy library has put off; the default does nothing.

        Called in the engine's thread on what leaves it or stays from step to step: outputs that streams will hand to
        their readers, and caches after a step. Called on the arrays of a model as well, in the thread that starts an
        engine. arrays: as they are, or in tuples, as the layers of a cache are.
        """

    def compile(self, fn: Callable[..., Any], *, donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        """`fn`, perhaps compiled per shape; arguments at positions `donate` may be overwritten."""
        return fn

    def program(self, fn: Callable[..., Any], *given: Hashable) -> Callable[..., Any]:
        """`fn(self, *given, ...)`, compiled once for all engines on this backend; it is kept as long as the backend.

        fn: a function of a module, as an equal one is what the program is found by.
        """
        key = (fn, *given)
        found = self._programs.get(key)
        if found is None:  # of two threads that come at once, both get the first one's
            found = self._programs.setdefault(key, self.compile(partial(fn, self, *given)))
        return found

    def candidates(self) -> Sequence[Any]:
        """The ways to compute each operation that are worth timing, as `Candidate`s (`hibachi.backend.candidates`);
        none: there is only one."""
        return ()

    def fuse(self, decoder: Any) -> Callable[..., Any] | None:
        """All layers of a `hibachi.llm.model.decoder.Decoder` as one call; None means they run operation by operation.

        (h [T, hidden], which may be overwritten, turns, cache, x) -> (normalised hidden states [n_out, hidden] at
        x.last, cache), bit for bit what the operations give; turns: for each set of rotary frequencies cos and sin
        [T, 1, dims / 2]. It holds for the decoder's own params. For a profile it says to which part of it each
        operation belongs, `parts`, and adds up their seconds in the array `seconds` where that is set.
        """
        return None

    def foreign_model(self, path: Path, *, dtype: str, max_model_len: int | None) -> Any:
        """The model in the folder `path`, run by another library over our cache: a level-2 model, or None.

        Called for an architecture that is not registered. The model has the attributes max_model_len, dtype, eos_ids,
        bos_ids and arch_name besides those of a `CachedModel`. Raises UnknownArchitecture, InvalidModelFiles,
        MissingExtra.
        """
        return None

    def lent_model(self, module: Any, max_model_len: int) -> Any:
        """A context manager that gives a module of another library as a level-2 model, as long as it is entered; None:
        the module is of no kind that is known. Raises UnsupportedOperation when it is entered.
        """
        return None

    def usable(self, cache: Sequence[LayerCache]) -> bool:
        """Is the cache still readable after a step failed? False if it was given away to a compiled call."""
        return True

    def invariant(self) -> ArrayBackend:
        """This backend with kernels that are `deterministic`: another object, or this one if it is so already.

        Decide before weights are loaded, as their layout may differ. Raises UnsupportedOperation where there are none.
        """
        if self.deterministic:
            return self
        raise UnsupportedOperation(
            f"{type(self).__name__} ({self.name}) has no kernels whose results are independent of the batch, so "
            f"deterministic=True cannot be kept on it. Pass deterministic=False, or take the backend numpy, torch or "
            f"jax; a class of your own says in `invariant` which backend to take instead."
        )

    def quantized(self, how: str) -> ArrayBackend:
        """This backend with weights that take less memory: another object. Decide after `invariant`, before loading.

        how: "int8", integers of eight bits and a scale for each row of a matrix. A deterministic backend stays so.
        Raises UnsupportedOperation where it cannot be done.
        """
        raise UnsupportedOperation(
            f"{type(self).__name__} ({self.name}) has no kernels for weights in {how}. Pass quantization=None, or take "
            f"numpy, torch or jax on the CPU, with hibachi's kernels."
        )

    def suits(self, dtype: str, arch: Any) -> bool:
        """Whether to compute such a model in the checkpoint's dtype, this one, if no dtype is given. arch: a
        `hibachi.llm.model.arch.Arch`; None means another kind of model. float32 always suits.
        """
        return dtype == "float32"

    def plain(self) -> ArrayBackend:
        """The same without hibachi's kernels."""
        return self

    def prefers(self, how: str, dtype: str) -> bool:
        """Was `quantized(how)` measured to be faster here than weights of this dtype? Takes a moment when first asked.

        It is what quantization="auto" asks, and answers no where `quantized` raises.
        """
        return False

    @override
    def versions(self) -> dict[str, str]:
        return {
            "library": f"{self.xp.__name__} {getattr(self.xp, '__version__', '')}".strip(),
            "device": str(self.device or "default"),
        }


def _spans(x: Array, leaves: int) -> list[slice]:
    """The columns of each leaf."""
    each = x.shape[-1] // leaves
    return [slice(at, at + each) for at in range(0, x.shape[-1], each)]


def _squares(xp: Any, x: Array) -> Array:
    """The sum of squares of each row, half upon half: by additions of single numbers, which libraries round alike."""
    x = x * x
    while (n := x.shape[-1]) % 2 == 0:
        x = x[:, : n // 2] + x[:, n // 2 :]
    return tree(xp.unstack(x, axis=-1))


def _is_int(n: Any) -> bool:
    return isinstance(n, (int, np.integer)) and not isinstance(n, bool)
