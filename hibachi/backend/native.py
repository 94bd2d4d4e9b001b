"""An array library's CPU backend with the kernels of `hibachi.backend.kernels` in place of its own.

Written once over arrays whose addresses are known; a library's class says how its arrays are made and where they lie.
float32 and bfloat16; other dtypes as the library computes them. No result depends on the batch, the number of threads,
the processor or the library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import addressof, memmove
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
from typing_extensions import override

from hibachi.backend import masks
from hibachi.backend.array_backend import Array, HostArray, LayerCache
from hibachi.backend.attention_terms import terms
from hibachi.backend.host_arrays import PackedWeight, address_of
from hibachi.backend.kernels.abi import Sizes, addresses
from hibachi.backend.kernels.library import NUMERICS, library
from hibachi.backend.kernels.memory import Reused, Slabs, zeros
from hibachi.backend.kernels.threads import most_threads
from hibachi.backend.layout import Paged, State, StepInputs
from hibachi.backend.native_layers import NativeLayers
from hibachi.backend.packing import BITS, INTO, Rows, as_stored, pack
from hibachi.backend.program import ACTIVATIONS, Program, program
from hibachi.backend.shapechecks import check_draw, expect
from hibachi.backend.stored import columns
from hibachi.common.shapes import CallShapes
from hibachi.errors import UnsupportedOperation

LANES = 16  # as in registers.h
CODES = {"float32": 0, "bfloat16": 1}  # as in operations.cpp
LARGE = 2**25  # bytes: more than this the C library gets anew from the system each time, and gives back at once

_sizes = lru_cache(256)(Sizes)  # all layers of a step have the same


class OwnLayout:
    """Keys and values in an order that kernels alone know. It has `keys` and `values`."""

    keys: Array
    values: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of both: what a layer is told from another one by."""
        return (*self.keys.shape, *self.values.shape)

    def halves(self) -> tuple[Array, Array]:
        return self.keys, self.values

    def with_halves(self, halves: Sequence[Array]) -> Any:
        own: Any = self  # those below are dataclasses
        return replace(own, keys=halves[0], values=halves[1])

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "The keys and values of this cache lie as hibachi's kernels want them. Let backend.attend read them, or "
            "look at the copies of backend.positions(cache). A model that reads them itself takes a backend without "
            "kernels, such as NumpyBackend(native=False)."
        )


@dataclass(frozen=True, eq=False)
class PagedCache(OwnLayout):
    """A layer's keys and values as attention.h has them. The last dimension of both is a lane."""

    keys: Array  # [blocks, kv_heads, spans, lanes of a key, 16, depth]
    values: Array  # [blocks, kv_heads, spans, 16 / depth, width, depth]
    block_size: int
    k_dim: int
    v_dim: int


