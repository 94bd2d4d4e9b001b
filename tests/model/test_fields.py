"""Every field of config.json, left out, null and in its other spellings, means what its class in transformers means."""

import copy
import dataclasses
import json
import typing

import numpy as np
import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hibachi import AutoregressiveBatchInference, SamplingParams
from hibachi.errors import HibachiError, UnknownArchitecture
from hibachi.model.defaults import DEFAULTS, OrNull
from hibachi.model.families import FAMILIES as KNOWN
from hibachi.model.registry import load_model
from hibachi.tensor.numpy_backend import NumpyBackend

SIZES = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=3,
    pad_token_id=0,
)
ROPE = dict(rope_type="default", rope_theta=700.0)
YARN = dict(rope_type="yarn", rope_theta=700.0, factor=4.0, original_max_position_embeddings=32, truncate=False)
LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.5, high_freq_factor=4.5)
LLAMA3 |= dict(original_max_position_embeddings=16)
LONG = dict(rope_type="longrope", rope_theta=700.0, original_max_position_embeddings=16, factor=6.0)
LONG |= dict(short_factor=[1.1] * 6, long_factor=[1.5, 2, 2.5, 3, 3.5, 4])
WINDOW = dict(use_sliding_window=True, sliding_window=7, max_window_layers=2)
GEMMA = SIZES | dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=7)
FALCON = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"} | dict(rope_parameters=ROPE)
GPT2 = dict(vocab_size=97, n_embd=48, n_layer=4, n_head=4, n_positions=128, n_inner=80, bos_token_id=1, eos_token_id=3)
FAMILIES = {  # name -> class, settings: as many as can be other than the class's own
    "Llama": ("Llama", SIZES | dict(head_dim=8, rope_parameters=LLAMA3, hidden_act="gelu")),
    "Llama, biases": ("Llama", SIZES | dict(attention_bias=True, mlp_bias=True, rope_parameters=YARN)),
    "Mistral": ("Mistral", SIZES | dict(sliding_window=7, rope_parameters=ROPE)),
    "Mixtral": ("Mixtral", SIZES | dict(num_local_experts=5, num_experts_per_tok=3, sliding_window=7)),
    "Qwen2": ("Qwen2", SIZES | WINDOW | dict(rope_parameters=YARN)),
    "Qwen3": ("Qwen3", SIZES | WINDOW | dict(head_dim=16, rope_parameters=ROPE)),
    "Qwen3-MoE": (
        "Qwen3Moe",
        SIZES
        | dict(use_sliding_window=True, sliding_window=7, num_experts=5, num_experts_per_tok=2)
        | dict(moe_intermediate_size=24, mlp_only_layers=[1], norm_topk_prob=True, head_dim=16),
    ),
    "Gemma": ("Gemma", SIZES | dict(head_dim=16, hidden_act="silu")),
    "Gemma 2": ("Gemma2", GEMMA | dict(final_logit_softcapping=9.0, attn_logit_softcapping=3.0)),
    "Gemma 3": (
        "Gemma3Text",
        GEMMA
        | dict(
            rope_parameters={"full_attention": ROPE | dict(rope_type="linear", factor=2.0), "sliding_attention": ROPE}
        )
        | dict(final_logit_softcapping=9.0, layer_types=["sliding_attention", "full_attention"] * 2),
    ),
    "Phi-3": ("Phi3", SIZES | dict(sliding_window=9, original_max_position_embeddings=128, rope_parameters=ROPE)),
    "Phi-3, LongRoPE": ("Phi3", SIZES | dict(original_max_position_embeddings=16, rope_parameters=LONG)),
    "OLMo 2": ("Olmo2", SIZES | dict(attention_bias=True, rope_parameters=ROPE)),
    "Granite": (
        "Granite",
        SIZES | dict(embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.5, logits_scaling=4.0),
    ),
    "SmolLM3": ("SmolLM3", SIZES | dict(no_rope_layer_interval=2, use_sliding_window=True, sliding_window=7)),
    "GPT-NeoX": ("GPTNeoX", FALCON | dict(rope_parameters=ROPE | {"partial_rotary_factor": 0.5}, hidden_act="silu")),
    "GPT-NeoX, serial": ("GPTNeoX", FALCON | dict(use_parallel_residual=False, attention_bias=False)),
    "GPT-2": ("GPT2", GPT2 | dict(activation_function="gelu")),
    "StarCoder2": ("Starcoder2", SIZES | dict(sliding_window=8, rope_parameters=ROPE)),
    "Falcon": ("Falcon", FALCON | dict(bias=True, ffn_hidden_size=80)),
    "Falcon 40B": ("Falcon", FALCON | dict(new_decoder_architecture=True, num_kv_heads=2)),
    "Falcon, serial": ("Falcon", FALCON | dict(parallel_attn=False, multi_query=False, activation="silu")),
    "Mamba": (
        "Mamba",
        dict(vocab_size=97, hidden_size=32, num_hidden_layers=3, state_size=8, expand=3, conv_kernel=3)
        | dict(time_step_rank=5, use_bias=True, bos_token_id=1, eos_token_id=3),
    ),
}
PROMPT = np.random.default_rng(1).integers(4, 97, 60)
LISTS = dict(layer_types=["full_attention", "sliding_attention"] * 2, no_rope_layers=[0, 0, 1, 1], mlp_only_layers=[0])
FOREIGN = {  # fields of any class, with values that change much where they count
    name: LISTS.get(name, {str: "relu", bool: not usual, int: 3, float: 0.37}.get(type(usual), 3))
    for fields in DEFAULTS.values()
    for name, default in fields.items()
    if (usual := default.default if isinstance(default, OrNull) else default) is not ... and "rope_" not in name
} | {"rope_theta": 50.0, "partial_rotary_factor": 0.5, "n_embed": 3, "is_causal": False}


