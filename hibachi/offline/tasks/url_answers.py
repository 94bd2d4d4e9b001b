"""Answers of servers: read, and without what differs from run to run: ids that are drawn, times, what the cache had."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hibachi.errors import shown
from hibachi.llm.chatformat.ids import call_id
from hibachi.llm.dialects.errors import SERVER, Refused
from hibachi.offline.tasks.lines import COMPLETIONS

Answer = dict[str, Any]
CallId = Callable[[Any, int, int], Any]
"""The id of a call in place of one that a server drew: from that, the number of the continuation and of the call."""
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def bad(words: str) -> Refused:
    """An answer with status 200 that is none."""
    return Refused(f"The server's answer cannot be read: {words}.", status=502, kind=SERVER, code="bad_answer")


def answer_in(data: bytes) -> Answer:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise bad(f"expected JSON; got {shown(data[:100].decode(errors='replace'))}") from None
    if not isinstance(found, dict):
        raise bad(f"expected an object; got {shown(found)}")
    return found


def choices_of(answer: Answer, count: int | None = None) -> list[Answer]:
    """In their order; None means as many as there are. Raises Refused."""
    found = answer.get("choices")
    if not isinstance(found, list) or not all(isinstance(c, dict) for c in found):
        raise bad(f"expected choices; got {shown(answer.get('error', found))}")
    if count is not None and len(found) != count:
        raise bad(f"expected {count} continuations; got {len(found)}")
    for choice in found:
        if (why := choice.get("finish_reason")) in ("abort", "error"):
            raise Refused(f"The server broke off (finish_reason {why}).", status=502, kind=SERVER, code="broken_off")
        if why is not None and not isinstance(why, str):
            raise bad(f"expected a finish_reason; got {shown(why)}")
    if all(isinstance(c.get("index"), int) for c in found):
        found.sort(key=lambda c: c["index"])
    return found


def text_of(choice: Answer, path: str) -> str:
    message = choice.get("message")
    found = choice.get("text") if path == COMPLETIONS else isinstance(message, dict) and (message.get("content") or "")
    if not isinstance(found, str):
        raise bad(f"expected a text; got {shown(choice)}")
    return found


def vectors_of(answer: Answer) -> list[list[float]]:
    """In their order. Raises Refused."""
    data = answer.get("data")
    if not isinstance(data, list) or not all(isinstance(d, dict) for d in data):
        raise bad(f"expected data, with vectors; got {shown(answer.get('error', data))}")
    if all(isinstance(d.get("index"), int) for d in data):
        data = sorted(data, key=lambda d: d["index"])
    return [_vector(d.get("embedding")) for d in data]


def _vector(given: Any) -> list[float]:
    """Of numbers, or of float32 in base64."""
    try:
        if isinstance(given, str):
            found: list[float] = np.frombuffer(base64.b64decode(given, validate=True), "<f4").astype(float).tolist()
            return found
        if isinstance(given, list):
            return [float(x) for x in given]
    except (ValueError, TypeError, OverflowError, binascii.Error):
        pass
    raise bad(f"expected a vector; got {shown(given)}")


@dataclass(frozen=True, slots=True)
class Used:
    """Tokens; None means the server does not say."""

    prompt: int | None
    new: int | None
    cached: int


def used_of(answer: Answer) -> Used:
    """In OpenAI's words, or in Anthropic's, whose input_tokens are those that the cache did not have."""
    found = answer.get("usage")
    used = found if isinstance(found, dict) else {}
    details = used.get("prompt_tokens_details", used.get("input_tokens_details"))
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    read, made = (_count(used.get(f"cache_{what}_input_tokens")) for what in ("read", "creation"))
    prompt = _count(used.get("prompt_tokens", used.get("input_tokens")))
    new = _count(used.get("completion_tokens", used.get("output_tokens")))
    if prompt is not None:
        prompt += (read or 0) + (made or 0)
    return Used(prompt, new, cached or read or 0)


def _count(given: Any) -> int | None:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not math.isfinite(given):
        return None
    return int(given) if 0 <= given < 2**53 else None


# ---- what differs from run to run -----------------------------------------------------------------------------------


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
