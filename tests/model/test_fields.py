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
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hibachi import AutoregressiveBatchInference, SamplingParams
from hibachi.backend.numpy_backend import NumpyBackend
from hibachi.errors import HibachiError, UnknownArchitecture
from hibachi.llm.model.defaults import DEFAULTS, OrNull
from hibachi.llm.model.families import FAMILIES as KNOWN
from hibachi.llm.model.registry import load_model

from .test_agreement import CASES, LONG, YARN, random_model

ROPE = dict(rope_type="default", rope_theta=700.0)
WINDOW = dict(use_sliding_window=True, sliding_window=7)
OTHER = {  # what in `CASES` is as the class has it by default, or would not be missed
    "Llama 2": dict(attention_bias=True, mlp_bias=True, rope_parameters=YARN | dict(truncate=False)),
    "Llama 3.1": dict(hidden_act="gelu", head_dim=8, tie_word_embeddings=False),
    "Mistral": dict(rope_parameters=ROPE),
    "Mixtral": dict(sliding_window=7),
    "Qwen2, window": dict(rope_parameters=YARN),
    "Qwen3": WINDOW | dict(max_window_layers=1, rope_parameters=ROPE),
    "Qwen3-MoE": WINDOW,
    "Gemma": dict(hidden_act="silu"),
    "Gemma2": dict(final_logit_softcapping=9.0, attn_logit_softcapping=3.0),
    "Gemma3": dict(
        rope_parameters={"full_attention": ROPE | dict(rope_type="linear", factor=2.0), "sliding_attention": ROPE},
        final_logit_softcapping=9.0,
    ),
    "Phi3": dict(original_max_position_embeddings=128, rope_parameters=ROPE),
    "Phi3, LongRoPE": dict(rope_parameters=LONG | dict(factor=6.0)),
    "OLMo2": dict(attention_bias=True, rope_parameters=ROPE),
    "SmolLM3": WINDOW,
    "GPT-NeoX": dict(hidden_act="silu"),
    "GPT-NeoX, serial": dict(attention_bias=False, rotary_pct=0.25),
    "GPT-2": dict(activation_function="gelu", n_inner=80),
    "StarCoder2": dict(rope_parameters=ROPE),
    "Falcon 7B": dict(ffn_hidden_size=80, rope_parameters=ROPE),
    "Falcon, serial": dict(activation="silu"),
    "Mamba": dict(expand=3, conv_kernel=3, time_step_rank=5, use_bias=True),
}
FAMILIES = {name: (kind, settings | OTHER.get(name, {})) for name, (kind, settings) in CASES.items()}
PROMPT = np.random.default_rng(1).integers(4, 97, 60)
LISTS = dict(layer_types=["full_attention", "sliding_attention"], no_rope_layers=[0, 1], mlp_only_layers=[0])
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
    return json.loads(config.to_json_string()) | {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    }


def older(config):
    """The same as transformers 4 wrote it, without a list of layers; None for those without rotary positions."""
    rope, neox = config.get("rope_parameters"), config["model_type"] == "gpt_neox"
    if rope is None:
        return None
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "layer_types")}
    if "full_attention" in rope:
        old |= {"rope_local_base_freq": rope["sliding_attention"]["rope_theta"], "sliding_window_pattern": 2}
        rope = rope["full_attention"]
    old |= {"rotary_emb_base" if neox else "rope_theta": rope["rope_theta"]}
    if "partial_rotary_factor" in rope:
        old |= {"rotary_pct" if neox else "partial_rotary_factor": rope["partial_rotary_factor"]}
    more = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor", "rope_type")}
    named = "rope_type" if config["model_type"] == "gemma3_text" else "type"  # for which `type` means nothing
    return old | ({"rope_scaling": {named: rope["rope_type"], **more}} if rope["rope_type"] != "default" else {})


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

    cls = transformers.AutoModelForCausalLM

    def __init__(self, name):
        self.model = random_model(*FAMILIES[name])
        self.weights = self.model.state_dict()

    def config(self, contents):
        return CONFIG_MAPPING[contents["model_type"]].from_dict(copy.deepcopy(contents))

    def __call__(self, contents, prompt):
        """Log-probabilities [n, vocab]. Raises what transformers raises, and ValueError if its weights are others."""
        config = self.config(contents)
        with torch.device("meta"):
            empty = self.cls.from_config(config, attn_implementation="eager")
        shapes, ours = ({n: p.shape for n, p in m.items()} for m in (empty.state_dict(), self.weights))
        if shapes != ours:
            raise ValueError("other weights")
        model = self.cls.from_config(self.config(contents), attn_implementation="eager").float().eval()
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
    told = [case for c in (config, older(config)) if c is not None for case in variants(c)]
    often = {f"{field} left out" for field in OFTEN}
    some = [(what, c) for i, (what, c) in enumerate(told) if i % every == 0 or what in often]
    faults = [fault for what, c in some if (fault := judged(tmp_path, reference, what, c))]
    assert not faults


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "Gemma3"])
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
OWN_WORDS |= {
    "layer_types",
    "head_dim",
    "original_max_position_embeddings",
    "sliding_window_pattern",
    "rope_local_base_freq",
}


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
        if name in ("bos_token_id", "eos_token_id"):  # none, unless a file says so
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
