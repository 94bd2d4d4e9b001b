"""The level-0 loop with a model that costs nothing: tokens per second, streams consumed, and processor time of a step.

Prompts of 32, 128 new tokens each, 200 requests at once (1,024 with 256 rows). In pairs: through a library's backend as
it is, and through an object that has nothing but its nine operations. Figures are medians; the last one is that of the
pairs. The Rust crate's own loop does 0.7 to 1.1 million tokens per second on work like this (200 requests, 8 to 32
rows; its figure, from another machine).
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

import hibachi
from hibachi.backend.nine import OPERATIONS

NEW = 128


class Next:
    def forward(self, tokens: Any) -> Any:
        return tokens[:, -1] + 1


class Nine:
    """A library by its nine operations, and nothing else of it."""

    def __init__(self, backend: hibachi.ArrayBackend) -> None:
        self.name = f"nine of {backend.name}"
        for operation in OPERATIONS:
            setattr(self, operation, getattr(backend, operation))


def once(rows: int, backend: Any, prompt: Any) -> tuple[float, float]:
    """Tokens per second, and microseconds of processor time a step."""
    requests = 1024 if rows == 256 else 200
    with hibachi.AutoregressiveBatchInference(Next(), max_num_seqs=rows, max_model_len=256, backend=backend) as engine:
        began, worked = perf_counter(), process_time()
        streams = [engine.run(prompt, max_tokens=NEW) for _ in range(requests)]
        tokens = sum(len(stream.collect()) for stream in streams)
        seconds, work = perf_counter() - began, process_time() - worked
        assert tokens == requests * NEW
        return tokens / seconds, 1e6 * work / engine.stats().steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--libraries", default="numpy,torch")
    args = parser.parse_args()
    print("| library | rows | tokens/s | us a step | tokens/s by nine | us a step | times the work |")
    print("|---|---|---|---|---|---|---|")
    for library in args.libraries.split(","):
        plain = hibachi.load_backend(library)
        prompt, nine = plain.put(np.zeros(32, np.int64)), Nine(plain)
        for rows in (8, 64, 256):
            own, other = [], []
            for turn in range(args.repeat + 1):
                for runs, backend in ((own, plain), (other, nine))[:: 1 if turn % 2 else -1]:
                    runs.append(once(rows, backend, prompt))
            pairs = list(zip(own[1:], other[1:], strict=True))
            cells = [f"{median(run[i] for run in runs[1:]):,.0f}" for runs in (own, other) for i in (0, 1)]
            times = median(slow[1] / fast[1] for fast, slow in pairs)
            print("|", " | ".join([library, str(rows), *cells, f"{times:.2f}"]), "|", flush=True)
