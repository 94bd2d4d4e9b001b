"""A model behind real engines: what requests are answered alone, together and in each other's way."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hibachi.backend.array_backend import ArrayBackend, HostArray
from hibachi.engine.autoregressive import AutoregressiveBatchInference
from hibachi.engine.feedforward import FeedforwardBatchInference
from hibachi.engine.kinds import takes_lengths
from hibachi.engine.ladder import ModelKind
from hibachi.engine.runners.extra_inputs import Declared, declared_by, example
from hibachi.errors import EngineFailed, HibachiError
from hibachi.request import SamplingParams
from hibachi.testing.verify.answers import Answer, Trouble, different
from hibachi.testing.verify.prompts import begins
from hibachi.testing.verify.spy import Spy

CANDIDATES = 8  # tokens whose log-probabilities are compared


class Asked(NamedTuple):
    """What engines are asked. prompts: (S, *tok), or inputs of a feed-forward model. n: tokens of an answer. pads:
    tokens [1, *tok] that rows may be padded with.
    """

    prompts: list[HostArray]
    n: int
    pads: list[HostArray]


class Engines:
    """Engines for a model, which are made when they are first asked for.

    vocab: size of the logits; None means tokens come out. tolerance: of log-probabilities and real values, absolute and
    relative.
    """

    backend: ArrayBackend
    kind: ModelKind
    vocab: int | None
    tolerance: float

    def __init__(
        self, model: Any, backend: ArrayBackend, kind: ModelKind, vocab: int | None, asked: Asked, tolerance: float
    ) -> None:
        self.spy: Spy = Spy(model, backend, kind)
        self.backend, self.kind, self.vocab, self.tolerance = backend, kind, vocab, tolerance
        self.takes_lengths: bool = takes_lengths(model, kind)
        self.prompts, self.n, self.pads = asked
        self.declared: Declared = declared_by(model)
        self._engines: dict[str, Any] = {}
        self._held: Any = None  # a stream, which would be cancelled if it were dropped

    def _engine(self, *, rows: int, longest: int, padding: Any = None, **options: Any) -> Any:
        model, backend = self.spy.model, self.spy.backend
        if not self.kind.has_tokens:
            return FeedforwardBatchInference(model, max_batch_size=rows, backend=backend)
        options |= {"max_num_seqs": rows, "max_model_len": longest, "padding_token": padding}
        if self.kind is not ModelKind.PAGED:
            options["deterministic"] = False  # no calls but those of the requests
        if self.kind is ModelKind.OWN_CACHE and self.vocab is None:
            options["token"] = self.prompts[0][0]
        options["enable_prefix_caching"] = (
            False  # everything is to be computed by the model, also what was computed before
        )
        return AutoregressiveBatchInference(model, backend=backend, **options)

    def engine(self, **options: Any) -> Any:
        """An engine, by default for all prompts at once: the one that was made with these options, if there is one."""
        longest = max(map(len, self.prompts)) + self.n
        options = {"rows": len(self.prompts) + 1, "longest": longest, "padding": self.padding} | options
        key = repr(options)
        if key not in self._engines:
            self._engines[key] = self._engine(**options)
        return self._engines[key]

    @property
    def padding(self) -> HostArray | None:
        return self.pads[0] if self.pads else None

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    # ---- requests ----------------------------------------------------------------------------------------------

    def ask(self, engine: Any, prompt: HostArray, n: int | None = None) -> Any:
        """The stream of n new tokens (None means `self.n`); for a feed-forward model an Item."""
        if not self.kind.has_tokens:
            return engine.run(prompt)
        n, seed = n or self.n, zlib.crc32(prompt.tobytes())  # the seed: of what a model draws itself besides
        inputs = {name: example(one, n=len(prompt) + n) for name, one in self.declared.inputs.items()}
        params = SamplingParams(seed=seed) if self.declared.seeded else None
        if self.vocab is not None:  # all n tokens, also where one of them ends the model's texts
            params = SamplingParams(temperature=0, logprobs=min(CANDIDATES, self.vocab), seed=seed, ignore_eos=True)
        return engine.run(prompt, params, max_tokens=n, inputs=inputs or None)

    def read(self, stream: Any) -> Answer:
        items: list[Any] = []
        try:
            if not self.kind.has_tokens:
                return Answer([self._host(stream.result())], "length")
            for item in stream:
                items.append(self._host(item))
        except HibachiError as e:
            return Answer(items, type(_fault(e)).__name__, _fault(e))
        return Answer(items, str(stream.finish_reason), None, stream.logprobs)

    def _host(self, item: Any) -> Any:
        return np.array(self.backend.get(item)) if self.backend.owns(item) else item

    def cancel(self, stream: Any) -> None:
        stream.cancel() if not self.kind.has_tokens else stream.close()

    def answers(self, engine: Any, asked: Sequence[HostArray], n: int | None = None) -> list[Answer]:
        """One after another, each alone."""
        found = []
        for prompt in asked:
            try:
                found.append(self.read(self.ask(engine, prompt, n)))
            except EngineFailed as e:
                found.append(Answer([], type(_fault(e)).__name__, _fault(e)))
        return found

    def together(self, engine: Any, asked: Sequence[HostArray], n: Sequence[int] = ()) -> list[Answer]:
        """All at once: they come while the engine is in a call, and it finds them at its next step."""
        with self.held(engine):
            streams = [self.ask(engine, prompt, n[i] if n else None) for i, prompt in enumerate(asked)]
        return [self.read(stream) for stream in streams]

    @contextmanager
    def held(self, engine: Any, call: int = 1, n: int = 1) -> Iterator[Any]:
        """The engine stands in this call of a request for n tokens, whose stream is yielded."""
        with self.spy.holding(call) as reached:
            self._held = self.ask(engine, self.prompts[0], n)
            self.wait(reached, [self._held])
            yield self._held

    def wait(self, reached: threading.Event, streams: Sequence[Any]) -> None:
        """Until the event, or the end of all streams."""
        while not reached.wait(0.02) and not all(
            s.done() if not self.kind.has_tokens else s.finish_reason for s in streams
        ):
            pass

    # ---- what is wrong -----------------------------------------------------------------------------------------

    @cached_property
    def alone(self) -> list[Answer]:
        """The answer to each prompt when no other request is there."""
        before, found = self.spy.calls, self.answers(self.engine(), self.prompts)
        gave_up = found[-1].ending != "length"  # an engine does, if it can use no output at all
        assert gave_up or self.spy.calls - before >= len(self.prompts), "the calls of the model were not seen"
        return found

    def changed_together(self, engine: Any, now: str) -> Trouble | None:
        """What differs when all run at once, in two orders."""
        everyone = range(len(self.prompts))
        for order in (everyone, everyone[::-1]):
            got = self.together(engine, [self.prompts[i] for i in order])
            if trouble := self.differs(order, got, now):
                return trouble
        return None

    def differs(
        self, which: Sequence[int], got: Sequence[Answer], now: str, n: Sequence[int] = (), was: str = "alone"
    ) -> Trouble | None:
        """The first of the answers to these prompts that is not (the first n tokens of) the one that came alone."""
        for k, (i, answer) in enumerate(zip(which, got, strict=True)):
            limit = n[k] if n else self.n
            if trouble := self.different(self.prompts[i], answer, self.alone[i], now, limit, was):
                return trouble
        return None

    def different(
        self, prompt: HostArray, got: Answer, want: Answer, now: str, n: int | None = None, was: str = "alone"
    ) -> Trouble | None:
        return different(prompt, got, want, f"as {was}", now, n or self.n, self.tolerance)

    # ---- the request that is made to fail ----------------------------------------------------------------------

    @cached_property
    def guilty(self) -> int | None:
        """A prompt with which no other request ever begins, if possible one that shares its length with another."""
        whole = self.prompts
        if self.kind.has_tokens:
            answers = [np.array(a.items).reshape(-1, *self.prompts[0].shape[1:]) for a in self.alone]
            whole = [np.concatenate(pair) for pair in zip(self.prompts, answers, strict=True)]
        told, shapes = [], [p.shape for p in self.prompts]
        for i, prompt in enumerate(self.prompts):
            if not any(begins(w, prompt) for j, w in enumerate(whole) if j != i):
                told.append(i)
        return next((i for i in told if shapes.count(shapes[i]) > 1), told[0] if told else None)

    def is_guilty(self, row: HostArray, more: int = 0) -> bool:
        """Is this the row of the guilty prompt, with at least `more` new tokens?"""
        assert self.guilty is not None
        prompt = self.prompts[self.guilty]
        return begins(row, prompt) and len(row) >= len(prompt) + more * (self.kind.has_tokens)


def _fault(e: HibachiError) -> HibachiError:
    """What a model did to a request, also if the engine gave up over it."""
    cause = e.__cause__
    return cause if isinstance(e, EngineFailed) and isinstance(cause, HibachiError) else e
