"""A whole model with one thing in one of its files changed: it loads and answers, or is refused."""

import json
import random
import resource
import struct
import time
import warnings

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from hibachi import LLM, SamplingParams
from hibachi.errors import HibachiError
from hibachi.llm.tokenizers.pieces import byte_letters

from ...lib.damage import changed

MB = 2**20
CONFIG = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"},
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 260, "head_dim": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 64},
    **{"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    **{"bos_token_id": 0, "eos_token_id": 257},
}
SHAPES = {
    "model.embed_tokens.weight": (260, 16),
    "model.norm.weight": (16,),
    "model.layers.0.input_layernorm.weight": (16,),
    "model.layers.0.post_attention_layernorm.weight": (16,),
    "model.layers.0.self_attn.q_proj.weight": (16, 16),
    "model.layers.0.self_attn.k_proj.weight": (8, 16),
    "model.layers.0.self_attn.v_proj.weight": (8, 16),
    "model.layers.0.self_attn.o_proj.weight": (16, 16),
    "model.layers.0.mlp.gate_proj.weight": (24, 16),
    "model.layers.0.mlp.up_proj.weight": (24, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 24),
}


def tokenizer():
    vocab = {letter: i for i, letter in enumerate(byte_letters())} | {"th": 256, "</s>": 257}
    cut = {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Isolated", "invert": False}
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = {"id": 257, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False}
    replace = {"type": "Replace", "pattern": {"String": "\u00a0"}, "content": " "}
    return {
        "version": "1.0",
        "added_tokens": [added | {"normalized": False, "special": True}],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, replace]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, letters]},
        "decoder": letters,
        "model": {"type": "BPE", "vocab": vocab, "merges": ["t h"], "unk_token": None},
    }


def weights():
    """Two shards, and how many of their bytes are worth changing; and their index."""
    rng, names, found = np.random.default_rng(0), list(SHAPES), {}
    for shard, own in (("1.safetensors", names[:6]), ("2.safetensors", names[6:])):
        at, header, data = 0, {}, b""
        for name in own:
            part = rng.normal(0, 0.1, SHAPES[name]).astype("<f4").tobytes()
            header[name] = {"dtype": "F32", "shape": list(SHAPES[name]), "data_offsets": [at, at + len(part)]}
            at, data = at + len(part), data + part
        text = json.dumps(header).encode()
        found[shard] = struct.pack("<Q", len(text)) + text + data, 8 + len(text)
    index = {"weight_map": {name: f"{1 + (i >= 6)}.safetensors" for i, name in enumerate(names)}}
    return found, index


@pytest.fixture(scope="module")
def whole():
    """File -> its bytes, and how many of them are worth changing."""
    shards, index = weights()
    texts = {"config.json": CONFIG, "tokenizer.json": tokenizer(), "generation_config.json": {"top_k": 5, "top_p": 0.9}}
    texts["model.safetensors.index.json"] = index
    files = {name: (data := json.dumps(content).encode(), len(data)) for name, content in texts.items()}
    return files | shards


def most_memory():
    """Bytes that this process has had at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_model_with_one_thing_changed_answers_or_is_refused(tmp_path, whole, count):
    params, worked, refused = SamplingParams(max_tokens=2, seed=1), 0, 0
    for name, (data, _) in whole.items():
        (tmp_path / name).write_bytes(data)
    with LLM(tmp_path, autotune="off", kv_cache_memory_bytes=MB) as llm:
        assert llm.generate("hello", params)[0].token_ids
    before = most_memory()
    for seed in range(count):
        rng = random.Random(seed)
        name = rng.choice(list(whole))
        (tmp_path / name).write_bytes(changed(*whole[name], rng))
        began = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # of numbers that are none
                with LLM(tmp_path, autotune="off", kv_cache_memory_bytes=MB) as llm:
                    llm.generate("hello the\u00a0world", params)
            worked += 1
        except HibachiError as e:
            assert len(str(e)) < 20_000, seed
            refused += 1
        assert time.perf_counter() - began < 5, seed
        (tmp_path / name).write_bytes(whole[name][0])
    assert most_memory() - before < 200 * MB
    assert worked > count / 40 and refused > count / 3
