"""Checks the header Host: which names a server that listens on loopback answers to.

A web page may have its own name resolve to 127.0.0.1 once it is loaded (DNS rebinding). Its requests then come from
this machine, and the browser treats the answers as those of the page's own server; only the header Host shows it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Any

from hibachi.llm.dialects.dialects import OPENAI, Dialect
from hibachi.llm.dialects.errors import Refused
from hibachi.server.web.access import tell_of_none
from hibachi.server.web.cors import hosts_of
from hibachi.server.web.deadlines import Tell
from hibachi.server.web.exchange import Exchange
from hibachi.server.web.settings import AddressSettings

_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::[0-9]*)?")


def hosts_for(settings: AddressSettings, origins: frozenset[str], public: bool) -> frozenset[str] | None:
    """Names to answer to besides those of loopback. None means any, where no page gains by that: other machines reach
    this server, or no browser does, or pages of any origin may send requests. public: as `bound` says.
    """
    if public or settings.uds is not None or "*" in origins:
        return None
    return frozenset({settings.host.lower()}) | hosts_of(origins)


def _openai(path: str) -> Dialect:
    return OPENAI


class Hosts:
    """Passes requests that call the server by one of its names. flag: the setting that adds names. dialect: the dialect
    in which a path is refused, without `root_path`.
    """

    def __init__(
        self,
        app: Any,
        names: frozenset[str],
        flag: str,
        tell: Tell = tell_of_none,
        dialect: Callable[[str], Dialect] = _openai,
    ) -> None:
        self._app, self._names, self._flag, self._tell, self._dialect = app, names, flag, tell, dialect

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        name = hosts[0] if len(hosts) == 1 else "localhost"  # none or several: for `check_headers`
        if self._is_ours(name):
            await self._app(scope, receive, send)
            return
        x = Exchange(scope, receive, send)
        x.dialect = self._dialect(x.route)
        # Not 421 (misdirected): clients may send that request once more.
        refused = Refused(
            f"Host: expected localhost, or an address of loopback; got {name[:100]!r}. A proxy on this machine may "
            f"pass another, if the server's {self._flag} has an origin with that host, such as https://{name[:100]}.",
            status=403,
            code="host_not_allowed",
        )
        await x.refuse(refused)
        self._tell(refused, x.client, 0.0)

    def _is_ours(self, given: str) -> bool:
        found = _HOST.fullmatch(given)
        if found is None:
            return False
        name = found[1].lower().removesuffix(".")
        if name in self._names or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
        except ValueError:
            return False
