"""The tools of a request, and which of them it wants to be called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: a JSON schema of an object. strict: its arguments must keep to
    the schema also where the model may choose.
    """

    name: str
    parameters: Mapping[str, Any]
    description: str = ""
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. arguments: the JSON text of an object, or the part of one if it is not `complete`."""

    name: str
    arguments: str = "{}"
    id: str | None = None
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of a request. mode: "auto": the model may call some; "required": it must; "none": it may not.

    allowed: names of those that may be called; None means all. parallel: several calls in one answer.
    """

    tools: tuple[Tool, ...] = ()
    mode: Literal["none", "auto", "required"] = "auto"
    allowed: frozenset[str] | None = None
    parallel: bool = True
    schemas: Mapping[str, Mapping[str, Any]] = field(init=False)
    """The parameters of each tool, by its name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "schemas", {tool.name: tool.parameters for tool in self.tools})

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.mode == "none":
            return ()
        return tuple(t for t in self.tools if self.allowed is None or t.name in self.allowed)


NO_TOOLS = Toolbox(mode="none")
