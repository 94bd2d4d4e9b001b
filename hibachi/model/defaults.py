"""What a config.json means by the fields that it leaves out, and which fields its class reads at all.

The numbers are the defaults of the configuration classes of transformers 5; a test compares them. A class that gets a
field which it does not read goes on without it, so the same field may count in one architecture and not in another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from hibachi.errors import InvalidModelFiles
from hibachi.model.fields import Config, Fields, is_int
from hibachi.model.rope import kind_of


class OrNull(NamedTuple):
    """The default of a field that may also be null, which then means None."""

    default: Any


class Derived(dict[str, Any]):
    """A config made from the settings of another format, which leaves nothing out: it is read as it stands."""


def _without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


_IDS: Mapping[str, Any] = {"bos_token_id": OrNull(1), "eos_token_id": OrNull(2)}
_ROPE: Mapping[str, Any] = {
    "rope_theta": OrNull(1e4),
    "rope_parameters": None,
    "rope_scaling": None,
    "original_max_position_embeddings": None,
}
_ATTENTION: Mapping[str, Any] = {**_ROPE, "head_dim": None, "is_causal": True}

_LLAMA: dict[str, Any] = {
    **_ATTENTION,
    **_IDS,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_NO_IDS = {"bos_token_id": None, "eos_token_id": None}
_WITHOUT_BIASES = _without(_LLAMA, "attention_bias", "mlp_bias")
_MISTRAL = _WITHOUT_BIASES | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": OrNull(4096),
}
_QWEN2: dict[str, Any] = {
    **_WITHOUT_BIASES,
    **_NO_IDS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": OrNull(32),
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": OrNull(4096),
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA = _WITHOUT_BIASES | {
    "bos_token_id": OrNull(2),
    "eos_token_id": OrNull(1),
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_bidirectional_attention": None,
}
_GEMMA2 = _without(_GEMMA, "hidden_act") | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": OrNull(4096),
    "layer_types": None,
    "final_logit_softcapping": OrNull(30.0),
    "attn_logit_softcapping": OrNull(50.0),
}
_LAYER_NORMS = _without(_WITHOUT_BIASES, "rms_norm_eps", "num_key_value_heads", "head_dim")

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": _MISTRAL
    | {
        "rope_theta": OrNull(1e6),
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"head_dim": 128, "attention_bias": False},
    "qwen3_moe": _without(_QWEN2, "max_window_layers", "layer_types")
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
        "mlp_only_layers": None,
    },
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _without(_GEMMA2, "attn_logit_softcapping")
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": OrNull(False),
        "sliding_window_pattern": 6,
        "rope_theta": OrNull(1e6),
        "rope_local_base_freq": OrNull(1e4),
    },
    "phi3": _WITHOUT_BIASES
    | {
        "eos_token_id": OrNull(32000),
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    "olmo2": _without(_LLAMA, "mlp_bias")
    | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": OrNull(50279)},
    "granite": _LLAMA
    | {
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    "smollm3": _LLAMA
    | {
        "rope_theta": OrNull(2e6),
        "bos_token_id": OrNull(128000),
        "eos_token_id": OrNull(128001),
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": OrNull(4),
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
    "gpt_neox": _without(_LAYER_NORMS, "rope_theta")
    | {
        "bos_token_id": OrNull(0),
        "vocab_size": 50432,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "rotary_emb_base": OrNull(1e4),
        "rotary_pct": OrNull(0.25),
        "use_parallel_residual": True,
        "attention_bias": True,
    },
    "gpt2": {
        "is_causal": True,
        "bos_token_id": OrNull(50256),
        "eos_token_id": OrNull(50256),
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    "starcoder2": _LAYER_NORMS
    | {
        "head_dim": None,
        "bos_token_id": OrNull(50256),
        "eos_token_id": OrNull(50256),
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "sliding_window": None,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    "falcon": _without(_LAYER_NORMS, "hidden_act", "intermediate_size")
    | {
        "bos_token_id": OrNull(11),
        "eos_token_id": OrNull(11),
        "vocab_size": 65024,
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "num_ln_in_parallel_attn": None,
        "layer_norm_epsilon": 1e-5,
        "num_kv_heads": None,
        "alibi": OrNull(False),
        "new_decoder_architecture": OrNull(False),
        "multi_query": OrNull(True),
        "parallel_attn": OrNull(True),
        "bias": OrNull(False),
        "ffn_hidden_size": None,
        "activation": "gelu",
        "tie_word_embeddings": True,
    },
    "mamba": {
        "bos_token_id": OrNull(0),
        "eos_token_id": OrNull(0),
        "vocab_size": 50280,
        "hidden_size": 768,
        "state_size": 16,
        "num_hidden_layers": 32,
        "layer_norm_epsilon": 1e-5,
        "expand": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "time_step_rank": "auto",
        "tie_word_embeddings": True,
    },
}
"""model_type -> field that its class reads -> what the class takes where the field is left out.

