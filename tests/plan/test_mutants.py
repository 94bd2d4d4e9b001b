"""Planted bugs in the scheduler, each with the test that catches it. A bug is a method with one line changed."""

import inspect
import random
import re
from typing import NamedTuple

import pytest

from hibachi.engine.scheduler import blocks, copies, policy, rows, scheduler
from hibachi.engine.scheduler.blocks import BlockPool
from hibachi.engine.scheduler.copies import Copies
from hibachi.engine.scheduler.policy import Fair, Priority
from hibachi.engine.scheduler.rows import RowTable
from hibachi.engine.scheduler.scheduler import Scheduler

from ..engine import test_checkpoints
from . import test_bounds, test_facts, test_properties, test_scheduler, test_speculated
from .world import KEEPING, drive, random_request, random_world

SEEDS = 400


def properties(seeds=range(120), policies=KEEPING):
    """What `test_properties.py` does, with seeds that are the same in each run."""
    for seed in seeds:
        rng = random.Random(seed)
        world = random_world(rng, strict=rng.random() < 0.7, policies=policies)
        requests = [random_request(i, rng, world.limits) for i in range(rng.randint(1, 16))]
        drive(world, requests, rng, unlucky=rng.random() < 0.8, arrive=rng.choice((0.5, 0.9)))


def copying():
    """The same, where rows start with copies of prefixes."""
    for seed in range(SEEDS):
        rng = random.Random(seed)
        world = random_world(rng, strict=rng.random() < 0.7, policies=KEEPING, copies=True)
        requests = [random_request(i, rng, world.limits) for i in range(rng.randint(1, 16))]
        drive(world, requests, rng, unlucky=rng.random() < 0.8, arrive=rng.choice((0.5, 0.9)))


def proposing():
    """The same, where rows are proposed tokens."""
    for seed in range(SEEDS):
        rng = random.Random(seed)
        world = random_world(rng, strict=rng.random() < 0.7, policies=KEEPING, proposals=random.Random(seed))
        requests = [random_request(i, rng, world.limits) for i in range(rng.randint(1, 16))]
        drive(world, requests, rng, unlucky=rng.random() < 0.8, arrive=rng.choice((0.5, 0.9)))


class Mutant(NamedTuple):
    breaks: str  # what is wrong, in words
    where: type  # the class, and the method with the line
    method: str
    line: str
    instead: str
    caught: str  # what the failing assertion says
    by: object = properties
    seed: int = 0  # where `properties` begins: saves time


