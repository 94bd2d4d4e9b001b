"""config.json and its neighbours with numbers that no model has, and files that are none."""

import json
import os
import random
import shutil
import time
import tracemalloc
import warnings

import pytest

pytest.importorskip("tokenizers")

from hibachi import LLM, SamplingParams
from hibachi.errors import ConfigError, HibachiError, InvalidModelFiles, PromptTooLong
from hibachi.llm.model import mamba, rope
from hibachi.llm.model.arch import shapes
from hibachi.llm.model.families import FAMILIES
from hibachi.llm.model.fields import MOST_SETTINGS
from hibachi.llm.model.files import TINY, open_files
from hibachi.llm.model.registry import find
from hibachi.llm.tokenizers import Tokenizer

MB = 2**20
LARGE = [10**9, 2**31 - 1, 2**31, 2**63, 2**64, 10**400]
ODD = [0, -1, 1, 7, *LARGE, float("nan"), float("inf"), -float("inf"), 1e308, 1e-308, 1e-45, 1.5, True, "8", "x", None]
ODD += [[], [1], [None] * 10**4, [{}], ["x"] * 2, {}, {"x": 1}]


@pytest.fixture
def folder(tmp_path):
    """folder(field=value, ...): the shipped model with another config.json."""
    config = json.loads((TINY / "config.json").read_text())
    path = tmp_path / "model"
    path.mkdir()
    for file in TINY.iterdir():
        if file.is_file():
            shutil.copy(file, path)

    def make(**fields):
        (path / "config.json").write_text(json.dumps(config | fields))
        return path

    return make


@pytest.mark.parametrize("positions", [10**6, 10**8, 2**31 - 1])
def test_m6_any_number_of_positions_loads_quickly_and_takes_no_memory(folder, positions):
    path = folder(max_position_embeddings=positions)
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with LLM(path, autotune="off", kv_cache_memory_bytes=8 * MB) as llm:
            assert time.perf_counter() - began < 2
            assert tracemalloc.get_traced_memory()[1] < 100 * MB
            assert llm.model.max_model_len == positions
            params = SamplingParams(max_tokens=3, temperature=0)
            assert len(llm.generate("Once upon a time", params)[0].token_ids) == 3
            with pytest.raises(PromptTooLong, match="cache"):  # it would have to be in memory
                llm.generate([[1] * 20_000], params)
    finally:
        tracemalloc.stop()


FIELDS = ["hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"]
FIELDS += ["intermediate_size", "rms_norm_eps", "rope_theta", "hidden_act"]


@pytest.mark.parametrize("field", FIELDS)
def test_a_number_that_no_model_has_is_refused_or_of_no_account(folder, field):
    began = time.perf_counter()
    for value in (0, -1, 10**9, 10**400, float("nan"), 1e308, "x", [1], {}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of numbers that become infinite in the model
            try:
                with LLM(folder(**{field: value}), autotune="off", kv_cache_memory_bytes=8 * MB) as llm:
                    llm.generate("a", SamplingParams(max_tokens=1))
            except HibachiError as e:
                assert len(str(e)) < 5000
    assert time.perf_counter() - began < 9


ROPES = {
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 1.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64},
    "linear": {"factor": 2.0},
}
BASE = {
    **dict.fromkeys(("hidden_size", "n_embd"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_hidden_layers", "n_layer", "num_experts_per_tok"), 2),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"), 1e-5),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("tie_word_embeddings", "norm_topk_prob"), True),
    **{"intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 100},
    **dict.fromkeys(("head_dim", "query_pre_attn_scalar", "sliding_window"), 16),
}


class Asked(dict):
    """A config that notes which fields are read, as (name,) or (name of an object in it, name)."""

    def __init__(self, fields, names, at=()):
        super().__init__({k: Asked(v, names, (*at, k)) if isinstance(v, dict) else v for k, v in fields.items()})
        self.names, self.at = names, at

    def get(self, name, default=None):
        self.names.append((*self.at, name))
        return super().get(name, default)


def read(config):
    name, family = find(config)
    if name == "MambaForCausalLM":
        return mamba.read_arch(config)
    arch = family.read(config)
    required, optional = shapes(arch)
    assert required and optional is not None
    if all(r.dims <= 64 for r in arch.ropes):  # others do not fit any weights
        assert all(len(rope.tables(r, 8, longest=arch.max_positions)[0]) == 8 for r in arch.ropes)
    return arch


@pytest.mark.parametrize("name", [*FAMILIES, "MambaForCausalLM"])
def test_whatever_a_field_holds_it_is_read_or_refused(name):
    rng, began = random.Random(name), time.perf_counter()
    for kind, scaling in ROPES.items():
        if name == "Phi3ForCausalLM" and kind != "longrope":  # which it does not have
            continue
        scaling = {"rope_scaling": {"rope_type": kind, **scaling}} if name != "GPTNeoXForCausalLM" else {}
        config = BASE | scaling | {"architectures": [name]}
        names = []
        assert read(Asked(config, names))
        for at in sorted(set(names)):
            for value in rng.sample(ODD, 6):
                changed = dict(config)
                if len(at) == 2:
                    changed[at[0]] = {**changed.get(at[0], {}), at[1]: value}
                else:
                    changed[at[0]] = value
                try:
                    read(changed)
                except HibachiError as e:
                    assert isinstance(e, ConfigError) and len(str(e)) < 3000, (at, value)
    assert time.perf_counter() - began < 10


FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
CONTENTS = {
    "a named pipe": lambda file: os.mkfifo(file),
    "a folder": lambda file: file.mkdir(),
    "a device without end": lambda file: file.symlink_to("/dev/zero"),
    "a file that is too large": lambda file: (file.touch(), os.truncate(file, 5 * MOST_SETTINGS)),  # of no blocks
    "a link to itself": lambda file: file.symlink_to(file),
    "deep": lambda file: file.write_text("[" * 200_000),
    "no text": lambda file: file.write_bytes(b"\xff\xfe\x00"),
    "no object": lambda file: file.write_text("[1]"),
    "a number of too many digits": lambda file: file.write_text('{"vocab_size": ' + "9" * 9999 + "}"),
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_none_costs_neither_time_nor_memory(folder, name, content):
    path = folder()
    (path / name).unlink(missing_ok=True)
    CONTENTS[content](path / name)
    began = time.perf_counter()
    tracemalloc.start()
    try:
        open_files(path).tokenizer(vocab_size=2048)
    except InvalidModelFiles as e:
        assert len(str(e)) < 1000
    else:  # what is not needed here, or means nothing
        assert name in ("config.json", "chat_template.jinja", "tokenizer_config.json")
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.perf_counter() - began < 5 and peak < 500 * MB


@pytest.mark.parametrize("name", ["tokenizer.model", "merges.txt"])
def test_a_vocabulary_that_is_none_costs_neither_time_nor_memory(tmp_path, name):
    for what in ("a named pipe", "a folder", "a device without end", "a file that is too large"):
        file = tmp_path / name
        (tmp_path / "vocab.json").write_text("{}")
        if name == "tokenizer.model":
            (tmp_path / "vocab.json").unlink()
        CONTENTS[what](file)
        with pytest.raises(InvalidModelFiles):
            Tokenizer.load(tmp_path)
        shutil.rmtree(file) if file.is_dir() else file.unlink()
