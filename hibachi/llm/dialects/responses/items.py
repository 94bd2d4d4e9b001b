"""Items: what a conversation is made of, in requests, in answers and in the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from hibachi.errors import FieldPath
from hibachi.llm.dialects.errors import Refused, unsupported
from hibachi.llm.dialects.openai.bodies import refused_by

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]
Id: TypeAlias = str | UnsetType | None
PAGE = "docs/agents.md"


class _Strict(Struct, tag_field="type", forbid_unknown_fields=True):
    pass


class InputText(_Strict, tag="input_text"):
    text: str
    prompt_cache_breakpoint: Any | UnsetType = UNSET  # it changes nothing


class OutputText(_Strict, tag="output_text"):
    text: str
    annotations: list[Any] | None = msgspec.field(default_factory=list)
    logprobs: list[Any] | None = msgspec.field(default_factory=list)


class RefusalText(_Strict, tag="refusal"):
    refusal: str


class ReasoningText(_Strict, tag="reasoning_text"):
    text: str


class SummaryText(_Strict, tag="summary_text"):
    text: str


class Message(_Strict, tag="message", kw_only=True):
    id: Id = UNSET
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | RefusalText]
    status: Status | None = "completed"
    phase: str | UnsetType | None = UNSET  # it changes nothing


class Reasoning(_Strict, tag="reasoning", kw_only=True):
    """What the model thought. Without `content`, its summary stands for it."""

    id: Id = UNSET
    summary: list[SummaryText] = msgspec.field(default_factory=list)
    content: list[ReasoningText] | UnsetType | None = UNSET
    status: Status | None = "completed"
    encrypted_content: Any | UnsetType = UNSET  # null only


class FunctionCall(_Strict, tag="function_call", kw_only=True):
    """arguments: JSON in a text, or whatever else came."""

    id: Id = UNSET
    call_id: str
    name: str
    arguments: Any
    status: Status | None = "completed"
    namespace: str | UnsetType | None = UNSET
    caller: Any | UnsetType = UNSET  # null only


class FunctionCallOutput(_Strict, tag="function_call_output", kw_only=True):
    """The result of a call."""

    id: Id = UNSET
    call_id: str
    output: str | list[InputText]
    status: Status | None = "completed"
    name: str | UnsetType | None = UNSET  # of the function; it changes nothing, nor does the next one
    namespace: str | UnsetType | None = UNSET
    caller: Any | UnsetType = UNSET  # null only


class ItemReference(_Strict, tag="item_reference"):
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
_READ = ("parsed_arguments", "parsed", "created_by")
"""Fields that OpenAI's clients have in our items, and send back with them: what they have read in a text, and what says
nothing to a model.
"""
_IDLE = ("async", "async_")  # the same, where they are null or false
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
    try:
        item: Given = msgspec.convert(_as_sent(raw), found)
    except msgspec.ValidationError as e:
        raise refused_by(e, found, PAGE, place) from None
    for name in _NULL:
        if getattr(item, name, UNSET) not in (UNSET, None):
            raise unsupported((*place, name), "It is of another server, so only null is")
    for part in item.content if isinstance(item, Message) and isinstance(item.content, list) else ():
        if isinstance(part, OutputText):  # no model is shown these, so they take no room
            part.annotations, part.logprobs = [], []
    if isinstance(item, FunctionCall | FunctionCallOutput) and not item.call_id:
        raise Refused.at((*place, "call_id"), " is empty.")
    return item


def _as_sent(raw: dict[str, Any]) -> dict[str, Any]:
    """An item without what a client has added."""
    out = {
        name: value
        for name, value in raw.items()
        if name not in _READ and (name not in _IDLE or value not in (None, False))
    }
    if isinstance(content := out.get("content"), list):
        out["content"] = [_as_sent(part) if isinstance(part, dict) else part for part in content]
    return out
