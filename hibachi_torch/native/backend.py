"""`TorchBackend` with the kernels of this folder: `TorchBackend("cpu", native=True)`."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from typing_extensions import override

from hibachi.shapes import CallShapes
from hibachi.tensor.array_backend import Array, HostArray, LayerCache
from hibachi.tensor.layout import Paged, State, StepInputs
from hibachi_torch.invariant_backend import InvariantTorchBackend
from hibachi_torch.native.build import library
from hibachi_torch.native.memory import Slabs, zeros
from hibachi_torch.native.program import ACTIVATIONS, Program, program
from hibachi_torch.native.structs import Sizes

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_LANES = 16  # as in lanes.h


_sizes = lru_cache(256)(Sizes)  # all layers of a step have the same


class _Kernels:
    """The compiled functions of one dtype."""

    def __init__(self, suffix: str) -> None:
        p, n, f = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        lib = library()

        def find(name: str, *arguments: Any) -> Any:
            # An object of its own: functions of one library share their argument types.
            kernel = lib[f"hibachi_{name}"]
            kernel.argtypes, kernel.restype = arguments, None
            return kernel

        self.linear = find(f"linear_{suffix}", p, n, p, p, p, n, n, n)
        self.linear_f32 = find("linear_bf16_f32" if suffix == "bf16" else "linear_f32", p, n, p, p, p, n, n, n)
        self.pack = find(f"pack_{suffix}", p, p, n, n)
        self.rows = find(f"rows_{suffix}", p, p, p, n, n)
        self.attend = find(f"attend_{suffix}", ctypes.POINTER(Sizes), *[p] * 9, ctypes.c_int, p)
        self.rms_norm = find(f"rms_norm_{suffix}", p, n, p, p, n, n, f)
        self.layer_norm = find(f"layer_norm_{suffix}", p, n, p, p, p, n, n, f)
        self.rope = find(f"rope_{suffix}", p, n, p, p, p, n, n, n)
        self.best = find("best_f32", p, n, n, p, p)
        self.activate = find(f"activate_{suffix}", ctypes.c_int, p, n, p, n, n, ctypes.c_int)


class WeightKernels(Protocol):
    """The compiled functions that take a packed matrix: its `pointers` are among their arguments."""

    linear: Any
    linear_f32: Any
    rows: Any


class PackedWeight:
    """A matrix [out, in] in the panels of linear.h."""

    __slots__ = ("data", "dtype", "kernels", "pointer", "pointers", "shape")

    def __init__(self, plain: torch.Tensor, kernels: _Kernels, slabs: Slabs) -> None:
        self.shape, self.dtype = plain.shape, plain.dtype
        (n, k), panel = plain.shape, library().hibachi_panel()
        depth = k + k % 2 if plain.dtype == torch.bfloat16 else k
        self.data = slabs.empty(-(-n // panel) * panel * depth, plain.dtype)
        self.pointer = self.data.data_ptr()
        self.kernels: WeightKernels = kernels
        self.pointers: tuple[int, ...] = (self.pointer,)
        kernels.pack(plain.contiguous().data_ptr(), self.pointer, n, k)


class NativeTorchBackend(InvariantTorchBackend):
    """float32 and bfloat16 on the CPU; other dtypes as in the class above.

    No result depends on the batch or on the number of threads. Raises NativeUnavailable where there is no compiler.
    """

    shapes = CallShapes()
    kernels = "native"
    native = True
    cascade = True
    """Attention reads what several tokens see, such as a prefix that rows share, once for some of them."""

    def __init__(self, device: Any = "cpu", native: bool | None = None) -> None:
        super().__init__("cpu")
        self._of = {dtype: _Kernels(suffix) for dtype, suffix in _SUFFIX.items()}
        self._slabs = Slabs()

    # ---- weights -----------------------------------------------------------------------------------------------

    @override
    def put_weight(self, w: HostArray, dtype: str) -> Array:
        kernels = self._of.get(self.dtype(dtype))
        return (
            super().put_weight(w, dtype)
            if kernels is None
            else PackedWeight(self.put(np.asarray(w), dtype), kernels, self._slabs)
        )

    @override
    def weight_rows(self, w: Array, idx: Array) -> Array:
        if not isinstance(w, PackedWeight):
            return super().weight_rows(w, idx)
        at, k = _index(idx.reshape(-1)), w.shape[1]
        if len(at) and not 0 <= int(at.min()) <= int(at.max()) < w.shape[0]:
            raise IndexError(f"expected rows 0 to {w.shape[0] - 1} of a weight; got {int(at.min())} to {int(at.max())}")
        out = torch.empty((len(at), k), dtype=w.dtype)
        w.kernels.rows(*w.pointers, at.data_ptr(), out.data_ptr(), len(at), k)
        return out.view(*idx.shape, k)

    @override
    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        return self._linear(x, w, b, w.dtype) if isinstance(w, PackedWeight) else super().linear(x, w, b)

    @override
    def logits(self, x: Array, w: Array, b: Array | None = None) -> Array:
        return self._linear(x, w, b, torch.float32) if isinstance(w, PackedWeight) else super().logits(x, w, b)

    def _linear(self, x: Array, w: PackedWeight, b: Array | None, dtype: torch.dtype) -> Array:
        """`linear` with results rounded to w's dtype, or not rounded: float32."""
        n, k = w.shape
        if x.dtype != w.dtype or x.shape[-1] != k or (b is not None and (b.dtype != w.dtype or b.shape != (n,))):
            raise ValueError(
                f"expected x [..., {k}] and b [{n}] of {w.dtype}; got x {tuple(x.shape)} of {x.dtype}"
                + ("" if b is None else f" and b {tuple(b.shape)} of {b.dtype}")
            )
        rows, stride = _rows(x)
        y = torch.empty((*x.shape[:-1], n), dtype=dtype)
        multiply = w.kernels.linear if dtype == w.dtype else w.kernels.linear_f32
        bias = None if b is None else b.contiguous()
        multiply(
            rows.data_ptr(),
            stride,
            *w.pointers,
            bias if bias is None else bias.data_ptr(),
            y.data_ptr(),
            y.numel() // n,
            n,
            k,
        )
        return y

    # ---- cache and attention -----------------------------------------------------------------------------------

    @override
    def make_cache(self, spec: Paged | State, *, blocks: int, block_size: int, rows: int, dtype: str) -> LayerCache:
        # See attention.h. The last dimension of keys, and that of values, is a lane.
        wanted = spec.dtype or dtype
        if isinstance(spec, State) or self.dtype(wanted) not in self._of:
            return super().make_cache(spec, blocks=blocks, block_size=block_size, rows=rows, dtype=dtype)
        depth = 2 if wanted == "bfloat16" else 1
        spans, wide = -(-block_size // _LANES), -(-spec.v_dim // _LANES) * _LANES
        shape = (blocks, spec.kv_heads, spans)
        keys = zeros((*shape, -(-spec.k_dim // depth), _LANES, depth), self.dtype(wanted))
        return keys, zeros((*shape, _LANES // depth, wide, depth), self.dtype(wanted)), block_size

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
        if len(cache) == 2:
            return super().attend(q, k, v, cache, x, scale=scale, window=window, softcap=softcap)
        keys, values, block_size = cache
        tokens, heads, dim = q.shape
        kv_heads, v_dim = v.shape[1:]
        (q, q_stride), (k, k_stride), (v, v_stride) = _tokens(q, keys), _tokens(k, keys), _tokens(v, keys)
        slot, pos, cu_q, table = _index(x.slot), _index(x.pos), _index(x.cu_q), _index(x.block_table)
        sizes = _sizes(
            tokens,
            len(cu_q) - 1,
            heads,
            kv_heads,
            dim,
            v_dim,
            table.shape[1],
            block_size,
            q_stride,
            k_stride,
            v_stride,
            window or 0,
            dim**-0.5 if scale is None else scale,
            softcap or 0.0,
        )
        out = torch.empty((tokens, heads, v_dim), dtype=keys.dtype)
        self._of[keys.dtype].attend(
            sizes,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            slot.data_ptr(),
            pos.data_ptr(),
            cu_q.data_ptr(),
            table.data_ptr(),
            self.cascade,
            out.data_ptr(),
        )
        return out, cache

    # ---- math --------------------------------------------------------------------------------------------------

    @override
    def rms_norm(self, x: Array, w: Array, eps: float) -> Array:
        kernels = self._of.get(x.dtype)
        if kernels is None or w.dtype != x.dtype:
            return super().rms_norm(x, w, eps)
        rows, stride = _rows(x)
        y = torch.empty(x.shape, dtype=x.dtype)
        dim = x.shape[-1]
        kernels.rms_norm(rows.data_ptr(), stride, w.contiguous().data_ptr(), y.data_ptr(), y.numel() // dim, dim, eps)
        return y

    @override
    def layer_norm(self, x: Array, w: Array, b: Array | None, eps: float) -> Array:
        kernels = self._of.get(x.dtype)
        if kernels is None or w.dtype != x.dtype or (b is not None and b.dtype != x.dtype):
            return super().layer_norm(x, w, b, eps)
        rows, stride = _rows(x)
        y = torch.empty(x.shape, dtype=x.dtype)
        dim = x.shape[-1]
        w, b = w.contiguous(), None if b is None else b.contiguous()
        bias = None if b is None else b.data_ptr()
        kernels.layer_norm(rows.data_ptr(), stride, w.data_ptr(), bias, y.data_ptr(), y.numel() // dim, dim, eps)
        return y

    @override
    def best(self, x: Array) -> tuple[Array, Array] | None:
        if x.dtype != torch.float32 or not 0 < x.shape[1] < 2**31:
            return None
        x = x.contiguous()
        place, most = torch.empty(len(x), dtype=torch.int32), torch.empty(len(x))
        self._of[x.dtype].best(x.data_ptr(), *x.shape, place.data_ptr(), most.data_ptr())
        return place, most

    @override
    def rope(self, x: Array, cos: Array, sin: Array) -> Array:
        kernels = self._of.get(x.dtype)
        tokens, heads, dim = x.shape
        if kernels is None or cos.dtype != x.dtype or cos.shape != (tokens, 1, dim // 2):
            return super().rope(x, cos, sin)
        x, stride = _tokens(x, x)
        y = torch.empty(x.shape, dtype=x.dtype)
        turns = cos.contiguous(), sin.contiguous()
        kernels.rope(x.data_ptr(), stride, *(t.data_ptr() for t in turns), y.data_ptr(), tokens, heads, dim)
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
        kernels = self._of.get(x.dtype)
        if kernels is None or not x.ndim:
            return super().gated(x, name) if gated else getattr(super(), name)(x)
        rows, stride = _rows(x)
        dim = x.shape[-1] // 2 if gated else x.shape[-1]
        y = torch.empty((*x.shape[:-1], dim), dtype=x.dtype)
        if y.numel():
            kernels.activate(ACTIVATIONS[name], rows.data_ptr(), stride, y.data_ptr(), y.numel() // dim, dim, gated)
        return y

    # ---- execution ---------------------------------------------------------------------------------------------

    @override
    def fuse(self, decoder: Any) -> Program | None:
        return program(decoder, PackedWeight)


class ApartTorchBackend(NativeTorchBackend):
    """Attention reads for each token by itself: what `cascade` is compared with."""

    cascade = False


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x [..., dim] as rows that lie equally far apart: an array that holds them and how many elements that is."""
    if x.ndim == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1]:
        return x, x.stride(0)
    return x.contiguous(), x.shape[-1] if x.ndim else 1


def _tokens(x: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x [tokens, heads, dim] with the heads of a token together, and elements from token to token."""
    if x.dtype != like.dtype:
        raise ValueError(f"expected {like.dtype}, as in the cache; got {x.dtype}")
    if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        x = x.contiguous()
    return x, x.stride(0)


def _index(t: torch.Tensor) -> torch.Tensor:
    return t if t.dtype == torch.int32 and t.is_contiguous() else t.to(torch.int32).contiguous()
