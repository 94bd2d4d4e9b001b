"""Base class of the two batchers: options, lazy start of the worker, shutdown."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from hibachi.backend.array_backend import HostArray
from hibachi.engine.conversions import Conversions
from hibachi.engine.engine import Engine
from hibachi.engine.forms import Forms
from hibachi.engine.health import STALL_AFTER, Health
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.meters import Meters
from hibachi.engine.runners.runner import Runner
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.stats import Stats
from hibachi.engine.streams.closeable import CLOSE_WITHIN, Closing, waited
from hibachi.engine.streams.loops import in_thread
from hibachi.engine.worker import Worker
from hibachi.errors import ConfigError, EngineClosed


class BatchInference(Closing):
    """Base class of the batchers. Owns a `Worker`, which starts with the first request.

    max_num_queued_reqs: requests that may wait besides the running ones; beyond, `run` raises QueueFull. None means any
    number.
    pause_after: unread items of a stream; beyond, its request pauses until half of them are read. None means any
    number.
    restart: "on_failure": if the device is lost, make a new cache and compute all requests again, up to three times
    without a successful step in between. If the engine's own loop fails, its requests raise EngineFailed, and a new
    loop serves new ones, up to three times without a token in between. "never" (None): all streams raise EngineFailed,
    and so does every later call.
    stall_after: seconds without a step, while work waits, after which `health` and the log report a stall; None means
    never.
    record: a file for all plans of the scheduler, for `hibachi.engine.recording.replay.replay`. None means only the
    last plans are kept, in memory.
    overlap: begin a step before the tokens of the last one are read; None means where the backend is asynchronous
    (CUDA).
    """

    def __init__(
        self,
        model: Any,
        max_num_seqs: int,
        *,
        max_num_queued_reqs: int | None = None,
        pause_after: int | None = None,
        restart: str | None = None,
        stall_after: float | None = STALL_AFTER,
        record: str | Path | None = None,
        overlap: bool | None = None,
    ) -> None:
        for name, value, least in (("max_num_queued_reqs", max_num_queued_reqs, 0), ("pause_after", pause_after, 1)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ConfigError(f"{name} must be an integer >= {least} (or None: no limit); got {value!r}.")
        if restart not in (None, "never", "on_failure"):
            raise ConfigError(f'restart must be "never" (or None) or "on_failure"; got {restart!r}.')
        if stall_after is not None and not (isinstance(stall_after, (int, float)) and stall_after > 0):
            raise ConfigError(f"stall_after must be a number of seconds > 0 (or None: never); got {stall_after!r}.")
        self.max_num_seqs = max_num_seqs
        self._max_queued, self._pause_after = max_num_queued_reqs, pause_after
        self._restart, self._stall_after, self._record = restart == "on_failure", stall_after, record
        self._overlap = overlap
        self._building = threading.RLock()
        self._worker: Worker | None = None
        self._closed = False
        self._conversions = Conversions(model)
        self.forms: Forms = Forms()

    @property
    def core(self) -> Engine | None:
        """The engine that steps the batch, for measurements; None before the first request."""
        return None if self._worker is None else self._worker.engine

    @property
    def pid(self) -> None:
        """None: the engine runs in this process."""
        return None

    @property
    def begins_again(self) -> bool:
        """Never: there is no other process."""
        return False

    def enqueue(self, job: Job) -> None:
        """Queue what `check` returned; its channel receives the items. Raises what `submit` raises."""
        assert self._worker is not None
        self._worker.add(job)

    def read(self, data: bytes, kind: str) -> HostArray:
        """See `BatchEngine`."""
        return self._conversions.read(data, kind)

    def write(self, tokens: HostArray) -> tuple[bytes, str]:
        """See `BatchEngine`."""
        return self._conversions.write(tokens)

    def check_room(self, tenant: Hashable, new: int) -> None:
        """Raise QueueFull if there is no room for this many more requests."""
        if self._worker is not None:
            self._worker.check_room(tenant, new)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("The engine is closed. Make a new one.")

    def _serve(self, scheduler: Scheduler, runner: Runner) -> Worker:
        """Start a worker. The caller holds `_building`, has checked that the batcher is open, and keeps the worker."""
        engine = Engine(scheduler, runner, restart=self._restart, record=self._record, overlap=self._overlap)
        return Worker(engine, max_num_queued_reqs=self._max_queued, stall_after=self._stall_after)

    def cancel(self, job: Job) -> None:
        """Cancel a request. It is a method so that open streams keep their engine alive."""
        if self._worker is not None:
            self._worker.cancel(job)

    def stats(self) -> Stats:
        """A snapshot of the engine's counters: waiting, running, steps, tokens, free blocks."""
        return self._worker.stats() if self._worker else Stats(max_num_seqs=self.max_num_seqs)

    def meters(self) -> Meters:
        """Histograms since the start: rows, tokens and times of steps; padding."""
        return self._worker.meters() if self._worker else Meters(limit=self.max_num_seqs)

    def health(self) -> Health:
        """The engine's health, callable from any thread, also while a forward pass hangs."""
        if self._worker is not None:
            return self._worker.health()
        return Health("closed", "The engine is closed.") if self._closed else Health("idle", "No request has come yet.")

    def dump(self) -> dict[str, Any]:
        """The flight recorder: the plans of the last steps, which can be written as JSON. It holds no tokens.

        With all events since the start (`complete`), `hibachi.engine.recording.replay.replay` plays it again.
        """
        return self._worker.dump() if self._worker else {"complete": True, "events": []}

    def reset_cache(self) -> None:
        """See `BatchEngine`."""
        if self._worker is not None:
            self._worker.reset_cache()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests and wait for the running and waiting ones.

        False if `timeout` seconds were not enough, or if the engine stalled or failed meanwhile.
        """
        timeout = waited(timeout)
        with self._building:
            self._closed = True
        return self._worker.drain(timeout) if self._worker else True

    @override
    def close(self, timeout: float | None = CLOSE_WITHIN) -> None:
        """Finish the running step and end all streams, with the reason "closed". Closing twice is fine.

        A step that takes longer than `timeout` seconds is abandoned: the streams end, and the log says where it stands;
        an `async def` model is cancelled. None means to wait without a limit.
        """
        timeout = waited(timeout)
        with self._building:
            self._closed = True
        if self._worker is not None:
            self._worker.close(timeout)
        self.forms.close()

    @override
    async def aclose(self, timeout: float | None = CLOSE_WITHIN) -> None:
        """`close`, without blocking the event loop while the running step ends."""
        await in_thread(partial(self.close, timeout))

    def __del__(self) -> None:
        worker: Worker | None = getattr(self, "_worker", None)
        if worker is not None:
            worker.stop()  # no waiting in a destructor
