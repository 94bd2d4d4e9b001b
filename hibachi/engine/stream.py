"""Where tokens leave the engine: a stream a request, iterated from any thread, from asyncio or trio.

The engine's side is a `Channel` (push, end); the user's side is an `ItemStream`. The engine holds no reference to the
stream, so dropping it cancels the request. Nothing here takes a lock on the way of a token: a consumer first registers
that it waits and then looks at the buffer once more, the engine first fills the buffer and then looks who waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Hashable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from hibachi.engine.closing import Closing
from hibachi.engine.loops import LoopEvent, LoopFuture, Wakeups, give_way, in_trio, loop_future
from hibachi.errors import EngineClosed, EngineError, RequestError
from hibachi.request import Finish

T = TypeVar("T")
Waiter = threading.Event | LoopFuture | LoopEvent


class Channel(Generic[T]):
    """The engine's end of a stream: a buffer, and the way it ended. Any number of threads and tasks may wait on it.

    pause_after: how many items may lie unread; None: any number. Whoever pushes asks `full` and then calls `pause`.
    """

    __slots__ = (
        "_drained",
        "_ending",
        "_waiters",
        "buffer",
        "error",
        "finish",
        "logprobs",
        "pause_after",
        "prompt_logprobs",
        "reused",
        "started",
        "stop_logprob",
        "tenant",
        "thread",
    )

    def __init__(self, pause_after: int | None = None) -> None:
        self.buffer: deque[T] = deque()
        self.pause_after = pause_after
        self.logprobs: list[dict[int, float] | None] = []
        self.prompt_logprobs: list[dict[int, float] | None] | None = None  # filled before the first token comes
        self.stop_logprob = 0.0  # of a stop token that was not delivered, if log-probabilities were asked for
        self.started: float | None = None  # when it joined the batch, by time.monotonic()
        self.reused = 0  # tokens of the prompt that were found in the cache then
        self.finish: Finish | None = None
        self.error: BaseException | None = None
        self.tenant: Hashable = ""  # whose request it is
        self.thread: int | None = None  # the identifier of the one that fills the buffer; None: of none that may wait
        self._waiters: deque[Waiter] = deque()
        self._ending = threading.RLock()  # reentrant: the garbage collector may drop the stream in the midst of `end`
        self._drained: deque[Callable[[], None]] = (
            deque()
        )  # while paused, the one call to make; whoever pops it makes it

    def push(self, item: T, wakeups: Wakeups) -> None:
        self.buffer.append(item)
        if self._waiters:
            self._wake(wakeups)

    def end(self, reason: Finish, error: BaseException | None = None, wakeups: Wakeups | None = None) -> bool:
        """End once; False if it had ended. Items pushed before stay readable."""
        with self._ending:
            if self.finish is not None:
                return False
            self.error = error
            self.finish = reason
        self._drained.clear()
        if wakeups is not None:
            self._wake(wakeups)
        else:
            self._wake(own := Wakeups())
            own.post()
        return True

    def renew(self) -> None:
        """After a fork, where the thread that held the lock may be gone."""
        self._ending = threading.RLock()

    @property
    def full(self) -> bool:
        """As much lies unread as may, and nobody has paused yet."""
        return self.pause_after is not None and len(self.buffer) >= self.pause_after and not self._drained

    def takes(self, n: int) -> bool:
        """May n more items come before the engine must ask whether we are `full`?"""
        return self.pause_after is None or len(self.buffer) + n <= self.pause_after

    @property
    def paused(self) -> bool:
        return bool(self._drained)

    def pause(self, drained: Callable[[], None]) -> bool:
        """Have `drained()` called once, when the reader has brought the buffer down to half; it comes from any thread.

        False: the reader was faster, go on; `drained` is not called then. It is not called either when the stream ends
        first, but may come late: after the end, from a reader that was about to call it.
        """
        self._drained.append(drained)
        # The other half of `eased`: a reader that came before it could not see that we paused.
        return not (self._low and self._take() is not None)

    def eased(self) -> None:
        """A reader has taken something from the buffer of a paused stream."""
        if self._low and (drained := self._take()) is not None:
            drained()

    @property
    def _low(self) -> bool:
        return self.pause_after is None or len(self.buffer) <= self.pause_after // 2

    def _take(self) -> Callable[[], None] | None:
        """`drained`, for one of all who ask: taking an item from a deque is atomic."""
        try:
            return self._drained.pop()
        except IndexError:
            return None

    def _wake(self, wakeups: Wakeups) -> None:
        """Wake everybody: they look for themselves whether there is something left for them."""
        while self._waiters:
            try:
                waiter = self._waiters.popleft()
            except IndexError:  # the other of `push` and `end` took it
                return
            if isinstance(waiter, threading.Event):
                waiter.set()
            else:
                wakeups.add(waiter)

    @property
    def ready(self) -> bool:
        """There is an item, or the end."""
        return bool(self.buffer) or self.finish is not None

    def listen(self, waiter: Waiter) -> None:
        """Wake `waiter` at the next item or the end; whoever calls this must look at `ready` once more."""
        if waiter not in self._waiters:
            self._waiters.append(waiter)

    def unlisten(self, waiter: Waiter) -> None:
        if waiter in self._waiters:  # else it was woken; asked first, as the error of `remove` would say all of it
            with suppress(ValueError):  # woken just now, by another thread
                self._waiters.remove(waiter)

    def check_thread(self) -> None:
        """Raise EngineError if this thread is the one that fills the buffer: it would wait for itself."""
        if self.thread == threading.get_ident():
            raise EngineError(
                "The engine's own thread cannot wait for what it has to compute itself: expected a stream of another "
                "engine; got one of the engine that called this model, stop predicate or logits processor. Use another "
                "engine for requests that it makes."
            )

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until there is an item or the end; False after `timeout` seconds.

        Raises EngineError in the engine's own thread.
        """
        if not self.ready and (timeout is None or timeout > 0):
            self.check_thread()
        deadline = None if timeout is None else time.monotonic() + timeout
        event = threading.Event()
        try:
            while not self.ready:
                event.clear()
                self.listen(event)
                left = None if deadline is None else deadline - time.monotonic()
                if not self.ready and not event.wait(left):
                    return self.ready
        finally:
            self.unlisten(event)
        return True

    async def wait_async(self, trio: Any) -> None:
        """Suspend this task until there is an item or the end. trio: what `in_trio` says.

        Raises EngineError in the engine's own thread, whose event loop runs nothing but what the engine awaits.
        """
        while not self.ready:
            self.check_thread()
            future = loop_future(trio)
            self.listen(future)
            try:
                if not self.ready:
                    await future
            finally:
                self.unlisten(future)


