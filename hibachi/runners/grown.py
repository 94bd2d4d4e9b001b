"""What level 0 showed its model last, kept where the model computes: the next step adds a token to it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hibachi.errors import text_of
from hibachi.plan.sequence import Seq
from hibachi.runners.faults import drop_frames
from hibachi.runners.tokentable import Kind
from hibachi.tensor.array_backend import Array, ArrayBackend, HostArray

log: logging.Logger = logging.getLogger("hibachi.engine")
WORTH = 2**16  # bytes of a call from which on rooms are kept: less is copied as fast
LEAST_ROOM = 16  # tokens
MOST_CAUSES = 8  # of an error, which are looked at


class Shown(NamedTuple):
    """tokens: [B, S + 1, *tok], of our own: what a call was shown and what it returned. lengths [B]: before that."""

    tokens: Array
    lengths: Any


class Grown:
    """Spares copies from the host, where the device has memory of its own and calls of any width.

    The host keeps all tokens as well, for stop tokens, and for rows that come, go or compute again. Memory: that of the
    inputs of one step, as long as the engine lives.
    """

    def __init__(self, backend: ArrayBackend, *, useful: bool) -> None:
        """useful: the model's outputs are its tokens."""
        self._backend = backend
        self.useful: bool = useful and backend.asynchronous and not backend.shapes.compiled
        self._last: dict[tuple[int, ...], Shown] = {}  # by who shared the call
        self._now: dict[tuple[int, ...], Shown] = {}

    def begin(self) -> None:
        """A step begins: what is older than the last one is dropped."""
        self._last, self._now = self._now, {}

    def clear(self) -> None:
        """The device lost what it held, or other requests have the same numbers."""
        self._last, self._now = {}, {}

    def tokens(self, seqs: list[Seq], lengths: Any, width: int) -> Array | None:
        """[B, width, *tok], padded on the left, to be read only. None means the host must put them together.

        seqs: of the first rows; the others are fill. lengths [B]: with the new token.
        """
        last = self._last.get(_key(seqs))
        if last is None or len(last.lengths) != len(lengths) or (lengths != last.lengths + 1).any():
            return None
        extra = int(last.tokens.shape[1]) - width
        if extra < 0:  # wider rows would need padding
            return None
        return last.tokens[:, extra:, ...] if extra else last.tokens

    def keep(self, seqs: list[Seq], shown: Array, out: Array, lengths: Any) -> None:
        """The model has answered. shown [B, S, *tok]: a copy that it had no access to; out: [B, *tok]."""
        if self.useful and out.dtype == shown.dtype:
            tokens = self._backend.cat([shown, self._backend.unsqueeze(out, 1)], 1)
            self._now[_key(seqs)] = Shown(tokens, lengths)


class Room:
    """The tokens of the rows of one call, on the host, with room on their right to grow into.

    A place that a model has been shown is never written to again, so that it may keep what it gets.
    """

    lengths: Any

    def __init__(self, shape: tuple[int, ...], dtype: Any, lengths: Any, most: int) -> None:
        """shape: [B, S, *tok], of tokens that are padded on the left, for the caller to write into `tokens`.
        lengths [B]: of them without padding. most: tokens that may still be added."""
        self.lengths = lengths
        self._end = shape[1]  # columns that are in use
        self._make(shape, dtype, most)

    @property
    def tokens(self) -> HostArray:
        """[B, S, *tok]"""
        return self._array[:, : self._end]

    def add(self, tokens: HostArray, most: int) -> None:
        """One more token [B, *tok] for each row."""
        if self._end == self._array.shape[1]:
            full = self._array
            self._make(full.shape, full.dtype, most)
            self._array[:, : self._end] = full
        self._array[:, self._end] = tokens
        self._end += 1
        self.lengths = self.lengths + 1

    def view(self, width: int) -> HostArray | None:
        """[B, width, *tok], which nobody can write to. None means so much padding is not there."""
        start = self._end - width
        return None if start < 0 else self._seen[:, start : self._end]

    def _make(self, shape: tuple[int, ...], dtype: Any, most: int) -> None:
        rows, used, *tok = shape
        self._array: HostArray = np.empty((rows, used + min(max(used, LEAST_ROOM), most), *tok), dtype)
        # Through a read-only buffer: the flag of a mere view could be set again by whoever has it.
        seen = np.frombuffer(self._array.reshape(-1).view(np.uint8).data.toreadonly(), dtype)
        self._seen: HostArray = seen.reshape(self._array.shape)


