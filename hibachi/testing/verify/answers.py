"""What came of a request, how two answers are compared, and both in words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hibachi.backend.array_backend import HostArray


class Trouble(NamedTuple):
    """What is wrong, in words."""

    expected: str
    got: str


@dataclass(frozen=True, slots=True)
class Answer:
    """items: tokens (ints, or host arrays), or the one output of a feed-forward model."""

    items: list[Any]
    ending: str  # the finish reason, or the class of the error
    error: BaseException | None = None
    logprobs: list[Any] = field(default_factory=list)  # as of a stream

    def told(self) -> str:
        """How it ended, in words."""
        if self.error is not None:
            return f"{self.ending}: {self.error}{_where(self.error)}"
        if self.ending == "length":
            return listed(self.items)
        return f"the end {self.ending!r} after {len(self.items)} tokens"


def different(prompt: HostArray, got: Answer, want: Answer, when: str, now: str, n: int, tol: float) -> Trouble | None:
    """How `got` differs from the first n tokens of `want`. when, now: under what circumstances each came.

    Sampled ids are compared while they are likelier than the next by more than rounding, tol, and log-probabilities
    with them; from where that is not so, both are right.
    """
    items = want.items[:n]
    expected = f"{listed(items)} for {show(prompt)}, {when}"
    if got.ending != "length" or len(got.items) != len(items):
        return Trouble(expected, f"{got.told()} {now}")
    for t, (a, b) in enumerate(zip(got.items, items, strict=True)):
        if not close(a, b, tol):
            likely = want.logprobs[t] if want.logprobs else None
            if likely:
                p, x, y = next(each for each in _codebooks(likely, a, b) if each[1] != each[2])  # others may follow it
                if p.get(x, -math.inf) >= p[y] - 2 * tol:
                    return None
            since = f", another from new token {t + 1} on" if t else ""
            return Trouble(expected, f"{listed(got.items)} {now}{since}")
        for k, new_scores in enumerate(_each(got.logprobs[t]) if got.logprobs else ()):
            old_scores = _each(want.logprobs[t])[k]
            if (worst := _unlike(new_scores, old_scores, tol)) is None:
                continue
            new, old = new_scores[worst], old_scores[worst]
            where = f"of id {worst} as new token {t + 1}"
            return Trouble(
                f"a log-probability of {old:.6g} {where} for {show(prompt)}, {when}",
                f"a log-probability of {new:.6g} {now}",
            )
    return None


def _each(scores: Any) -> list[dict[int, float]]:
    """Of each codebook; of a token that is one id, of one."""
    return scores if isinstance(scores, list) else [scores or {}]


def _codebooks(scores: Any, a: Any, b: Any) -> Iterator[tuple[dict[int, float], int, int]]:
    """For each codebook: its log-probabilities, and the ids of two tokens."""
    ids = (np.asarray(token).reshape(-1).tolist() for token in (a, b))
    return zip(_each(scores), *ids, strict=True)


def close(a: Any, b: Any, tol: float) -> bool:
    """Equal; real values up to tol, absolute or relative."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.dtype.kind not in "fc":
        return np.array_equal(a, b)
    return np.allclose(a, b, rtol=tol, atol=tol, equal_nan=True)


def _unlike(got: dict[int, float], want: dict[int, float], tol: float) -> int | None:
    """The id whose log-probabilities differ most, if that is too much."""
    off = {t: abs(got[t] - want[t]) for t in got.keys() & want.keys() if got[t] != want[t]}  # infinities are equal
    off = {t: d for t, d in off.items() if not d <= tol * max(1.0, abs(want[t]))}
    return max(off, key=lambda t: off[t], default=None)


def listed(items: list[Any]) -> str:
    """Tokens, briefly; the only one without a list around it."""
    return show(items[0] if len(items) == 1 else items)


def show(value: Any) -> str:
    """Numbers, briefly."""
    array = np.asarray(value)
    text = np.array2string(array, separator=", ", precision=5, threshold=12, edgeitems=3, max_line_width=10**6)
    text = " ".join(text.split()).replace("[ ", "[")
    return text if array.size <= 12 else f"{text} ({len(array)} of them)"


_PLACE = re.compile(r'File "([^"]*)", line (\d+)')


def _where(error: BaseException) -> str:
    """The line that raised, of which the engine keeps words only."""
    places = _PLACE.findall("".join(getattr(error, "__notes__", ())))
    return f" ({Path(places[-1][0]).name}, line {places[-1][1]})" if places else ""
