"""Frames drawn in depth: logits of a codebook depend on the ids drawn before it in the frame."""

import gc
import itertools
import weakref

import numpy as np
import pytest

from hibachi import (
    ConfigError,
    Guidance,
    InvalidModelOutput,
    InvalidRequest,
    ModelError,
    NonFiniteOutput,
    NumpyBackend,
    SamplingParams,
)
from hibachi.engine import build
from hibachi.engine.prompts import kind_of_ids
from hibachi.engine.runners.frames import FrameSampler
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.runner import Part, joined
from hibachi.engine.runners.tokentable import Tables
from hibachi.engine.sampling.uniforms import of_codebooks, uniforms
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.streams.channel import Channel
from hibachi.request import Request

from ..decode.reference import distribution
from .frames import DEPTHS, EMBED, HEAD, RUNGS, H, InDepth, K, SizedDepth, V
from .test_codebooks import LIBRARIES, PROMPTS, frames
from .test_equality_matrix import Preempting

EACH = [{"temperature": 0.8}, {"top_k": 3}, {}]
NEW = 6
BOOKS = np.arange(K)


def params(i, **how):
    return SamplingParams(**{"seed": i, "max_tokens": NEW, "codebooks": EACH} | how)


def together(engine, prompts=PROMPTS, **how):
    return [frames(s) for s in [engine.run(prompt, params(i, **how)) for i, prompt in enumerate(prompts)]]


def small(h):
    return (h - 16 * np.floor(h / 16) - 8) @ HEAD


def logits_of(known, drawn):
    """Of the codebook after these ids of a frame, by hand. known [n, K]."""
    h = sum(EMBED[k][known[:, k]].sum(axis=0) for k in range(K))
    past = h * 0 + h[:1] * 0 + sum((EMBED[k][i] for k, i in enumerate(drawn)), h * 0)
    return small(h + past).reshape(K, V)[len(drawn)].astype(np.float64)


def by_hand(prompt, seed, each=EACH, n=NEW):
    known, seeds = np.array(prompt), of_codebooks(seed, K)
    for _ in range(n):
        drawn = []
        for k, how in enumerate(each):
            p = distribution(logits_of(known, drawn), **how)
            u = uniforms(seeds[k : k + 1], np.array([len(known)]))[0]
            drawn.append(int(np.argmax(np.cumsum(p) > u)))
        known = np.concatenate([known, [drawn]])
    return known[len(prompt) :]


RIGHT = [by_hand(prompt, i) for i, prompt in enumerate(PROMPTS)]
CONDITIONS = {
    "alone": dict(max_num_seqs=1),
    "company": dict(max_num_seqs=4),
    "chunk": dict(max_num_seqs=3, max_num_batched_tokens=3),
    "preempted": dict(max_num_seqs=4, max_model_len=20, block_size=4),
}


def runs():
    for library, rung, condition in itertools.product(LIBRARIES, DEPTHS, CONDITIONS):
        if library != "jax" or rung == "state" or condition == "company":  # op by op, each shape is compiled
            yield pytest.param(library, rung, condition, id=f"{library}-{rung}-{condition}")


@pytest.mark.parametrize(("library", "rung", "condition"), [*runs()])
def test_frames_are_what_a_loop_draws(library, rung, condition, serve, monkeypatch):
    preempted = condition == "preempted" and rung != "whole"  # which holds no memory that others may need
    if preempted:
        monkeypatch.setattr(build, "RecordedScheduler", Preempting)
    engine = serve(DEPTHS[rung](library), backend=library, **CONDITIONS[condition])
    for got, want in zip(together(engine), RIGHT, strict=True):
        assert got.dtype.kind == "i" and np.array_equal(got, want)
    assert bool(engine.stats().preemptions) == preempted


class Apart(InDepth):
    """Its `depth` looks at no ids, so that its frames are those of `Frames`."""

    def depth(self, k, given, codes, past):
        return super(InDepth, self).scored(given["hidden"][0])[:, k], None


@pytest.mark.parametrize("rung", RUNGS)
def test_without_a_look_at_ids_frames_are_those_of_logits_of_all_codebooks(rung, serve):
    apart = serve(type("Apart", (Apart, RUNGS[rung]), {})(), max_num_seqs=4)
    want = together(serve(RUNGS[rung](), max_num_seqs=4))
    assert all(map(np.array_equal, together(apart), want))


