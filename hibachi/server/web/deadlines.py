"""Connections with bounds and deadlines for requests: uvicorn alone takes headers of any size, for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from hibachi.llm.dialects.errors import Refused, body_of
from hibachi.llm.dialects.openai.answers import encode

MOST_BYTES = 1 << 16  # of the first line and the headers of a request
MOST_HEADERS = 128
LEFT = "hibachi.left"  # where a request's scope has its `Left`
LINGERING = 1.0  # seconds that a client has to read why it was refused, while it may still be sending

Tell = Callable[[Refused, "tuple[str, int] | None", float], None]
"""Callback for what was refused before it became a request: the refusal, the client's address, seconds it took."""
Pairs = list[tuple[bytes, bytes]]
Dress = Callable[[Pairs, dict[bytes, bytes]], Pairs]
"""From the headers of an answer and those of its request, the headers to send."""


def too_large() -> Refused:
    return Refused(
        f"The headers are too large: at most {MOST_BYTES} bytes and {MOST_HEADERS} headers are taken.",
        status=431,
        code="headers_too_large",
        headers={"Connection": "close"},
    )


def check_headers(scope: Any) -> None:
    """Raise Refused for too many headers, and for repeated headers of which HTTP/1.1 allows one each."""
    headers = scope["headers"]
    if len(headers) > MOST_HEADERS or sum(len(n) + len(v) for n, v in headers) + len(scope["raw_path"]) > MOST_BYTES:
        raise too_large()
    seen = [name for name, _ in headers]
    if b"transfer-encoding" in seen and b"content-length" in seen:
        raise Refused("Expected Content-Length or Transfer-Encoding; got both.", code="invalid_http")
    hosts = seen.count(b"host")
    if hosts > 1 or (hosts == 0 and scope["http_version"] == "1.1"):
        raise Refused(f"Expected one header Host; got {hosts}.", code="invalid_http")
    for name in (b"authorization", b"x-api-key"):
        if seen.count(name) > 1:
            raise Refused(f"Expected at most one header {name.decode().title()}; got several.", code="invalid_http")


def cut(receive: Any, *, unread: bool = False) -> None:
    """End the connection of an answer that cannot be ended as it should, so that the client sees that it is not whole.

    receive: of the application's call. unread: without what the client has not taken yet.
    """
    cycle = getattr(receive, "__self__", None)
    transport = getattr(cycle, "transport", None)
    if cycle is not None and transport is not None and unread:
        transport.abort()
    elif cycle is not None and transport is not None:
        cycle.disconnected = True  # else uvicorn complains in the log of an answer without an end
        transport.close()


class Left:
    """Reports that the client of a request has left, without a task that waits for it. flow: of uvicorn's, which must
    be reading, or a leaving client goes unnoticed.
    """

    def __init__(self, flow: Any) -> None:
        self._flow, self._gone = flow, False
        self._call: Callable[[], object] | None = None

    def tell(self) -> None:
        self._gone = True
        if self._call is not None:
            self._call()

    def then(self, call: Callable[[], object] | None) -> None:
        """Set the function to call; it is called at once if the client has left already. None means nothing. The body
        must have been read.
        """
        self._call = call
        if call is not None and self._flow is not None:
            self._flow.resume_reading()
        if self._gone and call is not None:
            call()


class _Any(int):
    """How many bytes an answer has that ends with its connection: never too many, and always enough."""

    def __lt__(self, other: int) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __sub__(self, other: int) -> _Any:
        return self


class Arriving(asyncio.Protocol):
    """uvicorn's protocol, with a timer that closes the connection and a bound for what it holds of the headers.

    The timer runs from the first byte of a request, or from the beginning of the connection, until the headers are
    here. Then the body has a time of its own (`Served.body`), and an idle connection has uvicorn's. What comes of a
    body that was refused counts as a request to come, so that it ends as well. Headers that are here as a whole are
    counted by the application.
    """

    def __init__(
        self,
        *,
        seconds: float | None,
        tell: Tell | None = None,
        dress: Dress | None = None,
        _loop: asyncio.AbstractEventLoop | None = None,
        **more: Any,
    ) -> None:
        self._loop = _loop or asyncio.get_running_loop()
        inner: Any = AutoHTTPProtocol(_loop=self._loop, **more)  # type: ignore[call-arg]  # uvicorn chooses the class at run time
        self._inner = inner
        inner.send_400_response = self._malformed
        self._answering: Any = None  # the cycle of the request that is being answered
        self._left = Left(None)  # what hears that its client has left
        app = inner.app

        async def noting(scope: Any, receive: Any, send: Any) -> None:
            cycle: Any = getattr(receive, "__self__", None)
            self._answering = cycle
            scope[LEFT] = self._left = Left(getattr(cycle, "flow", None))
            if scope["http_version"] == "1.0" and hasattr(cycle, "chunked_encoding"):
                # An answer without a length ends with the connection; uvicorn would send it in chunks.
                cycle.chunked_encoding, cycle.expected_content_length = False, _Any()
            await app(scope, receive, send)

        inner.app = noting
        self._seconds, self._tell, self._dress = seconds, tell, dress
        self._timer: asyncio.TimerHandle | None = None
        self._size = 0  # bytes of headers that are not here as a whole
        self._began = 0.0
        self._deaf = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner.connection_made(transport)
        self._began = time.monotonic()
        self._wait()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        inner = self._inner
        inner.data_received(data)
        cycle = inner.cycle  # of the latest request whose headers are here
        in_headers = cycle is None or inner.scope is not cycle.scope  # perhaps behind a request that is being answered
        self._size = self._size + len(data) if in_headers else 0
        if self._size > MOST_BYTES:
            self._refuse(too_large())
        elif cycle is None or cycle.response_complete:  # if not in headers, bytes of a body that was refused
            self._wait()
        else:
            self._wait_no_more()

    def connection_lost(self, error: Exception | None) -> None:
        self._wait_no_more()
        self._inner.connection_lost(error)
        # uvicorn tells the latest request alone, which may be one that waits behind the one being answered.
        if (cycle := self._answering) is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            self._left.tell()

    def eof_received(self) -> bool | None:
        kept: bool | None = self._inner.eof_received()
        return kept

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def _malformed(self, why: str) -> None:
        """In the place of uvicorn's answer to what is no HTTP."""
        del why
        self._refuse(Refused("This is no valid HTTP request.", code="invalid_http", headers={"Connection": "close"}))

    def _refuse(self, refused: Refused) -> None:
        """Answer what never became a request, and end the connection."""
        if self._deaf:
            return
        self._deaf = True
        self._wait_no_more()
        inner = self._inner
        if self._tell is not None:
            self._tell(refused, inner.client, time.monotonic() - self._began)
        transport = inner.transport
        if inner.cycle is None or inner.cycle.response_complete:  # else another answer is under way
            body = encode(body_of(refused))
            reason = {431: b"Request Header Fields Too Large"}.get(refused.status, b"Bad Request")
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            headers.append((b"connection", b"close"))
            if self._dress is not None:
                headers = self._dress(headers, dict(inner.headers or ()))  # those that are here
            lines = b"".join(b"%s: %s\r\n" % header for header in headers)
            transport.write(b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (refused.status, reason, lines, body))
            if transport.can_write_eof():
                # Closed at once, with bytes unread, the connection would be reset and the answer perhaps lost.
                transport.write_eof()
                self._loop.call_later(LINGERING, transport.close)
                return
        transport.close()

    def _wait(self) -> None:
        if self._timer is None and self._seconds is not None:
            self._timer = self._loop.call_later(self._seconds, self._inner.transport.close)

    def _wait_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
