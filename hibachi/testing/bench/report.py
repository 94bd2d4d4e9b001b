"""The figures of a run against a server: throughput, times that users saw, errors, and if the generator kept up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hibachi.common.phases import short_duration
from hibachi.testing.bench.samples import INTERRUPTED, REJECTED, Loaded, Sample

PERCENTS = (50, 90, 95, 99)
TIMES = {
    "ttft": "Time to first token",
    "tpot": "Time per token after it",
    "itl": "Time between chunks",
    "e2e": "Whole request",
}
BUSY = 0.8  # of a core: above, the generator may be what is slow
LATE = 0.01  # seconds that 1 % of the requests were late: above, they did not come as they should


@dataclass(frozen=True, slots=True)
class Slo:
    """What a user is promised: seconds to the first token, and between tokens, on average over a request."""

    ttft: float = 0.5
    itl: float = 0.05

    def holds(self, ttft: float, between: float | None) -> bool:
        """between: tokens, on average; None means there was but one."""
        return ttft <= self.ttft and (between is None or between <= self.itl)


def figures(loaded: Loaded, slo: Slo | None = None) -> dict[str, Any]:
    """Seconds, tokens and requests a second. Times are of requests without error only.

    seconds: from the start to the end of the last request. late: behind schedule, when it was sent. cpu_share: of a
    core, used by the generator. goodput: requests a second that kept the SLO; slo_share: of all that were sent.
    """
    samples = loaded.samples
    good = [s for s in samples if s.ok]
    wall = loaded.seconds
    kinds = Counter(s.error for s in samples if s.error)
    came = sum(s.tokens for s in good)
    prompt = sum(s.prompt_tokens or 0 for s in good)
    late = [max(0.0, s.sent - s.due) for s in samples if s.due is not None and not s.waited]

    def each_second(n: float) -> float:
        return n / wall if wall else 0.0

    out: dict[str, Any] = {
        "requests": len(samples),
        "ok": len(good),
        "rejected": kinds.pop(REJECTED, 0),
        "interrupted": kinds.pop(INTERRUPTED, 0),
        "failed": sum(kinds.values()),
        "errors": {kind: {"count": n, "first": _first(samples, kind)} for kind, n in kinds.most_common()},
        "short": sum(s.counted is not None and s.counted < s.new for s in good),
        "seconds": wall,
        "requests_per_second": each_second(len(good)),
        "prompt_tokens": prompt,
        "new_tokens": came,
        "chunks": sum(len(s.chunks) for s in good),
        "tokens_per_second": each_second(came),
        "total_tokens_per_second": each_second(came + prompt),
        "usage": all(s.counted is not None for s in good),
        "peak": loaded.peak,
        "connections": loaded.connections,
        "ttft": summary(t for s in good if (t := s.ttft) is not None),
        "tpot": summary(t for s in good if (t := s.tpot) is not None),
        "itl": summary(gap for s in good for gap in s.itl),
        "e2e": summary(s.e2e for s in good),
        "late": summary(late),
        "cpu_seconds": loaded.cpu,
        "cpu_share": each_second(loaded.cpu),
        "complete": not loaded.interrupted,
    }
    if slo is not None:
        kept = sum(s.ttft is not None and slo.holds(s.ttft, s.tpot) for s in good)
        sent = len(samples) - out["interrupted"]
        out |= {"slo": asdict(slo), "goodput": each_second(kept), "slo_share": kept / sent if sent else 0.0}
    return out


def _first(samples: Iterable[Sample], kind: str) -> str:
    return next(s.message for s in samples if s.error == kind)


def summary(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, percentiles and largest."""
    found = np.fromiter(values, np.float64)
    if not found.size:
        return None
    at = np.percentile(found, PERCENTS)
    named = {f"p{p}": float(v) for p, v in zip(PERCENTS, at, strict=True)}
    return {"mean": float(found.mean()), **named, "max": float(found.max())}


def warnings(of: dict[str, Any], cores: int) -> list[str]:
    """Why the figures may say less about the server than they seem to."""
    out = []
    if of["cpu_share"] > BUSY:
        out.append(
            f"The load generator itself used {of['cpu_share']:.0%} of a core: it may be what was slow. Run several of "
            "it, on another machine."
        )
    if of["late"] and of["late"]["p99"] > LATE:
        out.append(
            f"Requests were sent late: 1 in 100 by more than {short_duration(of['late']['p99'])}. Times count from "
            f"when they were due. The processors ({cores} here) were too busy for this rate."
        )
    if of["ok"] and not of["usage"]:
        out.append("The server tells no usage: tokens are counted in chunks.")
    if of["short"]:
        out.append(f"{of['short']} answers were shorter than asked for: they ended at an end token.")
    return out


def text(of: dict[str, Any]) -> str:
    """As a table."""
    lines = [f"{of['requests']:,} requests in {short_duration(of['seconds'])}: {of['ok']:,} answered"]
    for what in ("rejected", "failed", "interrupted"):
        if of[what]:
            lines[0] += f", {of[what]:,} {what}" + (" (429)" if what == "rejected" else "")
    for kind, found in of["errors"].items():
        lines.append(f"  {found['count']:,} {kind}" + (f": {found['first']}" if found["first"] else ""))
    lines += [
        "",
        f"  requests    {of['requests_per_second']:>12,.2f} /s, at most {of['peak']:,} at a time",
        f"  new tokens  {of['tokens_per_second']:>12,.1f} /s ({of['new_tokens']:,} in {of['chunks']:,} chunks)",
        f"  all tokens  {of['total_tokens_per_second']:>12,.1f} /s",
    ]
    if "goodput" in of:
        slo = of["slo"]
        lines.append(
            f"  goodput     {of['goodput']:>12,.2f} /s ({of['slo_share']:.1%} had their first token within "
            f"{short_duration(slo['ttft'])}, the others every {short_duration(slo['itl'])})"
        )
    columns = ("mean", *(f"p{p}" for p in PERCENTS), "max")
    lines += ["", f"  {'':30}" + "".join(f"{c:>10}" for c in columns)]
    for name, title in TIMES.items():
        if found := of[name]:
            title = f"{title} ({name.upper()})"
            lines.append(f"  {title:30}" + "".join(f"{short_duration(found[c]):>10}" for c in columns))
    cpu = f"\n  the generator: {of['cpu_share']:.0%} of a core"
    if of["chunks"]:
        cpu += f", {short_duration(of['cpu_seconds'] / of['chunks'])} a chunk"
    if of["late"]:
        middle, most = (short_duration(of["late"][name]) for name in ("p50", "max"))
        cpu += f"; requests were sent {middle} late (p50), at most {most}"
    return "\n".join([*lines, cpu])
