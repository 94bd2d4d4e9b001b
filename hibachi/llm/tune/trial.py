"""Results of candidates: their times, which one is taken, and why the others are not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hibachi.backend.candidates import AllowedKernels, Candidate
from hibachi.llm.tune.stepcost import steps

STEP = ("linear", "attention")  # what a step is judged by


@dataclass(slots=True)
class KernelTrial:
    """What became of a candidate. times: milliseconds of a step's operations of this kind, by case. error: its largest
    difference from the reference, of the largest number. why_not: why it was not taken; None means it was. note: what
    else there is to say."""

    operation: str
    name: str
    times: dict[str, float]
    error: float | None
    why_not: str | None
    note: str = ""


def untimed(c: Candidate, allowed: AllowedKernels) -> KernelTrial:
    """The trial of a candidate before it is timed; one that is not allowed says why."""
    return KernelTrial(c.operation, c.name, {}, None, allowed.why_not(c))


def rank(trials: Sequence[KernelTrial]) -> None:
    """All but the fastest say why they are not taken."""
    ranked = [t for t in trials if t.why_not is None]
    if not ranked:
        return
    fastest = min(ranked, key=lambda t: _mean(t.times.values()))
    for t in ranked:
        if t is not fastest:
            times = _mean(t.times.values()) / _mean(fastest.times.values())
            t.why_not = f"{times:.2f} times the fastest" if t.times else "nothing was measured"


def taken_of(trials: Iterable[KernelTrial]) -> dict[str, dict[str, float]]:
    """The times of what was taken, by operation."""
    return {t.operation: t.times for t in trials if t.why_not is None}


def steps_of(trials: Iterable[KernelTrial]) -> dict[str, float]:
    return steps(taken_of(trials))


def _mean(times: Iterable[float]) -> float:
    """Geometric: each case counts alike, however long it takes."""
    logs = [math.log(max(t, 1e-9)) for t in times]
    return math.exp(sum(logs) / len(logs)) if logs else math.inf


def table(trials: list[KernelTrial]) -> str:
    """A line for each candidate: milliseconds by case, its error, and why it was not taken."""
    out = []
    for operation in dict.fromkeys(t.operation for t in trials):
        rows = _joined([t for t in trials if t.operation == operation])
        cases = list(next((t.times for t in rows if t.times), {}))
        errors = any(t.error is not None for t in rows)
        head = [operation, *cases, *(["error"] if errors else []), ""]
        lines = [head]
        for t in rows:
            said = t.why_not or "<- taken"
            cells = [f"{t.times[case]:.3f}" if case in t.times else "" for case in cases]
            off = [] if not errors else ["" if t.error is None else f"{t.error:.0e}"]
            lines.append([f"  {t.name}", *cells, *off, f"{said} ({t.note})" if t.note else said])
        widths = [max(14 if i == 0 else 0, *(len(line[i]) for line in lines)) for i in range(len(head) - 1)]
        for line in lines:
            cells = [f"{line[0]:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(line[1:-1], widths[1:], strict=True))]
            out.append("  ".join([*cells, line[-1]]).rstrip())
    return "\n".join(out)


def _joined(trials: list[KernelTrial]) -> list[KernelTrial]:
    """Those that cannot be had for one reason in one line."""
    out: list[KernelTrial] = []
    for t in trials:
        before = out[-1] if out else None
        if before is not None and before.why_not is not None and before.why_not == t.why_not and not t.times:
            out[-1] = replace(before, name=f"{before.name}, {t.name}")
        else:
            out.append(t)
    return out
