"""Batching for feed-forward models: single inputs in, single outputs out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic

import numpy as np
from typing_extensions import TypeVar, Unpack, override

from hibachi.backend.array_backend import ArrayBackend, HostArray
from hibachi.backend.infer import backend_of, prompt_backend
from hibachi.backend.nine import NineBackend
from hibachi.common.options import takes
from hibachi.engine.batchengine import Facts
from hibachi.engine.batchinference import BatchInference
from hibachi.engine.config import FeedforwardConfig, FeedforwardOptions
from hibachi.engine.conversions import output_row, said_by
from hibachi.engine.declared import own_tokens
from hibachi.engine.kinds import check_takes
from hibachi.engine.ladder import Feedforward
from hibachi.engine.prompts import NinePrompts, dtype_of
from hibachi.engine.recording.recorder import RecordedScheduler
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.nine import NineFeedforwardRunner
from hibachi.engine.runners.runner import Runner
from hibachi.engine.runners.tokentable import TokenKind, misfits
from hibachi.engine.runners.uncached import FeedforwardRunner
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Limits
from hibachi.engine.streams.channel import Channel
from hibachi.engine.streams.stream import Item, as_it_is
from hibachi.errors import ConfigError, EngineError, InvalidRequest, shown
from hibachi.request import PLAIN, Request, Terms, as_terms

T = TypeVar("T", default=Any)  # an array of the model's library


class FeedforwardBatchInference(BatchInference, Generic[T]):
    """Batches single inputs of a `Feedforward` model: all that wait are computed together, at most `max_batch_size` at
    once.

    There is no waiting time: a batch is what arrived while the one before was computed. Inputs of different shape or
    dtype are never stacked; each kind gets its own forward pass.

    token: one input; all others must have its shape and are cast to its dtype. None means the model's attribute of that
    name, else any shape and dtype.
    max_num_queued_reqs, restart, stall_after, record: see `AutoregressiveBatchInference`.
    """

    @takes(FeedforwardConfig)
    def __init__(self, model: Feedforward[T], **options: Unpack[FeedforwardOptions]) -> None:
        config = FeedforwardConfig(**options)
        if not callable(getattr(model, "forward", None)):
            raise ConfigError(f"A feed-forward model needs `forward(x)`; {type(model).__name__} has none.")
        check_takes(model, "forward", "x")
        super().__init__(model, config.max_batch_size, config)
        self.model = model
        token = own_tokens(model)["token"] if config.token is None else config.token
        self._token = None if token is None else np.asarray(token)
        self._backend = backend_of(config.backend, model)
        if self._token is not None and isinstance(self._backend, ArrayBackend):
            self._token = self._token.astype(dtype_of(token, self._token, self._backend))
        self._facts: Facts | None = None

    def run(self, item: T | Sequence[Any] | HostArray, *, terms: Terms | None = None) -> Item[T]:
        """Queue one input (*shape), without a batch dimension; returns at once: `await` the result or call `.result()`.

        terms: priority, tenant, deadlines. Raises InvalidRequest, QueueFull, EngineClosed or EngineFailed.
        """
        job = self.check(Request(item, terms=PLAIN if terms is None else terms))
        return Item(self.submit(job))

    @property
    def facts(self) -> Facts:
        """Facts about the engine, known once its library is: when it is made, if `backend=` or the model tell it, else
        with the first input. Raises EngineError before.
        """
        if self._facts is None:
            if self._backend is None:
                raise EngineError("The first input tells the library that computes. Send one, or pass backend=.")
            self._facts = self._made_facts(self._backend)
        return self._facts

    def _made_facts(self, backend: ArrayBackend | NineBackend) -> Facts:
        kind = self._token
        return Facts(
            vocab_size=None,
            limits=self._limits,
            cached=False,
            embed_size=None,
            has_hidden=False,
            deterministic=False,
            fingerprint=backend.fingerprint(),
            dtype="any dtype" if kind is None else kind.dtype.name,
            model=type(self.model).__name__,
            feedforward=True,
            token=None if kind is None else (kind.shape, kind.dtype.name),
            **said_by(self.model),
        )

    @property
    def _limits(self) -> Limits:
        n = self.max_num_seqs
        return Limits(n, n, 1, 2)

    def check(self, request: Request, channel: Channel[Any] | None = None) -> Job:
        """See `BatchEngine`. The request's prompt is the input. channel: where the output goes; None means a new
        one.
        """
        terms, now = checked_plain(request, type(self.model).__name__), time.monotonic()
        if self._backend is None:
            self._backend = prompt_backend(request.prompt, self.model)
        if isinstance(self._backend, NineBackend):
            prompts = NinePrompts(self._backend, token=None, stop_token=None, padding_token=None)
            given, kind = prompts.given(request.prompt)
        else:
            given, kind = _on_host(self._backend, request.prompt, self._token)
        if self._worker is None:
            self._start(self._backend)
        seq = Seq(1, 1, priority=terms.priority, tenant=terms.tenant)
        seq.deadline = None if terms.timeout is None else now + terms.timeout
        seq.start_by = None if terms.queue_timeout is None else now + terms.queue_timeout
        return Job(seq, channel or Channel(), replace(request, prompt=given), kind=kind)

    @override
    def reader(self, job: Job) -> Callable[[Any], Any]:
        """The function that converts an item of a request's channel to the output."""
        return as_it_is if isinstance(self._backend, NineBackend) else output_row

    def _start(self, backend: ArrayBackend | NineBackend) -> None:
        with self._building:
            if self._worker is not None:
                return
            self._check_open()
            runner: Runner
            if isinstance(backend, NineBackend):
                runner = NineFeedforwardRunner(self.model, backend)
            else:
                runner = FeedforwardRunner(self.model, backend)
            self._worker = self._serve(RecordedScheduler(self._limits), runner)


