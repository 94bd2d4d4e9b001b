"""One decoder-only transformer, written once over the backend, for every architecture that `Arch` can describe.

A block is attention (grouped queries, Ainslie et al. 2023; rotary positions, Su et al. 2021) and a feed-forward part
(gated: Shazeer 2020; or a mixture of experts: Shazeer et al. 2017), each with its norms, added to the residual stream.
What an architecture does not have is not in its parameters, and is passed over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeAlias

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, LayerCache
from hibachi.backend.group import share
from hibachi.backend.layout import CacheSpec, Paged, StepInputs
from hibachi.backend.library import PORTABLE
from hibachi.backend.packing import Rows, quantization_of
from hibachi.common.phases import phase
from hibachi.errors import ConfigError
from hibachi.llm.model.arch import Arch, Layer
from hibachi.llm.model.rope import HostArray, room, tables
from hibachi.llm.model.shards import Shard, check_rounded, check_shards, stages_of
from hibachi.llm.model.weights import Weights, matrices

Params: TypeAlias = dict[str, Any]

_DTYPES = ("float32", "float16", "bfloat16", "float64")


class Decoder:
    """A `CachedModel`: packed new tokens and paged keys and values in, logits out.

    Of several stages each has some of the layers: it begins with what the one before has sent, and the first one has
    the embedding, the last one norm and head.

    params, a plain tree of arrays: embed and head [vocab, hidden] (one array if they are tied), norm [hidden],
    positions [max_model_len, hidden], for each set of rotary frequencies a pair (cos, sin) [positions, dims / 2] in
    `ropes`, of as many positions as `reach` was last asked for or more, and for each of `layers`:

        attn_norm, mlp_norm, attn_post_norm, mlp_post_norm  [hidden]
        qkv                  [(heads + 2 * kv_heads) * head_dim, hidden]
        q_norm, k_norm       [head_dim], or [heads * head_dim] and [kv_heads * head_dim]
        o                    [hidden, heads * head_dim]
        gate_up (or up)      [2 * intermediate, hidden]
        down                 [hidden, intermediate]
        router               [experts, hidden], with gate_up and down as lists over the experts

    and biases `qkv_bias` and so on; each where the model has it. Matrices that multiply the same input lie in one
    array: fewer and larger multiplications.
    """

    params: dict[str, Any]
    arch: Arch
    backend: ArrayBackend
    dtype: str
    max_model_len: int
    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]

    stage_layers: tuple[int, ...] = ()
    """How many layers each stage has; none where the model is in one piece."""
    any_shape = True  # for the engine: all products are the backend's, which are right for any number of tokens

    def __init__(self, arch: Arch, params: Params, backend: ArrayBackend, *, dtype: str, max_model_len: int) -> None:
        self.arch, self.params, self.backend = arch, params, backend
        self.dtype, self.max_model_len = dtype, max_model_len
        self.vocab_size: int = arch.vocab_size
        self.bos_ids, self.eos_ids = arch.bos_ids, arch.eos_ids
        self._reached = min((t.shape[0] for pair in params["ropes"] for t in pair), default=max_model_len)
        self._growing = threading.Lock()
        self.embed_size: int = arch.hidden_size  # prompts may be given as embeddings of this width
        # Rounded to the dtype, as in training.
        self._embed_scale = float(backend.get(backend.put(np.array([arch.embed_scale], np.float32), dtype))[0])
        # XLA rounds once what is scaled and then added.
        fuses = backend.shapes.compiled and (arch.residual_scale, arch.embed_scale) != (1.0, 1.0)
        self.portable: bool = dtype in PORTABLE and arch.logit_softcap is None and not fuses
        """Kernels compute all of which libraries may have other bits; what these compute is one number by another."""
        self.quantization: str = quantization_of(backend, params)
        self.fused: Callable[..., Any] | None = backend.fuse(self)
        """All of it in one call, where the backend can; None means operation by operation, with the same result."""

    @classmethod
    def build(
        cls,
        arch: Arch,
        tensors: Mapping[str, HostArray],
        backend: ArrayBackend,
        *,
        dtype: str | None = None,
        max_model_len: int | None = None,
    ) -> Decoder:
        """The model of a description and its tensors by canonical name.

        dtype: to compute with and to cache in; None means float32. max_model_len: the longest sequence to be ready for;
        None means what the model was trained for. Raises ConfigError, UnsupportedOperation for a dtype that the library
        lacks.
        """
        dtype, max_model_len = checked(backend, dtype, max_model_len, arch.max_positions)
        place = backend.place
        check_shards(arch, place.tp_size, backend.leaves, place.stages)
        stages = stages_of(arch, place.stages)
        if backend.group is not None:
            tensors = Shard(tensors, arch, place, stages[place.stage])
            arch = tensors.arch
        params = _params(arch, tensors, backend, dtype, max_model_len)
        check_rounded(params, backend)
        with phase("preparing the model"):
            model = cls(arch, params, backend, dtype=dtype, max_model_len=max_model_len)
        model.stage_layers = tuple(map(len, stages)) if place.stages > 1 else ()
        return model

    def cache_spec(self) -> CacheSpec:
        a = self.arch
        return [Paged(a.kv_heads, a.head_dim, a.head_dim, dtype=self.dtype)] * len(a.layers)

    def reach(self, positions: int) -> None:
        """Be ready for steps at positions below this, or `max_model_len`; call it before such a step takes `params`.

        The tables of angles grow to one of few sizes. `params` is another tree then; a step that computes with the old
        one, in another thread, goes on with it.
        """
        if positions <= self._reached or self._reached >= self.max_model_len:
            return
        with self._growing:
            have, b = self._reached, self.backend
            if positions <= have:
                return
            size = room(positions, self.max_model_len)
            ropes = []
            for rope, pair in zip(self.arch.ropes, self.params["ropes"], strict=True):
                more = tables(rope, size, start=have, longest=self.max_model_len)
                ropes.append(tuple(b.xp.concat([t, b.put(m, self.dtype)]) for t, m in zip(pair, more, strict=True)))
            self.params = self.params | {"ropes": ropes}
            self._reached = size

    @property
    def takes_host(self) -> bool:
        """For the engine: the index arrays of a step may stay NumPy's, as nothing but kernels reads them."""
        return self.fused is not None and type(self) is Decoder  # a class derived from it may look at them

    def step(self, params: Params, cache: list[LayerCache], x: StepInputs[Array]) -> tuple[Array, list[LayerCache]]:
        """Logits [n_out, vocab], float32, after the tokens at `x.last`, and the new cache. Depends on nothing else. A
        stage before the last one has no logits, and returns what `hidden` does.
        """
        a, b = self.arch, self.backend
        if not b.place.last:
            return self.hidden(params, cache, x)
        if self.fused is not None and params is self.params:
            logits = self.fused(params, cache, x, self._entering(params, x))
        else:
            h, cache = self.hidden(params, cache, x)
            logits = b.logits(h, params["head"], params.get("head_bias"))
        logits = b.gather(logits, self.vocab_size)
        if a.logit_divisor != 1.0:
            logits = logits / a.logit_divisor
        if a.logit_softcap is not None:
            logits = b.xp.tanh(logits / a.logit_softcap) * a.logit_softcap
        return logits, cache

    def hidden(self, params: Params, cache: list[LayerCache], x: StepInputs[Array]) -> tuple[Array, list[LayerCache]]:
        """What the head sees: the last normalised hidden states [n_out, hidden] at `x.last`, and the new cache. A stage
        before the last one sends those of all tokens to the next, and returns them.
        """
        h = self._entering(params, x)
        if self.fused is not None and params is self.params:
            out = self.fused(params, cache, x, h, logits=False)
        else:
            out, cache = self._through_layers(params, cache, self._on_device(x), h)
        if self.backend.group is not None and not self.backend.place.last:
            self.backend.group.send(out)
        return out, cache

    def _through_layers(
        self, params: Params, cache: list[LayerCache], x: StepInputs[Array], h: Array | None
    ) -> tuple[Array, list[LayerCache]]:
        a, b = self.arch, self.backend
        if h is None:
            h = b.weight_rows(params["embed"], x.tok)
        turns = [[b.take(table, x.pos)[:, None, :] for table in pair] for pair in params["ropes"]]  # [T, 1, dims / 2]
        new: list[LayerCache] = []
        for kind, layer, memory in zip(a.layers, params["layers"], cache, strict=True):
            turn = None if kind.rope is None else turns[kind.rope]
            out, memory = self._attend(kind, layer, memory, self._norm(h, layer, "attn_norm"), x, turn)
            new.append(memory)
            if len(new) == len(cache) and b.place.last:  # nothing reads the other tokens any more
                h, out = b.take(h, x.last), b.take(out, x.last)
            out = self._norm(b.linear_reduce(out, layer["o"], layer.get("o_bias")), layer, "attn_post_norm")
            if a.parallel:
                h = h + out + self._feed_forward(kind, layer, self._norm(h, layer, "mlp_norm"))
                continue
            h = h + self._residual(out)
            out = self._feed_forward(kind, layer, self._norm(h, layer, "mlp_norm"))
            h = h + self._residual(self._norm(out, layer, "mlp_post_norm"))
        return self._norm(h, params, "norm") if b.place.last else h, new

    def _on_device(self, x: StepInputs[Array]) -> StepInputs[Array]:
        """The same in arrays of the backend, where some are NumPy's."""
        b = self.backend
        if b.owns(x.tok):
            return x
        named = {f.name: getattr(x, f.name) for f in fields(x)}
        return replace(x, **{name: b.put(t.copy()) for name, t in named.items() if isinstance(t, np.ndarray)})

    def _entering(self, params: Params, x: StepInputs[Array]) -> Array | None:
        """What the layers begin with, [T, hidden]; None means rows of the embedding as they are."""
        a, b = self.arch, self.backend
        if b.group is not None and not b.place.first:
            return b.group.receive((x.tok.shape[0], a.hidden_size), b.dtype(self.dtype))
        if a.embed_scale == 1.0 and not a.learned_positions and x.embeds is None:
            return None
        x = self._on_device(x)
        h = b.weight_rows(params["embed"], x.tok)
        if a.embed_scale != 1.0:
            h = h * self._embed_scale
        if x.embeds is not None and x.embedded is not None:
            h = b.xp.where(x.embedded[:, None], b.xp.astype(x.embeds, h.dtype, copy=False), h)
        if a.learned_positions:
            h = h + b.take(params["positions"], x.pos)
        return h

    def _norm(self, h: Array, params: Params, name: str) -> Array:
        """h normalised, or as it is if there is no such norm."""
        if name not in params:
            return h
        if self.arch.norm == "layer":
            return self.backend.layer_norm(h, params[name], params[f"{name}_bias"], self.arch.norm_eps)
        return self.backend.rms_norm(h, params[name], self.arch.norm_eps)

    def _residual(self, out: Array) -> Array:
        b, scale = self.backend, self.arch.residual_scale  # JAX would round the number to the dtype first
        return out if scale == 1.0 else b.xp.astype(b.float32(out) * scale, out.dtype, copy=False)

    def _attend(
        self,
        kind: Layer,
        layer: Params,
        memory: LayerCache,
        h: Array,
        x: StepInputs[Array],
        turn: list[Array] | None,
    ) -> tuple[Array, LayerCache]:
        """[T, hidden] -> [T, heads * head_dim], before the output projection."""
        a, b = self.arch, self.backend
        tokens, width, turned = h.shape[0], a.heads * a.head_dim, a.heads + a.kv_heads
        qkv = b.linear(h, layer["qkv"], layer.get("qkv_bias"))
        if a.qk_norm == "all":
            q, k = qkv[:, :width], qkv[:, width : turned * a.head_dim]
            if b.leaves == 1:
                q, k = self._norm(q, layer, "q_norm"), self._norm(k, layer, "k_norm")
            else:
                q, k = b.rms_norm_reduce([q, k], [layer["q_norm"], layer["k_norm"]], a.norm_eps)
            qkv = b.xp.concat([q, k, qkv[:, turned * a.head_dim :]], axis=-1)
        qkv = b.xp.reshape(qkv, (tokens, turned + a.kv_heads, a.head_dim))
        qk, v = qkv[:, :turned, :], qkv[:, turned:, :]
        if a.qk_norm == "head":
            q, k = self._norm(qk[:, : a.heads, :], layer, "q_norm"), self._norm(qk[:, a.heads :, :], layer, "k_norm")
            qk = b.xp.concat([q, k], axis=1)
        if turn is not None:  # queries and keys together
            cos, sin = turn
            dims = 2 * cos.shape[-1]
            if dims == a.head_dim:
                qk = b.rope(qk, cos, sin)
            else:
                qk = b.xp.concat([b.rope(qk[..., :dims], cos, sin), qk[..., dims:]], axis=-1)
        special: dict[str, Any] = dict(scale=a.attention_scale, window=kind.window, softcap=a.attention_softcap)
        special = {name: value for name, value in special.items() if value is not None}
        out, memory = b.attend(qk[:, : a.heads, :], qk[:, a.heads :, :], v, memory, x, **special)
        return b.xp.reshape(out, (tokens, width)), memory

    def _feed_forward(self, kind: Layer, layer: Params, h: Array) -> Array:
        """[T, hidden] -> [T, hidden]."""
        b = self.backend
        if not kind.experts:
            inner = self._activate(b.linear(h, layer["gate_up"], layer.get("gate_up_bias")))
            return b.linear_reduce(inner, layer["down"], layer.get("down_bias"))
        experts = self.arch.experts
        assert experts is not None
        odds = b.linear(h, layer["router"])
        weights, chosen = b.route(odds, experts.per_token, normalised=experts.normalised)
        into, out, activation = layer["gate_up"], layer["down"], self.arch.activation
        return b.experts_reduce(h, chosen, weights, into, out, activation, gated=self.arch.gated)

    def _activate(self, inner: Array) -> Array:
        """The hidden units of a feed-forward part from what its projections in give."""
        if self.arch.gated:
            return self.backend.gated(inner, self.arch.activation)
        return getattr(self.backend, self.arch.activation)(inner)


