"""Sampling parameters: their ranges, what a level refuses, and how requests end."""

import copy
import pickle
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest

from hibachi import InvalidRequest, NumpyBackend, SamplingParams, StopRule
from hibachi.testing.toys import SumFrames, SumLogits, SumPaged, expected

from ..lib.filters import TRIED

NUMPY = NumpyBackend()
NAN, INF = float("nan"), float("inf")

# field: (its range in words, values that are out of it)
RANGES = {
    **{name: (tried.words, tried.wrong) for name, tried in TRIED.items()},
    "seed": ("an integer >= 0 (or None)", [-1, 0.5, "7", True]),
    "max_tokens": ("an integer >= 1 (or None: no limit)", [0, -3, 1.5, True]),
    "min_tokens": ("an integer >= 0", [-1, 0.5, None, True]),
    "logprobs": ("an integer >= 0 (or None: none)", [-1, 0.5, True]),
    "prompt_logprobs": ("an integer >= 0 (or None: none)", [-1, 2.0, "1"]),
    "n": ("an integer from 1 to 16384", [0, -1, 1.0, None, True, 16385]),
    "best_of": ("an integer from n, 1, to 16384", [0, 1.5, "2", 10**9]),
    "stop": ("non-empty strings", ["", ["a", ""], 3, [b"a"]]),
    "bad_words": ("non-empty strings", ["", [None], 3]),
    "stop_token_ids": ("integers >= 0", [[-1], 3.5, ["a"], [True]]),
    "allowed_token_ids": ("integers >= 0", [[-1], 3.5, [None]]),
    "logit_bias": ("{token id: number}", [3, [1], ["ab"]]),
    "logits_processors": ("callables", [3, [print, None]]),
    "include_stop": ("True, False or None", [1, "yes"]),
    "num_speculative_tokens": ("an integer >= 0 (or None: as many as the engine's)", [-1, 1.0, "2", True, NAN]),
}


@pytest.mark.parametrize("field, value", [(f, v) for f, (_, values) in RANGES.items() for v in values], ids=str)
def test_what_is_out_of_range_is_refused(field, value):
    """Also in a copy with a change. The error names field, range and value."""
    for make in (SamplingParams, SamplingParams(seed=3, min_p=0.5).with_):
        with pytest.raises(InvalidRequest) as e:
            make(**{field: value})
        assert str(e.value) == f"{field} must be {RANGES[field][0]}; got {value!r}."


@pytest.mark.parametrize(
    "params, message",
    [
        (dict(min_tokens=4, max_tokens=3), "min_tokens must be at most max_tokens, 3; got 4."),
        (dict(n=3, best_of=2), "best_of must be an integer from n, 3, to 16384; got 2."),
        (dict(allowed_token_ids=[]), "allowed_token_ids must be at least one token id (or None: all); got ()."),
        (dict(logit_bias={-1: 1}), "logit_bias must be for token ids, integers >= 0; got {-1: 1}."),
        (dict(logit_bias={"a": 1}), "logit_bias must be for token ids, integers >= 0; got {'a': 1}."),
        (dict(logit_bias=[([], 1)]), "logit_bias must be for token ids, integers >= 0; got [([], 1)]."),
        (dict(logit_bias={1: 100.5}), "logit_bias must be of numbers in [-100, 100]; got {1: 100.5}."),
        (dict(logit_bias={1: NAN}), "logit_bias must be of numbers in [-100, 100]; got {1: nan}."),
        (dict(logit_bias={1: None}), "logit_bias must be of numbers in [-100, 100]; got {1: None}."),
    ],
)
def test_what_contradicts_itself_is_refused(params, message):
    with pytest.raises(InvalidRequest) as e:
        SamplingParams(**params)
    assert str(e.value) == message


@pytest.mark.parametrize("name, value", [(name, x) for name, t in TRIED.items() for x in (*t.right, *t.far)])
def test_the_ends_of_the_ranges_are_fine(name, value):
    SamplingParams(**{name: value})


def test_the_ends_of_other_ranges_are_fine():
    SamplingParams(max_tokens=1, logit_bias={0: -100}, logprobs=0)
    SamplingParams(min_tokens=16, n=100, best_of=100, seed=2**70, logit_bias={2**31: 100}, prompt_logprobs=0)


