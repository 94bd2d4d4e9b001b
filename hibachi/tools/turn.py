"""An answer of a model, read as a whole: what it thought, what it says, what it calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hibachi.tools.format import CallArguments, CallBegun, CallEnded, Event, Reasoned, Said


@dataclass(slots=True)
class Called:
    """A call of a tool. arguments: the JSON text of an object. id: if the text has one. complete: False means the
    answer ended within the call, and `arguments` is only their beginning.
    """

    name: str
    arguments: str = ""
    id: str | None = None
    complete: bool = True


@dataclass(slots=True)
class Turn:
    """reasoning, text: what was thought and what is said; "" if there is none. calls: in their order."""

    reasoning: str = ""
    text: str = ""
    calls: list[Called] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """There are calls, and the answer did not end within one."""
        return bool(self.calls) and all(call.complete for call in self.calls)


def turn_of(events: Iterable[Event]) -> Turn:
    """What all events of an answer say together."""
    found, thought, said, parts = Turn(), [], [], list[list[str]]()
    for event in events:
        match event:
            case Reasoned(text):
                thought.append(text)
            case Said(text):
                said.append(text)
            case CallBegun(_, name, id):
                found.calls.append(Called(name, id=id))
                parts.append([])
            case CallArguments(number, text):
                parts[number].append(text)
            case CallEnded(number, complete):
                found.calls[number].complete = complete
    found.reasoning, found.text = "".join(thought), "".join(said)
    for call, own in zip(found.calls, parts, strict=True):
        call.arguments = "".join(own)
    return found
