"""Chats as requests have them: prompts, and forms of answers, refused by the names of fields."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from hibachi.errors import InvalidRequest
from hibachi.llm.chatformat.errors import BadField
from hibachi.llm.chatformat.history import Messages
from hibachi.llm.chatformat.talk import Talk
from hibachi.llm.chatformat.templates.choosing import Parsers
from hibachi.llm.dialects.errors import Refused, as_refused, refusing
from hibachi.llm.dialects.forms import refused
from hibachi.llm.dialects.openai.parse import ParsedRequest
from hibachi.request import SamplingParams


class ChatTalk:
    """See `Talk`, which raises InvalidRequest where this raises Refused."""

    def __init__(self, tokenizer: Any, chat_template: str | None, parsers: Parsers | None = None) -> None:
        self._tokenizer, self._template = tokenizer, chat_template
        self._talk = Talk(tokenizer, chat_template, parsers)

    def check(self) -> None:
        """Raises Refused if there is no template."""
        if self._template is None and not self._tokenizer.chat_templates:
            raise Refused(
                "This model has no chat template: send a prompt to /v1/completions, or give it a template at the "
                "start, with --chat-template.",
                param="messages",
                code="no_chat_template",
            )

    def prompt_text(self, messages: Messages, variables: Mapping[str, Any], *, open_end: bool = False) -> str:
        with refusing():
            return self._talk.prompt_text(messages, variables, open_end=open_end)

    def prompt(self, asked: ParsedRequest, variables: Mapping[str, Any] | None = None) -> str:
        """The prompt of a chat. What reads its answer is noted in `asked.reader`. variables: further ones for
        the template. Raises Refused.
        """
        assert asked.messages is not None
        given = {**(variables or {}), **asked.template}
        try:
            with refusing():
                text, asked.reader = self._talk.prompt(
                    asked.messages, given, asked.toolbox, effort=asked.effort, open_end=asked.open_end
                )
        except InvalidRequest as e:  # what the template says
            raise Refused(str(e), param="messages", code="template_error") from e
        asked.reasoning_fields = self._talk.choosing.parsers.fields if asked.include_reasoning else ()
        return text

    def form(self, asked: ParsedRequest, check: Callable[[SamplingParams], object], ends: Collection[int]) -> None:
        """Make the form of the answer to a chat, behind `prompt`: of its tools, its reasoning and what was asked for.

        check: checks a form, which may take seconds. ends: tokens that end a text. Raises Refused, which names a tool,
        and what `check` raises.
        """
        if asked.reader is None:
            return
        try:
            found = self._talk.formed(asked.reader, asked.params, check, ends)
        except InvalidRequest as e:
            raise (as_refused(e) if isinstance(e, BadField) else refused(e, asked.form)) from e
        if found is not asked.params:
            asked.params, asked.form = found, asked.form or "tools"
