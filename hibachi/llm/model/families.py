"""The architectures that we know: for each, where config.json and the weights depart from Llama's.

A family is data: `fields` says what an `Arch` is filled with, `weights` how the file calls our canonical names. Both
are written as differences from those of Llama, which most models share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hibachi.llm.model.arch import Arch, Experts, Layer
from hibachi.llm.model.defaults import filled, naming_left_out
from hibachi.llm.model.fields import Config, Fields, contradiction, is_int
from hibachi.llm.model.rope import HostArray, gemma3_ropes, phi3_ropes, read_rope

WEIGHTS: Mapping[str, str | None] = {
    "embed": "embed_tokens",
    "norm": "norm",
    "head": "/lm_head",  # a slash: not below the prefix
    "layers": "layers.",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Canonical name -> name in the file, below the family's prefix, for a block below "layers.<number>."."""


@dataclass(frozen=True)
class Family:
    """How one architecture's files are read.

    model_type: what config.json calls it. fields: field of `Arch` -> its value, or a function of the config's `Fields`
    that gives it. weights: canonical name -> name in the file (see `WEIGHTS`), or a function of `Fields` that gives
    such a mapping; a name that is None is not in the file.
    prefix: of all names but those with a slash; files of the bare model go without it.
    transposed: canonical names of matrices stored as [in, out]. reordered: canonical name -> function of (array, Arch)
    that gives the array in the canonical order. skipped: the ends of names of tensors that we have no use for.
    refused: config field -> its only value that we support. respelled: parts of names in the file that some write
    otherwise -> the usual ones. within: what config.json calls a model of several media, of which only the text model
    is read; model_type is then that of its text_config.
    """

    model_type: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, str | None] | Callable[[Fields], Mapping[str, str | None]] = field(default_factory=dict)
    prefix: str = "model."
    transposed: frozenset[str] = frozenset()
    reordered: Mapping[str, Callable[[HostArray, Arch], HostArray]] = field(default_factory=dict)
    skipped: tuple[str, ...] = ("rotary_emb.inv_freq",)
    refused: Mapping[str, Any] = field(default_factory=dict)
    respelled: Mapping[str, str] = field(default_factory=dict)
    within: str | None = None

    def read(self, config: Config) -> Arch:
        """The description in the contents of a config.json.

        Raises UnknownArchitecture for a variant that we do not compute, InvalidModelFiles for a field that is missing,
        of the wrong type or in contradiction to another.
        """
        said = Fields(config)
        if self.within and (kind := said.inside("text_config").get("model_type")) not in (None, self.model_type):
            raise said.unknown("text_config.model_type", kind, [self.model_type])
        own = self._own(config)
        with naming_left_out(self.model_type, own):
            return self._read(Fields(filled(self.model_type, own)))

    def _own(self, config: Config) -> Config:
        """The fields of the text model: of those beside a text_config only the ones that are for the whole."""
        if not self.within:
            return config
        whole = {name: config[name] for name in _OF_THE_WHOLE if name in config}
        return {**Fields(config).inside("text_config").config, **whole}

    def _read(self, c: Fields) -> Arch:
        for name, only in {"is_causal": True, "use_bidirectional_attention": False, **self.refused}.items():
            if (found := c.get(name, default=only)) != only:
                raise c.unknown(name, found, [only])
        return _arch(c, self.fields)

    def names(self, config: Config) -> dict[str, str]:
        """Canonical name -> name in the file, without those that the file does not have."""
        own = (
            self.weights(Fields(filled(self.model_type, self._own(config)))) if callable(self.weights) else self.weights
        )
        return {ours: name for ours, name in {**WEIGHTS, **own}.items() if name is not None}


_OF_THE_WHOLE = ("bos_token_id", "eos_token_id", "tie_word_embeddings")


# ---- fields --------------------------------------------------------------------------------------------------------

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"),
}


