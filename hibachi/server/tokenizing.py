"""Tokenizes texts beside the event loop: short ones at once, others in threads, as many as memory allows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from hibachi.llm.dialects.errors import LIMITED, Refused
from hibachi.llm.tokenizers.tokenizer import AT_ONCE

T = TypeVar("T")
LARGE = 1 << 18  # characters from which on a text is read in the threads for long texts
MOST = 1 << 26  # characters of a tenant that may wait or be read


class Tokenizing:
    """Threads of its own, so that long texts wait for long texts and nothing else does.

    Of each tenant one text of a kind is read at a time (without tenants, two), so the others wait for one of its texts
    at most.
    """

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(2, "hibachi-text")
        self._large = ThreadPoolExecutor(1, "hibachi-long-text")
        self._held: Counter[str] = Counter()  # characters, by tenant
        self._turns: dict[tuple[str, bool], asyncio.Semaphore] = {}

    async def run(self, size: int, work: Callable[[], T], tenant: str = "") -> T:
        """Run `work()`, which reads `size` characters. Raises Refused if too much of this tenant waits already."""
        if size <= AT_ONCE:
            return work()
        if self._held[tenant] and self._held[tenant] + size > MOST:
            raise Refused(
                "Too much text of yours waits to be read. Try again later.",
                status=429,
                kind=LIMITED,
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        large = size > LARGE
        turns = self._turns.setdefault((tenant, large), asyncio.Semaphore(1 if tenant else 2))
        self._held[tenant] += size
        begun = False
        try:
            await turns.acquire()  # a client that leaves while it waits is forgotten
            try:
                future = (self._large if large else self._small).submit(work)
                begun = True
            finally:
                if not begun:
                    turns.release()
        finally:
            if not begun:
                self._held[tenant] -= size
        # Work that has begun counts until it ends, also if its client leaves.
        loop, done = asyncio.get_running_loop(), partial(self._done, tenant, size, turns)
        future.add_done_callback(lambda _: _safely(loop, done))
        return await asyncio.wrap_future(future)

    async def aside(self, work: Callable[[], T], tenant: str = "") -> T:
        """Run `work()` in a thread, whatever its size: templates may take long."""
        return await self.run(AT_ONCE + 1, work, tenant)

    def _done(self, tenant: str, size: int, turns: asyncio.Semaphore) -> None:
        self._held[tenant] -= size
        turns.release()


def _safely(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(call)
