"""What a call of the model is given: the new tokens of some rows, packed, in as few shapes as the backend asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from hibachi.engine.job import Job
from hibachi.engine.meters import Tally
from hibachi.engine.runner import row_bucket
from hibachi.engine.tokentable import TokenTable
from hibachi.plan.buckets import decode_rows, prompt_tokens, width_bucket
from hibachi.plan.limits import Limits
from hibachi.plan.lower import Packed, lower, pad
from hibachi.tensor.array_backend import Array, ArrayBackend
from hibachi.tensor.cache import StepInputs


class Inputs:
    """Packs rows for `model.step`.

    sizes: tokens of a call, if it may not have any number: the backend's one, and those that give the same bits.
    unscored: first tokens of each row whose outputs are looked at, [rows].
    """

    def __init__(
        self,
        model: Any,
        backend: ArrayBackend,
        limits: Limits,
        table: TokenTable,
        block_table: Any,
        tally: Tally,
        *,
        recurrent: bool,
    ) -> None:
        self.backend, self.limits, self.table, self.block_table = backend, limits, table, block_table
        self._tally, self._recurrent = tally, recurrent
        self._reach: Callable[[int], object] | None = getattr(model, "reach", None)
        # Our decoders multiply with the backend alone, which is right for any number of tokens.
        self._pads = backend.multiple > 1 and not getattr(model, "any_shape", False)
        self.embeds: WeakValueDictionary[int, Job] = WeakValueDictionary()  # by row, where a prompt is given so
        self.unscored = np.zeros(limits.rows, np.int32)
        self.sizes: tuple[int, ...] = () if backend.step_tokens is None else (backend.step_tokens,)

    def admit(self, job: Job, unscored: int) -> None:
        row = job.seq.row
        self.unscored[row] = unscored
        self.embeds.pop(row, None)
        if job.embeds is not None:
            self.embeds[row] = job

    def scores(self, rows: Any, start: Any) -> Any:
        """Of which rows outputs of more than the last token are looked at, from here on: bool [n]."""
        return self.unscored[rows] > start

    def packed(
        self, rows: Any, start: Any, q: Any, emit: Any, drawn: tuple[Array, Any, int] | None = None
    ) -> StepInputs[Array]:
        """The step's inputs on the device, in fixed shapes if the backend wants them.

        drawn: tokens on the device, for each row which of them is its only one, [B] (-1: the host knows its tokens),
        and the size of the vocabulary.
        """
        score = np.clip(self.unscored[rows] - start, 0, q)
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
        self._tally.call(len(tokens), wanted, shapes)
        names = [f.name for f in fields(Packed)]
        arrays = [tokens, *(getattr(packed, name) for name in names)]
        if drawn is not None:
            ids, source, vocab = drawn
            known = np.pad(source[packed.seg[: int(q.sum())]], (0, len(tokens) - int(q.sum())), constant_values=-1)
            *arrays, at, here = self.backend.put_all(
                [*arrays, np.maximum(known, 0).astype(np.int32), (known >= 0).astype(np.int32)]
            )
            arrays[0] = self._put_drawn(arrays[0], ids, at, here, vocab)
        else:
            arrays = self.backend.put_all(arrays)
        tok, *rest = arrays
        x = StepInputs(tok=tok, **dict(zip(names, rest, strict=True)))
        return self._with_embeds(x, rows, start, q) if self.embeds else x

    def _put_drawn(self, tok: Array, ids: Array, at: Array, here: Array, vocab: int) -> Array:
        """Tokens [T] with ids[at] where `here` > 0: tokens that the host has not seen."""
        xp = self.backend.xp
        drawn = xp.clip(self.backend.take(ids, at), 0, vocab - 1)  # of a row with NaN, it is anything
        return xp.where(here > 0, xp.astype(drawn, tok.dtype), tok)

    def _with_embeds(self, x: StepInputs[Array], rows: Any, start: Any, q: Any) -> StepInputs[Array]:
        """The same with the embeddings of prompts that are given so, if this step computes some of them."""
        jobs = [(i, self.embeds.get(row)) for i, row in enumerate(rows.tolist())]
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
        if self._recurrent:
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
        if self._recurrent:
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
