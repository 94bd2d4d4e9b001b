"""The host's table of tokens, and the history of each request."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from hibachi.backend.array_backend import HostArray
from hibachi.engine.speculation.config import MOST

SIDE_BY_SIDE = 64, 1024  # the newest tokens of each row in the table: at least and at most so many, powers of two,
TABLE_BYTES = 2**22  # and between the two as many as take no more than this


def misfits(values: HostArray, cast: HostArray) -> list[tuple[int, Any]]:
    """(row, first value) of the rows of `values` [n, ...] that another dtype could not hold, as `cast` shows.

    Integers must be equal; floats are rounded, but may not become infinite.
    """
    if np.can_cast(values.dtype, cast.dtype, "safe"):
        return []
    lost = np.isfinite(values) & ~np.isfinite(cast) if cast.dtype.kind == "f" else values != cast
    lost = lost.reshape(len(values), -1)
    return [(i, values.reshape(lost.shape)[i, lost[i].argmax()]) for i in np.flatnonzero(lost.any(axis=1)).tolist()]


class TokenHistory:
    """Tokens of a request, from its first: [length, *tok] on the host, in pieces that are never written to."""

    length: int

    __slots__ = ("__weakref__", "_pieces", "length")

    def __init__(self, first: HostArray) -> None:
        self._pieces, self.length = [first], len(first)

    def append(self, piece: HostArray) -> None:
        self._pieces.append(piece)
        self.length += len(piece)

    def give(self, position: int, tokens: HostArray) -> None:
        """Put tokens in the place of the last one, which was at this position."""
        assert position == self.length - 1
        self._pieces[-1:] = [self._pieces[-1][:-1], tokens]
        self.length = position + len(tokens)

    def read(self, start: int, end: int) -> HostArray:
        """Tokens `start` to `end` - 1, read-only."""
        if end <= len(self._pieces[0]):
            return self._pieces[0][start:end]
        out = np.empty((end - start, *self._pieces[0].shape[1:]), self._pieces[0].dtype)
        self.copy(start, out)
        return out

    def copy(self, start: int, out: HostArray) -> None:
        """Overwrite `out` with the tokens from `start` on."""
        end, at = start + len(out), 0
        for piece in self._pieces:
            first, last = max(start - at, 0), min(end - at, len(piece))
            if first < last:
                out[at + first - start : at + last - start] = piece[first:last]
            at += len(piece)


def within(counts: Any) -> Any:
    """0 to counts[i] - 1 for each row i, one row after another: which of its row's tokens each is."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


class TokenKind(NamedTuple):
    """Shape and dtype of the tokens of a request. Requests of different kinds never share a call."""

    shape: tuple[int, ...]
    dtype: Any  # NumPy's, of what the host keeps; of a backend that has the nine operations only, the library's name

    @property
    def nbytes(self) -> int:
        """Bytes of a token on the host."""
        size: int = self.dtype.itemsize
        return size * math.prod(self.shape)

    def key(self, raw: bytes) -> Hashable:
        """What tells the tokens of a block, as bytes, from those of other blocks of any kind."""
        return raw if self is IDS else (raw, self)

    def block_keys(self, prompt: HostArray, block_size: int) -> list[Hashable]:
        """The key of each full block of a prompt [n, *tok]."""
        size, raw = block_size * prompt[:1].nbytes, prompt.tobytes()
        return [self.key(raw[at : at + size]) for at in range(0, len(raw) - size + 1, size)] if size else []


IDS = TokenKind((), np.dtype(np.int32))
"""Of token ids: where the engine samples."""


class Tables:
    """The tokens of all running rows on the host, in a table for each kind of token."""

    def __init__(self, rows: int, kind: TokenKind | None = None) -> None:
        """rows: the most there may be at once. kind: of all requests; None means each has its own."""
        self.rows = rows
        self._kinds = [kind] * rows
        self._tables: dict[TokenKind, TokenTable] = {}
        self._at: list[TokenTable | None] = [None if kind is None else self.of(kind)] * rows

    @property
    def several(self) -> bool:
        """Whether rows may be of several kinds."""
        return len(self._tables) > 1

    def of(self, kind: TokenKind) -> TokenTable:
        if (found := self._tables.get(kind)) is None:
            found = self._tables[kind] = TokenTable(self.rows, *kind)
        return found

    def at(self, row: int) -> TokenTable:
        """The table that a row's tokens are in."""
        found = self._at[row]
        assert found is not None
        return found

    def fill(self, row: int, kind: TokenKind, history: TokenHistory) -> None:
        """`TokenTable.fill`. Tables of kinds that no row has any more are dropped."""
        if self._kinds[row] != kind:
            self._kinds[row] = kind
            self._tables = {k: t for k, t in self._tables.items() if k in self._kinds}
            self._at[row] = self.of(kind)
        self.at(row).fill(row, history)


