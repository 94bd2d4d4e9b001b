"""All trials on one model, the verdict, and how both are written."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from hibachi.testing.verify.causes import Cause, diagnose
from hibachi.testing.verify.inside import changed, kept
from hibachi.testing.verify.subject import Subject, TrialResult
from hibachi.testing.verify.trials import run

WIDTH = 88
STATES = {
    "equal": "same bits",
    "alike": "as alone",
    "rounding": "rounding",
    "differs": "differs",
    "failed": "failed",
    "skipped": "-",
}


@dataclass(frozen=True, slots=True)
class Report:
    """about: lines about the model. results: of the trials. causes: what is wrong, the root first; empty: nothing."""

    about: list[str]
    results: list[TrialResult]
    causes: list[Cause]

    @property
    def good(self) -> bool:
        return not self.causes

    @override
    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """A table, and in words what is wrong."""
        out = [line for about in self.about for line in _wrapped(about, "", "  ")] + [""]
        width = max(len(r.title) for r in self.results)
        out.append(f"  {'':{width}}  {'result':9}  largest difference")
        for r in self.results:
            size = "" if not r.worst else f"{r.worst:.1e}" if math.isfinite(r.worst) else "inf"
            state = STATES[r.state].upper() if r.faulty else STATES[r.state]
            out.append(f"  {r.title:{width}}  {state:9}  {r.why if r.state == 'skipped' else size}".rstrip())
            if r.faulty:
                out += _wrapped(_where(r), "      ", "      ")
        out.append("")
        if self.good:
            rounded = any(r.state == "rounding" for r in self.results)
            return [
                *out,
                f"No fault was found; {'some outputs differ by rounding' if rounded else 'all bits are equal'}.",
            ]
        for cause in self.causes:
            out += _wrapped(f"{cause.what}. [{cause.key}]", "FAULT  ", "       ")
            for saw in cause.saw:
                out += _wrapped(saw, "saw    ", "       ")
            out += _wrapped(cause.mend, "mend   ", "       ")
        if len(self.causes) > 1:
            out.append("Mend the first one first: the others may follow from it.")
        return out

    def as_json(self) -> dict[str, Any]:
        """For programs: plain values only."""
        return {
            "good": self.good,
            "about": self.about,
            "causes": [{"key": c.key, "what": c.what, "mend": c.mend, "saw": list(c.saw)} for c in self.causes],
            "trials": [_plain(r) for r in self.results],
        }


def verify(subject: Subject) -> Report:
    """Try everything, and find what the pattern means. A subject serves once."""
    try:
        before = kept(subject.model, subject.backend)
        results = run(subject)
        subject.changed = changed(before, kept(subject.model, subject.backend))
        return Report(subject.describe(), list(results.values()), diagnose(subject, results))
    finally:
        subject.close()


def _where(r: TrialResult) -> str:
    """The first variant that was a fault, and what came."""
    told = r.first.told() if r.first and r.state != "failed" else r.why
    more = f" (and {len(r.bad) - 1} more)" if len(r.bad) > 1 else ""
    return f"{r.variant}: {told}{more}"


def _wrapped(text: str, first: str, then: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=then, break_on_hyphens=False)


def _plain(r: TrialResult) -> dict[str, Any]:
    out: dict[str, Any] = {"key": r.key, "title": r.title, "result": r.state, "worst": _number(r.worst)}
    if r.state == "skipped":
        return out | {"why": r.why}
    if r.faulty:
        out |= {"variant": r.variant, "faulty_variants": r.bad}
    if r.why:
        out["why"] = r.why
    if r.first:
        d = r.first
        out |= {"row": d.row, "tokens_seen": d.seen, "new_token": d.step, "index": list(d.place)}
        out |= {"got": _number(d.got), "alone": _number(d.want), "difference": _number(d.size)}
    return out


def _number(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)  # JSON has no infinity
