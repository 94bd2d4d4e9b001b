"""Routes for operators of a server: health, load, flight recorder, and a reset of the prefix cache."""

from __future__ import annotations

import json
from functools import partial
from ipaddress import IPv6Address, ip_address
from typing import Any

from hibachi.common.installed import version
from hibachi.llm.dialects.dialects import key_of
from hibachi.llm.dialects.errors import DENIED, Refused
from hibachi.llm.dialects.openai.answers import CacheEvent, CacheEvents, Forgotten, Load, Unwell, Version, Well
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


async def cache_events(served: Served, x: Exchange) -> None:
    """The last changes of what is kept in host memory, on disk and in stores, from number `since` on. Needs what a
    reset of the cache needs.
    """
    _check_operator(served, x, "Its events are not told")
    given = dict(x.query)
    since = given.pop("since", "0")
    if given or not (since.isascii() and since.isdigit()):
        raise Refused(
            f"This route takes since=N, a number of an event; got {str(dict(x.query))[:80]}.",
            param="since",
            code="invalid_value",
        )
    served.check_open()
    found = await served.ask(partial(served.what.engine.cache_events, int(since)))
    events = [CacheEvent(*each) for each in found]
    await x.json(CacheEvents(events, events[-1].number + 1 if events else int(since)))


async def reset_prefix_cache(served: Served, x: Exchange) -> None:
    """Forget all cached prefixes. Needs an admin's key or, without keys, a client on the same machine."""
    _check_operator(served, x, "The cache is not reset")
    if query := x.scope.get("query_string"):
        raise Refused(
            f"This route takes nothing in its query; got {query.decode('latin-1')[:80]!r}.",
            code="unknown_parameter",
        )
    served.check_open()
    await served.ask(served.what.engine.reset_cache)
    await x.json(Forgotten(True))


def _check_operator(served: Served, x: Exchange, what: str) -> None:
    """Raises Refused for who is none."""
    if served.tenants.keys:
        if not _sees_all(served, x):
            raise _denied(what, "the key of an admin is needed")
    elif not _is_here(x.client):
        raise _denied(what, "there are no keys, so only this machine may ask for it")
    elif b"origin" in x.headers:  # a web page that is open on this machine
        raise _denied(what, "there are no keys, so no page of a browser may ask for it")


def _is_here(client: tuple[str, int] | None) -> bool:
    try:
        address = ip_address(client[0] if client else "")
    except ValueError:  # a Unix socket has none
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def _denied(what: str, why: str) -> Refused:
    return Refused(f"{what}: {why}.", status=403, kind=DENIED, code="admin_only")


_HEALTH = About(answer=Well, unwell=Unwell)
ROUTES = (
    Route("GET", "/load", load, about=About(answer=Load)),
    Route("POST", "/reset_prefix_cache", reset_prefix_cache, about=About(answer=Forgotten, statuses=(403, 503))),
    Route("GET", "/v1/cache/events", cache_events, about=About(answer=CacheEvents, statuses=(403, 503))),
    Route("GET", "/debug/flight", flight, about=About(answer=dict[str, Any], statuses=(503,))),
    Route("GET", "/health", health, keyed=False, about=_HEALTH),
    Route("GET", "/ready", ready, keyed=False, about=_HEALTH),
    Route("GET", "/version", about, keyed=False, about=About(answer=Version)),
)
