"""Conversations: converts messages of OpenAI's clients to the form that chat templates take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hibachi.api.errors import Refused
from hibachi.errors import InvalidRequest, shown
from hibachi.tools.history import NotShown, as_objects

MOST_VALUES = 1 << 18  # of the arguments of a call; commas and brackets count them
MOST_OF_ALL = 1 << 19  # of all calls, or of all tools


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
    calls = sum(len(c) for m in given if isinstance(c := m.get("tool_calls"), list))
    if calls > most:
        raise Refused(
            f"messages has {calls} tool_calls; at most {most} are served.", param="messages", code="invalid_value"
        )
    _check_arguments(given)
    with by_name():
        return _answered([message(m, i) for i, m in enumerate(given)])


def _answered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each result of a call names a call that was made; one that names none is of the first call in front of it that
    has no result yet. Raises Refused.
    """
    made: set[Any] = set()
    open_ = Counter[Any]()  # calls of the last message with calls that have no result, in their order
    found = []
    for i, m in enumerate(messages):
        if calls := m.get("tool_calls"):
            open_ = Counter(call.get("id") for call in calls)
            made.update(open_)
        if m["role"] == "tool":
            m = _result(m, f"messages[{i}].tool_call_id", made, open_)
        found.append(m)
    return found


def _result(m: dict[str, Any], place: str, made: set[Any], open_: Counter[Any]) -> dict[str, Any]:
    """A result with the id of its call, which is no longer open."""
    given = m.get("tool_call_id")
    if given is None and open_:
        id = _take(open_, next(iter(open_)))
        return m if id is None else {**m, "tool_call_id": id}
    if given is None:
        raise Refused(
            f"{place} is missing, and no call in front of this result is without one.",
            param=place,
            code="missing_required_parameter",
        )
    if not isinstance(given, str) or (given not in made and None not in made):
        raise Refused(
            f"{place} names a call that was not made: expected the id of a call in front of it; got {shown(given)}.",
            param=place,
            code="invalid_value",
        )
    if given in open_:
        _take(open_, given)
    return m


def _take(open_: Counter[Any], id: Any) -> Any:
    open_[id] -= 1
    if not open_[id]:
        del open_[id]
    return id


def message(given: dict[str, Any], i: int) -> dict[str, Any]:
    """A message with its content as one text, or null, and the arguments of its calls as objects. Raises Refused, and
    InvalidRequest, which begins with the place.
    """
    if not isinstance(given.get("role"), str):
        raise Refused(f"messages[{i}] has no role.", param=f"messages[{i}].role", code="missing_required_parameter")
    for name in ("reasoning_content", "reasoning"):
        if not isinstance(given.get(name), (str, type(None))):
            place = f"messages[{i}].{name}"
            raise Refused(f"{place} must be a text; got {shown(given[name])}.", param=place, code="invalid_type")
    content = given.get("content")
    given = dict(as_objects(given, f"messages[{i}]"))
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


def _check_arguments(messages: Sequence[dict[str, Any]]) -> None:
    """Reading JSON of millions of values takes seconds, in which Python does little else. Raises Refused."""
    total = 0
    for i, m in enumerate(messages):
        calls = m.get("tool_calls")
        for j, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            n = sum(arguments.count(sign) for sign in ",[{") if isinstance(arguments, str) else 0
            total += n
            if n > MOST_VALUES or total > MOST_OF_ALL:
                place = f"messages[{i}].tool_calls[{j}].function.arguments"
                most = f"{MOST_VALUES}, or with those before it {MOST_OF_ALL}"
                raise Refused(
                    f"{place} has more than {most} commas and brackets. Shorten it.", param=place, code="invalid_value"
                )


def check_values(tools: Any) -> int:
    """`_check_arguments` for the tools of a request. Returns their bytes as JSON. Raises Refused."""
    from msgspec.json import encode  # which rows of plain text do without

    text = encode(tools)
    if sum(text.count(sign) for sign in (b",", b"[", b"{")) > MOST_OF_ALL:
        raise Refused(
            f"tools has more than {MOST_OF_ALL} commas and brackets. Shorten it.", param="tools", code="invalid_value"
        )
    return len(text)


@contextmanager
def by_name() -> Iterator[None]:
    """Where a message begins with the field that it is about, the refusal names it."""
    try:
        yield
    except InvalidRequest as e:
        code = "unsupported_parameter" if " is not supported" in str(e) else "invalid_value"
        raise Refused(str(e), param=str(e).partition(" ")[0], code=code) from None


@contextmanager
def refusing() -> Iterator[None]:
    """What a template does not show is refused by name."""
    try:
        yield
    except NotShown as e:
        code = "unsupported_parameter" if e.unsupported else "invalid_value"
        raise Refused(str(e), param=e.field, code=code) from None
