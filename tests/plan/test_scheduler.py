"""The scheduler: calls, and the plans that must come of them. A step is written as {name: (start, q, emits)}."""

import numpy as np
import pytest

from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Limits
from hibachi.errors import PromptTooLong
from hibachi.request import Finish


class Checked(Scheduler):
    """A scheduler whose invariants are checked after every call."""

    def __init__(
        self, *, rows=4, budget=100, chunk=100, max_model_len=50, blocks=0, block_size=4, key_of=None, **limits
    ):
        super().__init__(Limits(rows, budget, chunk, max_model_len, blocks, block_size, **limits), key_of=key_of)

    def new(self, name, prompt_len, max_new=None):
        seq = Seq(prompt_len, max_new, owner=name)
        self.add(seq)
        return seq

    def plan(self):
        """The next plan, and what it says."""
        plan = self.schedule()
        self.check()
        if plan is None:
            return None, {}
        assert [s.row for s in plan.seqs] == plan.rows.tolist()
        cells = zip(plan.start.tolist(), plan.q.tolist(), plan.emit.tolist(), strict=True)
        return plan, {s.owner: cell for s, cell in zip(plan.seqs, cells, strict=True)}

    def done(self, plan, stop=()):
        """Commit; sequences named in `stop` drew their stop token. Returns who finished, and why."""
        names = [s.owner for s, emits in zip(plan.seqs, plan.emit.tolist(), strict=True) if emits]
        committed = self.commit(plan, np.array([n in stop for n in names], bool))
        self.check()
        return {s.owner: s.finish for s in committed.finished}

    def step(self, stop=()):
        """Plan and commit; returns what the plan said."""
        plan, said = self.plan()
        if plan is not None:
            self.done(plan, stop)
        return said

    def drop(self, seq, *args):
        out = self.cancel(seq, *args)
        self.check()
        return out


# ---- one sequence ------------------------------------------------------------------------------------------------


def test_prefill_then_decode_until_the_limit():
    s = Checked()
    a = s.new("a", 3, max_new=3)
    assert s.step() == {"a": (0, 3, True)}
    assert s.step() == {"a": (3, 1, True)}
    plan, said = s.plan()
    assert said == {"a": (4, 1, True)}
    assert s.done(plan) == {"a": Finish.LENGTH}
    assert a.finish == Finish.LENGTH and s.running == s.waiting == 0
    assert s.plan() == (None, {})


# ---- budget and chunks -------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks():
    s = Checked(chunk=4)
    s.new("a", 10)
    assert [s.step()["a"] for _ in range(4)] == [(0, 4, False), (4, 4, False), (8, 2, True), (10, 1, True)]


def test_the_budget_is_shared_in_order_of_arrival():
    s = Checked(budget=10)
    s.new("a", 4)
    s.new("b", 7)
    s.new("c", 2)
    assert s.step() == {"a": (0, 4, True), "b": (0, 6, False)}
    assert s.step() == {"a": (4, 1, True), "b": (6, 1, True), "c": (0, 2, True)}


