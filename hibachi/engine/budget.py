"""How many tokens a step may have: fewer after memory ran out, and more again later."""

from __future__ import annotations

import logging
from collections.abc import Callable

from hibachi.plan.limits import Limits
from hibachi.plan.step import StepPlan
from hibachi.runners.job import Job

log: logging.Logger = logging.getLogger("hibachi.engine")
GROW_AFTER, MOST_GROW_AFTER = 32, 1024  # steps after which a token budget that was halved is doubled


class TokenBudget:
    """The tokens of a step. limit: tells the scheduler of another number."""

    def __init__(self, limits: Limits, limit: Callable[[int], None]) -> None:
        self._limits, self._limit = limits, limit
        self._now = limits.budget
        self._slowed = 0  # number of the last request that had to compute fewer tokens in a step; 0 means none had
        self._good = 0  # steps that succeeded since the budget last changed
        self._grow_after = GROW_AFTER

    def restart(self) -> None:
        """The scheduler is a new one, with the whole budget."""
        self._now, self._good = self._limits.budget, 0

    def halve(self, budget: int, least: int | None = None) -> None:
        """Fewer tokens in a step, as memory ran out. Each time it takes longer until more are tried.

        least: None keeps room for a token of each row and as many of prompts, so that one request cannot slow down all.
        """
        budget = max(budget, 2 * self._limits.rows if least is None else least)
        if budget < self._now:
            log.warning("memory ran out: at most %d tokens in a step from now on", budget)
            self._good, self._grow_after = 0, min(2 * self._grow_after, MOST_GROW_AFTER)
            self._set(budget)

    def slowed(self, number: int, budget: int) -> None:
        """A request, by its number, computes fewer tokens now; if another did before, it is not one request's doing."""
        if self._slowed not in (0, number):
            self.halve(budget)
        self._slowed = number

    def restore(self) -> None:
        self._set(self._limits.budget)

    def adapt(self, short: int) -> None:
        """After a step that succeeded. short: its tokens, if it did so only as its rows ran apart; else 0."""
        if short:
            self.halve(short // 2)
            return
        most = self._limits.budget
        if self._now == most and self._grow_after == GROW_AFTER:
            return
        self._good += 1
        if self._good < self._grow_after:
            return
        self._good = self._slowed = 0
        if self._now < most:
            self._set(min(2 * self._now, most))
        else:  # the whole budget has held for as long
            self._grow_after = GROW_AFTER

    def _set(self, budget: int) -> None:
        self._now = max(1, budget)
        self._limit(budget)


def guilty_of(plan: StepPlan, budget: int) -> list[int]:
    """Places in a plan of who is to blame for steps that failed as a whole, of which this plan's is the latest.

    Suspected is who has not come past the length of such a step since then; others have, as they computed again what
    was lost. The only suspect is to blame, and who is suspected more often than tokens can be halved.
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