class ItemStream(Closing, Generic[T]):
    """The tokens of one request, as they come. Iterate with `for` or `async for`; leaving the loop cancels the request.

    Closing (`close`, `with`, leaving a loop early, dropping the last reference) cancels at once: the request leaves the
    batch at the next step. A failed request raises its error from the iteration, after the tokens before it.
    """

    def __init__(self, channel: Channel[Any], cancel: Callable[[], None], read: Callable[[Any], T]) -> None:
        self._channel, self._read = channel, read
        self._cancel: Callable[[], None] | None = cancel  # keeps the engine alive while the request runs

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

    @property
    def prompt_logprobs(self) -> list[dict[int, float] | None] | None:
        """{token id: log-probability} of each token of the prompt, None for the first; None if not asked for.

        Complete as soon as there is a token.
        """
        found = self._channel.prompt_logprobs
        return None if found is None else list(found)

    @property
    def stop_logprob(self) -> float:
        """Log-probability of a stop token that was not delivered; 0 if there was none, or they were not asked for."""
        return self._channel.stop_logprob

    @property
    def started(self) -> float | None:
        """When the request joined the batch, by time.monotonic(); None: it still waits."""
        return self._channel.started

    @property
    def reused(self) -> int:
        """Tokens of the prompt whose keys and values were found in the cache."""
        return self._channel.reused

    def logprobs_from(self, start: int, end: int) -> list[dict[int, float] | None]:
        """Part of `logprobs`, without a copy of the whole."""
        return self._channel.logprobs[start:end]

    def come(self) -> list[T]:
        """The items that have come and were not read, without waiting."""
        channel, buffer = self._channel, self._channel.buffer
        items = [self._read(buffer.popleft()) for _ in range(len(buffer))]
        if channel._drained:
            channel.eased()
        return items

    def check(self) -> None:
        """Raise the request's error, if it failed and all its items were read."""
        self._over()

    def __next__(self) -> T:
        channel = self._channel
        while True:
            try:
                item = channel.buffer.popleft()
            except IndexError:
                if self._over():
                    raise StopIteration from None
                channel.wait()
            else:
                if channel._drained:
                    channel.eased()
                return self._read(item)

    def _over(self) -> bool:
        """Has everything been read? Raises the request's error."""
        channel = self._channel
        if channel.finish is None or channel.buffer:
            return False
        channel.buffer = deque(maxlen=0)  # the engine may not know yet that we closed: nothing comes after the end
        self._cancel = None
        if channel.error is not None:
            # Without its traceback, which would grow with each raise.
            raise channel.error.with_traceback(None) from channel.error.__cause__
        return True

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
        trio = in_trio()
        if trio is not None:
            await trio.checkpoint()
        return await self._coming(trio)

    async def _coming(self, trio: Any) -> T:
        channel = self._channel
        while True:
            try:
                item = channel.buffer.popleft()
            except IndexError:
                if self._over():
                    raise StopAsyncIteration from None
                await channel.wait_async(trio)
            else:
                if channel._drained:
                    channel.eased()
                return self._read(item)

    def __aiter__(self) -> AsyncIterator[T]:
        return _Cursor(self)

    def collect(self) -> list[T]:
        """All remaining items, waiting for the end. Raises the request's error."""
        channel, read, items = self._channel, self._read, []
        while True:
            try:
                while True:
                    items.append(channel.buffer.popleft())
            except IndexError:
                if channel._drained:
                    channel.eased()
                if self._over():
                    return [read(item) for item in items]
                channel.wait()

    async def acollect(self) -> list[T]:
        return [item async for item in self]

    def close(self) -> None:
        """Cancel the request unless it has ended."""
        if self._channel.end(Finish.CANCELLED) and (cancel := self._cancel) is not None:
            cancel()
            self._cancel = None

    def __del__(self) -> None:
        if hasattr(self, "_channel"):
            self.close()


