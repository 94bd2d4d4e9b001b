"""Counts the tokens of reasoning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hibachi.tools.format import ReasoningFormat, Thinking


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
            head = self._tail = self._tail.lstrip()
            if head.startswith(self._begin):
                self._state = Thinking.OPEN
            elif not self._begin.startswith(head):
                self._state = Thinking.NONE
        if self._state is Thinking.OPEN:
            self._tokens = self._seen
            if self._end in self._tail:
                self._state = Thinking.NONE
            self._tail = self._tail[-len(self._end) :]
