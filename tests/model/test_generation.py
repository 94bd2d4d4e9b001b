"""Default sampling parameters out of generation_config.json."""

import json
from pathlib import Path

import pytest

from hibachi.errors import InvalidModelFiles
from hibachi.model.generation import generation_defaults
from hibachi.request import SamplingParams

CONFIGS = Path(__file__).parents[1] / "data" / "generation_configs"


def folder(path, **config):
    (path / "generation_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    "config, defaults",
    [
        ({}, {}),
        (
            {"bos_token_id": 1, "eos_token_id": [2, 3], "max_length": 20, "num_beams": 4, "transformers_version": "4"},
            {},
        ),
        (  # Llama 3's
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
            {"temperature": 0.6, "top_p": 0.9},
        ),
        (  # Qwen 2.5's
            {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
            {"repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
        ),
        (
            {"min_p": 0.1, "typical_p": 0.9, "max_new_tokens": 2048, "stop_strings": ["</answer>", "\n\n"]},
            {"min_p": 0.1, "typical_p": 0.9, "max_tokens": 2048, "stop": ("</answer>", "\n\n")},
        ),
        ({"stop_strings": "end", "temperature": 1}, {"stop": "end", "temperature": 1}),
        # null is not given, and whether to sample need not be said
        ({"do_sample": None, "temperature": 0.6, "top_k": None, "repetition_penalty": None}, {"temperature": 0.6}),
        # greedy is meant; what else the file says of drawing does not count, penalties do
        ({"do_sample": False}, {"temperature": 0.0}),
        (
            {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "typical_p": 0.9},
            {"temperature": 0.0},
        ),
        ({"do_sample": False, "repetition_penalty": 1.2}, {"repetition_penalty": 1.2, "temperature": 0.0}),
    ],
)
def test_what_a_file_sets(tmp_path, config, defaults):
    assert generation_defaults(folder(tmp_path, **config)) == defaults
    SamplingParams(**defaults)


def test_no_file_sets_nothing(tmp_path):
    assert generation_defaults(tmp_path) == {} == generation_defaults(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    "name, bad, expected",
    [
        ("temperature", -0.1, "a finite number >= 0"),
        ("temperature", "hot", "a finite number >= 0"),
        ("temperature", float("inf"), "a finite number >= 0"),
        ("top_k", 1.5, "an integer >= -1"),
        ("top_k", -2, "an integer >= -1"),
        ("top_p", 0, r"a number in \(0, 1\]"),
        ("top_p", True, r"a number in \(0, 1\]"),
        ("min_p", 2, r"a number in \[0, 1\]"),
        ("typical_p", [0.5], r"a number in \(0, 1\]"),
        ("repetition_penalty", 0, "a finite number > 0"),
        ("max_new_tokens", 0, "an integer >= 1"),
        ("stop_strings", [""], "non-empty strings"),
        ("stop_strings", 7, "non-empty strings"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(tmp_path, name, bad, expected):
    with pytest.raises(InvalidModelFiles, match=rf"generation_config\.json: {name} cannot be used: .*{expected}"):
        generation_defaults(folder(tmp_path, **{name: bad}))


def test_whether_to_sample_must_be_yes_or_no(tmp_path):
    with pytest.raises(InvalidModelFiles, match=r"do_sample must be true, false or null; got 'yes'"):
        generation_defaults(folder(tmp_path, do_sample="yes"))


def test_a_file_that_is_no_object_is_refused(tmp_path):
    for content in ("[]", "{", "\x00"):
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(InvalidModelFiles, match=r"generation_config\.json"):
            generation_defaults(tmp_path)


def test_files_at_hand(tmp_path):
    """They are of another kind, with stop_str and stop_token_ids: nothing in them is a default of ours."""
    files = sorted(CONFIGS.glob("*.json"))
    assert len(files) == 19
    for file in files:
        (tmp_path / "generation_config.json").write_bytes(file.read_bytes())
        assert generation_defaults(tmp_path) == {}
