"""From the times of tokens to the figures that are compared."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench.process import Answered, Process, Ran
from benchmarks.bench.work import totals
from hibachi.errors import ConfigError
from hibachi.testing.bench.report import Slo
from hibachi.testing.bench.work import TimedRequest

_PERCENTS = (50, 90, 99)
_ALIKE = {"q8_0": "int8", "q4_0": "int4"}


def kept(slo: Slo, a: Answered) -> bool:
    """Whether an answer came as promised."""
    if not a.times:
        return False
    between = (a.times[-1] - a.times[0]) / (len(a.times) - 1) if len(a.times) > 1 else None
    return slo.holds(a.times[0] - a.due, between)


def figures(requests: Sequence[TimedRequest], ran: Ran, slo: Slo | None = None) -> dict[str, Any]:
    """Of one run. Seconds, tokens and requests a second, MiB.

    seconds: from the start to the last token. ttft: from when a request was due to its first token; itl: between two
    tokens of a request; e2e: from when it was due to its last: percentiles over all. complete: all tokens came.
    others: the share of the processors that other processes had. goodput: requests a second that kept the SLO.
    """
    prompt, wanted = totals(requests)
    answers = [a for a in ran.answers if a.times]
    came = sum(len(a.times) for a in answers)
    seconds = max((a.times[-1] for a in answers), default=ran.use.seconds)
    gaps = [b - a for each in answers for a, b in pairwise(each.times)]
    out: dict[str, Any] = {
        "requests": len(requests),
        "prompt_tokens": prompt,
        "new_tokens": came,
        "complete": came == wanted,
        "seconds": seconds,
        "tokens_per_second": came / seconds if seconds else 0.0,
        "ttft": _percentiles(a.times[0] - a.due for a in answers),
        "itl": _percentiles(gaps),
        "e2e": _percentiles(a.times[-1] - a.due for a in answers),
        "cpu_seconds": ran.use.cpu_seconds,
        "others": ran.use.others,
        "contended": ran.use.contended,
        "peak_rss_mib": ran.use.peak_rss_mib,
    }
    if slo is not None:
        good = sum(kept(slo, a) for a in answers)
        out |= {"slo": asdict(slo), "goodput": good / seconds if seconds else 0.0, "slo_share": good / len(requests)}
    return out


def _percentiles(values: Iterable[float]) -> dict[str, float] | None:
    found = list(values)
    if not found:
        return None
    at = np.percentile(found, _PERCENTS)
    return {f"p{p}": float(v) for p, v in zip(_PERCENTS, at, strict=True)}


def dtype_of(run: dict[str, Any]) -> str:
    """What a run's matrices were kept in: "int8" and so on where they were quantized, else the dtype of the run."""
    about = run.get("about") or {}
    quantized = about.get("quantization") or ("int8" if "int8" in str(about.get("kernels")) else "none")
    return str(run["dtype"] if quantized == "none" else quantized)


def record(process: Process, work: str, turn: int, of: dict[str, Any], rate: float | None = None) -> dict[str, Any]:
    """One run as it is written to JSON."""
    s = process.setup
    dtype = dtype_of({"dtype": s.dtype, "about": process.about})
    return {
        "engine": process.label,
        "version": process.version,
        "about": process.about,
        "model": s.title or Path(s.model).name,
        "work": work,
        "rate": rate,
        "turn": turn,
        "dtype": dtype,
        "computes": s.dtype,
        "rows": s.rows,
        "threads": s.threads,
        "enable_prefix_caching": s.enable_prefix_caching,
        "options": {k: v for k, v in s.options.items() if k != "server"},
        "start_up": process.start_up,
        **of,
    }


@dataclass(frozen=True, slots=True)
class Summary:
    """All runs of one engine on one work. values: medians by name ("tokens_per_second", "ttft.p99", ...) over the runs
    that had the machine to themselves; over all of them, if none had. contended: how many of the runs had not."""

    engine: str
    version: str
    model: str
    dtype: str
    threads: int
    work: str
    rate: float | None
    runs: int
    contended: int
    complete: bool
    values: dict[str, float]
    failed: str | None = None

    @property
    def what(self) -> tuple[str, str, int, str, float]:
        """What can be compared."""
        return self.model, self.numbers, self.threads, self.work, self.rate or 0.0

    @property
    def numbers(self) -> str:
        """The dtype under one name: llama.cpp has its own for eight bits."""
        return _ALIKE.get(self.dtype, self.dtype)


def summarise(runs: Iterable[dict[str, Any]]) -> list[Summary]:
    """The runs by engine and work, in the order in which they came."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        named = run | {"dtype": dtype_of(run)}
        key = tuple(named.get(k) for k in ("engine", "version", "model", "dtype", "threads", "work", "rate"))
        groups.setdefault(key, []).append(run)
    return [_summary(key, group) for key, group in groups.items()]


def _summary(key: tuple[Any, ...], runs: list[dict[str, Any]]) -> Summary:
    done = [r for r in runs if "failed" not in r]
    quiet = [r for r in done if not r["contended"]]
    values: dict[str, list[float]] = {}
    for run in quiet or done:
        for name, value in _flat(run):
            values.setdefault(name, []).append(value)
    engine, version, model, dtype, threads, work, rate = key
    return Summary(
        engine,
        version,
        model,
        dtype,
        threads,
        work,
        rate,
        runs=len(done),
        contended=len(done) - len(quiet),
        complete=all(r["complete"] for r in done),
        values={name: statistics.median(each) for name, each in values.items()},
        failed=None if done else runs[0]["failed"],
    )


def _flat(run: dict[str, Any]) -> Iterable[tuple[str, float]]:
    for name, value in run.items():
        inner = value.items() if isinstance(value, dict) else [(None, value)]
        for key, number in inner:
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                yield name if key is None else f"{name}.{key}", float(number)


def read_results(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Documents that `benchmarks.bench` wrote. Raises ConfigError, OSError."""
    found = []
    for path in paths:
        try:
            document = json.loads(Path(path).read_text())
            runs = document["runs"]
            for run in runs:
                assert {"engine", "work", "model", "dtype", "threads"} <= run.keys()
                assert "failed" in run or {"tokens_per_second", "contended", "complete"} <= run.keys()
            summarise(runs)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as e:
            raise ConfigError(
                f"{path} is no result: expected what `benchmarks.bench throughput --out FILE` writes ({e!r})."
            ) from e
        found.append(document)
    return found
