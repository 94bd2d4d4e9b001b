"""The token budget of a step: halved after memory ran out, doubled again later."""

from __future__ import annotations

import logging
from collections.abc import Callable

from hibachi.engine.runners.job import Job
from hibachi.engine.scheduler.step import Limits, StepPlan

log: logging.Logger = logging.getLogger("hibachi.engine")
GROW_AFTER, MOST_GROW_AFTER = 32, 1024  # steps after which a token budget that was halved is doubled


class TokenBudget:
    """The token budget of a step. limit: a function that passes a new budget to the scheduler."""

    def __init__(self, limits: Limits, limit: Callable[[int], None]) -> None:
        self._limits, self._limit = limits, limit
        self._now = limits.budget
        self._slowed = 0  # number of the last request whose own budget was halved; 0 means none
        self._good = 0  # steps that succeeded since the budget last changed
        self._grow_after = GROW_AFTER
        self.whole: bool = True
        """Whether it has been whole for so long that a step that succeeds says nothing new."""

    def restart(self) -> None:
        """Use a new scheduler, with the whole budget."""
        self._now, self._good = self._limits.budget, 0
        self.whole = self._grow_after == GROW_AFTER

    def halve(self, budget: int, least: int | None = None) -> None:
        """Halve the token budget, as memory ran out. Each time it takes longer until it is doubled again.

        least: the smallest budget. None keeps room for a token of each row and as many tokens of prompts, so that one
        request cannot slow down all.
        """
        budget = max(budget, 2 * self._limits.rows if least is None else least)
        if budget < self._now:
            log.warning("memory ran out: at most %d tokens in a step from now on", budget)
            self._good, self._grow_after = 0, min(2 * self._grow_after, MOST_GROW_AFTER)
            self._set(budget)

    def slowed(self, number: int, budget: int) -> None:
        """Note that a request, by its number, had its own budget halved. If another had before, the cause is not one
        request.
        """
        if self._slowed not in (0, number):
            self.halve(budget)
        self._slowed = number

    def restore(self) -> None:
        self._set(self._limits.budget)

    def adapt(self, short: int) -> None:
        """Count a step that succeeded. short: its tokens, if it succeeded only after its rows were run apart; else
        0.
        """
        if short:
            self.halve(short // 2)
            return
        if self.whole:
            return
        most = self._limits.budget
        self._good += 1
        if self._good < self._grow_after:
            return
        self._good = self._slowed = 0
        if self._now < most:
            self._set(min(2 * self._now, most))
        else:  # the whole budget has held for as long
            self._grow_after, self.whole = GROW_AFTER, True

    def _set(self, budget: int) -> None:
        self._now = max(1, budget)
        self.whole = self._now == self._limits.budget and self._grow_after == GROW_AFTER
        self._limit(budget)


def guilty_of(plan: StepPlan, budget: int) -> list[int]:
    """Places in a plan of the requests to blame for steps that failed as a whole; this plan's step is the latest of
    them.

    A request is suspected as long as it has not got past the length of such a step since then; others have, as they
    computed again what was lost. A single suspect is to blame, and so is one suspected more often than the token budget
    can be halved.
    """
    times = []
    for seq, start, end in zip(plan.seqs, plan.start.tolist(), plan.end.tolist(), strict=True):
        job: Job = seq.owner
        failures, length = job.failures if job is not None else (0, 0)  # None means it has ended
        failures, length = (1, end) if start >= length else (failures + 1, min(length, end))
        if job is not None:
            job.failures = failures, length
        times.append(failures)
    suspects = [i for i, n in enumerate(times) if n > 1]
    if len(suspects) == 1 and (len(times) > 1 or int(plan.q[0]) == 1):
        return suspects
    return [i for i in suspects if times[i] > 4 + 2 * budget.bit_length()]
