"""Models with random weights: what is written loads, here and in transformers."""

import numpy as np
import pytest

from benchmarks.bench import randommodel
from benchmarks.bench.randommodel import SHAPES, write_model
from hibachi import LLM, SamplingParams
from hibachi.errors import ConfigError
from hibachi.llm.model.describe import describe

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 400,
}


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "small", SMALL | {"tie_word_embeddings": request.param})
    assert write_model("small", tmp_path / "m") == describe(tmp_path / "m").parameters
    return tmp_path / "m"


def test_it_loads_and_talks(folder):
    about = describe(folder)
    assert about.problem is None and dict(about.stored) == {"BF16": about.parameters}
    with LLM(folder) as llm:
        text = "Hello, wörld"
        ids = llm.tokenizer.encode(text)
        assert len(ids) == len(text.encode()) and llm.tokenizer.decode(ids) == text
        [out] = llm.generate(text, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        assert len(out.choices[0].token_ids) == 4


def test_the_seed_decides(folder, tmp_path):
    write_model("small", tmp_path / "same")
    write_model("small", tmp_path / "other", seed=1)
    one, same, other = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("m", "same", "other"))
    assert one == same != other


def test_what_is_refused(folder):
    with pytest.raises(ConfigError, match="holds a model already"):
        write_model("small", folder)
    with pytest.raises(ConfigError, match="one of 135m, 31m, 1b, 8b, small; got '1t'"):
        write_model("1t", folder.parent / "new")


def test_the_shapes_are_those_of_real_models():
    counts = {
        name: sum(int(np.prod(dims)) for _, dims in randommodel._tensors(randommodel._config(name)))
        for name in ("135m", "31m", "1b", "8b")
    }
    assert counts == {"135m": 134_515_008, "31m": 30_941_696, "1b": 1_235_814_400, "8b": 8_030_261_248}
