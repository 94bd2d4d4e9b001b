"""HTTP/1.1 by hand, so that a client may do as it likes, and sees each byte of an answer."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any

LONG = 20.0  # seconds: what has not come then, never comes


def request(method: str, target: bytes | str, body: bytes | None = None, *lines: bytes) -> bytes:
    """The bytes of a request, with a Content-Length if there is a body."""
    target = target.encode() if isinstance(target, str) else target
    head = [b"%s %s HTTP/1.1" % (method.encode(), target), b"Host: localhost", *lines]
    if body is not None:
        head.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(head) + b"\r\n\r\n" + (body or b"")


@dataclass
class Answer:
    """whole: has it come to the end that it announced? wire: its body as it was sent; times: of its parts."""

    head: bytes
    status: int
    headers: list[tuple[bytes, bytes]]
    wire: bytes = b""
    body: bytes = b""
    whole: bool = True
    parts: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def all(self, name: bytes) -> list[bytes]:
        return [value for n, value in self.headers if n.lower() == name.lower()]

    def __getitem__(self, name: bytes) -> bytes:
        (value,) = self.all(name)
        return value

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]


class Wire:
    """A connection to the router. Sends and reads bytes, and changes none."""

    def __init__(self, port: int, *, small: bool = False, seconds: float = LONG) -> None:
        self.socket = socket.socket()
        if small:  # little that the system takes in for us
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        self.socket.settimeout(seconds)
        self.socket.connect(("127.0.0.1", port))
        self.data = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, data: bytes) -> Wire:
        self.socket.sendall(data)
        return self

    def more(self) -> bool:
        """Reads on. False: there is no more."""
        try:
            part = self.socket.recv(1 << 18)
        except ConnectionError:
            part = b""
        self.data += part
        return bool(part)

    def until(self, mark: bytes) -> bytes:
        """Raises EOFError."""
        while (at := self.data.find(mark)) < 0:
            if not self.more():
                raise EOFError(self.data)
        found, self.data = self.data[: at + len(mark)], self.data[at + len(mark) :]
        return found

    def rest(self) -> bytes:
        """All that comes until the router closes."""
        while self.more():
            pass
        found, self.data = self.data, b""
        return found

    def head(self) -> Answer:
        head = self.until(b"\r\n\r\n")
        first, *lines = head[:-4].split(b"\r\n")
        headers = [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        return Answer(head, int(first.split(b" ")[1]), headers)

    def answer(self, *, head: bool = False) -> Answer:
        """head: of a HEAD, without a body."""
        answer = self.head()
        while 100 <= answer.status < 200 and answer.status != 101:
            answer = self.head()
        if not head and answer.status not in (204, 304):
            try:
                self._body(answer)
            except EOFError as e:
                answer.wire += e.args[0]
                answer.whole = False
        return answer

    def _body(self, answer: Answer) -> None:
        def came(part: bytes) -> None:
            answer.parts.append(part)
            answer.times.append(time.monotonic())

        lengths, encodings = answer.all(b"content-length"), answer.all(b"transfer-encoding")
        assert len(lengths) + len(encodings) <= 1, answer.head
        if encodings:
            assert encodings == [b"chunked"]
            while True:
                line = self.until(b"\r\n")
                size = int(line, 16)
                data = self._exactly(size + 2)
                answer.wire += line + data
                if not size:
                    break
                came(data[:-2])
        elif lengths:
            came(self._exactly(int(lengths[0])))
            answer.wire += answer.parts[-1]
        else:
            came(self.rest())
            answer.wire += answer.parts[-1]
        answer.body = b"".join(answer.parts)

    def _exactly(self, size: int) -> bytes:
        parts, have = [self.data], len(self.data)
        while have < size:
            self.data = b""
            if not self.more():
                raise EOFError(b"".join(parts))
            parts.append(self.data)
            have += len(self.data)
        whole = b"".join(parts)
        self.data = whole[size:]
        return whole[:size]
