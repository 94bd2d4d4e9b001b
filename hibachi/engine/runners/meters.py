"""Meters of an engine's steps: histograms and counters, in plain numbers that can be pickled.

One thread writes, without locks. Other threads may read at any time: they see every number as it is or was a moment
ago.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from time import perf_counter

log: logging.Logger = logging.getLogger("hibachi.engine")
WATCHED = 64  # steps of several rows, after which it is judged whether rows of one length meet


def decades(first: float, last: float, steps: Sequence[float] = (1, 2, 3, 5, 7)) -> tuple[float, ...]:
    """Bounds `first`, ... `last`: in each power of ten, these multiples of it."""
    found = [float(f"{step}e{power}") for power in range(-9, 10) for step in steps]  # exact decimals, as they are shown
    return tuple(x for x in found if first <= x <= last)


class Histogram:
    """Counts of values by bounds: value <= bound and above the bound before; the last count is of values above all
    bounds.
    """

    sum: float
    bounds: tuple[float, ...]
    counts: list[int]

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def copy(self) -> Histogram:
        other = Histogram(self.bounds)
        other.counts, other.sum = self.counts.copy(), self.sum
        return other

    def __add__(self, other: Histogram) -> Histogram:
        """The values of both histograms, which have the same bounds."""
        both = Histogram(self.bounds)
        both.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        both.sum = self.sum + other.sum
        return both


ROWS = tuple(2.0**n for n in range(11))  # to 1024
TOKENS = tuple(2.0**n for n in range(15))  # to 16384
KEPT = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)  # proposals
TENTHS = tuple(n / 10 for n in range(1, 11))
STEP_TIME = decades(5e-5, 10)


class Steps:
    """Meters of the steps of one phase. Times are in seconds."""

    __slots__ = ("host", "model", "occupancy", "rows", "seconds", "tokens")

    def __init__(self) -> None:
        self.rows: Histogram = Histogram(ROWS)  # requests in a step
        self.tokens: Histogram = Histogram(TOKENS)  # computed in a step, padding left out
        self.occupancy: Histogram = Histogram(TENTHS)  # rows, as a share of the most that there may be
        self.seconds: Histogram = Histogram(STEP_TIME)
        self.model: Histogram = Histogram(STEP_TIME)  # of these, in the model's forward pass and the sampler
        self.host: Histogram = Histogram(STEP_TIME)  # of these, the rest

    def add(self, rows: int, tokens: int, limit: int, seconds: float, model: float) -> None:
        self.rows.add(rows)
        self.tokens.add(tokens)
        self.occupancy.add(rows / limit)
        self.seconds.add(seconds)
        self.model.add(model)
        self.host.add(max(seconds - model, 0.0))

    def copy(self) -> Steps:
        other = Steps()
        for name in self.__slots__:
            setattr(other, name, getattr(self, name).copy())
        return other


@dataclass(slots=True)
class Proposals:
    """Counters of what one drafter proposes. by_position: how many were kept that were the n-th of their row in a
    step.
    """

    steps: int = 0  # of rows, with proposals
    proposed: int = 0
    accepted: int = 0
    by_position: list[int] = field(default_factory=list)

    def copy(self) -> Proposals:
        return Proposals(self.steps, self.proposed, self.accepted, self.by_position.copy())

    def note(self, proposed: int, accepted: int) -> None:
        self.steps += 1
        self.proposed += proposed
        self.accepted += accepted
        self.by_position += [0] * (accepted - len(self.by_position))
        for i in range(accepted):
            self.by_position[i] += 1


@dataclass(slots=True)
class Drafted:
    """Counters of proposals by the name of who made them, such as "ngram" or "forced"; and of all together."""

    by: dict[str, Proposals] = field(default_factory=dict)

    def copy(self) -> Drafted:
        return Drafted({name: each.copy() for name, each in self.by.copy().items()})

    def note(self, name: str, proposed: int, accepted: int) -> None:
        """A row has computed so many proposals of this drafter, and kept so many."""
        if (own := self.by.get(name)) is None:
            own = self.by[name] = Proposals()
        own.note(proposed, accepted)

    @property
    def steps(self) -> int:
        return sum(each.steps for each in self.by.values())

    @property
    def proposed(self) -> int:
        return sum(each.proposed for each in self.by.values())

    @property
    def accepted(self) -> int:
        return sum(each.accepted for each in self.by.values())

    @property
    def by_position(self) -> list[int]:
        return [sum(kept) for kept in zip_longest(*(each.by_position for each in self.by.values()), fillvalue=0)]

    def kept(self, tokens: int) -> Histogram:
        """How many proposals a row kept in a step, for all steps of rows. tokens: that all rows have got."""
        found, more = Histogram(KEPT), [*self.by_position, 0]
        found.add(0, max(0, tokens - sum(more) - more[0]))  # each such step brings a token of its own
        for n, (at_least, beyond) in enumerate(pairwise(more), 1):
            found.add(n, at_least - beyond)
        return found


@dataclass(slots=True)
class Meters:
    """Meters of all steps. prefill: steps with tokens of prompts (perhaps beside others); decode: steps of one new
    token for each row.

    Where the backend is asynchronous (CUDA, JAX), `model` is the time that the engine spent launching the model and
    waiting for its tokens. With overlapping steps, the host's work meanwhile is hidden behind the device: `host` is
    then how long the host worked, and less than that was lost.
    """

    prefill: Steps = field(default_factory=Steps)
    decode: Steps = field(default_factory=Steps)
    grammars: Histogram = field(default_factory=lambda: Histogram(STEP_TIME))  # seconds to compile one
    drafted: Drafted = field(default_factory=Drafted)
    failed: int = 0  # steps that did not happen
    joined: int = 0  # steps in which requests began beside others that went on
    computed: int = 0  # tokens that the model computed, padding included
    padding: int = 0  # of these, padding
    limit: int = 0  # rows
    block_size: int = 0  # tokens of a cache block
    memory: tuple[int, int] | None = None  # of the device: free and total bytes; None means unknown
    parts: dict[str, float] = field(default_factory=dict)  # seconds of the model's parts, where they are known
    expert_tokens: list[int] = field(default_factory=list)  # computed by each expert of a layer
    utilization: float | None = None  # of the device lately, 0 to 1; likewise

    @property
    def host_share(self) -> float:
        """The share of the steps' time that was spent outside the model and the sampler."""
        seconds = self.prefill.seconds.sum + self.decode.seconds.sum
        return (self.prefill.host.sum + self.decode.host.sum) / seconds if seconds else 0.0

    @property
    def padding_share(self) -> float:
        """The share of the tokens given to the model that was padding."""
        return self.padding / self.computed if self.computed else 0.0


