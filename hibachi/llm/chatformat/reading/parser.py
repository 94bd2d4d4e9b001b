"""What the text of a model holds, as it comes: reasoning, what is said, calls of tools."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from hibachi.llm.chatformat.format import (
    CallArguments,
    ChatFormat,
    Event,
    Reasoned,
    Said,
    Thinking,
)
from hibachi.llm.chatformat.reading.calls import BegunCall, CallReader
from hibachi.llm.chatformat.reading.pieces import EventPieces, Line
from hibachi.llm.chatformat.reading.slots import BLANKS, NO, WAIT, held, skip
from hibachi.llm.chatformat.reading.values import ArgumentsReader
from hibachi.llm.chatformat.tools import Toolbox

MOST_BLANKS: Final = 4096
"""Blanks that are held back at a time, as a marker may follow, before which they are left out."""

_ELEMENT: Final = re.compile(r"</?\w+>")


class Parser:
    """Reads one answer. Text cut anywhere gives the same events, up to joining neighbours.

    Only text that may be the beginning of a marker is held back: a few thousand characters at most. What begins like a
    call and is none is said as it came. Reasoning that comes after other reasoning begins with a new line, and so does
    what is said after reasoning if something was said before. Around calls blanks with a line break are left out, and
    a new line parts what is said before and behind; what has none is said as it came. Arguments that are not what the
    format says are given on as they came, and their call ends incomplete. No text raises anything.
    """

    def __init__(self, format: ChatFormat, toolbox: Toolbox, thinking: Thinking) -> None:
        wanted = toolbox.tools and toolbox.mode != "none"
        self._calls = CallReader(format.tools, toolbox) if wanted and format.tools is not None else None
        self._lines = format.tools is not None and "\n" in format.tools.between  # each call stands on its own
        self._mark = format.tools.marker.strip() if format.tools is not None else ""
        thinks = None if thinking is Thinking.NONE else format.reasoning
        self._think = thinks.begin.strip() if thinks is not None else ""
        self._thought = thinks.end.strip() if thinks is not None else ""
        self._before_said = format.before_said.strip()
        self._blanks = format.before_said[len(format.before_said.rstrip()) :]  # behind it, which are part of it
        silent = sorted(filter(None, {text.strip() for text in format.silent}), key=len, reverse=True)
        self._silent = frozenset(silent)
        self._marks = (*(self._calls.markers if self._calls is not None else ()), *silent)  # that are looked for
        self._search = re.compile("|".join(map(re.escape, sorted(self._marks, key=len, reverse=True)))).search
        self._suspect = re.compile("|".join({re.escape(mark[0]) for mark in self._marks})).search
        self._begins = tuple(filter(None, (self._think, self._thought, self._before_said, *self._marks)))

        self._text, self._at = "", 0  # what has come, and how much of it is read
        self._before = 0  # characters that came before it
        self._prompted = 0  # where the part of the text ends that the prompt has written
        self._last = self._cut = False  # no more text comes; as the limit of tokens was reached
        self._out = EventPieces()
        self._begun: BegunCall | None = None  # the call that is read
        self._arguments: ArgumentsReader | None = None  # of it
        self._open = False  # it has begun and not ended
        self._drop = False  # blanks before what is said are left out
        self._gap = ""  # blanks that were left out in front of a silent text, which are said if a call follows
        self._line = Line()  # that is said
        self._passed = False  # nothing but blanks came since a marker that was quoted
        self._broken = False  # a line break was among those that were left out since something was said
        self._fresh = True  # no reasoning but blanks has come since its marker
        self._state: Callable[[], bool] = self._start
        if thinking is Thinking.OPEN and self._thought:
            self._state = self._reason
        elif self._begins or self._calls is not None:
            self._text = format.prompted
            self._prompted = len(format.prompted)
            self._before = -self._prompted
        else:
            self._state = self._say_all

    @property
    def all_said(self) -> bool:
        """Whether all text from now on is said."""
        return self._state == self._say_all

    @property
    def reasoning(self) -> bool:
        """Whether the text is in the reasoning now."""
        return self._state == self._reason

    @property
    def may_reason(self) -> bool:
        """Whether the text is in the reasoning, or some may still come."""
        return self._state == self._reason or (bool(self._think) and not self.all_said)

    @property
    def holds(self) -> bool:
        """Whether text is held back, the prompt's included."""
        return bool(self._text)

    def plain(self, text: str) -> type[Said | Reasoned] | None:
        """What all of the next text surely is; most of the time that is quickly seen. None: it may be anything."""
        if self._text or not text:
            return None
        if self.all_said:
            return Said
        kind = Said if self._state == self._speak else Reasoned if self.reasoning else None
        if kind not in self._out.given or kind in self._out.apart or text[-1] in BLANKS:
            return None
        suspect = self._suspect(text) if kind is Said else self._thought[0] in text
        return None if suspect else kind

    def feed(self, text: str) -> list[Event]:
        """What more text gives."""
        if not text:
            return []
        if kind := self.plain(text):
            self._before += len(text)
            self._line.add(text)
            return [kind(text)]
        self._text += text
        return self._read()

    def end(self, cut: bool = False) -> list[Event]:
        """What was held back. cut: the limit of tokens ended the answer, so what looks like the beginning of a marker
        is no text that was said.
        """
        if cut and not self._open:
            begun = self._begun_marker(self._text)
            self._text = self._text[: len(self._text) - begun].rstrip(BLANKS) if begun else self._text
        self._last, self._cut = True, cut
        events = self._read()
        self._state = self._say_all
        return events

    def _read(self) -> list[Event]:
        while self._state():
            pass
        self._prompted = max(self._prompted - self._at, 0)
        self._before += self._at
        self._text, self._at = self._text[self._at :], 0
        if self._last and self._open:
            self._end_call(False)
        return self._out.taken()

    def _begun_marker(self, left: str) -> int:
        """How much at the end of what is held back is the beginning of a marker or a call. One letter says too
        little.
        """
        calls = self._calls
        if self.reasoning:
            most = held(left, self._thought)
            return most if most > 1 else 0
        if calls is not None:
            found = self._search(left) if self._marks else None
            after = self._state == self._after
            first = 0 if calls.alone or after else len(left)
            starts = [first, len(left) if found is None else found.start()]
            for at in starts:
                at = skip(left, at)
                ways = (calls.first(left, at), calls.next(left, at), calls.group(left, at))
                if len(left) - at > (not after) and WAIT in ways:
                    return len(left) - at
        most = max((held(left, mark) for mark in self._begins), default=0)
        return most if most > 1 else 0

    # ---- the states: each reads something, or says False, as it needs more text ------------------------------------

    def _start(self) -> bool:
        """At the beginning of the answer, or behind reasoning, calls or a silent text."""
        text = self._text
        at = skip(text, self._at)
        if self._drop:  # but not of a line that goes on behind a call
            self._broken = self._broken or "\n" in text[self._at : at]
            if Said not in self._out.apart or self._broken or (self._last and at == len(text)):
                self._at = at
        if at == len(text) and at - self._at < MOST_BLANKS and not self._last:
            return False
        if at - self._at < MOST_BLANKS:
            begun = self._called(at)
            if isinstance(begun, BegunCall):
                return self._begin_call(begun)
            left = text[at:]
            if not self._last and (
                begun == WAIT or any(mark.startswith(left) and mark != left for mark in self._begins)
            ):
                return False
            for mark in self._begins:
                if text.startswith(mark, at) and (next_state := self._behind_mark(mark)):
                    self._at, self._state = at + len(mark), next_state
                    return True
        if self._drop and not self._broken:  # the line goes on
            self._out.apart.discard(Said)
        self._gap, self._state = "", self._speak
        self._line = Line()
        return True

    def _called(self, at: int) -> BegunCall | int:
        """The call that begins at the beginning."""
        calls = self._calls
        if calls is None or not (calls.alone or self._text.startswith(calls.markers, at)):
            return -1
        found = calls.first(self._text, at)
        return calls.group(self._text, at) if found == NO else found

    def _behind_mark(self, mark: str) -> Callable[[], bool] | None:
        """The state behind a mark that stands at the beginning. Blanks before and behind it are left out."""
        if mark == self._before_said:
            self._drop, self._line = False, Line()
            return self._skip_blanks if self._blanks else self._speak
        if mark == self._think or mark == self._thought or mark in self._silent:
            self._drop = self._fresh = self._broken = True
            self._out.apart |= self._out.given
            return self._reason if mark == self._think else self._start
        return None

    def _skip_blanks(self) -> bool:
        left = self._text[self._at : self._at + len(self._blanks)]
        if left != self._blanks and self._blanks.startswith(left) and not self._last:
            return False
        self._at, self._state = self._at + len(left) * (left == self._blanks), self._speak
        return True

    def _reason(self) -> bool:
        text, think = self._text, self._think
        if self._fresh:
            self._at = skip(text, self._at)
            left, said = text[self._at :], self._before_said
            if not left or (not self._last and any(m.startswith(left) and m != left for m in (think, said))):
                return False
            if think and left.startswith(think):  # again, though the prompt has opened it
                self._at += len(think)
                return True
            if said and left.startswith(said):  # none comes, though the prompt has opened it
                self._state = self._start
                return True
            self._fresh = False
        start = self._at
        end = text.find(self._thought, start)
        stop = self._before_blanks(start, end if end >= 0 else len(text) - self._held(start, (self._thought,)))
        if end < 0 and self._last and "\n" not in text[stop:]:
            stop = len(text)
        self._out.add(Reasoned, text[start:stop])
        self._at = stop
        if end < 0:
            return False
        self._at, self._state, self._drop, self._broken = end + len(self._thought), self._start, True, True
        self._out.apart |= self._out.given
        return True

    def _speak(self) -> bool:
        if not self._marks:
            self._state = self._say_all
            return True
        text, start = self._text, self._at
        found = self._search(text, start)
        at = len(text) - self._held(start, self._marks) if found is None else found.start()
        stop = at if found is None and self._last else self._before_blanks(start, at)
        self._say(start, stop)
        self._at = stop
        if found is None:
            return False
        if self._line.quotes and stop == at and found[0] not in self._silent:
            self._at = at + len(found[0])
            self._say(at, self._at)
            self._passed = True
            return True
        begun = NO if self._passed and found[0] != self._mark else self._called(at)
        if isinstance(begun, BegunCall):
            self._broken = "\n" in text[stop:at]
            if not (self._broken or self._lines):
                self._say(stop, at)
            return self._begin_call(begun)
        if not self._last and (begun == WAIT or self._held(at, self._marks) == len(text) - at):
            return False
        ends = _silent(text, found, self._begins, self._last) if found[0] in self._silent else NO
        if ends == WAIT:
            return False
        if ends != NO:
            self._gap = "" if "\n" in text[stop:at] else text[stop:at]
            self._at, self._state, self._drop, self._broken = found.end(), self._start, True, True
            self._out.apart |= self._out.given
            return True
        self._say(stop, at + 1)
        self._at = at + 1
        return True

    def _say_all(self) -> bool:
        self._say(self._at, len(self._text))
        self._at = len(self._text)
        return False

    def _call(self) -> bool:
        """In the arguments of a call."""
        reader = self._arguments
        if reader is None:
            raise AssertionError("a call has a reader of its arguments")
        self._out.add(CallArguments, reader.feed(self._text[self._at :], self._last and not self._cut))
        self._at = len(self._text)
        if not (reader.done or reader.broken):
            return False
        self._before += len(self._text) - len(reader.rest)
        self._text, self._at, self._prompted = reader.rest, 0, 0
        self._state = self._spoil if reader.broken else self._behind
        return True

    def _behind(self) -> bool:
        """Behind the arguments of a call."""
        calls, begun, reader = self._of_call()
        end = calls.tail(begun.spelling, self._text, self._at)
        closed = end != WAIT or calls.closed(begun.spelling, self._text, self._at) or (self._last and not self._cut)
        if self._open and (end >= 0 or (closed and not reader.closing)):
            self._out.add(CallArguments, reader.closing)
            self._end_call(True)
        if end == WAIT:
            return self._close()
        if end < 0 and self._open:
            self._state = self._spoil
            return True
        self._at = max(end, self._at)
        self._begin_rest()
        return True

    def _spoil(self) -> bool:
        """In arguments that are not what the format says: up to what ends the call, they are given on as they are."""
        calls, begun, _ = self._of_call()
        text, start, stops = self._text, self._at, calls.stops(begun.spelling)
        ends = [at for at in (text.find(stop, start) for stop in stops) if at >= 0]
        self._at = min(ends) if ends else len(text) - self._held(start, stops)
        self._out.add(CallArguments, text[start : self._at])
        if not ends:
            return False
        self._end_call(False)
        self._at = max(calls.tail(begun.spelling, text, self._at), self._at)
        self._begin_rest()
        return True

    def _after(self) -> bool:
        """Behind a call, where another or the end of all may follow."""
        calls, begun, _ = self._of_call()
        following, end = calls.next(self._text, self._at), calls.end(begun.spelling, self._text, self._at)
        if isinstance(following, BegunCall):
            return self._begin_call(following)
        if end == WAIT:
            return self._close()
        if end < 0 and following == WAIT and not self._last:
            return False
        self._at, self._state = max(end, self._at), self._start
        return True

    # ---- what the states use ---------------------------------------------------------------------------------------

    def _close(self) -> bool:
        """Waits for the rest of a text that ends calls; at the end of the answer, that is no loss."""
        if self._last:
            self._at = len(self._text)
        return False

    def _of_call(self) -> tuple[CallReader, BegunCall, ArgumentsReader]:
        if self._calls is None or self._begun is None or self._arguments is None:
            raise AssertionError("a call has a reader of its arguments")
        return self._calls, self._begun, self._arguments

    def _begin_rest(self) -> None:
        self._state = self._after if self._of_call()[1].spelling.grouped else self._start
        self._drop = True

    def _begin_call(self, begun: BegunCall) -> bool:
        if self._calls is None:
            raise AssertionError("calls are read by a format")
        self._begun, self._arguments = begun, self._calls.arguments(begun)
        self._at, self._state, self._drop = begun.end, self._after, True
        if begun.name:  # or else what stands around calls has come, and none of them
            if self._gap:
                self._out.apart.discard(Said)
                self._out.add(Said, self._gap)
            self._out.begin(begun.name, begun.id)
            self._gap, self._state, self._open = "", self._call, True
        return True

    def _end_call(self, complete: bool) -> None:
        self._out.end(complete)
        self._open = False

    def _held(self, start: int, marks: tuple[str, ...]) -> int:
        """How much at the end of the text may be the beginning of one of some marks."""
        if self._last:
            return 0
        return max([held(self._text, mark, start) for mark in marks], default=0)

    def _before_blanks(self, start: int, last: int) -> int:
        """Where the blanks at the end of the text up to `last` begin, but for whole heaps of them."""
        blanks = last - start - len(self._text[start:last].rstrip(BLANKS))
        return last - blanks % MOST_BLANKS

    def _say(self, start: int, stop: int) -> None:
        """Gives a piece of the text, without what the prompt has written."""
        if stop > start:
            self._drop = False
            self._line.add(self._text[start:stop])
            self._passed = self._passed and self._text[start:stop].isspace()
        self._out.add(Said, self._text[max(start, self._prompted) : stop])


def _silent(text: str, found: re.Match[str], begins: tuple[str, ...], last: bool) -> int:
    """Whether a silent text within what is said is one: where it is written as an element of XML, which might be said,
    only the end of the answer or another of the texts `begins` comes behind it. NO, WAIT, or where it ends.
    """
    end = found.end()
    if not _ELEMENT.fullmatch(found[0]):
        return end
    left = text[skip(text, end) :]
    if left.startswith(begins) or (last and not left):
        return end
    return WAIT if not last and any(mark.startswith(left) for mark in begins) else NO
