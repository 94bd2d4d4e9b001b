"""Tenants that share rows: who comes gets its share at once, and nobody's first request is sent back for it."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hibachi.engine.scheduler.policy import Fair, Shares
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq, linked
from hibachi.engine.scheduler.step import Limits

from ..lib.leaks import kept
from .test_bounds import LARGEST, QUIET, Town, limits_of


class House:
    """A scheduler of `rows` rows, in which each step brings a token to whoever runs."""

    def __init__(self, rows=8, weights=None, policy=Shares, **limits):
        self.policy = policy(weights)
        self.scheduler = Scheduler(
            Limits(rows, **({"budget": 64, "chunk": 64, "max_model_len": 200} | limits)), self.policy
        )

    def add(self, tenant, n=1, prompt=2, new=100, **terms):
        seqs = [Seq(prompt, new, tenant=tenant, **terms) for _ in range(n)]
        for seq in seqs:
            self.scheduler.add(seq)
        return seqs

    def link(self, tenant, n, *, parts, **terms):
        """Sequences of one prompt. Not parts: they draw together to the end, as beams do."""
        seqs = [Seq(2, 100, tenant=tenant, **terms) for _ in range(n)]
        self.scheduler.add(linked(seqs, alike=True, parts=parts))
        return seqs

    def step(self):
        """Who was sent back before the step, and its plan."""
        sent = [seq for seq, _ in self.scheduler.make_room()]
        plan = self.scheduler.schedule()
        forks = [(seq, seq.link.seqs[0]) for seq in plan.seqs if seq.vacant]
        self.scheduler.commit(plan, np.zeros(int(plan.emit.sum()), bool), None, forks)
        self.scheduler.check()
        return sent, plan

    @property
    def rows(self):
        return dict(Counter(seq.tenant for seq in self.scheduler.order if seq.row >= 0))


def test_who_comes_has_its_row_in_the_next_step():
    house = House()
    many = house.add("many", 30)
    house.step()
    assert house.rows == {"many": 8}
    house.add("few")
    sent, plan = house.step()
    assert sent == [many[7]] and [seq.tenant for seq in plan.fresh] == ["few"]
    assert house.rows == {"many": 7, "few": 1}


def test_both_hold_as_many_while_both_wait_and_no_more_change_hands():
    house = House()
    many = house.add("many", 30)
    house.step()
    house.add("few", 30)
    sent, plan = house.step()
    assert sent == [many[7], many[6], many[5], many[4]] and len(plan.fresh) == 4
    assert house.rows == {"many": 4, "few": 4}
    for _ in range(20):
        sent, plan = house.step()
        assert not sent and not plan.fresh


def test_samples_that_have_forked_give_rows_back_one_by_one():
    house = House()
    seqs = house.link("many", 8, parts=True)
    house.link("many", 8, parts=True)
    house.step()
    house.step()
    house.add("few")
    assert house.step()[0] == [seqs[7]] and house.rows == {"many": 7, "few": 1}
    house.add("few", 30)
    assert house.step()[0] == [seqs[6], seqs[5], seqs[4]] and house.rows == {"many": 4, "few": 4}
    seen = list[str]()
    while seqs[4].finish is None:
        sent, plan = house.step()
        assert not sent
        seen += [seq.tenant for seq in plan.fresh]
    assert set(seen) == {"few", "many"} and not any(seq.alone for seq in seqs[:4])


def test_what_draws_together_gives_rows_back_together():
    house = House()
    last = [house.link("many", 4, parts=False) for _ in range(2)][1]
    house.step()
    assert house.rows == {"many": 8}
    house.add("few")
    assert set(house.step()[0]) == set(last) and house.rows == {"many": 4, "few": 1}
    whole = House()
    whole.link("many", 8, parts=False)
    whole.step()
    whole.add("few")
    assert whole.step()[0] == [] and whole.rows == {"many": 8}, "the first of a tenant is never sent back"


def test_nobody_is_sent_back_for_linked_sequences_that_cannot_start_then():
    house = House()
    many = house.add("many", 30)
    house.step()
    house.link("few", 6, parts=True)
    assert house.step()[0] == [] and house.rows == {"many": 8}
    for seq in many[:4]:
        house.scheduler.cancel(seq)
    sent, plan = house.step()
    assert sent == [many[7], many[6]] and [seq.tenant for seq in plan.fresh] == ["few"] * 6
    assert house.rows == {"many": 2, "few": 6}, "and of those that would have started meanwhile none did"


def test_a_fair_turn_counts_the_tokens_of_all_that_are_linked():
    house, tokens = House(rows=4, policy=Fair, max_model_len=12), Counter()
    for _ in range(40):
        house.link("linked", 4, parts=True)
        house.add("single", 4)
    for _ in range(200):
        _, plan = house.step()
        tokens.update({tenant: n for tenant, n in Counter(seq.tenant for seq in plan.seqs).items()})
    assert 0.8 < tokens["linked"] / tokens["single"] < 1.25, tokens


def test_rows_that_are_not_wanted_are_everybodys():
    house = House()
    house.add("few", 2, new=5)
    house.add("many", 30)
    house.step()
    assert house.rows == {"few": 2, "many": 6}
    for _ in range(6):
        house.step()
    assert house.rows == {"many": 8}


def test_the_first_of_a_tenant_is_never_sent_back():
    house = House(rows=2)
    first, last = house.add("a", 2)
    house.step()
    house.add("b")
    assert house.step()[0] == [last]
    house.add("c")
    assert house.step()[0] == [] and first.row >= 0, "with more tenants than rows, they wait"


def test_who_was_sent_back_is_the_first_of_its_tenant_to_go_on():
    house = House(rows=2)
    seqs = house.add("a", 4)
    house.step()
    (other,) = house.add("b", new=3)
    house.step()
    while other.finish is None:
        house.step()
    _, plan = house.step()
    assert plan.fresh == [seqs[1]]


def test_a_worse_class_takes_no_rows_and_a_better_one_its_share():
    house = House()
    house.add("many", 30, priority=1)
    house.step()
    house.add("late", 5, priority=2)
    assert house.step()[0] == []
    house.add("early", 30, priority=0)
    house.step()
    assert house.rows == {"many": 4, "early": 4}


def test_blocks_are_shared_as_well():
    """A row is free, but one tenant's requests hold all blocks."""
    house = House(rows=8, budget=200, blocks=33, block_size=4, max_model_len=100)
    house.add("many", 4, prompt=32, new=2)
    house.step()
    assert house.scheduler.pool.free == 0 and house.rows == {"many": 4}
    house.add("few", prompt=8, new=2)
    house.step()  # which finds no blocks, as nobody has asked yet
    house.step()
    assert house.rows.get("few") == 1, house.rows


