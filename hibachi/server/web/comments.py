"""Keep-alive comments in a stream that waits, so that no proxy or client takes it for dead."""

from __future__ import annotations

import asyncio

from hibachi.server.web.exchange import SSE, Exchange

EVERY = 15.0  # seconds in which nothing was sent
COMMENT = b": waiting\n\n"  # which readers of server-sent events pass over (WHATWG HTML, 9.2.6)


class Comments:
    """Sends a comment whenever nothing was sent for `every` seconds; the first begins the answer, with status 200.

    more: headers of that answer. Code that writes an event awaits `ready` first, and calls `stop` at the end.
    """

    def __init__(
        self,
        x: Exchange,
        kind: bytes = SSE,
        comment: bytes = COMMENT,
        every: float | None = None,
        more: dict[str, str] | None = None,
    ) -> None:
        self._x, self._kind, self._comment, self._more = x, kind, comment, more
        self._every = EVERY if every is None else every
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._saying: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(self._every, self._look)

    def _look(self) -> None:
        x = self._x
        since = self._since if x.written is None else x.written
        left = since + self._every - self._loop.time()
        if left <= 0:
            left = self._every
            if not x.writing and (self._saying is None or self._saying.done()):
                self._saying = self._loop.create_task(self._say())
        self._timer = self._loop.call_later(left, self._look)

    async def _say(self) -> None:
        if not self._x.begun:
            await self._x.begin(200, self._kind, self._more)
        await self._x.write(self._comment)

    async def settled(self) -> None:
        """No comment is being sent."""
        if self._saying is not None:
            saying, self._saying = self._saying, None
            await saying

    async def ready(self) -> None:
        """No comment is being sent, and the answer has begun."""
        await self.settled()
        if not self._x.begun:
            await self._x.begin(200, self._kind, self._more)

    def stop(self) -> None:
        self._timer.cancel()
        if self._saying is not None:
            self._saying.cancel()
