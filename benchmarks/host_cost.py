"""Host cost of a decode step: schedule + lower + commit, in microseconds, without a model. Target: 50 at 64 rows."""

from __future__ import annotations

import argparse
from time import perf_counter

import numpy as np

from hibachi.plan.lower import lower
from hibachi.plan.scheduler import Limits, Scheduler
from hibachi.plan.sequence import Seq


def measure(rows: int, steps: int) -> list[float]:
    """Medians in microseconds: schedule, lower, commit, all of it."""
    prompt = 128
    longest = prompt + steps + 1
    blocks = rows * -(-longest // 16) + 1
    limits = Limits(rows=rows, budget=max(8192, rows), chunk=8192, max_len=longest, blocks=blocks)
    scheduler = Scheduler(limits)
    for _ in range(rows):
        scheduler.add(Seq(prompt, steps))
    nobody = np.zeros(rows, bool)
    times = []
    while (started := perf_counter()) and (plan := scheduler.schedule()) is not None:
        scheduled = perf_counter()
        lower(plan.rows, plan.start, plan.q, plan.emit, scheduler.block_table, limits.block_size)
        lowered = perf_counter()
        scheduler.commit(plan, nobody[: int(plan.emit.sum())])
        done = perf_counter()
        if int(plan.q.max()) == 1:
            times.append((scheduled - started, lowered - scheduled, done - lowered, done - started))
    scheduler.check()
    return (np.median(times, axis=0) * 1e6).tolist()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    print("| rows | schedule | lower | commit | total, µs a step |\n|---|---|---|---|---|")
    for rows in (1, 8, 64, 256, 1024):
        schedule, low, commit, total = measure(rows, args.steps)
        print(f"| {rows} | {schedule:.1f} | {low:.1f} | {commit:.1f} | **{total:.1f}** |")
