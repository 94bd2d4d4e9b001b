"""Beam search: beside transformers' `generate`, and beside all sequences that there are."""

import importlib.util
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hibachi import (
    Beams,
    Finish,
    InvalidRequest,
    NonFiniteOutput,
    NumpyBackend,
    SamplingParams,
    StopRule,
    Trie,
    load_model,
)
from hibachi.llm.model.files import TINY
from hibachi.request import Request
from hibachi.testing.toys import SumTokens
from hibachi_jax import JaxBackend
from hibachi_torch import TorchBackend

from ..guide.toyguides import rule, toy_guides
from .frames import RUNGS
from .linking import whole

MARGIN = 1e-4

spec = importlib.util.spec_from_file_location("own_cache", Path(__file__).parents[2] / "examples" / "own_cache.py")
own_cache = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own_cache)


# ---- beside transformers -------------------------------------------------------------------------------------------

EOS = 7


@pytest.fixture(scope="module")
def gpt():
    torch.manual_seed(0)
    sizes = dict(vocab_size=60, n_positions=128, n_embd=64, n_layer=2, n_head=4, initializer_range=0.4)
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=EOS)).eval()


WORDS = ((3,), (40,), (11, 12), (5, 6, 8))
CASES = {
    "defaults": ((4, 1.0, False), {}, {}),
    "one beam": ((1, 1.0, True), {}, {}),
    "at once": ((3, 0.0, True), {}, {}),
    "never": ((5, 2.0, "never"), {}, {}),
    "never, short ones first": ((6, -1.0, "never"), {}, {}),
    "wide": ((16, 0.6, True), {}, {}),
    "wider than the vocabulary": ((40, 1.0, False), {}, {}),
    "several ends": ((4, 1.0, True), {"stop_token_ids": [EOS, 9, 20, 33]}, {"eos_token_id": [EOS, 9, 20, 33]}),
    "no end": ((4, 1.0, False), {"stop_token_ids": []}, {"eos_token_id": None}),
    "at least": ((4, 0.5, True), {"min_tokens": 6}, {"min_new_tokens": 6}),
    "penalised": ((4, 1.0, False), {"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    "bad words": ((4, 1.0, True), {}, {"bad_words_ids": [list(w) for w in WORDS]}),
}


@pytest.mark.parametrize(("beams", "ours", "theirs"), CASES.values(), ids=CASES)
def test_beams_and_scores_are_those_of_transformers(beams, ours, theirs, gpt, serve):
    width, penalty, early = beams
    engine = serve(own_cache.Gpt(gpt), backend="torch", max_model_len=128, max_num_seqs=64)
    new, rng = 14, np.random.default_rng(len(ours) + width)
    prompts = [rng.integers(8, 60, n).tolist() for n in rng.integers(1, 30, 8)]
    params = SamplingParams(
        **{"max_tokens": new, "beams": Beams(width, penalty, early), "stop_token_ids": [EOS]} | ours
    )
    words = WORDS if "bad_words_ids" in theirs else ()
    asked = [
        engine.submit_many(engine.check(Request(np.array(prompt), params, bad_words=words)), width)
        for prompt in prompts
    ]  # all at once
    agreed = 0
    for prompt, streams in zip(prompts, asked, strict=True):
        got = [(s.collect(), s.score) for s in streams]
        given = torch.tensor([prompt])
        how = dict(num_beams=width, length_penalty=penalty, early_stopping=early, eos_token_id=EOS) | theirs
        if width == 1:  # which it decodes greedily, and gives no score
            how |= dict(length_penalty=None, early_stopping=None)
        out = gpt.generate(
            given, attention_mask=torch.ones_like(given), num_return_sequences=width, max_new_tokens=new,
            do_sample=False, return_dict_in_generate=True, output_scores=True, pad_token_id=0, **how,
        )  # fmt: skip
        ends = np.atleast_1d(how["eos_token_id"]) if how["eos_token_id"] is not None else []
        rows = [row[len(prompt) :].tolist() for row in out.sequences]
        rows = [row[: next((i + 1 for i, t in enumerate(row) if t in ends), new)] for row in rows]
        if width == 1:
            assert got[0][0] == rows[0] and got[0][1] < 0
            agreed += 1
            continue
        scores = out.sequences_scores.numpy()
        assert [score for _, score in got] == pytest.approx(scores, rel=MARGIN)
        sure = np.abs(np.diff(scores / np.abs(scores).max(), prepend=np.inf, append=-np.inf)) > MARGIN
        for k in np.flatnonzero(sure[:-1] & sure[1:]).tolist():
            assert got[k][0] == rows[k]
            agreed += 1
    assert agreed >= 0.8 * width * len(prompts)


# ---- beside all sequences ------------------------------------------------------------------------------------------

V, NEW, WIDTH = 5, 3, 160
PROMPT = [1, 3, 2]


def logits_of(tokens):
    return np.random.default_rng([len(tokens), *tokens]).normal(size=V).astype(np.float32) * 2


class Few:
    """Level 1, a tiny vocabulary. Its logits are anything that depends on all tokens."""

    vocab_size, max_model_len, backend, deterministic = V, 40, "numpy", False

    def logits(self, tokens, lengths):
        rows = zip(np.asarray(tokens), lengths.tolist(), strict=True)
        return np.stack([logits_of(row[len(row) - n :].tolist()) for row, n in rows])


def plain(out, x):
    return x


def only(*ids):
    return lambda out, x: np.where(np.isin(np.arange(V), ids), x, -np.inf)


def taste(out, x):
    """Scores of one's own."""
    return x + np.float32(0.5) * ((np.arange(V) + sum(out)) % 3 == 0)


def disliked(factor, presence, frequency):
    def change(out, x):
        counts = np.bincount(out, minlength=V)
        seen = (counts > 0) | np.isin(np.arange(V), PROMPT)
        x = np.where(seen, np.where(x > 0, x / factor, x * factor), x)
        return x - frequency * counts - presence * (counts > 0)

    return change


def banned(out, x):
    now = [w[-1] for w in ((3, 1), (2,)) if len(w) == 1 or tuple(out[-1:]) == w[:-1]]
    return np.where(np.isin(np.arange(V), now), -np.inf, x)


def turns(out, x):
    return only(*((0, 2, 4), (1, 2))[len(out) % 2])(out, x)


PATHS = [[1], [1, 2], [1, 2, 4], [3, 3, 4], [4, 1, 1], [4, 1, 2], [2, 2]]


def in_catalogue(out, x):
    after = {p[len(out)] for p in PATHS if p[: len(out)] == out and len(p) > len(out)}
    return only(*after, *([0] if out in PATHS else []))(out, x)


SEARCHES = {  # params, how `run_many` is called, what is done to log-probabilities, which outputs end
    "no end": ({}, {}, plain, lambda out: False),
    "an end": ({"stop_token_ids": [0]}, {}, plain, lambda out: out[-1] == 0),
    "two ends": ({"stop_token_ids": [0, 3], "min_tokens": 2}, {},
                 lambda out, x: x if len(out) > 1 else only(1, 2, 4)(out, x), lambda out: out[-1] in (0, 3)),
    "a predicate": ({}, {"stop_rule": StopRule(where=lambda t: t >= 3)}, plain, lambda out: out[-1] >= 3),
    "a predicate, later": ({"min_tokens": 3}, {"stop_rule": StopRule(where=lambda t: t >= 3)}, plain,
                           lambda out: len(out) == 3 and out[-1] >= 3),
    "allowed ids": ({"allowed_token_ids": [1, 2, 4], "stop_token_ids": [4]}, {}, only(1, 2, 4),
                    lambda out: out[-1] == 4),
    "biases": ({"logit_bias": {2: 1.5, 4: -100}}, {}, lambda out, x: x + np.array([0, 0, 1.5, 0, -100]),
               lambda out: False),
    "a processor": ({"logits_processors": [taste], "stop_token_ids": [0]}, {}, taste, lambda out: out[-1] == 0),
    "a processor and a mask": ({"logits_processors": [taste], "allowed_token_ids": [0, 1, 3]}, {},
                               lambda out, x: taste(out, only(0, 1, 3)(out, x)), lambda out: False),
    "penalties": ({"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2}, {},
                  disliked(1.4, 0.3, 0.2), lambda out: False),
    "bad words": ({}, {"bad_words": ((3, 1), (2,))}, banned, lambda out: False),
    "a form": ({"structured_outputs": rule([0, 2, 4], [1, 2], most=NEW)}, {}, turns, lambda out: len(out) == NEW),
    "a catalogue": ({"stop_token_ids": [0]}, {"allowed": Trie(PATHS)}, in_catalogue,
                    lambda out: (out in PATHS and not any(len(p) > len(out) and p[: len(out)] == out for p in PATHS))
                    or (out[-1] == 0 and out[:-1] in PATHS)),
}  # fmt: skip


def every(change, ends, penalty):
    """All sequences, the best first, and their scores."""
    found, open_ = [], [([], 0.0)]
    while open_:
        out, score = open_.pop()
        x = logits_of(PROMPT + out).astype(np.float64)
        x = change(out, x - np.log(np.exp(x).sum()))
        for token in np.flatnonzero(np.isfinite(x)).tolist():
            new, total = [*out, token], score + x[token]
            if ends(new) or len(new) == NEW:
                found.append((total / len(new) ** penalty, new, ends(new)))
            else:
                open_.append((new, total))
    return sorted(found, key=lambda each: -each[0])


@pytest.mark.parametrize("penalty", [1.0, -0.5])
@pytest.mark.parametrize(("params", "call", "change", "ends"), SEARCHES.values(), ids=SEARCHES)
def test_the_best_of_all_sequences_are_found(params, call, change, ends, penalty, serve):
    engine = serve(Few(), max_num_seqs=WIDTH, max_model_len=40)
    if "structured_outputs" in params:
        toy_guides(engine)
    n, want = 12, every(change, ends, penalty)
    how = SamplingParams(max_tokens=NEW, n=n, beams=Beams(WIDTH, penalty, "never"), **params)
    if "bad_words" in call:
        ready = Request(np.array(PROMPT), how.for_one(n), bad_words=call["bad_words"])
        streams = engine.submit_many(engine.check(ready), n)
    else:
        streams = engine.run_many(PROMPT, how, **call)
    for k, stream in enumerate(streams):
        got = stream.collect()
        if k >= len(want):
            assert got == [] and stream.score == -np.inf
            continue
        score, tokens, stop = want[k]
        assert (stream.score, got) == (pytest.approx(score, abs=MARGIN), tokens)
        assert stream.finish_reason == (Finish.STOP if stop else Finish.LENGTH)
    whole(engine)


@pytest.mark.parametrize("made", [NumpyBackend, TorchBackend, JaxBackend])
@pytest.mark.parametrize("some", [0, 2])
def test_of_equal_scores_the_lower_ids_come_first(made, some, serve):
    """Also where more are equal than are looked at."""
    library = made()
    row = np.random.default_rng(0).integers(0, 1 + some, 300).astype(np.float32)

    class Flat:
        vocab_size, max_model_len, deterministic = 300, 40, False

        def logits(self, tokens, lengths):
            return library.xp.zeros((tokens.shape[0], 300), dtype=library.xp.float32) + library.put(row)[None, :]

    engine = serve(Flat(), backend=library, max_num_seqs=16, max_model_len=40)
    wide = engine.run_many([1], SamplingParams(max_tokens=1, n=12, beams=Beams()))
    streams = engine.run_many([1], SamplingParams(max_tokens=1, n=7, beams=Beams()))
    best = np.argsort(-row, kind="stable").tolist()
    assert [s.collect() for s in streams] == [[i] for i in best[:7]]
    assert [s.collect() for s in wide] == [[i] for i in best[:12]]


# ---- faults and bad input ------------------------------------------------------------------------------------------


def poisoned(out, x):
    return np.where(np.arange(V) == 2, np.nan, x).astype(np.float32) if out[:1] == [4] else x


def nothing(out, x):
    return np.full_like(x, -np.inf)


WRONG = {
    "nan of a beam": (dict(logits_processors=[poisoned], allowed_token_ids=[2, 4]), NonFiniteOutput, "NaN"),
    "nothing at first": (dict(logits_processors=[nothing]), InvalidRequest, "leave"),
    "an error": (dict(logits_processors=[lambda out, x: 1 // 0]), InvalidRequest, "ZeroDivisionError"),
    "a shape": (dict(logits_processors=[lambda out, x: x[:3]]), InvalidRequest, "of shape"),
    "a form that fails": (dict(structured_outputs=rule([1, 2], most=3, fails=2)), InvalidRequest, "too complex"),
    "a predicate": (dict(), InvalidRequest, "The stop predicate raised"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_fault_of_one_beam_ends_its_search_only(wrong, serve):
    how, kind, message = WRONG[wrong]
    engine = serve(Few(), max_num_seqs=16, max_model_len=40)
    toy_guides(engine)
    good = SamplingParams(max_tokens=NEW, n=3, beams=Beams(4), repetition_penalty=1.2)
    want = [s.collect() for s in engine.run_many(PROMPT, good)]
    beside = engine.run_many(PROMPT, good)
    rule_ = StopRule(where=lambda t: 1 // 0) if wrong == "a predicate" else None
    bad = engine.run_many(PROMPT, SamplingParams(max_tokens=NEW, n=2, beams=Beams(3), **how), stop_rule=rule_)
    errors = []
    for stream in bad:
        with pytest.raises(kind, match=message) as e:
            stream.collect()
        errors.append(e.value)
    assert errors[0] is not errors[1], "each has an error of its own"
    assert [s.collect() for s in beside] == want
    whole(engine)


def test_a_search_that_nothing_is_left_for_keeps_what_it_has(serve):
    def later(out, x):
        return nothing(out, x) if len(out) == 2 else x

    engine = serve(Few(), max_num_seqs=16, max_model_len=40)
    how = SamplingParams(max_tokens=9, n=3, beams=Beams(4), stop_token_ids=[0], logits_processors=[later])
    first, *_, last = [(s.collect(), s.score) for s in engine.run_many(PROMPT, how)]
    assert first[0][-1] == 0 and last == ([], -np.inf)


@pytest.mark.parametrize("penalty", [30, -30])
def test_scores_are_finite_whatever_the_penalty(penalty, serve):
    engine = serve(Few(), max_num_seqs=4, max_model_len=2000)
    how = SamplingParams(max_tokens=300, n=2, beams=Beams(2, penalty, "never"))
    streams = engine.run_many(PROMPT, how)
    best, second = [(len(s.collect()), s.score) for s in streams]
    assert best[0] == second[0] == 300 and -np.inf < second[1] <= best[1] < 0


def test_what_cannot_be_searched_is_refused(serve):
    engine = serve(Few(), max_num_seqs=4, max_model_len=40)
    how = SamplingParams(max_tokens=3, n=2, beams=Beams(3))

    def refused(message, call, engine=engine):
        with pytest.raises(InvalidRequest, match=message):
            call(engine)
        assert engine.stats().running == engine.stats().waiting == 0

    refused("at most max_num_seqs=4; got 5", lambda e: e.run_many([1], how.with_(beams=Beams(5))))
    refused("width must be an integer from 1 to 512", lambda e: Beams(0))
    refused("width must be an integer from 1 to 512", lambda e: Beams(True))
    refused("length_penalty must be a number from -30 to 30", lambda e: Beams(length_penalty=31))
    refused("early_stopping must be", lambda e: Beams(early_stopping="always"))
    refused("n must be from 1 to the width of the beams, 3; got 4", lambda e: e.run_many([1], how, 4))
    refused("n must be from 1 to the width of the beams, 2; got 3", lambda e: how.with_(n=3, beams=Beams(2)))
    refused("logprobs must be None where beams", lambda e: how.with_(logprobs=1, beams=Beams(3)))
    refused("best_of must be None where beams", lambda e: how.with_(best_of=3, beams=Beams(3)))
    refused("fed is of requests that draw", lambda e: e.run_many([1], how, fed=True))
    frames = serve(RUNGS["whole"](), max_num_seqs=4)
    refused("single ids; those of this model have 3", lambda e: e.run_many([[1, 2, 3]], how), frames)
    returns = serve(SumTokens(NumpyBackend()), max_num_seqs=4)
    refused("returns tokens", lambda e: e.run_many(np.array([1]), how), returns)
    paged = serve(load_model(TINY), max_num_seqs=8, max_model_len=100, cache_tokens=128, backend="numpy")
    refused(
        "3 linked sequences need 192 positions .*; it has 128",
        lambda e: e.run_many([1] * 40, how.with_(max_tokens=20)),
        paged,
    )


def test_a_search_keeps_guides_of_its_last_tokens_only(serve):
    """And nothing once it is over."""
    engine = serve(Few(), max_num_seqs=8, max_model_len=300)
    toy_guides(engine)
    made, fork = weakref.WeakSet(), engine.forms.guides.compile

    def compiled(grammar):
        guide = fork(grammar)
        cls = type(guide)

        class Seen(cls):
            def fork(self):
                new = Seen(self.rule, self.eos_ids)
                new.advance(self.had)
                made.add(new)
                most.append(len(made))
                return new

        return Seen(guide.rule, guide.eos_ids)

    most = []
    engine.forms.guides.compile = compiled
    how = SamplingParams(max_tokens=200, n=2, beams=Beams(4), structured_outputs=rule([1, 2], [3, 4], most=150))
    assert [len(s.collect()) for s in engine.run_many(PROMPT, how)] == [150, 150]
    assert max(most) < 60
