"""The ASGI application of the router: which paths pass, which clients are accepted, and what it answers itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from hibachi.llm.dialects.dialects import key_of
from hibachi.llm.dialects.errors import INVALID, SERVER, Refused, as_refused
from hibachi.llm.dialects.openai.answers import encode
from hibachi.router import body as bodies
from hibachi.router.affine import FURTHEST, pieces_of
from hibachi.router.body import Body, BodyRoom
from hibachi.router.client import Headers, in_words
from hibachi.router.dialects import dialect_of
from hibachi.router.fleet import ANY, shown
from hibachi.router.forward import Broken, Forwarder, Forwarding, lost, unknown
from hibachi.router.inspect_body import Named, model_of_path, model_of_query, server_of
from hibachi.router.policies import Ask, Homes
from hibachi.router.proxying import without_hops
from hibachi.router.routes import STORED, TOKENS, RouteKind, Routes, response_of_path
from hibachi.router.settings import RouteSettings
from hibachi.server.web.access import tell
from hibachi.server.web.deadlines import LEFT, Left, check_headers
from hibachi.server.web.exchange import Exchange, Gone, Leaving
from hibachi.server.web.tenants import PART, Tenants, named_part

log: logging.Logger = logging.getLogger("hibachi.route")
CLIENT_LEFT = 499  # as nginx logs a client that left
Own = Callable[[Exchange], Awaitable[None]]
_NOT_SENT = frozenset((b"host", b"content-length"))
_OURS = frozenset(("authorization", "x-api-key", PART))  # where the router has keys


class Door:
    """own: (method, path) -> what answers it here, and whether it takes a key. sticky: a header. most, room: bytes of a
    body, and of all that are in files. arrival: seconds for a body to come.
    """

    def __init__(
        self,
        forwarder: Forwarder,
        routes: Routes,
        tenants: Tenants,
        own: Mapping[tuple[str, str], tuple[Own, bool]],
        settings: RouteSettings,
    ) -> None:
        self._forwarder, self._routes, self._tenants, self._own = forwarder, routes, tenants, own
        self._fleet, self._sticky = forwarder.fleet, settings.sticky_header.lower().encode()
        self._most, self._arrival = settings.max_body_size, settings.arrival_timeout or None
        self._room = BodyRoom(max(settings.max_body_size, settings.max_bodies_size))
        self.draining = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        x = Exchange(scope, receive, send)
        x.dialect = dialect_of(x.path, x.headers)
        meter, refused = self._forwarder.meter, None
        meter.running += 1
        quiet, kind = False, "own"
        try:
            check_headers(scope)
            own = self._own.get(("GET" if x.method == "HEAD" else x.method, x.path))
            if own is not None:
                answer, keyed = own
                quiet = not keyed
                if keyed:
                    x.tenant = self._tenants.admit(key_of(x.headers))
                await answer(x)
            else:
                found = self._routes.kind(x.method, x.path)
                kind = "none" if found is None else found.value
                await self._pass(x, found)
        except Gone:
            x.status = CLIENT_LEFT
            meter.left += 1
        except Broken as e:
            log.warning("request %s: %s", x.id, e)
            x.more["error"] = "cut off"
        except Exception as e:
            refused = as_refused(e)
            x.blame(refused, e)
            if x.begun:
                raise
            await self._refuse(x, refused)
        finally:
            meter.running -= 1
            known = kind, x.status
            meter.answers[known] = meter.answers.get(known, 0) + 1
            tell(x, refused, quiet=quiet)

    async def _refuse(self, x: Exchange, refused: Refused) -> None:
        dialect = x.dialect
        data = encode(dialect.told(refused, x.id))
        told = {name.lower(): value for name, value in refused.headers.items()}
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        headers += [(name.encode(), value.encode()) for name, value in told.items()]
        headers += [(b"request-id", x.id.encode())] if dialect.tells_id else []
        await x.start(dialect.status(refused), headers)
        await x.write(data, more=False)

    # ---- what passes -------------------------------------------------------------------------------------------

    async def _pass(self, x: Exchange, kind: RouteKind | None) -> None:
        if kind is None:
            raise Refused(f"{x.method} {x.path[:200]}: this path does not pass.", status=404, code="not_found")
        if self.draining:
            raise Refused(
                "The router is shutting down. Try again elsewhere.", status=503, kind=SERVER, code="shutting_down",
                headers={"Retry-After": "1", "Connection": "close"},
            )  # fmt: skip
        if wanted := x.headers.get(b"upgrade"):
            protocol = wanted[:40].decode("latin-1")
            raise Refused(
                f"Upgrade: {protocol}: other protocols do not pass.", status=501, code="upgrade_not_supported"
            )
        x.tenant = self._tenants.admit(key_of(x.headers))
        headers, path = self._sendable(x)
        body = await self._body(x)
        try:
            named = await self._named(x, body)
            ask = await self._ask(x, kind, body, goes_on=named is not None)
            if body.size or b"content-length" in x.headers:
                headers.append(("Content-Length", str(body.size)))
            if named is not None:
                ask = self._to_its_keeper(ask, kind, named)
            elif kind is RouteKind.OBJECT or (ask.sticky and x.path in STORED):
                own = self._its_own(x, ask)
                if kind is RouteKind.OBJECT or any(u.name == own for u in self._fleet.having(ask.model)):
                    ask = replace(ask, only=own)
            job = Forwarding(x, ask, headers, path, body, kind, again=kind is RouteKind.GENERATES, kept=named)
            await self._while_here(x, self._forwarder.forward(job))
        finally:
            body.close()

    async def _body(self, x: Exchange) -> Body:
        try:
            async with asyncio.timeout(self._arrival):
                length = x.headers.get(b"content-length", b"")
                return await bodies.read(x.receive, self._most, length, self._room)
        except TimeoutError:
            raise Refused(
                f"The body did not come within {self._arrival:g} s.", status=408, code="arrival_timeout",
                headers={"Connection": "close"},
            ) from None  # fmt: skip

    def _sendable(self, x: Exchange) -> tuple[Headers, str]:
        """The headers that go on, and the request's path and query, as they were written."""
        raw, query = x.scope["raw_path"], x.scope["query_string"]
        try:
            path = (raw + b"?" + query if query else raw).decode("ascii")
            headers = in_words([(n, v) for n, v in without_hops(x.scope["headers"]) if n not in _NOT_SENT])
        except UnicodeDecodeError:
            raise Refused(
                "This request cannot be sent on: its path must be ASCII, and its headers UTF-8.", code="invalid_http"
            ) from None
        if self._tenants.keys:  # ours; an upstream has one of its own
            given = [value for name, value in headers if name == PART]
            headers = [(name, value) for name, value in headers if name not in _OURS]
            headers.append((PART, named_part(x.tenant, given)))  # its key is that of all who come through here
        return headers, path

    async def _ask(self, x: Exchange, kind: RouteKind, body: Body, *, goes_on: bool) -> Ask:
        """The facts of a request for the policy. goes_on: from what an upstream keeps, so that it need not name a
        model. Raises Refused for a model that no upstream has.
        """
        wants_text = getattr(self._forwarder.lines.policy, "pieces", False) and kind is RouteKind.GENERATES
        model, text = model_of_path(x.path), b""
        if body.size and (model is None or kind is RouteKind.GENERATES):
            named, text = await body.look(
                x.headers.get(b"content-type", b""),
                x.headers.get(b"content-encoding", b""),
                FURTHEST if wants_text else 0,
                self._room,
                strict=kind is RouteKind.GENERATES,
            )
            model = named or model
        if model is None and x.path == TOKENS:
            model = model_of_query(x.scope["query_string"])
        fleet = self._fleet
        if model is None:
            models = fleet.models
            if kind is RouteKind.GENERATES and len(models) > 1 and not goes_on:
                raise Refused(
                    f"The request names no model, and there are several: {shown(models, 50)}.",
                    kind=INVALID, param="model", code="model_missing",
                )  # fmt: skip
            model = models[0] if kind is RouteKind.GENERATES and models and not goes_on else ANY
        elif not fleet.having(model):
            if kind is not RouteKind.GENERATES and model_of_path(x.path) is None:
                model = ANY  # a field of this name in something else
            elif fleet.known:
                raise unknown(model, fleet.models)
        sticky = x.headers.get(self._sticky, b"").decode("latin-1")
        return Ask(model, pieces_of(text) if text else (), sticky)

    async def _named(self, x: Exchange, body: Body) -> Named | None:
        """What the path or the body names that some server keeps. None also means that it makes no difference."""
        if len(self._fleet.upstreams) <= 1 and len(self._fleet.models) <= 1:
            return None
        if server := server_of(id := response_of_path(x.path)):
            return Named(server, id)
        if x.path in STORED and body.size:
            return await body.named(x.headers.get(b"content-encoding", b""), self._room)
        return None

    def _to_its_keeper(self, ask: Ask, kind: RouteKind, named: Named) -> Ask:
        """For the upstream that keeps what is named. Raises Refused where none does, or where it lacks the model."""
        keeper = self._fleet.keeper(named.server)
        if keeper is None:
            if len(self._fleet.upstreams) <= 1:
                return ask  # it says so itself
            raise lost(named, "no upstream is the one that kept it")
        if kind is not RouteKind.GENERATES:
            ask = replace(ask, model=ANY)
        elif ask.model != ANY and ask.model not in keeper.models:
            raise lost(named, f"the server that keeps it does not have the model {shown([ask.model], 1)}")
        return replace(ask, only=keeper.name, in_memory=True)

    def _its_own(self, x: Exchange, ask: Ask) -> str:
        """What a path names is kept by one upstream: that of the sticky header. Raises Refused without one."""
        fleet = self._fleet
        if len(fleet.upstreams) <= 1:
            return ""
        if not ask.sticky:
            name = self._sticky.decode().title()
            raise Refused(
                f"{x.method} {x.path[:200]}: what this path names is kept by one of {len(fleet.upstreams)} upstreams. "
                f"Send the header {name} with all requests that belong together.",
                code="sticky_header_missing",
            )
        return Homes().of(ask.sticky.encode("latin-1"), fleet.upstreams).name

    async def _while_here(self, x: Exchange, work: Awaitable[None]) -> None:
        """Await `work` in this task; if the client leaves meanwhile, it is cancelled. Raises Gone then."""
        left: Left = x.scope[LEFT]
        try:
            with Leaving() as leaving:
                left.then(lambda: x.done or leaving.now())
                await work
        finally:
            left.then(None)