MUTANTS = [
    Mutant("refcount not incremented", BlockPool, "hold",
           "self._shared[block] = self._shared.get(block, 0) + 1", "pass", "nobody knows|not held"),
    Mutant("refcount not decremented", BlockPool, "release",
           "self._shared[block] = more - 1", "self._shared[block] = more", "nobody knows"),
    Mutant("released head first", BlockPool, "release",
           "for block in reversed(blocks):", "for block in blocks:", "",
           test_facts.test_v12_a_tail_block_is_evicted_before_its_head),
    Mutant("a new block counts as sound", BlockPool, "alloc",
           "self._unsound.update(taken)", "pass", "innocent"),
    Mutant("a free block stays unsound", BlockPool, "_give_back",
           "self._unsound.difference_update(blocks)", "pass", "a free block is unsound"),
    Mutant("the salt is ignored", BlockPool, "root",
           "return (salt,)", "return (None,)", "another salt"),
    Mutant("a hit covers the last token", Scheduler, "_reserve",
           "most = (seq.length - 1) // limits.block_size", "most = seq.length // limits.block_size", ""),
    Mutant("who starts from a state reads blocks of this step", Scheduler, "_reserve",
           ".isdisjoint(found)", ".isdisjoint([])", "",
           test_checkpoints.test_who_starts_on_blocks_waits_until_they_are_full),
    Mutant("a rolled-back step leaves its blocks known", Scheduler, "rollback",
           "self.pool.withdraw_nodes(new)", "pass", "solo stream|known before|the trie|nobody knows"),
    Mutant("a rolled-back step leaves its counters", Scheduler, "rollback",
           "self.table.take_back(plan.rows[same], plan.start[same], plan.emit[same])", "pass", ""),
    Mutant("the first is preempted", Scheduler, "_victim",
           "return next(seq for seq in reversed(self.order) if seq.row >= 0)",
           "return next(seq for seq in self.order if seq.row >= 0)", "the first in the order of service"),
    Mutant("preempted without its tokens", Scheduler, "_preempt",
           "seq.length = int(self.table.done[row])", "seq.length = seq.prompt_len", ""),
    Mutant("the budget is off by one", Scheduler, "_share",
           "tokens_left = self.budget - len(single)", "tokens_left = self.budget - len(single) + 1", ""),
    Mutant("the prefill cap is ignored", Scheduler, "_share",
           "tokens_left = min(tokens_left, self.limits.prefill)", "pass", "cap"),
    Mutant("chunks before decode rows", Scheduler, "_share",
           "single = np.flatnonzero(want == 1)[: self.budget]", "single = np.flatnonzero(want == 0)", ""),
    Mutant("somebody starts in a step that preempted", Scheduler, "schedule",
           "self.free_rows and not self.preempted", "self.free_rows", "started in a step that preempted"),
    Mutant("the generation is not bumped", Scheduler, "_vacate",
           "self.table.leave(row)", "pass", ""),
    Mutant("what nobody looked at counts as sound", Scheduler, "_vacate",
           "sound=full if emitted else 0", "sound=full", "",
           test_scheduler.test_what_was_never_looked_at_is_forgotten_when_its_reader_fails),
    Mutant("nothing is vouched for by who leaves", Scheduler, "_vacate",
           "sound=full if emitted else 0", "sound=0", "",
           test_scheduler.test_what_a_finite_output_vouches_for_stays_known_when_its_reader_fails),
    Mutant("sharers are not sent back when the writer failed", Scheduler, "fail",
           "tainted.intersection(s.blocks)", "False", "innocent", seed=189),
    Mutant("blocks of who failed stay known", Scheduler, "fail",
           "self.pool.withdraw(tainted)", "pass", "",
           test_properties.test_what_a_failed_prompt_computed_is_not_found),
    Mutant("what is in flight stays known when its row leaves", Scheduler, "_vacate",
           "self.pool.withdraw(seq.blocks[full : seq.published])", "pass", "",
           test_properties.test_what_nobody_heard_of_is_not_found),
    Mutant("what is not known to be sound is copied", Copies, "sound",
           "return n", "return len(found)", "",
           test_properties.test_what_a_step_computes_is_not_copied_in_it),
    Mutant("a row's own block is taken over by another", Copies, "idle",
           "if self._pool.is_idle(block)", "", "", copying),
    Mutant("rows share what is to be copied", Copies, "given",
           "theirs = iter(more), set(idle)", "theirs = iter(more), set(found)", "nobody knows", copying),
    Mutant("what nobody looked at is kept", Scheduler, "_vacate",
           "self.pool.withdraw(self.pool.unsound(seq.blocks))", "pass", "nobody vouched", copying),
    Mutant("what who failed had computed is kept", Scheduler, "fail",
           "self.pool.withdraw(seq.blocks)", "pass", "",
           test_properties.test_nothing_of_who_failed_is_copied),
    Mutant("deadlines are ignored", Scheduler, "expire",
           "late = time == seq.deadline or not (seq.started or seq.row >= 0)",
           "late = not (seq.started or seq.row >= 0)", "a deadline was not kept"),
    Mutant("a queue deadline ends who runs", Scheduler, "expire",
           "late = time == seq.deadline or not (seq.started or seq.row >= 0)", "late = True",
           "a deadline was not kept"),
    Mutant("who was unpaused stays parked", Scheduler, "_unpark",
           "self.policy.push(seq)", "pass", "nothing moves|overtook"),
    Mutant("the one cancelled in the queue still counts", Scheduler, "cancel",
           "self.waiting -= 1", "pass", "miscounted"),
    Mutant("last come, first served", Priority, "rank",
           "(seq.priority, seq.arrival, seq.number)", "(seq.priority, -seq.arrival, -seq.number)", "overtook"),
    Mutant("new work before preempted work", Fair, "peek",
           "if back is not None and back.priority <= priority:", "if back is not None and back.priority < priority:",
           "new work before preempted"),
    Mutant("tenants are given back everything", Fair, "left",
           "max(used - self._cost(seq.tenant, seq.end - tokens), min(used, lowest))",
           "used - self._cost(seq.tenant, seq.end - tokens)", "", test_bounds.test_early_ends_save_up_no_turns),
    Mutant("a new tenant starts at zero", Fair, "push",
           "max(self._used.get(key, level), level)", "self._used.get(key, 0.0)", "",
           test_bounds.test_a_flood_of_new_tenants_does_not_starve_who_waits),
    Mutant("proposals stay for a later step", Scheduler, "schedule",
           "seq.draft = 0", "pass", "for one step", proposing),
    Mutant("proposals go beyond the budget", Scheduler, "_draft",
           "tokens_left -= n", "pass", "beyond the budget", proposing),
    Mutant("a proposal for the place behind the last token", Scheduler, "_draft",
           "int(self.table.end[seq.row]) - at - 1", "int(self.table.end[seq.row]) - at", "cannot be kept", proposing),
    Mutant("proposals where there are no blocks", Scheduler, "_draft",
           "n = min(n, room)", "pass", "no room", proposing),
    Mutant("what is kept in the cache makes way for proposals", Scheduler, "_draft",
           "spare = self.pool.empty - len(seqs)", "spare = self.pool.free", "change what others get", proposing),
    Mutant("blocks for proposals while somebody waits", Scheduler, "_draft",
           "not self.waiting and", "", "", test_speculated.test_who_waits_gets_the_blocks),
    Mutant("the last of the order gets its proposals first", Scheduler, "_draft",
           "key=lambda i: seqs[i].rank", "key=lambda i: -i", "",
           test_speculated.test_proposals_get_what_is_left_of_the_budget_in_the_order_of_service),
    Mutant("wrong proposals count as computed", RowTable, "gain",
           "np.maximum(end, np.minimum(length - 1, end + draft))", "end + draft", "", proposing),
    Mutant("right proposals do not count as computed", RowTable, "gain",
           "np.maximum(end, np.minimum(length - 1, end + draft))", "end", "", proposing),
    Mutant("what a step with proposals brought counts as computed", RowTable, "gain",
           "self.gained[rows] = counts", "self.gained[rows] = 0", "",
           test_speculated.test_what_a_step_after_proposals_spoilt_is_not_found),
    Mutant("who starts later is preempted later", Fair, "pop",
           "seq.rank = seq.priority, self._started", "pass", "",
           test_bounds.test_who_started_first_is_preempted_last),
]  # fmt: skip


def broken(mutant):
    """The method with its line changed. The rest of its module is as it was."""
    module = {BlockPool: blocks, Copies: copies, RowTable: rows, Scheduler: scheduler}.get(mutant.where, policy)
    honest = inspect.getsource(getattr(mutant.where, mutant.method))
    name = f"{mutant.where.__name__}.{mutant.method}"
    assert honest.count(mutant.line) == 1, f"{name} has changed: bring its mutant along"
    source = inspect.getsource(module).replace(honest, honest.replace(mutant.line, mutant.instead))
    namespace = {"__name__": module.__name__}
    exec(compile(source, module.__name__, "exec"), namespace)
    return vars(namespace[mutant.where.__name__])[mutant.method]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.breaks)
def test_a_planted_bug_is_caught(mutant, monkeypatch):
    monkeypatch.setattr(mutant.where, mutant.method, broken(mutant))
    with pytest.raises((AssertionError, ValueError)) as caught:
        if mutant.by is properties:
            properties((*range(mutant.seed, SEEDS), *range(mutant.seed)))
        else:
            mutant.by()
    assert re.search(mutant.caught, str(caught.value)), caught.value


def test_without_a_bug_nothing_is_caught():
    properties()
