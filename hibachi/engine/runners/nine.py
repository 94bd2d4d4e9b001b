"""Runners over the nine operations alone: level 0 and feed-forward as the Rust crate has them.

The tokens of a request never leave its library. The inputs of a call grow out of the inputs of the call before: `cat`
and `unsqueeze` add the new tokens, `repeat` and `cat` pad a row in front, `slice` trims positions that no row needs any
more, `pop` or slices remove rows of requests that have left, `eq` and `idx_where_all_true` find stop tokens and NaN,
and `vectorize_dim` gives each stream its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import override

from hibachi.backend.nine import NineBackend
from hibachi.backend.protocol import BATCH_DIM, SEQ_DIM
from hibachi.engine.kinds import takes_lengths
from hibachi.engine.ladder import ModelKind
from hibachi.engine.runners.calls import mend_shape
from hibachi.engine.runners.groups import Call, Grouping
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.runner import AwaitingRunner, Outcome, Part, jobs_of
from hibachi.engine.runners.tokentable import TokenKind
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import StepPlan
from hibachi.errors import (
    BackendError,
    ConfigError,
    HibachiError,
    InvalidModelOutput,
    InvalidRequest,
    InvalidTensorOperation,
    text_of,
)

Array = Any


@dataclass(slots=True, eq=False)
class NineStops:
    """Stop rule of a request: tokens [1, *tok], one of which must be equal in all elements, and a predicate."""

    tokens: list[Array]
    where: Callable[[Any], Any] | None


@dataclass(slots=True, eq=False)
class KeptTokens:
    """Sequences of equal width [n, width, *tok], and the tokens [n, *tok] that follow if the step is committed.

    A job's `known` says where its row is: (kept, place).
    """

    array: Array
    jobs: list[Job]
    lengths: list[int]  # tokens of each; positions before them are padding
    next: Array = None
    grown: Array = None  # both together, once asked for


class NineRunner(AwaitingRunner):
    """Level 0 on a backend that has the nine operations only."""

    backend: NineBackend
    grouping: Grouping

    def __init__(self, model: Any, backend: NineBackend, grouping: Grouping) -> None:
        """Raises ConfigError for a model whose `forward` takes lengths, if the backend cannot make an array of them."""
        super().__init__(backend, None)
        self._ops, self.grouping = backend.ops, grouping
        self._kinds: set[TokenKind | None] = set()  # that there were
        self._forward: Any = model.forward
        self.name: str = f"{type(model).__name__}.forward"
        lengths = takes_lengths(model, ModelKind.FORWARD)
        self._put: Any = getattr(backend.ops, "put", None) if lengths else None
        if lengths and self._put is None:
            raise ConfigError(
                f"{self.name} is told `lengths`, an array that hibachi makes with `put`: expected a backend that has "
                f"it; {backend.name} has the nine operations only. Give it `put`, or let forward take tokens alone."
            )

    @override
    def admit(self, seq: Seq) -> None:
        job: Job = seq.owner
        self._kinds.add(job.kind)
        if job.known is None:
            one = self._ops.unsqueeze(job.request.prompt, BATCH_DIM)
            job.known = KeptTokens(one, [job], [seq.prompt_len]), 0

    @override
    def feed(self, seq: Seq, position: int, tokens: Array) -> None:
        ops, (kept, place) = self._ops, seq.owner.known
        row = taken(ops, kept.array, [place], len(kept.jobs))
        row = ops.slice(row, SEQ_DIM, ops.shape(row)[SEQ_DIM] - position, position)  # without padding
        longer = ops.cat([row, ops.unsqueeze(tokens, BATCH_DIM)], SEQ_DIM)
        seq.owner.known = KeptTokens(longer, [seq.owner], [ops.shape(longer)[SEQ_DIM]]), 0

    @override
    def run(self, plan: StepPlan) -> Outcome:
        calls = self.grouping.calls(plan, kinds=len(self._kinds) > 1)
        return self.isolated((call.idx, blaming(self, partial(self._call, plan, call))) for call in calls)

    def _call(self, plan: StepPlan, call: Call, idx: Any) -> Part:
        ops = self._ops
        places = dict(zip(jobs_of(plan, idx), idx.tolist(), strict=True))
        ends = dict(zip(places, plan.end[idx].tolist(), strict=True))
        with self.backend.guard():
            width = call.width if self.grouping.known else max(ends.values())
            kept = self._gathered(ends, width)
            n, shape = len(kept.jobs), tuple(ops.shape(kept.array))
            # A copy, as the model may write into what it is shown.
            shown, extra = ops.repeat(kept.array, BATCH_DIM, 1), call.rows - n if self.grouping.known else 0
            if extra:
                last = ops.slice(kept.array, BATCH_DIM, n - 1, 1)
                shown = ops.cat([shown, ops.repeat(last, BATCH_DIM, extra)], BATCH_DIM)
            self.tally.call((n + extra) * shape[SEQ_DIM], sum(kept.lengths))
            with self.tally, self.theirs:
                if self._put is None:
                    out = self.wait(self._forward(shown))
                else:
                    lengths = np.pad(np.array(kept.lengths, np.int32), (0, extra), mode="edge")
                    out = self.wait(self._forward(shown, lengths=self._put(lengths)))
            out = copied(ops, out, (n + extra, *shape[2:]), self.name)
            out = ops.slice(out, BATCH_DIM, 0, n) if extra else out
            kept.grown = None
            grown = self._grown(KeptTokens(kept.array, [], [], out))
            longer = (n, shape[SEQ_DIM] + 1, *shape[2:])
            agreed(tuple(ops.shape(grown)) == longer, "unsqueeze and cat", longer, ops.shape(grown))
            kept.next, kept.grown = out, grown
            stopped, bad = stopped_rows(ops, out, kept.jobs), strange_rows(ops, out, n)
            items = apart(ops, out, n)
        return Part(np.array([places[job] for job in kept.jobs]), None, None, stopped, bad, items=items)

    # ---- what a call is shown ----------------------------------------------------------------------------------

    def _gathered(self, ends: dict[Job, int], width: int) -> KeptTokens:
        """Jobs of this many tokens each, side by side in any order, padded to a width."""
        parts = dict[
            tuple[KeptTokens, bool], list[int]
        ]()  # where the rows are now, and whether their next tokens count
        for job, end in ends.items():
            kept, place = job.known
            parts.setdefault((kept, end > kept.lengths[place]), []).append(place)
        arrays, jobs = list[Array](), list[Job]()
        for (kept, grown), places in parts.items():
            places.sort()
            mine = [kept.jobs[i] for i in places]
            rows = taken(self._ops, self._grown(kept) if grown else kept.array, places, len(kept.jobs))
            arrays.append(self._wide(rows, width, mine[0]))
            jobs += mine
        array = arrays[0] if len(arrays) == 1 else self._ops.cat(arrays, BATCH_DIM)
        shape, wanted = tuple(self._ops.shape(array)), f"{len(jobs)} rows of {width} tokens"
        agreed(shape[:2] == (len(jobs), width), "cat, repeat, slice or pop", wanted, shape)
        self._leave(parts)
        found = KeptTokens(array, jobs, [ends[job] for job in jobs])
        for i, job in enumerate(jobs):
            job.known = found, i
        return found

    def _grown(self, kept: KeptTokens) -> Array:
        if kept.grown is None:
            kept.grown = self._ops.cat([kept.array, self._ops.unsqueeze(kept.next, SEQ_DIM)], SEQ_DIM)
        return kept.grown

    def _leave(self, parts: dict[tuple[KeptTokens, bool], list[int]]) -> None:
        """Copy the remaining rows after others have left, so that no more memory than theirs is held."""
        gone = dict[KeptTokens, list[int]]()
        for (kept, _), places in parts.items():
            gone.setdefault(kept, []).extend(places)
        for kept, places in gone.items():
            n = len(kept.jobs)
            if len(places) == n:
                continue
            left = set(places)
            stay = [
                i
                for i, job in enumerate(kept.jobs)
                if i not in left and job.known[0] is kept and job.seq.finish is None
            ]
            if not stay:
                continue
            following = None if kept.next is None else taken(self._ops, kept.next, stay, n)
            rest = KeptTokens(taken(self._ops, kept.array, stay, n), [kept.jobs[i] for i in stay], [], following)
            rest.lengths = [kept.lengths[i] for i in stay]
            for i, job in enumerate(rest.jobs):
                job.known = rest, i

    def _wide(self, rows: Array, width: int, job: Job) -> Array:
        """Rows with exactly this many positions: the newest, or more padding before them."""
        ops = self._ops
        n, now = ops.shape(rows)[:2]
        if now > width:
            return ops.slice(rows, SEQ_DIM, now - width, width)
        if now == width:
            return rows
        one = ops.unsqueeze(job.padding, BATCH_DIM)  # [1, 1, *tok]
        return ops.cat([ops.repeat(ops.repeat(one, SEQ_DIM, width - now), BATCH_DIM, n), rows], SEQ_DIM)


class NineFeedforwardRunner(AwaitingRunner):
    """Feed-forward on a backend that has the nine operations only."""

    backend: NineBackend

    def __init__(self, model: Any, backend: NineBackend) -> None:
        super().__init__(backend, None)
        self._model, self._ops = model, backend.ops
        self.name: str = f"{type(model).__name__}.forward"

    @override
    def run(self, plan: StepPlan) -> Outcome:
        calls = Grouping(padded=True).calls(plan, kinds=True)
        return self.isolated((call.idx, blaming(self, partial(self._call, plan))) for call in calls)

    def _call(self, plan: StepPlan, idx: Any) -> Part:
        ops, n = self._ops, len(idx)
        with self.backend.guard():
            x = ops.cat([ops.unsqueeze(job.request.prompt, BATCH_DIM) for job in jobs_of(plan, idx)], BATCH_DIM)
            self.tally.call(n, n)
            with self.tally, self.theirs:
                out = self.wait(self._model.forward(x))
            out = copied(ops, out, (n, None), self.name)
            bad, items = strange_rows(ops, out, n), apart(ops, out, n)
        return Part(idx, None, None, np.ones(n, bool), bad, items=items)


def taken(ops: Any, array: Array, places: Sequence[int], n: int) -> Array:
    """Rows of an array of n, at these places in ascending order."""
    if len(places) == n:
        return array
    if len(places) == n - 1:
        return ops.pop(array, BATCH_DIM, n * (n - 1) // 2 - sum(places))
    runs = list[list[int]]()  # (first, how many)
    for place in places:
        if runs and sum(runs[-1]) == place:
            runs[-1][1] += 1
        else:
            runs.append([place, 1])
    slices = [ops.slice(array, BATCH_DIM, first, count) for first, count in runs]
    return slices[0] if len(slices) == 1 else ops.cat(slices, BATCH_DIM)


def blaming(runner: AwaitingRunner, call: Callable[[Any], Part]) -> Callable[[Any], Part]:
    """The same call; an error of an operation is one of the backend, not of the model or of hibachi."""

    def blamed(idx: Any) -> Part:
        try:
            return call(idx)
        except MemoryError:
            raise
        except Exception as e:
            own = isinstance(e, HibachiError) and not isinstance(e, InvalidTensorOperation)
            if runner.theirs.raised is e or own:
                raise
            raise BackendError(
                f"The backend {runner.backend.name} raised {text_of(e)} while it moved tokens. `hibachi conformance` "
                f"tells what is wrong with it."
            ) from e

    return blamed


def agreed(fine: bool, operations: str, expected: Any, got: Any) -> None:
    """Raise BackendError if an operation did not do what it should."""
    if not fine:
        raise BackendError(
            f"The backend's {operations} gave shape {got}; expected {expected}. `hibachi conformance` tells what is "
            f"wrong with it."
        )


def apart(ops: Any, out: Array, n: int) -> list[Any]:
    """The rows of out [n, ...], one by one."""
    items = list(ops.vectorize_dim(out, BATCH_DIM))
    agreed(len(items) == n, "vectorize_dim", f"a list of {n}", f"a list of {len(items)}")
    return items


def copied(ops: Any, out: Any, expected: tuple[int | None, ...], call: str) -> Array:
    """A copy of the model's output, if it is an array of the backend and of this shape; None means any shape after the
    first dimension.

    Raises InvalidModelOutput.
    """
    try:
        shape = tuple(ops.shape(out))
    except BaseException as e:
        raise InvalidModelOutput(
            f"{call} must return an array of {ops.name}; got {type(out).__module__}.{type(out).__qualname__} "
            f"({text_of(e)}). Return the bare array."
        ) from e
    if not (shape[:1] == expected[:1] if expected[1:] == (None,) else shape == expected):
        want = f"({expected[0]}, any)" if expected[1:] == (None,) else expected
        raise InvalidModelOutput(f"{call} must return shape {want}; got {shape}. {mend_shape(call, expected, shape)}")
    out = ops.repeat(out, BATCH_DIM, 1)  # the memory is the model's, which may write its next output there
    agreed(tuple(ops.shape(out)) == shape, "repeat", shape, ops.shape(out))
    return out


def strange_rows(ops: Any, out: Array, n: int) -> Any:
    """Which of n rows hold NaN, which is not equal to itself: bool [n]; None means none does."""
    fine = ops.idx_where_all_true(ops.eq(out, out), BATCH_DIM)
    if len(fine) == n:
        return None
    bad = np.ones(n, bool)
    bad[fine] = False
    return bad


def stopped_rows(ops: Any, out: Array, jobs: list[Job]) -> Any:
    """Which requests end with their new tokens out [n, *tok]: bool [n]."""
    n, stopped = len(jobs), np.zeros(len(jobs), bool)
    rules: dict[int, tuple[NineStops, list[int]]] = {}
    for i, job in enumerate(jobs):
        if isinstance(job.stop, NineStops):
            rules.setdefault(id(job.stop), (job.stop, []))[1].append(i)
    for rule, members in rules.values():
        hits = np.zeros(n, bool)
        for token in rule.tokens:
            hits[ops.idx_where_all_true(ops.eq(out, ops.repeat(token, BATCH_DIM, n)), BATCH_DIM)] = True
        stopped[members] = hits[members]
        if rule.where is not None:
            stopped[members] |= _asked(ops, rule.where, taken(ops, out, members, n), len(members))
    return stopped


def _asked(ops: Any, where: Callable[[Any], Any], out: Array, n: int) -> Any:
    """The answer of a stop predicate for n rows: bool [n]."""
    hits = np.zeros(n, bool)
    try:
        said = where(ops.repeat(out, BATCH_DIM, 1))
        if isinstance(said, (list, np.ndarray)):
            hits[:] = said
        else:
            hits[ops.idx_where_all_true(said, BATCH_DIM)] = True
    except BaseException as e:  # SystemExit and CancelledError as well: they are no signals in this thread
        raise InvalidRequest(f"The stop predicate raised {text_of(e)}") from e
    return hits
