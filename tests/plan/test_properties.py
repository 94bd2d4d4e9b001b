"""Whatever comes in whatever order: every stream equals its solo run, nobody overtakes, and nothing is lost.

The world and all that is asserted after each call are in `world.py`.
"""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hibachi.engine.scheduler.step import Limits
from hibachi.request import Finish

from .world import POLICIES, Request, World, drive, random_request, random_world

QUIET = dict(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def names(policy):
    return type(policy()).__name__ + str(POLICIES.index(policy))


@pytest.mark.parametrize("policy", POLICIES, ids=names)
@settings(max_examples=40, **QUIET)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 16), depth=st.integers(1, 3), unlucky=st.booleans())
def test_every_stream_equals_its_solo_run(policy, seed, n, depth, unlucky):
    rng = random.Random(seed)
    world = random_world(rng, depth=depth, policy=policy())
    drive(world, [random_request(i, rng, world.limits) for i in range(n)], rng, unlucky=unlucky)


@settings(max_examples=80, **QUIET)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 16), unlucky=st.booleans())
def test_every_stream_equals_its_solo_run_whatever_is_proposed(seed, n, unlucky):
    rng = random.Random(seed)
    world = random_world(rng, proposals=random.Random(seed))
    drive(world, [random_request(i, rng, world.limits) for i in range(n)], rng, unlucky=unlucky)


@settings(max_examples=200, **QUIET)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 16), unlucky=st.booleans(), proposals=st.booleans())
def test_every_stream_equals_its_solo_run_whatever_callers_feed(seed, n, unlucky, proposals):
    rng = random.Random(seed)
    world = random_world(rng, copies=rng.random() < 0.3, proposals=random.Random(seed) if proposals else None)
    requests = [random_request(i, rng, world.limits) for i in range(n)]
    for request in requests:
        request.feeds = rng if rng.random() < 0.6 else None
    drive(world, requests, rng, unlucky=unlucky)


@settings(max_examples=200, **QUIET)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 16), unlucky=st.booleans())
def test_every_stream_equals_its_solo_run_where_prefixes_are_copied(seed, n, unlucky):
    rng = random.Random(seed)
    world = random_world(rng, copies=True)
    drive(world, [random_request(i, rng, world.limits) for i in range(n)], rng, unlucky=unlucky)


TOLD = Counter()


@settings(max_examples=400, **QUIET)
@given(
    seed=st.integers(0, 2**32), n=st.integers(1, 24), unlucky=st.booleans(), copies=st.booleans(), guess=st.booleans()
)
def test_every_stream_equals_its_solo_run_whatever_tiers_keep(seed, n, unlucky, copies, guess):
    rng = random.Random(seed)
    proposals = random.Random(seed) if guess else None
    world = random_world(rng, copies=copies, proposals=proposals, tier=random.Random(seed))
    TOLD.update(drive(world, [random_request(i, rng, world.limits) for i in range(n)], rng, unlucky=unlucky))


def test_and_tiers_were_used():
    assert TOLD["stored"] > 1000 and TOLD["loaded"] > 300, TOLD


def test_prefixes_are_copied_from_rows_and_taken_over_from_who_has_gone():
    world = World(Limits(3, 64, 64, 40, 20, 4, copies=True))

    def start(name):
        request = Request(name, [1] * 13 + [name], 6)
        world.add(request)
        return request

    first, second = start(0), start(1)
    world.tick()
    assert first.seq.row >= 0 > second.seq.row, "the second waits for what the first computes"
    world.commit()
    world.launch()
    assert second.seq.reused == 12 and not {*first.seq.blocks} & {*second.seq.blocks}
    assert world.tally["copied from a row"] == 3
    while world.tick():
        pass
    assert world.scheduler.pool.idle, "full blocks are kept"
    third = start(2)
    world.launch()
    assert third.seq.reused == 12 and world.tally["taken over"] == 3


def test_what_is_kept_of_who_left_is_told_once():
    world = World(Limits(2, 64, 64, 40, 20, 4, copies=True))
    request = Request(0, [1] * 13, 6)
    world.add(request)
    while world.tick():
        pass
    ((row, seq, kept),) = world.scheduler.copies.take_left()
    assert (row, seq, [n for n, _, _ in kept]) == (0, request.seq, [0, 1, 2, 3])
    assert all(world.scheduler.pool.keeps(block, node) for _, block, node in kept)
    assert not world.scheduler.copies.take_left()


def test_what_a_step_computes_is_not_copied_in_it():
    """A row that decodes fills a block in the step in which another with the same tokens starts."""
    world = World(Limits(2, 64, 64, 40, 20, 4, copies=True))
    first = Request(0, [1] * 7, 6)
    world.add(first)
    world.launch()
    world.commit()
    second = Request(1, [1] * 7 + [*first.got, 3], 2)
    world.add(second)
    world.launch()
    assert first.seq.published == 2 and second.seq.reused == 4


def test_nothing_of_who_failed_is_copied():
    world = World(Limits(2, 64, 64, 40, 20, 4, copies=True))
    request = Request(0, [1] * 19, 6, salt="a")
    world.add(request)
    world.launch()
    world.commit()
    request.guilty = True
    world.scheduler.fail(request.seq)
    world.ended(request, Finish.ERROR)
    assert found(world) == 0


@pytest.mark.slow
@settings(max_examples=6000, **QUIET)
@given(seed=st.integers(0, 2**32), strict=st.booleans())
def test_every_stream_equals_its_solo_run_many_times(seed, strict):
    rng = random.Random(seed)
    world = random_world(rng, strict=strict, proposals=random.Random(seed) if seed % 2 else None)
    requests = [random_request(i, rng, world.limits) for i in range(rng.randint(1, 20))]
    drive(world, requests, rng, unlucky=rng.random() < 0.8, arrive=rng.choice((0.1, 0.5, 0.9)))


# ---- what random orders seldom hit -------------------------------------------------------------------------------


def chunked():
    """A prompt of four full blocks in chunks of two blocks; its first chunk is committed."""
    world = World(Limits(2, 64, 8, 40, 20, 4))
    request = Request(0, [1] * 19, 4, salt="a")
    world.add(request)
    world.launch()
    world.commit()
    return world, request


def found(world):
    """What the same prompt finds computed now."""
    again = Request(1, [1] * 19, 4, salt="a")
    world.add(again)
    world.launch()
    return again.seq.reused


def test_what_a_failed_prompt_computed_is_not_found():
    """Whatever made its output not finite may be in any of its chunks."""
    world, request = chunked()
    assert request.seq.published == 2
    request.guilty = True
    world.scheduler.fail(request.seq)
    world.ended(request, Finish.ERROR)
    assert found(world) == 0


def test_what_nobody_heard_of_is_not_found():
    """It was cancelled while a step computed it: had that gone wrong, nobody would have asked."""
    world, request = chunked()
    world.launch()
    assert request.seq.published == 4
    world.cancel(request)
    world.commit()
    assert found(world) == 8, "the first chunk was heard of"
