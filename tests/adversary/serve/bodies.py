"""Random bodies: fields of completions and chats with values that are right, unusual, and wrong in any way."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import msgspec

from hibachi.llm.dialects.messages.bodies import CountBody, MessagesBody
from hibachi.llm.dialects.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from hibachi.llm.dialects.responses.bodies import ResponsesBody

from .wire import JSON

ROUTES = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/embeddings": EmbeddingBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
FIELDS = {path: [f.encode_name for f in msgspec.structs.fields(kind)] for path, kind in ROUTES.items()}
WORDS = "It is a truth universally acknowledged, that a single man in possession of a good fortune "


class Raw:
    """JSON as it stands, or what is none."""

    def __init__(self, text: str) -> None:
        self.text = text


TURN = {"role": "user", "content": "Who was Emma?"}
NUMBERS = (0, -1, 1, 2**31, -(2**31), 2**63, -(2**63), 2**64, 10**30, 1e308, -1e308, 5e-324, 0.5, True)
SPELLED = tuple(Raw(text) for text in ("NaN", "Infinity", "-Infinity", "1e999", "-0", "9" * 5000, "01", "1.", "nul"))
STRINGS = ("", "a", "\0", "\ud800", "\udfff\ud800", "é漢🙂", "</s><|im_end|>", "a" * 5000, "NaN", "0")
LISTS = (
    [],
    [[]],
    [None],
    ["a", 1],
    [0] * 5000,
    [-1],
    [2**63],
    [1e308],
    [True],
    ["\ud800"],
    [[[[1]]]],
    list(range(600)),
)
OBJECTS = ({}, {"a": 1}, {"": {}}, {"type": "text"}, {"0": 1e308}, {"-1": 1}, {"9" * 30: 1}, {"\ud800": None})
DEEP = tuple(Raw(a * n + b * n) for a, b in (("[", "]"), ('{"a":', "}")) for n in (90, 900, 90_000))
ODD = (None, *NUMBERS, *SPELLED, *STRINGS, *LISTS, *OBJECTS, *DEEP)

AT = {"type": "object", "properties": {"at": {"type": "string", "maxLength": 8}}, "required": ["at"]}
SCHEMAS = (
    AT,
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}},
    {"type": "object", "properties": {"a": {"enum": [f"value {i}" for i in range(3000)]}}},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}}},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}},
    {"type": "object", "required": [f"p{i}" for i in range(2000)]},
    {"type": "array"},
)


def tools_of(path: str) -> list[list[dict[str, Any]]]:
    """Tools as a route has them, one or several."""
    found = []
    for schema in SCHEMAS:
        if path == "/v1/chat/completions":
            one: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": schema}}
        elif path == "/v1/responses":
            one = {"type": "function", "name": "look", "parameters": schema}
        else:
            one = {"name": "look", "input_schema": schema}
        found.append([one])
    return [*found, [one] * 2, [{}], []]


FLAG, COUNT, SHARE = (True, False, None), (1, 2, 5, 20), (0, 0.0, 0.1, 0.9, 1, 2, -2)
UNUSUAL: dict[str, tuple[Any, ...]] = {
    "model": ("tiny", "other", None),
    "prompt": (WORDS, WORDS * 30, [1, 2, 3], ["a", "b"], [[1], [2, 3]], ["a", [1]], [1, "a"], [511] * 511, ["a"] * 40),
    "input": (
        *(WORDS, [1, 2], ["a", "b"], [[1], [2]], "a" * 9000, [1] * 600, ["a"] * 33),
        *([TURN], [TURN] * 20, [TURN] * 5000, [{"type": "item_reference", "id": "msg_abcdefgh_0_0"}]),
        [TURN, {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{"}],
        [{"type": "function_call_output", "call_id": "c", "output": "a"}],
        [{"type": "reasoning", "summary": []}, TURN, TURN | {"role": "assistant"}],
    ),
    "messages": (
        [TURN],
        [TURN] * 20,
        [TURN] * 5000,
        [{"role": "x"}],
        [{"content": "a"}],
        [{"role": 1, "content": "a"}],
        *([TURN | {"content": odd}] for odd in (None, 1, 0.5, "", {}, [], [None], [{"type": "text"}], [{"type": []}])),
        *([TURN | {"content": [{"type": kind, "text": "a"}]}] for kind in ("text", "image_url", None)),
        *([TURN | {"tool_calls": calls}] for calls in (None, {}, [1], [{"function": {"arguments": "{"}}])),
    ),
    "tokens": ([1, 2, 3], [0] * 4000, [255, 256, 511, 512], [10**6]),
    "max_tokens": (0, 1, 8, 40, 500, 511, 512),
    "max_completion_tokens": (0, 1, 8, 40, 511, 512),
    "min_tokens": (0, 1, 30, 600),
    "prediction": (
        *(
            {"type": "content", "content": text}
            for text in (WORDS, "", "a" * 9000, [], [{"type": "text", "text": "a"}])
        ),
        *({"type": "text", "content": "a"}, {"type": "content"}, {"type": "content", "content": [{"type": "image"}]}),
        *({"type": "content", "content": odd} for odd in (None, 1, {}, [None], [{"type": "text", "text": None}])),
    ),
    "num_speculative_tokens": (0, 1, 65, True, 0.5, -1, 10**6),
    "n": (1, 2, 5, 8, 30, 31, 33, 128, 129),
    "best_of": (1, 2, 8, 129),
    "logprobs": (0, 1, 5, 20, 21, True),
    "top_logprobs": (0, 5, 20, 21),
    "prompt_logprobs": (0, 1, 20, 21),
    "temperature": (*SHARE, 1e-6, 100),
    "stop": ("a", ["a", "e"], [""], ["a"] * 17, "a" * 1025, [" "] * 16),
    "seed": (*COUNT, -5, 2**63 - 1),
    "logit_bias": ({"5": 100}, {"5": -100.0}, {"100000": 1}, {str(i): 1 for i in range(300)}, {"a": 1}),
    "top_k": (-1, 0, 1, 5, 10**6),
    "stream_options": ({"include_usage": True}, {"continuous_usage_stats": True}, {"include_obfuscation": False}),
    "stop_token_ids": ([5], list(range(256)), [0] * 5000),
    "allowed_token_ids": ([5], [5, 6, 7], [], [10**6], list(range(4097))),
    "bad_words": (["a"], ["the", " of"], [""], ["a" * 2000]),
    "priority": (*COUNT, -100, 2**31),
    "cache_salt": ("a", "b" * 1000, ""),
    "timeout": (0.05, 1, 5, 1e308),
    "queue_timeout": (0.05, 1, 5),
    "request_id": ("mine", "a" * 128, "a" * 129, "a b"),
    "response_format": (
        *({"type": "text"}, {"type": "json_object"}, {"type": "structural_tag"}, {"type": "json_schema"}),
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    ),
    "structured_outputs": (
        {"regex": "[a-z]{1,5}"},
        {"json": {}, "regex": "a"},
        {"choice": ["a"] * 40_000},
        {"json": "{"},
    ),
    "guided_json": ({}, {"type": "integer"}, "{}", {"$ref": "#"}, {"anyOf": [{}] * 9999}),
    "guided_regex": ("[a-z]{3}", "(", "(?=a)", "(a*)*b" * 20, "a{100000}"),
    "guided_choice": (["yes", "no"], [""], [], ["a" * 2000]),
    "guided_grammar": ("start: /a+/", 'root ::= "a" root', "start: start", "(" * 9999),
    "grammar": ("", 'root ::= [a-z]+ "."', "root ::="),
    "json_schema": ({"type": "integer"}, {"type": "nonsense"}),
    "guided_whitespace_pattern": (" ?", "("),
    "modalities": (["text"], ["audio"]),
    "tool_choice": ("auto", "none", "required", {"type": "any"}, {"type": "tool", "name": "look"}),
    "previous_response_id": ("resp_abcdefgh_0", "resp_", "a" * 9000, "\0"),
    "instructions": ("Be brief.", "a" * 9000),
    "system": ("Be brief.", [{"type": "text", "text": "Be brief."}], [{}]),
    "thinking": ({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {}),
    "max_output_tokens": (0, 1, 40, 511),
    "truncation": ("auto", "disabled", "a"),
    "text": ({"format": {"type": "json_schema", "name": "a", "schema": AT}}, {"format": {"type": "json_object"}}, {}),
    "include": (["message.output_text.logprobs"], ["a"]),
    "chat_template_kwargs": ({"add_generation_prompt": False}, {"messages": []}, {"tools": 1}, {"raise_exception": 1}),
    "encoding_format": ("float", "base64", "int8"),
}
START: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "She was", "max_tokens": 8},
    "/v1/chat/completions": {"messages": [TURN], "max_tokens": 8},
    "/v1/responses": {"input": "Who was Emma?", "max_output_tokens": 8},
    "/v1/messages": {"model": "tiny", "messages": [TURN], "max_tokens": 8},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [TURN]},
    "/v1/embeddings": {"input": "She was"},
    "/tokenize": {"prompt": "She was"},
    "/detokenize": {"tokens": [1, 2, 3]},
}


@dataclass(frozen=True)
class Body:
    path: str
    data: bytes
    kind: str = JSON

    @property
    def said(self) -> str:
        cut = f"... ({len(self.data)} bytes)" if len(self.data) > 400 else ""
        return f"POST {self.path} {self.data[:400]!r}{cut}" + (f" as {self.kind!r}" if self.kind != JSON else "")


def _some(names: list[str], n: int, rng: random.Random) -> list[str]:
    return rng.sample(names, min(n, len(names)))


def draw(rng: random.Random) -> Body:
    path = rng.choices(list(ROUTES), (6, 4, 4, 4, 1, 2, 1, 1))[0]
    luck = rng.random()
    if luck < 0.04:
        return Body(path, rng.randbytes(rng.choice((0, 1, 10, 1000, 100_000))))
    if luck < 0.08:
        return Body(path, written(rng.choice(ODD)))
    fields = dict(START[path])
    for name in _some(FIELDS[path], rng.choice((0, 1, 2, 3, 4)), rng):
        fields[name] = rng.choice(tools_of(path) if name == "tools" else UNUSUAL.get(name, FLAG + SHARE))
    if rng.random() < 0.5:
        for name in _some(FIELDS[path], rng.choice((1, 1, 2)), rng):
            fields[name] = rng.choice(ODD)
    if rng.random() < 0.05:
        fields[rng.choice(("unknown", "", "prompt\n", "\ud800", "n" * 70_000, "logits_processors"))] = 1
    data = written(fields)
    if rng.random() < 0.06:
        data = mangled(data, rng)
    kind = rng.choice(KINDS) if rng.random() < 0.05 else JSON
    return Body(path, data, kind)


KINDS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "é", "a" * 3000, "",
         "application/json; charset=utf-16", "application/vnd.api+json")  # fmt: skip


MOST = 2_000_000  # bytes of a long text


LARGEST = (
    Body("/tokenize", json.dumps({"prompt": ("z9#" * MOST)[:MOST], "return_token_strs": True}).encode()),
    Body("/detokenize", json.dumps({"tokens": [5] * (MOST // 4)}).encode()),
    Body("/v1/completions", json.dumps(START["/v1/completions"] | {"metadata": [[1]] * (MOST // 10)}).encode()),
    Body("/tokenize", json.dumps({"prompt": "漢" * (MOST // 3), "return_token_strs": True}).encode()),
)
"""What takes the most memory, so that it has been taken once."""


def long(rng: random.Random) -> Body:
    """Texts, ids and arguments of up to two megabytes, and bodies larger than the server takes."""
    size = rng.choice((5_000, 20_000, 300_000, MOST))
    unit = rng.choice((WORDS, "a", "a ", "漢", "\n", "z9#"))
    text = unit * (size // len(unit.encode()))
    luck = rng.random()
    if luck < 0.1:
        return Body("/tokenize", b'{"prompt": "' + b"a" * (5 << 20) + b'"}')
    if luck < 0.2:
        return Body("/detokenize", written({"tokens": [5] * (size // 4)}))
    if luck < 0.25:  # of very many values
        path = rng.choice(("/v1/responses", "/v1/messages", "/v1/chat/completions"))
        return Body(path, written(START[path])[:-1] + b', "metadata": [' + b"[]," * 1_200_000 + b"1]}")
    if luck < 0.3:
        large = {rng.choice(("chat_template_kwargs", "metadata")): {"a": [[1]] * (size // 10)}}
        return Body("/v1/chat/completions", written(START["/v1/chat/completions"] | large))
    path, fields = rng.choice(
        (
            ("/v1/completions", {"prompt": text}),
            ("/v1/embeddings", {"input": [text[:3000]] * (size // 9000 + 1)}),
            ("/v1/chat/completions", {"messages": [TURN | {"content": text}]}),
            ("/tokenize", {"prompt": text, "return_token_strs": rng.random() < 0.2}),
            ("/tokenize", {"prompt": text}),
        )
    )
    return Body(path, json.dumps(fields, ensure_ascii=False).encode())


def written(value: Any) -> bytes:
    """As JSON; a lone half of a character is spelled, as JSON can."""
    return _written(value).encode()


def _written(value: Any) -> str:
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict) and any(isinstance(v, Raw) for v in value.values()):
        return "{" + ", ".join(f"{json.dumps(name)}: {_written(v)}" for name, v in value.items()) + "}"
    return json.dumps(value)


def mangled(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return rng.choice(
        (
            data[:at],
            data + b"}",
            data[:at] + rng.randbytes(3) + data[at:],
            b"\xef\xbb\xbf" + data,
            data[:-1] + b"," + data[1:],  # each field twice
            data.decode().encode("utf-16"),
            data + data,
            b" " * 100_000 + data,
        )
    )
