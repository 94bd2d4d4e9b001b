"""Requests of tenants who do no harm: whatever storms beside them, they get what they get alone."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from .house import KEYS
from .wire import Answer, Closed, Wire, events, request

LONG, SHORT = "It is a truth universally acknowledged, that a single man", "She was"
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who was Emma?"}]
GREEDY = {"temperature": 0, "ignore_eos": True}
SEEDED = {"temperature": 1.0, "seed": 7, "ignore_eos": True}


@dataclass(frozen=True)
class Innocent:
    name: str
    path: str
    body: dict[str, Any]

    def data(self, tenant: str) -> bytes:
        return request("POST", self.path, json.dumps(self.body).encode(), KEYS[tenant])


def _texts() -> list[Innocent]:
    """Whole and streamed."""
    plain, chat = "/v1/completions", "/v1/chat/completions"
    bodies = {
        "greedy": (plain, {"prompt": LONG, "max_tokens": 24, **GREEDY}),
        "long": (plain, {"prompt": SHORT, "max_tokens": 120, **GREEDY}),
        "two of n": (plain, {"prompt": SHORT, "n": 2, "max_tokens": 16, "logprobs": 3, **SEEDED}),
        "echo": (plain, {"prompt": LONG, "echo": True, "logprobs": 2, "max_tokens": 4, **GREEDY}),
        "ids": (plain, {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 8, "return_token_ids": True, **SEEDED}),
        "penalties": (plain, {"prompt": LONG, "max_tokens": 20, "frequency_penalty": 0.5, "stop": ["."], **SEEDED}),
        "chat": (chat, {"messages": TALK, "max_tokens": 16, **GREEDY}),
        "seeded chat": (
            chat,
            {"messages": TALK, "n": 2, "max_tokens": 9, "logprobs": True, "top_logprobs": 2, **SEEDED},
        ),
    }
    whole = [Innocent(name, path, body) for name, (path, body) in bodies.items()]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return whole + [Innocent(f"{i.name}, streamed", i.path, i.body | usage) for i in whole]


def _agents() -> list[Innocent]:
    """Calls, responses and messages, whole and streamed."""
    schema = {"type": "object", "properties": {"at": {"type": "string", "maxLength": 20}}, "required": ["at"]}
    calls = {"tools": [{"type": "function", "function": {"name": "look", "parameters": schema}}]}
    said = {"model": "tiny", "system": "Be brief.", "messages": TALK[1:], "temperature": 0}
    looks = {"tools": [{"name": "look", "input_schema": schema}], "tool_choice": {"type": "any"}}
    bodies = {
        "call": ("/v1/chat/completions", {"messages": TALK, "max_tokens": 60, "tool_choice": "required", **calls}),
        "response": ("/v1/responses", {"input": TALK, "max_output_tokens": 16, **GREEDY}),
        "message": ("/v1/messages", said | {"max_tokens": 16}),
        "called message": ("/v1/messages", said | {"max_tokens": 60, **looks}),
    }
    bodies["call"][1]["temperature"] = 0
    whole = [Innocent(name, path, body) for name, (path, body) in bodies.items()]
    return whole + [Innocent(f"{i.name}, streamed", i.path, i.body | {"stream": True}) for i in whole]


INNOCENTS = (
    *_texts(),
    *_agents(),
    Innocent("vectors", "/v1/embeddings", {"input": [LONG, SHORT]}),
    Innocent("a packed vector", "/v1/embeddings", {"input": SHORT, "encoding_format": "base64"}),
    Innocent("token ids", "/tokenize", {"messages": TALK, "return_token_strs": True}),
    Innocent("a text", "/detokenize", {"tokens": [5, 6, 7, 8]}),
)


async def send(port: int, innocent: Innocent, tenant: str) -> tuple[Answer, list[float]]:
    """The answer, and when its parts came. Raises Closed, Broken, TimeoutError."""
    wire = await Wire.open(port)
    try:
        await wire.send(innocent.data(tenant))
        answer = await wire.head()
        times, parts = [answer.began], []
        async for piece in wire.pieces(answer):
            parts.append(piece)
            times.append(time.monotonic())
        answer.body = b"".join(parts)
        if not await wire.quiet():
            raise Closed
        return answer, times
    finally:
        wire.close()


def content(answer: Answer) -> Any:
    """What must be equal: all but names, times, and what the cache knew."""
    if not answer.streamed:
        return _plain(json.loads(answer.body))
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    parts = [json.loads(event) for event in events(answer.body)]
    if "type" in parts[0]:
        return _of_parts(parts)
    for said in parts:
        usage = said.get("usage") or usage
        for choice in said["choices"]:
            _join(choices.setdefault(choice["index"], {}), choice)
    return [choices[i] for i in sorted(choices)], _plain(usage)


def _of_parts(parts: list[dict[str, Any]]) -> Any:
    """Of the named events of a response or a message."""
    if parts[0]["type"] == "response.created":
        return _plain(parts[-1]["response"])
    blocks: dict[int, dict[str, Any]] = {}
    why = None
    for part in parts:
        if part["type"] == "content_block_start":
            blocks[part["index"]] = _plain(part["content_block"])
        elif part["type"] == "content_block_delta":
            _join(blocks[part["index"]], {k: v for k, v in part["delta"].items() if k != "type"})
        elif part["type"] == "message_delta":
            why = part["delta"]["stop_reason"], part["usage"]["output_tokens"]
    return blocks, why


def _join(so_far: dict[str, Any], more: dict[str, Any]) -> None:
    """However the tokens were cut into chunks, the result is the same."""
    for name, value in more.items():
        if isinstance(value, dict):
            _join(so_far.setdefault(name, {}), value)
        elif name == "tool_calls" and value:
            for call in value:
                _join(so_far.setdefault(f"call {call['index']}", {}), _plain(call) | {"index": None})
        elif isinstance(value, (str, list)) and name not in ("finish_reason", "role"):
            so_far[name] = so_far.get(name, type(value)()) + value
        elif value is not None:
            so_far[name] = value


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        hidden = ("id", "created", "prompt_tokens_details", "system_fingerprint", "call_id", "created_at")
        hidden += ("completed_at", "input_tokens_details", "cache_read_input_tokens")
        if value.get("type") == "message" and "usage" in value:  # without what the cache knew
            value = value | {"usage": value["usage"]["output_tokens"]}
        return {name: _plain(v) for name, v in value.items() if name not in hidden}
    return value
