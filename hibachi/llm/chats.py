"""Chats in Python: conversations become prompts, and answers are read: what is said, thought and called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hibachi.llm.chatformat.asked import as_shown, toolbox_of
from hibachi.llm.chatformat.messages import plain_messages
from hibachi.llm.chatformat.reading.reader import AnswerReader
from hibachi.llm.chatformat.talk import Talk
from hibachi.llm.chatformat.templates.choosing import Parsers
from hibachi.llm.dialects.chat import Conversation, FormChecks, ReadChat, read_chat
from hibachi.llm.dialects.steps import run
from hibachi.llm.textstream import Choice, Completion, cut_off
from hibachi.llm.tokenizers.prompts import TextPrompts
from hibachi.request import SamplingParams


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a chat says of its tools and of reasoning, in OpenAI's words."""

    tools: Sequence[Mapping[str, Any]] | None
    choice: Any
    parallel: bool | None
    parsers: Parsers
    effort: str | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """Chats that may be queued."""

    chats: list[ReadChat]

    @property
    def ids(self) -> list[list[int]]:
        """Of each prompt."""
        return [chat.ids for chat in self.chats]

    @property
    def prompts(self) -> list[str]:
        return [chat.prompt for chat in self.chats]

    @property
    def params(self) -> list[SamplingParams]:
        return [chat.params for chat in self.chats]

    @property
    def readers(self) -> list[AnswerReader | None]:
        """Of their answers."""
        return [chat.reader for chat in self.chats]

    def told(self, done: Sequence[Completion], ids: Sequence[str] | None = None) -> list[Completion]:
        """Completions whose texts are what is said, beside calls and reasoning. ids: of each answer, of which those of
        its calls are made; None means they are made of its prompt.
        """
        names = [f"{each.prompt_token_ids}" for each in done] if ids is None else ids
        return [_completion(chat, each, id) for chat, each, id in zip(self.chats, done, names, strict=True)]


class Chats:
    """The chats of one model. checks: raises InvalidRequest where no form can be had. ends: tokens that end a text."""

    def __init__(self, prompts: TextPrompts, checks: Callable[[SamplingParams], object], ends: Sequence[int]) -> None:
        self._prompts, self._forms = prompts, FormChecks(checks, ends)
        self._talks: dict[tuple[Parsers, str | None], Talk] = {}

    def ready(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        params: Sequence[SamplingParams],
        asking: ChatRequest,
        variables: Mapping[str, Any],
    ) -> Ready:
        """Conversations that may be queued, with parameters for each. Raises InvalidRequest or PromptTooLong."""
        box = toolbox_of(asking.tools, asking.choice, asking.parallel)
        given = dict(variables) if box is None else {**variables, "tools": as_shown(asking.tools or ())}
        talk = self._talk(asking.parsers, given.pop("chat_template", None))
        chats = []
        for messages, own in zip(conversations, params, strict=True):
            chat = Conversation(plain_messages(messages), given, box, asking.effort)
            chats.append(run(read_chat(talk, self._prompts, chat, own, self._forms)))
        return Ready(chats)

    def _talk(self, parsers: Parsers, template: str | None) -> Talk:
        found = self._talks.get((parsers, template))
        if found is None:
            found = self._talks[parsers, template] = Talk(self._prompts.tokenizer, template, parsers)
        return found


def _completion(chat: ReadChat, done: Completion, id: str) -> Completion:
    reader = chat.reader
    if reader is None:
        return done
    return replace(done, choices=[_told(reader, id, choice) for choice in done.choices])


def _told(reader: AnswerReader, id: str, choice: Choice) -> Choice:
    found = reader.read(choice.text, cut_off(choice))
    calls = [replace(call, id=call.id or reader.call_id(id, choice.index, i)) for i, call in enumerate(found.calls)]
    return replace(choice, text=found.content, tool_calls=tuple(calls), reasoning=found.reasoning or "")
