"""Tokens of 4 KiB through level 0 on NumPy, read by their streams in process: MB of the tokens' own bytes a second.

32 streams at once, 64 and 1,024 new tokens each. "free" costs nothing: it gives back the last token it sees. "reads"
adds up all that it is shown, as real models at level 0 do; "writes" changes it in place, so it is given copies.

Expected before it was measured: 100 MB/s and more where the model is free, whatever the length, as a step copies new
tokens only (33 and 4 when each step copied each history); the speed of one pass over memory where it reads.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from hibachi import AutoregressiveBatchInference

STREAMS, WIDTH = 32, 1024  # at once; numbers in a token, float32
LENGTHS = 64, 1024  # new tokens of a stream

HostArray = Any


class Free:
    max_model_len = 4096

    def forward(self, tokens: HostArray) -> HostArray:
        return tokens[:, -1]


class Reads(Free):
    def forward(self, tokens: HostArray) -> HostArray:
        return tokens.sum(axis=1) / tokens.shape[1]


class Writes(Free):
    def forward(self, tokens: HostArray) -> HostArray:
        tokens *= 1
        return tokens[:, -1]


MODELS: dict[str, type[Free]] = {"free": Free, "reads": Reads, "writes": Writes}


def prompts(streams: int = STREAMS) -> list[HostArray]:
    """One token [1, WIDTH] each."""
    return list(np.random.default_rng(7).standard_normal((streams, 1, WIDTH), np.float32))


def in_process(model: Free, length: int) -> float:
    """MB/s of an engine, read by its streams in this thread."""
    given = prompts()
    with AutoregressiveBatchInference(model, backend="numpy", max_num_seqs=STREAMS) as engine:
        engine.run(given[0], max_tokens=2).collect()
        started = perf_counter()
        streams = [engine.run(prompt, max_tokens=length) for prompt in given]
        read = sum(token.nbytes for stream in streams for token in stream)
        seconds = perf_counter() - started
    assert read == STREAMS * length * WIDTH * 4
    return read / seconds / 1e6


def measured(models: list[str], runs: int) -> dict[tuple[str, int], float]:
    """MB/s by model and length: medians of so many runs, which take turns."""
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(runs):
        for name in models:
            for length in LENGTHS:
                found.setdefault((name, length), []).append(in_process(MODELS[name](), length))
    return {case: median(figures) for case, figures in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", choices=MODELS, action="append", help="one of them (all); may be repeated")
    args = parser.parse_args()
    chosen = args.model or list(MODELS)
    figures = measured(chosen, args.runs)
    print("| MB/s | " + " | ".join(f"{length:,} new tokens" for length in LENGTHS) + " |")
    print("|---" * (len(LENGTHS) + 1) + "|")
    for name in chosen:
        print(f"| {name} | " + " | ".join(f"**{figures[name, length]:,.1f}**" for length in LENGTHS) + " |")
