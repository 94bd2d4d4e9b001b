"""What ended a text: the model's own end, a stop token or a stop string, or its limit."""

from contextlib import closing

import pytest

import hibachi
from hibachi.llm.remote.llm import RemoteLLM
from hibachi.llm.textstream import Stopped
from hibachi.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
COUNTING = '''
import numpy as np

class Counting:
    """Says the next byte; 90 is its end."""

    vocab_size, max_model_len, eos_ids = 256, 64, (90,)

    class tokenizer:
        encode = staticmethod(lambda text: list(text.encode("latin-1")))
        decode = staticmethod(lambda ids: bytes(ids).decode("latin-1"))

    deterministic = False  # no calls but those of requests

    def logits(self, tokens, lengths):
        return np.eye(256, dtype=np.float32)[(tokens[:, -1] + 1) % 256] * 10
'''


@pytest.fixture(scope="module", params=["own", "child"])
def texts(request, tmp_path_factory):
    from hibachi.llm.own import open_texts

    file = tmp_path_factory.mktemp("counting") / "counting.py"
    file.write_text(COUNTING)
    with closing((open_texts if request.param == "own" else RemoteLLM)(f"{file}:Counting")) as made:
        made.generate(["V"], GREEDY)  # its thread runs before the first test, and after it
        yield made


def ended(texts, prompt, **changes):
    (out,) = texts.generate([prompt], GREEDY.with_(**changes))
    return out.choices[0]


@pytest.mark.parametrize("include", [False, True])
def test_its_own_end_has_a_token_and_no_reason(texts, include):
    found = ended(texts, "V", include_stop=include)
    assert found.finish_reason == "stop" and found.token_ids == [87, 88, 89, 90][: 3 + include]
    assert found.stop_reason is None and found.stopped_by == Stopped(None, 90)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_of_the_request_is_named(texts, include):
    found = ended(texts, "V", stop_token_ids=[88], include_stop=include)
    assert found.stop_reason == 88 and found.stopped_by.token == 88


@pytest.mark.parametrize("include", [False, True])
def test_its_log_probability_is_told_whether_it_was_delivered_or_not(texts, include):
    found = ended(texts, "V", logprobs=0, include_stop=include)
    assert found.stopped_by.logprob == pytest.approx(-0.0115, abs=1e-3) and found.stopped_by.logprob < 0


@pytest.mark.parametrize("stop", [["XY", "Y"], ["Y", "XY"], "XY"])
def test_a_stop_string_is_named_and_of_several_the_longest(texts, stop):
    found = ended(texts, "V", stop=stop)
    assert found.stop_reason == "XY" and found.stopped_by == Stopped("XY") and found.text == "W"


def test_a_limit_stops_nothing(texts):
    found = ended(texts, "V", max_tokens=2)
    assert found.finish_reason == "length" and found.stopped_by is None and found.stop_reason is None


def test_an_end_that_is_ignored_and_named_is_a_stop_token(texts):
    found = ended(texts, "V", ignore_eos=True, stop_token_ids=[90])
    assert found.stop_reason == 90


def test_each_token_may_have_a_piece_of_its_own():
    """A character of four bytes: three pieces are empty, and nothing is lost."""
    with closing(hibachi.LLM("tiny")) as llm:
        ids = llm.tokenizer.encode("a🙂b")
        choice = llm.submit(["x"], SamplingParams(temperature=0.0, max_tokens=1))[0].choices[0]
        choice.each = True
        found = choice.pieces(ids)
    assert [p.token_ids for p in found] == [[i] for i in ids]
    assert "".join(p.text for p in found) == "a🙂b" and "" in [p.text for p in found]
