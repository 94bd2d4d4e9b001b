"""Tools with all their parts."""

import copy

from hibachi.llm.chatformat.completed import completed

DEEP = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "object", "properties": {"b": {"type": "string"}}}},
        "c": {"type": "array"},
        "d": {"description": "kept", "enum": [1]},
        "e": True,
    },
    "required": ["a"],
}


def test_what_is_missing_is_empty():
    assert completed([{"type": "function", "function": {"name": "f"}}]) == [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": "",
                "parameters": {"type": "object", "properties": {}, "required": []},
            },
        }
    ]


def test_properties_at_any_depth():
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": DEEP, "strict": True}}]
    before = copy.deepcopy(tools)
    (tool,) = completed(tools)
    assert tools == before and tool["function"]["strict"] and tool["function"]["description"] == "d"
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {
                "description": "",
                "type": "array",
                "items": {
                    "description": "",
                    "type": "object",
                    "properties": {"b": {"description": "", "type": "string"}},
                    "additionalProperties": {},
                },
            },
            "c": {"description": "", "type": "array", "items": {"description": ""}},
            "d": {"description": "kept", "enum": [1]},
            "e": True,
        },
        "required": ["a"],
    }


def test_what_is_odd_is_left():
    deep = {"type": "array"}
    for _ in range(5000):
        deep = {"type": "array", "items": deep}
    assert completed([{"function": 3}, {"type": "custom"}]) == [{"function": 3}, {"type": "custom"}]
    assert completed([{"function": {"parameters": deep}}])
    assert completed([{"function": {"parameters": {"properties": 3, "items": 4, "type": ["array"]}}}])
