"""Requests to upstreams, through aiohttp with all that it would do by itself switched off."""

from __future__ import annotations

import errno
import re
import ssl
from collections.abc import Sequence
from typing import Any

import aiohttp
from yarl import URL

from hibachi.router.addresses import context_of, target
from hibachi.router.upstreams import Place
from hibachi.server.web.client import IDLE_FOR, open_session

MOST_HEAD = 1 << 18  # bytes of all
Headers = list[tuple[str, str]]
_ODD_NAME = re.compile(b'[\x00-\x1f\x7f()<>@,;:\\[\\]={} \t\\\\"]')
_ODD_VALUE = re.compile(b"[\x00-\x08\x0a-\x1f\x7f]")


class NoAnswer(aiohttp.ClientError):
    """The connection broke before an answer came."""


async def _once(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """aiohttp would send some requests a second time by itself, after just these errors; we decide that."""
    try:
        return await handler(request)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as e:
        raise NoAnswer(words(e)) from e


class _Pool(aiohttp.TCPConnector):
    """Closes an idle connection on which unrequested bytes came: they would answer the next request."""

    async def _get(self, *args: Any) -> Any:
        while (connection := await super()._get(*args)) is not None:
            if connection.protocol is not None and not connection.protocol.should_close:
                break
            connection.close()
        return connection


class UpstreamClient:
    """connect: seconds to open a connection."""

    def __init__(self, connect: float) -> None:
        self._session = open_session(
            _Pool(limit=0, limit_per_host=0, keepalive_timeout=IDLE_FOR), connect, middlewares=(_once,)
        )
        self._contexts: dict[tuple[bool, str], ssl.SSLContext | None] = {}

    async def ask(self, place: Place, method: str, path: str, headers: Headers, body: Any) -> aiohttp.ClientResponse:
        """The beginning of an answer: status and headers. path: as it stands in the request line.

        Raises what aiohttp raises.
        """
        base, host, server_name = target(place)
        if host is not None:
            headers = [*headers, ("Host", host)]
        return await self._session.request(
            method,
            URL(base + path, encoded=True),
            headers=headers,
            data=body,
            allow_redirects=False,
            ssl=self._context(place) or True,
            server_hostname=server_name,
        )

    def _context(self, place: Place) -> ssl.SSLContext | None:
        known = place.url.startswith("https:"), place.ca
        if known not in self._contexts:
            self._contexts[known] = context_of(place)
        return self._contexts[known]

    def forget(self) -> None:
        """Certificates are read again."""
        self._contexts = {}

    @property
    def closed(self) -> bool:
        return self._session.closed

    async def close(self) -> None:
        await self._session.close()


def not_opened(e: BaseException) -> bool:
    """Did the connection never come about, so that nothing was sent?"""
    return isinstance(e, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))


def is_ours(e: BaseException) -> bool:
    """Is it for lack of something here, of descriptors or ports, and no upstream is to blame?"""
    number = getattr(e, "errno", None) or getattr(getattr(e, "os_error", None), "errno", None)
    return number in (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)


def words(e: BaseException) -> str:
    """What went wrong, without what only concerns Python."""
    if isinstance(e, NoAnswer):
        return str(e)
    if isinstance(e, aiohttp.ClientConnectorDNSError):
        return "its name stands for no address"
    if isinstance(e, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not trusted ({e.certificate_error})"
    if isinstance(e, aiohttp.ClientConnectorError):
        return f"no connection ({e.strerror or e.os_error})"
    if isinstance(e, (aiohttp.ConnectionTimeoutError, TimeoutError)):
        return "it does not answer in time"
    if isinstance(e, aiohttp.ServerDisconnectedError):
        return "it closed the connection without an answer"
    if isinstance(e, aiohttp.ClientResponseError):
        return f"its answer is no HTTP ({e.message[:100]!r})"
    return f"the connection broke ({str(e)[:100] or type(e).__name__})"


def not_http(answer: aiohttp.ClientResponse) -> str | None:
    """Why an answer cannot be passed on: uvicorn would not send it."""
    if not 200 <= answer.status < 600:
        return f"its answer has the status {answer.status}"
    size = 0
    for name, value in answer.raw_headers:
        if (size := size + len(name) + len(value)) > MOST_HEAD:
            return f"the head of its answer is longer than {MOST_HEAD} bytes"
        if _ODD_NAME.search(name) or _ODD_VALUE.search(value):
            return f"its answer has the header {name[:40]!r} with letters that no header may have"
    return None


def in_words(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """As aiohttp wants them. Raises UnicodeDecodeError for what is no UTF-8."""
    return [(name.decode("ascii"), value.decode()) for name, value in headers]
