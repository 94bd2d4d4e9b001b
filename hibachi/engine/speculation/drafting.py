"""Proposals for rows that decode: made before a step is planned, judged when it is over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from typing_extensions import override

from hibachi.engine.guide.protocol import GuideFailed
from hibachi.engine.guide.turns import MOST
from hibachi.engine.runners.guiding import AT_ONCE, note
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.meters import Drafted
from hibachi.engine.runners.runner import Outcome, Runner
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import StepPlan
from hibachi.engine.speculation.draft_runner import DraftModel
from hibachi.engine.speculation.drafter_thread import LATELY, DrafterThread
from hibachi.engine.speculation.howmany import Depth, HowMany
from hibachi.engine.speculation.ngram import NgramDrafter
from hibachi.engine.speculation.protocol import NOTHING, Drafter, Tokens, checked

# Seconds that a step waits for a drafter in a thread of its own: a share of what steps take, within bounds.
LEAST_WAIT, MOST_WAIT, SHARE = 0.002, 0.005, 0.25
RETRY = 16  # where its guesses have not paid for the wait, such a drafter is asked in one step of so many


@dataclass(slots=True, eq=False)
class DraftingRow:
    """A row that may have proposals in the next step, and what was found for it.

    most: proposals that it may have. known: its tokens so far. by: who has found what is found.
    """

    seq: Seq
    job: Job
    most: int
    known: int
    found: Tokens = field(default_factory=lambda: NOTHING)
    sure: int = 0  # of these, how many at the beginning are certain
    by: str = ""


class Read(Protocol):
    """The tokens of a row, from `start` on."""

    def __call__(self, row: DraftingRow, start: int = 0) -> Tokens: ...


class Proposer(Protocol):
    """Asks somebody for guesses.

    name: of whom, for metrics. seconds: what asking took before the last step; it is none of the step's own.
    """

    name: str
    seconds: float

    def ask(self, rows: Sequence[DraftingRow], read: Read, tokens: int) -> None:
        """Find guesses for rows, at least one, if they could pay. tokens: of the step without proposals."""
        ...

    def took(self, seconds: float, tokens: int) -> None:
        """A step has taken so long, and has brought so many tokens; 0 if it computed prompts as well."""
        ...

    def forget(self, seq: Seq) -> None:
        """The request is over."""
        ...

    def close(self) -> None:
        """It is asked no more."""
        ...


class Direct:
    """Asks a drafter that takes hardly any time. how: says what pays; None means all."""

    name: str
    seconds = 0.0

    def __init__(self, drafter: Drafter, vocab_size: int, how: HowMany | None = None, name: str = "ngram") -> None:
        self._drafter, self._vocab, self._how, self.name = drafter, vocab_size, how, name

    def ask(self, rows: Sequence[DraftingRow], read: Read, tokens: int) -> None:
        if self._how is None or self._how.worth(tokens, sum(row.most for row in rows)):
            for row, found in zip(rows, self._found(rows, read), strict=True):
                row.found, row.by = found, self.name

    def _found(self, rows: Sequence[DraftingRow], read: Read) -> Sequence[Tokens]:
        most = [row.most for row in rows]
        asked = self._drafter.propose([row.seq for row in rows], [read(row) for row in rows], most)
        return checked(asked, most, self._vocab).proposals

    def took(self, seconds: float, tokens: int) -> None:
        """It does not matter."""

    def forget(self, seq: Seq) -> None:
        if (forget := getattr(self._drafter, "forget", None)) is not None:
            forget(seq)

    def close(self) -> None:
        """There is nothing to close."""


class ByNgrams(Direct):
    """Asks for n-grams: these need no check, and no look at what they have seen before."""

    def __init__(self, drafter: NgramDrafter, vocab_size: int, how: HowMany | None = None) -> None:
        super().__init__(drafter, vocab_size, how)
        self._ngrams = drafter

    @override
    def _found(self, rows: Sequence[DraftingRow], read: Read) -> Sequence[Tokens]:
        guess = self._ngrams.guess
        return [guess(row.seq, row.known, partial(read, row), row.most) for row in rows]


class Apart:
    """Asks a drafter in a thread of its own, which is waited for a few ms at most."""

    name: str
    seconds: float

    def __init__(self, aside: DrafterThread, how: HowMany | None, name: str) -> None:
        self.aside: DrafterThread = aside
        self._how, self.name, self.seconds = how, name, 0.0
        self._usual = 0.0  # seconds that a step takes
        self._passed = 0  # steps in a row in which it could have been asked and was not

    def ask(self, rows: Sequence[DraftingRow], read: Read, tokens: int) -> None:
        self.seconds = 0.0
        if self.aside.off or not self._pays(rows, tokens):
            return
        began = time.perf_counter()
        self.aside.ask([row.seq.number for row in rows], [read(row) for row in rows], [row.most for row in rows])
        found = self.aside.take(min(max(SHARE * self._usual, LEAST_WAIT), MOST_WAIT))
        self.seconds = time.perf_counter() - began
        for row, each in zip(rows, found or [NOTHING] * len(rows), strict=True):
            row.found, row.by = each, self.name

    def _pays(self, rows: Sequence[DraftingRow], tokens: int) -> bool:
        how, most = self._how, [row.most for row in rows]
        if how is None:
            return True
        if not how.worth(tokens, sum(most)):
            return False
        self._passed += 1
        rates = [how.records.rate(row.seq, self.name) for row in rows]
        if self._passed < RETRY and not how.pays(tokens, most, rates, self.aside.seconds):
            return False
        self._passed = 0
        return True

    def took(self, seconds: float, tokens: int) -> None:
        self._usual += LATELY * (seconds - self._usual)

    def forget(self, seq: Seq) -> None:
        self.aside.forget(seq.number)

    def close(self) -> None:
        """A drafter that hangs is let go: its thread does not keep the process alive."""
        self.aside.close()


class WithModel:
    """Asks a draft model for as many guesses as pay, its own time included. depth: says how many; None means all."""

    name: str = "draft_model"
    seconds: float

    def __init__(
        self, model: DraftModel, vocab_size: int, how: HowMany | None = None, depth: Depth | None = None
    ) -> None:
        self.model: DraftModel = model
        self._vocab, self._how, self._depth, self.seconds = vocab_size, how, depth, 0.0

    def ask(self, rows: Sequence[DraftingRow], read: Read, tokens: int) -> None:
        self.seconds = 0.0
        if self._depth is not None and self._how is not None:
            lacks = [self.model.lacks(row.seq, row.known) for row in rows]
            rates = [self._how.records.rate(row.seq, self.name) for row in rows]
            for row, n in zip(rows, self._depth.choose(lacks, rates, [row.most for row in rows]), strict=True):
                row.most = n
            rows = [row for row in rows if row.most]
        if not rows:
            return
        began, most = time.perf_counter(), [row.most for row in rows]
        asked = self.model.propose([row.seq for row in rows], [read(row) for row in rows], most)
        for row, found in zip(rows, checked(asked, most, self._vocab).proposals, strict=True):
            row.found, row.by = found, self.name
            if self._depth is not None:
                self._depth.note(row.most, len(found))
        self.seconds = time.perf_counter() - began

    def took(self, seconds: float, tokens: int) -> None:
        if self._depth is not None:
            self._depth.took(seconds, self.seconds, tokens)

    def forget(self, seq: Seq) -> None:
        self.model.forget(seq)

    def close(self) -> None:
        """Its memory goes with it."""


FORCED = "forced"  # who proposes what a grammar leaves no choice about
PREDICTED = "prediction"  # ... and what a caller expects


class Drafting:
    """Sets the proposals of the running rows.

    asker: of somebody who guesses where nobody is surer. k: the most proposals of a row. how: chooses how many pay;
    None means all.
    """

    asker: Proposer
    how: HowMany | None

    def __init__(self, asker: Proposer, k: int, how: HowMany | None = None) -> None:
        self.asker, self._k, self.how = asker, k, how
        self.drafted = Drafted()
        self._rows: dict[Seq, DraftingRow] = {}  # with what was found for the step
        self._came = 0  # tokens of the last step

    def propose(self, scheduler: Scheduler, runner: Runner) -> None:
        """Tell the scheduler how many proposals each row has."""
        self._rows.clear()
        self.asker.seconds = 0.0  # it may not be asked in this step
        rows = self._open(scheduler)
        if not rows:
            return

        def read(row: DraftingRow, start: int = 0) -> Any:
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

    def _open(self, scheduler: Scheduler) -> list[DraftingRow]:
        """The rows that decode, have room for more than one token, and allow proposals."""
        table, rows = scheduler.table, list[DraftingRow]()
        if scheduler.waits:  # a step with rows that draw together has no proposals
            return rows
        for seq in scheduler.order:
            at = seq.row
            if at < 0 or seq.paused or not table.emitted.item(at):
                continue
            if seq.link is not None and not seq.link.parted:
                continue
            known, job = table.known.item(at), seq.owner
            if known - table.computed.item(at) != 1:
                continue
            most = min(self._k, table.end.item(at) - known - 1)
            if job.request.params is not None and job.request.params.num_speculative_tokens is not None:
                most = min(most, job.request.params.num_speculative_tokens)
            if most > 0:
                rows.append(DraftingRow(seq, job, most, known))
        return rows

    def _counts(self, rows: Sequence[DraftingRow], budget: int) -> list[int]:
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

    def _judge(self, row: DraftingRow, came: Any, tried: int) -> None:
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


def _force(rows: Sequence[DraftingRow]) -> None:
    """Find what the grammars of guided rows leave no choice about."""
    guided = [(row, row.job.guided) for row in rows]
    ready = [
        (row, each)
        for row, each in guided
        if each is not None and each.seen == row.known - row.seq.prompt_len and not each.form.slow
    ]
    began = time.perf_counter()
    for i in range(0, len(ready), AT_ONCE):
        part, now = ready[i : i + AT_ONCE], time.perf_counter()
        if now - began > MOST:
            return
        some = [each for _, each in part]
        for guides in {each.guides for each in some}:
            if (prepare := getattr(guides, "prepare", None)) is not None:
                prepare([each.guide for each in some if each.guides == guides])
        for row, each in part:
            with suppress(GuideFailed):  # the draw will find out
                found, row.sure = each.guide.forced(row.most)
                row.found, row.by = np.array(found, np.int32), FORCED
        note(some, now, [1 + row.sure for row, _ in part])
