"""Every architecture on every library against transformers: chunks of prompts mixed with decode, greedy tokens."""

import copy
import json
from functools import cache

import array_api_strict
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from hibachi import AutoregressiveBatchInference, SamplingParams
from hibachi.backend.array_backend import ArrayBackend
from hibachi.backend.numpy_backend import NumpyBackend
from hibachi.errors import UnknownArchitecture
from hibachi.llm.model.registry import load_model
from hibachi_jax import JaxBackend
from hibachi_torch import TorchBackend

BASE = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
NO_KV = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
LLAMA3 = dict(rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(rope_type="llama3", original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)
LONG = dict(
    rope_type="longrope",
    rope_theta=1e4,
    original_max_position_embeddings=4,
    short_factor=[1.1] * 6,
    long_factor=[1.5, 2, 2.5, 3, 3.5, 4],
)
MOE = dict(num_experts_per_tok=2, num_local_experts=5)
FALCON = dict(NO_KV, bias=True, parallel_attn=True, new_decoder_architecture=False, multi_query=True)

CASES = {  # name -> class, settings
    "Llama 2": ("Llama", BASE),
    "Llama 3.1": ("Llama", BASE | dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "Llama, YaRN": ("Llama", BASE | dict(rope_parameters=YARN)),
    "Llama, linear rope, biases": (
        "Llama",
        BASE
        | dict(attention_bias=True, mlp_bias=True, num_key_value_heads=1)
        | dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.5)),
    ),
    "Mistral": ("Mistral", BASE | dict(sliding_window=7)),
    "Mixtral": ("Mixtral", BASE | MOE),
    "Qwen2": ("Qwen2", BASE),
    "Qwen2, window": ("Qwen2", BASE | dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "Qwen3": ("Qwen3", BASE | dict(head_dim=16)),
    "Qwen3-MoE": (
        "Qwen3Moe",
        BASE
        | dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
        | dict(mlp_only_layers=[1], norm_topk_prob=True),
    ),
    "Gemma": ("Gemma", BASE | dict(head_dim=16)),
    "Gemma2": ("Gemma2", BASE | dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=6)),
    "Gemma3": (
        "Gemma3Text",
        BASE
        | dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=6)
        | dict(layer_types=["sliding_attention", "full_attention"]),
    ),
    "Phi3": ("Phi3", BASE | dict(sliding_window=9)),
    "Phi3, LongRoPE": (
        "Phi3",
        BASE
        | dict(original_max_position_embeddings=4, rope_parameters=LONG | dict(original_max_position_embeddings=4)),
    ),
    "OLMo2": ("Olmo2", BASE),
    "Granite": (
        "Granite",
        BASE | dict(embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.5, logits_scaling=4.0),
    ),
    "SmolLM3": ("SmolLM3", BASE | dict(no_rope_layer_interval=2)),
    "GPT-NeoX": ("GPTNeoX", NO_KV | dict(rotary_pct=0.5)),
    "GPT-NeoX, serial": ("GPTNeoX", NO_KV | dict(rotary_pct=0.5, use_parallel_residual=False)),
    "GPT-2": (
        "GPT2",
        dict(vocab_size=97, n_embd=48, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2),
    ),
    "StarCoder2": ("Starcoder2", BASE | dict(sliding_window=8)),
    "Falcon 7B": ("Falcon", FALCON),
    "Falcon 40B": ("Falcon", FALCON | dict(new_decoder_architecture=True, num_kv_heads=2)),
    "Falcon, serial": ("Falcon", FALCON | dict(parallel_attn=False, multi_query=False)),
    "Mamba": (
        "Mamba",
        dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=8, bos_token_id=1, eos_token_id=2),
    ),
}
# Each has a line of `Decoder` or a class that no other has; where each compiles, the others are slow tests.
OF_THEIR_OWN = "Qwen3-MoE", "Gemma2", "Gemma3", "OLMo2", "Granite", "SmolLM3", "GPT-NeoX", "GPT-2", "Mamba"
LIBRARIES = {"numpy": NumpyBackend, "torch": lambda: TorchBackend("cpu"), "jax": JaxBackend}
STRICT = {"array_api_strict": lambda: ArrayBackend(array_api_strict)}
EACH = [
    pytest.param(name, library, marks=pytest.mark.slow if library == "jax" and name not in OF_THEIR_OWN else ())
    for name in CASES
    for library in LIBRARIES
]
EACH += [pytest.param("Llama 3.1", "array_api_strict"), pytest.param("Mistral", "array_api_strict")]
PROMPTS = [np.random.default_rng(1).integers(3, 97, n) for n in (5, 43, 9, 3)]
NEW = 32


