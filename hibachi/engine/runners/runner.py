"""Base of all runners: the outcome of a step, the check of a model's output, and the search for rows at fault."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from typing_extensions import override

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.library import Library
from hibachi.backend.nine import NineBackend
from hibachi.engine.runners.calls import Awaiter, Theirs, as_fault, drop_frames, holds, is_signal, mend_shape
from hibachi.engine.runners.entries import EntrySource
from hibachi.engine.runners.extra_inputs import ExtraInputs
from hibachi.engine.runners.guiding import completed
from hibachi.engine.runners.job import Job, stopped
from hibachi.engine.runners.meters import Tally
from hibachi.engine.runners.rowedits import penalised
from hibachi.engine.runners.sampler import Drawn
from hibachi.engine.runners.tokentable import Tables, TokenHistory, misfits
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Bools, Move, StepPlan
from hibachi.errors import HibachiError, InvalidModelOutput, NonFiniteOutput, text_of

log: logging.Logger = logging.getLogger("hibachi.engine")


class ModelRows(NamedTuple):
    """A model, the library that computes it, and what its rows have: their tokens, and what comes beside them."""

    model: Any
    backend: ArrayBackend
    tables: Tables
    beside: ExtraInputs


@dataclass(slots=True, eq=False)
class Part:
    """The new tokens of n rows of a plan, from one forward pass: m of them, one row's after another's."""

    idx: Any  # [n] places in the plan
    tokens: HostArray | None  # [m, *tok]; None means outputs that are no tokens (feed-forward)
    batch: Array  # the same, native, in our own memory; its rows go to the streams. None means the ints of `tokens` do
    stopped: Any  # bool [n]
    bad: Any = None  # bool [n]: not finite; None means all are
    logprobs: dict[int, Any] = field(default_factory=dict)  # by place among the tokens: see `Drawn`
    faults: dict[int, HibachiError] = field(default_factory=dict)  # by place in the plan: requests that failed
    counts: Any = None  # [n] tokens of each row, 0 only where it ends; None means one
    whole: Any = None  # bool [n]: ends as its output is complete, with a token that is part of it; None means none does
    items: list[Any] | None = None  # [m] what goes to the streams in the place of `batch`
    parents: list[tuple[Seq, Seq]] = field(default_factory=list)  # see `Scheduler.commit`
    heads: int | None = None  # only the first so many rows have readers; None means all have

    def each(self, rows: Sequence[int], most: Sequence[int], stopped: Sequence[bool]) -> tuple[Any, Any, Any, Any]:
        """The tokens of these rows [k] of the n, each row's at most `most` first ones; stopped: it ends with its last.

        Of each of these tokens: which of the k rows it belongs to, which of that row's tokens it is, which of all, and
        whether its row ends with it, [m] each.
        """
        counts = self.counts.tolist()
        first, found = [0, *accumulate(counts)], list[tuple[int, int, int, bool]]()
        for k, (row, room, over) in enumerate(zip(rows, most, stopped, strict=True)):
            n = counts[row]
            found += [(k, j, first[row] + j, over and j == n - 1) for j in range(min(n, room))]
        of, within, places, last = np.array(found, np.intp).reshape(-1, 4).T
        return of, within, places, last > 0


@dataclass(slots=True, eq=False)
class Outcome:
    """The result of a step. Rows of the plan in neither list get no token this time."""

    parts: list[Part]
    faults: dict[int, HibachiError]  # by place in the plan
    short: bool = False  # memory ran out for rows that then succeeded apart

    def __iadd__(self, other: Outcome) -> Outcome:
        self.parts += other.parts
        self.faults |= other.faults
        self.short |= other.short
        return self


@dataclass(slots=True, eq=False)
class Flight:
    """A step that the device may still be computing. n rows of it emit."""

    plan: StepPlan
    idx: Any  # [n] places in the plan
    jobs: list[Job]  # of these; their requests may end meanwhile
    ids: Array = None  # [m >= n] their tokens, on the device
    read: Callable[[], list[HostArray]] = list  # waits: tokens [m], and which rows were finite, bool [m]
    x: Any = None  # its inputs, where other stages of the model have begun with it
    cache: Any = None  # to go back to if the step fails; None means it was given away
    # Where rows are guided, and drawn late:
    logits: Array = None  # to draw them from
    fine: Array = None  # which rows were finite, on the device
    late: Any = ()  # [k] places among the jobs of those that were drawn so; two more arrays are read for them, [>= k]:
    # which can be drawn from, and which were finite
    faults: dict[int, HibachiError] = field(default_factory=dict)  # of these, by place among the jobs


class Sampler(Protocol):
    """Draws tokens from logits: a `RowSampler`, or a `FrameSampler` for tokens of several codebooks.

    shape: of the logits of one token, (vocab,) or (codebooks, vocab). depth: what makes these of outputs, a
    `hibachi.engine.runners.depth.DepthCalls`; None means that they are logits.
    """

    backend: ArrayBackend
    shape: tuple[int, ...]
    depth: Any

    def admit(self, job: Job) -> None:
        """A request has got a row."""
        ...

    def draw(self, logits: Array, jobs: Sequence[Job], rows: Any, positions: Any) -> Drawn:
        """One token for each job. logits [m, *shape], m >= n (rows beyond n are padding); rows, positions [n]."""
        ...

    def rows(self, logits: Array, at: Any) -> Array:
        """Copies of rows `at` of the logits; padded with more rows if the backend wants few shapes."""
        ...


class Runner:
    """Turns plans into tokens, for one kind of model. What is here is right for most.

    tables: of the tokens on the host; None means there are none.
    """

    backend: Any  # a `Library`
    tables: Tables | None
    tally: Tally
    theirs: Theirs
    few_shapes: str = ""  # why calls with proposals are of many shapes; "" means that they are not
    sampler: Sampler | None = None  # what draws the tokens; None means that the model returns them
    waiting: Any = None  # a `hibachi.engine.runners.linked.Waiting`, where it has a sampler
    forks: bool = False  # rows can go on from others
    entries: EntrySource | None = None  # of what tiers keep; None means it keeps no prefixes

    def __init__(self, backend: Library, tables: Tables | None) -> None:
        self.backend, self.tables = backend, tables
        self.tally, self.theirs = Tally(), Theirs()

    def drawn_by(self, head: Any, tally: Tally) -> None:
        """What its outputs go to, a `hibachi.engine.runners.heads.Head`; and the tally that the two have."""
        self.tally = tally
        self.sampler, self.waiting = getattr(head, "sampler", None), getattr(head, "waiting", None)

    # ---- what it is -------------------------------------------------------------------------------------------

    @property
    def deterministic(self) -> bool:
        """Whether other rows change no bit of a row, as far as the runner knows by itself."""
        return False

    def selfcheck(self) -> int:
        """Try once more what `deterministic` says; returns how many outputs were compared. Raises NotDeterministic."""
        return 0

    def cannot_speculate(self) -> str | None:
        """Why no tokens can be proposed to it; None means they can."""
        if self.sampler is None:
            return "it returns tokens, not logits"
        if len(self.sampler.shape) > 1:
            return "its tokens have several codebooks"
        if self.few_shapes and self.backend.shapes.compiled:
            return f"{self.few_shapes}, and its backend compiles each shape of a call"
        return None

    def cannot_gain(self, deterministic: bool) -> str | None:
        """Why proposals, which can be made, are not worth it; None means they may be. deterministic: the engine is."""
        return None if deterministic else "proposals may change bits where deterministic is False"

    # ---- what is asked of it -----------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> Outcome:
        """Compute a step. Raises StepFailed; errors of single rows are in the outcome."""
        raise NotImplementedError

    def isolated(self, calls: Iterable[tuple[Any, Callable[[Any], Part]]]) -> Outcome:
        """The outcome of calls, each with the places in the plan that it is for: see `isolate`."""
        outcome = Outcome([], {})
        for idx, call in calls:
            outcome += isolate(call, idx, self.backend, self.theirs)
        return outcome

    def draw_linked(self, plan: StepPlan) -> Outcome:
        """Draw for the rows of a step that `run` has computed and that draw together with others."""
        if self.waiting is None:
            return Outcome([], {})
        with self.backend.guard():
            found: Outcome = self.waiting.draw(self.sampler, plan, self.backend, self.theirs)
        return found

    def adopt(self, scheduler: Scheduler) -> None:
        """Go on with another scheduler of the same limits, under which nothing has run yet."""

    def admit(self, seq: Seq) -> None:
        """The sequence has got a row."""
        if self.tables is not None:
            self.tables.fill(seq.row, seq.owner.kind, seq.owner.history)

    def rebuild(self, *, keep: bool) -> None:
        """Make a new cache, as the contents of the old one are lost. keep: from now on a failed step may not take the
        cache along.
        """

    def tokens_of(self, row: int, n: int, start: int = 0) -> HostArray:
        """The first n tokens of a row, or those from `start` on; read-only."""
        assert self.tables is not None
        return self.tables.at(row).read(row, start, n)

    def told(self) -> tuple[dict[str, float], list[int]]:
        """For metrics: seconds of the model's parts, and tokens of each expert. Callable from any thread."""
        return {}, []

    def fitting(self, proposals: int) -> int:
        """How many of these proposals a row should compute, so that they need no more calls."""
        return proposals

    def written(self, rows: Any, positions: Any, tokens: HostArray) -> None:
        """Remember these decided tokens [m, *tok], of one kind, each for its row and position."""
        if self.tables is not None and len(rows):
            self.tables.at(rows[0]).write(rows, positions, tokens)

    def suspend(self, seq: Seq, row: int) -> None:
        """The sequence has lost its row; keep its first `seq.length` tokens until it gets another."""
        if self.tables is not None:
            self.tables.of(seq.owner.kind).leave(row, seq.owner.history, seq.length)

    def fork(self, moves: Sequence[Move]) -> None:
        """Rows go on from others. Called between two steps."""
        live = [m for m in moves if m.seq.finish is None]
        together = [m for m in live if m.seq.link is not None and m.seq.link.together]  # others have one prompt
        if self.tables is None or not together:
            return
        tokens = [self.tokens_of(m.source, m.tokens).copy() for m in together]
        for move, known in zip(together, tokens, strict=True):
            job: Job = move.seq.owner
            job.known = TokenHistory(known)
            self.tables.fill(move.to, move.seq.owner.kind, job.history)
            if self.sampler is not None and penalised(job.sampling):
                self.sampler.admit(job)  # it counts anew

    def feed(self, seq: Seq, position: int, tokens: Any) -> None:
        """From this position on, that of its newest token, the sequence has these tokens [m, *tok], of its kind."""
        if self.tables is not None and seq.row >= 0:
            self.tables.at(seq.row).give(seq.row, position, tokens)
        elif self.tables is not None:
            seq.owner.history.give(position, tokens)

    def keys_and_values(self, row: int, tokens: int) -> list[tuple[HostArray, HostArray]]:
        """Copies of the keys and values of each layer, for the first tokens of a row: float32 [kv_heads, tokens,
        dim].
        """
        return []

    def restore(self, pairs: list[tuple[int, int]]) -> None:
        """Restore recurrent states: for each (row, checkpoint), the row's state becomes the one kept in the
        checkpoint.
        """

    def save(self, pairs: list[tuple[int, int]]) -> None:
        """Save recurrent states: for each (row, checkpoint), the row's state is kept in the checkpoint."""

    def watch(self, wake: Callable[[], object]) -> None:
        """wake: to be called from any thread when `check` would raise though nobody asks for a step."""

    def check(self) -> None:
        """Raises EngineFailed if no step can be computed any more."""

    def idle(self) -> None:
        """There is nothing to compute: free what is kept for rows that have gone."""

    def interrupt(self) -> None:
        """Cancel an `async def` call of the model, and begin no other. Callable from any thread."""

    def close(self) -> None:
        """Release resources. Called once, in the engine's thread."""


