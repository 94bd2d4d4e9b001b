"""An engine in miniature around the scheduler, with a fake device, and all that must hold after every call.

The device stores token ids where a real one stores keys and values, through slots and block tables, and "samples" a
hash of the prefix that it reads back. A block that is lost or wrongly shared changes every token after. What a guilty
request writes is POISON, which stands for NaN: who reads it draws POISON.
"""

import copy
import zlib
from collections import Counter, deque

import numpy as np

from hibachi.common.shapes import fixed
from hibachi.engine.scheduler.lower import lower, pad
from hibachi.engine.scheduler.policy import Fair, Fcfs, Priority, Shares, WaitingServed
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Limits
from hibachi.engine.scheduler.tiers import Tiers
from hibachi.errors import PromptTooLong, QueueFull
from hibachi.request import Finish

VOCAB = 11
NOTHING, GARBAGE, POISON = -7, -8, -9  # never written; written by a step that did not happen; not finite
REFUSED = "refused"
ALIKE = (0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 0, 1)  # how prompts begin


def following(context):
    """The next token: a hash of all before."""
    return zlib.crc32(np.asarray(context, np.int32).tobytes()) % VOCAB


def solo(prompt, end, stop, fed=()):
    """What a sequence draws when it is alone, and why it ends. fed: {its length: what stands from its last token on}"""
    tokens = list(prompt)
    while len(tokens) < end:
        tokens.append(following(tokens))
        if tokens[-1] in stop:
            return tokens[len(prompt) :], Finish.STOP
        if len(tokens) in fed:
            tokens[-1:] = fed[len(tokens)]
    return tokens[len(prompt) :], Finish.LENGTH


def turn(policy, seq):
    """What orders the queue, said once more; in the order of arrival, names grow."""
    if isinstance(policy, (Fair, Shares)):
        return seq.priority
    if isinstance(policy, Fcfs):
        return seq.owner.name
    if policy.age is None:
        return seq.priority, seq.owner.name
    return seq.priority * policy.age + seq.arrival, seq.owner.name


class Device:
    """Memory of token ids, and each row's newest token: all that a step may read of the steps before it."""

    def __init__(self, limits):
        self.block_size = limits.block_size
        self.memory = np.full(limits.blocks * limits.block_size, NOTHING)
        self.newest = np.zeros(limits.rows + 1, np.int64)  # the last one is the padding rows'

    def run(self, x, tokens, poisoned):
        """Outputs [n_out]. tokens [T]: -1 where the host does not know the token yet. poisoned: {row: the first
        position that it spoils}.
        """
        rows = x.row[x.seg]
        values = np.where(tokens < 0, self.newest[rows], tokens)
        for row, first in poisoned.items():
            values = np.where((rows == row) & (x.pos >= first), POISON, values)
        self.memory[x.slot] = values
        out = []
        for t in x.last.tolist():
            i = x.seg[t]
            places = x.block_table[i][:, None] * self.block_size + np.arange(self.block_size)
            context = self.memory[places.reshape(-1)[: x.pos[t] + 1]]
            bad = np.count_nonzero(context == POISON)
            out.append(POISON if bad else following(context))
        return np.array(out, np.int64)


class Request:
    """name: in order of arrival. prompt: tokens; stop: tokens that end it. feeds: a source of random numbers, if it
    waits for its caller after each token; fed: see `solo`.
    """

    def __init__(self, name, prompt, max_new=None, stop=(), **terms):
        self.name, self.prompt, self.stop = name, list(prompt), set(stop)
        self.shares = terms.pop("shares", True)
        self.seq = Seq(len(self.prompt), max_new, owner=self, **terms)
        self.got, self.ends = [], []
        self.feeds, self.fed, self.waits = None, {}, False
        self.guess = []  # what somebody proposes to come next
        self.sampled = 0  # tokens drawn, those in flight included
        self.decoding = False
        self.begun = False  # had a row
        self.guilty = False

    @property
    def known(self):
        return len(self.prompt) + self.sampled

    @property
    def alive(self):
        return self.seq.finish is None and not self.ends


class Flight:
    """A step that was launched: its plan, what it drew, where it wrote."""

    def __init__(self, plan, out, slots):
        self.plan, self.out, self.slots = plan, out, slots
        self.waits = any(s.owner.feeds and emits for s, emits in zip(plan.seqs, plan.emit.tolist(), strict=True))


