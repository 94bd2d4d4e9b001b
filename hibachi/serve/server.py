"""The HTTP server: uvicorn, with an end in good order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import uvicorn

from hibachi.engine.remote import RemoteEngine
from hibachi.serve.app import application
from hibachi.serve.arriving import Arriving
from hibachi.serve.metrics import metrics_for
from hibachi.serve.signals import end
from hibachi.serve.state import Served

log = logging.getLogger("hibachi.serve")
BACKLOG = 2048  # connections that wait to be accepted
KEPT = 75  # seconds an idle connection stays open: longer than balancers keep theirs, so that it is they who close
CLOSING = 15.0  # seconds for the engine to end
FLUSHING = 2  # seconds for slow readers to fetch the end of their answers


def server_of(served: Served, metric_names: str, patience: float, certificate: dict[str, Any]) -> Server:
    """patience: seconds for running requests to end. certificate: settings of uvicorn."""
    _, routes = metrics_for(served, metric_names)
    config = uvicorn.Config(
        application(served, more=routes),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        http=partial(Arriving, seconds=served.arrival),  # type: ignore[arg-type]  # anything that makes a protocol
        backlog=BACKLOG,
        timeout_keep_alive=KEPT,
        timeout_graceful_shutdown=FLUSHING,
        **certificate,
    )
    return Server(config, served, patience)


class Server(uvicorn.Server):
    """Ends when all requests have. tidings: what to say when it listens."""

    tidings = ""

    def __init__(self, config: uvicorn.Config, served: Served, patience: float) -> None:
        super().__init__(config)
        self._served, self._patience = served, patience
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        _say(self.tidings)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """In place of uvicorn's, which raises the signal again when all is done, so that the status is not 0."""
        loop = asyncio.get_running_loop()
        numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
        for number in numbers:
            loop.add_signal_handler(number, self.stop, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
                signal.signal(number, end)

    def stop(self, number: int) -> None:
        """In good order; when called again, at once."""
        if self._draining is not None:
            self._abandon(128 + number)
        self._served.drain()
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it shows a trace for each that is cut off
        served, until = self._served, time.monotonic() + self._patience
        if served.open_requests:
            log.info("draining: %d requests are running, and have %g s", served.open_requests, self._patience)
        while served.open_requests and time.monotonic() < until:
            await asyncio.sleep(0.02)
        if served.open_requests:
            log.warning("%d requests were not done after %g s, and are cut off", served.open_requests, self._patience)
        try:
            await asyncio.wait_for(asyncio.to_thread(served.texts.close), CLOSING)  # which ends their streams
        except TimeoutError:
            log.error("the engine has not ended within %g s", CLOSING)
            self._abandon(1)
        finally:
            self.should_exit = True

    def _abandon(self, status: int) -> NoReturn:
        engine = self._served.texts.engine
        if isinstance(engine, RemoteEngine):
            with suppress(ProcessLookupError):
                os.kill(engine.pid, signal.SIGKILL)
        os._exit(status)


def _say(text: str) -> None:
    """A line on standard error, if anybody is there."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(f"hibachi: {text}", file=sys.stderr, flush=True)
