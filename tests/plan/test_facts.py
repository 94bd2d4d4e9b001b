"""What others do, observed as a black box, and what of it holds here: V-facts of vLLM, T-facts of TGI, a K-fact of
KVBoost. Where hibachi differs on purpose the test says so, and shows what holds instead. What `world.py` asserts after
every call (budgets, nobody overtakes, no block is lost or wrongly shared, salts) is not said again."""

import random

import numpy as np
import pytest

from hibachi.engine.scheduler.blocks import BlockPool
from hibachi.engine.scheduler.policy import WaitingServed
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Limits
from hibachi.errors import PromptTooLong


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


def test_t03_as_many_as_the_budget_holds_start_together_and_a_lone_one_waits_for_company():
    s = scheduler(rows=8, budget=8, policy=WaitingServed(ratio=1.0, patience=100))
    a, b = add(s, 4, name="a"), add(s, 4, name="b")
    assert step(s) == {"a": (0, 4), "b": (0, 4)}
    c = add(s, 1, name="c")
    assert set(step(s)) == {"a", "b"} and s.waiting == 1 and c.number == 3  # two run: one is not enough
    add(s, 1, name="d")
    assert set(step(s)) == {"a", "b", "c", "d"} and a.row != b.row


def test_t05_what_did_not_fit_starts_with_those_that_came_later():
    s = scheduler()
    s.limit(1)
    for name in "ab":
        add(s, 1, 1, name)
    assert set(step(s)) == {"a"}
    add(s, 1, 1, "c")
    s.limit(3)
    assert set(step(s)) == {"b", "c"}


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
        return [self.tokens[self.evict_one()][0] for _ in range(min(n, self.pool.idle))]

    def evict_one(self):
        spare = self.pool.alloc(self.pool.empty)
        taken = self.pool.alloc(1)
        self.pool.release(taken, sound=1)
        self.pool.release(spare, sound=len(spare))
        return taken[0]


def test_t15_the_older_prefix_gives_way():
    trie = Trie(7)
    a, b = trie.take([0, 1, 2, 3]), trie.take([4, 5])
    assert a[0] == b[0] == 0 and trie.pool.free == 0
    trie.free(a[1])
    trie.free(b[1])
    c = trie.take([6, 7, 8, 9])
    assert sorted(c[1]) == sorted(a[1])
    assert trie.find([0, 1, 2, 3])[0] == 0 and trie.find([4, 5])[0] == 2


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


def test_t23_random_rounds_share_nothing_but_prefixes():
    rng = random.Random(0)
    trie, held = Trie(60, 2), []
    for _ in range(10_000):
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
