"""The engine without threads: schedule, run, commit, deliver. One call of `step` is one step of the batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hibachi.engine.job import Job
from hibachi.engine.runner import Outcome, Part, Runner, StepFailed
from hibachi.engine.stream import Wakeups
from hibachi.errors import HibachiError
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


@dataclass(slots=True)
class _Counts:
    """The counters of `Stats`."""

    steps: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0
    finished: int = 0
    failed: int = 0


class Engine:
    """Owns the scheduler and a runner. Not thread-safe: whoever steps it also adds and cancels."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler, self.runner = scheduler, runner
        self._wakeups = Wakeups()
        self._live: set[Job] = set()
        self._counts = _Counts()

    def stats(self) -> Stats:
        scheduler, pool = self.scheduler, self.scheduler.pool
        return Stats(
            waiting=scheduler.waiting,
            running=scheduler.running,
            max_batch_size=scheduler.limits.rows,
            blocks=pool.usable if pool else 0,
            free_blocks=pool.free if pool else 0,
            **asdict(self._counts),
        )

    @property
    def finished(self) -> int:
        """How many of the requests added have ended."""
        return self._counts.finished

    def add(self, job: Job) -> None:
        job.seq.owner = job
        self._live.add(job)
        self.scheduler.add(job.seq)

    def cancel(self, job: Job) -> None:
        if job in self._live:
            if self.scheduler.prefilling(job.seq):
                self.runner.wipe(job.seq)
            self.scheduler.cancel(job.seq)
            self._ended(job, Finish.CANCELLED)

    def step(self) -> bool:
        """One step; False if there was nothing to do."""
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        for seq in plan.fresh:
            self.runner.admit(seq)
        try:
            outcome = self.runner.run(plan)
        except StepFailed as e:
            if e.why != "cache":
                raise e.__cause__ or e from None
            log.warning("a failed step took the cache with it; %d requests compute again", len(plan.seqs))
            self.runner.rebuild(keep=True)
            self.scheduler.rewind()
            outcome = Outcome([], {})
        # Counted before it is delivered: who has seen the end of its stream sees it in `stats` as well.
        counts = self._counts
        counts.steps += 1
        counts.prompt_tokens += sum(s.prompt_len for s in plan.fresh)
        self._settle(plan, outcome)
        counts.step_seconds += time.perf_counter() - began
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
        self._counts.new_tokens += len(keep)
        self.runner.written(plan.rows[idx], plan.end[idx], part, keep)
        seqs, wakeups, batch = plan.seqs, self._wakeups, part.batch
        values = part.tokens.tolist() if batch is None and part.tokens is not None else None
        for j, i, stop in zip(keep.tolist(), idx.tolist(), part.stopped[keep].tolist(), strict=True):
            job: Job = seqs[i].owner
            if stop and not job.include_stop:
                if values is not None and j in part.logprobs:
                    job.channel.stop_logprob = part.logprobs[j][values[j]]
                continue
            if part.logprobs and j in part.logprobs:
                job.channel.logprobs.append(part.logprobs[j])
            job.channel.push((batch, j) if values is None else values[j], wakeups)

    def _fail(self, seq: Seq, fault: HibachiError) -> None:
        if seq.finish is None:
            log.warning("a request failed: %s", fault)
            self.runner.wipe(seq)
            self.scheduler.cancel(seq, Finish.ERROR)
            self._ended(seq.owner, Finish.ERROR, fault)

    def _ended(self, job: Job, reason: Finish, error: BaseException | None = None) -> None:
        self._live.discard(job)
        job.seq.owner = None  # no circle: the job is freed as soon as nobody wants it
        self._counts.finished += 1
        self._counts.failed += reason is Finish.ERROR
        job.channel.end(reason, error, self._wakeups)

    def end_all(self, reason: Finish, error: Callable[[], HibachiError] | None = None) -> None:
        """End every waiting and running request, with an error of its own each."""
        live = list(self._live)
        for job in live:
            self._ended(job, reason, error() if error else None)
        self._wakeups.post()
        for job in live:
            with suppress(Exception):  # after a failure the scheduler may be in any state
                self.scheduler.cancel(job.seq, reason)

    def close(self) -> None:
        self.runner.close()
