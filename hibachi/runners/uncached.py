"""Runners for models without a cache: level 0 (tokens out), level 1 (logits out) and feed-forward."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
from typing_extensions import override

from hibachi.plan.sequence import Seq
from hibachi.plan.step import StepPlan
from hibachi.runners.runner import (
    Awaiter,
    BaseRunner,
    Outcome,
    Part,
    check_output,
    drawn_part,
    isolate,
    jobs_of,
    token_part,
)
from hibachi.runners.sampler import RowSampler
from hibachi.runners.tokentable import TokenTable
from hibachi.tensor.array_backend import Array, ArrayBackend, HostArray


class WholeRunner(BaseRunner):
    """Feeds the whole sequence of every row in every step, as the crate does.

    Without a padding token, rows of equal length go together and nothing is ever padded; with one, rows are padded on
    the left, so that the newest token is always last.
    """

    padding: HostArray | None
    sampler: RowSampler | None

    def __init__(
        self,
        model: Any,
        backend: ArrayBackend,
        table: TokenTable,
        padding: HostArray | None,
        sampler: RowSampler | None,
        alone: bool = False,
    ) -> None:
        super().__init__(backend, table)
        self.table: TokenTable = table
        self.padding, self.sampler = padding, sampler
        self.alone = alone  # one row a call: what a model of whose kernels we know nothing needs for equal bits
        self.forward: Any = model.logits if sampler else model.forward
        self.name: str = f"{type(model).__name__}.{'logits' if sampler else 'forward'}"
        self.takes_lengths: bool = sampler is not None or "lengths" in inspect.signature(model.forward).parameters
        self.wait: Awaiter = Awaiter()

    @override
    def interrupt(self) -> None:
        self.wait.interrupt()

    @override
    def admit(self, seq: Seq) -> None:
        super().admit(seq)
        if self.sampler:
            self.sampler.admit(seq.owner)

    def run(self, plan: StepPlan) -> Outcome:
        lengths = plan.end
        wanted = np.flatnonzero(plan.emit)  # the others have no new token yet, and no cache to fill
        if not len(wanted):
            return Outcome([], {})
        groups = [wanted]
        if self.alone:
            groups = [wanted[i : i + 1] for i in range(len(wanted))]
        elif self.padding is None and (lengths[wanted] != lengths[wanted[0]]).any():
            groups = [wanted[lengths[wanted] == n] for n in np.unique(lengths[wanted])]
        outcome = Outcome([], {})
        for idx in groups:
            outcome += isolate(lambda rows: self._forward(plan, lengths, rows), idx, self.backend, self.theirs)
        return outcome

    def _forward(self, plan: StepPlan, lengths: Any, idx: Any) -> Part:
        rows, lengths = plan.rows[idx], lengths[idx]
        jobs = jobs_of(plan, idx)
        with self.backend.guard():
            shown_rows, shown_lengths, width = self._shape(rows, lengths)
            shown = self.backend.put(self._batch(shown_rows, shown_lengths, width))
            shapes = (len(shown_rows), width) if self.backend.shapes.compiled else None
            self.tally.call(len(shown_rows) * width, int(lengths.sum()), shapes)
            with self.tally, self.theirs:
                out = self.wait(self._call(shown, shown_lengths))
            if self.sampler:
                expected: tuple[int, ...] = (len(shown_rows), self.sampler.vocab_size)
                logits = check_output(out, self.backend, expected, self.name, kind="logits")
                with self.tally:
                    drawn = self.sampler.draw(logits, jobs, rows, lengths)
                return drawn_part(idx, drawn, jobs, lengths, self.backend)
            dtype = self.table.values.dtype
            check_output(out, self.backend, (len(shown_rows), *self.table.shape), self.name, kind=dtype.kind)
            return token_part(idx, out, jobs, dtype, self.backend, self.tally, self.name)

    def _call(self, tokens: Array, lengths: Any) -> Any:
        if not self.takes_lengths:
            return self.forward(tokens)
        put = self.backend.put(lengths.copy())  # the model's own: it may write into it
        return self.forward(tokens, put) if self.sampler else self.forward(tokens, lengths=put)

    def _shape(self, rows: Any, lengths: Any) -> tuple[Any, Any, int]:
        """What the model is shown: the rows as they are, or, where every new shape would be compiled, padded to few.

        Only a model that is told the lengths can pass over more padding than its batch needs.
        """
        width = int(lengths.max())
        if not self.backend.shapes.compiled or self.padding is None or not self.takes_lengths:
            return rows, lengths, width
        extra = self.backend.shapes.rows(len(rows), len(self.table.values)) - len(rows)
        rows, lengths = np.pad(rows, (0, extra), mode="edge"), np.pad(lengths, (0, extra), mode="edge")
        return rows, lengths, self.backend.shapes.length(width)

    def _batch(self, rows: Any, lengths: Any, width: int) -> HostArray:
        """[B, S, *tok], padded on the left."""
        batch = self.table.window(rows, lengths, width)
        for i in np.flatnonzero(lengths != width).tolist():
            batch[i, : width - int(lengths[i])] = self.padding
        return batch

    @override
    def close(self) -> None:
        self.wait.close()


class FeedforwardRunner(BaseRunner):
    """One forward pass a request; inputs of one shape and dtype go together."""

    def __init__(self, model: Any, backend: ArrayBackend) -> None:
        super().__init__(backend, None)
        self.model = model
        self.name: str = f"{type(model).__name__}.forward"
        self.wait: Awaiter = Awaiter()

    @override
    def interrupt(self) -> None:
        self.wait.interrupt()

    def run(self, plan: StepPlan) -> Outcome:
        groups: dict[Any, list[int]] = {}
        for i, seq in enumerate(plan.seqs):
            groups.setdefault((seq.owner.prompt.shape, seq.owner.prompt.dtype), []).append(i)
        outcome = Outcome([], {})
        for members in groups.values():
            outcome += isolate(lambda idx: self._forward(plan, idx), np.array(members), self.backend, self.theirs)
        return outcome

    def _forward(self, plan: StepPlan, idx: Any) -> Part:
        batch = np.stack([j.prompt for j in jobs_of(plan, idx)])
        shapes = (batch.shape, batch.dtype) if self.backend.shapes.compiled else None
        self.tally.call(len(idx), len(idx), shapes)
        with self.backend.guard():
            x = self.backend.put(batch)
            with self.tally, self.theirs:
                out = self.wait(self.model.forward(x))
            check_output(out, self.backend, (len(idx), *(None,) * (len(getattr(out, "shape", ())) - 1)), self.name)
            out = self.backend.copy(out)  # the memory is the model's, which may write its next output there
            with self.tally:
                self.backend.settle([out])
        bad = None
        if self.backend.xp.isdtype(out.dtype, ("real floating", "complex floating")):
            xp = self.backend.xp
            bad = ~self.backend.get(xp.all(xp.reshape(xp.isfinite(out), (len(idx), -1)), axis=1))
        return Part(idx, None, out, np.ones(len(idx), bool), bad)

    @override
    def close(self) -> None:
        self.wait.close()
