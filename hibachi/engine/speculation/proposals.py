"""Proposed tokens: which of them a row keeps.

Each position draws as it would without proposals, with its own random number. A proposal that equals what was drawn
makes the next position's draw good as well, as its logits were computed behind the right token. So a row gets the
tokens that it would get anyhow, in fewer steps; what is proposed decides about time only.

Tokens that the form of an output leaves no choice about come first. Of these no logits are made, unless something looks
at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.engine.runners.frames import FrameSampler
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.runner import Part, drawn_part, jobs_of
from hibachi.engine.runners.sampler import Drawn, RowSampler
from hibachi.engine.runners.tokentable import TokenTable, within
from hibachi.engine.scheduler.step import StepPlan
from hibachi.errors import HibachiError


class ProposedPiece(NamedTuple):
    """Tokens of n rows in one call. own [n]: known ones. last [n]: the row has outputs. draft [n], proposals [sum]:
    tokens behind the known ones; None means there are none.
    """

    own: Any
    last: Any
    draft: Any = None
    proposals: HostArray | None = None


class Again(NamedTuple):
    """Rows, by their places among others, and what they compute again."""

    rows: Any
    ahead: Ahead


class Ahead:
    """What rows [B] compute in a step: known tokens up to `end`, and proposals behind them.

    draft [B]: how many of the latter, 0 where a row does not emit; proposals [sum]: one row's after another's. Both
    None means there are none.
    """

    def __init__(self, end: Any, emit: Any, draft: Any = None, proposals: HostArray | None = None) -> None:
        self._known, self._emit, self.draft, self._proposals = end, emit, draft, proposals
        self.end: Any = end if draft is None else end + draft
        self._first: Any = None if draft is None else np.cumsum(draft) - draft

    def piece(self, mine: Any, at: Any, n: Any) -> ProposedPiece:
        """Of the rows `mine`, so many tokens from there on, [n] each. Outputs are wanted of the last known token and of
        all proposals.
        """
        known, stop, emit = self._known[mine], at + n, self._emit[mine]
        if self.draft is None or self._proposals is None:
            return ProposedPiece(n, emit & (stop == known))
        draft, last = np.clip(stop - np.maximum(known, at), 0, n), emit & (stop >= known)
        first = self._first[mine] + np.maximum(at - known, 0)
        return ProposedPiece(n - draft, last, draft, self._proposals[np.repeat(first, draft) + within(draft)])

    def whole(self, start: Any) -> ProposedPiece:
        """All that the rows compute, from there on, [B]."""
        return ProposedPiece(self._known - start, self._emit, self.draft, self._proposals)

    @property
    def counts(self) -> Any:
        """How many outputs each row has, [B]."""
        return np.where(self._emit, 1 if self.draft is None else self.draft + 1, 0)

    def kept(self, part: Part, end: Any) -> Any:
        """Up to where the rows that emit have computed tokens that stay, [n].

        part: what these rows have drawn, in their order. end [n]: how many tokens they had before.
        """
        assert part.counts is not None
        return np.clip(end + part.counts - 1, end, self.end[np.flatnonzero(self._emit)])

    def wrong(self, part: Part, end: Any) -> Again:
        """The rows of which some proposals were wrong, and that go on: they keep what came before these. part, end: as
        of `kept`.
        """
        assert self._proposals is not None
        rows, kept = np.flatnonzero(self._emit), self.kept(part, end)
        over = part.stopped.copy()
        if part.bad is not None:
            over |= part.bad
        at = np.flatnonzero((kept < self.end[rows]) & ~over)
        rows, kept = rows[at], kept[at].astype(np.int32)
        known = np.minimum(self._known[rows], kept)
        draft = kept - known
        tokens = self._proposals[np.repeat(self._first[rows], draft) + within(draft)]
        return Again(rows, Ahead(known, np.zeros(len(rows), bool), draft, tokens))

    def outputs(self, mine: Any, piece: ProposedPiece) -> Any:
        """How many outputs each row has in this piece, [n]."""
        if piece.draft is None:
            return piece.last.astype(np.int64)
        return np.where(piece.last, piece.draft + (piece.own > 0), 0)


class Outs:
    """The logits of rows' outputs, in one call or several. counts [n]: outputs of each row."""

    def __init__(self, backend: ArrayBackend, counts: Any) -> None:
        self._backend = backend
        self._arrays: list[Array] = []
        self._first, self._done = np.cumsum(counts) - counts, np.zeros(len(counts), np.int64)
        total = int(counts.sum())
        self._which, self._at = np.zeros(total, np.int64), np.arange(total)

    def add(self, out: Array, mine: Any, counts: Any) -> None:
        """The outputs of a call, [m, vocab]: so many for each of the rows `mine`, one row's after another's, and
        padding. A row's outputs come in their order.
        """
        self.put(out, np.repeat(self._first[mine] + self._done[mine], counts) + within(counts))
        self._done[mine] += counts

    def put(self, out: Array, places: Any) -> None:
        """The outputs of a call, [m, vocab], which are those number `places` [n] of all, and padding; -1 for one that
        nobody wants.
        """
        at = np.flatnonzero(places >= 0)
        self._which[places[at]], self._at[places[at]] = len(self._arrays), at
        self._arrays.append(out)

    def draw(self, sampler: RowSampler, places: Any, jobs: Sequence[Job], rows: Any, positions: Any) -> Drawn:
        """`RowSampler.draw` from the outputs number `places` [n], in calls of the shapes that they have."""
        which = self._which[places]
        if (which == which[0]).all():
            return sampler.draw(self._rows(sampler, int(which[0]), self._at[places]), jobs, rows, positions)
        whole = Drawn(np.zeros(len(places), np.int32), np.zeros(len(places), bool), {})
        for k in np.unique(which).tolist():
            mine = np.flatnonzero(which == k)
            out = self._rows(sampler, k, self._at[places[mine]])
            part = sampler.draw(out, [jobs[i] for i in mine.tolist()], rows[mine], positions[mine])
            whole.tokens[mine] = part.tokens
            if part.bad is not None:
                whole.bad[mine] = part.bad
            whole.logprobs |= {int(mine[i]): found for i, found in part.logprobs.items()}
            whole.faults |= {int(mine[i]): fault for i, fault in part.faults.items()}
        return whole

    def _rows(self, sampler: RowSampler, k: int, at: Any) -> Array:
        return _rows_of(self._arrays[k], at, sampler, self._backend)