class _Cursor(Generic[T]):
    """What `async for` holds: an async generator would notice a `break` only later; this is dropped with the loop."""

    def __init__(self, stream: ItemStream[T]) -> None:
        self._stream = stream
        self._trio: Any = ...  # what `in_trio` says; looked up once for all items

    def __aiter__(self) -> _Cursor[T]:
        return self

    async def __anext__(self) -> T:
        try:
            if (trio := self._trio) is not None:
                if trio is ...:
                    trio = self._trio = in_trio()
                if trio is not None and self._stream._channel.ready:  # who has to wait gives way anyhow
                    await trio.checkpoint()
            return await self._stream._coming(trio)
        except BaseException:  # a cancelled task or a timeout: their traceback would keep this object for a while
            self._stream.close()
            raise

    def __del__(self) -> None:
        self._stream.close()


class Item(Generic[T]):
    """The one result of a feed-forward request: `await item`, or `item.result()` from any thread, as often as you like.

    Dropping it, or cancelling the task that awaits it, cancels the request.
    """

    def __init__(self, stream: ItemStream[T]) -> None:
        self._stream = stream

    def done(self) -> bool:
        return self._stream._channel.ready

    def result(self, timeout: float | None = None) -> T:
        """The output, waiting for it up to `timeout` seconds. Raises TimeoutError or the request's error."""
        if not self._stream._channel.wait(timeout):
            raise TimeoutError(f"no result within {timeout} s")
        return self._look()

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        try:
            await give_way()
            await self._stream._channel.wait_async(in_trio())
        except BaseException:
            self.cancel()
            raise
        return self._look()

    def _look(self) -> T:
        stream = self._stream
        if stream._channel.buffer:
            return stream._read(stream._channel.buffer[0])
        stream._over()
        raise closed(stream)

    @property
    def started(self) -> float | None:
        """When the request joined the batch, by time.monotonic(); None: it still waits."""
        return self._stream.started

    @property
    def finish_reason(self) -> Finish | None:
        """Why it ended; None while it runs."""
        return self._stream.finish_reason

    def cancel(self) -> None:
        self._stream.close()


