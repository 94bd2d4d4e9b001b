"""Proposals in a plan: how many rows compute, and that nobody else gets less for them."""

import numpy as np

from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Limits
from hibachi.engine.scheduler.stretch import look_ahead

from .world import Request, World, following


def decoding(limits, *requests):
    """A scheduler, and its requests (prompt, new tokens), which have one token each."""
    scheduler = Scheduler(limits)
    seqs = [Seq(prompt, new, owner=i) for i, (prompt, new) in enumerate(requests)]
    for seq in seqs:
        scheduler.add(seq)
    step(scheduler)
    return scheduler, seqs


def step(scheduler, counts=None):
    """One step; counts: tokens that each row gets."""
    plan = scheduler.schedule()
    scheduler.commit(plan, np.zeros(int(plan.emit.sum()), bool), None if counts is None else np.array(counts, np.int32))
    return plan


def test_proposals_get_what_is_left_of_the_budget_in_the_order_of_service():
    scheduler, seqs = decoding(Limits(3, 9, 9, 100), (2, 50), (2, 50), (2, 50))
    for seq in seqs:
        seq.draft = 4
    assert scheduler.schedule().draft.tolist() == [4, 2, 0]
    assert [seq.draft for seq in seqs] == [0, 0, 0]


def test_prompts_come_first():
    scheduler, (seq,) = decoding(Limits(2, 12, 12, 100), (2, 50))
    scheduler.add(Seq(8, 5))
    seq.draft = 5
    plan = scheduler.schedule()
    assert plan.q.tolist() == [1, 8] and plan.draft.tolist() == [3, 0]


def test_the_last_token_is_never_proposed():
    """It would not be fed back, so nothing could be drawn behind it."""
    scheduler, (seq,) = decoding(Limits(1, 64, 64, 100), (2, 4))
    seq.draft = 4
    plan = scheduler.schedule()
    assert plan.draft.tolist() == [2]
    [ended] = scheduler.commit(plan, np.zeros(1, bool), np.array([3], np.int32)).finished
    assert ended is seq


def test_who_waits_gets_the_blocks():
    """The first row may use the block that it has; the empty ones are for the request that waits for a row."""
    for waits, draft in ((False, [5, 0]), (True, [3, 0])):
        scheduler, (seq, _) = decoding(Limits(2, 64, 64, 100, blocks=12, block_size=4), (4, 30), (4, 30))
        if waits:
            scheduler.add(Seq(4, 30))
        seq.draft = 5
        assert scheduler.schedule().draft.tolist() == draft


def test_a_step_with_proposals_that_did_not_happen():
    scheduler, (seq,) = decoding(Limits(1, 64, 64, 100, blocks=20, block_size=4), (4, 30))
    seq.draft = 9
    scheduler.rollback(scheduler.schedule())
    assert scheduler.table.computed[seq.row] == 4 and scheduler.known(seq) == 5
    assert step(scheduler).draft is None
    scheduler.check()


def test_proposals_are_for_one_step_also_where_it_computes_nothing_of_their_row():
    scheduler, (seq, other) = decoding(Limits(2, 64, 64, 100), (4, 30), (4, 30))
    for paused in ([seq], [seq, other]):
        for one in paused:
            scheduler.pause(one)
        seq.draft = 3
        plan = scheduler.schedule()
        assert plan is None if other.paused else plan.draft is None
        assert not seq.draft
        for one in paused:
            scheduler.unpause(one)
        if plan is not None:
            scheduler.rollback(plan)


def test_a_row_with_proposals_ends_a_stretch():
    scheduler, (seq, _) = decoding(Limits(2, 64, 64, 100), (4, 30), (4, 30))
    assert look_ahead(scheduler).steps == 29
    seq.draft = 2
    assert look_ahead(scheduler) is None
    step(scheduler, [3, 1])
    assert look_ahead(scheduler).steps == 26


def test_what_a_step_after_proposals_spoilt_is_not_found():
    world = World(Limits(2, 64, 64, 40, 20, 4))
    request = Request(0, [1] * 5, 9)
    world.add(request)
    world.launch()
    world.commit()
    request.guess = [following([1] * 5 + request.got)]
    request.seq.draft = 1
    world.launch()
    world.commit()
    assert len(request.got) == 3
    world.poison.add(0)
    world.launch()  # it fills the second block
    assert request.seq.published == 2
    world.commit()
    assert request.ends == ["error"]
    again = Request(1, [1] * 5 + request.got + [2], 2)
    world.add(again)
    world.launch()
    assert again.seq.reused == 4
