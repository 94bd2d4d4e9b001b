"""Stop strings of a chat: they end what is said. In reasoning and in calls they are text as any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hibachi.llm.chatformat.format import ChatFormat, Event, Said, Thinking
from hibachi.llm.chatformat.reading.parser import Parser
from hibachi.llm.chatformat.tools import Toolbox


class Stops(Protocol):
    """Looks for stop strings in a text that comes in pieces: `hibachi.llm.tokenizers.stops.StopStrings`."""

    @property
    def found(self) -> str | None: ...

    @property
    def holds(self) -> int: ...

    def restart(self) -> None: ...

    def push(self, piece: str, /) -> str: ...

    def pass_by(self, piece: str, /) -> str: ...

    def flush(self) -> str: ...


class SaidParser(Parser):
    """A parser that tells where in the text stands what is said. All places count characters from the beginning."""

    def __init__(self, format: ChatFormat, toolbox: Toolbox, thinking: Thinking) -> None:
        super().__init__(format, toolbox, thinking)
        self.said: list[tuple[int, int]] = []
        """From where to where, in order; the reader empties it."""

    @property
    def known(self) -> int:
        """Up to where it is known what the text is."""
        return max(self._before + self._at, 0)

    def feed(self, text: str) -> list[Event]:
        if self.plain(text) is Said:
            self.said.append((self._before, self._before + len(text)))
        return super().feed(text)

    def _say(self, start: int, stop: int) -> None:
        super()._say(start, stop)
        start = max(start, self._prompted)
        if stop > start:
            self.said.append((self._before + start, self._before + stop))


class AnswerStops:
    """Stop strings in the text of an answer: each is looked for within what is said in one piece, nowhere else."""

    __slots__ = ("_parser", "_seen", "_start", "_stops", "_text")

    def __init__(self, parser: SaidParser, stops: Stops) -> None:
        self._parser, self._stops = parser, stops
        self._text, self._start = "", 0  # what is held back, and where it begins
        self._seen = 0  # where what was last looked through ends

    @property
    def found(self) -> str | None:
        """The stop string that has ended the text."""
        return self._stops.found

    def push(self, piece: str) -> str:
        """The text that is out of danger now. After `found` nothing comes."""
        return self._take(piece, self._stops.push)

    def pass_by(self, piece: str) -> str:
        """`push` for a piece in which no stop string ends the text; one may begin in it."""
        return self._take(piece, self._stops.pass_by)

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        self._parser.end()
        text = self._look(self._stops.push)
        return text if self.found is not None else text + self._text

    def _take(self, piece: str, look: Callable[[str], str]) -> str:
        self._text += piece
        self._parser.feed(piece)
        return self._look(look)

    def _look(self, look: Callable[[str], str]) -> str:
        parser, stops = self._parser, self._stops
        said, parser.said = parser.said, []
        for begin, end in said:
            if begin != self._seen:
                stops.restart()
            cut = begin - stops.holds + len(look(self._text[begin - self._start : end - self._start]))
            self._seen = end
            if stops.found is not None:
                return self._text[: cut - self._start]
        if parser.known > self._seen:  # something else has begun
            stops.restart()
        safe = parser.known - stops.holds - self._start
        text, self._text = self._text[:safe], self._text[safe:]
        self._start += safe
        return text
