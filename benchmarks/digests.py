"""One digest of many answers, however they are computed: libraries, threads, variants, engines, first and busy starts.

    .venv/bin/python benchmarks/digests.py --model tiny --model .smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

Each line of the table is a process of its own (tests/kernels/answers.py). A first start has an empty cache folder, so
it compiles the kernels if no wheel has brought them; a busy one has a process beside it on every core. The command
fails if a column has two digests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ANSWERS = ROOT / "tests" / "kernels" / "answers.py"
SPIN = "while True: pass"
START = {"library": "numpy", "engine": "ample"}
LINES: dict[str, dict[str, str]] = {
    "numpy": {},
    "torch": {"library": "torch"},
    "jax": {"library": "jax"},
    "1 thread": {"OMP_NUM_THREADS": "1"},
    "4 threads": {"OMP_NUM_THREADS": "4"},
    "torch, 1 thread": {"library": "torch", "OMP_NUM_THREADS": "1"},
    "chunked, prefixes from the cache": {"engine": "chunked"},
    "preempted": {"engine": "preempted"},
    "torch, preempted": {"library": "torch", "engine": "preempted"},
    "AVX2": {"HIBACHI_VARIANT": "avx2"},
    "torch, AVX2, chunked": {"library": "torch", "HIBACHI_VARIANT": "avx2", "engine": "chunked"},
    "first start": {"start": "first"},
    "busy start": {"start": "busy"},
    "first start, busy, torch": {"library": "torch", "start": "first busy"},
}


def digest(how: dict[str, str], dtype: str, model: str, many: int) -> str:
    how = START | how
    start = how.pop("start", "")
    command = [sys.executable, str(ANSWERS), how.pop("library"), dtype, how.pop("engine"), model, str(many)]
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(os.cpu_count() or 1) if "busy" in start]
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | how | ({"XDG_CACHE_HOME": folder} if "first" in start else {})
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
        finally:
            for process in spinning:
                process.kill()
                process.wait()
    if done.returncode:
        return "failed: " + done.stderr.strip().splitlines()[-1][:60]
    return done.stdout.split()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", action="append", help="may be given several times (default: tiny)")
    parser.add_argument("--answers", type=int, default=100, help="of each model")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="+", choices=LINES, default=list(LINES))
    args = parser.parse_args()
    columns = [(model, dtype) for model in args.model or ["tiny"] for dtype in args.dtype]
    print("| how | " + " | ".join(f"{Path(m).name.split('.')[0]}, {d}" for m, d in columns) + " |", flush=True)
    print("|---" * (len(columns) + 1) + "|")
    found: list[set[str]] = [set() for _ in columns]
    for name in args.only:
        row = [digest(LINES[name], dtype, model, args.answers) for model, dtype in columns]
        for column, one in zip(found, row, strict=True):
            column.add(one)
        print(f"| {name} | " + " | ".join(row) + " |", flush=True)
    return any(len(column) > 1 for column in found)


if __name__ == "__main__":
    sys.exit(main())
