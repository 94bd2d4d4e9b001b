"""The work that engines are compared on: prompts of random token ids, lengths of answers, times of arrival.

W1: 64 requests at once, prompts of about 79 tokens, answers of about 69 (log-normal, as real ones are).
W2: 64 at once that share their first 512 tokens, 16 of their own each, 32 new: first with nothing in the prefix cache
(cold), then the same once more (warm), then without a prefix cache (off).
W3: 64 like those of W1 that come one by one, with exponential times between them (a Poisson process).
W4: one request, 128 tokens in, 128 out.
W5: 16 at once, 1,024 tokens in, 16 out: the time of prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from hibachi.errors import ConfigError
from hibachi.testing.bench.work import TimedRequest
from hibachi.testing.bench.work import read as read

NAMES = ("W1", "W2", "W3", "W4", "W5")
AT_ONCE = tuple(name for name in NAMES if name != "W3")
_FIRST_ID = 3  # smaller ones are often special


def make(name: str, vocab_size: int, *, seed: int = 0, turn: int = 0, requests: int = 64) -> list[TimedRequest]:
    """The work of that name, one of `NAMES`.

    The lengths and times depend on the seed alone; the token ids also on the turn, so that no prefix cache knows the
    prompts of another turn. requests: how many (W4: always one, W5: 16). Raises ConfigError.
    """
    if name not in NAMES:
        raise ConfigError(f"A work must be one of {', '.join(NAMES)}; got {name!r}.")
    if vocab_size <= _FIRST_ID:
        raise ConfigError(f"A work needs a vocabulary of more than {_FIRST_ID} tokens; got {vocab_size}.")
    lengths, ids = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1, turn])

    def tokens(n: int) -> list[int]:
        found: list[int] = ids.integers(_FIRST_ID, vocab_size, n).tolist()
        return found

    if name == "W4":
        return [TimedRequest(0, 0.0, tokens(128), 128)]
    if name == "W5":
        return [TimedRequest(i, 0.0, tokens(1024), 16) for i in range(16)]
    if name == "W2":
        shared = tokens(512)
        return [TimedRequest(i, 0.0, shared + tokens(16), 32) for i in range(requests)]
    prompts = _around(lengths, 64, 0.6, 16, 256, requests)
    answers = _around(lengths, 52, 0.8, 8, 256, requests)
    arrivals = np.zeros(requests)
    if name == "W3":
        arrivals[1:] = np.cumsum(lengths.exponential(1.0, requests - 1))
    each = zip(arrivals.tolist(), prompts, answers, strict=True)
    return [TimedRequest(i, at, tokens(n), out) for i, (at, n, out) in enumerate(each)]


def _around(rng: Any, median: float, sigma: float, least: int, most: int, n: int) -> list[int]:
    drawn = np.rint(median * np.exp(rng.normal(0, sigma, n)))
    found: list[int] = np.clip(drawn, least, most).astype(int).tolist()
    return found


def at_rate(requests: Iterable[TimedRequest], rate: float | None) -> list[TimedRequest]:
    """The same with arrivals in seconds, `rate` requests a second on average; None means all at the start."""
    return [replace(r, arrival=r.arrival / rate if rate else 0.0) for r in requests]


def longest(requests: Iterable[TimedRequest]) -> int:
    """Most tokens of a request, prompt and answer."""
    return max(len(r.prompt) + r.max_tokens for r in requests)


def write(requests: Iterable[TimedRequest], path: str | Path) -> None:
    """As JSON lines: {"id", "arrival", "prompt", "max_tokens"}."""
    Path(path).write_text("".join(json.dumps(asdict(r)) + "\n" for r in requests))


def totals(requests: Sequence[TimedRequest]) -> tuple[int, int]:
    """(tokens of the prompts, tokens to be generated)."""
    return sum(len(r.prompt) for r in requests), sum(r.max_tokens for r in requests)
