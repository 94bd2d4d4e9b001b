"""Bodies of requests to /v1/messages: JSON as typed records, read as those of OpenAI's API. `cache_control` may stand
anywhere, and has no effect: what can be cached is.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from hibachi.llm.chatformat.messages import IMAGE
from hibachi.llm.dialects.extensible import Extensible
from hibachi.llm.dialects.forms import Schema

Anything = Any | UnsetType
PAGE = "docs/agents.md"
REFUSED = {
    "billing_policy": "Nothing is billed",
    "compaction": "Ask for a summary in a message",
    "container": "Nothing runs code here",
    "context_management": "Conversations are taken as they are sent",
    "fallback_credit_token": "Nothing is billed",
    "fallbacks": "The model that is named answers",
    "inference_geo": "The server runs where its operator put it",
    "mcp_servers": "The server calls no others: give their tools in tools, and call them yourself",
    "thread": "Nothing is kept between requests: send all messages",
}
"""Fields that may only be null or empty, and why."""
OF_SERVER = "It is a tool that Anthropic's servers have: give tools with an input_schema, which you call yourself"


class TextBlock(Extensible, tag="text"):
    """citations: of an answer that is sent back; they have no effect."""

    text: str
    cache_control: Anything = UNSET
    citations: Anything = UNSET


class ToolUse(Extensible, tag="tool_use"):
    """A call that the model made. input: an object, or whatever else came. incomplete: ours, see
    `answers.ToolUseBlock`.
    """

    id: str
    name: str
    input: Any = None
    incomplete: bool | None = None
    cache_control: Anything = UNSET
    caller: Anything = UNSET
    toolset_name: str | None = None


class ImageBlock(Extensible, tag="image"):
    """Of the result of a call; no model is shown the image."""

    @property
    def text(self) -> str:
        return IMAGE


class ToolResult(Extensible, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None
    cache_control: Anything = UNSET
    toolset_name: str | None = None


class ThinkingText(Extensible, tag="thinking"):
    """Reasoning of an answer that is sent back. Its signature is not checked."""

    thinking: str
    signature: str | None = None
    cache_control: Anything = UNSET


class RedactedThinking(Extensible, tag="redacted_thinking"):
    """Reasoning that only its maker can read. It is left out."""

    data: str
    cache_control: Anything = UNSET


Block: TypeAlias = TextBlock | ToolUse | ToolResult | ThinkingText | RedactedThinking


class Turn(Extensible):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class CustomTool(Extensible, kw_only=True):
    """A tool that the client calls. Its input keeps to the schema where it is `strict`, or must be called."""

    name: str
    description: str | None = None
    input_schema: Schema
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: Anything = UNSET
    eager_input_streaming: bool | None = None  # arguments come as they are made, whatever it says
    # As their default only.
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    input_examples: list[Any] | None = None


class Choice(Struct, kw_only=True, forbid_unknown_fields=True):
    """name: of the tool, for the type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thoughts(Struct, kw_only=True, forbid_unknown_fields=True):
    """budget_tokens: has no effect; max_tokens limits the reasoning and the rest of the answer together."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None


class JsonOutput(Extensible, kw_only=True):
    type: Literal["json_schema"]
    schema: Schema


class OutputConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """effort: how much the model reasons, where its chat template has such a setting."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class CountBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens"""

    model: str
    messages: list[Turn]
    system: str | list[TextBlock] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice | None = None
    thinking: Thoughts | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = None
    speed: Literal["standard"] | None = None
    # Without effect.
    metadata: Anything = UNSET
    service_tier: Anything = UNSET
    cache_control: Anything = UNSET
    diagnostics: Anything = UNSET
    # Known, and refused by name.
    billing_policy: Anything = UNSET
    compaction: Anything = UNSET
    fallback_credit_token: Anything = UNSET
    fallbacks: Anything = UNSET
    thread: Anything = UNSET
    container: Anything = UNSET
    context_management: Anything = UNSET
    inference_geo: Anything = UNSET
    mcp_servers: Anything = UNSET


class MessagesBody(CountBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages. seed: as in /v1/chat/completions; Anthropic's API has none."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
