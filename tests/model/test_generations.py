"""Both generations of config.json say the same: as transformers 5 writes it, and as transformers 4 wrote it."""

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hibachi.model.registry import find

from .test_agreement import CASES

DECODERS = {name: case for name, case in CASES.items() if name != "Mamba"}


def older(config, settings):
    """The config as transformers 4 wrote it: rope at the top level, no list of layers."""
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "layer_types", "dtype")}
    new = dict(config.get("rope_parameters") or {})
    if "full_attention" in new:  # Gemma 3
        old["rope_local_base_freq"] = new["sliding_attention"]["rope_theta"]
        old["sliding_window_pattern"] = 2
        new = new["full_attention"]
    if "rope_theta" in new:
        old["rope_theta" if config["model_type"] != "gpt_neox" else "rotary_emb_base"] = new.pop("rope_theta")
    if (share := new.pop("partial_rotary_factor", None)) is not None and config["model_type"] == "gpt_neox":
        old["rotary_pct"] = share
    if (kind := new.pop("rope_type", "default")) != "default":
        old["rope_scaling"] = {"type": "su" if kind == "longrope" else kind, **new}
    if "max_window_layers" in settings:
        old["max_window_layers"] = settings["max_window_layers"]
    return old


@pytest.mark.parametrize("name", DECODERS)
def test_an_older_file_is_read_alike(name):
    kind, settings = CASES[name]
    written = getattr(transformers, f"{kind}Config")(**settings)
    written.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[written.model_type]]
    config = written.to_diff_dict()
    old = older(config, settings)
    assert "rope_parameters" not in old and "layer_types" not in old
    found, family = find(config)
    assert found == written.architectures[0]
    assert family.read(old) == family.read(config)


def test_unknown_layers_are_refused():
    _, family = find({"architectures": ["Gemma2ForCausalLM"]})
    config = transformers.Gemma2Config(**CASES["Gemma2"][1]).to_diff_dict()
    with pytest.raises(
        ValueError, match="layer_types must be a list of 2 out of 'full_attention', 'sliding_attention'"
    ):
        family.read(config | {"layer_types": ["full_attention", "linear_attention"]})
