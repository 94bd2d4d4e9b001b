"""How long a step takes: a linear model of what the step computes."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hibachi.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step = step + token * T + row * B + position * P + pair * A.

    T: tokens computed. B: rows that take part. P: positions of the cache that are read, that is, over all rows, the
    length after the step. A: pairs of a token and a position that it looks at, itself included; a row with one token
    has as many as it has positions.

    `hibachi bench fit` measures these figures for a model. The defaults are arithmetic, not a measurement: a model of 8
    billion parameters (32 layers, width 4096, 8 key-value heads of 128) in bfloat16 on a device that reads 3.35 TB/s
    and does 400 TFLOP/s: the weights are read in 4.8 ms, a token takes 16 GFLOP, a position holds 131 kB, a pair takes
    524 kFLOP.
    """

    step: float = 4.8e-3
    token: float = 40e-6
    row: float = 0.0
    position: float = 39e-9
    pair: float = 1.3e-9

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            real = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not real or not 0 <= value < 1e3:
                raise ConfigError(f"{f.name} must be seconds, from 0 to 1000; got {value!r}.")
        if not self.step + self.token + self.row > 0:
            raise ConfigError("A step must take some time: expected step, token or row above 0; got 0 for each.")

    def seconds(self, tokens: float, rows: float, positions: float, pairs: float) -> float:
        return self.step + self.token * tokens + self.row * rows + self.position * positions + self.pair * pairs


def read_step_time(path: str | Path) -> StepTime:
    """The step time that `hibachi bench fit` wrote. Raises ConfigError, OSError."""
    text = Path(path).read_text()
    try:
        data: Any = json.loads(text)
        found = data["seconds"]
        return StepTime(**{f.name: found[f.name] for f in fields(StepTime)})
    except (ValueError, KeyError, TypeError) as e:
        if isinstance(e, ConfigError):
            raise
        names = ", ".join(f.name for f in fields(StepTime))
        raise ConfigError(
            f'{path}: expected JSON with "seconds": an object with {names}, as `hibachi bench fit` writes it; got '
            f"{text[:60]!r}."
        ) from e
