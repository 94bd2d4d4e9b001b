"""Responses, and the events of their streams, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from hibachi.llm.dialects.openai.answers import TokenLogprob, encode_line
from hibachi.llm.dialects.responses.items import (
    FunctionCall,
    FunctionCallOutput,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
    SummaryText,
)

Output: TypeAlias = Message | Reasoning | FunctionCall


class InputDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(Struct):
    reason: str = "max_output_tokens"


class Failure(Struct):
    code: str
    message: str


class ResponseTool(Struct, tag="function", kw_only=True):
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class ResponseNamespace(Struct, tag="namespace"):
    name: str
    description: str
    tools: list[ResponseTool]


class ResponseText(Struct):
    format: dict[str, Any]


class ResponseReasoning(Struct):
    effort: str | None
    summary: str | None


class Response(Struct, kw_only=True):
    """A response. status: "in_progress", "completed", "incomplete" or "failed". Times are Unix times in seconds."""

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    completed_at: int | None = None
    background: bool = False
    error: Failure | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Output] = msgspec.field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ResponseReasoning
    service_tier: str = "default"
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: Any
    tools: list[ResponseTool | ResponseNamespace]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | UnsetType = UNSET  # once it has ended
    user: str | UnsetType = UNSET
    metadata: dict[str, str]


class Deleted(Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(Struct):
    """Items, the latest first unless asked otherwise. has_more: there are some after `last_id`."""

    data: list[Message | Reasoning | FunctionCall | FunctionCallOutput]
    first_id: str
    last_id: str
    has_more: bool
    object: str = "list"


def listed(ids: Sequence[str], data: Sequence[bytes], *, more: bool) -> ItemList:
    """Items that are JSON already. more: there are further ones."""
    items: Any = [msgspec.Raw(item) for item in data]
    return ItemList(items, ids[0] if ids else "", ids[-1] if ids else "", more)


# ---- events ------------------------------------------------------------------------------------------------------


class _Whole(Struct):
    """An event that tells the response as it is then."""

    sequence_number: int
    response: Response


class ResponseCreated(_Whole, tag="response.created"):
    pass


class ResponseInProgress(_Whole, tag="response.in_progress"):
    pass


class ResponseCompleted(_Whole, tag="response.completed"):
    pass


class ResponseIncomplete(_Whole, tag="response.incomplete"):
    pass


class ResponseFailed(_Whole, tag="response.failed"):
    pass


class ResponseError(Struct, tag="error"):
    """Before a response has begun."""

    sequence_number: int
    code: str | None
    message: str
    param: str | None


class ItemAdded(Struct, tag="response.output_item.added"):
    sequence_number: int
    output_index: int
    item: Output


class ItemDone(Struct, tag="response.output_item.done"):
    sequence_number: int
    output_index: int
    item: Output


class PartAdded(Struct, tag="response.content_part.added"):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class PartDone(Struct, tag="response.content_part.done"):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class TextDelta(Struct, tag="response.output_text.delta"):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(Struct, tag="response.output_text.done"):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(Struct, tag="response.reasoning_text.delta"):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningDone(Struct, tag="response.reasoning_text.done"):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str


class SummaryAdded(Struct, tag="response.reasoning_summary_part.added"):
    sequence_number: int
    item_id: str
    output_index: int
    summary_index: int
    part: SummaryText


class SummaryPartDone(Struct, tag="response.reasoning_summary_part.done"):
    """status: "incomplete" where it was cut off."""

    sequence_number: int
    item_id: str
    output_index: int
    summary_index: int
    part: SummaryText
    status: str | UnsetType = UNSET


class SummaryDelta(Struct, tag="response.reasoning_summary_text.delta"):
    sequence_number: int
    item_id: str
    output_index: int
    summary_index: int
    delta: str


class SummaryDone(Struct, tag="response.reasoning_summary_text.done"):
    sequence_number: int
    item_id: str
    output_index: int
    summary_index: int
    text: str


class ArgumentsDelta(Struct, tag="response.function_call_arguments.delta"):
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Struct, tag="response.function_call_arguments.done"):
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


EVENTS = (
    ResponseCreated,
    ResponseInProgress,
    ItemAdded,
    PartAdded,
    TextDelta,
    TextDone,
    ReasoningDelta,
    ReasoningDone,
    SummaryAdded,
    SummaryDelta,
    SummaryDone,
    SummaryPartDone,
    ArgumentsDelta,
    ArgumentsDone,
    PartDone,
    ItemDone,
    ResponseCompleted,
    ResponseIncomplete,
    ResponseFailed,
    ResponseError,
)
_BEGINNINGS: dict[type[Struct], bytes] = {
    kind: f"event: {kind.__struct_config__.tag}\ndata: ".encode() for kind in EVENTS
}


def frame(event: Struct) -> bytes:
    """An event as it is sent."""
    return _BEGINNINGS[type(event)] + encode_line(event) + b"\n\n"
