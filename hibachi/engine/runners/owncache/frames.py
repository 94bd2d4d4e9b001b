"""Frames of a step of several calls, drawn together in depth: there are many calls of `depth`, whatever their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hibachi.backend.infer import leaves, mapped
from hibachi.engine.runners.heads import Sampled
from hibachi.engine.runners.runner import Part, Sampler
from hibachi.engine.scheduler.step import StepPlan


def draws_at_once(sampler: Sampler | None) -> bool:
    """Whether the frames of a step are drawn together: in depth, where no library compiles for their number."""
    return sampler is not None and sampler.depth is not None and not sampler.backend.shapes.compiled


class StepFrames:
    """The outputs of the calls of a step, until all are there.

    computed: from rows of the plan to those that emit, and their outputs. places: of each row that emits, of which call
    its output is, and which row of it.
    """

    places: dict[int, tuple[int, int]]

    def __init__(self, plan: StepPlan, head: Sampled, computed: Callable[[StepPlan, Any], tuple[Any, Any]]) -> None:
        self._plan, self._head, self._computed = plan, head, computed
        self._backend = head.sampler.backend
        self._outs, self.places = list[Any](), {}

    def step(self, idx: Any) -> Part:
        """Compute these rows [n] of the plan. Raises InvalidModelOutput, and what the model raises."""
        backend = self._backend
        with backend.guard():
            mine, out = self._computed(self._plan, idx)
            if len(mine):  # a copy: the memory is the model's, which may write its next output there
                out = mapped(lambda _, leaf: backend.copy(leaf), self._head.checked(out, len(mine)))
                self.places |= {i: (len(self._outs), k) for k, i in enumerate(mine.tolist())}
                self._outs.append(out)
        return Part(idx[:0], np.zeros(0, np.int32), None, np.zeros(0, bool))

    def draw(self, idx: Any) -> Part:
        """Draw for these rows of the plan, call by call. Raises as `step` does."""
        order, at = sorted(idx.tolist(), key=self.places.__getitem__), dict[int, list[int]]()
        for call, row in map(self.places.__getitem__, order):
            at.setdefault(call, []).append(row)
        with self._backend.guard():
            parts = [self._head.sampler.rows(self._outs[call], np.array(rows)) for call, rows in at.items()]
            joined = iter([self._backend.xp.concat(list(a), axis=0) for a in zip(*map(leaves, parts), strict=True)])
            out = mapped(lambda *_: next(joined), parts[0])
            return self._head.part(self._plan, np.array(order), out, len(order))
