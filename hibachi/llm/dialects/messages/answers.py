"""Answers of Anthropic's Messages API: whole messages, the events of a stream, and lists of models."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

from msgspec import Struct

SIGNATURE = "hibachi"
"""Of reasoning. Clients send it back with the reasoning, and it is not looked at."""


class AnthropicErrorDetails(Struct):
    """error_code: as OpenAI's clients are told it, but for Anthropic's "thread_unsupported_request"."""

    error_code: str


class AnthropicErrorAbout(Struct, omit_defaults=True):
    type: str
    message: str
    details: AnthropicErrorDetails | None = None


class AnthropicError(Struct, kw_only=True, tag="error"):
    """As Anthropic tells errors."""

    error: AnthropicErrorAbout
    request_id: str


class TokenCount(Struct):
    input_tokens: int


# ---- a message -----------------------------------------------------------------------------------------------------


class SaidBlock(Struct, tag="text"):
    text: str


class ThoughtBlock(Struct, tag="thinking"):
    thinking: str
    signature: str


class Direct(Struct, tag="direct"):
    """The model itself makes a call, not code that it wrote."""


class ToolUseBlock(Struct, tag="tool_use", omit_defaults=True):
    """incomplete: max_tokens cut the call off, or it holds what nobody can read, and `input` is {}. Not of Anthropic's;
    nothing says so there.
    """

    id: str
    name: str
    input: dict[str, Any]
    caller: Direct
    incomplete: bool = False


AnswerBlock: TypeAlias = SaidBlock | ThoughtBlock | ToolUseBlock


class ThinkingTokens(Struct):
    thinking_tokens: int


class MessageUsage(Struct, omit_defaults=True):
    """Tokens. input_tokens: of the prompt, without those that were found in the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens_details: ThinkingTokens | None = None


class MessageAnswer(Struct, tag="message"):
    id: str
    role: str
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


# ---- events --------------------------------------------------------------------------------------------------------


class MessageStart(Struct, tag="message_start"):
    message: MessageAnswer


class BlockStart(Struct, tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class TextDelta(Struct, tag="text_delta"):
    text: str


class InputDelta(Struct, tag="input_json_delta"):
    partial_json: str


class ThinkingDelta(Struct, tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag="signature_delta"):
    signature: str


class BlockDelta(Struct, tag="content_block_delta"):
    index: int
    delta: TextDelta | InputDelta | ThinkingDelta | SignatureDelta


class BlockStop(Struct, tag="content_block_stop", omit_defaults=True):
    """incomplete: as `ToolUseBlock` has it."""

    index: int
    incomplete: bool = False


class Ending(Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(Struct, tag="message_delta"):
    delta: Ending
    usage: MessageUsage


class MessageStop(Struct, tag="message_stop"):
    pass


class Ping(Struct, tag="ping"):
    pass


EVENTS = (MessageStart, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop, Ping, AnthropicError)


# ---- models --------------------------------------------------------------------------------------------------------


class AnthropicModel(Struct, tag="model"):
    """created_at: RFC 3339."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None = None
    lifecycle: str = "active"


class AnthropicModels(Struct):
    """All of them, on one page."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


def model(name: str, created: float, longest: int | None) -> AnthropicModel:
    """created: Unix time in seconds. longest: tokens of the context."""
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return AnthropicModel(name, name, at, longest)


def models(found: Sequence[AnthropicModel]) -> AnthropicModels:
    ends = (found[0].id, found[-1].id) if found else (None, None)
    return AnthropicModels(list(found), *ends)
