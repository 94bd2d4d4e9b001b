"""Whatever comes in whatever order: every stream equals its solo run, and nothing is lost.

The device is fake: it stores token ids where a real one stores keys and values, through slots and block tables, and
"samples" a hash of the prefix that it reads back. A block that is lost or shared changes every token after.
"""

import random
import zlib
from collections import deque

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hibachi.plan.lower import lower, pad
from hibachi.plan.scheduler import Limits, Scheduler
from hibachi.plan.sequence import Seq
from hibachi.request import Finish

VOCAB = 11
LONGEST = 40


def following(context):
    """The next token: a hash of all before."""
    return zlib.crc32(np.asarray(context, np.int32).tobytes()) % VOCAB


def solo(prompt, end, stop):
    """What a sequence draws when it is alone, and why it ends."""
    tokens = list(prompt)
    while len(tokens) < end:
        tokens.append(following(tokens))
        if tokens[-1] in stop:
            return tokens[len(prompt) :], Finish.STOP
    return tokens[len(prompt) :], Finish.LENGTH


class Device:
    """Memory of token ids, and each row's newest token: all that a step may read of the steps before it."""

    def __init__(self, limits):
        self.block_size = limits.block_size
        self.memory = np.full(limits.blocks * limits.block_size, -7)
        self.newest = np.zeros(limits.rows + 1, np.int64)  # the last one is the padding rows'

    def run(self, x, tokens):
        """Outputs [n_out]. tokens [T]: -1 where the host does not know the token yet."""
        rows = x.row[x.seg]
        self.memory[x.slot] = np.where(tokens < 0, self.newest[rows], tokens)
        out = []
        for t in x.last.tolist():
            i = x.seg[t]
            places = x.block_table[i][:, None] * self.block_size + np.arange(self.block_size)
            out.append(following(self.memory[places.reshape(-1)[: x.pos[t] + 1]]))
        return np.array(out, np.int64)


class Request:
    def __init__(self, name, rng):
        self.name = name
        self.prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
        self.stop = {rng.randrange(VOCAB)} if rng.random() < 0.5 else set()
        self.seq = Seq(len(self.prompt), rng.choice([None, *range(1, 12)]), owner=self)
        self.got, self.ends = [], []
        self.sampled = 0  # tokens drawn, those in flight included
        self.decoding = False


