"""A picture of some runs: percentiles of the times that users see, queue and rows over time."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hibachi.engine.simulator.simulate import Run
from hibachi.errors import ConfigError, MissingExtra

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


def check_format(path: str | Path) -> None:
    """That a picture can be written there. Raises ConfigError, MissingExtra."""
    if Path(path).suffix not in FORMATS:
        raise ConfigError(f"A picture is a .png or .svg file; got {str(path)!r}.")
    library()


def plot(runs: Sequence[Run], labels: Sequence[str], path: str | Path) -> None:
    """Write a picture of the runs, of the same trace, as PNG or SVG. Raises ConfigError, MissingExtra, OSError."""
    check_format(path)
    matplotlib = library()
    with matplotlib.rc_context(LOOK):
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(9.6, 6.4), layout="constrained")
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
        figure.savefig(path, dpi=110, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


def _percent_axis(panel: Any, title: str) -> None:
    panel.set_title(title)
    panel.set_xlabel("percentile")
    panel.set_xticks([-np.log10(1 - p / 100) for p in _TICKS], [f"{p:g}" for p in _TICKS])
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda value, _: seconds(value))
    panel.margins(x=0.01)


def _time_unit(span: float) -> tuple[str, float]:
    return next(((u, s) for u, s in (("hours", 3600.0), ("minutes", 60.0)) if span >= 3 * s), ("seconds", 1.0))


def seconds(value: float | None) -> str:
    """Short: 3.2 ms, 1.5 s, 280 s."""
    if value is None or value != value:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size * 0.9995:
            return f"{_short(value / size)} {unit}"
    return f"{_short(value / 1e-9)} ns" if value else "0 s"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


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
