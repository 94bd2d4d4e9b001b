"""What passes of an exchange, and for how long an answer is waited for."""

from __future__ import annotations

import asyncio
from math import inf
from typing import Any

import aiohttp

LOOK = 1.0  # seconds from one look at an answer that is waited for to the next
HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)  # fmt: skip


class Idle:
    """Closes an answer for whose next byte we have waited so many seconds (0: any), or of which nothing can come any
    more. One timer, however many bytes come.
    """

    def __init__(self, seconds: float, answer: aiohttp.ClientResponse) -> None:
        self._seconds, self._answer = seconds or inf, answer
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self.over = False
        self._timer = self._loop.call_later(min(self._seconds, LOOK), self._look)

    def begins(self) -> None:
        self._since = self._loop.time()

    def ends(self) -> None:
        self._since = None

    def _look(self) -> None:
        left = self._seconds if self._since is None else self._since + self._seconds - self._loop.time()
        # aiohttp tells nobody who waits that what came is no HTTP.
        protocol = None if self._answer.connection is None else self._answer.connection.protocol
        broken = protocol is not None and protocol.exception() is not None
        if left > 0 and not broken:
            self._timer = self._loop.call_later(min(left, LOOK), self._look)
        else:
            self.over = not broken
            self._answer.close()

    def stop(self) -> None:
        self._timer.cancel()


def without_hops(headers: Any) -> list[tuple[bytes, bytes]]:
    """Without those that concern one connection (RFC 9110, 7.6.1), and those that `Connection` names."""
    hops = HOP
    for name, value in headers:
        if len(name) == 10 and name.lower() == b"connection":
            hops = hops | {word.strip().lower() for word in value.split(b",")} - {b"content-length", b"content-type"}
    return [(name, value) for name, value in headers if name.lower() not in hops]