class OneCall:
    """`Outs` where one call has all of them, in their order: `out`, with padding at its end."""

    def __init__(self, backend: ArrayBackend, out: Array) -> None:
        self._backend, self._out = backend, out

    def draw(self, sampler: RowSampler, places: Any, jobs: Sequence[Job], rows: Any, positions: Any) -> Drawn:
        """As `Outs.draw`."""
        return sampler.draw(_rows_of(self._out, places, sampler, self._backend), jobs, rows, positions)


def _rows_of(out: Array, at: Any, sampler: RowSampler, backend: ArrayBackend) -> Array:
    if (len(at) == out.shape[0] or backend.shapes.compiled) and (at == np.arange(len(at))).all():
        return out  # what is more is padding, or not wanted
    return sampler.rows(out, at)


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
    row = np.repeat(idx, counts)
    table.write_ahead(
        plan.rows[row], plan.end[row] + within(counts), proposed(plan, idx, np.zeros_like(counts), counts)
    )


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
class _ProposedRow:
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
        self._rows, first = list[_ProposedRow](), 0
        certain = sure(sampler, plan, idx).tolist()
        of = (a[idx].tolist() for a in (plan.rows, plan.end, plan.draft))
        for job, n, row, end, draft in zip(jobs_of(plan, idx), certain, *of, strict=True):
            tokens = job.draft[:draft].tolist() if draft else []
            self._rows.append(_ProposedRow(job, row, tokens[:n], tokens[n:], end + n, first))
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

    def _take_sure(self) -> list[_ProposedRow]:
        """Give rows what they get for sure. Returns those that draw a token then, as they did not end."""
        over, rows, j = set[_ProposedRow](), [row for row in self._rows if row.given], 0
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

    def _at_once(self, rows: list[_ProposedRow]) -> None:
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

    def _step_by_step(self, rows: list[_ProposedRow]) -> None:
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

    def _draw(self, rows: list[_ProposedRow], within: list[int]) -> tuple[Part, list[bool]]:
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

    def _judged(self, drawn: Drawn, rows: list[_ProposedRow], positions: Any) -> Part:
        return drawn_part(np.arange(len(rows)), drawn, [row.job for row in rows], positions, self._sampler.backend)

    def _keep(self, row: _ProposedRow, part: Part, n: int) -> None:
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


