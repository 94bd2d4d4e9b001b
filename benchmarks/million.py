"""A million requests through the scheduler: random arrivals, cancels, priorities, deadlines, proposals, faults; nothing
may break.

The world of tests/plan/world.py: a fake device stores token ids as keys and values, so every stream is compared with
its solo run. Every row's output is judged in every step; all other invariants after every call of a few, `--every`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from hibachi.engine.scheduler.step import Limits
from tests.plan.world import POLICIES, World, drive, random_request

KINDS = (
    *("requests", "steps", "proposed", "accepted", "preemptions", "hits", "evictions"),
    *("pause", "rollback", "cache lost", "memory short"),
)
ENDS = "stop", "length", "cancelled", "error", "late", "refused"


def era(seed: int, requests: int, every: int) -> tuple[str, Counter[str]]:
    """One engine's life: what it was, what happened. Raises AssertionError if anything breaks."""
    rng = random.Random(seed)
    rows = rng.choice((8, 16, 32))
    budget = rng.choice((rows, 64, 256))
    block_size = rng.choice((2, 4, 8))
    limits = Limits(
        rows=rows,
        budget=max(rows, budget),
        chunk=rng.choice((4, 16, 256)),
        max_model_len=40,
        blocks=1 + rows * rng.choice((12, 20, 40)) // block_size,
        block_size=block_size,
        max_num_queued_reqs=rng.choice((None, None, 50)),
        prefill=rng.choice((None, None, 32)),
    )
    depth = rng.choice((1, 1, 2, 3))
    policy = POLICIES[seed % len(POLICIES)]()
    proposals = random.Random(seed) if seed % 3 else None  # in two lives of three
    world = World(limits, policy, depth, strict=depth == 1, every=every, proposals=proposals)
    happened = drive(
        world,
        (random_request(i, rng, limits) for i in range(requests)),
        rng,
        arrive=rng.choice((0.3, 0.45, 0.6)),
        crowd=200,
    )
    what = f"{type(policy).__name__}, {rows} rows, {limits.blocks} blocks of {block_size}, depth {depth}"
    what += ", proposals" if proposals else ""
    return what, happened


def main(requests: int, size: int, every: int, seed: int) -> Counter[str]:
    total: Counter[str] = Counter()
    violations = 0
    began = time.perf_counter()
    while total["requests"] < requests:
        now = min(size, requests - total["requests"])
        try:
            what, happened = era(seed, now, every)
        except AssertionError as e:
            violations += 1
            total["requests"] += now
            print(f"seed {seed}: VIOLATION: {e}", flush=True)
        else:
            total += happened
            seconds = time.perf_counter() - began
            print(f"{total['requests']:>9,} requests, {seconds:6.0f} s   ({what})", flush=True)
        seed += 1
    print("\n| what | count |\n|---|---|")
    for kind in (*KINDS, *ENDS):
        print(f"| {kind} | {total[kind]:,} |")
    print(f"| **violations** | **{violations}** |")
    total["violations"] = violations
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=20_000, help="requests in the life of one engine")
    parser.add_argument("--every", type=int, default=50, help="calls from one look at everything to the next")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.exit(bool(main(args.requests, args.size, args.every, args.seed)["violations"]))
