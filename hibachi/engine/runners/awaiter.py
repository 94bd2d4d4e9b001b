"""Models that are `async def`, awaited in the engine's own thread."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hibachi.errors import EngineClosed


def is_awaited(result: Any, owns: Callable[[Any], bool]) -> bool:
    """Whether a call's result is to be awaited. An array of the backend is not: those of some libraries could be."""
    return inspect.isawaitable(result) and (inspect.iscoroutine(result) or not owns(result))


class Awaiter:
    """Runs an `async def` method of a model to its end, on an event loop of the engine's own thread.

    owns: whether something is an array of the backend.
    """

    def __init__(self, owns: Callable[[Any], bool]) -> None:
        self._owns = owns
        self._loop: asyncio.Runner | None = None
        self._task: asyncio.Task[Any] | None = None
        self._over = False

    def __call__(self, result: Any) -> Any:
        if not is_awaited(result, self._owns):
            return result
        if self._over:
            if inspect.iscoroutine(result):
                result.close()
            raise EngineClosed("The engine is closed, and awaits its model no more. Make a new one.")
        if self._loop is None:
            self._loop = asyncio.Runner()
        try:
            return self._loop.run(self._await(result))
        finally:
            self._task = None

    async def _await(self, awaitable: Any) -> Any:
        self._task = asyncio.current_task()
        return await awaitable

    def interrupt(self) -> None:
        """Cancel the awaited call and accept no more. Callable from any thread."""
        self._over = True
        if (task := self._task) is not None:
            with suppress(RuntimeError):  # the loop has just been closed
                task.get_loop().call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