class AwaitingRunner(Runner):
    """A runner of models that may be `async def`. wait: awaits what a call returned, where that is to be done."""

    def __init__(self, backend: ArrayBackend | NineBackend, tables: Tables | None) -> None:
        super().__init__(backend, tables)
        self.wait: Awaiter = Awaiter(backend.owns)

    @override
    def interrupt(self) -> None:
        self.wait.interrupt()

    @override
    def close(self) -> None:
        self.wait.close()


@runtime_checkable
class Launcher(Protocol):
    """A runner that can begin a step before the one before it has been read.

    depth: how many may be in flight when another one begins. exclusive: nothing else is computed while some are.
    """

    depth: int
    exclusive: bool

    def can_launch(self, plan: StepPlan) -> bool: ...

    def launch(self, plan: StepPlan, before: Flight | None) -> Flight: ...

    def draw_late(self, flight: Flight) -> None:
        """Draw for the guided rows of a launched step, now that the step before it has been read. What goes wrong is
        raised by `land`.
        """
        ...

    def land(self, flight: Flight, held: Bools) -> Outcome:
        """Wait for a launched step, of which these rows [B] still belong to their sequences. Raises StepFailed."""
        ...


class StepFailed(Exception):
    """A step failed as a whole and did not happen, and no single row is to blame; the library's error is `__cause__`.

    why: "memory" ran out, the "device" is lost, or only the "cache" is, which was given away to a call that failed; or
    the step is to be taken "again", and waited for. cache_lost: re-running rows would read lost data. alone: for
    "memory", the place in the plan of a row that ran out of memory even when it ran by itself.
    """

    cache_lost: bool
    alone: int | None

    def __init__(
        self, why: Literal["memory", "device", "cache", "again"], *, cache_lost: bool, alone: int | None = None
    ) -> None:
        super().__init__(why)
        self.why, self.cache_lost, self.alone = why, cache_lost, alone


