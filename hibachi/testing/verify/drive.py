"""Calls a model as the engine does, but one call at a time and with everything about the call chosen by hand."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hibachi.backend.array_backend import ArrayBackend, HostArray
from hibachi.backend.layout import Paged, StepInputs
from hibachi.common.shapes import CallShapes, fixed
from hibachi.engine.ladder import ModelKind
from hibachi.engine.runners.calls import Awaiter
from hibachi.engine.runners.depth import DepthCalls, depth_of
from hibachi.engine.runners.extra_inputs import ExtraInputs, declared_by
from hibachi.engine.runners.memory import Memory
from hibachi.engine.runners.runner import check_output
from hibachi.engine.runners.uncached import WholeStep
from hibachi.engine.scheduler.lower import Packed, lower, pad
from hibachi.engine.scheduler.step import Limits
from hibachi.testing.verify.spy import one_array

PROMPT = 8  # tokens of each prompt, as models are told that ask
BLOCK = 4  # positions in a cache block: few, so that short rows have several

Key: TypeAlias = tuple[str, int]  # (a row's name, how many of its tokens the model had seen)
Outputs: TypeAlias = dict[Key, HostArray]


class Found(Exception):
    """A fault that is no difference between two outputs; its text says what was seen."""


class Span(NamedTuple):
    """Tokens start to end - 1 of a row, to be computed in a call.

    row: its name; "a#1" is another request with the tokens of "a". emit: is the output wanted? at: of which token;
    None means of the last.
    """

    row: str
    start: int
    end: int
    emit: bool = True
    at: int | None = None


class Driver:
    """What all drivers share. tokens: of each row, on the host.

    rows: most in a call. beside: what comes beside their tokens. touched: names of inputs that a call has changed.
    depth: what makes logits of outputs, if they are none.
    """

    model: Any
    backend: ArrayBackend
    name: str
    rows: int
    depth: DepthCalls | None

    def __init__(self, model: Any, backend: ArrayBackend, method: str, rows: int) -> None:
        self.model, self.backend, self.name, self.rows = model, backend, f"{type(model).__name__}.{method}", rows
        self.tokens: dict[str, HostArray] = {}
        self.touched: dict[str, None] = {}
        self.beside: ExtraInputs = ExtraInputs(declared_by(model), rows)
        self.wait: Awaiter = Awaiter(backend.owns)
        self.depth = depth_of(model, backend)

    def compared(self, out: Any, shape: tuple[int, ...], kind: str, last: HostArray) -> HostArray:
        """What is compared of an output that must have this shape: itself, or logits in depth, as they are after these
        tokens [shape[0], *tok].
        """
        if self.depth is not None:
            out = self.depth.forced(self.depth.given(out, shape[0], self.name), last)
        else:
            check_output(out, self.backend, shape, self.name, kind=kind)
        return self.host(out)

    def of(self, row: str) -> HostArray:
        return self.tokens[row.partition("#")[0]]

    def brought(self, rows: Sequence[str]) -> HostArray:
        """Set what these requests bring; returns their places. Seeds are by the tokens: two with the same are alike."""
        for i, row in enumerate(rows):
            self.beside.set(i, PROMPT, zlib.crc32(row.partition("#")[0].encode()))
        return np.arange(len(rows))

    def fresh(self, **layout: Any) -> Any:
        """Something with `call(pieces)`, with an empty cache if the model has one."""
        return self

    def close(self) -> None:
        self.wait.close()

    def put(self, host: HostArray) -> Any:
        return self.backend.put(host.copy())  # a copy: some libraries share memory with the host

    @contextmanager
    def watching(self, shown: dict[str, Any]) -> Iterator[None]:
        """Around a call that is shown these arrays: notes which of them it has written into."""
        before = {name: self.host(array) for name, array in shown.items()}
        yield
        for name, array in shown.items():
            if not np.array_equal(self.host(array), before[name], equal_nan=before[name].dtype.kind == "f"):
                self.touched[name] = None

    def host(self, out: Any) -> HostArray:
        host = np.array(self.backend.get(out))
        return host if host.dtype.kind in "iufbc" else np.array(self.backend.get(self.backend.float32(out)))


class WholeDriver(Driver):
    """Levels 0 and 1: every call is shown whole sequences. vocab: size of the logits; None means tokens come out.

    fills: tokens [1, *tok] that rows may be padded with; empty: rows of equal length go together.
    """

    vocab: int | None

    def __init__(self, model: Any, backend: ArrayBackend, vocab: int | None, kind: ModelKind, *, rows: int) -> None:
        super().__init__(model, backend, "logits" if kind is ModelKind.LOGITS else "forward", rows)
        self.vocab, self.step = vocab, WholeStep(model, self.beside, backend, kind, self._call)
        self.fills: list[HostArray] = []

    def call(
        self,
        pieces: Sequence[Span],
        *,
        extra: int = 0,
        fill: HostArray | None = None,
        right: bool = False,
        full: bool = False,
    ) -> Outputs:
        """extra: padding beyond what the longest row needs, with `fill` (None means the first there is); right: after
        the tokens, where no engine puts it. full: the lengths that are told count the padding."""
        lengths = np.array([p.end for p in pieces], np.int32)
        if fill is None and not self.fills and (lengths != lengths[0]).any():
            groups = [[p for p in pieces if p.end == n] for n in np.unique(lengths).tolist()]
            return {k: v for group in groups for k, v in self.call(group).items()}
        width = int(lengths.max()) + extra
        example = self.of(pieces[0].row)
        batch = np.zeros((len(pieces), width, *example.shape[1:]), example.dtype)
        if fill is None and self.fills:
            fill = self.fills[0]
        if fill is not None:
            batch[:] = fill
        for i, p in enumerate(pieces):
            place = slice(0, p.end) if right else slice(width - p.end, width)
            batch[i, place] = self.of(p.row)[: p.end]
        told = np.full_like(lengths, width) if full else lengths
        with self.backend.guard():
            beside = self.step.beside(self.brought([p.row for p in pieces]), lengths, width)
            out = self.step.called(self.put(batch), told, beside)
            row = logits_shape(self.vocab, batch.shape[2:]) if self.step.sampled else batch.shape[2:]
            kind = "logits" if self.step.sampled else batch.dtype.kind
            last = np.stack([self.of(p.row)[p.end - 1] for p in pieces])
            out = self.compared(out, (len(batch), *row), kind, last)
        return {(p.row, p.end): row for p, row in zip(pieces, out, strict=True)}

    def _call(self, method: Callable[..., Any], tokens: Any, *lengths: Any, **named: Any) -> Any:
        shown = {"tokens": tokens, **dict(zip(["lengths"], lengths, strict=False))}
        if "lengths" in named:
            shown["lengths"] = named["lengths"]
        with self.watching(shown):
            return self.wait(method(tokens, *lengths, **named))


def logits_shape(vocab: int | None, token: tuple[int, ...]) -> tuple[int, ...]:
    """Of the output for a token of this shape; vocab: None means tokens come out."""
    return token if vocab is None else (*token, vocab)


class FeedforwardDriver(Driver):
    """One input, one output: a row is an input, and its key is (name, 0)."""

    def __init__(self, model: Any, backend: ArrayBackend) -> None:
        super().__init__(model, backend, "forward", 0)

    def call(self, pieces: Sequence[Span]) -> Outputs:
        with self.backend.guard():
            x = self.put(np.stack([self.of(p.row) for p in pieces]))
            with self.watching({"x": x}):
                out = one_array(self.backend, self.wait(self.model.forward(x)))
            shape = (None,) * max(getattr(out, "ndim", 1) - 1, 0)
            host = self.host(check_output(out, self.backend, (len(pieces), *shape), self.name))
        return {(p.row, 0): row for p, row in zip(pieces, host, strict=True)}


class CachedDriver(Driver):
    """Level 2. longest: tokens of the longest row.

    stray: places of the cache that a call has written to though they are not its own. moved: layers with a state that
    some call has changed.
    """

    vocab: int | None

    def __init__(
        self, model: Any, backend: ArrayBackend, vocab: int | None, *, longest: int, rows: int, dtype: str
    ) -> None:
        super().__init__(model, backend, "step", rows)
        self.vocab, self.spec = vocab, list[Any](model.cache_spec())
        self.paged: list[int] = [i for i, layer in enumerate(self.spec) if isinstance(layer, Paged)]
        self.width: int = -(-longest // BLOCK) if self.paged else 0
        limits = Limits(rows, longest, longest, longest, rows * self.width + 1, BLOCK)
        self.memory: Memory = Memory(self.spec, backend, limits, dtype)
        self.states: list[int] = self.memory.states
        self.step: Callable[..., Any] = backend.compile(model.step)
        self.shapes: CallShapes = backend.shapes
        self.stray: dict[str, None] = {}
        self.moved: set[int] = set()

    def fresh(self, *, scattered: bool = False, shift: int = 0, **layout: Any) -> CacheSession:
        """scattered: the blocks of a row lie in no order. shift: first persistent row that is given away."""
        blocks = np.arange(1, self.rows * self.width + 1, dtype=np.int32)
        if scattered:
            blocks = np.random.default_rng(0).permutation(blocks)
        return CacheSession(self, blocks.reshape(self.rows, self.width), shift)


class CacheSession:
    """A cache and the requests in it. table [rows, blocks]; place: the row that each request holds."""

    driver: CachedDriver
    table: HostArray
    shift: int

    def __init__(self, driver: CachedDriver, table: HostArray, shift: int) -> None:
        d = self.driver = driver
        self.table, self.shift = table, shift
        self.place: dict[str, int] = {}
        d.memory.make()
        self.cache: list[Any] = d.memory.cache

    def call(self, pieces: Sequence[Span], *, times: int = 1, slack: bool = False) -> Outputs:
        """times: make each call so often. slack: with padding tokens and rows."""
        for p in pieces:
            self.place.setdefault(p.row, (len(self.place) + self.shift) % self.driver.rows)
        out: Outputs = {}
        for part in self._calls(list(pieces)):
            out |= self._step(sorted(part, key=lambda p: p.end - p.start != 1), times, slack)  # as in a plan
        return out

    def _calls(self, pieces: list[Span]) -> Iterator[list[Span]]:
        """The calls that an engine makes of this: one, but where rows need equally many tokens, or a call holds few."""
        d = self.driver
        most = d.shapes.sizes[0] if d.shapes.sizes else None
        while pieces:
            longest = max(p.end - p.start for p in pieces)
            size = longest if most is None else 1 if d.states else most
            if d.states:  # a state cannot skip padding: equally many tokens a row, a power of two
                size = 1 << (min(longest, size).bit_length() - 1)
            room = most or sum(p.end - p.start for p in pieces)
            call, left = [], []
            for p in pieces:
                n = min(p.end - p.start, size, room)
                if not n or (d.states and n < size):
                    left.append(p)
                    continue
                room -= n
                wanted, end = p.end - 1 if p.at is None else p.at, p.start + n
                call.append(Span(p.row, p.start, end, p.emit and p.start <= wanted < end, wanted))
                if end < p.end:
                    left.append(Span(p.row, end, p.end, p.emit and wanted >= end, wanted))
            yield call
            pieces = left

    def _step(self, pieces: Sequence[Span], times: int, slack: bool) -> Outputs:
        d = self.driver
        packed = self._packed(pieces)
        tokens = np.concatenate([d.of(p.row)[p.start : p.end] for p in pieces])
        n = len(pieces)
        if d.shapes.compiled or d.shapes.sizes:
            packed = self._padded(packed, slack)
            rest = np.zeros((len(packed.pos) - len(tokens), *tokens.shape[1:]), tokens.dtype)
            tokens = np.concatenate([tokens, rest])
        host = {"tok": tokens, **{f.name: getattr(packed, f.name) for f in fields(Packed)}}
        names = {row: name for name, row in self.place.items()}
        d.brought([names.get(row, "") for row in range(d.rows)])
        host |= d.beside.fields(packed)
        inputs = {name: d.put(a) for name, a in d.beside.inputs(packed.row, packed.row[packed.seg], packed.pos).items()}
        with d.backend.guard():
            x = StepInputs(**{name: d.put(a) for name, a in host.items()}, inputs=inputs or None)
            states = self._gathered(packed)
            shown = {f"x.{name}": getattr(x, name) for name in host}
            with d.watching(shown):
                for _ in range(times):
                    given = [states.get(i, c) for i, c in enumerate(self.cache)]
                    out, new = d.step(d.model.params, given, x)
                    row = logits_shape(d.vocab, tokens.shape[1:])
                    kind = "logits" if d.vocab is not None else tokens.dtype.kind
                    outputs = d.compared(out, (len(packed.last), *row), kind, tokens[packed.last])
                    if not isinstance(new, (list, tuple)) or len(new) != len(d.spec):
                        got = f"{len(new)} of them" if isinstance(new, (list, tuple)) else type(new).__name__
                        many = f"all {len(d.spec)} layers"
                        raise Found(f"{d.name} must return the new cache of {many} in a list; got {got}.")
                    self.cache = [old if i in states else new[i] for i, old in enumerate(self.cache)]
                self._scattered(packed, states, new, n)
        emitting = [p for p in pieces if p.emit]
        return {
            (p.row, (p.end if p.at is None else p.at + 1)): outputs[i].reshape(outputs.shape[1:])
            for i, p in enumerate(emitting)
        }

    def _packed(self, pieces: Sequence[Span]) -> Packed:
        given = [(self.place[p.row], p.start, p.end, p.end - 1 if p.at is None else p.at) for p in pieces]
        row, start, end, at = (np.array(column, np.int32) for column in zip(*given, strict=True))
        emit = np.array([p.emit for p in pieces])
        packed = lower(row, start, end - start, emit, self.table, BLOCK, tiles=self.driver.shapes.tiles)
        return replace(packed, last=(packed.cu_q[:-1] + at - start)[emit].astype(np.int32))

    def _padded(self, packed: Packed, slack: bool) -> Packed:
        """In few shapes, as for a backend that compiles for each; slack: in others, with still more padding."""
        d, q = self.driver, np.diff(packed.cu_q)
        tile = d.shapes.tiles[int(q.max()) > 1]
        rows, outputs = d.rows + 3 * slack, None
        if d.shapes.sizes:
            rows = tokens = outputs = d.shapes.sizes[0]
        elif d.states:
            tokens = rows * int(q[0])
        elif q.max() == 1:
            tokens = rows
        else:
            tokens = max(2 * tile, 1 << (len(packed.pos) - 1).bit_length()) << slack
        return pad(packed, fixed(tokens, rows, d.width, tile, outputs), trash_row=d.rows)

    def _gathered(self, packed: Packed) -> dict[int, Any]:
        """The states of this call's rows by layer, zeros for rows that start."""
        d, states = self.driver, [self.cache[i] for i in self.driver.states]
        if not states:
            return {}
        held, started = d.backend.put(packed.row.copy()), d.backend.put(packed.start > 0)
        return dict(zip(d.states, d.memory.gather(states, held, started), strict=True))

    def _scattered(self, packed: Packed, given: dict[int, Any], new: Any, n: int) -> None:
        d, b = self.driver, self.driver.backend
        for i, old in given.items():
            check_output(new[i], b, tuple(old.shape), f"{d.name} (state of layer {i})")
            if not np.array_equal(b.get(b.float32(new[i]))[:n], b.get(b.float32(old))[:n], equal_nan=True):
                d.moved.add(i)
            self.cache[i] = b.scatter_rows(self.cache[i], b.put(packed.row.copy()), new[i])

    def written(self) -> dict[str, HostArray]:
        """For each array of keys or values whose layout the backend knows, [blocks * block size, ...] on the host."""
        out = {}
        for i in self.driver.paged:
            for half, name in zip(self.driver.backend.positions(self.cache[i]), ("keys", "values"), strict=False):
                if half.shape[:2] == (self.table.size + 1, BLOCK):
                    out[f"layer {i}, {name}"] = half.reshape(half.shape[0] * BLOCK, -1)
        return out

    def slots(self, row: str, n: int) -> HostArray:
        """Where the first n positions of a request lie."""
        at = np.arange(n)
        slots: HostArray = self.table[self.place[row]][at // BLOCK] * BLOCK + at % BLOCK
        return slots
