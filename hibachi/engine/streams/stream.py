"""Streams of tokens: one for each request, iterated from any thread, from asyncio or trio.

The engine's side is a `Channel` (push, end); the user's side is an `ItemStream`. The engine holds no reference to the
stream, so dropping it cancels the request. No lock is taken on the way of a token: a consumer first registers that it
waits and then looks at the buffer once more; the engine first fills the buffer and then looks for waiting consumers.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import suppress
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, Generic

from hibachi.engine.streams.channel import Channel, T, give_way, in_trio
from hibachi.engine.streams.closeable import Closing
from hibachi.errors import EngineClosed, InvalidCall, InvalidRequest, RequestError, shown
from hibachi.request import Finish


class ItemStream(Closing, Generic[T]):
    """The tokens of one request, as they come. Iterate with `for` or `async for`; leaving the loop cancels the request.

    `next(stream)` and `stream.take(n)` read a part and leave the request running.

    Closing (`close`, `with`, leaving a loop early, dropping the last reference) cancels at once: the request leaves the
    batch at the next step. A failed request raises its error from the iteration, after the tokens before it.
    """

    channel: Channel[Any]
    read: Callable[[Any], T]
    left: bool = False  # a loop over it ended before all was read
    feeder: Callable[[Any], None] | None = None  # of `run(fed=True)`
    _read_out: bool = False  # a reader was told of its end

    def __init__(self, channel: Channel[Any], cancel: Callable[[], None], read: Callable[[Any], T]) -> None:
        self.channel, self.read = channel, read
        self._cancel: Callable[[], None] | None = cancel  # keeps the engine alive while the request runs

    @property
    def finish_reason(self) -> Finish | None:
        """Why the stream ended, or None while it runs: "stop", "length", "cancelled", "error" or "closed"."""
        return self.channel.finish

    @property
    def error(self) -> BaseException | None:
        """The error that iterating raises, if `finish_reason` is "error"."""
        return self.channel.error

    @property
    def logprobs(self) -> list[dict[int, float] | None]:
        """{token id: log-probability} of each token delivered so far, if they were asked for."""
        return list(self.channel.logprobs)

    @property
    def prompt_logprobs(self) -> list[dict[int, float] | None] | None:
        """{token id: log-probability} of each token of the prompt, None for the first; None if not asked for.

        Complete as soon as there is a token.
        """
        found = self.channel.prompt_logprobs
        return None if found is None else list(found)

    @property
    def stop_logprobs(self) -> dict[int, float] | None:
        """{token id: log-probability} of a stop token that was not delivered, if asked for; None if there was none."""
        return self.channel.stop_logprobs

    @property
    def stop_token(self) -> int | None:
        """The id of the token that ended it, delivered or not; None means that something else ended it, or tokens are
        no ids.
        """
        return self.channel.stop_token

    @property
    def score(self) -> float | None:
        """The score of a beam, once it has ended: see `Beams`. Minus infinity: there were no more sequences than others
        have.
        """
        return self.channel.score

    @property
    def started(self) -> float | None:
        """When the request joined the batch, by time.monotonic(); None means it still waits."""
        return self.channel.started

    @property
    def reused(self) -> int:
        """Tokens of the prompt whose keys and values were found in the cache."""
        return self.channel.reused

    @property
    def predicted(self) -> tuple[int, int]:
        """Tokens of its prediction that were proposed so far: how many were drawn, and how many were not."""
        return self.channel.accepted, self.channel.rejected

    def logprobs_from(self, start: int, end: int) -> list[dict[int, float] | None]:
        """The part of `logprobs` from an index on, without copying the whole."""
        return self.channel.logprobs[start:end]

    def come(self) -> list[T]:
        """The items that have come and were not read yet, without waiting."""
        raw = deque[Any]()
        self.come_into(raw)
        return [self.read(item) for item in raw]

    def come_into(self, raw: deque[Any]) -> None:
        """Move the items that have come to `raw`, as the engine gave them: Ctrl-C loses none."""
        move(self.channel.buffer, raw, len(self.channel.buffer))
        if self.channel.drained:
            self.channel.eased()

    def check(self) -> None:
        """Raise the request's error, if it failed and all its items were read."""
        self.over()

    def __next__(self) -> T:
        channel = self.channel
        while True:
            try:
                item = channel.buffer.popleft()
            except IndexError:
                item = _NOTHING  # waiting in here would put this error before that of a Ctrl-C
            if item is not _NOTHING:
                if channel.drained:
                    channel.eased()
                return self.read(item)
            if self.over():
                raise StopIteration
            channel.wait()

    def over(self) -> bool:
        """Whether everything has been read. Raises the request's error."""
        channel = self.channel
        if channel.finish is None or channel.buffer:
            return False
        channel.buffer = deque(maxlen=0)  # the engine may not know yet that we closed: nothing comes after the end
        self._cancel, self._read_out = None, True
        if self.left:
            raise closed(self)
        if channel.error is not None:
            # Without its traceback, which would grow with each raise.
            raise channel.error.with_traceback(None) from channel.error.__cause__
        return True

    def __iter__(self) -> Iterator[T]:
        return _Loop(self)

    def take(self, n: int) -> list[T]:
        """The next n items, waiting for them; fewer at the end. The request runs on.

        Raises the request's error once all items before it were read, and InvalidRequest for a wrong n.
        """
        channel, raw, wanted = self.channel, deque[Any](), checked_number(n)
        try:
            while len(raw) < wanted:
                if not channel.ready:
                    channel.wait()
                elif not self._taken(raw, wanted):
                    break
            return [self.read(item) for item in raw]
        except BaseException:  # Ctrl-C
            channel.buffer.extendleft(reversed(raw))
            raise

    async def atake(self, n: int) -> list[T]:
        """`take` for a task. Cancelling it does not cancel the request, and loses no item."""
        channel, raw = self.channel, deque[Any]()
        wanted, trio = checked_number(n), in_trio()
        try:
            await give_way()
            while len(raw) < wanted:
                if not channel.ready:
                    await channel.wait_async(trio)
                elif not self._taken(raw, wanted):
                    break
            return [self.read(item) for item in raw]
        except BaseException:
            channel.buffer.extendleft(reversed(raw))
            raise

    def _taken(self, raw: deque[Any], wanted: int) -> bool:
        """Move items that have come to `raw`, until it has `wanted`; False means no more will come. Raises the
        request's error if nothing was taken before it.
        """
        channel, before = self.channel, len(raw)
        ended = channel.finish is not None  # read first: nothing comes after the end
        move(channel.buffer, raw, wanted - before)
        if len(raw) == before:
            return not (ended and (raw or self.over()))
        if channel.drained:
            channel.eased()
        return True

    async def __anext__(self) -> T:
        trio = in_trio()
        if trio is not None:
            await trio.checkpoint()
        return await self.coming(trio)

    async def coming(self, trio: Any) -> T:
        channel = self.channel
        while True:
            try:
                item = channel.buffer.popleft()
            except IndexError:
                item = _NOTHING
            if item is not _NOTHING:
                if channel.drained:
                    channel.eased()
                return self.read(item)
            if self.over():
                raise StopAsyncIteration
            await channel.wait_async(trio)

    def __aiter__(self) -> AsyncIterator[T]:
        return _Cursor(self)

    def collect(self) -> list[T]:
        """All remaining items, waiting for the end. Raises the request's error."""
        channel, read, items = self.channel, self.read, deque[Any]()
        try:
            while True:
                self.come_into(items)
                if self.over():
                    return [read(item) for item in items]
                if channel.pause_after is None:  # the reader need not be woken for each item
                    channel.wait_end()
                else:
                    channel.wait()
        except BaseException:  # Ctrl-C: nothing is lost; of a request that ended, nothing can be read again
            channel.buffer.extendleft(reversed(items))
            raise

    if not TYPE_CHECKING:  # to type checkers it cannot be awaited at all

        def __await__(self):
            raise InvalidCall(
                "A stream is not awaited: expected `await stream.acollect()`, or `async for x in stream`."
            )

    async def acollect(self) -> list[T]:
        """`collect` for a task. Cancelling it cancels the request."""
        try:
            await give_way()
            if self.channel.pause_after is None:
                await self.channel.wait_end_async(in_trio())
            return [item async for item in self]
        except BaseException:
            self.leave()
            raise

    def feed(self, tokens: Any = None) -> None:
        """Go on, with the token that the caller gives; for streams of `run(fed=True)`, and once for each item.

        tokens: what stands in the place of the last item, one token or several, [m, *tok]; the next item comes after
        all of them. None means the item itself. Where they leave no room for another item the stream ends, as "length".
        Behind the last item it does nothing. It never waits, and may be called in any thread.

        Raises InvalidRequest for tokens of another kind, ids beyond the vocabulary, and where no item was read since
        the last time: then nothing has happened. Raises RequestError once the stream has
        ended, and InvalidCall for other streams.
        """
        if self.feeder is None:
            raise InvalidCall("feed is for streams that wait for their caller: make this one with run(..., fed=True).")
        self.feeder(tokens)

    def close(self) -> None:
        """Cancel the request unless it has ended."""
        self._end()

    def leave(self) -> None:
        """`close`, by a loop that ends before a reader was told of the end. Reading the stream again raises
        RequestError, which says so, whether or not the engine was done already.
        """
        if not self._read_out and self.channel.finish in LEAVABLE:
            self.left = True  # first: another reader looks as soon as the stream has ended
            self.left = self._end() or self.channel.finish in LEAVABLE
            if self.left:
                self.channel.buffer = deque(maxlen=0)

    def _end(self) -> bool:
        """Cancel the request; returns whether this call did it."""
        ended = self.channel.end(Finish.CANCELLED)
        if ended and (cancel := self._cancel) is not None:
            cancel()
            self._cancel = None
        return ended

    def __del__(self) -> None:
        if hasattr(self, "channel"):
            self.close()


