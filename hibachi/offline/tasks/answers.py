"""Columns of results: what a model wrote, in one continuation or several, and vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hibachi.llm.chatformat.templates.choosing import Parsers
from hibachi.llm.textstream import Choice
from hibachi.offline.files.format import Field
from hibachi.offline.tasks.columns import Columns
from hibachi.request import Finish

CALLS, SCORES = "tool_calls", ("logprobs", "prompt_logprobs")
VECTOR = (Field("embedding", "floats"), Field("prompt_tokens", "int"), Field("error", "text"))


@dataclass(frozen=True, slots=True)
class Continuation:
    """One continuation. ids: of its tokens. calls: in OpenAI's form; [] and None mean none."""

    text: str
    finish: Any
    ids: Any
    reasoning: str | None = None
    calls: Sequence[Mapping[str, Any]] | None = None


class Answers:
    """The columns of texts that a model wrote: output; of chats also reasoning, by the names of its fields, and
    tool_calls, if they may have tools; finish_reason; output_token_ids and log-probabilities, if they are wanted;
    prompt_tokens, completion_tokens, error. Where rows may have several continuations (n), columns of continuations are
    lists with an entry for each. token_ids may be set until the first row is answered.
    """

    def __init__(self, columns: Columns, parsers: Parsers, *, token_ids: bool) -> None:
        self._reasoning = parsers.fields if columns.talks and parsers.reasoning != "none" else ()
        self._calls = (CALLS,) if columns.talks and columns.brings_tools else ()
        self._many = columns.params.get("n", 1) != 1 or "n" in columns.param_columns
        self.scores = [n for n in SCORES if n in (*columns.params, *columns.param_columns)]
        self.token_ids = token_ids

    @property
    def fields(self) -> list[Field]:
        texts: Literal["json", "text"] = "json" if self._many else "text"
        names = ("output", *self._reasoning, *self._calls, "finish_reason")
        found = [Field(name, "json" if name == CALLS else texts) for name in names]
        if self.token_ids:
            found.append(Field("output_token_ids", "json" if self._many else "ints"))
        found += [Field(name, "json") for name in self.scores]
        return [*found, Field("prompt_tokens", "int"), Field("completion_tokens", "int"), Field("error", "text")]

    @property
    def parted(self) -> bool:
        """Whether there is a column of reasoning."""
        return bool(self._reasoning)

    def values(self, said: Sequence[Continuation], prompt: int | None, new: int | None) -> dict[str, Any]:
        """prompt, new: tokens; None means nobody says how many."""
        found: dict[str, list[Any]] = {"output": [s.text for s in said]}
        found |= {name: [s.reasoning or None for s in said] for name in self._reasoning}
        found |= {name: [s.calls or None for s in said] for name in self._calls}
        found["finish_reason"] = [s.finish for s in said]
        values = {name: self.told(of_choices) for name, of_choices in found.items()}
        values |= {"prompt_tokens": prompt, "completion_tokens": new}
        return values | ({"output_token_ids": self.told([s.ids for s in said])} if self.token_ids else {})

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
    finish = "tool_calls" if whole else str(choice.finish_reason)
    return Continuation(choice.text, finish, choice.token_ids, choice.reasoning, calls)


def continuation_in(choice: Mapping[str, Any], text: str) -> Continuation:
    """What a server has said in a choice of its answer. text: of the choice."""
    message, finish, ids = choice.get("message"), choice.get("finish_reason"), choice.get("token_ids")
    if not isinstance(message, Mapping):
        return Continuation(text, finish, ids)
    calls = message.get(CALLS)
    thoughts = [t for name in ("reasoning_content", "reasoning") if isinstance(t := message.get(name), str)]
    calls = calls if isinstance(calls, list) else None
    return Continuation(text, finish, ids, thoughts[0] if thoughts else None, calls)
