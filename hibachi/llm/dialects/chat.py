"""A chat becomes a prompt, what reads its answer, and the form of that: for HTTP, lines of files and Python alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hibachi.errors import InvalidRequest
from hibachi.llm.chatformat.errors import BadField, TemplateFailed
from hibachi.llm.chatformat.history import Messages
from hibachi.llm.chatformat.prefill import behind, compact, end_of, reader_of_all
from hibachi.llm.chatformat.reading.reader import AnswerReader
from hibachi.llm.chatformat.talk import Talk
from hibachi.llm.chatformat.tools import Toolbox
from hibachi.llm.dialects.steps import ReadingStep, Steps
from hibachi.llm.dialects.truncation import Truncation
from hibachi.llm.tokenizers.prompts import TextPrompts
from hibachi.request import SamplingParams
from hibachi.structured import StructuredOutputs


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a model is shown. variables: for the template, its tools as `as_shown` gives them. toolbox: tools that may
    be called. effort: of reasoning. open_end: the last message goes on. special: add special tokens to those of the
    template. size: bytes that say its tools and the form of its answer.
    """

    messages: Messages
    variables: Mapping[str, Any]
    toolbox: Toolbox | None = None
    effort: str | None = None
    open_end: bool = False
    special: bool = False
    truncation: Truncation | None = None
    size: int = 0


@dataclass(frozen=True, slots=True)
class ReadChat:
    """A conversation that can be answered. reader: of the answer; None means it is all text. params: with the form that
    the answer must have.
    """

    prompt: str
    ids: list[int]
    reader: AnswerReader | None
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class FormChecks:
    """Of one model. check: raises InvalidRequest where no form can be had, which may take seconds to find. ends: tokens
    that end a text.
    """

    check: Callable[[SamplingParams], object]
    ends: Collection[int]


def read_chat(
    talk: Talk, prompts: TextPrompts, chat: Conversation, params: SamplingParams, forms: FormChecks
) -> Steps[ReadChat]:
    """Raises BadField, TemplateFailed, InvalidRequest about `structured_outputs`, and PromptTooLong."""
    work = partial(talk.prompt, chat.messages, chat.variables, chat.toolbox, effort=chat.effort, open_end=chat.open_end)
    try:
        text, reader = yield ReadingStep("template", work)
    except BadField:
        raise
    except InvalidRequest as e:
        raise TemplateFailed(str(e)) from e
    (prompts.check_text if chat.truncation is None else prompts.check_size)(text)
    encode = partial(prompts.tokenizer.encode, text, add_special_tokens=chat.special)
    ids: list[int] = yield ReadingStep("text", encode, len(text))
    begun, form, shown = "", params.structured_outputs, prompts.tokenizer.bare(text)
    if chat.open_end and isinstance(form, StructuredOutputs):
        begun = end_of(shown, chat.messages[-1]["content"])
    if reader is not None and (chat.toolbox is not None or form is not None):
        whole = reader_of_all(reader, shown, begun)
        params = yield ReadingStep("form", partial(talk.formed, whole, params, forms.check, forms.ends), chat.size)
    if begun.strip() and isinstance(form, StructuredOutputs):
        begun = compact(begun, form, reader)
        params = yield ReadingStep("form", partial(behind, begun, params, forms.check), chat.size)
    return ReadChat(shown, ids, reader, params)
