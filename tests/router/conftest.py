"""A router in this process, its upstreams, a client of bytes, and a router in a process of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

for name in ("aiohttp", "uvicorn", "msgspec", "prometheus_client"):
    pytest.importorskip(name)

import uvicorn.server  # noqa: E402

from hibachi.router.addresses import places_of  # noqa: E402
from hibachi.router.run import Router, RouterServer, config_for  # noqa: E402
from hibachi.router.settings import settle  # noqa: E402
from hibachi.router.upstreams import Upstream, UpstreamState  # noqa: E402
from hibachi.server.web.keys import tenants_of  # noqa: E402

from .mocks import Mock  # noqa: E402

ROOT = Path(__file__).parents[2]
LONG = 20.0  # seconds: what has not come then, never comes
JSON = b"Content-Type: application/json"
BODY = b'{"model": "m", "prompt": "Emma"}'
QUICK = {
    "check_interval": 0.2,
    "check_timeout": 5.0,
    "connect_timeout": 5.0,
    "wait_for": 1.0,
    "timeout": 20.0,
    "idle_timeout": 20.0,
    "drain_timeout": 0.5,
}


def eventually(true: Callable[[], Any], seconds: float = LONG) -> Any:
    """What `true` returns, as soon as that is true."""
    until = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < until, "it never came"
        time.sleep(0.003)
    return found


# ---- a client ----------------------------------------------------------------------------------------------------


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


def ask(port: int, target: bytes | str = "/v1/completions", body: bytes | None = BODY, *lines: bytes) -> Answer:
    """POST, or GET without a body, on a connection of its own."""
    method = "GET" if body is None else "POST"
    if body is not None and not any(line.lower().startswith(b"content-type:") for line in lines):
        lines = (JSON, *lines)
    with Wire(port) as wire:
        return wire.send(request(method, target, body, *lines)).answer()


class Asking(threading.Thread):
    """`ask` in a thread. `result()`: its answer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(daemon=True)
        self._args, self._found, self.ended = args, None, 0.0
        self.start()

    def run(self) -> None:
        try:
            self._found = ask(*self._args)
        except BaseException as e:
            self._found = e
        self.ended = time.monotonic()

    def result(self) -> Answer:
        self.join(2 * LONG)
        assert not self.is_alive()
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found


# ---- a router here -----------------------------------------------------------------------------------------------


class Hasty:
    """asyncio for uvicorn, which sleeps a tenth of a second whenever it ends: with some 400 routers, that is long."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.01))


uvicorn.server.asyncio = Hasty()


class Serving(RouterServer):
    """In a thread, which has no signals."""

    def capture_signals(self) -> Any:
        return nullcontext()

    async def startup(self, sockets: Any = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)


class Here:
    """A router that runs."""

    def __init__(self, router: Router, server: Serving, port: int) -> None:
        self.router, self.server, self.port, self.url = router, server, port, f"http://127.0.0.1:{port}"

    def ask(self, *args: Any) -> Answer:
        return ask(self.port, *args)

    def asking(self, *args: Any) -> Asking:
        return Asking(self.port, *args)

    def wire(self, **more: Any) -> Wire:
        return Wire(self.port, **more)

    def of(self, mock: Mock) -> Upstream:
        """The record of an upstream."""
        (found,) = [u for u in self.router.fleet.upstreams if u.place.url == mock.url]
        return found

    def ready(self) -> Here:
        """Once everybody has been asked."""
        eventually(
            lambda: (
                self.router.fleet.upstreams
                and all(u.state is not UpstreamState.NEW for u in self.router.fleet.upstreams)
            )
        )
        return self

    def call(self, what: Callable[[], Any]) -> None:
        """In the router's thread."""
        self.server.loop.call_soon_threadsafe(what)

    @property
    def waiting(self) -> int:
        return self.router.forwarder.lines.waiting

    def figures(self) -> dict[str, float]:
        """What /metrics says."""
        lines = self.ask("/metrics", None).body.decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


@contextmanager
def routing(
    *places: Mock | str, environment: dict[str, str] | None = None, config: str | None = None, **flags: Any
) -> Iterator[Here]:
    """A router before these, ready when everybody was asked. flags: settings, besides QUICK."""
    urls = [place if isinstance(place, str) else place.url for place in places]
    environment = environment or {}
    given = {**QUICK, **flags} | ({"upstream": urls} if urls else {})
    settings = settle({key: value for key, value in given.items() if value is not None}, environment, config)
    router = Router(settings, tenants_of(settings), places_of(settings, environment))
    serving = config_for(router, settings, None)
    server = Serving(serving, router, settings)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    errors = logging.getLogger("uvicorn.error")
    level = errors.level
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive())
        assert thread.is_alive()
        yield Here(router, server, listener.getsockname()[1]).ready()
    finally:
        server.force_exit = True
        if thread.is_alive():
            server.loop.call_soon_threadsafe(server.stop)
        thread.join(LONG)
        listener.close()
        errors.setLevel(level)
        assert not thread.is_alive()


@pytest.fixture
def mock() -> Iterator[Callable[..., Mock]]:
    """mock(*models, script=...): an upstream that listens."""
    with ExitStack() as stack:

        def make(*models: str, **more: Any) -> Mock:
            made = Mock(*models, **more)
            stack.callback(made.close)
            return made.start()

        yield make


@pytest.fixture
def route() -> Iterator[Callable[..., Here]]:
    """route(*upstreams, **settings): a router before them."""
    with ExitStack() as stack:
        yield lambda *places, **more: stack.enter_context(routing(*places, **more))


# ---- a router in a process of its own ------------------------------------------------------------------------------


class Process:
    """`hibachi route`. said: its standard error."""

    def __init__(self, flags: Iterable[str], environment: dict[str, str]) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HIBACHI_", "UPSTREAM")) and k != "DEBUG"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hibachi", "route", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=clean | environment,
        )
        self._lines: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = 0

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)

    @property
    def said(self) -> str:
        return b"".join(self._lines).decode()

    def listening(self) -> Process:
        """Once it listens, and has asked everybody."""
        eventually(lambda: "routing to" in self.said or self.process.poll() is not None, 60)
        found = re.search(r"routing to .* on https?://[^ ]*:(\d+)", self.said)
        assert found, self.said
        self.port = int(found[1])

        def asked() -> bool:
            ups = ask(self.port, "/upstreams", None).json["upstreams"]
            return all(u["state"] != "new" for u in ups)

        eventually(asked)
        return self

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ends(self, seconds: float = 60) -> int:
        status = self.process.wait(seconds)
        self._reader.join(seconds)
        return status

    @property
    def memory(self) -> int:
        """Bytes that are resident, and of no file."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) << 10

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        self._reader.join(60)
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture
def spawn() -> Iterator[Callable[..., Process]]:
    """spawn(*flags, **environment): a router in a process of its own."""
    with ExitStack() as stack:

        def make(*flags: str, **environment: str) -> Process:
            made = Process(flags, environment)
            stack.callback(made.close)
            return made

        yield make


def hup(process: Process) -> None:
    """Have it read its file again, and wait until it has."""
    before = process.said.count("read again")
    process.signal(signal.SIGHUP)
    eventually(lambda: process.said.count("read again") > before)