class World:
    """An engine in miniature: plans up to `depth` ahead of what is committed."""

    def __init__(self, limits, depth, rng, padded):
        self.limits, self.depth, self.rng, self.padded = limits, depth, rng, padded
        self.scheduler, self.device = Scheduler(limits, key_of=self.key), Device(limits)
        self.host = np.zeros((limits.rows, LONGEST + 1), np.int64)
        self.flying = deque()
        self.arrived, self.admitted = [], []

    def key(self, seq, n):
        size = self.limits.block_size
        tokens = seq.owner.prompt + seq.owner.got
        assert len(tokens) >= (n + 1) * size, "published before its tokens are known"
        return tuple(tokens[n * size : (n + 1) * size])

    def add(self, request):
        size = self.limits.block_size
        keys = [tuple(request.prompt[i : i + size]) for i in range(0, len(request.prompt) - size + 1, size)]
        request.seq.keys, request.seq.salt = keys if self.rng.random() < 0.9 else None, self.rng.choice("ab")
        self.scheduler.add(request.seq)
        self.arrived.append(request)

    def running(self):
        return [r for r in self.arrived if r.seq.row >= 0]

    def cancel(self):
        request = self.rng.choice(self.arrived)
        if self.scheduler.cancel(request.seq):
            request.ends.append(Finish.CANCELLED)

    def lose_the_cache(self):
        self.send_back(self.scheduler.forget())
        self.device.memory[:] = -7

    def send_back(self, sent):
        for seq, _ in sent:
            seq.owner.sampled, seq.owner.decoding = len(seq.owner.got), False

    def launch(self):
        s, limits = self.scheduler, self.limits
        must = {r for r in self.running() if r.decoding and len(r.prompt) + r.sampled < r.seq.end}
        plan = s.schedule()
        s.check()
        must = {r for r in must if r.seq.row >= 0}
        if plan is not None:
            self.send_back(plan.preempted)
        if plan is None:
            assert not must
            return False
        requests = [seq.owner for seq in plan.seqs]
        assert must <= set(requests), "a decode row did not get its token"
        assert plan.q.min() >= 1 and plan.q.max() <= limits.chunk and plan.q.sum() <= limits.budget
        assert sorted(plan.q.tolist(), key=lambda q: q != 1) == plan.q.tolist(), "decode rows first"
        for seq in plan.fresh:
            self.admitted.append(seq.owner)
            self.host[seq.row] = -1
            known = seq.owner.prompt + seq.owner.got
            assert seq.length == len(known)
            self.host[seq.row, : seq.length] = known
        for request, emits in zip(requests, plan.emit.tolist(), strict=True):
            request.sampled += emits
            request.decoding |= emits
        x = lower(plan.rows, plan.start, plan.q, plan.emit, s.block_table, limits.block_size, tiles=(1, 4))
        tokens, wanted = self.host[x.row[x.seg], x.pos], len(x.last)
        if self.padded:
            size = limits.budget + 3
            tile = x.tile_q.shape[1]
            x = pad(x, tokens=size, rows=limits.rows, blocks=s.block_table.shape[1], tile=tile, trash_row=limits.rows)
            tokens = np.pad(tokens, (0, size - len(tokens)))
        out = self.device.run(x, tokens)[:wanted]
        self.device.newest[plan.rows[plan.emit]] = out
        self.flying.append((plan, out))
        return True

    def commit(self):
        plan, out = self.flying.popleft()
        at = np.flatnonzero(plan.emit)
        requests = [plan.seqs[i].owner for i in at.tolist()]
        stop = np.array([t in r.stop for r, t in zip(requests, out.tolist(), strict=True)], bool)
        committed = self.scheduler.commit(plan, stop)
        self.scheduler.check()
        alive = np.ones(len(at), bool) if committed.alive is None else committed.alive
        for i, request, token, ok in zip(at.tolist(), requests, out.tolist(), alive.tolist(), strict=True):
            if ok:
                request.got.append(token)
                self.host[plan.rows[i], plan.end[i]] = token
        for seq in committed.finished:
            seq.owner.ends.append(seq.finish)

    def tick(self):
        if not (len(self.flying) < self.depth and self.launch()) and self.flying:
            self.commit()


@settings(max_examples=300, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 6),
    blocks=st.integers(4, 14),
    block_size=st.sampled_from([1, 2, 4, 8]),
    budget=st.integers(1, 40),
    chunk=st.integers(1, 16),
    depth=st.integers(1, 3),
    n=st.integers(1, 14),
    padded=st.booleans(),
    unlucky=st.booleans(),
)
def test_every_stream_equals_its_solo_run(seed, rows, blocks, block_size, budget, chunk, depth, n, padded, unlucky):
    rng = random.Random(seed)
    world = World(Limits(rows, max(budget, rows), chunk, LONGEST, blocks, block_size), depth, rng, padded)
    expected = [Request(i, rng) for i in range(n)]
    usable = (blocks - 1) * block_size
    for r in expected:  # nobody asks for more than there is
        del r.prompt[max(1, usable - 2) :]
        r.seq.prompt_len = len(r.prompt)
        r.seq.max_new = min(r.seq.max_new or LONGEST, usable - len(r.prompt) + 1)
    todo = deque(expected)
    ticks = 0
    while todo or world.flying or world.scheduler.running or world.scheduler.waiting:
        ticks += 1
        assert ticks < 20000, "no progress"
        while todo and rng.random() < 0.5:
            world.add(todo.popleft())
        if unlucky and world.arrived and rng.random() < 0.05:
            world.cancel()
            world.scheduler.check()
        if unlucky and rng.random() < 0.01:
            world.lose_the_cache()
            world.scheduler.check()
        world.tick()

    for r in expected:
        want, why = solo(r.prompt, r.seq.end, r.stop)
        assert len(r.ends) == 1, "a stream ends exactly once"
        if r.ends == [Finish.CANCELLED]:
            assert r.got == want[: len(r.got)]
        else:
            assert (r.got, r.ends) == (want, [why])
    first = list(dict.fromkeys(r.name for r in world.admitted))
    assert first == sorted(first), "first come, first served"
    assert world.scheduler.pool.free == blocks - 1 and world.scheduler.running == 0
