"""Guided requests in an engine, with guides that need no library: what may come, how outputs end, who waits."""

import asyncio
import threading
import time

import numpy as np
import pytest

from hibachi import (
    AutoregressiveBatchInference,
    DeadlineExceeded,
    InvalidRequest,
    NumpyBackend,
    SamplingParams,
    Terms,
)
from hibachi.engine.recording.replay import replay
from hibachi.testing.toys import SumLogits, SumOwn, SumPaged, SumTokens, expected

from ..engine.test_overlap import Late
from ..lib.inside import parked
from ..lib.waits import until
from .toyguides import rule, toy_guides


class Slow(SumPaged):
    def step(self, params, cache, x):
        time.sleep(0.005)
        return super().step(params, cache, x)


class SumBooks(SumLogits):
    codebooks = 2


LEVELS = {"level 2": SumPaged, "level 1": SumLogits, "own cache": SumOwn}


def engine(model=SumPaged, *, eos=(), backend=None, **options):
    made = model(backend or NumpyBackend())
    made.eos_ids = eos
    found = AutoregressiveBatchInference(made, **{"max_model_len": 64} | options)
    toy_guides(found)
    return found


def params(form, **more):
    return SamplingParams(structured_outputs=form, **{"seed": 3, "temperature": 0.0} | more)


@pytest.mark.parametrize("model", LEVELS.values(), ids=LEVELS)
def test_only_allowed_tokens_come_and_a_complete_output_ends(model):
    """Two sets by turns; unguided requests beside it get what they get alone."""
    with engine(model) as e:
        plain = e.run([1, 2], max_tokens=6)
        stream = e.run([1, 2], params(rule([5, 6], [7, 8], most=4)))
        got = stream.collect()
        assert len(got) == 4 and all(t in s for t, s in zip(got, [[5, 6], [7, 8]] * 2, strict=True))
        assert stream.finish_reason == "stop" and stream.stop_token is None
        assert plain.collect() == expected([1, 2], 6)


def test_the_likeliest_of_the_allowed_tokens_comes():
    """The model wants 1+2+1 = 4; among 4 and 5 it comes, among 5 and 6 the first does."""
    with engine() as e:
        assert e.run([1, 2], params(rule([4, 5], most=1))).collect() == [4]
        assert e.run([1, 2], params(rule([5, 6], most=1))).collect() == [5]


def test_the_end_token_comes_only_where_the_output_may_end():
    """The model would say 9, its end, at once; at least 2 tokens must come."""
    with engine(eos=(9,)) as e:
        prompt = [8]  # 8 + 1 = 9
        stream = e.run(prompt, params(rule([0], least=2, most=5)))
        got = stream.collect()
        assert got[:2] == [0, 0] and got[-1] == 9 and stream.finish_reason == "stop" and stream.stop_token == 9


def test_a_complete_output_ends_whatever_min_tokens_and_ignore_eos_say():
    with engine(eos=(9,)) as e:
        for more in (dict(min_tokens=8), dict(ignore_eos=True), dict(ignore_eos=True, min_tokens=8)):
            stream = e.run([8], params(rule([0, 1], least=1, most=3), **more))
            assert len(stream.collect()) == 3 and stream.finish_reason == "stop", more


def test_a_form_that_only_nothing_fits_ends_at_once():
    with engine() as e:
        stream = e.run([1], params(rule([5], most=0)))
        assert stream.collect() == [] and stream.finish_reason == "stop"


def test_a_task_learns_at_once_that_its_form_is_complete():
    """Nothing is computed that would wake it."""

    async def all_of(stream):
        return [token async for token in stream]

    with engine() as e:
        form = params(rule([5], most=0, slow=0.1))  # the task waits when the form is ready
        assert asyncio.run(asyncio.wait_for(all_of(e.run([1], form)), 10)) == []


def test_a_grammar_that_fails_in_the_midst_ends_its_own_request_only():
    with engine() as e:
        others = [e.run([1, i], max_tokens=20) for i in range(4)]
        bad = e.run([1], params(rule([5], most=9, fails=3)))
        with pytest.raises(InvalidRequest, match="too complex"):
            bad.collect()
        assert bad.finish_reason == "error"
        assert [s.collect() for s in others] == [expected([1, i], 20) for i in range(4)]


def test_refused_at_the_call_or_in_its_stream():
    with engine() as e:
        with pytest.raises(InvalidRequest, match="the keyword `bad`"):
            e.run([1], params({"grammar": '{"bad": 1}'}))
        with pytest.raises(InvalidRequest, match="cannot be compiled"):
            e.run([1], params(rule([5], most=3, breaks=True))).collect()
        assert e.run([1], max_tokens=3).collect() == expected([1], 3)
        e.core.scheduler.check()


