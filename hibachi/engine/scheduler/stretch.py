"""Uneventful stretches: many steps in which every row gets one token and no request arrives, computed at once.

For simulations, where a step costs nothing but its planning. A stretch leaves the same state as the same number of
calls of `schedule` and `commit`, down to the numbers of the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Index, Ints
from hibachi.request import Finish

_PATIENCE = 64  # steps for which a policy is asked in advance


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """`steps` steps with the same B rows. positions: the sum of their lengths after the first step."""

    scheduler: Scheduler
    rows: Index
    steps: int
    positions: int

    def run(self, steps: int) -> list[Seq]:
        """Take the first `steps` of them; returns the sequences that reached their length with the last."""
        scheduler, rows = self.scheduler, self.rows
        assert 0 < steps <= self.steps
        if scheduler.pool:
            _grow(scheduler, rows, steps)
        done = scheduler.table.known[rows] + np.int32(steps)
        scheduler.table.known[rows] = scheduler.table.done[rows] = done
        scheduler.table.computed[rows] = done - np.int32(1)
        scheduler.table.gained[rows] = 1
        scheduler.steps += steps
        over = (done == scheduler.table.end[rows]).nonzero()[0]
        finished = [scheduler.order[i] for i in over.tolist()]
        for seq in finished:
            scheduler.leave(seq, Finish.LENGTH)
        return finished


def look_ahead(scheduler: Scheduler) -> Stretch | None:
    """The uneventful steps ahead, if no sequence is added, cancelled or paused meanwhile; None means to call
    `schedule`.

    Deadlines and the duration of steps are the caller's business. The policy's `opens` is asked for steps to come.
    """
    if scheduler.stale:
        scheduler.refresh()
    rows = scheduler.rows
    n = len(rows)
    if not n or scheduler.paused_rows or n > scheduler.budget:
        return None
    if any(seq.draft for seq in scheduler.order):  # nobody knows how many tokens it gets
        return None
    if scheduler.waiting and (next_ := scheduler.policy.peek()) is not None and scheduler.asked_back(next_):
        return None
    most = _closed(scheduler) if scheduler.waiting and scheduler.free_rows else None
    if most == 0:
        return None
    known, computed = scheduler.table.known[rows], scheduler.table.computed[rows]
    if np.count_nonzero(known - computed == 1) < n or np.count_nonzero(scheduler.table.emitted[rows]) < n:
        return None
    end = scheduler.table.end[rows]
    if scheduler.pool:
        # A step that fills a block which is to be published is left to `schedule`.
        size = np.int64(scheduler.limits.block_size)
        end = np.minimum(end, scheduler.table.published[rows] * size + size)
    steps = int(np.minimum.reduce(end - known))
    if most is not None:
        steps = min(steps, most)
    if scheduler.pool:
        steps = _affordable(scheduler, rows, known, steps)
    return Stretch(scheduler, rows, steps, int(np.add.reduce(known))) if steps > 0 else None


def _closed(scheduler: Scheduler) -> int | None:
    """Number of steps for which no waiting request can start although a row is free; None means until a running one
    ends.
    """
    policy = scheduler.policy
    # It waits for blocks, and none become free before a request ends, which ends the stretch too.
    if (seq := policy.peek()) is not None and scheduler.short(seq):
        return None
    running, step = scheduler.running, scheduler.steps
    for n in range(_PATIENCE):
        if policy.opens(scheduler.waiting, running, step + n + 1):
            return n
    return _PATIENCE


def _affordable(scheduler: Scheduler, rows: Index, known: Ints, steps: int) -> int:
    """The number of these steps that there are blocks for."""
    assert scheduler.pool
    free, size = scheduler.pool.free, scheduler.limits.block_size
    if len(rows) * (steps // size + 1) <= free:
        return steps
    short = known - 1 - scheduler.table.capacity[rows]  # after n steps a row needs n + short positions more than it has

    def need(n: int) -> int:
        return int(np.maximum(-(-(short + n) // size), 0).sum())

    if need(steps) <= free:
        return steps
    low, high = 0, steps  # enough for low, not for high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle) <= free else (low, middle)
    return low


def _grow(scheduler: Scheduler, rows: Index, steps: int) -> None:
    """Allocate the blocks that these steps need, in the order in which the steps would."""
    assert scheduler.pool
    size = scheduler.limits.block_size
    room = scheduler.table.capacity[rows] - scheduler.table.computed[rows]  # steps until a row needs a block
    who = (room < steps).nonzero()[0]
    if not len(who):
        return
    room = room[who]
    more = -((room - steps) // size)
    scheduler.table.capacity[rows[who]] += more * np.int32(size)
    if np.count_nonzero(more == 1) < len(more):
        nth = np.concatenate([np.arange(m) for m in more.tolist()])
        room = np.repeat(room, more) + nth * size
        who = np.repeat(who, more)
    who = who[room.argsort(kind="stable")]  # the first to need one first; in a step, in the order of service
    blocks = scheduler.pool.alloc(len(who))
    assert blocks is not None
    running, table = scheduler.order, scheduler.block_table
    for i, block in zip(who.tolist(), blocks, strict=True):
        seq = running[i]
        table[seq.row, len(seq.blocks)] = block
        seq.blocks.append(block)
