"""What a parser gives: events whose pieces are joined, and what their line says of a marker that follows."""

from __future__ import annotations

from typing import Final

from hibachi.llm.chatformat.format import CallArguments, CallBegun, CallEnded, Event, Reasoned, Said

_OPENING: Final = "“‘«„"
_QUOTES: Final = '`"'  # of which the first of a line opens, the second closes and so on; see `lark.QUOTING`


class EventPieces:
    """The events of an answer: pieces of one kind are joined. given: the kinds that have come; apart: of these, those
    that a new line parts from what comes; count: calls that have ended.
    """

    def __init__(self) -> None:
        self.given: set[type[Event]] = set()
        self.apart: set[type[Event]] = set()
        self.count = 0
        self._joined: list[str] = []
        self._kind: type[Said | Reasoned | CallArguments] | None = None
        self._events: list[Event] = []

    def add(self, kind: type[Said | Reasoned | CallArguments], text: str) -> None:
        if text:
            if kind is not self._kind:
                self._flush()
                self.given.add(kind)
            self._kind = kind
            if kind in self.apart and kind is not CallArguments:
                self._joined.append("\n")
            self.apart.discard(kind)
            self._joined.append(text)

    def begin(self, name: str, id: str | None) -> None:
        """A call begins."""
        self._flush()
        self.apart |= self.given
        self._events.append(CallBegun(self.count, name, id))

    def end(self, complete: bool) -> None:
        """The call ends."""
        self._flush()
        self._events.append(CallEnded(self.count, complete))
        self.count += 1

    def taken(self) -> list[Event]:
        """All since the last time."""
        self._flush()
        events, self._events = self._events, []
        return events

    def _flush(self) -> None:
        kind, text = self._kind, "".join(self._joined)
        if kind is CallArguments:
            self._events.append(CallArguments(self.count, text))
        elif kind is not None:
            self._events.append(Said(text) if kind is Said else Reasoned(text))
        self._kind, self._joined = None, []


class Line:
    """A line of what is said, since a call or reasoning. quotes: it ends with a quote sign that opens."""

    def __init__(self) -> None:
        self._odd: set[str] = set()
        self.quotes = False

    def add(self, text: str) -> None:
        """Text that is not empty."""
        line = text.rpartition("\n")[2]
        odd = {sign for sign in _QUOTES if line.count(sign) % 2}
        self._odd = odd ^ self._odd if line == text else odd
        self.quotes = text[-1] in _OPENING or text[-1] in self._odd
