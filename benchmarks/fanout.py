"""256 streams of one engine, each with a consumer of its own: tokens per second that arrive, by kind of consumer.

A model that costs nothing, NumPy, level 0, 256 rows, 128 new tokens a request. Consumers are tasks of one asyncio loop,
tasks of one trio run, or threads; `collect` is one thread that takes the streams one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import hibachi

STREAMS, NEW = 256, 128


class Next:
    def forward(self, tokens: np.ndarray) -> np.ndarray:
        return tokens[:, -1] + 1


def iterate(stream: Any) -> int:
    return sum(1 for _ in stream)


async def aiterate(stream: Any) -> int:
    n = 0
    async for _ in stream:
        n += 1
    return n


def with_asyncio(streams: list[Any]) -> int:
    async def main() -> int:
        return sum(await asyncio.gather(*[aiterate(stream) for stream in streams]))

    return asyncio.run(main())


def with_trio(streams: list[Any]) -> int:
    import trio  # only now: the others are measured as they are without it

    counts = []

    async def count(stream: Any) -> None:
        counts.append(await aiterate(stream))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(count, stream)

    trio.run(main)
    return sum(counts)


def with_threads(streams: list[Any]) -> int:
    with ThreadPoolExecutor(len(streams)) as pool:
        return sum(pool.map(iterate, streams))


def with_collect(streams: list[Any]) -> int:
    return sum(len(stream.collect()) for stream in streams)


def once(consume: Callable[[list[Any]], int]) -> float:
    """Tokens per second."""
    with hibachi.AutoregressiveBatchInference(Next(), max_num_seqs=STREAMS, max_model_len=256) as engine:
        prompt = np.zeros(32, np.int64)
        began = perf_counter()
        tokens = consume([engine.run(prompt, max_tokens=NEW) for _ in range(STREAMS)])
        assert tokens == STREAMS * NEW
        return tokens / (perf_counter() - began)


WAYS = {"asyncio": with_asyncio, "threads": with_threads, "collect": with_collect, "trio": with_trio}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    rates: dict[str, list[float]] = {}
    for way in args.ways:
        rates[way] = [once(WAYS[way]) for _ in range(args.repeat)]
    print("| consumers | tokens/s, median | least | most |\n|---|---|---|---|")
    for way, got in rates.items():
        print(f"| {way} | **{median(got):,.0f}** | {min(got):,.0f} | {max(got):,.0f} |")