def written(name):
    """The config.json of a family, as transformers 5 writes it."""
    kind, settings = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")(**copy.deepcopy(settings))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return json.loads(config.to_json_string()) | {"architectures": [type(model).__name__]}


def older(config):
    """The same as transformers 4 wrote it, or None."""
    rope = config.get("rope_parameters")
    if rope is None or "full_attention" in rope:
        return None
    neox = config["model_type"] == "gpt_neox"
    old = {k: v for k, v in config.items() if k != "rope_parameters"}
    old |= {"rotary_emb_base" if neox else "rope_theta": rope["rope_theta"]}
    if "partial_rotary_factor" in rope:
        old |= {"rotary_pct" if neox else "partial_rotary_factor": rope["partial_rotary_factor"]}
    more = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor", "rope_type")}
    return old | ({"rope_scaling": {"type": rope["rope_type"], **more}} if rope["rope_type"] != "default" else {})


def variants(config):
    """(what was done, the config) for each field left out, null, and for fields that other classes have."""
    yield "as it is", config
    for name in config:
        if name not in ("model_type", "architectures"):
            if name not in ("attention_bias", "mlp_bias"):  # then those in the weights count
                yield f"{name} left out", {k: v for k, v in config.items() if k != name}
            yield f"{name} null", config | {name: None}
    for at in ("rope_parameters", "rope_scaling"):
        for name in config.get(at) or {}:
            inner = config[at]
            yield f"{at}.{name} left out", config | {at: {k: v for k, v in inner.items() if k != name}}
            yield f"{at}.{name} null", config | {at: inner | {name: None}}
    for name in FOREIGN.keys() - DEFAULTS[config["model_type"]].keys() - UNCLEAR.get(config["model_type"], set()):
        yield f"{name} {FOREIGN[name]!r}", config | {name: FOREIGN[name]}
    yield "is_causal False", config | {"is_causal": False}


UNCLEAR = {"gpt_neox": {"head_dim"}, "falcon": {"head_dim", "n_embed"}}
"""model_type -> fields that its class does not have, which change a part of what they should."""


class Reference:
    """Models of transformers with the same weights."""

    def __init__(self, name):
        self.cls = transformers.AutoModelForCausalLM
        torch.manual_seed(0)
        config = self._config(written(name))
        model = self.cls.from_config(config, attn_implementation="eager").float().eval()
        with torch.no_grad():
            for parameter, p in model.named_parameters():  # the default is too small to tell errors from noise
                if p.ndim == 1 and ("norm" in parameter or "ln_" in parameter) and parameter.endswith("weight"):
                    p.normal_(0.0 if name.startswith("Gemma") else 1.0, 0.3)
                elif "A_log" not in parameter:
                    p.normal_(0.0, 0.2 if p.ndim == 1 else 0.12)
        self.model, self.weights = model, model.state_dict()

    def _config(self, contents):
        return CONFIG_MAPPING[contents["model_type"]].from_dict(copy.deepcopy(contents))

    def __call__(self, contents, prompt):
        """Log-probabilities [n, vocab]. Raises what transformers raises, and ValueError if its weights are others."""
        config = self._config(contents)
        with torch.device("meta"):
            empty = self.cls.from_config(config, attn_implementation="eager")
        shapes, ours = ({n: p.shape for n, p in m.items()} for m in (empty.state_dict(), self.weights))
        if shapes != ours:
            raise ValueError("other weights")
        model = self.cls.from_config(self._config(contents), attn_implementation="eager").float().eval()
        model.load_state_dict(self.weights)
        with torch.no_grad():
            logits = model(torch.tensor([prompt]), use_cache=False).logits[0]
        return logits.double().log_softmax(-1).numpy()


def ours(folder, contents, prompt):
    (folder / "config.json").write_text(json.dumps(contents))
    model = load_model(folder, NumpyBackend(), max_model_len=None)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=97, prompt_logprobs=97)
    with AutoregressiveBatchInference(model, max_num_seqs=1, backend=model.backend, cache_tokens=8192) as engine:
        stream = engine.run(prompt, params)
        list(stream)
        rows = [*stream.prompt_logprobs[1:], *stream.logprobs]
        return np.array([[row[i] for i in range(97)] for row in rows])


