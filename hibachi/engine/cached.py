"""The runner for models with a cache (level 2): packs the new tokens, keeps the cache, samples."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from hibachi.engine.job import Job, TokenTable, stopped
from hibachi.engine.runner import CacheLost, Outcome, Part, check_output, isolate, jobs_of, row_bucket
from hibachi.engine.sampler import RowSampler
from hibachi.plan.lower import Packed, lower, pad
from hibachi.plan.scheduler import Scheduler, Seq, StepPlan
from hibachi.tensor.array_backend import Array, ArrayBackend
from hibachi.tensor.cache import Paged, State, StepInputs

TILE = 32  # tokens in a query tile of a step that has prefill in it


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
        self.name = f"{type(model).__name__}.step"
        self._compile(donate=True)
        self._make_cache()

    def _compile(self, *, donate: bool) -> None:
        self._donating = donate
        step = self._recurrent_piece if self.states else self.model.step
        self._step = self.backend.compile(step, donate=(1,) if donate else ())
        self._gather = self.backend.compile(self._gather_states)
        self._scatter = self.backend.compile(self._scatter_states)
        self._wipe = self.backend.compile(self.backend.wipe, donate=(0,) if donate else ())

    def _make_cache(self) -> None:
        b, lim = self.backend, self.limits
        self.cache = [
            # One row more than the limit: padding rows write there.
            b.make_cache(s, blocks=max(lim.blocks, 1), block_size=lim.block_size, rows=lim.rows + 1, dtype=self.dtype)
            for s in self.spec
        ]

    def admit(self, seq: Seq) -> None:
        job: Job = seq.owner
        self.table.fill(seq.row, job.prompt)
        if self.sampler:
            self.sampler.admit(job)

    def run(self, plan: StepPlan) -> Outcome:
        try:
            return Outcome(*isolate(lambda idx: self._forward(plan, idx), np.arange(len(plan.rows))))
        except CacheLost:
            # The failed call had consumed the cache. Start over from the tokens, and keep the cache from now on, so
            # that the next failure can be pinned on a row.
            self._compile(donate=False)
            self._make_cache()
            return Outcome([], {}, cache_lost=True)

    def written(self, rows: Any, positions: Any, part: Part, keep: Any) -> None:
        assert part.tokens is not None
        self.table.write(rows, positions, part.tokens[keep])

    def wipe(self, seq: Seq) -> None:
        """Zeros in the blocks of a sequence: attention multiplies hidden positions by 0, which NaN would survive."""
        with self.backend.guard():
            blocks = self.backend.put(self.block_table[seq.row])  # with block 0 for those it has not
            for i, layer in enumerate(self.spec):
                if isinstance(layer, Paged):
                    self.cache[i] = self._wipe(self.cache[i], blocks)

    def close(self) -> None:
        pass

    def _forward(self, plan: StepPlan, idx: Any) -> Part:
        rows, start, q, emit = plan.rows[idx], plan.start[idx], plan.q[idx], plan.emit[idx]
        try:
            with self.backend.guard():
                run = self._recurrent if self.states else self._paged
                return run(plan, idx, rows, start, q, emit)
        except Exception as e:
            if self._donating and not self.backend.usable(self.cache):
                raise CacheLost from e
            raise

    def _paged(self, plan: StepPlan, idx: Any, rows: Any, start: Any, q: Any, emit: Any) -> Part:
        x = self._inputs(rows, start, q, emit)
        out, self.cache = self._step(self.model.params, self.cache, x)
        return self._part(plan, idx[emit], out, x)

    def _inputs(self, rows: Any, start: Any, q: Any, emit: Any) -> StepInputs[Array]:
        """The step's inputs on the device, in fixed shapes if the backend wants them."""
        packed = lower(rows, start, q, emit, self.block_table, self.limits.block_size, tile=TILE)
        tokens = self.table.values[rows[packed.seg], packed.pos]
        if self.backend.static_shapes:
            packed = self._pad(packed, q)
            tokens = np.concatenate(
                [tokens, np.zeros((len(packed.pos) - len(tokens), *tokens.shape[1:]), tokens.dtype)]
            )
        put = self.backend.put
        return StepInputs(tok=put(tokens), **{f.name: put(getattr(packed, f.name)) for f in fields(Packed)})

    def _pad(self, packed: Packed, q: Any) -> Packed:
        """Few shapes: decode steps by rows, steps with prefill by tokens, rows with a state by both exactly."""
        lim = self.limits
        decode = int(q.max()) == 1
        rows = row_bucket(len(q), lim.rows)
        if self.states:
            tokens = rows * int(q[0])  # padding inside a row would change its state
        elif decode:
            tokens = rows
        else:
            rows, tokens = lim.rows, max(2 * TILE, 1 << (len(packed.pos) - 1).bit_length())
        blocks = width_bucket(packed.block_table.shape[1], self.block_table.shape[1])
        return pad(packed, tokens=tokens, rows=rows, blocks=blocks, tile=1 if decode else TILE, trash_row=lim.rows)

    def _part(self, plan: StepPlan, idx: Any, out: Array, x: StepInputs[Array]) -> Part:
        """Check and sample the outputs of the rows `idx`, all of which emit."""
        wanted = x.last.shape[0]
        jobs, n = jobs_of(plan, idx), len(idx)
        if self.sampler:
            check_output(out, self.backend, (wanted, self.sampler.vocab_size), self.name)
            if not n:
                return Part(idx, np.zeros(0, np.int32), None, np.zeros(0, bool))
            tokens, bad, logprobs = self.sampler.draw(out, jobs, plan.rows[idx], plan.end[idx])
            return Part(idx, tokens, None, stopped(jobs, tokens, None, self.backend), bad, logprobs)
        kind = "f" if self.table.values.dtype.kind == "f" else "i"
        check_output(out, self.backend, (wanted, *self.table.shape), self.name, kind=kind)
        tokens = self.backend.get(out)[:n]
        bad = ~np.isfinite(tokens).reshape(n, -1).all(axis=1) if kind == "f" else None
        batch = out if wanted == n else out[:n, ...]
        return Part(idx, tokens, batch, stopped(jobs, tokens, batch, self.backend), bad)

    # ---- recurrent state ---------------------------------------------------------------------------------------

    def _recurrent(self, plan: StepPlan, idx: Any, rows: Any, start: Any, q: Any, emit: Any) -> Part:
        """Like `_paged`, for models with a `State`: a copy of the rows' states is stepped, and kept on success.

        A state cannot skip padding, so chunks are cut into powers of two and rows with the same piece go together:
        at most log2(chunk) + 1 calls, each with equally many tokens a row.
        """
        n, trash = len(idx), self.limits.rows
        size = row_bucket(n, trash) if self.backend.static_shapes else n
        held = np.full(size + 1, trash, np.int32)  # one more, for the padding rows of a piece
        held[:n] = rows
        started = np.zeros(size + 1, bool)
        started[:n] = start > 0
        states = [self.cache[i] for i in self.states]
        work = self._gather(states, self.backend.put(held), self.backend.put(started))
        at, left = start.copy(), q.copy()
        parts = []
        for bit in reversed(range(int(q.max()).bit_length())):
            piece = 1 << bit
            mine = np.flatnonzero(q & piece)
            if not len(mine):
                continue
            last = emit[mine] & (left[mine] == piece)
            x = self._inputs(rows[mine], at[mine], np.full(len(mine), piece, np.int32), last)
            place = np.full(x.row.shape[0], size, np.int32)
            place[: len(mine)] = mine
            out, caches = self._step(self.model.params, self._with(work), self.backend.put(place), x)
            work = [caches[i] for i in self.states]
            self.cache = [
                c if isinstance(s, Paged) else old for c, s, old in zip(caches, self.spec, self.cache, strict=True)
            ]
            if last.any():
                parts.append(self._part(plan, idx[mine[last]], out, x))
            at[mine] += piece
            left[mine] -= piece
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
        out, new = self.model.step(params, given, x)
        for i in self.states:
            expected = (int(place.shape[0]), *self.spec[i].shape)  # type: ignore[union-attr]
            check_output(new[i], b, expected, f"{self.name} (state of layer {i})")
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
    )


def width_bucket(n: int, most: int) -> int:
    """The next power of four from 4 on, at most `most`."""
    width = 4
    while width < n:
        width *= 4
    return min(width, most)