class Tally:
    """Times of a runner's calls in one step: `with tally:` around the model and the sampler."""

    seconds: float
    computed: int
    padding: int

    __slots__ = ("_began", "_shapes", "compiles", "computed", "padding", "seconds")

    def __init__(self) -> None:
        self.seconds, self.computed, self.padding, self._began = 0.0, 0, 0, 0.0
        self.compiles: bool = False  # a call of this step has new shapes, on a backend that compiles each
        self._shapes: set[Hashable] = set()

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += perf_counter() - self._began

    def call(self, tokens: int, wanted: int, shapes: Hashable = None) -> None:
        """Note a call of the model with `tokens` tokens, of which `wanted` are no padding.

        shapes: of its inputs, if the backend compiles a program for each (`CallShapes.compiled`); else None.
        """
        self.computed += tokens
        self.padding += tokens - wanted
        if shapes is not None and shapes not in self._shapes:
            self._shapes.add(shapes)
            self.compiles = True


class Meeting:
    """Warns once where most calls have one row, as rows of one length only share them. name: of the model's method."""

    def __init__(self, name: str) -> None:
        self._name, self._left, self._single = name, WATCHED, 0

    def step(self, sizes: Sequence[int]) -> None:
        """sizes: rows of each call of a step of several rows."""
        self._single += sum(1 if size == 1 else -1 for size in sizes)
        self._left -= 1
        if not self._left and self._single > 0:
            log.warning(
                "%s: most calls have one row, as rows of one length only share them: little is gained by requests that "
                "come together. Let it take `lengths`, and make positions and a mask from them (docs/models.md)",
                self._name,
            )
