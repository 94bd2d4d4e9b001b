"""Conversations in the form that a chat template takes: calls and results, reasoning, roles, an answer that goes on."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from hibachi.errors import FieldPath, InvalidRequest, shown
from hibachi.llm.chatformat.completed import completed
from hibachi.llm.chatformat.errors import UNSUPPORTED, BadField
from hibachi.llm.chatformat.format import ChatFormat, History
from hibachi.llm.chatformat.once import Once

Messages: TypeAlias = Sequence[Mapping[str, Any]]
WAY_OUT = (
    ' --tool-call-parser generic (in Python tool_call_parser="generic") describes tools in a system message, for any '
    "model; the name of the format in which the model writes calls is taken too."
)
"""What an operator can do about tools that a template does not know."""
_once = Once(logging.getLogger("hibachi.chat"))
CUT_SHOWN = 1000
"""Letters of the arguments of a call that was cut off: all of them may fill the context, which ended the call."""
HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Of a surrogate pair, escaped in JSON."""
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")  # of a call, as Mistral's templates want it


def as_objects(message: Mapping[str, Any], place: FieldPath, answered: Collection[str] = ()) -> Mapping[str, Any]:
    """A message with the arguments of its calls as objects: OpenAI's API has them as JSON in a text, and templates want
    the object; what is none stays a text. Calls that we have marked as cut off are left out but for those of the ids
    `answered`. place: of the message, such as ("messages", 3).

    Raises BadField.
    """
    calls = message.get("tool_calls")
    if message.get("function_call") is not None:
        raise BadField.at(
            (*place, "function_call"), " is not supported: send the call in tool_calls.", code=UNSUPPORTED
        )
    if calls is None or calls == []:
        return message
    if message.get("role") != "assistant":
        raise BadField.at(
            (*place, "tool_calls"),
            f" is in a message of {shown(message.get('role'))}: only messages of the role 'assistant' have calls.",
        )
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise BadField.at((*place, "tool_calls"), f" must be a list of calls; got {shown(calls)}.")
    whole = [
        _as_object(call, (*place, "tool_calls", i))
        for i, call in enumerate(calls)
        if not (isinstance(call, Mapping) and call.get("incomplete") is True) or _key(call.get("id")) in answered
    ]
    if whole:
        return {**message, "tool_calls": whole}
    said = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**said, "content": said.get("content") or ""}


def _as_object(given: Any, place: FieldPath) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise BadField.at(
            place, f' must be a call, {{"id": ..., "type": "function", "function": ...}}; got {shown(given)}.'
        )
    kind, id, function = given.get("type"), given.get("id"), given.get("function")
    if kind not in (None, "function"):
        raise BadField.at(
            (*place, "type"),
            f" is not supported as {shown(kind)}: only calls of type 'function' are.",
            code=UNSUPPORTED,
        )
    if not isinstance(id, (str, type(None))):
        raise BadField.at((*place, "id"), f" must be a text; got {shown(id)}.")
    if not isinstance(function, Mapping):
        raise BadField.at((*place, "function"), f" must be an object with name and arguments; got {shown(function)}.")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise BadField.at(
            (*place, "function", "name"), f" must be the name of a function; got {shown(function.get('name'))}."
        )
    arguments = _arguments(function.get("arguments"), function["name"])
    if given.get("incomplete") is True and isinstance(arguments, str):
        arguments = arguments[:CUT_SHOWN]
    return {**given, "function": {**function, "arguments": arguments}}


def _arguments(given: Any, name: str) -> Mapping[str, Any] | str:
    """No text, and null, are no arguments; those that were encoded twice are an object. What is none stays a text: a
    client cannot mend what a model wrote long ago, and would send it again and again.
    """
    found = given
    for _ in range(2):
        with suppress(ValueError, RecursionError):
            found = json.loads(found or "{}") if isinstance(found, str) else found
    if found is None:
        return {}
    if isinstance(found, Mapping):
        whole: Mapping[str, Any] = found
        if isinstance(given, str) and HALF.search(given):
            whole = json.loads(whole_letters(found))
        return whole
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, default=str)
    _once.warning(
        hash((name, text)),
        "arguments of an earlier call of %s are no JSON object; the model is shown them as they are where its chat "
        "template can show that, else none: %s",
        name,
        text,
    )
    return text


