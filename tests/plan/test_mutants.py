"""Bugs planted into public methods around the scheduler, each with what `world.py` or a test says of it."""

import random
import re
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from hibachi.engine.scheduler.blocks import BlockPool
from hibachi.engine.scheduler.copies import Copies
from hibachi.engine.scheduler.policy import Priority
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.step import RowTable

from . import test_facts, test_properties
from .world import KEEPING, drive, random_request, random_world

SEEDS = 400


def properties(**options):
    """What `test_properties.py` does, with seeds that are the same in each run."""
    for seed in range(SEEDS):
        rng = random.Random(seed)
        world = random_world(rng, strict=rng.random() < 0.7, policies=KEEPING, **options)
        requests = [random_request(i, rng, world.limits) for i in range(rng.randint(1, 16))]
        drive(world, requests, rng, unlucky=rng.random() < 0.8, arrive=rng.choice((0.5, 0.9)))


def copying():
    properties(copies=True)


def proposing():
    properties(proposals=random.Random(0))


class Mutant(NamedTuple):
    breaks: str  # what is wrong, in words
    where: type
    method: str
    change: object  # change(self, honest, *arguments) takes the place of the method
    caught: str  # what the failing assertion says
    by: object = properties


@contextmanager
def other(scheduler, **limits):
    """The scheduler works with other limits for a while."""
    kept, scheduler.limits = scheduler.limits, replace(scheduler.limits, **limits)
    yield
    scheduler.limits = kept


def one_more(self, honest, *now):
    self.budget += 1
    plan = honest(*now)
    self.budget -= 1
    return plan


def without_cap(self, honest, *now):
    with other(self, prefill=None):
        return honest(*now)


def proposed_for_ever(self, honest, *now):
    drafts = {seq: seq.draft for seq in self.order}
    plan = honest(*now)
    for seq, n in drafts.items():
        seq.draft = n
    return plan


def twice(self, honest, *args):
    honest(*args)
    return honest(*args)


def nothing(self, honest, *args, **options):
    return None


def unstopped(self, honest, plan, stopped, *counts):
    return honest(plan, np.zeros_like(stopped), *counts)


def newest_first(self, honest, seq):
    return (seq.priority, -seq.arrival, -seq.number)


def all_kept(self, honest, rows, end, counts, draft=None):
    length = honest(rows, end, counts, draft)
    if draft is not None:
        self.computed[rows] = end + draft
    return length


def none_kept(self, honest, rows, end, counts, draft=None):
    length = honest(rows, end, counts, draft)
    if draft is not None:
        self.computed[rows] = end
    return length


MUTANTS = [
    Mutant("a holder more than there are", BlockPool, "hold", twice, "nobody knows|a block is lost"),
    Mutant("what leaves is not given back", BlockPool, "release", nothing, "nobody|lost"),
    Mutant("released head first", BlockPool, "release",
           lambda self, honest, blocks, *, sound: [honest([b], sound=i < sound) for i, b in enumerate(blocks)], "",
           test_facts.test_v12_a_tail_block_is_evicted_before_its_head),
    Mutant("the salt is ignored", BlockPool, "root", lambda salt, honest: (None,), "another salt"),
    Mutant("what failed stays known", BlockPool, "withdraw", nothing, "",
           test_properties.test_what_a_failed_prompt_computed_is_not_found),
    Mutant("what nobody heard of stays known", BlockPool, "withdraw", nothing, "",
           test_properties.test_what_nobody_heard_of_is_not_found),
    Mutant("what a step that did not happen computed stays known", BlockPool, "withdraw_nodes", nothing,
           "solo stream|known before|the trie|nobody knows"),
    Mutant("the counters of a step that did not happen stay", RowTable, "take_back", nothing, ""),
    Mutant("a row's generation stays", RowTable, "leave", nothing, ""),
    Mutant("the budget is off by one", Scheduler, "schedule", one_more, ""),
    Mutant("the prefill cap is ignored", Scheduler, "schedule", without_cap, "cap"),
    Mutant("stop tokens are passed over", Scheduler, "commit", unstopped, "solo stream"),
    Mutant("deadlines are ignored", Scheduler, "expire", lambda self, honest, now: [], "a deadline was not kept"),
    Mutant("whoever is cancelled is not told so", Scheduler, "cancel", lambda self, honest, *seq: not honest(*seq),
           "cancel lies"),
    Mutant("last come, first served", Priority, "rank", newest_first, "overtook"),
    Mutant("what is not known to be sound is copied", Copies, "sound",
           lambda self, honest, found, at_work: len(found), "",
           test_properties.test_what_a_step_computes_is_not_copied_in_it),
    Mutant("a row's own block is taken over by another", Copies, "idle", lambda self, honest, found: list(found), "",
           copying),
    Mutant("rows share what is to be copied", Copies, "given",
           lambda self, honest, found, idle, more: honest(found, found, more), "", copying),
    Mutant("what nobody looked at is kept", BlockPool, "unsound", lambda self, honest, blocks: [], "", copying),
    Mutant("proposals stay for a later step", Scheduler, "schedule", proposed_for_ever, "for one step", proposing),
    Mutant("wrong proposals count as computed", RowTable, "gain", all_kept, "", proposing),
    Mutant("right proposals do not count as computed", RowTable, "gain", none_kept, "", proposing),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.breaks)
def test_a_planted_bug_is_caught(mutant, monkeypatch):
    found = getattr(mutant.where, mutant.method)
    if isinstance(vars(mutant.where)[mutant.method], staticmethod):
        monkeypatch.setattr(mutant.where, mutant.method, staticmethod(lambda *args: mutant.change(*args, found)))
    else:
        monkeypatch.setattr(
            mutant.where, mutant.method, lambda self, *a, **k: mutant.change(self, found.__get__(self), *a, **k)
        )
    with pytest.raises((AssertionError, ValueError)) as caught:
        mutant.by()
    assert re.search(mutant.caught, str(caught.value)), caught.value
