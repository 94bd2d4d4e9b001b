"""The scheduler: who computes how many tokens in the next step.

One rule: a sequence has `known` tokens and `computed` tokens, and every step moves `computed` towards `known`. Whole
prefill, chunked prefill and decode differ only in how many tokens that takes.

`schedule()` is optimistic: it advances both counters at once, leaving a placeholder for the token that the step will
sample, so that further plans can be made before the first is committed. `commit()` says which sequences stopped.
Rows that were given to somebody else in between are recognised by their generation and ignored.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from hibachi.errors import PromptTooLong
from hibachi.plan.blocks import BlockPool
from hibachi.request import Finish

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int32]]"
Bools: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step and the memory can hold."""

    rows: int  # sequences that run at once
    budget: int  # tokens computed in one step, over all rows; at least `rows`
    chunk: int  # tokens of one sequence computed in one step
    max_len: int  # tokens of one sequence, prompt included
    blocks: int = 0  # cache blocks, with the trash block; 0: the model keeps no cache
    block_size: int = 16

    def __post_init__(self) -> None:
        assert 0 < self.rows <= self.budget and self.chunk > 0 and self.max_len > 1, self


@dataclass(slots=True, eq=False)
class Seq:
    """One sequence: the only record of it. The owner's data hangs on `owner`; the rest belongs to the scheduler."""

    prompt_len: int
    max_new: int | None  # None: up to the end of the context
    owner: Any = None
    end: int = 0  # length at which it finishes
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    finish: Finish | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step: B rows, single-token rows first. Arrays are [B]."""

    seqs: list[Seq]
    fresh: list[Seq]  # those that just got their row
    rows: Ints  # the row of each
    start: Ints  # tokens computed before this step
    q: Ints  # tokens to compute now, >= 1
    emit: Bools  # reaches the end of the known tokens: a new token is wanted
    generation: Ints

    @property
    def end(self) -> Ints:
        return self.start + self.q


@dataclass(frozen=True, slots=True)
class Committed:
    """What a step came to. alive: which of the emitting rows still belong to their sequence; None: all."""

    alive: Bools | None
    finished: list[Seq]


class Scheduler:
    """First come, first served; blocks for prompt and output are reserved at admission, so nothing is preempted."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.blocks, limits.block_size) if limits.blocks else None
        rows = limits.rows
        width = self.pool.blocks_for(limits.max_len) if self.pool else 0
        self.block_table = np.zeros((rows, width), np.int32)
        self._known = np.zeros(rows, np.int32)
        self._computed = np.zeros(rows, np.int32)
        self._done = np.zeros(rows, np.int32)  # tokens whose value is committed; known - done are placeholders
        self._end = np.zeros(rows, np.int32)
        self._generation = np.zeros(rows, np.int32)
        self._free_rows = list(range(rows - 1, -1, -1))
        self._running: list[Seq] = []  # in order of arrival
        self._rows = np.zeros(0, np.int32)  # their rows
        self._left = False  # somebody left `_running`
        self._waiting: deque[Seq] = deque()
        self.waiting = 0  # without those who were cancelled in the queue

    @property
    def running(self) -> int:
        return self.limits.rows - len(self._free_rows)

    # ---- commands ----------------------------------------------------------------------------------------------

    def fit(self, prompt_len: int, max_new: int | None) -> int:
        """The length at which such a sequence would end. Raises PromptTooLong if it can never be served."""
        longest = self.limits.max_len
        if prompt_len >= longest:
            raise PromptTooLong(
                f"The prompt must leave room for one new token: expected at most {longest - 1} tokens; got "
                f"{prompt_len}. Shorten it, or raise max_model_len (now {longest})."
            )
        end = longest if max_new is None else min(prompt_len + max_new, longest)
        if self.pool and self.pool.blocks_for(end - 1) > self.pool.usable:
            raise PromptTooLong(
                f"The cache has {self.pool.usable * self.pool.block_size} positions; this request may need {end - 1}: "
                f"ask for fewer new tokens, or give the engine more cache_bytes."
            )
        return end

    def add(self, seq: Seq) -> None:
        """Queue a sequence. Raises PromptTooLong if it can never be served."""
        seq.end = self.fit(seq.prompt_len, seq.max_new)
        self._waiting.append(seq)
        self.waiting += 1

    def cancel(self, seq: Seq, reason: Finish = Finish.CANCELLED) -> bool:
        """End a waiting or running sequence; False if it has ended before."""
        if seq.finish is not None:
            return False
        if seq.row < 0:
            self.waiting -= 1  # it leaves the deque when it comes to the front
            seq.finish = reason
        else:
            self._leave(seq, reason)
        return True

    def prefilling(self, seq: Seq) -> bool:
        """Does it hold a row, and has nothing been sampled from it yet?"""
        return seq.row >= 0 and int(self._done[seq.row]) == seq.prompt_len

    def rewind(self) -> None:
        """The cache is lost: all running sequences compute their tokens again."""
        for seq in self._running:
            if seq.row >= 0:
                self._known[seq.row] = self._done[seq.row]
                self._computed[seq.row] = 0
                self._generation[seq.row] += 1

    # ---- one step ----------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute."""
        if self._left:
            self._running = [s for s in self._running if s.row >= 0]
            self._rows = np.fromiter((s.row for s in self._running), np.int32, len(self._running))
            self._left = False
        rows = self._rows
        start = self._computed[rows]
        # The token at the last position is never fed back, so plans made ahead stop one short of the end.
        q = np.minimum(self._known[rows], self._end[rows] - 1) - start
        decode = np.count_nonzero(q == 1) == len(q)  # (of NumPy's reductions, counting is by far the fastest)
        left = self.limits.budget - (len(q) if decode else int(q.sum()))
        if not decode and (left < 0 or int(q.max()) > self.limits.chunk):
            q, left = self._share(q)
        fresh = self._admit(left) if self._waiting and left > 0 and self._free_rows else []
        seqs = self._running
        if fresh:
            new = [s.row for s, _ in fresh]
            self._running = seqs = seqs + [s for s, _ in fresh]
            self._rows = rows = np.concatenate([rows, np.array(new, np.int32)])
            start = np.concatenate([start, np.zeros(len(new), np.int32)])
            q = np.concatenate([q, np.array([n for _, n in fresh], np.int32)])
        if not len(q):
            return None
        if fresh or not decode:
            order = np.argsort(q != 1, kind="stable")  # decode rows first: ragged kernels want ranges
            order = order[q[order] > 0]
            if not order.size:
                return None
            rows, start, q, seqs = rows[order], start[order], q[order], [seqs[i] for i in order.tolist()]
        end = start + q
        emit = end == self._known[rows]
        self._computed[rows] = end
        self._known[rows] += emit
        return StepPlan(seqs, [s for s, _ in fresh], rows, start, q, emit, self._generation[rows])

    def _share(self, want: Ints) -> tuple[Ints, int]:
        """Hand out the token budget: first one token to each decode row, then chunks in order of arrival."""
        single = want == 1
        left = self.limits.budget - int(single.sum())
        q = np.where(single, 1, 0).astype(np.int32)
        for i in np.flatnonzero(want > 1).tolist():
            q[i] = min(int(want[i]), self.limits.chunk, left)
            left -= int(q[i])
        return q, left

    def _admit(self, left: int) -> list[tuple[Seq, int]]:
        """Give rows and blocks to waiting sequences, first come first, while the budget lasts."""
        admitted = []
        while self._waiting and left > 0 and self._free_rows:
            seq = self._waiting[0]
            if seq.finish is None:
                if self.pool:
                    blocks = self.pool.alloc(self.pool.blocks_for(seq.end - 1))
                    if blocks is None:
                        break  # nobody overtakes: the first in the queue gets the next blocks
                    seq.blocks = blocks
                row = seq.row = self._free_rows.pop()
                self.block_table[row, : len(seq.blocks)] = seq.blocks
                self.block_table[row, len(seq.blocks) :] = 0
                self._known[row] = self._done[row] = seq.prompt_len
                self._computed[row] = 0
                self._end[row] = seq.end
                self.waiting -= 1
                q = min(seq.prompt_len, left, self.limits.chunk)
                left -= q
                admitted.append((seq, q))
            self._waiting.popleft()
        return admitted

    def commit(self, plan: StepPlan, stopped: Bools) -> Committed:
        """The step is done. stopped [emitting rows]: the new token ends its sequence.

        Sequences that left since `schedule()` (cancelled, failed) are passed over.
        """
        rows, end, seqs = plan.rows, plan.end, plan.seqs
        alive: Bools | None = None
        if np.count_nonzero(plan.emit) < len(rows):
            at = np.flatnonzero(plan.emit)
            rows, end, seqs = rows[at], end[at], [seqs[i] for i in at.tolist()]
            same = self._generation[rows] == plan.generation[at]
        else:
            same = self._generation[rows] == plan.generation
        if np.count_nonzero(same) < len(rows):
            alive = same
            rows, end = rows[same], end[same]
            seqs, stopped = [s for s, ok in zip(seqs, same.tolist(), strict=True) if ok], stopped[same]
        self._done[rows] = end + 1
        over = stopped | (end + 1 >= self._end[rows])
        finished = []
        if np.count_nonzero(over):
            for i in np.flatnonzero(over).tolist():
                self._leave(seqs[i], Finish.STOP if stopped[i] else Finish.LENGTH)
                finished.append(seqs[i])
        return Committed(alive, finished)

    def _leave(self, seq: Seq, reason: Finish) -> None:
        row = seq.row
        if self.pool:
            self.pool.release(seq.blocks)
        self._free_rows.append(row)
        self._generation[row] += 1
        seq.blocks, seq.row, seq.finish = [], -1, reason
        self._left = True

    # ---- invariants --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that rows, blocks and counters agree; for tests and debugging."""
        running = [s for s in self._running if s.row >= 0]
        rows = [s.row for s in running]
        assert sorted(rows + self._free_rows) == list(range(self.limits.rows)), "a row is lost or held twice"
        for s in running:
            computed, known, done = self._computed[s.row], self._known[s.row], self._done[s.row]
            assert computed <= known <= s.end and s.prompt_len <= done <= known, (
                computed,
                done,
                known,
                s.end,
            )
            table = self.block_table[s.row].tolist()
            assert table[: len(s.blocks)] == s.blocks and not any(table[len(s.blocks) :]), (table, s.blocks)
        if self.pool:
            self.pool.check([b for s in running for b in s.blocks])
        assert self.waiting == sum(s.finish is None for s in self._waiting)
