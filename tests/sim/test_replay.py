"""Replays: times that can be worked out by hand, the same with and without leaps, prefixes as an LRU finds them."""

import random
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest

from hibachi.engine.scheduler.policy import Fair, Fcfs, Priority, Shares, WaitingServed
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.simulator.guesses import Guesses
from hibachi.engine.simulator.outcome import Gaps
from hibachi.engine.simulator.replay import TraceReplay, beginning_before, span
from hibachi.engine.simulator.simulate import Setup, simulate
from hibachi.engine.simulator.steptime import StepTime
from hibachi.engine.simulator.trace import Trace, synthetic
from hibachi.errors import ConfigError, InvalidTrace

SECOND = 10**12
PLAIN = StepTime(step=1.0, token=0, row=0, position=0, pair=0)  # every step takes a second


def trace_of(*requests, keys=None, key_tokens=0):
    """From (arrival in seconds, prompt, output)."""
    at, prompt, output = np.array(requests, float).T
    numbers = (np.rint(at * SECOND).astype(np.int64), prompt.astype(np.int64), output.astype(np.int64))
    return Trace("own", *numbers, np.zeros(len(at), np.int64), None, keys, key_tokens)


def test_one_request():
    """A step that computes q tokens from `start` takes step + token*q + row + position*(start+q) + pair*(...)."""
    time = StepTime(step=1.0, token=0.1, row=0.01, position=1e-3, pair=1e-4)
    run = simulate(trace_of((0, 10, 4)), Setup(max_num_batched_tokens=64), time, Fcfs)
    first = 1 + 10 * 0.1 + 0.01 + 10 * 1e-3 + 55 * 1e-4
    later = [1 + 0.1 + 0.01 + n * (1e-3 + 1e-4) for n in (11, 12, 13)]
    assert run.times("started").tolist() == [0]
    assert run.times("first") == pytest.approx([first]) and run.times("last") == pytest.approx([first + sum(later)])
    assert run.outcome.gaps.percentiles([0, 50, 100]) == pytest.approx(later, rel=1e-3)
    figures = run.summary()
    assert figures["new_tokens"] == 4 and figures["computed_tokens"] == 13 and figures["steps"] == 4
    assert figures["ttft"]["p99"] == pytest.approx(first) and figures["itl"]["p50"] == pytest.approx(later[1], rel=1e-3)


def test_several_tokens_a_step():
    """The next step computes all that the last one brought; the last one brings what is left."""
    time = StepTime(step=1.0, token=0.1, row=0, position=0, pair=0)
    run = simulate(trace_of((0, 10, 8), (0, 10, 1)), Setup(max_num_batched_tokens=64, each=3), time, Fcfs)
    steps = [1 + 20 * 0.1, 1 + 3 * 0.1, 1 + 3 * 0.1]  # 3, 3 and 2 tokens of the first request
    assert run.times("first") == pytest.approx([steps[0]] * 2)
    assert run.times("last") == pytest.approx([sum(steps), steps[0]])
    figures = run.summary()
    assert figures["new_tokens"] == 9 and figures["computed_tokens"] == 26 and figures["steps"] == 3
    assert run.outcome.gaps.percentiles([0, 60, 100]) == pytest.approx([0, 0, 1.3], abs=1e-9, rel=1e-3)
    one, many = (
        simulate(synthetic(200, rate=5.0), Setup(max_num_seqs=8, num_blocks=300, each=n), time, Fcfs) for n in (1, 3)
    )
    assert one.outcome.new_tokens == many.outcome.new_tokens and many.outcome.steps < one.outcome.steps


def test_proposed_tokens_are_computed_and_some_are_kept():
    """All right: three tokens a step, which share its time; the last step has what is left, and none to propose."""
    time = StepTime(step=1.0, token=0.1, row=0, position=0, pair=0)
    run = simulate(trace_of((0, 10, 8)), Setup(guesses=Guesses(2, 1.0)), time, Fcfs)
    steps = [1 + 10 * 0.1, 1 + 3 * 0.1, 1 + 3 * 0.1, 1 + 0.1]  # 1, 3, 3 and 1 tokens
    assert run.times("last") == pytest.approx([sum(steps)])
    figures = run.summary()
    assert figures["new_tokens"] == 8 and figures["steps"] == 4 and figures["computed_tokens"] == 17
    assert figures["proposed_tokens"] == figures["accepted_tokens"] == 4
    assert run.outcome.gaps.percentiles([0, 80, 100]) == pytest.approx([1.3 / 3, 1.3 / 3, 1.1], rel=2e-3)
    wrong = simulate(trace_of((0, 10, 8)), Setup(guesses=Guesses(2, 0.0)), time, Fcfs).summary()
    assert wrong["steps"] == 8 and wrong["accepted_tokens"] == 0 and wrong["computed_tokens"] == 17 + 2 * 5 + 1


