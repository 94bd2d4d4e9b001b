"""Tokens of several codebooks: drawn by seed, position and codebook, on every rung and library."""

import itertools

import numpy as np
import pytest

import hibachi
from hibachi import ConfigError, InvalidModelOutput, InvalidRequest, NonFiniteOutput, SamplingParams
from hibachi.engine.sampling.uniforms import of_codebooks, uniforms

from ..decode.reference import distribution, fits
from .frames import RUNGS, Flat, K, OwnFrames, StateFrames, V, WholeFrames

LIBRARIES = ["numpy", "torch", "jax"]
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, V, (int(n), K)) for n in RNG.integers(1, 12, 6)]
EACH = [{"temperature": 0.8}, {"top_k": 3}, {"temperature": 0}]


def params(i, **how):
    return SamplingParams(**{"seed": i, "max_tokens": 6, "codebooks": EACH} | how)


def frames(stream):
    return np.array([np.asarray(frame) for frame in stream.collect()])


def together(engine, prompts=PROMPTS, **how):
    return [frames(s) for s in [engine.run(prompt, params(i, **how)) for i, prompt in enumerate(prompts)]]


@pytest.fixture(scope="module")
def right():
    """What each request gets, alone, from NumPy at level 1."""
    with hibachi.AutoregressiveBatchInference(WholeFrames(), max_num_seqs=1, deterministic=False) as engine:
        return [frames(engine.run(prompt, params(i))) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_same_frames_come_from_every_rung_and_library_in_any_company(rung, library, right, serve):
    engine = serve(RUNGS[rung](library), backend=library, max_num_seqs=4)
    for got, want in zip(together(engine), right, strict=True):
        assert got.dtype.kind == "i" and np.array_equal(got, want)


@pytest.mark.parametrize("rung", ["own", "state"])
def test_chunks_and_little_memory_change_nothing(rung, right, serve):
    few = {"cache_tokens": 24, "block_size": 4} if rung == "own" else {}
    engine = serve(RUNGS[rung](), max_num_seqs=3, max_num_batched_tokens=3, max_model_len=20, **few)
    assert all(map(np.array_equal, together(engine), right))


def test_codebooks_are_drawn_apart(serve):
    """With one distribution for all, their ids are independent, and the first one's are those of single ids."""
    flat = np.zeros((2, 4))
    engine = serve(Flat(flat), max_num_seqs=64)
    streams = [engine.run(np.zeros((1, 2), int), SamplingParams(seed=i, max_tokens=1)) for i in range(2000)]
    both = np.stack([frames(s)[0] for s in streams])
    assert fits((both[:, 0] * 4 + both[:, 1]).tolist(), [1 / 16] * 16)
    first = (uniforms(np.arange(2000, dtype=np.uint64), np.ones(2000)) * 4).astype(int)
    assert np.array_equal(both[:, 0], first)


def test_seeds_of_codebooks_share_no_numbers():
    seeds = of_codebooks(7, 8)
    assert seeds[0] == 7 and len({*seeds.tolist()}) == 8
    numbers = uniforms(np.repeat(seeds, 100), np.tile(np.arange(100), 8))
    assert len(np.unique(numbers)) > 795


DRAWN = np.random.default_rng(11).normal(size=(4, 12)) * 1.5


@pytest.mark.parametrize(
    "each",
    [
        ({}, {"temperature": 2.0}, {"top_k": 4}, {"temperature": 0.7}),
        ({"top_p": 0.5}, {"top_p": 0.9, "temperature": 2.0}, {"min_p": 0.05, "top_k": 5}, {"typical_p": 0.7}),
    ],
    ids=str,
)
@pytest.mark.parametrize("library", LIBRARIES)
def test_each_codebook_is_drawn_by_its_own_distribution(library, each, serve):
    engine = serve(Flat(DRAWN, library), max_num_seqs=256, backend=library)
    how = SamplingParams(max_tokens=1, codebooks=each)
    streams = [engine.run(np.zeros((1, 4), int), how.with_(seed=i)) for i in range(1000)]
    drawn = np.stack([frames(s)[0] for s in streams])
    assert all(fits(drawn[:, k].tolist(), distribution(DRAWN[k], **how)) for k, how in enumerate(each))


@pytest.mark.parametrize("rung", RUNGS)
def test_log_probabilities_of_each_codebook(rung, serve):
    engine = serve(RUNGS[rung]())
    stream = engine.run(PROMPTS[0], params(0, logprobs=2, temperature=0, codebooks=()))
    got = frames(stream)
    assert len(stream.logprobs) == len(got)
    known = PROMPTS[0]
    for frame, scores in zip(got, stream.logprobs, strict=True):
        logits = np.asarray(WholeFrames().logits(known[None], np.array([len(known)])))[0]
        want = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        assert len(scores) == K
        for k, each in enumerate(scores):
            assert len(each) in (2, 3) and int(frame[k]) in each
            for token, p in each.items():
                assert abs(p - want[k, token]) < 1e-4
            assert max(each.values()) == pytest.approx(want[k].max(), abs=1e-4)
        known = np.concatenate([known, frame[None]])


def test_a_stop_rule_sees_the_frame(serve):
    engine = serve(StateFrames())
    whole = frames(engine.run(PROMPTS[0], params(0, max_tokens=40)))
    at = next(i for i, frame in enumerate(whole) if frame[0] == frame[1])
    stream = engine.run(PROMPTS[0], params(0, max_tokens=40), stop_rule=lambda batch: batch[:, 0] == batch[:, 1])
    assert np.array_equal(frames(stream), whole[: at + 1]) and stream.finish_reason == "stop"
    stream = engine.run(PROMPTS[0], params(0, max_tokens=40), stop_rule=whole[3], include_stop=False)
    first = next(i for i, frame in enumerate(whole) if np.array_equal(frame, whole[3]))
    assert np.array_equal(frames(stream), whole[:first])


def test_a_stop_rule_waits_for_min_tokens(serve):
    engine = serve(StateFrames())
    stream = engine.run(PROMPTS[0], params(0, max_tokens=9, min_tokens=4), stop_rule=lambda b: b[:, 0] >= 0)
    assert len(frames(stream)) == 4


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        (dict(repetition_penalty=1.5), "repetition_penalty is for tokens that are single ids; got 1.5.*3 codebooks"),
        (dict(presence_penalty=1), "presence_penalty is for"),
        (dict(frequency_penalty=1), "frequency_penalty is for"),
        (dict(logit_bias={1: 1.0}), "logit_bias is for"),
        (dict(allowed_token_ids=[1]), "allowed_token_ids is for"),
        (dict(logits_processors=[print]), "logits_processors is for"),
        (dict(stop_token_ids=[1]), "stop_token_ids is for.*Pass stop_rule=, which sees whole tokens"),
        (dict(codebooks=[{}]), "codebooks must be one mapping for each of 3 codebooks; got 1"),
        (dict(stop="x"), "stop takes a tokenizer"),
    ],
    ids=str,
)
def test_what_counts_single_ids_is_refused_by_name(rung, how, message, serve):
    engine = serve(RUNGS[rung]())
    with pytest.raises(InvalidRequest, match=message):
        engine.run(PROMPTS[0], params(0, **how))


