"""A server that keeps every byte it is sent, and answers with the bytes it is told."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

CHECKS = (b"/v1/models", b"/load", b"/metrics")  # what the router asks by itself, with GET
POLL = 0.002  # seconds


class End:
    """Steps of an answer. CLOSE: end the connection; RESET: with a reset; HANG: say nothing until the other leaves."""


CLOSE, RESET, HANG = End(), End(), End()
Step = bytes | float | threading.Event | End  # bytes to send; seconds; until it is set
Answer = Iterable[Step]


@dataclass(eq=False)
class Request:
    """As it came. wire: the body as it was sent, with its chunks; body: without them."""

    method: str
    target: bytes
    head: bytes
    headers: list[tuple[bytes, bytes]]
    connection: int  # the number of its connection
    wire: bytes = b""
    body: bytes = b""
    size: int = 0
    came: float = field(default_factory=time.monotonic)
    ended: float | None = None
    left: threading.Event = field(default_factory=threading.Event)  # the router closed before the answer's end

    def __getitem__(self, name: bytes) -> bytes:
        """The header of this name, which must be there once."""
        (value,) = self.all(name)
        return value

    def all(self, name: bytes) -> list[bytes]:
        return [value for n, value in self.headers if n.lower() == name.lower()]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def full(status: int = 200, body: bytes = b"", *lines: bytes, reason: bytes = b"OK") -> bytes:
    """An answer with a Content-Length. lines: of its head."""
    head = [b"HTTP/1.1 %d %s" % (status, reason), *lines, b"Content-Length: %d" % len(body)]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def of_json(value: Any, status: int = 200, *lines: bytes) -> bytes:
    return full(status, json.dumps(value).encode(), b"Content-Type: application/json", *lines)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def sse(events: Iterable[bytes], between: Step = 0.0) -> Iterator[Step]:
    """Server-sent events in chunks. between: a step after each but the last."""
    yield b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    for n, event in enumerate(events):
        if n:
            yield between
        yield chunk(event)
    yield b"0\r\n\r\n"


def error(status: int, code: str = "broken", *lines: bytes) -> bytes:
    return of_json({"error": {"message": "no", "type": "server_error", "param": None, "code": code}}, status, *lines)


class Mock:
    """script: what answers a request, and is asked in the mock's own thread. models: of /v1/models. check: instead of
    that, an answer to checks. keep: how many bytes of each body are kept.

    Counts: connections, of which `open` are open; requests, of which `running` are being answered, `most` at once.
    """

    def __init__(self, *models: str, script: Callable[[Request], Answer] | None = None) -> None:
        self.models: tuple[str, ...] = models or ("m",)
        self.delay = 0.0  # of checks, in seconds
        self.check: Callable[[Request], Answer] | None = None
        self.loads: dict[bytes, bytes] = {}
        self.script = script or self.says_who
        self.keep = 1 << 30
        self.deaf: Callable[[Request], bool] = lambda _: False  # answer before the body has come
        self.paused = threading.Event()  # while it is set, nothing of bodies is read
        self.requests: list[Request] = []
        self.checks: list[Request] = []
        self.connections = self.open = self.running = self.most = 0
        self._held = socket.socket()  # keeps the port while the server is stopped
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port: int = self._held.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._server: asyncio.Server | None = None
        self.lines: set[_Connection] = set()
        self._thread.start()

    def says_who(self, request: Request) -> Answer:
        return [of_json({"port": self.port, "object": "text_completion"})]

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _do(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(20)

    def start(self) -> Mock:
        """Listen, again on the same port."""

        async def go() -> None:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self.port))
            self._server = await self._loop.create_server(lambda: _Connection(self), sock=listener, backlog=512)
            self._listener = listener

        self._do(go())
        return self

    def stop(self, *, gently: bool = False) -> None:
        """No longer listen. gently: requests that run are answered, else all connections end at once."""

        async def go() -> None:
            if self._server is not None:
                # What was accepted is begun first: asyncio loses a connection that it begins after its server closed.
                self._loop.remove_reader(self._listener)
                for _ in range(4):
                    await asyncio.sleep(0)
                self._server.close()
                self._server = None
            for line in list(self.lines):
                if not gently or not line.busy:
                    line.end()
                line.last = True
            while self.lines:
                await asyncio.sleep(POLL)

        self._do(go())

    def hang_up(self) -> None:
        """Close all idle connections."""

        async def go() -> None:
            for line in list(self.lines):
                if not line.busy:
                    line.end()

        self._do(go())

    def close(self) -> None:
        async def last() -> None:
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        with suppress(TimeoutError):
            self.stop()
        self._do(last())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()
        self._held.close()

    @property
    def bodies(self) -> list[bytes]:
        return [request.body for request in self.requests]

    def answer_to(self, request: Request) -> Answer:
        if request.method == "GET" and request.target in CHECKS:
            if self.check is not None:
                return self.check(request)
            if request.target in self.loads:
                return [full(200, self.loads[request.target])]
            if request.target != b"/v1/models":
                return [error(404)]
            data = [{"id": m, "object": "model", "created": 1, "owned_by": str(self.port)} for m in self.models]
            return [self.delay, of_json({"object": "list", "data": data})]
        return self.script(request)


class _Connection(asyncio.Protocol):
    """One connection, on bytes alone: nothing here is lenient for the router's sake."""

    def __init__(self, mock: Mock) -> None:
        self.mock = mock
        self.busy = self.last = False
        self._data = bytearray()
        self._more = asyncio.Event()
        self._gone = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def connection_made(self, transport: Any) -> None:
        mock = self.mock
        mock.connections += 1
        mock.open += 1
        self._number = mock.connections
        mock.lines.add(self)
        self._transport = transport
        transport.set_write_buffer_limits(high=1 << 16)
        self._task = asyncio.ensure_future(self._serve())

    def data_received(self, data: bytes) -> None:
        self._data += data
        self._more.set()
        if self.mock.paused.is_set() and len(self._data) > 1 << 16:
            self._transport.pause_reading()
            self._resuming = asyncio.ensure_future(self._resume())

    async def _resume(self) -> None:
        while self.mock.paused.is_set():
            await asyncio.sleep(POLL)
        with suppress(RuntimeError):
            self._transport.resume_reading()

    def eof_received(self) -> None:
        self._over()

    def connection_lost(self, error: Exception | None) -> None:
        self._over()
        self._room.set()
        self.mock.open -= 1
        self.mock.lines.discard(self)

    def _over(self) -> None:
        self._gone.set()
        self._more.set()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def end(self) -> None:
        self._transport.abort()

    async def _serve(self) -> None:
        try:
            while not self._gone.is_set() and not self.last:
                head = await self._until(b"\r\n\r\n")
                if not await self._one(head):
                    break
        except EOFError:
            pass
        finally:
            self._transport.close()

    async def _one(self, head: bytes) -> bool:
        first, *lines = head[:-4].split(b"\r\n")
        method, target, _ = first.split(b" ")
        headers = [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        request = Request(method.decode(), target, head, headers, self._number)
        mock = self.mock
        asked = request.method == "GET" and target in CHECKS
        self.busy = True
        try:
            if asked:
                mock.checks.append(request)
                return not await self._answer(request)
            mock.requests.append(request)
            mock.running += 1
            mock.most = max(mock.most, mock.running)
            try:
                if not mock.deaf(request):
                    await self._body(request)
                ended = await self._answer(request)
                if mock.deaf(request) and not ended:
                    await self._body(request)
                return not ended
            except EOFError:
                request.left.set()
                raise
            finally:
                mock.running -= 1
                request.ended = time.monotonic()
        finally:
            self.busy = False

    async def _body(self, request: Request) -> None:
        lengths, encodings = request.all(b"content-length"), request.all(b"transfer-encoding")
        assert len(lengths) + len(encodings) <= 1, request.head
        if encodings:
            while True:
                line = await self._until(b"\r\n")
                size = int(line.partition(b";")[0], 16)
                data = await self._exactly(size + 2)
                request.wire += line + data
                request.body += data[:-2]
                request.size += size
                if not size:
                    return
        elif lengths:
            left, kept = int(lengths[0]), bytearray()
            while left:
                part = await self._some(left)
                left -= len(part)
                request.size += len(part)
                if len(kept) < self.mock.keep:
                    kept += part
            request.body = request.wire = bytes(kept)

    async def _answer(self, request: Request) -> bool:
        """Is the connection at its end?"""
        for step in self.mock.answer_to(request):
            if isinstance(step, bytes):
                self._transport.write(step)
                await self._room.wait()
            elif step is CLOSE:
                return True
            elif step is RESET:
                self._transport.abort()
                return True
            elif step is HANG:
                await self._gone.wait()
            elif isinstance(step, threading.Event):
                while not step.is_set() and not self._gone.is_set():
                    await asyncio.sleep(POLL)
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._gone.wait(), step)
            if self._gone.is_set():
                request.left.set()
                return True
        return False

    # ---- bytes -------------------------------------------------------------------------------------------------

    async def _grown(self) -> None:
        if self._gone.is_set():
            raise EOFError
        self._more.clear()
        await self._more.wait()

    async def _until(self, mark: bytes) -> bytes:
        while (at := self._data.find(mark)) < 0:
            await self._grown()
        found = bytes(self._data[: at + len(mark)])
        del self._data[: at + len(mark)]
        return found

    async def _some(self, most: int) -> bytes:
        while not self._data:
            await self._grown()
        found = bytes(self._data[:most])
        del self._data[:most]
        return found

    async def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            found += await self._some(size - len(found))
        return found
