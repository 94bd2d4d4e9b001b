"""Turns requests into checked token ids, in steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from hibachi.errors import PromptTooLong
from hibachi.llm.chatformat.talk import Talk
from hibachi.llm.chatformat.templates.choosing import Parsers
from hibachi.llm.dialects.chat import Conversation, FormChecks, ReadChat, read_chat
from hibachi.llm.dialects.errors import Refused, refusing
from hibachi.llm.dialects.forms import said_by
from hibachi.llm.dialects.steps import ReadingStep, Steps
from hibachi.llm.dialects.truncation import Truncation
from hibachi.llm.tokenizers.prompts import TextPrompts, check_fits, input_exceeds
from hibachi.request import SamplingParams


class Reading:
    """Reads prompts for one model. vocab_size: None means any id is a token. chat_template: the name of one of the
    model's, or Jinja source; None means the model's own. longest: tokens of a prompt; None means what the context
    leaves. parsers: how the format of tool calls and reasoning is chosen.
    """

    def __init__(
        self,
        prompts: TextPrompts,
        vocab_size: int | None,
        chat_template: str | None = None,
        longest: int | None = None,
        parsers: Parsers | None = None,
    ) -> None:
        self.longest = longest
        self.prompts: TextPrompts = prompts
        self.vocab_size: int | None = vocab_size
        self.talk: Talk = Talk(prompts.tokenizer, chat_template, parsers)
        self._has_template = chat_template is not None or bool(prompts.tokenizer.chat_templates)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        size = self.vocab_size
        if ids and size is not None and not (min(ids) >= 0 and max(ids) < size):
            raise Refused.at(param, f": token ids must be from 0 to {size - 1}; got {min(ids)} to {max(ids)}.")

    def check_length(self, ids: Sequence[int], limit: int | None) -> None:
        """Raise PromptTooLong for a prompt that does not fit, or not with the new tokens that were asked for."""
        if self.longest is not None and len(ids) > self.longest:
            raise PromptTooLong(f"The prompt has {len(ids)} tokens. {input_exceeds(self.longest)} Shorten it.")
        check_fits(len(ids), limit, self.prompts.context)

    def encode(
        self, prompts: Sequence[Any], param: str, *, special: bool = True, truncation: Truncation | None = None
    ) -> Steps[list[list[int]]]:
        """Token ids of prompts, none of them too long. Raises Refused, InvalidRequest or PromptTooLong."""
        self._check(prompts, param, truncation)
        found = yield from self.tokens([p for p in prompts if isinstance(p, str)], special)
        return self._kept(_filled(prompts, found, param), truncation)

    def tokens(self, texts: Sequence[str], special: bool) -> Steps[list[list[int]]]:
        """Token ids of texts of any length. Raises InvalidRequest."""
        encode = self.prompts.tokenizer.encode
        found: list[list[int]] = yield ReadingStep(
            "text", lambda: [encode(text, add_special_tokens=special) for text in texts], sum(map(len, texts))
        )
        return found

    def predicted(self, text: str) -> Steps[list[int]]:
        """Token ids of a text that an answer may be; what cannot fit into the context is cut off. Raises
        InvalidRequest.
        """
        found: list[int] = yield ReadingStep("text", partial(self.prompts.predicted, text), len(text))
        return found

    def spans(self, text: str, special: bool) -> Steps[list[tuple[int, int, int]]]:
        """`tokens` of one text, each as id, begin and end in the text, in characters."""
        spans = self.prompts.tokenizer.spans
        found: list[tuple[int, int, int]] = yield ReadingStep(
            "text", lambda: spans(text, add_special_tokens=special), len(text)
        )
        return found

    def render(self, chat: Conversation) -> Steps[list[int]]:
        """Token ids of a conversation that is not too long. Raises Refused, InvalidRequest or PromptTooLong."""
        text = yield from self.prompt_text(chat)
        [ids] = yield from self.tokens([text], False)
        return _said(ids)

    def prompt_text(self, chat: Conversation) -> Steps[str]:
        """The text that `render` tokenizes. Raises as it does."""
        with self._templated():
            work = partial(self.talk.prompt_text, chat.messages, chat.variables, open_end=chat.open_end)
            text: str = yield ReadingStep("template", work)
        self.prompts.check_text(text)
        return text

    def chat(
        self, chat: Conversation, params: SamplingParams, forms: FormChecks, form: str | None = None
    ) -> Steps[ReadChat]:
        """A chat whose prompt is not too long. form: the field that says what form its answer must have. Raises
        Refused, InvalidRequest or PromptTooLong.
        """
        with self._templated(), said_by(form):
            found = yield from read_chat(self.talk, self.prompts, chat, params, forms)
        [ids] = self._kept([_said(found.ids)], chat.truncation)
        return replace(found, ids=ids)

    @contextmanager
    def _templated(self) -> Iterator[None]:
        """`refusing` for what needs a chat template. Raises Refused if there is none."""
        if not self._has_template:
            raise Refused(
                "This model has no chat template: send a prompt to /v1/completions, or give it a template at the "
                "start, with --chat-template.",
                param="messages",
                code="no_chat_template",
            )
        with refusing():
            yield

    def _check(self, prompts: Sequence[Any], param: str, truncation: Truncation | None) -> None:
        """Check all prompts before any is read."""
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_text(prompt, truncation)
            else:
                if truncation is None:
                    self.check_length(prompt, None)
                self.check_ids(prompt, param)

    def _check_text(self, text: str, truncation: Truncation | None) -> None:
        if truncation is None:
            self.prompts.check_text(text)
        else:
            self.prompts.check_size(text)

    def _kept(self, ids: list[list[int]], truncation: Truncation | None) -> list[list[int]]:
        if truncation is None:
            return ids
        return [truncation.cut(own, self.prompts.context, self.longest) for own in ids]


def _filled(prompts: Sequence[Any], found: Sequence[list[int]], param: str) -> list[list[int]]:
    """The ids of all prompts. found: of the prompts that are texts. Raises Refused if any is empty."""
    next_ = iter(found)
    ids = [next(next_) if isinstance(p, str) else list(p) for p in prompts]
    if not all(ids):
        raise Refused.at(param, " is empty: it must hold at least one token.", code="empty_string")
    return ids


def _said(ids: list[int]) -> list[int]:
    if not ids:
        raise Refused("The conversation is empty.", param="messages", code="empty_array")
    return ids
