"""Several simulated engines behind the router: as one engine where there is one, and as single steps where there are
several."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from hibachi.cli.simrouter import SimRouter, router_of
from hibachi.engine.scheduler.policy import Fair, Fcfs
from hibachi.engine.simulator.guesses import Guesses
from hibachi.engine.simulator.simulate import Setup, simulate
from hibachi.engine.simulator.steptime import StepTime
from hibachi.engine.simulator.trace import synthetic
from hibachi.errors import InvalidTrace
from hibachi.router.affine import PrefixAffine
from hibachi.router.policies import LeastConnection

from .test_replay import PLAIN, SECOND, conversations, trace_of

TIME = StepTime(step=0.01, token=1e-4, row=1e-5, position=1e-7, pair=1e-9)
TRACE = synthetic(250, rate=12, bursts=3, prompt=200, output=60, longest=1000, prefixes=20, shared=0.9, seed=3)
SMALL = {"num_blocks": 60, "block_size": 64, "max_num_seqs": 6, "max_num_batched_tokens": 256}


def left(run):
    """All that a replay leaves behind, but for who was idle when."""
    outcome, edges = run.outcome, np.linspace(0, run.outcome.clock, 20)
    outcome.gaps.fold()
    counts = ("clock", "steps", "new_tokens", "computed_tokens", "hit_tokens", "evictions", "preemptions", "refused")
    times = [getattr(outcome, what).tolist() for what in ("started", "first", "last")]
    means = [np.round(outcome.timeline.means(what, edges), 9).tolist() for what in ("waiting", "running")]
    return [getattr(outcome, what) for what in counts], times, outcome.gaps.counts.tolist(), means


class Noted(SimRouter):
    """Notes what was asked and told."""

    def __init__(self, *args):
        super().__init__(*args)
        self.told = []

    def place(self, i, now):
        engine = super().place(i, now)
        self.told.append((now, "placed", i, engine))
        return engine

    def emitted(self, engine, seconds):
        super().emitted(engine, seconds)
        self.told.append(("emitted", engine, seconds))

    def ended(self, engine):
        super().ended(engine)
        self.told.append(("ended", engine))


@pytest.mark.parametrize("policy", [Fcfs, Fair])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"max_num_queued_reqs": 9},
        {"guesses": Guesses(3, 0.7, 0.3)},
        {"kv_host_blocks": 40, "kv_disk_blocks": 90, "kv_disk_load": 1e-6},
    ],
    ids=["plain", "refusals", "guesses", "tiers"],
)
def test_one_engine_behind_a_router_is_one_engine(policy, more):
    trace = TRACE.faster(0.4)
    alone = simulate(trace, Setup(**SMALL, **more), TIME, policy)
    setup = Setup(**SMALL, **more, replicas=1, max_connections=1000)
    for fast in (True, False):
        assert left(simulate(trace, setup, TIME, policy, fast=fast, router=router_of(setup, trace))) == left(alone)
    assert alone.outcome.hit_tokens and (alone.outcome.refused != {}) == ("max_num_queued_reqs" in more)
    assert (alone.outcome.loads > 0 and alone.outcome.disk_loads > 0) == ("kv_disk_blocks" in more)


@pytest.mark.parametrize("policy", [LeastConnection, PrefixAffine])
@pytest.mark.parametrize("limit", [4, 64])
def test_what_is_looked_ahead_is_what_comes(policy, limit):
    """Step by step or not, the router sees the same at each request: who has how many, and who answers how quickly."""
    found = []
    for fast in (True, False):
        router = Noted(TRACE, policy(), 3, limit)
        run = simulate(TRACE, Setup(**SMALL, replicas=3), TIME, Fcfs, fast=fast, router=router)
        found.append((left(run), router.told, [u.in_flight for u in router.upstreams]))
        assert run.done.all() and run.summary()["most_waiting"] > 0
    assert found[0] == found[1] and found[0][2] == [0, 0, 0]
    placed = [told for told in found[0][1] if told[1] == "placed"]
    assert [i for *_, i, engine in placed if engine is not None] == list(range(250))  # first come, first served
    assert any(engine is None for *_, engine in placed) is (limit == 4)
    assert min(Counter(engine for *_, engine in placed).values()) > 40
    again = PrefixAffine() if policy is PrefixAffine else LeastConnection()
    shadow = Noted(TRACE, again, 3, limit)  # told the same, a router of its own says the same
    for what in found[0][1]:
        if what[1] == "placed":
            assert shadow.place(what[2], what[0]) == what[3]
        else:
            getattr(shadow, what[0])(*what[1:])


def test_times_of_two_engines_by_hand():
    """Each step takes a second. The third request waits in the router's line for a slot, the fourth is alone."""
    trace = trace_of((0, 4, 4), (0.5, 4, 2), (1, 4, 2), (30, 4, 1))
    setup = Setup(replicas=2, max_connections=1)
    run = simulate(trace, setup, PLAIN, Fcfs, router=router_of(setup, trace))
    assert run.times("started").tolist() == [0, 0, 1.5, 0]
    assert run.times("last").tolist() == [4, 2, 3.5, 1]
    figures = run.summary()
    assert run.outcome.clock == 31 * SECOND and figures["most_waiting"] == 1
    assert figures["mean_rows"] == pytest.approx(9 / 31) and figures["mean_waiting"] == pytest.approx(1.5 / 31)


def test_engines_that_let_nobody_in():
    class Closed(Fcfs):
        def opens(self, waiting, running, step):
            return False

    setup, trace = Setup(replicas=2), trace_of((0, 4, 4), (1, 4, 4))
    with pytest.raises(InvalidTrace, match="the policy lets none of 1 waiting requests in while 0 run"):
        simulate(trace, setup, PLAIN, Closed, router=router_of(setup, trace))


def test_copies_of_a_trace_share_nothing():
    """As from other people: as much is found as in one, in the caches and by the router."""
    once = replace(conversations(60), arrival=100 * np.arange(60) * SECOND)
    thrice, engine = once.copies(3, seed=1), Setup(num_blocks=4000, max_model_len=8192)
    one, three = (simulate(trace, engine, TIME, Fcfs).outcome.hit_tokens for trace in (once, thrice))
    assert one > 0 and three == 3 * one and np.array_equal(np.sort(thrice.arrival), thrice.arrival)
    router, firsts = router_of(Setup(replicas=2), thrice), [set(), set(), set()]
    for i, group in enumerate(thrice.group.tolist()):
        firsts[group] |= {router.ask(i).pieces[:1]} - {()}
    assert len(firsts[0]) == len(firsts[1]) > 3 and not firsts[0] & firsts[1]
