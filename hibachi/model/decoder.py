"""One decoder-only transformer, written once over the backend.

A block is the pre-norm block of Llama (Touvron et al. 2023): grouped-query attention (Ainslie et al. 2023) with rotary
positions (Su et al. 2021), then a gated feed-forward part (SwiGLU, Shazeer 2020), each behind an RMSNorm and added to
its input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hibachi.errors import ConfigError
from hibachi.model.arch import Arch, LinearScaling, Llama3Scaling, load_arch
from hibachi.model.weights import Checkpoint, HostArray
from hibachi.tensor.array_backend import Array, ArrayBackend, LayerCache
from hibachi.tensor.cache import CacheSpec, Paged, StepInputs

Params: TypeAlias = dict[str, Any]

_DTYPES = ("float32", "float16", "bfloat16", "float64")


class Decoder:
    """A `CachedModel`: packed new tokens and paged keys and values in, logits out.

    params, a plain tree of arrays: embed and head [vocab, hidden] (one array if they can be), norm [hidden], cos and
    sin [max_len, head_dim / 2], and for each of `layers`:

        attn_norm, mlp_norm  [hidden]
        qkv                  [(heads + 2 * kv_heads) * head_dim, hidden]
        o                    [hidden, heads * head_dim]
        gate_up              [2 * intermediate, hidden]
        down                 [hidden, intermediate]

    and biases `qkv_bias` and so on where the model has them. Matrices that multiply the same input lie in one array:
    fewer and larger multiplications.
    """

    def __init__(self, arch: Arch, params: Params, backend: ArrayBackend, *, dtype: str, max_len: int) -> None:
        self.arch, self.params, self.backend = arch, params, backend
        self.dtype, self.max_len = dtype, max_len
        self.vocab_size: int | None = arch.vocab_size

    @classmethod
    def load(
        cls, path: str | Path, backend: ArrayBackend, *, dtype: str | None = None, max_model_len: int | None = None
    ) -> Decoder:
        """The model in a directory of Hugging Face layout: config.json and safetensors.

        dtype: to compute with and to cache in; None: float32. max_model_len: the longest sequence to be ready for;
        None: what the model was trained for. Raises UnknownArchitecture, InvalidModelFiles, MissingExtra, ConfigError,
        UnsupportedOperation for a dtype that the library lacks.
        """
        arch, checkpoint = load_arch(path), Checkpoint(path)
        checkpoint.check(*tensor_shapes(arch))
        max_len, dtype = arch.max_positions if max_model_len is None else max_model_len, dtype or "float32"
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}; got {dtype!r}.")
        backend.dtype(dtype)  # raises where the library has none
        if not 1 <= max_len <= arch.max_positions:
            raise ConfigError(
                f"max_model_len must be between 1 and {arch.max_positions} (max_position_embeddings of this model); "
                f"got {max_model_len}."
            )
        return cls(arch, _params(arch, checkpoint, backend, dtype, max_len), backend, dtype=dtype, max_len=max_len)

    def cache_spec(self) -> CacheSpec:
        a = self.arch
        return [Paged(a.kv_heads, a.head_dim, a.head_dim, dtype=self.dtype)] * a.layers

    def step(self, params: Params, cache: list[LayerCache], x: StepInputs[Array]) -> tuple[Array, list[LayerCache]]:
        """Logits [n_out, vocab], float32, after the tokens at `x.last`, and the new cache. Depends on nothing else."""
        b, eps = self.backend, self.arch.rms_eps
        h = b.take(params["embed"], x.tok)  # [T, hidden]
        cos, sin = (b.take(params[name], x.pos)[:, None, :] for name in ("cos", "sin"))  # [T, 1, head_dim / 2]
        new = []
        for layer, memory in zip(params["layers"], cache, strict=True):
            a, memory = self._attend(layer, memory, b.rms_norm(h, layer["attn_norm"], eps), x, cos, sin)
            new.append(memory)
            if len(new) == len(cache):  # nothing reads the other tokens any more
                h, a = b.take(h, x.last), b.take(a, x.last)
            h = h + b.linear(a, layer["o"], layer.get("o_bias"))
            h = h + self._feed_forward(layer, b.rms_norm(h, layer["mlp_norm"], eps))
        return b.float32(b.linear(b.rms_norm(h, params["norm"], eps), params["head"])), new

    def _attend(
        self, layer: Params, memory: LayerCache, h: Array, x: StepInputs[Array], cos: Array, sin: Array
    ) -> tuple[Array, LayerCache]:
        """[T, hidden] -> [T, heads * head_dim], before the output projection."""
        a, b = self.arch, self.backend
        tokens, turned = h.shape[0], a.heads + a.kv_heads
        qkv = b.linear(h, layer["qkv"], layer.get("qkv_bias"))
        qkv = b.xp.reshape(qkv, (tokens, turned + a.kv_heads, a.head_dim))
        qk, v = b.rope(qkv[:, :turned, :], cos, sin), qkv[:, turned:, :]  # queries and keys turn together
        out, memory = b.attend(qk[:, : a.heads, :], qk[:, a.heads :, :], v, memory, x)
        return b.xp.reshape(out, (tokens, a.heads * a.head_dim)), memory

    def _feed_forward(self, layer: Params, h: Array) -> Array:
        """[T, hidden] -> [T, hidden]."""
        b, n = self.backend, self.arch.intermediate
        gate_up = b.linear(h, layer["gate_up"], layer.get("gate_up_bias"))
        return b.linear(b.silu(gate_up[:, :n]) * gate_up[:, n:], layer["down"], layer.get("down_bias"))


# ---- loading -------------------------------------------------------------------------------------------------------

_FUSED = {  # our name -> its parts in the file, one below the other
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}

Shapes: TypeAlias = dict[str, tuple[int, ...]]


def tensor_shapes(arch: Arch) -> tuple[Shapes, Shapes]:
    """Hugging Face name and shape of the tensors that the files must hold, and of those that they may hold."""
    a, q, kv = arch, arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    attention = {"q_proj": (q, a.hidden_size), "k_proj": (kv, a.hidden_size), "v_proj": (kv, a.hidden_size)}
    attention |= {"o_proj": (a.hidden_size, q)}
    mlp = {"gate_proj": (a.intermediate, a.hidden_size), "up_proj": (a.intermediate, a.hidden_size)}
    mlp |= {"down_proj": (a.hidden_size, a.intermediate)}
    embedding = (a.vocab_size, a.hidden_size)
    required: Shapes = {"model.embed_tokens.weight": embedding, "model.norm.weight": (a.hidden_size,)}
    optional: Shapes = {}
    (optional if a.tied else required)["lm_head.weight"] = embedding
    for i in range(a.layers):
        prefix = f"model.layers.{i}."
        required |= {f"{prefix}{norm}.weight": (a.hidden_size,) for norm in _NORMS.values()}
        optional[f"{prefix}self_attn.rotary_emb.inv_freq"] = (a.head_dim // 2,)  # old files; we compute it
        for part, shapes, bias in (("self_attn", attention, a.attention_bias), ("mlp", mlp, a.mlp_bias)):
            required |= {f"{prefix}{part}.{name}.weight": shape for name, shape in shapes.items()}
            if bias is not False:
                wanted = optional if bias is None else required
                wanted |= {f"{prefix}{part}.{name}.bias": shape[:1] for name, shape in shapes.items()}
    return required, optional


def _params(arch: Arch, files: Mapping[str, HostArray], backend: ArrayBackend, dtype: str, max_len: int) -> Params:
    b = backend
    embed = files["model.embed_tokens.weight"]
    head = b.put_weight(embed if arch.tied else files["lm_head.weight"], dtype)
    shared = arch.tied and head.shape == embed.shape  # else the backend keeps weights in a form without rows
    cos, sin = rope_tables(arch, max_len)
    return {
        "embed": head if shared else b.put(embed, dtype),
        "head": head,
        "norm": b.put(files["model.norm.weight"], dtype),
        "cos": b.put(cos, dtype),
        "sin": b.put(sin, dtype),
        "layers": [_layer(files, f"model.layers.{i}.", b, dtype) for i in range(arch.layers)],
    }


def _layer(files: Mapping[str, HostArray], prefix: str, b: ArrayBackend, dtype: str) -> Params:
    layer = {ours: b.put(files[f"{prefix}{name}.weight"], dtype) for ours, name in _NORMS.items()}
    for ours, parts in _FUSED.items():
        weights = [files[f"{prefix}{part}.weight"] for part in parts]
        layer[ours] = b.put_weight(np.concatenate(weights), dtype)
        names = [f"{prefix}{part}.bias" for part in parts]
        if any(name in files for name in names):
            biases = [
                files[n] if n in files else np.zeros(len(w), w.dtype) for n, w in zip(names, weights, strict=True)
            ]
            layer[f"{ours}_bias"] = b.put(np.concatenate(biases), dtype)
    return layer


def rope_tables(arch: Arch, length: int) -> tuple[HostArray, HostArray]:
    """Cosine and sine of the rotary angles of positions 0 to length - 1: float32 [length, head_dim / 2]."""
    pairs = np.arange(0, arch.head_dim, 2, dtype=np.float64) / arch.head_dim
    frequencies = _stretched(arch.rope_theta**-pairs, arch.rope_scaling)
    # In float32, although float64 would be closer to the formula: models are trained with float32 angles.
    angles = np.outer(np.arange(length, dtype=np.float32), frequencies.astype(np.float32))
    return np.cos(angles), np.sin(angles)


def _stretched(f: HostArray, scaling: LinearScaling | Llama3Scaling | None) -> HostArray:
    if scaling is None:
        return f
    if isinstance(scaling, LinearScaling):
        return f / scaling.factor
    s, turns = scaling, scaling.original_context * f / (2 * math.pi)  # turns within the original context
    kept = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0, 1)
    return kept * f + (1 - kept) * f / s.factor
