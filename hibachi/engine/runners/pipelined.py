"""Steps on their way through the stages of a model, of which this process has the last one.

A step begins with a message to the other stages. What they make of it waits here until it is its turn, so each stage
has a step to compute where there are as many in flight as stages (Huang et al. 2019, "GPipe").
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from typing_extensions import override

from hibachi.engine.runners.cached import CachedRunner
from hibachi.engine.runners.calls import drop_frames
from hibachi.engine.runners.heads import Sampled
from hibachi.engine.runners.runner import (
    Flight,
    Outcome,
    Part,
    StepFailed,
    jobs_of,
    outcome_of,
    raise_for_all,
)
from hibachi.engine.scheduler.step import Bools, StepPlan


class PipelinedRunner(CachedRunner):
    """A `CachedRunner` that is a `Launcher`: steps begin in the first stage, and are drawn from in the last."""

    exclusive = True

    @property
    def depth(self) -> int:
        """See `Launcher`."""
        return self.limits.stages - 1

    @override
    def cannot_speculate(self) -> str | None:
        return "it is cut into stages, which would wait for each other with proposals"

    def can_launch(self, plan: StepPlan) -> bool:
        """Whether the step is one call, and no other thread waits for its turn."""
        inputs = self.inputs
        return not (
            self.memory.wanted
            or inputs.score(plan.rows, plan.start)
            or any(seq.owner.request.pooling is not None for seq in plan.seqs)
        )

    def launch(self, plan: StepPlan, before: Flight | None) -> Flight:
        """Begin a step in the other stages. Raises EngineFailed."""
        with self.backend.guard():
            x = self.inputs.packed(plan.rows, plan.start, plan.q, plan.emit)
        if isinstance(x.block_table, np.ndarray):  # it may be a row of the scheduler's, which goes on
            x = replace(x, block_table=x.block_table.copy())
        self.memory.announce(x)
        idx = np.flatnonzero(plan.emit)
        return Flight(plan, idx, jobs_of(plan, idx), x=x)

    def draw_late(self, flight: Flight) -> None:
        """See `Launcher`: `land` draws."""

    def land(self, flight: Flight, held: Bools) -> Outcome:
        """Compute the last stage of a step, and draw. Raises StepFailed."""

        def part() -> Part:
            out, head, idx = self._called(self.main, flight.x), self.main.head, flight.idx
            wanted = flight.x.last.shape[0]
            if not held[idx].all():  # some have ended, or lost their rows
                assert isinstance(head, Sampled)
                at = np.flatnonzero(held[idx])
                idx, out = idx[at], head.sampler.rows(head.checked(out, wanted), at)
                wanted = out.shape[0]
            return head.part(flight.plan, idx, out, wanted)

        try:
            return outcome_of(self._kept(part))
        except Exception as e:
            raise_for_all(e, self.backend)
            drop_frames(e)
            raise StepFailed("again", cache_lost=False) from e
