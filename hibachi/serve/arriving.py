"""Connections whose requests must come in time: uvicorn waits for the headers of one as long as the client likes."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol


class Arriving(asyncio.Protocol):
    """uvicorn's protocol, and a timer that closes the connection.

    It runs from the first byte of a request, or from the beginning of the connection, until the headers are here. Then
    the body has a time of its own (`Served.body`), and an idle connection has uvicorn's. What comes of a body that
    was refused counts as a request to come, so that it ends as well.
    """

    def __init__(self, *, seconds: float | None, _loop: asyncio.AbstractEventLoop | None = None, **more: Any) -> None:
        self._loop = _loop or asyncio.get_running_loop()
        self._inner: Any = AutoHTTPProtocol(_loop=self._loop, **more)  # type: ignore[call-arg]
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner.connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)
        cycle = self._inner.cycle  # of the latest request whose headers are here
        if cycle is None or cycle.response_complete:
            self._wait()
        else:
            self._wait_no_more()

    def connection_lost(self, error: Exception | None) -> None:
        self._wait_no_more()
        self._inner.connection_lost(error)

    def eof_received(self) -> bool | None:
        kept: bool | None = self._inner.eof_received()
        return kept

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def _wait(self) -> None:
        if self._timer is None and self._seconds is not None:
            self._timer = self._loop.call_later(self._seconds, self._inner.transport.close)

    def _wait_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
