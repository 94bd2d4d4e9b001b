"""Pictures of results: engines side by side, latency over load, where a step's time goes, how cost grows."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hibachi.engine.simulator.plot import COLOURS, LOOK, check_format, library, seconds
from hibachi.testing.bench.engines.figures import Summary, summarise
from hibachi.testing.bench.engines.report import Bounds, bound_of, bounds_of, ours
from hibachi.testing.bench.steps.growth import Cliff, Point
from hibachi.testing.bench.steps.profile import PARTS, StepProfile, kinds

_OURS, _PEER = COLOURS[1], "#8fa7b8"
_MOST_STEPS = 300  # columns of the picture of a profile


def figure_of(width: float, height: float) -> Any:
    return importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: str | Path) -> None:
    figure.savefig(path, dpi=110, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


def plot_results(documents: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Bars for work that is there at once; lines over the rate for work that arrives. Raises ConfigError, MissingExtra,
    OSError."""
    check_format(path)
    found = [s for s in summarise(run for d in documents for run in d["runs"]) if s.failed is None]
    limits = bounds_of(documents)
    offline = sorted({(s.model, s.threads, s.work) for s in found if s.rate is None})
    online = sorted({(s.model, s.threads, s.work) for s in found if s.rate is not None})
    panels = len(offline) + 2 * len(online)
    with library().rc_context(LOOK):
        columns = min(3, max(1, panels))
        lines = max(1, -(-panels // columns))
        bars = max(
            [sum((s.model, s.threads, s.work, s.rate) == (*key, None) for s in found) for key in offline], default=0
        )
        figure = figure_of(0.6 + 4.3 * columns, 0.4 + lines * max(2.5, 0.6 + 0.4 * bars))
        several = len({(model, threads) for model, threads, _ in (*offline, *online)}) > 1
        axes = iter(figure.subplots(lines, columns, squeeze=False).ravel().tolist())
        for key in offline:
            panel = next(axes)
            panel.set_title(_title(*key, several=several, what="tokens/s"))
            _bars(
                panel,
                [s for s in found if (s.model, s.threads, s.work) == key and s.rate is None],
                limits,
            )
        for key in online:
            mine = [s for s in found if (s.model, s.threads, s.work) == key and s.rate is not None]
            for name, title in (("ttft", "time to first token"), ("itl", "time between tokens")):
                panel = next(axes)
                panel.set_title(_title(*key, several=several, what=title))
                _over_rate(panel, mine, name)
        for rest in axes:
            rest.set_visible(False)
        save(figure, path)


def _title(model: str, threads: int, work: str, *, several: bool, what: str) -> str:
    """several: there are panels of other models, or other numbers of threads."""
    return f"{work}: {what}" + (f" ({model}, {threads} thread{'s' * (threads != 1)})" if several else "")


def _bars(panel: Any, found: Sequence[Summary], limits: Bounds) -> None:
    rates = [s.values["tokens_per_second"] for s in found]
    names = [f"{s.engine}\n{s.dtype}" for s in found]
    panel.barh(range(len(found)), rates, color=[_OURS if ours(s) else _PEER for s in found], height=0.6)
    for i, (s, rate) in enumerate(zip(found, rates, strict=True)):
        mark = " (contended)" if s.contended == s.runs else ""
        panel.text(rate, i, f" {rate:,.0f}{mark}", va="center", fontsize=8)
    each = [bound_of(limits, s) for s in found]
    for limit in dict.fromkeys(rate for rate in each if rate is not None):
        mine = [i for i, rate in enumerate(each) if rate == limit]  # beside the bars that it bounds
        panel.plot([limit] * 2, [mine[0] - 0.45, mine[-1] + 0.45], color="#333333", linestyle=":", linewidth=1)
        panel.text(limit, mine[0] - 0.45, "bound ", ha="right", va="bottom", fontsize=7)
    panel.set_yticks(range(len(found)), names, fontsize=8)
    panel.set_ylim(len(found) - 0.4, -0.6)
    room = 1.7 if any(s.contended == s.runs for s in found) else 1.3  # beside the bars, for what is written there
    panel.set_xlim(0, room * max(rate for rate in [*rates, *each] if rate is not None))
    panel.grid(axis="y", visible=False)


def _over_rate(panel: Any, found: Sequence[Summary], name: str) -> None:
    for i, engine in enumerate(dict.fromkeys(s.engine for s in found)):
        mine = sorted((s for s in found if s.engine == engine), key=lambda s: s.rate or 0.0)
        for percent, style in (("p50", "-"), ("p99", "--")):
            values = [s.values.get(f"{name}.{percent}", np.nan) for s in mine]
            label = engine if percent == "p50" else None
            colour = COLOURS[i % len(COLOURS)]
            panel.plot([s.rate for s in mine], values, style, marker="o", markersize=3, color=colour, label=label)
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda value, _: seconds(value))
    panel.set_xlabel("requests a second (dashed: p99, else p50)")
    engines = len({s.engine for s in found})
    bottom, top = panel.get_ylim()
    panel.set_ylim(top=top * (top / bottom) ** (0.15 * engines))  # above the lines, for the names
    panel.legend(frameon=False, fontsize=7, loc="upper left")


def plot_profile(steps: Sequence[StepProfile], title: str, path: str | Path) -> None:
    """The parts of a step one upon the other: for each kind of step, and over the steps of a run."""
    check_format(path)
    found = kinds(steps)
    colour = dict(zip(PARTS, [*COLOURS, "#aa3377", "#bbbbbb"], strict=True))
    with library().rc_context(LOOK):
        figure = figure_of(9.6, 5.6)
        by_kind, over_time = figure.subplots(2, 1, height_ratios=(1, 1.5))
        for i, kind in enumerate(found):
            left, total = 0.0, sum(kind.parts.values())
            for part in PARTS:
                share = 100 * kind.parts[part] / total
                by_kind.barh(i, share, left=left, color=colour[part], label=part if i == 0 else None, height=0.6)
                if share >= 6:
                    at = left + share / 2
                    by_kind.text(at, i, f"{share:.0f}", ha="center", va="center", fontsize=8, color="white")
                left += share
        names = [f"{k.name}\n{seconds(k.seconds)}, {k.steps:,} steps" for k in found]
        by_kind.set_yticks(range(len(found)), names)
        by_kind.invert_yaxis()
        by_kind.set_xlim(0, 100)
        by_kind.grid(axis="y", visible=False)
        by_kind.set_title("Share of a step (%)")
        groups = np.array_split(np.arange(len(steps)), min(len(steps), _MOST_STEPS))
        first = [float(g[0]) for g in groups]
        each = [[_median_ms(part, [steps[i] for i in g]) for g in groups] for part in PARTS]
        over_time.stackplot(first, each, colors=[colour[p] for p in PARTS], step="post")
        tops = np.sort(np.sum(each, axis=0))
        decode = 1e3 * max(k.seconds for k in found if k.name != "with prompts") if len(found) > 1 else tops[-1]
        over_time.set_ylim(0, min(1.05 * tops[-1], 4 * decode))  # prompts stick out
        over_time.set_xlim(0, max(first[-1], 1.0))
        over_time.set_title("Milliseconds of each step, from the first on")
        figure.legend(*by_kind.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        save(figure, path)


def _median_ms(part: str, steps: Sequence[StepProfile]) -> float:
    return 1e3 * float(np.median([s.seconds.get(part, 0.0) for s in steps]))


def plot_growth(points: Sequence[Point], cliffs: Sequence[Cliff], title: str, path: str | Path) -> None:
    """Tokens a second over rows, milliseconds of a step over context; cliffs are marked."""
    check_format(path)
    with library().rc_context(LOOK):
        figure = figure_of(9.6, 3.9)
        by_rows, by_context = figure.subplots(1, 2)
        context = min(p.context for p in points)
        line = sorted((p for p in points if p.context == context), key=lambda p: p.rows)
        by_rows.plot([p.rows for p in line], [p.tokens_per_second for p in line], marker="o", markersize=3, color=_OURS)
        by_rows.set_xscale("log", base=2)
        by_rows.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        by_rows.set_ylim(bottom=0)
        by_rows.set_title(f"Tokens/s over rows, context {context}")
        for i, rows in enumerate(sorted({p.rows for p in points if p.context != context})):
            line = sorted((p for p in points if p.rows == rows), key=lambda p: p.context)
            label = f"{rows} row{'s' * (rows > 1)}"
            times = [1e3 * p.seconds for p in line]
            by_context.plot([p.context for p in line], times, marker="o", markersize=3, color=COLOURS[i], label=label)
        by_context.set_ylim(bottom=0)
        by_context.set_title("Milliseconds of a step over context")
        if by_context.get_legend_handles_labels()[0]:
            by_context.legend(frameon=False)
        for cliff in cliffs:
            b = cliff.after
            if cliff.along == "rows" and b.context == context:
                by_rows.plot(b.rows, b.tokens_per_second, "v", color="#000000", markersize=8)
            elif cliff.along == "context":
                by_context.plot(b.context, 1e3 * b.seconds, "^", color="#000000", markersize=8)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        save(figure, path)
