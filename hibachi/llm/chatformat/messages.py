"""Messages of OpenAI's clients, over HTTP, in rows or in Python, in the form that templates and `Talk` take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from hibachi.errors import FieldPath, shown
from hibachi.llm.chatformat.errors import BadField
from hibachi.llm.chatformat.history import as_objects

IMAGE = "(An image is here, which this model cannot be shown.)"
"""Stands for one in the result of a call, as an agent sends it again and again. One that the user sends is refused."""


def plain_messages(given: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with contents as one text, or null, and arguments of calls as objects. Each result names a call that
    was made; one that names none is of the first call in front of it that has no result yet. A call that was cut off
    is left out unless it has a result: then a client has made it, and the model must see what came of that.

    What this returns it takes again, and leaves as it is. Raises BadField.
    """
    given = list(given)
    made = set[Any]()
    open_ = Counter[Any]()  # calls of the last message with calls that have no result, in their order
    found = []
    for i, (each, answered) in enumerate(zip(given, _answered(given), strict=True)):
        m = _message(each, ("messages", i), answered)
        if calls := m.get("tool_calls"):
            open_ = Counter(call.get("id") for call in calls)
            made.update(open_)
        if m["role"] == "tool":
            m = _result(m, ("messages", i, "tool_call_id"), made, open_)
        found.append(m)
    return found


def _answered(messages: Sequence[Mapping[str, Any]]) -> list[set[str]]:
    """Of each message the ids of its calls that get a result. Nothing has been checked by then."""
    found, results = list[set[str]](), set[str]()
    for m in reversed(messages):
        calls = m.get("tool_calls")
        ids = [c.get("id") for c in calls if isinstance(c, Mapping)] if isinstance(calls, (list, tuple)) else []
        found.append({id for id in ids if isinstance(id, str) and id in results})
        results -= found[-1]
        if m.get("role") == "tool" and isinstance(id := m.get("tool_call_id"), str):
            results.add(id)
    return found[::-1]


def _message(given: Mapping[str, Any], place: FieldPath, answered: Collection[str]) -> dict[str, Any]:
    if not isinstance(given.get("role"), str):
        raise BadField.about((*place, "role"), place, " has no role.", code="missing_required_parameter")
    for name in ("reasoning_content", "reasoning"):
        if not isinstance(given.get(name), (str, type(None))):
            at = (*place, name)
            raise BadField.at(at, f" must be a text; got {shown(given[name])}.", code="invalid_type")
    found, content = dict(as_objects(given, place, answered)), given.get("content")
    if thought := _thought(given):
        found["reasoning_content"] = thought
    if found["role"] == "assistant" and not found.get("tool_calls"):
        found.setdefault("content", "")  # which a client leaves out where it was null
    if content is None or isinstance(content, str):
        return found
    return {**found, "content": _text(content, (*place, "content"), result=found["role"] == "tool")}


def _thought(given: Mapping[str, Any]) -> str:
    """Reasoning that stands only under a name that Copilot or OpenRouter has for it."""
    if any(given.get(name) for name in ("reasoning_content", "reasoning", "thinking")):
        return ""
    if isinstance(text := given.get("reasoning_text"), str) and text:
        return text
    details = given.get("reasoning_details")
    texts = [
        each.get("text") or each.get("summary")
        for each in (details if isinstance(details, (list, tuple)) else ())
        if isinstance(each, Mapping)
    ]
    return "".join(text for text in texts if isinstance(text, str))


def _text(content: Any, place: FieldPath, *, result: bool) -> str:
    """Of a list of parts. result: of a call."""
    if not isinstance(content, (list, tuple)):
        raise BadField.at(place, " must be a text or a list of parts.", code="invalid_type")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if result and kind == "image_url":
            texts.append(IMAGE)
            continue
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise BadField.at(place, f": only parts of text are served; got {str(kind)[:40]!r}.", code="unsupported")
        texts.append(part[kind])
    return "\n".join(texts)


def _result(m: dict[str, Any], place: FieldPath, made: set[Any], open_: Counter[Any]) -> dict[str, Any]:
    """A result with the id of its call, which is no longer open."""
    given = m.get("tool_call_id")
    if given is None and open_:
        id = _take(open_, next(iter(open_)))
        return m if id is None else {**m, "tool_call_id": id}
    if given is None:
        raise BadField.at(
            place,
            " is missing, and each call in front of this result has one: expected the id of its call.",
            code="missing_required_parameter",
        )
    if not isinstance(given, str) or (given not in made and None not in made):
        raise BadField.at(
            place,
            f" names a call that was not made: expected the id of a call in front of it; got {shown(given)}.",
        )
    if given in open_:
        _take(open_, given)
    return m


def _take(open_: Counter[Any], id: Any) -> Any:
    open_[id] -= 1
    if not open_[id]:
        del open_[id]
    return id
