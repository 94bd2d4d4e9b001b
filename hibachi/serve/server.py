"""The HTTP server of an engine: what its end takes, and how a lost engine ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import suppress
from typing import Any

import uvicorn

from hibachi.serve.app import application, tells
from hibachi.serve.metrics import metrics_for
from hibachi.serve.served import Served
from hibachi.streams.closeable import CLOSE_WITHIN
from hibachi.web.server import Server as Orderly
from hibachi.web.server import config_of

CLOSING = 1.0  # seconds at least for the engine to end, after the time of the requests is over


def server_of(
    served: Served,
    metric_names: str,
    patience: float,
    certificate: dict[str, Any],
    *,
    exit_on_failure: bool = False,
) -> Server:
    """patience: seconds for running requests to end. certificate: settings of uvicorn. exit_on_failure: end when the
    engine is lost for good.
    """
    _, routes = metrics_for(served, metric_names)
    config = config_of(application(served, more=routes), served.arrival, tells(served), certificate)
    return Server(config, served, patience, exit_on_failure)


class Server(Orderly):
    """Ends when all requests have, and with it the engine."""

    def __init__(self, config: uvicorn.Config, served: Served, patience: float, exit_on_failure: bool = False) -> None:
        super().__init__(config, patience, served.arrival)
        self._served, self._exits = served, exit_on_failure

    def open_requests(self) -> int:
        return self._served.open_requests

    def drain(self) -> None:
        self._served.drain()

    async def end_all(self, left: float) -> None:
        within = min(left + CLOSING, CLOSE_WITHIN)
        closing = threading.Thread(target=self._served.texts.close, args=(within,), daemon=True)
        closing.start()  # it ends their streams
        while closing.is_alive():
            await asyncio.sleep(0.01)

    def works(self) -> bool:
        return self._served.texts.health().state not in ("failed", "closed")

    def is_lost(self) -> str | None:
        health = self._served.texts.health()
        lost = self._exits and not health.ok and not self._served.texts.engine.begins_again
        return health.message if lost else None

    def leave(self) -> None:
        if (pid := self._served.texts.engine.pid) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