def raise_for_all(e: BaseException, backend: Library, *, cache_lost: bool = False) -> None:
    """Raise StepFailed if the whole step failed rather than one request.

    Not by the caller itself: a frame that names its own error would keep it alive, and the arrays of all its frames.
    """
    if holds(backend.fatal, e):
        raise StepFailed("device", cache_lost=True) from e
    if cache_lost:
        raise StepFailed("memory" if holds(backend.out_of_memory, e) else "cache", cache_lost=True) from e


def outcome_of(part: Part) -> Outcome:
    faults = dict(part.faults)
    if part.bad is not None and part.bad.any():
        faults |= {int(i): NonFiniteOutput(NOT_FINITE) for i in np.asarray(part.idx)[part.bad]}
    return Outcome([part], faults)


def isolate(call: Callable[[Any], Part], idx: Any, backend: Library, theirs: Theirs, tries: int = 2) -> Outcome:
    """Run `call(idx)`; if it raises, run halves of `idx` until the rows at fault stand alone. Raises StepFailed.

    Steps are idempotent (they write at fixed positions, or commit only on success), so running rows again is safe. A
    row is at fault if it fails twice, the second time alone: a model that fails once harms no request. g such rows of n
    cost at most 2 g log2(n) + 1 calls, a single row 2. If every row fails alone, every row is at fault. Where memory
    runs out, halves need less of it; a row that runs out of memory by itself fails the step.

    The model may raise anything, SystemExit and CancelledError as well: no signal comes to the engine's thread. theirs:
    what the model raised last. Halves keep the order of `idx`; a call gets its rows in the plan's order.
    """
    try:
        part = call(np.sort(idx) if len(idx) > 1 else idx)
    except StepFailed:
        raise
    except BaseException as e:
        if is_signal(e):
            raise
        raise_for_all(e, backend)
        failed = e  # the rows run again outside of this handler, which would keep the arrays of its frames alive
    else:
        return outcome_of(part)
    short = holds(backend.out_of_memory, failed)
    if len(idx) == 1 and tries == 1:
        if short:
            raise StepFailed("memory", cache_lost=False, alone=int(idx[0])) from failed
        return Outcome([], {int(idx[0]): as_fault(failed, theirs)})
    drop_frames(failed)
    theirs.raised = None
    half = len(idx) // 2
    both = Outcome([], {}, short and half > 0)
    if half:
        both += isolate(call, idx[:half], backend, theirs, 1)
    both += isolate(call, idx[half:], backend, theirs, 1)
    if not both.faults and not both.short:
        then = "succeeded apart, so each such step costs twice" if half else "succeeded when tried again"
        level = logging.INFO if theirs.warned else logging.WARNING
        theirs.warned = True
        log.log(level, "%d rows failed together and %s: %s", len(idx), then, text_of(failed))
    return both


