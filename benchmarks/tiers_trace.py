"""What tiers bring on Mooncake's trace: hit tokens by place, and the time to the first token, with none, with host
memory, and with host memory and a disk.

Four workers of 2,000 blocks of 512 tokens stand behind the router's policy `prefix-affine`, which sends each request
where `benchmarks/router_trace.py` sends it. Each worker is a run of the simulator (docs/simulator.md): the production
scheduler, and a step takes the time that a model of 8 billion parameters takes. A token has 131 kB; it comes from host
memory at 25 GB/s, and from disk at 5 GB/s.

    python -m benchmarks.tiers_trace --mooncake FILE [--plot PICTURE]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.bench.plot import COLOURS, LOOK, check_format, figure_of, library, save
from benchmarks.router_trace import BLOCKS, SERVERS, SLOTS, replay
from hibachi.common.phases import short_duration
from hibachi.engine.scheduler.policy import Fcfs
from hibachi.engine.simulator.simulate import Run, Setup, simulate
from hibachi.engine.simulator.steptime import StepTime
from hibachi.engine.simulator.trace import Trace, read_trace
from hibachi.router.affine import PrefixAffine

INK = "#333333"
PLACES = ("device", "host memory", "disk")
TOKEN = 131_072  # bytes of keys and values: 32 layers, 8 key-value heads of 128, in bfloat16


@dataclass(frozen=True)
class Cell:
    """tokens: of the prompts. hits: of these, by place. first: seconds to the first token, 50th and 95th percentile.
    loads: blocks to the device, and from disk to host memory."""

    name: str
    tokens: int
    hits: tuple[int, ...]
    first: tuple[float, float]
    loads: tuple[int, int]


def workers(trace: Trace) -> list[Trace]:
    """The requests of each worker."""
    sent = replay(trace, PrefixAffine()).chosen
    parts = [[i for i, engine in enumerate(sent) if engine == n] for n in range(SERVERS)]
    return [
        replace(
            trace,
            arrival=trace.arrival[part],
            prompt=trace.prompt[part],
            output=trace.output[part],
            priority=trace.priority[part],
            keys=[(trace.keys or [])[i] for i in part],
        )
        for part in parts
    ]


def cell(name: str, parts: Sequence[Trace], setup: Setup) -> Cell:
    runs: list[Run] = [simulate(part, setup, StepTime(), Fcfs) for part in parts]
    figures = [run.summary() for run in runs]

    def total(what: str) -> int:
        return sum(each[what] for each in figures)

    host, disk = total("host_hit_tokens"), total("disk_hit_tokens")
    prompts = sum(int(part.prompt.sum()) for part in parts)
    p50, p95 = np.percentile(np.concatenate([run.times("first") for run in runs]), [50, 95]).tolist()
    hits = total("hit_tokens") - host - disk, host, disk
    return Cell(name, prompts, hits, (p50, p95), (total("loads"), total("disk_loads")))


def plot(cells: Sequence[Cell], title: str, path: str) -> None:
    check_format(path)
    with library().rc_context(LOOK):
        figure = figure_of(9.6, 0.9 + 0.62 * len(cells))
        hits, first = figure.subplots(1, 2, width_ratios=(1.15, 1))
        for i, one in enumerate(cells):
            left = 0.0
            for place, tokens, colour in zip(PLACES, one.hits, COLOURS[:3:2] + COLOURS[1:2], strict=True):
                share = 100 * tokens / one.tokens
                hits.barh(i, share, left=left, color=colour, label=place if i == 0 else None, height=0.6)
                if share >= 4:
                    hits.text(left + share / 2, i, f"{share:.0f}%", ha="center", va="center", fontsize=8, color="white")
                left += share
            hits.text(left + 1, i, f"{left:.0f}%", va="center", fontsize=9, fontweight="bold")
            first.plot(one.first, [i, i], color="#bbbbbb", linewidth=2, zorder=1)
            for seconds, fill, label in zip(one.first, (INK, "white"), ("median", "95th percentile"), strict=True):
                first.scatter(seconds, i, color=fill, edgecolors=INK, s=36, label=label if i == 0 else None, zorder=2)
                first.annotate(
                    short_duration(seconds), (seconds, i), (0, 7), textcoords="offset points", ha="center", fontsize=8
                )
        hits.set_title("Prompt tokens that were found computed, by where (%)")
        hits.set_xlim(0, 100)
        first.set_title("Time to the first token (logarithmic)")
        first.set_xscale("log")
        first.margins(x=0.1)
        first.xaxis.set_major_formatter(lambda value, _: short_duration(value))
        for panel in (hits, first):
            panel.set_yticks(range(len(cells)), [one.name for one in cells] if panel is hits else [""] * len(cells))
            panel.tick_params(axis="y", length=0)
            panel.tick_params(axis="x", which="minor", length=0)
            panel.set_ylim(len(cells) - 0.4, -0.6)
            panel.grid(axis="y", visible=False)
            panel.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        save(figure, path)


def size(blocks: int, tokens: int) -> str:
    return f"{blocks:,} blocks, {blocks * tokens * TOKEN / 1e9:,.0f} GB"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mooncake", metavar="FILE", required=True)
    parser.add_argument("--host-blocks", type=int, default=4000, metavar="N", help="of a worker (default: 4,000)")
    parser.add_argument("--disk-blocks", type=int, default=16000, metavar="N", help="of a worker (default: 16,000)")
    parser.add_argument("--plot", metavar="PICTURE", help="draw the figures, to a .png or .svg file")
    args = parser.parse_args()
    trace = read_trace(args.mooncake)
    if not trace.keys:
        parser.error("--mooncake: expected a trace with hash_ids.")
    if args.plot:
        check_format(args.plot)
    plain = Setup(max_num_seqs=SLOTS, num_blocks=BLOCKS, max_num_batched_tokens=8192)
    host = replace(plain, kv_host_blocks=args.host_blocks)
    setups = {
        "no tiers": plain,
        "host memory": host,
        "host memory and disk": replace(host, kv_disk_blocks=args.disk_blocks),
        "a device that holds all": replace(plain, num_blocks=None),
    }
    print(f"{trace.name}, {len(trace):,} requests, {int(trace.prompt.sum()):,} prompt tokens; {SERVERS} workers, each:")
    each = trace.key_tokens
    places = {"device": BLOCKS, "host memory": args.host_blocks, "disk": args.disk_blocks}
    print(*(f"- {name}: {size(blocks, each)}" for name, blocks in places.items()), "", sep="\n")
    print("| tiers | tokens hit | device | host memory | disk | TTFT p50 | p95 | blocks loaded | read from disk |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    parts, cells = workers(trace), list[Cell]()
    for name, setup in setups.items():
        one = cell(name, parts, setup)
        cells.append(one)
        shares = " | ".join(f"{tokens:,} ({tokens / one.tokens:.1%})" for tokens in (sum(one.hits), *one.hits))
        times = " | ".join(f"{seconds:.2f} s" for seconds in one.first)
        print(f"| {name} | {shares} | {times} | {one.loads[0]:,} | {one.loads[1]:,} |", flush=True)
    if args.plot:
        room = f"host memory {args.host_blocks:,}, disk {args.disk_blocks:,}"
        plot(cells, f"{SERVERS} workers, each with {BLOCKS:,} blocks of {each} tokens; {room}", args.plot)
