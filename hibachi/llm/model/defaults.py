"""What a config.json means by the fields that it leaves out, and which fields its class reads at all.

The numbers are the defaults of the configuration classes of transformers 5; a test compares them. A class that gets a
field which it does not read goes on without it, so the same field may count in one architecture and not in another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from hibachi.errors import InvalidModelFiles
from hibachi.llm.model.fields import Config, Fields
from hibachi.llm.model.rope import kind_of


class OrNull(NamedTuple):
    """The default of a field that may also be null, which then means None."""

    default: Any


class Derived(dict[str, Any]):
    """A config made from the settings of another format, which leaves nothing out: it is read as it stands."""


def _without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _sizes(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int | OrNull | None, positions: int
) -> dict[str, Any]:
    return dict(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
    )


_IDS = ("bos_token_id", "eos_token_id")
_ROPE = ("rope_theta", "rope_parameters", "rope_scaling", "original_max_position_embeddings")
_KV_HEADS = "num_key_value_heads"
_OWN_BIASES = dict(attention_bias=False, mlp_bias=False)

# What most have, and then each: sizes in the order of `_sizes`, and what else is its own.
_MOST: dict[str, Any] = {
    **dict.fromkeys((*_IDS, *_ROPE, "head_dim")),
    **dict(rope_theta=OrNull(1e4), is_causal=True, hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=False),
}
_MISTRAL = _MOST | _sizes(32000, 4096, 14336, 32, 32, 8, 131072)
_QWEN = _MOST | dict(use_sliding_window=False, sliding_window=OrNull(4096))
_QWEN2 = _QWEN | _sizes(151936, 4096, 22016, 32, 32, OrNull(32), 32768) | dict(max_window_layers=28, layer_types=None)
_GEMMA = _MOST | dict(head_dim=256, tie_word_embeddings=True, attention_bias=False)
_GELU = "gelu_pytorch_tanh"
_WINDOWS = dict(sliding_window=OrNull(4096), layer_types=None, query_pre_attn_scalar=256, hidden_activation=_GELU)
_LAYER_NORMS = _without(_MOST, "rms_norm_eps", "head_dim")

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _MOST | _sizes(32000, 4096, 11008, 32, 32, None, 2048) | _OWN_BIASES,
    # With layer_types transformers takes the class of Ministral, which is Mistral's but for these.
    "mistral": _MISTRAL | dict(sliding_window=OrNull(4096), layer_types=None),
    "mixtral": _MISTRAL
    | dict(rope_theta=OrNull(1e6), rms_norm_eps=1e-5, sliding_window=None, num_experts_per_tok=2, num_local_experts=8),
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | dict(head_dim=128, attention_bias=False),
    "qwen3_moe": _QWEN
    | _sizes(151936, 2048, 6144, 24, 32, 4, 32768)
    | dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=False)
    | dict(decoder_sparse_step=1, mlp_only_layers=None, attention_bias=False),
    "gemma": _GEMMA
    | _sizes(256000, 3072, 24576, 28, 16, 16, 8192)
    | dict(hidden_act=_GELU, use_bidirectional_attention=None),
    "gemma2": _without(_GEMMA, "hidden_act")
    | _sizes(256000, 2304, 9216, 26, 8, 4, 8192)
    | _WINDOWS
    | dict(final_logit_softcapping=OrNull(30.0), attn_logit_softcapping=OrNull(50.0), use_bidirectional_attention=None),
    "gemma3_text": _without(_GEMMA, "hidden_act")  # its layers do not look at attn_logit_softcapping
    | _sizes(262208, 2304, 9216, 26, 8, 4, 131072)
    | _WINDOWS
    | dict(final_logit_softcapping=None, use_bidirectional_attention=OrNull(False), sliding_window_pattern=6)
    | dict(rope_theta=OrNull(1e6), rope_local_base_freq=OrNull(1e4)),
    "phi3": _MOST
    | _sizes(32064, 3072, 8192, 32, 32, None, 4096)
    | dict(original_max_position_embeddings=4096, partial_rotary_factor=1.0, rms_norm_eps=1e-5, sliding_window=None),
    "olmo2": _MOST | _sizes(50304, 4096, 11008, 32, 32, None, 2048) | dict(rms_norm_eps=1e-5, attention_bias=False),
    "granite": _MOST
    | _sizes(32000, 4096, 11008, 32, 32, None, 2048)
    | _OWN_BIASES
    | dict(attention_multiplier=1.0, embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0),
    "smollm3": _MOST
    | _sizes(128256, 2048, 11008, 36, 16, OrNull(4), 32768)
    | _OWN_BIASES
    | dict(rope_theta=OrNull(2e6), tie_word_embeddings=True, use_sliding_window=False, sliding_window=None)
    | dict(layer_types=None, no_rope_layers=None, no_rope_layer_interval=4),
    "gpt_neox": _without(_LAYER_NORMS | _sizes(50432, 6144, 24576, 44, 64, None, 2048), "rope_theta", _KV_HEADS)
    | dict(hidden_act="gelu", layer_norm_eps=1e-5, rotary_emb_base=OrNull(1e4), rotary_pct=OrNull(0.25))
    | dict(use_parallel_residual=True, attention_bias=True),
    "gpt2": dict.fromkeys(_IDS)
    | dict(vocab_size=50257, n_embd=768, n_inner=None, n_layer=12, n_head=12, n_positions=1024, is_causal=True)
    | dict(activation_function="gelu_new", layer_norm_epsilon=1e-5, tie_word_embeddings=True)
    | dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False),
    "starcoder2": _LAYER_NORMS
    | _sizes(49152, 3072, 12288, 30, 24, 2, 4096)
    | dict(head_dim=None, hidden_act=_GELU, norm_epsilon=1e-5, sliding_window=None, use_bias=True)
    | dict(tie_word_embeddings=True),
    "falcon": _without(
        _LAYER_NORMS | _sizes(65024, 4544, 0, 32, 71, None, 2048), "hidden_act", "intermediate_size", _KV_HEADS
    )
    | dict(activation="gelu", ffn_hidden_size=None, num_kv_heads=None, num_ln_in_parallel_attn=None)
    | dict(multi_query=OrNull(True), parallel_attn=OrNull(True), new_decoder_architecture=OrNull(False))
    | dict(alibi=OrNull(False), bias=OrNull(False), layer_norm_epsilon=1e-5, tie_word_embeddings=True),
    "mamba": dict.fromkeys(_IDS)
    | dict(vocab_size=50280, hidden_size=768, num_hidden_layers=32, state_size=16, expand=2, conv_kernel=4)
    | dict(hidden_act="silu", layer_norm_epsilon=1e-5, time_step_rank="auto", use_bias=False, use_conv_bias=True)
    | dict(tie_word_embeddings=True),
}
"""model_type -> field that its class reads -> what the class takes where the field is left out.

