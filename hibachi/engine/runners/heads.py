"""Heads turn the outputs of a call into results: sampled tokens, tokens that the model returned, or vectors.

A runner calls the model, and hands the outputs to the head of the rows that it has called it for. A head turns the
outputs of n rows into a `Part`: for each row any number of new tokens, whether it ends, and its faults. Later stages
(commit, table, streams, recording) take as many tokens a row as there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.engine.runners.frames import FrameSampler
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.linked import Waiting, forked
from hibachi.engine.runners.meters import Tally
from hibachi.engine.runners.runner import NOT_FINITE, Part, check_logits, check_output, drawn_part, jobs_of, token_part
from hibachi.engine.runners.sampler import RowSampler
from hibachi.engine.runners.tokentable import TokenTable, within
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import StepPlan
from hibachi.engine.speculation.proposals import Along, OneCall, Outs
from hibachi.errors import HibachiError, NonFiniteOutput

LOGITS_BYTES = 2**26  # of a call where the outputs of whole prompts are wanted


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """Which tokens of a call of n rows have outputs: the last `before` before the end, and the last one.

    idx [n]: places in the plan. start [n]: tokens computed before. before [n]: outputs of tokens that are not the last
    known. last [n]: whether the last known token has one; a new token is drawn from it.
    """

    idx: Any
    start: Any
    before: Any
    last: Any


class Head(Protocol):
    """Processes outputs for the rows of one kind of request. name: of the call, for errors."""

    name: str

    def step(self, model: Any) -> Callable[..., Any]:
        """The model's method to call."""
        ...

    def admit(self, job: Job) -> int:
        """A request has got a row. Returns how many of its first tokens need their outputs looked at, besides the last
        known one.
        """
        ...

    def most_outputs(self) -> int:
        """Most outputs of a call where outputs of whole prompts are wanted."""
        ...

    def part(self, plan: StepPlan, idx: Any, out: Array, wanted: int, of: Outputs | None = None) -> Part:
        """Process the outputs out [wanted, ...] for the rows idx [n] of the plan, all of which emit.

        of: which outputs there are, if other tokens have some too; None means the first n are those of the rows. Raises
        InvalidModelOutput.
        """
        ...