def writers_first(plan: StepPlan) -> Any:
    """Places in the plan of the rows that compute something, ordered so that the row that computes a block comes before
    rows that share it in this same step.

    Only rows that have just started can share so, and they do it in the order in which they started.
    """
    idx = np.flatnonzero(plan.q) if plan.linked else np.arange(len(plan.rows))
    if not plan.fresh:
        return idx
    started = {seq.row: n for n, seq in enumerate(plan.fresh, 1)}
    order = np.array([started.get(row, 0) for row in plan.rows[idx].tolist()], np.int64)
    return idx[np.argsort(order, kind="stable")]


NOT_FINITE = (
    "The model returned NaN or infinity for this request; expected finite values. Look for an overflow or a division "
    "by zero in its forward pass (a float16 model may need float32)."
)


_KINDS: dict[str | None, tuple[str, str | tuple[str, ...]]] = {  # by letter: in words, and as the array API says it
    "i": ("integer tokens, as the prompt's are", "integral"),
    "u": ("integer tokens, as the prompt's are", "integral"),
    "f": ("floating-point tokens, as the prompt's are", "real floating"),
    "b": ("bool tokens, as the prompt's are", "bool"),
    "logits": ("floats", ("real floating", "integral")),
    None: ("numbers", ("numeric", "bool")),
}