A field whose default is None or an `OrNull` may be null. Ids that begin and end a text are none where a file names
none: transformers does not end texts at those that its classes have. Some classes do not know the names
`original_max_position_embeddings`, `head_dim` and `is_causal`, but their models look for them.
"""

_SPELLINGS: Mapping[str, Mapping[str, str]] = {
    "gpt2": dict(
        n_embd="hidden_size",
        n_positions="max_position_embeddings",
        n_head="num_attention_heads",
        n_layer="num_hidden_layers",
    ),
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
        out |= {
            name: _without_share(c.inside(name)) for name in ("rope_parameters", "rope_scaling") if config.get(name)
        }
    return out


def _without_share(rope: Fields) -> Config:
    """Rotary settings of a class whose heads turn as a whole: it does not look for the part of them that turns."""
    share = rope.get("partial_rotary_factor", default=1)
    if share != 1 and kind_of(rope) in ("linear", "llama3", "yarn", "longrope", "su"):
        raise rope.wrong(("partial_rotary_factor",), "1 or left out in this architecture", share)
    inner = {
        name: _without_share(rope.inside(name)) for name, value in rope.config.items() if isinstance(value, Mapping)
    }
    return _without(rope.config, "partial_rotary_factor") | inner


@contextmanager
def naming_left_out(model_type: str, config: Config) -> Iterator[None]:
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
