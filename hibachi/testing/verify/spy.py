"""Stands between an engine and a model: sees every call of the model, and may hold it, make it fail or spoil it.

The engine is given `spy.model` and `spy.backend`. The calls of a model with a cache are left as they are, because its
step is compiled: by the engine's backend, so a copy of the backend is what sees the step's arguments and results. Other
models are wrapped.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.infer import leaves
from hibachi.backend.layout import StepInputs
from hibachi.engine.ladder import ModelKind
from hibachi.engine.runners.calls import is_awaited

_DECLARED = ("vocab_size", "past", "example_prompts", "codebooks", "draws", "inputs", "encode")
PATIENCE = 60.0  # seconds that a call is held at most


@dataclass(frozen=True, slots=True)
class SpiedCall:
    """One call of the model. rows: for each row of its output, all tokens up to the one whose output it is."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    rows: list[HostArray]


class Spy:
    """before(call): called in the engine's thread before each call of the model; may raise.
    after(call, out): gives what the engine gets as the call's output.
    record: copies of calls are put into this list, if there is one.
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
        self.record: list[SpiedCall] | None = None
        self._sequences: dict[int, HostArray] = {}  # by row, of a model with a cache
        self._gate: tuple[int, threading.Event, threading.Event] | None = None
        self.undo()

    def undo(self) -> None:
        """No more failing or spoiling."""
        self.before: Callable[[SpiedCall], None] = lambda call: None
        self.after: Callable[[SpiedCall, Array], Any] = lambda call, out: out

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

    def _see(self, call: SpiedCall) -> None:
        self.calls += 1
        gate = self._gate
        if gate is not None and self.calls == gate[0]:
            gate[1].set()
            gate[2].wait(PATIENCE)
        if self.record is not None:
            self.record.append(self._copied(call))
        self.before(call)

    def _compile(self, fn: Callable[..., Any], *, donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        compiled = self._plain.compile(fn, donate=donate)

        def step(*args: Any) -> Any:
            if not args or not isinstance(args[-1], StepInputs):
                return compiled(*args)  # something else of the engine
            call = SpiedCall(compiled, args, {}, self._rows(args[-1]))
            self._see(call)
            out, cache = compiled(*args)
            return self.after(call, out), cache

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
            call = SpiedCall(inner, (tokens, *args), options, rows)
            self._see(call)
            out = inner(*call.args, **options)
            if is_awaited(out, self._plain.owns):
                return self._later(call, out)
            return self.after(call, one_array(self._plain, out))

        return _like(model, run, "logits" if kind is ModelKind.LOGITS else "forward")

    def _wrapped_own(self, model: Any) -> Any:
        """Likewise, of a model with a cache of its own. Which requests its rows belong to cannot be seen."""

        def run(*args: Any, **options: Any) -> Any:
            call = SpiedCall(model.step, args, options, [])
            self._see(call)
            logits, past = model.step(*args, **options)
            return self.after(call, logits), past

        return _like(model, run, "step")

    async def _later(self, call: SpiedCall, out: Awaitable[Any]) -> Any:
        return self.after(call, one_array(self._plain, await out))

    # ---- calls that were recorded ------------------------------------------------------------------------------

    def again(self, call: SpiedCall) -> tuple[list[Array], list[str]]:
        """Run a recorded call once more: the arrays that it gives, and the names of the inputs that it changed."""
        mine = self._copied(call)
        with self._plain.guard():
            out = call.fn(*mine.args, **mine.options)
            if is_awaited(out, self._plain.owns):
                out = asyncio.run(_await(out))
        get, before, after = self._plain.get, _inputs(call), _inputs(mine)
        changed = [n for n in before if not np.array_equal(get(before[n]), get(after[n]), equal_nan=True)]
        return [a for a in _leaves(out) if self._plain.owns(a)], changed

    def _copied(self, call: SpiedCall) -> SpiedCall:
        weights, args = call.args[: _steps(call)], call.args[_steps(call) :]
        return replace(call, args=(*weights, *copied(self._plain, args)), options=copied(self._plain, call.options))


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


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def copied(backend: ArrayBackend, value: Any) -> Any:
    """The same with copies of all arrays of the backend, in lists, tuples, dicts and step inputs."""
    if backend.owns(value):
        return backend.xp.asarray(value, copy=True)
    if isinstance(value, dict):
        return {k: copied(backend, v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [copied(backend, v) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, StepInputs):
        return replace(value, **{f.name: copied(backend, getattr(value, f.name)) for f in fields(value)})
    return value


def _steps(call: SpiedCall) -> bool:
    """Is it the step of a model with a cache? Its arguments begin with the weights, and end with the inputs."""
    return bool(call.args) and isinstance(call.args[-1], StepInputs)


def _inputs(call: SpiedCall) -> dict[str, Array]:
    """What a call may not change: all but weights and cache."""
    if _steps(call):
        x = call.args[-1]
        given = {f.name: getattr(x, f.name) for f in fields(StepInputs) if f.name != "inputs"} | dict(x.inputs or {})
        return {f"x.{name}": array for name, array in given.items() if array is not None}
    return dict(zip(("tokens", "lengths"), call.args, strict=False)) | call.options


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value
