"""Proposed tokens in a simulated run: which requests have some, and how many of them are right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.step import Ints


@dataclass(frozen=True, slots=True)
class Guesses:
    """most: tokens that are proposed for a row in a step. right: how likely the next one is right, if those before it
    are. share: of the requests that have proposals at all; for the others, steps of one token each.
    """

    most: int
    right: float
    share: float = 1.0
    seed: int = 0


class Guessing:
    """Proposes for the rows of one run of n requests. The same run has the same luck."""

    def __init__(self, guesses: Guesses, n: int) -> None:
        self._guesses, self._rng = guesses, np.random.default_rng(guesses.seed)
        self._has = (self._rng.random(n) < guesses.share).tolist()

    def propose(self, scheduler: Scheduler) -> None:
        """For all rows that decode and may have some: for the next step."""
        for seq in scheduler.order:
            if seq.row >= 0 and self._has[seq.owner] and not scheduler.prefilling(seq):
                seq.draft = self._guesses.most

    def kept(self, draft: Ints) -> Ints:
        """How many of its proposals each row keeps: int32, as `draft` [n]."""
        kept = np.zeros(len(draft), np.int32)
        some = np.flatnonzero(draft)
        wrong = 1 - self._guesses.right
        first = self._rng.geometric(wrong, len(some)) if wrong > 0 else np.full(len(some), np.iinfo(np.int32).max)
        kept[some] = np.minimum(first - 1, draft[some])
        return kept
