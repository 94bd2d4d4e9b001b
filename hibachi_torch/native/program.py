"""All layers of a `Decoder` as one list of operations, which step.cpp runs in one call."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from hibachi.tensor.array_backend import Array, LayerCache
from hibachi.tensor.layout import StepInputs
from hibachi_torch.native.build import library
from hibachi_torch.native.structs import Op, Step

RMS_NORM, LINEAR, ROPE, WRITE, ATTEND, ACTIVATE, TAKE, ROUND, LINEAR_INT8, LAYER_NORM = range(10)
H, NORMED, QKV, MIXED, WIDE, INNER, OUT, LAST_H, LAST_MIXED = range(9)  # buffers, each with a row for every token
ROUNDED = 9  # rows as bytes
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}  # as in small.h
_PARTS = {
    LINEAR: "linear",
    ROUND: "linear",
    LINEAR_INT8: "linear",
    WRITE: "attention",
    ATTEND: "attention",
    ROPE: "attention",
    RMS_NORM: "norms",
    LAYER_NORM: "norms",
}

_i64, _p = ctypes.c_int64, ctypes.c_void_p


class Program:
    """The layers of a decoder. Made by `program`."""

    def __init__(self, decoder: Any, weight: type) -> None:
        self._arch, self._cascade, params = decoder.arch, decoder.backend.cascade, decoder.params
        self._halves = [cos.shape[-1] for cos, _ in params["ropes"]]
        self._kept: list[Any] = []  # what the operations point to
        self._ops: list[dict[str, Any]] = []
        self._rounds = hasattr(weight, "scales")  # bytes
        self.dtype = params["norm"].dtype
        self._after_last = False
        a = self._arch
        for i, (kind, layer) in enumerate(zip(a.layers, params["layers"], strict=True)):
            self._layer(i, kind, layer)
        self._norm("norm", params, LAST_H, NORMED)
        self._list = (Op * len(self._ops))(*(Op(**op) for op in self._ops))
        wide = params["layers"][0]["gate_up"].shape[0]
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        widths = [a.hidden_size, a.hidden_size, q + 2 * kv, q, wide, a.intermediate, a.hidden_size, a.hidden_size, q]
        deepest = max(q, a.intermediate, a.hidden_size)
        self._bytes = library().hibachi_int8_rounded(deepest) if self._rounds else 0  # of a row
        self._widths, self._offsets = widths, [sum(widths[1:i]) for i in range(1, len(widths))]
        self._wide = (_i64 * (len(widths) + 1))(*widths, 0)
        self._run = library()["hibachi_step_" + ("bf16" if self.dtype == torch.bfloat16 else "f32")]
        self._run.argtypes, self._run.restype = (_p, _p, _i64), None
        self.seconds: Any = None
        """If it is set to zeros, float64 [operations], the seconds of each are added to it."""
        self.parts = [_PARTS.get(op["kind"], "model") for op in self._ops]
        """What each operation belongs to, for a profile."""

    def __call__(
        self, h: Array, turns: list[list[Array]], cache: list[LayerCache], x: StepInputs[Array]
    ) -> tuple[Array, list[LayerCache]]:
        """h [T, hidden], which is overwritten; turns: (cos, sin) [T, 1, half] of each set of rotary frequencies.

        Returns the normalised hidden states [n_out, hidden] at x.last, and the cache.
        """
        a, tokens, outputs = self._arch, len(h), len(x.last)
        space = torch.empty(tokens * sum(self._widths[1:]), dtype=self.dtype)
        base, size = space.data_ptr(), space.element_size()
        rounded = torch.empty(tokens * self._bytes, dtype=torch.uint8)
        places = (h.data_ptr(), *(base + tokens * at * size for at in self._offsets), rounded.data_ptr())
        buffers = (_p * len(places))(*places)
        turned = (_p * max(1, 2 * len(turns)))(*(t.data_ptr() for pair in turns for t in pair))
        halves = (_p * (2 * len(cache)))(*(half.data_ptr() for layer in cache for half in layer[:2]))
        index = [_index(t) for t in (x.slot, x.pos, x.cu_q, x.block_table, x.last)]
        step = Step(
            *(tokens, outputs, len(index[2]) - 1, index[3].shape[1], cache[0][2], a.heads, a.kv_heads, a.head_dim),
            self._cascade,
            *(t.data_ptr() for t in index),
            *(ctypes.addressof(some) for some in (buffers, self._wide, turned, halves)),
            None if self.seconds is None else self.seconds.ctypes.data,
        )
        self._run(ctypes.addressof(step), ctypes.addressof(self._list), len(self._list))
        at = tokens * self._offsets[NORMED - 1]
        return space[at : at + outputs * a.hidden_size].view(outputs, a.hidden_size), cache

    # ---- the list ----------------------------------------------------------------------------------------------

    def _layer(self, i: int, kind: Any, layer: dict[str, Any]) -> None:
        a = self._arch
        q, turned = a.heads * a.head_dim, a.heads + a.kv_heads
        self._linear(layer, "qkv", self._norm("attn_norm", layer, H, NORMED), QKV)
        if a.qk_norm == "all":
            self._norm("q_norm", layer, QKV, QKV, n=q)
            self._norm("k_norm", layer, QKV, QKV, at=q, n=a.kv_heads * a.head_dim)
        elif a.qk_norm == "head":
            self._norm("q_norm", layer, QKV, QKV, n=a.head_dim, groups=a.heads)
            self._norm("k_norm", layer, QKV, QKV, at=q, n=a.head_dim, groups=a.kv_heads)
        if kind.rope is not None:
            self._add(ROPE, QKV, QKV, which=kind.rope, groups=turned, n=a.head_dim, k=self._halves[kind.rope])
        seen = dict(
            which=i,
            window=kind.window or 0,
            scale=a.head_dim**-0.5 if a.attention_scale is None else a.attention_scale,
            number=a.attention_softcap or 0.0,
        )
        self._add(WRITE, QKV, QKV, **seen)
        self._add(ATTEND, QKV, MIXED, **seen)
        h, mixed = H, MIXED
        if i == len(a.layers) - 1:  # nothing reads the other tokens any more
            h, mixed = LAST_H, LAST_MIXED
            self._add(TAKE, H, h)
            self._add(TAKE, MIXED, mixed)
            self._after_last = True
        if not a.parallel:
            self._joined(layer, "o", mixed, h, "attn_post_norm")
        inner = self._linear(layer, "gate_up", self._norm("mlp_norm", layer, h, NORMED), WIDE)
        self._add(ACTIVATE, inner, INNER, which=ACTIVATIONS[a.activation], gated=a.gated, n=a.intermediate)
        if a.parallel:  # both have read the same h
            self._joined(layer, "o", mixed, h, "attn_post_norm")
        self._joined(layer, "down", INNER, h, "mlp_post_norm")

    def _joined(self, layer: dict[str, Any], name: str, source: int, h: int, norm: str) -> None:
        """A product of which the result, perhaps normalised, is added to the residual stream."""
        if norm in layer:
            self._norm(norm, layer, self._linear(layer, name, source, OUT), h, added=h)
        else:
            self._linear(layer, name, source, h, added=h, scale=self._arch.residual_scale)

    def _norm(self, name: str, layer: dict[str, Any], source: int, to: int, *, at: int = 0, **more: Any) -> int:
        """The buffer that holds the result: `source` if there is no such norm."""
        if name not in layer:
            return source
        kind = LAYER_NORM if self._arch.norm == "layer" else RMS_NORM
        w, b = layer[name].contiguous(), layer.get(f"{name}_bias")
        b = None if b is None else b.contiguous()
        self._kept += [w, b]
        more = dict(n=len(w), groups=1, b=None if b is None else b.data_ptr()) | more
        self._add(kind, source, to, from_at=at, to_at=at, w=w.data_ptr(), number=self._arch.norm_eps, **more)
        return to

    def _linear(self, layer: dict[str, Any], name: str, source: int, to: int, **more: Any) -> int:
        w, b = layer[name], layer.get(f"{name}_bias")
        b = None if b is None else b.contiguous()
        self._kept += [w, b]
        n, k = w.shape
        more |= dict(w=w.pointer, b=None if b is None else b.data_ptr(), n=n, k=k)
        if self._rounds:
            self._add(ROUND, source, ROUNDED, k=k)
            self._add(LINEAR_INT8, ROUNDED, to, scales=w.scales.data_ptr(), **more)
        else:
            self._add(LINEAR, source, to, **more)
        return to

    def _add(self, kind: int, source: int, to: int, **more: Any) -> None:
        settled = dict(kind=kind, from_=source, to=to, outputs=self._after_last, added=-1, groups=1, scale=1.0)
        self._ops.append(settled | more)


def program(decoder: Any, weight: type[Any]) -> Program | None:
    """The decoder's layers as a program, or None if one of them has something that no operation computes.

    weight: the class of packed matrices.
    """
    a, params = decoder.arch, decoder.params
    dtype = params["norm"].dtype
    matrices: list[Any] = [layer.get(name) for layer in params["layers"] for name in ("qkv", "o", "gate_up", "down")]
    fits = (
        a.activation in ACTIVATIONS
        and not any(layer.experts for layer in a.layers)
        and all(type(w) is weight and w.dtype == dtype and not w.shape[1] % 2 for w in matrices)
        and all(t.dtype == dtype for pair in params["ropes"] for t in pair)
        and (a.residual_scale == 1.0 or (a.norms == "before" and not a.parallel))
        and not (a.parallel and a.norms != "before")
    )
    return Program(decoder, weight) if fits else None


def _index(t: torch.Tensor) -> torch.Tensor:
    return t if t.dtype == torch.int32 and t.is_contiguous() else t.to(torch.int32).contiguous()