def test_lists_may_be_arrays_or_single_and_are_kept_as_tuples():
    params = SamplingParams(
        stop="a", bad_words="b", stop_token_ids=3, allowed_token_ids=np.array([1, 2]), logits_processors=print
    )
    assert (params.stop, params.bad_words, params.stop_token_ids) == (("a",), ("b",), (3,))
    assert (params.allowed_token_ids, params.logits_processors) == ((1, 2), (print,))
    params = SamplingParams(logit_bias={np.int64(3): 1, 4: -2.5})
    assert params.logit_bias == ((3, 1), (4, -2.5)) == params.with_(seed=1).logit_bias
    assert hash(params) == hash(SamplingParams(logit_bias={3: 1, 4: -2.5}))


def test_runs_are_the_sequences_that_it_takes():
    assert [SamplingParams(**p).runs for p in (dict(), dict(n=3), dict(n=2, best_of=5))] == [1, 3, 5]


# ---- by level ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params, message",
    [
        (dict(stop="x"), "stop takes a tokenizer, which only hibachi.LLM has; got .*x"),
        (dict(bad_words=["x", "y"]), "bad_words takes a tokenizer, .* got .*allowed_token_ids or logit_bias"),
        (dict(n=2), "one stream, and run_many n: expected n=1 in run.*got n=2, best_of=None. Use run_many"),
        (dict(best_of=3), "expected n=1 in run, and no best_of; got n=1, best_of=3"),
        (dict(allowed_token_ids=[3, 10]), "allowed_token_ids must name token ids from 0 to 9 .*; got 10"),
        (dict(logit_bias={11: 1.0}), "logit_bias must name token ids from 0 to 9 .*; got 11"),
        (dict(prompt_logprobs=1), r"prompt_logprobs needs a model with a cache \(level 2\).*for one without"),
    ],
    ids=str,
)
def test_what_a_level_cannot_serve_is_refused_by_name(serve, params, message):
    with pytest.raises(InvalidRequest, match=message):
        serve(SumLogits(NUMPY)).run([1, 2], SamplingParams(**params))


def test_a_model_that_samples_by_itself_takes_no_parameters(serve):
    engine = serve(SumFrames(NUMPY), max_model_len=32)
    with pytest.raises(InvalidRequest, match=r"returns tokens, not logits.*Leave params out"):
        engine.run(np.ones((1, 3), int), SamplingParams(min_p=0.5))


def test_a_limit_below_min_tokens_is_refused(serve):
    with pytest.raises(InvalidRequest, match="min_tokens must be at most max_tokens, 2; got 3"):
        serve(SumLogits(NUMPY)).run([1], SamplingParams(min_tokens=3), max_tokens=2)


# ---- copies with changes: what does not change is not checked again --------------------------------------------

OTHERS = {
    **{name: (*tried.far, tried.right[1])[0] for name, tried in TRIED.items()}, "seed": 7, "max_tokens": 2**40,
    "stop": "x", "n": 3, "stop_token_ids": [np.int64(3)], "ignore_eos": True, "logprobs": 2**33,
    "logit_bias": {3: 1, 4: 2}, "allowed_token_ids": [1, 2], "bad_words": ["y"], "logits_processors": [print],
    "min_tokens": 3, "include_stop": True, "best_of": 4, "prompt_logprobs": 2, "skip_special_tokens": False,
    "codebooks": [{"temperature": 0}, {"top_k": 2**40}], "structured_outputs": {"choice": ["a", "b"]},
    "num_speculative_tokens": 2**40, "beams": {"width": 3},
}  # fmt: skip


def test_a_copy_is_what_would_have_been_made():
    assert OTHERS.keys() == {f.name for f in fields(SamplingParams)}
    first = SamplingParams(stop=["a"], max_tokens=9)
    others = {name: value for name, value in OTHERS.items() if name != "beams"}  # with which some others cannot be
    for changes in (*({name: value} for name, value in OTHERS.items()), {}, others):
        assert first.with_(**changes) == replace(first, **changes)
    assert first == SamplingParams(stop=["a"], max_tokens=9)


