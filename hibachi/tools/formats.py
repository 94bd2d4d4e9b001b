"""The formats of chat templates, each found once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import Lock

from hibachi.tools.derive import derive
from hibachi.tools.format import ChatFormat
from hibachi.tools.known import Named, named, recognized

MOST = 256  # templates that are remembered: clients may send their own


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
        """The format of a template. render: see `hibachi.tools.derive.derive`; it is called if the format is new.

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
    """Llama 3 marks some calls with a token that its template writes for built-in tools only."""
    if found.tools is None or not found.tools.alone or "<|python_tag|>" not in template:
        return found
    return replace(found, silent=("<|python_tag|>", *found.silent))
