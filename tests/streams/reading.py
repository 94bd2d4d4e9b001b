"""Ways to read a stream to its end."""

import asyncio
import itertools


def by_next(stream):
    got = []
    while True:
        try:
            got.append(next(stream))
        except StopIteration:
            return got


async def by_anext(stream):
    got = []
    while True:
        try:
            got.append(await anext(stream))
        except StopAsyncIteration:
            return got


async def by_three_tasks(stream):
    """Of asyncio."""
    return list(itertools.chain(*await asyncio.gather(*[by_anext(stream) for _ in range(3)])))