def judged(folder, reference, what, contents, prompt=PROMPT, rounding=2e-5):
    """None if all is well, else what is wrong."""
    field, how = what.split()[0].rpartition(".")[2], what.split()[1:]
    try:
        theirs = reference(contents, prompt.tolist())
    except Exception as e:
        theirs = e
    try:
        found = ours(folder, contents, prompt)
    except HibachiError as e:
        of_weights = "do not fit its config" in str(e) and how not in (["left", "out"], ["null"])
        if isinstance(theirs, Exception) and (of_weights or field in str(e)):
            return None
        if isinstance(e, UnknownArchitecture) and what == "is_causal False":
            return None
        return f"{what}: refused: {e!s:.300} {theirs!r:.100}"
    if isinstance(theirs, Exception):
        return None if field not in filled_names(contents) else f"{what}: loads, though {theirs!r:.200}"
    gap = np.abs(found - theirs).max()
    return None if gap < rounding else f"{what}: {gap:.2g}"


def filled_names(contents):
    return {*DEFAULTS[contents["model_type"]], "rope_type", "type", "factor"}


OFTEN = ["query_pre_attn_scalar", "hidden_activation", "hidden_act", "sliding_window", "rope_theta", "layer_types"]
OFTEN += ["max_window_layers", "rope_parameters", "max_position_embeddings", "parallel_attn", "final_logit_softcapping"]


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 60])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_field_means_what_its_class_means(name, every, tmp_path):
    reference = Reference(name)
    reference.model.save_pretrained(tmp_path)
    config = written(name)
    if name == "Mamba":  # beside the class's own, as old files have it
        config |= {"intermediate_size": 96}
    told = [case for c in (config, older(config)) if c is not None for case in variants(c)]
    often = {f"{field} left out" for field in OFTEN}
    some = [(what, c) for i, (what, c) in enumerate(told) if i % every == 0 or what in often]
    faults = [fault for what, c in some if (fault := judged(tmp_path, reference, what, c))]
    assert not faults


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mistral", "Gemma 2", "Gemma 3"])
def test_a_window_that_a_file_leaves_out_hides_what_is_beyond_4096(name, tmp_path):
    reference = Reference(name)
    reference.model.save_pretrained(tmp_path)
    config = {k: v for k, v in written(name).items() if k != "sliding_window"} | {"max_position_embeddings": 5000}
    prompt = np.random.default_rng(2).integers(4, 97, 4400)
    assert judged(tmp_path, reference, "sliding_window left out", config, prompt, 2e-4) is None


NO_EFFECT = {
    "initializer_range",
    "pad_token_id",
    "pretraining_tp",
    "output_router_logits",
    "is_decoder",
    "reorder_and_upcast_attn",
    "residual_in_fp32",
    "rescale_prenorm_residual",
    "attn_logit_softcapping",  # of Gemma 3 alone, whose layers do not look at it
}
OWN_WORDS = {"rope_theta", "rope_scaling", "rotary_emb_base", "rotary_pct", "partial_rotary_factor", "is_causal"}
OWN_WORDS |= {"head_dim", "original_max_position_embeddings", "sliding_window_pattern", "rope_local_base_freq"}


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_defaults_are_those_of_the_published_classes(model_type):
    cls, ours = CONFIG_MAPPING[model_type], DEFAULTS[model_type]
    base = {f.name for f in dataclasses.fields(transformers.PretrainedConfig)}
    theirs = {f.name: f for f in dataclasses.fields(cls) if f.name not in base}
    assert ours.keys() - theirs.keys() - {"tie_word_embeddings", "bos_token_id", "eos_token_id"} <= OWN_WORDS
    for name, field in theirs.items():
        if name not in ours:
            assert (
                name.startswith(("summary_", "time_step_", "router_", "use_"))
                or name.endswith(("_pdrop", "_dropout"))
                or name in NO_EFFECT
            )
            continue
        usual, null = (*ours[name], True) if isinstance(ours[name], OrNull) else (ours[name], ours[name] is None)
        assert (name, usual) == (name, field.default)
        # Of Falcon these may be null as well, and then its layers fail.
        fails = model_type == "falcon" and name in ("layer_norm_epsilon", "activation")
        assert (name, null) == (name, type(None) in typing.get_args(field.type) and not fails)
    if theta := ours.get("rope_theta"):
        default = cls.default_theta
        assert theta == OrNull(default["global"] if isinstance(default, dict) else default)


def test_a_published_file_that_leans_on_its_class():
    """falcon-7b leaves out max_position_embeddings, and more."""
    said = dict(alibi=False, architectures=["FalconForCausalLM"], attention_dropout=0.0, bias=False, bos_token_id=11)
    said |= dict(eos_token_id=11, hidden_dropout=0.0, hidden_size=4544, initializer_range=0.02, model_type="falcon")
    said |= dict(layer_norm_epsilon=1e-05, multi_query=True, new_decoder_architecture=False, num_attention_heads=71)
    said |= dict(num_hidden_layers=32, parallel_attn=True, torch_dtype="bfloat16", use_cache=True, vocab_size=65024)
    arch = KNOWN["FalconForCausalLM"].read(said)
    assert (arch.max_positions, arch.intermediate, arch.kv_heads, arch.tied) == (2048, 4 * 4544, 1, True)