# ---- loading -------------------------------------------------------------------------------------------------------


def checked(backend: ArrayBackend, dtype: str | None, max_model_len: int | None, longest: int) -> tuple[str, int]:
    """The dtype and the context to load with. Raises ConfigError, UnsupportedOperation."""
    dtype = dtype or "float32"
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}; got {dtype!r}.")
    backend.dtype(dtype)  # raises where the library has none
    if max_model_len is not None and not 1 <= max_model_len <= longest:
        raise ConfigError(
            f"max_model_len must be between 1 and {longest} (max_position_embeddings of this model); "
            f"got {max_model_len}."
        )
    return dtype, longest if max_model_len is None else max_model_len


_NORMS = ("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm", "q_norm", "k_norm")
_FUSED = {"qkv": ("q", "k", "v"), "o": (), "gate_up": ("gate", "up"), "down": ()}  # ours -> parts, one below the other


def _params(arch: Arch, files: Mapping[str, HostArray], b: ArrayBackend, dtype: str, max_model_len: int) -> Params:
    what = "reading weights" if b.quantization == "none" else "reading and quantizing weights"
    with phase(what, len(arch.layers), "layers") as p:
        params = _outer(arch, files, b, dtype, max_model_len)
        params["layers"] = []
        for i, kind in enumerate(arch.layers):
            params["layers"].append(_layer(arch, kind, files, f"layers.{i}.", b, dtype))
            p.update(i + 1)
    return params