def whole_letters(value: Any) -> str:
    """Parsed JSON as JSON again, with U+FFFD for halves of surrogate pairs, which no text may have: models and clients
    cut emojis. Raises RecursionError.
    """
    return json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def without_texts(messages: Messages, taken: Callable[[], bool]) -> Messages:
    """Messages whose calls have no arguments where these are a text, unless a template takes them so."""
    found = list(messages)
    for i, m in enumerate(messages):
        calls = m.get("tool_calls") or ()
        if any(map(_is_text, calls)) and not taken():
            whole = [{**c, "function": {**c["function"], "arguments": {}}} if _is_text(c) else c for c in calls]
            found[i] = {**m, "tool_calls": whole}
    return found


def _is_text(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("arguments"), str)


def hidden_calls(
    render: Callable[..., str], messages: Messages, variables: Mapping[str, Any], text: str, *, open_end: bool = False
) -> bool:
    """Whether the template does not show the calls of the conversation to the model.

    text: of the conversation as it is, `rendered` with this open_end.
    """
    for i, m in enumerate(messages):
        if m.get("tool_calls"):
            without = [*messages[:i], {k: v for k, v in m.items() if k != "tool_calls"}, *messages[i + 1 :]]
            with suppress(InvalidRequest):
                return rendered(render, without, variables, open_end=open_end, doubted=()) == text
            return False  # the template treats further messages with calls like this one
    return False


def as_written(messages: Messages, format: ChatFormat) -> Messages:
    """Messages whose calls have the form that a template of this format takes."""
    tools = format.tools
    if tools is None or not any(m.get("tool_calls") for m in messages):
        return messages
    if format.history.beside == "content":  # it would hide the calls
        messages = [part for m in messages for part in _apart(m)]
    found = [_in_form(m, format.history) for m in (_one_by_one(messages) if tools.most == 1 else messages)]
    return found if tools.id is None else [_with_short_ids(m) for m in found]