@pytest.mark.parametrize("rung", RUNGS)
def test_prompt_logprobs_are_refused(rung, serve):
    with pytest.raises(InvalidRequest, match="prompt_logprobs"):
        serve(RUNGS[rung]()).run(PROMPTS[0], params(0, prompt_logprobs=1))


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2]], [[1.0, 2, 3]], [[1, 2, V]], [[-1, 2, 3]], []], ids=str)
def test_prompts_of_other_frames_are_refused(prompt, serve):
    with pytest.raises(InvalidRequest):
        serve(StateFrames()).run(prompt, params(0))


def test_codebooks_of_single_ids_are_refused(serve):
    from hibachi.testing.toys import SumLogits

    with pytest.raises(InvalidRequest, match="codebooks is for models whose tokens have several"):
        serve(SumLogits(hibachi.NumpyBackend())).run([1], SamplingParams(codebooks=[{}]))


@pytest.mark.parametrize("codebooks", [0, -1, 2.0, True, "2"], ids=str)
def test_a_wrong_number_of_codebooks_is_refused(codebooks, serve):
    model = WholeFrames()
    model.codebooks = codebooks
    with pytest.raises(ConfigError, match=r"WholeFrames\.codebooks must be the number of ids in a token"):
        serve(model)


def test_eos_ids_are_refused(serve):
    model = WholeFrames()
    model.eos_ids = 2
    with pytest.raises(ConfigError, match="eos_ids is for tokens that are single ids"):
        serve(model)


