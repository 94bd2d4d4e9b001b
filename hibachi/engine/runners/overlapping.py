"""Steps that begin before the step before them has been read, of models with a cache (level 2)."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import numpy as np

from hibachi.backend.array_backend import Array
from hibachi.engine.runners.cached import CachedRunner
from hibachi.engine.runners.heads import Sampled
from hibachi.engine.runners.runner import (
    NOT_FINITE,
    Flight,
    Outcome,
    check_output,
    drawn_part,
    jobs_of,
    raise_for_all,
)
from hibachi.engine.runners.sampler import Drawn, RowSampler, nothing_left
from hibachi.engine.scheduler.step import Bools, StepPlan
from hibachi.errors import NonFiniteOutput


class OverlappingRunner(CachedRunner):
    """A `CachedRunner` that is a `Launcher`: nobody waits for the tokens of a step before the next one begins."""

    depth, exclusive = 1, False

    def can_launch(self, plan: StepPlan) -> bool:
        """Whether `launch` can begin this step: it must need nothing that the host learns from the step before."""
        head, inputs = self.main.head, self.inputs
        if not isinstance(head, Sampled) or self.memory.states or inputs.shapes.sizes or inputs.embeds:
            return False
        if self._vectors is not None and any(seq.owner.request.pooling is not None for seq in plan.seqs):
            return False
        if inputs.score(plan.rows, plan.start):
            return False
        idx = np.flatnonzero(plan.emit)
        jobs = jobs_of(plan, idx)
        # Two tokens may come before a consumer that is behind is noticed: of the step in flight, and of this one.
        if any(not job.channel.takes(2) or (job.stop and job.stop.where) for job in jobs):
            return False
        return head.sampler.plain(jobs, plan.rows[idx], plan.end[idx])

    def launch(self, plan: StepPlan, before: Flight | None) -> Flight:
        """Begin a step; the tokens drawn by the step `before` are inputs of this one.

        Raises what the model raises, and StepFailed if that cost the cache.
        """
        head, memory = self.main.head, self.memory
        assert isinstance(head, Sampled)
        sampler = head.sampler
        assert isinstance(sampler, RowSampler)  # as `can_launch` has it
        idx, held = np.flatnonzero(plan.emit), memory.cache
        rows, positions = plan.rows[idx], plan.end[idx]
        try:
            with self.backend.guard():
                drawn_before = _drawn(plan, before, sampler.vocab_size)
                x = self.inputs.packed(plan.rows, plan.start, plan.q, plan.emit, drawn_before)
                out = self._called(self.main, x)
                expected = (x.last.shape[0], sampler.vocab_size)
                out = check_output(out, self.backend, expected, self.name, kind="logits")
                with self.tally:
                    drawn: tuple[Array, ...] = sampler.begin(out, rows, positions) if len(idx) else ()
                    read = self.backend.fetch(drawn)
                    if not len(idx):
                        self.backend.settle(memory.cache)  # as below in `_forward`
        except BaseException as e:
            if not memory.donating:
                memory.cache = held  # as below in `_forward`
            elif not self.backend.usable(memory.cache):
                raise_for_all(e, self.backend, cache_lost=True)
            raise
        jobs, ids = jobs_of(plan, idx), drawn[0] if drawn else None
        flight = Flight(plan, idx, jobs, ids, read, None if memory.donating else held)
        if any(job.guided is not None for job in jobs):
            flight.logits, flight.fine = out, drawn[1]
        return flight

    def draw_late(self, flight: Flight) -> None:
        """See `Launcher`."""
        if flight.logits is None:
            return
        rows, jobs, positions = flight.plan.rows[flight.idx], flight.jobs, flight.plan.end[flight.idx]
        places = [i for i, job in enumerate(jobs) if job.guided is not None and job.seq.row == rows[i]]
        if not places:  # they have ended meanwhile
            return
        assert isinstance(self.main.head, Sampled) and isinstance(self.main.head.sampler, RowSampler)
        at, some, backend = np.array(places), [jobs[i] for i in places], self.backend
        try:
            with backend.guard(), self.tally:
                late = self.main.head.sampler.begin_late(flight.logits, at, some, rows[at], positions[at])
                ids, ok, fine, failed = late
                into = backend.put(np.pad(at, (0, ids.shape[0] - len(at)), mode="edge").astype(np.int32))
                flight.ids = backend.scatter_rows(flight.ids, into, ids)
                flight.read = backend.fetch((flight.ids, flight.fine, ok, fine))
            flight.late, flight.faults = at, {places[k]: fault for k, fault in failed.items()}
        except Exception as e:
            flight.read = partial(_raise, e)

    def land(self, flight: Flight, held: Bools) -> Outcome:
        """Wait for a step. Raises StepFailed."""
        plan, idx, jobs = flight.plan, flight.idx, flight.jobs
        try:
            with self.backend.guard(), self.tally:
                read = flight.read() if len(idx) else (np.zeros(0, np.int32), np.ones(0, bool))
        except Exception as e:
            if flight.cache is not None:
                self.memory.cache = flight.cache
            # What this step and the one after it wrote is not known.
            raise_for_all(e, self.backend, cache_lost=True)
            raise
        tokens, ok = (each[: len(idx)] for each in read[:2])
        if len(late := flight.late):
            left, fine = (each[: len(late)] for each in read[2:])
            ok = ok.copy()  # the array of a library may be read-only
            ok[late] = fine
            for i in late[fine & ~left].tolist():
                flight.faults.setdefault(i, nothing_left())
        drawn = Drawn(tokens, None if ok.all() else ~ok, {}, flight.faults)
        part = drawn_part(idx, drawn, jobs, plan.end[idx], self.backend)
        return Outcome([part], {int(i): NonFiniteOutput(NOT_FINITE) for i in idx[~ok]} | part.faults)


def _drawn(plan: StepPlan, before: Flight | None, vocab: int) -> tuple[Array, Any, int] | None:
    """The tokens of the step before, and for each row of a plan which of them it computes, [B]; -1 means none. vocab:
    size of the vocabulary.
    """
    if before is None or not len(before.idx):
        return None
    rows, generation = before.plan.rows[before.idx], before.plan.generation[before.idx]
    size = int(max(rows.max(), plan.rows.max())) + 1
    place, owner = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
    place[rows], owner[rows] = np.arange(len(rows)), generation
    source = np.where(owner[plan.rows] == plan.generation, place[plan.rows], -1)
    return (before.ids, source, vocab) if (source >= 0).any() else None


def _raise(error: BaseException) -> NoReturn:
    raise error
