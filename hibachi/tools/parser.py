"""What the text of a model holds, as it comes: reasoning, what is said, calls of tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hibachi.tools.fit import BLANKS, WAIT, Fit, held, skip
from hibachi.tools.format import (
    CallArguments,
    CallBegun,
    CallEnded,
    ChatFormat,
    Event,
    Reasoned,
    Said,
    Thinking,
)
from hibachi.tools.reader import CallReader
from hibachi.tools.tools import Toolbox
from hibachi.tools.values import Arguments

MOST_BLANKS: Final = 4096
"""Blanks that are held back at a time, as a marker may follow, before which they are left out."""


class Parser:
    """Reads one answer. Text cut anywhere gives the same events, up to joining neighbours.

    Only text that may be the beginning of a marker is held back: a few thousand characters at most. What begins like a
    call and is none is said as it came. Arguments that are not what the format says are given on as they came, and
    their call ends incomplete. No text raises anything.
    """

    def __init__(self, format: ChatFormat, toolbox: Toolbox, thinking: Thinking) -> None:
        wanted = format.tools is not None and toolbox.tools and toolbox.mode != "none"
        self._calls = CallReader(format.tools, toolbox) if wanted and format.tools is not None else None
        thinks = None if thinking is Thinking.NONE else format.reasoning
        self._think = thinks.begin.strip() if thinks is not None else ""
        self._thought = thinks.end.strip() if thinks is not None else ""
        self._before_said = format.before_said.strip()
        self._text, self._at = "", 0  # what has come, and how much of it is read
        self._events: list[Event] = []
        self._joined: list[str] = []  # pieces of one kind, which become one event
        self._kind: type[Said | Reasoned | CallArguments] | None = None  # what kind
        self._count = 0
        self._arguments: Arguments | None = None
        self._open = False  # a call has begun and not ended
        self._drop = False  # blanks before what is said are left out
        self._fresh = True  # no reasoning but blanks has come since its marker
        self._state: Callable[[], bool] = self._start
        if thinking is Thinking.OPEN and self._thought:
            self._state = self._reason
        elif not (self._think or self._thought or self._before_said or self._calls):
            self._state = self._say_all

    @property
    def reasoning(self) -> bool:
        """Whether the text is in the reasoning now."""
        return self._state == self._reason

    def feed(self, text: str) -> list[Event]:
        """What more text gives."""
        if self._state == self._say_all and not self._text:
            return [Said(text)] if text else []
        self._text, self._at = self._text[self._at :] + text, 0
        self._run()
        return self._taken()

    def end(self, cut: bool = False) -> list[Event]:
        """What was held back. cut: the limit of tokens ended the answer, so what looks like the beginning of a marker
        is no text that was said.
        """
        left = self._text[self._at :]
        if self._open:
            self._end_call(False)
        elif self._state == self._reason:
            self._reasoned(left[: len(left) - self._partial(left, (self._thought,), cut)].rstrip(BLANKS))
        elif self._state not in (self._behind, self._after) or not (cut or self._closes(left)):
            markers = (self._think, self._before_said, self._calls.marker if self._calls else "")
            begun = self._partial(left, markers, cut)
            kept = left[: len(left) - begun].rstrip(BLANKS) if begun else left
            if kept.strip(BLANKS) or not self._drop:
                self._said(kept.lstrip(BLANKS) if self._drop else kept)
        self._text, self._at, self._state = "", 0, self._say_all
        return self._taken()

    def _partial(self, left: str, markers: tuple[str, ...], cut: bool) -> int:
        """How much at the end of `left` is the beginning of a marker, or of a call. One letter says too little."""
        if not cut:
            return 0
        calls = self._calls
        if calls is not None and self._state != self._reason:
            at = skip(left, 0) if calls.alone else left.find(calls.marker)
            if at >= 0 and len(left) - at > 1 and calls.first(left, at) == WAIT:
                return len(left) - at
        most = max((held(left, marker) for marker in markers), default=0)
        return most if most > 1 else 0

    def _closes(self, left: str) -> bool:
        return self._calls is not None and (not left.strip(BLANKS) or self._calls.end(left, 0) == WAIT)

    # ---- the states: each reads something, or says False, as it needs more text ------------------------------------

    def _run(self) -> None:
        while self._state():
            pass

    def _start(self) -> bool:
        """At the beginning of the answer, or behind reasoning or calls."""
        text, calls = self._text, self._calls
        at = skip(text, self._at)
        if self._drop:
            self._at = at
        if at == len(text) and at - self._at < MOST_BLANKS:
            return False
        wait = False
        if at - self._at < MOST_BLANKS:
            for marker, state in (
                (self._think, self._reason),
                (self._thought, self._start),
                (self._before_said, self._speak),
            ):
                if marker and text.startswith(marker, at):
                    self._at, self._state = at + len(marker), state
                    self._drop, self._fresh = marker != self._before_said, True
                    return True
                wait |= bool(marker) and marker.startswith(text[at:])
            if calls is not None and calls.alone:
                found = calls.first(text, at)
                if isinstance(found, Fit):
                    return self._begin_call(found)
                wait |= found == WAIT
        if wait:
            return False
        self._state = self._speak
        return True

    def _reason(self) -> bool:
        text = self._text
        if self._fresh:
            self._at = skip(text, self._at)
            left = text[self._at : self._at + len(self._think)]
            if self._at == len(text) or (left != self._think and self._think.startswith(left)):
                return False
            if self._think and text.startswith(self._think, self._at):  # again, though the prompt has opened it
                self._at += len(self._think)
                return True
            self._fresh = False
        start = self._at
        end = text.find(self._thought, start)
        last = end if end >= 0 else len(text) - held(text, self._thought, start)
        stop = self._before_blanks(start, last)
        self._reasoned(text[start:stop])
        self._at = stop
        if end < 0:
            return False
        self._at, self._state, self._drop = end + len(self._thought), self._start, True
        return True

    def _speak(self) -> bool:
        calls = self._calls
        if calls is None or calls.alone:
            self._state = self._say_all
            return True
        text, start = self._text, self._at
        found = text.find(calls.marker, start)
        last = found if found >= 0 else len(text) - held(text, calls.marker, start)
        stop = self._before_blanks(start, last)
        if stop > start:
            self._drop = False
            self._said(text[start:stop])
            self._at = stop
        if found < 0:
            return False
        fits = calls.first(text, found)
        if isinstance(fits, Fit):
            return self._begin_call(fits)
        if fits == WAIT:
            return False
        self._said(text[stop : found + 1])
        self._at, self._drop = found + 1, False
        return True

    def _say_all(self) -> bool:
        self._said(self._text[self._at :])
        self._at = len(self._text)
        return False

    def _call(self) -> bool:
        """In the arguments of a call."""
        reader = self._arguments
        if reader is None:
            raise AssertionError("a call has a reader of its arguments")
        self._argued(reader.feed(self._text[self._at :]))
        self._at = len(self._text)
        if not (reader.done or reader.broken):
            return False
        self._text, self._at = reader.rest, 0
        if reader.done and not reader.closing:
            self._end_call(True)
        self._state = self._spoil if reader.broken else self._behind
        return True

    def _behind(self) -> bool:
        """Behind the arguments of a call."""
        calls, reader = self._of_call()
        end = calls.tail(self._text, self._at)
        if end == WAIT:
            return False
        if end < 0 and self._open:
            self._state = self._spoil
            return True
        if self._open:
            self._argued(reader.closing)
            self._end_call(True)
        self._at = max(end, self._at)
        self._begin_rest()
        return True

    def _spoil(self) -> bool:
        """In arguments that are not what the format says: up to what ends the call, they are given on as they are."""
        calls, _ = self._of_call()
        text, start = self._text, self._at
        ends = [at for at in (text.find(stop, start) for stop in calls.stops) if at >= 0]
        last = min(ends) if ends else len(text) - max((held(text, stop, start) for stop in calls.stops), default=0)
        self._argued(text[start:last])
        self._at = last
        if not ends:
            return False
        self._end_call(False)
        tail = calls.tail(text, last)
        self._at = max(tail, last)
        self._begin_rest()
        return True

    def _after(self) -> bool:
        """Behind a call, where another or the end of all may follow."""
        calls, _ = self._of_call()
        text = self._text
        following, end = calls.next(text, self._at), calls.end(text, self._at)
        if isinstance(following, Fit):
            return self._begin_call(following)
        if end < 0 and WAIT in (following, end):
            return False
        self._at, self._state = max(end, self._at), self._start
        return True

    # ---- what the states use ---------------------------------------------------------------------------------------

    def _of_call(self) -> tuple[CallReader, Arguments]:
        if self._calls is None or self._arguments is None:
            raise AssertionError("a call has a reader of its arguments")
        return self._calls, self._arguments

    def _begin_rest(self) -> None:
        self._state = self._after if self._calls is not None and self._calls.grouped else self._start
        self._drop = True

    def _before_blanks(self, start: int, last: int) -> int:
        """Where the blanks at the end of the text up to `last` begin, but for whole heaps of them."""
        blanks = last - start - len(self._text[start:last].rstrip(BLANKS))
        return last - blanks % MOST_BLANKS

    def _begin_call(self, found: Fit) -> bool:
        if self._calls is None:
            raise AssertionError("calls are read by a format")
        self._flush()
        self._events.append(CallBegun(self._count, found.name, found.id))
        self._arguments = self._calls.arguments(found.name)
        self._at, self._state, self._open = found.end, self._call, True
        return True

    def _end_call(self, complete: bool) -> None:
        self._flush()
        self._events.append(CallEnded(self._count, complete))
        self._count += 1
        self._open = False

    def _argued(self, text: str) -> None:
        self._add(CallArguments, text)

    def _said(self, text: str) -> None:
        self._add(Said, text)

    def _reasoned(self, text: str) -> None:
        self._add(Reasoned, text)

    def _add(self, kind: type[Said | Reasoned | CallArguments], text: str) -> None:
        if text:
            if kind is not self._kind:
                self._flush()
            self._kind = kind
            self._joined.append(text)

    def _flush(self) -> None:
        kind, text = self._kind, "".join(self._joined)
        if kind is CallArguments:
            self._events.append(CallArguments(self._count, text))
        elif kind is not None:
            self._events.append(Said(text) if kind is Said else Reasoned(text))
        self._kind, self._joined = None, []

    def _taken(self) -> list[Event]:
        self._flush()
        events, self._events = self._events, []
        return events
