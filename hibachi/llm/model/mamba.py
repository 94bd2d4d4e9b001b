"""Mamba (Gu & Dao 2023): a language model whose layers remember two small states a request instead of keys and values.

An example of the rung for recurrent models: `cache_spec` names the states, `step` gets those of its rows and returns
the new ones; a request costs the same memory however long it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, LayerCache
from hibachi.backend.layout import CacheSpec, State, StepInputs
from hibachi.backend.library import PORTABLE
from hibachi.backend.packing import quantization_of
from hibachi.llm.model.decoder import Params, checked, matrices_of
from hibachi.llm.model.defaults import filled, naming_left_out
from hibachi.llm.model.fields import Config, Fields
from hibachi.llm.model.files import ModelFiles
from hibachi.llm.model.rope import HostArray
from hibachi.llm.model.weights import Checkpoint, refuse_quantized, settle_vocabulary

_NO_LIMIT = 2**20  # tokens: the model has none of its own


@dataclass(frozen=True, slots=True)
class MambaArch:
    """A Mamba in numbers."""

    hidden_size: int
    """Width of the residual stream."""
    inner: int
    """Channels inside a layer."""
    state_size: int
    """Numbers that a channel remembers."""
    kernel: int
    """How many tokens the convolution of a channel sees."""
    rank: int
    """Width of the bottleneck from which the time step of each channel is computed."""
    layers: int
    """Number of layers."""
    vocab_size: int
    """Number of token ids, which is the number of logits."""
    norm_eps: float
    """What RMSNorm adds to the mean square."""
    conv_bias: bool
    """The convolution has a bias."""
    bias: bool
    """The projections in and out have biases."""
    tied: bool
    """The output head is the embedding matrix."""
    bos_ids: tuple[int, ...] = ()
    """Ids that begin a text."""
    eos_ids: tuple[int, ...] = ()
    """Ids that end a text."""


def read_arch(config: Config) -> MambaArch:
    """The description in a config.json. Raises UnknownArchitecture, InvalidModelFiles."""
    c, given = Fields(filled("mamba", config)), Fields(config)
    if (act := c.get("hidden_act")) not in ("silu", "swish"):
        raise c.unknown("hidden_act", act, ["silu", "swish"])
    hidden, vocab_size = c.count("hidden_size"), c.count("vocab_size")
    rank = c.get("time_step_rank")
    return MambaArch(
        hidden_size=hidden,
        inner=given.count(wide) if (wide := "intermediate_size") in config else c.count("expand") * hidden,
        state_size=c.count("state_size"),
        kernel=c.count("conv_kernel"),
        rank=-(-hidden // 16) if rank == "auto" else c.count("time_step_rank"),
        layers=c.count("num_hidden_layers", most=10_000),
        vocab_size=vocab_size,
        norm_eps=c.number("layer_norm_epsilon"),
        conv_bias=c.flag("use_conv_bias") is True,
        bias=c.flag("use_bias") is True,
        tied=c.flag("tie_word_embeddings") is True,
        bos_ids=c.ids("bos_token_id", vocab_size),
        eos_ids=c.ids("eos_token_id", vocab_size),
    )


class Mamba:
    """A `CachedModel` with two states a layer: the last inputs of the convolution, and what the channels remember.

    params: embed, head [vocab, hidden], norm [hidden], and for each of `layers`: norm [hidden], in_proj [2 * inner,
    hidden], conv [kernel, inner], x_proj [rank + 2 * state_size, inner], dt_proj [inner, rank], decay [state_size,
    inner] (negative rates), skip [inner], out_proj [hidden, inner], and the biases that the model has.
    """

    arch: MambaArch
    params: dict[str, Any]
    backend: ArrayBackend
    dtype: str
    max_model_len: int
    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]

    model_type = "mamba"
    portable = True
    """As of a Decoder."""
    any_shape = True  # for the engine: all products are the backend's, which are right for any number of tokens

    def __init__(
        self, arch: MambaArch, params: Params, backend: ArrayBackend, *, dtype: str, max_model_len: int
    ) -> None:
        self.arch, self.params, self.backend = arch, params, backend
        self.dtype, self.max_model_len = dtype, max_model_len
        self.vocab_size: int = arch.vocab_size
        self.bos_ids, self.eos_ids = arch.bos_ids, arch.eos_ids
        self.embed_size: int = arch.hidden_size  # prompts may be given as embeddings of this width
        self.quantization: str = quantization_of(backend, params)
        self.portable = dtype in PORTABLE

    @classmethod
    def load(
        cls, files: ModelFiles, backend: ArrayBackend, *, dtype: str | None = None, max_model_len: int | None = None
    ) -> Mamba:
        arch = read_arch(files.config)
        dtype, max_model_len = checked(backend, dtype, max_model_len, _NO_LIMIT)
        names, tensors = (_NAMES, files.checkpoint()) if files.gguf is None else (_CANONICAL, files.gguf)
        if isinstance(tensors, Checkpoint):
            refuse_quantized(tensors, files.config)
            embed, head = (f"{names[name]}.weight" for name in ("embed", "head"))
            arch = replace(arch, tied=settle_vocabulary(tensors, embed, head, arch.vocab_size, tied=arch.tied))
        with naming_left_out("mamba", files.config):
            tensors.check(*_shapes(arch, names))
        return cls(
            arch, _params(arch, tensors, names, backend, dtype), backend, dtype=dtype, max_model_len=max_model_len
        )

    def cache_spec(self) -> CacheSpec:
        a = self.arch
        # What the channels remember is summed up over the whole text, so it is kept in float32.
        return [State((a.kernel - 1, a.inner), self.dtype), State((a.state_size, a.inner), "float32")] * a.layers

    def step(self, params: Params, cache: list[LayerCache], x: StepInputs[Array]) -> tuple[Array, list[LayerCache]]:
        """Logits [n_out, vocab], float32, after the tokens at `x.last`, and the new states."""
        h, cache = self.hidden(params, cache, x)
        return self.backend.float32(self.backend.linear(h, params["head"])), cache

    def hidden(self, params: Params, cache: list[LayerCache], x: StepInputs[Array]) -> tuple[Array, list[LayerCache]]:
        """What the head sees: the last normalised hidden states [n_out, hidden] at `x.last`, and the new states."""
        b, eps = self.backend, self.arch.norm_eps
        rows = x.row.shape[0]
        h = b.weight_rows(params["embed"], x.tok)
        if x.embeds is not None and x.embedded is not None:
            h = b.xp.where(x.embedded[:, None], b.xp.astype(x.embeds, h.dtype, copy=False), h)
        h = b.xp.reshape(h, (rows, -1, h.shape[-1]))  # [B, S, hidden]
        new: list[LayerCache] = []
        for layer, past, state in zip(params["layers"], cache[::2], cache[1::2], strict=True):
            out, past, state = self._mix(layer, past, state, b.rms_norm(h, layer["norm"], eps))
            h, new = h + out, [*new, past, state]
        h = b.take(b.xp.reshape(h, (-1, h.shape[-1])), x.last)
        return b.rms_norm(h, params["norm"], eps), new

    def _mix(self, layer: Params, past: Array, state: Array, h: Array) -> tuple[Array, Array, Array]:
        """[B, S, hidden] -> the same, and the new states."""
        a, b = self.arch, self.backend
        both = b.linear(h, layer["in_proj"], layer.get("in_proj_bias"))
        u, past = b.convolve(past, both[..., : a.inner], layer["conv"], layer.get("conv_bias"))
        chosen = b.linear(u, layer["x_proj"])
        dt = b.linear(chosen[..., : a.rank], layer["dt_proj"], layer["dt_proj_bias"])
        write, read = chosen[..., a.rank : a.rank + a.state_size], chosen[..., a.rank + a.state_size :]
        gate = both[..., a.inner :]
        y, state = b.selective_scan(state, u, dt, gate, write, read, layer["decay"], layer["skip"])
        return b.linear(y, layer["out_proj"], layer.get("out_proj_bias")), past, state


# ---- loading -------------------------------------------------------------------------------------------------------

_NAMES = {
    "embed": "backbone.embeddings",
    "norm": "backbone.norm_f",
    "head": "lm_head",
    "layers": "backbone.layers.",
    "layer_norm": "norm",
    "in_proj": "mixer.in_proj",
    "conv": "mixer.conv1d",
    "x_proj": "mixer.x_proj",
    "dt_proj": "mixer.dt_proj",
    "a_log": "mixer.A_log",
    "d": "mixer.D",
    "out_proj": "mixer.out_proj",
}
_CANONICAL = {name: name for name in _NAMES} | {"layers": "layers.", "layer_norm": "norm"}


def _shapes(a: MambaArch, names: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    embedding = (a.vocab_size, a.hidden_size)
    required: dict[str, Any] = {f"{names['embed']}.weight": embedding, f"{names['norm']}.weight": (a.hidden_size,)}
    optional: dict[str, Any] = {}
    (optional if a.tied else required)[f"{names['head']}.weight"] = embedding
    for i in range(a.layers):
        at = f"{names['layers']}{i}."
        required |= {
            f"{at}{names['layer_norm']}.weight": (a.hidden_size,),
            f"{at}{names['in_proj']}.weight": (2 * a.inner, a.hidden_size),
            f"{at}{names['conv']}.weight": (a.inner, 1, a.kernel),
            f"{at}{names['x_proj']}.weight": (a.rank + 2 * a.state_size, a.inner),
            f"{at}{names['dt_proj']}.weight": (a.inner, a.rank),
            f"{at}{names['dt_proj']}.bias": (a.inner,),
            f"{at}{names['a_log']}": (a.inner, a.state_size),
            f"{at}{names['d']}": (a.inner,),
            f"{at}{names['out_proj']}.weight": (a.hidden_size, a.inner),
        }
        if a.conv_bias:
            required[f"{at}{names['conv']}.bias"] = (a.inner,)
        if a.bias:
            required |= {f"{at}{names['in_proj']}.bias": (2 * a.inner,)}
            required |= {f"{at}{names['out_proj']}.bias": (a.hidden_size,)}
    return required, optional


def _params(
    a: MambaArch, files: Mapping[str, HostArray], names: Mapping[str, str], b: ArrayBackend, dtype: str
) -> Params:
    embed = b.put_vocabulary(matrices_of(files, f"{names['embed']}.weight"), dtype)
    layers = []
    for i in range(a.layers):
        at = f"{names['layers']}{i}."
        rates = -np.exp(files[f"{at}{names['a_log']}"].astype(np.float32))
        layer: Params = {
            "norm": b.put(files[f"{at}{names['layer_norm']}.weight"], dtype),
            "conv": b.put(np.ascontiguousarray(files[f"{at}{names['conv']}.weight"][:, 0, :].T), dtype),
            "decay": b.put(np.ascontiguousarray(rates.T), "float32"),
            "skip": b.put(files[f"{at}{names['d']}"], "float32"),
        }
        for name in ("in_proj", "out_proj"):
            layer[name] = b.put_rows(matrices_of(files, f"{at}{names[name]}.weight"), dtype)
        for name in ("x_proj", "dt_proj"):  # small, and exp follows
            layer[name] = b.put_precise(files[f"{at}{names[name]}.weight"], dtype)
        for name in ("in_proj", "conv", "dt_proj", "out_proj"):
            if (bias := f"{at}{names[name]}.bias") in files:
                layer[f"{name}_bias"] = b.put(files[bias], dtype)
        layers.append(layer)
    return {
        "embed": embed,
        "head": embed if a.tied else b.put_vocabulary(matrices_of(files, f"{names['head']}.weight"), dtype),
        "norm": b.put(files[f"{names['norm']}.weight"], dtype),
        "layers": layers,
    }
