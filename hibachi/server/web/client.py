"""Requests to one server through aiohttp, with all that it would do by itself switched off: answers as they come."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import aiohttp
from yarl import URL

from hibachi.errors import ConfigError

MOST_HEADER, MOST_LINES = 1 << 16, 256  # bytes of one header of an answer, and how many there may be
IDLE_FOR = 4.0  # seconds until a connection is not used again: uvicorn, on which many servers run, closes it after 5
_URL = re.compile(r"(https?)://(\[[0-9a-fA-F:.]+\]|[^/:@\s\[\]?#]+)(?::(\d{1,5}))?(/[^\s?#]*)?")
Answer: TypeAlias = aiohttp.ClientResponse
Take = Callable[[Answer, bytes, float], None]


class Unreachable(Exception):
    """No connection could be made."""


class BadAnswer(Exception):
    """What came is no HTTP/1.1 response, or not all of one."""


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


def open_session(
    connector: aiohttp.TCPConnector,
    connect: float,
    *,
    headers: Mapping[str, str] | None = None,
    middlewares: Sequence[aiohttp.ClientMiddlewareType] = (),
    traces: Sequence[aiohttp.TraceConfig] = (),
) -> aiohttp.ClientSession:
    """A session that adds nothing to requests and changes nothing of answers. connect: seconds to open a connection."""
    return aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),  # it would hand one client's cookies to another
        auto_decompress=False,
        trust_env=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=connect, sock_read=None),
        max_line_size=MOST_HEADER,
        max_field_size=MOST_HEADER,
        max_headers=MOST_LINES,
        middlewares=middlewares,
        trace_configs=[*traces],
    )


class Client:
    """Requests to one server, over as many connections as there are requests at a time; they are kept for the next.

    headers: sent with each request. agent: what it calls itself. connect_timeout: seconds. made: connections. Close it
    by `close`.
    """

    def __init__(
        self,
        url: Url,
        headers: Mapping[str, str] | None = None,
        *,
        agent: str = "hibachi",
        connect_timeout: float = 30.0,
    ) -> None:
        if not all(f"{name}{value}".isascii() and f"{name}{value}".isprintable() for name, value in _pairs(headers)):
            raise ConfigError("A header, such as the API key, must be plain ASCII on one line.")
        self.url, self._timeout = url, connect_timeout
        self._headers = {"Accept": "*/*", "User-Agent": agent, **(headers or {})}
        self._session: aiohttp.ClientSession | None = None  # made in the loop that it is used in
        self.made = 0

    async def post(self, path: str, body: bytes, take: Take) -> Answer:
        """Send JSON, and give `take` each part of the answer's body with the time (perf_counter) at which it came; b""
        at the head. Raises Unreachable, BadAnswer, ConnectionError, and what `take` raises."""
        return await self._ask("POST", path, body, take, {"Content-Type": "application/json"})

    async def get(self, path: str) -> tuple[Answer, bytes]:
        """Raises Unreachable, BadAnswer, ConnectionError."""
        parts: list[bytes] = []
        answer = await self._ask("GET", path, None, lambda _answer, body, _now: parts.append(body), {})
        return answer, b"".join(parts)

    async def _ask(self, method: str, path: str, body: bytes | None, take: Take, headers: Mapping[str, str]) -> Answer:
        for again in (False, True):
            way = _Way()
            try:
                async with self._opened().request(
                    method,
                    URL(f"{self.url}{path}", encoded=True),
                    data=body,
                    headers=headers,
                    allow_redirects=False,
                    trace_request_ctx=way,
                ) as answer:
                    way.begun = True
                    take(answer, b"", time.perf_counter())
                    async for part in answer.content.iter_any():
                        take(answer, part, time.perf_counter())
                    return answer
            except aiohttp.ClientError as e:
                # A connection that has lain idle may just have been closed: then the request was not read.
                closed = isinstance(e, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError))
                if again or way.begun or not way.reused or not closed:
                    raise self._told(e) from e
        raise AssertionError("the second try returns or raises")

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            trace = aiohttp.TraceConfig()
            trace.on_connection_reuseconn.append(_reused)
            trace.on_connection_create_end.append(self._counted)
            connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=IDLE_FOR)
            self._session = open_session(connector, self._timeout, headers=self._headers, traces=(trace,))
        return self._session

    async def _counted(self, *_: object) -> None:
        self.made += 1

    def _told(self, e: aiohttp.ClientError) -> Exception:
        """An error of aiohttp as one of ours."""
        if isinstance(e, aiohttp.ConnectionTimeoutError):
            return Unreachable(f"{self.url}: no connection within {self._timeout:g} s")
        if isinstance(e, aiohttp.ClientConnectorError):
            return Unreachable(f"{self.url}: {e.strerror or e.os_error}")
        if isinstance(e, aiohttp.ClientConnectorCertificateError):
            return Unreachable(f"{self.url}: its certificate is not trusted ({e.certificate_error})")
        if isinstance(e, aiohttp.ServerDisconnectedError) and not isinstance(e.message, str):
            return BadAnswer("the connection was closed in the middle of the head of an answer")
        if isinstance(e, aiohttp.ServerDisconnectedError):
            return ConnectionResetError("the server closed the connection instead of answering")
        if isinstance(e, aiohttp.ClientPayloadError):
            return BadAnswer(f"the connection was closed in the middle of an answer, or it is no HTTP ({e})"[:300])
        if isinstance(e, aiohttp.ClientResponseError):
            return BadAnswer(f"expected an HTTP/1.1 answer; got something else ({e.message})"[:300])
        return ConnectionResetError(f"the connection broke ({e})")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


@dataclass(slots=True)
class _Way:
    """Of one request: whether its connection was used before, and whether the head of its answer has come."""

    reused: bool = False
    begun: bool = False


async def _reused(_session: aiohttp.ClientSession, of: Any, _about: object) -> None:
    of.trace_request_ctx.reused = True


def _pairs(headers: Mapping[str, str] | None) -> Sequence[tuple[str, str]]:
    return [*(headers or {}).items()]