class Rooms:
    """Spares copies on the host: a call of the rows of the last step is shown a view of what that step was shown.

    Views cannot be written to, and rows of them do not follow one another in memory. Not every model can do with that:
    its first call is made with an array in one piece, and again with one that lies in memory as a view does, both its
    own. If it writes into one, or gives other bits with the second, or fails, it gets arrays of its own for good, as it
    does once a view raises an error.
    Memory: at most twice the inputs of the last step, and while one runs of two; of a call, until one of its rows has
    ended.
    """

    def __init__(self, backend: ArrayBackend, name: str, *, useful: bool) -> None:
        """name: of the model's method. useful: the model's outputs are its tokens."""
        self._backend, self._name = backend, name
        host = useful and not backend.asynchronous and not backend.shapes.compiled
        self.useful: bool = host and backend.owns(np.empty(1))
        self._tried = set[bool]()  # views that were: are they contiguous?
        self._last: dict[tuple[int, ...], Room] = {}  # by who shared the call
        self._now: dict[tuple[int, ...], Room] = {}

    def begin(self) -> None:
        """A step begins: what is older than the last one is dropped."""
        if self._last or self._now:
            self._last, self._now = self._now, {}

    def end(self) -> None:
        """It is over: what it did not go on with is dropped."""
        self._last = {}

    def clear(self) -> None:
        """Other requests have the same numbers."""
        self._last, self._now = {}, {}

    def tokens(
        self,
        seqs: list[Seq],
        lengths: Any,
        width: int,
        kind: Kind,
        newest: Callable[[], HostArray],
        fill: Callable[[HostArray], object],
    ) -> HostArray:
        """[B, width, *tok], padded on the left, to be read only. lengths [B]: with the new token.

        seqs: of the first rows; the others are fill. newest: the last tokens [B, *tok]. fill: writes all tokens.
        """
        key, most = _key(seqs), max(0, max(seq.end for seq in seqs) - int(lengths.max()))
        room = self._last.get(key)
        if room is not None and len(room.lengths) == len(lengths):
            if (lengths == room.lengths + 1).all():
                room.add(newest(), most + 1)
            if (lengths == room.lengths).all() and (view := room.view(width)) is not None:
                self._now[key] = room
                return view
        room = self._now[key] = Room((len(lengths), width, *kind.shape), kind.dtype, lengths, most)
        fill(room.tokens)
        view = room.view(width)
        assert view is not None
        return view

    def ended(self, seqs: list[Seq], over: Any) -> None:
        """The model has answered. over: bool [n], whose requests end with it: these rows share no call again."""
        if over.any():
            self._now.pop(_key(seqs), None)

    def ask(self, view: HostArray, call: Callable[[HostArray], Any]) -> Any:
        """`call` of the tokens [B, S, *tok]; of a copy of them, where the model cannot do with a view."""
        contiguous = view.flags.c_contiguous
        if contiguous not in self._tried:
            own = view.copy()
            out = call(own)
            if self._backend.owns(out) and self._backend.unfit(out) is None:
                self._tried.add(contiguous)
                out = self._backend.copy(out)  # the next call may write its output there
                if not (self._agrees(out, view, call) and _equal(own, view)):  # it may write into a former input, too
                    self._give_up()
            return out
        try:
            return call(view)
        except Exception as e:
            if not wants_own(e):
                raise
        out = call(view.copy())
        self._give_up()
        return out

    def _agrees(self, out: Array, view: HostArray, call: Callable[[HostArray], Any]) -> bool:
        """Does `call` of these tokens, as they lie in the view, give the same bits and leave them as they are?"""
        apart = _apart(view)
        try:
            again = call(apart)
        except BaseException as e:  # no signal comes to this thread
            drop_frames(e)
            return False
        return self._backend.owns(again) and again.dtype == out.dtype and _equal(again, out) and _equal(apart, view)

    def _give_up(self) -> None:
        why = "it writes into them, or needs them in one piece"
        log.info("%s gets a copy of all tokens in each step: %s", self._name, why)
        self.useful = False
        self.clear()


_NEEDS_OWN = re.compile(r"read-?only|write?able|contiguous", re.IGNORECASE)


def wants_own(error: BaseException | None) -> bool:
    """Is it, or what it came from, the error of who writes into a view, or needs it in one piece?"""
    for _ in range(MOST_CAUSES):
        if error is None:
            break
        if _NEEDS_OWN.search(text_of(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _apart(view: HostArray) -> HostArray:
    """A copy [B, S, *tok] that may be written to; rows follow one another in memory only if those of `view` do."""
    rows, width, *tok = view.shape
    columns = width + (not view.flags.c_contiguous)
    size = view[0, 0].nbytes
    # What lies between is like no token, so that who reads it is found out.
    array = np.full(rows * columns * size, 0xA5, np.uint8).view(view.dtype).reshape(rows, columns, *tok)
    array[:, :width] = view
    return array[:, :width]


def _equal(a: HostArray, b: HostArray) -> bool:
    """In every bit."""
    if a.shape != b.shape:
        return False
    if a.dtype.itemsize in (1, 2, 4, 8):  # without copies of them
        bits = f"u{a.dtype.itemsize}"
        return bool((a.view(bits) == b.view(bits)).all())
    return a.tobytes() == b.tobytes()


def _key(seqs: list[Seq]) -> tuple[int, ...]:
    return tuple(seq.number for seq in seqs)