@pytest.mark.parametrize("right", [0.3, 0.8])
def test_as_many_proposals_are_kept_as_are_likely(right):
    """1 + p + p^2 + p^3 + p^4 tokens a step of a row."""
    setup = Setup(max_num_seqs=8, guesses=Guesses(4, right, seed=3))
    run = simulate(trace_of(*((0, 10, 2000) for _ in range(8))), setup, PLAIN, Fcfs).outcome
    rows = run.proposed_tokens / 4
    assert run.accepted_tokens / rows == pytest.approx(sum(right**n for n in range(1, 5)), rel=0.05)
    again = simulate(trace_of(*((0, 10, 2000) for _ in range(8))), setup, PLAIN, Fcfs).outcome
    assert again.steps == run.steps and again.accepted_tokens == run.accepted_tokens


@pytest.mark.parametrize(
    ("guesses", "each", "message"),
    [
        (Guesses(0, 0.5), 1, "at least 1; got 0"),
        (Guesses(2, 1.5), 1, "must be from 0 to 1; got 1.5"),
        (Guesses(2, 0.5, share=-1), 1, "must be from 0 to 1; got -1"),
        (Guesses(2, 0.5), 2, "expected each=1; got 2"),
    ],
)
def test_proposals_that_cannot_be(guesses, each, message):
    with pytest.raises(ConfigError, match=message):
        simulate(trace_of((0, 10, 8)), Setup(guesses=guesses, each=each), PLAIN, Fcfs)


def test_who_comes_between_two_steps_waits_for_the_next():
    run = simulate(trace_of((0, 4, 10), (2.5, 4, 2), (3.0, 4, 1)), Setup(max_num_seqs=3), PLAIN, Fcfs)
    assert run.times("started").tolist() == [0, 0.5, 0]
    assert run.times("first").tolist() == [1, 1.5, 1] and run.times("last").tolist() == [10, 2.5, 1]
    assert run.outcome.clock == 10 * SECOND and run.outcome.steps == 10


def test_the_queue_and_idle_time():
    run = simulate(trace_of((0, 4, 4), (0, 4, 2), (20, 4, 1)), Setup(max_num_seqs=1), PLAIN, Fcfs)
    assert run.times("started").tolist() == [0, 4, 0] and run.times("last").tolist() == [4, 6, 1]
    figures = run.summary()
    assert figures["virtual_seconds"] == 21 and figures["most_waiting"] == 1
    assert figures["mean_waiting"] == pytest.approx(4 / 21) and figures["mean_rows"] == pytest.approx(7 / 21)
    when, rows = run.over_time("running")
    assert rows[when < 5.9] == pytest.approx(1) and rows[(when > 6.1) & (when < 19.9)] == pytest.approx(0)


def test_what_cannot_be_served_is_counted():
    trace = trace_of((0, 4, 4), (0, 90, 4), (0, 4, 4), (0, 4, 4))
    run = simulate(trace, Setup(max_num_seqs=1, max_model_len=20, max_num_queued_reqs=2), PLAIN, Fcfs)
    assert run.outcome.refused == {"PromptTooLong": 1, "QueueFull": 1}
    assert run.done.tolist() == [True, False, True, False] and run.summary()["served"] == 2


def test_a_policy_that_lets_nobody_in():
    class Closed(Fcfs):
        def opens(self, waiting, running, step):
            return False

    with pytest.raises(InvalidTrace, match="the policy lets none of 2 waiting requests in while 0 run"):
        simulate(trace_of((0, 4, 4), (1, 4, 4)), Setup(), PLAIN, Closed)


@pytest.mark.parametrize("policy", [Fcfs, lambda: Priority(age=1.0), Fair, WaitingServed])
@pytest.mark.parametrize(
    "setup",
    [
        Setup(max_num_seqs=8, max_num_batched_tokens=256),
        Setup(max_num_seqs=16, num_blocks=130, block_size=16, max_num_batched_tokens=256),
        Setup(max_num_seqs=8, num_blocks=130, block_size=16, max_num_batched_tokens=256, guesses=Guesses(4, 0.7, 0.2)),
    ],
)
def test_leaps_change_nothing(policy, setup):
    trace = synthetic(250, rate=4, bursts=2, prompt=120, output=40, longest=1000, tenants=3, priorities=2, seed=3)
    time = StepTime(step=0.01, token=1e-5, row=1e-5, position=1e-7, pair=1e-9)
    fast, slow = (simulate(trace, setup, time, policy, fast=fast).outcome for fast in (True, False))
    assert fast.planned < slow.planned * (0.5 if setup.guesses is None else 0.9)
    for what in ("started", "first", "last"):
        assert getattr(fast, what).tolist() == getattr(slow, what).tolist()
    for what in ("clock", "steps", "computed_tokens", "new_tokens", "hit_tokens", "evictions", "preemptions"):
        assert getattr(fast, what) == getattr(slow, what), what
    assert fast.accepted_tokens == slow.accepted_tokens and (fast.accepted_tokens > 0) is (setup.guesses is not None)
    if setup.num_blocks and setup.max_num_seqs == 16:
        assert fast.preemptions and fast.hit_tokens and fast.evictions and fast.refused == slow.refused
    fast.gaps.fold()
    slow.gaps.fold()
    assert fast.gaps.counts.tolist() == slow.gaps.counts.tolist()
    edges = np.linspace(0, fast.clock, 20)
    for what in ("waiting", "running"):
        assert fast.timeline.means(what, edges) == pytest.approx(slow.timeline.means(what, edges), abs=1e-9)


