"""What rank 0 tells the others of a step: only what they cannot know.

Both sides keep a `Mirror`: the blocks of each row, and where its next step is expected to begin. A row that goes on by
one token costs no more than that token, and now and then the number of a block. All else follows, as `lower` makes the
index arrays of a step on each side.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from hibachi.common.shapes import StepShape
from hibachi.engine.scheduler.lower import Packed, lower, pad
from hibachi.engine.scheduler.step import Limits

CHECK_EVERY = 64  # steps from one checksum of the arrays to the next
SAME_ROWS, ONE_EACH, NEXT, ALL_LAST, SOME_LAST, SHORT_IDS, CHECKED, PADDED, EMBEDDED = (1 << i for i in range(9))
_HEAD = struct.Struct("<IHH")  # step, flags, rows
Ints = np.ndarray[Any, Any]


class Astray(Exception):
    """A rank has other tables than rank 0."""


@dataclass(slots=True)
class StepCall:
    """The arrays of a call of the model, as in `StepInputs`, without padding. last: of the tokens whose outputs are
    wanted. shape: to pad to; None means as they are. embeds: [k, hidden] float32 of the tokens at `embedded` [k].
    """

    tok: Ints
    row: Ints
    start: Ints
    q: Ints
    table: Ints  # [rows of the call, blocks]
    last: Ints
    shape: StepShape | None = None
    embeds: Ints | None = None
    embedded: Ints | None = None

    def packed(self, size: int, tiles: tuple[int, ...], trash_row: int) -> tuple[Ints, Packed]:
        """Tokens and index arrays as rank 0 has them. size: of a block."""
        n = len(self.row)
        found = lower(np.arange(n), self.start, self.q, np.ones(n, bool), self.table, size, tiles=tiles)
        found.row, found.last = self.row.astype(np.int32), self.last.astype(np.int32)
        tok = self.tok
        if self.shape is not None:
            found = pad(found, self.shape, trash_row=trash_row)
            tok = np.concatenate([tok, np.zeros((self.shape.tokens - len(tok), *tok.shape[1:]), tok.dtype)])
        return tok, found


class Mirror:
    """The rows of one memory, as both sides know them."""

    def __init__(self, limits: Limits) -> None:
        rows = limits.rows + 1
        self._size = limits.block_size
        self._places = np.dtype("<u1" if rows <= 256 else "<u2" if rows <= 65536 else "<u4")
        self._blocks = np.dtype("<u2" if limits.blocks <= 65536 else "<u4")
        self._table = np.zeros((rows, 1 - (-limits.max_model_len // limits.block_size)), np.int32)
        self._next = np.zeros(rows, np.int32)
        self._rows = np.zeros(0, np.int32)

    def encode(self, step: int, call: StepCall) -> bytes:
        n, row, start, q = len(call.row), call.row, call.start, call.q
        flags, parts = 0, list[Any]()
        if np.array_equal(row, self._rows):
            flags |= SAME_ROWS
        else:
            parts.append(row.astype(self._places))
        if np.array_equal(start, self._next[row]):
            flags |= NEXT
        else:
            parts.append(_exceptions(start, self._next[row]))
        if int(q.max()) == 1:
            flags |= ONE_EACH
        else:
            parts.append(_exceptions(q, np.ones(n, np.int32)))
        parts += self._grown(row, start + q, call.table)
        ends = np.cumsum(q) - 1
        if np.array_equal(call.last, ends):
            flags |= ALL_LAST
        elif (chosen := np.isin(ends, call.last)).sum() == len(call.last):
            flags |= SOME_LAST
            parts.append(np.packbits(chosen))
        else:
            parts += [np.array([len(call.last)], "<u4"), call.last.astype("<u4")]
        if short := int(call.tok.max()) < 1 << 16:
            flags |= SHORT_IDS
        parts.append(call.tok.astype("<u2" if short else "<u4"))
        if call.shape is not None:
            flags |= PADDED
            parts.append(np.array(call.shape, "<u4"))
        if call.embeds is not None and call.embedded is not None:
            flags |= EMBEDDED
            parts += [np.array(call.embeds.shape, "<u4"), call.embedded.astype("<u4"), call.embeds.astype("<f4")]
        if step % CHECK_EVERY == 0:
            flags |= CHECKED
            parts.append(np.array([self.checksum(call)], "<u4"))
        self._rows, self._next[row] = row.copy(), start + q
        return b"".join([_HEAD.pack(step, flags, n), *(part.tobytes() for part in parts)])

    def decode(self, data: bytes) -> tuple[int, StepCall]:
        """The number of a step, and its call. Raises Astray."""
        read = _Reader(data, _HEAD.size)
        step, flags, n = _HEAD.unpack_from(data)
        row = self._rows if flags & SAME_ROWS else read.some(n, self._places)
        start = self._next[row].copy()
        if not flags & NEXT:
            read.exceptions(start)
        q = np.ones(n, np.int32)
        if not flags & ONE_EACH:
            read.exceptions(q)
        self._grow(read, row, start + q)
        if flags & ALL_LAST:
            last = (np.cumsum(q) - 1).astype(np.int32)
        elif flags & SOME_LAST:
            chosen = np.unpackbits(read.some(-(-n // 8), np.dtype("u1"), np.uint8), count=n)
            last = (np.cumsum(q) - 1)[chosen > 0].astype(np.int32)
        else:
            last = read.some(int(read.some(1, "<u4")[0]), "<u4")
        tok = read.some(int(q.sum()), "<u2" if flags & SHORT_IDS else "<u4")
        call = StepCall(tok, row, start, q, self._table[row], last)
        if flags & PADDED:
            call.shape = StepShape(*read.some(len(StepShape._fields), "<u4").tolist())
        if flags & EMBEDDED:
            k, width = read.some(2, "<u4").tolist()
            call.embedded, call.embeds = read.some(k, "<u4"), read.some(k * width, "<f4", np.float32).reshape(k, width)
        if flags & CHECKED and int(read.some(1, "<u4", np.uint32)[0]) != self.checksum(call):
            raise Astray(f"The tables of step {step} are not those of rank 0.")
        self._rows, self._next[row] = row, start + q
        return step, call

    # ---- blocks: most rows that get some get one, their last -----------------------------------

    def _grown(self, row: Ints, end: Ints, table: Ints) -> list[Ints]:
        need = -(-end // self._size)
        width = int(need.max())
        new = (table[:, :width] != self._table[row, :width]) & (np.arange(width) < need[:, None])
        changed = new.any(axis=1)
        one = new[np.arange(len(row)), need - 1] & (new.sum(axis=1) == 1)
        parts = [np.packbits(one), table[one, need[one] - 1].astype(self._blocks)]
        others = np.flatnonzero(changed & ~one)
        parts.append(np.array([len(others)], "<u2"))
        for i in others.tolist():
            first = int(new[i].argmax())
            parts.append(np.array([i, first], "<u4"))
            parts.append(table[i, first : need[i]].astype(self._blocks))
        for i in np.flatnonzero(changed).tolist():
            self._table[row[i], : need[i]] = table[i, : need[i]]
        return parts

    def _grow(self, read: _Reader, row: Ints, end: Ints) -> None:
        need, n = -(-end // self._size), len(row)
        one = np.flatnonzero(np.unpackbits(read.some(-(-n // 8), np.dtype("u1"), np.uint8), count=n))
        self._table[row[one], need[one] - 1] = read.some(len(one), self._blocks)
        for _ in range(int(read.some(1, "<u2")[0])):
            i, first = read.some(2, "<u4").tolist()
            self._table[row[i], first : need[i]] = read.some(int(need[i]) - first, self._blocks)

    def checksum(self, call: StepCall) -> int:
        """Of all that a step is made of."""
        found = zlib.crc32(
            np.concatenate([call.row, call.start, call.q, call.last, call.tok]).astype(np.int32).tobytes()
        )
        for i, need in enumerate((-(-(call.start + call.q) // self._size)).tolist()):
            found = zlib.crc32(np.ascontiguousarray(call.table[i, :need], np.int32).tobytes(), found)
        return found


class _Reader:
    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at

    def some(self, n: int, stored: Any, dtype: Any = np.int32) -> Ints:
        found = np.frombuffer(self._data, stored, n, self._at).astype(dtype)
        self._at += n * np.dtype(stored).itemsize
        return found

    def exceptions(self, usual: Ints) -> None:
        pairs = self.some(2 * int(self.some(1, "<u2")[0]), "<u4").reshape(2, -1)
        usual[pairs[0]] = pairs[1]


def _exceptions(found: Ints, usual: Ints) -> Ints:
    """How many differ, where, and what they are."""
    at = np.flatnonzero(found != usual)
    return np.concatenate(
        [np.array([len(at)], "<u2").view("u1"), np.concatenate([at, found[at]]).astype("<u4").view("u1")]
    )