def native_row(item: Any) -> Any:
    """Reads an item that is a place in a native batch. Only now, so that what nobody reads costs no slice."""
    batch, i = item
    return batch[i, ...]


def closed(stream: ItemStream[Any]) -> Exception:
    """The error for one who wanted a whole answer from a stream that ended before it was complete."""
    if stream.finish_reason == Finish.CLOSED:
        return EngineClosed("The engine was closed before this request was done. Make a new one.")
    return RequestError("The request was cancelled before it was done.")


def merge(streams: Sequence[ItemStream[T]]) -> Iterator[tuple[int, list[T]]]:
    """(which stream, its new items) as they come from any of them, until all have ended. Raises the first error."""
    event = threading.Event()
    for came in _merged(streams, event):
        if came is None:
            event.wait()
        else:
            yield came


async def amerge(streams: Sequence[ItemStream[T]], take: Callable[[int, list[T]], object]) -> None:
    """`merge` for asyncio and trio: calls take(which stream, its new items).

    Not an async generator, which would outlive an exception until its loop finds the time to close it.
    """
    event = LoopEvent()
    for came in _merged(streams, event):
        if came is None:
            await event.wait()
        else:
            take(*came)


def _merged(
    streams: Sequence[ItemStream[T]], event: threading.Event | LoopEvent
) -> Iterator[tuple[int, list[T]] | None]:
    """What `merge` yields, and None when the caller must wait for the event."""
    active = dict(enumerate(streams))
    try:
        while active:
            event.clear()
            for i, stream in list(active.items()):
                channel = stream._channel
                channel.listen(event)
                over = channel.finish is not None  # read before the buffer: nothing is pushed after the end
                items = stream.come()
                if items:
                    yield i, items
                if over:
                    del active[i]
                    stream._over()
            if active:
                for stream in active.values():
                    stream._channel.check_thread()
                yield None
    finally:
        for stream in streams:
            stream._channel.unlisten(event)


def wait_any(streams: Sequence[ItemStream[Any]]) -> None:
    """Block this thread until one of the streams has an item, or has ended."""
    channels, event = [s._channel for s in streams], threading.Event()
    try:
        for channel in channels:
            channel.listen(event)
        if not any(channel.ready for channel in channels):
            for channel in channels:
                channel.check_thread()
            event.wait()
    finally:
        for channel in channels:
            channel.unlisten(event)


async def await_any(streams: Sequence[ItemStream[Any]]) -> None:
    """Suspend this task until one of the streams has an item, or has ended."""
    channels, future = [s._channel for s in streams], loop_future(in_trio())
    try:
        for channel in channels:
            channel.listen(future)
        if any(channel.ready for channel in channels):
            await give_way()
        else:
            for channel in channels:
                channel.check_thread()
            await future
    finally:
        for channel in channels:
            channel.unlisten(future)
