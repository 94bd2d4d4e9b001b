"""Watches many streams that come and go, and says which have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from hibachi.engine.streams.channel import NOTICED, Bell, LoopEvent, Wakeups, give_way
from hibachi.engine.streams.closeable import Closing
from hibachi.engine.streams.stream import ItemStream
from hibachi.errors import ConfigError, shown

Feed = Callable[[int, list[Any]], object]


class Gather(Closing):
    """Groups of streams, each under a key; `wait` says which groups are done, that is, all of their streams have ended.

    A group may be added at any time. Errors of streams are not raised here: ask the streams. `wake` may be called from
    any thread; everything else from one thread or one task.
    """

    def __init__(self) -> None:
        self._groups: dict[Hashable, _Group] = {}
        self._bell: Bell | LoopEvent | None = None  # what the streams ring; of the kind that was last waited with
        self._woken = False

    def __len__(self) -> int:
        """Number of groups that are not known to be done."""
        return len(self._groups)

    def add(self, key: Hashable, streams: Sequence[ItemStream[Any]], feed: Feed | None = None) -> None:
        """Watch a group until it is done.

        feed: None means that items stay in the streams until they are read, and `wait` sleeps until an end. Otherwise
        `wait` calls feed(i, new items of streams[i]), which may close streams[i], and passes on what it raises. Raises
        ConfigError if the key is taken, or if feed is None and a stream would pause because nothing reads it.
        """
        if key in self._groups:
            raise ConfigError(f"Each group needs a key of its own; {shown(key)} is still there. Wait for it first.")
        if feed is None and any(s.channel.pause_after is not None for s in streams):
            raise ConfigError("Streams that pause while unread (pause_after) never end unread. Pass feed=.")
        group = self._groups[key] = _Group(streams, feed)
        if self._bell is not None:
            group.listen(self._bell)

    def discard(self, key: Hashable) -> None:
        """Forget a group, if it is there. Its streams go on for their other holders."""
        group = self._groups.pop(key, None)
        if group is not None and self._bell is not None:
            group.unlisten(self._bell)

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Block this thread until a group is done. Returns the keys of all that are, each once, in the order of their
        `add`.

        [] means that `timeout` seconds have passed, or that `wake` was called; without any group it waits for these.
        Raises EngineError in the thread of an engine whose streams these are.
        """
        bell, deadline = self._bell, None if timeout is None else time.monotonic() + timeout
        if not isinstance(bell, Bell):
            bell = Bell()
            self._listen(bell)
        while True:
            bell.clear()  # before we look: a ring meanwhile ends the `wait` below at once
            done = self._look()
            if done or self._told():
                return done
            left = NOTICED if deadline is None else min(NOTICED, deadline - time.monotonic())
            if left <= 0:
                return []
            bell.wait(left)

    async def await_some(self) -> list[Any]:
        """`wait` for a task of asyncio or trio."""
        await give_way()
        bell, here = self._bell, LoopEvent()
        if not isinstance(bell, LoopEvent) or bell.get_loop() is not here.get_loop():
            bell = here
            self._listen(bell)
        while True:
            bell.clear()
            done = self._look()
            if done or self._told():
                return done
            await bell.wait()

    def poll(self) -> list[Any]:
        """The keys that `wait` would return, without waiting."""
        if self._bell is None:
            self._listen(Bell())
        return self._look()

    def wake(self) -> None:
        """Let the running `wait` return, or else the next one. Callable from any thread or signal handler."""
        self._woken = True
        if isinstance(bell := self._bell, LoopEvent):
            wakeups = Wakeups()
            wakeups.add(bell)
            wakeups.post()
        elif bell is not None:
            bell.set()

    def close(self) -> None:
        """Cancel all groups that still run, and forget them."""
        while self._groups:
            key, group = next(iter(self._groups.items()))
            self.discard(key)
            for stream in group.streams:
                stream.close()

    def _look(self) -> list[Any]:
        """The keys of the groups that are done; these are forgotten."""
        bell = self._bell
        assert bell is not None
        done = [key for key, group in list(self._groups.items()) if group.done(bell)]
        for key in done:
            self._groups.pop(key, None)  # `feed` may have discarded it
        return done

    def _told(self) -> bool:
        """Whether `wake` was called. Raises EngineError if this thread would wait for itself."""
        if self._woken:
            self._woken = False
            return True
        for group in self._groups.values():
            group.streams[0].channel.check_thread()
        return False

    def _listen(self, bell: Bell | LoopEvent) -> None:
        """Let all streams ring this bell from now on."""
        before, self._bell = self._bell, bell
        for group in self._groups.values():
            if before is not None:
                group.unlisten(before)
            group.listen(bell)


class _Group:
    __slots__ = ("active", "feed", "streams")

    def __init__(self, streams: Sequence[ItemStream[Any]], feed: Feed | None) -> None:
        self.streams, self.feed = streams, feed
        self.active = list(range(len(streams)))  # of those whose end was not seen yet

    def listen(self, bell: Bell | LoopEvent) -> None:
        for i in self.active:
            self.streams[i].channel.listen(bell, end=self.feed is None)

    def unlisten(self, bell: Bell | LoopEvent) -> None:
        for i in self.active:
            self.streams[i].channel.unlisten(bell)

    def done(self, bell: Bell | LoopEvent) -> bool:
        if self.feed is not None:
            self.active = [i for i in self.active if not self._fed(i, self.feed, bell)]
            return not self.active
        active, streams = self.active, self.streams
        # From the end, up to the first that still runs: one is enough to know that the group is not done.
        while active and streams[active[-1]].channel.finish is not None:
            active.pop()
        return not active

    def _fed(self, i: int, feed: Feed, bell: Bell | LoopEvent) -> bool:
        """Pass on new items; returns whether the group is done."""
        stream = self.streams[i]
        stream.channel.listen(bell)  # again each time, as a waiter that was woken is forgotten
        while True:
            over = stream.channel.finish is not None  # read before the buffer: nothing is pushed after the end
            if items := stream.come():
                feed(i, items)
            if over:
                stream.channel.unlisten(bell)
                return True
            if stream.channel.finish is None:
                return False
