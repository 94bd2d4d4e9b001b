"""Stands between an engine and a model: sees every call of the model, and may hold it, make it fail or spoil it.

The engine is given `spy.model` and `spy.backend`. The calls of a model with a cache are left as they are, because its
step is compiled: by the engine's backend, so a copy of the backend is what sees the step's arguments and results. Other
models are wrapped.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.infer import leaves
from hibachi.backend.layout import StepInputs
from hibachi.engine.ladder import ModelKind
from hibachi.engine.runners.calls import is_awaited

_DECLARED = ("vocab_size", "past", "example_prompts", "codebooks", "vocab_sizes", "depth", "draws", "inputs", "encode")
PATIENCE = 60.0  # seconds that a call is held at most


class Spy:
    """before(rows): called in the engine's thread before each call of the model; may raise. rows: for each row of its
    output, all tokens up to the one whose output it is.
    after(rows, out): gives what the engine gets as the call's output.
    """

    calls: int

    def __init__(self, model: Any, backend: ArrayBackend, kind: ModelKind) -> None:
        self._plain = backend
        self.backend: ArrayBackend = copy.copy(backend)
        self.model: Any = model
        if kind is ModelKind.PAGED:
            self.model = _unstopped(model)
            self.backend.compile = self._compile  # type: ignore[method-assign]  # of this copy
        else:
            self.model = self._wrapped(model, kind)
        self.calls = 0
        self._sequences: dict[int, HostArray] = {}  # by row, of a model with a cache
        self._gate: tuple[int, threading.Event, threading.Event] | None = None
        self.undo()

    def undo(self) -> None:
        """No more failing or spoiling."""
        self.before: Callable[[list[HostArray]], None] = lambda rows: None
        self.after: Callable[[list[HostArray], Array], Any] = lambda rows, out: out

    @contextmanager
    def holding(self, call: int) -> Iterator[threading.Event]:
        """Holds the engine in this call from now (1: the next) until the block is left; yields "it is held"."""
        held, opened = threading.Event(), threading.Event()
        self._gate = self.calls + call, held, opened
        try:
            yield held
        finally:
            self._gate = None
            opened.set()

    # ---- the call ----------------------------------------------------------------------------------------------

    def _see(self, rows: list[HostArray]) -> None:
        self.calls += 1
        gate = self._gate
        if gate is not None and self.calls == gate[0]:
            gate[1].set()
            gate[2].wait(PATIENCE)
        self.before(rows)

    def _compile(self, fn: Callable[..., Any], *, donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        compiled = self._plain.compile(fn, donate=donate)

        def step(*args: Any) -> Any:
            if not args or not isinstance(args[-1], StepInputs):
                return compiled(*args)  # something else of the engine
            rows = self._rows(args[-1])
            self._see(rows)
            out, cache = compiled(*args)
            return self.after(rows, out), cache

        return step

    def _rows(self, x: StepInputs[Array]) -> list[HostArray]:
        """The sequences behind the outputs of a step: what its rows held before, and their new tokens."""
        names = ("tok", "pos", "seg", "row", "start", "cu_q", "last")
        tok, pos, seg, row, start, cu_q, last = (self._plain.get(getattr(x, name)) for name in names)
        for i, place in enumerate(row.tolist()):
            new = tok[cu_q[i] : cu_q[i + 1]]
            if len(new):  # padding rows have none
                self._sequences[place] = np.concatenate([self._sequences.get(place, new[:0])[: start[i]], new])
        return [self._sequences[int(row[seg[j]])][: pos[j] + 1] for j in last.tolist()]

    def _wrapped(self, model: Any, kind: ModelKind) -> Any:
        """An object with the one method of this kind, called as the model is; it has the name of the model's class."""
        if kind is ModelKind.OWN_CACHE:
            return self._wrapped_own(model)
        inner = model.logits if kind is ModelKind.LOGITS else model.forward
        get = self._plain.get

        def run(tokens: Array, *args: Array, **options: Array) -> Any:
            batch, given = get(tokens), args[0] if args else options.get("lengths")
            lengths = get(given) if given is not None else np.full(len(batch), batch.shape[1] if batch.ndim > 1 else 0)
            rows = (
                list(batch) if not kind.has_tokens else [r[len(r) - n :] for r, n in zip(batch, lengths, strict=True)]
            )
            self._see(rows)
            out = inner(tokens, *args, **options)
            if is_awaited(out, self._plain.owns):
                return self._later(rows, out, kind)
            return self.after(rows, out if kind.has_tokens else one_array(self._plain, out))

        return _like(model, run, "logits" if kind is ModelKind.LOGITS else "forward")

    def _wrapped_own(self, model: Any) -> Any:
        """Likewise, of a model with a cache of its own. Which requests its rows belong to cannot be seen."""

        def run(*args: Any, **options: Any) -> Any:
            self._see([])
            logits, past = model.step(*args, **options)
            return self.after([], logits), past

        return _like(model, run, "step")

    async def _later(self, rows: list[HostArray], out: Awaitable[Any], kind: ModelKind) -> Any:
        return self.after(rows, await out if kind.has_tokens else one_array(self._plain, await out))


def _like(model: Any, run: Callable[..., Any], name: str) -> Any:
    """An object with one method, which takes what the model's takes, and what the model declares."""
    with suppress(TypeError, ValueError):  # compiled code need not tell
        run.__signature__ = inspect.signature(getattr(model, name))  # type: ignore[attr-defined]  # read by `inspect`
    said = {key: getattr(model, key) for key in _DECLARED if hasattr(model, key)} | {"spied": model}
    return type(type(model).__name__, (), {name: staticmethod(run), **said})()


def one_array(backend: ArrayBackend, out: Any) -> Any:
    """Several arrays of a feed-forward model as one, the numbers of each row one after another."""
    if not isinstance(out, (tuple, list, dict)) or not (arrays := leaves(out)):
        return out
    return backend.xp.concat([backend.xp.reshape(backend.float32(a), (a.shape[0], -1)) for a in arrays], axis=1)


def _unstopped(model: Any) -> Any:
    """The model, whose requests end only where a trial wants it."""

    def of(_: Any, name: str) -> Any:
        return None if name in ("stop_token", "stop_rule") else getattr(model, name)

    return type(type(model).__name__, (), {"__getattr__": of})()
