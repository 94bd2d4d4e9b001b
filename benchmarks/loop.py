"""The level-0 loop with a model that costs nothing: tokens per second, streams consumed.

Prompts of 32, 128 new tokens each, 200 requests at once (1,024 with 256 rows), on NumPy: through `NumpyBackend`, and
through an object that has the nine operations only. The Rust crate's own loop does 0.7 to 1.1 million tokens per second
on work like this (200 requests, 8 to 32 rows; its figure, from another machine). The last column: microseconds a step.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import hibachi


class Next:
    def forward(self, tokens: np.ndarray) -> np.ndarray:
        return tokens[:, -1] + 1


class Nine:
    """NumPy by the nine operations."""

    name = "nine"

    def shape(self, t: np.ndarray) -> tuple[int, ...]:
        return t.shape

    def cat(self, ts: list[np.ndarray], dim: int) -> np.ndarray:
        return np.concatenate(ts, axis=dim)

    def eq(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a == b

    def vectorize_dim(self, t: np.ndarray, dim: int) -> list[np.ndarray]:
        return list(np.moveaxis(t, dim, 0))

    def slice(self, t: np.ndarray, dim: int, start: int, length: int) -> np.ndarray:
        return t[(slice(None),) * dim + (slice(start, start + length),)]

    def idx_where_all_true(self, t: np.ndarray, dim: int) -> list[int]:
        return np.flatnonzero(t.all(axis=tuple(d for d in range(t.ndim) if d != dim))).tolist()

    def pop(self, t: np.ndarray, dim: int, index: int) -> np.ndarray:
        return np.delete(t, index, axis=dim)

    def repeat(self, t: np.ndarray, dim: int, times: int) -> np.ndarray:
        return np.concatenate([t] * times, axis=dim) if times else t[:0]

    def unsqueeze(self, t: np.ndarray, dim: int) -> np.ndarray:
        return np.expand_dims(t, dim)


def once(rows: int, requests: int, new: int, backend: Any) -> tuple[float, float]:
    """Tokens per second, and microseconds a step."""
    with hibachi.AutoregressiveBatchInference(Next(), max_num_seqs=rows, max_model_len=256, backend=backend) as engine:
        prompt = np.zeros(32, np.int64)
        began = perf_counter()
        streams = [engine.run(prompt, max_tokens=new) for _ in range(requests)]
        tokens = sum(len(stream.collect()) for stream in streams)
        seconds = perf_counter() - began
        assert tokens == requests * new
        stats = engine.stats()
        return tokens / seconds, 1e6 * stats.step_seconds / stats.steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--no-nine", action="store_true")
    args = parser.parse_args()
    print("| rows | backend | tokens/s, median | least | most | us a step |\n|---|---|---|---|---|---|")
    for rows in (8, 64, 256):
        for backend in ("numpy",) if args.no_nine else ("numpy", Nine()):
            runs = [once(rows, 1024 if rows == 256 else 200, 128, backend) for _ in range(args.repeat)]
            rates, name = [rate for rate, _ in runs], getattr(backend, "name", backend)
            us = median(us for _, us in runs)
            print(f"| {rows} | {name} | **{median(rates):,.0f}** | {min(rates):,.0f} | {max(rates):,.0f} | {us:.0f} |")
