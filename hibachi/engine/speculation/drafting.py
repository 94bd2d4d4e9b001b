"""Proposals for rows that decode: made before a step is planned, judged when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from hibachi.engine.guide.protocol import GuideFailed
from hibachi.engine.runners.meters import Drafted
from hibachi.engine.runners.runner import Outcome, Runner
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import StepPlan
from hibachi.engine.speculation.howmany import HowMany
from hibachi.engine.speculation.proposers import Asker, Row

FORCED = "forced"  # who proposes what a grammar leaves no choice about
PREDICTED = "prediction"  # ... and what a caller expects


class Drafting:
    """Sets the proposals of the running rows.

    asker: of somebody who guesses where nobody is surer. k: the most proposals of a row. how: chooses how many pay;
    None means all.
    """

    asker: Asker
    how: HowMany | None

    def __init__(self, asker: Asker, k: int, how: HowMany | None = None) -> None:
        self.asker, self._k, self.how = asker, k, how
        self.drafted = Drafted()
        self._rows: dict[Seq, Row] = {}  # with what was found for the step
        self._came = 0  # tokens of the last step

    def propose(self, scheduler: Scheduler, runner: Runner) -> None:
        """Tell the scheduler how many proposals each row has."""
        self._rows.clear()
        self.asker.seconds = 0.0  # it may not be asked in this step
        rows = self._open(scheduler)
        if not rows:
            return

        def read(row: Row, start: int = 0) -> Any:
            return runner.tokens_of(row.seq.row, row.known, start)

        _force([row for row in rows if row.job.guided is not None])
        for row in rows:
            if row.job.prediction is not None and not len(row.found):
                row.found, row.by = row.job.prediction.find(read(row, row.seq.prompt_len), row.most), PREDICTED
        if others := [row for row in rows if not len(row.found)]:
            self.asker.ask(others, read, len(rows))
        if not any(row.by for row in rows):  # nobody has looked for any
            return
        drafts = []
        for row, wanted in zip(rows, self._counts(rows, scheduler.budget - len(rows)), strict=True):
            n = runner.fitting(wanted)
            row.job.draft = row.found[:n]
            row.job.sure = min(n, row.sure)
            if row.by:
                self._rows[row.seq] = row
            if n:
                drafts.append((row.seq, n))
        if drafts:
            scheduler.propose(drafts)

    def _open(self, scheduler: Scheduler) -> list[Row]:
        """The rows that decode, have room for more than one token, and allow proposals."""
        table, rows = scheduler.table, []
        for seq in scheduler.order:
            at = seq.row
            if at < 0 or seq.paused or not table.emitted.item(at):
                continue
            known, job = table.known.item(at), seq.owner
            if known - table.computed.item(at) != 1:
                continue
            most = min(self._k, table.end.item(at) - known - 1)
            if job.request.params is not None and job.request.params.num_speculative_tokens is not None:
                most = min(most, job.request.params.num_speculative_tokens)
            if most > 0:
                rows.append(Row(seq, job, most, known))
        return rows

    def _counts(self, rows: Sequence[Row], budget: int) -> list[int]:
        """How many of its proposals each row computes: all that are certain, and the guesses that pay."""
        if self.how is None:
            return [len(row.found) for row in rows]
        sure = [row.sure for row in rows]
        guesses = [len(row.found) - row.sure for row in rows]
        rates = [self.how.records.rate(row.seq, row.by) for row in rows]
        more = self.how.choose(len(rows) + sum(sure), guesses, rates, budget - sum(sure))
        return [n + guess for n, guess in zip(sure, more, strict=True)]

    def took(self, plan: StepPlan, seconds: float) -> None:
        """A step is over, and took so long, asking included."""
        seconds -= self.asker.seconds
        tokens = int(np.add.reduce(plan.q))
        self.asker.took(seconds, self._came if tokens == len(plan.rows) else 0)
        if self.how is not None:
            self.how.costs.note(tokens if plan.draft is None else tokens + int(np.add.reduce(plan.draft)), seconds)

    def judge(self, plan: StepPlan, outcome: Outcome) -> None:
        """Which proposals of a step were right. Called before its tokens are delivered: whoever has seen the end of a
        stream finds them counted.
        """
        draft, self._came = plan.draft, 0
        for part in outcome.parts:
            if part.tokens is None:
                continue
            self._came += len(part.tokens)
            if not self._rows:
                continue
            counts = np.ones(len(part.idx), np.int64) if part.counts is None else part.counts
            first = np.cumsum(counts) - counts
            for i, n, at in zip(part.idx.tolist(), counts.tolist(), first.tolist(), strict=True):
                if (row := self._rows.get(plan.seqs[i])) is not None and n:
                    self._judge(row, part.tokens[at : at + n], 0 if draft is None else int(draft[i]))
        self._rows.clear()

    def _judge(self, row: Row, came: Any, tried: int) -> None:
        """The first `tried` proposals of a row were computed, and these tokens came."""
        right = len(came) - 1
        if tried:
            self.drafted.note(row.by, tried, right)
            if row.by == PREDICTED and row.seq.owner is not None:
                row.job.channel.predicted(right, tried - right)
        guesses, right = tried - row.sure, right - row.sure
        if guesses <= 0 <= right and len(row.found) > row.sure:  # no guess was computed: what came judges the first
            guesses, right = 1, int(came[row.sure] == row.found[row.sure])
        if guesses > 0 <= right and self.how is not None and row.seq.owner is not None:
            self.how.records.note(row.seq, guesses, right, row.by)

    def forget(self, seq: Seq) -> None:
        """The request is over."""
        if self.how is not None:
            self.how.records.forget(seq)
        self._rows.pop(seq, None)
        self.asker.forget(seq)

    def close(self) -> None:
        """No more proposals."""
        self.asker.close()


def _force(rows: Sequence[Row]) -> None:
    """Find what the grammars of guided rows leave no choice about."""
    guided = [(row, row.job.guided) for row in rows]
    ready = [(row, each) for row, each in guided if each is not None and each.seen == row.known - row.seq.prompt_len]
    if not ready:
        return
    if (prepare := getattr(ready[0][1].guides, "prepare", None)) is not None:
        prepare([each.guide for _, each in ready])
    for row, each in ready:
        with suppress(GuideFailed):  # the draw will find out
            found, row.sure = each.guide.forced(row.most)
            row.found, row.by = np.array(found, np.int32), FORCED
