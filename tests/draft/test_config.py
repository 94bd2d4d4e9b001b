"""`speculative_config`: what is taken, what is refused by name, and which models cannot have proposals."""

import numpy as np
import pytest

from hibachi import AutoregressiveBatchInference, ConfigError, NumpyBackend, UnsupportedOperation
from hibachi.engine.speculation.config import SpeculativeConfig, as_config
from hibachi.testing.toys import SumFrames, SumLogits, SumOwn, SumOwnState, SumPaged, SumState, SumTokens, expected
from hibachi_jax import JaxBackend


def test_words_mappings_and_json():
    assert as_config(None) is as_config("off") is None
    assert as_config("auto").auto
    given = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    assert as_config(given) == as_config('{"num_speculative_tokens": 4, "prompt_lookup_max": 3, "method": "ngram"}')
    assert as_config(given) == SpeculativeConfig("ngram", 4, 3, 3, auto=False)
    found = as_config('{"model": "org/name", "num_speculative_tokens": 3, "auto": true, "dtype": "float32"}')
    assert (found.method, found.model, found.auto, found.dtype) == ("draft_model", "org/name", True, "float32")
    assert as_config(found) is found
    assert as_config({"num_speculative_tokens": 2}) == SpeculativeConfig("ngram", 2, 5, 5, auto=False)  # V: defaults


@pytest.mark.parametrize(
    "given, names",
    [
        ("on", "auto"),
        (3, "auto"),
        ({"method": "eagle", "num_speculative_tokens": 2}, "method"),
        ({"method": "ngram"}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 0}, "from 1 to 64"),
        ({"num_speculative_tokens": -1}, "from 1 to 64"),
        ({"num_speculative_tokens": 10**9}, "from 1 to 64"),
        ({"num_speculative_tokens": True}, "from 1 to 64"),
        ({"num_speculative_tokens": 2, "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "prompt_lookup_max"),
        *(
            ({"num_speculative_tokens": 2, "prompt_lookup_min": bad}, "prompt_lookup_min")
            for bad in (0, -1, [], "", 0.0)
        ),
        *(({"num_speculative_tokens": 2, "prompt_lookup_max": bad}, "prompt_lookup_m") for bad in (0, -1, [], "", 0.0)),
        ({"num_speculative_tokens": 2, "auto": "yes"}, "auto"),
        ({"method": "draft_model", "num_speculative_tokens": 2}, "needs .model."),
        ({"method": "ngram", "model": "tiny", "num_speculative_tokens": 2}, "no other method has one"),
        ({"model": "tiny"}, "num_speculative_tokens"),
        ({"model": "", "num_speculative_tokens": 2}, "model must be the name or path .* got an empty one"),
        ({"num_speculative_tokens": 2, "dtype": "float32"}, "dtype is of the draft model"),
        ({"num_speculative_tokens": 2, "same": True}, "no field 'same'"),
        ({"num_speculative_tokens": 2, "disable_by_batch_size": 4}, "disable_by_batch_size"),
    ],
)
def test_what_is_refused_by_name(given, names):
    with pytest.raises(ConfigError, match=names):
        as_config(given)


CONFIG = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


class Frames(SumPaged):
    codebooks = 2


@pytest.mark.parametrize(
    ("model", "made", "why"),
    [
        (SumTokens, NumpyBackend, "it returns tokens"),
        (SumFrames, NumpyBackend, "it returns tokens"),
        (Frames, NumpyBackend, "several codebooks"),
        (SumOwn, NumpyBackend, "the last token only"),
        (SumOwnState, NumpyBackend, "the last token only"),
        (SumState, JaxBackend, "has a state, and its backend compiles"),
        (SumLogits, JaxBackend, "keeps no cache, and its backend compiles"),
    ],
)
def test_models_that_cannot_have_proposals_refuse_by_name_and_auto_leaves_them_alone(model, made, why):
    options = {"max_model_len": 64, "deterministic": False, "token": np.zeros((), np.int32)}
    with pytest.raises(UnsupportedOperation, match=f"speculative_config cannot be used with .*{why}"):
        AutoregressiveBatchInference(model(made()), backend=made(), speculative_config=CONFIG, **options)
    auto = AutoregressiveBatchInference(model(made()), backend=made(), speculative_config="auto", **options)
    with auto as e:
        assert e.core.drafting is None


@pytest.mark.parametrize("model", [SumState, SumLogits])
def test_a_draft_model_needs_blocks(model):
    backend = NumpyBackend()
    config = {"model": SumPaged(backend), "num_speculative_tokens": 2}
    with pytest.raises(UnsupportedOperation, match="keeps its cache in blocks"):
        AutoregressiveBatchInference(model(backend), max_model_len=64, speculative_config=config)


def test_auto_is_off_where_each_call_has_one_row_and_a_name_is_not():
    def engine(rows, config):
        model = SumLogits(NumpyBackend())
        return AutoregressiveBatchInference(model, max_model_len=64, max_num_seqs=rows, speculative_config=config)

    with engine(1, "auto") as e:
        assert e.core.drafting is None
    with engine(1, CONFIG) as e:
        assert e.run([1, 2], max_tokens=20).collect() == expected([1, 2], 20)
        assert e.stats().steps < 20
    with engine(4, "auto") as e:
        assert e.deterministic and e.core.drafting is not None


def test_auto_is_off_where_bits_are_not_promised_and_a_name_is_not():
    plain = NumpyBackend(native=False)
    with AutoregressiveBatchInference(SumPaged(plain), deterministic=False, speculative_config="auto") as e:
        assert e.core.drafting is None
    config = {"num_speculative_tokens": 4, "prompt_lookup_min": 1}
    with AutoregressiveBatchInference(SumPaged(plain), deterministic=False, speculative_config=config) as e:
        assert e.core.drafting is not None
        assert len(e.run([1, 2], max_tokens=20).collect()) == 20
        assert e.core.drafting.drafted.proposed > 0
