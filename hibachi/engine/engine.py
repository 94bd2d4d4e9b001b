"""The engine without threads: schedule, run, commit, deliver. One call of `step` is one step of the batch."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np

from hibachi.engine.budget import TokenBudget, guilty_of
from hibachi.engine.compiling import Compiling
from hibachi.engine.guide.protocol import GuideFailed
from hibachi.engine.guide.turns import Turns
from hibachi.engine.promise import Promise
from hibachi.engine.recording.recorder import RecordedScheduler, Recorder
from hibachi.engine.runners.calls import drop_frames, internal, no_room, too_late
from hibachi.engine.runners.guiding import Guided, stuck
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.meters import Drafted, Meters
from hibachi.engine.runners.runner import (
    Flight,
    Launcher,
    Outcome,
    Part,
    Runner,
    StepFailed,
    raise_for_all,
)
from hibachi.engine.scheduler.policy import Policy
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Move, Sent, StepPlan
from hibachi.engine.scheduler.timeshares import TimeShares
from hibachi.engine.speculation.drafting import Drafting
from hibachi.engine.speculation.howmany import Waits
from hibachi.engine.stats import EngineCounts, Stats
from hibachi.engine.streams.channel import Wakeups
from hibachi.engine.tiering import Tiering
from hibachi.errors import EngineFailed, HibachiError, InvalidModelOutput, KVStoreError, text_of
from hibachi.request import Finish

log: logging.Logger = logging.getLogger("hibachi.engine")
Command: TypeAlias = "tuple[Callable[[Job], None], Job] | None"  # a command and its job; None means just wake up
MOST_RESTARTS = 3  # without a step that succeeds in between
TOLD_AFTER = 3  # steps in a row in which no output was valid, before the log and `health` say so
MEMORY_EVERY = 2.0  # seconds between two questions to the device about its memory


class Engine:
    """Owns the scheduler and a runner. Not thread-safe: the thread that steps it also adds and cancels requests."""

    scheduler: RecordedScheduler
    invalid: int
    restarts: int
    runner: Runner

    def __init__(
        self,
        scheduler: RecordedScheduler,
        runner: Runner,
        *,
        restart: bool = False,
        record: str | Path | None = None,
        overlap: bool | None = None,
    ) -> None:
        """restart: make a new cache and go on when the device is lost. record: a file for all plans, see `Recorder`.

        overlap: begin a step before the tokens of the last one are read, where possible. None means if the backend is
        asynchronous, or the model is cut into stages.
        """
        self.scheduler, self.runner = scheduler, runner
        self.recorder: Recorder = scheduler.recorder
        if record is not None:
            self.recorder.write_to(record)
        self.restarts = 0
        self.moved: float | None = None  # when the last step ended, by time.monotonic()
        self.inbox: SimpleQueue[Command] = SimpleQueue()  # commands of other threads, for the thread that steps
        runner.watch(partial(self.inbox.put, None))
        self._wakeups = Wakeups()
        self._live: set[Job] = set()
        self._paused: set[Job] = set()
        self._pausing = False  # has any request a stream that pauses it while unread?
        self._counts = EngineCounts()
        limits = scheduler.limits
        self._meters = Meters(limit=limits.rows, block_size=limits.block_size if scheduler.pool else 0)
        self._worked = 0.0  # the runner's tally at the beginning of this step
        self._memory_at, self._processors = time.monotonic() - MEMORY_EVERY, time.process_time()
        self._restart = restart
        self._lost = 0  # devices lost since a step last succeeded
        self.invalid = 0  # steps in a row in which no output was valid
        self.invalid_why: str = ""  # the error of the last of these steps
        self._budget = TokenBudget(scheduler.limits, lambda budget: self.scheduler.limit(budget))
        self._policy = _copied(scheduler.policy) if restart else None  # as it is before the first request
        self._launcher: Launcher | None = None
        if isinstance(runner, Launcher):
            wanted = runner.exclusive or runner.backend.asynchronous if overlap is None else overlap
            self._launcher = runner if wanted else None
        self._flights: deque[Flight] = deque()
        self._calm = False  # the next step is waited for
        self._turns = Turns()
        self._in_turns: set[Job] = set()  # requests of slow forms that wait for theirs
        self._compiling = Compiling(self._made, self._turns, runner.sampler.shape[-1] if runner.sampler else 0)
        self.drafting: Drafting | None = None
        self.tiering: Tiering | None = None
        self.promise: Promise | None = None
        self.waits: Waits | None = None  # where steps may begin before the last one is read; None means that all do
        self._waiting = False  # this step is waited for, as it may have proposals then
        self._alone = False  # the last step needed what the host learns from the one before
        self._shares = TimeShares(getattr(scheduler.policy, "weight", lambda tenant: 1.0))

    def stats(self) -> Stats:
        scheduler, pool = self.scheduler, self.scheduler.pool
        return Stats(
            waiting=scheduler.waiting,
            held=scheduler.held,
            running=scheduler.running,
            max_num_seqs=scheduler.limits.rows,
            blocks=pool.usable if pool else 0,
            free_blocks=pool.free if pool else 0,
            cached_blocks=pool.idle if pool else 0,
            evictions=sum(kept.evictions for kept in (pool, scheduler.checkpoints) if kept),
            **asdict(scheduler.counts),
            **asdict(self._counts),
        )

    def meters(self) -> Meters:
        """A snapshot of the meters; callable from any thread."""
        own, tally, backend, now = self._meters, self.runner.tally, self.runner.backend, time.monotonic()
        if now - self._memory_at >= MEMORY_EVERY:
            spent, used = time.process_time(), now - self._memory_at
            share = min((spent - self._processors) / used / (os.cpu_count() or 1), 1.0)
            self._memory_at, self._processors = now, spent
            with suppress(Exception):  # a device that is lost tells nothing
                own.memory, own.utilization = backend.memory(), backend.utilization(share)
        parts, experts = self.runner.told()
        return replace(
            own,
            parts=parts,
            expert_tokens=experts,
            prefill=own.prefill.copy(),
            decode=own.decode.copy(),
            grammars=own.grammars.copy(),
            drafted=Drafted() if self.drafting is None else self.drafting.drafted.copy(),
            computed=tally.computed,
            padding=tally.padding,
        )

    @property
    def finished(self) -> int:
        """How many of the requests added have ended."""
        return self._counts.finished

    @property
    def paused(self) -> int:
        """Number of requests whose consumers are behind."""
        return len(self._paused)

    @property
    def compiles(self) -> bool:
        """Called when a call of the running step has shapes that the backend compiles a program for."""
        return self.runner.tally.compiles

    def obey(self, do: Callable[[Job], None], job: Job) -> None:
        """Run `do(job)`, a command. If it raises, only its own stream gets the error."""
        try:
            do(job)
        except BaseException as e:
            self._give_up(job, e)
        self._wakeups.post()  # perhaps no step comes that would

    def add(self, job: Job) -> None:
        """Queue a request, with those that it is linked with."""
        now, jobs, ticket = time.monotonic(), job.group, job.seq if job.linked is None else job.linked.ticket
        for each in jobs:
            each.seq.owner = each
            if not each.silent:
                self._live.add(each)
        guided = job.grammar is not None and job.guided is None
        brings = self.tiering is not None and self.tiering.begin(job, job.seq, self.scheduler, now)
        job.seq.held = ticket.held = guided or brings
        self._pausing |= job.channel.pause_after is not None or job.channel.fed
        try:
            self.scheduler.add(ticket, now)
        except BaseException as e:
            for each in jobs:
                each.seq.finish = Finish.ERROR  # the scheduler has not taken it
                if each is not job:
                    self._give_up(each, e)
            raise
        if guided:
            self._compiling.begin(job)

    def brought(self, job: Job, failed: Exception | None) -> None:
        """Called in another thread: what stores have for a job is there."""
        self.inbox.put((partial(self._go_on, failed=failed), job))

    def _go_on(self, job: Job, failed: Exception | None = None) -> None:
        """A job waits no longer for what stores have."""
        if self.tiering is None or not self.tiering.end(job) or job not in self._live:
            return
        if failed is not None and self.tiering.fail:
            self._give_up(
                job, KVStoreError(f"A store of the cache failed ({text_of(failed)}). Send the request again.")
            )
        else:
            self._free(job)

    def _free(self, job: Job) -> None:
        """A held job may start, unless it waits for something else."""
        if job.grammar is not None and (job.guided is None or job in self._in_turns):
            return
        if self.tiering is None or not self.tiering.waits(job):
            self.scheduler.free(job.seq)

    def _made(self, job: Job, made: Guided | BaseException, seconds: float) -> None:
        """Called in another thread: what has become of the grammar of a job."""
        self.inbox.put((partial(self._guide, made=made, seconds=seconds), job))

    def _guide(self, job: Job, made: Guided | BaseException, seconds: float) -> None:
        """The grammar of a held job is ready, or failed."""
        self._meters.grammars.add(seconds)
        jobs = job.group
        if not self._live.intersection(jobs):
            return
        if isinstance(made, BaseException):
            self._give_up(job, stuck(made) if isinstance(made, GuideFailed) else made)
        elif made.guide.complete:
            self.scheduler.cancel(job.seq, Finish.STOP)
            for each in jobs:
                self._ended(each, Finish.STOP)
        else:
            for each in jobs:
                each.guided = made if each is job else made.fork()
            if made.form.slow:
                self._in_turns.add(job)
                self._turns.some = True
            else:
                self._free(job)

    def cancel(self, job: Job, reason: Finish = Finish.CANCELLED) -> None:
        if job not in self._live:
            return
        bound = [seq.owner for seq in job.seq.bound]
        stays = any(each in self._live for each in bound if each is not job)  # its row is there for the others too
        self._ended(job, reason, stays=stays)
        if not stays:
            self.scheduler.cancel(job.seq, reason)
            for each in bound:
                _let_go(each)

    def drop_prefixes(self, job: Job) -> None:
        """Later requests find nothing of what was computed so far. job: not a request; its channel ends when this is
        done.
        """
        try:
            self.scheduler.drop_prefixes()
            if self.tiering is not None:
                self.tiering.forget(self.scheduler)
        except BaseException as e:
            job.channel.end(Finish.ERROR, internal(e))
        else:
            job.channel.end(Finish.STOP)

    def resume(self, job: Job) -> None:
        """The consumer of a paused request has caught up."""
        if job in self._paused:
            self._paused.remove(job)
            if job not in self._in_turns:
                self.scheduler.unpause(job.seq)

    def feed(self, job: Job, tokens: Any) -> None:
        """The caller gives what stands from the newest token on, [m, *tok]; None means that this stays."""
        if job not in self._live:
            return
        if tokens is not None and self.scheduler.known(job.seq) - 1 + len(tokens) >= job.seq.end:
            self.cancel(job, Finish.LENGTH)
            return
        for seq in () if tokens is None else job.seq.bound:
            at, guided = self.scheduler.known(seq) - 1, seq.owner.guided
            self.runner.feed(seq, at, tokens)
            if guided is not None:  # it was told what was drawn
                guided.bring_to(min(guided.seen, at - seq.prompt_len), lambda start, end: tokens[:0])
            self.scheduler.feed(seq, len(tokens) - 1)
        self.resume(job)

    def _take_turns(self) -> None:
        """Rows of slow forms wait until it is their turn."""
        slow = [(job, job.guided) for job in self._first_ones() if job.guided is not None and job.guided.form.slow]
        mine = {seq for job, _ in slow for seq in job.seq.bound}
        others = any(seq.row >= 0 and not seq.paused and seq not in mine for seq in self.scheduler.order)
        going = set(self._turns.go([guided for _, guided in slow], others=others, now=time.perf_counter()))
        waiting = {job for job, guided in slow if guided not in going}
        for job in waiting - self._in_turns:
            self.scheduler.pause(job.seq)
        for job in self._in_turns - waiting:
            if job.seq.finish is None and job not in self._paused:
                self._in_turns.discard(job)
                self._free(job)
                self.scheduler.unpause(job.seq)
        self._in_turns, self._turns.some = waiting, bool(slow)

    def _first_ones(self) -> list[Job]:
        """The running requests, and of those that are bound to one another the first."""
        return [seq.owner for seq in {id(first): first for job in self._live for first in job.seq.bound[:1]}.values()]

    def next_deadline(self) -> float | None:
        """The time (time.monotonic()) at which `step` has something to do even if no request arrives and nothing is
        computed.
        """
        times = [self.scheduler.next_deadline(), None if self.tiering is None else self.tiering.next_time()]
        return min((time for time in times if time is not None), default=None)

    def step(self) -> bool:
        """Take one step; False if there was nothing to compute."""
        self.runner.check()
        began = self._begin()
        self._waiting = self.drafting is not None and self.waits is not None and self.waits.waiting
        if self._waiting and self._flights:
            if not self._land_all(None, began):
                return True
            began = self._begin()
        now = time.monotonic()
        self._expire(now)
        if self._turns.some:
            self._take_turns()
        self._suspend(self.scheduler.make_room())
        if self.scheduler.shares_rows:
            self.scheduler.rest(self._shares.resting(*self.scheduler.wanted()))
        plan = self._plan(now)
        if plan is None and self.scheduler.resting:  # the request that was to start first could not
            self.scheduler.rest(frozenset())
            plan = self._plan(now)
        if plan is None:
            if self._flights:
                self._land(None, began)
                return True
            if not self._live:
                self.runner.idle()
                if self.tiering is not None:
                    self.tiering.after(self.scheduler, all_=True)
            return False
        if refused := self._admit(plan, now):
            # The others of the plan may share what these were to compute, so it does not happen.
            for job, error in refused:
                self._give_up(job, error)
            if self._land_all(plan, began):
                self._roll_back(plan, "a request could not start")
            return True
        waited = bool(self._flights)
        if self._exclusive and (any(plan.stores or ()) or any(plan.loads or ())) and not self._land_all(plan, began):
            return True
        launched, failed = self._launch(plan, self._flights[-1] if self._flights else None)
        if launched is not None and self._launcher is not None:
            self._flights.append(launched)
            while len(self._flights) > self._launcher.depth:
                if not self._land(None, began, steady=True):
                    return True
                began = self._begin()
            self._launcher.draw_late(launched)
            return True
        if self._flights and not self._land_all(plan, began, cache_lost=failed is not None and failed.cache_lost):
            return True
        if failed is not None:
            self._recover(failed, plan)
        elif waited and not self._stands(plan):
            self._roll_back(plan, "others have ended or wait")  # it was made for them as well
        else:
            self._run(plan, began)
        return True

    def try_model(self) -> bool:
        """Take one step of a trial of the model that was left for later; False if there was none to take."""
        if self.promise is None or not self.promise.tries:
            return False
        if self._exclusive:
            self._land_all(None, self._begin())
        return self.promise.step()

    @property
    def _exclusive(self) -> bool:
        """Whether there are steps in flight beside which nothing is computed."""
        return bool(self._flights) and self._launcher is not None and self._launcher.exclusive

    def _plan(self, now: float) -> StepPlan | None:
        # Proposals go on from the last token, and cost a step that begins before that is read.
        waits = self._launcher is None or self._waiting or self._alone
        may = self.promise is None or self.promise.proposes
        if self.drafting is not None and not self._flights and waits and may:
            self.drafting.propose(self.scheduler, self.runner)
        plan = self.scheduler.schedule(now)
        self._suspend(self.scheduler.preempted)
        return plan

    def _admit(self, plan: StepPlan, now: float) -> list[tuple[Job, BaseException]]:
        """Tell the runner of the requests that start; returns those for which it failed."""
        refused: list[tuple[Job, BaseException]] = []
        for seq in plan.fresh:
            job: Job = seq.owner
            try:
                self.runner.admit(seq)
            except BaseException as e:
                refused.append((job, e))
                continue
            if job.channel.started is None:
                job.channel.started, job.channel.reused = now, seq.reused
        return refused

    def _stands(self, plan: StepPlan) -> bool:
        """Whether every request in the plan is still there and none waits for its consumer."""
        return bool(self.scheduler.holds(plan).all()) and not (self._paused and any(seq.paused for seq in plan.seqs))

    def _begin(self) -> float:
        self.runner.tally.compiles = False
        self._worked = self.runner.tally.seconds
        return time.perf_counter()

    def _run(self, plan: StepPlan, began: float) -> None:
        """Run a step from its beginning to its end."""
        self._calm = False
        try:
            self._prepare(plan)
            outcome = self.runner.run(plan)
            if plan.linked:
                outcome += self.runner.draw_linked(plan)
        except StepFailed as e:
            self._recover(e, plan)
            self.moved = time.monotonic()
            return
        self._finish(plan, outcome, began)

    def _finish(self, plan: StepPlan, outcome: Outcome, began: float, *, steady: bool | None = None) -> None:
        """Process the results of a computed step. steady: it was in flight, and the step after it has begun; None means
        that it was waited for.
        """
        if outcome.short or not self._budget.whole:
            self._budget.adapt(plan.tokens if outcome.short else 0)
        # Counted before it is delivered, so a consumer that has seen the end of its stream finds it in `stats` too.
        counts = self._counts
        counts.steps += 1
        counts.prompt_tokens += sum(s.prompt_len for s in plan.fresh if s.length == s.prompt_len and not s.vacant)
        if self.drafting is not None:
            self.drafting.judge(plan, outcome)
        self._settle(plan, outcome, began)
        # After `_settle`: a request that failed there has lost its row, and its state is not kept.
        if kept := [(row, slot) for seq, row, slot in plan.saves if seq.row == row]:
            self._save(kept)
        else:
            self._lost = 0
        counts.step_seconds += (seconds := time.perf_counter() - began)
        if self.tiering is not None:
            if not self._exclusive:
                self.tiering.after(self.scheduler)
            self.tiering.took(plan, seconds)
        if self.drafting is not None and not self.runner.tally.compiles:
            self._took(self.drafting, plan, outcome, seconds, steady)
        self._measure(plan, seconds)
        self.moved = time.monotonic()
        self.runner.tally.compiles = False
        self._look_at(plan, outcome)

    def _took(self, drafting: Drafting, plan: StepPlan, outcome: Outcome, seconds: float, steady: bool | None) -> None:
        """What a step's time says about proposals. steady: as of `_finish`."""
        rows = len(plan.rows)
        decodes = self.waits is not None and plan.tokens == rows
        if steady is None:
            drafting.took(plan, seconds)
            if decodes and self.waits is not None:
                tokens = sum(len(p.idx) if p.counts is None else int(p.counts.sum()) for p in outcome.parts)
                self.waits.note_waited(rows, tokens, seconds)
        elif steady and decodes and self.waits is not None:
            self.waits.note_ahead(rows, seconds)

    def _measure(self, plan: StepPlan, seconds: float) -> None:
        rows, tokens, meters = len(plan.rows), plan.tokens, self._meters
        meters.joined += 0 < len(plan.fresh) < rows
        phase = meters.prefill if plan.fresh or tokens > rows else meters.decode
        tokens += 0 if plan.draft is None else int(plan.draft.sum())
        phase.add(rows, tokens, meters.limit, seconds, self.runner.tally.seconds - self._worked)
        if self.scheduler.shares_rows and not self.runner.tally.compiles:
            computed: dict[Hashable, int] = {}
            for seq, n in zip(plan.seqs, plan.q.tolist(), strict=True):
                computed[seq.tenant] = computed.get(seq.tenant, 0) + n
            if plan.draft is not None:  # also those that were not kept
                for seq, n in zip(plan.seqs, plan.draft.tolist(), strict=True):
                    computed[seq.tenant] += n
            self._shares.took(computed, seconds)

    # ---- a step in flight ---------------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan, before: Flight | None) -> tuple[Flight | None, StepFailed | None]:
        """Begin a step while the one before may still run; None means that it must run by itself, or has failed as a
        whole.
        """
        runner = self._launcher
        if runner is None or self._calm:
            return None, None
        self._alone = not runner.can_launch(plan)
        if self._alone or self._waiting or plan.draft is not None or plan.linked:
            return None, None
        try:
            self._prepare(plan)
            return runner.launch(plan, before), None
        except StepFailed as e:
            return None, e
        except Exception:  # it is run again by itself, where the request at fault is found
            return None, None

    def _land(self, plan: StepPlan | None, began: float, *, steady: bool = False, cache_lost: bool = False) -> bool:
        """Read the tokens of the oldest step in flight. False means that it failed, and so the others, and `plan`, the
        step after them, did not happen.

        steady: the step after it has begun. cache_lost: by the step after it.
        """
        assert self._launcher is not None
        flight = self._flights.popleft()
        try:
            outcome = self._launcher.land(flight, self.scheduler.holds(flight.plan))
        except StepFailed as e:
            e.cache_lost |= cache_lost
            self._calm = True
            later = [each.plan for each in self._flights] + ([] if plan is None else [plan])
            self._flights.clear()
            for each in reversed(later):
                self._roll_back(each, e.why)
            self._recover(e, flight.plan)
            self.moved = time.monotonic()
            return False
        self._finish(flight.plan, outcome, began, steady=steady)
        return True

    def _land_all(self, plan: StepPlan | None, began: float, *, cache_lost: bool = False) -> bool:
        """`_land` all steps in flight, the oldest first."""
        while self._flights:
            if not self._land(plan, began, cache_lost=cache_lost):
                return False
            began = self._begin()
        return True

    def _roll_back(self, plan: StepPlan, why: str) -> None:
        self._suspend(self.scheduler.rollback(plan, why))

    def _expire(self, now: float) -> None:
        """End the requests whose time is over, and let those start that have waited long enough for stores."""
        for job in () if self.tiering is None else self.tiering.late(now):
            self._go_on(job)
        ended = self.scheduler.expire(now)
        if ended:
            for seq in ended:
                self._ended(seq.owner, Finish.ERROR, too_late(seq, now))
            self._wakeups.post()

    def _prepare(self, plan: StepPlan) -> None:
        """Store and load what tiers keep, and restore the states of rows that start from one. Raises StepFailed."""
        if self.tiering is not None:
            self.tiering.before(plan)
        if not plan.restores:
            return
        try:
            self.runner.restore(plan.restores)
        except Exception as e:
            raise_for_all(e, self.runner.backend, cache_lost=True)

    def _save(self, kept: list[tuple[int, int]]) -> None:
        """Save the recurrent states of these rows."""
        try:
            self.runner.save(kept)
        except Exception as e:
            if not self.runner.backend.fatal(e):
                raise
            failed = StepFailed("device", cache_lost=True)
            failed.__cause__ = e
            self._recover(failed)
        else:
            self._lost = 0

    def _look_at(self, plan: StepPlan, outcome: Outcome) -> None:
        """Count the steps in a row without valid output. The log gets one line for all, each request its own error."""
        faults = outcome.faults.values()
        if len(faults) < len(plan.seqs) or not all(isinstance(fault, InvalidModelOutput) for fault in faults):
            self.invalid = 0
            return
        self.invalid += 1
        self.invalid_why = str(next(iter(faults)))
        if self.invalid == TOLD_AFTER:
            log.error("every output of the last %d steps was invalid: %s", self.invalid, self.invalid_why)

    # ---- steps that failed as a whole --------------------------------------------------------------------------

    def _recover(self, failed: StepFailed, plan: StepPlan | None = None) -> None:
        """Undo a step that did not happen, if there is one, and go on. Raises EngineFailed if that is not possible."""
        cause = failed.__cause__
        assert cause is not None
        self._meters.failed += 1
        if plan is not None:
            self._roll_back(plan, failed.why)
        if failed.why == "device":
            self._lose(cause)
        drop_frames(failed)  # they hold what the failed call had computed
        if failed.cache_lost:
            self._rebuild(keep=failed.why == "cache")
            self._suspend(self.scheduler.forget())
            log.warning("the cache was lost (%r); %d requests compute again", cause, len(self._live))
        if failed.why == "memory" and plan is not None:
            self._shrink(plan, failed.alone, cause)

    def _lose(self, cause: BaseException) -> None:
        """Handle a lost device. Raises EngineFailed unless the engine may restart."""
        if isinstance(cause, EngineFailed):
            raise cause
        self._lost += 1
        text = f"The device failed with {type(cause).__name__}: {cause}. "
        if not self._restart:
            text += 'Make a new engine, or let this one begin again with restart="on_failure".'
            raise EngineFailed(text) from cause
        if self._lost > MOST_RESTARTS:
            text += (
                f"It did not help to begin again {MOST_RESTARTS} times. Make a new engine, perhaps in a new process."
            )
            raise EngineFailed(text) from cause
        self.restarts += 1
        log.warning("the device is lost (%r); beginning again, %d of %d", cause, self._lost, MOST_RESTARTS)

    def _rebuild(self, *, keep: bool) -> None:
        while True:
            try:
                self.runner.rebuild(keep=keep)
            except Exception as e:
                if not self.runner.backend.fatal(e):
                    raise
                self._lose(e)
            else:
                return

    def _shrink(self, plan: StepPlan, alone: int | None, cause: BaseException) -> None:
        """Halve the token budget after an out-of-memory step: of one request if it is at fault, else of all.

        alone: the request's place in the plan, if it failed by itself. None means that the cache was lost, so no
        request could be tried by itself.
        """
        if alone is not None:
            self._shrink_one(plan.seqs[alone], int(plan.q[alone]), cause)
            return
        tokens = plan.tokens
        guilty = guilty_of(plan, self.scheduler.limits.budget)
        for i in guilty:
            self._shrink_one(plan.seqs[i], int(plan.q[i]), cause)
        if guilty:
            self._budget.restore()  # the number of tokens in a step was not the cause
        elif tokens > 1:
            log.warning("memory ran out with %d tokens in a step: %r", tokens, cause)
            self._budget.halve(tokens // 2, 1)

    def _shrink_one(self, seq: Seq, tokens: int, cause: BaseException) -> None:
        """Halve the token budget of this request; end it if there is no memory for even one token."""
        if tokens == 1:
            self._fail(seq, no_room(cause))
            self._wakeups.post()
            return
        log.warning("memory ran out for %d tokens of one request, now at most %d: %r", tokens, tokens // 2, cause)
        self.scheduler.slow(seq, tokens // 2)
        self._budget.slowed(seq.number, tokens // 2)

    # ---- what a step came to -----------------------------------------------------------------------------------

    def _suspend(self, sent: Sent) -> None:
        """Keep the tokens of the requests that lost their rows."""
        for seq, row in sent:
            if seq.owner is not None:  # else it has ended meanwhile
                try:
                    self.runner.suspend(seq, row)
                except BaseException as e:
                    self._give_up(seq.owner, e)

    def _settle(self, plan: StepPlan, outcome: Outcome, began: float) -> None:
        """Commit the plan and deliver the new tokens to their streams."""
        # Before the commit, which vouches for the blocks of every row that is still in its place.
        if outcome.faults:
            for i in _writers_first(plan, outcome.faults):
                seq = plan.seqs[i]
                # otherwise it was sent back, because it had read what a failed request wrote
                if self.scheduler.holds(plan)[i]:
                    self._fail(seq, outcome.faults[i])
        stopped = np.zeros(len(plan.rows), bool)
        counts = None
        for part in outcome.parts:
            stopped[part.idx] = part.stopped
            if part.counts is not None:
                counts = np.ones(len(plan.rows), np.int32) if counts is None else counts
                room = np.array([plan.seqs[i].end for i in part.idx.tolist()]) - plan.end[part.idx]
                stopped[part.idx] &= part.counts <= room
                counts[part.idx] = np.minimum(part.counts, room)
        stopped = stopped[plan.emit]
        counts = None if counts is None else counts[plan.emit]
        parents = [pair for part in outcome.parts for pair in part.parents]
        committed = self.scheduler.commit(plan, stopped, counts, parents, began)
        alive, lost = plan.emit, None
        if committed.alive is not None:
            alive = alive.copy()
            alive[alive] = committed.alive
        if committed.moves:
            lost = self._fork(committed.moves)
            alive = alive & np.array([seq.owner is not None for seq in plan.seqs])
        for part in outcome.parts:
            self._deliver(plan, part, alive)
        for seq in [s for s in committed.finished if s.owner.request.kept is not None]:
            self._keep(seq, plan)
        for seq in committed.finished:
            if seq.owner is not None:  # else its keys and values could not be copied
                job, reason = seq.owner, seq.finish
                assert reason is not None
                if job in self._live and job.linked is not None and job.linked.draws is not None:
                    reason, told = job.linked.draws.tell(job, reason)
                    self._counts.new_tokens += len(told)
                    for token in told:
                        job.channel.push(token, self._wakeups)
                self._ended(job, reason)
        self._wakeups.post()
        if lost is not None:
            self._recover(lost)

    def _fork(self, moves: Sequence[Move]) -> StepFailed | None:
        """Rows go on from others. Returns an error if the cache is lost by that, for when the tokens have their
        places.
        """
        failed = None
        try:
            self.runner.fork(moves)
        except Exception as e:
            failed = StepFailed("device" if self.runner.backend.fatal(e) else "cache", cache_lost=True)
            failed.__cause__ = e
        parted = {id(m.seq.link): m.seq.link for m in moves if m.seq.link is not None and m.seq.link.parted}
        for seq in [seq for link in parted.values() for seq in link.seqs]:
            if seq.owner is not None and not seq.owner.silent and seq.owner not in self._live:
                self.scheduler.cancel(seq)  # as its caller wanted before they had forked
                _let_go(seq.owner)
        return failed

    def _keep(self, seq: Seq, plan: StepPlan) -> None:
        """Copy the keys and values of a request that finished in this step, before its blocks get another owner."""
        i, job = plan.seqs.index(seq), seq.owner
        try:
            job.request.kept.extend(self.runner.keys_and_values(int(plan.rows[i]), int(plan.end[i])))
        except BaseException as e:
            self._give_up(job, e)

    def _deliver(self, plan: StepPlan, part: Part, alive: Any) -> None:
        keep = np.flatnonzero(alive[part.idx])
        if not len(keep):
            return
        if part.heads is not None:
            silent, keep = keep[keep >= part.heads], keep[keep < part.heads]
            if part.tokens is not None and len(silent):
                idx = part.idx[silent]
                self.runner.written(plan.rows[idx], plan.end[idx], part.tokens[silent])
        seqs, wakeups, batch = plan.seqs, self._wakeups, part.batch
        places, idx, last = keep, part.idx[keep], part.stopped[keep]
        positions = plan.end[idx]
        if part.whole is not None:  # such a row ends with a token that is no stop token
            last = last & ~part.whole[keep]
        if part.counts is not None:
            most = [seqs[i].end - at for i, at in zip(idx.tolist(), positions.tolist(), strict=True)]
            of, within, places, last = part.each(keep.tolist(), most, last.tolist())
            idx, positions = idx[of], positions[of] + within
        self._counts.new_tokens += len(places)
        pausing, values = self._pausing, part.items
        if part.tokens is not None:
            tokens = part.tokens[places]
            self.runner.written(plan.rows[idx], positions, tokens)
            if values is None and batch is None:
                if not (np.count_nonzero(last) or part.logprobs or pausing):  # as nearly always
                    for i, value in zip(idx.tolist(), tokens.tolist(), strict=True):
                        seqs[i].owner.channel.push(value, wakeups)
                    return
                values = part.tokens.tolist()
        for j, i, stop in zip(places.tolist(), idx.tolist(), last.tolist(), strict=True):
            job: Job = seqs[i].owner
            if stop:
                if values is not None and type(values[j]) is int:
                    job.channel.stop_token = values[j]
                if job.request.include_stop is False:
                    if values is not None and j in part.logprobs:
                        job.channel.stop_logprobs = part.logprobs[j]
                    continue
            if part.logprobs and j in part.logprobs:
                job.channel.logprobs.append(part.logprobs[j])
            job.channel.push((batch, j) if values is None else values[j], wakeups)
            if pausing and job.channel.full:
                self._pause(job)

    def _pause(self, job: Job) -> None:
        """The consumer of this request is behind: compute nothing for it until the consumer has caught up."""
        # The reader's call comes by the inbox, so `resume` runs after this method, however early the reader is.
        if job.seq.finish is None and job.channel.pause(partial(self.inbox.put, (self.resume, job))):
            self._paused.add(job)
            self.scheduler.pause(job.seq)

    def _fail(self, seq: Seq, fault: HibachiError) -> None:
        if seq.finish is None:
            log.info("a request failed: %s", "\n".join([str(fault), *getattr(fault, "__notes__", ())]))
            jobs = [each.owner for each in seq.bound]
            self._suspend(self.scheduler.fail(seq, type(fault).__name__))
            for job in jobs:
                self._ended(job, Finish.ERROR, fault if job is jobs[0] else copy.copy(fault))

    def _give_up(self, job: Job, error: BaseException) -> None:
        """End one request that could not be handled, without touching others."""
        fault = internal(error)
        if fault is not error:
            log.error("%s", fault)
        try:
            self._fail(job.seq, fault)
        except BaseException as e:  # of a policy, which hears of it last
            log.error("%s", internal(e))
        if job in self._live:  # it was not in the scheduler any more, or not yet
            self._ended(job, Finish.ERROR, fault)
        self._wakeups.post()

    def _ended(self, job: Job, reason: Finish, error: BaseException | None = None, *, stays: bool = False) -> None:
        """stays: it has no reader any more, and goes on for others."""
        if job not in self._live:  # nobody reads it, or its reader has left before the fork
            _let_go(job)
            return
        self._live.discard(job)
        self._paused.discard(job)
        if self.drafting is not None:
            self.drafting.forget(job.seq)
        if not stays:
            _let_go(job)
        self._counts.finished += 1
        self._counts.failed += reason is Finish.ERROR
        # Last: a reader that has seen the end of its stream finds it counted.
        job.channel.end(reason, error, self._wakeups)

    def end_all(self, reason: Finish, error: Callable[[], HibachiError] | None = None) -> None:
        """End every waiting and running request, each with its own copy of the error."""
        live = list(self._live)
        self._flights.clear()
        for job in live:
            self._ended(job, reason, error() if error else None)
        self._wakeups.post()
        for job in live:
            bound = [seq.owner for seq in job.seq.bound if seq.owner is not None]
            with suppress(Exception):  # after a failure the scheduler may be in any state
                self.scheduler.end(job.seq, reason)  # what the recording tells of is over
            for each in bound:  # that nobody reads
                _let_go(each)

    def can_begin_again(self) -> bool:
        return self._policy is not None

    def begin_again(self) -> None:
        """Drop the state that a failure left: an empty scheduler, a new cache. All requests must have ended."""
        assert not self._live
        policy = _copied(self._policy)
        assert policy is not None
        self.scheduler = self.scheduler.fresh(policy)
        self._calm = False
        self._budget.restart()
        self._paused.clear()
        self.runner.adopt(self.scheduler)
        self.restarts += 1

    def live(self) -> list[Job]:
        """The requests that have not ended; callable from any thread."""
        return list(self._live)

    def close(self) -> None:
        self._compiling.close()
        if self.promise is not None:
            self.promise.close()
        if self.drafting is not None:
            self.drafting.close()
        if self.tiering is not None:
            with suppress(Exception):  # a device that is lost
                self.tiering.after(self.scheduler, all_=True)
            self.tiering.close()
        self.runner.close()
        self.recorder.close()


def _let_go(job: Job) -> None:
    """No circle is left: it is freed as soon as nobody wants it."""
    job.seq.owner = job.linked = None


def _writers_first(plan: StepPlan, places: Iterable[int]) -> list[int]:
    """Places in a plan, ordered so that the writer of a shared block comes before its readers."""
    started = {seq: n for n, seq in enumerate(plan.fresh, 1)}
    return sorted(places, key=lambda i: started.get(plan.seqs[i], 0))


def _copied(policy: Policy | None) -> Policy | None:
    try:
        return copy.deepcopy(policy)
    except Exception as e:
        log.warning("the policy cannot be copied (%r), so a failed loop does not begin again", e)
        return None
