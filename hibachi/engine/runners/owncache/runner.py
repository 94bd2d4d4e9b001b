"""Runner for models that keep a cache of their own: `step(tokens, lengths, past) -> (logits, past)`.

The rows that decode lie in one past, which the model gets back as it returned it while no row comes or goes. A row that
comes is computed in a past of its own and then joined to the others; one that goes is cut out. The new tokens of a call
are as many for each row, so nothing is padded but the past.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from typing_extensions import override

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.infer import leaves
from hibachi.common.phases import phase
from hibachi.engine.runners.borders import borders_of
from hibachi.engine.runners.calls import drop_frames, is_signal
from hibachi.engine.runners.groups import telling
from hibachi.engine.runners.heads import ReturnedTokens, Sampled
from hibachi.engine.runners.meters import Meeting, Tally
from hibachi.engine.runners.owncache.frames import StepFrames, draws_at_once
from hibachi.engine.runners.owncache.layout import Layout, Past
from hibachi.engine.runners.owncache.prefixes import Prefixes
from hibachi.engine.runners.owncache.step import OwnStep, SteppedRows
from hibachi.engine.runners.owncache.trial import OwnCacheTrial
from hibachi.engine.runners.runner import ModelRows, Outcome, Part, Runner, isolate
from hibachi.engine.runners.tokentable import Tables, TokenKind
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Move, StepPlan
from hibachi.engine.speculation.proposals import Ahead, Outs, ahead_of
from hibachi.errors import ConfigError, NotDeterministic, text_of

log: logging.Logger = logging.getLogger("hibachi.engine")


class OwnCacheRunner(Runner):
    """Computes rows with pasts that the model makes.

    pasts: of the rows. prefixes: what is kept of rows that have gone; None means nothing is.

    apart: each row is computed by itself, its prompt in one call and then token by token, whatever the plan says. So no
    bit depends on other rows, on chunks, or on whether it was preempted.
    """

    backend: ArrayBackend
    tables: Tables
    layout: Layout
    head: Sampled | ReturnedTokens
    apart: bool = False
    deterministic: bool = False

    def __init__(
        self,
        of: ModelRows,
        head: Sampled | ReturnedTokens,
        kind: TokenKind,
        tally: Tally,
        examples: Sequence[HostArray],
        longest: int,
    ) -> None:
        """kind: of the tokens. examples: prompts, of whose tokens those for trials are drawn. longest: tokens of a
        request. Raises ConfigError.
        """
        model, backend, tables, beside = of
        super().__init__(backend, tables)
        self.drawn_by(head, tally)
        self._rows, self.head = tables.rows, head
        self.name: str = head.name
        self._beside = beside
        vocab = None if self.sampler is None else self.sampler.shape[-1]
        theirs = self.theirs

        def call(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            with tally, theirs:
                return method(*arguments, **named)

        try:
            with backend.guard():
                self._step = OwnStep(model, beside, backend, kind, vocab, examples, call)
                self._trial = OwnCacheTrial(self._step)
                self._trial.cross(borders_of(model), longest)
        except ConfigError:
            raise
        except Exception as e:
            raise ConfigError(
                f"{self.name} failed when it was tried on a few tokens, to see its past: {text_of(e).rstrip('.')}. The "
                f"attribute `example_prompts` of a model names prompts of ids that it can be tried on."
            ) from e
        self._encoded, self.layout = self._step.encoded, self._step.layout
        self.pasts: SteppedRows = SteppedRows(self._step, backend.shapes.length)
        self._seqs: dict[int, Seq] = {}
        self._most, self._chunk = 2**31, 2**31
        self._meeting = Meeting(self.name)
        self.remarks: list[str] = [f"its past: {self.layout.said()}"]
        for what, why in (
            ("prompts come whole, not in chunks", self._trial.whole),
            ("rows of one length only share calls", self._trial.parted),
        ):
            if why:
                log.warning("%s: %s, as %s", self.name, what, why)
                self.remarks.append(f"{what}, as {why}")
        if not self._trial.mixes and not self._trial.parted:
            self.remarks.append("rows of one length only share calls, as its step takes no lengths")
        self._template: Past | None = None  # of pasts that begin with a prefix; None means that none does
        self.prefixes: Prefixes | None = None

    def bound(self, positions: int, chunk: int) -> None:
        """positions: the most that a past may have, padding included. chunk: tokens of a row that a call may have."""
        self._most, self._chunk = positions, chunk

    # ---- requests ----------------------------------------------------------------------------------------------

    @override
    def admit(self, seq: Seq) -> None:
        self._keep()
        super().admit(seq)
        self._beside.admit(seq.owner)
        self.head.admit(seq.owner)
        self._forget([seq.row], encoded=True)
        self._seqs[seq.row] = seq

    @override
    def suspend(self, seq: Seq, row: int) -> None:
        self._keep()
        super().suspend(seq, row)
        self._forget([row], encoded=True)

    @override
    def adopt(self, scheduler: Scheduler) -> None:
        self.forks = self.sampler is not None or not (self.apart or self._trial.whole)
        self.rebuild(keep=False)
        self._seqs.clear()
        if scheduler.copies and scheduler.pool and self._template:
            self.prefixes = Prefixes(self.layout, self._template, scheduler.pool, scheduler.copies)
            self.prefixes.flush, self.entries = self._keep, self.prefixes

    @override
    def rebuild(self, *, keep: bool) -> None:
        self.pasts.of.clear()
        if self._encoded is not None:
            self._encoded.clear()
        if self.prefixes is not None:
            self.prefixes.clear()

    @override
    def idle(self) -> None:
        self._keep()
        self._forget([row for row, seq in self._seqs.items() if seq.row != row], encoded=True)
        if self.prefixes is not None:
            self.prefixes.drop()

    def _keep(self) -> None:
        """Keep what is wanted of the rows that have gone, before their pasts do."""
        if self.prefixes is not None:
            self.prefixes.keep_left(self.pasts.of, self._seqs)

    def _forget(self, rows: Sequence[int], encoded: bool = False) -> None:
        """encoded: also what is kept of the request's inputs."""
        self.pasts.forget(rows)
        if encoded and self._encoded is not None:
            self._encoded.forget(rows)

    # ---- the promise -------------------------------------------------------------------------------------------

    def decide(self, deterministic: bool | None) -> None:
        """Try whether rows may share calls without changing bits. deterministic: True means that each row is computed
        by itself if they may not; None means that they share calls then, which the log says; False tries nothing.
        """
        if deterministic is False:
            return
        why, short = "", "who shares a call changes its bits"
        if not self._trial.mixes:
            why = short = "rows of one length only share calls, which is not tried"
        try:
            if not why:
                with phase("trying whether requests can share calls"), telling(self.name):
                    self.selfcheck()
        except BaseException as e:
            if is_signal(e) or isinstance(e, ConfigError):
                raise
            why = text_of(e)
            if not isinstance(e, NotDeterministic):
                short = f"it failed when it was tried: {why}"
            drop_frames(e)
        self.apart, self.deterministic = bool(deterministic and why), bool(deterministic or not why)
        if self.apart:
            log.warning("%s computes each row by itself: %s", self.name, why)
        elif why:
            log.warning("deterministic=False for %s, as %s", self.name, short)
        if why:
            self.remarks.append(f"each row is computed by itself, as {short}" if self.apart else short)

    @override
    def selfcheck(self) -> int:
        return self._trial.in_company()

    def try_copies(self) -> bool:
        """Whether a row may begin with a copy of what others have computed; the log says so if it may not."""
        why = "each row is computed by itself" if self.apart else self._trial.cannot_copy()
        if not why:
            try:
                self._template, why = self._trial.copied(bits=self.deterministic)
            except Exception as e:
                why = f"a trial of it raised {text_of(e)}"
                drop_frames(e)
        if why:
            log.info("%s: no request begins with what others have computed, as %s", self.name, why)
        self.remarks.append(
            f"no request begins with what others have computed, as {why}" if why else "prefixes are copied"
        )
        return not why

    @override
    def cannot_speculate(self) -> str | None:
        return super().cannot_speculate() or self.cannot_take_back()[0] or None

    @override
    def cannot_gain(self, deterministic: bool) -> str | None:
        return super().cannot_gain(deterministic and self.cannot_take_back()[1])

    def cannot_take_back(self) -> tuple[str, bool]:
        """Why it cannot compute tokens that may be taken back, or ""; whether no bit differs for it, as far as a trial
        tells.
        """
        if not self._step.keeps:
            return "it returns the logits of the last token only: its step has no parameter logits_to_keep", False
        if self.backend.shapes.compiled:
            return "it keeps a cache of its own, and its backend compiles each shape of a call", False
        if self.apart or self._trial.whole:
            return "each row is computed by itself" if self.apart else "prompts come whole", False
        if place := self.layout.uncut:
            return f"the array {place} of its past is a state, or holds the newest positions only", False
        try:
            return self._trial.shortened()
        except Exception as e:
            drop_frames(e)
            return f"a trial of it raised {text_of(e)}", False

    # ---- a step ------------------------------------------------------------------------------------------------

    @override
    def run(self, plan: StepPlan) -> Outcome:
        self._keep()
        if self.prefixes is not None:
            self.prefixes.begin(plan.copies, self.pasts.of, self.backend.shapes.length)
        self.idle()
        calls = [*self._calls(plan)]
        if len(calls) == 1 or self.apart or not draws_at_once(self.sampler):
            return self.isolated((idx, _tried(self._forward, plan)) for idx in calls)
        assert isinstance(self.head, Sampled)
        frames = StepFrames(plan, self.head, self._computed)
        stepped = self.isolated((idx, frames.step) for idx in calls)
        drawn = Outcome([], stepped.faults, stepped.short)
        if frames.places:
            drawn += isolate(frames.draw, np.array(sorted(frames.places)), self.backend, self.theirs)
        return drawn

    @override
    def fork(self, moves: Sequence[Move]) -> None:
        super().fork(moves)
        pairs = [(move.source, move.to) for move in moves if move.seq.finish is None]
        with self.backend.guard():
            self.pasts.fork(pairs)
            if self._encoded is not None:
                self._encoded.fork(pairs)

    def _calls(self, plan: StepPlan) -> Iterator[Any]:
        """Which rows of a step share a call: [n] places in the plan each."""
        if self.apart:
            for i in np.flatnonzero(plan.emit & (plan.q > 0)).tolist():
                yield np.array([i])
            return
        groups: dict[tuple[int, ...], list[int]] = {}
        tokens = plan.q if plan.draft is None else plan.q + plan.draft
        for i, (start, q) in enumerate(zip(plan.start.tolist(), tokens.tolist(), strict=True)):
            if not q:  # it goes on from another
                continue
            if self._trial.whole and q > 1:
                if not plan.emit[i]:
                    continue  # a prompt waits for its last chunk
                start, q = 0, start + q
                if q > plan.seqs[i].prompt_len:  # after a preemption
                    yield np.array([i])
                    continue
            groups.setdefault((q, start if not self._trial.mixes else min(start, 1)), []).append(i)
        if not self._trial.mixes and len(plan.rows) > 1:
            self._meeting.step([len(group) for group in groups.values()])
        for group in groups.values():
            yield from _fitting(np.array(group), plan.end, self._most)

    def _forward(self, plan: StepPlan, idx: Any) -> Part:
        if plan.draft is not None and plan.draft[idx].any():
            return self._forward_ahead(plan, idx)
        with self.backend.guard():
            mine, out = self._computed(plan, idx)
            if not len(mine):
                return Part(mine, np.zeros(0, np.int32), None, np.zeros(0, bool))
            return self.head.part(plan, mine, out, leaves(out)[0].shape[0])

    def _computed(self, plan: StepPlan, idx: Any) -> tuple[Any, Any]:
        """Which rows of a call emit, and their outputs."""
        rows, emit = plan.rows[idx], plan.emit[idx]
        first, prompt = int(idx[0]), plan.seqs[int(idx[0])].prompt_len
        end, whole = int(plan.end[first]), self._trial.whole and plan.q[first] > 1
        if self.apart or (whole and end > prompt):
            out = self._alone(int(rows[0]), prompt, end)
        elif whole:
            out = self._advance(rows, np.zeros(len(rows), np.int32), end)
        else:
            self._catch_up(rows, plan.start[idx])
            out = self._advance(rows, plan.start[idx], int(plan.q[first]))
        wanted = np.flatnonzero(emit)
        if not 0 < len(wanted) < len(rows):
            return idx[emit], out
        if isinstance(self.head, Sampled):
            return idx[emit], self.head.sampler.rows(out, wanted)
        return idx[emit], self.backend.take(out, self.backend.put(wanted.astype(np.int32)))

    def _forward_ahead(self, plan: StepPlan, idx: Any) -> Part:
        """`_forward` for rows of which some have proposals. Positions of wrong ones are cut off the past."""
        assert isinstance(self.head, Sampled)
        rows, start = plan.rows[idx], plan.start[idx]
        ahead = ahead_of(self.head.sampler, self.head.table, plan, idx)
        outs, counts = Outs(self.backend, ahead.counts), ahead.counts
        keep = int(counts.max())
        wanted = np.arange(keep) >= keep - counts[:, None]
        places = np.full(wanted.shape, -1, np.int64)
        places[wanted] = np.arange(wanted.sum())
        with self.backend.guard():
            self._catch_up(rows, start)
            outs.put(self._piece(rows, start, int(ahead.end[0] - start[0]), ahead, keep), places.reshape(-1))
            part = self.head.along(plan, idx[plan.emit[idx]], outs)
            drop = np.zeros(len(idx), np.int64)
            emit = plan.emit[idx]
            drop[emit] = ahead.end[emit] - ahead.kept(part, plan.end[idx[emit]])
            past = self.pasts.of[int(rows[0])]
            for n in np.unique(drop[drop > 0]).tolist():
                some = np.flatnonzero(drop == n)
                self.pasts.of |= dict.fromkeys(rows[some].tolist(), self.layout.shortened(past, some.tolist(), n))
        return part

    def _alone(self, row: int, prompt: int, end: int) -> Array:
        """The logits of a row after its first `end` tokens, in calls that depend on nothing but the row."""
        past = self.pasts.of.get(row)
        have = 0 if past is None else past.counts[past.place(row)]
        if have not in range(prompt, end):
            self._forget([row])
            have, out = prompt, self._advance(np.array([row]), np.zeros(1, np.int32), prompt)
        for at in range(have, end):
            out = self._advance(np.array([row]), np.array([at], np.int32), 1)
        return out

    def _catch_up(self, rows: Any, start: Any) -> None:
        """Compute again what is not there: of a row whose past a failed step has taken along."""
        for row, n in zip(rows.tolist(), start.tolist(), strict=True):
            past = self.pasts.of.get(row)
            if n and (past is None or past.counts[past.place(row)] != n):
                self._forget([row])
                if self._trial.whole:
                    self._alone(row, min(n, self._seqs[row].prompt_len), n)
                    continue
                for at in range(0, n, self._chunk):
                    self._advance(np.array([row]), np.array([at], np.int32), min(self._chunk, n - at))

    def _advance(self, rows: Any, start: Any, q: int) -> Array:
        """Compute q tokens of each row; returns the logits after them, [m >= n, vocab]."""
        out: Array = None
        for piece in _pieces(q) if self.backend.shapes.compiled and not self._trial.whole else [q]:
            out = self._piece(rows, start, piece)
            start = start + piece
        return out

    def _piece(self, rows: Any, start: Any, q: int, ahead: Ahead | None = None, keep: int = 1) -> Array:
        n = len(rows)
        size = self.backend.shapes.rows(n, self._rows)
        filled = np.pad(rows, (0, size - n), mode="edge")
        each = np.repeat(np.arange(size), q)
        begins = np.pad(start, (0, size - n), mode="edge").astype(np.int32)
        positions = np.repeat(begins, q) + np.tile(np.arange(q), size)
        table = self.tables.at(rows[0])
        if ahead is None:
            tokens = table.packed(filled, begins, np.full(size, q), each, positions)
            tokens = tokens.reshape(size, q, *tokens.shape[1:])
        else:
            own, _, _, proposals = ahead.piece(np.arange(n), start, np.full(n, q))
            known = np.arange(q) < own[:, None]
            of = each[known.reshape(-1)]
            tokens = np.empty((n, q), np.int32)
            tokens[known] = table.packed(rows, start, own, of, positions[known.reshape(-1)])
            tokens[~known] = proposals
        shapes = self.backend.shapes
        wide = shapes.length(int(start.max())) if int(start[0]) else 0
        self.tally.call(size * q, n * q, (size, q, wide) if shapes.compiled else None)
        encoded = None if self._encoded is None else self._encoded.of(rows.tolist(), size, not self.deterministic)
        return self.pasts.advance(rows.tolist(), start.tolist(), tokens, filled, encoded, keep)


def _tried(forward: Callable[[StepPlan, Any], Part], plan: StepPlan) -> Callable[[Any], Part]:
    """A call for `isolate`: a row that fails is tried again without proposals, once alone. None fails for them."""
    bare = plan if plan.draft is None else replace(plan, draft=None)
    first = iter([plan])
    return lambda idx: forward(next(first, plan if len(idx) > 1 else bare), idx)


def _fitting(idx: Any, end: Any, most: int) -> Iterator[Any]:
    """Rows in as many parts as `most` positions want, those of like length together."""
    if len(idx) * int(end[idx].max()) <= most or len(idx) == 1:
        yield idx
        return
    order = idx[np.argsort(end[idx], kind="stable")]
    half = len(order) // 2
    for part in (order[:half], order[half:]):
        yield from _fitting(np.sort(part), end, most)


def _pieces(n: int) -> list[int]:
    """Powers of two that add up to n, the largest first: few shapes."""
    return [1 << i for i in reversed(range(n.bit_length())) if n >> i & 1]
