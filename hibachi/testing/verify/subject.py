"""A model under judgement: the rows that it is tried on, what it says to each alone, and how outputs are compared."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from hibachi.backend.array_backend import ArrayBackend, HostArray
from hibachi.backend.discover import resolve
from hibachi.backend.infer import backend_of
from hibachi.engine.build import codebooks_of
from hibachi.engine.kinds import kind_of
from hibachi.engine.ladder import ModelKind
from hibachi.engine.runners.depth import sizes_of
from hibachi.engine.runners.extra_inputs import check_taken, declared_by
from hibachi.engine.runners.stops import as_token
from hibachi.errors import ConfigError, InvalidRequest
from hibachi.testing.verify import prompts
from hibachi.testing.verify.drive import CachedDriver, Driver, FeedforwardDriver, Found, Outputs, Span, WholeDriver
from hibachi.testing.verify.engines import Asked, Engines
from hibachi.testing.verify.ownpasts import OwnDriver

KINDS = {
    ModelKind.FORWARD: "level 0, tokens out",
    ModelKind.LOGITS: "level 1, logits out",
    ModelKind.OWN_CACHE: "between levels 1 and 2, a cache of its own",
    ModelKind.PAGED: "level 2, a step over a cache",
    ModelKind.FEEDFORWARD: "feed-forward",
}
METHODS = {ModelKind.FORWARD: ("forward",), ModelKind.LOGITS: ("logits",), ModelKind.OWN_CACHE: ("step", "encode")}
MAIN, LONG, STEPS = 10, 23, 3  # tokens that most prompts have beyond the shortest, a long one, and after the prompt
LEAST = 8 + STEPS  # tokens beyond the shortest prompt, for all trials to have room
SIZES, CHUNKS, PADS = (2, 3, 8), (1, 3, 7), (1, 3, 8)
TOLERANCE = {"bfloat16": 5e-2, "float16": 1e-2}  # where another is not asked for; of other dtypes:
ROUNDING = 1e-4
NAMES, FILLS = "abcdef", 3
ANSWER = 6  # tokens that an engine is asked for, where there is room
CLOSE = 1e-3  # what its log-probabilities and real values may differ by at least

Rows: TypeAlias = Sequence[tuple[str, int]]  # (name, tokens of the prompt)
Variant: TypeAlias = tuple[str, Callable[[], Outputs]]  # what is done, in words
State: TypeAlias = Literal["equal", "alike", "rounding", "differs", "failed", "skipped"]


class Difference(NamedTuple):
    """Of one number, in one output of a row: `got` where the row alone had `want`.

    size: relative to the largest output of the row alone. seen: tokens that the model had seen of the row. step: which
    new token of the request it is, from 1; 0 means of a feed-forward model. place: index in the output.
    """

    size: float
    row: str
    seen: int
    step: int
    place: tuple[int, ...]
    got: float
    want: float

    def told(self) -> str:
        place = f", output {', '.join(map(str, self.place))}" if self.place else ""
        step = f", new token {self.step}" if self.step else ""
        return f"row {self.row}{step}{place}: {self.got:.6g}, alone {self.want:.6g}"


@dataclass(slots=True)
class TrialResult:
    """What came of a trial.

    state: "alike" says of answers of engines that they are equal up to rounding.
    worst: the largest difference of all variants. first: the first that is a fault, or else the first there is, and in
    which variant. why: it was skipped, or what was raised.
    """

    key: str
    title: str
    state: State = "equal"
    worst: float = 0.0
    first: Difference | None = None
    variant: str = ""
    why: str = ""
    error: BaseException | None = None
    bad: list[str] = field(default_factory=list)  # all variants that are faulty
    exact: bool = False  # rounding is a fault, too

    @property
    def wrong(self) -> bool:
        """By more than rounding."""
        return self.state in ("differs", "failed")

    @property
    def faulty(self) -> bool:
        return self.wrong or (self.exact and self.state == "rounding")

    def fail(self, variant: str, why: str, error: BaseException | None = None) -> None:
        if self.state != "failed" and not self.bad:
            self.variant = variant
        self.bad.append(variant)
        if self.state != "failed":
            self.state, self.why, self.error = "failed", why, error


class Subject:
    """A model, and what it takes to try it; the arguments are those of the command.

    backend: None means the one that the model names or that its arrays are of, else NumPy.
    examples: prompts (S, *tok), or inputs of a feed-forward model; None means the model's own, else ids are drawn below
    vocab_size. feedforward: `forward` takes one input, not a sequence; None means if the model has `example_inputs`.
    padding: may rows be padded? padding_token: with what; None means several things, if the model is told the lengths.
    tolerance: how large a difference may be to count as rounding, relative to the largest output; None means by dtype.
    exact: no difference may be.

    Raises ConfigError.
    """

    model: Any
    name: str
    exact: bool
    seed: int
    sizes: tuple[int, ...]
    chunks: tuple[int, ...]

    def __init__(
        self,
        model: Any,
        backend: ArrayBackend | None = None,
        *,
        name: str | None = None,
        examples: Any = None,
        vocab_size: int | None = None,
        feedforward: bool | None = None,
        padding: bool = True,
        padding_token: Any = None,
        max_model_len: int | None = None,
        tolerance: float | None = None,
        exact: bool = False,
        dtype: str | None = None,
        sizes: Sequence[int] = SIZES,
        chunks: Sequence[int] = CHUNKS,
        seed: int = 0,
    ) -> None:
        self.model, self.name, self.exact, self.seed = model, name or type(model).__name__, exact, seed
        feedforward = hasattr(model, "example_inputs") if feedforward is None else feedforward
        self.kind: ModelKind = ModelKind.FEEDFORWARD if feedforward else kind_of(model)
        self.backend: ArrayBackend = subject_backend(backend, model)
        if not feedforward:
            paged = self.kind is ModelKind.PAGED
            check_taken(model, declared_by(model), *METHODS.get(self.kind, ()), fields=paged)
        self.sizes, self.chunks = tuple(sizes), tuple(chunks)
        if not self.sizes or min(self.sizes) < 2 or not self.chunks or min(self.chunks) < 1:
            raise ConfigError(f"Batch sizes must be >= 2 and chunks >= 1; got {list(sizes)} and {list(chunks)}.")
        self.dtype: str = dtype or (found if isinstance(found := getattr(model, "dtype", None), str) else "float32")
        self.tolerance: float = tolerance if tolerance is not None else TOLERANCE.get(self.dtype, ROUNDING)
        size = getattr(model, "vocab_size", None)
        self.vocab: int | None = size if self.kind.level else None
        self.ids: int | Any | None = None if feedforward else vocab_size or size
        limit = max_model_len or getattr(model, "max_model_len", None)
        self.limit: int | None = limit if isinstance(limit, int) else None
        found = self._given(examples)
        self.drawn_ids: bool = not found  # there are no examples, whose order may matter
        self._sized(min(map(len, found)) if found and self.kind.has_tokens else 1, limit)
        self.driver: Driver = self._driver()
        self.base: Outputs = {}  # what each row gets alone
        self.changed: list[str] = []  # what the model keeps and calls have changed, once all trials are done
        self._put_rows(found)
        if isinstance(self.driver, WholeDriver) and padding:
            self.driver.fills = self._fills(padding_token)

    def _sized(self, shortest: int, limit: Any) -> None:
        """How long prompts are. None is shorter than the shortest example: the model may need so many tokens."""
        self.short = shortest
        room = (limit if isinstance(limit, int) else shortest + LONG + STEPS) - STEPS - shortest
        if room < LEAST - STEPS:
            raise ConfigError(
                f"To verify {self.name} takes a max_model_len >= {shortest + LEAST} with prompts of {shortest} or more "
                f"tokens; got {limit}."
            )
        self.long: int = shortest + min(LONG, room)
        self.main: int = shortest + min(MAIN, max(STEPS + 1, -(-room // 2)))
        self.half: int = shortest + STEPS + 1
        if self.half + STEPS >= self.main:
            self.half = 0  # there is no room for it

    def _driver(self) -> Driver:
        if not self.kind.has_tokens:
            return FeedforwardDriver(self.model, self.backend)
        rows = max(*self.sizes, 3) + 1
        if not self.kind.has_past:
            return WholeDriver(self.model, self.backend, self.vocab, self.kind, rows=rows)
        if self.kind is ModelKind.OWN_CACHE:
            return OwnDriver(self.model, self.backend, self.vocab, rows=rows)
        return CachedDriver(
            self.model, self.backend, self.vocab, longest=self.long + STEPS, rows=rows, dtype=self.dtype
        )

    # ---- rows --------------------------------------------------------------------------------------------------

    def _given(self, examples: Any) -> list[HostArray]:
        """The examples there are; none: ids are drawn."""
        how = prompts.HOW_INPUTS if not self.kind.has_tokens else prompts.HOW
        if examples is None:
            examples = getattr(self.model, "example_inputs" if not self.kind.has_tokens else "example_prompts", None)
        if examples is None:
            if not isinstance(self.ids, int) or self.ids < 2:
                raise ConfigError(f"There is nothing to try {self.name} on. {how}.")
            return []
        found = prompts.given(examples() if callable(examples) else examples, self.backend, how)
        return found if self.kind.has_tokens else [f for f in found if f.shape == found[-1].shape]

    def _put_rows(self, examples: list[HostArray]) -> None:
        """Rows of tokens under names: all that a trial needs of a prompt and what comes after it."""
        rows = self.driver.tokens
        for i, name in enumerate(NAMES[: len(examples) or None]):
            if examples:
                rows[name] = self._cast(examples[i][: self.long + STEPS] if self.kind.has_tokens else examples[i])
            else:
                rows[name] = self._cast(self.drawn(self.long + STEPS, self.seed + i))
        if self.kind.has_tokens and examples:
            self._grow()
        self.names: list[str] = list(self._different())
        if len(self.names) < 2:
            what = "of one shape" if not self.kind.has_tokens else f"that differ in their first {self.main} tokens"
            how = prompts.HOW_INPUTS if not self.kind.has_tokens else prompts.HOW
            raise ConfigError(f"To see whether rows influence each other takes two examples {what}. {how}.")

    def drawn(self, n: int, seed: int) -> HostArray:
        """n random tokens of ids."""
        codebooks = codebooks_of(self.model) if self.vocab is not None else None
        ids = prompts.draw(self.ids or 0, n * (codebooks or 1), seed)
        return ids if codebooks is None else ids.reshape(n, codebooks) % sizes_of(self.model)

    def _cast(self, tokens: HostArray) -> HostArray:
        """As an engine does."""
        if self.vocab is None:
            return tokens
        codebooks = codebooks_of(self.model)
        if (
            tokens.dtype.kind not in "iu"
            or tokens.shape[1:] != (() if codebooks is None else (codebooks,))
            or not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab
        ):
            raise ConfigError(f"Examples must be token ids from 0 to {self.vocab - 1}; got {prompts_shown(tokens)}.")
        return tokens.astype(np.int32)

    def _different(self) -> Iterable[str]:
        rows, n = self.driver.tokens, self.main if self.kind.has_tokens else None
        for i, name in enumerate(rows):
            if not any(prompts.same(rows[name][:n], rows[other][:n]) for other in list(rows)[:i]):
                yield name

    def _grow(self) -> None:
        """Examples become as long as a trial needs them, by what the model says to them.

        A model that fails at that gets what it said last again and again: it will fail the first trial.
        """
        rows = self.driver.tokens
        for name in list(rows):
            session, start = self.driver.fresh(), 0
            while len(rows[name]) < self.long + STEPS:
                end = len(rows[name])
                try:
                    out = session.call([Span(name, start, end)])[name, end]
                    if (depth := self.driver.depth) is not None:
                        out = np.array([each.argmax() for each in np.split(out, np.cumsum(depth.sizes)[:-1])])
                    elif self.vocab is not None:
                        out = out.argmax(axis=-1)
                    token = np.asarray(out)
                except Exception:
                    token = rows[name][-1]
                rows[name] = np.concatenate([rows[name], token[None].astype(rows[name].dtype)])
                start = end

    def _fills(self, token: Any) -> list[HostArray]:
        driver, first = self.driver, self.driver.tokens["a"]
        if token is not None:
            try:
                return [as_token(token, first.shape[1:], first.dtype, "padding token")[None]]
            except InvalidRequest as e:
                raise ConfigError(str(e)) from None
        if not isinstance(driver, WholeDriver) or not driver.step.takes_lengths:
            return []
        seen = np.concatenate([driver.tokens[name] for name in self.names])
        fills = [np.zeros_like(first[:1])]
        for token in seen:
            if len(fills) < FILLS and not any(np.array_equal(token, fill[0]) for fill in fills):
                fills.append(token[None])
        return fills

    def others(self, n: int) -> list[str]:
        """n rows that are not "a"; where there are too few, some are other requests with the same tokens."""
        others = self.names[1:]
        return [name if i < len(others) else f"{name}#{i}" for i, name in zip(range(n), others * n, strict=False)]

    # ---- requests ----------------------------------------------------------------------------------------------

    def prompt(self, row: str, n: int) -> list[list[Span]]:
        """The calls of a request for itself: the prompt of n tokens, then its next ones, each in a call."""
        if not self.kind.has_tokens:
            return [[Span(row, 0, 0)]]
        return [[Span(row, 0, n)], *([Span(row, n + i, n + i + 1)] for i in range(STEPS))]

    def alone(self, row: str = "a", n: int | None = None, **how: Any) -> Outputs:
        return self.alone_in(self.driver.fresh(), row, n, **how)

    def alone_in(self, session: Any, row: str = "a", n: int | None = None, **how: Any) -> Outputs:
        out: Outputs = {}
        for call in self.prompt(row, self.main if n is None else n):
            out |= session.call(call, **how)
        return out

    def call(self, *pieces: Span, **how: Any) -> Outputs:
        """One call, with an empty cache."""
        out: Outputs = self.driver.fresh().call(pieces, **how)
        return out

    def together(self, rows: Rows) -> Outputs:
        """All at once: each call has a piece of every row."""
        session, out = self.driver.fresh(), Outputs()
        for calls in zip(*(self.prompt(*row) for row in rows), strict=True):
            out |= session.call([piece for call in calls for piece in call])
        return out

    # ---- comparison --------------------------------------------------------------------------------------------

    def learn(self, row: str, n: int) -> Outputs:
        """What this row gets alone, which all that comes later is compared with. Raises Found if it is not finite."""
        out = self.alone(row, n)
        for (_, seen), values in out.items():
            if values.dtype.kind in "fc" and np.isnan(values).any():
                raise Found(f"The output for row {row} after {seen} tokens is NaN.")
        self.base |= out
        return out

    def logits(self) -> list[HostArray]:
        """All that rows got alone, [n, ids]; where frames are drawn in depth, of each codebook."""
        assert self.vocab is not None
        every = np.stack([*self.base.values()])
        if self.driver.depth is None:
            return [every.reshape(-1, self.vocab)]
        return np.split(every, np.cumsum(self.driver.depth.sizes)[:-1], axis=1)

    def compare(self, got: Outputs) -> tuple[float, Difference | None]:
        """The largest difference to what the rows got alone, and the first that is more than rounding, or else the
        first there is."""
        worst, first, fault = 0.0, None, None
        for (row, seen), values in got.items():
            base = self.base[row.partition("#")[0], seen]
            if values.shape != base.shape:
                raise Found(f"The output of row {row} has shape {values.shape}; alone {base.shape}.")
            d = difference(row, seen, self._step(seen), values, base)
            if d is None:
                continue
            worst, first = max(worst, d.size), first or d
            if fault is None and not self.rounding(d.size, values):
                fault = d
        return worst, fault or first

    def _step(self, seen: int) -> int:
        """Which new token of its request this is, from the number of tokens seen."""
        if not self.kind.has_tokens:
            return 0
        return next((seen - n + 1 for n in (self.long, self.main, self.half, self.short) if n and seen >= n), 0)

    def rounding(self, size: float, values: HostArray) -> bool:
        return values.dtype.kind in "fc" and size <= self.tolerance

    def equal(self, a: Outputs, b: Outputs) -> bool:
        """The same outputs, up to rounding?"""
        pairs = list(zip(a.values(), b.values(), strict=True))
        found = [difference("", 0, 0, x, y) for x, y in pairs if x.shape == y.shape]
        return len(found) == len(pairs) and all(
            d is None or self.rounding(d.size, x) for d, (x, _) in zip(found, pairs, strict=True)
        )

    def describe(self) -> list[str]:
        library = ", ".join(self.backend.versions().values())
        if not self.kind.has_tokens:
            rows = f"{len(self.names)} inputs"
        else:
            rows = f"{len(self.names)} rows of tokens, prompts of {self.short} to {self.long}, {STEPS} new tokens each"
        limit = (
            "no difference is allowed" if self.exact else f"rounding is up to {self.tolerance:g} of the largest output"
        )
        return [f"{self.name}: {KINDS[self.kind]}", f"on {self.backend.name} ({library}); {rows}; {limit}"]

    @cached_property
    def engines(self) -> Engines:
        """For what single calls do not show; made when these are done, as differences are relative to their outputs."""
        rows, names = self.driver.tokens, itertools.cycle(self.names)
        lengths = (self.main, self.main, self.short, self.long, self.half or self.main, self.short + 2)
        asked = [rows[name][:n] for n, name in zip(lengths, names, strict=False)]
        if not self.kind.has_tokens:
            asked = [rows[name] for name in self.names]
        distinct = [p for i, p in enumerate(asked) if not any(prompts.same(p, other) for other in asked[:i])]
        tolerance = self.tolerance
        if self.vocab is not None:  # of a log-probability: that of two logits
            largest = max((float(np.abs(v[np.isfinite(v)]).max(initial=0)) for v in self.base.values()), default=1.0)
            tolerance *= 2 * largest
        new = ANSWER if self.limit is None else min(ANSWER, self.limit - self.long)
        pads = self.driver.fills if isinstance(self.driver, WholeDriver) else []
        answers = Asked(distinct, new if self.kind.has_tokens else 1, pads)
        return Engines(self.model, self.backend, self.kind, self.vocab, answers, max(CLOSE, tolerance))

    def close(self) -> None:
        self.driver.close()
        if "engines" in self.__dict__:
            self.engines.close()


def subject_backend(backend: ArrayBackend | None, model: Any) -> ArrayBackend:
    """The backend with which a model is judged; NumPy's if nothing tells. Raises ConfigError."""
    found = backend_of(backend, model) or resolve("numpy")
    if not isinstance(found, ArrayBackend):
        raise ConfigError(f"Models are judged on a hibachi.ArrayBackend; {found!r} has the nine operations only.")
    return found


