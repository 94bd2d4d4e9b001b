"""Runners for models without a cache: level 0 (tokens out), level 1 (logits out) and feed-forward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import override

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.infer import leaves, mapped
from hibachi.common.phases import phase
from hibachi.engine.kinds import takes_lengths
from hibachi.engine.ladder import ModelKind
from hibachi.engine.runners.calls import drop_frames, is_signal
from hibachi.engine.runners.extra_inputs import Arguments, ExtraInputs
from hibachi.engine.runners.groups import Alone, Call, Grouping, Trials, telling
from hibachi.engine.runners.heads import Sampled
from hibachi.engine.runners.kept_inputs import WORTH, Grown, Rooms
from hibachi.engine.runners.runner import (
    AwaitingRunner,
    ModelRows,
    Outcome,
    Part,
    check_logits,
    check_output,
    isolate,
    jobs_of,
    token_part,
)
from hibachi.engine.runners.sampler import RowSampler
from hibachi.engine.runners.tokentable import Tables
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import StepPlan
from hibachi.engine.speculation.proposals import Longer
from hibachi.errors import text_of

log: logging.Logger = logging.getLogger("hibachi.engine")


class WholeStep:
    """Calls `logits` or `forward` with whole sequences, and with what else it takes.

    call: calls a method of the model, and awaits it if need be.
    """

    def __init__(
        self, model: Any, beside: ExtraInputs, backend: ArrayBackend, kind: ModelKind, call: Callable[..., Any]
    ) -> None:
        self.sampled: bool = kind is ModelKind.LOGITS
        self._method: Any = model.logits if self.sampled else model.forward
        self.name: str = f"{type(model).__name__}.{'logits' if self.sampled else 'forward'}"
        self.takes_lengths: bool = takes_lengths(model, kind)
        self._arguments, self._backend, self._call = Arguments(self._method, beside), backend, call

    @property
    def names(self) -> frozenset[str]:
        """What it takes beside tokens and lengths."""
        return self._arguments.names

    def beside(self, rows: Any, lengths: Any, width: int) -> dict[str, Array]:
        """What it takes beside these, for rows of a call."""
        if not self._arguments.names:
            return {}
        return {name: self._backend.put(array) for name, array in self._arguments.of(rows, lengths, width).items()}

    def called(self, tokens: Array, lengths: Any, beside: dict[str, Array]) -> Any:
        if not self.takes_lengths:
            return self._call(self._method, tokens, **beside)
        put = self._backend.put(lengths.copy())  # the model's own: it may write into it
        if self.sampled:
            return self._call(self._method, tokens, put, **beside)
        return self._call(self._method, tokens, lengths=put, **beside)


class WholeRunner(AwaitingRunner):
    """Feeds the whole sequence of every row in every step.

    Without a padding token, rows of equal length go together and nothing is ever padded; with one, rows are padded on
    the left, so that the newest token is always last.
    """

    backend: ArrayBackend
    tables: Tables
    grouping: Grouping
    few_shapes = "it keeps no cache"

    def __init__(
        self,
        of: ModelRows,
        head: Sampled | None,
        grouping: Grouping,
        deterministic: bool | None,
    ) -> None:
        """deterministic: True means one row a call, unless `try_calls` finds better. None means as `try_calls` finds
        it.
        """
        model, backend, tables, beside = of
        super().__init__(backend, tables)
        self._rows, self._head, self.grouping = tables.rows, head, grouping
        self.drawn_by(head, self.tally if head is None else head.tally)
        self.forks, sampler = head is not None, self.sampler
        self._asked, self._tried = bool(deterministic), deterministic is False
        kind = ModelKind.LOGITS if sampler else ModelKind.FORWARD
        wait = self.wait

        def call(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            return wait(method(*arguments, **named))

        self._step = WholeStep(model, beside, backend, kind, call)
        self.name: str = self._step.name
        self._beside = beside
        self._grown = Grown(backend, useful=sampler is None)
        self.rooms: Rooms = Rooms(backend, self.name, useful=sampler is None)
        if deterministic:
            self.grouping = self._alone

    @property
    def _alone(self) -> Grouping:
        return replace(self.grouping, known=Alone(), padded=self.grouping.padded and self._step.takes_lengths)

    @override
    def adopt(self, scheduler: Scheduler) -> None:
        self._grown.clear()
        self.rooms.clear()

    @override
    def rebuild(self, *, keep: bool) -> None:
        self._grown.clear()
        self.rooms.clear()

    @override
    def admit(self, seq: Seq) -> None:
        super().admit(seq)
        if self._step.names:
            self._beside.admit(seq.owner)
        if self.sampler:
            self.sampler.admit(seq.owner)

    @override
    def feed(self, seq: Seq, position: int, tokens: HostArray) -> None:
        super().feed(seq, position, tokens)
        self._grown.clear()  # it holds what the model returned

    @property
    @override
    def deterministic(self) -> bool:
        return self.grouping.known is not None

    @override
    def selfcheck(self) -> int:
        known = self.grouping.known
        return known.again() if isinstance(known, Trials) else 0  # or each call has one row

    @override
    def cannot_gain(self, deterministic: bool) -> str | None:
        if isinstance(self.grouping.known, Alone):
            return "each of its calls has one row"
        return super().cannot_gain(deterministic)

    def try_calls(self, prompts: Sequence[HostArray], padding: HostArray | None) -> None:
        """Try on tokens like these whether rows can share calls without changing bits, and do so from now on."""
        self._tried = True
        compiled = self.backend.shapes.compiled
        if self._rows == 1:
            self.grouping = self._alone
            return
        ask, why = partial(self._asked_for, padding=padding), "who shares a call changes its bits"
        trials = Trials(ask, prompts, self._alone, self._rows, one=compiled)
        try:
            with phase("trying whether requests can share calls"), telling(self.name):
                works = trials.begin()
        except BaseException as e:
            if is_signal(e):
                raise
            why, works = f"it failed when it was tried: {text_of(e)}", False
            drop_frames(e)
        if works:
            self.grouping = replace(self._alone, known=trials)
        elif self._asked:
            log.warning("%s is shown one row a call, as %s", self.name, why)
        else:
            log.warning("deterministic=False for %s, as %s", self.name, why)

    def _asked_for(self, prompts: list[HostArray], width: int, rows: int, *, padding: HostArray | None) -> HostArray:
        """An output for each prompt, from one call: see `Ask`."""
        self.tally.compiles = True  # it may take as long as that does
        lengths = np.array([len(p) for p in prompts] + [len(prompts[-1])] * (rows - len(prompts)), np.int32)
        batch = np.empty((rows, width, *prompts[0].shape[1:]), prompts[0].dtype)
        for i, n in enumerate(lengths.tolist()):
            batch[i, width - n :] = prompts[min(i, len(prompts) - 1)]
            if n < width:
                batch[i, : width - n] = padding
        with self.backend.guard(), self.theirs:
            examples = self._step.beside(self._beside.nobody(rows), lengths, width)
            out = self._step.called(self.backend.put(batch), lengths, examples)
            if self.sampler is None:
                out = check_output(out, self.backend, (rows, *prompts[0].shape[1:]), self.name)
            else:
                out = check_logits(out, self.sampler, rows, self.name)
                if self.sampler.depth is not None:
                    out = self.sampler.depth.forced(out, batch[:, -1])
            return self.backend.get(self.backend.copy(out))[: len(prompts)]

    @override
    def run(self, plan: StepPlan) -> Outcome:
        if not self._tried and plan.emit.any():
            jobs = [seq.owner for seq in plan.seqs]
            mine = [job for job in jobs if job.kind == jobs[0].kind]
            self.try_calls([job.history.read(0, job.seq.prompt_len) for job in mine], mine[0].padding)
        if plan.draft is not None and isinstance(self.sampler, RowSampler):
            return self._run_longer(plan, self.sampler)
        if self._grown.useful:
            self._grown.begin()
        if self.rooms.useful:
            self.rooms.begin()
        calls = self.grouping.calls(plan, kinds=self.tables.several)
        outcome = self.isolated((call.idx, partial(self._forward, plan, call)) for call in calls)
        if self.rooms.useful:
            self.rooms.end()
        return outcome

    def _forward(self, plan: StepPlan, call: Call, idx: Any) -> Part:
        rows, lengths = plan.rows[idx], plan.end[idx]
        jobs = jobs_of(plan, idx)
        kind = jobs[0].kind
        assert kind is not None  # of all: rows of different kinds share no call
        with self.backend.guard():
            shown_rows, shown_lengths, width = self._shape(rows, lengths, call)
            seqs = [job.seq for job in jobs]
            batch = partial(self._batch, shown_rows, shown_lengths, width, jobs[0].padding)
            kept = self.rooms.useful and len(shown_rows) * width * kind.nbytes >= WORTH
            if kept:
                newest = partial(self._newest, shown_rows, shown_lengths)
                shown: Array = self.rooms.tokens(seqs, shown_lengths, width, kind, newest, batch)
            else:
                shown = self._grown.tokens(seqs, shown_lengths, width) if self._grown.useful else None
                shown = self.backend.put(batch()) if shown is None else shown
            shapes = (len(shown_rows), width, kind) if self.backend.shapes.compiled else None
            self.tally.call(len(shown_rows) * width, int(lengths.sum()), shapes)
            if kept:
                put = self.backend.put
                out = self.rooms.ask(shown, lambda tokens: self._answer(put(tokens), shown_rows, shown_lengths))
            else:
                # A copy where it is kept for the next step, as the model may write into what it is shown.
                tokens = self.backend.copy(shown) if self._grown.useful else shown
                out = self._answer(tokens, shown_rows, shown_lengths)
            if self._head is not None:
                return self._head.part(plan, idx, out, len(shown_rows))
            check_output(out, self.backend, (len(shown_rows), *kind.shape), self.name, kind=kind.dtype.kind)
            if self._grown.useful:
                self._grown.keep(seqs, shown, out, shown_lengths)
            part = token_part(idx, out, jobs, kind.dtype, self.backend, self.tally, self.name)
            if kept:
                self.rooms.ended(seqs, part.stopped | (lengths + 1 >= [seq.end for seq in seqs]))
            return part

    def _run_longer(self, plan: StepPlan, sampler: RowSampler) -> Outcome:
        """`run` where rows have proposals."""
        longer = Longer(plan, self.backend, sampler, self.tables.at(plan.rows[0]))
        calls = self.grouping.calls(longer.plan, kinds=False)  # (ids are of one kind)
        shown = self.isolated((call.idx, partial(self._show, longer, call)) for call in calls)
        idx, faults = longer.settle(shown.faults)
        drawn = Outcome([], faults, shown.short)
        if len(idx):
            drawn += isolate(longer.part, idx, self.backend, self.theirs)
        return drawn

    def _show(self, longer: Longer, call: Call, idx: Any) -> Part:
        """Call the model for some rows of the plan of a `Longer`, which gets the logits."""
        plan, padding = longer.plan, longer.plan.seqs[int(idx[0])].owner.padding
        assert self.sampler is not None
        with self.backend.guard():
            rows, lengths, width = self._shape(plan.rows[idx], plan.end[idx], call)
            batch = np.zeros((len(rows), width), np.int32)
            for i, n in enumerate(lengths.tolist()):
                batch[i, width - n :] = longer.text(int(idx[min(i, len(idx) - 1)]))
                if n < width:
                    batch[i, : width - n] = padding
            shapes = (batch.shape, batch.dtype) if self.backend.shapes.compiled else None
            self.tally.call(batch.size, int(lengths.sum()), shapes)
            out = self._answer(self.backend.put(batch), rows, lengths)
            out = check_logits(out, self.sampler, len(rows), self.name)
            longer.add(idx, self.backend.copy(out))  # the memory is the model's, which may write its next output there
        return Part(idx[:0], np.zeros(0, np.int32), None, np.zeros(0, bool))

    def _answer(self, tokens: Array, rows: Any, lengths: Any) -> Any:
        with self.tally, self.theirs:
            return self._step.called(tokens, lengths, self._step.beside(rows, lengths, tokens.shape[1]))

    def _shape(self, rows: Any, lengths: Any, call: Call) -> tuple[Any, Any, int]:
        """The inputs of a call: the rows as they are, or, where every new shape would be compiled, padded to few
        shapes.

        Only a model that takes lengths can skip more padding than its batch needs.
        """
        width, size = int(lengths.max()), len(rows)
        if self.grouping.known is not None:
            width, size = call.width, call.rows
        elif self.backend.shapes.compiled and self.grouping.padded and self._step.takes_lengths:
            width, size = self.backend.shapes.length(width), self.backend.shapes.rows(size, self._rows)
        if extra := size - len(rows):
            rows, lengths = np.pad(rows, (0, extra), mode="edge"), np.pad(lengths, (0, extra), mode="edge")
        return rows, lengths, width

    def _batch(
        self, rows: Any, lengths: Any, width: int, padding: HostArray | None, out: HostArray | None = None
    ) -> HostArray:
        """[B, S, *tok], padded on the left. out: where to; None means into a new array."""
        batch = self.tables.at(rows[0]).window(rows, lengths, width, out)
        for i in np.flatnonzero(lengths != width).tolist():
            batch[i, : width - int(lengths[i])] = padding
        return batch

    def _newest(self, rows: Any, lengths: Any) -> HostArray:
        """[B, *tok], the last token of each row."""
        each = np.arange(len(rows))
        return self.tables.at(rows[0]).packed(rows, lengths - 1, np.ones(len(rows), np.intp), each, lengths - 1)


class FeedforwardRunner(AwaitingRunner):
    """One forward pass a request; inputs of one shape and dtype go together."""

    backend: ArrayBackend

    def __init__(self, model: Any, backend: ArrayBackend) -> None:
        super().__init__(backend, None)
        self.model = model
        self.name: str = f"{type(model).__name__}.forward"

    @override
    def run(self, plan: StepPlan) -> Outcome:
        calls = Grouping(padded=True).calls(plan, kinds=True)
        return self.isolated((call.idx, partial(self._forward, plan)) for call in calls)

    def _forward(self, plan: StepPlan, idx: Any) -> Part:
        batch = np.stack([j.request.prompt for j in jobs_of(plan, idx)])
        shapes = (batch.shape, batch.dtype) if self.backend.shapes.compiled else None
        self.tally.call(len(idx), len(idx), shapes)

        def kept(name: str, array: Any) -> Array:
            """A copy of the array, as the memory is the model's, which may write its next output there."""
            shape = len(idx), *(None,) * (len(getattr(array, "shape", ())) - 1)
            return self.backend.copy(check_output(array, self.backend, shape, name))

        with self.backend.guard():
            x = self.backend.put(batch)
            with self.tally, self.theirs:
                out = self.wait(self.model.forward(x))
            out = mapped(kept, out, self.name)
            arrays = leaves(out) or [kept(self.name, out)]  # which is refused, as there is none in it
            with self.tally:
                self.backend.settle(arrays)
        bad, xp = np.zeros(len(idx), bool), self.backend.xp
        for array in arrays:
            if xp.isdtype(array.dtype, ("real floating", "complex floating")):
                bad |= ~self.backend.get(xp.all(xp.reshape(xp.isfinite(array), (len(idx), -1)), axis=1))
        return Part(idx, None, out, np.ones(len(idx), bool), bad)
