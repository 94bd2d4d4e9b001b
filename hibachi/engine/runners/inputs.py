"""Inputs of a call of the model: the new tokens of some rows, packed, in as few shapes as the backend wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.layout import StepInputs
from hibachi.common.shapes import CallShapes
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.meters import Tally
from hibachi.engine.runners.runner import ModelRows
from hibachi.engine.runners.tokentable import Tables
from hibachi.engine.scheduler.lower import NAMES, Packed, lower, lower_one, pad
from hibachi.engine.scheduler.step import Limits


class Inputs:
    """Packs rows for `model.step`.

    shapes: the call shapes that the backend wants, as far as they are right for the model. unscored: first tokens of
    each row whose outputs are looked at, [rows].
    """

    backend: ArrayBackend
    limits: Limits
    tables: Tables
    block_table: Any

    def __init__(self, of: ModelRows, limits: Limits, block_table: Any, tally: Tally, *, recurrent: bool) -> None:
        model, backend, self.tables, beside = of
        self.backend, self.limits, self.block_table = backend, limits, block_table
        self._tally, self._recurrent, self._beside, declared = tally, recurrent, beside, beside.declared
        self._wants_more = bool(declared.knows or declared.draws or declared.inputs)  # beside tokens
        self._reach: Callable[[int], object] | None = getattr(model, "reach", None)
        self._on_host: bool = getattr(model, "takes_host", False)
        # Our decoders multiply with the backend alone, which is right for any number of tokens.
        any_shape = getattr(model, "any_shape", False)
        self.shapes: CallShapes = replace(backend.shapes, multiple=1) if any_shape else backend.shapes
        self.embeds: WeakValueDictionary[int, Job] = WeakValueDictionary()  # by row, where a prompt is given so
        self.unscored: HostArray = np.zeros(limits.rows, np.int32)
        self._scoring = False  # has any row such tokens?

    def admit(self, job: Job, unscored: int) -> None:
        row = job.seq.row
        if self._wants_more:
            self._beside.admit(job)
        self.look(row, unscored)
        self.embeds.pop(row, None)
        if job.request.embeds is not None:
            self.embeds[row] = job

    def look(self, row: int, unscored: int) -> None:
        """The outputs of so many first tokens of a row are looked at."""
        self.unscored[row] = unscored
        self._scoring = bool(self.unscored.any())

    def scores(self, rows: Any, start: Any) -> Any:
        """Which rows need outputs of more than the last token, from here on: bool [n]."""
        return self.unscored[rows] > start

    def score(self, rows: Any, start: Any) -> bool:
        """Whether one of these rows does."""
        return self._scoring and bool(np.count_nonzero(self.scores(rows, start)))

    def packed(
        self,
        rows: Any,
        start: Any,
        q: Any,
        emit: Any,
        drawn: tuple[Array, Any, int] | None = None,
        draft: Any = None,
        proposals: HostArray | None = None,
    ) -> StepInputs[Array]:
        """The step's inputs, in fixed shapes if the backend wants them: on the device, or if the model takes them so,
        the host's own, which nobody may write to.

        drawn: tokens on the device; for each row, which of them is its only token, [B] (-1 means the host knows its
        tokens); and the size of the vocabulary. draft [B], proposals [sum of it]: tokens behind those of the plan, of
        which outputs are wanted too.
        """
        ahead, tiles = draft is not None and int(q.max()) <= 1, self.shapes.choices
        if draft is not None:
            q = q + draft
            if ahead and self.shapes.compiled:
                tiles = (self.shapes.tiles[0],) * 2
        scoring = self.score(rows, start)
        table, size, longest = self.block_table, self.limits.block_size, int(q[0]) if len(q) == 1 else int(q.max())
        if len(rows) == 1 and not scoring:
            more = 0 if draft is None else int(draft[0])
            outputs = min(longest, 1 + more) if emit[0] else 0
            packed = lower_one(int(rows[0]), int(start[0]), longest, outputs, table, size, tiles=tiles)
            tokens = self._tokens_of_one(packed, longest - more, proposals if more else None)
        else:
            score = np.clip(self.unscored[rows] - start, 0, q) if scoring else None
            packed = lower(rows, start, q, emit, table, size, tiles=tiles, score=score, tail=draft)
            tokens = self._tokens(rows, start, q, packed, draft, proposals)
        if self._reach is not None:
            self._reach(packed.block_table.shape[1] * size or int(packed.pos.max()) + 1)
        wanted = len(tokens)
        shape = None
        if not self.shapes.exact:
            shape = self.shapes.step(
                packed.shape,
                longest=longest,
                rows=self.limits.rows,
                blocks=self.block_table.shape[1],
                state=self._recurrent,
                scored=scoring,
                ahead=ahead,
            )
        if shape is not None:
            packed = pad(packed, shape, trash_row=self.limits.rows)
            tokens = np.concatenate([tokens, np.zeros((shape.tokens - wanted, *tokens.shape[1:]), tokens.dtype)])
        self._tally.call(len(tokens), wanted, packed.shape if self.shapes.compiled else None)
        beside = self._beside_of(packed) if self._wants_more else {}
        names = [*NAMES, *beside]
        arrays: list[Array] = [tokens, *packed.arrays(), *beside.values()]
        if drawn is not None:
            ids, source, vocab = drawn
            known = np.pad(source[packed.seg[: int(q.sum())]], (0, len(tokens) - int(q.sum())), constant_values=-1)
            *arrays, at, here = self.backend.put_all(
                [*arrays, np.maximum(known, 0).astype(np.int32), (known >= 0).astype(np.int32)]
            )
            arrays[0] = self._put_drawn(arrays[0], ids, at, here, vocab)
        elif not self._on_host:
            arrays = self.backend.put_all(arrays)
        if beside:
            named = dict(zip(("tok", *names), arrays, strict=True))
            inputs = {name: named.pop(name) for name in self._beside.declared.inputs if name in named}
            x = StepInputs(**named, inputs=inputs or None)
        else:
            x = StepInputs(*arrays)
        return self._with_embeds(x, rows, start, q) if self.embeds else x

    def _tokens_of_one(self, packed: Packed, known: int, proposals: HostArray | None) -> HostArray:
        """The tokens of a single row: so many known ones, and proposals."""
        row, start = int(packed.row[0]), int(packed.start[0])
        tokens = self.tables.at(row).read(row, start, start + known)
        return tokens if proposals is None else np.concatenate([tokens, proposals])

    def _tokens(
        self, rows: Any, start: Any, q: Any, packed: Packed, draft: Any, proposals: HostArray | None
    ) -> HostArray:
        table = self.tables.at(rows[0])
        if draft is None or proposals is None:
            return table.packed(rows, start, q, packed.seg, packed.pos)
        known = packed.pos < (start + q - draft)[packed.seg]
        tokens = np.empty(len(known), np.int32)
        tokens[known] = table.packed(rows, start, q - draft, packed.seg[known], packed.pos[known])
        tokens[~known] = proposals
        return tokens

    def _beside_of(self, packed: Packed) -> dict[str, HostArray]:
        """What comes beside the tokens of a step: fields of `StepInputs`, and inputs by their names."""
        beside, rows = self._beside, packed.row
        found = beside.fields(packed)
        if beside.declared.inputs:
            found |= beside.inputs(rows, rows[packed.seg], packed.pos)
        return found

    def _put_drawn(self, tok: Array, ids: Array, at: Array, here: Array, vocab: int) -> Array:
        """Tokens [T] with ids[at] where `here` > 0: tokens that the host has not seen."""
        xp = self.backend.xp
        drawn = xp.clip(self.backend.take(ids, at), 0, vocab - 1)  # of a row with NaN, it is anything
        return xp.where(here > 0, xp.astype(drawn, tok.dtype), tok)

    def _with_embeds(self, x: StepInputs[Array], rows: Any, start: Any, q: Any) -> StepInputs[Array]:
        """The same with the embeddings of prompts that are given as embeddings, if this step computes some of them."""
        jobs = [(i, self.embeds.get(row)) for i, row in enumerate(rows.tolist())]
        mine = [(i, job.request.embeds) for i, job in jobs if job is not None and job.request.embeds is not None]
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
