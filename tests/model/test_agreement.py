"""Every architecture on every library against transformers: chunks of prompts mixed with decode, greedy tokens."""

from functools import cache

import numpy as np
import pytest
import torch
import transformers

from hibachi import AutoregressiveBatchInference, SamplingParams
from hibachi.model.registry import load_model
from hibachi.tensor.numpy_backend import NumpyBackend
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
EACH = [
    pytest.param(name, library, marks=pytest.mark.slow if library == "jax" and name not in OF_THEIR_OWN else ())
    for name in CASES
    for library in LIBRARIES
]
PROMPTS = [np.random.default_rng(1).integers(3, 97, n) for n in (5, 43, 9, 3)]
NEW = 32


def make(name, folder):
    """A random model in transformers, saved in `folder`."""
    kind, settings = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter, p in model.named_parameters():  # the default is too small to tell errors from noise
            if p.ndim == 1 and "norm" in parameter and parameter.endswith("weight"):
                p.normal_(0.0 if name.startswith("Gemma") else 1.0, 0.3)
            elif "A_log" not in parameter:
                p.normal_(0.0, 0.2 if p.ndim == 1 else 0.12)
    model.save_pretrained(folder)
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


@pytest.mark.parametrize("name, library", EACH)
def test_logits_and_greedy_tokens_are_those_of_transformers(case, name, library):
    """Every one of our tokens is the most likely one after those before it, so they are those of a greedy run."""
    reference, folder = case(name)
    for prompt, tokens, ours in zip(PROMPTS, *run(folder, LIBRARIES[library]()), strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        np.testing.assert_allclose(ours, logits.double().log_softmax(-1).numpy(), atol=1e-4, rtol=0)
