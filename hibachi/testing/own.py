"""A user's own model under judgement: engines for it, its answers alone and together, and what is wrong with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from hibachi.engine.autoregressive import AutoregressiveBatchInference
from hibachi.engine.build import given_backend, level_of
from hibachi.engine.feedforward import FeedforwardBatchInference
from hibachi.errors import BackendError, ConfigError, EngineFailed, HibachiError
from hibachi.request import SamplingParams
from hibachi.tensor.array_backend import ArrayBackend, HostArray
from hibachi.tensor.discover import backend_for, resolve
from hibachi.testing import prompts
from hibachi.testing.answers import Answer, Trouble, close, different, show
from hibachi.testing.spy import Call, Spy, takes_lengths

KINDS = {0: "level 0, tokens out", 1: "level 1, logits out", 2: "level 2, a step over a cache", None: "feed-forward"}
NEW_TOKENS = 6
CONTEXT = 64  # most tokens of a request, where nobody says
SHORTEST_CONTEXT = 8
CANDIDATES = 8  # tokens whose log-probabilities are compared


class Own:
    """A model, and what it takes to judge it.

    backend: None: the one that the model names or that its arrays are of, else NumPy.
    examples: prompts (S, *tok) or, for a feed-forward model, inputs; None: what the model's `example_prompts` (or
    `example_inputs`) says, else ids drawn below vocab_size (None: the model's). feedforward: `forward` takes one input,
    not a sequence; None: if the model has `example_inputs`.
    padding: may rows be padded? padding_token: with what; None: zeros, and a token of the prompts. A level 0 model
    without `lengths` is padded only if there is a padding_token.
    max_model_len: None: the model's own. tolerance: of log-probabilities and real values, absolute and relative.

    Raises ConfigError.
    """

    def __init__(
        self,
        model: Any,
        backend: ArrayBackend | None = None,
        *,
        name: str | None = None,
        examples: Sequence[Any] | None = None,
        vocab_size: int | None = None,
        feedforward: bool | None = None,
        padding: bool = True,
        padding_token: Any = None,
        max_model_len: int | None = None,
        tolerance: float = 1e-3,
    ) -> None:
        self.name, self.tolerance = name or type(model).__name__, tolerance
        feedforward = hasattr(model, "example_inputs") if feedforward is None else feedforward
        self.rung = None if feedforward else level_of(model)
        self.backend = backend or backend_of(model)
        self.spy = Spy(model, self.backend, self.rung)
        own = getattr(model, "max_model_len", getattr(model, "max_len", None))
        self.limit = max_model_len or (own if isinstance(own, int) else CONTEXT)
        if self.limit < SHORTEST_CONTEXT:
            raise ConfigError(f"To judge a model takes a max_model_len >= {SHORTEST_CONTEXT}; got {self.limit}.")
        self.n = 1 if feedforward else min(NEW_TOKENS, self.limit // 4)  # new tokens of a request
        size = getattr(model, "vocab_size", None)
        self.vocab = size if self.rung else None  # of logits; None: tokens come out
        self.ids = None if feedforward else vocab_size or size  # prompts are drawn below this number
        self._engines: dict[Any, Any] = {}
        self._held: Any = None  # a stream, which would be cancelled if it were dropped
        if examples is None:
            examples = getattr(model, "example_inputs" if feedforward else "example_prompts", None)
        self.prompts = self._prompts(examples() if callable(examples) else examples)
        self._pads: list[Any] = [] if padding_token is None else [padding_token]
        if padding_token is None and padding and takes_lengths(model, self.rung):
            self._pads = [np.zeros_like(self.prompts[0][:1]), self.prompts[0][:1]]

    def _prompts(self, examples: Any) -> list[HostArray]:
        if examples is None:
            if isinstance(self.ids, int) and self.ids > 0:
                return prompts.drawn(self.ids, self.limit - self.n)
            how = prompts.HOW_INPUTS if self.rung is None else prompts.HOW
            raise ConfigError(f"There is nothing to try {self.name} on. {how}.")
        if self.rung is None:
            return prompts.given(examples, self.backend, prompts.HOW_INPUTS)
        found = prompts.given(examples, self.backend, prompts.HOW)
        longest = len(found[-1])
        if longest + self.n > self.limit:
            raise ConfigError(
                f"An example of {longest} tokens and {self.n} new ones are over max_model_len={self.limit}. Give "
                f"shorter ones, or a larger --max-model-len."
            )
        more = prompts.grown(found[0], found[1], self.limit - self.n - len(found[0]), self._adds(found[0]))
        return found + [m for m in more if not any(prompts.same(m, f) for f in found)]

    def _adds(self, prompt: HostArray) -> Callable[[int], Any]:
        def ask(n: int) -> Any:
            with self._engine(rows=1, longest=len(prompt) + n) as engine:
                return self.answers(engine, [prompt], n)[0].items

        return ask

    def describe(self) -> list[str]:
        """Lines about what is judged, and on what."""
        library = ", ".join(self.backend.versions().values())
        sizes = sorted(map(len, self.prompts))
        on = f"prompts of {sizes[0]} to {sizes[-1]} tokens, {self.n} new ones each" if self.n > 1 else "inputs"
        return [f"{self.name}: {KINDS[self.rung]}", f"on {self.backend.name} ({library})", f"with {len(sizes)} {on}"]

    def long_prompt(self, length: int) -> HostArray | None:
        """A prompt of so many tokens; None if there is no way to make one."""
        if self.ids is not None:
            return prompts.draw(self.ids, length)
        first = self.prompts[0]
        new = np.array(self._adds(first)(length - len(first)))
        return np.concatenate([first, new.astype(first.dtype)]) if len(first) + len(new) == length else None

    # ---- engines and requests ----------------------------------------------------------------------------------

    def _engine(self, *, rows: int, longest: int, padding: Any = None, **options: Any) -> Any:
        model, backend = self.spy.model, self.spy.backend
        if self.rung is None:
            return FeedforwardBatchInference(model, max_batch_size=rows, backend=backend)
        options |= {"max_batch_size": rows, "max_model_len": longest, "padding_token": padding}
        options["prefix_cache"] = False  # everything is to be computed by the model, also what was computed before
        return AutoregressiveBatchInference(model, backend=backend, **options)

    def engine(self, *, new: bool = False, padding: Any = None, **options: Any) -> Any:
        """An engine, by default for all prompts at once: the one that was made with these options, unless `new`."""
        longest = max(map(len, self.prompts)) + self.n
        options = {"rows": len(self.prompts) + 1, "longest": longest, "padding": padding} | options
        key = repr(options)
        if new and (old := self._engines.pop(key, None)) is not None:
            old.close()
        if key not in self._engines:
            self._engines[key] = self._engine(**options)
        return self._engines[key]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def ask(self, engine: Any, prompt: HostArray, n: int | None = None) -> Any:
        """The stream of n new tokens (None: `self.n`); for a feed-forward model an Item."""
        if self.rung is None:
            return engine.run(prompt)
        if self.vocab is None:
            return engine.run(prompt, max_new_tokens=n or self.n)
        logprobs = min(CANDIDATES, self.vocab)
        return engine.run(prompt, SamplingParams(temperature=0, max_tokens=n or self.n, logprobs=logprobs))

    def read(self, stream: Any) -> Answer:
        items: list[Any] = []
        try:
            if self.rung is None:
                return Answer([self._host(stream.result())], "length")
            for item in stream:
                items.append(self._host(item))
        except HibachiError as e:
            return Answer(items, type(_fault(e)).__name__, _fault(e))
        return Answer(items, str(stream.finish_reason), None, stream.logprobs)

    def _host(self, item: Any) -> Any:
        return np.array(self.backend.get(item)) if self.backend.owns(item) else item

    def cancel(self, stream: Any) -> None:
        stream.cancel() if self.rung is None else stream.close()

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
        while not reached.wait(0.02) and not all(s.done() if self.rung is None else s.finish_reason for s in streams):
            pass

    # ---- what is wrong -----------------------------------------------------------------------------------------

    @cached_property
    def alone(self) -> list[Answer]:
        """The answer to each prompt when nobody else is there."""
        before, found = self.spy.calls, self.answers(self.engine(), self.prompts)
        gave_up = found[-1].ending != "length"  # an engine does, if it can use no output at all
        assert gave_up or self.spy.calls - before >= len(self.prompts), "the calls of the model were not seen"
        return found

    @cached_property
    def unanswered(self) -> Trouble | None:
        what = "an output" if self.rung is None else f"{self.n} tokens"
        for prompt, answer in zip(self.prompts, self.alone, strict=True):
            if (answer.ending, len(answer.items)) != ("length", self.n):
                return Trouble(f"{what} for {show(prompt)}, alone", answer.told())
        return None

    @cached_property
    def unsteady(self) -> Trouble | None:
        """What differs when all are asked again, twice, alone, in another order, of a new engine."""
        order = range(len(self.prompts))[::-1]
        engine = self.engine(new=True)
        for _ in range(2):
            got = self.answers(engine, [self.prompts[i] for i in order])
            if trouble := self.differs(order, got, "when it is asked again", was="the first time"):
                return trouble
        return None

    @cached_property
    def mixed(self) -> Trouble | None:
        """What differs when all run at once."""
        return self.changed_together(self.engine())

    @cached_property
    def misled(self) -> Trouble | None:
        """What differs when all run at once and are padded."""
        for pad in self._pads:
            now = f"padded with {show(np.asarray(pad).ravel())} beside {len(self.prompts) - 1} others"
            if trouble := self.changed_together(self.engine(padding=pad), now):
                return trouble
        return None

    @property
    def can_pad(self) -> bool:
        return bool(self._pads)

    @property
    def harmless(self) -> list[Any]:
        """Padding tokens, if they do no harm."""
        return self._pads if self._pads and self.misled is None else []

    @property
    def padding(self) -> Any:
        """The first of them, or None."""
        return self.harmless[0] if self.harmless else None

    @cached_property
    def replayed(self) -> tuple[Trouble | None, list[str]]:
        """What differs when a call of a run of all prompts is made twice; and the inputs that calls change."""
        self.spy.record = calls = []
        try:
            self.together(self.engine(), self.prompts, [min(3, self.n)] * len(self.prompts))
        finally:
            self.spy.record = None
        trouble, changed = None, []
        for call in calls:
            try:
                (first, more), (second, _) = self.spy.again(call), self.spy.again(call)
            except Exception as e:
                return Trouble("a call that can be made again", f"{type(e).__name__}: {e}"), changed
            changed += more
            trouble = trouble or self._unequal(call, first, second)
        return trouble, list(dict.fromkeys(changed))

    def _unequal(self, call: Call, first: list[Any], second: list[Any]) -> Trouble | None:
        for i, pair in enumerate(zip(first, second, strict=True)):
            a, b = (np.asarray(self.backend.get(t)) for t in pair)
            if not close(a, b, self.tolerance):
                off = f", off by {np.abs(a - b).max():.4g}" if a.shape == b.shape and a.dtype.kind in "iuf" else ""
                what = "the cache" if i else "the output"
                rows = "1 row" if len(call.rows) == 1 else f"{len(call.rows)} rows"
                return Trouble(f"the same twice from a call with {rows}", f"{what} changed{off}")
        return None

    def changed_together(self, engine: Any, now: str = "") -> Trouble | None:
        """What differs when all run at once, in two orders."""
        everyone = range(len(self.prompts))
        for order in (everyone, everyone[::-1]):
            got = self.together(engine, [self.prompts[i] for i in order])
            if trouble := self.differs(order, got, now or f"beside {len(order) - 1} others"):
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
        if self.rung is not None:
            answers = [np.array(a.items).reshape(-1, *self.prompts[0].shape[1:]) for a in self.alone]
            whole = [np.concatenate(pair) for pair in zip(self.prompts, answers, strict=True)]
        told, shapes = [], [p.shape for p in self.prompts]
        for i, prompt in enumerate(self.prompts):
            if not any(prompts.begins(w, prompt) for j, w in enumerate(whole) if j != i):
                told.append(i)
        return next((i for i in told if shapes.count(shapes[i]) > 1), told[0] if told else None)

    def is_guilty(self, row: HostArray, more: int = 0) -> bool:
        """Is this the row of the guilty prompt, with at least `more` new tokens?"""
        assert self.guilty is not None
        prompt = self.prompts[self.guilty]
        return prompts.begins(row, prompt) and len(row) >= len(prompt) + more * (self.rung is not None)


def _fault(e: HibachiError) -> HibachiError:
    """What a model did to a request, also if the engine gave up over it."""
    cause = e.__cause__
    return cause if isinstance(e, EngineFailed) and isinstance(cause, HibachiError) else e


def backend_of(model: Any) -> ArrayBackend:
    """The backend that a model names, or that its arrays are of; NumPy if it has none."""
    if (named := given_backend(None, model)) is not None:
        return named
    inside = [getattr(model, "params", None), getattr(model, "__dict__", None)]
    if callable(parameters := getattr(model, "parameters", None)):  # as a torch.nn.Module has them
        inside.append(list(parameters())[:1])
    for array in _arrays(inside):
        try:
            if (found := backend_for(array)).name != "numpy":
                return found
        except BackendError:
            continue
    return resolve("numpy")


def _arrays(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list, tuple)):
        for each in list(value.values()) if isinstance(value, dict) else value:
            yield from _arrays(each)
    elif hasattr(value, "dtype") and hasattr(value, "shape"):
        yield value
