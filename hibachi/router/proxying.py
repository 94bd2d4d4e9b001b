"""What passes of an exchange, and for how long an answer is waited for."""

from __future__ import annotations

import asyncio
from math import inf
from typing import Any

import aiohttp

from hibachi.router.inspect_answer import AnswerInspector
from hibachi.server.web.deadlines import cut
from hibachi.server.web.exchange import Exchange

LOOK = 1.0  # seconds from one look at an answer that is waited for to the next
HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)  # fmt: skip


class Idle:
    """Ends an exchange after this many seconds (0 means any) without a byte from the upstream or to the client, or when
    nothing can come any more. One timer, however many bytes come.
    """

    def __init__(self, seconds: float, answer: aiohttp.ClientResponse, receive: Any) -> None:
        """receive: of the application's call."""
        self._seconds, self._answer, self._receive = seconds or inf, answer, receive
        self._loop = asyncio.get_running_loop()
        self._since, self._reading = self._loop.time(), True
        self.over = False
        self._timer = self._loop.call_later(min(self._seconds, LOOK), self._look)

    def reads(self) -> None:
        self._since, self._reading = self._loop.time(), True

    def writes(self) -> None:
        self._since, self._reading = self._loop.time(), False

    def _look(self) -> None:
        left = self._since + self._seconds - self._loop.time()
        # aiohttp does not report to waiting callers that the bytes are no HTTP.
        protocol = None if self._answer.connection is None else self._answer.connection.protocol
        broken = protocol is not None and protocol.exception() is not None
        if left <= 0 and not broken and not self._reading:
            cut(self._receive, unread=True)  # which is to the exchange as if the client had left
            return
        if left <= 0 or broken:
            self.over = not broken
            self._answer.close()
        self._timer = self._loop.call_later(min(left, LOOK) if left > 0 else LOOK, self._look)

    def stop(self) -> None:
        self._timer.cancel()


async def relay(x: Exchange, content: aiohttp.StreamReader, reader: AnswerInspector, watch: Idle) -> None:
    """Pass the body of an answer on as it comes. Raises what aiohttp raises."""
    while not content.at_eof():
        watch.reads()
        part = reader.feed(await content.readany())
        watch.writes()
        if content.at_eof():
            await x.write(part + reader.end(), more=False)
            return
        if part:
            await x.write(part)
    await x.write(reader.end(), more=False)


def without_hops(headers: Any) -> list[tuple[bytes, bytes]]:
    """Without those that concern one connection (RFC 9110, 7.6.1), and those that `Connection` names."""
    hops = HOP
    for name, value in headers:
        if len(name) == 10 and name.lower() == b"connection":
            hops = hops | {word.strip().lower() for word in value.split(b",")} - {b"content-length", b"content-type"}
    return [(name, value) for name, value in headers if name.lower() not in hops]