class Sampled:
    """Logits: one token a row is sampled from them, and log-probabilities of prompts are computed."""

    sampler: RowSampler | FrameSampler
    name: str
    table: TokenTable
    tally: Tally

    def __init__(self, sampler: RowSampler | FrameSampler, table: TokenTable, tally: Tally, name: str) -> None:
        self.sampler, self.table, self.tally, self.name = sampler, table, tally, name
        self.waiting: Waiting = Waiting()

    def step(self, model: Any) -> Callable[..., Any]:
        call: Callable[..., Any] = model.step
        return call

    def admit(self, job: Job) -> int:
        self.sampler.admit(job)
        return job.unscored

    def most_outputs(self) -> int:
        return max(16, LOGITS_BYTES // (4 * self.sampler.vocab_size))

    def part(self, plan: StepPlan, idx: Any, out: Array, wanted: int, of: Outputs | None = None) -> Part:
        sampler, backend = self.sampler, self.sampler.backend
        out = self.checked(out, wanted)
        faults: dict[int, HibachiError] = {}
        if of is not None:
            assert isinstance(sampler, RowSampler)  # scores of a prompt are of single ids
            out, faults = self._score(sampler, plan, out, of)
        if not len(idx):
            return Part(idx, np.zeros(0, np.int32), None, np.zeros(0, bool), faults=faults)
        parents = list[tuple[Seq, Seq]]()
        if plan.linked:
            idx, out, parents = self._linked(plan, idx, out)
            if not len(idx):
                return Part(idx, np.zeros(0, np.int32), None, np.zeros(0, bool), faults=faults)
        jobs, positions = jobs_of(plan, idx), plan.end[idx]
        with self.tally:
            drawn = sampler.draw(out, jobs, plan.rows[idx], positions)
        part = drawn_part(idx, drawn, jobs, positions, backend)
        part.faults |= faults
        part.parents = parents
        return part

    def _linked(self, plan: StepPlan, idx: Any, out: Array) -> tuple[Any, Array, list[tuple[Seq, Seq]]]:
        """`idx` and the outputs, without the rows that wait for others, and with those that go on from one of them."""
        together = np.array([job.linked is not None and job.linked.draws is not None for job in jobs_of(plan, idx)])
        if len(at := np.flatnonzero(together)):
            self.waiting.keep(self.sampler, plan, idx, out, at)
            if len(at) == len(idx):
                return idx[:0], out, []
        mine, at, parents = forked(plan, idx[~together])
        if not parents and len(mine) == len(idx):
            return idx, out, parents
        return mine, self.sampler.rows(out, np.flatnonzero(~together)[at]), parents

    def checked(self, out: Array, wanted: int) -> Array:
        """The outputs [wanted, ...] of a call. Raises InvalidModelOutput."""
        return check_logits(out, self.sampler, wanted, self.name)

    def along(self, plan: StepPlan, idx: Any, outs: Outs | OneCall) -> Part:
        """Draw for the rows idx [n] of the plan along their proposals. outs: of the last known token of each row, and
        of each proposal that is not sure.
        """
        assert isinstance(self.sampler, RowSampler)
        with self.tally:
            return Along(self.sampler, self.table, plan, idx, outs).run()

    def _score(
        self, sampler: RowSampler, plan: StepPlan, out: Array, of: Outputs
    ) -> tuple[Array, dict[int, HibachiError]]:
        """Note the log-probabilities of the prompt's tokens; returns the outputs to sample from, and errors."""
        idx, start, emit, score = of.idx, of.start, of.last, of.before
        rows, jobs = plan.rows[idx], jobs_of(plan, idx)
        ends = np.cumsum(score + emit)
        samples = ends[emit] - 1
        row = np.repeat(np.arange(len(idx)), score)
        places = np.delete(np.arange(ends[-1]), samples)
        position = start[row] + within(score) + 1
        tokens, wanted = np.zeros(ends[-1], np.int32), np.zeros(ends[-1], np.int32)
        tokens[places] = self.table.packed(rows, start + 1, score, row, position)
        wanted[places] = [jobs[i].sampling.prompt_logprobs for i in row.tolist()]
        with self.tally:
            found = sampler.logprobs(out, tokens, wanted.tolist())
        faults: dict[int, HibachiError] = {}
        for i, place, at in zip(row.tolist(), places.tolist(), position.tolist(), strict=True):
            scores = jobs[i].scores
            assert scores is not None
            scores[at] = found[place]
            if any(value != value for value in found[place].values()):
                faults[int(idx[i])] = NonFiniteOutput(NOT_FINITE)
        return sampler.rows(out, samples) if len(samples) else out, faults


class ReturnedTokens:
    """Tokens that the model returns itself, one a row."""

    name: str

    def __init__(self, backend: ArrayBackend, tally: Tally, name: str) -> None:
        self._backend, self._tally, self.name = backend, tally, name

    def step(self, model: Any) -> Callable[..., Any]:
        call: Callable[..., Any] = model.step
        return call

    def admit(self, job: Job) -> int:
        return 0

    def most_outputs(self) -> int:
        return 2**30

    def part(self, plan: StepPlan, idx: Any, out: Array, wanted: int, of: Outputs | None = None) -> Part:
        if not len(idx):
            return Part(idx, np.zeros(0, np.int32), None, np.zeros(0, bool))
        jobs = jobs_of(plan, idx)
        assert jobs[0].kind is not None  # of all: rows of different kinds share no call
        shape, dtype = jobs[0].kind
        check_output(out, self._backend, (wanted, *shape), self.name, kind=dtype.kind)
        return token_part(idx, out, jobs, dtype, self._backend, self._tally, self.name)


class Pooled:
    """Vectors: the pooled hidden states of each whole text. A request ends with its vector."""

    name: str

    def __init__(self, backend: ArrayBackend, budget: int, name: str) -> None:
        self._backend, self._budget, self.name = backend, budget, f"{name}.hidden"
        self._sums: WeakKeyDictionary[Job, dict[int, Any]] = WeakKeyDictionary()
        """{position: sum over the tokens from there, float64 [hidden]} of each request."""

    def step(self, model: Any) -> Callable[..., Any]:
        call: Callable[..., Any] = model.hidden
        return call

    def admit(self, job: Job) -> int:
        self._sums[job] = {}
        before_last = job.seq.prompt_len - 1
        return {"mean": before_last, "cls": min(1, before_last), "last": 0}[job.request.pooling or "last"]

    def most_outputs(self) -> int:
        return self._budget

    def part(self, plan: StepPlan, idx: Any, out: Array, wanted: int, of: Outputs | None = None) -> Part:
        check_output(out, self._backend, (wanted, None), self.name, kind="f")
        host = self._backend.get(out).astype(np.float64, order="C")
        if of is not None:
            host = self._sum(plan, of, host)
        vectors, jobs = host[: len(idx)], jobs_of(plan, idx)
        for i, job in enumerate(jobs):
            vectors[i] = self._pooled(job, vectors[i])
        bad = ~np.isfinite(vectors).all(axis=1)
        rounded = vectors.astype(np.float32)
        for i, job in enumerate(jobs):
            if job.request.unit:
                rounded[i] = unit(rounded[i])
        batch = self._backend.put(rounded)
        self._backend.settle([batch])
        return Part(idx, np.zeros(len(idx), np.int32), batch, np.ones(len(idx), bool), bad)

    def _sum(self, plan: StepPlan, of: Outputs, host: Any) -> Any:
        """Keep the sums of the tokens before the last; returns the outputs of the last tokens."""
        ends = np.cumsum(of.before + of.last)
        places = zip(*(a.tolist() for a in (of.start, of.before, ends, of.last)), strict=True)
        for job, (at, n, end, last) in zip(jobs_of(plan, of.idx), places, strict=True):
            sums = self._sums[job]
            for position in [p for p in sums if p >= at]:  # of a step that failed half-way and is run again
                del sums[position]
            if n:
                sums[at] = host[end - last - n : end - last].sum(axis=0)
        return host[ends[of.last] - 1]

    def _pooled(self, job: Job, last: Any) -> Any:
        sums = self._sums[job]
        if job.request.pooling == "mean":
            return sum(sums.values(), last) / job.seq.prompt_len
        return sums[0] if sums else last


def unit(vector: HostArray) -> HostArray:
    """Scale to length 1, unless it is zero."""
    out: HostArray = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return out
