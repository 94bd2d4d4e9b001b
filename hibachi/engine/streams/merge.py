"""Reads several streams as one, in the order in which their items come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hibachi.engine.streams.channel import NOTICED, Bell, LoopEvent, T, give_way, in_trio, loop_future
from hibachi.engine.streams.stream import ItemStream


def merge(streams: Sequence[ItemStream[T]]) -> Iterator[tuple[int, list[T]]]:
    """Yield (index of a stream, its new items) as they come, until all streams have ended. Raises the first error."""
    bell = Bell()
    for came in _merged(streams, bell):
        if came is None:
            _wait(bell)
        else:
            yield came


def _merged(streams: Sequence[ItemStream[T]], event: Bell | LoopEvent) -> Iterator[tuple[int, list[T]] | None]:
    """What `merge` yields, and None when the caller must wait for the event."""
    active = dict(enumerate(streams))
    try:
        while active:
            event.clear()
            for i, stream in list(active.items()):
                stream.channel.listen(event)
                over = stream.channel.finish is not None  # read before the buffer: nothing is pushed after the end
                items = stream.come()
                if items:
                    yield i, items
                if over:
                    del active[i]
                    stream.over()
            if active:
                for stream in active.values():
                    stream.channel.check_thread()
                yield None
    finally:
        for stream in streams:
            stream.channel.unlisten(event)


def wait_any(streams: Sequence[ItemStream[Any]]) -> None:
    """Block this thread until one of the streams has an item, or has ended."""
    channels, bell = [s.channel for s in streams], Bell()
    try:
        for channel in channels:
            channel.listen(bell)
        if not any(channel.ready for channel in channels):
            for channel in channels:
                channel.check_thread()
            _wait(bell)
    finally:
        for channel in channels:
            channel.unlisten(bell)


def _wait(bell: Bell) -> None:
    """Wait for it to ring, and notice Ctrl-C on every system."""
    while not bell.wait(NOTICED):
        pass


async def amerge(streams: Sequence[ItemStream[T]], take: Callable[[int, list[T]], object]) -> None:
    """`merge` for asyncio and trio: calls take(index of a stream, its new items).

    Not an async generator, which would outlive an exception until its loop finds the time to close it.
    """
    event = LoopEvent()
    for came in _merged(streams, event):
        if came is None:
            await event.wait()
        else:
            take(*came)


async def await_any(streams: Sequence[ItemStream[Any]]) -> None:
    """Suspend this task until one of the streams has an item, or has ended."""
    channels, future = [s.channel for s in streams], loop_future(in_trio())
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
