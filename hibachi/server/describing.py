"""GET /openapi.json and GET /docs: the description of the API, generated from the routes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from inspect import getdoc
from typing import Any

from hibachi.common.installed import version
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.messages.answers import AnthropicError
from hibachi.llm.dialects.openai.answers import encode
from hibachi.server.docspage import STYLE, page
from hibachi.server.metrics import is_work
from hibachi.server.openapi import EVENTS, JSON, Content, Error, Operation, TgiError, document
from hibachi.server.routes import About, Route
from hibachi.server.served import Served
from hibachi.server.web.exchange import Exchange

_ERRORS: Mapping[str, Any] = {
    "tgi": TgiError,
    "anthropic": AnthropicError,
}  # by the name of a dialect; others as OpenAI
_STYLED = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_STYLED}'; base-uri 'none'; "
    f"form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def with_description(routes: Sequence[Route]) -> tuple[Route, ...]:
    """The routes, and two more that describe all of them."""
    all_: list[Route] = []

    @cache
    def described(served: Served, root: str) -> dict[str, Any]:
        title = f"hibachi serve: {', '.join(served.names)}"
        found = [operation(route, served) for route in all_ if route.about.useful(served)]
        return document(found, title, version(), root)

    @cache
    def as_json(served: Served, root: str) -> bytes:
        return encode(described(served, root))

    @cache
    def as_page(served: Served, root: str) -> bytes:
        return page(described(served, root)).encode()

    async def openapi(served: Served, x: Exchange) -> None:
        """The description of all routes, in OpenAPI 3.1."""
        await x.answer(as_json(served, x.scope.get("root_path", "")), JSON.encode())

    async def docs(served: Served, x: Exchange) -> None:
        """The description of all routes as a page for people."""
        await x.answer(as_page(served, x.scope.get("root_path", "")), b"text/html; charset=utf-8", 200, HEADERS)

    all_ += [
        *routes,
        Route("GET", "/openapi.json", openapi, keyed=False, about=About(answer=dict[str, Any])),
        Route("GET", "/docs", docs, keyed=False, about=About(writes={"text/html": {"type": "string"}})),
    ]
    return tuple(all_)


def operation(route: Route, served: Served) -> Operation:
    about = route.about
    good: Content = {**({} if about.answer is None else {JSON: about.answer}), **about.writes}
    if about.events:
        good = {**good, EVENTS: None}
    ends = {d.end.removeprefix(b"data: ").decode().strip() for d in (route.dialect, *about.dialects) if d.end}
    answers: dict[int, dict[str, Any]] = {200: dict(good)}
    events = list(about.events)
    for status, error in _errors(route, served):
        if status == 200:
            events.append(error)
        else:
            answers.setdefault(status, {})
            told = answers[status].get(JSON, ())
            answers[status][JSON] = tuple(dict.fromkeys((*told, error)))
    reads = {**({} if about.body is None else {JSON: about.body}), **about.reads}
    return Operation(
        method=route.method,
        path=route.path,
        text=getdoc(route.handler) or "",
        tag=route.handler.__module__.rpartition(".")[2],
        answers=answers,
        reads=reads,
        events=tuple(dict.fromkeys(events)),
        end=ends.pop() if ends and events else None,
        query=about.query,
        keyed=route.keyed and bool(served.tenants.keys),
        example=about.example(served) if about.example else None,
    )


def _errors(route: Route, served: Served) -> Iterator[tuple[int, Any]]:
    """The statuses that a route's errors may have, in each of its dialects, and the types of these."""
    for dialect in dict.fromkeys((route.dialect, *route.about.dialects)):
        for refused in _refusals(route, served):
            yield 200 if dialect.as_event(refused) else dialect.status(refused), _ERRORS.get(dialect.name, Error)
    if route.about.unwell is not None:
        yield 503, route.about.unwell
    yield 403, _ERRORS.get(route.dialect.name, Error)  # of another name of the server, before the route is looked for


def _refusals(route: Route, served: Served) -> Iterator[Refused]:
    """One of each kind that a route may meet."""
    about = route.about

    def of(status: int, code: str | None = None) -> Refused:
        return Refused("", status=status, code=code)

    yield of(400, "invalid_http")
    yield of(431)
    yield of(500, "internal_error")
    if route.keyed and served.tenants.keys:
        yield of(401)
    if about.body is not None:
        for status in (400, 408, 413, 415):
            yield of(status)
        yield of(503, "shutting_down")
    if about.named:
        yield of(404)
    if about.asks or is_work(route.method, route.path):
        yield of(429, "queue_full")
        yield of(500, "model_fault")
        yield of(503, "engine_failed")
    for status in about.statuses:
        yield of(status)
