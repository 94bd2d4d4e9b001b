"""What dialects know of a model of texts, and how chats become requests to it: for all dialects, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from hibachi.llm.dialects.chat import FormChecks
from hibachi.llm.dialects.openai import parse
from hibachi.llm.dialects.openai.answers import TokenTexts
from hibachi.llm.dialects.openai.bodies import Bounds, ChatBody, CompletionBody
from hibachi.llm.dialects.openai.parse import ParsedRequest
from hibachi.llm.dialects.reading import Reading
from hibachi.llm.dialects.steps import ReadingStep, Steps
from hibachi.request import SamplingParams


class Serving(Protocol):
    """Of `hibachi.llm.texts.Texts`, what is asked here."""

    @property
    def default_params(self) -> SamplingParams: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def check_form(self, params: SamplingParams, /) -> object: ...


@dataclass(frozen=True, slots=True)
class TextModel:
    """variables: for chat templates, where a chat says no others."""

    texts: Serving
    reading: Reading
    vocabulary: TokenTexts
    bounds: Bounds
    variables: Mapping[str, Any] = field(default_factory=dict)

    def completion(self, body: CompletionBody) -> Steps[tuple[ParsedRequest, list[list[int]]]]:
        """What a completion asks for, and the token ids of its prompts. Raises Refused, InvalidRequest or
        PromptTooLong.
        """
        asked = parse.completion(body, self.texts.default_params, self.bounds)
        ids = yield from self.reading.encode(
            asked.prompts, "prompt", special=asked.special, truncation=asked.truncation
        )
        return asked, ids

    def chat(self, body: ChatBody) -> Steps[tuple[ParsedRequest, list[int]]]:
        """What a chat asks for, with what reads its answer in `ParsedRequest.reader`, and the token ids of its prompt.
        Raises as `completion`.
        """
        asked: ParsedRequest = yield ReadingStep(
            "body", partial(parse.chat, body, self.texts.default_params, self.bounds)
        )
        assert asked.chat is not None
        chat = replace(asked.chat, variables={**self.variables, **asked.chat.variables})
        forms = FormChecks(self.texts.check_form, self.texts.eos_ids)
        found = yield from self.reading.chat(chat, asked.params, forms, asked.form)
        asked.reader = found.reader
        if asked.include_reasoning:
            asked.reasoning_fields = self.reading.talk.choosing.parsers.fields
        if found.params is not asked.params:
            asked.params, asked.form = found.params, asked.form or "tools"
        return asked, found.ids
