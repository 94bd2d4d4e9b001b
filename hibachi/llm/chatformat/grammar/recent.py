"""The forms of answers that were made lately: an agent sends the same tools with each of its turns."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection
from contextlib import suppress
from threading import Lock

from hibachi.llm.chatformat.reading.reader import AnswerReader
from hibachi.structured import StructuredOutputs

MOST, MOST_BYTES = 256, 2**24


def content_of(reader: AnswerReader, answer: StructuredOutputs | None, ends: Collection[int]) -> bytes | None:
    """A digest of all that makes a form; None where the tools are no JSON. Schemas count as they are written, since
    arguments come in their order; descriptions of tools do not.
    """
    toolbox = reader.toolbox
    tools = [(tool.name, tool.strict, tool.parameters) for tool in toolbox.tools]
    allowed = None if toolbox.allowed is None else sorted(toolbox.allowed)
    choice = (toolbox.mode, allowed, toolbox.parallel)
    with suppress(TypeError, ValueError, RecursionError):
        text = json.dumps([repr(reader.format), choice, reader.thinking.value, repr(answer), sorted(ends), tools])
        return hashlib.sha256(text.encode()).digest()
    return None


class RecentForms:
    """Forms by what they were made of; the least recently used go first. Callable from any thread."""

    def __init__(self, entries: int = MOST, size: int = MOST_BYTES) -> None:
        self._most, self._most_bytes, self._bytes = entries, size, 0
        self._kept: OrderedDict[bytes, StructuredOutputs] = OrderedDict()
        self._lock = Lock()

    def find(self, content: bytes | None) -> StructuredOutputs | None:
        with self._lock:
            found = None if content is None else self._kept.get(content)
            if found is not None and content is not None:
                self._kept.move_to_end(content)
            return found

    def keep(self, content: bytes | None, form: StructuredOutputs | None) -> None:
        """None is not kept, neither of both."""
        if content is None or form is None:
            return
        with self._lock:
            self._drop(content)
            self._kept[content] = form
            self._bytes += len(form.text)
            while len(self._kept) > self._most or self._bytes > self._most_bytes:
                self._drop(next(iter(self._kept)))

    def _drop(self, content: bytes) -> None:
        gone = self._kept.pop(content, None)
        self._bytes -= len(gone.text) if gone is not None else 0

    def __len__(self) -> int:
        return len(self._kept)
