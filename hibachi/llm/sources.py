"""Sources of prompts: read no further ahead than asked, and never block the engine on a slow one."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from hibachi.engine.streams.channel import LoopEvent, in_trio

T = TypeVar("T", covariant=True)
S = TypeVar("S")


class PromptSource(Protocol[T]):
    """Gives items one by one. error: the exception that reading them raised, after the items before it."""

    error: BaseException | None

    @property
    def over(self) -> bool:
        """Whether the source is exhausted and all its items were taken."""
        ...

    def ask(self, most: int) -> None:
        """Read ahead until this many items are ready."""
        ...

    def take(self) -> T | None:
        """The next item; None means there is none yet, or none any more."""
        ...

    def close(self) -> None:
        """Stop reading. Callable from any thread."""
        ...


class Listed(Generic[S]):
    """A source whose items are all there already."""

    def __init__(self, items: Iterator[S]) -> None:
        self._items, self.over = items, False
        self.error: BaseException | None = None

    def ask(self, most: int) -> None:
        pass

    def take(self) -> S | None:
        if not self.over:
            try:
                return next(self._items)
            except StopIteration:
                self.over = True
            except Exception as e:
                self.error, self.over = e, True
        return None

    def close(self) -> None:
        self.over = True


class _Ahead(Generic[S]):
    """A source that a thread or task reads, which calls `wake` after each item and at the end."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._came: deque[S] = deque()
        self._asked = self._taken = 0
        self._ended = self._closed = False
        self.error: BaseException | None = None

    @property
    def over(self) -> bool:
        return self._ended and not self._came  # in this order: nothing comes after the end

    def take(self) -> S | None:
        if not self._came:
            return None
        self._taken += 1
        return self._came.popleft()

    def _more(self, most: int) -> int:
        """Number of items still to read until this many are ready."""
        more = max(0, most - (self._asked - self._taken))
        self._asked += more
        return more

    def _end(self, error: BaseException | None = None) -> None:
        self.error, self._ended = error, True
        self._wake()


class Threaded(_Ahead[S]):
    """Any iterator, read in a thread of its own, as it may block. A `next` that blocks for ever keeps its thread."""

    def __init__(self, items: Iterator[S], wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self._items: Iterator[S] | None = items
        self._room, self._begun = threading.Semaphore(0), False

    def ask(self, most: int) -> None:
        if more := self._more(most):
            self._room.release(more)
        if not self._begun:
            self._begun = True
            run = contextvars.copy_context().run
            threading.Thread(target=run, args=(self._read,), name="hibachi-prompts", daemon=True).start()

    def _read(self) -> None:
        items, self._items = self._items, None  # dropped, and so closed, at the end
        assert items is not None
        try:
            while self._room.acquire() and not self._closed:
                self._came.append(next(items))
                self._wake()
        except StopIteration:
            self._end()
        except BaseException as e:
            self._end(e)

    def close(self) -> None:
        self._closed, self._items = True, None
        self._room.release()


class Tasked(_Ahead[S]):
    """An asynchronous iterator, read by a task of its own. along: converts each thing read to an item."""

    def __init__(self, items: AsyncIterator[Any], along: Callable[[Any], S], wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self._items, self._along = items, along
        self._room: LoopEvent | None = None
        self._cancel: Callable[[], object] = _nothing

    def ask(self, most: int) -> None:
        """Call this in the loop that reads."""
        more = self._more(most)
        if self._room is None:
            self._begin()
        elif more and not self._room.done():
            self._room.set_result(None)

    def _begin(self) -> None:
        self._room = LoopEvent()
        if (lowlevel := in_trio()) is None:
            loop = asyncio.get_running_loop()
            task = loop.create_task(self._read_to_the_end())
            self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        else:
            scopes, token = sys.modules["trio"].CancelScope, lowlevel.current_trio_token()
            scope = scopes()
            lowlevel.spawn_system_task(self._read_in, scope, scopes, context=contextvars.copy_context())
            self._cancel = lambda: token.run_sync_soon(scope.cancel)

    async def _read_in(self, scope: Any, scopes: Any) -> None:
        with scope:
            try:
                await self._read()
            finally:
                with scopes(shield=True):
                    await self._finish()

    async def _read_to_the_end(self) -> None:
        try:
            await self._read()
        finally:
            await self._finish()

    async def _finish(self) -> None:
        """Close an asynchronous generator in its own loop, which cannot know otherwise that it is not needed any
        more.
        """
        if isinstance(self._items, AsyncGenerator):
            with suppress(Exception):
                await self._items.aclose()

    async def _read(self) -> None:
        assert self._room is not None
        read = 0
        try:
            while not self._closed:
                while read >= self._asked:
                    self._room.clear()
                    await self._room.wait()
                self._came.append(self._along(await anext(self._items)))
                read += 1
                self._wake()
        except StopAsyncIteration:
            self._end()
        except Exception as e:
            self._end(e)
        except BaseException:  # cancelled
            self._end()
            raise

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with suppress(Exception):  # the loop is closed, and with it the task
                self._cancel()


def _nothing() -> None:
    pass
