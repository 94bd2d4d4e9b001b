"""Options of engines: what is misspelt is answered in one sentence, with the nearest name."""

import inspect

import numpy as np
import pytest

import hibachi
from hibachi.lm.options import OPTIONS
from hibachi.lm.own import open_texts


class Model:
    vocab_size, max_model_len = 10, 64

    def logits(self, tokens, lengths):
        return np.zeros((len(tokens), 10), np.float32)

    def forward(self, tokens):
        return tokens[:, -1]


@pytest.mark.parametrize(
    "make, wrong, near",
    [
        (lambda **o: hibachi.LLM("tiny", **o), "max_num_sequences", "max_num_seqs"),
        (lambda **o: hibachi.LLM("tiny", **o), "quantisation", "quantization"),
        (lambda **o: hibachi.AutoregressiveBatchInference(Model(), **o), "stop_tokens", "stop_token"),
        (lambda **o: hibachi.AutoregressiveBatchInference(Model(), **o), "max_queued_reqs", "max_num_queued_reqs"),
        (lambda **o: hibachi.FeedforwardBatchInference(Model(), **o), "batch_size", "max_batch_size"),
        (lambda **o: open_texts(f"{__name__}:Model", **o), "scheduling_polcy", "scheduling_policy"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest(make, wrong, near):
    with pytest.raises(hibachi.ConfigError, match=f"^[A-Za-z]+ has no option '{wrong}'; did you mean '{near}'\\?$"):
        make(**{wrong: 3})


def test_one_that_resembles_nothing_is_answered_with_all():
    with pytest.raises(hibachi.ConfigError, match=r"has no option 'zz'; expected one of max_batch_size, .*record\.$"):
        hibachi.FeedforwardBatchInference(Model(), zz=1)


def test_every_option_is_spelled_out():
    """So that help() and editors show it; and those of texts reach whatever makes them."""
    for face in (hibachi.LLM, hibachi.AutoregressiveBatchInference, hibachi.FeedforwardBatchInference):
        kinds = {p.kind for p in inspect.signature(face).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds
    llm = {p.name for p in inspect.signature(hibachi.LLM).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert llm == set(OPTIONS)
