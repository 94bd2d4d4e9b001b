"""Calls of a draft model, over pools of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.layout import StepInputs
from hibachi.engine.runners.checkedstep import CheckedStep
from hibachi.engine.runners.memory import Memory
from hibachi.engine.runners.runner import check_output
from hibachi.engine.sampling.rows import pick, total
from hibachi.engine.scheduler.limits import Limits
from hibachi.engine.scheduler.lower import lower, lower_one

_quiet = np.errstate(invalid="ignore", over="ignore", divide="ignore")  # rows that are not finite give anything


def scratch_blocks(k: int, size: int) -> int:
    """Blocks of a row for what it guesses beyond its own blocks: k positions, the first at the beginning of a block."""
    return -(-k // size)


class DraftCalls:
    """limits: of the engine. Each row has its own blocks, and behind them so many that it may guess into, which begin
    where the engine's blocks end.
    """

    def __init__(self, model: Any, backend: ArrayBackend, dtype: str, limits: Limits, k: int) -> None:
        self.model, self.backend, self.size = model, backend, limits.block_size
        self._spare, self._first = scratch_blocks(k, limits.block_size), max(limits.blocks, 1)
        blocks = self._first + limits.rows * self._spare
        self.memory: Memory = Memory(model.cache_spec(), backend, replace(limits, blocks=blocks, checkpoints=0), dtype)
        self._name = f"{type(model).__name__}.step"
        self._step = CheckedStep(model.step, backend, self._name)
        self._reach: Any = getattr(model, "reach", None)
        width = -(-limits.max_model_len // limits.block_size) + self._spare
        self._table: HostArray = np.zeros((limits.rows, width), np.int32)
        self._blocks = [0] * limits.rows  # how many each row has of its own

    def own(self, row: int, blocks: Sequence[int], *, anew: bool) -> int:
        """A row has these blocks now: more than when it was last named, or others. Returns the positions in them."""
        have, now = 0 if anew else self._blocks[row], len(blocks)
        if anew or now > have:
            first = self._first + row * self._spare
            self._table[row, have:now] = blocks[have:]
            self._table[row, now : now + self._spare] = range(first, first + self._spare)
            self._table[row, now + self._spare :] = 0
            self._blocks[row] = now
        return now * self.size

    def run(self, rows: Any, start: Any, q: Any, emit: Any, tokens: HostArray) -> Array:
        """Logits behind the last token of the rows that emit, [n, vocab]. rows, start, q, emit [B], tokens [sum of q]:
        rows with one token first.
        """
        if len(tokens) == len(rows) and emit.all():
            return self.ahead(rows, start, tokens)
        packed = lower(rows, start, q, emit, self._table, self.size, tiles=self.backend.shapes.choices)
        return self._call(tokens, packed.arrays(), int((start + q).max()), len(packed.last))

    def ahead(self, rows: Any, pos: Any, tokens: HostArray) -> Array:
        """`run` for one token of each row, at these positions, all of which emit: packed in a third of the time."""
        n, block, most = len(rows), pos // self.size, int(pos.max())
        one, each = _upto(n + 1), _upto(n)
        if self.backend.shapes.tiles[0] != 1:
            packed = lower(
                rows, pos, one[1:] - each, each >= 0, self._table, self.size, tiles=self.backend.shapes.choices
            )
            return self._call(tokens, packed.arrays(), most + 1, n)
        table = self._table[rows, : most // self.size + 1]
        slot, end = table[each, block] * self.size + pos % self.size, pos + 1
        of = rows.astype(np.int32)
        return self._call(
            tokens, [pos, slot, each, of, pos, end, one, table, each, each[:, None], each, each], most + 1, n
        )

    def alone(self, row: int, start: int, tokens: HostArray) -> Array:
        """`run` for the tokens of one row, which emits: logits [1, vocab]. Packed with few small arrays."""
        n = len(tokens)
        packed = lower_one(row, start, n, 1, self._table, self.size, tiles=self.backend.shapes.choices)
        return self._call(tokens, packed.arrays(), start + n, 1)

    def _call(self, tokens: HostArray, packed: list[HostArray], positions: int, wanted: int) -> Array:
        """packed: the fields of `Packed`, in their order. wanted: outputs."""
        if self._reach is not None:
            self._reach(positions)
        arrays = [tokens, *packed]
        tok, *rest = arrays if getattr(self.model, "takes_host", False) else self.backend.put_all(arrays)
        out, self.memory.cache = self._step(self.model.params, self.memory.cache, StepInputs(tok, *rest))
        if wanted:
            return check_output(out, self.backend, (wanted, self.model.vocab_size), self._name, kind="logits")
        self.backend.settle(self.memory.cache)
        return out


@lru_cache
def _upto(n: int) -> HostArray:
    a = np.arange(n, dtype=np.int32)
    a.flags.writeable = False
    return a


@_quiet
def likelihood(backend: ArrayBackend, logits: Array, ids: Array, warmth: Array) -> Array:
    """The probability of the token ids [n] by the logits [n, vocab] times warmth [n]: float32 [n]."""
    xp = backend.xp
    x = backend.float32(logits) * warmth[:, None]
    x = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    return pick(backend, x, ids[:, None])[:, 0] / total(backend, x)


@_quiet
def drawn(logits: HostArray, warmth: HostArray, u: HostArray) -> tuple[HostArray, HostArray, HostArray]:
    """What rows without filters draw from logits [n, vocab] times warmth [n], by random numbers u [n]; NaN stands for
    the most likely token. Token ids [n], the probability of each, and which rows are finite.

    `hibachi.engine.sampling.draw.sample` and `likelihood` in one, and in a third of the time. It may round otherwise.
    """
    each, best = _upto(len(logits)), logits.argmax(axis=1)  # a NaN is the largest
    most = logits[each, best]
    weights = np.exp((logits - most[:, None]) * warmth[:, None])
    if (greedy := np.isnan(u)).all():
        ids, whole = best, weights.sum(axis=1)
    else:
        sums = np.cumsum(weights, axis=1)
        whole = sums[:, -1]
        ids = np.where(greedy, best, (sums > (u * whole)[:, None]).argmax(axis=1))
    return ids, weights[each, ids] / whole, np.isfinite(most)


def drawn_alone(logits: HostArray, warmth: float, u: float | None) -> tuple[int, float, bool]:
    """`drawn` for one row, [vocab]; u None stands for the most likely token."""
    best = int(logits.argmax())
    if not math.isfinite(most := logits.item(best)):
        return best, 0.0, False
    weights = logits - np.float32(most)
    weights *= np.float32(warmth)
    np.exp(weights, out=weights)
    if u is None:
        token, whole = best, weights.sum()
    else:
        sums = weights.cumsum()
        whole = sums[-1]
        token = min(int(sums.searchsorted(np.float32(u) * whole, "right")), len(sums) - 1)
    return token, weights.item(token) / float(whole), True