@pytest.mark.parametrize("library", LIBRARIES)
def test_log_probabilities_and_greedy_frames(library, serve):
    engine = serve(DEPTHS["state"](library), backend=library)
    stream = engine.run(PROMPTS[0], params(0, logprobs=1, temperature=0, codebooks=()))
    known = PROMPTS[0]
    for frame, scores in zip(frames(stream), stream.logprobs, strict=True):
        for k, each in enumerate(scores):
            logits = logits_of(known, frame[:k].tolist())
            assert frame[k] == logits.argmax()
            want = logits.max() - np.log(np.exp(logits).sum())
            assert each == {int(frame[k]): pytest.approx(want, abs=1e-4)}
        known = np.concatenate([known, frame[None]])


def test_guided_frames_are_the_same_at_each_rung(serve):
    """A second row has another prompt; the logits of each codebook are mixed before its id is drawn."""
    others, found = [(prompt + 1) % V for prompt in PROMPTS[::-1]], list[list[np.ndarray]]()
    for rung in DEPTHS:
        engine = serve(DEPTHS[rung](), max_num_seqs=8)
        guided = [Guidance(2.0, prompt=other) if i % 2 else None for i, other in enumerate(others)]
        streams = [engine.run(p, params(i), guidance=guided[i]) for i, p in enumerate(PROMPTS)]
        found.append([frames(stream) for stream in streams])
        assert all(map(np.array_equal, found[-1], found[0]))
    assert all(np.array_equal(got, want) != i % 2 for i, (got, want) in enumerate(zip(found[0], RIGHT, strict=True)))


@pytest.mark.parametrize("each", [(), EACH], ids=["alike", "apart"])
def test_a_row_holds_on_to_no_request(each):
    prompt, model = np.zeros((5, K), np.int32), DEPTHS["whole"]()
    kind = kind_of_ids(K)
    sampler = FrameSampler(model.library, 2, model, Tables(2, kind).of(kind))
    job = Job(Seq(5, 3), Channel(), Request(prompt, params(0, codebooks=each)))
    job.seq.owner, job.seq.row = job, 1
    sampler.admit(job)
    seen = weakref.ref(prompt)
    del job, prompt
    gc.collect()
    assert seen() is None


def test_a_part_of_no_rows_joins_those_of_frames():
    """As where all rows of a call wait for others that they draw with."""
    fault, pair = InvalidRequest("no"), (Seq(1, 1), Seq(1, 1))
    nobody = Part(np.arange(0), np.zeros(0, np.int32), None, np.zeros(0, bool), faults={3: fault})
    some = Part(np.arange(2), np.ones((2, K), np.int32), np.ones((2, K)), np.zeros(2, bool), parents=[pair])
    whole = joined([nobody, some, some], np.arange(0), NumpyBackend())
    assert whole.tokens.shape == (4, K) and (whole.faults, whole.parents) == ({3: fault}, [pair, pair])
    assert joined([nobody, nobody], np.arange(0), NumpyBackend()).faults == {3: fault}


WIDE = np.random.default_rng(2).normal(size=(H * 64, V)).astype(np.float32)


@pytest.mark.parametrize("rung", ["whole", "own"])
def test_bits_of_rounded_products_are_those_of_a_request_alone(rung, serve):
    """On NumPy, products of several rows are rounded otherwise; calls are made so that none is."""

    class Rounded(DEPTHS[rung]):
        def depth(self, k, given, codes, past):
            logits, past = super().depth(k, given, codes, past)
            return logits + np.tile(past + codes[:, :1] / 7, 64).astype(np.float32) @ WIDE, past

    def bits(streams):
        both = [(frames(stream).tolist(), stream.logprobs) for stream in streams]
        return [
            (said, [[{i: p.hex() for i, p in each.items()} for each in f] for f in scores]) for said, scores in both
        ]

    engine = serve(Rounded(), deterministic=True, max_num_seqs=6)
    alone = [bits([engine.run(prompt, params(i, logprobs=1))])[0] for i, prompt in enumerate(PROMPTS)]
    assert bits([engine.run(prompt, params(i, logprobs=1)) for i, prompt in enumerate(PROMPTS)]) == alone


