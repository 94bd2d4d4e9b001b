"""Host cost of a decode step: schedule + lower + commit, in microseconds, without a model.

Targets: 50 at 64 rows, with everything on 60, and 300 at 1024 rows.
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import numpy as np

from hibachi.engine.scheduler.lower import lower
from hibachi.engine.scheduler.policy import Fair
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Limits


def measure(rows: int, steps: int, everything: bool) -> tuple[list[float], float]:
    """Microseconds: medians of schedule, lower, commit, all of it; the least of all of it.

    everything: prompts and what is generated are shared, tenants are served fairly, each request has its deadlines, and
    others wait.
    """
    prompt = 128
    longest = prompt + steps + 1
    blocks = rows * -(-longest // 16) + 1
    limits = Limits(rows=rows, budget=max(8192, rows), chunk=8192, max_model_len=longest, blocks=blocks)
    size = limits.block_size

    def key_of(seq: Seq, n: int) -> bytes:
        return tokens[seq.row, n * size : (n + 1) * size].tobytes()  # as the engine does

    tokens = np.arange(rows * longest, dtype=np.int32).reshape(rows, longest)
    scheduler = Scheduler(limits, Fair(), key_of) if everything else Scheduler(limits)
    for i in range(2 * rows if everything else rows):
        terms: dict[str, Any] = {}
        if everything:
            keys = [tokens[i % rows, n * size : (n + 1) * size].tobytes() for n in range(prompt // size)]
            terms = {"keys": keys, "salt": i, "tenant": i % 5, "deadline": 1e9 + i, "start_by": 1e8 + i}
        scheduler.add(Seq(prompt - i % size, steps, **terms), 0.0)  # so that blocks fill in every step
    nobody = np.zeros(rows, bool)
    times = []
    while scheduler.running or scheduler.waiting >= rows:
        now = perf_counter()
        scheduler.expire(now)
        plan = scheduler.schedule(now)
        if plan is None or scheduler.waiting < rows * everything:
            break
        scheduled = perf_counter()
        lower(plan.rows, plan.start, plan.q, plan.emit, scheduler.block_table, limits.block_size)
        lowered = perf_counter()
        scheduler.commit(plan, nobody[: int(plan.emit.sum())])
        done = perf_counter()
        if int(plan.q.max()) == 1:
            times.append((scheduled - now, lowered - scheduled, done - lowered, done - now))
    scheduler.check()
    assert len(times) > steps // 2
    return (np.median(times, axis=0) * 1e6).tolist(), min(t[-1] for t in times) * 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    print("| rows | | schedule | lower | commit | total, µs a step | least |\n|---|---|---|---|---|---|---|")
    for rows in (1, 8, 64, 256, 1024):
        for everything in (False, True):
            (schedule, low, commit, total), least = measure(rows, args.steps, everything)
            on = "everything on" if everything else ""
            print(f"| {rows} | {on} | {schedule:.1f} | {low:.1f} | {commit:.1f} | **{total:.1f}** | {least:.1f} |")
