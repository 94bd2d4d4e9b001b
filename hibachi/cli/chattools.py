"""Functions of a file as tools of a conversation: what a client of tool calls does, in one process."""

from __future__ import annotations

import asyncio
import inspect
import json
import runpy
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hibachi.errors import ConfigError, InvalidRequest, printable, text_of
from hibachi.llm.chatformat.asked import toolbox_of
from hibachi.llm.chatformat.tools import ToolCall

MOST_TURNS = 8  # answers to one message, or a model may call for ever
_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", type(None): "null"}


class Functions:
    """The public functions of a Python file. Raises ConfigError for a file that cannot be run or has none, and for
    functions that cannot be described.
    """

    def __init__(self, file: str | Path) -> None:
        sys.path.append(str(Path(file).resolve().parent))  # it may import its neighbours; last, so it hides nothing
        try:
            found = runpy.run_path(str(file), run_name="hibachi_tools")
        except (Exception, SystemExit) as e:
            raise ConfigError(
                f"--tools {file}: expected a Python file that runs; got {type(e).__name__}: {e!s:.200}."
            ) from e
        self._functions: dict[str, Callable[..., Any]] = {
            name: value for name, value in found.items() if _is_own(value) and not name.startswith("_")
        }
        if not self._functions:
            raise ConfigError(
                f"--tools {file}: expected functions with type hints and docstrings; it has none whose name begins "
                f"without an underscore."
            )
        self.tools = [_tool(*each) for each in self._functions.items()]

    def call(self, call: ToolCall) -> str:
        """The result of a call, as text; what went wrong is a result as well."""
        try:
            result = self._functions[call.name](**json.loads(call.arguments))
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except (Exception, SystemExit) as e:
            text = text_of(e)
        return text.encode(errors="backslashreplace").decode()  # names of files may hold half characters


def _is_own(value: Any) -> bool:
    """Whether it is a function that the file defines, be it behind a decorator such as functools.lru_cache."""
    if getattr(value, "__module__", None) != "hibachi_tools":
        return False
    return inspect.isfunction(value) or (callable(value) and inspect.isfunction(getattr(value, "__wrapped__", None)))


def _tool(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """A function as OpenAI's API has tools. Raises ConfigError."""
    tool = {"type": "function", "function": _described(name, function)}
    try:
        toolbox_of([tool])
    except InvalidRequest as e:
        why = str(e).removeprefix("tools[0].function.")
        raise ConfigError(f"--tools: {name} cannot be a tool: its {why} Letters are those from a to z.") from e
    try:
        json.dumps(tool, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise ConfigError(
            f"--tools: expected type hints of {name} with values that JSON has, such as Literal['a', 1]; got: {e}. "
            f"Change them, or let the function's name begin with an underscore."
        ) from e
    return tool


def _described(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    try:
        hints = get_type_hints(function)
    except Exception as e:
        raise ConfigError(
            f"--tools: expected type hints of {name} that can be evaluated; got {type(e).__name__}: {e!s:.200}."
        ) from e
    if odd := [p for p in parameters if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]:
        raise ConfigError(
            f"--tools: expected parameters of {name} that are given by name; got {str(odd[0])!r}, which is "
            f"{odd[0].kind.description}. Change it, or let the function's name begin with an underscore."
        )
    return {
        "name": name,
        "description": inspect.getdoc(function) or "",
        "parameters": {
            "type": "object",
            "properties": {p.name: _schema(hints.get(p.name, Any)) for p in parameters},
            "required": [p.name for p in parameters if p.default is p.empty],
            "additionalProperties": False,
        },
    }


def _schema(hint: Any) -> Mapping[str, Any]:
    """The JSON schema of a type hint; of one that is not known, any value."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(each) for each in args]}
    if origin is list or hint is list:
        return {"type": "array", **({"items": _schema(args[0])} if args else {})}
    kind = _KINDS.get(origin or hint)
    return {} if kind is None else {"type": kind}


def results(functions: Functions, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Run calls, show them, and return their results as messages."""
    found = []
    for call in calls:
        result = functions.call(call)
        print(printable(f"[{call.name}({call.arguments}) -> {result}]"), flush=True)
        found.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return found