LEAVABLE = None, Finish.STOP, Finish.LENGTH  # not a stream that failed, or that somebody closed
_NOTHING: Any = object()
_pop = operator.methodcaller("popleft")


def move(buffer: deque[Any], to: deque[Any], n: int) -> None:
    """Move up to n items. No signal is handled in the midst of it, as it runs no line of Python."""
    with suppress(IndexError):  # another reader was faster
        to.extend(islice(map(_pop, repeat(buffer)), min(n, len(buffer))))


def checked_number(n: int) -> int:
    """Check how many items to take. Raises InvalidRequest."""
    number = None
    if not isinstance(n, bool):
        with suppress(TypeError):
            number = operator.index(n)  # NumPy's integers too
    if number is None or number < 0:
        raise InvalidRequest(f"take(n) takes a number of items, an integer >= 0; got {shown(n)}.")
    return number


class _Loop(Generic[T]):
    """What `for` holds. Dropping it, as `break` does, cancels the request; a generator that never ran would not."""

    def __init__(self, stream: ItemStream[T]) -> None:
        self._stream = stream

    def __iter__(self) -> _Loop[T]:
        return self

    def __next__(self) -> T:
        try:
            return next(self._stream)
        except BaseException:  # Ctrl-C: its traceback would keep this object for a while
            self._stream.leave()
            raise

    def __del__(self) -> None:
        self._stream.leave()


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
                if trio is not None and self._stream.channel.ready:  # a task that has to wait gives way anyhow
                    await trio.checkpoint()
            return await self._stream.coming(trio)
        except BaseException:  # a cancelled task or a timeout: their traceback would keep this object for a while
            self._stream.leave()
            raise

    def __del__(self) -> None:
        self._stream.leave()


