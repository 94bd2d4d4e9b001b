"""How a model is talked to: a conversation in its chat template, and how the answer is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hibachi.errors import InvalidRequest
from hibachi.llm.chatformat.errors import UNSUPPORTED, BadField
from hibachi.llm.chatformat.format import ChatFormat, Thinking, thinking_of
from hibachi.llm.chatformat.generic import described, with_calls_said
from hibachi.llm.chatformat.grammar.answer import served_form
from hibachi.llm.chatformat.grammar.recent import RecentForms, content_of
from hibachi.llm.chatformat.history import (
    WAY_OUT,
    Messages,
    as_written,
    hidden_calls,
    rendered,
    without_texts,
)
from hibachi.llm.chatformat.instructions import Instructions
from hibachi.llm.chatformat.marks import marks
from hibachi.llm.chatformat.reading.reader import AnswerReader
from hibachi.llm.chatformat.templates.choosing import Choosing, Parsers
from hibachi.llm.chatformat.templates.probes import TOOLS, USUAL
from hibachi.llm.chatformat.tools import NO_TOOLS, Toolbox
from hibachi.request import SamplingParams
from hibachi.structured import StructuredOutputs


class Talk:
    """Makes prompts of the chats of one model, and says how their answers are read.

    chat_template: the name of one of the model's, or Jinja source; None means the model's own. parsers: how the format
    of tool calls and reasoning is chosen.

    Templates may take long, so threads call this where others wait.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None, parsers: Parsers | None = None) -> None:
        self._tokenizer, self._template = tokenizer, chat_template
        self.choosing: Choosing = Choosing(self._render, parsers)
        self._forms = RecentForms()
        self._placing: dict[tuple[str, bool, bool], Instructions] = {}

    def _render(self, messages: Messages, /, **variables: Any) -> str:
        more = {} if self._template is None else {"chat_template": self._template}
        text: str = self._tokenizer.render_chat(messages, **{**variables, **more})
        return text

    def _source(self, *, tools: bool) -> str:
        """The text of the template that is taken for a conversation; "" if there is none."""
        own: dict[str, str] = dict(self._tokenizer.chat_templates)
        if self._template is not None:
            return own.get(self._template, self._template)
        return own.get("tool_use" if tools and "tool_use" in own else "default", "")

    def _format(self, variables: Mapping[str, Any], messages: Messages) -> ChatFormat:
        tools = bool(variables.get("tools"))
        calls = any(m.get("tool_calls") for m in messages)
        return self.choosing.format(self._source(tools=tools), tools=tools or calls)

    # ---- the prompt --------------------------------------------------------------------------------------------

    def prompt_text(self, messages: Messages, variables: Mapping[str, Any], *, open_end: bool = False) -> str:
        """A conversation as the model is shown it; `Tokenizer.bare` of that. open_end: its last message goes on. tools
        among the variables are as `as_shown` gives them.

        Raises InvalidRequest, and BadField for what the template does not show.
        """
        return self._prompt_text(messages, variables, self._format(variables, messages), open_end=open_end)

    def _prompt_text(
        self, messages: Messages, variables: Mapping[str, Any], format: ChatFormat, *, open_end: bool = False
    ) -> str:
        given = {k: v for k, v in variables.items() if k not in ("chat_template", "messages")}
        if self.choosing.parsers.split:
            messages = [self._guarded(m) for m in messages]
        instructions = self._instructions(bool(given.get("tools")), format)
        messages = without_texts(messages, instructions.take_texts)
        return instructions.shown(messages, lambda placed: self._text(placed, given, format, open_end=open_end))

    def _guarded(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message in which the user, or a tool, names no special token."""
        content = message.get("content")
        if message.get("role") not in ("user", "tool") or not isinstance(content, str):
            return message
        guarded = self._tokenizer.guarded(content)
        return message if guarded == content else {**message, "content": guarded}

    def _instructions(self, tools: bool, format: ChatFormat) -> Instructions:
        source = self._source(tools=tools)
        key = source, tools, format.tools is None
        if key not in self._placing:
            usual = {**USUAL, "tools": TOOLS if tools else None}
            self._placing[key] = Instructions(
                lambda messages, begin: self._text(messages, {**usual, "add_generation_prompt": begin}, format),
                "developer" in source,
            )
        return self._placing[key]

    def _text(
        self, messages: Messages, variables: Mapping[str, Any], format: ChatFormat, *, open_end: bool = False
    ) -> str:
        """The text of messages whose system and developer stand where they are shown."""
        given = dict(variables)
        if self.choosing.parsers.generic:
            return self._described(messages, given.pop("tools", None) or (), given, open_end=open_end)
        sure = format.shows and format.tools is not None and format.source == "derived"
        messages = as_written(messages, format)
        if format.history.content == "null":
            given["nulls"] = True
        doubted = ("documents",) if sure else ("tools", "documents")
        text = rendered(self._render, messages, given, open_end=open_end, doubted=doubted)
        if sure or not hidden_calls(self._render, messages, given, text, open_end=open_end):
            return text
        if format.tools is None:
            raise BadField.at(
                ("messages", next(i for i, m in enumerate(messages) if m.get("tool_calls")), "tool_calls"),
                f" is not supported: this model's chat template does not show calls to the model.{WAY_OUT}",
                code=UNSUPPORTED,
            )
        said = [with_calls_said(m, format.tools) for m in messages]
        return rendered(self._render, said, given, open_end=open_end, doubted=doubted)

    def _described(
        self, messages: Messages, tools: Sequence[Any], variables: Mapping[str, Any], *, open_end: bool
    ) -> str:
        """In the generic format: tools stand in the system message, or in the user's if there can be none."""
        try:
            return rendered(self._render, described(messages, tools), variables, open_end=open_end)
        except InvalidRequest:
            if not tools or any(m.get("role") == "system" for m in messages):
                raise
            return rendered(self._render, described(messages, tools, system=False), variables, open_end=open_end)

    # ---- the answer --------------------------------------------------------------------------------------------

    def prompt(
        self,
        messages: Messages,
        variables: Mapping[str, Any],
        box: Toolbox | None = None,
        *,
        effort: str | None = None,
        open_end: bool = False,
    ) -> tuple[str, AnswerReader | None]:
        """The prompt of a chat, and what reads its answer; None means that the answer is all text. box: the tools that
        may be called. effort: OpenAI's reasoning_effort. Raises as `prompt_text` does.
        """
        given = dict(variables)
        format = self._format(given, messages)
        if box is not None and format.shows and format.tools is None:
            raise BadField.at(
                ("tools",),
                f" is not supported: how this model writes calls is not known.{WAY_OUT}",
                code=UNSUPPORTED,
            )
        if effort is not None:
            given |= self.choosing.effort(self._source(tools=box is not None), effort)
        text = self._prompt_text(messages, given, format, open_end=open_end)
        if box is None and format.reasoning is None and not format.before_said and not format.silent:
            return text, None
        shown = marks(format, self._tokenizer.split_special)
        reader = AnswerReader(format, box or NO_TOOLS, thinking_of(format.reasoning, text), shown)
        return text, _going_on(reader, messages[-1]["content"]) if open_end else reader

    def formed(
        self,
        reader: AnswerReader,
        params: SamplingParams,
        check: Callable[[SamplingParams], object],
        ends: Collection[int],
    ) -> SamplingParams:
        """Parameters with the form of an answer that `reader` reads, which joins theirs; see `form`. check: raises
        InvalidRequest where no form can be had; it may take seconds.
        """
        answer = params.structured_outputs
        assert answer is None or isinstance(answer, StructuredOutputs)
        found = self.form(reader, answer, lambda form: check(params.with_(structured_outputs=form)), ends)
        return params if found is answer else params.with_(structured_outputs=found)

    def form(
        self,
        reader: AnswerReader,
        answer: StructuredOutputs | None,
        check: Callable[[StructuredOutputs], object],
        ends: Collection[int],
    ) -> StructuredOutputs | None:
        """The form of an answer that `reader` reads; see `served_form`. answer: the form of what is said. ends: tokens
        that end a text.
        """
        content = content_of(reader, answer, ends)
        if (found := self._forms.find(content)) is not None:
            with suppress(InvalidRequest):  # below it is said in the words of the tools
                check(found)
                return found
        split, ids = self._tokenizer.split_special, getattr(self._tokenizer, "special_ids", ())
        found = served_form(reader, answer, split, check, ids=ids, ends=ends)
        if found is not answer:
            self._forms.keep(content, found)
        return found


def _going_on(reader: AnswerReader, content: str) -> AnswerReader:
    """What reads an answer that goes on with a content: in its reasoning, or behind what it has said. Behind that no
    reasoning comes, but in formats whose answers may have further messages.
    """
    if reader.format.reasoning is None or not content.strip():
        return reader
    parser = replace(reader, thinking=Thinking.MAY).parser()
    parser.feed(content)
    if parser.reasoning:
        return replace(reader, thinking=Thinking.OPEN)
    return reader if reader.format.prompted else replace(reader, thinking=Thinking.NONE)
