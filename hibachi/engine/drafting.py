"""Proposals for rows that decode: made before a step is planned, judged when it is over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hibachi.draft.aside import LATELY, Aside
from hibachi.draft.config import METHODS, SpeculativeConfig
from hibachi.draft.find import drafter_of
from hibachi.draft.howmany import HowMany
from hibachi.draft.ngram import NgramDrafter
from hibachi.draft.protocol import NOTHING, Drafter, Tokens, checked
from hibachi.guide.protocol import GuideFailed
from hibachi.plan.scheduler import Scheduler
from hibachi.plan.sequence import Seq
from hibachi.plan.step import StepPlan
from hibachi.runners.job import Job
from hibachi.runners.meters import Drafted
from hibachi.runners.runner import BaseRunner, Outcome

FORCED = "forced"  # who proposes what a grammar leaves no choice about
PREDICTED = "prediction"  # ... and what a caller expects
# Seconds that a step waits for a drafter in a thread of its own: a share of what steps take, within bounds.
LEAST_WAIT, MOST_WAIT, SHARE = 0.002, 0.005, 0.25
RETRY = 16  # where its guesses have not paid for the wait, such a drafter is asked in one step of so many


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

    drafter: proposes where nobody is surer; name: what metrics call it. One `Aside` is waited for a few ms at most. k:
    the most of a row. how: chooses how many pay; None means all.
    """

    def __init__(
        self, drafter: Drafter | Aside, k: int, vocab_size: int, how: HowMany | None = None, name: str = "ngram"
    ) -> None:
        self._usual = 0.0  # seconds that a step takes, without the wait for a drafter
        self._waited = 0.0  # for the drafter, in this step
        self._passed = 0  # steps in a row in which it could have been asked and was not
        self._drafter, self._k, self._vocab, self._how, self._name = drafter, k, vocab_size, how, name
        self.drafted = Drafted()
        self._rows: dict[Seq, Row] = {}  # with what was found for the step

    def propose(self, scheduler: Scheduler, runner: BaseRunner) -> list[tuple[int, int]]:
        """Returns the sequences, by number, that have proposals now, and how many."""
        self._rows.clear()
        self._waited = 0.0
        for seq in scheduler.order:
            seq.draft = 0
        rows = self._open(scheduler)
        if not rows:
            return []
        self._force(rows, scheduler)
        self._follow([row for row in rows if not len(row.found)], scheduler, runner)
        self._guess([row for row in rows if not len(row.found)], scheduler, runner, len(rows))
        for row, n in zip(rows, self._counts(rows, scheduler.budget - len(rows)), strict=True):
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
            most, asked = min(self._k, int(table.end[at] - table.known[at]) - 1), seq.owner.params
            if asked is not None and asked.num_speculative_tokens is not None:
                most = min(most, asked.num_speculative_tokens)
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

    def _follow(self, rows: Sequence[Row], scheduler: Scheduler, runner: BaseRunner) -> None:
        """Find what callers expect."""
        for row in rows:
            if (prediction := row.job.prediction) is not None:
                known = runner.tokens_of(row.seq.row, int(scheduler.table.known[row.seq.row]))
                row.found, row.by = prediction.find(known[row.seq.prompt_len :], row.most), PREDICTED

    def _guess(self, rows: Sequence[Row], scheduler: Scheduler, runner: BaseRunner, tokens: int) -> None:
        """Ask the drafter, if its proposals could pay. tokens: of the step without proposals."""
        if not rows or not self._worth(rows, tokens):
            return
        known = [runner.tokens_of(row.seq.row, int(scheduler.table.known[row.seq.row])) for row in rows]
        for row, each in zip(rows, self._asked(rows, known), strict=True):
            row.found, row.by = each, self._name

    def _asked(self, rows: Sequence[Row], known: list[Tokens]) -> list[Tokens]:
        """What the drafter proposes for rows with these tokens."""
        most = [row.most for row in rows]
        if not isinstance(self._drafter, Aside):
            return checked(self._drafter.propose([row.seq for row in rows], known, most), most, self._vocab).proposals
        began = time.perf_counter()
        self._drafter.ask([row.seq.number for row in rows], known, most)
        found = self._drafter.take(min(max(SHARE * self._usual, LEAST_WAIT), MOST_WAIT))
        self._waited = time.perf_counter() - began
        return [NOTHING] * len(rows) if found is None else found

    def _worth(self, rows: Sequence[Row], tokens: int) -> bool:
        """Whether to ask the drafter."""
        drafter, how, most = self._drafter, self._how, [row.most for row in rows]
        if isinstance(drafter, Aside) and drafter.off:
            return False
        if how is None:
            return True
        if not how.worth(tokens, sum(most)):
            return False
        self._passed += 1
        if isinstance(drafter, Aside) and self._passed < RETRY:
            rates = [how.records.rate(row.seq, self._name) for row in rows]
            if not how.pays(tokens, most, rates, drafter.seconds):
                return False
        self._passed = 0
        return True

    def _counts(self, rows: Sequence[Row], budget: int) -> list[int]:
        """How many of its proposals each row computes."""
        if self._how is None:
            return [len(row.found) for row in rows]
        sure = [row.sure for row in rows]
        guesses = [len(row.found) - row.sure for row in rows]
        rates = [self._how.records.rate(row.seq, row.by) for row in rows]
        more = self._how.choose(len(rows) + sum(sure), guesses, rates, budget - sum(sure))
        return [n + guess for n, guess in zip(sure, more, strict=True)]

    def took(self, plan: StepPlan, seconds: float) -> None:
        """A step is over, and took so long."""
        seconds -= self._waited
        self._usual += LATELY * (seconds - self._usual)
        if self._how is not None:
            draft = 0 if plan.draft is None else int(plan.draft.sum())
            self._how.costs.note(int(plan.q.sum()) + draft, seconds)

    def judge(self, plan: StepPlan, outcome: Outcome) -> None:
        """Which proposals of a step were right. Called before its tokens are delivered: whoever has seen the end of a
        stream finds them counted.
        """
        draft = plan.draft
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
            self.drafted.note(tried, right)
            if row.by == PREDICTED and row.seq.owner is not None:
                row.job.channel.predicted(right, tried - right)
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
        if isinstance(self._drafter, Aside):
            self._drafter.forget(seq.number)
        elif (forget := getattr(self._drafter, "forget", None)) is not None:
            forget(seq)

    def close(self) -> None:
        """No more proposals. A drafter that hangs is let go: its thread does not keep the process alive."""
        if isinstance(self._drafter, Aside):
            self._drafter.close()


def made(config: SpeculativeConfig, vocab_size: int) -> Drafting:
    """Raises ConfigError or MissingExtra for a drafter of another package that cannot be made."""
    method, how = config.method, HowMany() if config.auto else None
    if isinstance(method, str) and method in METHODS:
        drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
        return Drafting(drafter, config.num_speculative_tokens, vocab_size, how, method)
    name = method if isinstance(method, str) else type(method).__name__
    aside = Aside(drafter_of(method, vocab_size), vocab_size, name)
    return Drafting(aside, config.num_speculative_tokens, vocab_size, how, name)
