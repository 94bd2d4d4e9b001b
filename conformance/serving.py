"""What the promises about engines are tried with: engines that end with their test, gates, readers that never hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from hibachi import AutoregressiveBatchInference, FeedforwardBatchInference, HibachiError, Item
from hibachi.testing.causes import root_of
from hibachi.testing.toys import SumState

PARTS = ["arrays and arithmetic", "paged attention"]  # the groups of promises about what an engine is made of
PATIENCE = 60.0  # seconds until a test that hangs fails
LOOK = 0.02  # seconds from one look at a stream to the next, while the engine is waited for
BLOCK = 8  # positions in a cache block


@cache
def toy(kind: Any, backend: Any) -> Any:
    """One model for all tests, so that a library that compiles its step compiles it once."""
    return kind(backend)


def raise_error(stream: Any) -> None:
    """Raise the error of a stream or an item that has ended, if it failed."""
    if isinstance(stream, Item):
        stream.result(0)
    elif stream.error is not None:
        raise stream.error


class Gate:
    """A stop predicate that stops nobody, but holds the engine in the midst of a step.

    By then the step has computed its tokens and delivered none of them. One request's gate is called once a step.
    """

    def __init__(self, step: int, patience: float) -> None:
        self._steps, self._patience = step, patience
        self._reached, self._opened = threading.Event(), threading.Event()

    def __call__(self, tokens: Any) -> np.ndarray:
        self._steps -= 1
        if self._steps == 0:
            self._reached.set()
            assert self._opened.wait(self._patience), "nobody opened the gate"
        return np.zeros(tokens.shape[0], bool)

    def wait(self, stream: Any) -> None:
        """Until the engine is held, in a step of this stream or item. Raises its error, if it ends before that."""
        end = time.monotonic() + self._patience
        while not self._reached.wait(LOOK):
            if stream.finish_reason is not None and not self._reached.is_set():
                raise_error(stream)
                raise AssertionError(
                    f"a stream ended with {stream.finish_reason!s} before the engine came to this step"
                )
            assert time.monotonic() < end, "the engine never came to this step"

    def open(self) -> None:
        self._opened.set()


class Ending(str):
    """The class of the error that ended a stream. A failed promise shows it with what the array library raised."""

    raised: str

    def __repr__(self) -> str:
        return f"{self!s} ({self.raised})"

    def __format__(self, spec: str) -> str:
        return repr(self)


class Serving:
    """serve(model, **options): an engine, with 4 rows and 64 tokens a request unless the options say otherwise."""

    def __init__(
        self,
        backend: Any,
        *,
        autoregressive: Any = AutoregressiveBatchInference,
        feedforward: Any = FeedforwardBatchInference,
        patience: float = PATIENCE,
    ) -> None:
        self.backend, self.autoregressive, self.feedforward = backend, autoregressive, feedforward
        self.patience = patience
        self._engines: list[Any] = []
        self._gates: list[Gate] = []
        self._kept: list[Any] = []  # streams, which would be cancelled if they were dropped

    def __call__(self, model: Any, **options: Any) -> Any:
        options = {"max_num_seqs": 4, "max_model_len": 64} | options
        if not hasattr(model, "cache_spec"):  # no calls but those of the requests
            options = {"deterministic": False} | options
        engine = self.autoregressive(model, **options)
        self._engines.append(engine)
        return engine

    def cached(self, model: Any, **options: Any) -> Any:
        """For a model with a cache, or a toy, whose rows have four blocks.

        Its steps are of few different shapes, because some libraries compile each.
        """
        model = toy(model, self.backend) if isinstance(model, type) else model
        rows = 2 if isinstance(model, SumState) else 4
        return self(model, **{"max_model_len": 4 * BLOCK, "block_size": BLOCK, "max_num_seqs": rows} | options)

    def single(self, model: Any, **options: Any) -> Any:
        """A feed-forward engine."""
        engine = self.feedforward(model, **{"max_batch_size": 4, "backend": self.backend} | options)
        self._engines.append(engine)
        return engine

    def gate(self, step: int = 1) -> Gate:
        """For `stop=`: holds the engine in this step of the request, until it is opened."""
        self._gates.append(Gate(step, self.patience))
        return self._gates[-1]

    def hold(self, engine: Any, prompt: Any, **options: Any) -> Gate:
        """The gate of a request that leaves with its first token, for which the engine waits."""
        gate = self.gate()
        self._kept.append(engine.run(prompt, **options | {"max_tokens": 1, "stop_rule": gate}))
        gate.wait(self._kept[-1])
        return gate

    def together(self, engine: Any, prompts: Sequence[Any], **options: Any) -> list[Any]:
        """The streams of requests that came while the engine was in a step: it finds all of them at the next."""
        return self.at_once(engine, [{"prompt": prompt, **options} for prompt in prompts])

    def at_once(self, engine: Any, asked: Sequence[dict[str, Any]]) -> list[Any]:
        """Likewise, of requests that each have options of their own; the prompt is one of these."""
        gate = self.hold(engine, **asked[0])
        streams = [engine.run(**options) for options in asked]
        gate.open()
        return streams

    def read(self, stream: Any) -> tuple[list[Any], str]:
        """All that comes, as numbers and lists, and how it ended: the finish reason, or the class of the error."""
        watch = threading.Timer(self.patience, stream.close)
        watch.daemon = True
        watch.start()
        items = []
        try:
            for item in stream:
                items.append(self.host(item))
        except HibachiError as e:
            ending = Ending(type(e).__name__)
            ending.raised = root_of(e)
            return items, ending
        finally:
            watch.cancel()
        return items, str(stream.finish_reason)

    def host(self, item: Any) -> Any:
        return self.backend.get(item).tolist() if self.backend.owns(item) else item

    def expect(self, stream: Any, items: Sequence[Any], ending: str = "length") -> None:
        """The stream gives these items and ends so. AssertionError: it does not."""
        got, end = self.read(stream)
        if (got, end) != (list(items), ending):
            raise AssertionError(
                f"a stream gave {got} and ended with {end}; expected {list(items)} and {ending}"
            ) from stream.error

    def close(self) -> None:
        for gate in self._gates:
            gate.open()
        for engine in self._engines:
            engine.close()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
