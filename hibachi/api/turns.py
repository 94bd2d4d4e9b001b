"""How the answer to a chat is read: which text is reasoning, which is said, which are calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hibachi.streams.textstream import Choice, cut_off
from hibachi.tools.format import ChatFormat, ReasoningFormat, Thinking
from hibachi.tools.ids import call_id
from hibachi.tools.reading.parser import Parser
from hibachi.tools.reading.whole import Answer, read
from hibachi.tools.tools import Toolbox


@dataclass(frozen=True, slots=True)
class Turns:
    """How the answer to one chat is read.

    format: of the model's template. thinking: where the answer begins. include_reasoning: False means that reasoning is
    read and left out. fields: the names under which reasoning is told. shown: special tokens that the answer's text
    must show.
    """

    format: ChatFormat
    toolbox: Toolbox = field(default_factory=Toolbox)
    thinking: Thinking = Thinking.NONE
    include_reasoning: bool = True
    fields: tuple[str, ...] = ("reasoning_content",)
    shown: frozenset[int] = frozenset()

    def parser(self) -> Parser:
        """One for each continuation."""
        return Parser(self.format, self.toolbox, self.thinking)

    def read(self, choice: Choice) -> Answer:
        """A continuation that has ended."""
        return read(self.format, self.toolbox, self.thinking, choice.text, cut_off(choice))

    def call_id(self, answer: str, choice: int, number: int) -> str:
        """See `hibachi.tools.ids.call_id`."""
        return call_id(answer, choice, number, nine=self.format.nine)


class Thought:
    """Counts the tokens of a reasoning, its markers included. raw: the bytes of a token."""

    def __init__(self, reasoning: ReasoningFormat, thinking: Thinking, raw: Callable[[int], bytes]) -> None:
        self._begin, self._end = reasoning.begin.strip().encode(), reasoning.end.strip().encode()
        self._raw, self._state = raw, thinking
        self._tail, self._seen, self._tokens = b"", 0, 0

    def upto(self, ids: Sequence[int]) -> int:
        """Tokens of the reasoning among these ids, which begin with those of the call before."""
        while self._state is not Thinking.NONE and self._seen < len(ids):
            self._tail += self._raw(ids[self._seen])
            self._seen += 1
            self._look()
        return self._tokens

    def _look(self) -> None:
        if self._state is Thinking.MAY:
            head = self._tail.lstrip()
            if head.startswith(self._begin):
                self._state = Thinking.OPEN
            elif not self._begin.startswith(head):
                self._state = Thinking.NONE
        if self._state is Thinking.OPEN:
            self._tokens = self._seen
            if self._end in self._tail:
                self._state = Thinking.NONE
            self._tail = self._tail[-len(self._end) :]
