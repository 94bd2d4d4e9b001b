"""What requests say of tools, for schemathesis: fields of chats, of responses and of Anthropic's messages, from which
requests are made that are mostly answered.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
NAMES = ["f", "get-weather", "a_b.c"]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}}, "required": ["city"]}
PARAMETERS = [
    {"type": "object"},
    {"type": "object", "properties": {}, "additionalProperties": False},
    CITY,
    {**CITY, "additionalProperties": False},
    {"type": "object", "properties": {"n": {"type": "integer", "minimum": -3, "maximum": 99}}, "required": ["n"]},
    {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": ["boolean", "null"]}}},
    {"type": "object", "properties": {"way": {"enum": ["up", "down", 1, None]}, "a": {"const": {"b": [1]}}}},
    {"type": "object", "properties": {"days": {"type": "array", "items": {"enum": ["mo", "tu"]}, "maxItems": 3}}},
    {"type": "object", "properties": {"a": {"anyOf": [CITY, {"type": "null"}]}}},
    {"type": "object", "properties": {"id": {"type": "string", "pattern": "^[a-f]{2}$"}}, "required": ["id"]},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    {"type": "array"},  # refused, as the next ones
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
]
REFERRING = [
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": CITY}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/B"}}, "$defs": {"A": CITY}, "required": ["a"]},
]
TEXT = {"type": "string", "maxLength": 20}
STRICT = {"type": ["boolean", "null"]}
EFFORTS = {"enum": ["none", "minimal", "low", "medium", "high", "xhigh", None]}


def some(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": 3}


def record(kind: str | None, *must: str, **fields: Schema) -> Schema:
    own = {} if kind is None else {"type": {"const": kind}}
    must = must if kind is None else ("type", *must)
    return {"type": "object", "properties": own | fields, "required": list(must), "additionalProperties": False}


def literally(value: Any) -> Schema:
    """Only this value. In an enum, schemathesis would take a "$ref" for one of its own."""
    if not isinstance(value, dict):
        return {"const": value}
    return record(None, *value, **{name: literally(inner) for name, inner in value.items()})


NAME, SCHEMA = {"enum": NAMES}, {"anyOf": [{"enum": PARAMETERS}, *map(literally, REFERRING)]}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
ASKS = {"role": "user", "content": "How is it?"}
CHATS = [
    [ASKS],
    [{"role": "system", "content": "Be brief."}, ASKS],
    [
        ASKS,
        {"role": "assistant", "content": None, "reasoning_content": "I see.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "rainy"},
    ],
    [
        ASKS,
        {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "c2"}]},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "rainy"},
        ASKS,
    ],
    [ASKS, {"role": "tool", "tool_call_id": "c9", "content": "of no call"}],
]
_FUNCTION = record(None, "name", name=NAME, description=TEXT, parameters=SCHEMA, strict=STRICT)
_NAMED = record("function", "function", function=record(None, "name", name={"enum": [*NAMES, "other"]}))
_ALLOWED = record(None, "mode", "tools", mode={"enum": ["auto", "required"]}, tools=some(_NAMED))
_WORDS = {"enum": ["none", "auto", "required"]}
CHAT: Schema = {
    "tools": some(record("function", "function", function=_FUNCTION)),
    "tool_choice": {"anyOf": [_WORDS, _NAMED, record("allowed_tools", "allowed_tools", allowed_tools=_ALLOWED)]},
    "parallel_tool_calls": {"type": "boolean"},
    "reasoning_effort": EFFORTS,
    "messages": {"enum": CHATS},
    "max_completion_tokens": {"type": "integer", "minimum": 1, "maximum": 80},
    "stream": {"type": "boolean"},
    "n": {"type": "integer", "minimum": 1, "maximum": 2},
}

_TOOL = record("function", "name", name=NAME, description=TEXT, parameters=SCHEMA, strict=STRICT)
_INNER = {**_TOOL, "properties": {**_TOOL["properties"], "name": {"enum": NAMES[:2]}}}  # OpenAI knows no dots there
_SPACE = record("namespace", "name", "tools", name={"enum": ["n", "m"]}, description=TEXT, tools=some(_INNER))
_ONE = record("function", "name", name={"enum": [*NAMES, "n__f", "other"]})
_SOME = record("allowed_tools", "mode", "tools", mode={"enum": ["auto", "required"]}, tools=some(_ONE))
_CALLED = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
_RESULT = {"type": "function_call_output", "call_id": "c1", "output": "rainy"}
_INPUTS = [
    "How is it?",
    [ASKS, _CALLED, _RESULT],
    [ASKS, {"type": "reasoning", "summary": []}, {**_CALLED, "namespace": "n"}, _RESULT, ASKS],
    [ASKS, {**_CALLED, "status": "incomplete"}],
    [ASKS, _RESULT],
]
RESPONSE: Schema = {
    "input": {"enum": _INPUTS},
    "tools": some({"anyOf": [_TOOL, _TOOL, _SPACE]}),
    "tool_choice": {"anyOf": [_WORDS, _ONE, _SOME]},
    "parallel_tool_calls": {"type": "boolean"},
    "reasoning": record(None, effort=EFFORTS, summary={"enum": ["auto", "concise", "detailed", None]}),
    "max_output_tokens": CHAT["max_completion_tokens"],
    "stream": {"type": "boolean"},
    "store": {"type": "boolean"},
}

_USE = {"type": "tool_use", "id": "c1", "name": "f", "input": {"city": "Oslo"}}
_USED = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "rainy", "is_error": True}],
}
_TALKS = [
    [ASKS],
    [ASKS, {"role": "assistant", "content": [{"type": "thinking", "thinking": "I see."}, _USE]}, _USED],
    [ASKS, {"role": "assistant", "content": "It is"}],
    [ASKS, _USED],
]
_THINKING = record("enabled", budget_tokens={"type": "integer"}, display={"enum": ["summarized", "omitted"]})
MESSAGE: Schema = {
    "messages": {"enum": _TALKS},
    "max_tokens": CHAT["max_completion_tokens"],
    "system": TEXT,
    "tools": some(
        record(None, "name", "input_schema", name=NAME, description=TEXT, input_schema=SCHEMA, strict=STRICT)
    ),
    "tool_choice": {
        "anyOf": [
            {"enum": [{"type": "auto"}, {"type": "any"}, {"type": "none"}]},
            record("tool", "name", name={"enum": [*NAMES, "other"]}, disable_parallel_tool_use={"type": "boolean"}),
        ]
    },
    "thinking": {"anyOf": [_THINKING, {"enum": [{"type": "disabled"}, {"type": "adaptive"}]}]},
    "output_config": record(None, effort={"enum": ["low", "high", "max"]}),
    "stream": {"type": "boolean"},
}
