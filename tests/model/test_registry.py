"""Names of architectures, and who loads them. V-34 is the fact in the reference that the first tests show."""

import pytest

import hibachi
from hibachi.errors import ConfigError, InvalidModelFiles, UnknownArchitecture
from hibachi.llm.model import registry
from hibachi.llm.model.families import FAMILIES, Family
from hibachi.llm.model.registry import architectures, find


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(registry, "_MINE", {})


class Loader:
    model_type = "mine"

    def load(self, files, backend, *, dtype, max_model_len):
        return files, backend, dtype, max_model_len


def test_v34_a_name_that_is_no_string_is_a_type_error():
    with pytest.raises(TypeError, match="architecture must be a name such as 'LlamaForCausalLM'; got 1"):
        hibachi.register_model(1, Loader())


@pytest.mark.parametrize("target", ["noColon", "", "a:b:c", "a b:c", ":c", "a:"])
def test_v34_a_string_that_names_no_place_is_a_value_error(target):
    with pytest.raises(ValueError, match=r"must be 'package\.module:NAME'; got"):
        hibachi.register_model("A", target)


def test_v34_an_unknown_architecture_is_answered_with_those_that_are_known():
    with pytest.raises(UnknownArchitecture) as e:
        find({"architectures": ["Qwen9ForCausalLM"], "model_type": "qwen9"})
    said = str(e.value)
    assert "['Qwen9ForCausalLM']" in said and "Qwen2ForCausalLM" in said and "Qwen3ForCausalLM" in said
    assert "register_model" in said and "'hf'" in said and "CachedModel" in said


def test_nothing_like_it_lists_everything():
    with pytest.raises(UnknownArchitecture) as e:
        find({"architectures": ["Xyz"]})
    assert all(name in str(e.value) for name in FAMILIES)


@pytest.mark.parametrize("model", [None, 3, object(), dict])
def test_what_cannot_load_is_a_type_error(model):
    with pytest.raises(TypeError, match="Family or as something with a method `load`"):
        hibachi.register_model("A", model)


def test_a_registered_model_is_found_by_name_and_by_type(tmp_path):
    loader = Loader()
    hibachi.register_model("MineForCausalLM", loader)
    assert find({"architectures": ["MineForCausalLM"]}) == ("MineForCausalLM", loader)
    assert find({"model_type": "mine"}) == ("MineForCausalLM", loader)
    assert architectures()["MineForCausalLM"] == "register_model"
    (tmp_path / "config.json").write_text('{"architectures": ["MineForCausalLM"]}')
    files, backend, *rest = hibachi.load_model(tmp_path, "torch", dtype="float16", max_model_len=7)
    assert files.config == {"architectures": ["MineForCausalLM"]} and (backend.name, *rest) == ("torch", "float16", 7)


def test_a_registered_model_goes_before_a_built_in_one():
    mine = Family("llama", fields={"logit_divisor": 2.0})
    hibachi.register_model("LlamaForCausalLM", mine)
    assert find({"architectures": ["LlamaForCausalLM"]}) == ("LlamaForCausalLM", mine)


def test_the_first_known_of_several_names_counts():
    config = {"architectures": ["SomethingElse", "MistralForCausalLM"], "model_type": "mistral"}
    assert find(config)[0] == "MistralForCausalLM"


def test_a_class_and_a_model_type_that_contradict_each_other_are_named():
    with pytest.raises(InvalidModelFiles, match="names LlamaForCausalLM, whose model_type is llama; got 'gemma'"):
        find({"architectures": ["LlamaForCausalLM"], "model_type": "gemma"})


@pytest.mark.parametrize("place", ["no.such.module:X", "hibachi.errors:NoSuchName"])
def test_a_place_that_is_not_there_is_an_error_when_it_is_needed(place):
    hibachi.register_model("A", place)
    with pytest.raises(ConfigError, match=f"A is registered as '{place}', which cannot be imported"):
        find({"architectures": ["A"]})


@pytest.mark.parametrize("kind", sorted({f.within or f.model_type for f in FAMILIES.values()} | {"mamba"}))
def test_every_model_type_is_enough_where_the_architecture_is_not_named(kind):
    name, model = find({"model_type": kind})
    assert kind in (model.model_type, getattr(model, "within", None)) and architectures()[name] == "hibachi"