def check_output(
    out: Any, backend: ArrayBackend, expected: tuple[int | None, ...], call: str, *, kind: str | None = None
) -> Array:
    """Check that the model's output is a dense numeric array of the backend with the expected shape, and return it.

    expected: None stands for any size. kind: "logits" (real numbers), or NumPy's letter of the dtype of the prompts:
    tokens must be integers, floats or bools as these are. None means any numbers, bools included. Raises
    InvalidModelOutput. Only metadata is read, so the device need not be waited for. Logits are returned in row-major
    order.
    """
    if not backend.owns(out) or (why := backend.unfit(out)) is not None:
        got = f"{type(out).__module__}.{type(out).__qualname__}"
        if backend.owns(out):
            raise InvalidModelOutput(
                f"{call} must return an ordinary array of {backend.name}; got one that is {why} ({got}). Make it a "
                f"dense array of numbers."
            )
        raise InvalidModelOutput(
            f"{call} must return an array of {backend.name}; got {got}. "
            f"Return the bare array (no {'tuple, no ' if kind else ''}output object), or pass backend=."
        )
    shape = tuple(out.shape)
    if shape != expected and (
        len(shape) != len(expected) or any(e not in (None, n) for e, n in zip(expected, shape, strict=True))
    ):
        want = (
            "("
            + ", ".join("any" if n is None else str(n) for n in expected)
            + ("," if len(expected) == 1 else "")
            + ")"
        )
        mend = mend_shape(call, expected, shape, logits=kind == "logits")
        raise InvalidModelOutput(f"{call} must return shape {want}; got {shape}. {mend}")
    words, wanted = _KINDS[kind]
    usual = kind == "logits" and out.dtype == backend.xp.float32  # the library's own answer takes far longer
    if not usual and not _is_kind(backend.xp, out.dtype, wanted):
        raise InvalidModelOutput(
            f"{call} must return {words}; got {out.dtype}. "
            + ("Convert its output." if kind in (None, "logits") else _CONVERT)
        )
    return backend.row_major(out) if kind == "logits" else out


def check_logits(out: Any, sampler: Sampler, rows: int, call: str) -> Any:
    """`check_output` of what is drawn from: logits of so many rows, or what the model's `depth` makes these of."""
    if sampler.depth is not None:
        return sampler.depth.given(out, rows, call)
    return check_output(out, sampler.backend, (rows, *sampler.shape), call, kind="logits")


_CONVERT = "Convert its output, or return logits from `logits` to have them sampled."


def _is_kind(xp: Any, dtype: Any, kind: str | tuple[str, ...]) -> bool:
    try:
        return bool(xp.isdtype(dtype, kind))
    except TypeError:  # NumPy's: a dtype that another package has added
        return False