def test_with_allowed_token_ids_and_biases():
    with engine() as e:
        got = e.run([1], params(rule([4, 5, 6], most=3), allowed_token_ids=[6, 7])).collect()
        assert got == [6, 6, 6]
        got = e.run([1], params(rule([4, 5, 6], most=3), logit_bias={5: 100, 9: 100})).collect()
        assert got == [5, 5, 5]
        with pytest.raises(InvalidRequest, match="leaves no token"):
            e.run([1], params(rule([4], most=3), allowed_token_ids=[6])).collect()


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_a_seeded_output_is_the_same_in_any_company_chunked_and_preempted(chunk):
    """Sampled with a temperature from even logits, beside requests that come and go, with little memory."""
    form = rule(range(0, 5), range(3, 9), [1, 2, 7], most=12)

    def request(e, i):
        return e.run([i, 2, 3, i], params(form, temperature=2.0, seed=i, presence_penalty=0.5, min_tokens=2))

    with engine(SumLogits) as alone:
        want = [request(alone, i).collect() for i in range(6)]
    with (
        engine(
            SumPaged, max_num_batched_tokens=max(chunk, 8), max_num_seqs=8, cache_tokens=64, block_size=4, overlap=False
        ) as e,
        engine(SumPaged) as one,
    ):
        solo = [request(one, i).collect() for i in range(6)]
        noise = [e.run([i] * (3 + i), max_tokens=20) for i in range(6)]
        streams = [request(e, i) for i in range(6)]
        noise += [e.run([i] * (2 + i), max_tokens=9) for i in range(6)]
        assert [s.collect() for s in streams] == solo
        assert [len(s.collect()) for s in noise] == [20] * 6 + [9] * 6
        if chunk == 1:
            assert e.stats().preemptions
    assert all(len(w) == 12 for w in want)


# ---- waiting for a grammar ------------------------------------------------------------------------------------------


def gated(e):
    guides = e.forms.guides
    guides.gate = threading.Event()
    return guides.gate


def test_who_waits_for_a_grammar_holds_no_row_and_delays_nobody():
    with engine(max_num_seqs=1) as e:
        gate = gated(e)
        slow = e.run([1], params(rule([5], most=3, waits=True)))
        assert e.run([1, 2], max_tokens=5).collect() == expected([1, 2], 5)
        assert e.stats().waiting == 1 and e.stats().running == 0
        gate.set()
        assert slow.collect() == [5, 5, 5]


def test_it_then_takes_the_place_that_it_had():
    """Behind one that runs wait the guided one and, later, another: the guided one goes first."""
    with engine(Slow, max_num_seqs=1) as e:
        gate = gated(e)
        first = e.run([1], max_tokens=60)
        slow = e.run([1], params(rule([5], most=3, waits=True)))
        last = e.run([1, 2], max_tokens=5)
        gate.set()
        until(lambda: e.stats().waiting == 2 and not parked(e))
        first.close()
        assert slow.collect() == [5, 5, 5] and last.collect() == expected([1, 2], 5)
        assert slow.started < last.started


def test_deadlines_and_cancelling_work_while_a_grammar_is_made():
    with engine() as e:
        gate = gated(e)
        form = params(rule([5], most=3, waits=True))
        late, left, queued = e.run([1], form, terms=Terms(timeout=0.05)), e.run([1], form), e.run([1], form)
        with pytest.raises(DeadlineExceeded):
            late.collect()
        left.close()
        until(lambda: e.stats().waiting == 1)
        gate.set()
        assert queued.collect() == [5, 5, 5]
        until(lambda: e.stats().waiting == 0)
        e.core.scheduler.check()


def test_drain_waits_for_grammars():
    e = engine()
    gate = gated(e)
    slow = e.run([1], params(rule([5], most=3, waits=True)))
    threading.Timer(0.1, gate.set).start()
    assert e.drain(10) and slow.collect() == [5, 5, 5]
    e.close()


def test_close_ends_those_that_wait_for_a_grammar():
    e = engine()
    gate = gated(e)
    slow = e.run([1], params(rule([5], most=3, waits=True)))
    until(lambda: e.stats().waiting == 1)
    e.close()
    assert slow.finish_reason == "closed"
    gate.set()


# ---- steps that overlap -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_guided_row_draws_late_and_all_steps_overlap(temperature):
    """Guided rows and others beside them: what they get alone, and no step is waited for because of a guide."""
    forms = [rule(range(0, 5), range(3, 9), [1, 2, 7], most=9), rule([5, 6], [1], most=30), None, None]

    def all_of(e):
        return [
            e.run([i, 2, 3], params(forms[i % 4], temperature=temperature, seed=i, max_tokens=12 + i)) for i in range(8)
        ]

    with engine(overlap=False) as e:
        want = [s.collect() for s in all_of(e)]
    late = Late()
    with engine(backend=late, overlap=True, max_num_seqs=6) as e:
        streams = all_of(e)
        assert [s.collect() for s in streams] == want
        assert [s.finish_reason for s in streams[:2]] == ["stop", "length"]
        until(lambda: e.stats().running == 0)
        assert late.ahead > 10
        e.core.scheduler.check()
        assert replay(e.dump())


# ---- models that cannot be guided -----------------------------------------------------------------------------------


def test_models_that_return_no_logits_of_single_ids_refuse_by_name():
    form = rule([5], most=3)
    e = AutoregressiveBatchInference(SumTokens(NumpyBackend()), max_model_len=64)
    with e, pytest.raises(InvalidRequest, match="samples by itself"):
        e.run(np.array([1, 2]), params(form))
    e = AutoregressiveBatchInference(SumBooks(NumpyBackend()), max_model_len=64)
    with e, pytest.raises(InvalidRequest, match="structured_outputs is for tokens that are single ids"):
        e.run(np.ones((3, SumBooks.codebooks), np.int32), params(form))
