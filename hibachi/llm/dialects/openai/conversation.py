"""Conversations of requests: how long they may be, and what is wrong with them as refusals by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hibachi.errors import InvalidRequest
from hibachi.llm.chatformat.history import NotShown
from hibachi.llm.chatformat.messages import BadMessage, plain_messages
from hibachi.llm.dialects.errors import Refused

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
        return plain_messages(given)


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
    except BadMessage as e:
        raise Refused(str(e), param=e.place, code=e.code) from None
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
