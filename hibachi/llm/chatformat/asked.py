"""The tools that a request names, in the words of OpenAI's API, and which of them it wants to be called.

What is raised says the path of the field that it is about, as ("tools", 3, "function", "name") or ("tool_choice",).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, Literal, TypeAlias

from hibachi.errors import FieldPath, shown
from hibachi.llm.chatformat.errors import UNSUPPORTED, BadField
from hibachi.llm.chatformat.tools import Tool, Toolbox

Mode: TypeAlias = Literal["none", "auto", "required"]
MOST = 1024  # tools of a request
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_MODES: Mapping[str, Mode] = {"none": "none", "auto": "auto", "required": "required", "any": "required"}
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # hold schemas by name
_PARTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalProperties", "propertyNames", "contains", "not")
_DEEPEST = 128  # steps of a path
_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}}


def toolbox_of(
    tools: Sequence[Mapping[str, Any]] | None, choice: Any = None, parallel: bool | None = None, most: int = MOST
) -> Toolbox | None:
    """The tools that may be called; None means there are none, or `choice` is "none".

    tools: [{"type": "function", "function": {"name", "description", "parameters", "strict"}}, ...]; [] as None.
    choice: "none", "auto", "required", "any" (as "required"), {"type": "function", "function": {"name"}}, or
    {"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}; None means "auto". Raises BadField.
    """
    if tools is not None and (isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence)):
        raise BadField.at(("tools",), f" must be a list of tools; got {shown(tools)}.")
    if not isinstance(parallel, (bool, NoneType)):
        raise BadField.at(("parallel_tool_calls",), f" must be true or false; got {shown(parallel)}.")
    if tools and len(tools) > most:
        raise BadField.at(("tools",), f" has {len(tools)} entries; at most {most} are served.")
    found = tuple(_tool(given, ("tools", i)) for i, given in enumerate(tools or ()))
    known: dict[str, int] = {}
    for i, tool in enumerate(found):
        if (first := known.setdefault(tool.name, i)) != i:
            raise BadField.at(
                ("tools", i, "function", "name"),
                f" is {tool.name!r}, which ",
                ("tools", first),
                " is called as well. Give each tool a name of its own.",
            )
    mode, allowed = _choice(choice, most)
    if not found and mode == "required":
        raise BadField.at(("tool_choice",), f" wants a call, and there are no tools; got {shown(choice)}. Send tools.")
    if unknown := [name for name in allowed or () if name not in known]:
        raise BadField.at(
            ("tool_choice",),
            f" names {shown(unknown[0])}, and no tool has this name; there are: {', '.join(known)[:400] or 'none'}.",
        )
    if not found or mode == "none":
        return None
    named = isinstance(choice, Mapping) and choice.get("type") != "allowed_tools"  # then it is called once
    return Toolbox(found, mode, None if allowed is None else frozenset(allowed), parallel is not False and not named)


def check_choice(choice: Any) -> None:
    """What is wrong with a `tool_choice` whatever the tools are. Raises BadField."""
    _choice(choice, MOST)


def as_shown(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools as templates are shown them: as they were sent, but with parameters where there are none, and without
    what is not for the model. For tools that `toolbox_of` took.
    """
    return [
        {"type": "function", **tool, "function": _function(tool["function"])} for tool in tools if "function" in tool
    ]


def _function(given: Mapping[str, Any]) -> dict[str, Any]:
    field, parameters = _parameters(given, ())
    named = {"parameters" if name == field else name: value for name, value in given.items() if name != "strict"}
    named["parameters"] = dict(_NOTHING) if parameters is None else parameters
    return {name: value for name, value in named.items() if value is not None}


def _parameters(function: Mapping[str, Any], place: FieldPath) -> tuple[str, Any]:
    """The field that says the parameters, Anthropic's where OpenAI's is missing, and what it says; None is nothing."""
    field = "parameters" if function.get("parameters") is not None else "input_schema"
    return field, _schema(function.get(field), (*place, field))


def _schema(given: Any, place: FieldPath) -> Any:
    """A schema without keywords that are null, which say nothing. Raises BadField for a type in other letters than JSON
    schemas have, such as Gemini's "STRING".
    """
    if not isinstance(given, Mapping) or len(place) > _DEEPEST:
        return given
    kind, found = given.get("type"), dict[str, Any]()
    if isinstance(kind, str) and kind not in _TYPES and kind.lower() in _TYPES:
        raise BadField.at((*place, "type"), f" must be {kind.lower()!r}, as JSON schemas spell it; got {shown(kind)}.")
    for key, value in given.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            value = {name: _schema(part, (*place, key, name)) for name, part in value.items()}
        elif key in _PARTS:
            each = value if isinstance(value, list) else ()
            value = [_schema(part, (*place, key, i)) for i, part in enumerate(each)] or _schema(value, (*place, key))
        if value is not None or key in ("const", "default"):
            found[key] = value
    return found


def _tool(given: Any, place: FieldPath) -> Tool:
    if _kind(given) != "function":
        _refuse_kind(given, place)
        raise BadField.at(place, f' must be a tool, {{"type": "function", "function": ...}}; got {shown(given)}.')
    function = given.get("function")
    if not isinstance(function, Mapping):
        raise BadField.at(
            (*place, "function"),
            f" must be an object with the tool's name, description and parameters; got {shown(function)}.",
        )
    at = (*place, "function")
    name, about = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadField.at(
            (*at, "name"),
            f" must have 1 to 128 letters, digits and any of _ - . : /; got {shown(name)}. Rename the tool.",
        )
    if not isinstance(about, (str, type(None))):
        raise BadField.at((*at, "description"), f" must be a text; got {shown(about)}.")
    strict, (field, parameters) = function.get("strict"), _parameters(function, at)
    if not isinstance(strict, (bool, type(None))):
        raise BadField.at((*at, "strict"), f" must be true or false; got {shown(strict)}.")
    if parameters is None:
        parameters = _NOTHING
    _check_schema(parameters, (*at, field))
    return Tool(name, parameters, about or "", bool(strict))


def _check_schema(given: Any, place: FieldPath) -> None:
    """What can be said without compiling it: that it is about an object."""
    if not isinstance(given, Mapping):
        raise BadField.at(place, f" must be a JSON schema of an object; got {shown(given)}.")
    kind, properties, required = given.get("type", "object"), given.get("properties", {}), given.get("required", [])
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise BadField.at((*place, "type"), f' must be "object", as arguments have names; got {shown(kind)}.')
    if not isinstance(properties, Mapping) or not all(isinstance(s, (Mapping, bool)) for s in properties.values()):
        raise BadField.at((*place, "properties"), f" must be schemas by name; got {shown(properties)}.")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise BadField.at((*place, "required"), f" must be a list of names; got {shown(required)}.")


def _choice(given: Any, most: int) -> tuple[Mode, list[str] | None]:
    """The mode, and the names that it allows; None means all."""
    if given is None:
        return "auto", None
    if isinstance(given, str) and given in _MODES:
        return _MODES[given], None
    kind = _kind(given)
    if kind == "function":
        return "required", [_named(given, ("tool_choice",))]
    if kind == "allowed_tools":
        inner = given.get("allowed_tools")
        mode = inner.get("mode") if isinstance(inner, Mapping) else None
        tools = inner.get("tools") if isinstance(inner, Mapping) else None
        if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
            raise BadField.at(
                ("tool_choice", "allowed_tools"),
                f' must have a mode, "auto" or "required", and a list of tools; got {shown(inner)}.',
            )
        if len(tools) > most:
            raise BadField.at(("tool_choice",), f" has {len(tools)} tools; at most {most} are served.")
        return _MODES[mode], [_named(t, ("tool_choice", "allowed_tools", "tools", i)) for i, t in enumerate(tools)]
    if isinstance(kind, str):
        raise BadField.at(
            ("tool_choice", "type"),
            f' is not supported as {shown(kind)}: expected "function" or "allowed_tools". "none", "auto", "required" '
            f'and "any" are sent as texts, not as objects.',
            code=UNSUPPORTED,
        )
    raise BadField.at(
        ("tool_choice",),
        f' must be "none", "auto", "required", {{"type": "function", "function": {{"name": ...}}}} or '
        f'{{"type": "allowed_tools", ...}}; got {shown(given)}.',
    )


def _named(given: Any, place: FieldPath) -> str:
    if (kind := _kind(given)) != "function":
        _refuse_kind(given, place)
        if isinstance(given, Mapping):
            raise BadField.at((*place, "type"), f' must be "function"; got {shown(kind)}.')
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise BadField.at((*place, "function", "name"), f" must be the name of a tool; got {shown(name)}.")
    return name


def _kind(given: Any) -> Any:
    """The type of a tool or of a choice; None means `given` is no object."""
    return given.get("type", "function") if isinstance(given, Mapping) else None


def _refuse_kind(given: Any, place: FieldPath) -> None:
    """Raise BadField for a type that has a name, which is another than those that are served."""
    if isinstance(kind := _kind(given), str):
        raise BadField.at(
            (*place, "type"),
            f" is not supported as {shown(kind)}: only tools of type 'function' are.",
            code=UNSUPPORTED,
        )
