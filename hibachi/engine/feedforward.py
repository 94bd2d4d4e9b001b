"""The feed-forward twin: single inputs in, single outputs out, batched behind the scenes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic

import numpy as np
from typing_extensions import TypeVar

from hibachi.engine.batchinference import BatchInference
from hibachi.engine.health import STALL_AFTER
from hibachi.engine.prompts import NinePrompts
from hibachi.engine.worker import Worker
from hibachi.errors import ConfigError, InvalidRequest
from hibachi.model.ladder import Feedforward
from hibachi.options import spelled
from hibachi.plan.limits import Limits
from hibachi.plan.scheduler import Scheduler
from hibachi.plan.sequence import Seq
from hibachi.runners.job import Job
from hibachi.runners.nine import NineFeedforwardRunner
from hibachi.runners.runner import Runner
from hibachi.runners.tokentable import Kind
from hibachi.runners.uncached import FeedforwardRunner
from hibachi.streams.channel import Channel
from hibachi.streams.stream import Item, ItemStream, as_it_is, native_row
from hibachi.tensor.array_backend import ArrayBackend, HostArray
from hibachi.tensor.nine import NineBackend
from hibachi.tensor.protocol import Backend
from hibachi.tensor.whose import backend_of, prompt_backend

T = TypeVar("T", default=Any)  # an array of the model's library


class FeedforwardBatchInference(BatchInference, Generic[T]):
    """Batches single inputs of a `Feedforward` model: whatever waits goes together, at most `max_batch_size` at once.

    There is no waiting time: a batch is what came while the one before was computed. Inputs of different shape or dtype
    are never stacked; each kind gets its own forward pass. max_waiting, restart, stall_after, record: see
    `BatchInference`.
    """

    @spelled
    def __init__(
        self,
        model: Feedforward[T],
        *,
        max_batch_size: int = 16,
        backend: str | Backend[Any] | None = None,
        max_waiting: int | None = None,
        restart: str | None = None,
        stall_after: float | None = STALL_AFTER,
        record: str | Path | None = None,
    ) -> None:
        if not callable(getattr(model, "forward", None)):
            raise ConfigError(f"A feed-forward model needs `forward(x)`; {type(model).__name__} has none.")
        if not isinstance(max_batch_size, int) or isinstance(max_batch_size, bool) or max_batch_size < 1:
            raise ConfigError(f"max_batch_size must be an integer >= 1; got {max_batch_size!r}.")
        super().__init__(
            max_batch_size, max_waiting=max_waiting, restart=restart, stall_after=stall_after, record=record
        )
        self._model = model
        self._backend = backend_of(backend, model)

    def run(self, item: T | Sequence[Any] | HostArray) -> Item[T]:
        """Queue one input (*shape), without a batch dimension; returns at once: `await` it or call `.result()`."""
        if self._backend is None:
            self._backend = prompt_backend(item, self._model)
        if isinstance(self._backend, NineBackend):
            given, kind = NinePrompts(self._backend, token=None, stop_token=None, padding_token=None).given(item)
        else:
            given, kind = _on_host(self._backend, item)
        worker = self._worker or self._start(self._backend)
        job = Job(Seq(1, 1), Channel(), given, kind=kind)
        worker.add(job)
        read = as_it_is if isinstance(self._backend, NineBackend) else native_row
        return Item(ItemStream(job.channel, partial(self.cancel, job), read))

    def _start(self, backend: ArrayBackend | NineBackend) -> Worker:
        with self._building:
            if self._worker is not None:
                return self._worker
            self._check_open()
            n = self.max_batch_size
            runner: Runner
            if isinstance(backend, NineBackend):
                runner = NineFeedforwardRunner(self._model, backend)
            else:
                runner = FeedforwardRunner(self._model, backend)
            self._worker = self._serve(Scheduler(Limits(n, n, 1, 2)), runner)
            return self._worker


def _on_host(backend: ArrayBackend, item: Any) -> tuple[HostArray, Kind]:
    """A copy of an input, and its kind. Raises InvalidRequest."""
    try:
        host = np.array(backend.get(item) if backend.owns(item) else item)
    except ValueError as e:
        raise InvalidRequest(
            f"An input must be an array or a list of equal rows; got {type(item).__name__} ({e})."
        ) from e
    if host.dtype.kind not in "iufbc":
        raise InvalidRequest(f"An input must hold numbers; got dtype {host.dtype}.")
    return host, Kind(host.shape, host.dtype)
