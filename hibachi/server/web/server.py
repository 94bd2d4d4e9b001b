"""A server on uvicorn that shuts down in order and in time, whatever hangs."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import uvicorn

from hibachi.server.web.certificate import Certificate
from hibachi.server.web.cors import Cors
from hibachi.server.web.deadlines import Arriving, Tell
from hibachi.server.web.ending import Drainable
from hibachi.server.web.signals import end

log: logging.Logger = logging.getLogger("hibachi.serve")
BACKLOG = 2048  # connections that wait to be accepted
KEPT = 75  # seconds an idle connection stays open: longer than balancers keep theirs, so that it is they who close
FLUSHING = 1  # seconds for slow readers to fetch the end of their answers
OVERTIME = 2.5  # seconds after the time of the requests, when whatever is left is abandoned
LAST = 2.9  # likewise, for what holds the interpreter
LOOK = 0.25  # seconds from one look at the server to the next
LOOKS = 4  # so often it must be found lost
TOLD_EVERY = 10.0  # seconds: complaints of the same kind are logged no more often


class Config(uvicorn.Config):
    """uvicorn's configuration, with a certificate that may change. None means no TLS."""

    def __init__(self, app: Any, certificate: Certificate | None, **more: Any) -> None:
        super().__init__(app, **more)
        self.certificate = certificate

    def load(self) -> None:
        super().load()
        self.ssl = self.certificate


def config_of(app: Any, arrival: float | None, tell: Tell, certificate: Certificate | None, **more: Any) -> Config:
    """Make the configuration. arrival: seconds for the headers of a request to come. tell: called for what was no
    request. more: settings of uvicorn.
    """
    # What never is a request passes no application, and browsers show its answer to a page only if it is marked.
    dress = app.marked if isinstance(app, Cors) else None
    return Config(
        app,
        certificate,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        http=partial(Arriving, seconds=arrival, tell=tell, dress=dress),
        backlog=BACKLOG,
        timeout_keep_alive=KEPT,
        timeout_graceful_shutdown=FLUSHING,
        **more,
    )


class HttpServer(uvicorn.Server):
    """Ends when all requests have ended. tidings: what to say when it listens. status: of the process, once it has
    ended.
    """

    tidings = ""

    def __init__(self, config: Config, serving: Drainable, patience: float, arrival: float | None) -> None:
        """serving: what answers. patience: seconds for running requests to end. arrival: as in `config_of`."""
        super().__init__(config)
        self._serving = serving
        self._certificate = config.certificate
        self._patience, self._arrival = patience, arrival
        self._draining: asyncio.Task[None] | None = None
        self._stopped = False
        self._complained = -TOLD_EVERY
        self.status: int = 0

    async def startup(self, sockets: Any = None) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._complain)
        # uvicorn does not pass it on: seconds for the handshake of TLS, which no timer of ours sees.
        create, limit = loop.create_server, self._arrival
        if self._certificate is not None and limit:
            loop.create_server = partial(create, ssl_handshake_timeout=limit)  # type: ignore[method-assign]  # for this call only
        try:
            await super().startup(sockets)
        finally:
            loop.create_server = create  # type: ignore[method-assign]  # as it was
        self._watching = loop.create_task(self._watch())
        _say(self.tidings)

    def _complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Of what fails outside of requests, such as accepting connections."""
        error = context.get("exception")
        if isinstance(error, OSError):
            self._tell_now_and_then("%s: %s", context.get("message"), error)
        else:
            loop.default_exception_handler(context)

    def _tell_now_and_then(self, *words: Any) -> None:
        if (now := time.monotonic()) - self._complained >= TOLD_EVERY:
            self._complained = now
            log.error(*words)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """In place of uvicorn's, which raises the signal again when all is done, so that the status is not 0.

        The first is for the loop; the second is heard also when the loop hangs.
        """
        loop = asyncio.get_running_loop()
        wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        numbers = [n for n in wanted if signal.getsignal(n) is not signal.SIG_IGN]
        for number in numbers:
            # `signal.signal`, not the loop's own: it comes between two lines of whatever the main thread is doing.
            signal.signal(number, lambda n, _: self.signalled(loop, n))
        if hasattr(signal, "SIGUSR1"):  # from another rank: see `hibachi.engine.group.link.end_all`
            signal.signal(signal.SIGUSR1, lambda *_: self.finish(loop))
        try:
            yield
        finally:
            for number in numbers:
                signal.signal(number, end)

    def signalled(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        if self._stopped:
            self._abandon(128 + number)
        self.finish(loop)

    def finish(self, loop: asyncio.AbstractEventLoop) -> None:
        """`stop`, from any thread; and whatever hangs, the process ends in time."""
        if self._stopped:
            return
        self._stopped = True
        timer = threading.Timer(self._patience + OVERTIME, self._let_go)
        timer.daemon = True
        timer.start()
        with suppress(Exception):  # without a standard error
            # Its trace goes nowhere: standard error may be what hangs.
            faulthandler.dump_traceback_later(self._patience + LAST, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
        loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """In good order."""
        if self._draining is None:
            self._serving.drain()
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it shows a trace for each that is cut off
        await self._serving.end(self._patience)
        self.should_exit = True

    # ---- the watch ---------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look whether there are descriptors left, the certificate is another, and the server is lost for good."""
        room, lost = _descriptors_left(), 0
        while self._draining is None:
            before = time.monotonic()
            await asyncio.sleep(LOOK)
            if self._stopped:
                return
            if len(self.server_state.connections) >= room:
                self._tell_now_and_then(
                    "no file descriptors are left: %d connections are open, and no further ones are taken until some "
                    "end; raise the limit (ulimit -n)",
                    len(self.server_state.connections),
                )
            if self._certificate is not None:
                self._certificate.look()
            # Found several times, and not just as this process goes on after it was stopped itself.
            slept = time.monotonic() - before > 4 * LOOK
            lost = lost + 1 if not slept and self._serving.is_lost() is not None else 0
            if lost > LOOKS:
                log.error("the engine is lost, and the server ends: %s", self._serving.is_lost())
                self.status = 1
                self._patience = 0.0
                self.finish(asyncio.get_running_loop())
                return

    def _let_go(self) -> None:
        words = "something still hangs %g s after the signal, and is let go", self._patience + OVERTIME
        telling = threading.Thread(target=log.error, args=words, daemon=True)  # the log may be what hangs
        telling.start()
        telling.join(0.2)
        self._abandon(1)

    def _abandon(self, status: int) -> NoReturn:
        self._serving.leave()
        os._exit(status)


def _descriptors_left() -> float:
    """Number of connections that this process may still open."""
    try:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/dev/fd"))
    except (OSError, ValueError):
        return float("inf")


def _say(text: str) -> None:
    """Write a line to standard error, if it is open."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(f"hibachi: {text}", file=sys.stderr, flush=True)
