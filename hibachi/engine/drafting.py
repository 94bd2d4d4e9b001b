"""Proposals for rows that decode: made before a step is planned, judged when it is over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hibachi.draft.config import SpeculativeConfig
from hibachi.draft.howmany import Depth, HowMany
from hibachi.draft.ngram import NgramDrafter
from hibachi.draft.protocol import NOTHING, Drafter, Tokens, checked
from hibachi.engine import draftmodels
from hibachi.engine.batchengine import Facts
from hibachi.guide.protocol import GuideFailed
from hibachi.plan.scheduler import Scheduler
from hibachi.plan.sequence import Seq
from hibachi.plan.step import StepPlan
from hibachi.runners.draftmodel import DraftModel
from hibachi.runners.job import Job
from hibachi.runners.meters import Drafted
from hibachi.runners.runner import BaseRunner, Outcome
from hibachi.tensor.array_backend import ArrayBackend

FORCED = "forced"  # who proposes what a grammar leaves no choice about


@dataclass(slots=True, eq=False)
class Row:
    """A row that may have proposals in the next step, and what was found for it. most: proposals that it may have."""

    seq: Seq
    most: int
    found: Tokens = field(default_factory=lambda: NOTHING)
    sure: int = 0  # of these, how many at the beginning are certain
    by: str = ""  # who has found it

    @property
    def job(self) -> Job:
        job: Job = self.seq.owner
        return job


class Drafting:
    """Sets the proposals of the running rows.

    drafter: proposes where nobody is surer; name: what metrics call it. k: the most of a row. how: chooses how many
    pay; None means all. depth: of a draft model, chooses how many it makes; with `how` only.
    """

    def __init__(
        self,
        drafter: Drafter,
        k: int,
        vocab_size: int,
        how: HowMany | None = None,
        name: str = "ngram",
        depth: Depth | None = None,
    ) -> None:
        self._drafter, self._k, self._vocab, self._how, self._name = drafter, k, vocab_size, how, name
        self._depth = depth
        self._seconds = 0.0  # that a draft model took before this step
        self.drafted = Drafted()
        self._rows: dict[Seq, Row] = {}  # with what was found for the step

    def propose(self, scheduler: Scheduler, runner: BaseRunner) -> list[tuple[int, int]]:
        """Returns the sequences, by number, that have proposals now, and how many."""
        self._rows.clear()
        for seq in scheduler.order:
            seq.draft = 0
        rows = self._open(scheduler)
        if not rows:
            return []
        self._force(rows, scheduler)
        self._guess([row for row in rows if not len(row.found)], scheduler, runner, len(rows))
        for row, wanted in zip(rows, self._counts(rows, scheduler.budget - len(rows)), strict=True):
            n = runner.fitting(wanted)
            row.job.draft, row.seq.draft = row.found[:n], n
            row.job.sure = min(n, row.sure)
            if row.by:
                self._rows[row.seq] = row
        return [(row.seq.number, row.seq.draft) for row in rows if row.seq.draft]

    def _open(self, scheduler: Scheduler) -> list[Row]:
        """The rows that decode, have room for more than one token, and allow proposals."""
        table, rows = scheduler.table, []
        for seq in scheduler.order:
            at = seq.row
            if at < 0 or seq.paused or not table.emitted[at] or table.known[at] - table.computed[at] != 1:
                continue
            most = min(self._k, int(table.end[at] - table.known[at]) - 1)
            if most > 0:
                rows.append(Row(seq, most))
        return rows

    def _force(self, rows: Sequence[Row], scheduler: Scheduler) -> None:
        """Find what the grammars of guided rows leave no choice about."""
        guided = [
            (row, guided)
            for row in rows
            if (guided := row.job.guided) is not None and guided.seen == scheduler.known(row.seq) - row.seq.prompt_len
        ]
        if not guided:
            return
        if (prepare := getattr(guided[0][1].guides, "prepare", None)) is not None:
            prepare([each.guide for _, each in guided])
        for row, each in guided:
            with suppress(GuideFailed):  # the draw will find out
                found, row.sure = each.guide.forced(row.most)
                row.found, row.by = np.array(found, np.int32), FORCED

    def _guess(self, rows: Sequence[Row], scheduler: Scheduler, runner: BaseRunner, tokens: int) -> None:
        """Ask the drafter, if its proposals could pay. tokens: of the step without proposals."""
        rows = [row for row in self._asked(rows, scheduler, tokens) if row.most]
        if not rows:
            return
        began = time.perf_counter()
        known = [runner.tokens_of(row.seq.row, int(scheduler.table.known[row.seq.row])) for row in rows]
        most = [row.most for row in rows]
        found = checked(self._drafter.propose([row.seq for row in rows], known, most), most, self._vocab).proposals
        for row, each in zip(rows, found, strict=True):
            row.found, row.by = each, self._name
        if self._depth is not None:
            self._seconds = time.perf_counter() - began
            for row in rows:
                self._depth.note(row.most, len(row.found))

    def _asked(self, rows: Sequence[Row], scheduler: Scheduler, tokens: int) -> Sequence[Row]:
        """The rows that the drafter is asked about; `most` of each says how many proposals could pay."""
        if self._how is None or not rows:
            return rows
        if self._depth is None:
            return rows if self._how.worth(tokens, sum(row.most for row in rows)) else ()
        assert isinstance(self._drafter, DraftModel)
        lacks = [self._drafter.lacks(row.seq, scheduler.known(row.seq)) for row in rows]
        rates = [self._how.records.rate(row.seq, self._name) for row in rows]
        for row, most in zip(rows, self._depth.choose(lacks, rates, [row.most for row in rows]), strict=True):
            row.most = most
        return rows

    def _counts(self, rows: Sequence[Row], budget: int) -> list[int]:
        """How many of its proposals each row computes."""
        if self._how is None:
            return [len(row.found) for row in rows]
        sure = [row.sure for row in rows]
        guesses = [len(row.found) - row.sure for row in rows]
        rates = [self._how.records.rate(row.seq, row.by) for row in rows]
        more = self._how.choose(len(rows) + sum(sure), guesses, rates, budget - sum(sure))
        return [n + guess for n, guess in zip(sure, more, strict=True)]

    def judge(self, plan: StepPlan, outcome: Outcome, seconds: float) -> None:
        """A step is over, and took so long: which proposals were right."""
        draft, how = plan.draft, self._how
        if how is not None:
            seconds, self._seconds = seconds - self._seconds, 0.0
            how.costs.note(int(plan.q.sum()) + (0 if draft is None else int(draft.sum())), seconds)
            if self._depth is not None:
                self._depth.took(seconds)
        for part in outcome.parts:
            if part.tokens is None or not self._rows:
                continue
            counts = np.ones(len(part.idx), np.int64) if part.counts is None else part.counts
            first = np.cumsum(counts) - counts
            for i, n, at in zip(part.idx.tolist(), counts.tolist(), first.tolist(), strict=True):
                if (row := self._rows.get(plan.seqs[i])) is not None and n:
                    self._judge(row, part.tokens[at : at + n], 0 if draft is None else int(draft[i]))

    def _judge(self, row: Row, came: Any, tried: int) -> None:
        """The first `tried` proposals of a row were computed, and these tokens came."""
        right = len(came) - 1
        if tried:
            self.drafted.note(row.by, tried, right)
        guesses, right = tried - row.sure, right - row.sure
        if guesses <= 0 <= right and len(row.found) > row.sure:  # no guess was computed: what came judges the first
            guesses, right = 1, int(came[row.sure] == row.found[row.sure])
        if guesses > 0 <= right and self._how is not None and row.seq.owner is not None:
            self._how.records.note(row.seq, guesses, right, row.by)

    def forget(self, seq: Seq) -> None:
        """The request is over."""
        if self._how is not None:
            self._how.records.forget(seq)
        self._rows.pop(seq, None)
        if (forget := getattr(self._drafter, "forget", None)) is not None:
            forget(seq)


def made(config: SpeculativeConfig, facts: Facts, backend: ArrayBackend) -> Drafting:
    """backend: of the model. Raises UnsupportedOperation, and ConfigError."""
    k, how = config.num_speculative_tokens, HowMany() if config.auto else None
    assert facts.vocab_size is not None
    if config.method == "draft_model":
        depth = None if how is None else Depth(how)
        drafter = draftmodels.made(config, facts, backend, depth)
        return Drafting(drafter, k, facts.vocab_size, how, "draft_model", depth)
    return Drafting(NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max), k, facts.vocab_size, how)
