"""Which format a chat template has: found once, when it is first needed, and kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, TypeAlias

from hibachi.errors import ConfigError, InvalidRequest, shown
from hibachi.tools.derive import derive
from hibachi.tools.format import HERMES, PLAIN, ChatFormat
from hibachi.tools.known import KNOWN

Render: TypeAlias = Callable[..., str]
"""render(messages, **variables) -> text. Raises InvalidRequest."""

_THINKS = re.compile("think|reason|channel|analysis", re.IGNORECASE)  # one of them is in every template that knows it
_KNOWS_NONE = re.compile("""['"]none['"]""")


@dataclass(frozen=True, slots=True)
class Parsers:
    """How formats are chosen. tools: "auto" means derived from the template; "generic": tools are described in a system
    message; else the name of a record. reasoning: "auto", "none" or the name of a record. fields: the names under which
    reasoning is told. Raises ConfigError.
    """

    tools: str = "auto"
    reasoning: str = "auto"
    fields: tuple[str, ...] = ("reasoning_content",)

    def __post_init__(self) -> None:
        _check("--tool-call-parser", self.tools, ("auto", "generic"), lambda f: f.tools is not None)
        _check("--reasoning-parser", self.reasoning, ("auto", "none"), lambda f: f.reasoning is not None)

    @property
    def generic(self) -> bool:
        return self.tools == "generic"


def _check(flag: str, name: str, own: Sequence[str], fits: Callable[[ChatFormat], bool]) -> None:
    names = [*own, *sorted(n for n, f in KNOWN.items() if fits(f))]
    if name not in names:
        raise ConfigError(f"{flag} {shown(name)}: expected one of {', '.join(names)}.")


class Formats:
    """The format of one chat template. render: of it. source: its text, or all texts that it may be.

    Threads may ask at once; the first one finds out, and the others wait.
    """

    def __init__(self, render: Render, source: str, parsers: Parsers | None = None) -> None:
        self._render, self._source = render, source
        self.parsers: Parsers = parsers or Parsers()
        self._lock = Lock()
        self._derived: ChatFormat | None = None

    def of(self, *, tools: bool) -> ChatFormat:
        """The format. tools: of a conversation with tools, or with calls; otherwise nobody asks for their form."""
        by = self.parsers
        record = None if by.tools in ("auto", "generic") else KNOWN[by.tools]
        thinks = by.reasoning == "auto" and _THINKS.search(self._source) is not None
        base = self.derived() if thinks or (tools and by.tools == "auto") else PLAIN
        if by.reasoning == "none":
            base = replace(base, reasoning=None)
        elif by.reasoning != "auto":
            base = replace(base, reasoning=KNOWN[by.reasoning].reasoning)
        if by.generic:
            return replace(base, tools=HERMES, shows=True, source="generic")
        if record is None:
            return base
        reasoning = base.reasoning if by.reasoning == "auto" and base.reasoning is not None else record.reasoning
        if by.reasoning not in ("auto", by.tools):
            reasoning = base.reasoning
        return replace(record, reasoning=reasoning, switch=base.switch, effort=base.effort, source=by.tools)

    def derived(self) -> ChatFormat:
        """What the template shows."""
        with self._lock:
            if self._derived is None:
                self._derived = derive(self._render)
            return self._derived

    def effort(self, asked: str) -> dict[str, Any]:
        """The variables of the template by which it reads OpenAI's reasoning_effort. Raises InvalidRequest, whose
        message begins with this name, if there are none.
        """
        found = self.derived()
        if asked == "none" and found.switch is not None:
            return {found.switch: False}
        if not found.effort or (asked == "none" and not _KNOWS_NONE.search(self._source)):
            raise InvalidRequest(
                f"reasoning_effort is not supported as {shown(asked)}: this model's chat template has no such setting."
            )
        return {"reasoning_effort": asked}

    @property
    def knows_developer(self) -> bool:
        """Does the template know the role "developer"?"""
        return "developer" in self._source
