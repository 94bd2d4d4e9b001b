"""The level-0 loop with a model that costs nothing: tokens per second, streams consumed. Target: 250,000.

1,024 requests at once, prompts of 32, 128 new tokens each, 256 rows, NumPy: the Rust crate's own loop does 0.7 to 1.1
million tokens per second on work like this (200 requests, 8 to 32 rows; its figure, from another machine).
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter

import numpy as np

import hibachi


class Next:
    def forward(self, tokens: np.ndarray) -> np.ndarray:
        return tokens[:, -1] + 1


def once(rows: int, requests: int, new: int) -> float:
    """Tokens per second."""
    with hibachi.AutoregressiveBatchInference(Next(), max_batch_size=rows, max_model_len=256) as engine:
        prompt = np.zeros(32, np.int64)
        began = perf_counter()
        streams = [engine.run(prompt, max_new_tokens=new) for _ in range(requests)]
        tokens = sum(len(stream.collect()) for stream in streams)
        assert tokens == requests * new
        return tokens / (perf_counter() - began)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    print("| rows | tokens/s, median | least | most |\n|---|---|---|---|")
    for rows in (8, 32, 256):
        rates = [once(rows, 1024 if rows == 256 else 200, 128) for _ in range(args.repeat)]
        print(f"| {rows} | **{median(rates):,.0f}** | {min(rates):,.0f} | {max(rates):,.0f} |")
