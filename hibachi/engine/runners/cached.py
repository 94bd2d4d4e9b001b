"""The runner for models with a cache (level 2): which rows go into which call, and recovery of the cache after a
failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import numpy as np
from typing_extensions import override

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.layout import StepInputs
from hibachi.common.shapes import size_for
from hibachi.engine.runners.calls import CheckedStep
from hibachi.engine.runners.heads import Head, Outputs, Pooled, Sampled
from hibachi.engine.runners.inputs import Inputs
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.memory import Memory, RecurrentStep
from hibachi.engine.runners.meters import Tally
from hibachi.engine.runners.runner import (
    ModelRows,
    Outcome,
    Part,
    Runner,
    StepFailed,
    isolate,
    joined,
    raise_for_all,
    writers_first,
)
from hibachi.engine.runners.tokentable import Tables, TokenKind
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Limits, Move, StepPlan
from hibachi.engine.speculation.proposals import Ahead, OneCall, Outs, ProposedPiece, ahead_of

OUTPUTS_AHEAD = 16  # calls of one step that may run before the first one's output is read


class ModelCall:
    """A method of the model, compiled, and the head that its outputs go to.

    sizes: tokens of a call, as in `CallShapes`; of the first only, if a call has outputs of another width.
    """

    head: Head

    def __init__(self, head: Head, model: Any, backend: ArrayBackend, memory: Memory) -> None:
        self.head, self._backend, self._memory = head, backend, memory
        self._checked = CheckedStep(head.step(model), backend, head.name)
        self.compile()

    def compile(self) -> None:
        """Compile anew: the old program may hold on to a cache."""
        memory, step = self._memory, self._checked
        whole = RecurrentStep(step, self._backend, tuple(memory.spec)) if memory.states else step
        self.step: Callable[..., Any] = self._backend.compile(whole, donate=(1,) if memory.donating else ())


class CachedRunner(Runner):
    """Runs `model.step` over the packed new tokens of a plan.

    head: of requests that want tokens. Requests that want a vector have a head of their own, and are called apart, on
    the same cache. tally: of the calls; the head has the same. memory: None means a new one.
    """

    model: Any
    limits: Limits
    tables: Tables
    forks = True

    def __init__(
        self,
        of: ModelRows,
        scheduler: Scheduler,
        head: Head,
        dtype: str,
        tally: Tally,
        memory: Memory | None = None,
    ) -> None:
        model, backend, tables, _ = of
        super().__init__(backend, tables)
        self.drawn_by(head, tally)
        self.model, self.limits = model, scheduler.limits
        self.memory: Memory = memory or Memory(model.cache_spec(), backend, self.limits, dtype)
        self.inputs: Inputs = Inputs(of, self.limits, scheduler.block_table, tally, recurrent=bool(self.memory.states))
        self.few_shapes = "it has a state" if self.memory.states else ""
        self.main: ModelCall = ModelCall(head, model, backend, self.memory)
        self._vectors: ModelCall | None = None  # made when first needed
        self.advanced: bool = False  # states of some rows were stepped, and stored

    @property
    def name(self) -> str:
        return self.main.head.name

    @override
    def told(self) -> tuple[dict[str, float], list[int]]:
        own = getattr(getattr(self.model, "fused", None), "told", None)
        return ({}, []) if own is None else own()

    @override
    def adopt(self, scheduler: Scheduler) -> None:
        self.inputs.block_table = scheduler.block_table
        self.rebuild(keep=False)

    @override
    def admit(self, seq: Seq) -> None:
        job: Job = seq.owner
        super().admit(seq)
        call = self.main
        if job.request.pooling is not None:
            if self._vectors is None:
                head = Pooled(self.backend, self.limits.budget, type(self.model).__name__)
                self._vectors = ModelCall(head, self.model, self.backend, self.memory)
            call = self._vectors
        self.inputs.admit(job, call.head.admit(job))
        if job.request.begun is not None:  # each time that it gets a row: it has other blocks then, or they were lost
            with self.tally:
                self.memory.write(seq.blocks, job.request.begun.kv)

    @override
    def fitting(self, proposals: int) -> int:
        if not self.memory.states or not proposals:
            return proposals
        return (1 << ((proposals + 1).bit_length() - 1)) - 1  # with the token before them, a power of two

    @override
    def run(self, plan: StepPlan) -> Outcome:
        if plan.draft is not None and self.memory.states and self.inputs.shapes.compiled:
            plan = replace(plan, draft=None)  # its calls have one output a row
        groups = self._groups(plan, writers_first(plan))
        if len(groups) == 1:
            return self._run(plan, *groups[0])
        outcome, advanced = Outcome([], {}), False
        for some, call in groups:
            try:
                outcome += self._run(plan, some, call)
            except StepFailed as e:
                # A group before this one has stored its states, and these cannot go back: all compute again.
                e.cache_lost |= advanced
                raise
            advanced |= self.advanced
        return outcome

    def _groups(self, plan: StepPlan, idx: Any) -> list[tuple[Any, ModelCall]]:
        """The rows `idx` apart: requests that want vectors, and each kind of token; where some have proposals, those
        whose prompts are scored. In each group their order stays.
        """
        scored = np.zeros(len(plan.rows), bool) if plan.draft is None else self.inputs.scores(plan.rows, plan.start)
        if self._vectors is None and not self.tables.several and (plan.draft is None or not scored.any()):
            return [(idx, self.main)]
        found: dict[tuple[bool, TokenKind | None, bool], list[int]] = {}
        for i in idx.tolist():
            job: Job = plan.seqs[i].owner
            found.setdefault((job.request.pooling is not None, job.kind, bool(scored[i])), []).append(i)
        calls = {False: self.main, True: self._vectors or self.main}
        return [(np.array(some), calls[key[0]]) for key, some in sorted(found.items(), key=lambda f: f[0][0])]

    def _run(self, plan: StepPlan, idx: Any, call: ModelCall) -> Outcome:
        """`run` for some rows of a plan: places in it, the writer of a block before the rows that share it."""
        self.advanced = False
        bare = plan if plan.draft is None else replace(plan, draft=None)
        tries = chain([plan], repeat(bare))  # what fails is tried again without proposals: no row fails for them
        try:
            return isolate(lambda idx: self._forward(next(tries), idx, call), idx, self.backend, self.theirs)
        except StepFailed as e:
            # Unlike keys and values, states cannot go back: rows that were run apart are one step further.
            e.cache_lost |= self.advanced
            raise

    # ---- its memory --------------------------------------------------------------------------------------------

    @override
    def watch(self, wake: Callable[[], object]) -> None:
        self.memory.watch(wake)

    @override
    def check(self) -> None:
        self.memory.check()

    @override
    def close(self) -> None:
        self.memory.close()

    @override
    def rebuild(self, *, keep: bool) -> None:
        memory = self.memory
        if not self.backend.shapes.compiled or (keep and memory.donating):  # else what was compiled is as good as new
            memory.compile(donate=memory.donating and not keep)
            self.main.compile()
            self._vectors = None
        memory.make()

    @override
    def keys_and_values(self, row: int, tokens: int) -> list[tuple[HostArray, HostArray]]:
        blocks = self.inputs.block_table[row, : -(-tokens // self.limits.block_size)]
        return self.memory.read(blocks, tokens)

    @override
    def restore(self, pairs: list[tuple[int, int]]) -> None:
        self.memory.restore(pairs)

    @override
    def save(self, pairs: list[tuple[int, int]]) -> None:
        self.memory.save(pairs)

    @override
    def fork(self, moves: Sequence[Move]) -> None:
        super().fork(moves)
        with self.tally:
            self.memory.fork([m.block for m in moves if m.block is not None], [(m.source, m.to) for m in moves])

    # ---- calls -------------------------------------------------------------------------------------------------

    def _forward(self, plan: StepPlan, idx: Any, call: ModelCall) -> Part:
        rows, start, q, emit = plan.rows, plan.start, plan.q, plan.emit
        if len(idx) < len(rows):
            rows, start, q, emit = rows[idx], start[idx], q[idx], emit[idx]
        run = self._recurrent if self.memory.states else self._paged
        return self._kept(lambda: run(plan, call, idx, rows, start, q, emit))

    def _kept(self, compute: Callable[[], Part]) -> Part:
        """What a computation comes to. Where it fails, the cache is what it was before, if that can be."""
        memory = self.memory
        before = memory.cache
        try:
            with self.backend.guard():
                part = compute()
                with self.tally:
                    self.backend.settle(memory.cache)  # of a chunk of a prompt, no output has asked for it
                return part
        except BaseException as e:
            if not memory.donating:
                memory.cache = before  # what an asynchronous call returned may be its error
            elif not self.backend.usable(memory.cache):
                raise_for_all(e, self.backend, cache_lost=True)
            raise

    def _called(self, call: ModelCall, x: StepInputs[Array]) -> Array:
        with self.tally, self.theirs, self.memory.calling(x, hidden=call is not self.main):
            out: Array
            out, self.memory.cache = call.step(self.model.params, self.memory.cache, x)
        return out

    def _sizes(self, call: ModelCall) -> tuple[int, ...]:
        """The allowed numbers of tokens of a call. Only for the main call was tried which sizes give the same bits."""
        return self.inputs.shapes.sizes if call is self.main else self.inputs.shapes.sizes[:1]

    def _outputs(self, idx: Any, rows: Any, start: Any, q: Any, last: Any) -> Outputs:
        return Outputs(idx, start, np.clip(self.inputs.unscored[rows] - start, 0, q), last)

    def _ahead(self, plan: StepPlan, call: ModelCall, idx: Any) -> Ahead:
        """What the rows idx of a plan compute."""
        if plan.draft is None or not isinstance(call.head, Sampled):
            return Ahead(plan.end[idx], plan.emit[idx])
        return ahead_of(call.head.sampler, call.head.table, plan, idx)

    def _packed(self, rows: Any, at: Any, piece: ProposedPiece) -> StepInputs[Array]:
        return self.inputs.packed(rows, at, piece.own, piece.last, draft=piece.draft, proposals=piece.proposals)

    def _drawn(self, plan: StepPlan, call: ModelCall, idx: Any, outs: Outs) -> Part:
        """What the rows idx of a plan, of which all emit, draw along their proposals."""
        assert isinstance(call.head, Sampled)
        return call.head.along(plan, idx, outs)

    def _add(self, outs: Outs, call: ModelCall, out: Array, wanted: int, mine: Any, counts: Any) -> None:
        """Keep the outputs of a call, if it has any; the next one may write to their memory."""
        assert isinstance(call.head, Sampled)
        if counts.any():
            out = call.head.checked(out, wanted)
            outs.add(out if self.backend.immutable else self.backend.copy(out), mine, counts)

    def _paged(self, plan: StepPlan, call: ModelCall, idx: Any, rows: Any, start: Any, q: Any, emit: Any) -> Part:
        if self.inputs.shapes.sizes:
            return self._in_calls(plan, call, idx)
        if self.inputs.score(rows, start):
            return self._scored(plan, call, idx, rows, start, q, emit)
        if plan.draft is None or not plan.draft[idx].any():
            x = self.inputs.packed(rows, start, q, emit)
            mine = idx if np.count_nonzero(emit) == len(idx) else idx[emit]
            return call.head.part(plan, mine, self._called(call, x), x.last.shape[0])
        if len(idx) > 1:
            idx = idx[np.argsort(q + plan.draft[idx] != 1, kind="stable")]  # single-token rows first, as in a plan
        rows, start, emit, ahead = plan.rows[idx], plan.start[idx], plan.emit[idx], self._ahead(plan, call, idx)
        x = self._packed(rows, start, ahead.whole(start))
        assert isinstance(call.head, Sampled)
        out = call.head.checked(self._called(call, x), x.last.shape[0])
        return call.head.along(plan, idx[emit], OneCall(self.backend, out))

    def _in_calls(self, plan: StepPlan, call: ModelCall, idx: Any) -> Part:
        """`_paged` in calls of few shapes. The outputs of several are awaited together."""
        order = writers_first(plan)
        idx = order[np.isin(order, idx)]
        rows, start, emit, ahead = plan.rows[idx], plan.start[idx], plan.emit[idx], self._ahead(plan, call, idx)
        outs = None if ahead.draft is None else Outs(self.backend, ahead.counts)
        parts, waiting = list[Part](), list[tuple[Any, Array, int, Outputs | None]]()
        for mine, at, n in self.calls(rows, start, ahead.end - start, self._sizes(call)):
            piece = ahead.piece(mine, at, n)
            x, last = self._packed(rows[mine], at, piece), piece.last
            out = self._called(call, x)
            if outs is not None:
                self._add(outs, call, out, x.last.shape[0], mine, ahead.outputs(mine, piece))
                continue
            scoring = bool(self.inputs.scores(rows[mine], at).any())
            if scoring or last.any():
                of = self._outputs(idx[mine], rows[mine], at, n, last) if scoring else None
                waiting.append((idx[mine[last]], out, x.last.shape[0], of))
            # What is not drawn from before the next call must not lie in memory that this call may write to.
            if len(waiting) == (OUTPUTS_AHEAD if self.backend.immutable else 1):
                parts += [call.head.part(plan, *each) for each in waiting]
                waiting = []
        if outs is not None:
            return self._drawn(plan, call, idx[emit], outs)
        parts += [call.head.part(plan, *each) for each in waiting]
        return joined(parts, idx[:0], self.backend)

    def calls(self, rows: Any, start: Any, q: Any, sizes: tuple[int, ...]) -> Iterator[tuple[Any, Any, Any]]:
        """A step cut into calls of the allowed sizes: (places among `rows`, start, tokens) of each call.

        Prompts that are given as embeddings take other inputs, so their tokens are in calls of their own.
        """
        embeds = self.inputs.embeds
        given = np.array([embeds[row].seq.prompt_len if row in embeds else 0 for row in rows.tolist()], np.int32)
        embedded = np.clip(given - start, 0, q)
        for first, each, some in ((start, embedded, sizes[:1]), (start + embedded, q - embedded, sizes)):
            ends = np.cumsum(each, dtype=np.int32)
            done, total = 0, int(ends[-1])
            while done < total:
                size = size_for(total - done, some)
                skipped = np.clip(done - (ends - each), 0, each)
                n = np.clip(done + size - (ends - each), 0, each) - skipped
                mine = np.flatnonzero(n)
                mine = mine[np.argsort(n[mine] != 1, kind="stable")]  # single-token rows first, as in a plan
                yield mine, (first + skipped)[mine], n[mine]
                done += size

    def _scored(self, plan: StepPlan, call: ModelCall, idx: Any, rows: Any, start: Any, q: Any, emit: Any) -> Part:
        """`_paged` where outputs of whole prompts are wanted: in several calls, as logits take much memory."""
        at, left = start.copy(), q.copy()
        parts = []
        while left.any():
            piece, room = left.copy(), call.head.most_outputs()
            for i in np.flatnonzero((left > 0) & self.inputs.scores(rows, at)).tolist():
                piece[i] = min(piece[i], room)
                room -= piece[i]
            mine = np.flatnonzero(piece)
            mine = mine[np.argsort(piece[mine] != 1, kind="stable")]  # single-token rows first, as in a plan
            last = emit[mine] & (left[mine] == piece[mine])
            x = self.inputs.packed(rows[mine], at[mine], piece[mine], last)
            out = self._called(call, x)
            of = self._outputs(idx[mine], rows[mine], at[mine], piece[mine], last)
            parts.append(call.head.part(plan, idx[mine[last]], out, x.last.shape[0], of))
            at += piece
            left -= piece
        return joined(parts, idx[:0], self.backend)

    def _recurrent(self, plan: StepPlan, call: ModelCall, idx: Any, rows: Any, start: Any, q: Any, emit: Any) -> Part:
        """Like `_paged`, for models with a `State`: a copy of the rows' states is stepped, and kept on success.

        A state cannot go back. So a row whose proposals were not all right is stepped once more, from its old state, on
        the tokens that it keeps.
        """
        memory, ahead = self.memory, self._ahead(plan, call, idx)
        states = [memory.cache[i] for i in memory.states]
        scoring = int(np.count_nonzero(self.inputs.scores(rows, start)))
        held, work = self._working(states, rows, start)
        outs = None if ahead.draft is None else Outs(self.backend, ahead.counts)
        parts = list[Part]()

        def each(mine: Any, at: Any, piece: ProposedPiece, out: Array, wanted: int) -> None:
            if outs is not None:
                self._add(outs, call, out, wanted, mine, ahead.outputs(mine, piece))
            elif scoring or piece.last.any():
                of = self._outputs(idx[mine], rows[mine], at, piece.own, piece.last) if scoring else None
                parts.append(call.head.part(plan, idx[mine[piece.last]], out, wanted, of))

        self._step_states(call, work, rows, start, ahead, scoring, each)
        kept = [(held, work)]
        if outs is not None:
            parts = [part := self._drawn(plan, call, idx[emit], outs)]
            again = ahead.wrong(part, plan.end[idx[emit]])
            if len(again.rows):
                held, work = self._working(states, rows[again.rows], start[again.rows])
                self._step_states(call, work, rows[again.rows], start[again.rows], again.ahead)
                kept.append((held, work))
        part = joined(parts, idx[:0], self.backend)
        self.advanced = True
        for held, work in kept:
            states = memory.scatter(states, self.backend.put(held), work)
        memory.keep_states(states)
        return part

    def _working(self, states: list[Array], rows: Any, start: Any) -> tuple[Any, list[Array]]:
        """Rows, padded to those of a call and one more, for the padding of a piece; and copies of their states."""
        n, trash = len(rows), self.limits.rows
        size = trash if self.inputs.shapes.sizes else self.inputs.shapes.rows(n, trash)
        held, started = np.full(size + 1, trash, np.int32), np.zeros(size + 1, bool)
        held[:n], started[:n] = rows, start > 0
        return held, self.memory.gather(states, self.backend.put(held), self.backend.put(started))

    def _step_states(
        self,
        call: ModelCall,
        work: list[Array],
        rows: Any,
        start: Any,
        ahead: Ahead,
        scoring: int = 0,
        each: Callable[[Any, Any, ProposedPiece, Array, int], None] | None = None,
    ) -> None:
        """Step the states `work` over what rows compute. each: gets of each call the places among the rows, where they
        start, their tokens, the outputs, and how many. scoring: rows of which all outputs are wanted.

        A state cannot skip padding, so chunks are cut into powers of two and rows with the same piece go together. That
        makes at most log2(chunk) + 1 calls, each with equally many tokens a row (more where outputs of whole prompts
        are wanted, as logits take much memory).
        """
        sizes, pieces = self._sizes(call), self.inputs.shapes.pieces
        if self.inputs.embeds or call is not self.main:  # of these, one shape was tried
            sizes, pieces = sizes[:1], (1,)
        at, left = start.copy(), ahead.end - start
        most = max(1, call.head.most_outputs() // scoring) if scoring else int(left.max())
        if scoring:
            pieces = (1,)  # the outputs of a call in few shapes are as many as its rows
        while left.any():
            longest = int(left.max())
            if sizes:
                n = next(n for n in reversed(pieces) if n <= longest)
                mine = np.flatnonzero(left >= n)
                mine = mine[: size_for(len(mine), sizes)]
            else:
                n = 1 << (min(longest, most).bit_length() - 1)
                mine = np.flatnonzero(left >= n)
            piece = ahead.piece(mine, at[mine], np.full(len(mine), n, np.int32))
            x = self._packed(rows[mine], at[mine], piece)
            place = np.full(x.row.shape[0], work[0].shape[0] - 1, np.int32)
            place[: len(mine)] = mine
            placed = self.backend.put(place)
            with self.tally, self.theirs:
                out, caches = call.step(self.model.params, self.memory.with_states(work), placed, x)
            work[:] = [caches[i] for i in self.memory.states]
            self.memory.keep_blocks(caches)
            if each is not None:
                each(mine, at[mine], piece, out, x.last.shape[0])
            at[mine] += n
            left[mine] -= n
