"""Which format the chats of a model have: what its template shows, or what the operator says."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from hibachi.llm.chatformat.format import HERMES, PLAIN, ChatFormat
from hibachi.llm.chatformat.once import Once
from hibachi.llm.chatformat.templates.derive import derive
from hibachi.llm.chatformat.templates.known import KNOWN, Named, named, recognized

log: logging.Logger = logging.getLogger("hibachi.chat")
MOST = 256  # templates that are remembered: clients may send their own
_THINKS = re.compile("think|reason|channel|analysis", re.IGNORECASE)  # one of them is in every template that knows it
_KNOWS_NONE = re.compile("""['"]none['"]""")


class Formats:
    """Finds formats and keeps them. May be used from any thread: several may find the same one at a time.

    tool, reasoning: names of records that are taken instead of what a template says. Raises ConfigError for unknown
    ones.
    """

    def __init__(self, tool: str | None = None, reasoning: str | None = None) -> None:
        self._named: Named = named(tool, reasoning)
        self._lock = Lock()
        self._found: dict[str, ChatFormat] = {}

    def of(self, template: str, render: Callable[..., str]) -> ChatFormat:
        """The format of a template. render: see `derive`; it is called if the format is new.

        Never raises. It takes some hundredths of a second, and 20 s at most with a template that takes its time.
        """
        with self._lock:
            kept = self._found.get(template)
        if kept is not None:
            return kept
        found = self._named.over(_llama(template, derive(render, recognized(template))))
        with self._lock:
            while len(self._found) >= MOST:
                del self._found[next(iter(self._found))]
            self._found[template] = found
        return found


def _llama(template: str, found: ChatFormat) -> ChatFormat:
    """Llama 3 marks some calls with a token that its template writes for built-in tools only, and writes some otherwise
    than its template.
    """
    tools, known = found.tools, KNOWN["llama3_json"].tools
    if tools is None or known is None or not tools.alone or "<|python_tag|>" not in template:
        return found
    tools = replace(tools, spellings=known.spellings) if tools.call == known.call else tools
    return replace(found, tools=tools, silent=("<|python_tag|>", *found.silent))


@dataclass(frozen=True, slots=True)
class Parsers:
    """How formats are chosen. tools: "auto" means as the template shows; "generic": tools are described in a system
    message; else the name of a record. reasoning: "auto", "none" or the name of a record. fields: the names under which
    reasoning is told. split: names of special tokens in what users and tools say are text. Raises ConfigError for a
    record that there is not.
    """

    tools: str = "auto"
    reasoning: str = "auto"
    fields: tuple[str, ...] = ("reasoning_content",)
    split: bool = True

    def __post_init__(self) -> None:
        self.formats()

    def formats(self) -> Formats:
        """They find formats, and keep them."""
        return Formats(None if self.generic else self.tools, None if self.reasoning == "none" else self.reasoning)

    @property
    def generic(self) -> bool:
        return self.tools == "generic"


class Choosing:
    """Chooses the format of a chat. render: renders a conversation in the template, see `derive`."""

    def __init__(self, render: Callable[..., str], parsers: Parsers | None = None) -> None:
        self.parsers: Parsers = parsers or Parsers()
        self._render, self._formats = render, self.parsers.formats()
        self._once = Once(log)

    def format(self, template: str, *, tools: bool) -> ChatFormat:
        """The format of a chat. template: the text of the chat template. tools: the chat has tools, or calls; if not,
        how they are written does not matter.

        The first time it takes some hundredths of a second. Never raises.
        """
        by = self.parsers
        wanted = (tools and not by.generic) or (by.reasoning != "none" and self._speaks(template))
        found = self._formats.of(template, self._render) if wanted else PLAIN
        if by.reasoning == "none":
            found = replace(found, reasoning=None)
        if by.generic:
            found = replace(found, tools=HERMES, shows=True, source="generic")
        return found

    def _speaks(self, template: str) -> bool:
        """Whether there may be more in an answer than what is said."""
        named = self.parsers.reasoning != "auto" or self.parsers.tools not in ("auto", "generic")
        return named or _THINKS.search(template) is not None or recognized(template) is not None

    def effort(self, template: str, asked: str) -> Mapping[str, Any]:
        """The variables of the template by which it reads OpenAI's reasoning_effort. An effort is a wish, which agents
        send to any model: where the template has no such setting there are none, and the log says so once.
        """
        found = self._formats.of(template, self._render)
        if asked == "none" and found.switch is not None:
            return {found.switch: False}
        if not found.effort or (asked == "none" and not _KNOWS_NONE.search(template)):
            none = ", only a switch, which 'none' turns off" if found.switch is not None else ""
            why = f"this model's chat template has no such setting{none}"
            self._once.warning("effort", f"reasoning_effort %s has no effect: {why}", asked)
            return {}
        return {"reasoning_effort": asked}
