"""The event loops that consumers wait on, asyncio's and trio's, and how another thread wakes them.

trio is not a dependency and is never imported here: a program that waits in a trio task has imported it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any


def in_trio() -> Any:
    """The module trio.lowlevel if a trio task is running in this thread, else None."""
    lowlevel = sys.modules.get("trio.lowlevel")
    if lowlevel is None:
        return None
    loop = asyncio._get_running_loop()
    if loop is not None and asyncio.current_task(loop) is not None:  # an asyncio task, even if trio-asyncio runs it
        return None
    try:
        lowlevel.current_task()
    except (RuntimeError, AttributeError):  # no task of trio; or another thread is importing it just now
        return None
    return lowlevel


class TrioFuture:
    """The part of an asyncio future that is needed here, for trio: set in the loop's own thread, awaited once."""

    __slots__ = ("_event", "_token")

    def __init__(self, lowlevel: Any) -> None:
        self._event, self._token = sys.modules["trio"].Event(), lowlevel.current_trio_token()

    def get_loop(self) -> Any:
        return self._token

    def done(self) -> bool:
        return bool(self._event.is_set())

    def set_result(self, _: None) -> None:
        self._event.set()

    def __await__(self) -> Generator[Any, None, None]:
        yield from self._event.wait().__await__()


LoopFuture = asyncio.Future[None] | TrioFuture


def loop_future(trio: Any) -> LoopFuture:
    """A future to await in the running loop; trio: what `in_trio` says. Raises RuntimeError if there is no loop."""
    return asyncio.get_running_loop().create_future() if trio is None else TrioFuture(trio)


async def give_way() -> None:
    """In trio: let other tasks run, and notice a cancellation, as trio expects of every await; asyncio does not."""
    if (lowlevel := in_trio()) is not None:
        await lowlevel.checkpoint()


class LoopEvent:
    """A threading.Event for one task: `wait` suspends, and other threads set it through `Wakeups`."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future = loop_future(in_trio())

    def clear(self) -> None:
        if self._future.done():
            self._future = loop_future(in_trio())

    async def wait(self) -> None:
        await self._future

    def get_loop(self) -> Any:
        return self._future.get_loop()

    def done(self) -> bool:
        return self._future.done()

    def set_result(self, _: None) -> None:
        self._future.set_result(None)


class Wakeups:
    """Consumers to wake after a step: at most one post per event loop, whatever the number of streams."""

    def __init__(self) -> None:
        self._futures: dict[Any, list[LoopFuture | LoopEvent]] = {}

    def add(self, future: LoopFuture | LoopEvent) -> None:
        self._futures.setdefault(future.get_loop(), []).append(future)

    def post(self) -> None:
        for loop, futures in self._futures.items():
            try:
                if isinstance(loop, asyncio.AbstractEventLoop):
                    loop.call_soon_threadsafe(_resolve, futures)
                else:
                    loop.run_sync_soon(_resolve, futures)
            except Exception:  # the loop was closed, or the trio run has ended, and its consumers with it
                continue
        self._futures.clear()


def _resolve(futures: list[LoopFuture | LoopEvent]) -> None:
    for future in futures:
        if not future.done():  # its task may have been cancelled, or woken by another stream, since the post
            future.set_result(None)


async def in_thread(do: Callable[[], None]) -> None:
    """Await `do()` in a thread of its own, where it runs to its end even if this task is cancelled or was before."""
    errors: list[BaseException] = []
    future = loop_future(in_trio())

    def run() -> None:
        try:
            do()
        except BaseException as e:
            errors.append(e)
        finally:
            done = Wakeups()
            done.add(future)
            done.post()

    threading.Thread(target=run, name="hibachi-close", daemon=True).start()
    await future
    if errors:
        raise errors[0]