@pytest.mark.parametrize("rung", [WholeFrames, OwnFrames, StateFrames], ids=lambda c: c.__name__)
@pytest.mark.parametrize("wrong", ["fewer", "flat", "more"])
def test_logits_whose_codebooks_change_harm_one_request(rung, wrong, serve):
    """The guilty request begins with frame 0; the others get what they get without it."""

    class Changing(rung):
        def scored(self, h):
            logits = super().scored(h)
            if not self.armed:
                return logits
            return {"fewer": logits[:, :2], "flat": logits[:, 0], "more": np.concatenate([logits, logits], 1)}[wrong]

        armed = False

    model = Changing()
    engine = serve(model)
    want = together(engine)
    model.armed = True
    with pytest.raises(InvalidModelOutput, match=r"must return shape \(1, 3, 7\)"):
        engine.run(PROMPTS[0], params(0)).collect()
    model.armed = False
    assert all(map(np.array_equal, together(engine), want))


@pytest.mark.parametrize("rung", RUNGS)
def test_nan_in_one_codebook_ends_its_request_only(rung, serve):
    class Spoilt(RUNGS[rung]):
        def scored(self, h):
            logits = super().scored(h)
            if len(logits) > 1:
                logits = logits.copy()
                logits[1, 2, 3] = np.nan
            return logits

    plain = serve(RUNGS[rung](), max_num_seqs=6)
    want = together(plain)
    engine = serve(Spoilt(), max_num_seqs=6)
    streams = [engine.run(prompt, params(i)) for i, prompt in enumerate(PROMPTS)]
    ended, right = 0, 0
    for stream, expected in zip(streams, want, strict=True):
        try:
            right += np.array_equal(frames(stream), expected)
        except NonFiniteOutput:
            ended += 1
    assert ended >= 1 and right >= 1 and ended + right == len(PROMPTS)


def test_a_prompt_that_grows_by_itself_continues(serve, right):
    """Position, not the number of new tokens, decides what is drawn: a prompt and its first tokens give the rest."""
    engine = serve(StateFrames())
    for i, (prompt, want) in enumerate(itertools.islice(zip(PROMPTS, right, strict=True), 3)):
        again = engine.run(np.concatenate([prompt, want[:2]]), params(i, max_tokens=4))
        assert np.array_equal(frames(again), want[2:])


@pytest.mark.parametrize("rung", RUNGS)
def test_codebooks_that_are_forced_to_an_id(rung, serve, recwarn):
    """As in a delay pattern: all other ids have the logit -inf, in trials of the model too."""

    class Delayed(RUNGS[rung]):
        def scored(self, h):
            logits = np.full((h.shape[0], K, V), -np.inf, np.float32)
            logits[:, :, 5] = 0
            logits[:, 0] = super().scored(h)[:, 0]
            return logits

    engine = serve(Delayed(), deterministic=None, max_num_seqs=4)
    got = together(engine)
    assert engine.deterministic and all((frame[:, 1:] == 5).all() for frame in got)
    assert len({int(i) for frame in got for i in frame[:, 0]}) > 1 and not list(recwarn)


def test_a_wrong_value_is_refused_with_the_number_of_its_codebook():
    with pytest.raises(InvalidRequest, match="codebooks number 1: temperature must be a finite number"):
        SamplingParams(codebooks=[{}, {"temperature": -1}])