def difference(row: str, seen: int, step: int, got: HostArray, want: HostArray) -> Difference | None:
    """The place where two outputs of one shape differ most; None if they are equal, NaN and infinities included."""
    if got.dtype.kind == "b":
        got, want = got.astype(int), want.astype(int)
    unequal = (got != want) & ~((got != got) & (want != want))
    if not unequal.any():
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        finite = np.abs(want[np.isfinite(want)])
        scale = float(finite.max()) if finite.size else 1.0
        off = np.where(unequal, np.abs(got.astype(np.float64) - want), 0.0) / (scale or 1.0)
    off = np.where(np.isnan(off), math.inf, off)
    place = tuple(int(i) for i in np.unravel_index(int(off.argmax()), off.shape))
    return Difference(float(off[place]), row, seen, step, place, float(got[place]), float(want[place]))


def prompts_shown(tokens: HostArray) -> str:
    return f"{tokens.dtype} of shape {tokens.shape}, {tokens.ravel()[:6].tolist()}"


def prompts_in(path: Path) -> list[Any]:
    """Prompts of a text file: a line of ids, or a list in JSON, for each. Raises ConfigError."""
    out = []
    for i, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            out.append(json.loads(line) if "[" in line else [int(part) for part in line.replace(",", " ").split()])
        except ValueError:
            raise ConfigError(f"{path}, line {i}: expected token ids, or a list in JSON; got {line!r:.60}.") from None
    return out
