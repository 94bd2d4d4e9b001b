"""What an answer says of its upstream: whether it is an error with status 200, and whether its stream has its end.

Bytes are read beside their passing on, and none is changed. What cannot be read (packed, of no known type) is right.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from hibachi.llm.dialects.errors import Refused
from hibachi.router.dialects import StreamForm

LONGEST_ERROR = 1 << 16  # bytes of an answer, or an event, that is an error
LONGEST_LINE = 1 << 20  # bytes of a line that is kept back until it is whole
TAIL = 4  # parts of which one has the last event of a stream: what comes in parts is a line or more
# In types and codes of errors that are no fault of who answers: of the request, or of too many of them.
_NO_FAULT = re.compile(
    r"invalid|bad.?request|unsupported|unprocessable|not.?found|authenti|permission|validation|template|tool_error|"
    r"context_length|too_(?:long|large|many)|content_(?:filter|policy)|moderation|rate.?limit|quota|queue_full|"
    r"overloaded|out_of_memory|timeout_error|'timeout'|deadline|shutting_down|\b4\d\d\b",
    re.IGNORECASE,
)


class AnswerInspector:
    """fault: why the answer is a fault of its upstream, as soon as that is known; "" means it is not. refused: it says
    that the request is at fault. over: an error has come.
    """

    fault = ""
    refused = over = False

    def feed(self, part: bytes) -> bytes:
        """What passes on when this has come."""
        return part

    def end(self) -> bytes:
        """There is no more. What has not passed on of what has come."""
        return b""

    def finished(self) -> bool:
        """Has the last event of a stream come, or an error?"""
        return self.over

    def broken(self, refused: Refused, request: str) -> bytes | None:
        """What ends an answer that broke, as far as it has no end; None means nothing can."""
        return None

    def _blame(self, told: dict[str, Any], what: str, name: bytes = b"") -> None:
        """told: a body, or an event of this name. Is it an error, and whose fault?"""
        inner = told.get("response")
        error = told.get("error") or (inner.get("error") if isinstance(inner, dict) else None)
        if not error and name != b"error" and "error" not in (told.get("type"), told.get("object")):
            return
        self.over = True
        error = error if isinstance(error, dict) else told
        codes = [error.get(name) for name in ("type", "error_type", "code", "status", "details")]
        if error.get("param") is not None or _NO_FAULT.search(str(codes)):
            self.refused = True
        elif not self.fault:
            self.fault = f"{what} is an error"


class WholeAnswer(AnswerInspector):
    """A body in JSON."""

    def __init__(self) -> None:
        self._body = b""

    def feed(self, part: bytes) -> bytes:
        self._body = (self._body + part)[-LONGEST_ERROR:]
        return part

    def end(self) -> bytes:
        if b'"error"' in self._body:
            self._blame(_object(self._body), "an answer with status 200")
        elif not self._body.rstrip().endswith((b"}", b"]")):
            self.fault = "an answer with status 200 is no whole JSON"
        return b""


class EventStream(AnswerInspector):
    """Server-sent events. form: of the path, None for one whose streams are not known. Only whole lines pass, so that
    one that breaks can be ended by an event.
    """

    def __init__(self, form: StreamForm | None) -> None:
        self._form = form
        self._held, self._name = bytearray(), b""
        self._tail = deque[bytes](maxlen=TAIL)

    def feed(self, part: bytes) -> bytes:
        if self._held or not part.endswith(b"\n"):
            part = self._whole_lines(part)
        if b"error" in part or self._name:
            self._look(part)
        if part:
            self._tail.append(part)
        return part

    def _whole_lines(self, part: bytes) -> bytes:
        at = max(part.rfind(b"\n"), part.rfind(b"\r")) + 1
        if long := len(self._held) + len(part) - at > LONGEST_LINE:
            at = len(part)
        self._held += part[:at]
        lines = bytes(self._held) if at else b""
        if at:
            self._held.clear()
        self._held += part[at:]
        if long:  # its beginning would be lost
            self.over = self.over or self._ends(lines)
        return lines

    def end(self) -> bytes:
        held = self.feed(b"\n")[:-1] if self._held else b""
        if self._form is not None and not self.finished():
            self.fault = "a stream ended without its last event"
        return held

    def finished(self) -> bool:
        return self.over or self._ends(b"".join(self._tail))

    def broken(self, refused: Refused, request: str) -> bytes | None:
        if self.finished():
            return b""
        return None if self._form is None else self._form.broken(refused, request, b"".join(self._tail))

    def _ends(self, lines: bytes) -> bool:
        return self._form is not None and self._form.end.search(lines) is not None

    def _look(self, lines: bytes) -> None:
        for line in lines.splitlines():
            field, _, value = line.partition(b":")
            if field == b"event":
                self._name = value.strip()
            elif field == b"data":
                self._blame(_object(value), "an event of a stream", self._name)
                self._name = b""


def _object(data: bytes) -> dict[str, Any]:
    """{} for anything else."""
    try:
        found = msgspec.json.decode(data) if len(data) <= LONGEST_ERROR else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def reader_of(form: StreamForm | None, headers: Mapping[str, str]) -> AnswerInspector:
    """What reads an answer with these headers. form: of streams of its path."""
    kind = headers.get("Content-Type", "").lower()
    if headers.get("Content-Encoding", "identity").lower() != "identity":
        return AnswerInspector()
    if kind.startswith("text/event-stream"):
        return EventStream(form)
    return WholeAnswer() if kind.startswith("application/json") else AnswerInspector()
