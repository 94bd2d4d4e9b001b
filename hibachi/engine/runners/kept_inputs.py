"""The inputs that level 0 showed its model last, kept where the model computes: the next step adds a token to them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.engine.runners.calls import drop_frames
from hibachi.engine.runners.tokentable import TokenKind
from hibachi.engine.scheduler.sequence import Seq
from hibachi.errors import text_of

log: logging.Logger = logging.getLogger("hibachi.engine")
WORTH = 2**16  # bytes of a call from which on rooms are kept: less is copied as fast
LEAST_ROOM = 16  # tokens
MOST_CAUSES = 8  # characters of an error that are looked at


class ShownInputs(NamedTuple):
    """The tokens of a call and its result: [B, S + 1, *tok], in our own memory. lengths [B]: before the call."""

    tokens: Array
    lengths: Any


class Grown:
    """Saves copies from the host, where the device has its own memory and takes calls of any width.

    The host keeps all tokens as well, for stop tokens, and for rows that join, leave or compute again. Memory: the
    inputs of one step, as long as the engine lives.
    """

    def __init__(self, backend: ArrayBackend, *, useful: bool) -> None:
        """useful: the model's outputs are its tokens."""
        self._backend = backend
        self.useful: bool = useful and backend.asynchronous and not backend.shapes.compiled
        self._last: dict[tuple[int, ...], ShownInputs] = {}  # by who shared the call
        self._now: dict[tuple[int, ...], ShownInputs] = {}

    def begin(self) -> None:
        """Begin a step: inputs older than the last step are dropped."""
        self._last, self._now = self._now, {}

    def clear(self) -> None:
        """Drop everything: the device lost its memory, or other requests have the same numbers."""
        self._last, self._now = {}, {}

    def tokens(self, seqs: list[Seq], lengths: Any, width: int) -> Array | None:
        """The tokens [B, width, *tok], padded on the left, read-only. None means the host must assemble them.

        seqs: of the first rows; the others are filler. lengths [B]: with the new token.
        """
        last = self._last.get(_key(seqs))
        if last is None or len(last.lengths) != len(lengths) or (lengths != last.lengths + 1).any():
            return None
        extra = int(last.tokens.shape[1]) - width
        if extra < 0:  # wider rows would need padding
            return None
        return last.tokens[:, extra:, ...] if extra else last.tokens

    def keep(self, seqs: list[Seq], shown: Array, out: Array, lengths: Any) -> None:
        """Keep the inputs of a call and the model's answer. shown [B, S, *tok]: a copy that the model had no access to;
        out: [B, *tok].
        """
        if out.dtype == shown.dtype:
            tokens = self._backend.cat([shown, self._backend.unsqueeze(out, 1)], 1)
            self._now[_key(seqs)] = ShownInputs(tokens, lengths)


class Room:
    """The tokens of the rows of one call, on the host, with free columns on their right.

    A place that a model has been shown is never written to again, so the model may keep what it gets.
    """

    lengths: Any

    def __init__(self, shape: tuple[int, ...], dtype: Any, lengths: Any, most: int) -> None:
        """shape: [B, S, *tok], of tokens that are padded on the left, for the caller to write into `tokens`.
        lengths [B]: of them without padding. most: tokens that may still be added."""
        self.lengths = lengths
        self._end = shape[1]  # columns that are in use
        self._make(shape, dtype, most)

    @property
    def columns(self) -> int:
        """Of its memory, free ones included."""
        return int(self._array.shape[1])

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
        """[B, width, *tok], read-only. None means there is not that much padding on the left."""
        start = self._end - width
        return None if start < 0 else self._seen[:, start : self._end]

    def _make(self, shape: tuple[int, ...], dtype: Any, most: int) -> None:
        rows, used, *tok = shape
        self._array: HostArray = np.empty((rows, used + min(max(used, LEAST_ROOM), most), *tok), dtype)
        # Through a read-only buffer: the model could set the flag of a mere view again.
        seen = np.frombuffer(self._array.reshape(-1).view(np.uint8).data.toreadonly(), dtype)
        self._seen: HostArray = seen.reshape(self._array.shape)


class Rooms:
    """Saves copies on the host: a call of the rows of the last step is shown a view of what that step was shown.

    Views are read-only, and rows of them do not follow one another in memory. Not every model can work with that. So
    its first call is made twice, with an array in one piece and with one that lies in memory as a view does, both its
    own. If the model writes into one, gives other bits with the second, or fails, it gets arrays of its own for good,
    as it does once a view raises an error. Memory: at most twice the inputs of the last step, and while a step runs of
    two; the memory of a call is kept until one of its rows has ended.
    """

    def __init__(self, backend: ArrayBackend, name: str, *, useful: bool) -> None:
        """name: of the model's method. useful: the model's outputs are its tokens."""
        self._backend, self._name = backend, name
        host = useful and not backend.asynchronous and not backend.shapes.compiled
        self.useful: bool = host and backend.owns(np.empty(1))
        self._tried = set[bool]()  # views that were: are they contiguous?
        self._last: dict[tuple[int, ...], Room] = {}  # by who shared the call
        self._now: dict[tuple[int, ...], Room] = {}

    def __len__(self) -> int:
        """Calls whose inputs are kept."""
        return len(self._last) + len(self._now)

    def begin(self) -> None:
        """Begin a step: inputs older than the last step are dropped."""
        if self._last or self._now:
            self._last, self._now = self._now, {}

    def end(self) -> None:
        """End a step: inputs that it did not use are dropped."""
        self._last = {}

    def clear(self) -> None:
        """Drop everything: other requests have the same numbers."""
        self._last, self._now = {}, {}

    def tokens(
        self,
        seqs: list[Seq],
        lengths: Any,
        width: int,
        kind: TokenKind,
        newest: Callable[[], HostArray],
        fill: Callable[[HostArray], object],
    ) -> HostArray:
        """The tokens [B, width, *tok], padded on the left, read-only. lengths [B]: with the new token.

        seqs: of the first rows; the others are filler. newest: the last tokens [B, *tok]. fill: writes all tokens.
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
        """The model has answered. over: bool [n], which requests end with it: these rows share no call again."""
        if over.any():
            self._now.pop(_key(seqs), None)

    def ask(self, view: HostArray, call: Callable[[HostArray], Any]) -> Any:
        """Call the model with the tokens [B, S, *tok], or with a copy of them where it cannot work with a view."""
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
        """Whether the call gives the same bits for these tokens in a view's memory layout, and leaves them
        unchanged.
        """
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
    """Whether an error, or its cause, says that the model writes into a view or needs it in one piece."""
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
    # The memory between rows differs from every token, so that a model that reads it is found out.
    array = np.full(rows * columns * size, 0xA5, np.uint8).view(view.dtype).reshape(rows, columns, *tok)
    array[:, :width] = view
    return array[:, :width]


def _equal(a: HostArray, b: HostArray) -> bool:
    """Whether two arrays agree in every bit."""
    if a.shape != b.shape:
        return False
    if a.dtype.itemsize in (1, 2, 4, 8):  # without copies of them
        bits = f"u{a.dtype.itemsize}"
        return bool((a.view(bits) == b.view(bits)).all())
    return a.tobytes() == b.tobytes()


def _key(seqs: list[Seq]) -> tuple[int, ...]:
    return tuple(seq.number for seq in seqs)
