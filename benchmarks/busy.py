"""A decode step beside other work, and on fewer processors: what threads cost when others have the machine.

    .venv/bin/python benchmarks/busy.py --model tiny --rows 8 64

For each place: a step with one thread, and with all threads of the team, measured in turns in processes that begin
anew. "busy" has a process beside it on every core, "one core" is tied to one (taskset), "half stopped" is stopped for
half of each 20 ms, as a quota does to it. What counts is the ratio of the two, in time and in processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

SPIN = "while True: pass"
STEPS = """
import json, sys, time
import hibachi
from statistics import median
model, rows, steps, backend = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
with hibachi.LLM(model, backend=backend, max_model_len=512) as llm:
    params = hibachi.SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    llm.generate([[5 + i] * 8 for i in range(rows)], params.with_(max_tokens=8))
    began, used = time.perf_counter(), time.process_time()
    llm.generate([[5 + i] * 8 for i in range(rows)], params)
    print(json.dumps([(time.perf_counter() - began) / steps * 1e3, (time.process_time() - used) / steps * 1e3]))
"""
PLACES = ("free", "busy", "one core", "half stopped")


@contextmanager
def place(name: str) -> Iterator[list[str]]:
    """What a command begins with there."""
    cores = sorted(os.sched_getaffinity(0))
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in cores if name == "busy"]
    try:
        yield ["taskset", "-c", str(cores[0])] if name == "one core" else []
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def stop_and_go(process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        for what in (signal.SIGSTOP, signal.SIGCONT):
            try:
                process.send_signal(what)
            except ProcessLookupError:
                return
            time.sleep(0.01)


def step(where: str, begin: list[str], threads: int, arguments: list[str]) -> tuple[float, float]:
    """Milliseconds of a step, and of processor time."""
    env = os.environ | {"HIBACHI_THREADS": str(threads)}
    command = [*begin, sys.executable, "-c", STEPS, *arguments]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    if where == "half stopped":
        threading.Thread(target=stop_and_go, args=(process,), daemon=True).start()
    said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{where}: the process ended with {process.returncode}")
    took, used = json.loads(said.splitlines()[-1])
    return took, used


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="tiny", help="as of hibachi.LLM (default: tiny)")
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    args = parser.parse_args()
    most = len(os.sched_getaffinity(0))
    print(f"| where | rows | one thread, ms | {most} threads, ms | time | processor time |")
    print("|---|---|---|---|---|---|")
    for where in args.places:
        with place(where) as begin:
            for rows in args.rows:
                arguments = [args.model, str(rows), str(args.steps), args.backend]
                found: dict[int, list[tuple[float, float]]] = {1: [], most: []}
                for _ in range(args.turns):
                    for threads, taken in found.items():
                        taken.append(step(where, begin, threads, arguments))
                (one, used_one), (all_, used_all) = (
                    [median(column) for column in zip(*taken, strict=True)] for taken in found.values()
                )
                ratios = f"{all_ / one:.2f} | {used_all / used_one:.2f}"
                print(f"| {where} | {rows} | {one:.2f} | {all_:.2f} | {ratios} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