class Longer:
    """A step of rows with proposals. plan: of m rows; those of one row of the step follow one another."""

    plan: StepPlan

    def __init__(self, plan: StepPlan, backend: ArrayBackend, sampler: RowSampler, table: TokenTable) -> None:
        assert plan.draft is not None
        self._plan, self._backend, self._sampler, self._table = plan, backend, sampler, table
        self._of = np.flatnonzero(plan.emit)
        certain, draft = sure(sampler, plan, self._of), plan.draft[self._of]
        place(table, plan, self._of, certain)
        self._certain, self._counts = certain, draft - certain + 1
        self._first = np.cumsum(self._counts) - self._counts
        each = np.repeat(np.arange(len(self._of)), self._counts)
        self._more = np.arange(len(each)) - self._first[each]  # proposals that are shown
        self._known, self._each = plan.end[self._of] + certain, each
        self._guesses = np.split(proposed(plan, self._of, certain, draft), np.cumsum(draft - certain)[:-1])
        at = self._of[each]
        self.plan = replace(
            plan,
            seqs=[plan.seqs[i] for i in at.tolist()],
            rows=plan.rows[at],
            start=plan.start[at],
            q=(self._known[each] + self._more).astype(np.int32) - plan.start[at],
            emit=plan.emit[at],
            generation=plan.generation[at],
            draft=None,
        )
        self._outs: list[tuple[Any, Array]] = []

    def text(self, i: int) -> HostArray:
        """The tokens of row i of the m."""
        row = int(self._each[i])
        known = self._table.read(int(self.plan.rows[i]), 0, int(self._known[row]))
        return np.concatenate([known, self._guesses[row][: self._more[i]]])

    def add(self, idx: Any, out: Array) -> None:
        """The logits of the rows idx of the m, and padding."""
        self._outs.append((idx, out))

    def settle(self, failed: dict[int, HibachiError]) -> tuple[Any, dict[int, HibachiError]]:
        """failed: by place among the m. Returns the rows of the step that can be drawn for, and the errors of the
        others. Proposals of which there are no logits have not been made.
        """
        fine = np.zeros(len(self._each), bool)
        for idx, _ in self._outs:
            fine[idx] = True
        counts = np.array(
            [
                int(np.logical_and.accumulate(fine[first : first + n]).sum())
                for first, n in zip(self._first.tolist(), self._counts.tolist(), strict=True)
            ]
        )
        draft = np.zeros(len(self._plan.rows), np.int32)
        draft[self._of] = self._certain + np.maximum(counts - 1, 0)
        self._plan, self._counts = replace(self._plan, draft=draft), counts
        bad = {int(self._of[i]): failed[int(self._first[i])] for i in np.flatnonzero(counts == 0).tolist()}
        return self._of[counts > 0], bad

    def part(self, idx: Any) -> Part:
        """What the rows idx of the step draw, after `settle`."""
        rows = np.searchsorted(self._of, idx)
        outs, places = Outs(self._backend, self._counts[rows]), np.full(len(self._each), -1, np.int64)
        wanted = np.isin(self._each, rows) & (self._more < self._counts[self._each])
        places[wanted] = np.arange(wanted.sum())
        for at, out in self._outs:
            if (places[at] >= 0).any():
                outs.put(out, places[at])
        return Along(self._sampler, self._table, self._plan, idx, outs).run()
