"""Ways to read a stream to its end."""

import asyncio
import itertools

import trio


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


async def by_three_of_trio(stream):
    got = []

    async def one():
        got.extend(await by_anext(stream))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(one)
    return got