def token_part(
    idx: Any, out: Array, jobs: list[Job], dtype: Any, backend: ArrayBackend, tally: Tally, call: str
) -> Part:
    """The part of a step whose tokens the model returned itself. out [m, *tok], m >= n: rows beyond n are padding.

    dtype: of the history, to which tokens are cast. A token that it cannot hold ends its own request only.
    """
    n = len(idx)
    with tally:
        # A copy, as the memory is the model's, which may write its next output there.
        batch = backend.copy(out if out.shape[0] == n else out[:n, ...])
        backend.settle([batch])
        returned = backend.get(batch)
    tokens, faults = returned, dict[int, HibachiError]()
    if returned.dtype != dtype:
        with np.errstate(over="ignore", invalid="ignore"):
            tokens = returned.astype(dtype)
        for i, value in misfits(returned, tokens):
            faults[int(idx[i])] = InvalidModelOutput(
                f"{call} returned the token {value}, which {dtype} cannot hold, the dtype of this engine's prompts. "
                f"Return smaller numbers, or let the engine's first prompt be of a wider dtype."
            )
    bad = ~np.isfinite(returned).reshape(n, -1).all(axis=1) if dtype.kind == "f" else None
    return Part(idx, tokens, batch, stopped(jobs, tokens, batch, backend), bad, faults=faults)


def jobs_of(plan: StepPlan, idx: Any) -> list[Job]:
    seqs = plan.seqs
    return [seqs[i].owner for i in idx.tolist()]


def drawn_part(idx: Any, drawn: Drawn, jobs: list[Job], positions: Any, backend: ArrayBackend) -> Part:
    """The part of a step with sampled tokens: rows `idx` of the plan, their tokens at `positions`."""
    batch = None if drawn.tokens.ndim == 1 else backend.put(drawn.tokens.copy())  # of frames, the streams get rows
    stop = stopped(jobs, drawn.tokens, batch, backend, positions)
    faults, whole = dict(drawn.faults), None
    if [job for job in jobs if job.guided is not None]:
        skip = np.zeros(len(jobs), bool) if drawn.bad is None else drawn.bad.copy()
        skip[list(faults)] = True
        whole, failed = completed(jobs, drawn.tokens, stop, skip)
        stop |= whole
        faults |= failed
    by_place = {int(idx[i]): fault for i, fault in faults.items()}
    return Part(idx, drawn.tokens, batch, stop, drawn.bad, drawn.logprobs, by_place, whole=whole)


def joined(parts: list[Part], nobody: Any, backend: ArrayBackend) -> Part:
    """Join the parts of the pieces of one call."""
    if len(parts) == 1:
        return parts[0]
    faults = {i: fault for p in parts for i, fault in p.faults.items()}
    parts = [p for p in parts if len(p.idx)]  # those of no rows need not have the shape of tokens
    if not parts:
        return Part(nobody, np.zeros(0, np.int32), None, np.zeros(0, bool), faults=faults)
    logprobs, offset = {}, 0
    for p in parts:
        logprobs.update({offset + i: lp for i, lp in p.logprobs.items()})
        offset += len(p.idx) if p.counts is None else int(p.counts.sum())
    batch = None
    if parts[0].batch is not None:
        batch = backend.xp.concat([p.batch for p in parts], axis=0)
        backend.settle([batch])
    return Part(
        idx=np.concatenate([p.idx for p in parts]),
        tokens=np.concatenate([p.tokens for p in parts if p.tokens is not None]),
        batch=batch,
        stopped=np.concatenate([p.stopped for p in parts]),
        whole=np.concatenate([np.zeros(len(p.idx), bool) if p.whole is None else p.whole for p in parts])
        if any(p.whole is not None for p in parts)
        else None,
        bad=np.concatenate([np.zeros(len(p.idx), bool) if p.bad is None else p.bad for p in parts]),
        counts=np.concatenate([np.ones(len(p.idx), np.intp) if p.counts is None else p.counts for p in parts])
        if any(p.counts is not None for p in parts)
        else None,
        logprobs=logprobs,
        faults=faults,
        parents=[pair for p in parts for pair in p.parents],
    )