class World:
    """Plans up to `depth` ahead of what is committed. Every method that changes something checks everything after.

    strict: poison is only given to rows that emit, with one step in flight: then nobody else may be harmed.
    every: look at everything after each so many calls (streams, and what each step does, are always looked at).
    proposals: a source of random numbers; rows are proposed tokens then, right ones and wrong ones. tier: likewise;
    what is stored is found again then, for a while.
    """

    def __init__(
        self, limits, policy=None, depth=1, *, padded=False, strict=True, every=1, grows=True, proposals=None, tier=None
    ):
        self.proposals, self.forgets, self.tier = proposals, tier, {}
        self.limits, self.depth, self.padded, self.every = limits, depth, padded, every
        self.strict = strict and depth == 1
        self.scheduler = Scheduler(limits, policy, self.key if grows else None)
        self.device = Device(limits)
        self.host = np.zeros((limits.rows, limits.max_model_len + 1), np.int64)
        self.flying = deque()
        self.live = {}  # by name; in order of arrival
        self.begun = []  # names, in the order in which they first started
        self.now = 0.0
        self.steps = 0
        self.calls = 0
        self.salts = {}  # of who wrote to a block
        self.tally = Counter()  # how requests ended
        if tier is not None:
            self.scheduler.tiers = Tiers(b"root", self.tier.get)
        self.poison = set()  # requests whose next step, if it emits, writes POISON

    # ---- what the scheduler asks --------------------------------------------------------------------------------

    def key(self, seq, n):
        size = self.limits.block_size
        tokens = seq.owner.prompt + seq.owner.got
        assert len(tokens) >= (n + 1) * size, "published before its tokens are known"
        return tuple(tokens[n * size : (n + 1) * size])

    # ---- commands -----------------------------------------------------------------------------------------------

    def add(self, request):
        size = self.limits.block_size
        keys = [tuple(request.prompt[i : i + size]) for i in range(0, len(request.prompt) - size + 1, size)]
        request.seq.keys = keys if request.shares else None
        waiting = self.scheduler.waiting
        try:
            self.scheduler.add(request.seq, self.now)
        except (QueueFull, PromptTooLong) as e:
            full = self.limits.max_num_queued_reqs is not None and waiting >= self.limits.max_num_queued_reqs
            assert full or isinstance(e, PromptTooLong), "refused without reason"
            request.ends.append(REFUSED)
            self.tally[REFUSED] += 1
            assert self.scheduler.waiting == waiting, "a refused request waits"
        else:
            self.live[request.name] = request
        self.check()

    def cancel(self, request):
        before = request.seq.finish
        assert self.scheduler.cancel(request.seq) == (before is None), "cancel lies"
        if before is None:
            self.ended(request, Finish.CANCELLED)
        self.check()

    def expire(self, seconds):
        self.now += seconds
        looked = self.calls % self.every == 0
        late = {r.name for r in self.live.values() if self.is_late(r)} if looked else ()
        ended = self.scheduler.expire(self.now)
        assert not looked or {seq.owner.name for seq in ended} == late, "a deadline was not kept"
        for seq in ended:
            self.ended(seq.owner, Finish.ERROR)
        self.check()

    def is_late(self, request):
        seq = request.seq
        started = request.begun or seq.row >= 0
        return (seq.deadline is not None and seq.deadline <= self.now) or (
            seq.start_by is not None and seq.start_by <= self.now and not started
        )

    def forget(self):
        self.send_back(self.scheduler.forget())
        self.device.memory[:] = GARBAGE
        self.check()
        assert self.scheduler.running == 0

    def pause(self, request):
        self.scheduler.pause(request.seq)
        self.check()

    def unpause(self, request):
        if request.waits:
            self.feed(request)
        self.scheduler.unpause(request.seq)
        self.check()

    def feed(self, request):
        """Its caller gives a token or several, or leaves the one that was drawn."""
        seq, rng, request.waits = request.seq, request.feeds, False
        n, at = len(request.prompt) + len(request.got), self.scheduler.known(seq)
        assert n == at, "tokens are miscounted"
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(1, min(6, seq.end - n)))]
        if rng.random() < 0.3:
            return
        request.fed[n] = tokens
        request.got[-1:] = tokens
        request.sampled = len(request.got)
        if seq.row >= 0:
            self.host[seq.row, n - 1 : n - 1 + len(tokens)] = tokens
        self.scheduler.feed(seq, len(tokens) - 1)
        request.decoding &= len(tokens) == 1
        self.tally["fed"] += len(tokens)

    def limit(self, budget):
        self.scheduler.limit(budget)

    def abort(self):
        """The steps in flight do not happen: newest first."""
        while self.flying:
            flight = self.flying.pop()
            self.device.memory[flight.slots] = GARBAGE
            self.send_back(self.scheduler.rollback(flight.plan))
            self.check()
        for seq in self.scheduler.order:
            if seq.row >= 0:
                ahead = self.scheduler.table.known[seq.row] - self.scheduler.table.computed[seq.row]
                seq.owner.sampled = len(seq.owner.got)
                seq.owner.decoding = not self.scheduler.prefilling(seq) and ahead == 1

    def send_back(self, sent):
        for seq, _ in sent:
            seq.owner.sampled, seq.owner.decoding = len(seq.owner.got), False

    def ended(self, request, reason):
        request.ends.append(reason)
        assert len(request.ends) == 1, "a stream ends exactly once"
        del self.live[request.name]
        self.poison.discard(request.name)
        late = reason is Finish.ERROR and not request.guilty
        self.tally["late" if late else str(reason)] += 1
        if self.strict and late:
            assert request.seq.deadline is not None or request.seq.start_by is not None, "an innocent one failed"
        self.judge_stream(request)

    # ---- steps --------------------------------------------------------------------------------------------------

    def tick(self):
        """One step further; False if there is nothing to do."""
        # Nothing is planned behind a step of which nobody knows how many tokens it brings.
        ahead = not any(flight.plan.draft is not None or flight.waits for flight in self.flying)
        if len(self.flying) < self.depth and ahead and self.launch():
            return True
        if self.flying:
            self.commit()
            return True
        return False

    def launch(self):
        s = self.scheduler
        if sent := s.make_room():
            self.send_back(sent)
            self.check()
        order = [seq for seq in s.order if seq.row >= 0]
        moving = [seq for seq in order if not seq.paused]
        must = [q.owner for q in moving if q.owner.known < q.end]
        if (stages := s.limits.stages) > 1:
            must = [r for r in must if r.sampled == len(r.got)]  # nothing of it is in flight
        plain = None
        if self.proposals is not None and not self.flying:
            if self.calls % self.every == 0 and self.proposals.random() < 0.2:
                plain = copy.deepcopy(s, {id(self): self})
            self.propose()
        guesses = {seq: seq.draft for seq in order if seq.draft}
        among = min(s.running + s.waiting, s.limits.rows)
        plan = s.schedule(self.now)
        self.check()
        if stages > 1 and plan is not None and not plan.linked:
            assert np.count_nonzero(plan.q) <= -(-among // stages), "a plan leaves others without rows"
        self.judge_proposals(plan, guesses, plain)
        must = [r for r in must if r.seq.row >= 0]
        if stages > 1:
            must = must[: -(-sum(q.row >= 0 for q in moving) // stages)]
        must = [r for r in must if r.decoding]
        self.send_back(s.preempted)
        if plan is None:
            assert not must, "a decode row did not get its token"
            return False
        self.steps += 1
        self.judge(plan, order, must)
        for seq in plan.fresh:
            self.enter(seq)
        for seq, emits in zip(plan.seqs, plan.emit.tolist(), strict=True):
            seq.owner.sampled += emits
            seq.owner.decoding |= emits
        self.fly(plan)
        return True

    def judge(self, plan, order, must):
        """What a plan must be. order: who ran before, in the order of service; must: who wants its next token."""
        s, limits = self.scheduler, self.limits
        q = plan.q.tolist()
        assert min(q) >= 1 and max(q) <= limits.chunk and sum(q) <= s.budget and len(q) <= limits.rows
        assert sorted(q, key=lambda n: n != 1) == q, "decode rows first"
        assert [seq.row for seq in plan.seqs] == plan.rows.tolist() and len(set(plan.seqs)) == len(q)
        assert (plan.start + plan.q <= s.table.end[plan.rows] - 1).all(), "the last token is never fed back"
        fresh = set(plan.fresh)
        served = {seq.owner for seq in plan.seqs}
        if not served.issuperset(must):
            assert s.budget < limits.rows and max(q) == 1 and not fresh, "a decode row did not get its token"
        if limits.prefill is not None:
            prompts = sum(n for seq, n in zip(plan.seqs, q, strict=True) if n > 1 or seq in fresh)
            assert prompts <= limits.prefill, "more of prompts than the cap allows"
        mine = [seq for seq, _ in plan.preempted if not seq.paused]
        assert not (mine and fresh), "somebody started in a step that preempted"
        first = next((seq for seq in order if not seq.paused), None)
        assert first is None or first not in mine, "the first in the order of service was preempted"
        if plan.fresh and self.calls % self.every == 0:
            self.judge_order(plan)

    def propose(self):
        """Somebody guesses what comes: right to some point, and more than there may be room for."""
        rng = self.proposals
        for seq in self.scheduler.order:
            if seq.row < 0 or rng.random() < 0.3:
                continue
            request, n = seq.owner, rng.randrange(1, 8)
            tokens = request.prompt + request.got
            for _ in range(n):
                tokens.append(following(tokens))
            guess = request.guess = tokens[-n:]
            wrong = rng.randrange(n + 2)
            guess[wrong:] = [(token + 1) % VOCAB for token in guess[wrong:]]
            seq.draft = n

    def judge_proposals(self, plan, guesses, plain):
        """guesses: how many were proposed. plain: the scheduler as it was before."""
        s = self.scheduler
        assert not any(r.seq.draft for r in self.live.values()), "proposals are for one step"
        if plan is not None and plan.draft is not None:
            draft = plan.draft
            assert draft.any() and (draft >= 0).all() and not draft[~plan.emit].any()
            assert int((plan.q + draft).sum()) <= s.budget, "proposals go beyond the budget"
            assert (plan.end + draft <= s.table.end[plan.rows] - 1).all(), "a proposal that cannot be kept"
            assert not s.pool or (plan.end + draft <= s.table.capacity[plan.rows]).all(), "no room for a proposal"
            assert all(n <= guesses.get(seq, 0) for seq, n in zip(plan.seqs, draft.tolist(), strict=True))
            self.tally["proposed"] += int(draft.sum())
        if plain is not None:
            assert _told(plain, plain.schedule(self.now)) == _told(s, plan), "proposals change what others get"

    def judge_order(self, plan):
        """Nobody overtakes."""
        policy = getattr(self.scheduler.policy, "order", self.scheduler.policy)
        waits = [r.seq for r in self.live.values() if r.seq.row < 0 and not r.seq.paused]
        for seq in plan.fresh:
            new = not seq.owner.begun
            for other in waits:
                assert turn(policy, seq) <= turn(policy, other), "somebody overtook in the queue"
                if new and other.owner.begun and not (isinstance(policy, Shares) and other.tenant != seq.tenant):
                    assert other.priority != seq.priority, "new work before preempted work of its class"

    def enter(self, seq):
        request = seq.owner
        known = request.prompt + request.got
        assert seq.length == len(known)
        assert seq.reused <= seq.length - 1, "a hit covers the last token"
        assert request.shares or not seq.reused, "a request found what it did not want to share"
        if not request.begun:
            request.begun = True
            self.begun.append(request.name)
        self.host[seq.row] = -1
        self.host[seq.row, : seq.length] = known

    def store(self, stores):
        """What is told to be stored is stored, and something that was is lost."""
        for block, name in stores.blocks:
            held = self.memory_of(block).copy()
            assert held.min() >= 0, "it is not sound"
            assert held.tolist() == self.tier.setdefault(name, (held, self.salts[block]))[0].tolist(), (
                "one name for two"
            )
        self.tally["stored"] += len(stores.blocks)
        if self.tier and self.forgets.random() < 0.2:
            del self.tier[self.forgets.choice(list(self.tier))]

    def memory_of(self, block):
        size = self.limits.block_size
        return self.device.memory[block * size : (block + 1) * size]

    def fly(self, plan):
        s, limits, size = self.scheduler, self.limits, self.limits.block_size
        if s.tiers:
            self.store(plan.stores)
            for block, _, (held, salt) in plan.loads.blocks:
                self.memory_of(block)[:], self.salts[block] = held, salt
                self.tally["loaded"] += 1
        for seq, start in zip(plan.seqs, plan.start.tolist(), strict=True):
            for block in seq.blocks[-(-start // size) :]:  # it has written to none of these
                self.salts[block] = seq.salt
        for seq in plan.fresh if not s.copies else ():
            found = seq.blocks[: seq.reused // size]
            assert all(self.salts[block] == seq.salt for block in found), "found under another salt"
        for seq, sources in plan.copies:
            assert len(sources) == seq.reused // size and seq in plan.fresh, "it copies what it did not find"
            for n, (source, own) in enumerate(zip(sources, seq.blocks, strict=False)):
                block = own
                if source.lender >= 0:
                    lender = next(other for other in s.order if other.row == source.lender)
                    assert lender is not seq and lender.blocks[n] != own, "it copies from itself"
                    block = lender.blocks[n]
                    self.tally["copied from a row"] += 1
                else:
                    self.tally["taken over"] += 1
                assert s.pool.node(block) == source.node, "it copies other contents"
                place = np.arange(size)
                self.device.memory[own * size + place] = self.device.memory[block * size + place]
        draft = plan.draft
        q = plan.q if draft is None else plan.q + draft
        x = lower(plan.rows, plan.start, q, plan.emit, s.block_table, size, tiles=(1, 4), tail=draft)
        tokens, wanted, slots = self.host[x.row[x.seg], x.pos], len(x.last), x.slot
        if draft is not None:
            n = zip(plan.seqs, draft.tolist(), strict=True)
            tokens[x.pos >= plan.end[x.seg]] = [token for seq, most in n for token in seq.owner.guess[:most]]
        assert s.limits.stages == 1 or tokens.min() >= 0, "it computes a token that is not known"
        if self.padded:
            n, outputs = limits.budget + 3, limits.rows if draft is None else limits.budget
            tile = x.tile_q.shape[1]
            shape = fixed(n, limits.rows, s.block_table.shape[1], tile)
            x = pad(x, shape._replace(outputs=max(outputs, wanted)), trash_row=limits.rows)
            tokens = np.pad(tokens, (0, n - len(tokens)))
        out = self.device.run(x, tokens, self.guilty_rows(plan) if self.poison else {})[:wanted]
        if draft is not None:
            out, at = [], np.split(out, np.cumsum((draft + 1)[plan.emit])[:-1])
            for i, drawn in zip(np.flatnonzero(plan.emit).tolist(), at, strict=True):
                out.append(self.kept(plan.seqs[i].owner, drawn.tolist()))
        else:
            self.device.newest[plan.rows[plan.emit]] = out
            out = [[token] for token in out.tolist()]
        self.flying.append(Flight(plan, out, slots))

    def kept(self, request, drawn):
        """What a row keeps of what it drew along its proposals: the first that differs is the last."""
        for n, (token, guess) in enumerate(zip(drawn, request.guess, strict=False), 1):
            if token != guess or token in request.stop:
                return drawn[:n]
        return drawn

    def guilty_rows(self, plan):
        """{row: the first position that it spoils}"""
        rows = {}
        for i, (seq, row, emits) in enumerate(zip(plan.seqs, plan.rows.tolist(), plan.emit.tolist(), strict=True)):
            if seq.owner.name in self.poison and (emits or not self.strict):
                self.poison.remove(seq.owner.name)
                seq.owner.guilty = True
                rows[row] = int(plan.start[i])
                if plan.draft is not None and (n := int(plan.draft[i])) and self.proposals.random() < 0.5:
                    rows[row] = int(plan.end[i]) + self.proposals.randrange(n)  # which it may never come to
        return rows

    def commit(self):
        s = self.scheduler
        flight = self.flying.popleft()
        plan, out = flight.plan, flight.out  # the tokens of each emitting row
        at = np.flatnonzero(plan.emit)
        seqs = [plan.seqs[i] for i in at.tolist()]
        if bad := [i for i, drawn in zip(at.tolist(), out, strict=True) if drawn[-1] == POISON]:
            self.fail(plan, bad)
        stop = np.array([drawn[-1] in q.owner.stop for q, drawn in zip(seqs, out, strict=True)], bool)
        counts = None if plan.draft is None else np.array([len(drawn) for drawn in out], np.int32)
        committed = s.commit(plan, stop, counts)
        alive = np.ones(len(at), bool) if committed.alive is None else committed.alive
        for i, seq, drawn, ok in zip(at.tolist(), seqs, out, alive.tolist(), strict=True):
            if ok:
                assert POISON not in drawn and not seq.owner.ends, "a token after the end"
                seq.owner.got += drawn
                self.host[plan.rows[i], plan.end[i] : plan.end[i] + len(drawn)] = drawn
                seq.owner.sampled += len(drawn) - 1
                self.tally["accepted"] += len(drawn) - 1
        for seq in committed.finished:
            self.ended(seq.owner, seq.finish)
        if s.tiers:
            self.store(s.take_stores(self.forgets.choice((0, 3, 8))))
        for i, seq, ok in zip(at.tolist(), seqs, alive.tolist(), strict=True):
            if ok and seq.owner.feeds and seq.finish is None and seq.row == plan.rows[i]:
                seq.owner.waits = True
                s.pause(seq)
        self.check()

    def fail(self, plan, places):
        """End those whose outputs are not finite; writers before their readers, as readers may be innocent."""
        s = self.scheduler
        started = {seq: n for n, seq in enumerate(plan.fresh, 1)}
        for i in sorted(places, key=lambda i: started.get(plan.seqs[i], 0)):
            seq = plan.seqs[i]
            if seq.row == plan.rows[i] and s.table.generation[seq.row] == plan.generation[i]:
                assert seq.owner.guilty or not self.strict, "an innocent neighbour was harmed"
                self.send_back(s.fail(seq))
                self.ended(seq.owner, Finish.ERROR)
                self.check()

    # ---- what must hold -----------------------------------------------------------------------------------------

    def check(self):
        self.calls += 1
        if self.calls % self.every:
            return
        s = self.scheduler
        s.check()
        pool, size = s.pool, self.limits.block_size
        running = [seq for seq in s.order if seq.row >= 0]
        assert s.waiting == sum(r.seq.row < 0 for r in self.live.values()), "who waits is miscounted"
        assert s.running == len(running) == sum(r.seq.row >= 0 for r in self.live.values())
        holders = Counter(block for seq in running for block in seq.blocks)
        if s.copies:
            assert max(holders.values(), default=1) == 1, "two rows hold one block"
            kept = [block for block in range(1, pool.total) if pool.is_idle(block)]
            assert not pool.unsound(kept), "a block is kept that nobody vouched for"
        for seq in running:
            for block in seq.blocks[int(s.table.computed[seq.row]) // size :]:
                assert holders[block] == 1, "a block that is still written to is shared"
                assert not pool.publishes(block, pool.node(block)), "a block is known before it is full"

    def drained(self):
        """Everything has ended."""
        s = self.scheduler
        assert not self.live and not self.flying and s.running == s.waiting == 0
        assert s.pool.free == s.pool.usable, "a block is lost"
        assert s.policy.peek() is None
        s.check()

    def judge_stream(self, request):
        """Its stream is that of a solo run, whoever was here."""
        assert len(request.ends) == 1, "a stream ends exactly once"
        if request.ends == [REFUSED]:
            assert not request.got
            return
        want, why = solo(request.prompt, request.seq.end, request.stop, request.fed)
        if request.ends[0] in (Finish.STOP, Finish.LENGTH):
            assert (request.got, request.ends) == (want, [why]), "not its solo stream"
        else:
            assert request.got == want[: len(request.got)], "not the beginning of its solo stream"


def _told(scheduler, plan):
    """A plan in words, and what it made of the scheduler, without proposals."""
    if plan is None:
        return None
    names = [[seq.owner.name for seq in seqs] for seqs in (plan.seqs, plan.fresh, [s for s, _ in plan.preempted])]
    arrays = [a.tolist() for a in (plan.rows, plan.start, plan.q, plan.emit)]
    return names, arrays, scheduler.pool and scheduler.pool.evictions


def drive(world, requests, rng, *, unlucky=True, arrive=0.5, crowd=1000):
    """Bring the requests in, let everything happen that can, and see all of them to their ends.

    crowd: so many are here at most. Returns how often what happened.
    """
    requests = iter(requests)
    happened = Counter()
    coming = True
    while coming or world.live or world.flying:
        while coming and len(world.live) < crowd and rng.random() < arrive:
            if coming := (request := next(requests, None)) is not None:
                happened["requests"] += 1
                world.add(request)
                if unlucky and request.alive and rng.random() < 0.08:
                    world.poison.add(request.name)
        if unlucky and (event := _event(world, rng)):
            happened[event] += 1
        world.expire(rng.choice((0.0, 0.5, 1.0)))
        if not world.tick() and world.live and not coming:
            paused = [r for r in world.live.values() if r.seq.paused]
            assert paused, "work waits, and nothing moves"
            world.unpause(rng.choice(paused))
    world.drained()
    counts, pool = world.scheduler.counts, world.scheduler.pool
    happened.update(
        steps=world.steps, preemptions=counts.preemptions, hits=counts.prefix_hits, evictions=pool.evictions
    )
    return happened + world.tally


def _event(world, rng):
    """Something that happens now and then; its name."""
    chance = rng.random()
    if chance > 0.25 or not world.live:
        return None
    live = list(world.live.values())
    if chance < 0.03:
        world.cancel(rng.choice(live))
        return "cancel"
    if chance < 0.06:
        world.pause(rng.choice(live))
        return "pause"
    if chance < 0.12:
        if paused := [r for r in live if r.seq.paused]:
            world.unpause(rng.choice(paused))
            return "unpause"
    elif chance < 0.13:
        world.flying.clear()
        world.forget()
        return "cache lost"
    elif chance < 0.15:
        if world.flying:
            world.abort()
            return "rollback"
    elif chance < 0.17:
        world.limit(rng.randint(1, world.limits.budget))
        return "memory short"
    elif chance < 0.20:
        world.limit(world.limits.budget)
    elif chance < 0.22:
        world.poison.add(rng.choice(live).name)
        return "poison"
    return None


KEEPING = (  # rows, as long as there is memory
    Fcfs,
    Priority,
    lambda: Priority(age=4.0),
    Fair,
    lambda: Fair({"x": 2.0, "y": 0.5}),
    lambda: WaitingServed(1.2, 3),
    lambda: WaitingServed(2.0, 5, Fair()),
)
SHARES = (Shares, lambda: Shares({"x": 2.0, "y": 0.5}))
POLICIES = KEEPING + SHARES


def random_world(
    rng, *, depth=None, strict=True, policy=None, policies=POLICIES, copies=False, proposals=None, tier=None
):
    """A world with few rows, few blocks and tight budgets."""
    rows = rng.randint(1, 6)
    budget = max(rows, rng.randint(1, 40))
    stages = 1 if depth or copies or proposals else rng.choice((1, 1, 2, 3))
    limits = Limits(
        rows=rows,
        budget=budget,
        chunk=rng.choice((1, 2, 3, 5, 8, 16, budget)),
        max_model_len=40,
        blocks=rng.randint(4, 14),
        block_size=rng.choice((1, 2, 4, 8)),
        max_num_queued_reqs=rng.choice((None, None, None, 4)),
        prefill=rng.choice((None, None, 1, 4, 12)),
        reserve_all=rng.random() < 0.15,
        copies=copies,
        stages=stages,
    )
    if stages > 1:
        depth = stages
    return World(
        limits,
        rng.choice(policies)() if policy is None else policy,
        rng.randint(1, 3) if depth is None else depth,
        padded=rng.random() < 0.3,
        strict=strict,
        grows=rng.random() < 0.8,
        proposals=proposals,
        tier=tier,
    )


def random_request(name, rng, limits):
    """One that fits. Most prompts begin alike."""
    usable = min((limits.blocks - 1) * limits.block_size, limits.max_model_len - 1)
    n = min(rng.randrange(1, 14), usable)
    most = max(1, usable - n + 1)
    new = rng.choice([None, *range(1, 12)])
    if new is None and usable < limits.max_model_len - 1:
        new = most
    return Request(
        name,
        [*ALIKE[: rng.choice((n, n - 1, rng.randrange(n + 1)))], *(rng.randrange(2) for _ in range(n))][:n],
        None if new is None else min(new, most),
        {rng.randrange(VOCAB)} if rng.random() < 0.5 else (),
        shares=rng.random() < 0.9,
        salt=rng.choice("aab"),
        priority=rng.choice((0, 0, 1, 2)),
        tenant=rng.choice("xyz"),
        deadline=rng.choice((None, None, None, None, 30.0, 100.0)),
        start_by=rng.choice((None, None, None, None, 20.0)),
    )
