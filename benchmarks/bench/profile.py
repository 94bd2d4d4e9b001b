"""Where the time of a step goes: schedule, lower, the model and its parts, sample, deliver.

The methods that do these things are replaced, on the objects of one engine, by ones that look at the clock as well. A
moment belongs to the innermost of them, so the parts add up to the whole. An engine without a profile pays nothing; one
with it some 0.5 µs for each call that is timed, a few hundred in a step of a language model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hibachi.engine.autoregressive import AutoregressiveBatchInference
from hibachi.errors import ConfigError

PARTS = ("schedule", "lower", "linear", "attention", "norms", "model", "sample", "deliver", "rest", "between")
"""linear, attention, norms and model (all else of it) are the forward pass, the others the host's share. lower: from
the plan to index arrays on the device. rest: of the engine; between: two steps, such as taking requests."""
FORWARD = ("linear", "attention", "norms", "model")
_BACKEND = {
    "linear": "linear",
    "logits": "linear",
    "experts": "linear",
    "attend": "attention",
    "rope": "attention",
    "rms_norm": "norms",
    "layer_norm": "norms",
}
_IDLE = 0.1  # seconds between two steps: above, the engine had nothing to do
_FULL = 0.9  # of the most rows of any step: from there on a decode step counts as full


@dataclass(slots=True)
class StepProfile:
    """rows, tokens: of the plan; more tokens than rows: some were of prompts. seconds: of each part that took any."""

    rows: int
    tokens: int
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def host(self) -> float:
        """The share of it that is not the model."""
        total = self.total
        return 1 - sum(self.seconds.get(part, 0.0) for part in FORWARD) / total if total else 0.0


class Profile:
    """Times the steps of an engine from now on. `steps`: those since the last `clear`.

    The engine must be built (a model of level 1 or 2), and no request may be running. Where the library runs calls
    later than they are made, or compiles the whole step, the model's parts are not told apart: all of it is "model".
    """

    def __init__(self, engine: AutoregressiveBatchInference) -> None:
        if engine.core is None:
            raise ConfigError("A profile needs an engine that is built: one with a model of level 1 or 2.")
        self._engine = engine.core
        self.steps: list[StepProfile] = []
        self._stack: list[list[Any]] = []  # of [part, time inside that belongs to others]
        self._now: dict[str, float] = {}
        self._plan: Any = None
        self._ended: float | None = None
        self._wrap(engine)

    def clear(self) -> None:
        self.steps, self._ended = [], None

    def _wrap(self, engine: AutoregressiveBatchInference) -> None:
        core: Any = self._engine  # methods are replaced, as types forbid
        runner, backend = core.runner, core.runner.backend
        for name in ("schedule", "commit", "expire"):
            self._time(core.scheduler, name, "schedule")
        planned = core.scheduler.schedule

        def schedule(*args: Any, **options: Any) -> Any:
            self._plan = planned(*args, **options)
            return self._plan

        core.scheduler.schedule = schedule
        self._time(runner.inputs, "packed", "lower")
        self._time(runner.main.head, "part", "sample")
        self._time(core, "_settle", "deliver")
        device = backend.versions().get("device", "cpu")
        if self._tells_parts(backend, device):
            model = getattr(engine.model, "backend", None)
            for name, part in _BACKEND.items():
                self._time(backend if model is None else model, name, part)
        step = runner.main.step
        fused = getattr(engine.model, "fused", None)
        if fused is not None:
            self._names, self._of = np.unique(fused.parts, return_inverse=True)

        def forward(*args: Any) -> Any:
            if fused is not None:
                fused.seconds[:] = 0  # what the check of determinism took beside
            out = step(*args)
            backend.get(out[0][:1, :1] if out[0].ndim == 2 else out[0])  # waits for the device
            if fused is not None:
                self._split(fused)
            return out

        runner.main.step = forward
        self._time(runner.main, "step", "model")
        whole = core.step

        def stepped() -> bool:
            self._plan, self._now = None, {}
            began = time.perf_counter()
            went: bool = self._timed(whole, "rest")
            if self._plan is not None:
                if self._ended is not None and began - self._ended < _IDLE:
                    self._now["between"] = began - self._ended
                plan = self._plan
                self.steps.append(StepProfile(len(plan.rows), int(plan.q.sum()), self._now))
            self._ended = time.perf_counter() if went else None
            return went

        core.step = stepped

    def _split(self, fused: Any) -> None:
        """Give the seconds that a call of all layers has counted to their parts."""
        for part, took in zip(self._names.tolist(), np.bincount(self._of, fused.seconds).tolist(), strict=True):
            self._now[part] = self._now.get(part, 0.0) + took
            self._stack[-1][1] += took

    @staticmethod
    def _tells_parts(backend: Any, device: str) -> bool:
        return not backend.shapes.compiled and device.startswith("cpu")

    def _time(self, owner: Any, name: str, part: str) -> None:
        call = getattr(owner, name)
        setattr(owner, name, lambda *args, **options: self._timed(call, part, *args, **options))

    def _timed(self, call: Callable[..., Any], part: str, *args: Any, **options: Any) -> Any:
        inside: list[Any] = [part, 0.0]
        self._stack.append(inside)
        began = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            took = time.perf_counter() - began
            self._stack.pop()
            self._now[part] = self._now.get(part, 0.0) + took - inside[1]
            if self._stack:
                self._stack[-1][1] += took

    def as_json(self) -> list[dict[str, Any]]:
        return [{"rows": s.rows, "tokens": s.tokens, "seconds": s.seconds} for s in self.steps]


def from_json(steps: Sequence[dict[str, Any]]) -> list[StepProfile]:
    return [StepProfile(s["rows"], s["tokens"], s["seconds"]) for s in steps]


@dataclass(frozen=True, slots=True)
class StepKind:
    """Steps of one kind. seconds: the median of a step; parts: the mean seconds of each part over the middle half of
    the steps by time, as a few that were interrupted say nothing; host: the median of the host's share."""

    name: str
    steps: int
    seconds: float
    parts: dict[str, float]
    host: float


