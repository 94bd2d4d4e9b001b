"""What llama.cpp calls architectures, their settings and their tensors, in the terms of config.json.

Settings and names are those of llama.cpp's converter and loader (github.com/ggml-org/llama.cpp, conversion/ and
src/models/). What a GGUF file does not say, and they assume, is assumed here as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hibachi.errors import InvalidModelFiles, UnknownArchitecture
from hibachi.llm.model.defaults import Derived
from hibachi.llm.model.gguf.ends import end_ids, special_id
from hibachi.llm.model.gguf.file import Blocks, Metadata


@dataclass(frozen=True)
class GgufSource:
    """A GGUF file's header, its settings by name without the architecture in front."""

    file: Path
    architecture: str
    metadata: Metadata
    stored: Mapping[str, Blocks]

    def raw(self, name: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{name}")

    def get(self, name: str) -> Any:
        """A number, a string or a truth value; None if there is no such entry.

        One for each layer counts as one if they are all the same.
        """
        value = self.raw(name)
        if isinstance(value, list):
            raise self.wrong(name, "one value", value)
        if not isinstance(value, np.ndarray):
            return value
        if not len(value) or (value != value[0]).any():
            raise UnknownArchitecture(
                f"{self.file}: {self.architecture}.{name} differs between layers ({value[:8].tolist()} ...), "
                f"which is not supported. Use a model whose layers are alike."
            )
        return value[0].item()

    def count(self, name: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value < 2**31:
            raise self.wrong(name, "an integer >= 1", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.wrong(name, "a number > 0", value)
        return value

    def wrong(self, name: str, expected: str, got: Any) -> InvalidModelFiles:
        got = "no such entry" if got is None else f"{got!r:.100}"
        return InvalidModelFiles(
            f"{self.file}: {self.architecture}.{name} must be {expected}; got {got}. Convert or download it again."
        )

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Of a tensor by its GGUF name."""
        if tensor not in self.stored:
            raise InvalidModelFiles(f"{self.file} has no tensor {tensor!r}. Convert or download it again.")
        return self.stored[tensor].shape

    def biases(self, *names: str) -> bool | None:
        """Have these matrices of the first block, as far as they are there, biases? None means some."""
        there = [n for n in names if f"blk.0.{n}.weight" in self.stored]
        found = {f"blk.0.{n}.bias" in self.stored for n in there}
        return found.pop() if len(found) == 1 else None

    def token(self, name: str) -> int | None:
        return special_id(self.metadata, name, self.vocab_size())

    def vocab_size(self) -> int:
        shape = self.shape("token_embd.weight")
        return shape[0] if shape else 0

    def head_dim(self) -> int:
        hidden, heads = self.count("embedding_length"), self.count("attention.head_count")
        return self.count("attention.key_length", max(hidden // heads, 1))


Config = dict[str, Any]

NAMES: Mapping[str, tuple[str, ...]] = {
    "token_embd": ("embed",),
    "position_embd": ("positions",),
    "output_norm": ("norm",),
    "output": ("head",),
    "attn_norm": ("attn_norm",),
    "attn_q": ("q",),
    "attn_k": ("k",),
    "attn_v": ("v",),
    "attn_qkv": ("qkv",),
    "attn_output": ("o",),
    "attn_q_norm": ("q_norm",),
    "attn_k_norm": ("k_norm",),
    "post_attention_norm": ("attn_post_norm",),
    "ffn_norm": ("mlp_norm",),
    "post_ffw_norm": ("mlp_post_norm",),
    "ffn_gate": ("gate",),
    "ffn_up": ("up",),
    "ffn_down": ("down",),
    "ffn_gate_inp": ("router",),
    "ffn_gate_exps": ("experts.gate",),
    "ffn_up_exps": ("experts.up",),
    "ffn_down_exps": ("experts.down",),
}
"""GGUF name -> canonical names, without the number of the block and "weight" or "bias"."""

SETTINGS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that hold settings: `rope_scaling` has them."""


@dataclass(frozen=True)
class Architecture:
    """How files of one architecture are read.

    model_type, name: as in config.json. config: what its config says beyond that of a Llama. names: departures from
    `NAMES`. paired: the rows of queries and keys are in the order in which llama.cpp turns neighbours. plus_one: norms
    are stored plus one. base: the config that `config` is added to.
    """

    model_type: str
    name: str
    config: Callable[[GgufSource], Config] = lambda s: {}
    names: Mapping[str, tuple[str, ...]] | Callable[[GgufSource], Mapping[str, tuple[str, ...]]] = field(
        default_factory=dict
    )
    paired: bool = False
    plus_one: bool = False
    base: Callable[[GgufSource], Config] = lambda s: _llama(s)


def find_architecture(source: GgufSource) -> Architecture:
    """Raises UnknownArchitecture."""
    found = ARCHITECTURES.get(source.architecture)
    if found is None:
        raise UnknownArchitecture(
            f"{source.file} holds a model of the architecture {source.architecture!r:.100}; known in GGUF: "
            f"{', '.join(ARCHITECTURES)}. Use the model in Hugging Face layout."
        )
    return found(source) if callable(found) else found


def read_config(source: GgufSource) -> Config:
    """The contents of a config.json for the model. Raises UnknownArchitecture, InvalidModelFiles."""
    architecture = find_architecture(source)
    own = {"model_type": architecture.model_type, "architectures": [architecture.name]}
    if source.get("attention.causal") is False:
        raise UnknownArchitecture(
            f"{source.file}: {source.architecture}.attention.causal is false; supported: true. Its vectors and answers "
            f"look ahead: use a model that does not."
        )
    blocks = {int(m[1]) for n in source.stored if (m := re.match(r"blk\.([0-9]{1,9})\.", n))}
    if len(blocks) != source.count("block_count") or max(blocks, default=0) != len(blocks) - 1:
        raise InvalidModelFiles(
            f"{source.file} should have {source.get('block_count')} blocks, by {source.architecture}.block_count; its "
            f"tensors belong to {len(blocks)}. Convert or download it again."
        )
    if source.architecture not in _PARTLY_TURNED:
        _check_turned(source)
    config = own | _common(source) | architecture.base(source) | architecture.config(source)
    return Derived({name: value for name, value in config.items() if value is not None})


def _common(s: GgufSource) -> Config:
    ends = end_ids(s.metadata, s.vocab_size())
    return {
        "vocab_size": s.vocab_size(),
        "tie_word_embeddings": "output.weight" not in s.stored,
        "bos_token_id": s.token("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": s.token("padding"),
    }


def _sizes(s: GgufSource) -> Config:
    heads = s.count("attention.head_count")
    return {
        "hidden_size": s.count("embedding_length"),
        "num_hidden_layers": s.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": s.count("attention.head_count_kv", heads),
        "intermediate_size": s.count("feed_forward_length"),
        "max_position_embeddings": s.count("context_length"),
    }


def _llama(s: GgufSource) -> Config:
    return {
        **_sizes(s),
        "head_dim": s.count("attention.key_length") if s.get("attention.key_length") is not None else None,
        "hidden_act": "silu",
        "rms_norm_eps": s.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": s.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(s),
        "attention_bias": s.biases("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output"),
        "mlp_bias": s.biases("ffn_gate", "ffn_up", "ffn_down"),
    }


def _layer_norm(s: GgufSource) -> Config:
    return _sizes(s) | {"rope_theta": s.number("rope.freq_base", 10000.0)}


# ---- rotary frequencies --------------------------------------------------------------------------------------------

_PARTLY_TURNED = ("phi3", "gptneox", "gpt2", "mamba")  # whose config says how much of a head is turned; or nothing is


def _check_turned(s: GgufSource) -> None:
    """Raises UnknownArchitecture for a file of which only a part of each head is turned."""
    for name in ("rope.dimension_count", "rope.dimension_count_swa"):
        if s.get(name) is not None and s.count(name) != s.head_dim():
            raise UnknownArchitecture(
                f"{s.file}: {s.architecture}.{name} must be {s.head_dim()}, the size of a head; got {s.count(name)}. "
                f"{s.architecture} with heads of which a part is turned is not supported: use another file of it."
            )


def _rope_scaling(s: GgufSource) -> Config | None:
    original = s.count("rope.scaling.original_context_length", s.count("context_length"))
    if "rope_factors_long.weight" in s.stored:
        factor = s.get("rope.scaling.attn_factor")
        return {
            "rope_type": "longrope",
            "long_factor": _factors(s, "rope_factors_long.weight"),
            "short_factor": _factors(s, "rope_factors_short.weight"),
            "original_max_position_embeddings": original,
            **({"attention_factor": factor} if factor is not None else {}),
        }
    factor = s.number("rope.scaling.factor", s.get("rope.scale_linear") or 1.0)
    kind = s.get("rope.scaling.type") or ("linear" if factor != 1.0 else "none")
    for name, beside in {"rope.scaling.attn_factor": 1.0, "rope.freq_base_swa": s.get("rope.freq_base")}.items():
        if s.get(name) not in (None, beside) and s.architecture != "gemma3":
            raise UnknownArchitecture(
                f"{s.file}: {s.architecture}.{name} must be {beside} or left out; got {s.get(name)}, which is not "
                f"supported. Use another file of this model."
            )
    if "rope_freqs.weight" in s.stored:
        if kind != "none":
            raise UnknownArchitecture(
                f"{s.file} has rope_freqs.weight and {s.architecture}.rope.scaling ({kind!r:.100}); both together are "
                f"not supported. Use another file of this model."
            )
        return _llama3(s, _factors(s, "rope_freqs.weight"))
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind == "yarn":
        theirs = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
        found = {ours: s.get(f"rope.scaling.{name}") for ours, name in theirs.items()}
        own = {ours: value for ours, value in found.items() if value is not None}
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **own}
    raise UnknownArchitecture(
        f"{s.file}: {s.architecture}.rope.scaling.type is {kind!r:.100}; known: none, linear, yarn. Use a model "
        f"with one of these."
    )


def _factors(s: GgufSource, name: str) -> list[float]:
    """What frequencies are divided by."""
    if len(s.shape(name)) != 1 or s.shape(name)[0] > 1 << 16:
        raise InvalidModelFiles(f"{s.file}: {name} has the shape {s.shape(name)}, expected one number for a frequency.")
    factors = s.stored[name].read(np.float32)
    if not ((factors > 0) & (factors < math.inf)).all():
        raise InvalidModelFiles(f"{s.file}: {name} must hold numbers > 0; got {factors[:8]} ... Download it again.")
    return [float(str(f)) for f in factors]


def _llama3(s: GgufSource, factors: list[float]) -> Config | None:
    """Llama 3.1's stretching, of which the file keeps the outcome only: the published numbers if they give it.

    Others become the factors of a LongRoPE that is the same in short and long contexts.
    """
    if all(f == 1.0 for f in factors):
        return None
    kind = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    turns = 8192 / (2 * math.pi) * s.number("rope.freq_base", 10000.0) ** -(np.arange(len(factors)) / len(factors))
    kept, factor = np.clip((turns - 1.0) / 3.0, 0, 1), max(factors)
    if np.allclose(1 / (kept + (1 - kept) / factor), factors, rtol=1e-4):
        return {"rope_type": "llama3", "factor": factor, **kind}
    context = s.count("context_length")
    same = {"long_factor": factors, "short_factor": factors, "attention_factor": 1.0}
    return {"rope_type": "longrope", "original_max_position_embeddings": context, **same}


# ---- architectures -------------------------------------------------------------------------------------------------


def _experts(s: GgufSource, count: str) -> Config:
    return {
        count: s.count("expert_count"),
        "num_experts_per_tok": s.count("expert_used_count"),
    }


def _mixtral(s: GgufSource) -> Config:
    width = s.count("expert_feed_forward_length", s.count("feed_forward_length"))
    return _experts(s, "num_local_experts") | {"intermediate_size": width}


def _qwen3moe(s: GgufSource) -> Config:
    width = s.count("expert_feed_forward_length")
    return _experts(s, "num_experts") | {
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(s: GgufSource) -> Config:
    return {"head_dim": s.head_dim(), "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma_scores(s: GgufSource, largest: int, caps: tuple[float | None, float | None]) -> Config:
    """largest: the number of blocks of the one model whose scores are not scaled by the size of a head.

    caps: of scores and of logits, unless the file has others.
    """
    hidden, heads = s.count("embedding_length"), s.count("attention.head_count")
    return _gemma(s) | {
        "attn_logit_softcapping": s.get("attn_logit_softcapping") or caps[0],
        "final_logit_softcapping": s.get("final_logit_softcapping") or caps[1],
        "query_pre_attn_scalar": hidden // heads if s.count("block_count") == largest else s.head_dim(),
    }


def _windows(s: GgufSource, period: int, default: int | None = None) -> Config:
    """Layers with a window, unless the file has none; the last one of each `period` sees everything."""
    n, window = s.count("block_count"), s.get("attention.sliding_window") or default
    pattern = s.raw("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray) and len(pattern) == n:
        slides = [bool(x) for x in pattern]
    else:
        every = pattern if type(pattern) is int and pattern > 0 else period
        slides = [i % every < every - 1 for i in range(n)]
    types = ["sliding_attention" if window and x else "full_attention" for x in slides]
    return {"sliding_window": window, "layer_types": types}


def _gemma2(s: GgufSource) -> Config:
    return _gemma_scores(s, 46, (50.0, 30.0)) | _windows(s, 2, default=4096)


def _gemma3(s: GgufSource) -> Config:
    local = {"rope_local_base_freq": s.number("rope.freq_base_swa", 10000.0), "sliding_window_pattern": 6}
    return _gemma_scores(s, 62, (None, None)) | _windows(s, 6) | local


def _phi3(s: GgufSource) -> Config:
    share = s.count("rope.dimension_count", s.head_dim()) / s.head_dim()
    return {
        "sliding_window": s.get("attention.sliding_window") or None,
        "original_max_position_embeddings": s.count("rope.scaling.original_context_length", s.count("context_length")),
        "partial_rotary_factor": share if share != 1.0 else None,
    }


def _granite(s: GgufSource) -> Config:
    return {
        "attention_multiplier": s.number("attention.scale", s.head_dim() ** -0.5),
        "embedding_multiplier": s.number("embedding_scale", 1.0),
        "residual_multiplier": s.number("residual_scale", 1.0),
        "logits_scaling": s.number("logit_scale", 1.0),
    }


def _gpt_neox(s: GgufSource) -> Config:
    parallel = s.get("use_parallel_residual")
    return {
        "hidden_act": "gelu",
        "layer_norm_eps": s.number("attention.layer_norm_epsilon"),
        "rotary_pct": s.count("rope.dimension_count", s.head_dim()) / s.head_dim(),
        "use_parallel_residual": True if parallel is None else bool(parallel),
        "attention_bias": s.biases("attn_qkv", "attn_output"),
    }


def _gpt2(s: GgufSource) -> Config:
    sizes = _sizes(s)
    return {
        "n_embd": sizes["hidden_size"],
        "n_layer": sizes["num_hidden_layers"],
        "n_head": sizes["num_attention_heads"],
        "n_inner": sizes["intermediate_size"],
        "n_positions": sizes["max_position_embeddings"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": s.number("attention.layer_norm_epsilon"),
    }


def _starcoder2(s: GgufSource) -> Config:
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": s.number("attention.layer_norm_epsilon"),
        "use_bias": s.biases("attn_q", "attn_output", "ffn_up", "ffn_down"),
    }


def _falcon(s: GgufSource) -> Config:
    sizes = _sizes(s)
    heads, kv_heads, two = sizes["num_attention_heads"], sizes["num_key_value_heads"], _has_two_norms(s)
    return {
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "new_decoder_architecture": two or kv_heads not in (1, heads),
        "num_ln_in_parallel_attn": 2 if two else 1,
        "parallel_attn": True,
        "alibi": False,
        "bias": s.biases("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
        "ffn_hidden_size": sizes["intermediate_size"],
        "activation": "gelu",
        "layer_norm_epsilon": s.number("attention.layer_norm_epsilon"),
    }


def _has_two_norms(s: GgufSource) -> bool:
    return "blk.0.attn_norm_2.weight" in s.stored


def _falcon_names(s: GgufSource) -> Mapping[str, tuple[str, ...]]:
    """Attention and feed-forward part read the same input through norms of their own, or through one."""
    if _has_two_norms(s):
        return {"attn_norm": ("mlp_norm",), "attn_norm_2": ("attn_norm",)}
    return {"attn_norm": ("attn_norm", "mlp_norm")}


def _mamba(s: GgufSource) -> Config:
    if s.get("ssm.dt_b_c_rms"):
        raise UnknownArchitecture(f"{s.file} holds a Falcon-Mamba, whose norms inside a block are not supported.")
    return {
        "hidden_size": s.count("embedding_length"),
        "num_hidden_layers": s.count("block_count"),
        "intermediate_size": s.count("ssm.inner_size"),
        "state_size": s.count("ssm.state_size"),
        "conv_kernel": s.count("ssm.conv_kernel"),
        "time_step_rank": s.count("ssm.time_step_rank"),
        "layer_norm_epsilon": s.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": s.count("context_length"),
        "hidden_act": "silu",
        "use_bias": s.biases("ssm_in", "ssm_out"),
        "use_conv_bias": s.biases("ssm_conv1d"),
    }


_LLAMA = Architecture("llama", "LlamaForCausalLM", paired=True)
_MIXTRAL = Architecture("mixtral", "MixtralForCausalLM", _mixtral, paired=True)
_MISTRAL = Architecture("mistral", "MistralForCausalLM", paired=True)


def _olmo2(s: GgufSource) -> Architecture:
    if s.get("attention.sliding_window"):
        raise UnknownArchitecture(f"{s.file} holds an OLMo 3, whose windows are not supported. Use the folder of it.")
    return Architecture("olmo2", "Olmo2ForCausalLM")


def _mistral3(s: GgufSource) -> Architecture:
    if s.get("attention.temperature_scale"):
        raise UnknownArchitecture(f"{s.file} holds a Ministral 3, whose attention has a temperature: not supported.")
    return _MISTRAL


ARCHITECTURES: Mapping[str, Architecture | Callable[[GgufSource], Architecture]] = {
    "llama": lambda s: _MIXTRAL if s.get("expert_count") else _LLAMA,
    "mistral3": _mistral3,
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3moe),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _gemma, plus_one=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _gemma2, plus_one=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma3, plus_one=True),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _phi3, {"ffn_up": ("gate_up",)}),
    "olmo2": _olmo2,
    "granite": Architecture("granite", "GraniteForCausalLM", _granite, paired=True),
    "smollm3": Architecture(
        "smollm3",
        "SmolLM3ForCausalLM",
        lambda s: {
            "no_rope_layer_interval": 4,
            "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(s.count("block_count"))],
        },
        paired=True,
    ),
    "gptneox": Architecture("gpt_neox", "GPTNeoXForCausalLM", _gpt_neox, base=_layer_norm),
    "gpt2": Architecture("gpt2", "GPT2LMHeadModel", _gpt2, base=lambda s: {}),
    "starcoder2": Architecture("starcoder2", "Starcoder2ForCausalLM", _starcoder2, base=_layer_norm),
    "falcon": Architecture("falcon", "FalconForCausalLM", _falcon, _falcon_names, base=_layer_norm),
    "mamba": Architecture(
        "mamba",
        "MambaForCausalLM",
        _mamba,
        {
            "attn_norm": ("norm",),
            "ssm_in": ("in_proj",),
            "ssm_conv1d": ("conv",),
            "ssm_x": ("x_proj",),
            "ssm_dt": ("dt_proj",),
            "ssm_a": ("a_log",),
            "ssm_d": ("d",),
            "ssm_out": ("out_proj",),
        },
        base=lambda s: {},
    ),
}
"""`general.architecture` of a GGUF file -> how it is read."""
