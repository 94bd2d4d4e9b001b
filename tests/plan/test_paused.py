"""Sequences that wait for their readers: skipped, and in nobody's way for good."""

import random

import numpy as np
import pytest

from hibachi.engine.scheduler.policy import Fcfs, WaitingServed
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Limits
from hibachi.request import Finish


def step(s):
    """A step as the engine does it; returns the sequences that got a token."""
    s.make_room()
    plan = s.schedule()
    s.check()
    if plan is None:
        return []
    s.commit(plan, np.zeros(int(plan.emit.sum()), bool))
    s.check()
    return [seq for seq, emits in zip(plan.seqs, plan.emit.tolist(), strict=True) if emits]


def test_a_paused_row_is_skipped_and_goes_on_in_its_row():
    s = Scheduler(Limits(2, 64, 64, 64))
    a, b = Seq(4, 8), Seq(4, 8)
    s.add(a)
    s.add(b)
    step(s)
    row = a.row
    s.pause(a)
    assert [step(s) for _ in range(2)] == [[b]] * 2
    s.unpause(a)
    assert step(s) == [a, b] and a.row == row and not s.counts.preemptions


def test_its_blocks_go_to_one_that_waits_for_them_while_others_go_on():
    """Rows are free, blocks are not: 8 of 4 positions, 4 of them held by the paused one and 2 by another."""
    s = Scheduler(Limits(4, 64, 64, 64, 9, 4))
    a, b, c = Seq(13, 8), Seq(4, 8), Seq(12, 4)
    s.add(a)
    s.add(b)
    step(s)
    s.pause(a)
    s.add(c)
    assert c in step(s) + step(s) and a.row < 0 <= b.row
    s.unpause(a)
    while s.running or s.waiting:
        step(s)
    assert {seq.finish for seq in (a, b, c)} == {Finish.LENGTH}


@pytest.mark.parametrize("policy", [Fcfs, lambda: WaitingServed(ratio=10, patience=10**6)], ids=["fcfs", "waves"])
@pytest.mark.parametrize("reserve_all", [False, True])
@pytest.mark.parametrize("blocks", [0, 9, 14])
def test_readers_in_any_order_get_everything(blocks, reserve_all, policy):
    """Streams with a bound, read one after the other in an order that has nothing to do with the queue's.

    Those whose reader has not come yet hold rows and blocks, while the reader waits for one who has none.
    """
    for trial in range(20):
        rng = random.Random(trial)
        limits = Limits(rng.randint(1, 3), rng.choice([4, 64]), 64, 32, blocks, 4, reserve_all=reserve_all)
        s, bound = Scheduler(limits, policy()), rng.randint(1, 5)
        seqs = [Seq(rng.randint(1, 12), rng.randint(1, 20)) for _ in range(8)]
        for seq in seqs:
            s.add(seq)
        unread = dict.fromkeys(seqs, 0)
        for reader in rng.sample(seqs, len(seqs)):
            idle = 0
            while reader.finish is None or unread[reader]:
                came = step(s)
                for seq in came:
                    unread[seq] += 1
                    if unread[seq] >= bound:
                        s.pause(seq)
                if unread[reader]:
                    unread[reader] -= 1
                    if unread[reader] <= bound // 2:
                        s.unpause(reader)
                    idle = 0
                idle = 0 if came else idle + 1
                assert idle < 10, "nobody gets on"
            assert reader.finish is Finish.LENGTH
        assert not s.running and not s.waiting
