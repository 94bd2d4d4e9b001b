"""The report of a run, and its course over time."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from hibachi.common.installed import need, version
from hibachi.errors import ConfigError, printable
from hibachi.offline.drive import Counts
from hibachi.offline.runs import Done

REPORT = b'{\n "hibachi":'  # how a report begins
POINTS = 512  # of the course of a run that are kept, at most twice as many


class Course:
    """How a run went: a point now and then, ever further apart as it gets longer."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._every, self._next = 1.0, 0.0
        self.points: list[dict[str, float]] = []

    def see(self, counts: Counts) -> None:
        at = time.monotonic() - self._began
        if at < self._next:
            return
        self._next = at + self._every
        self.points.append(
            {
                "seconds": round(at, 3),
                "rows": counts.rows,
                "prompt_tokens": counts.prompt_tokens,
                "cached_tokens": counts.cached_tokens,
                "new_tokens": counts.new_tokens,
                "memory": resident(),
            }
        )
        if len(self.points) >= 2 * POINTS:
            del self.points[::2]
            self._every *= 2


def resident() -> int:
    """Bytes of memory that this process holds; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def report(done: Done, course: Course, more: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON could hold it. more: what else is known, such as the files."""
    counts, seconds = done.counts, done.seconds
    computed = counts.prompt_tokens - counts.cached_tokens
    return {
        "hibachi": version(),
        "status": done.status,
        "rows": done.rows,
        "failed": done.failed,
        "resumed": done.resumed,
        "engine": done.about,
        "seconds": round(seconds, 3),
        "this start": asdict(counts),
        "hit share": round(counts.cached_tokens / counts.prompt_tokens, 4) if counts.prompt_tokens else None,
        "rates": {
            "rows": round(counts.rows / seconds, 2) if seconds else None,
            "prompt tokens computed": round(computed / seconds, 2) if seconds else None,
            "new tokens": round(counts.new_tokens / seconds, 2) if seconds else None,
        },
        "remarks": done.remarks,
        "damaged journal lines": done.damaged,
        "created": done.created,
        **more,
        "course": course.points,
    }


def text(done: Done, output: str, *, limited: bool = True) -> str:
    """The same in a few lines for people. limited: the command says how many new tokens a row may get."""
    counts, output = done.counts, printable(output)
    if done.status == "done before":
        return f"{output} is finished: {done.rows:,} rows, {done.failed:,} failed. There was nothing to do."
    lines = []
    rows = f"{done.rows:,} rows, {done.failed:,} failed"
    if done.resumed:
        rows += f"; {done.resumed:,} were done before"
    lines.append(f"{output}: {rows}; {done.seconds:.1f} s, {counts.rows / max(done.seconds, 1e-9):,.1f} rows/s")
    if counts.prompt_tokens:
        hits = counts.cached_tokens / counts.prompt_tokens
        lines.append(
            f"{counts.prompt_tokens:,} tokens of prompts, {hits:.1%} of them from the cache; {counts.new_tokens:,} new "
            f"tokens, {counts.new_tokens / max(done.seconds, 1e-9):,.1f} a second"
        )
    if counts.losses:
        lines.append(f"The engine was lost {counts.losses} times; {counts.given_up} rows were given up.")
    computed = counts.rows - counts.failed
    if not limited and 2 * counts.cut > computed:
        lines.append(
            f"{counts.cut:,} of {computed:,} answers were cut off, as rows get 16 new tokens unless the model's "
            f"generation config says otherwise: --max-tokens N allows more."
        )
    lines += [f"{printable(what)}: {n:,} times" for what, n in sorted(done.remarks.items())]
    return "\n".join(lines)


def write(path: str, told: Mapping[str, Any]) -> None:
    """Raises OSError."""
    Path(path).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def is_told(path: str) -> bool:
    """Whether the file is a report or picture of an earlier run, or empty. Such a file may lie in a folder of rows; any
    other may be a user's rows. Raises OSError.
    """
    with open(path, "rb") as file:
        head = file.read(64)
    return not head or head.startswith((REPORT, b"\x89PNG", b"<?xml"))


def check_plot(path: str) -> None:
    """Raises ConfigError, MissingExtra."""
    if Path(path).suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"A picture is drawn as .png or .svg; got {path}.")
    need("matplotlib", "--plot", "plot")


def plot(told: Mapping[str, Any], path: str) -> None:
    """Rows, tokens a second and memory over time."""
    matplotlib = need("matplotlib", "--plot", "plot")
    matplotlib.use("Agg")
    pyplot = need("matplotlib.pyplot", "--plot", "plot")
    points = told["course"]
    at = [p["seconds"] for p in points]
    figure, (rows, speed, memory) = pyplot.subplots(3, 1, sharex=True, figsize=(8, 7), layout="constrained")
    rows.plot(at, [p["rows"] for p in points], color="#1f77b4")
    rows.set_ylabel("rows done")
    middle, new, hits = [], [], []
    for a, b in pairwise(points):
        took = max(b["seconds"] - a["seconds"], 1e-9)
        middle.append((a["seconds"] + b["seconds"]) / 2)
        new.append((b["new_tokens"] - a["new_tokens"]) / took)
        read = (b["prompt_tokens"] - b["cached_tokens"]) - (a["prompt_tokens"] - a["cached_tokens"])
        hits.append(read / took)
    speed.plot(middle, new, label="new tokens", color="#2ca02c")
    speed.plot(middle, hits, label="tokens of prompts, computed", color="#ff7f0e")
    speed.set_ylabel("tokens a second")
    speed.legend(loc="best")
    memory.plot(at, [p["memory"] / 2**20 for p in points], color="#7f7f7f")
    memory.set_ylim(bottom=0)
    memory.set_ylabel("memory of this process, MiB")
    memory.set_xlabel("seconds")
    for axes in (rows, speed, memory):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    rows.set_title(f"{told['rows']:,} rows, {told['failed']:,} failed, {told['seconds']:,.1f} s")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
