"""The memory of a model with a cache: keys and values in blocks, states by row, and states that were kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hibachi.plan.limits import Limits
from hibachi.tensor.array_backend import Array, ArrayBackend
from hibachi.tensor.layout import CacheSpec, Paged, State


class Memory:
    """cache: what `model.step` is given, a list of layers. kept: the checkpoints of each layer with a state.

    donating: a compiled call is given the cache for good. It stays so until that has cost a cache.
    """

    kept: list[Any]
    cache: list[Any]
    backend: ArrayBackend
    limits: Limits

    def __init__(self, spec: CacheSpec, backend: ArrayBackend, limits: Limits, dtype: str) -> None:
        self.backend, self.limits, self._dtype = backend, limits, dtype
        self.spec: list[Paged | State] = list(spec)
        self.states: list[int] = [i for i, layer in enumerate(self.spec) if isinstance(layer, State)]
        self.compile(donate=True)
        self.make()

    def compile(self, *, donate: bool) -> None:
        self.donating = donate
        self.gather: Callable[..., Any] = self.backend.compile(self._gather)
        self.scatter: Callable[..., Any] = self.backend.compile(self._scatter)
        self._copy = self.backend.compile(self._copy_states, donate=(0,) if donate else ())

    def make(self) -> None:
        b, lim = self.backend, self.limits
        self.cache, self.kept = list[Any](), list[Any]()  # before there is memory for new ones
        self.cache = [
            # One row more than the limit: padding rows write there.
            b.make_cache(s, blocks=max(lim.blocks, 1), block_size=lim.block_size, rows=lim.rows + 1, dtype=self._dtype)
            for s in self.spec
        ]
        n = lim.checkpoints
        # Likewise one more. A state is an array of rows, so a checkpoint is a row as well.
        self.kept = [
            b.make_cache(self.spec[i], blocks=1, block_size=1, rows=n + 1, dtype=self._dtype) if n else None
            for i in self.states
        ]

    def another(self, limits: Limits) -> Memory:
        """A second one, of these limits and without checkpoints, for the same compiled calls."""
        new = Memory(self.spec, self.backend, replace(limits, checkpoints=0), self._dtype)
        if not self.donating:
            new.compile(donate=False)
        return new

    def restore(self, pairs: list[tuple[int, int]]) -> None:
        """(row, checkpoint): the state of each row is the one kept in the checkpoint."""
        rows, slots = self._places(pairs)
        with self.backend.guard():
            for i, kept in zip(self.states, self.kept, strict=True):
                self.cache[i] = self._copy(self.cache[i], rows, kept, slots)

    def save(self, pairs: list[tuple[int, int]]) -> None:
        """(row, checkpoint): keep the state of each row."""
        rows, slots = self._places(pairs)
        with self.backend.guard():
            self.kept = [
                self._copy(kept, slots, self.cache[i], rows) for i, kept in zip(self.states, self.kept, strict=True)
            ]
            self.backend.settle(self.kept)

    def _places(self, pairs: list[tuple[int, int]]) -> tuple[Array, Array]:
        """Rows and checkpoints on the device, in few shapes."""
        n = self.backend.shapes.rows(len(pairs), self.limits.rows)
        at = np.full((2, max(n, len(pairs))), [[self.limits.rows], [self.limits.checkpoints]], np.int32)
        at[:, : len(pairs)] = np.array(pairs, np.int32).T
        return self.backend.put(at[0]), self.backend.put(at[1])

    def _copy_states(self, into: Array, to: Array, source: Array, at: Array) -> Array:
        return self.backend.scatter_rows(into, to, self.backend.take(source, at))

    # ---- states of a step, which are stepped as a copy and kept on success ---------------------------------------

    def with_states(self, work: list[Array]) -> list[Any]:
        """The cache, with these states in the place of its own."""
        given = iter(work)
        return [c if isinstance(s, Paged) else next(given) for c, s in zip(self.cache, self.spec, strict=True)]

    def keep_blocks(self, caches: list[Any]) -> None:
        """Take the keys and values of a call, and leave the states as they were."""
        self.cache = [
            c if isinstance(s, Paged) else old for c, s, old in zip(caches, self.spec, self.cache, strict=True)
        ]

    def keep_states(self, states: list[Array]) -> None:
        for i, state in zip(self.states, states, strict=True):
            self.cache[i] = state

    def _gather(self, states: list[Array], held: Array, started: Array) -> list[Array]:
        """The states of the rows `held`, zeros for those that start."""
        b = self.backend
        out = []
        for s in states:
            rows = b.take(s, held)
            flag = b.xp.reshape(started, (-1, *(1,) * (s.ndim - 1)))
            out.append(b.xp.where(flag, rows, b.xp.zeros_like(rows)))
        return out

    def _scatter(self, states: list[Array], held: Array, work: list[Array]) -> list[Array]:
        return [self.backend.scatter_rows(s, held, w) for s, w in zip(states, work, strict=True)]


@dataclass(frozen=True)
class RecurrentStep:
    """One call of the model on some of the working states; equal for one model, so that it is compiled once."""

    step: Any  # a `CheckedStep`
    backend: ArrayBackend
    spec: tuple[Paged | State, ...]

    @property
    def __name__(self) -> str:  # of the program, where a library compiles it
        return "step"

    def __call__(self, params: Any, cache: list[Any], place: Array, x: Any) -> tuple[Array, list[Any]]:
        """place: of each row of the call its place among the working states. Returns all working states."""
        b = self.backend
        given = [b.take(c, place) if isinstance(s, State) else c for c, s in zip(cache, self.spec, strict=True)]
        out, new = self.step(params, given, x)
        joined = [
            b.scatter_rows(old, place, n) if isinstance(s, State) else n
            for old, n, s in zip(cache, new, self.spec, strict=True)
        ]
        return out, joined
