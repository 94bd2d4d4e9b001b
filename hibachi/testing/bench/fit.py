"""Fits a `StepTime` to a model: runs loads of many sizes through its engine, and reads the times off its recorder."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations, product
from typing import Any

import numpy as np

from hibachi.common.phases import phase
from hibachi.engine.autoregressive import AutoregressiveBatchInference
from hibachi.engine.simulator.steptime import StepTime
from hibachi.errors import ConfigError
from hibachi.request import SamplingParams

_NAMES = tuple(f.name for f in fields(StepTime))
NEW_TOKENS = 12  # of each request that is measured
_SMALLEST = 1e-3  # of a prediction's relative error: below, further digits are noise


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """n measured steps. what: [n, 5], in the order of `StepTime`: 1, tokens, rows, positions, pairs. seconds: [n]."""

    what: Any
    seconds: Any

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True, slots=True)
class StepTimeFit:
    """A step time, and how far it is off: |predicted - measured| / measured over all steps."""

    time: StepTime
    steps: int
    median_error: float
    p90_error: float

    def as_json(self, **about: Any) -> dict[str, Any]:
        """What `hibachi sim --step-time` reads; about: what else is worth knowing."""
        residuals = {"median": self.median_error, "p90": self.p90_error}
        return {"seconds": asdict(self.time), "steps": self.steps, "relative_error": residuals, **about}


def measure(
    engine: AutoregressiveBatchInference,
    vocab_size: int,
    *,
    rows: Sequence[int],
    contexts: Sequence[int],
    new_tokens: int = NEW_TOKENS,
    rounds: int = 2,
    seed: int = 0,
) -> Samples:
    """Steps of each number of rows with prompts of each length, and of prompts that join rows that decode.

    The engine must be idle. The first round, in which libraries compile and memory is touched, is not counted. Raises
    ConfigError if nothing of this fits into the engine.
    """
    rng = np.random.default_rng(seed)
    longest = engine.max_model_len - new_tokens
    sizes = [(r, c) for r in rows for c in contexts if r <= engine.max_num_seqs and c <= longest]
    if not sizes:
        raise ConfigError(
            f"Nothing to measure: expected contexts up to {longest} (max_model_len less {new_tokens} new tokens) and "
            f"rows up to {engine.max_num_seqs}; got contexts {list(contexts)} and rows {list(rows)}."
        )
    found: list[tuple[list[float], float]] = []
    told = phase("measuring steps", (rounds + 1) * len(sizes), "loads")
    with told:
        for i, (turn, (r, c)) in enumerate(product(range(rounds + 1), sizes)):
            told.update(i, f"measuring steps: {r} rows of {c} tokens" if turn else "running each load once, uncounted")
            began = time.monotonic()
            streams = [_start(engine, rng.integers(0, vocab_size, c), new_tokens) for _ in range(r)]
            if r > 1:  # one more prompt when they decode
                next(streams[-1], None)
                streams.append(_start(engine, rng.integers(0, vocab_size, c), 2))
            for stream in streams:
                for _ in stream:
                    pass
            if turn:
                found += _steps(engine.dump()["events"], began)
    what, seconds = zip(*found, strict=True)
    return Samples(np.array(what), np.array(seconds))


def _start(engine: AutoregressiveBatchInference, prompt: Any, new_tokens: int) -> Any:
    params = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True)
    return engine.run(prompt.astype(np.int32), params)


def _steps(events: Iterable[dict[str, Any]], since: float) -> list[tuple[list[float], float]]:
    """(what was computed, seconds) of each step that was planned after `since`, from a dump of an engine."""
    out, plan = [], None
    for event in events:
        if event["event"] == "plan":
            plan = event["plan"] if event["now"] >= since else None
        elif event["event"] == "commit" and plan is not None:
            start, q = np.array(plan["start"], float), np.array(plan["q"], float)
            pairs = q * start + q * (q + 1) / 2
            out.append(([1.0, q.sum(), float(len(q)), (start + q).sum(), pairs.sum()], float(event["seconds"])))
            plan = None
    return out


def fit(samples: Samples) -> StepTimeFit:
    """The step time with figures >= 0 whose relative errors have the smallest sum of absolute values.

    Absolute values, not squares: a step that was interrupted by something else does not count for more than another.
    Solved by least squares that are weighted anew until nothing changes. Raises ConfigError for too few samples.
    """
    if len(samples) < len(_NAMES):
        raise ConfigError(f"A fit needs at least {len(_NAMES)} steps; got {len(samples)}.")
    scaled = samples.what / samples.seconds[:, None]  # a prediction over the measurement, which should be 1
    weight = np.ones(len(samples))
    best = np.zeros(len(_NAMES))
    for _ in range(50):
        before = best
        best = _least_squares(scaled * np.sqrt(weight)[:, None], np.sqrt(weight))
        error = np.abs(scaled @ best - 1)
        weight = 1 / np.maximum(error, _SMALLEST)
        if np.allclose(best, before, rtol=1e-6, atol=0):
            break
    found = StepTime(**{name: float(value) for name, value in zip(_NAMES, best, strict=True)})
    return StepTimeFit(found, len(samples), float(np.median(error)), float(np.percentile(error, 90)))


def _least_squares(a: Any, b: Any) -> Any:
    """The x >= 0 that minimises |a x - b|: tries which of the few columns are needed. The smallest set wins a tie."""
    n = a.shape[1]
    size = np.sqrt((a * a).sum(axis=0))
    size[size == 0] = 1.0
    best, least = np.zeros(n), np.inf
    for k in range(1, n + 1):
        for chosen in map(list, combinations(range(n), k)):
            x = np.linalg.lstsq(a[:, chosen] / size[chosen], b, rcond=None)[0]
            if (x < 0).any():
                continue
            rest = float(((a[:, chosen] / size[chosen] @ x - b) ** 2).sum())
            if rest < least * (1 - 1e-9):
                best, least = np.zeros(n), rest
                best[chosen] = x / size[chosen]
    return best
