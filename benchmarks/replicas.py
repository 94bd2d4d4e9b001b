"""What replicas behind the router do, as a picture: the time to the first token for one work and more and more
replicas, and for as many more people as replicas, beside the share of prompt tokens that are found in caches.

Both take what `hibachi sim` wrote; docs/scale.md has the commands.

    python -m benchmarks.replicas --work FILE --people FILE [FILE ...] --plot PICTURE
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench.plot import COLOURS, LOOK, check_format, figure_of, library, save
from hibachi.common.phases import short_duration


def read(paths: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The runs of each policy, by the number of replicas."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        for run in json.loads(Path(path).read_text())["runs"]:
            found.setdefault(run["setup"]["router"], []).append(run)
    return {router: sorted(runs, key=lambda run: int(run["setup"]["replicas"])) for router, runs in found.items()}


def plot(work: dict[str, list[dict[str, Any]]], people: dict[str, list[dict[str, Any]]], path: str) -> None:
    check_format(path)
    with library().rc_context(LOOK):
        figure = figure_of(9.6, 3.6)
        first, second, hits = figure.subplots(1, 3)
        for panel, by_router in ((first, work), (second, people)):
            for (router, runs), colour in zip(by_router.items(), COLOURS, strict=False):
                at = [run["setup"]["replicas"] for run in runs]
                for name, style in (("p50", "-"), ("p99", "--")):
                    values = [run["ttft"][name] for run in runs]
                    panel.plot(at, values, style, marker="o", markersize=3, color=colour, label=f"{router}, {name}")
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter(lambda value, _: short_duration(value))
        requests = next(iter(work.values()))[0]["requests"]
        each = next(iter(people.values()))[0]
        first.set_title(f"Time to first token: {requests:,} requests")
        second.set_title(f"{each['requests'] / each['setup']['replicas']:,.0f} requests a replica")
        second.sharey(first)
        for runs, colour in zip(people.values(), COLOURS, strict=False):
            at, share = [run["setup"]["replicas"] for run in runs], [100 * run["hit_rate"] for run in runs]
            hits.plot(at, share, marker="o", markersize=3, color=colour)
        hits.set_title("Prompt tokens found (%)")
        hits.set_ylim(bottom=0)
        for panel in (first, second, hits):
            panel.set_xlabel("replicas")
        for panel in (second, hits):
            panel.set_xscale("log")
            at = sorted({run["setup"]["replicas"] for runs in people.values() for run in runs})
            panel.set_xticks(at, [f"{n:,}" for n in at])
            panel.minorticks_off()
        figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        save(figure, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, metavar="FILE", help="one trace on several numbers of replicas")
    parser.add_argument("--people", required=True, nargs="+", metavar="FILE", help="copies of it, on as many more")
    parser.add_argument("--plot", required=True, metavar="PICTURE", help="a .png or .svg file")
    args = parser.parse_args()
    plot(read([args.work]), read(args.people), args.plot)
