"""HTTP by hand, so that a client may do as it likes; and answers read by the letter, so that broken ones are seen."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

STATUS = re.compile(rb"HTTP/1\.1 ([1-5][0-9]{2}) [\x20-\x7e]*")
HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ?([\x20-\x7e\x80-\xff]*)")
JSON = "application/json"
PATIENCE = 60.0  # seconds without a byte, in which any answer goes on on a busy machine


class Broken(Exception):
    """The answer is no HTTP."""


class Closed(Exception):
    """The server has closed the connection, and was within its rights or not."""


@dataclass
class Answer:
    """began: when its first line was here."""

    status: int
    headers: dict[str, str]
    began: float = field(default_factory=time.monotonic)
    body: bytes = b""

    @property
    def streamed(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")


def request(
    method: str,
    path: str,
    body: bytes | None = None,
    key: str | None = None,
    *more: str,
    kind: str = JSON,
) -> bytes:
    """more: further header lines."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    if body is not None:
        lines += [f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *more, "\r\n"]).encode("latin-1") + (body or b"")


class Wire:
    """A connection. Nothing is read before it is asked for."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._here = sock, b""
        self.ended = False

    @classmethod
    async def open(cls, port: int, *, small: bool = False) -> Wire:
        """small: little is taken that is not read."""
        sock = socket.socket()
        if small:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        wire = cls(sock)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except BaseException:
            wire.close()
            raise
        return wire

    async def send(self, data: bytes) -> None:
        """Raises Closed, also where the server does not take it."""
        try:
            async with asyncio.timeout(PATIENCE):
                await asyncio.get_running_loop().sock_sendall(self._sock, data)
        except (ConnectionError, BrokenPipeError) as e:
            raise Closed from e

    def say_no_more(self) -> None:
        """FIN; what comes can still be read."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as e:
            raise Closed from e

    def vanish(self) -> None:
        """RST, as of a machine that is gone."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self._sock.close()

    # ---- reading -----------------------------------------------------------------------------------------------

    async def more(self) -> None:
        """Wait for some bytes. Raises Closed, TimeoutError."""
        try:
            async with asyncio.timeout(PATIENCE):
                data = await asyncio.get_running_loop().sock_recv(self._sock, 1 << 16)
        except ConnectionError as e:
            self.ended = True
            raise Closed from e
        if not data:
            self.ended = True
            raise Closed
        self._here += data

    async def quiet(self) -> bool:
        """Is there nothing that nobody asked for?"""
        return not self._here

    async def _line(self) -> bytes:
        while b"\r\n" not in self._here:
            await self.more()
        line, _, self._here = self._here.partition(b"\r\n")
        return line

    async def _exactly(self, n: int) -> bytes:
        while len(self._here) < n:
            await self.more()
        data, self._here = self._here[:n], self._here[n:]
        return data

    async def head(self) -> Answer:
        """The beginning of an answer. Raises Broken, Closed if there is none."""
        try:
            first = await self._line()
        except Closed:
            if self._here:
                raise Broken(f"the connection ended within {self._here[:80]!r}") from None
            raise
        try:
            if not (found := STATUS.fullmatch(first)):
                raise Broken(f"no status line: {first[:80]!r}")
            headers: dict[str, str] = {}
            while line := await self._line():
                if not (said := HEADER.fullmatch(line)) or (name := said[1].decode().lower()) in headers:
                    raise Broken(f"no header, or one twice: {line[:80]!r}")
                headers[name] = said[2].decode("latin-1")
        except Closed:
            raise Broken("the connection ended within the headers") from None
        answer = Answer(int(found[1]), headers)
        return await self.head() if answer.status == 100 else answer

    async def pieces(self, answer: Answer) -> AsyncIterator[bytes]:
        """What comes of the body, as it comes. Raises Broken."""
        length, coding = answer.headers.get("content-length"), answer.headers.get("transfer-encoding")
        if (length is None) == (coding is None) or coding not in (None, "chunked"):
            raise Broken(f"content-length: {length} and transfer-encoding: {coding}")
        try:
            if length is not None:
                yield await self._exactly(int(length))
                return
            while size := int(await self._line(), 16):
                data = await self._exactly(size + 2)
                if not data.endswith(b"\r\n"):
                    raise Broken("a chunk that does not end where it says")
                yield data[:-2]
            if await self._line():
                raise Broken("something after the last chunk")
        except Closed:
            raise Broken("the connection ended within the body") from None
        except ValueError as e:
            raise Broken(f"a length that is none: {e}") from None

    async def answer(self, *, head: bool = False) -> Answer:
        """The whole of one. head: it has no body."""
        answer = await self.head()
        if not head:
            answer.body = b"".join([piece async for piece in self.pieces(answer)])
        return answer


def events(body: bytes) -> list[bytes]:
    """Of a stream that is over. Raises Broken."""
    *whole, rest = body.split(b"\n\n")
    if whole and whole[-1].startswith(b"event: ") and not rest:  # of responses and messages: named, and with no mark
        return [_named(event) for event in whole if not event.startswith(b":")]
    if rest or not whole or whole[-1] != b"data: [DONE]" or not all(e.startswith(b"data: ") for e in whole):
        raise Broken(f"a stream that ends with {body[-80:]!r}")
    return [event.removeprefix(b"data: ") for event in whole[:-1]]


def _named(event: bytes) -> bytes:
    name, _, data = event.partition(b"\ndata: ")
    if not name.startswith(b"event: ") or not data.startswith(b'{"type":"%s"' % name.removeprefix(b"event: ")):
        raise Broken(f"an event that is named otherwise than its type: {event[:80]!r}")
    return data


async def ask(port: int, data: bytes, *, head: bool = False) -> Answer:
    """On a connection of its own."""
    wire = await Wire.open(port)
    try:
        await wire.send(data)
        return await wire.answer(head=head)
    finally:
        wire.close()
