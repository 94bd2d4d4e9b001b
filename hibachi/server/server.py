"""The HTTP server of an engine: how its shutdown ends the engine, and how a lost engine ends the server."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import suppress
from typing import Any

from starlette.applications import Starlette

from hibachi.engine.streams.closeable import CLOSE_WITHIN
from hibachi.errors import ConfigError
from hibachi.server.app import application, dialect_at, tells
from hibachi.server.metrics import metrics_for
from hibachi.server.served import Served
from hibachi.server.web.certificate import Certificate
from hibachi.server.web.cors import Cors
from hibachi.server.web.deadlines import Tell
from hibachi.server.web.hosts import Hosts
from hibachi.server.web.rooted import Rooted
from hibachi.server.web.server import Config, config_of
from hibachi.server.web.server import HttpServer as Orderly

CLOSING = 1.0  # seconds at least for the engine to end, after the time of the requests is over


def server_of(
    served: Served,
    certificate: Certificate | None,
    origins: frozenset[str],
    hosts: frozenset[str] | None,
    root_path: str,
) -> Server:
    """Make the server.

    origins: of web pages that may send requests. hosts: names that the server answers to besides those of loopback;
    None means any. Raises ConfigError for a root_path with which our own routes begin.
    """
    _, routes = metrics_for(served, served.settings.metric_names)
    app = surrounded(application(served, more=routes), tells(served), origins, hosts, root_path)
    return Server(config_of(app, served.settings.arrival_timeout or None, tells(served), certificate), served)


def surrounded(
    app: Starlette, tell: Tell, origins: frozenset[str], hosts: frozenset[str] | None, root_path: str
) -> Any:
    """The application with its middleware; see `server_of`."""
    around: Any = app
    if hosts is not None:
        around = Hosts(around, hosts, "--allowed-origins", tell, dialect_at)
    if root_path:
        if any(f"{getattr(route, 'path', '')}/".startswith(f"{root_path}/") for route in app.routes):
            # A path could be read in two ways.
            raise ConfigError(f"--root-path {root_path}: our own routes begin so. Choose another, such as /llm.")
        around = Rooted(around, root_path)
    return Cors(around, origins, tell=tell) if origins else around


class Server(Orderly):
    """Ends when all requests have ended, and ends the engine."""

    def __init__(self, config: Config, served: Served) -> None:
        settings = served.settings
        super().__init__(config, settings.drain_timeout, settings.arrival_timeout or None)
        self._served, self._exits = served, settings.exit_on_failure

    def open_requests(self) -> int:
        return self._served.open_requests

    def drain(self) -> None:
        self._served.drain()

    async def end_all(self, left: float) -> None:
        within = min(left + CLOSING, CLOSE_WITHIN)
        closing = threading.Thread(target=self._served.what.close, args=(within,), daemon=True)
        closing.start()  # it ends their streams
        while closing.is_alive():
            await asyncio.sleep(0.01)

    def works(self) -> bool:
        return self._served.what.health().state not in ("failed", "closed")

    def is_lost(self) -> str | None:
        health = self._served.what.health()
        lost = self._exits and not health.ok and not self._served.what.engine.begins_again
        return health.message if lost else None

    def leave(self) -> None:
        if (pid := self._served.what.engine.pid) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
