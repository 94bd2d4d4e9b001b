"""The ASGI application: which route, who asks, and what becomes of errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from starlette import routing
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from hibachi.api.errors import Refused, as_refused
from hibachi.serve import openai, tgi
from hibachi.serve.flight import of_tenant
from hibachi.serve.routes import Route
from hibachi.serve.served import Served
from hibachi.web.access import tell, tell_of_none
from hibachi.web.deadlines import Tell, check_headers
from hibachi.web.exchange import Exchange, Gone

LEFT = 499  # as nginx logs a client that left


async def health(served: Served, x: Exchange) -> None:
    """Does the engine step?"""
    await _tell(served, x, served.why_not_live(_sees_all(served, x)))


async def ready(served: Served, x: Exchange) -> None:
    """Would a request be taken?"""
    await _tell(served, x, served.why_not_ready(_sees_all(served, x)))


def _sees_all(served: Served, x: Exchange) -> bool:
    return served.tenants.may_see_all(x.headers.get(b"authorization"))


async def _tell(served: Served, x: Exchange, why_not: str | None) -> None:
    if why_not is None:
        await x.json({"status": "ok", "numerics": served.numerics})
    else:
        await x.json({"status": "unavailable", "reason": why_not}, 503, {"Retry-After": "1"})


async def flight(served: Served, x: Exchange) -> None:
    """The flight recorder: what the last steps computed, and for whom: one's own requests, or all. No tokens."""
    dump = await served.ask(served.what.dump)
    if not served.tenants.may_see_all(x.headers.get(b"authorization")):
        dump = of_tenant(dump, x.tenant)
    await x.answer(json.dumps(dump, default=str).encode(), b"application/json")


async def about(served: Served, x: Exchange) -> None:
    """The version of hibachi."""
    await x.json({"version": version("hibachi")})


OPERATING = (
    Route("GET", "/debug/flight", flight),
    Route("GET", "/health", health, keyed=False),
    Route("GET", "/ready", ready, keyed=False),
    Route("GET", "/version", about, keyed=False),
)
ROUTES: tuple[Route, ...] = (*openai.ROUTES, *tgi.ROUTES, *OPERATING)


class Endpoint:
    """A route on ASGI. Errors become answers here, and nowhere else."""

    def __init__(self, served: Served, route: Route) -> None:
        self._served, self._route = served, route

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        served, route, x = self._served, self._route, Exchange(scope, receive, send)
        tenants, refused = served.tenants, None
        x.dialect = route.dialect
        try:
            check_headers(scope)
            if route.keyed:
                x.tenant = tenants.admit(route.dialect.key(x.headers))
            tenants.running[x.tenant] += 1
            try:
                await route.handler(served, x)
            finally:
                tenants.running[x.tenant] -= 1
        except Gone:
            x.status = LEFT
        except Exception as e:
            refused = as_refused(e)
            x.blame(refused, e)
            if not x.begun:
                await x.refuse(refused)
            else:
                raise
        finally:
            served.meter.answered(x.method, route.path, x.status, refused, x.record)
            tell(x, refused, quiet=not route.keyed)


def tells(served: Served) -> Tell:
    """Logs and counts what was refused before it was a request."""

    def tell(refused: Refused, client: tuple[str, int] | None, seconds: float) -> None:
        served.meter.answered("-", "-", refused.status, refused, None)
        tell_of_none(refused, client, seconds)

    return tell


def application(served: Served, more: Sequence[Route] = ()) -> Starlette:
    """more: further routes."""
    routes = [routing.Route(r.path, Endpoint(served, r), methods=[r.method]) for r in (*ROUTES, *more)]
    made = Starlette(routes=routes, exception_handlers={HTTPException: partial(_no_route, served)})
    made.router.redirect_slashes = False  # a redirect would name the host that the client says
    return made


async def _no_route(served: Served, request: Any, error: Exception) -> Any:
    assert isinstance(error, HTTPException)
    status, headers = error.status_code, dict(error.headers or {})
    what = "allows no such method" if status == 405 else "does not exist"

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        x = Exchange(scope, receive, send)
        try:
            check_headers(scope)
            refused = Refused(f"{x.method} {x.path[:200]}: this route {what}.", status=status, code="not_found")
            refused.headers = headers
        except Refused as e:
            refused = e
        await x.refuse(refused)
        served.meter.answered("-", "-", refused.status, refused, None)
        tell(x, refused)

    return answer
