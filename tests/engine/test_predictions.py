"""What a caller expects of a request is proposed, counted, and changes no bit."""

from types import SimpleNamespace

import numpy as np
import pytest

from hibachi import LLM, AutoregressiveBatchInference, InvalidRequest, NumpyBackend, SamplingParams
from hibachi.llm.tokenizers.prompts import TextPrompts
from hibachi.testing.toys import SumFrames, SumPaged, SumTokens, expected

from ..guide.toyguides import toy_guides

GREEDY = SamplingParams(temperature=0, max_tokens=20)
OURS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 64}  # which nothing repeats


def engine(config=OURS, **options):
    found = AutoregressiveBatchInference(
        SumPaged(NumpyBackend()), **{"max_model_len": 64, "overlap": False, "speculative_config": config} | options
    )
    toy_guides(found)
    return found


def test_a_right_one_saves_steps_and_what_was_right_is_counted():
    with engine() as e:
        stream = e.run([1, 2], GREEDY, prediction=expected([1, 2], 20))
        assert stream.collect() == expected([1, 2], 20)
        assert e.stats().steps == 5  # the prompt's gives one token; then 5, 5, 5 and 4
        assert stream.predicted == (15, 0)
        assert e.run([1, 2], GREEDY).predicted == (0, 0)


def test_it_is_found_again_behind_a_difference():
    text = expected([1, 2], 20)
    with engine() as e:
        wrong = [*text[:6], (text[6] + 1) % 10, *text[7:]]
        stream = e.run([1, 2], GREEDY, prediction=wrong)
        assert stream.collect() == text
        accepted, rejected = stream.predicted
        assert accepted >= 10 and 0 < rejected <= 6
        assert e.stats().steps <= 8


def test_where_nothing_is_proposed_it_has_no_effect():
    with engine("off") as e:
        stream = e.run([1, 2], GREEDY, prediction=expected([1, 2], 20))
        assert stream.collect() == expected([1, 2], 20) and stream.predicted == (0, 0)
        assert e.stats().steps == 20
    with engine() as e:
        stream = e.run([1, 2], GREEDY.with_(num_speculative_tokens=0), prediction=expected([1, 2], 20))
        assert stream.collect() == expected([1, 2], 20) and stream.predicted == (0, 0)


def test_of_a_text_no_more_is_read_than_fits_into_the_context():
    read = []
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: read.append(text) or list(range(len(text))))
    assert TextPrompts(tokenizer, 10).predicted("a" * 10**6) == list(range(10))
    assert [len(text) for text in read] == [160]
    assert TextPrompts(tokenizer, 10).predicted("abc") == [0, 1, 2]
    with pytest.raises(InvalidRequest, match=r"A prediction must be .* valid Unicode; got '\\ud800' at character 2"):
        TextPrompts(tokenizer, 10).predicted("ab\ud800")


@pytest.mark.parametrize(
    "given",
    [3, "ab", [[1]], [1.5], [True], [-1], [10], [2**70], {"a": 1}, np.zeros((2, 2), int), (n for n in [1]), [None]],
    ids=lambda each: type(each).__name__ + str(each)[:30].partition(" at ")[0],
)
@pytest.mark.parametrize("config", [OURS, "off"], ids=["on", "off"])
def test_what_is_no_prediction_is_refused(given, config):
    with engine(config) as e:
        with pytest.raises(InvalidRequest, match="prediction must"):
            e.run([1, 2], GREEDY, prediction=given)
        assert e.run([1, 2], GREEDY).collect() == expected([1, 2], 20)


def test_what_is_longer_than_the_context_is_cut():
    with engine() as e:
        stream = e.run([1, 2], GREEDY, prediction=np.array(expected([1, 2], 20) * 10**5))
        assert stream.collect() == expected([1, 2], 20) and stream.predicted == (15, 0)
        assert e.run([1, 2], GREEDY, prediction=[]).collect() == expected([1, 2], 20)


@pytest.mark.parametrize("model", [SumTokens, SumFrames])
def test_models_without_single_ids_refuse_it(model, serve):
    prompt = [[1, 2, 3]] if model is SumFrames else np.array([1])
    with pytest.raises(InvalidRequest, match="prediction is for models that return logits of single ids"):
        serve(model(NumpyBackend())).run(prompt, prediction=[1])


def test_texts_take_a_text_for_all_or_one_for_each():
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = ["It is a truth", "She was"]
    with LLM("tiny", backend="numpy", speculative_config=OURS) as llm:
        plain = llm.generate(prompts, params)
        texts = [out.text for out in plain]

        def steps(prediction):
            before = llm.stats().steps
            assert [out.text for out in llm.generate(prompts, params, prediction=prediction)] == texts
            return llm.stats().steps - before

        assert steps(texts) < 15 < 25 < steps(None) <= 31
        assert steps(plain[0].token_ids) <= 31 and steps([None, texts[1]]) <= 31
        stream = llm.stream(prompts[0], params, prediction=texts[0])
        assert "".join(piece.text for piece in stream) == texts[0] and stream.tokens.predicted[0] > 15
        for wrong, said in (
            ([texts[0]], "one for each of 2 prompts; got 1"),
            ([3.5, texts[0]], "token ids"),
            (7, "ids"),
        ):
            with pytest.raises(InvalidRequest, match=said):
                llm.generate(prompts, params, prediction=wrong)
