"""Chats in Python: conversations become prompts, and answers are read: what is said, thought and called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hibachi.request import SamplingParams
from hibachi.streams.textstream import Choice, Completion, cut_off
from hibachi.structured import StructuredOutputs
from hibachi.tools.asked import as_shown, toolbox_of
from hibachi.tools.history import as_objects
from hibachi.tools.reading.reader import AnswerReader
from hibachi.tools.talk import Talk
from hibachi.tools.templates.choosing import Parsers


@dataclass(frozen=True, slots=True)
class Asking:
    """What a chat says of its tools, in OpenAI's words."""

    tools: Sequence[Mapping[str, Any]] | None
    choice: Any
    parallel: bool
    parsers: Parsers


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that is ready to be answered. reader: None means that the answer is all text."""

    prompt: str
    reader: AnswerReader | None
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Ready:
    """Chats that may be queued. ids: of each prompt."""

    chats: list[Chat]
    ids: list[list[int]]

    @property
    def prompts(self) -> list[str]:
        return [chat.prompt for chat in self.chats]

    @property
    def params(self) -> list[SamplingParams]:
        return [chat.params for chat in self.chats]

    @property
    def shown(self) -> frozenset[int]:
        """Special tokens that the texts of answers show."""
        return frozenset[int]().union(*(chat.reader.shown for chat in self.chats if chat.reader is not None))

    def told(self, done: Sequence[Completion]) -> list[Completion]:
        """Completions whose texts are what is said, beside calls and reasoning."""
        return [_completion(chat, each) for chat, each in zip(self.chats, done, strict=True)]


class Chats:
    """The chats of one model. checks: checks parameters whose form is new. ends: tokens that end a text."""

    def __init__(self, tokenizer: Any, checks: Any, ends: Sequence[int]) -> None:
        self._tokenizer, self._checks, self._ends = tokenizer, checks, ends
        self._talks: dict[tuple[Parsers, str | None], Talk] = {}

    def ready(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        params: Sequence[SamplingParams],
        asking: Asking,
        variables: Mapping[str, Any],
    ) -> Ready:
        """Conversations that may be queued, with parameters for each. Raises InvalidRequest."""
        chats = [self._chat(m, p, asking, variables) for m, p in zip(conversations, params, strict=True)]
        return Ready(chats, [self._tokenizer.encode(c.prompt, add_special_tokens=False) for c in chats])

    def _chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        asking: Asking,
        variables: Mapping[str, Any],
    ) -> Chat:
        box = toolbox_of(asking.tools, asking.choice, asking.parallel)
        given = dict(variables) if box is None else {**variables, "tools": as_shown(asking.tools or ())}
        talk = self._talk(asking.parsers, given.pop("chat_template", None))
        prompt, reader = talk.prompt([as_objects(m, f"messages[{i}]") for i, m in enumerate(messages)], given, box)
        answer = params.structured_outputs
        if reader is not None:
            assert answer is None or isinstance(answer, StructuredOutputs)
            answer = talk.form(reader, answer, partial(self._check, params), self._ends)
        return Chat(prompt, reader, params.with_(structured_outputs=answer))

    def _talk(self, parsers: Parsers, template: str | None) -> Talk:
        found = self._talks.get((parsers, template))
        if found is None:
            found = self._talks[parsers, template] = Talk(self._tokenizer, template, parsers)
        return found

    def _check(self, params: SamplingParams, form: StructuredOutputs) -> None:
        self._checks(params.with_(structured_outputs=form))


def _completion(chat: Chat, done: Completion) -> Completion:
    reader = chat.reader
    if reader is None:
        return done
    return replace(done, choices=[_told(reader, done, choice) for choice in done.choices])


def _told(reader: AnswerReader, done: Completion, choice: Choice) -> Choice:
    found = reader.read(choice.text, cut_off(choice))
    about = f"{done.prompt_token_ids}"  # an answer in Python has no id
    calls = [replace(call, id=call.id or reader.call_id(about, choice.index, i)) for i, call in enumerate(found.calls)]
    return replace(choice, text=found.content, tool_calls=tuple(calls), reasoning=found.reasoning or "")