def _outer(arch: Arch, files: Mapping[str, HostArray], b: ArrayBackend, dtype: str, max_model_len: int) -> Params:
    """What belongs to no layer."""
    ropes = [tables(rope, room(1, max_model_len), longest=max_model_len) for rope in arch.ropes]
    params: Params = {"ropes": [tuple(b.put(table, dtype) for table in pair) for pair in ropes]}
    if b.place.first:
        params["embed"] = b.put_vocabulary(matrices_of(files, "embed.weight"), dtype)
        if arch.learned_positions:
            params["positions"] = b.put(files["positions.weight"][:max_model_len], dtype)
    if b.place.last:
        params["head"] = params["embed"] if arch.tied else b.put_vocabulary(matrices_of(files, "head.weight"), dtype)
        if arch.head_bias:
            params["head_bias"] = b.put(files["head.bias"], dtype)
        _put_norm(params, "norm", arch, files, "norm", b, dtype)
    return params


def _layer(arch: Arch, kind: Layer, files: Mapping[str, HostArray], at: str, b: ArrayBackend, dtype: str) -> Params:
    layer: Params = {}
    for name in _NORMS:
        if f"{at}{name}.weight" in files:
            _put_norm(layer, name, arch, files, f"{at}{name}", b, dtype)
    for ours, parts in _FUSED.items():
        if kind.experts and ours in ("gate_up", "down"):
            continue
        names = [f"{at}{n}" for n in ((ours,) if f"{at}{ours}.weight" in files else parts)]
        names = [n for n in names if f"{n}.weight" in files]  # without a gate, `up` is alone
        weights = [matrices_of(files, f"{n}.weight") for n in names]
        if any(f"{n}.bias" in files for n in names):
            biases = [
                files[f"{n}.bias"] if f"{n}.bias" in files else np.zeros(sum(w.shape[0] for w in some), np.float32)
                for n, some in zip(names, weights, strict=True)
            ]
            layer[f"{ours}_bias"] = b.put(np.concatenate(biases), dtype)
        flat = [w for some in weights for w in some]
        layer[ours] = b.put_rows(flat, dtype) if parts else _columns(flat, b, dtype)
    if kind.experts:
        gate, up, down = (matrices_of(files, f"{at}experts.{n}.weight") for n in ("gate", "up", "down"))
        layer["router"] = b.put_precise(files[f"{at}router.weight"], dtype)
        layer["gate_up"] = [b.put_rows(pair, dtype) for pair in zip(gate, up, strict=True)]
        layer["down"] = [_columns([w], b, dtype) for w in down]
    return layer


def _columns(parts: list[Rows], b: ArrayBackend, dtype: str) -> Array:
    """Those of a matrix that this process has."""
    if b.place.tp_size == 1:
        return b.put_rows(parts, dtype)
    mine = share(parts[0].shape[1], b.place.tp_rank, b.place.tp_size)
    return b.put_columns(parts, dtype, mine.start, mine.stop)


def matrices_of(files: Mapping[str, HostArray], name: str) -> list[Rows]:
    """See `Weights.matrices`."""
    return files.matrices(name) if isinstance(files, Weights) else matrices(files[name])


def _put_norm(
    params: Params, name: str, arch: Arch, files: Mapping[str, HostArray], theirs: str, b: ArrayBackend, dtype: str
) -> None:
    weight = files[f"{theirs}.weight"]
    params[name] = b.put(weight + np.float32(1) if arch.norm_plus_one else weight, dtype)
    if f"{theirs}.bias" in files:
        params[f"{name}_bias"] = b.put(files[f"{theirs}.bias"], dtype)
