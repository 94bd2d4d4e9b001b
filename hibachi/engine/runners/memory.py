"""The memory of a model with a cache: keys and values in blocks, states by row, and checkpoints of states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray, LayerCache
from hibachi.backend.layout import CacheSpec, Paged, State, StepInputs
from hibachi.engine.runners.entries import Entries, Kind, arrays_of, kinds_of
from hibachi.engine.scheduler.lower import Packed, lower
from hibachi.engine.scheduler.step import EntryLoads, EntryStores, Limits
from hibachi.errors import UnsupportedOperation

AT_ONCE = 16  # entries that are read or written together
T = TypeVar("T")


def position_bytes(spec: CacheSpec, dtype: str) -> int:
    """Bytes of the keys and values of one position. dtype: of layers that name none."""

    def size(name: str) -> int:
        return 2 if name == "bfloat16" else int(np.dtype(name).itemsize)

    paged = [layer for layer in spec if isinstance(layer, Paged)]
    return sum(s.kv_heads * (s.k_dim + s.v_dim) * size(s.dtype or dtype) for s in paged)


class Memory:
    """The cache of a model. cache: a list of layers, the input of `model.step`. kept: the checkpoints of each layer
    with a state.

    donating: a compiled call gets the cache for good; this is switched off once a failed call has lost the
    cache so.
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
        self._fill = self.backend.compile(self._fill_blocks, donate=(0,) if donate else ())
        self._fork = self.backend.compile(self._forked, donate=(0,) if donate else ())
        self._read = self.backend.compile(self._read_blocks)
        self._write = self.backend.compile(self._write_blocks, donate=(0,) if donate else ())
        self._set = self.backend.compile(self._set_rows, donate=(0,) if donate else ())

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
        """A second memory of these limits, without checkpoints, for the same compiled calls."""
        new = Memory(self.spec, self.backend, replace(limits, checkpoints=0), self._dtype)
        if not self.donating:
            new.compile(donate=False)
        return new

    # ---- where several processes have a part each ---------------------------------------------------------------

    def calling(self, x: StepInputs[Array], *, hidden: bool) -> AbstractContextManager[None]:
        """Around each call of the model, for logits or for hidden states."""
        return nullcontext()

    def announce(self, x: StepInputs[Array]) -> None:
        """There will be such a call, for logits, before any other: the stages before this one begin with it."""

    @property
    def wanted(self) -> bool:
        """Whether another thread waits until all announced calls have been made."""
        return False

    def watch(self, wake: Callable[[], object]) -> None:
        """wake: called from another thread when a process has ended, and `check` would raise."""

    def check(self) -> None:
        """Raises EngineFailed if no step can be computed any more."""

    def close(self) -> None:
        """There will be no more calls."""

    def restore(self, pairs: list[tuple[int, int]]) -> None:
        """For each (row, checkpoint): set the state of the row to the one kept in the checkpoint."""
        rows, slots = self._places(pairs)
        with self.backend.guard():
            for i, kept in zip(self.states, self.kept, strict=True):
                self.cache[i] = self._copy(self.cache[i], rows, kept, slots)

    def save(self, pairs: list[tuple[int, int]]) -> None:
        """For each (row, checkpoint): keep the state of the row."""
        rows, slots = self._places(pairs)
        with self.backend.guard():
            self.kept = [
                self._copy(kept, slots, self.cache[i], rows) for i, kept in zip(self.states, self.kept, strict=True)
            ]
            self.backend.settle(self.kept)

    def fork(self, blocks: Sequence[tuple[int, int]], rows: Sequence[tuple[int, int]]) -> None:
        """Copy the contents of blocks to others, and the states of rows, for each (from, to)."""
        places = [_few(blocks, 0), _few(rows if self.states else (), self.limits.rows)]
        with self.backend.guard():
            self.cache = self._fork(self.cache, *self.backend.put_all([at for pair in places for at in pair]))
            self.backend.settle(self.cache)

    def _forked(self, cache: list[Any], block: Array, to: Array, row: Array, into: Array) -> list[Any]:
        b = self.backend
        return [
            b.copy_blocks(c, block, to) if isinstance(s, Paged) else b.copy_rows(c, row, into)
            for c, s in zip(cache, self.spec, strict=True)
        ]

    def _places(self, pairs: list[tuple[int, int]]) -> tuple[Array, Array]:
        """Rows and checkpoints on the device, in few shapes."""
        n = self.backend.shapes.rows(len(pairs), self.limits.rows)
        at = np.full((2, max(n, len(pairs))), [[self.limits.rows], [self.limits.checkpoints]], np.int32)
        at[:, : len(pairs)] = np.array(pairs, np.int32).T
        return self.backend.put(at[0]), self.backend.put(at[1])

    def _copy_states(self, into: Array, to: Array, source: Array, at: Array) -> Array:
        return self.backend.scatter_rows(into, to, self.backend.take(source, at))

    # ---- keys and values that come from elsewhere, and go there -------------------------------------------------

    def write(self, blocks: Sequence[int], kv: Sequence[tuple[HostArray, HostArray]]) -> None:
        """Write keys and values of each layer, [kv_heads, n, dim], into the first of these blocks.

        They are written by `attend`, so that any backend's kind of cache works. Each block is given to it as a sequence
        of its own, which costs next to nothing, and blocks come in few shapes.
        """
        b, size = self.backend, self.limits.block_size
        n = kv[0][0].shape[1]
        full = -(-n // size)
        most = max(1, self.limits.budget // size)
        with b.guard():
            for at in range(0, full, most):
                mine = blocks[at : min(at + most, full)]
                some = np.zeros(1 << (len(mine) - 1).bit_length(), np.int32)  # what is too many is block 0, the trash
                some[: len(mine)] = mine
                x = self._alone(some)
                for i, (halves, spec) in enumerate(zip(kv, self.spec, strict=True)):
                    assert isinstance(spec, Paged)
                    put = (_positions(half, at * size, len(some) * size) for half in halves)
                    with np.errstate(over="ignore"):  # what its dtype cannot hold, `attend` stores as NaN
                        k, v = (b.put(half, spec.dtype or self._dtype) for half in put)
                    self.cache[i] = self._fill(self.cache[i], k, v, x)
            b.settle(self.cache)

    def read(self, blocks: Sequence[int], tokens: int) -> list[tuple[HostArray, HostArray]]:
        """Keys and values of each layer, float32 [kv_heads, tokens, dim]: copies. Raises UnsupportedOperation."""
        out = []
        with self.backend.guard():
            for layer in self.cache:
                halves = self.backend.positions(layer, blocks)
                if len(halves) != 2:
                    raise UnsupportedOperation(
                        f"{self.backend!r} keeps keys and values in a form that `positions` cannot tell apart. Take "
                        f"another backend to have them returned."
                    )
                k, v = (half.reshape(-1, *half.shape[2:])[:tokens].transpose(1, 0, 2).copy() for half in halves)
                out.append((k, v))
        return out

    def _alone(self, blocks: Any) -> StepInputs[Array]:
        """A step of full sequences, each of which has one of these blocks [n]."""
        n, size = len(blocks), self.limits.block_size
        one, start, none = np.arange(n, dtype=np.int32), np.zeros(n, np.int32), np.zeros(n, bool)
        choices = self.backend.shapes.choices
        packed = lower(one, start, np.full(n, size, np.int32), none, blocks[:, None], size, tiles=choices)
        packed = replace(packed, row=np.full(n, self.limits.rows, np.int32))
        names = [f.name for f in fields(Packed)]
        tok, *rest = self.backend.put_all([packed.pos, *(getattr(packed, name) for name in names)])
        return StepInputs(tok=tok, **dict(zip(names, rest, strict=True)))

    def _fill_blocks(self, cache: LayerCache, k: Array, v: Array, x: StepInputs[Array]) -> LayerCache:
        return self.backend.attend(self.backend.xp.zeros_like(k), k, v, cache, x)[1]

    # ---- what tiers keep ---------------------------------------------------------------------------------------

    def outgoing(self, stores: EntryStores) -> tuple[list[Entries], list[Entries]]:
        """See `EntrySource`."""
        with self.backend.guard():
            return self._out(stores.blocks, self.read_entries), self._out(stores.states, self._read_checkpoints)

    def _out(self, given: Sequence[tuple[int, bytes]], read: Callable[[Array], list[Array]]) -> list[Entries]:
        b, out = self.backend, list[Entries]()
        for some in _pieces(given):
            held = read(b.put(_padded([at for at, _ in some])))
            b.settle(held)
            out.append(Entries([name for _, name in some], b.fetch(held)))
        return out

    def incoming(self, loads: EntryLoads) -> None:
        """See `EntrySource`."""
        b = self.backend
        with b.guard():
            for some in _pieces(loads.blocks):
                at = _padded([load.at for load in some])
                self.write_entries(at, arrays_of([load.data for load in some], self._kinds[0], len(at)))
            for some in _pieces(loads.states):
                rows = _padded([load.at for load in some])
                rows[len(some) :] = self.limits.rows  # nobody's
                held = arrays_of([load.data for load in some], self._kinds[1], len(rows))
                for i, state in zip(self.states, held, strict=True):
                    self.cache[i] = self._set(self.cache[i], b.put(rows), b.put(state))
            b.settle(self.cache)

    def read_entries(self, blocks: Array) -> list[Array]:
        """What is in these blocks [n]: arrays [n, ...]."""
        held: list[Array] = self._read(self.cache, blocks)
        return held

    def write_entries(self, blocks: HostArray, held: Sequence[HostArray]) -> None:
        """Blocks [n] get what `read_entries` has returned for n others."""
        b = self.backend
        self.cache = self._write(self.cache, b.put(blocks), [b.put(a) for a in held])

    def _read_checkpoints(self, slots: Array) -> list[Array]:
        return [self.backend.bits(self.backend.take(kept, slots)) for kept in self.kept]

    def _read_blocks(self, cache: list[Any], blocks: Array) -> list[Array]:
        paged = [c for c, s in zip(cache, self.spec, strict=True) if isinstance(s, Paged)]
        return [half for layer in paged for half in self.backend.read_blocks(layer, blocks)]

    def _write_blocks(self, cache: list[Any], blocks: Array, held: list[Array]) -> list[Any]:
        b, given = self.backend, iter(held)
        return [
            b.write_blocks(c, blocks, [next(given) for _ in b.halves(c)]) if isinstance(s, Paged) else c
            for c, s in zip(cache, self.spec, strict=True)
        ]

    def _set_rows(self, into: Array, rows: Array, state: Array) -> Array:
        return self.backend.scatter_rows(into, rows, self.backend.of_bits(state, into))

    def entry_kinds(self) -> tuple[list[Kind], list[Kind]]:
        """See `EntrySource`."""
        return self._kinds

    @cached_property
    def _kinds(self) -> tuple[list[Kind], list[Kind]]:
        b = self.backend
        with b.guard():
            one = b.put(np.zeros(1, np.int32))
            held = self.read_entries(one) if self.limits.blocks else []
            states = [b.bits(b.take(self.cache[i], one)) for i in self.states]
            return kinds_of(held, b), kinds_of(states, b)

    # ---- states of a step, which are stepped as a copy and kept on success ---------------------------------------

    def with_states(self, work: list[Array]) -> list[Any]:
        """The cache, with these states in place of its own."""
        given = iter(work)
        return [c if isinstance(s, Paged) else next(given) for c, s in zip(self.cache, self.spec, strict=True)]

    def keep_blocks(self, caches: list[Any]) -> None:
        """Take over the keys and values of a call, and leave the states as they were."""
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
    """One call of the model on some of the working states. Wrappers of one model are equal, so that it is compiled
    once.
    """

    step: Any  # a `CheckedStep`
    backend: ArrayBackend
    spec: tuple[Paged | State, ...]

    @property
    def __name__(self) -> str:  # of the program, where a library compiles it
        return "step"

    def __call__(self, params: Any, cache: list[Any], place: Array, x: Any) -> tuple[Array, list[Any]]:
        """place: for each row of the call its index among the working states. Returns all working states."""
        b = self.backend
        given = [b.take(c, place) if isinstance(s, State) else c for c, s in zip(cache, self.spec, strict=True)]
        out, new = self.step(params, given, x)
        joined = [
            b.scatter_rows(old, place, n) if isinstance(s, State) else n
            for old, n, s in zip(cache, new, self.spec, strict=True)
        ]
        return out, joined


def _pieces(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Few at a time: calls of few shapes, on memory that the processor's cache holds."""
    return (items[at : at + AT_ONCE] for at in range(0, len(items), AT_ONCE))


def _padded(places: Sequence[int]) -> HostArray:
    """Places int32 in few shapes: what is too many is block 0, the trash, or the first checkpoint."""
    at = np.zeros(1 << (len(places) - 1).bit_length(), np.int32)
    at[: len(places)] = places
    return at


def _few(pairs: Sequence[tuple[int, int]], nothing: int) -> HostArray:
    """Places from which and to which is copied, int32 [2, n], in few shapes. nothing: a place of no meaning."""
    at = np.full((2, 1 << max(len(pairs) - 1, 0).bit_length()), nothing, np.int32)
    at[:, : len(pairs)] = np.array(pairs, np.int32).reshape(-1, 2).T
    return at


def _positions(half: HostArray, start: int, count: int) -> HostArray:
    """[heads, n, dim] -> this many positions from `start` on, [count, heads, dim]; positions beyond n are zeros."""
    part = half[:, start : start + count]
    out = np.zeros((count, half.shape[0], half.shape[2]), half.dtype)
    out[: part.shape[1]] = part.transpose(1, 0, 2)
    return out