def test_chunks_are_shared_as_well():
    """A long prompt leaves another tenant its part of the step's tokens."""
    house = House(budget=16, chunk=16, max_model_len=200)
    house.add("many", 3, prompt=100)
    house.step()
    house.add("few", prompt=20)
    _, plan = house.step()
    assert [(seq.tenant, q) for seq, q in zip(plan.seqs, plan.q.tolist(), strict=True)] == [("many", 8), ("few", 8)]
    _, plan = house.step()
    assert {seq.tenant: q for seq, q in zip(plan.seqs, plan.q.tolist(), strict=True)} == {"many": 8, "few": 8}
    _, plan = house.step()
    assert {seq.tenant: q for seq, q in zip(plan.seqs, plan.q.tolist(), strict=True)} == {"many": 12, "few": 4}


def test_what_waits_is_paused_before_anybody_is_sent_back():
    house = House()
    many = house.add("many", 8)
    house.step()
    house.scheduler.pause(many[2])
    house.add("few")
    assert house.step()[0] == [many[2]]


def test_nothing_stays_of_a_tenant_that_is_gone():
    rng = random.Random(0)
    town = Town(limits_of(rng), policy := Shares(), rng)
    for i in range(200):
        if i < 100:
            town.add(tenant=f"tenant {i}", priority=i % 3)
        for seq in [s for s in town.waiting if s.number % 7 == 0]:
            town.scheduler.cancel(seq)
            town.waiting.discard(seq)
        town.scheduler.make_room()
        town.step()
    while town.step():
        pass
    assert policy.peek() is None and kept(policy) == kept(Shares())


@pytest.mark.parametrize("rows", [2, 4, 16])
def test_backlogged_tenants_hold_rows_by_their_weights(rows):
    rng = random.Random(rows)
    town = Town(Limits(rows, 64, 64, LARGEST), Shares({"c": 2.0}), rng)
    held = Counter()
    for step in range(400):
        for tenant in "abc":
            while len([s for s in town.waiting if s.tenant == tenant]) < 4:
                town.add(tenant=tenant)
        town.waiting.update(seq for seq, _ in town.scheduler.make_room())
        town.step()
        if step > 50:
            held.update(seq.tenant for seq in town.scheduler.order if seq.row >= 0)
    if rows > 2:
        assert 0.8 < held["a"] / held["b"] < 1.25 and 1.6 < 2 * held["c"] / (held["a"] + held["b"]) < 2.4
    assert min(held.values()) > 0


@settings(max_examples=40, **QUIET)
@given(seed=st.integers(0, 2**32))
def test_where_no_row_was_free_nobody_who_waits_is_two_rows_behind(seed):
    rng = random.Random(seed)
    rows = rng.randint(2, 9)
    town = Town(Limits(rows, 640, 64, LARGEST), Shares(), rng)
    for _ in range(60):
        for tenant in "abcd":
            if rng.random() < 0.3:
                town.add(tenant=tenant)
        full = town.scheduler.running == rows
        town.waiting.update(seq for seq, _ in town.scheduler.make_room())
        town.step()
        if full and town.scheduler.running == rows:  # nobody has ended with this step
            held = Counter(seq.tenant for seq in town.scheduler.order if seq.row >= 0)
            for seq in town.waiting:
                assert max(held.values()) - held[seq.tenant] < 2


def test_classes_that_nobody_looks_at_are_forgotten():
    house = House(rows=1)
    house.add("a", 2)
    house.step()
    for priority in range(1, 1000):
        (gone,) = house.add("b", priority=priority)
        house.scheduler.cancel(gone)
    assert kept(house.policy) < 1000
