"""Sampling of one step, in milliseconds: 64 rows over a vocabulary of 49,152, without a model.

Targets on the torch CPU backend: greedy 3 ms; temperature, top_k, top_p and penalties 15 ms. What to expect: a pass
over the logits (12 MB) takes 0.2 ms to read and 1 ms to write anew, an exponential of them 3 ms; to find the 64 largest
of each row takes about 4 ms, to sort the rows 240 ms. So greedy about 1 ms, a plain draw 7 ms, filters 6 ms, with
penalties 10 ms, and 250 ms for whoever sorts. Beside the time, that of the processor: it says more on a busy machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

from hibachi import ArrayBackend, SamplingParams, load_backend
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.sampler import RowSampler
from hibachi.engine.runners.tokentable import TokenHistory, TokenTable
from hibachi.engine.sampling.draw import sample
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.streams.channel import Channel
from hibachi.request import Request

CONTEXT = 512  # tokens of each row, which the penalties look at
CASES = {
    "greedy": dict(temperature=0.0),
    "temperature": dict(temperature=0.8),
    "temperature, top_k 50, top_p 0.95": dict(temperature=0.8, top_k=50, top_p=0.95),
    "the same and all three penalties": dict(
        temperature=0.8, top_k=50, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1
    ),
    "temperature, top_p 0.95": dict(temperature=0.8, top_p=0.95),
    "temperature, min_p 0.05": dict(temperature=0.8, min_p=0.05),
    "the same and typical_p 0.9": dict(temperature=0.8, min_p=0.05, typical_p=0.9),
    "temperature, logprobs 5": dict(temperature=0.8, logprobs=5),
}


def language_like(rows: int, vocab: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits whose softmax falls like a power of the rank, as a language model's does: 20 tokens hold most of it."""
    rng = np.random.default_rng(0)
    ranks = np.argsort(rng.random((rows, vocab)), axis=1) + 1
    return (-1.6 * np.log(ranks) + 0.3 * rng.normal(size=(rows, vocab))).astype(np.float32)


def steps(backend: ArrayBackend, logits: Any, params: dict[str, Any]) -> Callable[[], object]:
    """A function that samples one step, for rows in the midst of their output."""
    rows, vocab = logits.shape
    rng = np.random.default_rng(1)
    table = TokenTable(rows, (), np.dtype(np.int32))
    sampler = RowSampler(backend, rows, vocab, table)
    jobs = []
    for row in range(rows):
        tokens = rng.integers(0, vocab, CONTEXT).astype(np.int32)
        table.fill(row, TokenHistory(tokens))
        seq = Seq(CONTEXT // 2, None, row=row)
        prompt = tokens[: CONTEXT // 2]
        jobs.append(Job(seq, Channel(), Request(prompt, SamplingParams(seed=row, **params)), seed=row))
        sampler.admit(jobs[-1])
    every, positions = np.arange(rows), np.full(rows, CONTEXT)
    return lambda: sampler.draw(logits, jobs, every, positions)


def full_sort(backend: ArrayBackend, logits: Any, params: dict[str, Any]) -> Callable[[], object] | None:
    """The same filters by the definition, which sorts whole rows; None where nothing is filtered."""
    if params["temperature"] == 0 or not params.keys() & {"top_k", "top_p", "min_p"}:
        return None
    rows = logits.shape[0]
    table = TokenTable(rows, (), np.dtype(np.int32))
    sampler = RowSampler(backend, rows, logits.shape[1], table)
    for row in range(rows):
        job = Job(Seq(1, None, row=row), Channel(), Request(np.zeros(1, np.int32), SamplingParams(**params)), seed=row)
        sampler.admit(job)
    how = sampler._how(np.arange(rows), np.ones(rows, int), rows)
    draw = backend.compile(lambda x, how: sample(backend, x, how, typical="typical_p" in params))
    return lambda: backend.get(draw(logits, how))


def measure(backend: ArrayBackend, step: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Medians in milliseconds: on the clock, and of the processor."""
    times, busy = [], []
    with backend.guard():
        step()
        for _ in range(repeats):
            began, used = perf_counter(), process_time()
            step()
            times.append(perf_counter() - began)
            busy.append(process_time() - used)
    return median(times) * 1e3, median(busy) * 1e3


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    backend = load_backend(args.backend)
    logits = backend.put(language_like(args.rows, args.vocab))
    print(f"| {args.rows} rows x {args.vocab}, {backend.name} | ms | processor | by a full sort | processor |")
    print("|---|---|---|---|---|")
    for name, params in CASES.items():
        clock, busy = measure(backend, steps(backend, logits, params), args.repeats)
        other = full_sort(backend, logits, params)
        theirs = " | ".join(f"{t:.0f}" for t in measure(backend, other, 3)) if other else "| "
        print(f"| {name} | **{clock:.1f}** | {busy:.1f} | {theirs} |", flush=True)
