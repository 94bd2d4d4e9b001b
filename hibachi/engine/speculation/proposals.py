"""Proposed tokens: which of them a row keeps.

Each position draws as it would without proposals, with its own random number. A proposal that equals what was drawn
makes the next position's draw good as well, as its logits were computed behind the right token. So a row gets the
tokens that it would get anyhow, in fewer steps; what is proposed decides about time only.

Tokens that the form of an output leaves no choice about come first. Of these no logits are made, unless something looks
at them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hibachi.backend.array_backend import HostArray
from hibachi.engine.runners.frames import FrameSampler
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.runner import Part, drawn_part, jobs_of
from hibachi.engine.runners.sampler import Drawn, RowSampler
from hibachi.engine.runners.tokentable import TokenTable
from hibachi.engine.scheduler.step import StepPlan
from hibachi.engine.speculation.ahead import Ahead, OneCall, Outs
from hibachi.errors import HibachiError


def sure(sampler: RowSampler | FrameSampler, plan: StepPlan, idx: Any) -> Any:
    """How many of their first proposals the rows idx get for sure, without logits: int32 [n]."""
    assert plan.draft is not None and isinstance(sampler, RowSampler)
    jobs = jobs_of(plan, idx)
    if not any(job.sure for job in jobs):
        return np.zeros(len(jobs), np.int32)
    return np.minimum(sampler.sure(jobs, plan.rows[idx], plan.end[idx]), plan.draft[idx])


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


@dataclass(slots=True, eq=False)
class _Row:
    """A row along its proposals.

    number: in the table. given: tokens that it gets for sure. guesses: the other proposals. at: the position that its
    first output draws for. first: this output, among those of all rows. tokens: that are drawn and kept; logprobs: by
    place among these. stopped, whole, bad, fault: as in `Part`, of the last token.
    """

    job: Job
    number: int
    given: list[int]
    guesses: list[int]
    at: int
    first: int
    tokens: list[int] = field(default_factory=list)
    logprobs: dict[int, Any] = field(default_factory=dict)
    stopped: bool = False
    whole: bool = False
    bad: bool = False
    fault: HibachiError | None = None


class Along:
    """The draws of n rows along their proposals. In lists, as most steps have few rows with proposals.

    out: the logits of the last token and of each proposal of each row; of tokens that a row gets for sure, only of the
    last.
    """

    def __init__(self, sampler: RowSampler, table: TokenTable, plan: StepPlan, idx: Any, out: Outs | OneCall) -> None:
        assert plan.draft is not None
        self._sampler, self._table, self._idx, self._out = sampler, table, idx, out
        self._rows, first = list[_Row](), 0
        certain = sure(sampler, plan, idx).tolist()
        of = (a[idx].tolist() for a in (plan.rows, plan.end, plan.draft))
        for job, n, row, end, draft in zip(jobs_of(plan, idx), certain, *of, strict=True):
            tokens = job.draft[:draft].tolist() if draft else []
            self._rows.append(_Row(job, row, tokens[:n], tokens[n:], end + n, first))
            first += 1 + draft - n

    def run(self) -> Part:
        rows = self._take_sure()
        looks = self._sampler.looks_back([row.number for row in rows]).tolist()
        if at_once := [row for row, back in zip(rows, looks, strict=True) if not back]:
            self._at_once(at_once)
        if others := [row for row, back in zip(rows, looks, strict=True) if back]:
            self._step_by_step(others)
        return self._part()

    def _part(self) -> Part:
        rows, tokens, logprobs = self._rows, list[int](), dict[int, Any]()
        for row in rows:
            tokens += row.given
            logprobs |= {len(tokens) + n: found for n, found in row.logprobs.items()}
            tokens += row.tokens
        return Part(
            self._idx,
            np.array(tokens, np.int32),
            None,
            np.array([row.stopped for row in rows]),
            np.array([row.bad for row in rows]) if any(row.bad for row in rows) else None,
            logprobs,
            {int(i): row.fault for i, row in zip(self._idx, rows, strict=True) if row.fault is not None},
            counts=np.array([len(row.given) + len(row.tokens) for row in rows]),
            whole=np.array([row.whole for row in rows]) if any(row.whole for row in rows) else None,
        )

    def _take_sure(self) -> list[_Row]:
        """Give rows what they get for sure. Returns those that draw a token then, as they did not end."""
        over, rows, j = set[_Row](), [row for row in self._rows if row.given], 0
        while rows:
            tokens = np.array([row.given[j] for row in rows], np.int32)
            positions = np.array([row.at - len(row.given) + j for row in rows])
            part = self._judged(Drawn(tokens, None, {}), rows, positions)
            for n in {*np.flatnonzero(part.stopped).tolist(), *part.faults}:
                row = rows[n]
                over.add(row)
                row.given = row.given[: j + 1]
                row.stopped, row.whole = bool(part.stopped[n]), part.whole is not None and bool(part.whole[n])
                row.fault = part.faults.get(n)
            j += 1
            rows = [row for row in rows if row not in over and j < len(row.given)]
        return [row for row in self._rows if row not in over] if over else self._rows

    def _at_once(self, rows: list[_Row]) -> None:
        """Draw for all positions: what a row draws does not depend on what it drew before."""
        part, right = self._draw(
            [row for row in rows for _ in range(len(row.guesses) + 1)],
            [j for row in rows for j in range(len(row.guesses) + 1)],
        )
        first = 0
        for row in rows:
            n, first = first, first + len(row.guesses) + 1
            self._keep(row, part, n)
            while right[n]:
                n += 1
                self._keep(row, part, n)

    def _step_by_step(self, rows: list[_Row]) -> None:
        """Draw position by position: the changes of a row's logits depend on the tokens before."""
        j = 0
        while rows:
            part, right = self._draw(rows, [j] * len(rows))
            for n, row in enumerate(rows):
                self._keep(row, part, n)
            rows = [row for row, good in zip(rows, right, strict=True) if good]
            if rows:
                come = np.array([(row.number, row.at + j, row.tokens[j]) for row in rows], np.intp)
                self._table.write_ahead(*come.T)
            j += 1

    def _draw(self, rows: list[_Row], within: list[int]) -> tuple[Part, list[bool]]:
        """What is drawn from m outputs, number `within` of each of these rows; and which of the tokens are what was
        proposed and end nothing.
        """
        of = np.array([(row.number, row.at + j, row.first + j) for row, j in zip(rows, within, strict=True)], np.intp)
        numbers, positions, places = of.T
        drawn = self._out.draw(self._sampler, places, [row.job for row in rows], numbers, positions)
        part = self._judged(drawn, rows, positions)
        stopped, bad = part.stopped.tolist(), None if part.bad is None else part.bad.tolist()
        right = [
            j < len(row.guesses)
            and token == row.guesses[j]
            and not (stopped[n] or (bad is not None and bad[n]) or n in part.faults)
            for n, (row, j, token) in enumerate(zip(rows, within, drawn.tokens.tolist(), strict=True))
        ]
        return part, right

    def _judged(self, drawn: Drawn, rows: list[_Row], positions: Any) -> Part:
        return drawn_part(np.arange(len(rows)), drawn, [row.job for row in rows], positions, self._sampler.backend)

    def _keep(self, row: _Row, part: Part, n: int) -> None:
        """The row gets the token number n of those drawn. One that failed behind others is not kept: the next step
        draws it again, so that these come as they do without proposals.
        """
        assert part.tokens is not None
        bad, fault = part.bad is not None and bool(part.bad[n]), part.faults.get(n)
        if (bad or fault is not None) and (row.given or row.tokens):
            return
        if n in part.logprobs:
            row.logprobs[len(row.tokens)] = part.logprobs[n]
        row.tokens.append(part.tokens.item(n))
        row.stopped, row.bad, row.fault = bool(part.stopped[n]), bad, fault
        row.whole = part.whole is not None and bool(part.whole[n])