def _apart(m: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What is said and what is called, each as a message of its own."""
    if not m.get("tool_calls") or not m.get("content"):
        return [m]
    said = {name: value for name, value in m.items() if name != "tool_calls"}
    return [said, {"role": m.get("role"), "content": None, "tool_calls": m["tool_calls"]}]


def _one_by_one(messages: Messages) -> list[Mapping[str, Any]]:
    """For a template that writes one call of a message: each is a message, and its result follows it."""
    found: list[Mapping[str, Any]] = []
    at = 0
    while at < len(messages):
        m, calls = messages[at], messages[at].get("tool_calls")
        at += 1
        if not isinstance(calls, list) or len(calls) < 2 or not all(isinstance(c, dict) for c in calls):
            found.append(m)
            continue
        behind = at
        while behind < len(messages) and messages[behind].get("role") == "tool":
            behind += 1
        of, rest = _paired(calls, messages[at:behind])
        for call, results in zip(calls, of, strict=True):
            found.append({**m, "tool_calls": [call]})
            m = {"role": m.get("role"), "content": None}
            found += results
        found += rest
        at = behind
    return found


def _paired(calls: Sequence[Mapping[str, Any]], results: Messages) -> tuple[list[Messages], Messages]:
    """The results of each call, and those of no call. A result without an id is of the first call that has none yet,
    and one whose id no call has, of the first such call without an id.
    """
    of: list[list[Mapping[str, Any]]] = [[] for _ in calls]
    rest: list[Mapping[str, Any]] = []
    every = deque(range(len(calls)))
    named: dict[Any, deque[int]] = {}
    for n, call in enumerate(calls):
        named.setdefault(_key(call.get("id")), deque()).append(n)
    for r in results:
        id = _key(r.get("tool_call_id"))
        places = every if id is None else named.get(id) or named.get(None)
        while places and len(places) > 1 and of[places[0]]:
            places.popleft()
        (of[places[0]] if places else rest).append(r)
    return [*of], rest


def _key(id: Any) -> Any:
    return id if isinstance(id, str) else None


def _in_form(m: Mapping[str, Any], history: History) -> Mapping[str, Any]:
    if not isinstance(m.get("tool_calls"), list) or not m["tool_calls"]:
        return m
    out = dict(m)
    if not m.get("content"):
        out["content"] = "" if history.content == "empty" else None
    if history.arguments == "text":
        out["tool_calls"] = [_as_text(c) for c in m["tool_calls"]]
    return out


def _as_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def rendered(
    render: Callable[..., str],
    messages: Messages,
    variables: Mapping[str, Any],
    *,
    open_end: bool = False,
    doubted: Sequence[str] = ("tools", "documents"),
) -> str:
    """Call `render(messages, **variables)` with the first form of the messages that the template takes.

    open_end: up to the end of the last message's content, which is to be continued. doubted: variables that the
    template may not look at.

    Raises InvalidRequest if the template takes no form, BadField for a doubted variable that does not change its text,
    and for a last message that it does not show to its end.
    """
    if open_end:
        return _opened(render, messages, variables, doubted)
    text = _rendered(render, messages, variables)
    for name in doubted:
        if variables.get(name) and _without(render, messages, variables, name) == text:
            raise BadField.at(
                (name,),
                f" is not supported: this model's chat template does not show them to the model."
                f"{WAY_OUT if name == 'tools' else ''}",
                code=UNSUPPORTED,
            )
    return text


def _without(render: Callable[..., str], messages: Messages, variables: Mapping[str, Any], name: str) -> str | None:
    """The text without a variable; None if there is none."""
    with suppress(InvalidRequest):
        return _rendered(render, messages, {other: value for other, value in variables.items() if other != name})
    return None


def _opened(
    render: Callable[..., str], messages: Messages, variables: Mapping[str, Any], doubted: Sequence[str]
) -> str:
    """The text up to the end of the last message's content. A mark behind the content shows where the template puts
    that end, whatever else looks like it.
    """
    *before, last = messages
    content = last.get("content")
    if not isinstance(content, str):
        raise BadField.about(
            ("messages",),
            "continue_final_message needs a last message with a content: expected a text, which may be empty.",
        )
    mark = f"END{secrets.token_hex(12)}"
    text = rendered(render, [*before, {**last, "content": f"{content}{mark} "}], variables, doubted=doubted)
    front, found, behind = text.rpartition(mark)
    if not found:
        raise BadField.at(
            ("continue_final_message",),
            " is not supported with this conversation: the model's chat template does not show the last message as "
            "it is.",
            code=UNSUPPORTED,
        )
    blanks = len(content) - len(content.rstrip())
    if behind.startswith(" ") or not content.strip() or not front.endswith(content[len(content) - blanks :]):
        return front
    return front[: len(front) - blanks]  # the template takes away blanks at the end


def _rendered(render: Callable[..., str], messages: Messages, variables: Mapping[str, Any]) -> str:
    first: InvalidRequest | None = None
    for given in _given(variables):
        for form in _forms(messages):
            try:
                return render(form, **given)
            except InvalidRequest as e:
                first = first or e
    assert first is not None
    raise first


def _given(variables: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The variables as they are; with tools that have all their parts."""
    yield variables
    tools = variables.get("tools")
    if tools and (whole := completed(tools)) != tools:
        yield {**variables, "tools": whole}


def _forms(messages: Messages) -> Iterator[Messages]:
    """The messages as they are, where null counts as missing; with "" for null; with nine letters as ids of calls; with
    the names of the functions that results are of.
    """
    yield messages
    texts = messages
    if any(m.get("content", "") is None for m in messages):
        texts = [{**m, "content": ""} if m.get("content", "") is None else m for m in messages]
        yield texts
    named = _with_names(texts)
    forms = [texts] if named == list(texts) else [texts, named]
    for form in forms:
        if form is named:
            yield named
        short = [_with_short_ids(m) for m in form]
        if short != list(form):
            yield short


def _with_names(messages: Messages) -> list[Mapping[str, Any]]:
    """Results with the names of their functions, which OpenAI's API leaves out and some templates want."""
    names: dict[str | None, Any] = {}
    found: list[Mapping[str, Any]] = []
    for m in messages:
        for call in m.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping) and isinstance(call.get("id"), str):
                names[call["id"]] = function.get("name")
        name = names.get(_key(m.get("tool_call_id"))) if m.get("role") == "tool" else None
        found.append({**m, "name": name} if name and not m.get("name") else m)
    return found


def _with_short_ids(m: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same id becomes the same, in a call and in its answer."""
    out = dict(m)
    if isinstance(m.get("tool_call_id"), str):
        out["tool_call_id"] = _short(m["tool_call_id"])
    if isinstance(m.get("tool_calls"), list):
        out["tool_calls"] = [
            {**c, "id": _short(c["id"])} if isinstance(c, dict) and isinstance(c.get("id"), str) else c
            for c in m["tool_calls"]
        ]
    return out


def _short(given: str) -> str:
    if _SHORT_ID.fullmatch(given):
        return given
    return hashlib.sha256(given.encode(errors="replace")).hexdigest()[:9]
