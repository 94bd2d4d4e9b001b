"""How a model is talked to: a conversation in its chat template, and how its answer is read and formed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hibachi.api.asking import Asked, by_name
from hibachi.api.conversation import WAY_OUT, as_written, hidden_calls, rendered, without_developer
from hibachi.api.errors import Refused
from hibachi.api.forms import refused
from hibachi.api.turns import Turns
from hibachi.errors import InvalidRequest
from hibachi.model.text.chat import choose_template
from hibachi.structured import StructuredOutputs
from hibachi.tools.choosing import Choosing, Parsers
from hibachi.tools.format import ChatFormat, thinking_of
from hibachi.tools.forming import formed, shown_by
from hibachi.tools.generic import described, with_calls_said
from hibachi.tools.tools import Toolbox

Messages = Sequence[Mapping[str, Any]]
NO_TOOLS = Toolbox(mode="none")


class Talk:
    """chat_template: the name of one of the model's, or Jinja source; None means the model's own. parsers: how the
    format of tool calls and reasoning is chosen.

    Templates may take long, so threads call this where others wait.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None, parsers: Parsers | None = None) -> None:
        self._tokenizer, self._template = tokenizer, chat_template
        self.choosing: Choosing = Choosing(self._render, parsers)

    def check(self) -> None:
        """Raises Refused if there is no template."""
        if self._template is None and not self._tokenizer.chat_templates:
            raise Refused(
                "This model has no chat template: send a prompt to /v1/completions, or give it a template at the "
                "start, with --chat-template.",
                param="messages",
                code="no_chat_template",
            )

    def _source(self, *, tools: bool) -> str:
        """The text of the template that is taken for a conversation."""
        return choose_template(dict(self._tokenizer.chat_templates), self._template, tools=tools)

    def _format(self, variables: Mapping[str, Any], messages: Messages) -> ChatFormat:
        tools = bool(variables.get("tools"))
        return self.choosing.format(self._source(tools=tools), tools=tools or _calls(messages))

    def _render(self, messages: Messages, **variables: Any) -> str:
        more = {} if self._template is None else {"chat_template": self._template}
        text: str = self._tokenizer.render_chat(messages, **{**variables, **more})
        return text

    # ---- the prompt --------------------------------------------------------------------------------------------

    def written(
        self,
        messages: Messages,
        variables: Mapping[str, Any],
        *,
        open_end: bool = False,
    ) -> str:
        """A conversation as the model is shown it. open_end: its last message goes on.

        Raises InvalidRequest, and Refused for what the template does not show.
        """
        return self._written(messages, variables, self._format(variables, messages), open_end=open_end)

    def _written(
        self, messages: Messages, variables: Mapping[str, Any], format: ChatFormat, *, open_end: bool = False
    ) -> str:
        given = {k: v for k, v in variables.items() if k not in ("chat_template", "messages")}
        if "developer" not in self._source(tools=bool(given.get("tools"))):
            messages = without_developer(messages)
        if self.choosing.parsers.generic:
            return self._described(messages, given.pop("tools", None) or (), given, open_end=open_end)
        sure = format.shows and format.tools is not None and format.source == "derived"
        messages = as_written(messages, format)
        if format.history.content == "null":
            given["nulls"] = True
        doubted = ("documents",) if sure else ("tools", "documents")
        text = rendered(self._render, messages, given, open_end=open_end, doubted=doubted)
        if sure or (field := hidden_calls(self._render, messages, given, text)) is None:
            return text
        if format.tools is None:
            raise Refused(
                f"{field} is not supported: this model's chat template does not show calls to the model.{WAY_OUT}",
                param=field,
                code="unsupported_parameter",
            )
        said = [with_calls_said(m, format.tools) for m in messages]
        return rendered(self._render, said, given, open_end=open_end, doubted=doubted)

    def _described(
        self, messages: Messages, tools: Sequence[Any], variables: Mapping[str, Any], *, open_end: bool
    ) -> str:
        """`written` in the generic format: tools stand in the system message, or the user's if there can be none."""
        try:
            return rendered(self._render, described(messages, tools), variables, open_end=open_end)
        except InvalidRequest:
            if not tools or any(m["role"] == "system" for m in messages):
                raise
            return rendered(self._render, described(messages, tools, system=False), variables, open_end=open_end)

    # ---- the answer --------------------------------------------------------------------------------------------

    def spoken(self, asked: Asked, variables: Mapping[str, Any] | None = None) -> str:
        """The prompt of a chat. How its answer is read is noted in `asked.turns`. variables: further ones for the
        template. Raises Refused or InvalidRequest.
        """
        assert asked.messages is not None
        box, given = asked.toolbox, {**(variables or {}), **asked.template}
        format = self._format(given, asked.messages)
        if box is not None and format.shows and format.tools is None:
            raise Refused(
                f"tools is not supported: how this model writes calls is not known.{WAY_OUT}",
                param="tools",
                code="unsupported_parameter",
            )
        if asked.effort is not None:
            with by_name():
                given |= self.choosing.effort(self._source(tools=box is not None), asked.effort)
        text = self._written(asked.messages, given, format, open_end=asked.open_end)
        if box is not None or format.reasoning is not None or format.before_said or format.silent:
            self._turn(asked, format, box or NO_TOOLS, text)
        return text

    def _turn(self, asked: Asked, format: ChatFormat, box: Toolbox, prompt: str) -> None:
        thinking = thinking_of(format.reasoning, prompt)
        shown = shown_by(format, self._tokenizer.split_special)
        asked.turns = Turns(format, box, thinking, asked.include_reasoning, self.choosing.parsers.fields, shown)

    def form(self, asked: Asked, check: Callable[[StructuredOutputs], object], ends: Collection[int]) -> None:
        """Make the form of the answer to a chat, behind `spoken`: of its tools, its reasoning and what was asked for.

        check: checks a form, which may take seconds. ends: tokens that end a text. Raises Refused, which names a tool,
        and what `check` raises.
        """
        turns, answer = asked.turns, asked.params.structured_outputs
        if turns is None or (answer is None and not turns.toolbox.callable):
            return
        assert answer is None or isinstance(answer, StructuredOutputs)
        split, ids = self._tokenizer.split_special, getattr(self._tokenizer, "special_ids", ())
        try:
            found = formed(turns.format, turns.toolbox, turns.thinking, answer, split, check, ids=ids, ends=ends)
        except InvalidRequest as e:
            raise _refused(e, asked.form) from e
        if found is not answer:
            asked.params = asked.params.with_(structured_outputs=found)
            asked.form = asked.form or "tools"


def _refused(error: InvalidRequest, said: str | None) -> Refused:
    words = str(error)
    if not words.startswith("tools"):
        return refused(error, said)
    return Refused(words, param=words.partition(" ")[0].rstrip(":"), code="invalid_value")


def _calls(messages: Messages) -> bool:
    return any(m.get("tool_calls") for m in messages)
