"""How the cost of decoding grows with the rows and with the context, and where it jumps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.bench.profile import Profile
from hibachi.engine.autoregressive import AutoregressiveBatchInference
from hibachi.request import SamplingParams

ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128)
CONTEXTS = (128, 256, 512, 1024, 2048)
FULL_ROWS, FULL_CONTEXTS, FULL_ROUNDS = (*ROWS, 129, 256), (*CONTEXTS, 4096), 3
SEVERAL = 4  # rows, beside a single one, that all contexts are measured with
CLIFF = 0.2


@dataclass(frozen=True, slots=True)
class Point:
    """Decode steps at this many rows and this much context. seconds: the median of a step."""

    rows: int
    context: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.seconds


@dataclass(frozen=True, slots=True)
class Cliff:
    """From one size to the next the cost rises too much: `factor` times what it should be."""

    along: str
    before: Point
    after: Point
    factor: float

    def __str__(self) -> str:
        a, b = (self.before, self.after)
        if self.along == "rows":
            return (
                f"{a.rows} -> {b.rows} rows at context {a.context}: {a.tokens_per_second:,.0f} -> "
                f"{b.tokens_per_second:,.0f} tokens/s"
            )
        return (
            f"context {a.context} -> {b.context} with {a.rows} rows: a step takes {1e3 * b.seconds:.2f} ms, "
            f"{self.factor:.2f} times what the contexts around it say"
        )


def measure(
    engine: AutoregressiveBatchInference,
    vocab_size: int,
    *,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    new_tokens: int = 16,
    rounds: int = 1,
    seed: int = 0,
    told: Callable[[Point], Any] = lambda point: None,
) -> list[Point]:
    """All rows at the shortest context, and all contexts with the fewest rows and with SEVERAL, or the most below it.

    The rows of a step share nothing. Each has one prompt for all sizes, cut to the context, so that an engine with a
    prefix cache computes it once; what is timed are the steps that decode. What the engine has no room for is left out.
    Rounds go through all sizes one after the other, so that other work on the machine meets them alike; each size has
    the best of its medians. told: called with each point of the last round.
    """
    room = engine.max_model_len - new_tokens
    contexts = sorted(c for c in contexts if c <= room)
    rows = sorted(r for r in rows if r <= engine.max_num_seqs)
    if not contexts or not rows:
        return []
    sizes = [(r, contexts[0]) for r in rows]
    for r in sorted({rows[0], next((r for r in rows if r >= SEVERAL), rows[-1])}):
        sizes += [(r, c) for c in contexts[1:]]
    rng, profile = np.random.default_rng(seed), Profile(engine)
    texts = rng.integers(0, vocab_size, (rows[-1], contexts[-1] - 1), np.int32)
    best: dict[tuple[int, int], float] = {}
    for turn in range(rounds):
        for r, c in sizes:
            profile.clear()
            params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
            for stream in [engine.run(text[: c - 1], params) for text in texts[:r]]:
                for _ in stream:
                    pass
            times = [s.total for s in profile.steps if s.rows == s.tokens == r]
            if times:
                best[r, c] = min(statistics.median(times), best.get((r, c), np.inf))
            if turn == rounds - 1 and (r, c) in best:
                told(Point(r, c, best[r, c]))
    return [Point(*size, seconds) for size, seconds in best.items()]


def cliffs(points: Sequence[Point], most: float = CLIFF) -> list[Cliff]:
    """Where more rows give less tokens a second by more than a fifth; where a step is slower by more than a fifth than
    on the line through the contexts before it, or than in proportion where there is only one before."""
    found = []
    for context in sorted({p.context for p in points}):
        line = sorted((p for p in points if p.context == context), key=lambda p: p.rows)
        for a, b in pairwise(line):
            factor = a.tokens_per_second / b.tokens_per_second
            if factor > 1 / (1 - most):
                found.append(Cliff("rows", a, b, factor))
    for rows in sorted({p.rows for p in points}):
        line = sorted((p for p in points if p.rows == rows), key=lambda p: p.context)
        for i in range(1, len(line)):
            a, b = line[i - 1], line[i]
            expected = a.seconds * b.context / a.context
            if i > 1:
                z = line[i - 2]
                slope = max(0.0, (a.seconds - z.seconds) / (a.context - z.context))
                expected = min(expected, a.seconds + slope * (b.context - a.context))
            if b.seconds > expected * (1 + most):
                found.append(Cliff("context", a, b, b.seconds / expected))
    return found


def as_json(points: Sequence[Point]) -> list[dict[str, Any]]:
    return [asdict(p) | {"tokens_per_second": p.tokens_per_second} for p in points]
