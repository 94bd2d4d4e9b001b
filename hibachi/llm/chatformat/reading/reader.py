"""How the answer to one chat is read: which text is reasoning, which is said, which are calls of tools."""

from __future__ import annotations

from dataclasses import dataclass

from hibachi.llm.chatformat.format import PLAIN, ChatFormat, Thinking
from hibachi.llm.chatformat.ids import call_id
from hibachi.llm.chatformat.reading.parser import Parser
from hibachi.llm.chatformat.reading.stops import AnswerStops, SaidParser, Stops
from hibachi.llm.chatformat.reading.whole import Answer, read
from hibachi.llm.chatformat.tools import NO_TOOLS, Toolbox


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Reads the answer to one chat.

    format: of the model's template. thinking: where the answer begins. shown: ids of special tokens that the answer's
    text must show.
    """

    format: ChatFormat
    toolbox: Toolbox = NO_TOOLS
    thinking: Thinking = Thinking.NONE
    shown: frozenset[int] = frozenset()

    def parser(self) -> Parser:
        """One for each continuation, where text comes in pieces."""
        return Parser(self.format, self.toolbox, self.thinking)

    def stops(self, stops: Stops) -> Stops | AnswerStops:
        """Looks for stop strings in what is said."""
        parser = SaidParser(self.format, self.toolbox, self.thinking)
        return stops if parser.all_said else AnswerStops(parser, stops)

    def read(self, text: str, cut: bool) -> Answer:
        """A whole continuation. cut: something else than the model has ended it."""
        return read(self.format, self.toolbox, self.thinking, text, cut)

    def call_id(self, answer: str, choice: int, number: int) -> str:
        """An id for a call that came without one; see `hibachi.llm.chatformat.ids.call_id`."""
        return call_id(answer, choice, number, nine=self.format.nine)


ALL_SAID = AnswerReader(PLAIN)
"""Reads an answer that is all text."""