def test_what_depends_on_another_field_is_checked_with_it():
    for params, change in (
        (SamplingParams(min_tokens=5), {"max_tokens": 4}),
        (SamplingParams(max_tokens=5), {"min_tokens": 6}),
        (SamplingParams(best_of=2), {"n": 3}),
    ):
        with pytest.raises(InvalidRequest, match=r"min_tokens must be at most|best_of must be an integer from n"):
            params.with_(**change)
    with pytest.raises(InvalidRequest, match=r"^temperature"):  # the first of several, as when it is made
        SamplingParams().with_(logit_bias=3, temperature=-1)
    with pytest.raises(InvalidRequest, match="SamplingParams has no option 'hot'"):
        SamplingParams().with_(warm=1, seed=2, hot=1)
    with pytest.raises(InvalidRequest, match=r"Beams has no option 'zz'; expected one of width, .*early_stopping"):
        SamplingParams(beams={"zz": 1})


@dataclass(frozen=True)
class More(SamplingParams):
    extra: int = 0


def test_a_subclass_has_its_own_fields():
    more = More(seed=1, extra=2)
    assert more.with_(extra=3) == More(seed=1, extra=3)
    assert pickle.loads(pickle.dumps(more)) == copy.copy(more) == more


def test_they_cross_a_pipe():
    params = SamplingParams(seed=3, stop="x", logit_bias={3: 1})
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert len(pickle.dumps(params)) < 250


# ---- endings -------------------------------------------------------------------------------------------------

MODELS = pytest.mark.parametrize("model", [SumLogits, SumPaged])
GREEDY = SamplingParams(temperature=0, max_tokens=None)


@MODELS
def test_a_stop_token_at_the_limit_is_a_stop(serve, model):
    """V-17. The tokens are 4 8 6 2 4 ..."""
    engine = serve(model(NUMPY), max_model_len=32)
    for limit, items, ending in ((2, [4, 8], "length"), (3, [4, 8, 6], "stop"), (4, [4, 8, 6], "stop")):
        stream = engine.run([1, 2], GREEDY.with_(max_tokens=limit, stop_token_ids=[6]))
        assert (stream.collect(), stream.finish_reason) == (items, ending)
    stream = serve(model(NUMPY), max_model_len=5).run([1, 2], GREEDY.with_(stop_token_ids=[6]))
    assert (stream.collect(), stream.finish_reason) == ([4, 8, 6], "stop")  # also at the end of the context


@MODELS
def test_before_min_tokens_no_stop_token_can_come(serve, model):
    """V-18: it is suppressed, so another token comes. Then it may."""

    class Doubtful(model):
        """Its second choice is the token after the right one."""

        def _both(self, logits):
            return logits / 1000 + np.roll(logits, 1, axis=1) / 2000

        def logits(self, tokens, lengths):
            return self._both(super().logits(tokens, lengths))

        def step(self, params, cache, x):
            logits, cache = super().step(params, cache, x)
            return self._both(logits), cache

    if model is SumLogits:
        del Doubtful.step
    engine = serve(Doubtful(NUMPY), max_model_len=32, stop_token=4)
    params = GREEDY.with_(max_tokens=9)
    assert engine.run([1, 2], params).collect() == [4]  # at once
    stream = engine.run([1, 2], params.with_(min_tokens=1))
    got = stream.collect()
    assert got[0] == 5 and got[-1] == 4 and 4 not in got[:-1] and stream.finish_reason == "stop"
    others = engine.run([1, 2], params.with_(min_tokens=9, stop_token_ids=[2, 6]))
    assert not {4, 2, 6} & {*others.collect()} and others.finish_reason == "length"


@MODELS
def test_before_min_tokens_nothing_else_stops(serve, model):
    engine = serve(model(NUMPY), max_model_len=32)
    whole = expected([1, 2], 5)
    for least, n in ((0, 2), (2, 2), (3, 3), (4, 4)):
        rule = StopRule(where=lambda tokens: np.isin(tokens, [8, 6, 2]))
        stream = engine.run([1, 2], GREEDY.with_(min_tokens=least), stop_rule=rule)
        assert (stream.collect(), stream.finish_reason) == (whole[:n], "stop")