def test_decode_rows_get_their_token_before_any_prefill_chunk():
    """ARCHITECTURE 17.4: an older long prompt does not starve the decode rows behind it."""
    s = Checked(budget=5, rows=3)
    long = s.new("long", 40)
    s.new("b", 2)
    s.new("c", 2)
    assert s.step() == {"long": (0, 5, False)}  # it came first and takes the whole budget
    s.drop(long)
    assert s.step() == {"b": (0, 2, True), "c": (0, 2, True)}
    s.new("long 2", 40)
    for start in (0, 3, 6, 9):
        assert s.step() == {
            "b": (2 + start // 3, 1, True),
            "c": (2 + start // 3, 1, True),
            "long 2": (start, 3, False),
        }


# ---- admission ---------------------------------------------------------------------------------------------------


def test_blocks_for_prompt_and_output_are_reserved_at_admission():
    s = Checked(blocks=8, block_size=4, reserve_all=True)  # 7 to give away
    a = s.new("a", 4, max_new=5)  # positions 0 to 7 are stored; the last token is not fed back
    b = s.new("b", 4, max_new=6)  # one more: a third block
    s.step()
    assert (len(a.blocks), len(b.blocks), s.pool.free) == (2, 3, 2)
    assert s.block_table[a.row, :3].tolist() == [*a.blocks, 0]


@pytest.mark.parametrize("blocks, starts", [(7, False), (8, True)])
def test_who_was_preempted_starts_again_with_a_block_to_spare_for_each_that_runs(blocks, starts):
    """Else it would take the block that the other asks for next, and be preempted at once."""
    s = Checked(rows=3, blocks=blocks, block_size=4)
    others = [s.new(name, 3, max_new=12) for name in "ab"]
    c = s.new("c", 3, max_new=12)
    while not s.preempted:
        s.step()
    assert (c.row, c.length) == (-1, 9) and s.running == 2
    s.drop(others[1])
    assert s.pool is not None and s.pool.free == 3 + starts  # it needs three, and one runs
    assert s.step() == {"a": (9, 1, True)} | ({"c": (0, 9, True)} if starts else {})


@pytest.mark.parametrize(
    "reserve_all, free, starts", [(False, 6, True), (False, 5, False), (True, 4, True), (True, 3, False)]
)
def test_who_runs_is_left_a_hundredth_of_the_blocks(reserve_all, free, starts):
    """So that who starts does not preempt it at once; where all blocks are reserved, none need be left."""
    s = Checked(blocks=201, block_size=4, max_model_len=1000, budget=2000, chunk=2000, reserve_all=reserve_all)
    taken = 4 * (200 - free)
    s.new("a", taken - 7 if reserve_all else taken - 3, max_new=8)
    s.step()
    assert s.pool.free == free
    s.new("b", 13, max_new=4)  # four blocks
    assert ("b" in s.step()) == starts


def test_deadlines_of_those_who_ended_are_passed_over():
    s = Checked()
    assert s.next_deadline() is None
    early, late = Seq(2, 5, owner="early", deadline=5.0, start_by=3.0), Seq(2, 5, owner="late", deadline=7.0)
    s.add(early)
    s.add(late)
    assert s.next_deadline() == 3.0
    s.step()
    assert s.expire(3.0) == [] and s.next_deadline() == 5.0  # it has started
    s.drop(early)
    assert s.next_deadline() == 7.0 and s.expire(6.9) == []
    assert s.expire(7.0) == [late] and late.finish == Finish.ERROR
    assert s.next_deadline() is None and s.expire(100.0) == []


def test_who_should_have_started_ends():
    s = Checked(rows=1)
    s.new("a", 2)
    waits = Seq(2, 5, owner="waits", start_by=3.0)
    s.add(waits)
    s.step()
    assert s.expire(2.9) == [] and s.expire(3.0) == [waits] and s.waiting == 0


def test_who_waits_for_a_checkpoint_that_another_is_about_to_make():
    """Of a prefix that both have; not where it has another salt, is paused, or has a token already."""
    keys = list("abcdefgh")

    def start(**changes):
        s = Checked(rows=4, chunk=4, budget=8, block_size=4, checkpoints=4, checkpoint_every=2)
        first = Seq(21, 4, owner="first", keys=keys[:5])
        s.add(first)
        s.step()
        second = Seq(21, 4, owner="second", keys=changes.pop("keys", keys[:5]), **changes)
        s.add(second)
        return s, first, s.step()

    assert list(start()[2]) == ["first"]
    assert set(start(salt="other")[2]) == {"first", "second"}
    assert set(start(keys=["x", *keys[1:5]])[2]) == {"first", "second"}
    assert set(start(keys=["a", "x", *keys[2:5]])[2]) == {"first", "second"}
    assert list(start(keys=["a", "b", "x", *keys[3:5]])[2]) == ["first"]
    s, first, _ = start()
    s.pause(first)
    assert list(s.step()) == ["second"]


def at_a_checkpoint():
    """A scheduler with two slots, of which a long prompt has one already and its next step is to write the other."""
    s = Checked(rows=4, chunk=4, budget=8, block_size=4, checkpoints=2, checkpoint_every=1)
    seq = Seq(13, 4, owner="a", keys=list("abc"))
    s.add(seq)
    first, _ = s.plan()
    s.done(first)
    plan, _ = s.plan()
    assert [who for who, _, _ in plan.saves] == [seq] and plan.saves[0][2] != first.saves[0][2]
    return s, seq, plan


def test_a_step_that_did_not_happen_gives_its_checkpoint_back():
    s, _, plan = at_a_checkpoint()
    s.rollback(plan)
    s.check()
    assert [s.checkpoints.reserve(), s.checkpoints.reserve()] == [plan.saves[0][2], None]


@pytest.mark.parametrize("happened", [True, False])
def test_checkpoints_that_nobody_vouched_for_go_with_their_request(happened):
    s, seq, plan = at_a_checkpoint()
    if happened:
        s.done(plan)
    s.drop(seq)
    assert sorted((s.checkpoints.reserve(), s.checkpoints.reserve())) == [0, 1]


def test_a_checkpoint_is_found_once_its_request_has_a_token():
    s, _, plan = at_a_checkpoint()
    s.done(plan)
    assert not s.checkpoints.knows(None, "abc", 1)
    s.step()  # no slot is left for the third
    s.step()
    assert [s.checkpoints.knows(None, "abc", n) for n in (1, 2, 3)] == [True, True, False]


def test_a_reader_that_fails_takes_nothing_from_a_writer_that_has_a_token():
    s = Checked(blocks=20, block_size=4)
    writer, reader = (Seq(9, 5, owner=name, keys=["x", "y"]) for name in ("writer", "reader"))
    s.add(writer)
    s.step()
    s.add(reader)
    assert s.plan()[1]["reader"][0] == 8  # two blocks are shared
    assert s.fail(reader) == [] and writer.row >= 0
    s.check()


# ---- too long ----------------------------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_into_the_cache_is_refused():
    s = Checked(blocks=3, block_size=4)
    s.new("fits", 5, max_new=4)
    with pytest.raises(PromptTooLong, match=r"8 positions.* may need 9"):
        s.new("a", 5, max_new=5)
    with pytest.raises(PromptTooLong, match="may need 49"):
        s.new("a", 5)


def test_fit_says_where_a_sequence_would_end():
    s = Checked(max_model_len=10)
    assert (s.limits.fit(3, None), s.limits.fit(3, 2), s.limits.fit(9, 5)) == (10, 5, 10)


# ---- cancelling --------------------------------------------------------------------------------------------------


def test_commit_says_who_is_alive():
    s = Checked()
    a, b, c = (s.new(name, 2) for name in "abc")
    plan, _ = s.plan()
    assert s.commit(plan, np.zeros(3, bool)).alive is None
    plan, _ = s.plan()
    s.drop(b)
    assert s.commit(plan, np.zeros(3, bool)).alive.tolist() == [True, False, True]
    assert (a.row >= 0, c.row >= 0) == (True, True)


def test_prefilling_means_that_nothing_was_sampled_yet():
    s = Checked(chunk=2)
    a, b = s.new("a", 3), s.new("b", 30)
    assert not s.prefilling(a)  # it waits
    s.step()
    assert s.prefilling(a)
    s.step()
    assert not s.prefilling(a) and s.prefilling(b)


# ---- who lost a row -----------------------------------------------------------------------------------------------


def test_who_lost_its_row_is_named_though_no_plan_came_of_it():
    """At once, not by the plan in which it starts again: its tokens are put away before anybody asks for them."""
    s = Checked(rows=2, blocks=3, block_size=4)
    s.new("a", 4, max_new=1)
    b = s.new("b", 4, max_new=4)
    first, said = s.plan()
    assert said == {"a": (0, 4, True), "b": (0, 4, True)}
    row = b.row
    assert s.plan() == (None, {}) and s.preempted == [(b, row)]  # a has all its tokens, and b finds no block
    assert s.done(first) == {"a": Finish.LENGTH}
    plan, said = s.plan()
    assert said == {"b": (0, 4, True)} and plan.fresh == [b] and plan.preempted == s.preempted == []


def known_when_a_reader_fails(steps):
    """How many blocks are still known when one that shares them all fails; the writer left after so many steps."""
    s = Checked(rows=1, chunk=4, blocks=20, block_size=4, key_of=lambda seq, n: str(n))
    writer = Seq(9, None, owner="writer", keys=["0", "1"])
    s.add(writer)
    for _ in range(steps):
        s.step()
    s.drop(writer)
    reader = Seq(14, None, owner="reader", keys=["0", "1", "2"])
    s.add(reader)
    s.plan()
    s.fail(reader)
    s.check()
    assert s.pool is not None and reader.reused
    return len(s.pool.match(None, ["0", "1", "2"], 3)[0])


def test_what_was_never_looked_at_is_forgotten_when_its_reader_fails():
    """The writer left before its first token: whatever made the reader's output not finite may be the writer's work."""
    assert known_when_a_reader_fails(2) == 0


def test_what_a_finite_output_vouches_for_stays_known_when_its_reader_fails():
    assert known_when_a_reader_fails(3) == 2
    assert known_when_a_reader_fails(6) == 3  # a block of what it generated
