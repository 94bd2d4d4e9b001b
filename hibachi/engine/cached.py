"""The runner for models with a cache (level 2): packs the new tokens, keeps the cache, samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from hibachi.engine.faults import Theirs
from hibachi.engine.job import Job
from hibachi.engine.meters import Tally
from hibachi.engine.runner import (
    NOT_FINITE,
    Flight,
    Outcome,
    Part,
    StepFailed,
    check_output,
    drawn_part,
    isolate,
    jobs_of,
    raise_for_all,
    row_bucket,
    token_part,
    writers_first,
)
from hibachi.engine.samebits import same_bits
from hibachi.engine.sampler import Drawn, RowSampler
from hibachi.engine.tokentable import TokenTable
from hibachi.errors import HibachiError, InvalidModelOutput, NonFiniteOutput
from hibachi.plan.buckets import decode_rows, prompt_tokens, width_bucket
from hibachi.plan.lower import Packed, lower, pad
from hibachi.plan.scheduler import Scheduler, StepPlan
from hibachi.plan.sequence import Seq
from hibachi.tensor.array_backend import Array, ArrayBackend, LayerCache
from hibachi.tensor.cache import Paged, State, StepInputs

LOGITS_BYTES = 2**26  # of a call where the outputs of whole prompts are wanted
OUTPUTS_AHEAD = 16  # calls of one step that may run before the first one's output is read


class CachedRunner:
    """Runs `model.step` over the packed new tokens of a plan."""

    def __init__(
        self,
        model: Any,
        backend: ArrayBackend,
        scheduler: Scheduler,
        table: TokenTable,
        sampler: RowSampler | None,
        dtype: str,
    ) -> None:
        self.model, self.backend, self.table, self.sampler = model, backend, table, sampler
        self.limits, self.block_table = scheduler.limits, scheduler.block_table
        self.dtype = dtype
        self.spec = list(model.cache_spec())
        self.states = [i for i, layer in enumerate(self.spec) if isinstance(layer, State)]
        self.name = self._name_of(model)
        self._reach: Callable[[int], object] | None = getattr(model, "reach", None)
        self.tally, self.theirs = Tally(), Theirs()
        self._embeds: WeakValueDictionary[int, Job] = WeakValueDictionary()  # by row, where a prompt is given so
        self._unscored = np.zeros(self.limits.rows, np.int32)  # first tokens of each row whose output is looked at
        self.advanced = False  # states of some rows were stepped, and stored
        self._compile(donate=True)
        self._make_cache()
        # Our decoders multiply with the backend alone, which is right for any number of tokens.
        self._pads = backend.multiple > 1 and not getattr(model, "any_shape", False)
        self.sizes: tuple[int, ...] = ()
        """Tokens of a call, if it may not have any number: the backend's one, and those that give the same bits."""
        if (one := backend.step_tokens) is not None:
            self.sizes = (one, *backend.larger_steps)
            self.sizes = (one, *(size for size in backend.larger_steps if same_bits(self, one, size)))

    @staticmethod
    def _name_of(model: Any) -> str:
        return f"{type(model).__name__}.step"

    def _compile(self, *, donate: bool) -> None:
        self._donating = donate
        self._model_step = CheckedStep(self.model.step, self.backend, self.name)
        step = self._recurrent_piece if self.states else self._model_step
        self._step = self.backend.compile(step, donate=(1,) if donate else ())
        self._gather = self.backend.compile(self._gather_states)
        self._scatter = self.backend.compile(self._scatter_states)
        self._copy = self.backend.compile(self._copy_states, donate=(0,) if donate else ())

    def _make_cache(self) -> None:
        b, lim = self.backend, self.limits
        self.cache = [
            # One row more than the limit: padding rows write there.
            b.make_cache(s, blocks=max(lim.blocks, 1), block_size=lim.block_size, rows=lim.rows + 1, dtype=self.dtype)
            for s in self.spec
        ]
        n = lim.checkpoints
        # Likewise one more. A state is an array of rows, so a checkpoint is a row as well.
        self.kept = [
            b.make_cache(self.spec[i], blocks=1, block_size=1, rows=n + 1, dtype=self.dtype) if n else None
            for i in self.states
        ]

    def adopt(self, scheduler: Scheduler) -> None:
        self.block_table = scheduler.block_table
        self.rebuild(keep=False)

    def interrupt(self) -> None:
        pass  # a step is not awaited

    def admit(self, seq: Seq) -> None:
        job: Job = seq.owner
        self.table.fill(seq.row, job.history)
        self._unscored[seq.row] = job.unscored
        self._embeds.pop(seq.row, None)
        if job.embeds is not None:
            self._embeds[seq.row] = job
        if self.sampler:
            self.sampler.admit(job)

    def run(self, plan: StepPlan) -> Outcome:
        return self.run_rows(plan, writers_first(plan))

    def run_rows(self, plan: StepPlan, idx: Any) -> Outcome:
        """`run` for some rows of a plan: places in it, who writes a block before those who share it."""
        self.advanced = False
        try:
            return isolate(lambda idx: self._forward(plan, idx), idx, self.backend, self.theirs)
        except StepFailed as e:
            # Unlike keys and values, states cannot go back: rows that were run apart are one step further.
            e.cache_lost |= self.advanced
            raise

    # ---- a step that nobody waits for ---------------------------------------------------------------------------

    def can_launch(self, plan: StepPlan) -> bool:
        """Can `launch` begin this step? It must need nothing that the host learns from the step before."""
        if self.sampler is None or self.states or self.sizes or self._embeds:
            return False
        if (self._unscored[plan.rows] > plan.start).any():
            return False
        idx = np.flatnonzero(plan.emit)
        jobs = jobs_of(plan, idx)
        # Two tokens may come before a consumer that is behind is noticed: of the step in flight, and of this one.
        if any(not job.channel.takes(2) or (job.stop and job.stop.where) for job in jobs):
            return False
        return self.sampler.plain(jobs, plan.rows[idx], plan.end[idx])

    def launch(self, plan: StepPlan, before: Flight | None) -> Flight:
        """Begin a step; what the one `before` draws are inputs of this one.

        Raises what the model raises, and StepFailed if that cost the cache.
        """
        assert self.sampler is not None
        idx, held = np.flatnonzero(plan.emit), self.cache
        rows, positions = plan.rows[idx], plan.end[idx]
        try:
            with self.backend.guard():
                x = self._inputs(plan.rows, plan.start, plan.q, plan.emit, _drawn(plan, before))
                out = self._call_model(x)
                expected = (x.last.shape[0], self.sampler.vocab_size)
                out = check_output(out, self.backend, expected, self.name, kind="logits")
                with self.tally:
                    drawn = self.sampler.begin(out, rows, positions) if len(idx) else ()
                    read = self.backend.fetch(drawn)
        except BaseException as e:
            if not self._donating:
                self.cache = held
            elif not self.backend.usable(self.cache):
                raise_for_all(e, self.backend, cache_lost=True)
            raise
        ids = drawn[0] if drawn else None
        return Flight(plan, idx, jobs_of(plan, idx), ids, read, None if self._donating else held)

    def land(self, flight: Flight) -> Outcome:
        """Wait for a step. Raises StepFailed."""
        plan, idx, jobs = flight.plan, flight.idx, flight.jobs
        try:
            with self.backend.guard(), self.tally:
                tokens, ok = flight.read() if len(idx) else (np.zeros(0, np.int32), np.ones(0, bool))
        except Exception as e:
            if flight.cache is not None:
                self.cache = flight.cache
            # What this step and the one after it wrote is not known.
            raise_for_all(e, self.backend, cache_lost=True)
            raise
        tokens, ok = tokens[: len(idx)], ok[: len(idx)]
        part = drawn_part(idx, Drawn(tokens, None if ok.all() else ~ok, {}), jobs, plan.end[idx], self.backend)
        return Outcome([part], {int(i): NonFiniteOutput(NOT_FINITE) for i in idx[~ok]} | part.faults)

    def _put_drawn(self, tok: Array, ids: Array, at: Array, here: Array) -> Array:
        """Tokens [T] with ids[at] where `here` > 0: tokens that the host has not seen."""
        assert self.sampler is not None
        xp = self.backend.xp
        drawn = xp.clip(self.backend.take(ids, at), 0, self.sampler.vocab_size - 1)  # of a row with NaN, it is anything
        return xp.where(here > 0, xp.astype(drawn, tok.dtype), tok)

    def rebuild(self, *, keep: bool) -> None:
        if not self.backend.static_shapes or (keep and self._donating):  # else what was compiled is as good as new
            self._compile(donate=self._donating and not keep)  # what was compiled may hold on to the cache
        self.cache, self.kept = [], []  # before there is memory for new ones
        self._make_cache()

    def written(self, rows: Any, positions: Any, part: Part, keep: Any) -> None:
        assert part.tokens is not None
        self.table.write(rows, positions, part.tokens[keep])

    def suspend(self, seq: Seq, row: int) -> None:
        self.table.leave(row, seq.owner.history, seq.length)

    def restore(self, pairs: list[tuple[int, int]]) -> None:
        rows, slots = self._places(pairs)
        with self.backend.guard():
            for i, kept in zip(self.states, self.kept, strict=True):
                self.cache[i] = self._copy(self.cache[i], rows, kept, slots)

    def save(self, pairs: list[tuple[int, int]]) -> None:
        rows, slots = self._places(pairs)
        with self.backend.guard():
            self.kept = [
                self._copy(kept, slots, self.cache[i], rows) for i, kept in zip(self.states, self.kept, strict=True)
            ]

    def _places(self, pairs: list[tuple[int, int]]) -> tuple[Array, Array]:
        """Rows and checkpoints on the device, in few shapes."""
        n = row_bucket(len(pairs), self.limits.rows) if self.backend.static_shapes else len(pairs)
        at = np.full((2, max(n, len(pairs))), [[self.limits.rows], [self.limits.checkpoints]], np.int32)
        at[:, : len(pairs)] = np.array(pairs, np.int32).T
        return self.backend.put(at[0]), self.backend.put(at[1])

    def _copy_states(self, into: Array, to: Array, source: Array, at: Array) -> Array:
        return self.backend.scatter_rows(into, to, self.backend.take(source, at))

    def close(self) -> None:
        pass

    def _forward(self, plan: StepPlan, idx: Any) -> Part:
        rows, start, q, emit = plan.rows[idx], plan.start[idx], plan.q[idx], plan.emit[idx]
        before = self.cache
        try:
            with self.backend.guard():
                run = self._recurrent if self.states else self._paged
                return run(plan, idx, rows, start, q, emit)
        except BaseException as e:
            if not self._donating:
                self.cache = before  # what an asynchronous call returned may be its error
            elif not self.backend.usable(self.cache):
                raise_for_all(e, self.backend, cache_lost=True)
            raise

    def _paged(self, plan: StepPlan, idx: Any, rows: Any, start: Any, q: Any, emit: Any) -> Part:
        if self.sizes:
            return self._in_calls(plan, idx, rows, start, q, emit)
        if (self._unscored[rows] > start).any():
            return self._scored(plan, idx, rows, start, q, emit)
        x = self._inputs(rows, start, q, emit)
        return self._part(plan, idx[emit], self._call_model(x), x)

    def _call_model(self, x: StepInputs[Array]) -> Array:
        with self.tally, self.theirs:
            out, self.cache = self._step(self.model.params, self.cache, x)
        return out

    def _in_calls(self, plan: StepPlan, idx: Any, rows: Any, start: Any, q: Any, emit: Any) -> Part:
        """`_paged` in calls of few shapes. The outputs of several are awaited together."""
        order = writers_first(plan)
        idx = order[np.isin(order, idx)]
        rows, start, q, emit = plan.rows[idx], plan.start[idx], plan.q[idx], plan.emit[idx]
        parts, waiting, end = [], [], start + q
        for mine, at, n in self._calls(rows, start, q):
            last = emit[mine] & (at + n == end[mine])
            x = self._inputs(rows[mine], at, n, last)
            out = self._call_model(x)
            scoring = bool((self._unscored[rows[mine]] > at).any())
            if scoring or last.any():
                call = (idx[mine], at, n, last) if scoring else None
                waiting.append((idx[mine[last]], out, x, call))
            # What is not drawn from before the next call must not lie in memory that this call may write to.
            if len(waiting) == (OUTPUTS_AHEAD if self.backend.immutable else 1):
                parts += [self._part(plan, *each) for each in waiting]
                waiting = []
        parts += [self._part(plan, *each) for each in waiting]
        return _joined(parts, idx[:0], self.backend)

    def _calls(self, rows: Any, start: Any, q: Any) -> Iterator[tuple[Any, Any, Any]]:
        """A step cut into calls of the sizes that there are: (places among `rows`, start, tokens) of each call.

        Prompts that are given as embeddings take other inputs, so their tokens are in calls of their own.
        """
        embeds = self._embeds
        given = np.array([embeds[row].seq.prompt_len if row in embeds else 0 for row in rows.tolist()], np.int32)
        embedded = np.clip(given - start, 0, q)
        for first, each, sizes in ((start, embedded, self.sizes[:1]), (start + embedded, q - embedded, self.sizes)):
            ends = np.cumsum(each, dtype=np.int32)
            done, total = 0, int(ends[-1])
            while done < total:
                size = max(n for n in sizes if n == sizes[0] or 2 * (total - done) > n)  # at least half full
                skipped = np.clip(done - (ends - each), 0, each)
                n = np.clip(done + size - (ends - each), 0, each) - skipped
                mine = np.flatnonzero(n)
                mine = mine[np.argsort(n[mine] != 1, kind="stable")]  # single-token rows first, as in a plan
                yield mine, (first + skipped)[mine], n[mine]
                done += size

    def _scored(self, plan: StepPlan, idx: Any, rows: Any, start: Any, q: Any, emit: Any) -> Part:
        """`_paged` where outputs of whole prompts are wanted: in several calls, as logits take much memory."""
        at, left = start.copy(), q.copy()
        parts = []
        while left.any():
            piece, room = left.copy(), self._room()
            for i in np.flatnonzero((left > 0) & (self._unscored[rows] > at)).tolist():
                piece[i] = min(piece[i], room)
                room -= piece[i]
            mine = np.flatnonzero(piece)
            mine = mine[np.argsort(piece[mine] != 1, kind="stable")]  # single-token rows first, as in a plan
            last = emit[mine] & (left[mine] == piece[mine])
            x = self._inputs(rows[mine], at[mine], piece[mine], last)
            out = self._call_model(x)
            parts.append(self._part(plan, idx[mine[last]], out, x, (idx[mine], at[mine], piece[mine], last)))
            at += piece
            left -= piece
        return _joined(parts, idx[:0], self.backend)

    def _room(self) -> int:
        """How many outputs a call may have where many are wanted."""
        assert self.sampler is not None
        return max(16, LOGITS_BYTES // (4 * self.sampler.vocab_size))

    def _inputs(
        self, rows: Any, start: Any, q: Any, emit: Any, drawn: tuple[Array, Any] | None = None
    ) -> StepInputs[Array]:
        """The step's inputs on the device, in fixed shapes if the backend wants them.

        drawn: tokens on the device, and for each row which of them is its only one, [B]; -1: the host knows its tokens.
        """
        score = np.clip(self._unscored[rows] - start, 0, q)
        scoring = bool(score.any())
        table, size = self.block_table, self.limits.block_size
        packed = lower(rows, start, q, emit, table, size, tiles=self.backend.tiles, score=score if scoring else None)
        if self._reach is not None:
            self._reach(packed.block_table.shape[1] * size or int(packed.pos.max()) + 1)
        tokens = self.table.packed(rows, start, q, packed.seg, packed.pos)
        wanted = len(tokens)
        static = self.backend.static_shapes or (self.backend.static_decode and int(q.max()) == 1)
        if static or self._pads:
            packed = self._pad(packed, q, scoring) if static else self._fill(packed, q)
            tokens = np.concatenate(
                [tokens, np.zeros((len(packed.pos) - len(tokens), *tokens.shape[1:]), tokens.dtype)]
            )
        shapes = None
        if self.backend.static_shapes:
            shapes = (len(tokens), packed.block_table.shape, packed.tile_q.shape, len(packed.last))
        self.tally.call(len(tokens), wanted, shapes)
        names = [f.name for f in fields(Packed)]
        arrays = [tokens, *(getattr(packed, name) for name in names)]
        if drawn is not None:
            ids, source = drawn
            known = np.pad(source[packed.seg[: int(q.sum())]], (0, len(tokens) - int(q.sum())), constant_values=-1)
            *arrays, at, here = self.backend.put_all(
                [*arrays, np.maximum(known, 0).astype(np.int32), (known >= 0).astype(np.int32)]
            )
            arrays[0] = self._put_drawn(arrays[0], ids, at, here)
        else:
            arrays = self.backend.put_all(arrays)
        tok, *rest = arrays
        x = StepInputs(tok=tok, **dict(zip(names, rest, strict=True)))
        return self._with_embeds(x, rows, start, q) if self._embeds else x

    def _with_embeds(self, x: StepInputs[Array], rows: Any, start: Any, q: Any) -> StepInputs[Array]:
        """The same with the embeddings of prompts that are given so, if this step computes some of them."""
        jobs = [(i, self._embeds.get(row)) for i, row in enumerate(rows.tolist())]
        mine = [(i, job.embeds) for i, job in jobs if job is not None and job.embeds is not None]
        mine = [(i, e) for i, e in mine if start[i] < len(e)]
        if not mine:
            return x
        tokens, first = x.tok.shape[0], np.cumsum(q) - q
        embeds, embedded = np.zeros((tokens, mine[0][1].shape[1]), np.float32), np.zeros(tokens, bool)
        for i, e in mine:
            part = e[start[i] : start[i] + q[i]]
            embeds[first[i] : first[i] + len(part)] = part
            embedded[first[i] : first[i] + len(part)] = True
        return replace(x, embeds=self.backend.put(embeds), embedded=self.backend.put(embedded))

    def _fill(self, packed: Packed, q: Any) -> Packed:
        """Tokens, rows and outputs in the multiples that the backend asks for."""
        many = self.backend.multiple
        rows, tokens, outputs = (-(-n // many) * many for n in (len(q), len(packed.pos), len(packed.last)))
        if self.states:
            tokens = rows * int(q[0])
        tiles, tile = packed.tile_q.shape
        return pad(
            packed,
            tokens=tokens,
            rows=rows,
            blocks=packed.block_table.shape[1],
            tile=tile,
            tiles=max(tiles, rows) if tile == 1 else tiles,
            trash_row=self.limits.rows,
            outputs=max(outputs, many),
        )

    def _pad(self, packed: Packed, q: Any, scoring: bool) -> Packed:
        """Few shapes: decode steps by rows, steps with prefill by tokens, rows with a state by both exactly."""
        lim = self.limits
        decode = int(q.max()) == 1
        if self.sizes:  # nothing but the size may vary
            n = next(size for size in self.sizes if size >= len(packed.pos))
            width = self.block_table.shape[1]
            return pad(packed, tokens=n, rows=n, blocks=width, tile=1, trash_row=lim.rows, outputs=n)
        tile, any_width = self.backend.tiles[not decode], self.backend.any_width
        ladder = self.backend.ladder
        if self.states:
            rows = row_bucket(len(q), lim.rows)
            tokens = rows * int(q[0])  # padding inside a row would change its state
        elif decode:
            rows = tokens = min(decode_rows(len(q), ladder, any_width=any_width), max(2, lim.rows))
        else:
            rows, tokens = lim.rows, prompt_tokens(len(packed.pos), ladder, tile)
        blocks = self.block_table.shape[1]
        if not any_width:
            blocks = width_bucket(packed.block_table.shape[1], blocks)
        return pad(
            packed,
            tokens=tokens,
            rows=rows,
            blocks=blocks,
            tile=tile,
            trash_row=lim.rows,
            outputs=tokens if scoring else None,
        )

    def _part(self, plan: StepPlan, idx: Any, out: Array, x: StepInputs[Array], call: Any = None) -> Part:
        """Check and sample the outputs of the rows `idx`, all of which emit.

        call: (places in the plan, start, tokens, emit) of the rows of this call, if there are outputs of other tokens.
        """
        wanted = x.last.shape[0]
        jobs, n = jobs_of(plan, idx), len(idx)
        if self.sampler:
            out = check_output(out, self.backend, (wanted, self.sampler.vocab_size), self.name, kind="logits")
            faults: dict[int, HibachiError] = {}
            if call is not None:
                out, faults = self._score(plan, out, *call)
            if not n:
                return Part(idx, np.zeros(0, np.int32), None, np.zeros(0, bool), faults=faults)
            with self.tally:
                drawn = self.sampler.draw(out, jobs, plan.rows[idx], plan.end[idx])
            part = drawn_part(idx, drawn, jobs, plan.end[idx], self.backend)
            part.faults |= faults
            return part
        dtype = self.table.values.dtype
        check_output(out, self.backend, (wanted, *self.table.shape), self.name, kind=dtype.kind)
        return token_part(idx, out, jobs, dtype, self.backend, self.tally, self.name)

    def _score(
        self, plan: StepPlan, out: Array, idx: Any, start: Any, q: Any, emit: Any
    ) -> tuple[Array, dict[int, HibachiError]]:
        """Note the log-probabilities of the prompt's tokens; returns the outputs that are to be sampled, and errors."""
        assert self.sampler is not None
        rows, jobs = plan.rows[idx], jobs_of(plan, idx)
        score = np.clip(self._unscored[rows] - start, 0, q)
        ends = np.cumsum(score + emit)
        samples = ends[emit] - 1
        row = np.repeat(np.arange(len(idx)), score)
        places = np.delete(np.arange(ends[-1]), samples)
        position = start[row] + np.arange(len(row)) - np.repeat(np.cumsum(score) - score, score) + 1
        tokens, wanted = np.zeros(ends[-1], np.int32), np.zeros(ends[-1], np.int32)
        tokens[places] = self.table.packed(rows, start + 1, score, row, position)
        wanted[places] = [jobs[i].sampling.prompt_logprobs for i in row.tolist()]
        with self.tally:
            found = self.sampler.logprobs(out, tokens, wanted.tolist())
        faults: dict[int, HibachiError] = {}
        for i, place, at in zip(row.tolist(), places.tolist(), position.tolist(), strict=True):
            scores = jobs[i].scores
            assert scores is not None
            scores[at] = found[place]
            if any(value != value for value in found[place].values()):
                faults[int(idx[i])] = NonFiniteOutput(NOT_FINITE)
        return self.sampler.rows(out, samples) if len(samples) else out, faults

    # ---- recurrent state ---------------------------------------------------------------------------------------

    def _recurrent(self, plan: StepPlan, idx: Any, rows: Any, start: Any, q: Any, emit: Any) -> Part:
        """Like `_paged`, for models with a `State`: a copy of the rows' states is stepped, and kept on success.

        A state cannot skip padding, so chunks are cut into powers of two and rows with the same piece go together:
        at most log2(chunk) + 1 calls, each with equally many tokens a row (more where outputs of whole prompts are
        wanted, as logits take much memory).
        """
        n, trash = len(idx), self.limits.rows
        size = trash if self.sizes else row_bucket(n, trash) if self.backend.static_shapes else n
        held = np.full(size + 1, trash, np.int32)  # one more, for the padding rows of a piece
        held[:n] = rows
        started = np.zeros(size + 1, bool)
        started[:n] = start > 0
        states = [self.cache[i] for i in self.states]
        work = self._gather(states, self.backend.put(held), self.backend.put(started))
        at, left = start.copy(), q.copy()
        parts = []
        scoring = int(np.count_nonzero(self._unscored[rows] > start))
        most = max(1, self._room() // scoring) if scoring else int(q.max())
        while left.any():
            piece = 1 << (min(int(left.max()), most).bit_length() - 1)
            mine = np.flatnonzero(left >= piece)
            if self.sizes:  # one token a row, as rows of one call must have equally many, in one shape
                piece, mine = 1, np.flatnonzero(left)[: self.sizes[0]]
            last = emit[mine] & (left[mine] == piece)
            each = np.full(len(mine), piece, np.int32)
            x = self._inputs(rows[mine], at[mine], each, last)
            place = np.full(x.row.shape[0], size, np.int32)
            place[: len(mine)] = mine
            placed = self.backend.put(place)
            with self.tally, self.theirs:
                out, caches = self._step(self.model.params, self._with(work), placed, x)
            work = [caches[i] for i in self.states]
            self.cache = [
                c if isinstance(s, Paged) else old for c, s, old in zip(caches, self.spec, self.cache, strict=True)
            ]
            if scoring or last.any():
                call = (idx[mine], at[mine], each, last) if scoring else None
                parts.append(self._part(plan, idx[mine[last]], out, x, call))
            at[mine] += piece
            left[mine] -= piece
        self.advanced = True
        states = self._scatter(states, self.backend.put(held), work)
        for i, state in zip(self.states, states, strict=True):
            self.cache[i] = state
        return _joined(parts, idx[:0], self.backend)

    def _with(self, work: list[Array]) -> list[Any]:
        given = iter(work)
        return [c if isinstance(s, Paged) else next(given) for c, s in zip(self.cache, self.spec, strict=True)]

    def _recurrent_piece(
        self, params: Any, cache: list[Any], place: Array, x: StepInputs[Array]
    ) -> tuple[Array, list[Any]]:
        """One call of the model on the rows at `place` of the working states; returns all working states."""
        b = self.backend
        given = [b.take(c, place) if isinstance(s, State) else c for c, s in zip(cache, self.spec, strict=True)]
        out, new = self._model_step(params, given, x)
        joined = [
            b.scatter_rows(old, place, n) if isinstance(s, State) else n
            for old, n, s in zip(cache, new, self.spec, strict=True)
        ]
        return out, joined

    def _gather_states(self, states: list[Array], held: Array, started: Array) -> list[Array]:
        """The states of the rows `held`, zeros for those that start."""
        b = self.backend
        out = []
        for s in states:
            rows = b.take(s, held)
            flag = b.xp.reshape(started, (-1, *(1,) * (s.ndim - 1)))
            out.append(b.xp.where(flag, rows, b.xp.zeros_like(rows)))
        return out

    def _scatter_states(self, states: list[Array], held: Array, work: list[Array]) -> list[Array]:
        return [self.backend.scatter_rows(s, held, w) for s, w in zip(states, work, strict=True)]


@dataclass(frozen=True)
class CheckedStep:
    """`model.step` with a look at the cache that it returns; equal for one model, so that it is compiled once.

    Raises InvalidModelOutput. Only types and shapes are looked at, and of what is compiled no more than once, when it
    is traced. Lists are copied both ways: the model may keep and change those that it has.
    """

    step: Callable[..., Any]
    backend: ArrayBackend
    name: str

    @property
    def __name__(self) -> str:  # of the program, where a library compiles it
        return "step"

    def __call__(
        self, params: Any, cache: Sequence[LayerCache], x: StepInputs[Array]
    ) -> tuple[Array, list[LayerCache]]:
        result = self.step(params, list(cache), x)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise self._wrong("a pair (outputs, cache)", result)
        out, new = result
        if not isinstance(new, (tuple, list)) or len(new) != len(cache):
            raise self._wrong(f"the cache as a list of {len(cache)} layers, as it was given", new)
        return out, [
            layer if layer is old or self._alike(old, layer) else self._like(old, layer, i)
            for i, (old, layer) in enumerate(zip(cache, new, strict=True))
        ]

    def _alike(self, old: LayerCache, new: LayerCache) -> bool:
        """Says quickly of nearly all layers that they are fine: pairs of arrays of the same types and shapes."""
        if type(new) is not tuple or type(old) is not tuple or len(new) != 2 or len(old) != 2:
            return False
        (a, b), (c, d), unfit = new, old, self.backend.unfit
        try:
            return (a is c or (type(a) is type(c) and a.shape == c.shape and unfit(a) is None)) and (
                b is d or (type(b) is type(d) and b.shape == d.shape and unfit(b) is None)
            )
        except AttributeError:
            return False

    def _like(self, old: LayerCache, new: LayerCache, i: int) -> LayerCache:
        """`new`, if it is of the kind and the shape of `old`, in the same kind of tuple."""
        if isinstance(old, (tuple, list)):
            if not isinstance(new, (tuple, list)) or len(new) != len(old):
                raise self._wrong(f"layer {i} of the cache as {len(old)} arrays, as it was given", new)
            return type(old)([self._like(a, b, i) for a, b in zip(old, new, strict=True)])
        if self.backend.owns(old):
            if not self.backend.owns(new) or self.backend.unfit(new) is not None or new.shape != old.shape:
                raise self._wrong(f"an array of {self.backend.name} of shape {tuple(old.shape)} in layer {i}", new)
        elif type(new) is not type(old):
            raise self._wrong(f"layer {i} of the cache as {type(old).__qualname__}, as it was given", new)
        return new

    def _wrong(self, expected: str, got: Any) -> InvalidModelOutput:
        what = type(got).__qualname__
        if hasattr(got, "shape"):
            what += f" of shape {tuple(got.shape)}"
        elif isinstance(got, (tuple, list)):
            what += f" of {len(got)}"
        return InvalidModelOutput(
            f"{self.name} must return {expected}; got {what}. Return (outputs, [what `attend` returned, or the new "
            f"state, for each layer])."
        )


def _drawn(plan: StepPlan, before: Flight | None) -> tuple[Array, Any] | None:
    """The tokens of the step before, and for each row of a plan which of them it computes, [B]; -1: none."""
    if before is None or not len(before.idx):
        return None
    rows, generation = before.plan.rows[before.idx], before.plan.generation[before.idx]
    size = int(max(rows.max(), plan.rows.max())) + 1
    place, owner = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
    place[rows], owner[rows] = np.arange(len(rows)), generation
    source = np.where(owner[plan.rows] == plan.generation, place[plan.rows], -1)
    return (before.ids, source) if (source >= 0).any() else None


def _joined(parts: list[Part], nobody: Any, backend: ArrayBackend) -> Part:
    """The parts of one call's pieces as one part."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Part(nobody, np.zeros(0, np.int32), None, np.zeros(0, bool))
    logprobs, offset = {}, 0
    for p in parts:
        logprobs.update({offset + i: lp for i, lp in p.logprobs.items()})
        offset += len(p.idx)
    return Part(
        idx=np.concatenate([p.idx for p in parts]),
        tokens=np.concatenate([p.tokens for p in parts]),  # type: ignore[misc]
        batch=None if parts[0].batch is None else backend.xp.concat([p.batch for p in parts], axis=0),
        stopped=np.concatenate([p.stopped for p in parts]),
        bad=np.concatenate([np.zeros(len(p.idx), bool) if p.bad is None else p.bad for p in parts]),
        logprobs=logprobs,
        faults={i: fault for p in parts for i, fault in p.faults.items()},
    )
