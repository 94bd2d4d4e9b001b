"""What others do, observed as a black box, and what of it holds here: V-facts of vLLM, T-facts of TGI, a K-fact of
KVBoost. Where hibachi differs on purpose the test says so, and shows what holds instead."""

import random

import numpy as np
import pytest

from hibachi.engine.scheduler.blocks import BlockPool
from hibachi.engine.scheduler.limits import Limits
from hibachi.engine.scheduler.policy import Fcfs, Priority, WaitingServed
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.errors import PromptTooLong
from hibachi.request import Finish

from .world import Request, World


def scheduler(*, rows=4, budget=100, chunk=1000, max_model_len=200, blocks=0, size=16, policy=None, **limits):
    return Scheduler(Limits(rows, max(rows, budget), chunk, max_model_len, blocks, size, **limits), policy)


def add(s, prompt, max_new=8, name=None, **terms):
    """prompt: a length, or tokens that may be shared."""
    if isinstance(prompt, int):
        seq = Seq(prompt, max_new, owner=name, **terms)
    else:
        size = s.limits.block_size
        keys = [tuple(prompt[i : i + size]) for i in range(0, len(prompt) - size + 1, size)]
        seq = Seq(len(prompt), max_new, owner=name, keys=keys, **terms)
    s.add(seq)
    return seq


def step(s, stop=()):
    """One step: {name: (start, tokens)}, or None; `stop` names those that end with it."""
    plan = s.schedule()
    s.check()
    if plan is None:
        return None
    emitting = [seq for seq, emits in zip(plan.seqs, plan.emit.tolist(), strict=True) if emits]
    s.commit(plan, np.array([seq.owner in stop for seq in emitting], bool))
    s.check()
    return {seq.owner: (int(a), int(q)) for seq, a, q in zip(plan.seqs, plan.start, plan.q, strict=True)}


def finish(s):
    while step(s):
        pass


# ---- vLLM: the scheduler -----------------------------------------------------------------------------------------


def test_v01_tokens_of_a_step_and_rows_are_bounded():
    s = scheduler(rows=3, budget=8)
    for n in (5, 30, 2, 9, 1, 14):
        add(s, n)
    while (plan := s.schedule()) is not None:
        assert plan.q.sum() <= 8 and len(plan.rows) <= 3 and s.running <= 3
        s.commit(plan, np.zeros(int(plan.emit.sum()), bool))


def test_v02_running_requests_are_served_before_waiting_ones():
    s = scheduler(budget=10)
    add(s, 25, name="runs")
    assert step(s) == {"runs": (0, 10)}
    add(s, 2, name="waits")
    assert step(s) == {"runs": (10, 10)}
    assert step(s) == {"runs": (20, 5), "waits": (0, 2)}


def test_v02_a_long_prefill_does_not_take_the_budget_of_decodes_behind_it():
    """There with a threshold; here always, and before any chunk."""
    s = scheduler(rows=2, budget=4, policy=Priority())
    add(s, 2, name="decodes", max_new=50, priority=1)
    step(s)
    add(s, 40, name="long", priority=0)
    for _ in range(5):
        said = step(s)
        assert said["decodes"][1] == 1 and said["long"][1] == 3


def test_v03_a_prompt_of_100_in_a_budget_of_32():
    s = scheduler(budget=32)
    add(s, 100, name="a")
    assert [step(s)["a"] for _ in range(4)] == [(0, 32), (32, 32), (64, 32), (96, 4)]
    assert step(s) == {"a": (100, 1)}, "the first token came with the fourth step"


def test_v04_a_prompt_that_no_step_could_hold():
    """Chunking cannot be switched off here: a prompt beyond chunk and budget is cut, and only what fits nowhere is
    refused. What is refused at construction is a budget that cannot give each row its token."""
    s = scheduler(budget=32, chunk=1000, max_model_len=150)
    add(s, 100, name="a")
    assert step(s) == {"a": (0, 32)}
    with pytest.raises(PromptTooLong):
        add(s, 150)
    with pytest.raises(AssertionError):
        Limits(rows=4, budget=3, chunk=8, max_model_len=10)


