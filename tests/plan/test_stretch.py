"""A stretch leaves behind what the same number of single steps would."""

import random

import numpy as np
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from hibachi.engine.scheduler.policy import Fair, Fcfs, Priority, WaitingServed
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Limits
from hibachi.engine.scheduler.stretch import look_ahead

POLICIES = [Fcfs, lambda: Priority(age=3.0), Fair, WaitingServed]


def state(scheduler):
    """All of a scheduler that decides what it does next, with sequences by their owner."""
    out = {name: values.tolist() for name, values in vars(scheduler.table).items()}
    out["block_table"] = scheduler.block_table.tolist()
    out |= {name: getattr(scheduler, name) for name in ("steps", "waiting", "counts", "budget")}
    out["running"] = [(s.owner, s.row, s.blocks, s.published, s.node) for s in scheduler.order if s.row >= 0]
    out["rows"] = scheduler.free_rows
    head = scheduler.policy.peek()
    out["head"] = head and head.owner
    if scheduler.pool:
        pool = scheduler.pool
        out["pool"] = pool.empty, pool.idle, pool.evictions, [pool.is_idle(block) for block in range(1, pool.total)]
    return out


def step(scheduler, now, luck=0):
    """luck: decides how many proposals are right."""
    plan = scheduler.schedule(now)
    if plan is None:
        return None, []
    counts = None
    if plan.draft is not None:
        counts = 1 + np.random.default_rng(luck).integers(0, plan.draft[plan.emit] + 1).astype(np.int32)
    return plan, scheduler.commit(plan, np.zeros(int(plan.emit.sum()), bool), counts).finished


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(POLICIES),
    rows=st.integers(1, 6),
    blocks=st.sampled_from([0, 9, 20, 60]),
    size=st.sampled_from([2, 4]),
    budget=st.sampled_from([6, 16]),
    reserve=st.booleans(),
    rate=st.floats(0.05, 1.0),
    shared=st.booleans(),
    proposals=st.sampled_from([0.0, 0.3]),
)
def test_it_is_what_single_steps_come_to(seed, policy, rows, blocks, size, budget, reserve, rate, shared, proposals):
    rng = random.Random(seed)
    limits = Limits(rows, budget, budget, max_model_len=16 * size, blocks=blocks, block_size=size, reserve_all=reserve)
    one, many = Scheduler(limits, policy()), Scheduler(limits, policy())
    now, stretched = 0.0, 0
    for name in range(25):
        while rng.random() > rate and one.waiting + one.running:
            luck, propose = rng.random(), proposals and rng.random() < proposals
            if propose:  # to the same rows, the same number
                for scheduler in (one, many):
                    for seq in scheduler.order:
                        seq.draft = int(8 * luck) * (seq.row >= 0) if seq.row % 2 else 0
            stretch = look_ahead(many)
            assert stretch is None or not any(seq.draft for seq in many.order)
            if stretch is None:
                lucky = int(1e6 * luck)
                (plan, ended), (plan2, ended2) = step(one, now, lucky), step(many, now, lucky)
                assert (plan is None) == (plan2 is None)
                assert [s.owner for s in ended] == [s.owner for s in ended2]
                now += 1
            else:
                steps = rng.randint(1, stretch.steps)
                assert stretch.positions == int((one.table.computed[stretch.rows] + 1).sum())
                ended = []
                for _ in range(steps):
                    assert not ended, "it goes on after somebody has left"
                    plan, ended = step(one, now)
                    now += 1
                    assert plan.rows.tolist() == stretch.rows.tolist() and plan.q.tolist() == [1] * len(plan.rows)
                    assert plan.emit.all() and not plan.fresh and not plan.preempted and not plan.published
                assert [s.owner for s in stretch.run(steps)] == [s.owner for s in ended]
                stretched += steps
            assert state(one) == state(many)
            many.check()
        longest = limits.max_model_len if not blocks else min(limits.max_model_len, (blocks - 1) * size)
        prompt = rng.randint(1, longest - 1)
        known = rng.randint(0, longest // size)
        keys = [(i, rng.randint(0, 1)) for i in range(known)] if shared and rng.random() < 0.8 else None
        new, priority, tenant = rng.randint(1, longest - prompt), rng.randint(0, 2), rng.choice("ab")
        for scheduler in (one, many):
            own = None if keys is None else list(keys)
            seq = Seq(prompt, new, owner=name, priority=priority, tenant=tenant, keys=own)
            scheduler.add(seq, now)
    event("with stretches" if stretched > 5 else "without")


def decoding(limits, requests, policy=None):
    """A scheduler in which all requests (prompt, new tokens) that have a row decode."""
    scheduler = Scheduler(limits, policy)
    for prompt, new in requests:
        scheduler.add(Seq(prompt, new))
    step(scheduler, 0.0)
    return scheduler


def test_it_ends_before_blocks_run_short():
    scheduler = decoding(Limits(2, 64, 64, 100, blocks=7, block_size=4), [(8, 16), (8, 16)])
    stretch = look_ahead(scheduler)
    assert stretch.steps == 4  # each gets one of the two free blocks, for four positions more
    stretch.run(4)
    assert look_ahead(scheduler) is None
    plan, _ = step(scheduler, 0.0)
    assert len(plan.preempted) == 1


def test_a_gate_is_asked_when_it_opens():
    scheduler = decoding(Limits(4, 64, 64, 1000), [(4, 900), (4, 900)], WaitingServed(ratio=5, patience=20))
    scheduler.add(Seq(4, 9))
    before = look_ahead(scheduler).steps
    assert 15 <= before <= 20
    look_ahead(scheduler).run(before)
    assert look_ahead(scheduler) is None
    plan, _ = step(scheduler, 0.0)
    assert len(plan.fresh) == 1
