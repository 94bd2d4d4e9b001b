"""Proposals where a model is shown whole sequences: a row is shown several times, each time with one proposal more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.engine.runners.runner import Part
from hibachi.engine.runners.sampler import RowSampler
from hibachi.engine.runners.tokentable import TokenTable
from hibachi.engine.scheduler.step import StepPlan
from hibachi.engine.speculation.ahead import Outs
from hibachi.engine.speculation.proposals import Along, place, proposed, sure
from hibachi.errors import HibachiError


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
