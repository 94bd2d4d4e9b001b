"""Tables of results: on the terminal, and as a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.bench.figures import Summary, summarise
from benchmarks.bench.process import OURS

Row = list[str]
OFFLINE = ["work", "engine", "dtype", "tokens/s", "to best peer", "of bound", "TTFT p50 / p99 ms", "ITL p50 / p99 ms"]
OFFLINE += ["RSS MiB", "start s (+ import)", "runs"]
ONLINE = ["work", "engine", "dtype", "TTFT p50 / p99 ms", "p99 to best", "ITL p50 / p99 ms", "p99 to best", "goodput/s"]
ONLINE += ["SLO kept", "tokens/s", "runs"]


def ours(s: Summary) -> bool:
    return s.engine.startswith(OURS)


def best_peer(s: Summary, all_of_them: Iterable[Summary], name: str, *, least: bool = False) -> float | None:
    """The best value of a peer at the same work; None means no peer did it."""
    found = [p.values[name] for p in all_of_them if not ours(p) and p.what == s.what and name in p.values]
    return (min if least else max)(found) if found else None


Bounds = Mapping[tuple[str, str | None, str], float]
"""Tokens a second by model, dtype (None means not said) and work."""


def bounds_of(documents: Sequence[dict[str, Any]]) -> Bounds:
    """The bounds whose ceilings were measured on a quiet machine: others are too low to say anything."""
    quiet = [d for d in documents if not d.get("ceilings", {}).get("contended")]
    return {
        (model, d.get("ceilings", {}).get("dtype"), title): rate
        for d in quiet
        for model in {run["model"] for run in d["runs"]}
        for title, rate in d.get("bounds", {}).items()
    }


def bound_of(limits: Bounds, s: Summary) -> float | None:
    """The bound of such runs."""
    return limits.get((s.model, s.numbers, s.work), limits.get((s.model, None, s.work)))


def tables(documents: Sequence[dict[str, Any]]) -> list[tuple[str, Row, list[Row]]]:
    """(title, head, rows) for each model and number of threads: work that is there at once, then work that arrives."""
    found = summarise(run for d in documents for run in d["runs"])
    limits = bounds_of(documents)
    out = []
    for model, threads in dict.fromkeys((s.model, s.threads) for s in found):
        mine = [s for s in found if (s.model, s.threads) == (model, threads)]
        mine.sort(key=lambda s: (s.work, s.rate or 0.0))
        title = f"{model}, {threads} thread{'s' * (threads != 1)}"
        rows = [_offline(s, mine, bound_of(limits, s)) for s in mine if s.rate is None]
        if rows:
            out.append((f"{title}: all requests at once", OFFLINE, rows))
        rows = [_online(s, mine) for s in mine if s.rate is not None]
        if rows:
            out.append((f"{title}: requests that arrive", ONLINE, rows))
    return out


def _offline(s: Summary, others: Sequence[Summary], limit: float | None) -> Row:
    if s.failed is not None:
        return [s.work, s.engine, s.dtype, f"failed: {s.failed}", *[""] * (len(OFFLINE) - 4)]
    v, best = s.values, best_peer(s, others, "tokens_per_second")
    rate = v["tokens_per_second"]
    return [
        s.work,
        s.engine,
        s.dtype,
        f"{rate:,.1f}" + ("" if s.complete else " (incomplete)"),
        f"{rate / best:.2f}x" if best else "",
        f"{rate / limit:.0%}" if limit else "",
        _pair(v, "ttft"),
        _pair(v, "itl"),
        f"{v['peak_rss_mib']:,.0f}" if "peak_rss_mib" in v else "",
        f"{v['start_up.total'] - v['start_up.import']:.2f} (+ {v['start_up.import']:.2f})",
        _runs(s),
    ]


def _online(s: Summary, others: Sequence[Summary]) -> Row:
    if s.failed is not None:
        return [s.work, s.engine, s.dtype, f"failed: {s.failed}", *[""] * (len(ONLINE) - 4)]
    v = s.values
    return [
        f"{s.work} {s.rate:g}/s",
        s.engine,
        s.dtype,
        _pair(v, "ttft"),
        _ratio(s, others, "ttft.p99"),
        _pair(v, "itl"),
        _ratio(s, others, "itl.p99"),
        f"{v['goodput']:.2f}" if "goodput" in v else "",
        f"{v['slo_share']:.0%}" if "slo_share" in v else "",
        f"{v['tokens_per_second']:,.1f}" + ("" if s.complete else " (incomplete)"),
        _runs(s),
    ]


def _ratio(s: Summary, others: Sequence[Summary], name: str) -> str:
    best = best_peer(s, others, name, least=True)
    return f"{s.values[name] / best:.2f}x" if best and name in s.values else ""


def _pair(values: dict[str, float], name: str) -> str:
    if f"{name}.p50" not in values:
        return ""
    return " / ".join(_ms(values[f"{name}.{p}"]) for p in ("p50", "p99"))


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def _runs(s: Summary) -> str:
    if not s.contended:
        return str(s.runs)
    return f"{s.runs}, all contended" if s.contended == s.runs else f"{s.runs}, {s.contended} contended and left out"


def text(documents: Sequence[dict[str, Any]]) -> str:
    """For the terminal."""
    out = []
    for title, head, rows in tables(documents):
        cells = [[_cut(c) for c in row] for row in (head, *rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        used = [i for i, column in enumerate(zip(*cells[1:], strict=True)) if any(column)]
        lines = ["  ".join(_align(row[i], widths[i], i) for i in used).rstrip() for row in cells]
        out.append("\n".join([title, "", *lines]))
    return "\n\n".join(out)


def _cut(cell: str) -> str:
    return cell if len(cell) <= 60 else cell[:59] + "…"


def _align(cell: str, width: int, column: int) -> str:
    return f"{cell:<{width}}" if column < 3 else f"{cell:>{width}}"


def page(documents: Sequence[dict[str, Any]]) -> str:
    """RESULTS.md."""
    lines = ["# Results", ""]
    lines.append(
        "Written by `python -m benchmarks.bench compare --results FILE`, from the JSON of its runs; do not edit. Tokens"
    )
    lines.append(
        "are generated ones; medians over the runs in which others had at most 3 % of the machine, or over all"
    )
    lines.append("where no run had that. `docs/benchmarks.md` says how to repeat it.")
    for d in documents:
        lines += ["", *_about(d)]
    for title, head, rows in tables(documents):
        lines += ["", f"## {title}", "", _line(head), _line(["---"] * len(head)), *map(_line, rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Row) -> str:
    return f"| {' | '.join(c.replace('|', '/') for c in cells)} |"


def _about(d: dict[str, Any]) -> list[str]:
    m = d["machine"]
    parts = [f"{m['cores']} cores of {m.get('processor') or m['system']}", m["system"]]
    if m.get("memory_gib"):
        parts.append(f"{m['memory_gib']:g} GiB")
    engines = dict.fromkeys(_engine(r) for r in d["runs"] if "failed" not in r)
    lines = [f"- {d['date'][:10]}: {', '.join(parts)}; Python {m['python']}; {'; '.join(engines)}."]
    if limits := d.get("ceilings"):
        rates = ", ".join(f"{rate / 1e12:.2f} at {n} rows" for n, rate in limits["products"].items())
        mark = " (contended)" if limits["contended"] else ""
        lines.append(
            f"  Ceilings{mark}: memory {limits['bandwidth'] / 1e9:.0f} GB/s; product of {limits['dtype']}, TFLOP/s: "
            f"{rates}."
        )
    return lines


def _engine(run: dict[str, Any]) -> str:
    library = run.get("about", {}).get("library")
    return f"{run['engine']} {run['version']}" + (f" on {library}" if library else "")