def _arch(c: Fields, own: Mapping[str, Any]) -> Arch:
    """Llama's reading of a config, with a family's own fields in place of some."""

    def take(name: str, usual: Callable[[], Any]) -> Any:
        if name not in own:
            return usual()
        value = own[name]
        return value(c) if callable(value) else value

    hidden, heads = c.count("hidden_size", "n_embd"), c.count("num_attention_heads", "n_head")
    kv_heads = take("kv_heads", lambda: c.count("num_key_value_heads", default=heads))
    if heads % kv_heads:
        raise contradiction(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    if c.get("head_dim") is None and hidden % heads:
        raise contradiction(
            f"without head_dim, hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})"
        )
    head_dim, vocab_size = c.count("head_dim", default=hidden // heads), c.count("vocab_size")
    values: dict[str, Any] = dict(
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        layers=take("layers", lambda: (Layer(),) * layers_of(c)),
        ropes=take("ropes", lambda: (read_rope(c, head_dim),)),
        intermediate=take("intermediate", lambda: c.count("intermediate_size")),
        max_positions=c.count("max_position_embeddings", "n_positions"),
        norm_eps=c.number("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"),
        activation=take("activation", lambda: activation(c)),
        tied=take("tied", lambda: bool(c.flag("tie_word_embeddings"))),
        attention_bias=take("attention_bias", lambda: c.flag("attention_bias")),
        mlp_bias=take("mlp_bias", lambda: c.flag("mlp_bias")),
        bos_ids=c.ids("bos_token_id", vocab_size),
        eos_ids=c.ids("eos_token_id", vocab_size),
    )
    others = {name: take(name, lambda: None) for name in own if name not in values}
    return Arch(**values, **others)


def layers_of(c: Fields) -> int:
    return c.count("num_hidden_layers", "n_layer", most=10_000)


def activation(c: Fields) -> str:
    names = ("hidden_activation", "hidden_act", "activation_function", "activation")
    found = c.get(*names, default="silu")
    if not isinstance(found, str) or found not in _ACTIVATIONS:
        raise c.unknown(next(n for n in names if n in c.config), found, sorted(_ACTIVATIONS))
    return _ACTIVATIONS[found]


# ---- layers --------------------------------------------------------------------------------------------------------


def windowed(c: Fields, *, slides: Callable[[int], bool] = lambda i: True) -> list[int | None]:
    """The window of each layer. slides: which layers have one, where the file has no layer_types."""
    n, window = layers_of(c), c.optional_count("sliding_window")
    types = c.each("layer_types", n, ("full_attention", "sliding_attention"))
    if types is not None:
        if "sliding_attention" in types and window is None:
            raise contradiction("layer_types names sliding_attention, but there is no sliding_window")
        return [window if t == "sliding_attention" else None for t in types]
    return [window if slides(i) else None for i in range(n)]


def sliding(c: Fields) -> tuple[Layer, ...]:
    """A window, if there is one, on every layer."""
    return tuple(Layer(window=w) for w in windowed(c))


def sliding_if_used(c: Fields) -> tuple[Layer, ...]:
    """Qwen: a window only with use_sliding_window, and by default not in the first max_window_layers."""
    if not is_int(first := c.get("max_window_layers", default=0)):
        raise c.wrong(("max_window_layers",), "an integer", first)
    if not c.flag("use_sliding_window"):
        c = Fields({**c.config, "sliding_window": None})
    return tuple(Layer(window=w) for w in windowed(c, slides=lambda i: i >= first))


def _alternating(c: Fields, every: int) -> list[int | None]:
    """Gemma: a window on all layers but each `every`th, unless layer_types says otherwise."""
    if c.get("layer_types") is None:
        c.count("sliding_window")  # must be there
    return windowed(c, slides=lambda i: (i + 1) % every != 0)


def _gemma2_layers(c: Fields) -> tuple[Layer, ...]:
    return tuple(Layer(window=w) for w in _alternating(c, 2))


def _gemma3_layers(c: Fields) -> tuple[Layer, ...]:
    windows = _alternating(c, c.count("sliding_window_pattern"))
    return tuple(Layer(window=w, rope=0 if w is None else 1) for w in windows)


def _smollm3_layers(c: Fields) -> tuple[Layer, ...]:
    n, every = layers_of(c), c.count("no_rope_layer_interval")
    turns = c.each("no_rope_layers", n, (0, 1)) or [int((i + 1) % every != 0) for i in range(n)]
    windows = windowed(c, slides=lambda i: bool(c.flag("use_sliding_window")) and not turns[i])
    return tuple(Layer(window=w, rope=0 if t else None) for w, t in zip(windows, turns, strict=True))


def _qwen3_moe_layers(c: Fields) -> tuple[Layer, ...]:
    dense, every = c.get("mlp_only_layers", default=[]), c.count("decoder_sparse_step")
    if not isinstance(dense, list):
        raise c.wrong(("mlp_only_layers",), "a list of layers", dense)
    return tuple(
        Layer(window=layer.window, experts=i not in dense and (i + 1) % every == 0)
        for i, layer in enumerate(sliding_if_used(c))
    )


def _all_experts(c: Fields) -> tuple[Layer, ...]:
    return tuple(Layer(window=w, experts=True) for w in windowed(c))


def experts(c: Fields, *, normalised: bool = True) -> Experts:
    count, per_token = c.count("num_experts", "num_local_experts", most=100_000), c.count("num_experts_per_tok")
    if per_token > count:
        raise contradiction(f"num_experts_per_tok ({per_token}) must not exceed the number of experts ({count})")
    return Experts(count, per_token, c.count("moe_intermediate_size", "intermediate_size"), normalised)


def _query_scale(c: Fields) -> float | None:
    return None if (s := c.optional_number("query_pre_attn_scalar")) is None else s**-0.5


# ---- weights -------------------------------------------------------------------------------------------------------


def by_group(w: HostArray, arch: Arch) -> HostArray:
    """Rows of queries, keys and values as [q; k; v], from groups of the queries, the key and the value of a key head.

    GPT-NeoX and Falcon store them so; with a single key head both orders are the same.
    """
    group = arch.heads // arch.kv_heads
    w = w.reshape(arch.kv_heads, group + 2, arch.head_dim, *w.shape[1:])
    parts = w[:, :group], w[:, group : group + 1], w[:, group + 1 :]
    return np.concatenate([p.reshape(-1, *w.shape[3:]) for p in parts])


_FUSED_QKV: Mapping[str, str | None] = {"q": None, "k": None, "v": None}
_UNGATED: Mapping[str, str | None] = {"gate": None}
_QK_NORM: Mapping[str, str | None] = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_FOUR_NORMS: Mapping[str, str | None] = {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "router": "mlp.gate",
    "experts.gate": "mlp.experts.{}.gate_proj",
    "experts.up": "mlp.experts.{}.up_proj",
    "experts.down": "mlp.experts.{}.down_proj",
}


def _falcon_weights(c: Fields) -> Mapping[str, str | None]:
    two_norms = c.flag("new_decoder_architecture") and c.get("num_ln_in_parallel_attn", default=2) == 2
    after = "input_layernorm" if c.flag("parallel_attn") else "post_attention_layernorm"
    return {
        **_FUSED_QKV,
        **_UNGATED,
        "embed": "word_embeddings",
        "norm": "ln_f",
        "layers": "h.",
        "attn_norm": "ln_attn" if two_norms else "input_layernorm",
        "mlp_norm": "ln_mlp" if two_norms else after,
        "qkv": "self_attention.query_key_value",
        "o": "self_attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    }


def _falcon_kv_heads(c: Fields) -> int:
    heads = c.count("num_attention_heads")
    if c.flag("new_decoder_architecture"):
        return c.count("num_kv_heads", default=heads)
    if c.flag("multi_query"):
        return 1
    if (kv_heads := c.count("num_kv_heads", default=heads)) != heads:
        raise contradiction(f"num_kv_heads ({kv_heads}) must be num_attention_heads ({heads}) without multi_query")
    return heads


def _falcon_parallel(c: Fields) -> bool:
    new, parallel = c.flag("new_decoder_architecture"), c.flag("parallel_attn")
    if new and not parallel:
        raise contradiction("new_decoder_architecture is true, which needs parallel_attn")
    return bool(parallel)


# ---- the list ------------------------------------------------------------------------------------------------------

_GEMMA = dict(
    norm_plus_one=True,
    embed_scale=lambda c: math.sqrt(c.count("hidden_size")),
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", fields=dict(layers=sliding)),
    "MixtralForCausalLM": Family(
        "mixtral",
        fields=dict(layers=_all_experts, experts=experts),
        weights={
            "router": "block_sparse_moe.gate",
            "experts.gate": "block_sparse_moe.experts.{}.w1",
            "experts.up": "block_sparse_moe.experts.{}.w3",
            "experts.down": "block_sparse_moe.experts.{}.w2",
        },
        respelled={".mlp.": ".block_sparse_moe."},
    ),
    "Qwen2ForCausalLM": Family("qwen2", fields=dict(layers=sliding_if_used)),
    "Qwen3ForCausalLM": Family("qwen3", fields=dict(layers=sliding_if_used, qk_norm="head"), weights=_QK_NORM),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        fields=dict(
            layers=_qwen3_moe_layers,
            experts=lambda c: experts(c, normalised=c.flag("norm_topk_prob") is True),
            qk_norm="head",
        ),
        weights={**_QK_NORM, **_EXPERTS},
    ),
    "GemmaForCausalLM": Family("gemma", fields=_GEMMA),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        fields=dict(
            **_GEMMA,
            layers=_gemma2_layers,
            norms="both",
            attention_scale=_query_scale,
            attention_softcap=lambda c: c.optional_number("attn_logit_softcapping"),
            logit_softcap=lambda c: c.optional_number("final_logit_softcapping"),
        ),
        weights=_FOUR_NORMS,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        fields=dict(
            **_GEMMA,
            layers=_gemma3_layers,
            ropes=gemma3_ropes,
            norms="both",
            qk_norm="head",
            attention_scale=_query_scale,
            attention_softcap=lambda c: c.optional_number("attn_logit_softcapping"),
            logit_softcap=lambda c: c.optional_number("final_logit_softcapping"),
        ),
        weights={**_FOUR_NORMS, **_QK_NORM},
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        fields=dict(layers=sliding, ropes=phi3_ropes),
        weights={
            **_FUSED_QKV,
            **_UNGATED,
            "up": None,
            "qkv": "self_attn.qkv_proj",
            "gate_up": "mlp.gate_up_proj",
        },
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        fields=dict(norms="after", qk_norm="all"),
        weights={
            **_QK_NORM,
            "attn_norm": None,
            "mlp_norm": None,
            "attn_post_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        },
    ),
    "GraniteForCausalLM": Family(
        "granite",
        fields=dict(
            attention_scale=lambda c: c.number("attention_multiplier"),
            embed_scale=lambda c: c.number("embedding_multiplier"),
            residual_scale=lambda c: c.number("residual_multiplier"),
            logit_divisor=lambda c: c.number("logits_scaling"),
        ),
    ),
    "SmolLM3ForCausalLM": Family("smollm3", fields=dict(layers=_smollm3_layers)),
    "GPTNeoXForCausalLM": Family(
        "gpt_neox",
        fields=dict(
            norm="layer",
            gated=False,
            parallel=lambda c: c.flag("use_parallel_residual") is True,
        ),
        prefix="gpt_neox.",
        weights={
            **_FUSED_QKV,
            **_UNGATED,
            "embed": "embed_in",
            "norm": "final_layer_norm",
            "head": "/embed_out",
            "qkv": "attention.query_key_value",
            "o": "attention.dense",
            "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        },
        reordered={"qkv": by_group},
        skipped=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
    ),
    "GPT2LMHeadModel": Family(
        "gpt2",
        fields=dict(
            norm="layer",
            gated=False,
            learned_positions=True,
            ropes=(),
            layers=lambda c: (Layer(rope=None),) * layers_of(c),
            intermediate=lambda c: c.count("n_inner", default=4 * c.count("n_embd")),
        ),
        prefix="transformer.",
        weights={
            **_FUSED_QKV,
            **_UNGATED,
            "embed": "wte",
            "positions": "wpe",
            "norm": "ln_f",
            "layers": "h.",
            "attn_norm": "ln_1",
            "mlp_norm": "ln_2",
            "qkv": "attn.c_attn",
            "o": "attn.c_proj",
            "up": "mlp.c_fc",
            "down": "mlp.c_proj",
        },
        transposed=frozenset({"qkv", "o", "up", "down"}),
        skipped=("attn.bias", "attn.masked_bias"),
        refused={"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "add_cross_attention": False},
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2",
        fields=dict(
            layers=sliding,
            norm="layer",
            gated=False,
            attention_bias=lambda c: c.flag("use_bias"),
            mlp_bias=lambda c: c.flag("use_bias"),
        ),
        weights={**_UNGATED, "up": "mlp.c_fc", "down": "mlp.c_proj"},
    ),
    "FalconForCausalLM": Family(
        "falcon",
        fields=dict(
            norm="layer",
            gated=False,
            kv_heads=_falcon_kv_heads,
            parallel=_falcon_parallel,
            intermediate=lambda c: c.count("ffn_hidden_size", default=4 * c.count("hidden_size")),
            attention_bias=lambda c: c.flag("bias"),
            mlp_bias=lambda c: c.flag("bias"),
        ),
        prefix="transformer.",
        weights=_falcon_weights,
        reordered={"qkv": by_group},
        refused={"alibi": False},
    ),
}
"""Class in `architectures` of config.json -> its family."""

FAMILIES |= {
    "Gemma3ForConditionalGeneration": replace(
        FAMILIES["Gemma3ForCausalLM"],
        fields={**FAMILIES["Gemma3ForCausalLM"].fields, "logit_softcap": None},  # which this class does not look at
        within="gemma3",
    ),
    "Mistral3ForConditionalGeneration": replace(FAMILIES["MistralForCausalLM"], within="mistral3"),
}
