"""The tools of a response as a chat has them, and back. Those of a namespace are called NAMESPACE__NAME there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hibachi.errors import FieldPath
from hibachi.llm.dialects.errors import Refused, unsupported
from hibachi.llm.dialects.openai.bodies import taken
from hibachi.llm.dialects.responses.bodies import FunctionTool, Namespace
from hibachi.llm.dialects.responses.items import PAGE

Raw = dict[str, Any]
JOINT = "__"


class Placed(NamedTuple):
    """A function, and where it stands in the body, such as ("tools", 2, "tools", 0)."""

    place: FieldPath
    namespace: Namespace | None
    function: FunctionTool

    @property
    def name(self) -> str:
        """As the model knows it."""
        return joined(None if self.namespace is None else self.namespace.name, self.function.name)


def joined(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}{JOINT}{name}"


def functions(tools: Sequence[Raw] | None) -> list[Placed]:
    """All functions, those in namespaces as well. Raises Refused."""
    found = list[Placed]()
    for i, raw in enumerate(tools or ()):
        place: FieldPath = ("tools", i)
        if raw.get("type") == "namespace":
            found += _in_namespace(raw, place)
        else:
            found.append(Placed(place, None, _function(raw, place)))
    return found


def of_chat(placed: Placed) -> Raw:
    """As a chat has it. Where it is not described, what its namespace is for is."""
    tool, space = placed.function, placed.namespace
    more = {
        "description": tool.description or (space and space.description),
        "parameters": tool.input_schema if tool.parameters is None else tool.parameters,
        "strict": tool.strict,
    }
    function = {"name": placed.name} | {name: value for name, value in more.items() if value is not None}
    return {"type": "function", "function": function}


def split(placed: Sequence[Placed]) -> dict[str, tuple[str, str]]:
    """Namespace and name of each function in a namespace, by the name that the model knows."""
    return {p.name: (p.namespace.name, p.function.name) for p in placed if p.namespace is not None}


def _in_namespace(raw: Raw, place: FieldPath) -> Iterator[Placed]:
    space: Namespace = taken(Namespace, raw, PAGE, place)
    _check_name(space, place)
    for i, inner in enumerate(space.tools):
        at = (*place, "tools", i)
        function = _function(inner, at)
        _check_name(function, at)  # as the name that the model knows is never empty
        yield Placed(at, space, function)


def _check_name(named: Namespace | FunctionTool, place: FieldPath) -> None:
    if not named.name:
        raise Refused.at((*place, "name"), " is empty.")


def _function(raw: Raw, place: FieldPath) -> FunctionTool:
    kind = raw.get("type")
    if kind != "function":
        raise unsupported(
            (*place, "type"),
            f"Only tools of type 'function' and namespaces of them are served, not {str(kind)[:40]!r}",
        )
    if "function" in raw:
        raise Refused(
            "Unknown field: ",
            (*place, "function"),
            ". In tools of /v1/responses name, description and parameters stand beside type.",
            param=(*place, "function"),
            code="unknown_parameter",
        )
    tool: FunctionTool = taken(FunctionTool, raw, PAGE, place)
    for name in ("output_schema", "allowed_callers", "defer_loading"):
        if getattr(tool, name):
            raise unsupported((*place, name), "It is of tools that OpenAI runs")
    if tool.asynchronous:
        raise unsupported((*place, "async"), "The next request comes with the result of a call")
    return tool