def kinds(steps: Sequence[StepProfile]) -> list[StepKind]:
    """Steps with prompts; steps that only decode; of these, the full ones: with nearly the most rows there were."""
    decode = [s for s in steps if s.tokens == s.rows]
    most = max((s.rows for s in decode), default=0)
    full = [s for s in decode if s.rows >= _FULL * most]
    groups = {"with prompts": [s for s in steps if s.tokens > s.rows], "decode": decode}
    if most > 1:
        groups[f"decode, {full[0].rows if len({s.rows for s in full}) == 1 else f'about {most}'} rows"] = full
    return [_kind(name, group) for name, group in groups.items() if group]


def _kind(name: str, steps: Sequence[StepProfile]) -> StepKind:
    ordered = sorted(steps, key=lambda s: s.total)
    cut = len(steps) // 4
    middle = ordered[cut : len(ordered) - cut]
    parts = {part: statistics.fmean(s.seconds.get(part, 0.0) for s in middle) for part in PARTS}
    times = statistics.median(s.total for s in steps)
    return StepKind(name, len(steps), times, parts, statistics.median(s.host for s in steps))


def table(steps: Sequence[StepProfile]) -> str:
    """A line for each part: milliseconds of a step, and their share; of the whole step the median."""
    found = kinds(steps)
    lines = [f"{'':10}" + "".join(f"{k.name:>26}" for k in found)]
    lines.append(f"{'steps':10}" + "".join(f"{k.steps:>26,}" for k in found))
    for part in PARTS:
        cells = (f"{1e3 * k.parts[part]:9.3f} ms {k.parts[part] / sum(k.parts.values()):7.1%}" for k in found)
        lines.append(f"{part:10}" + "".join(f"{cell:>26}" for cell in cells))
    lines.append(f"{'step':10}" + "".join(f"{1e3 * k.seconds:23.3f} ms" for k in found))
    lines.append(f"{'not model':10}" + "".join(f"{k.host:>26.1%}" for k in found))
    return "\n".join(lines)