class TokenTable:
    """The tokens of all running rows, on the host: fed to the model, and compared with stop tokens.

    The newest tokens of each row lie side by side in `values`, where a step reads and writes those of all rows at once.
    The older tokens of a long row are in the history of its request, which is freed with the request: the table never
    grows.
    """

    width: int

    def __init__(self, rows: int, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape = shape
        (least, most), size = SIDE_BY_SIDE, rows * max(1, np.dtype(dtype).itemsize * math.prod(shape))
        self.width = least
        while self.width < most and 2 * self.width * size <= TABLE_BYTES:
            self.width *= 2
        # One more, for a token that the device is still computing; for ids, as many more as may be proposed.
        self.values: HostArray = np.zeros((rows, self.width + 1 + (0 if shape else MOST), *shape), dtype)
        self._before = np.zeros(rows, np.intp)  # tokens of each row before those in `values`
        self._histories: list[ref[TokenHistory] | None] = [None] * rows
        self._long = False  # a row has tokens that are not in `values`

    def fill(self, row: int, history: TokenHistory) -> None:
        """Give a row to another request; its tokens so far are its history, which the caller keeps."""
        n = history.length
        if n <= self.width:
            history.copy(0, self.values[row, :n])
        self._before[row] = 0 if n <= self.width else n
        self._histories[row] = ref(history)
        self._long = bool(self._before.any())

    def leave(self, row: int, history: TokenHistory, length: int) -> None:
        """The request loses its row: append to its history what it lacks of its first `length` tokens."""
        if history.length < length:
            history.append(self.read(row, history.length, length).copy())

    def read(self, row: int, start: int, end: int) -> HostArray:
        """Tokens `start` to `end` - 1 of a row, read-only."""
        before = int(self._before[row])
        if start >= before:
            return self.values[row, start - before : end - before]
        out = np.empty((end - start, *self.shape), self.values.dtype)
        self._copy(row, start, out)
        return out

    def packed(self, rows: Any, start: Any, n: Any, of: Any, positions: Any) -> HostArray:
        """The tokens of a step, [T, *tok]: of each of `rows` the `n` tokens from `start` on.

        of, positions [T]: for each token, the index of its row in `rows`, and its position, which may be one beyond the
        last token.
        """
        row = rows[of]
        if not self._long:
            newest: HostArray = self.values[row, positions]
            return newest
        at = positions - self._before[row]
        tokens: HostArray = self.values[row, np.maximum(at, 0)]
        if np.count_nonzero(at < 0):
            first, older = np.cumsum(n) - n, np.minimum(self._before[rows] - start, n)
            for i in np.flatnonzero(older > 0).tolist():
                self._copy(int(rows[i]), int(start[i]), tokens[first[i] : first[i] + older[i]])
        return tokens

    def window(self, rows: Any, lengths: Any, width: int, out: HostArray | None = None) -> HostArray:
        """The first `lengths` tokens of each of `rows`, right-aligned in [n, width, *tok]; the content left of them is
        arbitrary.

        out: the array to write to; None means a new one.
        """
        if out is None and width <= self.width and not (self._long and self._before[rows].any()):
            newest: HostArray = self.values[rows, :width]
            for i in np.flatnonzero(lengths != width).tolist():
                newest[i, width - lengths[i] :] = self.values[rows[i], : lengths[i]]
            return newest
        if out is None:
            out = np.zeros((len(rows), width, *self.shape), self.values.dtype)
        for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            self._copy(row, 0, out[i, width - length :])
        return out

    def write(self, rows: Any, positions: Any, tokens: HostArray) -> None:
        """Write new tokens [m, *tok] for `rows` [m], each at its position, which is one beyond its last.

        A row that is named several times gets its tokens one after another.
        """
        if not len(rows):
            return
        at = positions - self._before[rows] if self._long else positions
        if np.count_nonzero(at >= self.width):
            if len(rows) > 1 and np.count_nonzero(rows[1:] == rows[:-1]):  # only the first of a row may shift it
                again = np.concatenate([[False], rows[1:] == rows[:-1]])
                self.write(rows[~again], positions[~again], tokens[~again])
                self.write(rows[again], positions[again], tokens[again])
                return
            at = at.copy()
            for i in np.flatnonzero(at >= self.width).tolist():
                self._shift(int(rows[i]))
                at[i] = 0
        self.values[rows, at] = tokens

    def give(self, row: int, position: int, tokens: HostArray) -> None:
        """Write the tokens [m, *tok] of a row from a position on, that of its newest one at the earliest."""
        for i in range(0, len(tokens), SIDE_BY_SIDE[0]):
            part = tokens[i : i + SIDE_BY_SIDE[0]]
            self.write(np.full(len(part), row), position + i + np.arange(len(part)), part)

    def write_ahead(self, rows: Any, positions: Any, tokens: HostArray) -> None:
        """Write ids [m] that may come, behind the last ones: at most `MOST` of a row. They are read until `write` gives
        others to these positions, and no history gets them.
        """
        self.values[rows, positions - self._before[rows]] = tokens

    def _shift(self, row: int) -> None:
        """Move the tokens of a row from `values` to its history."""
        history, before = self._history(row), int(self._before[row])
        if (known := history.length - before) < self.width:
            history.append(self.values[row, known : self.width].copy())
        self._before[row] = before + self.width
        self._long = True

    def _copy(self, row: int, start: int, out: HostArray) -> None:
        """Overwrite `out` with the tokens of a row from `start` on."""
        before = int(self._before[row])
        older = min(max(before - start, 0), len(out))
        if older:
            self._history(row).copy(start, out[:older])
        at = start + older - before
        out[older:] = self.values[row, at : at + len(out) - older]

    def _history(self, row: int) -> TokenHistory:
        found = self._histories[row]
        history = None if found is None else found()
        assert history is not None, "the request of this row has gone"
        return history
