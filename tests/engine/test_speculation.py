"""Proposed tokens: answers are the same bits as without, whatever is proposed."""

import random
import time

import numpy as np
import pytest

from hibachi import AutoregressiveBatchInference, InvalidRequest, NumpyBackend, SamplingParams, StopRule
from hibachi.engine.recording.replay import replay
from hibachi.engine.speculation.drafting import Direct, Drafting
from hibachi.engine.speculation.howmany import Costs
from hibachi.testing.toys import SumPaged, expected

from ..guide.toyguides import rule, toy_guides
from .models import Counting


class Oracle:
    """Proposes what will come, wrong from the `wrong`-th on. answers: by the first token of the prompt."""

    def __init__(self, wrong=99):
        self.wrong, self.calls = wrong, 0

    def propose(self, keys, tokens, most):
        self.calls += 1
        out = []
        for own, k in zip(tokens, most, strict=True):
            found = np.array(expected(own, k), np.int32)
            found[self.wrong :] = (found[self.wrong :] + 1) % 10
            out.append(found)
        return out


class Random:
    def __init__(self, seed=0, vocab=10):
        self.random, self.vocab = random.Random(seed), vocab

    def propose(self, keys, tokens, most):
        return [[self.random.randrange(self.vocab) for _ in range(self.random.randrange(k + 1))] for k in most]


class CountingPaged(Counting, SumPaged):
    pass


def speculating(model, drafter, k=4, backend=None, **options):
    options = {"max_model_len": 64, "overlap": False, "deterministic": False} | options
    found = AutoregressiveBatchInference(model, backend=backend, **options)
    toy_guides(found)
    found.core.drafting = Drafting(Direct(drafter, 10), k)
    return found


def engine(drafter, k=4, model=SumPaged, **options):
    return speculating(model(NumpyBackend()), drafter, k, **options)


GREEDY = SamplingParams(temperature=0, max_tokens=20)


def test_four_right_proposals_give_five_tokens_in_one_call_and_a_wrong_first_one_gives_one():
    """V-28."""
    for wrong, tokens in ((99, [1, 5, 5, 5, 4]), (0, [1] * 20), (2, [1, 3, 3, 3, 3, 3, 3, 1])):
        with engine(Oracle(wrong), model=CountingPaged) as e:
            stream = e.run([1, 2], GREEDY)
            e.model.sizes.clear()
            assert stream.collect() == expected([1, 2], 20)
            stats = e.stats()
            assert stats.new_tokens == 20
            if wrong == 99:
                assert stats.steps == len(tokens), e.model.sizes
            if wrong == 0:
                assert stats.steps == 20


@pytest.mark.parametrize("drafter", [Oracle(), Oracle(1), Random()], ids=["right", "wrong", "random"])
def test_answers_are_the_same_whatever_is_proposed(drafter):
    """V-27: greedy, sampled, with penalties, log-probabilities, guides, stops; many rows, few blocks, preemption."""
    guided = rule(range(0, 5), range(3, 9), [1, 2, 7], most=12)
    kinds = [
        dict(temperature=0),
        dict(temperature=2.0),
        dict(temperature=2.0, presence_penalty=1.0, logprobs=2),
        dict(temperature=0, structured_outputs=guided),
        dict(temperature=2.0, structured_outputs=guided, repetition_penalty=1.3),
        dict(temperature=0, stop_token_ids=[2], min_tokens=3),
        dict(temperature=1.5, top_k=3, logit_bias={3: 2.0}),
        dict(temperature=0, logits_processors=[lambda ids, x: x + (len(ids) % 3)]),
    ]

    def all_of(e):
        streams = [
            e.run([i % 10, 2, 3 + i % 5], SamplingParams(**kinds[i % 8] | {"seed": i, "max_tokens": 10 + i}))
            for i in range(24)
        ]
        return [(s.collect(), s.logprobs, s.finish_reason, s.stop_token) for s in streams]

    with engine(Random(), k=0) as e:
        want = all_of(e)
    for options in ({}, {"max_num_seqs": 5}, {"cache_tokens": 128, "block_size": 4, "max_num_seqs": 12}):
        with engine(drafter, **options) as e:
            assert all_of(e) == want
            assert e.core.drafting.drafted.proposed
            e.core.scheduler.check()
            assert replay(e.dump())
    assert e.stats().preemptions


def test_nobody_waits_or_is_preempted_for_proposals():
    """Steps with as many tokens as rows leave no room; and no block with contents makes way."""
    with engine(Oracle(), max_num_batched_tokens=16, max_num_seqs=16) as e:
        streams = [e.run([i % 10, 1], GREEDY) for i in range(16)]
        assert [s.collect() for s in streams] == [expected([i % 10, 1], 20) for i in range(16)]
    with engine(Oracle(), cache_tokens=64, block_size=4, max_num_seqs=2) as e:
        for i in range(6):
            assert e.run([i, *range(9)], GREEDY).collect() == expected([i, *range(9)], 20)
        evicted = e.stats().evictions
    with engine(Random(), k=0, cache_tokens=64, block_size=4, max_num_seqs=2) as e:
        for i in range(6):
            e.run([i, *range(9)], GREEDY).collect()
        assert evicted <= e.stats().evictions