def make(name, folder, **saved):
    """A random model in transformers, saved in `folder`. saved: options of save_pretrained."""
    kind, settings = (CASES | WITH_IMAGES)[name]
    model = random_model(kind, settings, images=name in WITH_IMAGES)
    model.save_pretrained(folder, **saved)
    return model


def random_model(kind, settings, *, images=False):
    config = getattr(transformers, f"{kind}Config")(**copy.deepcopy(settings))
    auto = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter, p in model.named_parameters():  # the default is too small to tell errors from noise
            if p.ndim == 1 and "norm" in parameter and parameter.endswith("weight"):
                p.normal_(0.0 if kind.startswith("Gemma") else 1.0, 0.3)
            elif "A_log" not in parameter:
                p.normal_(0.0, 0.2 if p.ndim == 1 else 0.12)
    return model


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """case(name): the model in transformers, and its folder."""

    @cache
    def get(name):
        folder = tmp_path_factory.mktemp("model")
        return make(name, folder), folder

    return get


def run(folder, backend):
    """Our greedy tokens after each prompt, and the log-probabilities before each of them [NEW, 97]."""
    model = load_model(folder, backend)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=97)
    with AutoregressiveBatchInference(
        model,
        max_num_seqs=3,
        max_num_batched_tokens=12,  # chunks of prompts beside decoding rows, and a prompt that waits
        max_model_len=128,
        block_size=32 if backend.shapes.compiled else 4,  # fewer shapes to compile
        backend=backend,
    ) as engine:
        streams = [engine.run(prompt, params) for prompt in PROMPTS]
        tokens = [list(stream) for stream in streams]
        return tokens, [np.array([[step[i] for i in range(97)] for step in s.logprobs]) for s in streams]


def agree(reference, folder, backend, atol):
    """Every one of our tokens is the most likely one after those before it, so they are those of a greedy run."""
    for prompt, tokens, ours in zip(PROMPTS, *run(folder, backend), strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        np.testing.assert_allclose(ours, logits.double().log_softmax(-1).numpy(), atol=atol, rtol=0)


@pytest.mark.parametrize("name, library", EACH)
def test_logits_and_greedy_tokens_are_those_of_transformers(case, name, library):
    reference, folder = case(name)
    agree(reference, folder, (LIBRARIES | STRICT)[library](), 1e-4)


# ---- files that say more or less, or say it otherwise ----------------------------------------------------------------

_IMAGES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
_IMAGES |= dict(image_size=28, patch_size=14)
WITH_IMAGES = {
    "Gemma3, images": (
        "Gemma3",
        dict(text_config=CASES["Gemma3"][1], vision_config=_IMAGES | dict(model_type="siglip_vision_model")),
    ),
    "Mistral3": (
        "Mistral3",
        dict(
            text_config=BASE | dict(model_type="mistral", head_dim=12, sliding_window=7),
            vision_config=_IMAGES | dict(model_type="pixtral", head_dim=8),
        ),
    ),
}
IN_ONE = dict(save_original_format=False)  # as transformers 5 has them in memory: experts in one array, other prefixes
HEAD = "lm_head.weight"


def embedding(tensors):
    return next(name for name, t in tensors.items() if len(t) == 97 and name != HEAD)


def own_head(tensors, config, name=HEAD):
    t = tensors[embedding(tensors)]
    tensors[name] = t + 0.1 * torch.randn(t.shape)
    config["tie_word_embeddings"] = True


def own_head_of_text(tensors, config):
    """It is the class that says they are tied, whatever text_config says."""
    own_head(tensors, config, f"language_model.{HEAD}")
    del config["tie_word_embeddings"]
    config["text_config"]["tie_word_embeddings"] = False


def left_out(tensors, config):
    for name in ("layer_types", "query_pre_attn_scalar", "rope_parameters", "sliding_window", "hidden_activation"):
        del config["text_config"][name]
    config.update(sliding_window=3, query_pre_attn_scalar=3, is_causal=False)  # beside text_config these are nothing
    config["text_config"]["final_logit_softcapping"] = 1.0  # nor this in the class for images


def renamed(find, old, new):
    def change(tensors, config):
        for name in [n for n in tensors if find in n]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def masks(tensors, config):
    """Buffers that old files hold and nobody needs, of no dtype of weights."""
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)


