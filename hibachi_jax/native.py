"""`JaxBackend` with hibachi's kernels: `JaxBackend("cpu", native=True)`.

They are custom calls of XLA (`hibachi/backend/kernels/src/xla.h`), whose handlers are in the library itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from hibachi.backend import masks
from hibachi.backend.array_backend import Array, ArrayBackend, HostArray, LayerCache
from hibachi.backend.attention_terms import terms
from hibachi.backend.kernels.library import NUMERICS, KernelLibrary, library
from hibachi.backend.kernels.memory import Slabs
from hibachi.backend.kernels.threads import most_threads
from hibachi.backend.layout import Paged, State, StepInputs
from hibachi.backend.native import CODES, LANES, Int4Backend, Int8Backend, OwnLayout, unpacked
from hibachi.backend.packing import BITS, INTO, Rows, as_stored, pack
from hibachi.backend.program import ACTIVATIONS
from hibachi.backend.shapechecks import (
    check_attend,
    check_convolve,
    check_draw,
    check_experts,
    check_route,
    check_scan,
    expect,
)
from hibachi.errors import UnsupportedOperation
from hibachi_jax.backend import JaxBackend

HANDLERS = (
    *("linear", "rows", "attend", "rms_norm", "layer_norm", "softmax", "rope", "activate", "best", "draw", "mass"),
    "kept_rows",
    *("convolve", "scan", "route", "experts"),
)


@cache
def known() -> KernelLibrary:
    """The library, its handlers known to XLA by the names of `target`. Raises NativeUnavailable."""
    found = library()
    # XLA wants to be told its own version.
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    if minor := re.search(r"define XLA_FFI_API_MINOR (\d+)", header):
        found.kernels.xla_version(int(minor[1]))
    for name in HANDLERS:
        handler = jax.ffi.pycapsule(found.kernels.symbol(f"xla_{name}"))
        jax.ffi.register_ffi_target(target(name), handler, platform="cpu")
    return found


@cache
def target(name: str) -> str:
    """What a program calls. Programs are kept on disk, so the name says which library they were made for."""
    return f"hibachi_{name}.{library().path.stem}"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class JaxPackedWeight:
    """A matrix [out, in] in panels of a kind, a name of `INTO` in packing.py; those of int8 have a scale for each row.
    shape: of the matrix. dtype: of what it is multiplied with."""

    panels: Array
    scales: Array | None
    shape: tuple[int, int] = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})
    kind: str = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class JaxPagedCache(OwnLayout):
    """A layer's keys and values as attention.h has them. The last dimension of both is a lane."""

    keys: Array  # [blocks, kv_heads, spans, lanes of a key, 16, depth]
    values: Array  # [blocks, kv_heads, spans, 16 / depth, width, depth]
    block_size: int = field(metadata={"static": True})
    k_dim: int = field(metadata={"static": True})
    v_dim: int = field(metadata={"static": True})


