"""The body of POST /v1/responses, read strictly; see `hibachi.llm.dialects.openai.bodies`."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType, field

from hibachi.llm.dialects.extensible import Extensible
from hibachi.llm.dialects.forms import Schema
from hibachi.llm.dialects.openai.bodies import Anything


class PlainFormat(Extensible, tag="text"):
    """Any text."""


class ObjectFormat(Extensible, tag="json_object"):
    """Any JSON object."""


class SchemaFormat(Extensible, tag="json_schema", kw_only=True):
    """JSON that keeps to a schema, whatever `strict` says."""

    name: str
    schema: Schema
    description: str | None = None
    strict: bool | None = None


OutputFormat: TypeAlias = PlainFormat | ObjectFormat | SchemaFormat


class TextAsked(Struct, forbid_unknown_fields=True):
    """What form the text must have."""

    format: OutputFormat | None = None
    verbosity: str | None = None  # its default, "medium", only


class ReasoningAsked(Struct, forbid_unknown_fields=True):
    """effort: where the model's template reads it. summary: the reasoning is told in the place of one, as it is;
    generate_summary is its old name.
    """

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None  # "auto" only
    mode: str | None = None  # null only

    @property
    def summed(self) -> bool:
        """Whether reasoning is told where its summary would stand."""
        return self.summary is not None or self.generate_summary is not None


class FunctionTool(Extensible, tag="function", kw_only=True):
    """strict: arguments must keep to the schema also where the model may choose; null means no."""

    name: str
    parameters: Schema | None = None
    input_schema: Schema | None = None  # the same
    description: str | None = None
    strict: bool | None = None
    output_schema: Any = None  # null only
    defer_loading: bool = False  # false only
    allowed_callers: Any = None  # null only
    asynchronous: bool | None = field(default=None, name="async")  # null or false only


class Namespace(Extensible, tag="namespace", kw_only=True):
    """Functions that belong together. tools: as those of the body."""

    name: str
    description: str | None = None
    tools: list[dict[str, Any]]


class StreamAsked(Extensible):
    include_obfuscation: bool | None = None  # it changes nothing


class ResponsesBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses. input: a text of the user, or items, see items.py. Fields that OpenAI does not have are those
    of /v1/chat/completions.
    """

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamAsked | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    text: TextAsked | None = None
    reasoning: ReasoningAsked | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Anything = UNSET
    prompt_cache_retention: Anything = UNSET
    prompt_cache_options: Anything = UNSET
    client_metadata: Anything = UNSET
    background: bool | None = None  # false only
    # As in /v1/chat/completions.
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    queue_timeout: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Known, and refused by name.
    conversation: Any | UnsetType = UNSET
    prompt: Any | UnsetType = UNSET
    max_tool_calls: Any | UnsetType = UNSET
    context_management: Any | UnsetType = UNSET
    moderation: Any | UnsetType = UNSET


SAME = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "seed",
    "stop",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "priority",
    "cache_salt",
    "timeout",
    "queue_timeout",
    "chat_template_kwargs",
)
"""Fields that a chat has by the same name."""
