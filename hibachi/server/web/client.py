"""A light HTTP client for one server: requests in JSON, answers as they come. It must cost little."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from hibachi.errors import ConfigError
from hibachi.server.web.wire import BadAnswer, Response

_URL = re.compile(r"(https?)://(\[[0-9a-fA-F:.]+\]|[^/:@\s\[\]?#]+)(?::(\d{1,5}))?(/[^\s?#]*)?")
Take = Callable[[Response, bytes, float], None]


class Unreachable(Exception):
    """No connection could be made."""


class Idle(ConnectionResetError):
    """The server closed the connection before any of the answer came, as it does with those long unused."""


@dataclass(frozen=True, slots=True)
class Url:
    """Address of a server. base: path in front of the routes, without /v1 and without a slash at its end."""

    secure: bool
    host: str
    port: int
    base: str

    @classmethod
    def of(cls, text: str) -> Url:
        """Raises ConfigError."""
        found = _URL.fullmatch(text.strip())
        if found is None or not 0 < int(found[3] or 80) < 2**16:
            raise ConfigError(f"Expected a URL like http://127.0.0.1:8000; got {text[:200]!r}.")
        secure = found[1] == "https"
        base = (found[4] or "").rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(secure, found[2].strip("[]"), int(found[3] or (443 if secure else 80)), base)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.authority}{self.base}"


class Connection(asyncio.Protocol):
    """One connection, for one request after the other."""

    def __init__(self) -> None:
        self.open: bool = False
        self.failed: BaseException | None = None
        self._answer: Response | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.open = cast(asyncio.Transport, transport), True

    async def ask(self, request: bytes, take: Take) -> Response:
        """Send, and give `take` each part of the body with the time (perf_counter) at which it came; b"" at the head.

        Raises BadAnswer, ConnectionError, and what `take` raises.
        """
        self._answer, self._take = Response(), take
        self._over: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._over
        finally:
            if not (self._answer.done and self._answer.reusable):
                self.close()
            self._answer = None

    def data_received(self, data: bytes) -> None:
        now, answer = time.perf_counter(), self._answer
        if answer is None or self._over.done():  # nobody has asked
            self.close()
            return
        try:
            body = answer.feed(data)
            if answer.status:
                self._take(answer, body, now)
        except Exception as e:
            self._over.set_exception(e)
            return
        if answer.done:
            self._over.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        answer = self._answer
        if answer is None or self._over.done():
            return
        try:
            if not answer.begun:
                raise Idle("the server closed the connection instead of answering") from error
            if error is not None:
                raise ConnectionResetError("the server closed the connection in the middle of an answer") from error
            answer.end()
            self._over.set_result(answer)
        except (BadAnswer, OSError) as e:
            self._over.set_exception(e)

    def close(self) -> None:
        """Close at once, so that the server sees that the answer is not read."""
        self.open = False
        self._transport.abort()


class Client:
    """Requests to one server, over as many connections as there are requests at a time; they are kept for the next.

    headers: sent with each request. agent: what it calls itself. connect_timeout: seconds. Close it by `close`.
    """

    made: int
    url: Url

    def __init__(
        self,
        url: Url,
        headers: Mapping[str, str] | None = None,
        *,
        agent: str = "hibachi",
        connect_timeout: float = 30.0,
    ) -> None:
        self.url, self._timeout = url, connect_timeout
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        if more.count("\r\n") != len(headers or {}) or not more.isascii():
            raise ConfigError("A header, such as the API key, must be plain ASCII on one line.")
        self._common = f"Host: {url.authority}\r\nAccept: */*\r\nUser-Agent: {agent}\r\n{more}"
        self._free: list[Connection] = []
        self.made = 0  # connections

    async def post(self, path: str, body: bytes, take: Take) -> Response:
        """Send JSON. Raises Unreachable, BadAnswer, ConnectionError."""
        head = f"POST {self.url.base}{path} HTTP/1.1\r\n{self._common}"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return await self._ask(head.encode() + body, take)

    async def get(self, path: str) -> tuple[Response, bytes]:
        """Raises Unreachable, BadAnswer, ConnectionError."""
        parts: list[bytes] = []
        request = f"GET {self.url.base}{path} HTTP/1.1\r\n{self._common}\r\n".encode()
        answer = await self._ask(request, lambda _answer, body, _now: parts.append(body))
        return answer, b"".join(parts)

    async def _ask(self, request: bytes, take: Take) -> Response:
        while self._free:
            connection = self._free.pop()
            if not connection.open:
                continue
            try:
                return await self._with(connection, request, take)
            except Idle:
                break  # once more, on a new one
        return await self._with(await self._connect(), request, take)

    async def _with(self, connection: Connection, request: bytes, take: Take) -> Response:
        try:
            return await connection.ask(request, take)
        finally:  # also when cancelled just as the answer was whole: nobody else would close it
            if connection.open:
                self._free.append(connection)

    async def _connect(self) -> Connection:
        url, loop = self.url, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout):
                _, made = await loop.create_connection(Connection, url.host, url.port, ssl=url.secure or None)
        except TimeoutError:
            raise Unreachable(f"{url}: no connection within {self._timeout:g} s") from None
        except OSError as e:
            raise Unreachable(f"{url}: {e.strerror or e}") from e
        self.made += 1
        return made

    async def close(self) -> None:
        for connection in self._free:
            connection.close()
        self._free.clear()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
