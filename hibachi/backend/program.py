"""A `Decoder` as one list of operations, from token ids to logits, which step.cpp runs in one call."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array, HostArray, LayerCache
from hibachi.backend.host_arrays import address_of
from hibachi.backend.kernels.abi import Op, Step, addresses
from hibachi.backend.kernels.memory import ALIGNED
from hibachi.backend.layout import StepInputs
from hibachi.backend.packing import INTO

RMS_NORM, LINEAR, ROPE, WRITE, ATTEND, ACTIVATE, TAKE, ROUND, LINEAR_INT8, LAYER_NORM = range(10)
ROUTE, SORT, GATHER, MIX, LINEAR_Q4_0, LINEAR_Q8_0, EMBED, ADD = range(10, 18)
ROUNDING = {"int8": LINEAR_INT8, "q4_0": LINEAR_Q4_0, "q8_0": LINEAR_Q8_0}  # kinds of weights that take rounded rows
# Buffers, each with a row for every token; those of experts with a piece for each expert of a token.
H, NORMED, QKV, MIXED, WIDE, INNER, OUT, LAST_H, LAST_MIXED, ODDS, GATHERED, WIDES, INNERS = range(13)
# logits, sums and a leaf of what experts give: float32; rounded: rows as bytes; lists: who goes to which expert
FINAL, LOGITS, ROUNDED, LISTS, SUMS, LEAF = range(13, 19)
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}  # as in small.h
_PARTS = {
    LINEAR: "linear",
    ROUND: "linear",
    ADD: "linear",
    **dict.fromkeys(ROUNDING.values(), "linear"),
    WRITE: "attention",
    ATTEND: "attention",
    ROPE: "attention",
    RMS_NORM: "norms",
    LAYER_NORM: "norms",
}


@dataclass(frozen=True, slots=True, eq=False)
class ProgramMemory:
    """What a call with so many tokens works in, and the next one of as many again. h, final: these buffers' places.
    sums: what is added up over processes, float32 [tokens, hidden].
    """

    tokens: int
    step: Step
    buffers: Any
    h: int
    final: int
    held: HostArray
    sums: HostArray


class Program:
    """The operations of a decoder: the rows of its embedding, its layers, its head. Made by `program`."""

    def __init__(self, decoder: Any) -> None:
        self._arch, self._backend, params = decoder.arch, decoder.backend, decoder.params
        self._halves = [cos.shape[-1] for cos, _ in params["ropes"]]
        a = self._arch
        self._kept: list[Any] = []  # what the operations point to
        self._ops: list[dict[str, Any]] = []
        self.dtype = self._backend.dtype(decoder.dtype)
        self._after_last = False
        self._cuts: list[int] = []  # operations before which sums are added up over processes
        self._stage = self._backend.place
        if self._stage.first:
            embed = params["embed"]
            rows, scales = embed.pointers
            self._kept.append(embed)
            self._add(EMBED, H, H, which=INTO[embed.kind], w=rows, scales=scales, n=a.hidden_size)
        for i, (kind, layer) in enumerate(zip(a.layers, params["layers"], strict=True)):
            self._layer(i, kind, layer)
        if self._stage.last:
            self._norm("norm", params, LAST_H, FINAL)
        self._before_head = len(self._ops)
        if self._stage.last:
            self._linear(params, "head", FINAL, LOGITS, wide=1)
        self._list = (Op * len(self._ops))(*(Op(**op) for op in self._ops))
        q, kv, hidden, gates = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.hidden_size, 1 + a.gated
        widths = [hidden, hidden, q + 2 * kv, q, gates * a.intermediate, a.intermediate, hidden, hidden, q]
        each, inner, odds = (e.per_token, e.intermediate, e.count + e.count % 2) if (e := a.experts) else (0, 0, 0)
        self._widths = [*widths, odds, each * hidden, each * gates * inner, each * inner, hidden]
        self._kernels = run = self._backend.library.kernels
        deepest = run.int8_rounded(max(q, a.intermediate, hidden)), each * run.int8_rounded(max(inner, hidden))
        self._bytes = max(deepest) if any(op["kind"] == ROUND for op in self._ops) else 0  # of a token
        self._outputs = params["head"].shape[0] if self._stage.last else 0  # of a process, where there are several
        self._wide = (ctypes.c_int64 * (LEAF + 1))(*self._widths, self._outputs, 0, 0, hidden, each * hidden)
        written = {op["to"] for op in self._ops}
        sums = self._backend.local_leaves.bit_length() if LEAF in written else SUMS in written
        self._summed = [4 * sums * hidden, 4 * (LEAF in written) * each * hidden]  # bytes of a token
        self._code = self._backend.codes[self.dtype]
        self._known: tuple[weakref.ref[Any], Any] | None = None  # the cache of the last step, and where it lies
        self._turned: tuple[Any, list[Array], Any, int] | None = None  # the tables of angles of the last step
        self._idle: list[ProgramMemory] = []
        self.seconds: HostArray = np.zeros(len(self._ops))
        """Of each operation, float64 [operations], added up."""
        self.parts = [_PARTS.get(op["kind"], "model") for op in self._ops]
        """What each operation belongs to."""
        self._sorts = [op["outputs"] for op in self._ops if op["kind"] == SORT]
        self.expert_tokens: HostArray = np.zeros(a.experts.count if a.experts and self._sorts else 0, np.int64)
        """How many tokens each expert of the last layer with experts has computed, int64 [experts]."""

    def __call__(
        self,
        params: Any,
        cache: list[LayerCache],
        x: StepInputs[Array],
        h: Array | None = None,
        *,
        logits: bool = True,
    ) -> Array:
        """Logits [n_out, vocab] in float32 at x.last; or [n_out, hidden], what the head sees; or [T, hidden], what the
        next stage goes on with.

        params: of the decoder, or with other tables of angles. Arrays of x: also those of NumPy, whatever the backend.
        h [T, hidden]: the tokens as they are embedded, which is overwritten; None means as rows of the matrix.
        """
        b, a = self._backend, self._arch
        arrays = x.tok, x.slot, x.pos, x.cu_q, x.block_table, x.last
        tok, slot, pos, cu_q, table, last = (t if type(t) is np.ndarray else b.get(t) for t in arrays)
        index = np.concatenate([tok, slot, pos, cu_q, table.reshape(-1), last], dtype=np.int32, casting="same_kind")
        try:
            memory = self._idle.pop()  # no other thread has it
        except IndexError:
            memory = None
        if memory is None or memory.tokens != len(tok):
            memory = None  # before there is memory for another
            memory = self._memory(len(tok))
        n = len(last)
        buffers, step = memory.buffers, memory.step
        buffers[LOGITS], buffers[FINAL], buffers[H] = None, memory.final, memory.h if h is None else b.address(h)
        if not self._stage.last:
            logits, out = False, b.empty((len(tok), a.hidden_size), self.dtype) if h is None else h
            buffers[H] = b.address(out)
        elif logits:
            out = b.output((n, self._outputs))
            buffers[LOGITS] = b.address(out)
        else:
            out = b.empty((n, a.hidden_size), self.dtype)
            buffers[FINAL] = b.address(out)
        halves, (_, _, turns, step.positions) = self._halves_of(cache), self._angles_of(params["ropes"])
        step.outputs, step.rows, step.blocks = n, len(cu_q) - 1, table.shape[1]
        step.block_size, step.cache_blocks = cache[0].block_size, len(cache[0].keys)
        step.index, step.turns, step.caches = address_of(index), ctypes.addressof(turns), ctypes.addressof(halves)
        first, end = int(h is not None and self._stage.first), len(self._list) if logits else self._before_head
        kept = (self.seconds,)  # they live as long as the call, whoever sets others
        for cut in (*self._cuts, end):
            step.seconds = kept[0][first:].ctypes.data
            self._kernels.step(self._code, ctypes.addressof(step), ctypes.addressof(self._list[first]), cut - first)
            if cut != end:
                sums = memory.sums[: n if self._ops[cut]["outputs"] else len(tok)]
                b.group.sum(b.from_host(sums, b.xp.float32))
            first = cut
        if len(self.expert_tokens):
            self._count(buffers[LISTS], n if self._sorts[-1] else len(tok))
        self._idle.append(memory)
        return out

    def told(self) -> tuple[dict[str, float], list[int]]:
        """For metrics: the seconds of each part, and `expert_tokens`."""
        seconds: dict[str, float] = {}
        for part, took in zip(self.parts, self.seconds.tolist(), strict=True):
            seconds[part] = seconds.get(part, 0.0) + took
        return seconds, self.expert_tokens.tolist()

    def _count(self, lists: int, tokens: int) -> None:
        """Count who went to which expert: `Lists` of experts.h, of the last layer with experts."""
        experts = len(self.expert_tokens)
        starts = (ctypes.c_int32 * (experts + 1)).from_address(lists + 16 * tokens * self._arch.experts.per_token)
        self.expert_tokens += np.diff(starts[:])

    def _memory(self, tokens: int) -> ProgramMemory:
        a, item = self._arch, 2 if self._code else 4  # bytes of a number
        lists = 0 if (e := a.experts) is None else self._kernels.lists(tokens, e.per_token, e.count)
        summed = [tokens * size for size in self._summed]
        sizes = [*(tokens * width * item for width in self._widths), 0, tokens * self._bytes, lists, *summed]
        ends = list(accumulate(size + -size % ALIGNED for size in sizes))
        held = np.empty(ends[-1] + ALIGNED, np.uint8)
        base = held.ctypes.data + -held.ctypes.data % ALIGNED
        buffers = addresses([base + at for at in (0, *ends[:-1])])
        step = Step(tokens=tokens, heads=a.heads, kv_heads=a.kv_heads, head_dim=a.head_dim, vocabulary=a.vocab_size)
        step.cascade, step.buffers = self._backend.cascade, ctypes.addressof(buffers)
        step.widths = ctypes.addressof(self._wide)
        sums = held[base - held.ctypes.data + ends[-3] :][: summed[0]].view(np.float32).reshape(-1, a.hidden_size)
        return ProgramMemory(tokens, step, buffers, buffers[H], buffers[FINAL], held, sums)

    def _halves_of(self, cache: list[LayerCache]) -> Any:
        """The addresses of all keys and values. Another thread may step another cache meanwhile."""
        known = self._known
        if known is None or known[0]() is not cache[0].keys:
            halves = addresses([self._backend.address(t) for c in cache for t in (c.keys, c.values)])
            self._known = known = weakref.ref(cache[0].keys), halves
        return known[1]

    def _angles_of(self, ropes: list[tuple[Array, Array]]) -> tuple[Any, list[Array], Any, int]:
        """The tables of angles: as they are, row by row, their addresses, and of how many positions they are. They
        grow; see `Decoder.reach`.
        """
        known = self._turned
        if known is None or known[0] is not ropes:
            tables = [self._backend.row_major(t) for pair in ropes for t in pair]
            positions = min((len(t) for t in tables), default=0)
            places = addresses([self._backend.address(t) for t in tables])
            self._turned = known = ropes, tables, places, positions
        return known

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
        if i == len(a.layers) - 1 and self._stage.last:  # nothing reads the other tokens any more
            h, mixed = LAST_H, LAST_MIXED
            self._add(TAKE, H, h)
            self._add(TAKE, MIXED, mixed)
            self._after_last = True
        if not a.parallel:
            self._joined(layer, "o", mixed, h, "attn_post_norm")
        normed = self._norm("mlp_norm", layer, h, NORMED)
        if kind.experts:
            self._experts(layer, normed, h)
            return
        inner = self._linear(layer, "gate_up", normed, WIDE)
        self._add(ACTIVATE, inner, INNER, which=ACTIVATIONS[a.activation], gated=a.gated, n=a.intermediate)
        if a.parallel:  # both have read the same h
            self._joined(layer, "o", mixed, h, "attn_post_norm")
        self._joined(layer, "down", INNER, h, "mlp_post_norm")

    def _experts(self, layer: dict[str, Any], source: int, h: int) -> None:
        """A mixture of experts, added to the residual stream."""
        a, e = self._arch, self._arch.experts
        among: dict[str, Any] = dict(experts=e.count, groups=e.per_token, which=LISTS)
        self._linear(layer, "router", source, ODDS)
        self._add(ROUTE, ODDS, ODDS, gated=e.normalised, **among)
        self._add(SORT, ODDS, ODDS, **among)
        self._add(GATHER, source, GATHERED, n=a.hidden_size, **among)
        self._of_experts(layer["gate_up"], GATHERED, among, WIDES)
        how = dict(which=ACTIVATIONS[a.activation], gated=a.gated, n=e.intermediate, groups=e.per_token)
        self._add(ACTIVATE, WIDES, INNERS, **how)
        normed = "mlp_post_norm" in layer
        to, more = (OUT, {}) if normed else (h, dict(added=h, scale=a.residual_scale))
        if self._backend.leaves == 1:
            self._of_experts(layer["down"], INNERS, among, GATHERED)
            self._add(MIX, GATHERED, to, n=a.hidden_size, **among, **more)
        else:
            self._of_experts(layer["down"], INNERS, among)
            self._added(to, n=a.hidden_size, **more)
        if normed:
            self._norm("mlp_post_norm", layer, OUT, h, added=h)

    def _of_experts(self, weights: list[Any], source: int, among: dict[str, Any], to: int | None = None) -> None:
        """The products of all experts. to: None means SUMS, where they are mixed leaf by leaf."""
        n, k = weights[0].shape
        w, scales = (addresses(pointers) for pointers in zip(*(w.pointers for w in weights), strict=True))
        self._kept += [weights, w, scales]
        places = dict(w=ctypes.addressof(w), scales=ctypes.addressof(scales))
        kind, source = self._factors(weights[0].kind, source, k, among["groups"])
        if to is not None:
            self._add(kind, source, to, n=n, k=k, **places, **among)
            return
        for leaf in range(self._backend.local_leaves):
            one = dict(leaf=leaf, leaves=self._backend.local_leaves, wide=1, n=n, **among)
            self._add(kind, source, LEAF, k=k, **places, **one)
            self._add(MIX, LEAF, SUMS, **one)

    def _joined(self, layer: dict[str, Any], name: str, source: int, h: int, norm: str) -> None:
        """A product of which the result, perhaps normalised, is added to the residual stream."""
        if norm in layer:
            self._norm(norm, layer, self._reduced(layer, name, source, OUT), h, added=h)
        else:
            self._reduced(layer, name, source, h, added=h, scale=self._arch.residual_scale)

    def _reduced(self, layer: dict[str, Any], name: str, source: int, to: int, **more: Any) -> int:
        """A product of `linear_reduce`."""
        leaves = self._backend.local_leaves
        if self._backend.place.tp_size == 1:
            return self._linear(layer, name, source, to, leaves=leaves, **more)
        w, b = layer[name], layer.get(f"{name}_bias")
        self._linear({name: w}, name, source, SUMS, leaves=leaves, wide=1)
        b = None if b is None else self._backend.row_major(b)
        self._kept += [b]
        self._added(to, n=w.shape[0], b=None if b is None else self._backend.address(b), **more)
        return to

    def _added(self, to: int, **more: Any) -> None:
        """What is in SUMS, of all processes."""
        if self._backend.place.tp_size > 1:
            self._cuts.append(len(self._ops))
        self._add(ADD, SUMS, to, **more)

    def _norm(self, name: str, layer: dict[str, Any], source: int, to: int, *, at: int = 0, **more: Any) -> int:
        """The buffer that holds the result: `source` if there is no such norm."""
        if name not in layer:
            return source
        kind = LAYER_NORM if self._arch.norm == "layer" else RMS_NORM
        w, b = self._backend.row_major(layer[name]), layer.get(f"{name}_bias")
        b = None if b is None else self._backend.row_major(b)
        self._kept += [w, b]
        more = dict(n=len(w), groups=1, b=None if b is None else self._backend.address(b)) | more
        self._add(
            kind, source, to, from_at=at, to_at=at, w=self._backend.address(w), number=self._arch.norm_eps, **more
        )
        return to

    def _linear(self, layer: dict[str, Any], name: str, source: int, to: int, **more: Any) -> int:
        w, b = layer[name], layer.get(f"{name}_bias")
        b = None if b is None else self._backend.row_major(b)
        self._kept += [w, b]
        n, k = w.shape
        data, scales = w.pointers
        more |= dict(w=data, scales=scales, b=None if b is None else self._backend.address(b), n=n, k=k)
        kind, source = self._factors(w.kind, source, k)
        self._add(kind, source, to, **more)
        return to

    def _factors(self, kind: str, source: int, k: int, groups: int = 1) -> tuple[int, int]:
        """The operation that multiplies with weights of a kind, and the buffer of what it multiplies."""
        if kind not in ROUNDING:
            return LINEAR, source
        self._add(ROUND, source, ROUNDED, k=k, groups=groups)
        return ROUNDING[kind], ROUNDED

    def _add(self, kind: int, source: int, to: int, **more: Any) -> None:
        settled = dict(
            kind=kind, from_=source, to=to, outputs=self._after_last, added=-1, groups=1, scale=1.0, leaves=1
        )
        self._ops.append(settled | more)


def fuses(arch: Any) -> bool:
    """Can a program compute such a model (`hibachi.llm.model.arch.Arch`)?"""
    return (
        arch.activation in ACTIVATIONS
        and (arch.residual_scale == 1.0 or (arch.norms == "before" and not arch.parallel))
        and not (arch.parallel and (arch.norms != "before" or any(layer.experts for layer in arch.layers)))
    )


def whole(arch: Any) -> bool:
    """Is there nothing that the array library computes in the model's dtype, before the layers or after them?"""
    return fuses(arch) and arch.embed_scale == 1.0 and not arch.learned_positions


def program(decoder: Any) -> Program | None:
    """The decoder as a program, or None if a layer of it has something that no operation computes."""
    params = decoder.params
    dtype = decoder.backend.dtype(decoder.dtype)
    matrices: list[Any] = [layer.get(name) for layer in params["layers"] for name in ("qkv", "o", "gate_up", "down")]
    matrices += [layer["router"] for layer in params["layers"] if "router" in layer]
    matrices += [params[name] for name in ("embed", "head") if name in params]

    def packed(w: Any) -> bool:
        if isinstance(w, list):  # experts, which are multiplied by one operation
            return all(map(packed, w)) and len({some.kind for some in w}) == 1
        odd = dtype == decoder.backend.dtype("bfloat16") and w.shape[1] % 2  # rows of pairs begin with a pair
        return hasattr(w, "pointers") and w.dtype == dtype and not odd

    fits = (
        fuses(decoder.arch)
        and (decoder.arch.qk_norm != "all" or decoder.backend.leaves == 1)
        and dtype in decoder.backend.codes
        and all(map(packed, matrices))
        and all(t.dtype == dtype for pair in params["ropes"] for t in pair)
    )
    return Program(decoder) if fits else None
