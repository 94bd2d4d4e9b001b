"""The ASGI application: which route, who asks, and what becomes of errors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from starlette import routing
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from hibachi.api.errors import Refused, as_refused
from hibachi.serve import generate, openai, operating, ranking, tgi, warm
from hibachi.serve.describing import with_description
from hibachi.serve.metrics import is_work
from hibachi.serve.routes import Route
from hibachi.serve.served import Served
from hibachi.web.access import tell, tell_of_none
from hibachi.web.deadlines import Tell, check_headers
from hibachi.web.exchange import Exchange, Gone

LEFT = 499  # as nginx logs a client that left


MODULES = (openai, ranking, warm, tgi, generate, operating)
ROUTES: tuple[Route, ...] = tuple(route for module in MODULES for route in module.ROUTES)


class Endpoint:
    """A route on ASGI. Errors become answers here, and nowhere else."""

    def __init__(self, served: Served, route: Route) -> None:
        self._served, self._route = served, route
        self._counts = is_work(route.method, route.path)

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
                with served.gate.around(x) if self._counts else nullcontext():
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
    routes = [
        routing.Route(r.path, Endpoint(served, r), methods=[r.method]) for r in with_description((*ROUTES, *more))
    ]
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