class NativeBackend(NativeLayers):
    """To be inherited from before a library's own deterministic backend."""

    deterministic = True
    shapes = CallShapes()
    kernels = "native"
    native = True
    draws = True
    numerics = NUMERICS
    cascade = True
    """Attention reads what several tokens see, such as a prefix that rows share, once for some of them."""

    def begin(self) -> None:
        """To be called at the end of `__init__`. Raises NativeUnavailable."""
        self.library = library()
        self._run = self.library.kernels
        self._slabs, self._reused, self._outputs = Slabs(), Reused(), Reused()
        self.codes = {self.dtype(name): code for name, code in CODES.items()}
        self._threads: int | None = -1
        self.follow_threads()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in ("library", "_run")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.library = library()
        self._run = self.library.kernels

    def library_threads(self) -> int | None:
        """How many threads the library was set to use; None means it has no such number."""
        return None

    def follow_threads(self) -> None:
        """The kernels use as many threads as the library, and no more than there are processors for."""
        now = self.library_threads()
        if now != self._threads:
            self._threads = now
            self._run.set_threads(most_threads(now))

    def _heads(self, x: Array, name: str, dims: tuple[int | None, int | None], like: Any) -> tuple[Array, int]:
        """x [tokens, heads, dim] with the heads of a token together, and elements from token to token."""
        if x.dtype != like or x.ndim != 3 or any(d not in (None, n) for n, d in zip(x.shape[1:], dims, strict=True)):
            wanted = ", ".join("any" if d is None else str(d) for d in dims)
            raise ValueError(
                f"attend: expected {name} [tokens, {wanted}] of {like}, as in the cache; got {tuple(x.shape)} of "
                f"{x.dtype}. Return what `cache_spec` says."
            )
        apart, of_head, one = self.strides(x)
        if one != 1 or of_head != x.shape[2] or apart < x.shape[1] * x.shape[2]:
            x = self.row_major(x)
            apart = x.shape[1] * x.shape[2]
        return x, apart

    def output(self, shape: tuple[int, ...]) -> Array:
        """`empty` of float32, for what a step returns."""
        small = 4 * math.prod(shape) < LARGE
        held = np.empty(shape, np.float32) if small else self._outputs.empty(shape, np.float32)
        return self.from_host(held, self.xp.float32)

    # ---- weights ---------------------------------------------------------------------------------------------------

    @override
    def put_weight(self, w: HostArray, dtype: str) -> Array:
        return self._packed([w], dtype) if self.dtype(dtype) in self.codes else super().put_weight(w, dtype)

    @override
    def put_rows(self, parts: Sequence[Rows], dtype: str) -> Array:
        known = self.dtype(dtype) in self.codes
        return self._packed(parts, dtype, as_stored(parts)) if known else super().put_rows(parts, dtype)

    def _packed(self, parts: Sequence[Rows], dtype: str, into: str | None = None) -> PackedWeight:
        shape, kind = (sum(part.shape[0] for part in parts), parts[0].shape[1]), into or dtype
        return PackedWeight(shape, self.dtype(dtype), kind, *pack(parts, kind, self._run, self._slabs))

    @override
    def weight_rows(self, w: Array, idx: Array) -> Array:
        if not isinstance(w, PackedWeight):
            return super().weight_rows(w, idx)
        at, (n, k) = self.index(self.xp.reshape(idx, (-1,))), w.shape
        out = self.empty((len(at), k), w.dtype)
        places = (self.address(t) for t in (at, out))
        self._run.rows(self.codes[w.dtype], INTO[w.kind], *w.pointers, *places, len(at), n, k)
        return self.xp.reshape(out, (*idx.shape, k))

    @override
    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        return self._linear(x, w, b, w.dtype) if isinstance(w, PackedWeight) else super().linear(x, w, b)

    @override
    def logits(self, x: Array, w: Array, b: Array | None = None) -> Array:
        return self._linear(x, w, b, self.xp.float32) if isinstance(w, PackedWeight) else super().logits(x, w, b)

    @override
    def put_columns(self, parts: Sequence[Rows], dtype: str, first: int, end: int) -> Array:
        if self.dtype(dtype) not in self.codes:
            return super().put_columns(parts, dtype, first, end)
        if self.quantization == "none" and as_stored(parts) is None:
            return self.put_rows([columns(part, first, end) for part in parts], dtype)
        held, self._slabs = self._slabs, Slabs()  # rows are rounded as they are whole, and the whole is not kept
        try:
            w = self.put_rows(parts, dtype)
        finally:
            self._slabs = held
        return w.columns(first, end, held)

    @override
    def linear_leaves(self, x: Array, w: Array, b: Array | None = None, *, wide: bool = False) -> Array:
        if not isinstance(w, PackedWeight):
            return super().linear_leaves(x, w, b, wide=wide)
        return self._linear(x, w, b, self.xp.float32 if wide else w.dtype, self.local_leaves)

    def _linear(self, x: Array, w: PackedWeight, b: Array | None, dtype: Any, leaves: int = 1) -> Array:
        """`linear` with results rounded to w's dtype, or not rounded: float32."""
        n, k = w.shape
        if x.dtype != w.dtype or x.shape[-1] != k or (b is not None and (b.dtype != w.dtype or b.shape != (n,))):
            raise ValueError(
                f"expected x [..., {k}] and b [{n}] of {w.dtype}; got x {tuple(x.shape)} of {x.dtype}"
                + ("" if b is None else f" and b {tuple(b.shape)} of {b.dtype}")
            )
        (rows, stride), y = self.rows(x), self.empty((*x.shape[:-1], n), dtype)
        bias = None if b is None else self.row_major(b)
        self._run.linear(
            self.codes[w.dtype],
            INTO[w.kind],
            dtype != w.dtype,
            self.address(rows),
            stride,
            *w.pointers,
            self._pointer(bias),
            self.address(y),
            len(y) if y.ndim == 2 else int(np.prod(y.shape[:-1])),
            n,
            k,
            leaves,
        )
        return y

    # ---- cache and attention ---------------------------------------------------------------------------------------

    @override
    def make_cache(self, spec: Paged | State, *, blocks: int, block_size: int, rows: int, dtype: str) -> LayerCache:
        wanted = spec.dtype or dtype
        if isinstance(spec, State) or wanted not in CODES:
            return super().make_cache(spec, blocks=blocks, block_size=block_size, rows=rows, dtype=dtype)
        depth = 2 if wanted == "bfloat16" else 1
        spans, wide = -(-block_size // LANES), -(-spec.v_dim // LANES) * LANES
        shape = (blocks, spec.kv_heads, spans)
        keys = zeros((*shape, -(-spec.k_dim // depth), LANES, depth), BITS[wanted])
        values = zeros((*shape, LANES // depth, wide, depth), BITS[wanted])
        held = self.from_host(keys, self.dtype(wanted)), self.from_host(values, self.dtype(wanted))
        return PagedCache(*held, block_size, spec.k_dim, spec.v_dim)

    @override
    def positions(self, cache: LayerCache, blocks: Sequence[int] | None = None) -> list[HostArray]:
        if not isinstance(cache, PagedCache):
            return super().positions(cache, blocks)
        keys, values = (self.get(self._some_blocks(t, blocks)) for t in (cache.keys, cache.values))
        return unpacked(keys, values, cache.block_size, cache.k_dim, cache.v_dim)

    @override
    def copy_blocks(self, cache: LayerCache, source: Array, to: Array) -> LayerCache:
        if not isinstance(cache, PagedCache):
            return super().copy_blocks(cache, source, to)
        both = zip(self.get(source).tolist(), self.get(to).tolist(), strict=True)
        return _moved(self, cache, cache.halves(), [pair for pair in both if pair[0] != pair[1]])

    @override
    def write_blocks(self, cache: LayerCache, blocks: Array, held: Sequence[Array]) -> LayerCache:
        if not isinstance(cache, PagedCache):
            return super().write_blocks(cache, blocks, held)
        return _moved(self, cache, [self.row_major(half) for half in held], list(enumerate(self.get(blocks).tolist())))

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
        if not isinstance(cache, PagedCache):
            how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "bias": bias, "sinks": sinks}
            return super().attend(q, k, v, cache, x, **how)
        keys, values, block_size, k_dim, v_dim = cache.keys, cache.values, cache.block_size, cache.k_dim, cache.v_dim
        kv_heads, dtype = keys.shape[1], keys.dtype
        (q, q_stride), (k, k_stride), (v, v_stride) = (
            self._heads(q, "q", (None, k_dim), dtype),
            self._heads(k, "k", (kv_heads, k_dim), dtype),
            self._heads(v, "v", (kv_heads, v_dim), dtype),
        )
        tokens, heads, _ = q.shape
        slot, pos, cu_q, table = (self.index(t) for t in (x.slot, x.pos, x.cu_q, x.block_table))
        rows = len(cu_q) - 1
        if heads % kv_heads or not len(k) == len(v) == len(slot) == len(pos) == tokens or len(table) != rows:
            raise ValueError(
                f"attend: expected heads that are a multiple of the {kv_heads} of keys, and as many keys, values, "
                f"slots and positions as queries; got {heads} heads, and {tokens}, {len(k)}, {len(v)}, {len(slot)} and "
                f"{len(pos)}, in {rows} rows with a block table of {len(table)}."
            )
        sizes = _sizes(
            *(tokens, rows, heads, kv_heads, k_dim, v_dim, table.shape[1], block_size, len(keys)),
            *(q_stride, k_stride, v_stride, window or 0),
            *(k_dim**-0.5 if scale is None else scale, softcap or 0.0),
        )
        out = self.empty((tokens, heads, v_dim), dtype)
        places = (self.address(t) for t in (q, k, v, keys, values, slot, pos, cu_q, table))
        added: tuple[int | None, int, int | None] = None, 0, None
        if bias is not None or sinks is not None:
            bias, sinks = (None if t is None else self.row_major(t) for t in terms(self, bias, sinks, heads))
            added = self._pointer(bias), 0 if bias is None else bias.shape[1], self._pointer(sinks)
        self._run.attend(self.codes[dtype], addressof(sizes), *places, self.cascade, *added, self.address(out))
        return out, cache

    # ---- math ------------------------------------------------------------------------------------------------------

    def _of_rows(self, x: Array, *vectors: Array | None) -> int | None:
        """The code of the dtype of x [..., dim] if kernels compute it and all vectors [dim] have the same; else None.

        Raises ValueError for a vector of another length.
        """
        for w in vectors:
            expect("a norm", x, vector=(w, tuple(x.shape[-1:])))
        alike = all(w is None or w.dtype == x.dtype for w in vectors)
        return self.codes.get(x.dtype) if alike and x.ndim else None

    @override
    def rms_norm(self, x: Array, w: Array, eps: float) -> Array:
        code = self._of_rows(x, w)
        if code is None:
            return super().rms_norm(x, w, eps)
        (rows, stride), y, dim, w = self.rows(x), self.empty(x.shape, x.dtype), x.shape[-1], self.row_major(w)
        many = int(np.prod(x.shape[:-1]))
        self._run.rms_norm(code, self.address(rows), stride, self.address(w), self.address(y), many, dim, eps)
        return y

    @override
    def layer_norm(self, x: Array, w: Array, b: Array | None, eps: float) -> Array:
        code = self._of_rows(x, w, b)
        if code is None:
            return super().layer_norm(x, w, b, eps)
        (rows, stride), y, dim, w = self.rows(x), self.empty(x.shape, x.dtype), x.shape[-1], self.row_major(w)
        b, many = None if b is None else self.row_major(b), int(np.prod(x.shape[:-1]))
        places = (self.address(w), self._pointer(b), self.address(y))
        self._run.layer_norm(code, self.address(rows), stride, *places, many, dim, eps)
        return y

    @override
    def softmax(self, x: Array) -> Array:
        code = self.codes.get(x.dtype)
        if code is None or not x.ndim or not x.shape[-1]:
            return super().softmax(x)
        x, y = self.row_major(x), self.empty(x.shape, x.dtype)
        self._run.softmax(code, self.address(x), self.address(y), int(np.prod(x.shape[:-1])), x.shape[-1])
        return y

    @override
    def best(self, x: Array) -> tuple[Array, Array] | None:
        if (found := self.best_on_host(x)) is None:
            return None
        place, most = found
        return self.from_host(place, self.xp.int32), self.from_host(most, self.xp.float32)

    @override
    def best_on_host(self, x: Array) -> tuple[HostArray, HostArray] | None:
        if x.dtype != self.xp.float32 or not 0 < x.shape[1] < 2**31:
            return None
        x, (n, columns) = self.row_major(x), x.shape
        place, most = np.empty(n, np.int32), np.empty(n, np.float32)
        self._run.best(self.address(x), n, columns, address_of(place), address_of(most))
        return place, most

    @override
    def draw(self, x: Array, how: Sequence[Array]) -> tuple[Array, Array]:
        x = self.row_major(self.float32(x))
        token, most = self.empty((len(x),), self.xp.int32), self.empty((len(x),), self.xp.float32)
        integers = [self.xp.isdtype(t.dtype, "integral") for t in how]
        kept = [self.index(t) if i else self.row_major(self.float32(t)) for t, i in zip(how, integers, strict=True)]
        check_draw(x, kept, self._run.draw_parameters())
        places = addresses([self.address(t) for t in kept])
        self._run.draw(self.address(x), *x.shape, places, self.address(token), self.address(most))
        return token, most

    @override
    def mass(self, x: Array) -> tuple[Array, Array]:
        x = self.row_major(self.float32(x))
        most, mass = (self.empty((len(x),), self.xp.float32) for _ in range(2))
        self._run.mass(self.address(x), *x.shape, self.address(most), self.address(mass))
        return most, mass

    @override
    def keep_bits(self, x: Array, bits: HostArray) -> Array:
        if x.dtype != self.xp.float32:
            return super().keep_bits(x, bits)
        x, bits = self.row_major(x), masks.checked(bits, x.shape)
        self._run.keep_bits(self.address(x), bits.ctypes.data, *x.shape)
        return x

    @override
    def kept_rows(self, logits: Array, at: HostArray, bits: HostArray | None = None) -> tuple[Array, Array]:
        code, shape = self.codes.get(logits.dtype), (len(at), logits.shape[1])
        if code is None:
            return super().kept_rows(logits, at, bits)
        logits, at = self.row_major(logits), np.require(at, np.int32, ["C", "A"])
        bits = None if bits is None else masks.checked(bits, shape)
        x = self.from_host(self._reused.empty(shape, np.float32), self.xp.float32)
        finite = self.empty(shape[:1], self.xp.bool)
        places = at.ctypes.data, None if bits is None else bits.ctypes.data, self.address(x), self.address(finite)
        self._run.kept_rows(code, self.address(logits), len(logits), *places, *shape)
        return x, finite

    @override
    def rope(self, x: Array, cos: Array, sin: Array) -> Array:
        tokens, heads, dim = x.shape
        code = self.codes.get(x.dtype)
        shape = (tokens, 1, dim // 2)
        fits = dim % 2 == 0 and all(t.dtype == x.dtype and tuple(t.shape) == shape for t in (cos, sin))
        if code is None or not fits:
            return super().rope(x, cos, sin)
        (x, stride), y = self._heads(x, "x", (None, None), x.dtype), self.empty(x.shape, x.dtype)
        cos, sin = self.row_major(cos), self.row_major(sin)
        turns = (self.address(t) for t in (cos, sin))
        self._run.rope(code, self.address(x), stride, *turns, self.address(y), tokens, heads, dim)
        return y

    @override
    def silu(self, x: Array) -> Array:
        return self._activate("silu", x, gated=False)

    @override
    def gelu(self, x: Array) -> Array:
        return self._activate("gelu", x, gated=False)

    @override
    def gelu_tanh(self, x: Array) -> Array:
        return self._activate("gelu_tanh", x, gated=False)

    @override
    def gated(self, x: Array, activation: str) -> Array:
        return self._activate(activation, x, gated=True) if activation in ACTIVATIONS else super().gated(x, activation)

    def _activate(self, name: str, x: Array, *, gated: bool) -> Array:
        code = self.codes.get(x.dtype)
        if code is None or not x.ndim or (gated and x.shape[-1] % 2):
            return super().gated(x, name) if gated else getattr(super(), name)(x)
        rows, stride = self.rows(x)
        dim = x.shape[-1] // 2 if gated else x.shape[-1]
        y, many = self.empty((*x.shape[:-1], dim), x.dtype), int(np.prod(x.shape[:-1]))
        if many * dim:
            self._run.activate(code, ACTIVATIONS[name], self.address(rows), stride, self.address(y), many, dim, gated)
        return y

    # ---- execution -------------------------------------------------------------------------------------------------

    @override
    def fuse(self, decoder: Any) -> Program | None:
        return program(decoder)

    @override
    def suits(self, dtype: str, arch: Any) -> bool:
        return dtype in CODES

    @override
    def versions(self) -> dict[str, str]:
        return super().versions() | {"numerics": NUMERICS}


class Int8Backend(NativeBackend):
    """Matrices of float32 and bfloat16 models in eight bits; the rest as in the class above.

    No result depends on the batch or on the number of threads: a row is rounded by itself, sums of a group are exact.
    """

    kernels = "native int8"
    quantization = "int8"
    panels = "int8"
    """What matrices become, as in packing.py."""

    @override
    def put_weight(self, w: HostArray, dtype: str) -> Array:
        return self.put_rows([w], dtype)

    @override
    def put_rows(self, parts: Sequence[Rows], dtype: str) -> Array:
        if dtype not in CODES:
            raise UnsupportedOperation(
                f"Weights in {self.quantization} go with activations in float32 or bfloat16; got {dtype}. Pass one of "
                f"these as dtype."
            )
        return self._packed(parts, dtype, self.panels)

    @override
    def put_precise(self, w: HostArray, dtype: str) -> Array:
        return NativeBackend.put_weight(self, w, dtype)


class Int4Backend(Int8Backend):
    """The same in four bits, as GGUF's Q4_0; embeddings and head in eight, as its Q8_0: in four they cost most."""

    kernels = "native int4"
    quantization = "int4"
    panels = "q4_0"
    vocabulary = "q8_0"

    @override
    def put_vocabulary(self, parts: Sequence[Rows], dtype: str) -> Array:
        return self._packed(parts, dtype, as_stored(parts) or self.vocabulary)


def unpacked(keys: HostArray, values: HostArray, block_size: int, k_dim: int, v_dim: int) -> list[HostArray]:
    """The arrays of a `PagedCache` as `ArrayBackend.positions` has them."""
    blocks, kv_heads, spans = keys.shape[:3]
    k = keys.transpose(0, 2, 4, 1, 3, 5).reshape(blocks, spans * LANES, kv_heads, -1)
    v = values.transpose(0, 2, 3, 5, 1, 4).reshape(blocks, spans * LANES, kv_heads, -1)
    return [np.array(k[:, :block_size, :, :k_dim], np.float32), np.array(v[:, :block_size, :, :v_dim], np.float32)]


def _moved(
    backend: NativeBackend, cache: PagedCache, source: Sequence[Array], pairs: Sequence[tuple[int, int]]
) -> PagedCache:
    """The cache, into whose blocks those of `source` were copied: for each (number there, number here)."""
    for half, new in zip(cache.halves(), source, strict=True):
        to, at, size = backend.address(half), backend.address(new), half.nbytes // half.shape[0]
        for block, into in pairs:
            memmove(to + into * size, at + block * size, size)
    return cache
