"""Linked sequences: none starts in part, none is lost, and what each gets does not depend on who else is here.

Four kinds stand for all: samples, which have a prompt and part after it; early ones, which part before its last token;
mixed ones, whose prompts differ and whose tokens are one; and beams, which begin alike and then go on from one another.
"""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hibachi.engine.recording.recorder import RecordedScheduler
from hibachi.engine.recording.replay import replay
from hibachi.engine.scheduler.lower import lower
from hibachi.engine.scheduler.sequence import Seq, linked
from hibachi.engine.scheduler.step import Limits
from hibachi.errors import InvalidRequest, PromptTooLong

from .world import POLICIES, VOCAB, Device, following

QUIET = dict(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


class Member:
    def __init__(self, group, number, prompt):
        self.group, self.number, self.prompt, self.got = group, number, prompt, []
        self.end = None


class Group:
    """kind: "one", "samples", "early", "mixed" or "beams"."""

    def __init__(self, name, kind, prompts, max_new, stop, **terms):
        self.name, self.kind, self.stop, self.max_new = name, kind, stop, max_new
        self.members = [Member(self, i, prompt) for i, prompt in enumerate(prompts)]
        self.seqs = [Seq(len(m.prompt), max_new, owner=m, **terms) for m in self.members]
        alike, parts = kind in ("samples", "early", "beams"), kind in ("samples", "early")
        self.ticket = self.seqs[0]
        if len(prompts) > 1:
            self.ticket = linked(self.seqs, alike=alike, parts=parts, early=kind == "early")

    def draws(self, hashes, n):
        """From the hash of each member's tokens to (the member that each goes on from, its new token). n: tokens so
        far.
        """
        each = range(len(self.members))
        if self.kind == "mixed":
            return [(i, sum(hashes) % VOCAB) for i in each]
        if self.kind == "beams" and n:
            # Some die: each goes on from one of the first, but those go on from themselves.
            live = 1 + sum(hashes) % len(self.members)
            return [(i if i < live else (hashes[i] + i) % live, (hashes[i] + i) % VOCAB) for i in each]
        return [(0 if self.kind == "beams" else i, (hashes[i] + i) % VOCAB) for i in each]

    def over(self, tokens, prompts, longest):
        return tokens[-1] in self.stop or len(tokens) == self.max_new or len(tokens) + len(prompts) == longest

    def solo(self, longest):
        """What each gets where nobody else is here."""
        got = [[] for _ in self.members]
        live = list(range(len(got)))
        while live:
            drawn = self.draws([following(m.prompt + g) for m, g in zip(self.members, got, strict=True)], len(got[0]))
            before = [list(g) for g in got]
            for i in live:
                got[i] = before[drawn[i][0]] + [drawn[i][1]]
            over = [i for i in live if self.over(got[i], self.members[i].prompt, longest)]
            live = [i for i in live if i not in over] if self.kind in ("samples", "early") or not over else []
        return got


class Engine:
    """Steps a scheduler and its device, and looks at everything after each call."""

    def __init__(self, limits, policy, rng, grows):
        self.scheduler = RecordedScheduler(limits, policy, self.key if grows else None)
        self.scheduler.recorder.__init__(self.scheduler, length=10**6)
        self.limits, self.rng, self.device = limits, rng, Device(limits)
        self.live, self.tally, self.now = [], Counter(), 0.0

    def key(self, seq, n):
        size = self.limits.block_size
        return tuple((seq.owner.prompt + seq.owner.got)[n * size : (n + 1) * size])

    def add(self, group):
        size = self.limits.block_size
        for seq in group.seqs if self.rng.random() < 0.8 and not self.limits.apart else ():
            prompt = seq.owner.prompt
            seq.keys = [tuple(prompt[i : i + size]) for i in range(0, len(prompt) - size + 1, size)]
        try:
            self.scheduler.add(group.ticket, self.now)
        except (InvalidRequest, PromptTooLong):
            self.tally["refused"] += 1
            return
        self.live.append(group)
        self.check()

    def step(self):
        s = self.scheduler
        for seq in s.expire(self.now):
            self.end(seq.owner, "late")
        s.make_room()
        self.check()
        plan = s.schedule(self.now)
        self.check()
        if plan is None:
            return False
        for seq in plan.fresh:
            assert all(each.row >= 0 for each in seq.bound), "somebody started in part"
        if self.rng.random() < 0.05:
            s.rollback(plan)
            self.check()
            return True
        self.run(plan)
        return True

    def run(self, plan):
        s, size = self.scheduler, self.limits.block_size
        for seq, sources in plan.copies:
            for n, (source, own) in enumerate(zip(sources, seq.blocks, strict=False)):
                lender = next((o.blocks[n] for o in s.order if o.row == source.lender), own)
                self.device.memory[own * size : own * size + size] = self.device.memory[lender * size :][:size]
        real = plan.q > 0
        assert not real.all() or not any(seq.vacant for seq in plan.seqs)
        rows, start, q, emit = plan.rows[real], plan.start[real], plan.q[real], plan.emit[real]
        x = lower(rows, start, q, emit, s.block_table, size, tiles=(1, 4))
        seqs = [seq for seq, ok in zip(plan.seqs, real.tolist(), strict=True) if ok]
        known = [seq.owner.prompt + seq.owner.got for seq in seqs]
        out = self.device.run(x, np.array([known[i][p] for i, p in zip(x.seg, x.pos, strict=True)]), {})
        hashes = dict(zip([seq for seq, e in zip(seqs, emit.tolist(), strict=True) if e], out.tolist(), strict=True))
        emitting = [seq for seq, e in zip(plan.seqs, plan.emit.tolist(), strict=True) if e]
        stopped, parents, got = [], [], {}
        for seq in emitting:
            member = seq.owner
            group = member.group
            if seq.link is not None and not seq.link.parted and not seq.link.alike:
                assert {*seq.link.seqs} <= {*emitting}, "they do not draw together"
            first = group.seqs[0]
            if group.kind in ("samples", "early"):
                parent = first if seq.vacant else seq
                token = (hashes[parent] + member.number) % VOCAB
            else:
                of = [hashes[first if each.vacant else each] for each in group.seqs]
                at, token = group.draws(of, len(member.got))[member.number]
                parent = group.seqs[at]
            if parent is not seq:
                parents.append((seq, parent))
            got[seq] = [*parent.owner.got, token]
            stopped.append(token in group.stop if group.kind != "beams" else False)
        if any(seq.owner.group.kind == "beams" for seq in emitting):  # one that stops ends all of them
            for n, seq in enumerate(emitting):
                if seq.owner.group.kind == "beams":
                    stopped[n] = any(got[each][-1] in each.owner.group.stop for each in seq.owner.group.seqs)
        if emitting and self.rng.random() < 0.05:  # an output that is not finite
            bad = self.rng.choice(emitting)
            for each in list(bad.bound):
                self.end(each.owner, "failed")
            s.fail(bad)
            self.check()
        committed = s.commit(plan, np.array(stopped, bool), None, parents)
        for move in committed.moves:
            self.tally["moved"] += 1
            assert not (self.limits.rows_apart and move.block), "a block is copied that holds nothing"
            if move.block:
                of, to = move.block
                self.device.memory[to * size : to * size + size] = self.device.memory[of * size :][:size]
            if self.limits.rows_apart:
                self.copy(plan, move)
        alive = np.ones(len(emitting), bool) if committed.alive is None else committed.alive
        for seq, ok in zip(emitting, alive.tolist(), strict=True):
            if ok:
                seq.owner.got = got[seq]
        for seq in committed.finished:
            self.end(seq.owner, str(seq.finish))
        self.check()

    def copy(self, plan, move):
        """Where rows share no block, what a row goes on from is copied whole."""
        s, size = self.scheduler, self.limits.block_size
        n = -(-move.tokens // size)
        of, to = s.block_table[move.source, :n], s.block_table[move.to, :n]
        if move.seq.finish is None and of.all():
            for a, b in zip(of.tolist(), to.tolist(), strict=True):
                self.device.memory[b * size : b * size + size] = self.device.memory[a * size : a * size + size]

    def end(self, member, why):
        assert member.end is None, "it ends twice"
        member.end = why
        self.tally[why] += 1
        group = member.group
        want = group.solo(self.limits.max_model_len)[member.number]
        if why in ("stop", "length"):
            assert member.got == want, "not what it gets alone"
        elif group.kind != "beams":  # (a beam that would have died may be ended before)
            assert member.got == want[: len(member.got)], "not the beginning of what it gets alone"
        if all(m.end for m in group.members):
            self.live.remove(group)

    def check(self):
        self.scheduler.check()
        for group in self.live:
            here = [seq for seq in group.seqs if seq.finish is None]
            if len(group.seqs) > 1 and not group.ticket.link.parted:
                assert len({seq.row >= 0 for seq in here}) <= 1, "a group runs in part"

    def trouble(self):
        s, rng = self.scheduler, self.rng
        seqs = [seq for group in self.live for seq in group.seqs if seq.finish is None]
        if not seqs:
            return
        seq, what = rng.choice(seqs), rng.random()
        if what < 0.05:
            gone = [*seq.bound]
            s.cancel(seq)
            for each in gone:
                self.end(each.owner, "cancelled")
        elif what < 0.2:
            (s.unpause if seq.paused else s.pause)(seq)
        elif what < 0.23:
            s.forget()
            self.device.memory[:] = -8
        elif what < 0.3:
            s.limit(rng.choice((1, 2, self.limits.budget)))
        self.check()


def world(seed, policy):
    rng = random.Random(seed)
    rows, size = rng.randint(1, 8), rng.randint(1, 5)
    longest = rng.randint(8, 40)
    how = rng.choice(("shared", "apart", "copies"))
    limits = Limits(
        rows,
        rows + rng.randint(0, 20),
        rng.randint(1, 12),
        longest,
        2 + rng.randint(-(-longest // size), rows * longest // size + 1),
        size,
        reserve_all=rng.random() < 0.2,
        apart=how == "apart",
        copies=how == "copies",
    )
    engine = Engine(limits, policy, rng, grows=rng.random() < 0.7 and how != "apart")
    groups = []
    for name in range(rng.randint(1, 12)):
        kind, n = rng.choice(("one", "samples", "early", "mixed", "beams")), rng.randint(2, rows + 1)
        base = [1 - i % 2 for i in range(rng.randint(2, longest - 2))]
        prompts = [base] * n
        if kind == "mixed":
            prompts = [[1 - i % 2 for i in range(rng.randint(1, longest - 2))] for _ in range(n)]
        terms = dict(priority=rng.randint(0, 2), tenant=rng.choice("ab"))
        if rng.random() < 0.1:
            terms["deadline"] = rng.uniform(1, 30)
        stop = {rng.randrange(VOCAB)} if rng.random() < 0.7 else set()
        groups.append(Group(name, kind, prompts[:1] if kind == "one" else prompts, rng.randint(1, 20), stop, **terms))
    return engine, groups


def drive(seed, policy):
    engine, groups = world(seed, policy())
    rng = engine.rng
    while groups or engine.live:
        engine.now += 1.0
        if groups and rng.random() < 0.5:
            engine.add(groups.pop())
        if rng.random() < 0.3:
            engine.trouble()
        if not engine.step() and not groups:
            if not engine.live:
                continue
            paused = [s for g in engine.live for s in g.seqs if s.finish is None and s.paused]
            assert paused, "work waits, and nothing moves"
            for seq in paused:
                engine.scheduler.unpause(seq)
    s = engine.scheduler
    assert s.running == s.waiting == s.waits == s.paused_rows == 0 and s.policy.peek() is None
    assert s.pool.free == s.pool.usable, "a block is lost"
    assert replay(s.recorder.dump(), policy()) == sum(
        e["event"] == "plan" and bool(e["plan"]) for e in s.recorder.dump()["events"]
    )
    return engine.tally


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p()).__name__ + str(POLICIES.index(p)))
@settings(max_examples=60, **QUIET)
@given(seed=st.integers(0, 2**32))
def test_linked_sequences_start_together_and_get_what_they_get_alone(policy, seed):
    drive(seed, policy)