A field whose default is None or an `OrNull` may be null. Of `original_max_position_embeddings`, `head_dim` and
`is_causal` some classes do not know the name, but their models look for it.
"""

_SPELLINGS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "n_embd": "hidden_size",
        "n_positions": "max_position_embeddings",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
    },
    "mixtral": {"num_local_experts": "num_experts"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "falcon": {"hidden_size": "n_embed"},
}
"""model_type -> field -> its other name, which wins where a file has both."""


def filled(model_type: str, config: Config) -> Config:
    """The fields that the class of this model_type reads, with its own defaults for those that are left out.

    A model_type that is not in `DEFAULTS`, and what is `Derived`, stay as they are. Raises InvalidModelFiles for a null
    that the class refuses.
    """
    known = DEFAULTS.get(model_type)
    if known is None or isinstance(config, Derived):
        return config
    c, out = Fields(config), dict[str, Any]()
    for name, default in known.items():
        other = _SPELLINGS.get(model_type, {}).get(name, name)
        spelling = other if other in config else name
        usual, may_be_null = (default.default, True) if isinstance(default, OrNull) else (default, default is None)
        value = config.get(spelling, usual)
        if value is None and not may_be_null:
            raise c.wrong((spelling,), f"a value, or be left out, which means {usual!r}", None)
        out[name] = False if value is None and isinstance(usual, bool) else value
    # Files are older than these fields, and their weights have biases or have none.
    out |= {name: None for name in ("attention_bias", "mlp_bias") if name in known and name not in config}
    if not {"partial_rotary_factor", "rotary_pct"} & known.keys():
        out |= {name: _whole(c.inside(name)) for name in ("rope_parameters", "rope_scaling") if config.get(name)}
    return out | _ends(config, known, out["vocab_size"])


def _whole(rope: Fields) -> Config:
    """Rotary settings of a class whose heads turn as a whole: it does not look for the part of them that turns."""
    share = rope.get("partial_rotary_factor", default=1)
    if share != 1 and kind_of(rope) != "default":
        raise rope.wrong(("partial_rotary_factor",), "1 or left out in this architecture", share)
    inner = {name: _whole(rope.inside(name)) for name, value in rope.config.items() if isinstance(value, Mapping)}
    return _without(rope.config, "partial_rotary_factor") | inner


def _ends(config: Config, known: Mapping[str, Any], vocab_size: Any) -> dict[str, Any]:
    """Ids of the class's own that such a vocabulary does not have are none; nobody wrote them."""
    usual = {name: known[name].default for name in _IDS if isinstance(known[name], OrNull) and name not in config}
    return {name: None for name, i in usual.items() if is_int(vocab_size) and i >= vocab_size}


@contextmanager
def saying_what_is_left_out(model_type: str, config: Config) -> Iterator[None]:
    """Within, an InvalidModelFiles also names the fields that are left out or null."""
    try:
        yield
    except InvalidModelFiles as e:
        known, other = DEFAULTS.get(model_type, {}), _SPELLINGS.get(model_type, {})
        names = {name: other.get(name, name) for name in _without(known, *_IDS, *_ROPE, "is_causal")}
        missing = [n if n == o else f"{n} ({o})" for n, o in names.items() if config.get(n) is config.get(o) is None]
        if isinstance(config, Derived) or not missing:
            raise
        raise InvalidModelFiles(
            f"{e}\nconfig.json leaves out {', '.join(missing)}, for which the defaults of its class count."
        ) from e
