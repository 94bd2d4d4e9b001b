"""What a body of a response asks for, in the words of a chat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from hibachi.errors import FieldPath, PromptTooLong
from hibachi.llm.dialects.errors import Refused, refusing, unsupported
from hibachi.llm.dialects.extensible import pass_over
from hibachi.llm.dialects.forms import Format, JsonObjectFormat, JsonSchemaFormat, NamedSchema, check_served
from hibachi.llm.dialects.openai.bodies import Bounds, ChatBody
from hibachi.llm.dialects.openai.conversation import conversation
from hibachi.llm.dialects.openai.parse import ParsedRequest, check_count
from hibachi.llm.dialects.responses.bodies import SAME, ObjectFormat, ResponsesBody, SchemaFormat
from hibachi.llm.dialects.responses.items import (
    FunctionCall,
    FunctionCallOutput,
    Given,
    Item,
    Message,
    Reasoning,
    RefusalText,
    given,
    is_skipped,
)
from hibachi.llm.dialects.responses.tools import functions, joined, of_chat
from hibachi.llm.dialects.steps import ReadingStep, Steps
from hibachi.llm.dialects.textmodel import TextModel

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
REFUSED = {
    "conversation": "Nothing is kept by that name: previous_response_id says what came before",
    "prompt": "No templates of prompts are kept here",
    "max_tool_calls": "It limits tools that OpenAI runs, and none is run here",
    "context_management": "A conversation is not made shorter; truncation leaves out its beginning",
    "moderation": "Nothing is judged",
}
"""Fields that may only be null, and why."""
SUMMARIES = (None, "auto", "concise", "detailed")
_ONLY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("background", (None, False), "An answer is waited for; send stream to see it grow"),
    ("text.verbosity", (None, "medium"), "The models served have no such setting"),
    ("reasoning.summary", SUMMARIES, "It is null, auto, concise or detailed"),
    ("reasoning.generate_summary", SUMMARIES, "It is null, auto, concise or detailed"),
    ("reasoning.context", (None, "auto"), "The model's template says which reasoning it is shown again"),
    ("reasoning.mode", (None,), "The models served have no such setting"),
)
"""Fields, what they may be, and why nothing else."""
MOST_METADATA, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512  # OpenAI's
_BY_NAME = "function", "allowed_tools"  # forms of tool_choice that are objects


def request(
    model: TextModel, body: ResponsesBody, items: Callable[[], Sequence[Item]], before: int = 0, size: int = 0
) -> Steps[tuple[ParsedRequest, list[int]]]:
    """What a response asks for, and the token ids of its prompt, which fits into the context. Where truncation is
    "auto", the oldest turns are left out as far as they must; what system and developer say stays.

    items: gives the whole conversation, references resolved; the first `before` of them are kept, in `size` bytes.
    Raises Refused, InvalidRequest or PromptTooLong.
    """
    chat: ChatBody = yield ReadingStep("body", lambda: as_chat(body, items(), before), size)
    with refusing(partial(in_body, body.tools)):
        try:
            return (yield from _fitting(model, chat))
        except PromptTooLong:
            turns = starts(chat)
            if body.truncation != "auto" or not turns:
                raise
        best = yield from _fitting(model, shortened(chat, turns[-1]))
        low, high = 0, len(turns) - 1  # from turns[high] on it fits, and from none before turns[low]
        while low < high:
            middle = (low + high) // 2
            try:
                best = yield from _fitting(model, shortened(chat, turns[middle]))
                high = middle
            except PromptTooLong:
                low = middle + 1
        return best


def _fitting(model: TextModel, chat: ChatBody) -> Steps[tuple[ParsedRequest, list[int]]]:
    asked, ids = yield from model.chat(chat)
    model.reading.check_length(ids, asked.max_tokens)
    return asked, ids


def own_items(body: ResponsesBody, bounds: Bounds) -> list[Given]:
    """The items of the input. Raises Refused."""
    if isinstance(body.input, str):
        return [Message(role="user", content=body.input)]
    check_count("input", body.input, bounds.messages, "items")
    for kind in {raw["type"] for raw in body.input if is_skipped(raw)}:
        pass_over("Items", kind)
    return [given(raw, ("input", i)) for i, raw in enumerate(body.input) if not is_skipped(raw)]


def as_chat(body: ResponsesBody, items: Sequence[Item], before: int = 0) -> ChatBody:
    """The chat that a body asks for. items: the whole conversation, references resolved; the first `before` of them are
    kept. Raises Refused.
    """
    _check(body)
    tools = [of_chat(tool) for tool in functions(body.tools)]
    fields: dict[str, Any] = {name: getattr(body, name) for name in SAME}
    if not tools:
        fields["parallel_tool_calls"] = None
    include = body.include or ()
    return ChatBody(
        **fields,
        messages=_checked(items, body, before),
        max_completion_tokens=body.max_output_tokens,
        logprobs=True if LOGPROBS in include else None,
        top_logprobs=body.top_logprobs if LOGPROBS in include else None,
        tools=tools or None,
        tool_choice=_choice(body.tool_choice, bool(tools)),
        response_format=_format(body),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )


def _checked(items: Sequence[Item], body: ResponsesBody, before: int) -> list[dict[str, Any]]:
    """The messages that items stand for, with what can be wrong in them refused by its item. Raises Refused."""
    found = turns(items, body.instructions)
    places = [None] * before + [i for i, raw in enumerate(body.input) if not is_skipped(raw)]
    with refusing(partial(_in_items, items, [own for _, own in found], places)):
        return conversation([message for message, _ in found], len(found) + len(items))


def _in_items(
    items: Sequence[Item], of: Sequence[Sequence[int]], places: Sequence[int | None], path: FieldPath
) -> FieldPath:
    """Where a field of a message stands in the input. of: the items of each message. places: of items in the input;
    None means it is kept.
    """
    match path:
        case "messages", int(i), "tool_calls", int(j), "function", *rest:
            return _in_items(items, of, places, ("messages", i, "tool_calls", j, *rest))
        case "messages", int(i), "tool_calls", int(j), *rest:
            k = [k for k in of[i] if isinstance(items[k], FunctionCall)][j]
        case "messages", int(i), *rest:
            k = of[i][0]
        case _:
            return in_body(None, path)
    if (place := places[k]) is None:
        return ("input",)
    return "input", place, *("call_id" if name in ("id", "tool_call_id") else name for name in rest)


def turns(items: Iterable[Item], instructions: str | None = None) -> list[tuple[dict[str, Any], list[int]]]:
    """The messages that items stand for, and the places of the items of each. Reasoning, the text and the calls of one
    turn are one message.
    """
    found = list[tuple[dict[str, Any], list[int]]]()
    if instructions is not None:
        found.append(({"role": "system", "content": instructions}, []))
    turn: dict[str, Any] | None = None  # the model's, which may go on
    for k, item in enumerate(items):
        if isinstance(item, FunctionCallOutput):
            found.append(({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}, [k]))
            turn = None
        elif isinstance(item, Message) and item.role != "assistant":
            found.append(({"role": item.role, "content": _text(item.content)}, [k]))
            turn = None
        else:
            if turn is None or not _goes_on(turn, item):
                turn = {"role": "assistant", "content": None}
                found.append((turn, []))
            _add(turn, item)
            found[-1][1].append(k)
    for message, _ in found:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
        if "reasoning_content" in message:
            message["reasoning_content"] = "\n".join(message["reasoning_content"])
    return found


def _goes_on(turn: dict[str, Any], item: Item) -> bool:
    """Whether an item belongs to the turn before it."""
    if isinstance(item, Reasoning):
        return turn["content"] is None and "tool_calls" not in turn
    return not isinstance(item, Message) or turn["content"] is None


def _add(turn: dict[str, Any], item: Item) -> None:
    if isinstance(item, Reasoning):
        parts = item.content or item.summary
        turn.setdefault("reasoning_content", []).extend(part.text for part in parts)
    elif isinstance(item, FunctionCall):
        function = {"name": joined(item.namespace or None, item.name), "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call | {"incomplete": True} if item.status == "incomplete" else call)
    elif isinstance(item, Message):
        turn["content"] = _text(item.content)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, RefusalText) else part.text for part in content)


def _check(body: ResponsesBody) -> None:
    check_served(body, REFUSED, {})
    for name, allowed, why in _ONLY:
        if (value := _at(body, name)) not in allowed:
            raise unsupported(name, why, value)
    for name in body.include or ():
        if name not in (LOGPROBS, ENCRYPTED):
            raise unsupported("include", f"{name[:80]!r} is of tools or inputs that are not served")
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise Refused.at("top_logprobs", f' needs include: ["{LOGPROBS}"].')
    if body.stream_options is not None and not body.stream:
        raise Refused.at("stream_options", " needs stream to be true.")
    check_count("metadata", body.metadata, MOST_METADATA)
    for key, value in (body.metadata or {}).items():
        check_count("metadata", key, LONGEST_KEY, "characters in a key")
        check_count("metadata", value, LONGEST_VALUE, "characters in a value")


def _at(body: ResponsesBody, name: str) -> Any:
    first, _, inner = name.partition(".")
    found = getattr(body, first)
    return getattr(found, inner) if inner and found is not None else found


def _choice(given: Any, tools: bool) -> Any:
    """tool_choice as a chat has it. tools: there are some."""
    if given is None or isinstance(given, str):
        return given if tools or given not in ("auto", "none") else None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in _BY_NAME:
        what, shown = " or ".join(_BY_NAME), str(kind if isinstance(given, dict) else given)[:40]
        raise unsupported(
            "tool_choice", f"'none', 'auto', 'required' and objects of type {what} are taken, not {shown!r}"
        )
    if kind == "function":
        return _named_tool(given)
    listed = given.get("tools")
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise Refused.at("tool_choice.tools", " must be a list of tools.", code="invalid_type")
    names = [_named_tool(one) for one in listed]
    return {"type": kind, "allowed_tools": {"mode": given.get("mode"), "tools": names}}


def _named_tool(given: dict[str, Any]) -> dict[str, Any]:
    """One that tool_choice names. In a namespace, it is named with it."""
    name, space = given.get("name"), given.get("namespace")
    if isinstance(name, str) and isinstance(space, str):
        name = joined(space, name)
    return {"type": given.get("type"), "function": {"name": name}}


def _format(body: ResponsesBody) -> Format | None:
    asked = None if body.text is None else body.text.format
    if isinstance(asked, SchemaFormat):
        return JsonSchemaFormat(
            json_schema=NamedSchema(
                name=asked.name, description=asked.description, schema=asked.schema, strict=asked.strict
            )
        )
    return JsonObjectFormat() if isinstance(asked, ObjectFormat) else None


# ---- conversations that are too long --------------------------------------------------------------------------------


def starts(chat: ChatBody) -> list[int]:
    """Where turns of the user begin, but the first, and no result comes whose call stands before."""
    found, open_ = list[int](), set[Any]()  # results whose calls are yet to come, on the way back
    for i in range(len(chat.messages) - 1, -1, -1):
        message = chat.messages[i]
        if message["role"] == "tool":
            open_.add(message.get("tool_call_id"))
        for call in message.get("tool_calls") or ():
            open_.discard(call.get("id"))
        if message["role"] == "user" and not open_:
            found.append(i)
    first = next((i for i, message in enumerate(chat.messages) if message["role"] == "user"), None)
    return [i for i in reversed(found) if i != first]


def shortened(chat: ChatBody, start: int) -> ChatBody:
    """The same from message `start` on, with what system and developer said before."""
    kept = [message for message in chat.messages[:start] if message["role"] in ("system", "developer")]
    return msgspec.structs.replace(chat, messages=[*kept, *chat.messages[start:]])


# ---- where the fields of a chat stand in its body -------------------------------------------------------------------


def in_body(tools: Sequence[dict[str, Any]] | None, path: FieldPath) -> FieldPath:
    """Where a field of the chat that is made of a body stands in it. tools: those of the body."""
    match path:
        case "messages", *_:
            return ("input",)
        case (("max_tokens" | "max_completion_tokens"), *_):
            return ("max_output_tokens",)
        case "response_format", *rest:
            return "text", "format", *rest[rest[:1] == ["json_schema"] :]
        case "tools", int(i), *rest:
            return *functions(tools)[i].place, *rest[rest[:1] == ["function"] :]
        case "tool_choice", ("function" | "allowed_tools"), *rest:
            return "tool_choice", *rest
        case "reasoning_effort", *_:
            return "reasoning", "effort"
        case "logprobs", *_:
            return ("include",)
    return path
