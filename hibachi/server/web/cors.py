"""Cross-origin requests of web pages: the CORS protocol of the Fetch standard, around an ASGI application."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from hibachi.errors import ConfigError
from hibachi.llm.dialects.errors import Refused
from hibachi.server.web.access import tell as log_of
from hibachi.server.web.access import tell_of_none
from hibachi.server.web.deadlines import Tell, check_headers
from hibachi.server.web.exchange import Exchange

Headers = list[tuple[bytes, bytes]]
MAX_AGE = b"600"  # seconds that a browser remembers
ANY = frozenset({"*"})
EVERY = b"*"
# By their names, as "*" stands for all headers only where a page sends no cookies.
OURS = (
    b"X-Request-Id, Request-Id, Retry-After, X-Compute-Type, X-Compute-Time, X-Compute-Characters, X-Total-Time, "
    b"X-Validation-Time, X-Queue-Time, X-Inference-Time, X-Time-Per-Token, X-Prompt-Tokens, X-Generated-Tokens, "
    b"X-Completion-Tokens, X-Finish-Reason, X-Stop-Reason"
)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
_USUAL = {"http": ":80", "https": ":443"}  # browsers leave them out


def origins_of(given: Sequence[str] | None, flag: str) -> frozenset[str]:
    """Origins in the form that browsers send: scheme://host or scheme://host:port, in lower case; "*" means any, and
    must stand alone.

    Raises ConfigError, which names `flag`.
    """
    found = {_as_browsers_write(origin, flag) for origin in given or ()}
    return ANY if "*" in found else frozenset(found)


def _as_browsers_write(given: str, flag: str) -> str:
    if given in ("*", "null"):  # null: of pages from files, and in sandboxes
        return given
    origin = given.lower().removesuffix("/")
    if not _ORIGIN.fullmatch(origin):
        raise ConfigError(
            f"{flag}: expected origins, such as https://page.example or http://localhost:3000, separated by blanks, or "
            f"* for any; got {given[:80]!r}."
        )
    usual = _USUAL.get(origin.partition("://")[0])
    return origin.removesuffix(usual) if usual else origin


def hosts_of(origins: Iterable[str]) -> frozenset[str]:
    """Their hosts, without ports; those of IPv6 in brackets."""
    netlocs = (urlsplit(origin).netloc for origin in origins if origin not in ("*", "null"))
    return frozenset(re.sub(r":[0-9]+$", "", netloc) for netloc in netlocs)


class Cors:
    """CORS around the application. Every answer is marked, errors and streams as well.

    origins: of `origins_of`. exposed: the headers of answers that pages may read. tell: called for preflights of
    unknown origins, which never reach the application.
    """

    def __init__(self, app: Any, origins: frozenset[str], *, exposed: bytes = OURS, tell: Tell = tell_of_none) -> None:
        self._app, self._exposed, self._tell = app, exposed, tell
        self._any = "*" in origins
        self._origins = {origin.encode() for origin in origins}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        if _is_preflight(scope, headers):
            await self._preflight(Exchange(scope, receive, send))
            return

        async def marking(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": self.marked(message.get("headers", ()), headers)}
            await send(message)

        await self._app(scope, receive, marking)

    def marked(self, answer: Iterable[tuple[bytes, bytes]], request: Mapping[bytes, bytes]) -> Headers:
        """An answer's headers with ours in the place of any that were there."""
        kept = [(name, value) for name, value in answer if not name.lower().startswith(b"access-control-")]
        if not self._any:
            kept = _varying(kept)
        if not self._allows(request):
            return kept
        origin = b"*" if self._any else request[b"origin"]
        told = [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", self._exposed)]
        return kept + told

    def _allows(self, request: Mapping[bytes, bytes]) -> bool:
        return self._any or request.get(b"origin") in self._origins

    async def _preflight(self, x: Exchange) -> None:
        """Answer a preflight request, which a browser sends without a key."""
        x.always = self.marked((), x.headers)
        try:
            check_headers(x.scope)
            if not self._allows(x.headers):
                origin = x.headers[b"origin"][:100].decode("latin-1")
                raise Refused(
                    f"Pages of {origin} may not ask this server. Its operator says which may.",
                    status=403,
                    code="origin_not_allowed",
                )
        except Refused as refused:
            await x.refuse(refused)
            self._tell(refused, x.client, 0.0)
            return
        told = [
            (b"access-control-allow-methods", x.headers[b"access-control-request-method"]),
            (b"access-control-max-age", MAX_AGE),
        ]
        if asked := x.headers.get(b"access-control-request-headers"):
            told.append((b"access-control-allow-headers", asked))
        if x.headers.get(b"access-control-request-private-network") == b"true":
            told.append((b"access-control-allow-private-network", b"true"))
        await x.start(204, x.always + told)
        await x.write(b"", more=False)
        log_of(x, quiet=True)


def _is_preflight(scope: Any, headers: Mapping[bytes, bytes]) -> bool:
    return scope["method"] == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers


def _varying(headers: Headers) -> Headers:
    """With Origin among the headers of the request on which the answer depends, for caches."""
    lines = [value for name, value in headers if name.lower() == b"vary"]
    named = [word.strip() for line in lines for word in line.split(b",") if word.strip()]
    if {b"*", b"origin"} & {name.lower() for name in named}:
        return headers
    return [h for h in headers if h[0].lower() != b"vary"] + [(b"vary", b", ".join([*named, b"Origin"]))]
