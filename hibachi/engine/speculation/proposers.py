"""Who is asked for guesses, when that is worth it, and what it costs: a drafter of ours, one in a thread of its own, or
a draft model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from typing_extensions import override

from hibachi.engine.runners.job import Job
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.speculation.draft_runner import DraftModel
from hibachi.engine.speculation.drafter_thread import LATELY, Aside
from hibachi.engine.speculation.howmany import Depth, HowMany
from hibachi.engine.speculation.ngram import NgramDrafter
from hibachi.engine.speculation.protocol import NOTHING, Drafter, Tokens, checked

# Seconds that a step waits for a drafter in a thread of its own: a share of what steps take, within bounds.
LEAST_WAIT, MOST_WAIT, SHARE = 0.002, 0.005, 0.25
RETRY = 16  # where its guesses have not paid for the wait, such a drafter is asked in one step of so many


@dataclass(slots=True, eq=False)
class Row:
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

    def __call__(self, row: Row, start: int = 0) -> Tokens: ...


class Asker(Protocol):
    """Asks somebody for guesses.

    name: of whom, for metrics. seconds: what asking took before the last step; it is none of the step's own.
    """

    name: str
    seconds: float

    def ask(self, rows: Sequence[Row], read: Read, tokens: int) -> None:
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

    def ask(self, rows: Sequence[Row], read: Read, tokens: int) -> None:
        if self._how is None or self._how.worth(tokens, sum(row.most for row in rows)):
            for row, found in zip(rows, self._found(rows, read), strict=True):
                row.found, row.by = found, self.name

    def _found(self, rows: Sequence[Row], read: Read) -> Sequence[Tokens]:
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
    def _found(self, rows: Sequence[Row], read: Read) -> Sequence[Tokens]:
        guess = self._ngrams.guess
        return [guess(row.seq, row.known, partial(read, row), row.most) for row in rows]


class Apart:
    """Asks a drafter in a thread of its own, which is waited for a few ms at most."""

    name: str
    seconds: float

    def __init__(self, aside: Aside, how: HowMany | None, name: str) -> None:
        self.aside: Aside = aside
        self._how, self.name, self.seconds = how, name, 0.0
        self._usual = 0.0  # seconds that a step takes
        self._passed = 0  # steps in a row in which it could have been asked and was not

    def ask(self, rows: Sequence[Row], read: Read, tokens: int) -> None:
        self.seconds = 0.0
        if self.aside.off or not self._pays(rows, tokens):
            return
        began = time.perf_counter()
        self.aside.ask([row.seq.number for row in rows], [read(row) for row in rows], [row.most for row in rows])
        found = self.aside.take(min(max(SHARE * self._usual, LEAST_WAIT), MOST_WAIT))
        self.seconds = time.perf_counter() - began
        for row, each in zip(rows, found or [NOTHING] * len(rows), strict=True):
            row.found, row.by = each, self.name

    def _pays(self, rows: Sequence[Row], tokens: int) -> bool:
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

    def ask(self, rows: Sequence[Row], read: Read, tokens: int) -> None:
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
