"""Where tokens leave the engine: a stream a request, iterated from any thread or from asyncio.

The engine's side is a `Channel` (push, end); the user's side is an `ItemStream`. The engine holds no reference to the
stream, so dropping it cancels the request. Nothing here takes a lock on the way of a token: a consumer first registers
that it waits and then looks at the buffer once more, the engine first fills the buffer and then looks who waits.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from hibachi.errors import EngineClosed, RequestError
from hibachi.request import Finish

T = TypeVar("T")


class Wakeups:
    """Consumers to wake after a step: at most one post per event loop, whatever the number of streams."""

    def __init__(self) -> None:
        self._futures: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}

    def add(self, future: asyncio.Future[None]) -> None:
        self._futures.setdefault(future.get_loop(), []).append(future)

    def post(self) -> None:
        for loop, futures in self._futures.items():
            try:
                loop.call_soon_threadsafe(_resolve, futures)
            except RuntimeError:  # the loop was closed, and its consumers with it
                continue
        self._futures.clear()


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


class Channel(Generic[T]):
    """The engine's end of a stream: a buffer, and the way it ended."""

    __slots__ = ("_async_waiter", "_ending", "_sync_waiter", "buffer", "error", "finish", "logprobs")

    def __init__(self) -> None:
        self.buffer: deque[T] = deque()
        self.logprobs: deque[dict[int, float] | None] = deque()
        self.finish: Finish | None = None
        self.error: BaseException | None = None
        self._sync_waiter: threading.Event | None = None
        self._async_waiter: asyncio.Future[None] | None = None
        self._ending = threading.Lock()

    def push(self, item: T, wakeups: Wakeups) -> None:
        self.buffer.append(item)
        self._wake(wakeups)

    def end(self, reason: Finish, error: BaseException | None = None, wakeups: Wakeups | None = None) -> bool:
        """End once; False if it had ended. Items pushed before stay readable."""
        with self._ending:
            if self.finish is not None:
                return False
            self.error = error
            self.finish = reason
        own = Wakeups()
        self._wake(own if wakeups is None else wakeups)
        own.post()
        return True

    def _wake(self, wakeups: Wakeups) -> None:
        if (event := self._sync_waiter) is not None:
            event.set()
        if (future := self._async_waiter) is not None:
            self._async_waiter = None
            wakeups.add(future)

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until there is an item or the end; False after `timeout` seconds."""
        event = self._sync_waiter or threading.Event()
        while True:
            event.clear()
            self._sync_waiter = event
            if self.buffer or self.finish is not None:
                self._sync_waiter = None
                return True
            if not event.wait(timeout):
                return False

    async def wait_async(self) -> None:
        while not self.buffer and self.finish is None:
            future = self._async_waiter = asyncio.get_running_loop().create_future()
            if self.buffer or self.finish is not None:
                self._async_waiter = None
                return
            await future


class ItemStream(Generic[T]):
    """The tokens of one request, as they come. Iterate with `for` or `async for`; leaving the loop cancels the request.

    Closing (`close`, `with`, leaving a loop early, dropping the last reference) cancels at once: the request leaves the
    batch at the next step. A failed request raises its error from the iteration, after the tokens before it.
    """

    def __init__(self, channel: Channel[Any], cancel: Callable[[], None], read: Callable[[Any], T]) -> None:
        self._channel, self._cancel, self._read = channel, cancel, read

    @property
    def finish_reason(self) -> Finish | None:
        """Why the stream ended, or None while it runs: "stop", "length", "cancelled", "error" or "closed"."""
        return self._channel.finish

    @property
    def error(self) -> BaseException | None:
        """The error that iterating raises, if `finish_reason` is "error"."""
        return self._channel.error

    @property
    def logprobs(self) -> list[dict[int, float] | None]:
        """{token id: log-probability} of each token delivered so far, if they were asked for."""
        return list(self._channel.logprobs)

    def __next__(self) -> T:
        channel = self._channel
        while True:
            try:
                return self._read(channel.buffer.popleft())
            except IndexError:
                if channel.finish is not None and not channel.buffer:
                    if channel.error is not None:
                        raise channel.error from channel.error.__cause__
                    raise StopIteration from None
                channel.wait()

    def __iter__(self) -> Iterator[T]:
        try:
            while True:
                try:
                    item = next(self)
                except StopIteration:
                    return
                yield item
        finally:
            self.close()

    async def __anext__(self) -> T:
        channel = self._channel
        while not channel.buffer:
            if channel.finish is not None and not channel.buffer:
                if channel.error is not None:
                    raise channel.error from channel.error.__cause__
                raise StopAsyncIteration
            await channel.wait_async()
        return self._read(channel.buffer.popleft())

    def __aiter__(self) -> AsyncIterator[T]:
        return _Cursor(self)

    def collect(self) -> list[T]:
        """All remaining items, waiting for the end. Raises the request's error."""
        buffer, read, items = self._channel.buffer, self._read, []
        while True:
            while buffer:
                items.append(read(buffer.popleft()))
            try:
                items.append(next(self))
            except StopIteration:
                return items

    async def acollect(self) -> list[T]:
        return [item async for item in self]

    def close(self) -> None:
        """Cancel the request unless it has ended."""
        if self._channel.end(Finish.CANCELLED):
            self._cancel()

    async def aclose(self) -> None:
        self.close()

    def __enter__(self) -> ItemStream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> ItemStream[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_channel"):
            self.close()


class _Cursor(Generic[T]):
    """What `async for` holds: an async generator would notice a `break` only later; this is dropped with the loop."""

    def __init__(self, stream: ItemStream[T]) -> None:
        self._stream = stream

    def __aiter__(self) -> _Cursor[T]:
        return self

    async def __anext__(self) -> T:
        return await self._stream.__anext__()

    def __del__(self) -> None:
        self._stream.close()


class Item(Generic[T]):
    """The one result of a feed-forward request: `await item`, or `item.result()` from any thread."""

    def __init__(self, stream: ItemStream[T]) -> None:
        self._stream = stream
        self._value: list[T] = []

    def done(self) -> bool:
        return bool(self._value) or self._stream.finish_reason is not None

    def result(self, timeout: float | None = None) -> T:
        """The output, waiting for it up to `timeout` seconds. Raises TimeoutError or the request's error."""
        if not self._value:
            if not self._stream._channel.wait(timeout):
                raise TimeoutError(f"no result within {timeout} s")
            self._take(self._stream.collect())
        return self._value[0]

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> T:
        if not self._value:
            self._take(await self._stream.acollect())
        return self._value[0]

    def _take(self, items: list[T]) -> None:
        if not items:
            raise closed(self._stream)
        self._value = items

    def cancel(self) -> None:
        self._stream.close()


def closed(stream: ItemStream[Any]) -> Exception:
    """The error for one who wanted a whole answer from a stream that ended before it was complete."""
    if stream.finish_reason == Finish.CLOSED:
        return EngineClosed("The engine was closed before this request was done. Make a new one.")
    return RequestError("The request was cancelled before it was done.")


def merge(streams: Sequence[ItemStream[T]]) -> Iterator[tuple[int, list[T]]]:
    """(which stream, its new items) as they come from any of them, until all have ended. Raises the first error."""
    event = threading.Event()
    active = dict(enumerate(streams))
    for stream in streams:
        stream._channel._sync_waiter = event
    while active:
        event.clear()
        for i, stream in list(active.items()):
            channel = stream._channel
            over = channel.finish is not None  # read before the buffer: nothing is pushed after the end
            items = [stream._read(channel.buffer.popleft()) for _ in range(len(channel.buffer))]
            if items:
                yield i, items
            if over:
                del active[i]
                if channel.error is not None:
                    raise channel.error
        if active:
            event.wait()
