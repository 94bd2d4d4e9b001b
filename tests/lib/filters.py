"""What tests try of each number of `SamplingParams` that changes how probable tokens are: a new filter is a line."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hibachi.request import FILTERS, SamplingParams

NAN, INF = float("nan"), float("inf")


class Tried(NamedTuple):
    """words: its range, as errors say it. wrong: out of it. right: in it, its ends among them. far: in it, but beyond
    what is useful. some: as requests have it; those that do nothing are not among them.
    """

    words: str
    wrong: tuple[Any, ...]
    right: tuple[Any, ...]
    far: tuple[Any, ...]
    some: tuple[float, ...]


SHARE = "a number in (0, 1]"
PENALTY = "a number in [-2, 2]"
TRIED = {
    "temperature": Tried(
        "a finite number >= 0 (0 is greedy)",
        (-0.01, NAN, INF, "hot", None, True),
        (0, 0.5, 1, 50),
        (1e40, 1e-320, 1e-5, 1e38, 1e39, 1e300, np.float64(0.7)),
        (0.4, 0, 2.5),
    ),
    "top_k": Tried(
        "an integer >= -1 (0 or -1: no limit)", (-2, 1.5, "3", None, True), (-1, 0, 1, 7), (2**40,), (1, 3, 9, 40, 5000)
    ),
    "top_p": Tried(SHARE, (0, -0.5, 1.01, NAN, None), (0.01, 0.5, 1), (1e-9, 1e-320), (0.2, 0.73, 0.95)),
    "min_p": Tried("a number in [0, 1]", (-0.01, 1.01, NAN, "x", True), (0, 0.1, 1), (1e-320,), (0.03, 0.6)),
    "typical_p": Tried(SHARE, (0, 1.01, NAN, None), (0.01, 0.5, 0.9, 1), (1e-9, 1e-320), (0.35, 0.9)),
    "repetition_penalty": Tried(
        "a finite number > 0 (1: none)",
        (0, -1, INF, NAN, "2"),
        (0.01, 1, 1.3),
        (1e-40, 1e-320, 1e-30, 1e30, 1e39, 1e300),
        (0.7, 2.0),
    ),
    "presence_penalty": Tried(PENALTY, (-2.01, 2.01, NAN, None), (-2, 0, 0.5, 2), (), (-1.5, 2.0)),
    "frequency_penalty": Tried(PENALTY, (-2.01, 2.01, INF, "1"), (-2, 0, 0.5, 2), (), (-0.3, 0.9)),
}
DEFAULTS: dict[str, float] = {f.name: getattr(SamplingParams(), f.name) for f in FILTERS}


def nudged(params: SamplingParams, by: float) -> SamplingParams:
    """The same with all that filters cut at a little off, where rounding may decide."""
    values = {f.name: getattr(params, f.name) * (1 + by) for f in FILTERS if f.draws and not f.integer}
    del values["temperature"]
    fits = {f.name: f.fits for f in FILTERS}
    return params.with_(**{name: x if fits[name](x) else getattr(params, name) for name, x in values.items()})
