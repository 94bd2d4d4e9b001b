"""The figures of a run against a server: throughput, times that users saw, errors, and if the generator kept up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hibachi.engine.simulator.plot import COLOURS, LOOK, check_format, library, seconds
from hibachi.testing.bench.engines.figures import Slo
from hibachi.testing.bench.load.generator import INTERRUPTED, REJECTED, Loaded, Sample
from hibachi.testing.bench.plot import figure_of, save

PERCENTS = (50, 90, 95, 99)
TIMES = {
    "ttft": "Time to first token",
    "tpot": "Time per token after it",
    "itl": "Time between chunks",
    "e2e": "Whole request",
}
BUSY = 0.8  # of a core: above, the generator may be what is slow
LATE = 0.01  # seconds that 1 % of the requests were late: above, they did not come as they should


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
            f"Requests were sent late: 1 in 100 by more than {seconds(of['late']['p99'])}. Times count from when they "
            f"were due. The processors ({cores} here) were too busy for this rate."
        )
    if of["ok"] and not of["usage"]:
        out.append("The server tells no usage: tokens are counted in chunks.")
    if of["short"]:
        out.append(f"{of['short']} answers were shorter than asked for: they ended at an end token.")
    return out


def text(of: dict[str, Any]) -> str:
    """As a table."""
    lines = [f"{of['requests']:,} requests in {seconds(of['seconds'])}: {of['ok']:,} answered"]
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
            f"{seconds(slo['ttft'])}, the others every {seconds(slo['itl'])})"
        )
    columns = ("mean", *(f"p{p}" for p in PERCENTS), "max")
    lines += ["", f"  {'':30}" + "".join(f"{c:>10}" for c in columns)]
    for name, title in TIMES.items():
        if found := of[name]:
            title = f"{title} ({name.upper()})"
            lines.append(f"  {title:30}" + "".join(f"{seconds(found[c]):>10}" for c in columns))
    cpu = f"\n  the generator: {of['cpu_share']:.0%} of a core"
    if of["chunks"]:
        cpu += f", {seconds(of['cpu_seconds'] / of['chunks'])} a chunk"
    if of["late"]:
        cpu += f"; requests were sent {seconds(of['late']['p50'])} late (p50), at most {seconds(of['late']['max'])}"
    return "\n".join([*lines, cpu])


def plot(samples: Sequence[Sample], of: dict[str, Any], title: str, path: str | Path) -> None:
    """Distributions of the times; tokens a second and requests at a time over the run. Raises ConfigError,
    MissingExtra, OSError."""
    check_format(path)
    good = [s for s in samples if s.ok]
    with library().rc_context(LOOK):
        figure = figure_of(9.6, 6.4)
        (first, between), (rate, running) = figure.subplots(2, 2)
        _shares(first, {"TTFT": [s.ttft for s in good if s.ttft is not None], "whole request": [s.e2e for s in good]})
        first.set_title("Time to first token, and of the whole request")
        gaps = [gap for s in good for gap in s.itl]
        _shares(between, {"between chunks (ITL)": gaps, "mean of a request (TPOT)": [t for s in good if (t := s.tpot)]})
        between.set_title("Time between tokens")
        end = of["seconds"] or 1.0
        if slo := of.get("slo"):
            for panel, limit in ((first, slo["ttft"]), (between, slo["itl"])):
                panel.axvline(limit, color="#333333", linestyle=":", linewidth=1, label="promised (SLO)")
        for panel in (first, between):
            if panel.get_legend_handles_labels()[0]:
                panel.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)
        edges = np.linspace(0, end, min(120, max(10, round(end * 4))) + 1)
        times = np.concatenate([np.asarray(s.chunks) for s in samples] or [np.zeros(0)])
        scale = of["new_tokens"] / of["chunks"] if of["chunks"] else 1.0  # tokens of a chunk
        per_second = scale * np.histogram(times, edges)[0] / (edges[1] - edges[0])
        rate.stairs(per_second, edges, color=COLOURS[1], linewidth=1.4)
        rate.set_title("New tokens a second")
        moments = [(s.sent, 1) for s in samples] + [(s.end, -1) for s in samples]
        moments.sort()
        at = [0.0, *(t for t, _ in moments), end]
        count = np.cumsum([0, *(n for _, n in moments), 0])
        running.step(at, count, where="post", color=COLOURS[0], linewidth=1.2)
        running.set_title("Requests at a time")
        bad = [s.end for s in samples if not s.ok and s.error != INTERRUPTED]
        if bad:
            running.plot(bad, np.zeros(len(bad)), "x", color="#000000", markersize=5, label="failed", clip_on=False)
            running.legend(frameon=False, fontsize=8)
        for panel in (rate, running):
            panel.set_xlabel("seconds")
            panel.set_xlim(0, end)
            panel.set_ylim(bottom=0)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        save(figure, path)


def _shares(panel: Any, found: dict[str, Sequence[float]]) -> None:
    """Plot the share of requests over the time that they took at most."""
    found = {label: values for label, values in found.items() if len(values)}
    for colour, (label, values) in zip((COLOURS[1], COLOURS[0]), found.items(), strict=False):
        x = np.maximum(np.quantile(values, np.linspace(0, 1, 201)), 1e-6)
        panel.plot(x, np.linspace(0, 100, 201), label=label, color=colour, linewidth=1.6)
    panel.set_xscale("log")
    if found:  # chunks that came together are no reason to show microseconds
        panel.set_xlim(left=0.8 * max(1e-6, min(float(np.quantile(v, 0.03)) for v in found.values())))
    low, high = panel.get_xlim()
    few = high < 500 * low
    panel.xaxis.set_major_formatter(lambda value, _: seconds(value))
    panel.xaxis.set_minor_formatter(lambda value, _: seconds(value) if few and f"{value:e}"[0] in "25" else "")
    panel.tick_params(axis="x", which="minor", labelsize=8)
    panel.set_ylabel("% within")
    panel.set_ylim(0, 101)
