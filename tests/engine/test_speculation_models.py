"""Proposed tokens for models that are not plain ones with keys and values: the same answers, bit for bit."""

import random
from contextlib import suppress

import numpy as np
import pytest

import hibachi
from hibachi import AutoregressiveBatchInference, ModelError, SamplingParams, UnsupportedOperation
from hibachi.engine.recording.replay import replay
from hibachi.engine.runners.runner import Part
from hibachi.engine.speculation.drafting import Direct, Drafting
from hibachi.engine.speculation.proposals import Ahead
from hibachi.testing.toys import SumBoth, SumLogits, SumOwn, SumPaged, SumState, expected
from hibachi_jax import JaxBackend

from ..guide.toyguides import rule
from .models import Counting, Soft, until
from .test_speculation import GREEDY, Oracle, Random
from .test_speculation import speculating as engine

DRAFTERS = {"right": Oracle, "wrong": lambda: Oracle(0), "half right": lambda: Oracle(2), "random": Random}
GUIDED = rule(range(0, 5), range(3, 9), [1, 2, 7], most=12)
KINDS = [
    dict(temperature=0),
    dict(temperature=2.0),
    dict(temperature=0, logprobs=2),
    dict(temperature=2.0, presence_penalty=1.0, logprobs=2),
    dict(temperature=0, stop_token_ids=[2], min_tokens=3),
    dict(temperature=2.0, structured_outputs=GUIDED, repetition_penalty=1.3),
    dict(temperature=1.5, top_k=3, logit_bias={3: 2.0}),
]


def answers(e, n=14):
    """All that is said, of many requests at once."""
    streams = [
        e.run([i % 10, 2, 3 + i % 5], SamplingParams(**KINDS[i % len(KINDS)] | {"seed": i, "max_tokens": 6 + i}))
        for i in range(n)
    ]
    return [
        (s.collect(), [{t: float(v).hex() for t, v in p.items()} for p in s.logprobs], s.finish_reason, s.stop_token)
        for s in streams
    ]


def check_same(make, drafter, options, n=14):
    """The same as without proposals, which were made; nothing is left behind."""
    with make(Random(), k=0) as e:
        want = answers(e, n)
    for each in options:
        with make(DRAFTERS[drafter](), **each) as e:
            assert answers(e, n) == want
            assert e.core.drafting.drafted.proposed
            e.core.scheduler.check()
            assert replay(e.dump())
    return e


class SoftState(Soft, SumState):
    pass


class SoftBoth(Soft, SumBoth):
    pass


STATES = [(SumState, "right"), (SumState, "half right"), (SumBoth, "right"), (SumBoth, "wrong")]
STATES += [(SoftState, "random"), (SoftBoth, "random")]


@pytest.mark.parametrize(("toy", "drafter"), STATES)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_states_go_on_as_if_wrong_proposals_had_never_been(library, toy, drafter):
    backend = hibachi.load_backend(library)

    def make(*args, **options):
        return engine(toy(backend), *args, backend=backend, **options)

    few = {"max_num_seqs": 5, "block_size": 4}
    check_same(make, drafter, [few | {"k": 3}, few | {"k": 7, "cache_tokens": 64}])


class CountingState(Counting, SumState):
    pass


@pytest.mark.parametrize(
    ("wrong", "sizes"),
    [
        (99, [2, 4, 4, 4, 4, 2, 1]),  # all right: one call for four tokens
        (0, [2, *[4, 1] * 16, 2, 1, 2, 1, 1]),  # the first wrong: one more, for the token that was known
    ],
)
def test_calls_of_a_state_with_proposals(wrong, sizes):
    backend = hibachi.load_backend("numpy")
    with engine(CountingState(backend), Oracle(wrong), k=4) as e:
        assert e.run([1, 2], GREEDY).collect() == expected([1, 2], 20)
        assert e.model.sizes == sizes


# ---- backends that compile a program for each shape ----------------------------------------------------------------


class CountingPaged(Counting, SumPaged):
    pass


class SoftPaged(Soft, SumPaged):
    pass


COMPILED = {
    "kernels": lambda: JaxBackend(),
    "invariant": lambda: JaxBackend(native=False).invariant(),
    "any bits": lambda: JaxBackend(native=False),
}


@pytest.mark.parametrize("jax", COMPILED)
def test_proposals_are_tokens_like_others_where_each_shape_is_compiled(jax):
    toy = SumPaged if jax == "any bits" else SoftPaged
    check_same(lambda *args, **options: engine(toy(COMPILED[jax]()), *args, **options), "random", [{"k": 3}], n=7)


