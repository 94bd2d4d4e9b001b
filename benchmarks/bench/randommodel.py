"""Models with random weights in the shapes of real ones, so that a benchmark needs no download."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hibachi.errors import ConfigError

SHAPES: dict[str, dict[str, Any]] = {
    "135m": {  # of SmolLM2-135M
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "31m": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
        "tie_word_embeddings": False,
    },
    "1b": {  # of Llama 3.2 1B; 2.5 GB
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "8b": {  # of Llama 3 8B; 16 GB
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
_SPREAD = 0.05  # standard deviation of the weights
_PIECE = 1 << 22  # numbers made at a time


def write_model(shape: str, path: str | Path, *, seed: int = 0) -> int:
    """Write a Llama with random weights in bfloat16, and a tokenizer of single bytes, to a folder; returns how many
    parameters it has. Raises ConfigError for an unknown shape or a folder that holds a model already, OSError."""
    if shape not in SHAPES:
        raise ConfigError(f"A shape must be one of {', '.join(SHAPES)}; got {shape!r}.")
    folder = Path(path)
    if (folder / "config.json").exists():
        raise ConfigError(f"{folder} holds a model already. Name another folder.")
    config = _config(shape)
    tensors = dict(_tensors(config))
    folder.mkdir(parents=True, exist_ok=True)
    _write_safetensors(folder / "model.safetensors", tensors, np.random.default_rng(seed))
    _write_json(folder / "tokenizer.json", _tokenizer(config["vocab_size"]))
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<0>"})
    _write_json(folder / "config.json", config)  # last: who has it has all
    return sum(math.prod(dims) for dims in tensors.values())


def _config(shape: str) -> dict[str, Any]:
    dims = SHAPES[shape]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **dims,
        "head_dim": dims["hidden_size"] // dims["num_attention_heads"],
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": _SPREAD,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, as transformers has them."""
    h, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    yield "model.embed_tokens.weight", (config["vocab_size"], h)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        yield f"{at}input_layernorm.weight", (h,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield f"{at}self_attn.{name}_proj.weight", (rows, h)
        yield f"{at}self_attn.o_proj.weight", (h, q)
        yield f"{at}post_attention_layernorm.weight", (h,)
        yield f"{at}mlp.gate_proj.weight", (inner, h)
        yield f"{at}mlp.up_proj.weight", (inner, h)
        yield f"{at}mlp.down_proj.weight", (h, inner)
    yield "model.norm.weight", (h,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], h)


def _write_safetensors(path: Path, tensors: dict[str, tuple[int, ...]], rng: np.random.Generator) -> None:
    """Matrices of normal numbers, vectors (norms) of ones; rounded to bfloat16 by dropping bits."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dims in tensors.items():
        end = at + 2 * math.prod(dims)
        header[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for dims in tensors.values():
            left = math.prod(dims)
            while left:
                n = min(left, _PIECE)
                numbers = np.ones(n, "<f4") if len(dims) == 1 else rng.standard_normal(n, "f4") * np.float32(_SPREAD)
                file.write((numbers.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes())
                left -= n


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Byte-level BPE with a single merge, as some converters want one, filled up with tokens that no text gives."""
    # The byte-level alphabet: printable bytes stand for themselves, the others for characters from 256 on.
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    letters = [chr(b) for b in shown] + [chr(256 + i) for i in range(len(hidden))]
    merged = ["th"]
    words = [f"<{i}>" for i in range(vocab_size - len(letters) - len(merged))]
    vocab = {token: i for i, token in enumerate([words[0], *letters, *merged, *words[1:]])}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 0, "content": words[0], **special}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocab, "merges": ["t h"]},
    }


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
