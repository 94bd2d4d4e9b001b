"""Proposed tokens: which of them a row keeps.

Each position draws as it would without proposals, with its own random number. A proposal that equals what was drawn
makes the next position's draw good as well, as its logits were computed behind the right token. So a row gets the
tokens that it would get anyhow, in fewer steps; what is proposed decides about time only.

Tokens that the form of an output leaves no choice about come first. Of these no logits are made, unless something looks
at them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hibachi.errors import HibachiError
from hibachi.plan.step import StepPlan
from hibachi.runners.ahead import Ahead, Outs
from hibachi.runners.frames import FrameSampler
from hibachi.runners.job import Job
from hibachi.runners.runner import Part, drawn_part, jobs_of
from hibachi.runners.sampler import Drawn, RowSampler
from hibachi.runners.tokentable import TokenTable
from hibachi.tensor.array_backend import HostArray


def sure(sampler: RowSampler | FrameSampler, plan: StepPlan, idx: Any) -> Any:
    """How many of their first proposals the rows idx get for sure, without logits: int32 [n]."""
    assert plan.draft is not None and isinstance(sampler, RowSampler)
    return np.minimum(
        sampler.sure([plan.seqs[i].owner for i in idx.tolist()], plan.rows[idx], plan.end[idx]), plan.draft[idx]
    )


def proposed(plan: StepPlan, idx: Any, start: Any, end: Any) -> HostArray:
    """The proposals of the rows idx of a plan, each row's from number `start` to `end`, one row's after another's:
    int32. start, end [n].
    """
    places = zip(idx.tolist(), start.tolist(), end.tolist(), strict=True)
    found = [plan.seqs[i].owner.draft[first:last] for i, first, last in places if first < last]
    return np.concatenate(found) if found else np.zeros(0, np.int32)


def place(table: TokenTable, plan: StepPlan, idx: Any, counts: Any) -> None:
    """Write the first proposals of the rows idx into the table, behind what is known: so many of each, [n]."""
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    row = np.repeat(idx, counts)
    table.write_ahead(plan.rows[row], plan.end[row] + within, proposed(plan, idx, np.zeros_like(counts), counts))


def ahead_of(sampler: RowSampler | FrameSampler, table: TokenTable, plan: StepPlan, idx: Any) -> Ahead:
    """What the rows idx of a plan compute. Tokens that they get for sure are in the table then."""
    end, emit = plan.end[idx], plan.emit[idx]
    if plan.draft is None or not (draft := plan.draft[idx]).any():
        return Ahead(end, emit)
    certain = sure(sampler, plan, idx)
    if certain.any():  # the rest of the step does not tell them from others that are known
        place(table, plan, idx, certain)
    return Ahead(end + certain, emit, draft - certain, proposed(plan, idx, certain, draft))


class Along:
    """The draws of n rows along their proposals.

    out: the logits of the last token and of each proposal of each row; of tokens that a row gets for sure, only of the
    last.
    """

    def __init__(self, sampler: RowSampler, table: TokenTable, plan: StepPlan, idx: Any, out: Outs) -> None:
        assert plan.draft is not None
        self._sampler, self._table, self._idx, self._out = sampler, table, idx, out
        self.jobs: list[Job] = jobs_of(plan, idx)
        self._sure = sure(sampler, plan, idx)
        self._rows, self._at, self._draft = plan.rows[idx], plan.end[idx] + self._sure, plan.draft[idx] - self._sure
        self._first = np.cumsum(self._draft + 1) - (self._draft + 1)  # of each row's outputs
        n = int((self._draft + 1).sum())
        self._proposed = np.full(n, -1, np.int32)  # what is proposed for the position that each output draws
        self._proposed[np.delete(np.arange(n), self._first + self._draft)] = proposed(
            plan, idx, self._sure, plan.draft[idx]
        )
        self._given: list[HostArray] = [
            np.zeros(0, np.int32) if not n else plan.seqs[i].owner.draft[:n]
            for i, n in zip(idx.tolist(), self._sure.tolist(), strict=True)
        ]
        self.counts = np.zeros(len(idx), np.int64)  # tokens that are drawn
        self.tokens = np.zeros(n, np.int32)
        self.bad, self.stopped = np.zeros(len(idx), bool), np.zeros(len(idx), bool)
        self.whole = np.zeros(len(idx), bool)
        self.logprobs: dict[int, dict[int, float]] = {}
        self.faults: dict[int, HibachiError] = {}

    def run(self) -> Part:
        looks, draws = self._sampler.looks_back(self._rows), self._take_sure()
        if len(at := np.flatnonzero(draws & ~looks)):
            self._at_once(at)
        if len(at := np.flatnonzero(draws & looks)):
            self._step_by_step(at)
        return self._part()

    def _part(self) -> Part:
        tokens, logprobs, n = list[HostArray](), dict[int, Any](), 0
        for given, first, count in zip(self._given, self._first.tolist(), self.counts.tolist(), strict=True):
            tokens += [given, self.tokens[first : first + count]]
            n += len(given)
            logprobs |= {n + i: self.logprobs[first + i] for i in range(count) if first + i in self.logprobs}
            n += count
        faults = {int(self._idx[i]): e for i, e in self.faults.items()}
        whole = self.whole if self.whole.any() else None
        bad = self.bad if self.bad.any() else None
        counts = self.counts + [len(given) for given in self._given]
        found = np.concatenate(tokens).astype(np.int32, copy=False)
        return Part(self._idx, found, None, self.stopped, bad, logprobs, faults, counts=counts, whole=whole)

    def _take_sure(self) -> Any:
        """Give rows what they get for sure. Returns which rows draw a token then, bool [n]: those that did not end."""
        draws, at, j = np.ones(len(self._idx), bool), np.flatnonzero(self._sure), 0
        while len(at):
            tokens = np.array([self._given[i][j] for i in at.tolist()], np.int32)
            jobs, positions = [self.jobs[i] for i in at.tolist()], self._at[at] - self._sure[at] + j
            part = drawn_part(np.arange(len(at)), Drawn(tokens, None, {}), jobs, positions, self._sampler.backend)
            for n in {*np.flatnonzero(part.stopped).tolist(), *part.faults}:
                i = int(at[n])
                draws[i], self._given[i] = False, self._given[i][: j + 1]
                self.stopped[i], self.whole[i] = part.stopped[n], part.whole is not None and part.whole[n]
                if n in part.faults:
                    self.faults[i] = part.faults[n]
            j += 1
            at = at[draws[at] & (j < self._sure[at])]
        return draws

    def _at_once(self, at: Any) -> None:
        """Draw for all positions: what a row draws does not depend on what it drew before."""
        outs = self._draft[at] + 1
        row = np.repeat(at, outs)
        within = np.arange(len(row)) - np.repeat(np.cumsum(outs) - outs, outs)
        places = self._first[row] + within
        part, good = self._draw(row, places, self._at[row] + within)
        ends = np.cumsum(outs)
        for i, first, end in zip(at.tolist(), (ends - outs).tolist(), ends.tolist(), strict=True):
            n = first
            while n < end - 1 and good[n]:
                n += 1
            self._keep(i, part, n, n - first + 1)

    def _step_by_step(self, at: Any) -> None:
        """Draw position by position: the changes of a row's logits depend on the tokens before."""
        j = 0
        while len(at):
            part, good = self._draw(at, self._first[at] + j, self._at[at] + j)
            for n, i in enumerate(at.tolist()):
                self._keep(i, part, n, j + 1)
            right = at[good & (j < self._draft[at])]
            self._table.write_ahead(self._rows[right], self._at[right] + j, self.tokens[self._first[right] + j])
            at = right
            j += 1

    def _draw(self, row: Any, places: Any, positions: Any) -> tuple[Part, Any]:
        """What is drawn at m positions, and which of the tokens are what was proposed and end nothing: bool [m]."""
        jobs = [self.jobs[i] for i in row.tolist()]
        drawn = self._out.draw(self._sampler, places, jobs, self._rows[row], positions)
        part = drawn_part(np.arange(len(row)), drawn, jobs, positions, self._sampler.backend)
        self.tokens[places] = drawn.tokens
        self.logprobs |= {int(places[i]): found for i, found in drawn.logprobs.items()}
        right = (drawn.tokens == self._proposed[places]) & ~part.stopped
        if part.bad is not None:
            right &= ~part.bad
        right[list(part.faults)] = False
        return part, right

    def _keep(self, i: int, part: Part, last: int, count: int) -> None:
        """Row i keeps `count` tokens; the last of them is number `last` of those drawn. One that failed behind others
        is not kept: the next step draws it again, so that these come as they do without proposals.
        """
        failed = last in part.faults or (part.bad is not None and bool(part.bad[last]))
        if failed and count + self._sure[i] > 1:
            self.counts[i] = count - 1
            return
        self.counts[i], self.stopped[i] = count, part.stopped[last]
        if part.whole is not None:
            self.whole[i] = part.whole[last]
        if part.bad is not None:
            self.bad[i] = part.bad[last]
        if last in part.faults:
            self.faults[i] = part.faults[last]
