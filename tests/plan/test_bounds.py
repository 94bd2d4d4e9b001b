"""What policies promise in numbers: how far tenants can be apart, and when a request starts at the latest."""

import random
from collections import Counter
from itertools import combinations, count

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hibachi.engine.scheduler.policy import Fair, Fcfs, Priority, WaitingServed
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Limits

from ..lib.leaks import kept

QUIET = dict(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
LARGEST = 40


class Town:
    """A scheduler without a device. Requests end early when `rng` says so."""

    def __init__(self, limits, policy, rng, early=0.1):
        self.scheduler, self.policy, self.rng, self.early = Scheduler(limits, policy), policy, rng, early
        self.now, self.steps = 0.0, 0
        self.waiting, self.served = set(), Counter()
        self.latest = {}  # the step by which it must have started
        self.late = self.bounded = 0

    def add(self, **terms):
        prompt = self.rng.randint(1, LARGEST - 2)
        seq = Seq(prompt, self.rng.randint(1, LARGEST - prompt), **terms)
        self.scheduler.add(seq, self.now)
        self.waiting.add(seq)
        return seq

    def step(self):
        """One step; then whoever waits is asked by when it starts."""
        s = self.scheduler
        self.now += 1
        plan = s.schedule(self.now)
        if plan is not None:
            self.steps += 1
            for seq in plan.fresh:
                self.waiting.discard(seq)
                if seq in self.latest:
                    assert self.steps <= self.latest.pop(seq), "it started too late"
            for seq, q in zip(plan.seqs, plan.q.tolist(), strict=True):
                self.served[seq.tenant] += q
            emitting = int(np.count_nonzero(plan.emit))
            s.commit(plan, np.array([self.rng.random() < self.early for _ in range(emitting)], bool))
            for seq, _ in plan.preempted:
                self.waiting.add(seq)
        else:
            assert not s.waiting and not s.running, "work waits, and nothing moves"
        s.check()
        return plan is not None

    def ask(self):
        """Some of those who wait: until when must they have started?"""
        some = self.rng.sample(sorted(self.waiting, key=lambda seq: seq.number), min(len(self.waiting), 3))
        for seq in some:
            if self.policy.settled(seq) <= self.now and (within := self.scheduler.starts_within(seq)) is not None:
                self.bounded += seq not in self.latest
                latest = self.steps + within
                self.latest[seq] = min(self.latest.get(seq, latest), latest)


def limits_of(rng):
    rows = rng.randint(1, 6)
    budget = max(rows, rng.choice((4, 16, 64)))
    least = -(-LARGEST // 4) + 1
    blocks = rng.choice((least, least + 5, 4 * least))
    prefill = rng.choice((None, None, 4))
    return Limits(rows, budget, rng.choice((2, 8, budget)), LARGEST, blocks, 4, prefill=prefill)


# ---- a waiting request starts in time ----------------------------------------------------------------------------

BOUNDED = {
    "Fcfs": Fcfs,
    "Priority": lambda: Priority(age=8.0),
    "Fair": lambda: Fair({"x": 2.0, "y": 0.25}, largest=LARGEST),
    "WaitingServed": lambda: WaitingServed(1.2, 20),
    "WaitingServed patient": lambda: WaitingServed(50.0, 30, Priority(age=3.0)),
    "WaitingServed Fair": lambda: WaitingServed(2.0, 10, Fair(largest=LARGEST)),
}


def run(policy, seeds):
    """Runs towns, in which a request that starts too late is an error; returns how many were given a bound."""
    bounded = 0
    for seed in seeds:
        rng = random.Random(seed)
        town = Town(limits_of(rng), policy(), rng, rng.choice((0.0, 0.1, 0.5)))
        names = count()
        rate = rng.choice((0.1, 0.3, 1.0))
        for _ in range(100):
            if rng.random() < rate and len(town.waiting) < 30:
                # Among them are tenants that nobody has seen before, and better classes.
                town.add(priority=rng.choice((0, 0, 0, 1, 2)), tenant=rng.choice(("x", "y", f"new {next(names)}")))
            town.step()
            town.ask()
        while town.step():
            town.ask()
        assert not town.waiting
        bounded += town.bounded
    return bounded


@pytest.mark.parametrize("policy", BOUNDED.values(), ids=BOUNDED.keys())
def test_a_waiting_request_starts_within_the_steps_that_its_policy_says(policy):
    assert run(policy, range(6)) > 50


@pytest.mark.slow
@pytest.mark.parametrize("policy", BOUNDED.values(), ids=BOUNDED.keys())
def test_a_waiting_request_starts_within_the_steps_that_its_policy_says_many_times(policy):
    assert run(policy, range(100, 300)) > 2000


def test_ageing_says_from_when_on_nobody_comes_before():
    policy = Priority(age=10.0)
    s = Scheduler(Limits(1, 8, 8, 50), policy)
    low = Seq(4, 4, priority=3)
    s.add(low, 7.0)
    assert policy.settled(low) == 37.0
    before, after = Seq(4, 4), Seq(4, 4)
    s.add(before, 36.9)
    s.add(after, 37.1)
    assert before.rank < low.rank < after.rank


def test_nobody_starves_with_ageing():
    """A stream of better requests that never ends; without ageing the worse one would wait for ever."""
    started = {}
    for age in (None, 5.0):
        rng = random.Random(0)
        town = Town(Limits(1, 64, 64, LARGEST), Priority(age), rng, early=0.0)
        low = town.add(priority=2)
        for step in range(2000):
            if town.scheduler.waiting < 5:
                town.add(priority=0)
            town.step()
            if low not in town.waiting:
                started[age] = step
                break
    assert None not in started
    assert started[5.0] < 10 * LARGEST


# ---- tenants -----------------------------------------------------------------------------------------------------


def apart(town, policy, weights):
    """Of tenants that wait in one class: (how far their counters are apart, what is allowed)."""
    worst = []
    for priority in {seq.priority for seq in town.waiting}:
        waiting = {seq.tenant for seq in town.waiting if seq.priority == priority}
        for a, b in combinations(waiting, 2):
            share = min(weights.get(t, 1.0) for t in waiting)
            worst.append((abs(policy.used(a, priority) - policy.used(b, priority)), 2 * policy.largest / share))
    return worst


@settings(max_examples=25, **QUIET)
@given(
    seed=st.integers(0, 2**32),
    tenants=st.integers(2, 5),
    weights=st.dictionaries(st.sampled_from("01234"), st.sampled_from([0.25, 0.5, 2.0, 3.0])),
    early=st.sampled_from([0.0, 0.05, 0.3, 0.9]),
    classes=st.integers(1, 2),
)
def test_tenants_that_wait_are_within_two_largest_requests(seed, tenants, weights, early, classes):
    """As charged, at any time, whatever the number of rows. Tenants come and go, ends are early, weights differ."""
    rng = random.Random(seed)
    policy = Fair(weights)
    town = Town(limits_of(rng), policy, rng, early)
    backlogged = [str(i) for i in range(tenants)]
    seen = False
    for step in range(100):
        for tenant in backlogged:
            if rng.random() < (0.5 if step % 50 < 25 else 0.02):
                town.add(tenant=tenant, priority=rng.randrange(classes))
        if rng.random() < 0.05 and town.waiting:
            seq = rng.choice(sorted(town.waiting, key=lambda s: s.number))
            town.scheduler.cancel(seq)
            town.waiting.discard(seq)
        town.step()
        for distance, allowed in apart(town, policy, weights):
            seen = True
            assert distance <= allowed + 1e-6
    while town.step():
        pass
    assert seen and policy.peek() is None
    assert kept(policy) == kept(Fair(weights)), "a counter leaks"


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("early", [0.0, 0.2])
def test_two_backlogged_tenants_are_served_alike(rows, early):
    """What was really computed: apart by at most what the rows hold and what the counters allow."""
    rng = random.Random(rows)
    policy = Fair()
    town = Town(Limits(rows, 64, 64, LARGEST), policy, rng, early)
    worst = 0
    for _ in range(3000):
        for tenant in "ab":
            while len([s for s in town.waiting if s.tenant == tenant]) < 4:
                town.add(tenant=tenant)
        town.step()
        worst = max(worst, abs(town.served["a"] - town.served["b"]))
    assert min(town.served.values()) > 1000
    assert worst <= (2 + rows) * LARGEST


def test_a_flood_of_new_tenants_does_not_starve_who_waits():
    town = Town(Limits(1, 64, 64, LARGEST), Fair(), random.Random(2), early=0.0)
    town.add(tenant="old")
    waiting = town.add(tenant="old")
    for n in range(10):
        town.add(tenant=f"new {n}")
    for n in count(10):
        town.step()
        if waiting not in town.waiting:
            break
        town.add(tenant=f"new {n}")
        assert n < 12 * LARGEST, "it starves"


def test_early_ends_save_up_no_turns():
    """One tenant alone ends thirty-two requests early: who comes then starts at once, and is not far ahead either."""
    policy = Fair()
    s = Scheduler(Limits(16, 64, 64, 1000), policy)
    for _ in range(100):
        s.add(Seq(1, 900, tenant="early"))
    for _ in range(2):
        plan = s.schedule()
        s.commit(plan, np.ones(len(plan.rows), bool))
    late = [Seq(1, 900, tenant="late") for _ in range(100)]
    for seq in late:
        s.add(seq)
    plan = s.schedule()
    assert 7 <= sum(seq.tenant == "late" for seq in plan.fresh) <= 9
    assert abs(policy.used("early") - policy.used("late")) <= 2 * policy.largest


# ---- preempted work ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Fcfs, Priority, Fair, WaitingServed])
def test_preempted_work_is_resumed_before_new_work_of_its_class(policy):
    s = Scheduler(Limits(3, 64, 64, 60, 9, 4), policy())
    seqs = [Seq(10, 20, owner=name, tenant=name) for name in "abcde"]
    started, preempted, resumed = [], set(), 0
    for seq in seqs:
        s.add(seq)
    while (plan := s.schedule()) is not None:
        for seq in plan.fresh:
            new = seq not in started
            assert not (new and preempted), "new work came first"
            resumed += not new
            preempted.discard(seq)
            started.append(seq)
        preempted |= {seq for seq, _ in plan.preempted}
        s.commit(plan, np.zeros(int(plan.emit.sum()), bool))
    assert resumed and len(set(started)) == 5


def test_who_started_first_is_preempted_last():
    """Also where it came later, as its tenant had fewer tokens: else each that starts could push it out again."""
    s = Scheduler(Limits(2, 64, 64, 60, 9, 4), Fair())
    _, old, few = seqs = [Seq(12, 2, tenant="many"), Seq(8, 20, tenant="many"), Seq(8, 20, tenant="few")]
    for seq in seqs:
        s.add(seq)
    started, preempted = [], set()
    while (plan := s.schedule()) is not None:
        started += plan.fresh
        preempted |= {seq for seq, _ in plan.preempted}
        s.commit(plan, np.zeros(int(plan.emit.sum()), bool))
    assert started[1:3] == [few, old]
    assert preempted == {old}
