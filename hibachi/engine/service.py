"""What both faces of the engine share: a worker that is built with the first request, and its life."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from hibachi.engine.closing import Closing
from hibachi.engine.engine import Engine, Stats
from hibachi.engine.job import Job
from hibachi.engine.worker import Worker
from hibachi.errors import ConfigError, EngineClosed
from hibachi.tensor.array_backend import ArrayBackend
from hibachi.tensor.discover import resolve


class Service(Closing):
    """Owns a `Worker`."""

    def __init__(self, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size
        self._building = threading.RLock()
        self._worker: Worker | None = None
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("The engine is closed. Make a new one.")

    def _serve(self, engine: Engine) -> Worker:
        """Start serving; the caller holds `_building`, and has checked that we are open."""
        self._worker = Worker(engine)
        return self._worker

    def _cancel(self, job: Job) -> None:  # a method, so that open streams keep their engine alive
        if self._worker is not None:
            self._worker.cancel(job)

    def stats(self) -> Stats:
        """A snapshot: waiting, running, steps, tokens, free blocks."""
        return self._worker.stats() if self._worker else Stats(max_batch_size=self.max_batch_size)

    def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests and wait for the others; False if `timeout` seconds were not enough."""
        with self._building:
            self._closed = True
        return self._worker.drain(timeout) if self._worker else True

    def close(self) -> None:
        """Finish the running step and end all streams, with the reason "closed". Closing twice is fine."""
        with self._building:
            self._closed = True
        if self._worker is not None:
            self._worker.close()

    async def aclose(self) -> None:
        """`close`, without holding up the event loop while the running step ends."""
        await asyncio.to_thread(self.close)

    def __del__(self) -> None:
        if getattr(self, "_worker", None) is not None:
            self._worker.stop()  # type: ignore[union-attr]  # no waiting in a destructor


def given_backend(backend: Any, model: Any) -> ArrayBackend | None:
    """The backend that was passed, by name or as it is, or the model's own; None if there is neither."""
    if backend is None:
        backend = getattr(model, "backend", None)
    if isinstance(backend, str):
        return resolve(backend)
    if backend is None or isinstance(backend, ArrayBackend):
        return backend
    raise ConfigError(
        f"backend must be a name, an ArrayBackend or None; got {type(backend).__qualname__}. A backend of your own "
        f"inherits from hibachi.ArrayBackend."
    )
