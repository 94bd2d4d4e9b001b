"""Routes for operators of a server: health, load, flight recorder, and a reset of the prefix cache."""

from __future__ import annotations

import json
from ipaddress import IPv6Address, ip_address
from typing import Any

from hibachi.common.installed import version
from hibachi.llm.dialects.dialects import key_of
from hibachi.llm.dialects.errors import DENIED, Refused
from hibachi.llm.dialects.openai.answers import Forgotten, Load, Unwell, Version, Well
from hibachi.server.flight import of_tenant
from hibachi.server.routes import About, Route
from hibachi.server.served import Served
from hibachi.server.web.exchange import Exchange


async def health(served: Served, x: Exchange) -> None:
    """Does the engine step?"""
    await _tell(served, x, served.why_not_live(_sees_all(served, x)))


async def ready(served: Served, x: Exchange) -> None:
    """Would a request be taken?"""
    await _tell(served, x, served.why_not_ready(_sees_all(served, x)))


def _sees_all(served: Served, x: Exchange) -> bool:
    return served.tenants.may_see_all(key_of(x.headers))


async def _tell(served: Served, x: Exchange, why_not: str | None) -> None:
    if why_not is None:
        await x.json(Well(served.numerics))
    else:
        await x.json(Unwell(why_not), 503, {"Retry-After": "1"})


async def flight(served: Served, x: Exchange) -> None:
    """The flight recorder: what the last steps computed, and for whom: one's own requests, or all. No tokens."""
    dump = await served.ask(served.what.dump)
    if not _sees_all(served, x):
        dump = of_tenant(dump, x.tenant)
    await x.answer(json.dumps(dump, default=str).encode(), b"application/json")


async def about(served: Served, x: Exchange) -> None:
    """The version of hibachi."""
    await x.json(Version(version()))


async def load(served: Served, x: Exchange) -> None:
    """Number of open requests, this one not counted."""
    await x.json(Load(served.open_requests - 1))


async def reset_prefix_cache(served: Served, x: Exchange) -> None:
    """Forget all cached prefixes. Needs an admin's key or, without keys, a client on the same machine."""
    if served.tenants.keys:
        if not _sees_all(served, x):
            raise _denied("the key of an admin is needed")
    elif not _is_here(x.client):
        raise _denied("there are no keys, so only this machine may ask for it")
    elif b"origin" in x.headers:  # a web page that is open on this machine
        raise _denied("there are no keys, so no page of a browser may ask for it")
    if query := x.scope.get("query_string"):
        raise Refused(
            f"This route takes nothing in its query; got {query.decode('latin-1')[:80]!r}.",
            code="unknown_parameter",
        )
    served.check_open()
    await served.ask(served.what.engine.reset_cache)
    await x.json(Forgotten(True))


def _is_here(client: tuple[str, int] | None) -> bool:
    try:
        address = ip_address(client[0] if client else "")
    except ValueError:  # a Unix socket has none
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def _denied(why: str) -> Refused:
    return Refused(f"The cache is not reset: {why}.", status=403, kind=DENIED, code="admin_only")


_HEALTH = About(answer=Well, unwell=Unwell)
ROUTES = (
    Route("GET", "/load", load, about=About(answer=Load)),
    Route("POST", "/reset_prefix_cache", reset_prefix_cache, about=About(answer=Forgotten, statuses=(403, 503))),
    Route("GET", "/debug/flight", flight, about=About(answer=dict[str, Any], statuses=(503,))),
    Route("GET", "/health", health, keyed=False, about=_HEALTH),
    Route("GET", "/ready", ready, keyed=False, about=_HEALTH),
    Route("GET", "/version", about, keyed=False, about=About(answer=Version)),
)