def test_leaps_change_nothing_where_samples_give_rows_back():
    """Those of one request have one rank, and nothing but their numbers says which of them goes first."""
    trace = conversations(120, seed=6).faster(60.0).shared_by(3, 2, 6)
    trace = replace(trace, output=10 * trace.output)
    setup = Setup(max_num_seqs=8, num_blocks=60, max_num_batched_tokens=64)
    found = []
    for fast in (True, False):
        scheduler = Scheduler(setup.limits(trace), Shares())
        end = TraceReplay(trace, scheduler, StepTime(0.01, 1e-4, 0, 0, 0), samples=3).run(fast)
        found.append((end.clock, end.steps, end.preemptions, end.hit_tokens))
    assert found[0] == found[1] and found[0][2] > 50


def test_steps_that_begin_in_time():
    rng = random.Random(0)
    for _ in range(300):
        first, growth = rng.randint(1, 50), rng.choice([0, 0, 1, 7])
        room = rng.randint(1, 2000)
        began, n = 0, 0
        while began < room:
            began += first + growth * n
            n += 1
        assert beginning_before(room, first, growth) == n
        assert span(n, first, growth) == began


def test_gaps_come_to_the_percentiles_of_the_values():
    rng = np.random.default_rng(0)
    gaps, values = Gaps(), []
    for _ in range(60):
        some = rng.integers(10**6, 10**10, 9000)
        first, growth, steps, times = (int(n) for n in rng.integers(1, [10**9, 10**6, 50, 30]))
        gaps.add(some)
        gaps.add_run(first, growth, steps, times)
        values += [some, np.repeat(first + growth * np.arange(steps), times)]
    at = [0, 10, 50, 90, 99, 100]
    expected = np.percentile(np.concatenate(values), at, method="inverted_cdf") / SECOND
    assert gaps.percentiles(at) == pytest.approx(expected, rel=2e-3)
    assert np.isnan(Gaps().percentiles(at)).all()


# ---- prefixes ------------------------------------------------------------------------------------------------------


def conversations(n, seed=0, size=64):
    """Requests that go on where others were: each takes a known prefix and adds pieces of its own."""
    rng = random.Random(seed)
    talks, keys, requests, fresh = [()], [], [], iter(range(10**9))
    for _ in range(n):
        start = rng.choice(talks[-60:]) if rng.random() < 0.8 else ()
        own = start + tuple(next(fresh) for _ in range(rng.randint(1, 6)))
        talks.append(own)
        keys.append(own)
        requests.append((10.0 * len(requests), len(own) * size - rng.randint(0, size - 1), rng.randint(1, 9)))
    return trace_of(*requests, keys=keys, key_tokens=size)


def lru_hit_rate(trace, capacity, order=None):
    """Tokens that a cache of so many blocks would have, if each request came when the one before it had ended."""
    cache, hit = OrderedDict(), 0
    for i in range(len(trace)) if order is None else order:
        prompt = int(trace.prompt[i])
        full = trace.keys[i][: prompt // trace.key_tokens]
        known = 0
        while known < len(full) and full[known] in cache:
            known += 1
        hit += min(known, (prompt - 1) // trace.key_tokens) * trace.key_tokens
        for key in reversed(full):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hit / int(trace.prompt.sum())


@pytest.mark.parametrize("blocks", [100, 200, 400, None])
@pytest.mark.parametrize("rows", [1, 8])
def test_prefixes_are_found_as_an_lru_of_the_same_size_finds_them(blocks, rows):
    trace = conversations(800)
    run = simulate(trace, Setup(max_num_seqs=rows, num_blocks=blocks, max_model_len=8192), StepTime(), Fcfs)
    expected = lru_hit_rate(trace, blocks or 10**9)
    assert 0.1 < expected < 0.9 and abs(run.summary()["hit_rate"] - expected) < 0.01
