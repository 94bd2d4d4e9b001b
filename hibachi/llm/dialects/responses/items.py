"""Items: what a conversation is made of, in requests, in answers and in the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from hibachi.errors import FieldPath
from hibachi.llm.chatformat.messages import IMAGE
from hibachi.llm.dialects.errors import Refused, unsupported
from hibachi.llm.dialects.extensible import Extensible
from hibachi.llm.dialects.openai.bodies import taken

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]
Id: TypeAlias = str | UnsetType | None
PAGE = "docs/agents.md"


class InputText(Extensible, tag="input_text"):
    text: str
    prompt_cache_breakpoint: Any | UnsetType = UNSET  # it changes nothing


class InputImage(Extensible, tag="input_image"):
    """Of the result of a call; what is kept is `IMAGE`, as no model is shown it."""


class OutputText(Extensible, tag="output_text"):
    text: str
    annotations: list[Any] | None = msgspec.field(default_factory=list)
    logprobs: list[Any] | None = msgspec.field(default_factory=list)


class RefusalText(Extensible, tag="refusal"):
    refusal: str


class ReasoningText(Extensible, tag="reasoning_text"):
    text: str


class SummaryText(Extensible, tag="summary_text"):
    text: str


class Message(Extensible, tag="message", kw_only=True):
    id: Id = UNSET
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | RefusalText]
    status: Status | None = "completed"
    phase: str | UnsetType | None = UNSET  # it changes nothing


class Reasoning(Extensible, tag="reasoning", kw_only=True):
    """What the model thought. Without `content`, its summary stands for it."""

    id: Id = UNSET
    summary: list[SummaryText] = msgspec.field(default_factory=list)
    content: list[ReasoningText] | UnsetType | None = UNSET
    status: Status | None = "completed"
    encrypted_content: Any | UnsetType = UNSET  # null only


class FunctionCall(Extensible, tag="function_call", kw_only=True):
    """arguments: JSON in a text, or whatever else came."""

    id: Id = UNSET
    call_id: str
    name: str
    arguments: Any
    status: Status | None = "completed"
    namespace: str | UnsetType | None = UNSET
    caller: Any | UnsetType = UNSET  # null only


class FunctionCallOutput(Extensible, tag="function_call_output", kw_only=True):
    """The result of a call."""

    id: Id = UNSET
    call_id: str
    output: str | list[InputText | InputImage]
    status: Status | None = "completed"
    name: str | UnsetType | None = UNSET  # of the function; it changes nothing, nor does the next one
    namespace: str | UnsetType | None = UNSET
    caller: Any | UnsetType = UNSET  # null only


class ItemReference(Extensible, tag="item_reference"):
    """An item of an earlier response, or of its input."""

    id: str


Item: TypeAlias = Message | Reasoning | FunctionCall | FunctionCallOutput
"""An item as it is kept. Its `id` is a text then, and the content of a message is a list."""
Given: TypeAlias = Item | ItemReference
PREFIXES: Mapping[type, str] = {Message: "msg", Reasoning: "rs", FunctionCall: "fc", FunctionCallOutput: "fco"}
"""What ids begin with."""
_KINDS: Mapping[str, type[Any]] = {
    "message": Message,
    "reasoning": Reasoning,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "item_reference": ItemReference,
}
_NULL = ("encrypted_content", "caller")
SKIPPED = "web_search_call", "file_search_call", "mcp_list_tools", "ghost_snapshot"
"""Types of items that are passed over: they say what a server did, and the message behind them what came of it."""
# As they are read when they were kept: what a text has beside it, which may be long, is passed over.
_RAW = [(name, msgspec.Raw, msgspec.Raw()) for name in ("annotations", "logprobs")]
_KeptText: Any = msgspec.defstruct("_KeptText", _RAW, bases=(OutputText,), tag="output_text")
_PARTS: Any = list[InputText | _KeptText | RefusalText]
_KeptMessage: Any = msgspec.defstruct(
    "_KeptMessage", [("content", _PARTS)], bases=(Message,), tag="message", kw_only=True
)
_decoder = msgspec.json.Decoder(_KeptMessage | Reasoning | FunctionCall | FunctionCallOutput)
_encode = msgspec.json.Encoder().encode


def kept(data: bytes) -> Item:
    """An item that `as_kept` wrote, to be shown to a model."""
    item: Item = _decoder.decode(data)
    return item


def as_kept(item: Item, id: str) -> bytes:
    """An item as JSON, in the form that answers have, with this id. Changes the item so."""
    item.id, item.status = id, item.status or "completed"
    if isinstance(item, Reasoning) and item.content is None:
        item.content = UNSET
    if isinstance(item, Message):
        if isinstance(item.content, str):
            kind = OutputText if item.role == "assistant" else InputText
            item.content = [kind(item.content)]
        for part in item.content:
            if isinstance(part, OutputText):
                part.annotations, part.logprobs = part.annotations or [], part.logprobs or []
    return _encode(item)


def is_skipped(raw: Any) -> bool:
    return isinstance(raw, dict) and isinstance(kind := raw.get("type"), str) and kind in SKIPPED


def given(raw: Any, place: FieldPath) -> Given:
    """One item of a request. place: where it stands. Raises Refused, which names the field."""
    kind = raw.get("type")
    if kind is None:
        kind = "message" if "role" in raw else "item_reference"
        raw = {**raw, "type": kind}
    found = _KINDS.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise unsupported(
            (*place, "type"), f"{str(kind)[:40]!r} is none of the items that are served, which are {', '.join(_KINDS)}"
        )
    item: Given = taken(found, raw, PAGE, place)
    for name in _NULL:
        if getattr(item, name, UNSET) not in (UNSET, None, ""):
            raise unsupported((*place, name), "It is of another server, so only null is")
    for part in item.content if isinstance(item, Message) and isinstance(item.content, list) else ():
        if isinstance(part, OutputText):  # no model is shown these, so they take no room
            part.annotations, part.logprobs = [], []
    if isinstance(item, FunctionCallOutput) and isinstance(item.output, list):
        item.output = [InputText(IMAGE) if isinstance(part, InputImage) else part for part in item.output]
    if isinstance(item, FunctionCall | FunctionCallOutput) and not item.call_id:
        raise Refused.at((*place, "call_id"), " is empty.")
    return item
