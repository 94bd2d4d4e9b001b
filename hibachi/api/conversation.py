"""Conversations: converts messages of OpenAI's clients to the form that chat templates take, and renders them."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hibachi.api.errors import Refused
from hibachi.errors import InvalidRequest

Messages = Sequence[Mapping[str, Any]]
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")  # of a call, as Mistral's templates want it


def conversation(given: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """The messages of a conversation for a template. Raises Refused."""
    if not given:
        raise Refused(
            'messages is empty: send at least one, such as {"role": "user", "content": "Hello"}.',
            param="messages",
            code="empty_array",
        )
    if len(given) > most:
        raise Refused(
            f"messages has {len(given)} entries; at most {most} are served.", param="messages", code="invalid_value"
        )
    return [message(m, i) for i, m in enumerate(given)]


def message(given: dict[str, Any], i: int) -> dict[str, Any]:
    """A message with its content as one text, or null, and the arguments of its calls as objects. Raises Refused."""
    if not isinstance(given.get("role"), str):
        raise Refused(f"messages[{i}] has no role.", param=f"messages[{i}].role", code="missing_required_parameter")
    content = given.get("content")
    if isinstance(given.get("tool_calls"), list):
        given = {**given, "tool_calls": [_call(c) for c in given["tool_calls"]]}
    if content is None or isinstance(content, str):
        return given
    place = f"messages[{i}].content"
    if not isinstance(content, list):
        raise Refused(f"{place} must be a text or a list of parts.", param=place, code="invalid_type")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise Refused(
                f"{place}: only parts of text are served; got {str(kind)[:40]!r}.", param=place, code="unsupported"
            )
        texts.append(part[kind])
    return {**given, "content": "\n".join(texts)}


def _call(given: Any) -> Any:
    """A tool call. OpenAI's API has its arguments as JSON in a text; templates want the object."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return given
    with suppress(ValueError, RecursionError):
        arguments = json.loads(function["arguments"] or "{}")
        if isinstance(arguments, dict):
            return {**given, "function": {**function, "arguments": arguments}}
    return given


def rendered(
    render: Callable[..., str], messages: Messages, variables: Mapping[str, Any], *, open_end: bool = False
) -> str:
    """Call `render(messages, **variables)` with the first form of the messages that the template takes.

    open_end: up to the end of the last message's content, which is to be continued. Raises InvalidRequest if the
    template takes no form. Raises Refused for tools or documents that do not change its text, and for a last message
    that it does not show to its end.
    """
    if open_end:
        return _opened(render, messages, variables)
    text = _rendered(render, messages, variables)
    for shown in ("tools", "documents"):
        if variables.get(shown):
            without = {name: value for name, value in variables.items() if name != shown}
            with suppress(InvalidRequest):
                if _rendered(render, messages, without) == text:
                    raise Refused(
                        f"{shown} is not supported: this model's chat template does not show them to the model.",
                        param=shown,
                        code="unsupported_parameter",
                    )
    return text


def _opened(render: Callable[..., str], messages: Messages, variables: Mapping[str, Any]) -> str:
    """A mark behind the last content says where the template puts its end, whatever else looks like it."""
    *before, last = messages
    content = last.get("content")
    if not isinstance(content, str):
        raise Refused(
            "continue_final_message needs a last message with a content: expected a text, which may be empty.",
            param="messages",
            code="invalid_value",
        )
    mark = f"END{secrets.token_hex(12)}"
    text = rendered(render, [*before, {**last, "content": f"{content}{mark} "}], variables)
    front, found, behind = text.rpartition(mark)
    if not found:
        raise Refused(
            "continue_final_message is not supported with this conversation: the model's chat template does not show "
            "the last message as it is.",
            param="continue_final_message",
            code="unsupported_parameter",
        )
    blanks = len(content) - len(content.rstrip())
    if behind.startswith(" ") or not content.strip() or not front.endswith(content[len(content) - blanks :]):
        return front
    return front[: len(front) - blanks]  # the template takes away blanks at the end


def _rendered(render: Callable[..., str], messages: Messages, variables: Mapping[str, Any]) -> str:
    first: InvalidRequest | None = None
    for form in _forms(messages):
        try:
            return render(form, **variables)
        except InvalidRequest as e:
            first = first or e
    assert first is not None
    raise first


def _forms(messages: Messages) -> Iterator[Messages]:
    """The messages as they are, where null counts as missing; with "" for null; with nine letters as ids of calls."""
    yield messages
    texts = messages
    if any(m.get("content", "") is None for m in messages):
        texts = [{**m, "content": ""} if m.get("content", "") is None else m for m in messages]
        yield texts
    short = [_with_short_ids(m) for m in texts]
    if short != list(texts):
        yield short


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
