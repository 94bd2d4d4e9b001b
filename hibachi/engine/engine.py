"""The engine without threads: schedule, run, commit, deliver. One call of `step` is one step of the batch."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hibachi.engine.job import Job
from hibachi.engine.runner import Outcome, Part, Runner
from hibachi.engine.stream import Wakeups
from hibachi.errors import ModelFault
from hibachi.plan.scheduler import Scheduler, Seq, StepPlan
from hibachi.request import Finish

log = logging.getLogger("hibachi.engine")


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of an engine. Counters run from its start."""

    waiting: int = 0  # requests in the queue
    running: int = 0  # requests that hold a row
    max_batch_size: int = 0  # rows
    steps: int = 0
    step_seconds: float = 0.0  # time spent in steps
    prompt_tokens: int = 0  # of requests admitted
    new_tokens: int = 0  # delivered
    finished: int = 0  # requests that ended, for whatever reason
    failed: int = 0  # of these, with an error
    blocks: int = 0  # cache blocks; 0: the model keeps no cache
    free_blocks: int = 0

    @property
    def mean_batch_size(self) -> float:
        """New tokens a step."""
        return self.new_tokens / self.steps if self.steps else 0.0


class Engine:
    """Owns the scheduler and a runner. Not thread-safe: whoever steps it also adds and cancels."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler, self.runner = scheduler, runner
        self._wakeups = Wakeups()
        self._live: set[Job] = set()
        self._counts = Stats(max_batch_size=scheduler.limits.rows)

    def stats(self) -> Stats:
        scheduler, pool = self.scheduler, self.scheduler.pool
        return replace(
            self._counts,
            waiting=scheduler.waiting,
            running=scheduler.running,
            blocks=pool.usable if pool else 0,
            free_blocks=pool.free if pool else 0,
        )

    def add(self, job: Job) -> None:
        job.seq.owner = job
        if job.channel.finish is None:  # else it was closed before it got here
            self._live.add(job)
            self.scheduler.add(job.seq)

    def cancel(self, job: Job) -> None:
        if self.scheduler.cancel(job.seq):
            self._ended(job, Finish.CANCELLED)

    def step(self) -> bool:
        """One step; False if there was nothing to do."""
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        for seq in plan.fresh:
            self.runner.admit(seq)
        outcome = self.runner.run(plan)
        if outcome.cache_lost:
            log.warning("a failed step took the cache with it; %d requests compute again", len(plan.seqs))
            self.scheduler.rewind()
        self._settle(plan, outcome)
        counts = self._counts
        self._counts = replace(
            counts,
            steps=counts.steps + 1,
            step_seconds=counts.step_seconds + time.perf_counter() - began,
            prompt_tokens=counts.prompt_tokens + sum(s.prompt_len for s in plan.fresh),
        )
        return True

    def _settle(self, plan: StepPlan, outcome: Outcome) -> None:
        """Commit the plan and hand the new tokens to their streams."""
        for i, fault in outcome.faults.items():
            self._fail(plan.seqs[i], fault)
        stopped = np.zeros(len(plan.rows), bool)
        for part in outcome.parts:
            stopped[part.idx] = part.stopped
        committed = self.scheduler.commit(plan, stopped[plan.emit])
        alive = plan.emit
        if committed.alive is not None:
            alive = alive.copy()
            alive[alive] = committed.alive
        for part in outcome.parts:
            self._deliver(plan, part, alive)
        for seq in committed.finished:
            assert seq.finish is not None
            self._ended(seq.owner, seq.finish)
        self._wakeups.post()

    def _deliver(self, plan: StepPlan, part: Part, alive: Any) -> None:
        keep = np.flatnonzero(alive[part.idx])
        if not len(keep):
            return
        idx = part.idx[keep]
        self.runner.written(plan.rows[idx], plan.end[idx], part, keep)
        seqs, wakeups, batch = plan.seqs, self._wakeups, part.batch
        values = part.tokens.tolist() if batch is None and part.tokens is not None else None
        for j, i in zip(keep.tolist(), idx.tolist(), strict=True):
            job: Job = seqs[i].owner
            if part.stopped[j] and not job.include_stop:
                continue
            if part.logprobs and j in part.logprobs:
                job.channel.logprobs.append(part.logprobs[j])
            job.channel.push((batch, j) if values is None else values[j], wakeups)
        self._counts = replace(self._counts, new_tokens=self._counts.new_tokens + len(keep))

    def _fail(self, seq: Seq, fault: ModelFault) -> None:
        if self.scheduler.cancel(seq, Finish.ERROR):
            log.warning("a request failed: %s", fault)
            self._ended(seq.owner, Finish.ERROR, fault)

    def _ended(self, job: Job, reason: Finish, error: BaseException | None = None) -> None:
        self._live.discard(job)
        job.channel.end(reason, error, self._wakeups)
        counts = self._counts
        failed = counts.failed + (reason is Finish.ERROR)
        self._counts = replace(counts, finished=counts.finished + 1, failed=failed)

    def end_all(self, reason: Finish, error: BaseException | None = None) -> None:
        """End every waiting and running request."""
        for job in list(self._live):
            self.scheduler.cancel(job.seq, reason)
            self._ended(job, reason, error)
        self._wakeups.post()

    @property
    def busy(self) -> bool:
        return bool(self._live)
