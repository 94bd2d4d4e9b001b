"""config.json of the Llama family, in both generations, and what is refused."""

import json
from dataclasses import replace

import pytest

from hibachi.errors import InvalidModelFiles, UnknownArchitecture
from hibachi.llm.model.arch import Arch, Layer
from hibachi.llm.model.files import open_files
from hibachi.llm.model.registry import find
from hibachi.llm.model.rope import Linear, Llama3, Rope

OLD = {  # as transformers 4 writes it
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 1000,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 5000.0,
    "rope_scaling": None,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
NEW = {k: v for k, v in OLD.items() if not k.startswith("rope")} | {  # as transformers 5 writes it
    "head_dim": 8,
    "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def read_arch(config):
    _, family = find(config)
    return family.read(config)


EXPECTED = Arch(
    hidden_size=64,
    heads=8,
    kv_heads=2,
    head_dim=8,
    layers=(Layer(),) * 3,
    intermediate=96,
    vocab_size=1000,
    norm_eps=1e-5,
    ropes=(Rope(5000.0, 8),),
    max_positions=2048,
    tied=True,
    attention_bias=False,
    mlp_bias=None,
    bos_ids=(1,),
    eos_ids=(2, 3),
)


@pytest.mark.parametrize("config", [OLD, NEW], ids=["old", "new"])
def test_both_generations_of_the_file_say_the_same(config):
    assert read_arch(config) == EXPECTED


@pytest.mark.parametrize(
    "written, read",
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 2}, Linear(2.0)),
        ({"type": "linear", "factor": 2.0}, Linear(2.0)),
        (LLAMA3, Llama3(8.0, 1.0, 4.0, 512)),
        ({**LLAMA3, "original_max_position_embeddings": 512.0}, Llama3(8.0, 1.0, 4.0, 512)),
        ({k: v for k, v in LLAMA3.items() if k[:8] != "original"}, Llama3(8.0, 1.0, 4.0, 2048)),
    ],
)
def test_rope_scaling_in_both_generations(written, read):
    assert read_arch(OLD | {"rope_scaling": written}) == replace(EXPECTED, ropes=(Rope(5000.0, 8, read),))
    new = NEW | {"rope_parameters": written | {"rope_theta": 5000.0}}
    assert read_arch(new) == replace(EXPECTED, ropes=(Rope(5000.0, 8, read),))


def test_of_two_frequencies_the_inner_and_of_two_ways_to_stretch_the_older_name_counts():
    linear, inner = {"type": "linear", "factor": 2.0}, {"rope_theta": 7.0}
    assert read_arch(OLD | {"rope_parameters": inner}).ropes == (Rope(7.0, 8),)
    assert read_arch(OLD | {"rope_parameters": LLAMA3 | inner, "rope_scaling": linear}).ropes == (
        Rope(5000.0, 8, Linear(2.0)),
    )


def test_what_files_leave_out_is_as_their_class_has_it():
    left_out = ("num_key_value_heads", "rope_theta", "tie_word_embeddings", "attention_bias", "architectures")
    config = {k: v for k, v in OLD.items() if k not in (*left_out, "bos_token_id", "eos_token_id")}
    assert read_arch(config) == replace(
        EXPECTED, kv_heads=8, ropes=(Rope(10000.0, 8),), tied=False, attention_bias=None, bos_ids=(), eos_ids=()
    )


@pytest.mark.parametrize("eos, read", [(7, (7,)), ([7], (7,)), (None, ()), (-1, ()), ([1000, 7, 2**70], (7,))])
def test_ids_are_one_or_several_or_none(eos, read):
    assert read_arch(OLD | {"eos_token_id": eos}).eos_ids == read


@pytest.mark.parametrize(
    "change, says",
    [
        ({"architectures": ["LlamaForTokenClassification"]}, "Nearest known: LlamaForCausalLM"),
        ({"architectures": None, "model_type": "lama"}, "model_type 'lama'"),
        ({"architectures": None, "model_type": None}, "Known: FalconForCausalLM, GPT2LMHeadModel"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; supported: 'gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.rope_type is 'dynamic'; supported: 'default'"),
    ],
)
def test_another_architecture_is_refused_with_what_is_supported(change, says):
    with pytest.raises(UnknownArchitecture) as e:
        read_arch(OLD | change)
    assert says in str(e.value)
    assert "CachedModel" in str(e.value)


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "rms_norm_eps"]
)
@pytest.mark.parametrize("value", [None, 0, -1, "64", True])
def test_a_missing_or_wrong_field_is_named(field, value):
    got = "null" if value is None else repr(value)
    with pytest.raises(InvalidModelFiles, match=f"{field} must be .*; got {got}. Take the config.json"):
        read_arch(OLD | {field: value})


@pytest.mark.parametrize(
    "change, says",
    [
        ({"num_key_value_heads": 3}, r"num_attention_heads \(8\).*num_key_value_heads \(3\)"),
        ({"hidden_size": 60}, r"hidden_size \(60\).*num_attention_heads \(8\)"),
        ({"head_dim": 7}, r"in a head \(7\) must be even"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, r"low_freq_factor \(4.0\) must be below"),
    ],
)
def test_a_contradiction_is_named(change, says):
    with pytest.raises(InvalidModelFiles, match=f"contradicts itself: .*{says}"):
        read_arch(OLD | change)


@pytest.mark.parametrize(
    "change, says",
    [
        *(({"eos_token_id": bad}, "must be an integer, a list of int") for bad in (2.0, True, [2, "x"], "</s>")),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor must be a number > 0; got no such field"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number > 0; got nan"),
        (
            {
                "architectures": None,
                "model_type": "qwen2",
                "layer_types": ["full_attention"] * 2 + ["linear_attention"],
            },
            "layer_types must be a list of 3 out of 'full_attention', 'sliding_attention'",
        ),
    ],
)
def test_other_nonsense_is_named(change, says):
    with pytest.raises(InvalidModelFiles, match=says):
        read_arch(OLD | change)


def test_generation_config_names_the_ends_of_a_turn(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OLD))
    assert read_arch(open_files(tmp_path).config) == EXPECTED
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert read_arch(open_files(tmp_path).config) == replace(EXPECTED, eos_ids=(2, 3, 9))


@pytest.mark.parametrize("content, says", [("{", "cannot be read as JSON"), ("[]", "got list")])
def test_a_broken_file_is_named(tmp_path, content, says):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidModelFiles, match=rf"config\.json.*{says}"):
        open_files(tmp_path)
