"""GGUF: names and configs of every architecture, damaged files."""

import contextlib
import json
import random
import re
import struct
import time
import tracemalloc
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from hibachi.backend.packing import joined
from hibachi.backend.stored import Stored
from hibachi.errors import InvalidModelFiles, UnknownArchitecture
from hibachi.llm.model.arch import shapes
from hibachi.llm.model.describe import describe
from hibachi.llm.model.gguf import GGUF, find_gguf
from hibachi.llm.model.gguf.file import read_header
from hibachi.llm.model.registry import find
from hibachi.llm.remote.identity import name_of, system_fingerprint
from hibachi.offline.tasks.fingerprint import model_facts

from ...lib.damage import changed


def write(path, arch, entries, tensors):
    """A GGUF file. entries: without the architecture in front; a name with a slash has none. tensors: as float32, or if
    they are uint8 as the blocks of Q4_1; or the name of a kind and blocks."""
    w = gguf.GGUFWriter(path, arch)
    adds = {bool: w.add_bool, int: w.add_uint32, float: w.add_float32, str: w.add_string, list: w.add_array}
    for name, value in entries.items():
        adds[type(value)](name[1:] if name.startswith("/") else f"{arch}.{name}", value)
    for name, array in tensors.items():
        kind, array = array if isinstance(array, tuple) else (None, np.asarray(array))
        kind = "Q4_1" if kind is None and array.dtype == np.uint8 else kind
        kind = None if kind is None else gguf.GGMLQuantizationType[kind]
        w.add_tensor(name, array if kind else array.astype(np.float32), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


# ---- architectures -------------------------------------------------------------------------------------------------

SIZES = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}
RMS, LAYER = {"attention.layer_norm_rms_epsilon": 1e-6}, {"attention.layer_norm_epsilon": 1e-6}
SPLIT = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
WIDE = {"attn_q": (128, 64), "attn_k": (64, 64), "attn_v": (64, 64), "attn_output": (64, 128)}  # heads of 32
FUSED = {"attn_qkv": (128, 64), "attn_output": (64, 64)}
WHOLE = {"attn_qkv": (192, 64), "attn_output": (64, 64)}  # as many key heads as query heads
NORMS = {"attn_norm": (64,), "ffn_norm": (64,)}
AFTER = {"post_attention_norm": (64,), "post_ffw_norm": (64,)}
GATED = {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
PLAIN = {"ffn_up": (96, 64), "ffn_down": (64, 96)}
EXPERTS = {"ffn_gate_inp": (4, 64), "ffn_gate_exps": (4, 48, 64), "ffn_up_exps": (4, 48, 64)}
EXPERTS |= {"ffn_down_exps": (4, 64, 48)}
MAMBA = {"attn_norm": (64,), "ssm_in": (256, 64), "ssm_conv1d": (128, 4), "ssm_x": (20, 128), "ssm_dt": (128, 4)}
MAMBA |= {"ssm_a": (128, 8), "ssm_d": (128,), "ssm_out": (64, 128)}
TOP, HEAD = {"token_embd": (40, 64), "output_norm": (64,)}, {"output": (40, 64)}


def qk_norms(q, k):
    return {"attn_q_norm": (q,), "attn_k_norm": (k,)}


MODELS = {  # what: (architecture, entries, tensors of the top and of a block, those with biases, class, config)
    "llama": ("llama", SIZES | RMS, TOP | HEAD, SPLIT | NORMS | GATED, (), "LlamaForCausalLM", {"rms_norm_eps": 1e-6}),
    "llama with biases": (
        "llama",
        SIZES | RMS | {"rope.freq_base": 5e5},
        TOP,
        SPLIT | NORMS | GATED,
        (*SPLIT, *GATED),
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_theta": 5e5},
    ),
    "mixtral": (
        "llama",
        SIZES | RMS | {"expert_count": 4, "expert_used_count": 2, "feed_forward_length": 48},
        TOP,
        SPLIT | NORMS | EXPERTS,
        (),
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48},
    ),
    "mistral": ("mistral3", SIZES | RMS, TOP, SPLIT | NORMS | GATED, (), "MistralForCausalLM", {}),
    "qwen2": ("qwen2", SIZES | RMS, TOP, SPLIT | NORMS | GATED, ("attn_q", "attn_k", "attn_v"), "Qwen2ForCausalLM", {}),
    "qwen3": (
        "qwen3",
        SIZES | RMS | {"attention.key_length": 32},
        TOP,
        WIDE | NORMS | GATED | qk_norms(32, 32),
        (),
        "Qwen3ForCausalLM",
        {"head_dim": 32},
    ),
    "qwen3moe": (
        "qwen3moe",
        SIZES | RMS | {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48},
        TOP,
        SPLIT | NORMS | EXPERTS | qk_norms(16, 16),
        (),
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "gemma": (
        "gemma",
        SIZES | RMS | {"attention.key_length": 32},
        TOP,
        WIDE | NORMS | GATED,
        (),
        "GemmaForCausalLM",
        {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "gemma2": (
        "gemma2",
        SIZES | RMS | {"attention.sliding_window": 32, "final_logit_softcapping": 25.0},
        TOP,
        SPLIT | NORMS | AFTER | GATED,
        (),
        "Gemma2ForCausalLM",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 32,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 25.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3": (
        "gemma3",
        SIZES | RMS | {"attention.sliding_window": 32, "rope.freq_base": 1e6, "attention.key_length": 32},
        TOP,
        WIDE | NORMS | AFTER | GATED | qk_norms(32, 32),
        (),
        "Gemma3ForCausalLM",
        {
            "model_type": "gemma3_text",
            "layer_types": ["sliding_attention"] * 2,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
        },
    ),
    "phi3": (
        "phi3",
        SIZES | RMS | {"rope.dimension_count": 8, "attention.sliding_window": 0},
        TOP | HEAD,
        FUSED | NORMS | {"ffn_up": (192, 64), "ffn_down": (64, 96)},
        (),
        "Phi3ForCausalLM",
        {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 128},
    ),
    "olmo2": ("olmo2", SIZES | RMS, TOP | HEAD, SPLIT | AFTER | GATED | qk_norms(64, 32), (), "Olmo2ForCausalLM", {}),
    "granite": (
        "granite",
        SIZES | RMS | {"attention.scale": 0.1, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 8.0},
        TOP,
        SPLIT | NORMS | GATED,
        (),
        "GraniteForCausalLM",
        {"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 8.0},
    ),
    "smollm3": (
        "smollm3",
        SIZES | RMS | {"block_count": 5},
        TOP,
        SPLIT | NORMS | GATED,
        (),
        "SmolLM3ForCausalLM",
        {"no_rope_layers": [1, 1, 1, 0, 1]},
    ),
    "gptneox": (
        "gptneox",
        SIZES | LAYER | {"rope.dimension_count": 4, "attention.head_count_kv": 4, "use_parallel_residual": False},
        TOP | HEAD,
        WHOLE | NORMS | PLAIN,
        ("output_norm", *WHOLE, *NORMS, *PLAIN),
        "GPTNeoXForCausalLM",
        {"rotary_pct": 0.25, "use_parallel_residual": False, "layer_norm_eps": 1e-6},
    ),
    "gpt2": (
        "gpt2",
        SIZES | LAYER | {"attention.head_count_kv": 4},
        TOP | {"position_embd": (128, 64)},
        WHOLE | NORMS | PLAIN,
        ("output_norm", *WHOLE, *NORMS, *PLAIN),
        "GPT2LMHeadModel",
        {"n_embd": 64, "n_positions": 128, "n_inner": 96},
    ),
    "starcoder2": (
        "starcoder2",
        SIZES | LAYER,
        TOP,
        SPLIT | NORMS | PLAIN,
        ("output_norm", *SPLIT, *NORMS, *PLAIN),
        "Starcoder2ForCausalLM",
        {"use_bias": True, "norm_epsilon": 1e-6},
    ),
    "falcon": (
        "falcon",
        SIZES | LAYER | {"attention.head_count_kv": 1},
        TOP,
        {"attn_qkv": (96, 64), "attn_output": (64, 64), "attn_norm": (64,)} | PLAIN,
        ("output_norm", "attn_norm"),
        "FalconForCausalLM",
        {"multi_query": True, "new_decoder_architecture": False, "bias": False},
    ),
    "falcon with two norms": (
        "falcon",
        SIZES | LAYER,
        TOP,
        FUSED | {"attn_norm": (64,), "attn_norm_2": (64,)} | PLAIN,
        ("output_norm", "attn_norm", "attn_norm_2"),
        "FalconForCausalLM",
        {"multi_query": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "mamba": (
        "mamba",
        {"block_count": 2, "context_length": 128, "embedding_length": 64, "attention.head_count": 0}
        | RMS
        | {"ssm.inner_size": 128, "ssm.state_size": 8, "ssm.conv_kernel": 4, "ssm.time_step_rank": 4},
        TOP,
        MAMBA,
        ("ssm_conv1d", "ssm_dt"),
        "MambaForCausalLM",
        {"intermediate_size": 128, "state_size": 8, "conv_kernel": 4, "time_step_rank": 4, "use_conv_bias": True},
    ),
}


def make(path, what, entries=(), tensors=()):
    """The file of a model of `MODELS`, its numbers random; entries and tensors: more, or others."""
    arch, usual, top, block, biased, _, _ = MODELS[what]
    usual, rng = usual | dict(entries), np.random.default_rng(0)
    blocks = {f"blk.{i}.{name}": shape for i in range(usual["block_count"]) for name, shape in block.items()}
    stored = {}
    for name, shape in (top | blocks).items():
        suffix = "" if name.endswith(("ssm_a", "ssm_d")) else ".weight"
        stored[name + suffix] = -rng.uniform(0.1, 2, shape) if name.endswith("ssm_a") else rng.normal(size=shape)
        if re.sub(r"blk\.\d+\.", "", name) in biased:
            stored[f"{name}.bias"] = rng.normal(size=shape[:1] if len(shape) > 1 else shape)
    stored |= dict(tensors)
    return write(path, arch, usual, {n: a for n, a in stored.items() if a is not None}), stored


@pytest.mark.parametrize("what", MODELS)
def test_config_and_names_are_those_of_hugging_face(tmp_path, what):
    path, stored = make(tmp_path / "m.gguf", what)
    model, (*_, name, config) = GGUF(path), MODELS[what]
    assert model.config["architectures"] == [name]
    assert {k: model.config[k] for k in config} == config
    json.dumps(model.config)  # nothing of NumPy
    for tensor in model:
        assert model[tensor].shape == model.shape(tensor) and model[tensor].dtype == np.float32
        assert model.dtype(tensor) == "F32"
    found, family = find(model.config)
    assert found == name
    if what == "mamba":
        return
    arch = family.read(model.config)
    model.check(*shapes(arch, {tensor.split(".")[-2] for tensor in model}))
    assert arch.tied is ("output.weight" not in stored) and arch.max_positions == 128


def test_mamba_by_name(tmp_path):
    path, stored = make(tmp_path / "m.gguf", "mamba")
    model, at = GGUF(path), "layers.1."
    names = "norm.weight in_proj.weight conv.weight conv.bias x_proj.weight dt_proj.weight dt_proj.bias a_log d"
    assert {n for n in model if n.startswith(at)} == {at + n for n in (*names.split(), "out_proj.weight")}
    np.testing.assert_allclose(model[f"{at}a_log"], np.log(-stored["blk.1.ssm_a"]), rtol=1e-5, atol=1e-6)
    assert model.shape(f"{at}conv.weight") == (128, 1, 4)
    np.testing.assert_array_equal(model[f"{at}conv.weight"][:, 0], stored["blk.1.ssm_conv1d.weight"].astype(np.float32))


@pytest.mark.parametrize("what", MODELS)
def test_matrices_need_not_be_read(tmp_path, what):
    model = GGUF(make(tmp_path / "m.gguf", what)[0])
    for name in model:
        if len(model.shape(name)) > 1:
            unread = model.matrices(name)
            made = name.endswith(("conv.weight", "a_log"))  # of what is stored
            assert all(isinstance(part, Stored) is not made for part in unread)
            np.testing.assert_array_equal(joined(unread).reshape(model.shape(name)), model[name])


def as_neighbours(w, heads):
    """What llama.cpp's converter does to the rows of queries and keys: halves of a head become neighbours."""
    return w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


@pytest.mark.parametrize("what", ["llama with biases", "mixtral", "mistral", "granite", "smollm3"])
def test_rows_of_queries_and_keys_are_put_back(tmp_path, what):
    rng = np.random.default_rng(1)
    original = {"q": rng.normal(size=(64, 64)), "k": rng.normal(size=(32, 64)), "v": rng.normal(size=(32, 64))}
    heads = {"q": 4, "k": 2}
    theirs = {n: as_neighbours(w, heads[n]) if n in heads else w for n, w in original.items()}
    tensors = {f"blk.1.attn_{n}.weight": w for n, w in theirs.items()}
    biases = {f"blk.1.attn_{n}.bias": w[:, 0] for n, w in theirs.items()} if "biases" in what else {}
    model = GGUF(make(tmp_path / "m.gguf", what, tensors=tensors | biases)[0])
    for n, w in original.items():
        np.testing.assert_array_equal(model[f"layers.1.{n}.weight"], w.astype(np.float32))
        if biases:
            np.testing.assert_array_equal(model[f"layers.1.{n}.bias"], w[:, 0].astype(np.float32))
    # in one matrix
    nothing = {f"blk.{i}.attn_{n}.{kind}": None for i in range(5) for n in "qkv" for kind in ("weight", "bias")}
    fused = {
        f"blk.{i}.attn_qkv.weight": np.concatenate(list(theirs.values())) for i in range(5 if what == "smollm3" else 2)
    }
    model = GGUF(make(tmp_path / "fused.gguf", what, tensors=nothing | fused)[0])
    np.testing.assert_array_equal(
        model["layers.1.qkv.weight"], np.concatenate(list(original.values())).astype(np.float32)
    )


@pytest.mark.parametrize("what", ["qwen2", "gemma", "phi3", "olmo2"])
def test_other_rows_stay_as_they_are(tmp_path, what):
    path, stored = make(tmp_path / "m.gguf", what)
    ours, theirs = ("qkv", "attn_qkv") if what == "phi3" else ("q", "attn_q")
    expected = stored[f"blk.0.{theirs}.weight"].astype(np.float32)
    np.testing.assert_array_equal(GGUF(path)[f"layers.0.{ours}.weight"], expected)


@pytest.mark.parametrize("what", ["gemma", "gemma2", "gemma3"])
def test_norms_of_gemma_come_minus_one(tmp_path, what):
    path, stored = make(tmp_path / "m.gguf", what)
    model = GGUF(path)
    norms = {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm"}
    if what != "gemma":
        norms |= {"attn_post_norm": "post_attention_norm", "mlp_post_norm": "post_ffw_norm"}
    if what == "gemma3":
        norms |= {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
    pairs = {f"layers.1.{n}.weight": f"blk.1.{theirs}.weight" for n, theirs in norms.items()}
    for ours, theirs in (pairs | {"norm.weight": "output_norm.weight"}).items():
        np.testing.assert_array_equal(model[ours], stored[theirs].astype(np.float32) - 1)


def test_the_two_norms_of_falcon(tmp_path):
    path, stored = make(tmp_path / "two.gguf", "falcon with two norms")
    for ours, theirs in (("attn_norm", "attn_norm_2"), ("mlp_norm", "attn_norm")):
        for kind in ("weight", "bias"):
            expected = stored[f"blk.1.{theirs}.{kind}"].astype(np.float32)
            np.testing.assert_array_equal(GGUF(path)[f"layers.1.{ours}.{kind}"], expected)
    one = GGUF(make(tmp_path / "one.gguf", "falcon")[0])
    np.testing.assert_array_equal(one["layers.1.attn_norm.weight"], one["layers.1.mlp_norm.weight"])


def llama3_factors(theta, dims, factor, low, high, context):
    """As llama.cpp's converter computes them."""
    out = []
    for i in range(0, dims, 2):
        length = 2 * np.pi * theta ** (i / dims)
        if length < context / high:
            out.append(1.0)
        elif length > context / low:
            out.append(factor)
        else:
            smooth = (context / length - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


PUBLISHED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALINGS = {  # what: (entries, tensors, rope_scaling)
    "none": ({"rope.scaling.type": "none"}, {}, None),
    "a factor alone": ({"rope.scaling.factor": 4.0}, {}, {"rope_type": "linear", "factor": 4.0}),
    "linear": (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {},
        {"rope_type": "linear", "factor": 4.0},
    ),
    "linear, as of old": ({"rope.scale_linear": 2.0}, {}, {"rope_type": "linear", "factor": 2.0}),
    "yarn": (
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_beta_fast": 16.0,
        },
        {},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
    ),
    "llama3": (
        {"rope.freq_base": 5e5},
        {"rope_freqs.weight": llama3_factors(5e5, 16, 32.0, 1.0, 4.0, 8192)},
        {"rope_type": "llama3", "factor": 32.0, **PUBLISHED},
    ),
    "llama3 of ones": ({}, {"rope_freqs.weight": np.ones(8)}, None),
    "llama3 with other numbers": (
        {},
        {"rope_freqs.weight": np.arange(1, 9)},
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 128,
            "long_factor": [float(i) for i in range(1, 9)],
            "short_factor": [float(i) for i in range(1, 9)],
            "attention_factor": 1.0,
        },
    ),
    "longrope": (
        {"rope.scaling.attn_factor": 1.25, "rope.scaling.original_context_length": 64},
        {"rope_factors_long.weight": np.full(8, 2.5), "rope_factors_short.weight": np.full(8, 1.5)},
        {
            "rope_type": "longrope",
            "long_factor": [2.5] * 8,
            "short_factor": [1.5] * 8,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.25,
        },
    ),
}


@pytest.mark.parametrize("what", SCALINGS)
def test_scaling_of_rotary_frequencies(tmp_path, what):
    entries, tensors, expected = SCALINGS[what]
    model = GGUF(make(tmp_path / "m.gguf", "llama", entries, tensors)[0])
    assert model.config.get("rope_scaling") == expected
    assert not [n for n in model if "rope" in n]
    find(model.config)[1].read(model.config)


@pytest.mark.parametrize(
    "entries, ids",
    [
        ({}, {}),
        ({"/tokenizer.ggml.bos_token_id": 3, "/tokenizer.ggml.eos_token_id": 4}, {"bos": 3, "eos": 4}),
        ({"/tokenizer.ggml.eos_token_id": 4, "/tokenizer.ggml.eot_token_id": 5}, {"eos": [4, 5]}),
        ({"/tokenizer.ggml.eos_token_id": 4, "/tokenizer.ggml.eot_token_id": 4}, {"eos": 4}),
        ({"/tokenizer.ggml.eos_token_id": 40, "/tokenizer.ggml.padding_token_id": 2**32 - 1}, {}),  # 40 tokens
        ({"/tokenizer.ggml.model": "llama"}, {"bos": 1, "eos": 2}),
        (
            {
                "/tokenizer.ggml.eos_token_id": 1,
                "/tokenizer.ggml.tokens": ["a", "<eos>", "<end_of_turn>", "<|end|>", *["b"] * 36, "<|im_end|>"],
                "/tokenizer.ggml.token_type": [1, 3, 3, 1, *[1] * 36, 3],  # the last one has no row in the embedding
            },
            {"eos": [1, 2, 3]},
        ),
    ],
)
def test_ids_that_begin_and_end_a_text(tmp_path, entries, ids):
    config = GGUF(make(tmp_path / "m.gguf", "llama", entries)[0]).config
    found = {name: config[f"{name}_token_id"] for name in ("bos", "eos", "pad") if f"{name}_token_id" in config}
    assert found == ids


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what, entries, tensors, error, message",
    [
        ("llama", {"/general.type": "adapter"}, {}, InvalidModelFiles, "holds no language model: general.type is 'ad"),
        ("llama", {"/split.count": 3}, {}, InvalidModelFiles, "split.count 3; expected 0 and 1, by its name"),
        ("llama", {"attention.head_count": 0}, {}, InvalidModelFiles, "llama.attention.head_count must be an integer"),
        ("llama", {"attention.head_count": 3}, {}, InvalidModelFiles, "q has the shape .64, 64., which 3 and 2 heads"),
        ("llama", {"embedding_length": "wide"}, {}, InvalidModelFiles, "embedding_length must be.*>= 1; got 'wide'"),
        ("llama", {"embedding_length": [64, 32]}, {}, UnknownArchitecture, "embedding_length differs between layers"),
        ("llama", {"rope.freq_base": -1.0}, {}, InvalidModelFiles, "rope.freq_base must be a number > 0; got -1.0"),
        ("llama", {"rope.scaling.type": "magic"}, {}, UnknownArchitecture, "scaling.type is 'magic'; known: none, lin"),
        ("llama", {}, {"rope_freqs.weight": np.zeros(8)}, InvalidModelFiles, "must hold numbers > 0"),
        ("llama", {}, {"token_embd.weight": None}, InvalidModelFiles, "has no tensor 'token_embd.weight'"),
        ("llama", {}, {"blk.2.ffn_up.weight": np.zeros(4)}, InvalidModelFiles, "have 2 blocks.*tensors belong to 3"),
        (
            "llama",
            {"rope.dimension_count": 8},
            {},
            UnknownArchitecture,
            "dimension_count must be 16, the size .* got 8",
        ),
        ("llama", {"rope.dimension_count": 32}, {}, UnknownArchitecture, "must be 16, the size of a head; got 32"),
        ("gemma3", {"rope.dimension_count_swa": 8}, {}, UnknownArchitecture, "of which a part is turned"),
        ("llama", {"attention.causal": False}, {}, UnknownArchitecture, "attention.causal is false; supported: true"),
        ("llama", {"rope.scaling.attn_factor": 0.5}, {}, UnknownArchitecture, "attn_factor must be 1.0 or left out"),
        ("gemma2", {"rope.freq_base_swa": 7.0}, {}, UnknownArchitecture, "freq_base_swa must be .* got 7.0"),
        (
            *("llama", {"rope.scaling.factor": 2.0}, {"rope_freqs.weight": np.ones(8)}),
            *(UnknownArchitecture, "both together are not supported"),
        ),
        ("olmo2", {"attention.sliding_window": 4}, {}, UnknownArchitecture, "holds an OLMo 3, whose windows"),
        ("mistral", {"attention.temperature_scale": 0.1}, {}, UnknownArchitecture, "Ministral 3"),
        ("mamba", {"ssm.dt_b_c_rms": True}, {}, UnknownArchitecture, "Falcon-Mamba"),
    ],
)
def test_a_model_that_we_cannot_read_is_explained(tmp_path, what, entries, tensors, error, message):
    path, _ = make(tmp_path / "m.gguf", what, entries, tensors)
    with pytest.raises(error, match=message):
        GGUF(path)


def test_an_unknown_architecture_is_named(tmp_path):
    path = write(tmp_path / "m.gguf", "rwkv7", {}, {"token_embd.weight": np.zeros((4, 4))})
    with pytest.raises(
        UnknownArchitecture, match=r"architecture 'rwkv7'; known in GGUF: llama, mistral3, qwen2.*mamba"
    ):
        GGUF(path)


def test_what_is_missing_or_too_much_is_listed_in_one_error(tmp_path):
    tensors = {"blk.0.ffn_up.weight": None, "blk.1.attn_k.weight": np.zeros((64, 64)), "blk.1.extra.weight": np.ones(3)}
    model = GGUF(make(tmp_path / "m.gguf", "llama", {}, tensors)[0])
    with pytest.raises(InvalidModelFiles) as e:
        model.check(*shapes(find(model.config)[1].read(model.config)))
    assert [line.strip() for line in str(e.value).split("\n")[1:-1]] == [
        "layers.0.up.weight is missing (expected shape (96, 64))",
        "blk.1.extra.weight (3,) is not part of this architecture",
        "layers.1.k.weight has shape (64, 64), expected (32, 64)",
    ]


def header(version=3, tensors=0, entries=0, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + rest


def text(s):
    return struct.pack("<Q", len(s)) + s


def tensor(shape, kind=0, offset=0, name=b"w"):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ALIGNED = text(b"general.alignment") + struct.pack("<II", 4, 32)
HEADERS = {
    "nothing": b"",
    "four bytes": b"GGUF",
    "another format": b"PK\3\4" + bytes(60),
    "version 1": header(1),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "many tensors": header(tensors=2**63, rest=bytes(100)),
    "many entries": header(entries=2**63, rest=bytes(100)),
    "a long string": header(entries=1, rest=struct.pack("<Q", 2**63) + bytes(50)),
    "a long list of strings": header(entries=1, rest=text(b"k") + struct.pack("<IIQ", 9, 8, 2**60) + bytes(50)),
    "a long list of numbers": header(entries=1, rest=text(b"k") + struct.pack("<IIQ", 9, 4, 2**62) + bytes(50)),
    "a list of lists": header(entries=1, rest=text(b"k") + struct.pack("<IIQIQ", 9, 9, 1, 4, 0)),
    "an unknown type": header(entries=1, rest=text(b"k") + struct.pack("<II", 13, 0)),
    "an entry twice": header(entries=2, rest=ALIGNED + ALIGNED),
    "a tensor that is no UTF-8": header(tensors=1, rest=tensor([4], name=b"\xff") + bytes(999)),
    "an odd alignment": header(entries=1, rest=ALIGNED[:-4] + struct.pack("<I", 24)),
    "no alignment": header(entries=1, rest=ALIGNED[:-4] + bytes(4)),
    "a shape beyond the file": header(tensors=1, rest=tensor([2**40]) + bytes(999)),
    "a shape beyond 64 bits": header(tensors=1, rest=tensor([2**63, 2**63, 2**63]) + bytes(999)),
    "no rows": header(tensors=1, rest=tensor([0, 2**60]) + bytes(999)),
    "five dimensions": header(tensors=1, rest=tensor([1] * 5) + bytes(999)),
    "many dimensions": header(tensors=1, rest=text(b"w") + struct.pack("<I", 2**31) + bytes(999)),
    "an unknown kind": header(tensors=1, rest=tensor([32], kind=77) + bytes(999)),
    "half a block": header(tensors=1, rest=tensor([33], kind=2) + bytes(999)),
    "an offset beyond the file": header(tensors=1, rest=tensor([4], offset=2**60) + bytes(999)),
    "overlapping tensors": header(tensors=2, rest=tensor([4]) + tensor([4], name=b"v") + bytes(999)),
    "a tensor twice": header(tensors=2, rest=tensor([8]) + tensor([8], offset=32) + bytes(999)),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_promises_what_is_not_there(tmp_path, what):
    path = tmp_path / "m.gguf"
    path.write_bytes(HEADERS[what])
    with pytest.raises(InvalidModelFiles, match=r"m\.gguf.*([Dd]ownload|Convert|Use the model)"):
        GGUF(path)


def test_bytes_that_are_no_utf_8(tmp_path):
    """Where nobody needs them they refuse nothing; where somebody does it is said which entry, and which of a list."""
    entries, size = vocabulary()
    entries |= {"/general.description": "Gr#sse", "/general.tags": ["gr#n"], "/a#": 1, "/tokenizer.chat_template": "h#"}
    tensors = {"token_embd.weight": np.zeros((size, 64))}
    whole = make(tmp_path / "m.gguf", "llama", entries, tensors)[0].read_bytes()

    def damaged(before, after=None):
        path = tmp_path / "m.gguf"
        path.write_bytes(whole.replace(before, after or before.replace(b"#", b"\xf6")))
        return GGUF(path)

    for before in (b"Gr#sse", b"gr#n", b"a#"):
        model = damaged(before)
        assert dict(model) and model.tokenizer().chat_template == {"default": "h#"}
    assert damaged(b"Gr#sse").metadata["general.description"] == "Gr\ufffdsse"
    with pytest.raises(InvalidModelFiles, match="chat template 'default' must be UTF-8; got other bytes"):
        damaged(b"h#").tokenizer()
    model = damaged("Ġthe".encode(), b"\xff\xa0the")
    assert dict(model)  # numbers need no text
    with pytest.raises(
        InvalidModelFiles, match=rf"tokens must be UTF-8; got b'.xff.xa0the' as number {size - 1}\. Con"
    ):
        model.tokenizer()
    with pytest.raises(InvalidModelFiles, match=r"general\.architecture is no UTF-8: b'l.xffama'. Copy or download"):
        damaged(b"llama", b"l\xffama")


def test_a_file_that_is_not_there_or_shrinks(tmp_path):
    with pytest.raises(InvalidModelFiles, match="There is no file"):
        GGUF(tmp_path / "m.gguf")
    path, _ = make(tmp_path / "m.gguf", "llama")
    model = GGUF(path)
    path.write_bytes(path.read_bytes()[:-20000])
    with pytest.raises(InvalidModelFiles, match="has changed since it was opened"):
        dict(model)


def test_where_a_gguf_file_is(tmp_path):
    assert find_gguf("a/b.gguf") == Path("a/b.gguf")
    assert find_gguf(tmp_path) is None and find_gguf(tmp_path / "none") is None
    (tmp_path / "x.gguf").touch()
    assert find_gguf(tmp_path) == tmp_path / "x.gguf"
    (tmp_path / "y.gguf").touch()
    with pytest.raises(InvalidModelFiles, match=r"holds 2 GGUF files: x\.gguf, y\.gguf\. Pass one of these"):
        find_gguf(tmp_path)
    (tmp_path / "config.json").touch()
    assert find_gguf(tmp_path) is None


# ---- models that are split -----------------------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path, monkeypatch):
    """split(name): the three parts of a model of llama, as the library writes them; as a whole in `whole.gguf`."""
    writer = gguf.GGUFWriter

    def made(name, what="llama"):
        monkeypatch.setattr(gguf, "GGUFWriter", writer)
        make(tmp_path / "whole.gguf", what)
        monkeypatch.setattr(gguf, "GGUFWriter", partial(writer, split_max_tensors=8))
        (tmp_path / name).mkdir()
        make(tmp_path / name / f"{name}.gguf", what)
        return sorted((tmp_path / name).iterdir())

    return made


def test_any_part_or_the_folder_is_the_whole_model(tmp_path, split, capsys):
    files = split("m")
    whole = GGUF(tmp_path / "whole.gguf")
    assert [f.name for f in files] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for place in (*files, tmp_path / "m"):
        assert find_gguf(place) == files[0]
    for path in files:
        model = GGUF(path)
        assert model.parts == files and model.path == files[0] and model.config == whole.config
        assert model.keys() == whole.keys() and all(np.array_equal(model[name], whole[name]) for name in whole)
        assert name_of(str(path)) == "m" and model_facts(str(path))["files"].keys() == {f.name for f in files}
    assert describe(files[2]).files == "GGUF, 3 parts"
    facts = SimpleNamespace(numerics="cpu-2 float32", dtype="float32", quantization="none")
    before = system_fingerprint(facts, str(files[0]))
    assert system_fingerprint(facts, str(tmp_path / "m")) == before
    files[1].write_bytes(files[1].read_bytes()[:-1] + b"\x01")
    assert system_fingerprint(facts, str(files[0])) != before


def test_parts_that_do_not_make_a_model_are_named(split):
    first, second, third = split("m")
    other = split("other", "qwen3")
    good = second.read_bytes()
    for wrong, message in [
        (None, r"m lacks 1 of the 3 parts of a GGUF model: m-00002-of-00003\.gguf\. Copy or download what is missing"),
        (first.read_bytes(), r"m-00002-of-00003\.gguf has split.no 0 and split.count 3; expected 1 and 3, by its name"),
        (other[1].read_bytes(), r"m-00002-of-00003\.gguf holds 8 of a model's 24"),
        (good.replace(b"count\2\0\0\0\3", b"count\2\0\0\0\4"), r"00002-of-00003.* split.count 4; expected"),
        (
            good.replace(b"blk.0.ffn_gate", b"blk.1.ffn_gate"),
            r"00003\.gguf holds the tensor 'blk.1.ffn_gate.weight', as .*00002-",
        ),
    ]:
        second.unlink() if wrong is None else second.write_bytes(wrong)
        with pytest.raises(InvalidModelFiles, match=message):
            GGUF(third)


@pytest.mark.parametrize("what", ["mixtral", "gemma3", "phi3", "falcon", "mamba"])
def test_entries_of_any_type_are_read_or_refused(tmp_path, monkeypatch, what):
    path, _ = make(tmp_path / "m.gguf", what, vocabulary()[0], {"token_embd.weight": np.zeros((vocabulary()[1], 64))})
    GGUF(path).tokenizer()
    metadata, stored = read_header(path)
    arrays = [np.array([]), np.array([1, 2]), np.array([2.5]), np.array([True, False])]
    odd = [None, "", "x", "llama", True, 0, -1, 2**63, 1e300, float("nan"), float("inf"), [], ["a", "b"], *arrays]
    for key in metadata:
        for value in odd:
            changed = {**metadata, key: value} if value is not None else {k: v for k, v in metadata.items() if k != key}
            monkeypatch.setattr("hibachi.llm.model.gguf.file.read_header", lambda path, m=changed: (m, stored))
            with contextlib.suppress(InvalidModelFiles, UnknownArchitecture):
                model = GGUF(path)
                json.dumps(model.config)
                model.tokenizer().raw.encode("the theory")


# ---- fuzzing -------------------------------------------------------------------------------------------------------


def vocabulary():
    tokens = ["<unk>", "<s>", "</s>", *(chr(i) for i in range(33, 127)), "Ġ", "th", "the", "Ġthe"]
    types = [2, 3, 3] + [1] * (len(tokens) - 3)
    entries = {"tokens": tokens, "token_type": types, "merges": ["t h", "th e", "Ġ the"]}
    entries |= {"model": "gpt2", "pre": "smollm", "bos_token_id": 1, "eos_token_id": 2, "add_bos_token": True}
    return {f"/tokenizer.ggml.{k}": v for k, v in entries.items()}, len(tokens)


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_mutated_file_is_refused_or_read(tmp_path, count):
    entries, size = vocabulary()
    tensors = {"token_embd.weight": np.zeros((size, 64))}
    tensors |= {f"blk.{i}.ffn_up.weight": np.full((96, 2 * 20), i, np.uint8) for i in range(2)}
    path, _ = make(tmp_path / "m.gguf", "llama", entries, tensors)
    GGUF(path).tokenizer()
    data = path.read_bytes()
    end = min(t.offset for t in read_header(path)[1].values())
    outcomes = {InvalidModelFiles: 0, UnknownArchitecture: 0, None: 0}
    tracemalloc.start()
    for seed in range(count):
        path.write_bytes(changed(data, end, random.Random(seed)))
        start, outcome = time.perf_counter(), None
        try:
            model = GGUF(path)
            assert all(model[name].shape == model.shape(name) for name in model)
            model.tokenizer().raw.encode("the theory")
        except (InvalidModelFiles, UnknownArchitecture) as e:
            outcome = type(e)
        outcomes[outcome] += 1
        assert time.perf_counter() - start < 5, seed
        peak = tracemalloc.get_traced_memory()[1]
        assert peak < 10e6, f"mutation {seed} took {peak / 1e6:.0f} MB for a file of {len(data) / 1e6:.1f} MB"
    tracemalloc.stop()
    assert min(outcomes.values()) > 0, outcomes  # each way out was taken
