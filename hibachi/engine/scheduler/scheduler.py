"""The scheduler: which sequences compute how many tokens in the next step, on which blocks.

One rule: a sequence has `known` tokens and `computed` tokens, and every step moves `computed` towards `known`. Whole
prefill, chunked prefill, decode, and computing again after a preemption differ only in how many tokens that takes.

`schedule()` is optimistic: it advances both counters at once and leaves a placeholder for the token that the step will
sample. It also publishes the blocks that the step will fill, so that sequences that start in the same step can share
them (every layer writes before it reads, and the writer stands before its sharers; with recurrent states, where a step
is several calls, they start in the next one). `commit()` says which sequences stopped; `rollback()` says that the step
did not happen. Rows that got another sequence in between are recognised by their generation and ignored.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from hibachi.engine.scheduler.blocks import BlockPool
from hibachi.engine.scheduler.checkpoints import Checkpoints
from hibachi.engine.scheduler.copies import Copied, Copies, CopySource
from hibachi.engine.scheduler.links import check_fits, others_of, tail, tokens_of, waited
from hibachi.engine.scheduler.names import state_name
from hibachi.engine.scheduler.policy import Fcfs, Policy
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import (
    NEVER,
    Bools,
    Committed,
    EntryLoad,
    EntryStores,
    Index,
    Ints,
    KnownStart,
    Limits,
    Move,
    Published,
    RowTable,
    SchedulerCounts,
    Sent,
    StepPlan,
)
from hibachi.engine.scheduler.tiers import Tiers
from hibachi.errors import QueueFull
from hibachi.request import Finish

TOGETHER = 8  # blocks that are stored at once, where they may wait: reading one takes as many calls as reading all


class Scheduler:
    """Runs sequences in the order of a policy, shares common prefixes, and preempts when blocks run out.

    policy: which sequence starts next (None means first come, first served). key_of: the key of the full block number n
    of a running sequence (n beyond the keys that it came with), from its tokens; None means generated tokens are not
    shared.
    """

    steps: int
    waiting: int
    paused_rows: int
    budget: int  # tokens of a plan
    limits: Limits
    policy: Policy

    def __init__(
        self, limits: Limits, policy: Policy | None = None, key_of: Callable[[Seq, int], Hashable] | None = None
    ) -> None:
        self.limits, self.policy, self._key_of = limits, policy or Fcfs(), key_of
        Scheduler.limit(self, limits.budget)
        self.counts: SchedulerCounts = SchedulerCounts()
        self.pool: BlockPool | None = BlockPool(limits.blocks, limits.block_size) if limits.blocks else None
        self.checkpoints: Checkpoints | None = (
            Checkpoints(limits.checkpoints, limits.checkpoint_every) if limits.checkpoints else None
        )
        self.copies: Copies | None = Copies(self.pool) if self.pool and limits.copies else None
        self._slots: dict[Seq, list[tuple[int, int]]] = {}  # checkpoints that it has written: (blocks, slot)
        rows = limits.rows
        width = min(self.pool.blocks_for(limits.max_model_len), self.pool.usable) if self.pool else 0
        self.block_table: Ints = np.zeros((rows, width), np.int32)
        self.table: RowTable = RowTable(rows)
        self.free_rows: list[int] = list(range(rows - 1, -1, -1))
        self.order: list[Seq] = []  # in the order of service
        self.rows: Index = np.zeros(0, np.intp)  # their rows
        self.stale: bool = False  # `rows` and `order` hold a sequence that has left
        self._slow = False  # is there a sequence that may compute only few tokens in a step?
        self.paused_rows = 0  # rows
        self.waits = 0  # rows whose last known tokens wait for others: see `Link`
        # Waiting sequences that may not start yet: held ones, and those that were preempted while paused.
        self._parked: set[Seq] = set()
        self.tiers: Tiers | None = None
        self.displaced: Callable[[], list[Seq]] | None = getattr(self.policy, "displaced", None)
        self._held_back: Seq | None = None  # the sequence that was to start in the last step and could not
        self.resting: frozenset[Hashable] = frozenset()  # tenants of which nothing is computed
        self._deadlines: list[tuple[float, int, Seq]] = []
        self._ripe = 64  # length at which they are looked through
        self.preempted: Sent = []  # sequences that lost their row in the last `schedule`, also if it returned no plan
        self._stuck: tuple[Seq, int] | None = None  # the sequence that found too few blocks, and how many there were
        self._numbers = 0
        self.steps = 0
        self.waiting = 0  # without sequences that were cancelled in the queue

    def fresh(self, policy: Policy) -> Scheduler:
        """An empty scheduler of the same limits, whose counters go on."""
        new = Scheduler(self.limits, policy, self._key_of)
        new.count_on(self)
        return new

    def count_on(self, before: Scheduler) -> None:
        """Go on with the counters of another scheduler, and with its tiers."""
        self.counts, self.tiers = before.counts, before.tiers
        if self.tiers:
            self.tiers.forget()
        if self.pool and before.pool:
            self.pool.evictions = before.pool.evictions
        if self.checkpoints and before.checkpoints:
            self.checkpoints.evictions = before.checkpoints.evictions

    @property
    def running(self) -> int:
        return self.limits.rows - len(self.free_rows)

    @property
    def held(self) -> int:
        """Number of waiting sequences that `free` has not been called for."""
        return sum(seq.held for seq in list(self._parked))

    @property
    def shares_generated(self) -> bool:
        return self._key_of is not None

    # ---- commands ----------------------------------------------------------------------------------------------

    def add(self, seq: Seq, now: float = 0.0) -> None:
        """Queue a sequence, or those of a ticket (see `linked`). Raises QueueFull, or PromptTooLong if it can never be
        served.
        """
        members = () if seq.link is None else seq.link.seqs
        for each in (seq, *members):
            each.end = self.limits.fit(each.prompt_len, each.max_new)
        if seq.link is not None:
            check_fits(self.limits, seq.link)
            seq.end, seq.link.tokens = tokens_of(seq.link)
        if self.limits.max_num_queued_reqs is not None and self.waiting >= self.limits.max_num_queued_reqs:
            raise QueueFull(
                f"The queue is full: expected fewer than max_num_queued_reqs={self.limits.max_num_queued_reqs} waiting "
                f"requests; got {self.waiting}. Try again later."
            )
        self._numbers += 1
        seq.number, seq.arrival, seq.length = self._numbers, now, seq.prompt_len + seq.begun
        seq.rank = self.policy.rank(seq)
        for n, each in enumerate(members, self._numbers + 1):
            each.number, each.arrival, each.length = n, now, each.prompt_len + each.begun
        self._numbers += len(members)
        self._queue(seq)  # a policy that raises has queued nothing
        for time in (seq.start_by, seq.deadline):
            if time is not None:
                heapq.heappush(self._deadlines, (time, seq.number, seq))
        if len(self._deadlines) > self._ripe:  # sequences that ended in time would stay until then
            self._deadlines = [item for item in self._deadlines if item[2].finish is None]
            heapq.heapify(self._deadlines)
            self._ripe = max(64, 2 * len(self._deadlines))

    def cancel(self, seq: Seq, reason: Finish = Finish.CANCELLED) -> bool:
        """End a waiting or running sequence, as a caller wants it; False if it has ended before."""
        return self.end(seq, reason)

    def end(self, seq: Seq, reason: Finish) -> bool:
        """`cancel`, for whatever reason."""
        if seq.finish is not None:
            return False
        if seq.link is not None and seq is seq.link.ticket:
            return any([self.end(each, reason) for each in list(seq.link.seqs)])
        if seq.row >= 0:
            self.leave(seq, reason)
            return True
        ticket = seq.ticket
        self.waiting -= 1  # it leaves the queue when it comes to the front
        self._parked.discard(ticket)
        self._over(seq, reason, seq.length)
        return True

    def expire(self, now: float) -> list[Seq]:
        """End the sequences whose deadline has passed, or that should have started by now; returns them."""
        ended = []
        while self._deadlines and self._deadlines[0][0] <= now:
            time, _, seq = heapq.heappop(self._deadlines)
            late = time == seq.deadline or not (seq.started or seq.row >= 0)
            members = [seq] if seq.link is None else list(seq.link.seqs)
            if late and self.end(seq, Finish.ERROR):
                ended += members
        return ended

    def next_deadline(self) -> float | None:
        """The earliest time at which `expire` has something to do."""
        while self._deadlines and self._deadlines[0][2].finish is not None:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def pause(self, seq: Seq) -> None:
        """Compute nothing of it until `unpause`; when rows or blocks are short, it is the first to lose its row.

        One that waits to start keeps its place in the queue, and is paused when it has started.
        """
        if seq.finish is None and not seq.paused:
            for each in seq.bound:
                each.paused = True
                self.paused_rows += each.row >= 0
            seq.ticket.paused = True

    def unpause(self, seq: Seq) -> None:
        if seq.paused:
            for each in seq.bound:
                each.paused = False
                self.paused_rows -= each.row >= 0
            seq.ticket.paused = False
            self._unpark(seq.ticket)

    def free(self, seq: Seq) -> None:
        """A held sequence may start from now on, with all that it is linked with: it takes the place in the queue that
        it had.
        """
        if seq.held:
            seq.held = False
            seq.ticket.held = any(each.held for each in seq.bound)
            self._unpark(seq.ticket)

    def feed(self, seq: Seq, more: int) -> None:
        """The last token of a sequence, which nothing has computed yet, is another one, and so many more follow it."""
        if seq.row >= 0:
            for counter in (self.table.known, self.table.done, self.table.gained):
                counter[seq.row] += more
        else:
            seq.length += more

    def _unpark(self, seq: Seq) -> None:
        if seq in self._parked and not (seq.paused or seq.held):
            self._parked.remove(seq)
            self.policy.push(seq)

    def make_room(self) -> Sent:
        """Sequences that lose their row because another could not start otherwise: paused ones, then those that the
        policy names.

        Asked before each step.
        """
        if (
            not self.waiting
            or (not self.paused_rows and self.displaced is None)
            or (next_ := self.policy.peek()) is None
        ):
            return []
        if self.paused_rows:
            paused = [seq for seq in self.order if seq.row >= 0 and seq.paused]
            others_run = len(paused) < self.running
            if not (len(self.free_rows) >= len(next_.bound) and others_run) or self.short(next_):
                # One row is enough while others go on; where none does, blocks may be what is missing.
                return self._preempt(paused[-1:] if others_run else paused)
        if self.displaced is None or (len(self.free_rows) >= len(next_.bound) and not self.short(next_)):
            return []
        return self._preempt(self.asked_back(next_))

    def asked_back(self, next_: Seq) -> list[Seq]:
        """The sequences that the policy sends back so that this one can start; none if it could not then either."""
        given = [] if self.displaced is None else self.displaced()
        seqs = [each for s in given for each in (s.link.seqs if s.link and s is s.link.ticket else [s])]
        return seqs if len(self.free_rows) + len(seqs) >= len(next_.bound) else []

    def short(self, seq: Seq) -> bool:
        """Whether it found too few blocks, and none has become free since."""
        return bool(self.pool and self._stuck and self._stuck[0] is seq and self.pool.free <= self._stuck[1])

    @property
    def shares_rows(self) -> bool:
        return self.displaced is not None

    def rest(self, tenants: frozenset[Hashable]) -> None:
        """Compute nothing of these tenants until told otherwise; they keep their rows."""
        self.resting = tenants

    def _comes(self) -> Seq | None:
        """The next sequence to start, unless it has just found that it cannot yet."""
        seq = self.policy.peek() if self.waiting and self.free_rows else None
        if seq is None or seq is self._held_back or self.short(seq) or len(self.free_rows) < len(seq.bound):
            return None
        return seq

    def wanted(self) -> tuple[dict[Hashable, int], dict[Hashable, int]]:
        """By tenant: the tokens that its running sequences would compute in the next step, and its best class.

        The sequence that is next to start is counted too.
        """
        tokens: dict[Hashable, int] = {}
        best: dict[Hashable, int] = {}
        moving = [seq for seq in self.order if seq.row >= 0 and not seq.paused]
        if (comes := self._comes()) is not None:
            moving.append(comes)
        for seq in moving:
            n = seq.length
            if seq.row >= 0:
                n = 1 if self.table.emitted[seq.row] else int(self.table.known[seq.row] - self.table.computed[seq.row])
            tokens[seq.tenant] = tokens.get(seq.tenant, 0) + max(1, min(n, self.limits.chunk))
            best[seq.tenant] = min(best.get(seq.tenant, seq.priority), seq.priority)
        return tokens, best

    def limit(self, budget: int) -> None:
        """Set the token budget of a step, also to fewer tokens than rows. Plans of several stages share it."""
        self.budget = max(1, -(-budget // self.limits.stages))

    def propose(self, drafts: Sequence[tuple[Seq, int]]) -> None:
        """So many tokens are proposed to come next of each of these sequences, for the next step."""
        for seq, n in drafts:
            seq.draft = n

    def slow(self, seq: Seq, tokens: int) -> None:
        """Compute at most `tokens` of this sequence in a step from now on."""
        seq.most = max(1, tokens)
        self._slow = True

    def prefilling(self, seq: Seq) -> bool:
        """Whether it holds a row and has sampled no token since it got it."""
        return seq.row >= 0 and not self.table.emitted[seq.row]

    def known(self, seq: Seq) -> int:
        """Number of its tokens that have a value."""
        return int(self.table.done[seq.row]) if seq.row >= 0 else seq.length

    def starts_within(self, seq: Seq) -> int | None:
        """Most steps from `policy.settled(seq)` until a waiting sequence starts; None means no bound.

        The first in the order of service moves on by a token in every step, and is not preempted. So those before it
        are through after as many steps as they have tokens, twice as many if they must compute some of them again.
        Steps that fail do not count, and no sequence may be paused.
        """
        ahead = self.policy.ahead(seq)
        if ahead is None:
            return None
        return 1 + 2 * (ahead + sum(s.end for s in self.order if s.row >= 0))

    # ---- when something failed ---------------------------------------------------------------------------------

    def fail(self, seq: Seq) -> Sent:
        """End a sequence whose step failed, and forget what it computed since its last token.

        Other sequences that share such blocks go back to the queue, to compute them again.
        """
        if seq.finish is not None or seq.row < 0:
            self.end(seq, Finish.ERROR)
            return []
        sent: Sent = []
        members = [each for each in seq.bound if each.row >= 0]
        if self.pool:
            blocks = [block for each in members for block in each.blocks]
            tainted = set(self.pool.unsound(blocks))
            self.pool.withdraw(tainted)
            if self.copies:
                self.pool.withdraw(blocks)  # the model may have spoilt all of its past
            for other in [s for s in self.order if s not in members and s.row >= 0 and tainted.intersection(s.blocks)]:
                if other.row >= 0:  # not sent back with another
                    self.pool.withdraw(self.pool.unsound(other.blocks))
                    sent += self._preempt([other])
        # `_vacate` then withdraws what was published since the last step that succeeded, and vouches for nothing more.
        for row in [each.row for each in members if self.table.emitted[each.row]]:
            self.table.settled[row] = self.table.done[row] - self.table.gained[row]
            self.table.emitted[row] = False
        self.leave(seq, Finish.ERROR)
        return sent

    def rollback(self, plan: StepPlan) -> Sent:
        """The step did not happen: sequences that started with it are back in the queue, the others where they were."""
        for seq, before, node, _, new in reversed(plan.published):
            if self.pool:
                self.pool.withdraw_nodes(new)
            if seq.row >= 0 and seq.published > before:
                seq.published, seq.node = before, node
                self.table.published[seq.row] = before
        for seq, _, slot in plan.saves:
            held = [item for item in self._slots.get(seq, ()) if item[1] == slot]
            if held and self.checkpoints:
                self._slots[seq].remove(held[0])
                self.checkpoints.release(slot)
        same = self.holds(plan)
        self.table.take_back(plan.rows[same], plan.start[same], plan.emit[same])
        return self._preempt(plan.fresh)

    def forget(self) -> Sent:
        """The contents of the cache are lost: all running sequences go back to the queue, to compute their tokens
        again.
        """
        sent = self._preempt(self.order)
        if self.pool:
            self.pool.reset()
            self.pool.named.clear()
        if self.checkpoints:
            self.checkpoints.reset()
        if self.tiers:
            self.tiers.forget()
        return sent

    def drop_prefixes(self) -> None:
        """Sequences that start later find nothing of what was computed so far; running ones go on, and share nothing
        any more: all that they compute depends on it.
        """
        for seq in [seq for seq in self.order if seq.row >= 0]:
            seq.keys = None
            self._let_go(seq)
        if self.pool:
            self.pool.drop()
            self.pool.named.clear()
        if self.checkpoints:
            self.checkpoints.reset()

    # ---- one step ----------------------------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """Plan the next step; None if there is nothing to compute. now: time of the clock that `add` was given."""
        table = self.table
        self.steps += 1
        self.preempted = []
        drafts = {seq: seq.draft for seq in self.order if seq.draft}
        for seq in drafts:  # they are for this step, whatever becomes of it
            seq.draft = 0
        # Growing may preempt a row, which leaves budget and blocks to the others: then all is shared out again.
        while True:
            if self.stale:
                self.refresh()
            rows, seqs = self.rows, self.order
            if self.paused_rows or self.resting:
                seqs = [s for s in seqs if not s.paused and s.tenant not in self.resting]
                rows = np.fromiter((s.row for s in seqs), np.intp, len(seqs))
            start = table.computed[rows]
            # The token at the last position is never fed back, so plans made ahead stop one short of the end.
            q = np.minimum(table.known[rows], table.end[rows] - 1) - start
            if self.limits.stages > 1:
                q = self._of_a_stage(rows, start, q)
            if self.checkpoints:
                q = self._to_marks(seqs, rows, start, q)
            if self._slow:
                q = np.minimum(q, np.fromiter((s.most or NEVER for s in seqs), np.int32, len(seqs)))
            if self.waits and np.count_nonzero((left := table.known[rows] - start) != 1):
                q = waited(seqs, q, left)
            decode = np.count_nonzero(q == 1) == len(q)  # (of NumPy's reductions, counting is by far the fastest)
            tokens_left = self.budget - (len(q) if decode else int(q.sum()))
            if tokens_left < 0 or not decode:
                decode = False
                q, tokens_left = self._share(q, seqs)
            elif self.limits.prefill is not None:
                tokens_left = min(tokens_left, self.limits.prefill)
            if self.waits and np.count_nonzero(q != left):
                q = waited(seqs, q, left)
            end = start + q
            if not self.pool or not np.count_nonzero(end > table.capacity[rows]):
                break
            sent = self._grow(seqs, rows, end, table.capacity[rows])
            if not sent:
                break
            self.preempted += sent
        published: list[Published] = []
        if self.pool and np.count_nonzero(full := end // self.limits.block_size > table.published[rows]):
            # (What no plan notes could not be rolled back.)
            at = (full if decode else full & (q > 0)).nonzero()[0]
            mine = rows[at]
            known = at.tolist(), end[at].tolist(), table.done[mine].tolist(), table.gained[mine].tolist()
            table.published[mine] = [
                self._publish(seqs[i], n, done, done - gained if emitted else -1, published)
                for i, n, done, gained, emitted in zip(*known, table.emitted[mine].tolist(), strict=True)
            ]
        fresh: list[tuple[Seq, int, int]] = []
        restores: list[tuple[int, int]] = []
        copied: list[Copied] = []
        # Where a row was just preempted blocks are short, so none starts: it would mostly be the same request again.
        room = len(self.free_rows)
        if self.limits.stages > 1:  # so many rows start in one of several plans that each gets some
            among = min(self.running + self.waiting, self.limits.rows)
            room = min(room, -(-among // self.limits.stages) - int(np.count_nonzero(q)))
        if self.waiting and tokens_left > 0 and room > 0 and not self.preempted:
            at_work = [] if decode else [seqs[i] for i in (end < table.known[rows]).nonzero()[0].tolist()]
            if self.copies:  # what these compute, it is worth to wait for
                at_work = [s for i in (~table.emitted[rows]).nonzero()[0].tolist() if not (s := seqs[i]).vacant]
            fresh = self._admit(tokens_left, room, at_work, published, restores, copied)
        if fresh:
            rows = np.concatenate([rows, np.array([s.row for s, _, _ in fresh], np.intp)])
            start = np.concatenate([start, np.array([at for _, at, _ in fresh], np.int32)])
            q = np.concatenate([q, np.array([n for _, _, n in fresh], np.int32)])
            seqs = seqs + [s for s, _, _ in fresh]
            self._enter([s for s, _, _ in fresh])
        if not len(q):
            return None
        if fresh or not decode:
            order = np.argsort(q != 1, kind="stable")  # decode rows first: ragged kernels want ranges
            order = order[q[order] > 0]
            if not order.size:
                return None
            rows, start, q, seqs = rows[order], start[order], q[order], [seqs[i] for i in order.tolist()]
            end = start + q
        emit = end == table.known[rows]
        if (fresh or not decode) and (
            parting := [s for i in emit.nonzero()[0].tolist() if seqs[i].link for s in others_of(seqs[i])]
        ):
            seqs, more = seqs + parting, [s.row for s in parting]
            rows, q = np.concatenate([rows, np.array(more, np.intp)]), np.pad(q, (0, len(more)))
            start = np.concatenate([start, table.computed[more]])
            end, emit = start + q, np.pad(emit, (0, len(more)), constant_values=True)
        else:
            parting = []
        tokens = len(q) if decode and not fresh else int(q.sum())
        draft = None
        if drafts and not (self.waits or parting):  # who draws together, or goes on from another, has one token
            draft = self._draft(drafts, seqs, end, emit, self.budget - tokens)
        table.advance(rows, end, emit)
        return StepPlan(
            seqs=seqs,
            fresh=[s for s, _, _ in fresh],
            rows=rows,
            start=start,
            q=q,
            emit=emit,
            generation=table.generation[rows],
            tokens=tokens,
            preempted=self.preempted,
            published=published,
            restores=restores,
            saves=self._to_save(seqs, rows, start, end, emit) if self.checkpoints else [],
            copies=copied,
            draft=draft,
            linked=bool(self.waits or parting),
            stores=self.take_stores(TOGETHER) if self.tiers else None,
            loads=self.tiers.take_loads(self.pool, self.table) if self.tiers else None,
        )

    def take_stores(self, least: int = 0) -> EntryStores:
        """What has become sound since the last call, to be stored before anything else is written: (block, name), and
        (checkpoint, name) of states. least: fewer blocks than that stay for a later call, if none of them may be
        written to before.
        """
        assert self.tiers
        named: list[tuple[int, Hashable, bytes]] = []
        pool = self.pool
        kept = pool is not None and len(pool.named) < least and not self.copies
        if pool is not None and not (kept and all(pool.publishes(block, node) for block, node, _ in pool.named)):
            named, pool.named = pool.named, []
            if self.copies:  # what a row has is kept by nobody yet
                here = [each for each in named if pool.publishes(each[0], each[1])]
                pool.named = [each for each in here if not pool.is_idle(each[0])]
                named = [each for each in here if pool.is_idle(each[0])]
        states, self.tiers.stored_states = self.tiers.stored_states, []
        return EntryStores([(block, name) for block, _, name in named], states)

    def refresh(self) -> None:
        self.order = [s for s in self.order if s.row >= 0]
        self.rows = np.fromiter((s.row for s in self.order), np.intp, len(self.order))
        self.stale = False

    def _enter(self, fresh: list[Seq]) -> None:
        """Put the starting sequences among the running ones, in the order of service."""
        running = self.order + fresh
        if len(fresh) > 1 or (self.order and fresh[0].rank < self.order[-1].rank):
            running.sort(key=_rank)
        self.order = running
        self.rows = np.fromiter((s.row for s in running), np.intp, len(running))

    def _of_a_stage(self, rows: Index, start: Ints, q: Ints) -> Ints:
        """What rows compute in one of several plans: tokens that are known, and so many rows that each plan gets
        some.
        """
        q = np.minimum(q, self.table.done[rows] - start)
        if not self.waits:  # who draws together is in one plan
            q[q.nonzero()[0][-(-len(rows) // self.limits.stages) :]] = 0
        return q

    def _share(self, want: Ints, seqs: list[Seq]) -> tuple[Ints, int]:
        """Hand out the token budget: first one token to each decode row, then chunks in the order of service.

        Where tenants share rows, each gets an equal part for its chunks, and a waiting sequence that is next to start
        finds its part left.
        """
        # `want` is in the order of service. Fewer tokens than rows (after memory ran out) go to the first of them.
        budget = max([self.budget, *(len(s.bound) for s in seqs)]) if self.waits else self.budget
        single = (want == 1).nonzero()[0][:budget]
        q = np.zeros(len(want), np.int32)
        q[single] = 1
        tokens_left = budget - len(single)
        if self.limits.prefill is not None:
            tokens_left = min(tokens_left, self.limits.prefill)
        prompts, kept = (want > 1).nonzero()[0].tolist(), 0
        if self.displaced is not None and prompts:
            quota = dict.fromkeys([seqs[i].tenant for i in prompts], 0)
            comes = self._comes()
            if comes is not None:
                quota[comes.tenant] = 0
            each = tokens_left // len(quota)
            quota = dict.fromkeys(quota, each)
            for i in prompts:
                q[i] = min(int(want[i]), self.limits.chunk, quota[seqs[i].tenant])
                quota[seqs[i].tenant] -= int(q[i])
                tokens_left -= int(q[i])
            kept = 0 if comes is None else quota[comes.tenant]
        for i in prompts:
            more = min(int(want[i]) - int(q[i]), self.limits.chunk - int(q[i]), tokens_left - kept)
            q[i] += more
            tokens_left -= more
        return q, tokens_left

    def _draft(self, drafts: dict[Seq, int], seqs: list[Seq], end: Ints, emit: Bools, tokens_left: int) -> Ints | None:
        """How many of the proposed tokens each row of a step computes: as many as there is room for, in the order of
        service. Nobody else gets less for it, and nothing in the cache makes way.
        """
        draft, wanted = np.zeros(len(seqs), np.int32), [drafts.get(seq, 0) for seq in seqs]
        # A waiting sequence needs blocks too; running ones need one each before long.
        spare = self.pool.empty - len(seqs) if self.pool else 0
        for i in sorted(emit.nonzero()[0].tolist(), key=lambda i: seqs[i].rank):
            seq, at = seqs[i], int(end[i])
            n = min(wanted[i], tokens_left, int(self.table.end[seq.row]) - at - 1)
            if n > 0 and self.pool:
                room = int(self.table.capacity[seq.row]) - at
                if n > room and not self.waiting and (more := min(self.pool.blocks_for(n - room), spare)) > 0:
                    spare -= more
                    room += more * self.limits.block_size
                    self._extend(seq, more)
                n = min(n, room)
            if n > 0:
                draft[i] = n
                tokens_left -= n
        return draft if draft.any() else None

    def _extend(self, seq: Seq, blocks: int) -> None:
        """Give a running sequence so many more blocks, which are free."""
        assert self.pool
        more = self.pool.alloc(blocks)
        assert more is not None
        have = len(seq.blocks)
        self.block_table[seq.row, have : have + blocks] = more
        self.table.capacity[seq.row] += blocks * self.limits.block_size
        seq.blocks += more

    # ---- blocks ------------------------------------------------------------------------------------------------

    def _grow(self, seqs: list[Seq], rows: Index, end: Ints, capacity: Ints) -> Sent:
        """Allocate blocks for rows at the end of theirs; if none are left, take them from the last in the order of
        service.

        Returns the sequences that lost their row.
        """
        assert self.pool
        sent: Sent = []
        who = (end > capacity).nonzero()[0]
        size = self.limits.block_size
        if not np.count_nonzero(end[who] > capacity[who] + size) and (blocks := self.pool.alloc(len(who))) is not None:
            # One more for each, as nearly always: at once, which is the same.
            self.block_table[rows[who], capacity[who] // size] = blocks
            self.table.capacity[rows[who]] += size
            for i, block in zip(who.tolist(), blocks, strict=True):
                seqs[i].blocks.append(block)
            return sent
        for i in who.tolist():
            seq = seqs[i]
            while seq.row >= 0:
                more = self.pool.alloc(self.pool.blocks_for(int(end[i])) - len(seq.blocks))
                if more is not None:
                    self._give(seq, more)
                    break
                sent += self._preempt([self._victim()])
        return sent

    def _give(self, seq: Seq, more: list[int]) -> None:
        have, row = len(seq.blocks), seq.row
        seq.blocks += more
        self.block_table[row, have : have + len(more)] = more
        self.table.capacity[row] = len(seq.blocks) * self.limits.block_size

    def _victim(self) -> Seq:
        if self.paused_rows:
            for seq in reversed(self.order):
                if seq.row >= 0 and seq.paused:
                    return seq
        return next(seq for seq in reversed(self.order) if seq.row >= 0)

    def _publish(self, seq: Seq, end: int, done: int, sound: int, log: list[Published]) -> int:
        """Publish the full blocks among the first `end` tokens, which a step computes now.

        done: tokens that have a value. sound: tokens that a step computed which sampled one and succeeded; -1 means
        none. Returns how many blocks are published; NEVER if no more will be.
        """
        pool, keys, bs, before = self.pool, seq.keys, self.limits.block_size, seq.published
        assert pool
        if keys is None:  # since the prefixes were dropped
            return NEVER
        new: list[tuple[int, Hashable]] = []
        log.append((seq, before, seq.node, keys, new))
        if sound >= 0:  # that step has succeeded, and with it all before
            pool.vouch(seq.blocks[max(before - 1, 0) : sound // bs])
        for n in range(before, min(end, done) // bs):
            if n >= len(keys):
                if self._key_of is None:
                    return NEVER
                keys.append(self._key_of(seq, n))
            block = seq.blocks[n]
            name = self.tiers.names(seq, n + 1)[n] if self.tiers else None
            seq.node = node = pool.publish(block, seq.node, keys[n], name)
            seq.published = n + 1
            new.append((block, node))
        return seq.published

    # ---- who starts --------------------------------------------------------------------------------------------

    def _admit(
        self,
        tokens_left: int,
        room: int,
        at_work: list[Seq],
        published: list[Published],
        restores: list[tuple[int, int]],
        copied: list[Copied],
    ) -> list[tuple[Seq, int, int]]:
        """Give rows and blocks to waiting sequences while the budget lasts: (sequence, tokens it found computed, its
        share).

        room: for so many sequences, besides what starts together. at_work: sequences that have more of their prompt to
        compute after this step.
        """
        started: list[tuple[Seq, int, int]] = []
        policy = self.policy
        if not policy.opens(self.waiting - len(self._parked), self.running - self.paused_rows, self.steps):
            return started
        self._held_back = None
        while tokens_left > 0 and len(started) < room and self.free_rows and (seq := policy.peek()) is not None:
            if self.short(seq) or seq.tenant in self.resting:
                break
            found = self._reserved(seq, at_work, published, copied)
            if found is None:  # no sequence overtakes: the next in order gets the next blocks
                self._held_back = seq
                break
            group = list(seq.bound)
            hits = [self._hit(each, of.blocks) for each, of in zip(group, found, strict=True)]
            shares = self._shares_of(group, hits, tokens_left, alone=not (self.running or started))
            if shares is None:
                self._give_back(group, copied)
                self._held_back = seq
                break
            policy.pop(seq)
            self.waiting -= 1
            for each, hit, q, of in zip(group, hits, shares, found, strict=True):
                row = each.row = self.free_rows.pop()
                each.rank = seq.rank
                self.paused_rows += each.paused
                if of.slot is not None:
                    restores.append((row, of.slot))
                if of.state is not None and self.tiers:
                    self.tiers.states.append(EntryLoad(row, int(self.table.generation[row]), of.state))
                tokens_left -= q
                self.table.enter(row, each.length, hit, each.end)
                self._place(each, hit, q, of, published)
                if hit + q < each.length or (self.copies and not each.vacant):
                    at_work = [*at_work, each]
                each.started = True
                started.append((each, hit, q))
            if seq.link is not None and not seq.link.parted:
                seq.row, seq.started = group[0].row, True
                self.waits += len(group) if seq.link.waits else 0
        return started

    def _hit(self, seq: Seq, known: int) -> int:
        """Tokens of a starting sequence that need not be computed. known: blocks that were found."""
        seq.reused = known * self.limits.block_size
        if seq.vacant:
            return seq.length
        return seq.prompt_len if seq.begun else seq.reused  # of one begun elsewhere, its runner writes them

    def _shares_of(
        self, group: Sequence[Seq], hits: Sequence[int], tokens_left: int, *, alone: bool
    ) -> list[int] | None:
        """Tokens that starting sequences compute now; None means that those which draw together get none yet.

        alone: nobody else runs.
        """
        together = len(group) > 1 and not group[-1].vacant
        if together and alone:
            tokens_left = max(tokens_left, len(group))
        shares = []
        for seq, hit in zip(group, hits, strict=True):
            last = together or _forks_early(seq)
            q = max(0, min(seq.length - hit - last, tokens_left, seq.most or self.limits.chunk))
            if self.checkpoints and seq.keys is not None and q:
                mark = self.checkpoints.mark(hit, seq.length, self.limits.block_size)
                q = q if mark is None else min(q, mark - hit)
            tokens_left -= q
            shares.append(q)
        if together:
            last = all(hit + q == seq.length - 1 for seq, hit, q in zip(group, hits, shares, strict=True))
            within = all(q < (seq.most or self.limits.chunk) for seq, q in zip(group, shares, strict=True))
            if last and within and tokens_left >= len(group):
                return [q + 1 for q in shares]
            return shares if any(shares) else None
        return shares

    def _place(self, seq: Seq, hit: int, q: int, of: KnownStart, published: list[Published]) -> None:
        """Note the blocks of a sequence that starts, and publish those that its first q tokens fill."""
        row, size = seq.row, self.limits.block_size
        if self.pool:
            self.block_table[row, : len(seq.blocks)] = seq.blocks
            self.block_table[row, len(seq.blocks) :] = 0
            self.table.capacity[row] = NEVER if seq.vacant else len(seq.blocks) * size
            seq.published = 0 if seq.vacant else seq.reused // size
            self.table.published[row] = seq.published if seq.keys is not None and not seq.vacant else NEVER
            if seq.keys is not None and not seq.vacant and (hit + q) // size > seq.published:
                self.table.published[row] = self._publish(seq, hit + q, seq.length, -1, published)
        if seq.keys is not None and not (seq.started or seq.begun or seq.vacant):
            self.counts.prefix_queries += seq.length
            self.counts.prefix_hits += hit
            self.counts.tier_hits += of.loaded * size if self.pool else hit * (of.state is not None)

    def _reserved(
        self, seq: Seq, at_work: list[Seq], published: list[Published], copied: list[Copied]
    ) -> list[KnownStart] | None:
        """`_reserve` for a sequence, or for all those of a ticket; None, and nothing reserved, if one cannot start."""
        if seq.link is None or seq.link.parted:
            found = self._reserve(seq, at_work, published, copied)
            return None if found is None else [found]
        first, *others = seq.link.seqs
        if len(self.free_rows) <= len(others):
            return None
        if seq.link.alike and not seq.link.forked:
            more = tail(self.limits, first, early=seq.link.early)
            found = self._reserve(first, at_work, published, copied, more * len(others))
            if found is None:
                self._name_stuck(first, seq)
                return None
            for each in others:
                each.vacant = True
                each.blocks = self.pool.alloc(more) or [] if self.pool else []
            return [found] + [KnownStart(0)] * len(others)
        got = list[KnownStart]()
        for each in seq.link.seqs:  # of which none waits for what others of them compute
            found = self._reserve(each, [] if got else at_work, published, copied, finds=not (self.copies and got))
            if found is None:
                self._give_back(seq.link.seqs[: len(got)], copied)
                self._name_stuck(each, seq)
                return None
            got.append(found)
        return got

    def _give_back(self, seqs: Sequence[Seq], copied: list[Copied]) -> None:
        """These do not start: their blocks are free again."""
        for seq in seqs:
            if self.pool:
                self.pool.release(seq.blocks, sound=0)
            seq.blocks, seq.node, seq.vacant = [], None, False
        copied[:] = [each for each in copied if each[0] not in seqs]

    def _name_stuck(self, seq: Seq, ticket: Seq) -> None:
        """If this sequence of a link found too few blocks, its ticket did."""
        if self.pool and self._stuck is not None and self._stuck[0] is seq:
            self._stuck = ticket, self.pool.free

    def _reserve(
        self,
        seq: Seq,
        at_work: list[Seq],
        published: list[Published],
        copied: list[Copied],
        more: int = 0,
        *,
        finds: bool = True,
    ) -> KnownStart | None:
        """Give a sequence its blocks; None means not yet.

        more: blocks that must be left for others. finds: it may begin with what others have computed.
        """
        pool, limits = self.pool, self.limits
        # At least the last token must be computed; and one before, where others go on from it.
        most = (seq.length - 1 - _forks_early(seq)) // limits.block_size
        slot = state = None
        brought: list[Any] = []
        tiers = self.tiers if seq.keys is not None and not seq.begun and finds else None
        if seq.keys is None or seq.begun or not finds:
            most = 0
        elif self.checkpoints:
            ahead, last = self._to_come(seq, most, at_work), most
            most, slot = self.checkpoints.find(seq.salt, seq.keys, most) or (0, None)
            if tiers and (kept := tiers.state(seq, most, last)) and (way := self._way(seq, kept[0])) is not None:
                most, slot, state, brought = kept[0], None, kept[1], way
            if ahead > most:
                return None  # another makes a better checkpoint
        if not pool:
            return KnownStart(most, slot, state) if self.checkpoints else KnownStart(0)
        found: list[int] = []
        node = pool.root(seq.salt)
        if seq.keys is not None:
            found, node = pool.match(seq.salt, seq.keys, most)
            while self.checkpoints and state is None and len(found) < most:  # blocks of its prefix were taken
                most, slot = self.checkpoints.find(seq.salt, seq.keys, len(found)) or (0, None)
                found, node = pool.match(seq.salt, seq.keys, most)
            if self.checkpoints and not {block for *_, new in published for block, _ in new}.isdisjoint(found):
                return None  # a step with states is several calls, and these blocks may be full after the last one only
            if (
                not self.checkpoints
                and len(found) < most
                and any(
                    s.keys
                    and s.node == node
                    and s.keys[s.published : s.published + 1] == seq.keys[len(found) : len(found) + 1]
                    for s in at_work
                )
            ):
                return None  # another computes the same in its next step
            if self.copies:
                sound = self.copies.sound(found, at_work)
                if sound is None:
                    return None  # another has computed the same, or does so in this step
                found, node = pool.match(seq.salt, seq.keys, sound)
        if state is None and tiers and len(found) < most:
            brought = tiers.found(seq, len(found), most)
        idle = found if self.copies is None else self.copies.idle(found)  # or held by others, where blocks are shared
        need = pool.blocks_for(seq.end - 1 if limits.reserve_all else seq.length) - len(idle)
        spare = 0  # blocks to be left for running sequences, so that they do not preempt it at once
        if self.running and not limits.reserve_all:
            spare = max(pool.usable // 100, self.running if seq.started else 0)
        # Held before `alloc`, and before `free` is read: blocks that were found may be idle, and would be taken or
        # counted.
        sources = self.copies.sources(found, [*self.order, *at_work]) if self.copies else []
        pool.hold(idle)
        new = pool.alloc(need) if pool.free >= need + spare + more else None
        if new is None:
            pool.release(idle, sound=0)
            self._stuck = seq, pool.free
            return None
        self._stuck = None
        seq.blocks, seq.node = found + new, node
        if self.copies and (found or brought):
            seq.blocks = self.copies.given(found, idle, new)
            copied.append((seq, sources))
        if tiers and brought:
            nodes = self._bring(seq, len(found), brought, published)
            sources += [CopySource(node, -1) for node in nodes]
        return KnownStart(len(found) + len(brought), slot, state, len(brought))

    def _way(self, seq: Seq, n: int) -> list[Any] | None:
        """What a tier has of the first n blocks of a sequence, where they are not here; None: not all of that."""
        if not self.pool or not self.tiers or seq.keys is None:
            return []
        found = len(self.pool.match(seq.salt, seq.keys, n)[0])
        brought = self.tiers.found(seq, found, n)
        return brought if found + len(brought) == n else None

    def _bring(self, seq: Seq, start: int, brought: list[Any], published: list[Published]) -> list[Hashable]:
        """Publish what is loaded into the blocks of a sequence from `start` on; returns the nodes."""
        assert self.pool and self.tiers and seq.keys is not None
        new: list[tuple[int, Hashable]] = []
        published.append((seq, start, seq.node, seq.keys, new))
        for n, data in enumerate(brought, start):
            block = seq.blocks[n]
            seq.node = self.pool.publish(block, seq.node, seq.keys[n])
            new.append((block, seq.node))
            self.tiers.blocks.append(EntryLoad(block, seq.node, data))
        self.pool.vouch([block for block, _ in new])
        return [node for _, node in new]

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def _to_marks(self, seqs: list[Seq], rows: Any, start: Ints, want: Ints) -> Ints:
        """Limit wanted tokens so that prompts go no further than to their next checkpoint."""
        assert self.checkpoints
        if np.count_nonzero(self.table.emitted[rows]) == len(rows):
            return want
        for i in (~self.table.emitted[rows]).nonzero()[0].tolist():
            if seqs[i].keys is not None:
                mark = self.checkpoints.mark(int(start[i]), seqs[i].length, self.limits.block_size)
                if mark is not None:
                    want[i] = min(int(want[i]), mark - int(start[i]))
        return want

    def _to_come(self, seq: Seq, most: int, started: list[Seq]) -> int:
        """Blocks of the longest prefix of a sequence for which another sequence is about to make a checkpoint."""
        assert self.checkpoints and seq.keys is not None
        best = 0
        running = [s for s in self.order if s.row >= 0 and not s.paused and not self.table.emitted[s.row]]
        for other in {*running, *started}:
            if other.keys is None or other.salt != seq.salt:
                continue
            last = (other.length - 1) // self.limits.block_size
            common = 0
            for mine, theirs in zip(seq.keys[:most], other.keys[:last], strict=False):
                if mine != theirs:
                    break
                common += 1
            best = max(best, last if last <= common else common // self.checkpoints.every * self.checkpoints.every)
        return best

    def _to_save(self, seqs: list[Seq], rows: Any, start: Ints, end: Ints, emit: Bools) -> list[tuple[Seq, int, int]]:
        """The checkpoints that a step reaches."""
        assert self.checkpoints
        saves: list[tuple[Seq, int, int]] = []
        for i in (~emit).nonzero()[0].tolist():
            seq, at = seqs[i], int(end[i])
            if seq.keys is None or at != self.checkpoints.mark(int(start[i]), seq.length, self.limits.block_size):
                continue
            n = at // self.limits.block_size
            if n > len(seq.keys):  # it was preempted, and what it generated has no names where there are no blocks
                continue
            if not self.checkpoints.knows(seq.salt, seq.keys, n) and (slot := self.checkpoints.reserve()) is not None:
                self._slots.setdefault(seq, []).append((n, slot))
                saves.append((seq, int(rows[i]), slot))
        return saves

    # ---- the end of a step -------------------------------------------------------------------------------------

    def holds(self, plan: StepPlan) -> Bools:
        """Which rows of a plan [B] still belong to their sequences."""
        held: Bools = self.table.generation[plan.rows] == plan.generation
        return held

    def commit(
        self, plan: StepPlan, stopped: Bools, counts: Ints | None = None, parents: Sequence[tuple[Seq, Seq]] = ()
    ) -> Committed:
        """Commit a step. stopped [emitting rows]: the last new token ends its sequence.

        counts [emitting rows]: how many tokens each got, no more than it may have, and 0 only where it ends; None means
        one. With counts other than one no later step may have been planned. Sequences that left since `schedule()`
        (cancelled, failed, sent back) are passed over. parents: (a sequence, another that it goes on from in place of
        its own tokens) of those that are linked; the other goes on from its own.
        """
        table = self.table
        rows, end, seqs = plan.rows, plan.end, plan.seqs
        alive: Bools | None = None
        if np.count_nonzero(plan.emit) < len(rows):
            same = table.generation[rows] == plan.generation
            table.settled[rows[same]] = end[same]
            if self.waits:
                early = [seq for seq, ok in zip(seqs, same.tolist(), strict=True) if ok and self._forks_now(seq)]
                parents = [*parents, *((each, seq) for seq in early for each in others_of(seq))]
            at = plan.emit.nonzero()[0]
            rows, end, seqs = rows[at], end[at], [seqs[i] for i in at.tolist()]
            same = table.generation[rows] == plan.generation[at]
        else:
            same = table.generation[rows] == plan.generation
        if np.count_nonzero(same) < len(rows):
            alive = same
            rows, end = rows[same], end[same]
            seqs, stopped = [s for s, ok in zip(seqs, same.tolist(), strict=True) if ok], stopped[same]
            counts = None if counts is None else counts[same]
        assert counts is None or not np.count_nonzero((counts == 0) & ~stopped), "a row got no token, and goes on"
        length = table.gain(rows, end, counts, None if plan.draft is None else self._proposed(plan, alive))
        if np.count_nonzero(table.emitted[rows]) < len(rows):
            for i in (~table.emitted[rows]).nonzero()[0].tolist():
                table.emitted[seqs[i].row] = True
                if self.pool:
                    self.pool.vouch(seqs[i].blocks[: int(end[i]) // self.limits.block_size])
                if self.checkpoints:
                    for n, slot in self._slots.pop(seqs[i], ()):
                        self.checkpoints.publish(seqs[i].salt, seqs[i].keys or (), n, slot)
                        if self.tiers and (names := self.tiers.names(seqs[i], n)[n - 1 : n]):
                            self.tiers.stored_states.append((slot, state_name(names[0])))
        moves = [self._fork(seq, source) for seq, source in parents if seq.row >= 0 and source.row >= 0]
        over = stopped | (length >= table.end[rows])
        finished: list[Seq] = []
        if np.count_nonzero(over):
            for i in over.nonzero()[0].tolist():
                if seqs[i].finish is None:  # else it has left with one that it is linked with
                    finished += seqs[i].bound
                    self.leave(seqs[i], Finish.STOP if stopped[i] else Finish.LENGTH)
        return Committed(alive, finished, moves)

    def _forks_now(self, seq: Seq) -> bool:
        """Whether others go on from it before its last token."""
        link, table = seq.link, self.table
        return (
            link is not None
            and link.early
            and not seq.vacant
            and bool(table.known[seq.row] - table.computed[seq.row] == 1)
        )

    def _fork(self, seq: Seq, source: Seq) -> Move:
        """A sequence goes on from another that it is linked with, which was computed as far as the last step came."""
        table, row, size, block = self.table, seq.row, self.limits.block_size, None
        end = int(table.computed[source.row])
        if self.pool and self.limits.rows_apart:
            self.pool.withdraw(seq.blocks)
            seq.published, seq.node = 0, self.pool.root(seq.salt)
        elif self.pool:
            full = end // size
            shared, own = source.blocks[:full], seq.blocks if seq.vacant else seq.blocks[full:]
            if table.emitted[source.row]:
                self.pool.vouch(shared)
            self.pool.hold(shared)
            if not seq.vacant:
                self.pool.release(seq.blocks[:full], sound=full)
            if end % size:
                block = source.blocks[full], own[0]
            seq.blocks = shared + own
            seq.published, seq.node = min(source.published, full), source.node
        if self.pool:
            seq.keys, seq.names = None if source.keys is None else list(source.keys), list(source.names)
            seq.root = source.root
            self.block_table[row, : len(seq.blocks)] = seq.blocks
            table.capacity[row] = len(seq.blocks) * size
            table.published[row] = seq.published if seq.keys is not None else NEVER
        table.computed[row], table.settled[row] = end, table.settled[source.row]
        table.emitted[row] = table.emitted[source.row]
        link = seq.link
        assert link is not None
        if not link.forked:
            self.waits -= len(link.seqs) if link.waits else 0
            link.forked = True
            self.waits += len(link.seqs) if link.waits else 0
        seq.vacant = False
        return Move(seq, source.row, row, end, block)

    def _proposed(self, plan: StepPlan, alive: Bools | None) -> Ints:
        """The proposals of the emitting rows that are alive."""
        assert plan.draft is not None
        mine = plan.draft[plan.emit]
        return mine if alive is None else mine[alive]

    def _queue(self, seq: Seq) -> None:
        if seq.paused or seq.held:
            self._parked.add(seq)
        else:
            self.policy.push(seq)
        self.waiting += 1

    def _preempt(self, seqs: Sequence[Seq]) -> Sent:
        """Send sequences back to their places in the queue, with those that are bound to them; their published blocks
        stay known. Returns them, and the rows that they had.
        """
        sent: Sent = []
        for seq in seqs:
            if seq.row < 0:
                continue
            ticket = seq.ticket
            for each in seq.bound:
                sent.append((each, each.row))
                each.length = int(self.table.done[each.row])
                self._vacate(each)
            ticket.length, ticket.row = seq.length, -1
            seq.alone = seq.link is not None and seq.link.parted
            self.counts.preemptions += 1
            self._queue(ticket)
        return sent

    def leave(self, seq: Seq, reason: Finish) -> None:
        tokens = int(self.table.done[seq.row])
        for each in seq.bound:
            self._vacate(each)
        self._over(seq, reason, tokens)

    def _over(self, seq: Seq, reason: Finish, tokens: int) -> None:
        """A sequence has ended, at a length of `tokens`, and all that is bound to it."""
        link, ticket, bound = seq.link, seq.ticket, seq.bound
        for each in (*bound, ticket):
            each.finish = reason
        # (It was charged by `pop`: one that never started owes the policy nothing.)
        if link is not None:
            link.tokens += len(bound) * (tokens - seq.prompt_len)
        if ticket.started and (link is None or not link.parted or seq.alone):
            self.policy.left(ticket, tokens if link is None or link.parted else link.tokens)
        if link is None:
            return
        link.seqs = [each for each in link.seqs if each.finish is None]
        if link.parted and not link.seqs:
            link.ticket.finish = reason
            self.policy.left(link.ticket, link.tokens)

    def _vacate(self, seq: Seq) -> None:
        row = seq.row
        if self.pool:
            emitted, settled = self.table.emitted[row], int(self.table.settled[row])
            if emitted:
                settled = max(settled, int(self.table.done[row] - self.table.gained[row]))
            full = settled // self.limits.block_size
            # Withdrawn before they are released: a block that is still published then would become idle, and be found.
            if seq.published > full:  # blocks that a step in flight computes: its result will not be known
                self.pool.withdraw(seq.blocks[full : seq.published])
            if self.copies:
                self.pool.vouch(seq.blocks[: full if emitted else 0])
                self.pool.withdraw(self.pool.unsound(seq.blocks))
            self.pool.release(seq.blocks, sound=full if emitted else 0)
            if self.copies:
                self.copies.leave(seq, row, seq.blocks)
        self._let_go(seq)
        self.free_rows.append(row)
        self.table.leave(row)
        self.paused_rows -= seq.paused
        self.waits -= seq.link is not None and seq.link.waits
        seq.blocks, seq.row, seq.published, seq.node, seq.vacant = [], -1, 0, None, False
        self.stale = True

    def _let_go(self, seq: Seq) -> None:
        """The checkpoints that it has written are not wanted."""
        if self.checkpoints:
            for _, slot in self._slots.pop(seq, ()):
                self.checkpoints.release(slot)

    # ---- invariants --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that rows, blocks and counters agree; for tests and debugging."""
        running = [s for s in self.order if s.row >= 0]
        rows = [s.row for s in running]
        assert sorted(rows + self.free_rows) == list(range(self.limits.rows)), "a row is lost or held twice"
        assert running == sorted(running, key=_rank), "the order of service is lost"
        assert self.paused_rows == sum(s.paused for s in running), "a paused row is lost"
        bound = [s for s in running if s.link is not None and not s.link.parted]
        assert all(each.row >= 0 for s in bound for each in s.bound), "linked sequences run in part"
        assert self.waits == sum(s.link is not None and s.link.waits for s in bound), "who waits is miscounted"
        writers: set[int] = set()
        for s in running:
            computed, known, done = self.table.computed[s.row], self.table.known[s.row], self.table.done[s.row]
            assert computed <= known <= s.end and s.length <= done <= known, (computed, done, known, s.end)
            if self.pool is None:
                continue
            table = self.block_table[s.row].tolist()
            assert table[: len(s.blocks)] == s.blocks and not any(table[len(s.blocks) :]), (table, s.blocks)
            assert 0 not in s.blocks, "the trash block is owned"
            written = s.blocks if s.vacant else s.blocks[computed // self.limits.block_size :]
            assert not writers.intersection(written), "two sequences write to one block"
            writers.update(written)
            if not s.vacant:
                assert self.table.capacity[s.row] == len(s.blocks) * self.limits.block_size >= computed
        for s in running:
            full = 0 if s.vacant else self.table.computed[s.row] // self.limits.block_size
            assert not self.pool or not writers.intersection(s.blocks[:full]), "a shared block is still written to"
        if self.pool:
            self.pool.check([b for s in running for b in s.blocks])
        if self.checkpoints:
            self.checkpoints.check([slot for items in self._slots.values() for _, slot in items])
        assert self.waiting >= 0


def _forks_early(seq: Seq) -> bool:
    return seq.link is not None and seq.link.early and not seq.link.forked and not seq.vacant


def _rank(seq: Seq) -> Any:
    return seq.rank
