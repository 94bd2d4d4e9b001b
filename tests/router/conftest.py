"""A router in this process, its upstreams, a client of bytes, and a router in a process of its own."""

from __future__ import annotations

import asyncio
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

from ..lib.wire import LONG, Answer, Wire, request  # noqa: E402
from .mocks import Mock  # noqa: E402

ROOT = Path(__file__).parents[2]
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
