"""Answers of servers without what differs from run to run: ids that are drawn, times, what the cache had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hibachi.llm.chatformat.ids import call_id
from hibachi.offline.tasks.urlbase import Answer

CallId = Callable[[Any, int, int], Any]
"""The id of a call in place of one that a server drew: from that, the number of the continuation and of the call."""
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def renamed(given: Any, before: str, now: str, choice: int, number: int) -> str | None:
    """The id of a call whose answer is renamed, if it was made of the answer's, as our servers do; else None."""
    front = "toolu_" if str(given).startswith("toolu_") else "call_"
    for nine in (False, True):
        old, new = (call_id(answer, choice, number, nine=nine) for answer in (before, now))
        if given == (old if nine else front + old.removeprefix("call_")):
            return new if nine else front + new.removeprefix("call_")
    return None


def renaming(before: str, now: str, drawn: Callable[[str], str], *, ours: bool) -> CallId:
    """Gives ids to the calls of an answer whose own id was `before` and is `now`.

    ours: one of our servers answered: an id that is not made of the answer's was written by the model, and stays.
    drawn: makes an id in place of one that another server drew.
    """

    def call(given: Any, choice: int, number: int) -> Any:
        made = renamed(given, before, now, choice, number)
        if made is not None or ours:
            return made or given
        return f"call_{drawn(f'call {choice} {number}')}"

    return call


def rename_chat(answer: Answer, call: CallId) -> None:
    for choice in answer["choices"]:
        message, index = choice.get("message"), choice.get("index")
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for i, one in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(one, dict) and "id" in one:
                one["id"] = call(one["id"], index if isinstance(index, int) else 0, i)


def rename_response(answer: Answer, own: str, created: int, call: CallId) -> None:
    """own: what ids have behind their prefix."""
    for name in ("created_at", "completed_at"):
        if answer.get(name) is not None:
            answer[name] = created
    calls = 0
    for i, item in enumerate(answer["output"]):
        if not isinstance(item, dict):
            continue
        if "id" in item:
            kind = str(item.get("type"))
            item["id"] = f"{_PREFIXES.get(kind, kind)}_{own}_{i}"
        if "call_id" in item:
            item["call_id"] = call(item["call_id"], 0, calls)
            calls += 1


def rename_message(answer: Answer, call: CallId) -> None:
    calls = [block for block in answer["content"] if isinstance(block, dict) and block.get("type") == "tool_use"]
    for i, block in enumerate(calls):
        if "id" in block:
            block["id"] = call(block["id"], 0, i)


def alone(usage: dict[str, Any]) -> None:
    """Leave out what depends on other requests, by any API's names."""
    usage.pop("prompt_tokens_details", None)
    if isinstance(details := usage.get("completion_tokens_details"), dict):
        for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
            details.pop(name, None)
        if not details:
            usage.pop("completion_tokens_details")
    if isinstance(details := usage.get("input_tokens_details"), dict):
        details.update(dict.fromkeys(details.keys() & {"cached_tokens", "cache_write_tokens"}, 0))
    for name in ("cache_read_input_tokens", "cache_creation_input_tokens"):
        if isinstance(usage.get(name), int) and isinstance(usage.get("input_tokens"), int):
            usage["input_tokens"] += usage[name]
            usage[name] = 0
    usage.pop("cache_creation", None)
