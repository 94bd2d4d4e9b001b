"""Lowers a plan to packed index arrays, once per step for every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter

import numpy as np

from hibachi.common.shapes import StepShape
from hibachi.engine.scheduler.step import Bools, Index, Ints


@dataclass(slots=True, eq=False)
class Packed:
    """The index arrays of `StepInputs` (see there for shapes and meaning), as int32 host arrays."""

    pos: Ints
    slot: Ints
    seg: Ints
    row: Ints
    start: Ints
    kv_len: Ints
    cu_q: Ints
    block_table: Ints
    last: Ints
    tile_q: Ints
    tile_row: Ints
    tile_of: Ints

    def arrays(self) -> list[Ints]:
        """All fields, in the order of `NAMES`."""
        return list(_arrays(self))

    @property
    def shape(self) -> StepShape:
        tiles, tile = self.tile_q.shape
        return StepShape(len(self.pos), len(self.row), self.block_table.shape[1], tiles, tile, len(self.last))


NAMES = tuple(f.name for f in fields(Packed))
_arrays: Callable[[Packed], tuple[Ints, ...]] = attrgetter(*NAMES)

_TILE = 6
"""What a query tile costs besides its tokens, in tokens: its keys and values are gathered. Measured on NumPy."""


@lru_cache
def _upto(n: int) -> Ints:
    a = np.arange(n, dtype=np.int32)
    a.flags.writeable = False
    return a


@lru_cache
def _none(n: int) -> Ints:
    a = np.zeros(n, np.int32)
    a.flags.writeable = False
    return a


def lower(
    row: Ints | Index,
    start: Ints,
    q: Ints,
    emit: Bools,
    table: Ints,
    block_size: int,
    *,
    tiles: tuple[int, ...] = (1, 32),
    score: Ints | None = None,
    tail: Ints | None = None,
) -> Packed:
    """Pack a step's rows [B]. table [rows, blocks]: the scheduler's; an empty one (no paged layer) gives slot 0.

    Outputs are wanted of the last token of each emitting row, of the tail [B] tokens before it, and of the first score
    [B] tokens of each. `tiles`:
    tokens in a query tile when all rows have one token; then those to choose from when some have several.
    """
    n = len(row)
    end = start + q
    width = min(-(-int(end.max()) // block_size), table.shape[1])
    blocks = table[row, :width]
    row = row.astype(np.int32)
    single = int(q.max()) == 1
    tile = tiles[0] if single else min(tiles[1:], key=lambda t: int((-(-q // t)).sum()) * (t + _TILE))
    if single and tile == 1:  # decode only: every array is a plain range
        one = _upto(n)
        slot = blocks[one, start // block_size] * block_size + start % block_size if width else np.zeros(n, np.int32)
        wanted = emit if score is None else emit | (score > 0)
        last = one if wanted.all() else wanted.nonzero()[0].astype(np.int32)
        return Packed(start, slot, one, row, start, end, _upto(n + 1), blocks, last, one[:, None], one, one)
    cu_q = np.zeros(n + 1, np.int32)
    np.cumsum(q, out=cu_q[1:])
    total = int(cu_q[-1])
    seg = np.repeat(_upto(n), q)
    offset = _upto(total) - cu_q[seg]  # place of each token among the new ones of its row
    pos = start[seg] + offset
    slot = blocks[seg, pos // block_size] * block_size + pos % block_size if width else np.zeros(total, np.int32)
    last = (cu_q[1:] - 1)[emit]
    if tail is not None:
        last = np.flatnonzero(emit[seg] & (offset >= (q - 1 - tail)[seg])).astype(np.int32)
    if score is not None:
        last = np.union1d(last, np.flatnonzero(offset < score[seg])).astype(np.int32)
    count = -(-q // tile)
    first = np.zeros(n + 1, np.int32)
    np.cumsum(count, out=first[1:])
    tile_of = (first[seg] + offset // tile) * tile + offset % tile
    tile_q = np.zeros(int(first[-1]) * tile, np.int32)
    tile_q[tile_of] = _upto(total)
    tile_row = np.repeat(_upto(n), count)
    return Packed(
        pos,
        slot,
        seg,
        row,
        start,
        end,
        cu_q,
        blocks,
        last,
        tile_q.reshape(-1, tile),
        tile_row,
        tile_of.astype(np.int32),
    )


def lower_one(
    row: int, start: int, n: int, wanted: int, table: Ints, block_size: int, *, tiles: tuple[int, ...] = (1, 32)
) -> Packed:
    """`lower` for n tokens of one row, of which the last `wanted` have outputs: in a third of the time."""
    end, each, none = start + n, _upto(n), _none(n)
    blocks = table[row : row + 1, : -(-end // block_size)]
    if n == 1 and tiles[0] == 1:  # every array is of one number
        at = int(blocks[0, start // block_size]) * block_size + start % block_size if blocks.shape[1] else 0
        few = np.array([row, start, end, 0, 1, at], np.int32)
        pos = few[1:2]
        return Packed(
            pos,
            few[5:],
            none,
            few[:1],
            pos,
            few[2:3],
            few[3:5],
            blocks,
            each[n - wanted :],
            each.reshape(1, 1),
            none,
            each,
        )
    few = np.array([row, start, end, 0, n], np.int32)
    if n == 1:
        pos, tile = few[1:2], tiles[0]
    else:
        pos, tile = np.arange(start, end, dtype=np.int32), min(tiles[1:], key=lambda t: -(-n // t) * (t + _TILE))
    slot = blocks[0].take(pos // block_size) * block_size + pos % block_size if blocks.shape[1] else none
    count, tile_q = -(-n // tile), each
    if count * tile > n:
        tile_q = np.zeros(count * tile, np.int32)
        tile_q[:n] = each
    return Packed(
        pos,
        slot,
        none,
        few[:1],
        few[1:2],
        few[2:3],
        few[3:],
        blocks,
        each[n - wanted :],
        tile_q.reshape(count, tile),
        _none(count),
        each,
    )


def pad(p: Packed, shape: StepShape, *, trash_row: int) -> Packed:
    """The same step in a shape that holds it.

    Padding tokens stand at position 0 of block 0, padding rows hold `trash_row`, padding outputs repeat token 0.
    """
    tokens, rows, blocks, tiles, tile, outputs = shape
    tile_q = p.tile_q if p.tile_q.shape[1] == tile else np.zeros((0, tile), np.int32)
    tile_of = p.tile_of
    if not len(tile_q):  # a decode-only step in the shape of a mixed one: one tile a row
        tile_q = np.zeros((len(p.row), tile), np.int32)
        tile_q[:, 0] = p.tile_q[:, 0]
        tile_of = (_upto(len(p.row)) * tile).astype(np.int32)

    def to(a: Ints, n: int, fill: int = 0) -> Ints:
        out = np.full((n, *a.shape[1:]), fill, np.int32)
        out[: len(a)] = a
        return out

    table = np.zeros((rows, blocks), np.int32)
    table[: p.block_table.shape[0], : p.block_table.shape[1]] = p.block_table
    return Packed(
        pos=to(p.pos, tokens),
        slot=to(p.slot, tokens),
        seg=to(p.seg, tokens),
        row=to(p.row, rows, trash_row),
        start=to(p.start, rows),
        kv_len=to(p.kv_len, rows),
        cu_q=to(p.cu_q, rows + 1, len(p.pos)),
        block_table=table,
        last=to(p.last, outputs),
        tile_q=to(tile_q, tiles),
        tile_row=to(p.tile_row, tiles),
        tile_of=to(tile_of, tokens),
    )
