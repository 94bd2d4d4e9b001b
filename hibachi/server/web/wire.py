"""Parses HTTP/1.1 responses and server-sent events from bytes, however these are split. No input or output here."""

from __future__ import annotations

import re

_MOST_HEAD = 64 << 10  # bytes of a head, of the line in front of a chunk, of a trailer
_EOL = re.compile(rb"\r\n|\n|\r")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: .*)?")
_SIZE = re.compile(rb"([0-9a-fA-F]{1,16})[ \t]*(?:;.*)?\r?")


class BadAnswer(Exception):
    """The bytes are no HTTP/1.1 response."""


class Response:
    """One response, fed with bytes (RFC 9112).

    status: 0 until the head is there. headers: names in lower case. done: the whole body has come. reusable: the
    connection may carry another request. begun: some of it has come.
    """

    done: bool

    def __init__(self) -> None:
        self.status: int = 0
        self.headers: dict[str, str] = {}
        self.begun: bool = False
        self.done: bool = False
        self.reusable: bool = True
        self._rest = b""
        self._read = self._head
        self._left = 0  # bytes of the body, or of this chunk

    def feed(self, data: bytes) -> bytes:
        """Returns the bytes of the body that have come with it. Raises BadAnswer."""
        self.begun = True
        if self.done:
            raise BadAnswer("bytes came after the end of the answer")
        return self._read(self._rest + data if self._rest else data)

    def end(self) -> None:
        """The connection was closed. Raises BadAnswer if more should have come."""
        self.reusable = False
        if self._read == self._until_closed:
            self.done = True
        if not self.done:
            raise BadAnswer("the connection was closed in the middle of an answer")

    # ---- one for each state: each takes all that is there, and keeps in _rest what it cannot use yet -----------------

    def _head(self, data: bytes) -> bytes:
        lines = []
        at = 0
        while True:
            end = data.find(b"\n", at)
            if end < 0 or end > _MOST_HEAD:
                return self._keep(data)
            line = data[at:end].removesuffix(b"\r")
            at = end + 1
            if line:
                lines.append(line)
            elif lines:
                break
        self._rest = b""
        found = _STATUS.fullmatch(lines[0])
        if found is None:
            raise BadAnswer(f"expected an HTTP/1.1 status line; got {lines[0][:60]!r}")
        if found[2][:1] == b"1":  # the real one follows
            return self._head(data[at:])
        self.status = int(found[2])
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon:
                raise BadAnswer(f"expected a header; got {line[:60]!r}")
            self.headers[name.strip().lower().decode("latin-1")] = value.strip().decode("latin-1")
        return self._body(data[at:], old=found[1] == b"0")

    def _body(self, data: bytes, *, old: bool) -> bytes:
        says = self.headers.get("connection", "").lower()
        self.reusable = says == "keep-alive" if old else says != "close"
        length = self.headers.get("content-length", "")
        if self.status in (204, 304):
            self.done = True
            return b""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._read = self._size
        elif length:
            if not (length.isascii() and length.isdigit()):
                raise BadAnswer(f"expected Content-Length: a number; got {length[:60]!r}")
            self._left, self._read = int(length), self._counted
        else:
            self._read = self._until_closed
        return self._read(data)

    def _counted(self, data: bytes) -> bytes:
        if len(data) > self._left:
            raise BadAnswer("more came than Content-Length says")
        self._left -= len(data)
        self.done = not self._left
        return data

    def _until_closed(self, data: bytes) -> bytes:
        return data

    def _size(self, data: bytes) -> bytes:
        """At the line in front of a chunk; takes as many chunks as there are."""
        at, body = 0, []
        while True:
            end = data.find(b"\n", at)
            if end < 0:
                self._keep(data[at:])
                break
            found = _SIZE.fullmatch(data, at, end)
            if found is None:
                raise BadAnswer(f"expected the size of a chunk; got {data[at:end][:60]!r}")
            size = int(found[1], 16)
            at = end + 1
            if not size:
                self._read, self._rest = self._trailer, b""
                self._trailer(data[at:])
                break
            part = data[at : at + size]
            body.append(part)
            at += size
            if len(part) < size:
                self._left, self._read, self._rest = size - len(part), self._chunk, b""
                break
            if (next_ := _after_chunk(data, at)) < 0:
                self._read = self._chunk_end
                self._keep(data[at:])
                break
            at = next_
        return body[0] if len(body) == 1 else b"".join(body)

    def _chunk(self, data: bytes) -> bytes:
        """Inside a chunk."""
        part = data[: self._left]
        self._left -= len(part)
        if self._left:
            return part
        self._read = self._chunk_end
        return part + self._chunk_end(data[len(part) :])

    def _chunk_end(self, data: bytes) -> bytes:
        at = _after_chunk(data, 0)
        if at < 0:
            return self._keep(data)
        self._read, self._rest = self._size, b""
        return self._size(data[at:])

    def _trailer(self, data: bytes) -> bytes:
        at = 0
        while (end := data.find(b"\n", at)) >= 0:
            if not data[at:end].removesuffix(b"\r"):
                self.done, self._rest = True, b""
                return b""
            at = end + 1
        return self._keep(data[at:])

    def _keep(self, data: bytes) -> bytes:
        if len(data) > _MOST_HEAD:
            raise BadAnswer(f"a line or a head of more than {_MOST_HEAD} bytes")
        self._rest = data
        return b""


def _after_chunk(data: bytes, at: int) -> int:
    """Where the next begins, after the end of line that follows a chunk; -1 means more must come. Raises BadAnswer."""
    if data.startswith((b"\r\n", b"\n"), at):
        return at + (2 if data[at] == 13 else 1)
    if at == len(data) or (at + 1 == len(data) and data[at] == 13):
        return -1
    raise BadAnswer(f"expected the end of a chunk; got {data[at : at + 20]!r}")


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