@pytest.mark.parametrize("rung", DEPTHS)
def test_trials_go_through_depth(rung, serve, caplog):
    class Mixing(DEPTHS[rung]):
        def depth(self, k, given, codes, past):
            logits, past = super().depth(k, given, codes, past)
            return logits + 1e-5 * given["hidden"][0].mean() * (k == K - 1), past

    assert serve(DEPTHS[rung](), max_num_seqs=4, deterministic=None).deterministic
    assert (
        not serve(Mixing(), max_num_seqs=4, deterministic=None).deterministic and "deterministic=False" in caplog.text
    )


SIZES = SizedDepth.vocab_sizes


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("how", ["depth", "plain"])
def test_codebooks_of_other_sizes(how, library, serve):
    """Ids that a codebook does not have are never drawn, and have no part in log-probabilities."""
    bases = (SizedDepth, RUNGS["state"]) if how == "depth" else (RUNGS["state"],)
    model = type("Sizes", bases, {"vocab_sizes": SIZES})(library)
    engine = serve(model, backend=library, max_num_seqs=4)
    prompts = [prompt % SIZES for prompt in PROMPTS]
    for i, prompt in enumerate(prompts):
        stream = engine.run(prompt, params(i, codebooks=(), temperature=8.0, logprobs=V, max_tokens=12))
        drawn = frames(stream)
        assert (drawn < SIZES).all() and len({*drawn[:, 1].tolist()}) == 3
        for scores in stream.logprobs:
            assert [len(each) for each in scores] == [*SIZES]
            assert all(sum(np.exp([*each.values()])) == pytest.approx(1, abs=1e-4) for each in scores)
    with pytest.raises(InvalidRequest, match=r"codebook 1 must be from 0 to 2 .*got 3 in frame 1"):
        engine.run([[0, 0, 0], [0, 3, 0]], params(0))
    fed = engine.run(prompts[0], params(0), fed=True)
    next(fed)
    with pytest.raises(InvalidRequest, match=r"feed takes .*codebook 1 must be from 0 to 2 .*got 3 in frame 0"):
        fed.feed([0, 3, 0])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("models", [RUNGS, DEPTHS], ids=["plain", "depth"])
