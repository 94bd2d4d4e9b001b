"""The application of an engine: how its shutdown ends the engine, and how a lost engine ends the server."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import suppress
from typing import Any

from starlette.applications import Starlette

from hibachi.engine.streams.closeable import CLOSE_WITHIN
from hibachi.errors import ConfigError, text_of
from hibachi.server.app import application, dialect_at, tells
from hibachi.server.load_model import opened
from hibachi.server.metrics import metrics_for
from hibachi.server.served import Served
from hibachi.server.settings import ServeSettings
from hibachi.server.web.certificate import Certificate
from hibachi.server.web.cors import Cors, origins_of
from hibachi.server.web.deadlines import Tell
from hibachi.server.web.ending import Drainable
from hibachi.server.web.hosts import Hosts
from hibachi.server.web.rooted import Rooted, root_of
from hibachi.server.web.server import Config, config_of

CLOSING = 1.0  # seconds at least for the engine to end, after the time of the requests is over


def surrounded(
    app: Starlette, tell: Tell, origins: frozenset[str], hosts: frozenset[str] | None, root_path: str
) -> Any:
    """The application with its middleware.

    origins: of web pages that may send requests. hosts: see `Application.begin`. Raises ConfigError for a root_path
    with which our own routes begin.
    """
    around: Any = app
    if hosts is not None:
        around = Hosts(around, hosts, "--allowed-origins", tell, dialect_at)
    if root_path:
        if any(f"{getattr(route, 'path', '')}/".startswith(f"{root_path}/") for route in app.routes):
            # A path could be read in two ways.
            raise ConfigError(f"--root-path {root_path}: our own routes begin so. Choose another, such as /llm.")
        around = Rooted(around, root_path)
    return Cors(around, origins, tell=tell) if origins else around


class Application(Drainable):
    """The ASGI application of `hibachi serve`: all its routes, and how they come to their end.

    Any ASGI server runs it: what is called lifespan opens the model, and at the end lets running requests end and
    closes it. Made in any process: it can be pickled until it is open.
    """

    def __init__(self, settings: ServeSettings) -> None:
        """Raises ConfigError for settings that cannot be used, as far as that is known without the model."""
        self.settings = settings
        self._origins = origins_of(settings.allowed_origins, "--allowed-origins")
        self._root_path = root_of(settings.root_path)
        self._served: Served | None = None

    @property
    def served(self) -> Served:
        assert self._served is not None, "the application is not open"
        return self._served

    def open(self) -> None:
        """Load the model, if that was not done. Raises what making it raises."""
        if self._served is None:
            self.begin(opened(self.settings), None)

    def begin(self, served: Served, hosts: frozenset[str] | None) -> None:
        """Serve a model that is loaded. hosts: names that are answered to besides those of loopback; None means any.
        Raises ConfigError for a --root-path with which our own routes begin.
        """
        _, routes = metrics_for(served, self.settings.metric_names)
        app = application(served, more=routes)
        self._app = surrounded(app, tells(served), self._origins, hosts, self._root_path)
        self._served = served

    def config(self, certificate: Certificate | None) -> Config:
        """For uvicorn, once a model is served."""
        return config_of(self._app, self.settings.arrival_timeout or None, tells(self.served), certificate)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await self._app(scope, receive, send)

    async def _live(self, receive: Any, send: Any) -> None:
        await receive()
        try:
            await asyncio.to_thread(self.open)
        except Exception as e:
            await send({"type": "lifespan.startup.failed", "message": text_of(e)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self.drain()
        await self.end(self.settings.drain_timeout)
        await send({"type": "lifespan.shutdown.complete"})

    def open_requests(self) -> int:
        return self.served.open_requests

    def drain(self) -> None:
        self.served.drain()

    async def end_all(self, left: float) -> None:
        within = min(left + CLOSING, CLOSE_WITHIN)
        closing = threading.Thread(target=self.served.what.close, args=(within,), daemon=True)
        closing.start()  # it ends their streams
        while closing.is_alive():
            await asyncio.sleep(0.01)

    def works(self) -> bool:
        return self.served.what.health().state not in ("failed", "closed")

    def is_lost(self) -> str | None:
        health = self.served.what.health()
        lost = self.settings.exit_on_failure and not health.ok and not self.served.what.engine.begins_again
        return health.message if lost else None

    def leave(self) -> None:
        if (pid := self.served.what.engine.pid) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
