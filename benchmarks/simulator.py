"""The simulator: requests replayed a second, and its prefix hit rate beside that of an LRU written here.

Without arguments on made-up traces; with files, on those: Azure's LLM inference trace (.csv), Mooncake's (.jsonl).
"""

from __future__ import annotations

import argparse
import statistics
from collections import OrderedDict
from time import process_time

from hibachi.engine.scheduler.policy import Fcfs
from hibachi.engine.simulator.simulate import Setup, simulate
from hibachi.engine.simulator.steptime import StepTime
from hibachi.engine.simulator.trace import Trace, read_trace, synthetic

SETUPS = {
    "lengths only": Setup(enable_prefix_caching=False),
    "with blocks": Setup(enable_prefix_caching=False, num_blocks=20_000, block_size=16),
    "256 rows, 3 times as fast": Setup(enable_prefix_caching=False, max_num_seqs=256),
}


def speed(trace: Trace, repeats: int) -> None:
    print(f"{trace.name}, {len(trace):,} requests\n\n| setup | requests/s, median of {repeats} | best |\n|---|---|---|")
    for name, setup in SETUPS.items():
        given = trace.faster(3) if "fast" in name else trace
        rates = []
        for _ in range(repeats):
            began = process_time()  # one thread: what it takes of a core, whoever shares it
            simulate(given, setup, StepTime(), Fcfs)
            rates.append(len(trace) / (process_time() - began))
        print(f"| {name} | {statistics.median(rates):,.0f} | {max(rates):,.0f} |")


def lru(trace: Trace, capacity: float) -> float:
    """Share of the prompts' tokens that an LRU of so many pieces has, one request after the other."""
    cache: OrderedDict[object, None] = OrderedDict()
    hits = 0
    for prompt, keys in zip(trace.prompt.tolist(), trace.keys or [], strict=True):
        full = keys[: prompt // trace.key_tokens]
        known = 0
        while known < len(full) and full[known] in cache:
            known += 1
        hits += min(known, (prompt - 1) // trace.key_tokens)
        for key in reversed(full):  # heads are left last, so tails go first
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits * trace.key_tokens / int(trace.prompt.sum())


def prefixes(trace: Trace) -> None:
    print(
        f"\n{trace.name}, {len(trace):,} requests\n\n| blocks | LRU | scheduler, 1 row | 64 rows |\n|---|---|---|---|"
    )
    pieces = [-(-n // trace.key_tokens) for n in trace.prompt.tolist()]
    for blocks in (1000, 2000, 4000, 8000, 16000, 32000, None):
        rates = []
        for rows in (1, 64):
            run = simulate(
                trace, Setup(max_num_seqs=rows, num_blocks=blocks, max_num_batched_tokens=8192), StepTime(), Fcfs
            )
            rates.append(run.summary()["hit_rate"])
        print(
            f"| {blocks or 'enough'} | {lru(trace, blocks or 1e9):.2%} | {rates[0]:.2%} | {rates[1]:.2%} |", flush=True
        )
    found = rates[0] * int(trace.prompt.sum()) / trace.key_tokens
    print(f"\nof all pieces, the last of a prompt among them: {found / sum(pieces):.2%} with enough blocks")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--azure", metavar="FILE")
    parser.add_argument("--mooncake", metavar="FILE")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    made = synthetic(20_000, rate=5, shared=0.8)
    speed(read_trace(args.azure) if args.azure else made, args.repeats)
    prefixes(read_trace(args.mooncake) if args.mooncake else made)