def test_codebooks_have_biases_and_allowed_ids_of_their_own(models, library, serve):
    each = [{"allowed_token_ids": [2, 5], "temperature": 9.0}, {"logit_bias": {4: 100}, "temperature": 0}, {}]
    engine = serve(models["state"](library), backend=library, max_num_seqs=4)
    want = together(engine)
    streams = [engine.run(p, params(i, codebooks=each if i % 2 else EACH)) for i, p in enumerate(PROMPTS)]
    for i, stream in enumerate(streams):
        got = frames(stream)
        if not i % 2:
            assert np.array_equal(got, want[i])
            continue
        assert {*got[:, 0].tolist()} == {2, 5} and (got[:, 1] == 4).all() and len({*got[:, 2].tolist()}) > 1
    for entry, message in (
        ({"logit_bias": {V: 1}}, "codebooks number 1: logit_bias must name token ids from 0 to 6 .*; got 7"),
        ({"allowed_token_ids": [9]}, "codebooks number 1: allowed_token_ids must name token ids"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            engine.run(PROMPTS[0], params(0, codebooks=[{}, entry, {}]))
    nothing = engine.run(PROMPTS[0], params(0, codebooks=[{}, {"allowed_token_ids": [1]}, {}]))
    assert (frames(nothing)[:, 1] == 1).all()


@pytest.mark.parametrize("name", ["repetition_penalty", "structured_outputs", "seed"])
def test_what_codebooks_may_not_differ_in_is_refused(name):
    with pytest.raises(InvalidRequest, match=r"codebooks must be one mapping.* logit_bias, allowed_token_ids"):
        SamplingParams(codebooks=[{name: 1}])


WRONG = {
    "a shape": (lambda logits, past: (logits[:, :5], past), InvalidModelOutput, r"1 must .* \(1, 7\);.*vocab_sizes"),
    "too few rows": (lambda logits, past: (logits[:0], past), InvalidModelOutput, r"\.depth of .* must return shape"),
    "no pair": (lambda logits, past: logits, InvalidModelOutput, r"\.depth must return a pair \(logits, past\)"),
    "an error": (lambda logits, past: 1 // 0, ModelError, "ZeroDivisionError"),
    "nan": (lambda logits, past: (logits * np.nan, past), NonFiniteOutput, "NaN"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("rung", DEPTHS)
def test_what_depth_does_wrong_ends_its_request_only(rung, wrong, serve):
    """Wherever a row was given frames of ones; the others get what they get without it."""
    spoil, kind, message = WRONG[wrong]

    class Spoilt(DEPTHS[rung]):
        def scored(self, h):
            given = super().scored(h)
            given["guilty"] = (h == MARK).all(axis=1)
            return given

        def depth(self, k, given, codes, past):
            logits, past = super().depth(k, given, codes, past)
            if k != 1 or not given["guilty"].any():
                return logits, past
            if wrong == "nan":
                return np.where(given["guilty"][:, None], np.nan, logits), past
            return spoil(logits, past)

    MARK = EMBED[BOOKS, 1].sum(axis=0)
    engine = serve(Spoilt(), max_num_seqs=6, deterministic=False)
    streams = [engine.run(prompt, params(i)) for i, prompt in enumerate(PROMPTS)]
    bad = engine.run([[1] * K], params(9))
    assert all(np.array_equal(frames(stream), want) for stream, want in zip(streams, RIGHT, strict=True))
    with pytest.raises(kind, match=message):
        bad.collect()


@pytest.mark.parametrize("rung", DEPTHS)
def test_a_past_that_outlives_its_frame_is_told(rung, serve):
    class Keeping(DEPTHS[rung]):
        def depth(self, k, given, codes, past):
            logits, past = super().depth(k, given, codes, getattr(self, "kept", None))
            self.kept = past
            return logits, past

    message = r"\.depth must begin anew with each frame, where `past` is None"
    with pytest.raises((ConfigError, InvalidModelOutput), match=message):
        serve(Keeping(), deterministic=False).run([[1] * K], params(0)).collect()


@pytest.mark.parametrize("out", [(), [np.zeros((3, 2))], {"h": 1.0}], ids=str)
def test_a_step_that_returns_no_rows_for_depth(out, serve):
    class Odd(DEPTHS["whole"]):
        def logits(self, tokens, lengths):
            return out

    with pytest.raises(InvalidModelOutput, match=r"Odd\.logits.* must return"):
        serve(Odd(), deterministic=False).run(PROMPTS[0], params(0)).collect()


@pytest.mark.parametrize("sizes", [(7, 7), (7, 7, 8), (7, 0, 7), 7, "abc"], ids=str)
def test_wrong_sizes_are_refused(sizes, serve):
    model = DEPTHS["state"]()
    model.vocab_sizes = sizes
    with pytest.raises(ConfigError, match=r"vocab_sizes must be the size of each of 3 codebooks"):
        serve(model)


def test_a_depth_of_other_parameters_is_refused(serve):
    model = DEPTHS["state"]()
    model.depth = lambda hidden: hidden
    with pytest.raises(ConfigError, match=r"depth is called as `depth\(k, given, codes, past\)`"):
        serve(model)

    async def depth(k, given, codes, past): ...

    model.depth = depth
    with pytest.raises(ConfigError, match=r"\.depth is called within a step: expected no `async`"):
        serve(model)


def test_one_program_serves_all_codebooks(serve):
    """On a library that compiles: one for the first codebook, which has no past, and one for all others; for each
    number of rows.
    """
    traced = []

    class Traced(DEPTHS["state"]):
        def depth(self, params, k, given, codes, past):
            traced.append((len(codes), past is None))
            logits, past = super().depth(k, given, codes, past)
            return logits * params[0], past

    model = Traced("jax")
    model.params = (np.float32(1),)
    engine = serve(model, backend="jax", max_num_seqs=4, deterministic=False)
    assert all(map(np.array_equal, together(engine), RIGHT))
    assert len(traced) == len({*traced})
