"""Calls that take a while, in a few threads beside the event loop, fair to tenants."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from hibachi.errors import QueueFull

T = TypeVar("T")
MOST = 64  # calls that may wait or run


class TenantPool:
    """Runs calls, at most `at_once` of all tenants that have no name, and half as many of one that has. name: of the
    threads. waiting: what waits, in the words of an error. threads: of all tenants; None means twice `at_once`.
    """

    def __init__(self, name: str, waiting: str, *, at_once: int = 4, threads: int | None = None) -> None:
        self._threads = ThreadPoolExecutor(threads or 2 * at_once, name)
        self._waiting, self._at_once = waiting, at_once
        self._calls = Counter[str]()  # by tenant
        self._turns: dict[str, asyncio.Semaphore] = {}

    async def run(self, call: Callable[[], T], tenant: str = "") -> T:
        """What the call returns. A tenant may have at most half as many waiting or running as all together, so none
        blocks the others. Raises QueueFull.
        """
        most = MOST // 2 if tenant else MOST
        if self._calls[tenant] >= most or self._calls.total() >= MOST:
            raise QueueFull(f"{most} {self._waiting}. Try again later.")
        at_once = max(self._at_once // 2, 1) if tenant else self._at_once
        turns = self._turns.setdefault(tenant, asyncio.Semaphore(at_once))
        self._calls[tenant] += 1
        try:
            async with turns:
                return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        finally:
            self._calls[tenant] -= 1