def test_v05_the_last_admitted_is_preempted_and_gets_the_same_tokens():
    world = World(Limits(2, 64, 64, 40, 7, 4))
    a, b = (Request(n, [n] * 8, 16) for n in range(2))
    world.add(a)
    world.add(b)
    preempted = []
    while world.tick():
        preempted += [seq.owner for seq in (world.flying[-1].plan.preempted if world.flying else []) for seq in seq[:1]]
    assert preempted and set(preempted) == {b}
    assert world.scheduler.counts.preemptions == len(preempted)
    assert a.ends == b.ends == [Finish.LENGTH]  # that both are their solo streams is asserted by the world


def test_v06_nobody_starts_in_a_step_that_preempted():
    s = scheduler(rows=3, blocks=8, size=4)
    for name in "abc":
        add(s, 8, 12, name)
    seen = False
    while (plan := s.schedule()) is not None:
        seen |= bool(plan.preempted)
        assert not (plan.preempted and plan.fresh)
        s.commit(plan, np.zeros(int(plan.emit.sum()), bool))
    assert seen


def test_v07_smaller_priorities_first_and_ties_by_arrival():
    s = scheduler(rows=1, policy=Priority())
    for name, priority in ("a", 1), ("b", 0), ("c", 1), ("d", -1), ("e", 0):
        add(s, 3, 1, name, priority=priority)
    assert [next(iter(step(s))) for _ in range(5)] == list("dbeac")


# ---- vLLM: prefix cache and pool ---------------------------------------------------------------------------------


def hit(s, tokens, **terms):
    """Tokens that such a prompt finds computed when it starts; it is run to its end."""
    seq = add(s, tokens, 1, **terms)
    finish(s)
    assert seq.finish is not None
    return seq.reused


def test_v08_the_second_prompt_of_40_hits_32():
    s = scheduler(blocks=20)
    assert [hit(s, range(40)) for _ in range(2)] == [0, 32]
    assert (s.counts.prefix_queries, s.counts.prefix_hits) == (80, 32)


def test_v09_a_prompt_of_exactly_32_hits_16():
    s = scheduler(blocks=20)
    assert [hit(s, range(32)) for _ in range(2)] == [0, 16]


def test_v10_another_salt_hits_nothing():
    s = scheduler(blocks=20)
    assert hit(s, range(40), salt="a") == 0
    assert hit(s, range(40), salt="b") == 0
    assert hit(s, range(40)) == 0
    assert hit(s, range(40), salt="a") == 32


def test_v11_two_running_requests_share_full_blocks():
    s = scheduler(blocks=20)
    a, b = add(s, range(40)), add(s, range(40))
    step(s)
    step(s)
    assert a.row >= 0 and b.row >= 0 and a.finish is b.finish is None
    assert a.blocks[:2] == b.blocks[:2] and not set(a.blocks[2:]) & set(b.blocks[2:])


def test_v12_a_tail_block_is_evicted_before_its_head():
    s = scheduler(blocks=4)  # three to give away
    assert hit(s, range(48)) == 0  # its full blocks 0 and 1 are useful, and the last one as a part of longer prompts
    hit(s, range(100, 115))  # takes one
    assert s.pool.evictions == 1
    assert hit(s, range(33)) == 32, "the head is still there"


def test_v13_what_was_evicted_is_missed_from_there_on():
    s = scheduler(blocks=6)
    hit(s, range(64))
    hit(s, range(100, 148))  # three blocks: one was free beside the four, two are taken
    assert s.pool.evictions == 2
    assert hit(s, range(64)) == 32


def test_v14_reset_only_while_nobody_runs():
    s = scheduler(blocks=20)
    hit(s, range(40))
    a = add(s, range(40))
    step(s)
    assert a.reused == 32 and not s.pool.reset()
    finish(s)
    assert s.pool.reset()
    assert hit(s, range(40)) == 0