FILES = {  # name -> model, options of save_pretrained, what changes the tensors and config.json in place
    "a head of its own": ("Llama 3.1", {}, own_head),
    "GPT-2, a head of its own": ("GPT-2", {}, own_head),
    "Mamba, a head of its own": ("Mamba", {}, own_head),
    "the head alone": ("Llama 3.1", {}, lambda t, c: t.update({HEAD: t.pop(embedding(t))})),
    "the head below the prefix": ("Llama 2", {}, renamed(HEAD, HEAD, f"model.{HEAD}")),
    "GPT-2, masks": ("GPT-2", {}, masks),
    "Mistral, types of layers": (
        "Mistral",
        {},
        lambda t, c: c.update(layer_types=["full_attention", "sliding_attention"]),
    ),
    "Mixtral, one array": ("Mixtral", IN_ONE, None),
    "Mixtral, one array, older names": ("Mixtral", IN_ONE, renamed(".mlp.", ".mlp.", ".block_sparse_moe.")),
    "Qwen3-MoE, one array": ("Qwen3-MoE", IN_ONE, None),
    "Gemma3, images": ("Gemma3, images", {}, None),
    "Gemma3, images, in memory": ("Gemma3, images", IN_ONE, left_out),
    "Mistral3": ("Mistral3", {}, None),
    "Mistral3, a head of its own": ("Mistral3", {}, own_head_of_text),
}
EVERYWHERE = "Mixtral, one array", "Gemma3, images"


def rewrite(folder, change):
    """The files of a folder after change(tensors, config)."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "name, library", [(name, lib) for name in FILES for lib in (LIBRARIES if name in EVERYWHERE else ["numpy"])]
)
def test_what_the_files_hold_counts_as_in_transformers(tmp_path, caplog, name, library):
    model, saved, change = FILES[name]
    make(model, tmp_path, **saved)
    if change is not None:
        rewrite(tmp_path, change)
    auto = transformers.AutoModelForImageTextToText if model in WITH_IMAGES else transformers.AutoModelForCausalLM
    reference = auto.from_pretrained(tmp_path, attn_implementation="eager").eval()
    agree(reference, tmp_path, LIBRARIES[library](), 2e-5)
    assert caplog.text.count("holds other numbers than the embeddings") == (change in (own_head, own_head_of_text))


def test_a_text_model_of_another_kind_within_one_of_images_is_named(tmp_path):
    make("Mistral3", tmp_path)
    rewrite(tmp_path, lambda tensors, config: config["text_config"].update(model_type="ministral3"))
    with pytest.raises(UnknownArchitecture, match=r"text_config\.model_type is 'ministral3'; supported: 'mistral'"):
        load_model(tmp_path, TorchBackend("cpu"))
