"""The engine's end of a stream: a buffer, and how it ended.

No lock is taken on the way of a token: a consumer first registers that it waits and then looks at the buffer once more;
the engine first fills the buffer and then looks for waiting consumers.

The event loops that consumers wait on are asyncio's and trio's. trio is not a dependency and is never imported here: a
program that waits in a trio task has imported it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from hibachi.errors import EngineError
from hibachi.request import Finish


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


NOTICED = 1.0  # seconds until a thread that waits notices a signal that came just before it began to

T = TypeVar("T")


class Bell:
    """An event for one thread that any thread may set, even a signal's handler in the midst of its `wait`, where a
    threading.Event deadlocks.
    """

    __slots__ = ("_silent",)

    def __init__(self) -> None:
        self._silent = threading.Lock()  # held while it is not set
        self._silent.acquire()

    def set(self) -> None:
        if self._silent.locked():
            with suppress(RuntimeError):  # another was faster
                self._silent.release()

    def clear(self) -> None:
        self._silent.acquire(blocking=False)

    def wait(self, timeout: float) -> bool:
        """False after `timeout` seconds, else clears."""
        return self._silent.acquire(timeout=timeout)


Waiter = Bell | LoopFuture | LoopEvent


class Channel(Generic[T]):
    """The engine's end of a stream: a buffer, and how it ended. Any number of threads and tasks may wait on it.

    pause_after: how many items may lie unread; None means any number. The thread that pushes asks `full`, and then
    calls `pause`. fed: it is paused with each item, until the caller has given the next token.
    """

    __slots__ = (
        "_at_end",
        "_ending",
        "_waiters",
        "accepted",
        "buffer",
        "drained",
        "error",
        "fed",
        "finish",
        "logprobs",
        "pause_after",
        "prompt_logprobs",
        "rejected",
        "reused",
        "score",
        "started",
        "stop_logprobs",
        "stop_token",
        "tenant",
        "thread",
    )

    def __init__(self, pause_after: int | None = None) -> None:
        self.buffer: deque[T] = deque()
        self.pause_after: int | None = pause_after
        self.fed: bool = False
        self.logprobs: list[Any] = []  # {id: number} of each token, or one for each of its codebooks, or None
        self.prompt_logprobs: list[dict[int, float] | None] | None = None  # filled before the first token comes
        self.score: float | None = None  # of a beam
        self.stop_logprobs: dict[int, float] | None = None  # as `logprobs`, of a stop token that was not delivered
        # the token that ended it, delivered or not, where tokens are drawn from logits
        self.stop_token: int | None = None
        self.started: float | None = None  # when it joined the batch, by time.monotonic()
        self.reused: int = 0  # tokens of the prompt that were found in the cache then
        # tokens of its prediction that were proposed, and were drawn or were not
        self.accepted: int = 0
        self.rejected: int = 0
        self.finish: Finish | None = None
        self.error: BaseException | None = None
        self.tenant: Hashable = ""  # the tenant of the request
        self.thread: int | None = None  # the identifier of the thread that fills the buffer, which may not wait on it
        self._waiters: deque[Waiter] = deque()
        self._at_end: deque[Waiter] = deque()  # waiters for the end only
        self._ending = threading.RLock()  # reentrant: the garbage collector may drop the stream in the midst of `end`
        self.drained: deque[Callable[[], None]] = (
            deque()
        )  # while paused, the one call to make; the thread that pops it makes it

    def predicted(self, accepted: int, rejected: int) -> None:
        """So many more tokens of its prediction were right, and so many wrong."""
        self.accepted += accepted
        self.rejected += rejected

    def push(self, item: T, wakeups: Wakeups) -> None:
        self.buffer.append(item)
        if self._waiters:
            self._wake(wakeups)

    def end(self, reason: Finish, error: BaseException | None = None, wakeups: Wakeups | None = None) -> bool:
        """End the stream; False if it had ended. Items pushed before stay readable."""
        with self._ending:
            if self.finish is not None:
                return False
            # The error first: readers take no lock, and ask for it as soon as they see `finish`.
            self.error = error
            self.finish = reason
        self.drained.clear()
        own = wakeups or Wakeups()
        self._waiters.extend(self._at_end)
        self._wake(own)
        if wakeups is None:
            own.post()
        return True

    def renew(self) -> None:
        """Make new locks after a fork, where the thread that held the old ones may be gone."""
        self._ending = threading.RLock()

    @property
    def full(self) -> bool:
        """Whether as many items lie unread as may, and it is not paused yet."""
        if self.fed:
            return True
        return self.pause_after is not None and len(self.buffer) >= self.pause_after and not self.drained

    def takes(self, n: int) -> bool:
        """Whether n more items may come before the engine must ask `full`."""
        return not self.fed and (self.pause_after is None or len(self.buffer) + n <= self.pause_after)

    @property
    def paused(self) -> bool:
        return bool(self.drained)

    def pause(self, drained: Callable[[], None]) -> bool:
        """Have `drained()` called once when the reader has emptied the buffer to half; any thread may make the call.

        False means that the reader was faster: go on, `drained` is not called. Nor is it called when the stream ends
        first. It may come late: after the end, from a reader that was about to call it.
        """
        if self.fed:
            return True
        self.drained.append(drained)
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
        """`drained`, for only one of the threads that ask: taking an item from a deque is atomic."""
        try:
            return self.drained.pop()
        except IndexError:
            return None

    def _wake(self, wakeups: Wakeups) -> None:
        """Wake all waiters: each looks for itself whether there is something left for it."""
        while self._waiters:
            try:
                waiter = self._waiters.popleft()
            except IndexError:  # the other of `push` and `end` took it
                return
            if isinstance(waiter, Bell):
                waiter.set()
            else:
                wakeups.add(waiter)

    @property
    def ready(self) -> bool:
        """Whether there is an item, or the stream has ended."""
        return bool(self.buffer) or self.finish is not None

    def listen(self, waiter: Waiter, *, end: bool = False) -> None:
        """Wake `waiter` at the next item or the end. After this call the caller must look at `ready` once more.

        end: at the end only; then look at `finish`.
        """
        waiters = self._at_end if end else self._waiters
        if waiter not in waiters:
            waiters.append(waiter)

    def unlisten(self, waiter: Waiter) -> None:
        for waiters in (self._waiters, self._at_end):
            if waiter in waiters:  # else it was woken; asked first, as the error of `remove` would say all of it
                with suppress(ValueError):  # woken just now, by another thread
                    waiters.remove(waiter)

    def wait_end(self) -> None:
        """Block this thread until the end, however many items come. Only for streams that unread items do not pause.

        Raises EngineError in the engine's own thread.
        """
        bell = Bell()
        self.listen(bell, end=True)
        try:
            if self.finish is None:
                self.check_thread()
                while not bell.wait(NOTICED):
                    pass
        finally:
            self.unlisten(bell)

    async def wait_end_async(self, trio: Any) -> None:
        """`wait_end` for a task. trio: what `in_trio` says."""
        while self.finish is None:
            self.check_thread()
            future = loop_future(trio)
            self.listen(future, end=True)
            try:
                if self.finish is None:
                    await future
            finally:
                self.unlisten(future)

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
        bell = Bell()
        try:
            while not self.ready:
                # An item that comes before `listen` is seen by `ready` below; a later one rings after `clear`.
                bell.clear()
                self.listen(bell)
                if self.ready:
                    break
                left = NOTICED if deadline is None else min(NOTICED, deadline - time.monotonic())
                if left <= 0 or (not bell.wait(left) and deadline is not None and time.monotonic() >= deadline):
                    return self.ready
        finally:
            self.unlisten(bell)
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
