"""Upstreams that fail as they are told, and count what they did to which request.

A request says its number in the header X-Test. What is to be done to it, the storm says (`Told`); what was done is in
the `Book`: for each number the attempts that came, in order.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

# What is done to a request. One of FAULTS leaves its client without an answer, and another upstream is to be tried.
ANSWER, AFTER = "answer", "broke after the first byte"
FAULTS = ("500", "502", "500 that broke", "broke before the first byte", "broke in the head", "no HTTP")
BUSY = ("429", "503 with Retry-After")
LEAVING = "shutting down"  # a 503 that says so, as hibachi's servers do
DIED_BEFORE, DIED_AFTER, LEFT = "died before the first byte", "died after the first byte", "left by the router"
HALF = "500 that broke"
ILL = frozenset((*FAULTS, DIED_BEFORE))  # those that count as a fault of an upstream
BUSY_BODY = {"error": {"message": "busy", "type": "rate_limit_error", "param": None, "code": "busy"}}
LEAVING_BODY = {"error": {"message": "bye", "type": "server_error", "param": None, "code": "shutting_down"}}


@dataclass
class Told:
    """slow: seconds to the first byte. chunks: of the answer; gap: seconds between them. poison: a fault, or "die"."""

    deeds: list[str] = field(default_factory=list)  # of the first attempt, the second, ...; then ANSWER
    slow: float = 0.0
    chunks: int = 3
    gap: float = 0.0
    size: int = 20  # bytes of a chunk
    chunked: bool = True
    poison: str = ""


@dataclass
class Attempt:
    where: str  # the upstream
    came: float
    what: str = ""  # became of it; "": it runs
    ended: float = 0.0


class Book:
    """told: what is to be done to a request of this number."""

    def __init__(self, told: Callable[[int], Told]) -> None:
        self.told = told
        self.attempts: defaultdict[int, list[Attempt]] = defaultdict(list)
        self.wrong: list[str] = []


class Mock:
    """One upstream on a port of its own, which it keeps while it is dead."""

    def __init__(self, book: Book, models: tuple[str, ...]) -> None:
        self.book, self.models = book, models
        self.guard = _socket(0)  # never listens: nobody else gets the port meanwhile
        self.port: int = self.guard.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server: asyncio.Server | None = None
        self.connections: set[_Connection] = set()
        self.closings: list[float] = []  # when it closed connections that somebody may just have used
        self.sick = self.leaving = False  # checks get 500; requests get 503
        self.deaths = self.most = 0

    @property
    def lives(self) -> bool:
        return self.server is not None

    @property
    def active(self) -> list[Attempt]:
        return [c.attempt for c in self.connections if c.attempt is not None]

    async def start(self) -> None:
        if self.server is None:
            loop, self.leaving = asyncio.get_running_loop(), False
            self.server = await loop.create_server(lambda: _Connection(self), sock=_socket(self.port), backlog=256)

    def die(self) -> None:
        """All that it has breaks; no connection can be opened until `start`."""
        if self.server is None:
            return
        self.deaths += 1
        self.closings.append(time.monotonic())
        self.server.close()
        self.server = None
        for connection in list(self.connections):
            connection.dies()

    async def leave(self, quickly: bool) -> None:
        """Say that it shuts down, end what runs, and go. quickly: somebody else has its place before anybody looks."""
        self.leaving = True
        await asyncio.sleep(0.1)
        if quickly:
            self.leaving = False
            return
        until = time.monotonic() + 1.0
        while self.active and time.monotonic() < until:
            await asyncio.sleep(0.01)
        self.die()

    async def end(self) -> None:
        self.die()
        self.guard.close()


class _Connection(asyncio.Protocol):
    transport: Any

    def __init__(self, mock: Mock) -> None:
        self.mock, self.book = mock, mock.book
        self.data = bytearray()
        self.attempt: Attempt | None = None  # that is under way
        self.begun = False  # its answer
        self.task: asyncio.Task[None] | None = None
        self.lost = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.mock.connections.add(self)
        if not self.mock.lives:
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self.mock.connections.discard(self)
        self._ends(LEFT)
        if self.task is not None:
            self.task.cancel()

    def dies(self) -> None:
        if self.attempt is None:
            self.transport.close()
        else:
            self._ends(DIED_AFTER if self.begun else DIED_BEFORE)
            self.transport.abort()

    def _ends(self, what: str) -> None:
        if self.attempt is not None:
            self.attempt.what, self.attempt.ended = what, time.monotonic()
            self.attempt = None

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self.task is not None or self.transport.is_closing():
            return
        end = self.data.find(b"\r\n\r\n")
        if end < 0:
            return
        first, *lines = bytes(self.data[:end]).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        size = int(headers.get("content-length", "0"))
        if len(self.data) < end + 4 + size:
            return
        body = bytes(self.data[end + 4 : end + 4 + size])
        del self.data[: end + 4 + size]
        if "transfer-encoding" in headers:
            self.book.wrong.append(f"{first}: a body without its length")
        self.task = asyncio.ensure_future(self._serve(first, headers, body))

    async def _serve(self, first: str, headers: dict[str, str], body: bytes) -> None:
        with suppress(asyncio.CancelledError):
            await self._answer(first, headers, body)
        self.task = None
        if self.data and not self.lost and not self.transport.is_closing():
            self.data_received(b"")

    async def _answer(self, first: str, headers: dict[str, str], body: bytes) -> None:
        if "x-test" not in headers:
            models = [{"id": name, "object": "model"} for name in self.mock.models]
            self._whole(500 if self.mock.sick else 200, {"object": "list", "data": models})
            return
        n = int(headers["x-test"])
        told = self.book.told(n)
        self.attempt, self.begun = Attempt(self.mock.url, time.monotonic()), False
        self.book.attempts[n].append(self.attempt)
        self.mock.most = max(self.mock.most, len(self.mock.active))
        own = n
        if body:
            try:
                said = json.loads(body)
                own, model = said["n"], said.get("model")
            except (ValueError, KeyError, TypeError):
                self.book.wrong.append(f"{n}: its body did not come as it was sent: {body[:200]!r}")
                return
            if "prompt" in said and model not in self.mock.models:  # elsewhere it may be another field
                self.book.wrong.append(f"{n}: {self.mock.url} does not have {model}")
        await self._do(n, own, told, " /v1/completions" in first and b'"stream": true' in body)

    async def _do(self, n: int, own: int, told: Told, stream: bool) -> None:
        deed = told.poison or (told.deeds.pop(0) if told.deeds else ANSWER)
        if self.mock.leaving:
            self._ends(LEAVING)
            self._whole(503, LEAVING_BODY, "Retry-After: 1\r\n")
            return
        if deed in BUSY:
            self._ends(deed)
            self._whole(int(deed[:3]), BUSY_BODY, "Retry-After: 1\r\n")
            return
        if told.slow:
            await asyncio.sleep(told.slow)
        if deed == "die":
            mock = self.mock
            mock.die()
            asyncio.get_running_loop().call_later(0.15, lambda: asyncio.ensure_future(mock.start()))
        elif deed in ("500", "502"):
            self._ends(deed)
            self._whole(int(deed), {"error": {"message": "fault", "type": "server_error", "param": None, "code": "x"}})
        elif deed in FAULTS:
            self._ends(deed)
            self.transport.write(
                {
                    "500 that broke": b"HTTP/1.1 500 No\r\nContent-Length: 100\r\n\r\n{",
                    "broke before the first byte": b"",
                    "broke in the head": b"HTTP/1.1 200 OK\r\nContent-",
                    "no HTTP": b"220 mail.example.org\r\n\r\n",
                }[deed]
            )
            self.transport.close()
        else:
            await self._send(n, own, told, stream, breaks=deed == AFTER)

    async def _send(self, n: int, own: int, told: Told, stream: bool, *, breaks: bool) -> None:
        if stream:
            text = b"x" * told.size
            parts = [b'data: {"n": %d, "i": %d, "text": "%s"}\n\n' % (own, i, text) for i in range(told.chunks)]
            parts.append(b"data: [DONE] %d\n\n" % own)
        else:
            data = json.dumps({"n": own, "test": n, "text": "x" * told.size * told.chunks}).encode()
            step = len(data) // told.chunks + 1
            parts = [data[i : i + step] for i in range(0, len(data), step)]
        chunked = told.chunked or stream
        framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {sum(map(len, parts))}"
        kind = "text/event-stream" if stream else "application/json"
        self.begun = True
        self.transport.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{framing}\r\n\r\n".encode())
        for i, part in enumerate(parts):
            if breaks and i == len(parts) // 2:
                self._ends(AFTER)
                self.transport.close()
                return
            if told.gap:
                await asyncio.sleep(told.gap)
            self.transport.write(b"%x\r\n%s\r\n" % (len(part), part) if chunked else part)
        if chunked:
            self.transport.write(b"0\r\n\r\n")
        while self.transport.get_write_buffer_size():
            await asyncio.sleep(0.001)
        self._ends(ANSWER)
        if n % 97 == 0:  # now and then one closes a connection that others would have kept
            self.mock.closings.append(time.monotonic())
            self.transport.close()

    def _whole(self, status: int, said: Any, more: str = "") -> None:
        data = json.dumps(said).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n{more}\r\n"
        self.transport.write(head.encode() + data)


def _socket(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    sock.setblocking(False)
    return sock
