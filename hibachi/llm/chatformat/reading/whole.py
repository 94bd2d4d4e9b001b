"""Whole answers: what their text holds, in one piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hibachi.llm.chatformat.format import (
    CallArguments,
    CallBegun,
    CallEnded,
    ChatFormat,
    Event,
    Reasoned,
    Said,
    Thinking,
)
from hibachi.llm.chatformat.reading.parser import Parser
from hibachi.llm.chatformat.tools import Toolbox, ToolCall


@dataclass(frozen=True, slots=True)
class Answer:
    """What the text of an answer holds. reasoning: None means that there is none."""

    reasoning: str | None = None
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    @property
    def called(self) -> bool:
        """There are calls, and all of them are complete."""
        return bool(self.calls) and all(call.complete for call in self.calls)


def read(format: ChatFormat, toolbox: Toolbox, thinking: Thinking, text: str, cut: bool = False) -> Answer:
    """What a whole text holds. cut: the limit of tokens ended it."""
    parser = Parser(format, toolbox, thinking)
    return joined([*parser.feed(text), *parser.end(cut)])


def joined(events: Iterable[Event]) -> Answer:
    """All events of one answer in one piece. Calls that have not ended are not complete."""
    reasoned: list[str] = []
    said: list[str] = []
    begun: dict[int, CallBegun] = {}
    arguments: dict[int, list[str]] = {}
    complete: set[int] = set()
    for event in events:
        match event:
            case Reasoned(text):
                reasoned.append(text)
            case Said(text):
                said.append(text)
            case CallBegun():
                begun[event.number], arguments[event.number] = event, []
            case CallArguments(number, text):
                arguments[number].append(text)
            case CallEnded(number, True):
                complete.add(number)
    calls = [ToolCall(one.name, "".join(arguments[n]), one.id, n in complete) for n, one in begun.items()]
    return Answer("".join(reasoned) if reasoned else None, "".join(said), calls)
