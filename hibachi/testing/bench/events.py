"""Parses server-sent events from bytes, however these are split. No input or output here."""

from __future__ import annotations

import re

_EOL = re.compile(rb"\r\n|\n|\r")


class Events:
    """The data of server-sent events (WHATWG HTML, 9.2.6), fed with bytes. Other fields of an event are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._after_cr = False  # a line feed that comes now belongs to the line before
        self._first = True

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that have come whole; lines of one event joined by line feeds."""
        whole = not (self._rest or self._data or self._after_cr)
        if whole and data.startswith(b"data: ") and data.endswith(b"\n\n") and b"\r" not in data:  # nearly always
            parts = data[6:-2].split(b"\n\ndata: ")
            if data.count(b"\n") == 2 * len(parts):
                self._first = False
                return parts
        return self._any(data)

    def _any(self, data: bytes) -> list[bytes]:
        out: list[bytes] = []
        if self._after_cr and data:
            data, self._after_cr = data.removeprefix(b"\n"), False
        data = self._rest + data
        at = 0
        for end in _EOL.finditer(data):
            line, at = data[at : end.start()], end.end()
            if self._first:
                line, self._first = line.removeprefix(b"\xef\xbb\xbf"), False
            if not line:
                if self._data:
                    out.append(b"\n".join(self._data))
                    self._data.clear()
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
        self._after_cr = data.endswith(b"\r")
        self._rest = data[at:]
        return out