def checked_plain(request: Request, model: str) -> Terms:
    """The terms of a request for one output, which has no tokens. Raises InvalidRequest for options that need
    tokens.
    """
    for name in ("params", "max_tokens", "stop_rule", "embeds", "pooling", "begun", "kept", "inputs"):
        if (got := getattr(request, name)) is not None:
            raise InvalidRequest(
                f"{model} gives one output for each input, and no tokens one after another; got {name}={shown(got)}. "
                f"Leave it out."
            )
    return as_terms(request.terms)


def fitting(host: HostArray, token: tuple[tuple[int, ...], Any] | None) -> HostArray:
    """A copy of a numeric input with the shape and dtype of all inputs, if these are fixed. Raises InvalidRequest."""
    if host.dtype.kind not in "iufbc":
        raise InvalidRequest(f"An input must hold numbers; got dtype {host.dtype}.")
    if token is None:
        return np.array(host)
    shape, dtype = token[0], np.dtype(token[1])
    family = dict.fromkeys("iub", "integers")  # of the letters of dtypes: floats and complex numbers are their own
    if host.shape != shape or family.get(host.dtype.kind, host.dtype.kind) != family.get(dtype.kind, dtype.kind):
        raise InvalidRequest(
            f"This model takes inputs of shape {shape} and {dtype}; got {host.shape} and {host.dtype}. Send such a one."
        )
    with np.errstate(over="ignore", invalid="ignore"):
        cast = host.astype(dtype)
    for _, value in misfits(host[None], cast[None]):
        raise InvalidRequest(f"This model takes inputs of {dtype}, which cannot hold {value}. Send smaller numbers.")
    return cast


def _on_host(backend: ArrayBackend, item: Any, token: HostArray | None) -> tuple[HostArray, TokenKind]:
    """A copy of an input on the host, and its kind. Raises InvalidRequest."""
    try:
        host = np.asarray(backend.get(item) if backend.owns(item) else item)
    except ValueError as e:
        raise InvalidRequest(
            f"An input must be an array or a list of equal rows; got {type(item).__name__} ({e}). Call `run` once for "
            f"each input."
        ) from e
    if token is None and (dtype := dtype_of(item, host, backend)) != host.dtype:
        token = np.empty(host.shape, dtype)
    host = fitting(host, None if token is None else (token.shape, token.dtype))
    return host, TokenKind(host.shape, host.dtype)
