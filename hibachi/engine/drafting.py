"""Proposals for rows that decode: made before a step is planned, judged when it is over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

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
        self._by: dict[Seq, str] = {}  # who made the proposals of the step
        self._untried: dict[Seq, Tokens] = {}  # proposals that no row has computed: what comes judges them too

    def propose(self, scheduler: Scheduler, runner: BaseRunner) -> list[tuple[int, int]]:
        """Returns the sequences, by number, that have proposals now, and how many."""
        self._by.clear()
        self._untried.clear()
        for seq in scheduler.order:
            seq.draft = 0
        rows = self._rows(scheduler)
        if not rows:
            return []
        self._force(rows, scheduler)
        self._guess([row for row in rows if not len(row.found)], scheduler, runner, len(rows))
        for row, n in zip(rows, self._counts(rows, scheduler.budget - len(rows)), strict=True):
            row.job.draft, row.seq.draft = row.found[:n], n
            if n:
                self._by[row.seq] = row.by
            elif len(row.found):
                self._untried[row.seq] = row.found
        return [(row.seq.number, row.seq.draft) for row in rows if row.seq.draft]

    def _rows(self, scheduler: Scheduler) -> list[Row]:
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
        for row in rows:
            guided = row.job.guided
            if guided is not None and guided.seen == scheduler.known(row.seq) - row.seq.prompt_len:
                with suppress(GuideFailed):  # the draw will find out
                    row.found, row.by = np.array(guided.guide.forced(row.most), np.int32), FORCED

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
        rates = [self._how.records.rate(row.seq) for row in rows]
        for row, most in zip(rows, self._depth.choose(lacks, rates, [row.most for row in rows]), strict=True):
            row.most = most
        return rows

    def _counts(self, rows: Sequence[Row], budget: int) -> list[int]:
        """How many of its proposals each row computes."""
        counts = [len(row.found) for row in rows]
        if self._how is None:
            return counts
        rates = [1.0 if row.by == FORCED else self._how.records.rate(row.seq) for row in rows]
        return self._how.choose(len(rows), counts, rates, budget)

    def judge(self, plan: StepPlan, outcome: Outcome, seconds: float) -> None:
        """A step is over, and took so long: which proposals were right."""
        draft, how = plan.draft, self._how
        if how is not None:
            seconds, self._seconds = seconds - self._seconds, 0.0
            how.costs.note(int(plan.q.sum()) + (0 if draft is None else int(draft.sum())), seconds)
            if self._depth is not None:
                self._depth.took(seconds)
        for part in outcome.parts:
            if part.tokens is None or (draft is None and not self._untried):
                continue
            counts = np.ones(len(part.idx), np.int64) if part.counts is None else part.counts
            first = np.cumsum(counts) - counts
            for i, n, at in zip(part.idx.tolist(), counts.tolist(), first.tolist(), strict=True):
                seq, tried = plan.seqs[i], 0 if draft is None else int(draft[i])
                if tried:
                    right = max(n - 1, 0)
                    self.drafted.note(tried, right)
                elif (guess := self._untried.get(seq)) is not None and n:
                    tried, right = 1, int(part.tokens[at] == guess[0])
                if tried and how is not None and seq.owner is not None and self._by.get(seq) != FORCED:
                    how.records.note(seq, tried, right)

    def forget(self, seq: Seq) -> None:
        """The request is over."""
        if self._how is not None:
            self._how.records.forget(seq)
        self._untried.pop(seq, None)
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
