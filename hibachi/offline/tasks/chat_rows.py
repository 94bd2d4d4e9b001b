"""What rows that are chats bring beside their messages, and what their answers have beside a text: calls, reasoning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from hibachi.errors import InvalidRequest, shown
from hibachi.llm.chatformat.asked import check_choice, toolbox_of
from hibachi.llm.chatformat.templates.choosing import Parsers
from hibachi.llm.textstream import Choice
from hibachi.offline.files.format import Field
from hibachi.request import Finish

CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a row, or the run for all rows, says of a chat, by the names that OpenAI's API and vLLM's have."""

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        kinds = (
            ("tools", list, 'a list of tools such as {"type": "function", "function": {"name": ...}}'),
            ("parallel_tool_calls", bool, "true or false"),
            ("reasoning_effort", str, "a text"),
            ("chat_template_kwargs", Mapping, "an object, of variables for the chat template"),
        )
        for name, kind, expected in kinds:
            given = getattr(self, name)
            if given is not None and not isinstance(given, kind):
                raise InvalidRequest(f"{name} must be {expected}; got {shown(given)}.")

    def check(self) -> None:
        """What the tools and the choice say together. Raises InvalidRequest."""
        toolbox_of(self.tools, self.tool_choice, self.parallel_tool_calls)

    def check_for_rows(self) -> None:
        """What the choice says by itself, where each row brings its tools. Raises InvalidRequest."""
        check_choice(self.tool_choice)

    @property
    def variables(self) -> dict[str, Any]:
        """For the template. Which template it is, the run says."""
        return {name: value for name, value in (self.chat_template_kwargs or {}).items() if name != "chat_template"}

    def as_body(self) -> dict[str, Any]:
        """As fields of a request."""
        found = {name: getattr(self, name) for name in CHATS}
        return {name: value for name, value in found.items() if value is not None}


CHATS = tuple(f.name for f in fields(ChatOptions))
NO_OPTIONS = ChatOptions()


def without_nulls(value: Any) -> Any:
    """Of a row of Parquet, where all rows have the names that any has."""
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


# ---- results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Continuation:
    """One continuation. calls: in OpenAI's form; [] and None mean none."""

    text: str
    finish: Any
    reasoning: str | None = None
    calls: Sequence[Mapping[str, Any]] | None = None


class Answers:
    """The columns of answers: output, reasoning by the names of its fields, tool_calls, finish_reason.

    talks: the rows are chats. tools: they may bring tools. many: each column has a list with an entry for each
    continuation.
    """

    def __init__(self, parsers: Parsers, *, talks: bool, tools: bool, many: bool) -> None:
        self._reasoning = parsers.fields if talks and parsers.reasoning != "none" else ()
        self._calls = (CALLS,) if talks and tools else ()
        self._many = many

    @property
    def fields(self) -> list[Field]:
        texts: Literal["json", "text"] = "json" if self._many else "text"
        names = ("output", *self._reasoning, *self._calls, "finish_reason")
        return [Field(name, "json" if name == CALLS else texts) for name in names]

    @property
    def parted(self) -> bool:
        """Whether there is a column of reasoning."""
        return bool(self._reasoning)

    def values(self, said: Sequence[Continuation]) -> dict[str, Any]:
        found: dict[str, list[Any]] = {"output": [s.text for s in said]}
        found |= {name: [s.reasoning or None for s in said] for name in self._reasoning}
        found |= {name: [s.calls or None for s in said] for name in self._calls}
        found["finish_reason"] = [s.finish for s in said]
        return {name: self.told(values) for name, values in found.items()}

    def told(self, of_choices: list[Any]) -> Any:
        return of_choices if self._many else of_choices[0]


def continuation_of(choice: Choice) -> Continuation:
    """What a model here has said."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
            **({} if call.complete else {"incomplete": True}),
        }
        for call in choice.tool_calls
    ]
    whole = bool(calls) and all(call.complete for call in choice.tool_calls) and choice.finish_reason is Finish.STOP
    return Continuation(choice.text, "tool_calls" if whole else str(choice.finish_reason), choice.reasoning, calls)


def continuation_in(choice: Mapping[str, Any], text: str) -> Continuation:
    """What a server has said in a choice of its answer. text: of the choice."""
    message, finish = choice.get("message"), choice.get("finish_reason")
    if not isinstance(message, Mapping):
        return Continuation(text, finish)
    calls = message.get(CALLS)
    thoughts = [t for name in ("reasoning_content", "reasoning") if isinstance(t := message.get(name), str)]
    return Continuation(text, finish, thoughts[0] if thoughts else None, calls if isinstance(calls, list) else None)