@pytest.mark.parametrize("jax", ["kernels", "invariant"])
def test_no_program_is_compiled_for_proposals(jax):
    """A step of n tokens, proposals among them, has the shape of a step of n rows."""
    with engine(CountingPaged(COMPILED[jax]()), Oracle(), k=0, max_num_seqs=16) as e:
        for n in (1, 2, 3, 4, 8, 12, 16):
            for stream in [e.run([i % 10, 2], GREEDY) for i in range(n)]:
                stream.collect()
        before = len(e.model.sizes)
        e.core.drafting = Drafting(Direct(Oracle(), 10), 7)
        for n in (1, 2):
            streams = [e.run([i, 2], GREEDY) for i in range(n)]
            assert [s.collect() for s in streams] == [expected([i, 2], 20) for i in range(n)]
        assert e.meters().drafted.accepted > 30
        assert len(e.model.sizes) == before, e.model.sizes


# ---- models without a cache ----------------------------------------------------------------------------------------


class SoftLogits(SumLogits):
    def __init__(self, backend):
        super().__init__(backend, margin=3.0)


class Failing(SumLogits):
    """Cannot work with what nobody asked for: two tokens 7 in a row."""

    def logits(self, tokens, lengths):
        if ((tokens[:, 1:] == 7) & (tokens[:, :-1] == 7)).any():
            raise ValueError("7 7")
        return super().logits(tokens, lengths)


WHOLE = [(SumLogits, "half right"), (SumLogits, "right"), (SoftLogits, "random"), (SoftLogits, "wrong")]


@pytest.mark.parametrize(("toy", "drafter"), WHOLE)
@pytest.mark.parametrize("options", [{}, {"padding_token": 0}, {"deterministic": True, "padding_token": 0}], ids=str)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_rows_are_shown_with_and_without_each_proposal(library, options, toy, drafter):
    backend = hibachi.load_backend(library)

    def make(*args, **more):
        return engine(toy(backend), *args, backend=backend, **options, **more)

    check_same(make, drafter, [{"k": 3, "max_num_seqs": 5}])


def test_a_proposal_that_the_model_fails_with_was_never_made():
    class Sevens:
        def propose(self, keys, tokens, most):
            return [[expected(own, 1)[0], 7, 7, 7][:k] for own, k in zip(tokens, most, strict=True)]

    backend = hibachi.load_backend("numpy")
    with engine(Failing(backend), Sevens(), backend=backend, padding_token=0) as e:
        streams = [e.run([i, 2], GREEDY) for i in range(4)]
        assert [s.collect() for s in streams] == [expected([i, 2], 20) for i in range(4)]
        assert e.stats().steps < 20 and not e.stats().failed
        bad = e.run([7, 7], GREEDY)
        with pytest.raises(ModelError, match="7 7"):
            bad.collect()


# ---- models with a cache of their own ------------------------------------------------------------------------------


class Keeps(SumOwn):
    """Returns the logits of as many of the last tokens as are wanted."""

    def __init__(self, backend, new_only=False):
        super().__init__(backend, new_only)
        self.sizes = []

    def step(self, tokens, lengths, past, logits_to_keep=1):
        self.sizes.append(tuple(tokens.shape))
        xp, found = self.backend.xp, []
        for left in reversed(range(logits_to_keep)):
            n = tokens.shape[1] - left
            logits, after = super().step(tokens[:, :n], lengths - left, past)
            found.append(logits)
        return xp.stack(found, axis=1), after


class SoftKeeps(Keeps):
    def step(self, tokens, lengths, past, logits_to_keep=1):
        logits, past = super().step(tokens, lengths, past, logits_to_keep)
        return logits * 0.003, past


OWN = [(Keeps, "half right"), (Keeps, "right"), (SoftKeeps, "random"), (SoftKeeps, "wrong")]


@pytest.mark.parametrize(("toy", "drafter"), OWN)
@pytest.mark.parametrize("new_only", [False, True])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_positions_of_wrong_proposals_are_cut_off_a_past(library, new_only, toy, drafter):
    backend = hibachi.load_backend(library)

    def make(*args, **more):
        return engine(toy(backend, new_only), *args, backend=backend, **more)

    check_same(make, drafter, [{"k": 3, "max_num_seqs": 5}, {"k": 6, "cache_tokens": 96, "block_size": 4}])


@pytest.mark.parametrize("new_only", [False, True])
def test_calls_of_a_past_with_proposals(new_only):
    backend = hibachi.load_backend("numpy")
    with engine(Keeps(backend, new_only), Oracle(2), backend=backend) as e:
        e.model.sizes.clear()
        assert e.run([1, 2], GREEDY).collect() == expected([1, 2], 20)
        assert e.model.sizes == [(1, 2), *[(1, 5)] * 5, (1, 4), (1, 1)]


