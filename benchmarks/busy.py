"""A decode step beside other work, and on fewer processors: what threads cost when others have the machine.

    .venv/bin/python benchmarks/busy.py --model tiny --rows 8 64

For each place: a step with one thread and with all threads of the team, in turns within a process, in several
processes. "busy" has a process beside it on every core, "one core" is tied to one (taskset), "half stopped" is stopped
for half of each 20 ms, as a quota does to it. What counts is the ratio of the two turns, in time and in processor time:
between turns a scheduler gives a process more or less of a busy machine, by a factor of two.
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
from hibachi.backend.kernels.library import library
model, rows, steps, backend, turns = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
with hibachi.LLM(model, backend=backend, max_model_len=512) as llm:
    params = hibachi.SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    prompts = [[5 + i] * 8 for i in range(rows)]
    llm.generate(prompts, params.with_(max_tokens=8))
    most = library().kernels.threads()
    taken = []
    for _ in range(turns):
        for threads in (1, most):
            library().kernels.set_threads(threads)
            began, used = time.perf_counter(), time.process_time()
            llm.generate(prompts, params)
            taken.append([(time.perf_counter() - began) / steps * 1e3, (time.process_time() - used) / steps * 1e3])
    print(json.dumps(taken))
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


def steps(where: str, begin: list[str], arguments: list[str]) -> list[tuple[float, float]]:
    """Milliseconds of a step, and of processor time: with one thread, with all, with one, and so on."""
    command = [*begin, sys.executable, "-c", STEPS, *arguments]
    env = {"HIBACHI_THREADS": str(len(os.sched_getaffinity(0)))} | os.environ
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    if where == "half stopped":
        threading.Thread(target=stop_and_go, args=(process,), daemon=True).start()
    said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{where}: the process ended with {process.returncode}")
    return [(took, used) for took, used in json.loads(said.splitlines()[-1])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="tiny", help="as of hibachi.LLM (default: tiny)")
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turns", type=int, default=6, help="of a process, each with one thread and with all")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    args = parser.parse_args()
    most = len(os.sched_getaffinity(0))
    print(f"| where | rows | one thread, ms | {most} threads, ms | time | processor time |")
    print("|---|---|---|---|---|---|")
    for where in args.places:
        with place(where) as begin:
            for rows in args.rows:
                arguments = [args.model, str(rows), str(args.steps), args.backend, str(args.turns)]
                found = [x for _ in range(args.processes) for x in steps(where, begin, arguments)]
                one, all_ = found[::2], found[1::2]
                time_, used = (median(b[i] / a[i] for a, b in zip(one, all_, strict=True)) for i in (0, 1))
                ms = f"{median(x[0] for x in one):.2f} | {median(x[0] for x in all_):.2f}"
                print(f"| {where} | {rows} | {ms} | {time_:.2f} | {used:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