def test_stops_limits_and_pauses():
    with engine(Oracle(), pause_after=2) as e:
        stream = e.run([1, 2], GREEDY, stop_rule=StopRule(where=lambda batch: batch == 2))
        got = [next(stream)]
        time.sleep(0.05)
        assert len(stream.channel.buffer) <= 2 + 4
        got += list(stream)
        assert got == [4, 8, 6, 2]
    with engine(Oracle()) as e:
        for n in range(1, 9):
            assert e.run([1, 2], SamplingParams(temperature=0, max_tokens=n)).collect() == expected([1, 2], n)
        assert e.run([1] * 60, SamplingParams(temperature=0)).collect() == expected([1] * 60, 4)


class Outputs(SumPaged):
    """Counts the outputs that are asked for."""

    outputs = 0

    def step(self, params, cache, x):
        self.outputs += len(x.last)
        return super().step(params, cache, x)


FORCED = rule([3], [5], [1], range(4, 6), [7], [8], range(2, 9), most=14)
FORCED_KINDS = [
    {},
    dict(temperature=2.0),
    dict(logprobs=2),
    dict(stop_token_ids=[5]),
    dict(stop_token_ids=[8], min_tokens=6),
    dict(temperature=2.0, presence_penalty=1.0, repetition_penalty=1.5),
    dict(temperature=2.0, bad_words=["\x07\x08"]),
    dict(logit_bias={5: -3.0}),
    dict(max_tokens=2),
    dict(max_tokens=9),
    dict(structured_outputs=rule([3], [5], [1], most=3)),
    dict(structured_outputs=rule([3], [5], [1], [2], [4], most=9, least=1)),
    dict(structured_outputs=rule([3], [5], [1], most=9, fails=2)),
    dict(structured_outputs=rule([3], [5], [1], range(2, 4), most=9, fails=4)),
]


def test_forced_tokens_are_taken_without_logits_and_answers_stay_the_same():
    def all_of(e, kinds):
        made = [
            SamplingParams(**dict(temperature=0, max_tokens=20, structured_outputs=FORCED, seed=3) | k) for k in kinds
        ]
        streams = [e.run([i % 10, 1, 2], p, stop_rule=rule_of(i)) for i, p in enumerate(made)]
        return [ended(s) for s in streams]

    def rule_of(i):
        return StopRule(where=lambda batch: batch == 7) if i == 1 else None

    def ended(stream):
        try:
            got = stream.collect()
        except InvalidRequest as e:
            return str(e)
        return got, stream.logprobs, stream.finish_reason, stream.stop_token

    kinds = [k for k in FORCED_KINDS if "bad_words" not in k]
    with engine(Random(), k=0, model=Outputs) as e:
        want = all_of(e, kinds)
        plain = e.model.outputs
    with engine(Nothing(), k=8, model=Outputs) as e:
        assert all_of(e, kinds) == want
        assert e.core.drafting.drafted.accepted > 30
        assert e.model.outputs < plain - 20
        assert replay(e.dump())
    assert any("cannot go on" in str(each) for each in want)


class Nothing:
    def propose(self, keys, tokens, most):
        return [[] for _ in keys]


class Never:
    """Lets nobody compute a proposal, and keeps the records."""

    def __init__(self):
        self.costs, self.records, self.noted = Costs(), self, []

    def worth(self, tokens, most):
        return True

    def choose(self, tokens, counts, rates, budget):
        return [0] * len(counts)

    def rate(self, key, by):
        return 0.9

    def note(self, key, tried, right, by):
        self.noted.append((tried, right))

    def forget(self, key):
        pass


@pytest.mark.parametrize(("wrong", "right"), [(99, 1), (0, 0)])
def test_what_comes_judges_proposals_that_no_row_has_computed(wrong, right):
    """So a request whose proposals were bad is tried again when they have become good."""
    never = Never()
    with engine(Oracle(wrong)) as e:
        e.core.drafting = Drafting(Direct(Oracle(wrong), 10, never), 4, never)
        tokens = e.run([1, 2], GREEDY).collect()
    assert tokens == expected([1, 2], 20)
    assert len(never.noted) >= 15 and set(never.noted) == {(1, right)}


class Most:
    """Notes how many may be proposed."""

    def __init__(self):
        self.most = set()

    def propose(self, keys, tokens, most):
        self.most |= set(most)
        return Oracle().propose(keys, tokens, most)


@pytest.mark.parametrize(("asked", "most"), [(None, 4), (0, 0), (1, 1), (3, 3), (4, 4), (64, 4), (10**12, 4)])
def test_a_request_may_ask_for_fewer_proposals_or_none(asked, most):
    drafter = Most()
    with engine(drafter) as e:
        assert e.run([1, 2], GREEDY.with_(num_speculative_tokens=asked)).collect() == expected([1, 2], 20)
        assert max(drafter.most, default=0) == most
        assert len(e.core.drafting.drafted.by_position) == most


def test_nothing_is_forced_on_a_request_that_wants_no_proposals():
    form, steps = rule([1], [2], [3], most=6), []
    for asked in (None, 0):
        with engine(Random(), k=4) as e:
            stream = e.run([1, 2], SamplingParams(structured_outputs=form, num_speculative_tokens=asked))
            assert stream.collect() == [1, 2, 3, 1, 2, 3]
            steps.append((e.stats().steps, e.core.drafting.drafted.proposed))
    assert steps == [(2, 4), (6, 0)]
