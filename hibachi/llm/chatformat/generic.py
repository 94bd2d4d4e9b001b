"""Tools for templates that know none: they are described in a system message, and calls and results are text.

The form is Hermes's, which many models have seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hibachi.llm.chatformat.format import HERMES, ToolFormat
from hibachi.llm.chatformat.tools import ToolCall
from hibachi.llm.chatformat.write import written

Message = Mapping[str, Any]
_CALL = '<tool_call>\n{"name": "...", "arguments": {"...": "..."}}\n</tool_call>'


def described(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    *,
    system: bool = True,
) -> list[dict[str, Any]]:
    """A conversation that any template can show: of system, user and assistant messages with text.

    tools: as templates are shown them. system: tools are described in the system message; False means in front of the
    first message of the user, for templates without a system message.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        _add(found, _plain(message))
    if not tools:
        return found
    about, role = _about(tools), "system" if system else "user"
    at = next((i for i, m in enumerate(found) if m.get("role") == role), None)
    if system and at != 0:
        return [{"role": "system", "content": about}, *found]
    if at is None:
        return [{"role": role, "content": about}, *found]
    own = found[at].get("content") or ""
    joined = f"{own}\n\n{about}" if system else f"{about}\n\n{own}"
    found[at] = {**found[at], "content": joined.strip()}
    return found


def _about(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call tools, with arguments of these schemas:\n<tools>\n{lines}\n</tools>\n"
        f"To call one, write nothing but its name and arguments:\n{_CALL}\n"
        f"Results come as <tool_response>."
    )


def _plain(message: Message) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    return with_calls_said(message, HERMES)


def with_calls_said(message: Message, format: ToolFormat) -> dict[str, Any]:
    """A message whose calls are a part of what it says, as the model wrote them. Raises InvalidRequest for arguments
    that are no object.
    """
    calls = message.get("tool_calls")
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    if not calls:
        return kept
    said, text = message.get("content") or "", written(format, [_call(call) for call in calls])
    return {**kept, "content": f"{said}\n{text}" if said else text}


def _call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function") or {}
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(str(function.get("name")), text, call.get("id"))


def _add(found: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Results are one message with what the user says behind them, as many templates want turns to alternate."""
    before = found[-1] if found else None
    if before is not None and before.get("role") == message.get("role") == "user" and _is_result(before):
        before["content"] = f"{before['content']}\n{message.get('content') or ''}"
    else:
        found.append(message)


def _is_result(message: Message) -> bool:
    return str(message.get("content")).endswith("</tool_response>")