@pytest.mark.parametrize("how", ["end", "abort", "fail"])
def test_v15_all_blocks_come_back(how):
    s = scheduler(blocks=20)
    seqs = [add(s, [*range(32), n], 5) for n in range(4)]
    step(s)
    step(s)
    for seq in seqs:
        if how == "abort":
            s.cancel(seq)
        elif how == "fail":
            s.fail(seq)
        s.check()
    finish(s)
    assert s.pool.free == s.pool.usable == 19 and s.running == s.waiting == 0


def test_v16_block_0_is_in_no_table():
    s = scheduler(rows=2, blocks=9, size=4)
    for n in range(6):
        add(s, [n, *range(10)], 9)
    while (plan := s.schedule()) is not None:
        for seq in plan.seqs:
            held = s.block_table[seq.row, : len(seq.blocks)]
            assert (held > 0).all() and held.tolist() == seq.blocks
        s.commit(plan, np.zeros(int(plan.emit.sum()), bool))


# ---- TGI: the queue ----------------------------------------------------------------------------------------------


def test_t01_numbers_are_given_in_order_of_arrival():
    """There from 0, here from 1."""
    s = scheduler()
    assert [add(s, 1).number for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("policy", [Fcfs, WaitingServed])
def test_t02_an_empty_queue_gives_nothing(policy):
    assert step(scheduler(policy=policy())) is None


def test_t03_as_many_as_the_budget_holds_start_together_and_a_lone_one_waits_for_company():
    s = scheduler(rows=8, budget=8, policy=WaitingServed(ratio=1.0, patience=100))
    a, b = add(s, 4, name="a"), add(s, 4, name="b")
    assert step(s) == {"a": (0, 4), "b": (0, 4)}
    c = add(s, 1, name="c")
    assert set(step(s)) == {"a", "b"} and s.waiting == 1 and c.number == 3  # two run: one is not enough
    add(s, 1, name="d")
    assert set(step(s)) == {"a", "b", "c", "d"} and a.row != b.row


def test_t04_one_row_takes_one():
    s = scheduler(rows=1)
    add(s, 1, name="a")
    add(s, 1, name="b")
    assert set(step(s)) == {"a"} and s.waiting == 1


def test_t05_what_did_not_fit_starts_with_those_that_came_later():
    s = scheduler()
    s.limit(1)
    for name in "ab":
        add(s, 1, 1, name)
    assert set(step(s)) == {"a"}
    add(s, 1, 1, "c")
    s.limit(3)
    assert set(step(s)) == {"b", "c"}


def test_t06_without_budget_nobody_starts():
    """A budget of 0 does not exist here, as nothing would ever move: `limit` gives at least 1. What decode rows leave
    over is what others can start with, and that may be nothing."""
    s = scheduler(rows=2)
    s.limit(0)
    assert s.budget == 1
    add(s, 1, 5, "a")
    step(s)
    add(s, 1, 5, "b")
    assert set(step(s)) == {"a"} and s.waiting == 1


def test_t07_a_request_costs_its_own_tokens_and_no_padding():
    """There each prompt of a batch costs as much as the longest, and more with speculation. Tokens are packed here."""
    s = scheduler(budget=6)
    add(s, 5, name="long")
    add(s, 1, name="short")
    assert step(s) == {"short": (0, 1), "long": (0, 5)}


def test_t08_a_request_whose_caller_left_is_dropped_from_the_queue():
    s = scheduler()
    a = add(s, 1)
    assert s.cancel(a) and s.waiting == 0
    assert step(s) is None and a.finish == Finish.CANCELLED


def test_t09_a_first_that_does_not_fit_blocks_those_behind_it():
    s = scheduler(blocks=6, size=4)
    add(s, 12, 4, "runs")
    step(s)
    add(s, 12, 4, "large")
    add(s, 1, 1, "small")
    while s.waiting:
        said = step(s)
        assert "small" not in said or "large" in said


def test_t10_the_second_prompt_gets_what_the_first_left_over():
    s = scheduler(budget=8)
    add(s, 3, name="a")
    add(s, 10, name="b")
    assert step(s) == {"a": (0, 3), "b": (0, 5)}


def test_t11_waiting_served_ratio_and_max_waiting_tokens():
    policy = WaitingServed(ratio=1.2, patience=20)
    assert not policy.opens(11, 10, 1)
    assert policy.opens(12, 10, 1)
    s = scheduler(rows=20, policy=WaitingServed(ratio=100, patience=20))
    add(s, 1, 100, "a")
    step(s)
    add(s, 1, 100, "b")
    decodes = 0
    while "b" not in step(s):
        decodes += 1
    assert decodes == 19


# ---- TGI: trie and allocator -------------------------------------------------------------------------------------
# Numbers of blocks differ: there all blocks of a request are taken at once, here as it grows. A hit is at most n - 1
# tokens here, where n - 1 or n there. A block is the smallest part that can be shared here; there it is a token, and
# nodes are split.


@pytest.mark.parametrize("size, prompt, again", [(2, 4, 2), (2, 3, 2), (1, 4, 3)], ids=["T-12", "T-13", "T-14"])
def test_t12_t13_t14_a_prompt_comes_again(size, prompt, again):
    """There the second finds 4, 2 and 4 tokens: the last token is not computed again."""
    s = scheduler(blocks=12, size=size)
    first = add(s, range(prompt), 5)
    step(s)
    blocks = first.blocks[: again // size]
    finish(s)
    second = add(s, range(prompt), 5)
    step(s)
    assert (first.reused, second.reused) == (0, again)
    assert second.blocks[: again // size] == blocks
    finish(s)
    assert s.pool.free == 11


class Trie:
    """Prompts in a pool with blocks of `size` tokens, as a scheduler would put them there."""

    def __init__(self, total, size=1):
        self.pool, self.size = BlockPool(total, size), size
        self.tokens = {}

    def keys(self, tokens):
        return [tuple(tokens[i : i + self.size]) for i in range(0, len(tokens) - self.size + 1, self.size)]

    def find(self, tokens):
        """Tokens of the longest known prefix, and its blocks."""
        found, _ = self.pool.match(None, self.keys(tokens), len(tokens))
        return len(found) * self.size, found

    def take(self, tokens, extra=0):
        """Hold the blocks of a prompt and of `extra` tokens more; returns (tokens found, blocks)."""
        keys = self.keys(tokens)
        found, node = self.pool.match(None, keys, len(keys))
        self.pool.hold(found)
        more = self.pool.alloc(self.pool.blocks_for(len(tokens) + extra) - len(found))
        if more is None:
            self.pool.release(found, sound=0)
            return None
        blocks = found + more
        for n in range(len(found), len(keys)):
            node = self.pool.publish(blocks[n], node, keys[n])
            self.tokens[blocks[n]] = keys[n]
        return len(found) * self.size, blocks

    def free(self, blocks):
        self.pool.release(blocks, sound=len(blocks))

    def put(self, tokens):
        """Insert and let go; returns how many tokens were known."""
        known, blocks = self.take(tokens)
        self.free(blocks)
        return known

    def evict(self, n):
        """The tokens of the next n blocks that give way, each of one token."""
        return [self.tokens[b][0] for b in list(self.pool._idle)[:n] if self.evict_one()]

    def evict_one(self):
        spare = self.pool.alloc(self.pool.empty)
        taken = self.pool.alloc(1)
        self.pool.release(taken, sound=1)
        self.pool.release(spare, sound=len(spare))
        return True


def test_t15_the_older_prefix_gives_way():
    trie = Trie(7)
    a, b = trie.take([0, 1, 2, 3]), trie.take([4, 5])
    assert a[0] == b[0] == 0 and trie.pool.free == 0
    trie.free(a[1])
    trie.free(b[1])
    c = trie.take([6, 7, 8, 9])
    assert sorted(c[1]) == sorted(a[1])
    assert trie.find([0, 1, 2, 3])[0] == 0 and trie.find([4, 5])[0] == 2


def test_t16_two_identical_prompts_leave_one_copy():
    """There both compute and one copy is dropped; here the second shares, also when both start in one step."""
    trie = Trie(10)
    a, b = trie.take([0, 1, 2, 3]), trie.take([0, 1, 2, 3])
    assert a[1] == b[1]
    trie.free(a[1])
    trie.free(b[1])
    assert trie.find([0, 1, 2, 3])[0] == 4
    assert (trie.pool.empty, trie.pool.idle, trie.pool.total) == (5, 4, 10)


def test_t16_two_copies_that_were_computed_apart_leave_one():
    pool = BlockPool(10, 1)
    a, b = pool.alloc(4), pool.alloc(4)
    for blocks in a, b:
        node = pool.root(None)
        for block, token in zip(blocks, range(4), strict=True):
            node = pool.publish(block, node, (token,))
    pool.release(a, sound=4)
    pool.release(b, sound=4)
    assert pool.match(None, [(n,) for n in range(4)], 4)[0] == a
    assert (pool.empty, pool.idle) == (5, 4)


def test_t17_prompts_that_fork():
    """There the third finds 2 tokens, as the second is known only when it ends; here 4, as it has been computed."""
    trie = Trie(20)
    first = trie.take([0, 1], extra=2)
    trie.free(first[1])
    second = trie.take([0, 1, 2, 3, 4, 5], extra=2)
    assert second[0] == 2
    third = trie.take([0, 1, 2, 3, 6, 7], extra=2)
    assert third[0] == 4 and third[1][:4] == second[1][:4]
    trie.free(third[1])
    trie.free(second[1])
    assert trie.pool.free == 19
    assert trie.take([0, 1, 2, 3, 4, 5])[0] == 6
    assert trie.take([0, 1, 2, 3, 6, 7])[0] == 6


def test_t18_insertion_says_what_was_known():
    trie = Trie(40)
    prompts = [0, 1, 2], [0, 1, 2], [1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5, 6, 7]
    assert [trie.put(p) for p in prompts] == [0, 3, 0, 3, 4]


def test_t19_insertion_with_blocks_of_two():
    trie = Trie(40, 2)
    prompts = [0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 3, 4, 5, 6, 7, 8]
    assert [trie.put(p) for p in prompts] == [0, 4, 0, 4, 2]


def test_t20_find_gives_the_blocks_of_the_prefix():
    trie = Trie(40)
    for prompt in ([0, 1, 2], [1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5, 6, 7]):
        trie.put(prompt)

    def found(tokens):
        return [trie.tokens[block][0] for block in trie.find(tokens)[1]]

    assert found([0]) == [0]
    assert found([0, 1, 2, 3, 5]) == [0, 1, 2, 3, 5]


def test_t21_the_least_recently_used_tail_gives_way_first():
    """The same blocks in the same turns as there. Here a chain gives way from its end, one block at a time."""
    trie = Trie(40)
    for prompt in ([0, 1, 2], [0, 1, 2, 3, 5, 6, 7], [0, 1, 2, 3, 4], [1, 2, 3]):
        trie.put(prompt)
    assert trie.evict(1) == [7]
    trie.put([0, 1, 2, 3, 4])
    trie.put([1, 2, 3])
    assert sorted(trie.evict(2)) == [5, 6]
    trie.put([1, 2, 3])
    assert trie.evict(3) == [4, 3, 2]
    assert trie.evict(10) == [1, 0, 3, 2, 1]


def test_t22_a_part_of_a_node_is_no_way_to_its_children():
    trie = Trie(40)
    trie.put([0, 1, 2])
    trie.put([0, 1, 2, 3, 4, 5])
    assert [trie.tokens[block][0] for block in trie.find([0, 1, 3, 4, 5])[1]] == [0, 1]


def churn(rounds):
    rng = random.Random(0)
    trie, held = Trie(60, 2), []
    for _ in range(rounds):
        if held and (rng.random() < 0.5 or len(held) > 12):
            trie.free(held.pop(rng.randrange(len(held)))[1])
            continue
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        taken = trie.take(prompt, extra=rng.randrange(4))
        if taken is None:
            continue
        blocks = taken[1]
        assert 0 not in blocks and len(set(blocks)) == len(blocks)
        known = taken[0] // 2
        for other, theirs in held:
            common = set(blocks) & set(theirs)
            same = next((i for i, (x, y) in enumerate(zip(prompt, other, strict=False)) if x != y), 99) // 2
            assert common <= set(blocks[: min(known, same)]), "a block is shared that is not of a common prefix"
        held.append((prompt, blocks))
    trie.pool.check([block for _, blocks in held for block in blocks])


def test_t23_random_rounds_share_nothing_but_prefixes():
    churn(10_000)


@pytest.mark.slow
def test_t23_a_hundred_thousand_random_rounds_share_nothing_but_prefixes():
    churn(100_000)


@pytest.mark.parametrize("cancelled_first", [True, False])
def test_t24_what_was_abandoned_before_it_was_computed_is_not_found(cancelled_first):
    s = scheduler(blocks=20)
    a = add(s, range(40))
    plan = s.schedule()  # this step never happens
    if cancelled_first:
        s.cancel(a)
    s.rollback(plan)
    s.cancel(a)
    s.check()
    assert hit(s, range(40)) == 0


# ---- KVBoost -----------------------------------------------------------------------------------------------------


def test_k28_the_pool_of_blocks():
    pool = BlockPool(5, 4)
    blocks = pool.alloc(4)
    assert pool.alloc(1) is None, "all are taken"
    pool.publish(blocks[0], pool.root(None), "x")
    pool.hold(blocks[:1])  # a second holder
    pool.release(blocks[:1], sound=1)
    assert pool.free == 0
    pool.release(blocks[:1], sound=1)
    assert pool.free == 1
    pool.release(blocks[1:], sound=3)
    pool.check([])


@pytest.mark.parametrize("unknown", [[4], [1, 3], [0], [9]], ids=["free", "twice", "the trash block", "no such"])
def test_k28_giving_back_what_is_not_held_is_an_error_and_changes_nothing(unknown):
    pool = BlockPool(5, 4)
    held, gone = pool.alloc(2), pool.alloc(1)
    assert (held, gone) == ([1, 2], [3])
    pool.release(gone, sound=1)
    with pytest.raises(ValueError, match="not held"):
        pool.release(unknown, sound=0)
    pool.check(held)


def test_k28_a_block_that_is_written_to_has_one_holder():
    """There a shared block is copied before it is written to; here only full blocks are shared, so nobody writes."""
    s = scheduler(blocks=20)
    a, b = add(s, range(40)), add(s, range(40))
    while a.finish is None:
        step(s)
        if a.row >= 0 and b.row >= 0:
            assert not set(a.blocks[2:]) & set(b.blocks[2:])


# ---- our own -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [512, 2048, 100_000])
def test_a_burst_that_shares_512_of_544_tokens_computes_them_once(budget):
    """64 requests that arrive in one step: 544 + 63 * 32 = 2,560 tokens of prompts."""
    s = scheduler(rows=64, budget=budget, max_model_len=600, blocks=400)
    for n in range(64):
        add(s, [*range(512), *range(1000 * n, 1000 * n + 32)], 1)
    computed = 0
    while (plan := s.schedule()) is not None:
        computed += int(plan.q.sum())
        s.commit(plan, np.zeros(int(plan.emit.sum()), bool))
    assert computed == 544 + 63 * 32
