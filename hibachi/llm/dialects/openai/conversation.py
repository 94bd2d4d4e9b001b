"""Conversations of requests: how long they may be, and what is wrong with them as refusals by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hibachi.llm.chatformat.messages import plain_messages
from hibachi.llm.dialects.errors import Refused, refusing

MOST_VALUES = 1 << 18  # of the arguments of a call; commas and brackets count them
MOST_OF_ALL = 1 << 19  # of all calls, or of all tools


def conversation(given: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """The messages of a conversation for a template. Raises Refused."""
    if not given:
        raise Refused.at(
            "messages",
            ' is empty: send at least one, such as {"role": "user", "content": "Hello"}.',
            code="empty_array",
        )
    if len(given) > most:
        raise Refused.at("messages", f" has {len(given)} entries; at most {most} are served.")
    calls = sum(len(c) for m in given if isinstance(c := m.get("tool_calls"), list))
    if calls > most:
        raise Refused.at("messages", f" has {calls} tool_calls; at most {most} are served.")
    _check_arguments(given)
    with refusing():
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
                raise Refused.at(
                    ("messages", i, "tool_calls", j, "function", "arguments"),
                    f" has more than {MOST_VALUES}, or with those before it {MOST_OF_ALL} commas and brackets. Shorten "
                    f"it.",
                )


def check_values(tools: Any) -> int:
    """`_check_arguments` for the tools of a request. Returns their bytes as JSON. Raises Refused."""
    from msgspec.json import encode  # which rows of plain text do without

    text = encode(tools)
    if sum(text.count(sign) for sign in (b",", b"[", b"{")) > MOST_OF_ALL:
        raise Refused.at("tools", f" has more than {MOST_OF_ALL} commas and brackets. Shorten it.")
    return len(text)