class Item(Generic[T]):
    """The one result of a feed-forward request: `await item`, or `item.result()` from any thread, as often as you like.

    Dropping it, or cancelling the task that awaits it, cancels the request.
    """

    def __init__(self, stream: ItemStream[T]) -> None:
        self._stream = stream

    @property
    def stream(self) -> ItemStream[T]:
        """The stream that delivers it, for code that watches many streams."""
        return self._stream

    def done(self) -> bool:
        return self._stream.channel.ready

    def result(self, timeout: float | None = None) -> T:
        """The output, waiting for it up to `timeout` seconds. Raises TimeoutError or the request's error."""
        if not self._stream.channel.wait(timeout):
            raise TimeoutError(f"no result within {timeout} s")
        return self._look()

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        try:
            await give_way()
            await self._stream.channel.wait_async(in_trio())
        except BaseException:
            self.cancel()
            raise
        return self._look()

    def _look(self) -> T:
        stream = self._stream
        if stream.channel.buffer:
            return stream.read(stream.channel.buffer[0])
        stream.over()
        raise closed(stream)

    @property
    def started(self) -> float | None:
        """When the request joined the batch, by time.monotonic(); None means it still waits."""
        return self._stream.started

    @property
    def finish_reason(self) -> Finish | None:
        """Why it ended; None while it runs."""
        return self._stream.finish_reason

    def cancel(self) -> None:
        self._stream.close()


def native_row(item: Any) -> Any:
    """Convert a place in a native batch to its row, only when it is read: unread items cost no slice."""
    batch, i = item
    return batch[i, ...]


def as_it_is(item: Any) -> Any:
    """Return an item unchanged."""
    return item


def closed(stream: ItemStream[Any]) -> Exception:
    """The error for a caller that wanted a whole answer from a stream that ended before it was complete."""
    if stream.finish_reason == Finish.CLOSED:
        return EngineClosed("The engine was closed before this request was done. Make a new one.")
    if stream.left:
        return left_early()
    return RequestError("The request was cancelled before it was done.")


def left_early() -> RequestError:
    """The error for a caller that reads on where a loop has ended early."""
    return RequestError(
        "A loop over its stream (or `acollect`) ended early, which cancels the request. To read a part and then go "
        "on, use next(stream) or stream.take(n)."
    )
