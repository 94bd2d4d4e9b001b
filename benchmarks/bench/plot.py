"""Pictures of results: engines side by side, a server under load, replays of a trace, where a step's time goes and
how cost grows."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench.figures import Summary, summarise
from benchmarks.bench.growth import Cliff, Point
from benchmarks.bench.profile import PARTS, StepProfile, kinds
from benchmarks.bench.report import Bounds, bound_of, bounds_of, ours
from hibachi.common.phases import short_duration
from hibachi.engine.simulator.simulate import Run
from hibachi.errors import ConfigError, MissingExtra
from hibachi.testing.bench.samples import INTERRUPTED

FORMATS = (".png", ".svg")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a6c00", "#56b4e9", "#444444", "#e69f00")
_STYLES = ("-", "--", ":", "-.")
_TICKS = (0, 50, 90, 99, 99.9)
_INK, _GRID = "#333333", "#e4e4e4"
LOOK = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.edgecolor": "#999999",
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "svg.hashsalt": "hibachi",
}
_OURS, _PEER = COLOURS[1], "#8fa7b8"
_MOST_STEPS = 300  # columns of the picture of a profile


def check_format(path: str | Path) -> None:
    """That a picture can be written there. Raises ConfigError, MissingExtra."""
    if Path(path).suffix not in FORMATS:
        raise ConfigError(f"A picture is a .png or .svg file; got {str(path)!r}.")
    library()


def library() -> Any:
    """matplotlib. Raises MissingExtra."""
    try:
        return importlib.import_module("matplotlib")
    except ModuleNotFoundError as e:
        if e.name != "matplotlib":
            raise
        raise MissingExtra(
            "A picture needs the package 'matplotlib', which is not installed. It is in the extra 'plot': "
            "pip install '.[plot]' in the checkout."
        ) from e


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
    panel.yaxis.set_major_formatter(lambda value, _: short_duration(value))
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
        names = [f"{k.name}\n{short_duration(k.seconds)}, {k.steps:,} steps" for k in found]
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


def plot_load(document: dict[str, Any], path: str | Path) -> None:
    """Distributions of the times; tokens a second and requests at a time over the run.

    document: what `hibachi bench serve --out` wrote. Raises ConfigError, MissingExtra, OSError.
    """
    check_format(path)
    of, samples = document["figures"], document["requests"]
    good = [s for s in samples if s["error"] is None]
    with library().rc_context(LOOK):
        figure = figure_of(9.6, 6.4)
        (first, between), (rate, running) = figure.subplots(2, 2)
        _shares(
            first,
            {"TTFT": [s["ttft"] for s in good if s["ttft"] is not None], "whole request": [s["e2e"] for s in good]},
        )
        first.set_title("Time to first token, and of the whole request")
        gaps = [gap for s in good for gap in s["itl"]]
        _shares(
            between, {"between chunks (ITL)": gaps, "mean of a request (TPOT)": [t for s in good if (t := s["tpot"])]}
        )
        between.set_title("Time between tokens")
        end = of["seconds"] or 1.0
        if slo := of.get("slo"):
            for panel, limit in ((first, slo["ttft"]), (between, slo["itl"])):
                panel.axvline(limit, color="#333333", linestyle=":", linewidth=1, label="promised (SLO)")
        for panel in (first, between):
            if panel.get_legend_handles_labels()[0]:
                panel.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)
        edges = np.linspace(0, end, min(120, max(10, round(end * 4))) + 1)
        times = np.concatenate([_chunks(s) for s in samples] or [np.zeros(0)])
        scale = of["new_tokens"] / of["chunks"] if of["chunks"] else 1.0  # tokens of a chunk
        per_second = scale * np.histogram(times, edges)[0] / (edges[1] - edges[0])
        rate.stairs(per_second, edges, color=COLOURS[1], linewidth=1.4)
        rate.set_title("New tokens a second")
        moments = [(s["sent"], 1) for s in samples] + [(s["end"], -1) for s in samples]
        moments.sort()
        at = [0.0, *(t for t, _ in moments), end]
        count = np.cumsum([0, *(n for _, n in moments), 0])
        running.step(at, count, where="post", color=COLOURS[0], linewidth=1.2)
        running.set_title("Requests at a time")
        bad = [s["end"] for s in samples if s["error"] is not None and s["error"] != INTERRUPTED]
        if bad:
            running.plot(bad, np.zeros(len(bad)), "x", color="#000000", markersize=5, label="failed", clip_on=False)
            running.legend(frameon=False, fontsize=8)
        for panel in (rate, running):
            panel.set_xlabel("seconds")
            panel.set_xlim(0, end)
            panel.set_ylim(bottom=0)
        figure.suptitle(load_title(document), x=0.01, ha="left", fontsize=11, fontweight="bold")
        save(figure, path)


def load_title(document: dict[str, Any]) -> str:
    """The model, what was sent, and how fast."""
    o = document["options"]
    name = document["model"] or o["url"]
    if o["trace"]:
        return f"{name}: {Path(o['trace']).name}" + (f", {o['speed']:g} times as fast" if o["speed"] != 1 else "")
    what = Path(o["work"]).name if o["work"] else "random prompts"
    if o["rate"] is not None:
        what += f", {o['rate']:g} requests/s ({o['arrivals'] or 'poisson'})"
    return f"{name}: {what}" + (f", at most {o['concurrency']} at a time" if o["concurrency"] else "")


def _chunks(request: dict[str, Any]) -> Any:
    """The times at which its chunks came, in seconds after the start."""
    if request["ttft"] is None:
        return np.zeros(0)
    begun = request["sent"] if request["due"] is None else min(request["due"], request["sent"])
    return begun + request["ttft"] + np.cumsum([0.0, *request["itl"]])


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
    panel.xaxis.set_major_formatter(lambda value, _: short_duration(value))
    panel.xaxis.set_minor_formatter(lambda value, _: short_duration(value) if few and f"{value:e}"[0] in "25" else "")
    panel.tick_params(axis="x", which="minor", labelsize=8)
    panel.set_ylabel("% within")
    panel.set_ylim(0, 101)


def plot_replays(runs: Sequence[Run], labels: Sequence[str], path: str | Path) -> None:
    """Write a picture of the runs, of the same trace, as PNG or SVG. Raises ConfigError, MissingExtra, OSError."""
    check_format(path)
    with library().rc_context(LOOK):
        figure = figure_of(9.6, 6.4)
        (first, between), (queue, rows) = figure.subplots(2, 2)
        unit, scale = _time_unit(max(run.outcome.clock for run in runs) / 1e12)
        at = np.linspace(0, -np.log10(1 - _TICKS[-1] / 100), 200)
        for i, (run, label) in enumerate(zip(runs, labels, strict=True)):
            style = _STYLES[i // len(COLOURS) % len(_STYLES)]
            width = 1.4 + min(len(runs) - 1 - i, 3) * 0.9  # where they are equal, the first still shows
            line: Any = {"color": COLOURS[i % len(COLOURS)], "linestyle": style}
            percent = 100 * (1 - 10**-at)
            if len(run.times("first")):
                first.plot(at, np.percentile(run.times("first"), percent), label=label, linewidth=width, **line)
                between.plot(at, run.outcome.gaps.percentiles(percent), linewidth=width, **line)
            for panel, what in ((queue, "waiting"), (rows, "running")):
                when, value = run.over_time(what)
                panel.plot(when / scale, value, linewidth=0.7 * width, **line)
        _percent_axis(first, "Time to first token")
        _percent_axis(between, "Time between tokens")
        for panel, title in ((queue, "Requests waiting"), (rows, "Rows in use")):
            panel.set_title(title)
            panel.set_xlabel(f"time ({unit})")
            panel.set_ylim(bottom=0)
            panel.set_xlim(left=0)
            panel.margins(x=0)
        if first.get_legend_handles_labels()[0]:
            legend = figure.legend(loc="outside lower center", ncols=min(len(runs), 5), frameon=False)
            for handle in legend.get_lines():
                handle.set_linewidth(2)
        trace = runs[0].trace
        figure.suptitle(f"{trace.name}, {len(trace):,} requests", x=0.01, ha="left", fontsize=11, fontweight="bold")
        save(figure, path)


def _percent_axis(panel: Any, title: str) -> None:
    panel.set_title(title)
    panel.set_xlabel("percentile")
    panel.set_xticks([-np.log10(1 - p / 100) for p in _TICKS], [f"{p:g}" for p in _TICKS])
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda value, _: short_duration(value))
    panel.margins(x=0.01)


def _time_unit(span: float) -> tuple[str, float]:
    return next(((u, s) for u, s in (("hours", 3600.0), ("minutes", 60.0)) if span >= 3 * s), ("seconds", 1.0))
