"""Texts become tokens beside the event loop: short ones at once, others in threads, as many as memory allows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from hibachi.api.errors import LIMITED, Refused

T = TypeVar("T")
AT_ONCE = 4096  # characters: a millisecond or two, less than a thread costs those who wait for the loop
LARGE = 1 << 18  # characters, from which on a text waits for others like it only
MOST = 1 << 26  # characters that may wait or be read


class Tokenizing:
    """Threads of its own, so that long texts wait for long texts and nothing else does."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(2, "hibachi-text")
        self._large = ThreadPoolExecutor(1, "hibachi-long-text")
        self._held = 0

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """`work()`, which reads `size` characters. Raises Refused if too much waits already."""
        if size <= AT_ONCE:
            return work()
        if self._held and self._held + size > MOST:
            raise Refused(
                "Too much text waits to be read. Try again later.",
                status=429,
                kind=LIMITED,
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self._held += size
        pool = self._large if size > LARGE else self._small
        try:
            future = pool.submit(work)
        except BaseException:
            self._held -= size
            raise
        # Who leaves is forgotten if it has not begun; what has begun is paid for until it ends.
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: _safely(loop, self._done, size))
        return await asyncio.wrap_future(future)

    async def aside(self, work: Callable[[], T]) -> T:
        """`work()` in a thread, whatever its size: templates take their time."""
        return await self.run(AT_ONCE + 1, work)

    def _done(self, size: int) -> None:
        self._held -= size


def _safely(loop: asyncio.AbstractEventLoop, call: Callable[[int], object], size: int) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(call, size)
