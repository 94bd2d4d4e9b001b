"""The life of a server: an address, a model, requests, and an end in good order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from types import SimpleNamespace
from typing import Any, NoReturn

import uvicorn

from hibachi.engine.remote import RemoteEngine
from hibachi.errors import ConfigError
from hibachi.serve.address import bound
from hibachi.serve.app import application
from hibachi.serve.keys import tenants_of
from hibachi.serve.metrics import metrics_for
from hibachi.serve.opened import about, opened
from hibachi.serve.state import Served

log = logging.getLogger("hibachi.serve")
BACKLOG = 2048  # connections that wait to be accepted
CLOSING = 15.0  # seconds for the engine to end
FLUSHING = 2  # seconds for slow readers to fetch the end of their answers


def serve(settings: SimpleNamespace, remarks: Sequence[str] = ()) -> int:
    """Serves until a signal comes. Returns the exit status: 0 when all was brought to an end.

    Raises ConfigError for an address or settings that cannot be used, and what making the model raises.
    """
    _log_to_stderr(settings.log_level)
    for remark in remarks:
        log.warning("%s", remark)
    tenants, certificate = tenants_of(settings), _certificate(settings)
    with bound(settings) as (listener, url, public), _ends_at_once():
        if public and not tenants.keys:
            log.warning("whoever reaches %s may use it, as there is no --api-key", url)
        served = opened(settings, tenants)
        with closing(served.texts):
            _, routes = metrics_for(served, settings.metric_names)
            config = _config(application(served, more=routes), certificate)
            server = Server(config, served, settings.drain_timeout)
            server.tidings = f"serving {', '.join(served.names)} on {url} ({about(served.texts)})"
            try:
                server.run([listener])
            except OSError as e:
                raise ConfigError(f"Cannot listen on {url}: {e.strerror or e}.") from e
    return 0


def _config(app: Any, certificate: dict[str, Any]) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=FLUSHING,
        **certificate,
    )


class Server(uvicorn.Server):
    """Ends when all requests have. tidings: what to say when it listens."""

    tidings = ""

    def __init__(self, config: uvicorn.Config, served: Served, patience: float) -> None:
        super().__init__(config)
        self._served, self._patience = served, patience
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        say(self.tidings)

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
                signal.signal(number, _end_at_once)

    def stop(self, number: int) -> None:
        """In good order; when called again, at once."""
        if self._draining is not None:
            self._abandon(128 + number)
        self._served.draining = True
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
        self.should_exit = True

    def _abandon(self, status: int) -> NoReturn:
        engine = self._served.texts.engine
        if isinstance(engine, RemoteEngine):
            with suppress(ProcessLookupError):
                os.kill(engine.pid, signal.SIGKILL)
        os._exit(status)


def say(text: str) -> None:
    """A line on standard error, if anybody is there."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(f"hibachi: {text}", file=sys.stderr, flush=True)


def _log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("hibachi", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper() if name == "hibachi" else logging.WARNING)


def _end_at_once(number: int, frame: object) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


@contextmanager
def _ends_at_once() -> Iterator[None]:
    """SIGTERM, like Ctrl-C, ends what we are doing, so that nothing is left behind: neither process nor file."""
    before = signal.signal(signal.SIGTERM, _end_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _certificate(settings: SimpleNamespace) -> dict[str, Any]:
    """For uvicorn. Raises ConfigError for one that cannot be used, before the model is loaded."""
    cert, key = settings.ssl_certfile, settings.ssl_keyfile
    if cert is None:
        if key is not None:
            raise ConfigError("--ssl-keyfile is the key of --ssl-certfile, which is missing.")
        return {}
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
        raise ConfigError(f"--ssl-certfile {cert}, --ssl-keyfile {key}: {e}.") from e
    return {"ssl_certfile": cert, "ssl_keyfile": key}
