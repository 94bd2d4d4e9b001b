"""A draft model by its name: loaded beside the main model, with the same tokens id by id."""

import json
import shutil

import pytest

from hibachi import LLM, ConfigError, InvalidModelFiles, SamplingParams
from hibachi.llm.model.files import TINY
from hibachi.llm.own import open_model
from hibachi.llm.remote.llm import RemoteLLM

PARAMS = SamplingParams(temperature=0, max_tokens=24)
TEXT = "It is a truth universally acknowledged, that"


@pytest.fixture(scope="module")
def plain():
    with LLM("tiny", backend="numpy") as llm:
        return llm.generate(TEXT, PARAMS)[0].token_ids


@pytest.mark.parametrize("more", [{}, {"method": "draft_model", "backend": "numpy", "dtype": "float32"}])
def test_a_draft_model_by_its_name(plain, more):
    config = {"model": "tiny", "num_speculative_tokens": 3, **more}
    with LLM("tiny", backend="numpy", speculative_config=json.dumps(config)) as llm:
        assert llm.generate(TEXT, PARAMS)[0].token_ids == plain
        found = llm.engine.meters().drafted
        assert found.accepted == found.proposed > 0 and llm.stats().steps < 24


def test_another_tokenizer_is_refused_by_the_first_token_that_differs(tmp_path):
    other = tmp_path / "other"
    shutil.copytree(TINY, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    by_id = {i: token for token, i in vocab.items()}
    vocab[by_id[7]], vocab[by_id[9]] = 9, 7
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ConfigError, match="same tokens, id by id; token 7 is b"):
        LLM("tiny", backend="numpy", speculative_config={"model": str(other), "num_speculative_tokens": 3})
    (other / "tokenizer.json").unlink()  # only the sizes can be compared then
    (other / "tokenizer_config.json").unlink()
    with LLM("tiny", backend="numpy", speculative_config={"model": other, "num_speculative_tokens": 3}) as llm:
        assert llm.generate(TEXT, PARAMS)[0].token_ids


def test_what_is_no_model_is_refused():
    with pytest.raises(InvalidModelFiles, match="no folder"):
        LLM("tiny", backend="numpy", speculative_config={"model": "/none", "num_speculative_tokens": 3})


def test_another_process_takes_names():
    with pytest.raises(ConfigError, match="is given by its name"):
        RemoteLLM("tiny", backend="numpy", speculative_config={"model": object(), "num_speculative_tokens": 3})


def test_a_model_of_ones_own_has_one_too():
    name = "hibachi.testing.toys:SumPaged"
    params = SamplingParams(temperature=0, max_tokens=12)
    config = {"model": name, "num_speculative_tokens": 3}
    with open_model(name, backend="numpy", speculative_config=config, deterministic=False) as texts:
        found = texts.generate([[1, 2]], params)[0].token_ids
        assert list(found) == [4, 8, 6, 2, 4, 8, 6, 2, 4, 8, 6, 2] and texts.stats().steps == 4
