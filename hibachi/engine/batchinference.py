"""Base class of the two batchers: options, lazy start of the worker, shutdown."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from typing_extensions import override

from hibachi.backend.array_backend import HostArray
from hibachi.engine.config import WorkerConfig
from hibachi.engine.conversions import Conversions
from hibachi.engine.engine import Engine
from hibachi.engine.forms import Forms
from hibachi.engine.health import Health
from hibachi.engine.recording.recorder import RecordedScheduler
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.meters import Meters
from hibachi.engine.runners.runner import Runner
from hibachi.engine.stats import Stats
from hibachi.engine.streams.channel import Channel, in_thread
from hibachi.engine.streams.closeable import CLOSE_WITHIN, Closing, waited
from hibachi.engine.streams.stream import ItemStream
from hibachi.engine.worker import Worker
from hibachi.errors import EngineClosed, UnsupportedOperation


class BatchInference(Closing):
    """Base class of the batchers. Owns a `Worker`, which starts with the first request.

    config: of the worker and its engine. overlap: as in `AutoregressiveBatchInference`.
    """

    def __init__(self, model: Any, max_num_seqs: int, config: WorkerConfig, *, overlap: bool | None = None) -> None:
        self.max_num_seqs, self._config, self._overlap = max_num_seqs, config, overlap
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

    def reader(self, job: Job) -> Callable[[Any], Any]:
        """The function that converts an item of a request's channel to an item of its stream."""
        raise NotImplementedError

    def submit(self, ready: Job) -> ItemStream[Any]:
        """See `BatchEngine`."""
        self.enqueue(ready)
        return self.opened(ready)

    def submit_many(self, ready: Job, n: int) -> list[ItemStream[Any]]:
        """See `BatchEngine`."""
        jobs = self.copies(ready, [ready.channel, *(Channel(ready.channel.pause_after) for _ in range(n - 1))])
        self.enqueue_many(jobs)
        return [self.opened(job) for job in jobs]

    def opened(self, job: Job) -> ItemStream[Any]:
        """The stream of a request that was queued."""
        return ItemStream(job.channel, partial(self.cancel, job), self.reader(job))

    def copies(self, job: Job, channels: Sequence[Channel[Any]]) -> list[Job]:
        """A checked request once for each channel: the first as it is, the others with seeds of their own."""
        return [job, *(job.copy(channel, i) for i, channel in enumerate(channels[1:], 1))]

    def enqueue_many(self, jobs: Sequence[Job]) -> None:
        """`enqueue` for a request and its copies."""
        assert self._worker is not None
        self._worker.check_room(jobs[0].seq.tenant, len(jobs))
        for job in jobs:
            self.enqueue(job)

    def _stream(self, job: Job, read: Callable[[Any], Any]) -> ItemStream[Any]:
        """`submit`, with a reader of one's own."""
        self.enqueue(job)
        return ItemStream(job.channel, partial(self.cancel, job), read)

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

    def _serve(self, scheduler: RecordedScheduler, runner: Runner) -> Worker:
        """Start a worker. The caller holds `_building`, has checked that the batcher is open, and keeps the worker."""
        config = self._config
        restart = config.restart == "on_failure"
        engine = Engine(scheduler, runner, restart=restart, record=config.record, overlap=self._overlap)
        return Worker(engine, max_num_queued_reqs=config.max_num_queued_reqs, stall_after=config.stall_after)

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

    def keep(self, job: Job, *, pin: bool | None = None, importance: float | None = None) -> int:
        """See `BatchEngine`."""
        engine = None if self._worker is None else self._worker.engine
        if engine is None or engine.tiering is None:
            raise UnsupportedOperation(
                "This engine keeps nothing beside its cache: give it kv_tiers (--kv-host-bytes)."
            )
        tiering, tokens = engine.tiering, engine.tiering.keep(job, engine.scheduler, pin=pin, importance=importance)
        if pin is not False:  # the device may have it, and so nothing would bring it to host memory
            engine.inbox.put((lambda job: tiering.store_again(job, engine.scheduler), job))
        return tokens

    def cache_events(self, since: int = 0) -> list[tuple[int, str, str, str]]:
        """See `BatchEngine`."""
        tiering = None if self._worker is None else self._worker.engine.tiering
        return [] if tiering is None else tiering.host.events(since)

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
