"""Tools with all their parts, for templates that do not look whether these are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_DEEPEST = 32


def completed(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools of a request, in OpenAI's form, with empty parts where there are none: descriptions of functions and
    properties, `parameters`, `properties`, `required`, `items` of arrays, `additionalProperties` of objects.

    It is meant for a template that has refused them as they came: the model may be shown the empty parts.
    """
    return [_tool(tool) for tool in tools]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    given = function.get("parameters")
    parameters = given if isinstance(given, Mapping) else {}
    whole = {"type": "object", "properties": {}, "required": [], **_schema(parameters, 0)}
    return {**tool, "function": {**function, "description": function.get("description") or "", "parameters": whole}}


def _schema(schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
    out = dict(schema)
    if depth > _DEEPEST:
        return out
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        out["properties"] = {name: _property(value, depth + 1) for name, value in properties.items()}
    if schema.get("type") == "array":
        out["items"] = _property(schema.get("items", {}), depth + 1)
    if schema.get("type") == "object" and depth:
        out.setdefault("additionalProperties", {})
    return out


def _property(value: Any, depth: int) -> Any:
    return {"description": "", **_schema(value, depth)} if isinstance(value, Mapping) else value
