"""The ASGI application: routing, API keys, and errors as answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from starlette import routing
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from hibachi.llm.dialects.dialects import ANTHROPIC, OPENAI, Dialect, key_of, spoken
from hibachi.llm.dialects.errors import Refused, as_refused
from hibachi.server import generate, messages, openai, operating, ranking, responses, tgi, warm
from hibachi.server.describing import with_description
from hibachi.server.metrics import is_work
from hibachi.server.routes import Route
from hibachi.server.served import Served
from hibachi.server.web.access import tell, tell_of_none
from hibachi.server.web.deadlines import Tell, check_headers
from hibachi.server.web.exchange import Exchange, Gone
from hibachi.server.web.tenants import PART, part_of

LEFT = 499  # as nginx logs a client that left


MODULES = (openai, responses, messages, ranking, warm, tgi, generate, operating)
ROUTES: tuple[Route, ...] = tuple(route for module in MODULES for route in module.ROUTES)
_DIALECTS = {route.path: route.dialect for route in ROUTES}
_METHODS = {path: sorted({route.method for route in ROUTES if route.path == path}) for path in _DIALECTS}


def dialect_at(path: str) -> Dialect:
    """The dialect of errors that come before a route is found: a wrong method, or another name of the server."""
    return _DIALECTS.get(path, ANTHROPIC if path.startswith("/v1/messages") else OPENAI)


class Endpoint:
    """A route on ASGI. Errors become answers here, and nowhere else."""

    def __init__(self, served: Served, route: Route) -> None:
        self._served, self._route, self.path = served, route, route.path
        self._counts = is_work(route.method, route.path)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        served, route, x = self._served, self._route, Exchange(scope, receive, send)
        tenants, refused = served.tenants, None
        x.dialect = spoken(x.route, x.headers, route.dialect)
        try:
            check_headers(scope)
            if route.keyed:
                x.tenant = tenants.admit(key_of(x.headers))
                x.part = part_of(x.headers.get(PART.encode()))
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
    """A callback that logs and counts what was refused before it became a request."""

    def tell(refused: Refused, client: tuple[str, int] | None, seconds: float) -> None:
        served.meter.answered("-", "-", refused.status, refused, None)
        tell_of_none(refused, client, seconds)

    return tell


def application(served: Served, more: Sequence[Route] = ()) -> Starlette:
    """The ASGI application. more: further routes."""
    routes = [
        routing.Route(r.path, Endpoint(served, r), methods=[r.method]) for r in with_description((*ROUTES, *more))
    ]
    made = Starlette(routes=routes, exception_handlers={HTTPException: partial(_no_route, served)})
    made.router.redirect_slashes = False  # a redirect would name the host that the client says
    return made


def _meant(route: str) -> str:
    """What to mend in a client's address, where that makes of a path one that there is; else nothing."""
    if route.startswith("/v1/v1/") and route.removeprefix("/v1") in _METHODS:
        return " The client adds /v1 itself: leave it out of the address that the client is given (base_url)."
    if f"/v1{route}" in _METHODS:
        return " Add /v1 to the address that the client is given (base_url)."
    return ""


def _methods(scope: Any) -> list[str]:
    """Those of all routes with the path of the request, of which Starlette names the first one only."""
    first = scope.get("endpoint")
    return _METHODS.get(first.path, []) if isinstance(first, Endpoint) else []


async def _no_route(served: Served, request: Any, error: Exception) -> Any:
    assert isinstance(error, HTTPException)
    status, headers = error.status_code, dict(error.headers or {})
    first = request.scope.get("endpoint")
    if status == 405 and request.method == "POST" and isinstance(first, Endpoint) and first.path.endswith("}"):
        status, headers = 404, {}  # /v1/responses/compact is a route that there is not, and no id: clients try it
    what, code = "does not exist", "not_found"
    if status == 405:
        what, code = "allows no such method", "method_not_allowed"

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        x = Exchange(scope, receive, send)
        x.dialect = spoken(x.route, x.headers, dialect_at(x.route))
        try:
            check_headers(scope)
            said = f"{x.method} {x.path[:200]}: this route {what}"
            if status == 405 and (methods := _methods(scope)):
                headers["Allow"] = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
                said += f", but {headers['Allow']}"
            said += f".{_meant(x.route)}" if status == 404 else "."
            refused = Refused(said, status=status, code=code)
            refused.headers = headers
        except Refused as e:
            refused = e
        await x.refuse(refused)
        served.meter.answered("-", "-", refused.status, refused, None)
        tell(x, refused)

    return answer
