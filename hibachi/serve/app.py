"""The ASGI application: which route, who asks, and what becomes of errors."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from hibachi.api.errors import Refused, as_refused
from hibachi.serve import openai
from hibachi.serve.access import tell
from hibachi.serve.exchange import Exchange, Gone
from hibachi.serve.state import Served

log = logging.getLogger("hibachi.serve")
Handler = Callable[[Served, Exchange], Awaitable[None]]
LEFT = 499  # as nginx logs a client that left


async def health(served: Served, x: Exchange) -> None:
    """Does the engine step?"""
    await _tell(x, served.why_not_live())


async def ready(served: Served, x: Exchange) -> None:
    """Would a request be taken?"""
    await _tell(x, served.why_not_ready())


async def _tell(x: Exchange, why_not: str | None) -> None:
    if why_not is None:
        await x.json({"status": "ok"})
    else:
        await x.json({"status": "unavailable", "reason": why_not}, 503, {"Retry-After": "1"})


async def flight(served: Served, x: Exchange) -> None:
    """The flight recorder: what the last steps computed, and for whom. No tokens."""
    dump = await asyncio.to_thread(served.texts.dump)
    await x.answer(json.dumps(dump, default=str).encode(), b"application/json")


async def about(served: Served, x: Exchange) -> None:
    """The version of hibachi."""
    await x.json({"version": version("hibachi")})


ROUTES: tuple[tuple[str, str, Handler, bool], ...] = (
    # method, path, handler, does it take a key?
    ("GET", "/v1/models", openai.models, True),
    ("GET", "/v1/models/{model:path}", openai.model, True),
    ("POST", "/v1/completions", openai.completions, True),
    ("POST", "/v1/chat/completions", openai.chat, True),
    ("POST", "/v1/embeddings", openai.embeddings, True),
    ("POST", "/tokenize", openai.tokenize, True),
    ("POST", "/detokenize", openai.detokenize, True),
    ("GET", "/debug/flight", flight, True),
    ("GET", "/health", health, False),
    ("GET", "/ready", ready, False),
    ("GET", "/version", about, False),
)


class Endpoint:
    """A route on ASGI. Errors become answers here, and nowhere else."""

    def __init__(self, served: Served, path: str, handler: Handler, keyed: bool) -> None:
        self._served, self._path, self._handler, self._keyed = served, path, handler, keyed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        served, x = self._served, Exchange(scope, receive, send)
        tenants, refused = served.tenants, None
        try:
            if self._keyed:
                x.tenant = tenants.admit(x.headers.get(b"authorization"))
            tenants.running[x.tenant] += 1
            try:
                await self._handler(served, x)
            finally:
                tenants.running[x.tenant] -= 1
        except Gone:
            x.status = LEFT
        except Exception as e:
            refused = as_refused(e)
            if refused.status == 500:
                log.exception("request %s: %s %s", x.id, x.method, x.path)
            if not x.begun:
                await x.refuse(refused)
            else:
                raise
        finally:
            served.meter.answered(x.method, self._path, x.status, refused, x.record)
            tell(x, quiet=not self._keyed)


def application(served: Served, more: tuple[tuple[str, str, Handler, bool], ...] = ()) -> Starlette:
    """more: further routes."""
    routes = [
        Route(path, Endpoint(served, path, handler, keyed), methods=[method])
        for method, path, handler, keyed in (*ROUTES, *more)
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})


async def _no_route(request: Any, error: Exception) -> Any:
    assert isinstance(error, HTTPException)
    status, headers = error.status_code, dict(error.headers or {})
    what = "allows no such method" if status == 405 else "does not exist"

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        x = Exchange(scope, receive, send)
        told = f"{x.method} {x.path[:200]}: this route {what}."
        await x.refuse(Refused(told, status=status, code="not_found", headers=headers))
        tell(x)

    return answer