class NativeJaxBackend(JaxBackend):
    """float32 and bfloat16 on the CPU; float16 is kept and multiplied as float32.

    No result depends on the batch or on the number of threads. Raises NativeUnavailable where there is no compiler.
    """

    deterministic = True
    kernels = "native"
    native = True
    draws = True
    numerics = NUMERICS
    quantizations = ("int8", "int4")

    def __init__(self, device: Any = None, native: bool | None = None) -> None:
        super().__init__("cpu" if device is None and jax.default_backend() != "cpu" else device)
        self._run = known().kernels
        self._run.set_threads(most_threads())
        self._slabs = Slabs()

    def _computed(self, dtype: str) -> str:
        """The dtype that kernels compute this one in. Raises UnsupportedOperation."""
        found = "float32" if dtype == "float16" else dtype
        if found not in CODES or self.dtype(found).dtype != found:
            raise UnsupportedOperation(
                f"JAX's native kernels compute in float32 and bfloat16; got {dtype}. Pass one of these as dtype, or "
                f"JaxBackend(native=False)."
            )
        return found

    @override
    def suits(self, dtype: str, arch: Any) -> bool:
        return dtype in CODES

    @override
    def plain(self) -> ArrayBackend:
        found = JaxBackend(self.device, native=False)
        found.undecided = True
        return found

    # ---- weights -----------------------------------------------------------------------------------------------

    @override
    def put_weight(self, w: HostArray, dtype: str) -> Array:
        return NativeJaxBackend.put_rows(self, [w], dtype)

    @override
    def put_rows(self, parts: Sequence[Rows], dtype: str) -> Array:
        return self._packed(parts, dtype, as_stored(parts) or self._computed(dtype))

    def _packed(self, parts: Sequence[Rows], dtype: str, into: str) -> JaxPackedWeight:
        shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
        data, scales = pack(parts, into, self._run, self._slabs)
        seen = np.dtype(self.dtype(into)) if into in CODES else BITS[into]
        placed = self._placed(data.view(seen)), None if scales is None else self._placed(scales)
        return JaxPackedWeight(*placed, shape, np.dtype(self.dtype(dtype)), into)

    def _placed(self, packed: HostArray) -> Array:
        return jax.device_put(packed, self.device, may_alias=True)  # it is aligned, so JAX does not copy it

    @override
    def weight_rows(self, w: Array, idx: Array) -> Array:
        if not isinstance(w, JaxPackedWeight):
            return super().weight_rows(w, idx)
        n, k = w.shape
        at = idx.reshape(-1).astype(jnp.int32)
        kind = _kind(w)
        scales = () if w.scales is None else (w.scales,)
        found = _call("rows", (len(at), k), kind, w.panels, at, *scales, ints=[INTO[w.kind], n])
        return found.astype(w.dtype).reshape(*idx.shape, k)

    @override
    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        return self._linear(x, w, b, w.dtype) if isinstance(w, JaxPackedWeight) else super().linear(x, w, b)

    @override
    def logits(self, x: Array, w: Array, b: Array | None = None) -> Array:
        return self._linear(x, w, b, jnp.float32) if isinstance(w, JaxPackedWeight) else super().logits(x, w, b)

    def _linear(self, x: Array, w: JaxPackedWeight, b: Array | None, dtype: Any) -> Array:
        """`linear` with results rounded to w's dtype, or not rounded: float32."""
        n, k = w.shape
        if x.dtype != w.dtype or x.shape[-1] != k or (b is not None and (b.dtype != w.dtype or b.shape != (n,))):
            raise ValueError(
                f"expected x [..., {k}] and b [{n}] of {w.dtype}; got x {tuple(x.shape)} of {x.dtype}"
                + ("" if b is None else f" and b {tuple(b.shape)} of {b.dtype}")
            )
        kind = _kind(w)
        rows = x.reshape(-1, k).astype(kind)
        made = dtype if w.dtype == kind else kind
        more = *(() if w.scales is None else (w.scales,)), *(() if b is None else (b.astype(kind),))
        y = _call("linear", (len(rows), n), made, rows, w.panels, *more, ints=[INTO[w.kind]])
        return y.astype(dtype).reshape(*x.shape[:-1], n)

    # ---- cache and attention -----------------------------------------------------------------------------------

    @override
    def make_cache(self, spec: Paged | State, *, blocks: int, block_size: int, rows: int, dtype: str) -> LayerCache:
        if isinstance(spec, State):
            return super().make_cache(spec, blocks=blocks, block_size=block_size, rows=rows, dtype=dtype)
        wanted = self._computed(spec.dtype or dtype)
        depth = 2 if wanted == "bfloat16" else 1
        spans, wide = -(-block_size // LANES), -(-spec.v_dim // LANES) * LANES
        shape = (blocks, spec.kv_heads, spans)
        keys = self.zeros((*shape, -(-spec.k_dim // depth), LANES, depth), wanted)
        return JaxPagedCache(
            keys, self.zeros((*shape, LANES // depth, wide, depth), wanted), block_size, spec.k_dim, spec.v_dim
        )

    @override
    def positions(self, cache: LayerCache, blocks: Sequence[int] | None = None) -> list[HostArray]:
        if not isinstance(cache, JaxPagedCache):
            return super().positions(cache, blocks)
        keys, values = (np.asarray(self._some_blocks(t, blocks), np.float32) for t in (cache.keys, cache.values))
        return unpacked(keys, values, cache.block_size, cache.k_dim, cache.v_dim)

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
        if not isinstance(cache, JaxPagedCache):
            how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "bias": bias, "sinks": sinks}
            return super().attend(q, k, v, cache, x, **how)
        keys, values, dtype = cache.keys, cache.values, q.dtype
        if dtype == jnp.float16:
            q, k, v = (t.astype(keys.dtype) for t in (q, k, v))
        if any(t.dtype != keys.dtype for t in (q, k, v)):
            raise ValueError(f"expected {keys.dtype}, as in the cache; got {q.dtype}, {k.dtype} and {v.dtype}")
        check_attend(q, k, v, keys.shape[1], cache.k_dim, cache.v_dim, x)
        index = [t.astype(jnp.int32) for t in (x.slot, x.pos, x.cu_q, x.block_table)]
        added = terms(self, bias, sinks, q.shape[1])
        reach = 0 if added[0] is None else added[0].shape[1]
        out, keys, values = jax.ffi.ffi_call(
            target("attend"),
            (jax.ShapeDtypeStruct((*q.shape[:2], v.shape[2]), q.dtype), _like(keys), _like(values)),
            input_output_aliases={3: 1, 4: 2},
        )(
            *(q, k, v, keys, values, *index),
            *(t for t in added if t is not None),
            ints=np.array([cache.block_size, window or 0, 1, reach], np.int64),
            reals=np.array([q.shape[2] ** -0.5 if scale is None else scale, softcap or 0.0], np.float32),
        )
        return out.astype(dtype), replace(cache, keys=keys, values=values)

    # ---- experts and states ------------------------------------------------------------------------------------

    @override
    def route(self, x: Array, k: int, *, normalised: bool) -> tuple[Array, Array]:
        if x.dtype not in _COMPUTED:
            return super().route(x, k, normalised=normalised)
        check_route(x, k)
        made = (jax.ShapeDtypeStruct((len(x), k), dtype) for dtype in (jnp.float32, jnp.int32))
        weights, chosen = jax.ffi.ffi_call(target("route"), tuple(made))(x, ints=np.array([normalised], np.int64))
        return weights, chosen

    @override
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
        leaves: int = 0,  # which are refused
    ) -> Array:
        check_experts(x, chosen, weights, into, out, gated)
        every = [*into, *out]
        packed = all(isinstance(w, JaxPackedWeight) and w.dtype == _kind(w) == x.dtype for w in every)
        packed = packed and all(len({w.kind for w in some}) == 1 for some in (into, out))
        dim, inner = out[0].shape
        odd = x.dtype != jnp.float32 and (dim % 2 or inner % 2)  # rows of pairs begin with a pair
        if not packed or activation not in ACTIVATIONS or odd:
            return super().experts(x, chosen, weights, into, out, activation, gated=gated)
        routed = weights.astype(jnp.float32), chosen.astype(jnp.int32)
        ints = [len(into), inner, ACTIVATIONS[activation], gated, INTO[into[0].kind], INTO[out[0].kind]]
        given = [w.panels for w in every] + [w.scales for w in every if w.scales is not None]
        return _call("experts", x.shape, x.dtype, x, *routed, *given, ints=ints)

    @override
    def convolve(self, past: Array, x: Array, w: Array, b: Array | None = None) -> tuple[Array, Array]:
        given = past, x, w, *(() if b is None else (b,))
        if x.dtype not in _COMPUTED or any(t.dtype != x.dtype for t in given):
            return super().convolve(past, x, w, b)
        check_convolve(past, x, w, b)
        if not x.shape[1]:
            return x, past
        y, last = jax.ffi.ffi_call(target("convolve"), (_like(x), _like(past)))(*given)
        return y, last

    @override
    def selective_scan(
        self, state: Array, x: Array, dt: Array, gate: Array, write: Array, read: Array, decay: Array, skip: Array
    ) -> tuple[Array, Array]:
        narrow, summed = (x, dt, gate, write, read), (state, decay, skip)
        if x.dtype not in _COMPUTED or any(t.dtype != x.dtype for t in narrow):
            return super().selective_scan(state, x, dt, gate, write, read, decay, skip)
        check_scan(state, x, dt, gate, write, read, decay, skip)
        summed = tuple(t.astype(jnp.float32) for t in summed)
        y, last = jax.ffi.ffi_call(target("scan"), (_like(x), _like(summed[0])))(*narrow, *summed)
        return y, last

    # ---- math --------------------------------------------------------------------------------------------------

    @override
    def rms_norm(self, x: Array, w: Array, eps: float) -> Array:
        if w.dtype != x.dtype:
            return self.rms_norm(x, jnp.ones_like(w, x.dtype), eps) * w
        expect("rms_norm", x, w=(w, x.shape[-1:]))
        return _rowwise("rms_norm", x, w, reals=[eps])

    @override
    def layer_norm(self, x: Array, w: Array, b: Array | None, eps: float) -> Array:
        if w.dtype != x.dtype or (b is not None and b.dtype != x.dtype):
            y = self.layer_norm(x, jnp.ones_like(w, x.dtype), None, eps) * w
            return y if b is None else y + b
        expect("layer_norm", x, w=(w, x.shape[-1:]), b=(b, x.shape[-1:]))
        return _rowwise("layer_norm", x, w, *(() if b is None else (b,)), reals=[eps])

    @override
    def softmax(self, x: Array) -> Array:
        return _rowwise("softmax", x)

    @override
    def best(self, x: Array) -> tuple[Array, Array] | None:
        if x.dtype != jnp.float32 or not 0 < x.shape[1] < 2**31:
            return None
        return _of_rows("best", jnp.int32, x)

    @override
    def draw(self, x: Array, how: Sequence[Array]) -> tuple[Array, Array]:
        check_draw(x, how, self._run.draw_parameters())
        kept = (t.astype(jnp.int32 if jnp.isdtype(t.dtype, "integral") else jnp.float32) for t in how)
        return _of_rows("draw", jnp.int32, x.astype(jnp.float32), *kept)

    @override
    def mass(self, x: Array) -> tuple[Array, Array]:
        return _of_rows("mass", jnp.float32, x.astype(jnp.float32))

    @override
    def kept_rows(self, logits: Array, at: HostArray, bits: HostArray | None = None) -> tuple[Array, Array]:
        shape = len(at), logits.shape[1]
        if logits.dtype not in _COMPUTED or 0 in shape:
            return super().kept_rows(logits, at, bits)
        words = () if bits is None else (self.put(masks.checked(bits, shape).view(np.int32)),)
        found: tuple[Array, Array] = self.program(_kept_rows)(logits, self.put(np.asarray(at, np.int32)), *words)
        return found

    @override
    def rope(self, x: Array, cos: Array, sin: Array) -> Array:
        turns = (x.shape[0], 1, x.shape[2] // 2)
        fits = x.shape[2] % 2 == 0 and all(t.dtype == x.dtype and t.shape == turns for t in (cos, sin))
        if not fits or x.dtype not in _COMPUTED:
            return super().rope(x, cos, sin)
        return _call("rope", x.shape, x.dtype, x, cos, sin)

    @override
    def silu(self, x: Array) -> Array:
        return _rowwise("activate", x, ints=[ACTIVATIONS["silu"]])

    @override
    def gelu(self, x: Array) -> Array:
        return _rowwise("activate", x, ints=[ACTIVATIONS["gelu"]])

    @override
    def gelu_tanh(self, x: Array) -> Array:
        return _rowwise("activate", x, ints=[ACTIVATIONS["gelu_tanh"]])

    @override
    def gated(self, x: Array, activation: str) -> Array:
        if activation not in ACTIVATIONS or x.shape[-1] % 2:
            return super().gated(x, activation)
        return _rowwise("activate", x, width=x.shape[-1] // 2, ints=[ACTIVATIONS[activation]])


class Int8NativeJaxBackend(NativeJaxBackend):
    """`JaxBackend("cpu").quantized("int8")`: as `Int8Backend` on the other libraries."""

    kernels = Int8Backend.kernels
    quantization = "int8"
    panels = "int8"

    @override
    def put_weight(self, w: HostArray, dtype: str) -> Array:
        return self.put_rows([w], dtype)

    @override
    def put_rows(self, parts: Sequence[Rows], dtype: str) -> Array:
        self._computed(dtype)
        return self._packed(parts, dtype, self.panels)

    @override
    def put_precise(self, w: HostArray, dtype: str) -> Array:
        return NativeJaxBackend.put_weight(self, w, dtype)


class Int4NativeJaxBackend(Int8NativeJaxBackend):
    """`JaxBackend("cpu").quantized("int4")`: as `Int4Backend` on the other libraries."""

    kernels = Int4Backend.kernels
    quantization = "int4"
    panels = Int4Backend.panels

    @override
    def put_vocabulary(self, parts: Sequence[Rows], dtype: str) -> Array:
        return self._packed(parts, dtype, as_stored(parts) or Int4Backend.vocabulary)


_COMPUTED = (jnp.float32, jnp.bfloat16)


def _kind(w: JaxPackedWeight) -> Any:
    """What it is multiplied with in the kernels: float16 as float32."""
    return np.dtype(np.float32) if w.dtype == np.float16 else w.dtype


def _of_rows(name: str, dtype: Any, x: Array, *args: Array) -> tuple[Array, Array]:
    """A kernel that makes two numbers of each row, of this dtype and float32."""
    made = jax.ShapeDtypeStruct((len(x),), dtype), jax.ShapeDtypeStruct((len(x),), jnp.float32)
    one, other = jax.ffi.ffi_call(target(name), made)(x, *args)
    return one, other


def _kept_rows(backend: ArrayBackend, logits: Array, at: Array, *bits: Array) -> tuple[Array, Array]:
    shape = len(at), logits.shape[1]
    made = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:1], jnp.bool)
    x, finite = jax.ffi.ffi_call(target("kept_rows"), made)(logits, at, *bits)
    return x, finite


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(
    name: str, shape: tuple[int, ...], dtype: Any, *args: Array, ints: Sequence[int] = (), reals: Sequence[float] = ()
) -> Array:
    """A kernel that makes one array."""
    if 0 in shape:
        return jnp.zeros(shape, dtype)
    attributes = {"ints": np.array(ints, np.int64)} if ints else {}
    attributes |= {"reals": np.array(reals, np.float32)} if reals else {}
    return jax.ffi.ffi_call(target(name), jax.ShapeDtypeStruct(shape, dtype))(*args, **attributes)


def _rowwise(
    name: str,
    x: Array,
    *args: Array,
    width: int | None = None,
    ints: Sequence[int] = (),
    reals: Sequence[float] = (),
) -> Array:
    """A kernel of each row [..., dim] by itself, in float32 if it does not know the dtype."""
    shape = (*x.shape[:-1], x.shape[-1] if width is None else width)
    how: dict[str, Any] = {"ints": ints, "reals": reals}
    if x.dtype in _COMPUTED:
        return _call(name, shape, x.dtype, x, *args, **how)
    args = tuple(a.astype(jnp.float32) for a in args)
    return _call(name, shape, jnp.float32, x.astype(jnp.float32), *args, **how).astype(x.dtype)