class Sevens:
    def propose(self, keys, tokens, most):
        return [[7] * n for n in most]


def test_a_model_with_a_cache_of_its_own_says_why_it_has_no_proposals():
    class Lumps(Keeps):
        """Keeps what it learned from the tokens of a call in the last of their positions."""

        def step(self, tokens, lengths, past, logits_to_keep=1):
            logits, after = super().step(tokens, lengths, past, logits_to_keep)
            kept = after["layers"][0][0].copy()
            new = kept[..., -tokens.shape[1] :]
            new[..., -1], new[..., :-1] = new.sum(axis=-1), 0
            return logits, {"layers": [(kept,)]}

    backend = hibachi.load_backend("numpy")
    config = {"num_speculative_tokens": 4, "prompt_lookup_min": 1}
    for toy, why in ((SumOwn, "logits_to_keep"), (Lumps, "cannot be cut")):
        with pytest.raises(UnsupportedOperation, match=why):
            AutoregressiveBatchInference(toy(backend), backend=backend, speculative_config=config)
    made = AutoregressiveBatchInference(Keeps(backend), backend=backend, speculative_config="auto")
    with made as e:
        assert e.deterministic and e.core.drafting is not None


# ---- when something fails ------------------------------------------------------------------------------------------


class Flaky:
    """Fails now and then."""

    random, rate = random.Random(5), 0.0

    def shake(self):
        if self.random.random() < self.rate:
            raise RuntimeError("now and then")


class FlakyBoth(Flaky, SumBoth):
    def step(self, params, cache, x):
        self.shake()
        return super().step(params, cache, x)


class FlakyKeeps(Flaky, Keeps):
    def step(self, tokens, lengths, past, logits_to_keep=1):
        self.shake()
        return super().step(tokens, lengths, past, logits_to_keep)


class FlakyLogits(Flaky, SumLogits):
    def logits(self, tokens, lengths):
        self.shake()
        return super().logits(tokens, lengths)


FEW_BLOCKS = {"cache_tokens": 160, "block_size": 4}


@pytest.mark.parametrize(
    ("toy", "options"),
    [(FlakyBoth, FEW_BLOCKS), (FlakyKeeps, FEW_BLOCKS), (FlakyLogits, {"padding_token": 0})],
)
def test_failures_cancels_and_preemption_change_no_answer_and_leave_nothing_behind(toy, options):
    r, backend, answered = random.Random(1), hibachi.load_backend("numpy"), 0
    with engine(model := toy(backend), Random(), 6, backend, max_num_seqs=6, pause_after=5, **options) as e:
        model.rate = 0.03
        live = []
        for i in range(60):
            prompt = [r.randrange(10) for _ in range(r.randrange(1, 20))]
            live.append((prompt, e.run(prompt, SamplingParams(temperature=i % 2, seed=i, max_tokens=20))))
            if r.random() < 0.3:
                live.pop(r.randrange(len(live)))[1].close()
        for prompt, stream in live:
            with suppress(ModelError):  # it failed twice by itself
                assert stream.collect() == expected(prompt, 20)
                answered += 1
        assert answered > 0.8 * len(live) and e.core.drafting.drafted.accepted
        until(lambda: not (e.stats().running or e.stats().waiting))
        e.core.scheduler.check()
        if pool := e.core.scheduler.pool:
            assert e.stats().preemptions and pool.free == pool.usable


def test_a_row_may_keep_fewer_tokens_than_those_that_came_for_sure():
    """Two for sure, behind ten, and three guesses; the draw behind the two failed, so it is drawn again."""
    ahead = Ahead(np.array([12]), np.array([True]), np.array([3], np.int32), np.array([5, 6, 7], np.int32))
    for count, kept, tokens in ((2, 11, []), (3, 12, []), (4, 13, [5]), (6, 15, None)):
        part = Part(np.zeros(1, int), np.zeros(count, np.int32), None, np.zeros(1, bool), counts=np.array([count]))
        assert ahead.kept(part, np.array([10])).tolist() == [kept]
        again = ahead.wrong(part, np.array([10]))
        assert again.ahead.end.tolist() == ([] if tokens is None else [kept])
        if tokens is not None:
            n = np.array([kept - 10])
            piece = again.ahead.piece(np.array([0]), np.array([10]), n)
            assert piece.proposals.tolist() == tokens and piece.own.tolist() == [kept - 10 - len(tokens)]
