"""What several processes bring, and what leaves cost on one: tokens a second of rows that decode.

    python benchmarks/ranks.py [--shape 1b] [--rows 64] [--ranks 2] [--stages 1] [--dtype bfloat16] [--leaves 8]

By turns, in one run: one process with one thread, and so many ranks in each of so many stages with one thread each;
then, with all threads, one process without leaves and with them. The model has random weights in the shape of a real
one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.bench.randommodel import write_model
from hibachi import LLM, SamplingParams

PROMPT = 4


def rate(llm: LLM, rows: int, new: int) -> float:
    """Tokens a second, prompts included in the time."""
    random = np.random.default_rng(0)
    prompts = [random.integers(5, 250, PROMPT).tolist() for _ in range(rows)]
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params)
    return rows * new / (time.perf_counter() - began)


def compared(folder: str, asked: argparse.Namespace, pair: dict[str, tuple[int, dict[str, Any]]]) -> None:
    """pair: by name the threads of this process, and options."""
    made, rates = {}, {name: list[float]() for name in pair}
    for name, (threads, options) in pair.items():
        torch.set_num_threads(threads)  # an engine's thread takes over what holds when it first computes
        options |= dict(backend="torch", dtype=asked.dtype, max_num_seqs=asked.rows)
        options |= dict(max_model_len=PROMPT + asked.new + 8)
        options["deterministic"] = True  # asked for, it is tried now, and not beside what is measured
        made[name] = LLM(folder, **options)
        rate(made[name], asked.rows, asked.new)
    for _ in range(asked.rounds):
        for name, llm in made.items():
            rates[name].append(rate(llm, asked.rows, asked.new))
    first, second = (statistics.median(rates[name]) for name in pair)
    for name, each in rates.items():
        print(f"  {name:<28}{statistics.median(each):8.1f} tokens/s")
    print(f"  {second / first:.3f} of the first")
    for llm in made.values():
        llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--leaves", type=int, default=8, help="0: do not measure what they cost")
    parser.add_argument("--new", type=int, default=8, help="tokens after each prompt")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="of a model that was written before")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = asked.folder or made
        if not Path(folder, "config.json").exists():
            write_model(asked.shape, folder)
        cores = torch.get_num_threads()
        ranks = {"tensor_parallel_size": asked.ranks, "pipeline_parallel_size": asked.stages}
        named, size = f"{asked.ranks} ranks, {asked.stages} stages", asked.ranks * asked.stages
        print(f"{asked.shape}, {asked.dtype}, {asked.rows} rows; {cores} threads in all")
        compared(folder, asked, {"one process, one thread": (1, {}), named: (size, ranks)})
        leaves = {"no leaves": (cores, {}), f"{asked.leaves} leaves": (cores, {"tp_leaves": asked.leaves})}
        if asked.leaves:
            compared(folder, asked, leaves)


if __name__ == "__main__":
    main()
