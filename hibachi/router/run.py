"""The life of a router: bind the address, find upstreams, serve, reload at SIGHUP, shut down in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hibachi.errors import ConfigError
from hibachi.router.addresses import places_of, resolved
from hibachi.router.app import Door
from hibachi.router.checks import UpstreamChecks
from hibachi.router.client import UpstreamClient
from hibachi.router.dialects import as_anthropic, dialect_of
from hibachi.router.fleet import Fleet
from hibachi.router.forward import Forwarder, ForwardPatience
from hibachi.router.health import Thresholds
from hibachi.router.metrics import PLAIN, Page
from hibachi.router.policynames import policy_of
from hibachi.router.queue import Queues
from hibachi.router.routes import Routes
from hibachi.router.settings import RouteSettings
from hibachi.router.status import told
from hibachi.router.upstreams import Place, Upstream
from hibachi.server.web.access import tell_of_none
from hibachi.server.web.address import bound
from hibachi.server.web.certificate import Certificate, certificate_of
from hibachi.server.web.cors import EVERY, Cors, origins_of
from hibachi.server.web.ending import Drainable
from hibachi.server.web.exchange import Exchange
from hibachi.server.web.hosts import Hosts, hosts_for
from hibachi.server.web.keys import tenants_of
from hibachi.server.web.logs import log_to_stderr
from hibachi.server.web.server import Config, HttpServer, config_of
from hibachi.server.web.signals import ending
from hibachi.server.web.tenants import Tenants

log: logging.Logger = logging.getLogger("hibachi.route")


def route(settings: RouteSettings, remarks: Sequence[str] = ()) -> int:
    """Routes until a signal comes. Returns the exit status. Raises ConfigError for what cannot be used."""
    log_to_stderr(settings.log_level, settings.log_format)
    for remark in remarks:
        log.warning("%s", remark)
    tenants, certificate, places = tenants_of(settings), certificate_of(settings), places_of(settings, os.environ)
    origins = origins_of(settings.allowed_origins, "--allowed-origins")
    policy_of(settings.policy)
    _all_descriptors()
    if settings.tib and settings.max_connections == 1:
        log.info("one request at a time for each upstream, as with text-inference-batcher; --max-connections is more")
    with bound(settings) as (listeners, url, public), ending():
        router = Router(settings, tenants, places)
        config = config_for(router, settings, certificate, hosts_for(settings, origins, public))
        server = RouterServer(config, router, settings)
        # Requests leave no garbage in circles (none after 5,189), and looking for some took an eighth of the time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 10, 10)
        server.tidings = f"routing to {len(places)} upstreams on {url} ({settings.policy})"
        try:
            server.run(listeners)
        except OSError as e:
            raise ConfigError(f"Cannot listen on {url}: {e.strerror or e}.") from e
    return server.status


def config_for(
    router: Router,
    settings: RouteSettings,
    certificate: Certificate | None,
    hosts: frozenset[str] | None = None,
) -> Config:
    """For uvicorn. Dates are the upstreams', and a client does not choose the address by which it waits in line.

    hosts: the names it answers to besides those of loopback; None means to any. Raises ConfigError.
    """
    arrival = settings.arrival_timeout or None
    app: Any = router if hosts is None else Hosts(router, hosts, "--allowed-origins", dialect=dialect_of)
    if origins := origins_of(settings.allowed_origins, "--allowed-origins"):
        app = Cors(app, origins, exposed=EVERY)
    return config_of(app, arrival, tell_of_none, certificate, date_header=False, proxy_headers=False)


def _all_descriptors() -> None:
    """Raise the limit of open files: a stream takes two, and systems give 1,024 by default."""
    with suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Router(Drainable):
    """Everything that runs while there are requests; made in any thread, `begin` in that of the loop."""

    door: Door
    forwarder: Forwarder

    def __init__(self, settings: RouteSettings, tenants: Tenants, places: Sequence[Place]) -> None:
        self._settings, self._tenants, self._places = settings, tenants, list(places)
        self.fleet = Fleet()
        self._resolving: asyncio.Task[None] | None = None
        self._settling = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.door(scope, receive, send)

    async def begin(self) -> None:
        settings, fleet = self._settings, self.fleet
        fleet.settle(await resolved(self._places, ()))
        policy = policy_of(settings.policy)
        self._lines = Queues(fleet, policy, most=settings.max_num_queued_reqs, wait_for=settings.wait_for)
        self._client = UpstreamClient(settings.connect_timeout)
        self._checks = UpstreamChecks(
            fleet,
            self._client,
            self._lines.changed,
            every=settings.check_interval,
            within=settings.check_timeout,
            limits=Thresholds(settings.fall, settings.rise),
            loads=getattr(policy, "loads", False),
        )
        origin = settings.origin_header

        def dress(x: Exchange, u: Upstream, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
            if origin:
                headers.append((b"x-upstream-origin", u.origin.encode()))
            return headers

        patience = ForwardPatience(settings.timeout, settings.idle_timeout, settings.wait_for)
        self.forwarder = Forwarder(
            fleet, self._lines, self._client, patience, dress, self._checks.now, keyed=bool(self._tenants.keys)
        )
        page = Page(self.forwarder)

        async def models(x: Exchange) -> None:
            listed = fleet.listed(owners=origin)
            await x.json(as_anthropic(listed) if x.dialect.tells_id else {"object": "list", "data": listed})

        async def health(x: Exchange) -> None:
            await x.json({"status": "ok"})

        async def ready(x: Exchange) -> None:
            if fleet.ready and not self.door.draining:
                await x.json({"status": "ok"})
            else:
                why = "the router is shutting down" if self.door.draining else fleet.reasons()
                await x.json({"status": "unavailable", "reason": why}, 503, {"Retry-After": "1"})

        async def metrics(x: Exchange) -> None:
            await x.answer(page.text(), PLAIN)

        async def upstreams(x: Exchange) -> None:
            await x.json(told(fleet, self._lines, settings.policy))

        own = {
            ("GET", "/v1/models"): (models, True),
            ("GET", "/upstreams"): (upstreams, True),
            ("GET", "/health"): (health, False),
            ("GET", "/ready"): (ready, False),
            ("GET", "/metrics"): (metrics, False),
        }
        self.door = Door(self.forwarder, Routes(settings.pass_ or ()), self._tenants, own, settings)
        self._checks.follow()
        if settings.resolve_interval:
            self._resolving = asyncio.ensure_future(self._resolve())

    def open_requests(self) -> int:
        return self.forwarder.meter.running

    def drain(self) -> None:
        self.door.draining = True

    async def end_all(self, left: float) -> None:
        if self._resolving is not None:
            self._resolving.cancel()
        self._checks.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._client.close()

    def reload(self) -> None:
        """The configuration is read again; one that cannot be read changes nothing."""
        try:
            self._places = places_of(self._settings, os.environ)
        except ConfigError as e:
            log.error("the configuration was not read again: %s", e)
            return
        self._client.forget()
        log.info("the configuration was read again: %d upstreams", len(self._places))
        self._reloading = asyncio.ensure_future(self._settle(anew=True))

    async def _resolve(self) -> None:
        while True:
            await asyncio.sleep(self._settings.resolve_interval)
            await self._settle()

    async def _settle(self, *, anew: bool = False) -> None:
        """anew: what is known of the places may be wrong."""
        fleet = self.fleet
        async with self._settling:  # a slow look at names must not undo a reload that came after it
            before = {u.name for u in fleet.upstreams}
            fleet.settle(await resolved(self._places, [u.place for u in fleet.upstreams]))
        now = {u.name for u in fleet.upstreams}
        for words, names in (("there is", now - before), ("there is no more", before - now)):
            if names:
                log.info("%s %s", words, ", ".join(sorted(names)))
        self._checks.follow()
        for u in fleet.upstreams if anew else ():
            self._checks.now(u)
        self._lines.changed()


class RouterServer(HttpServer):
    def __init__(self, config: Any, router: Router, settings: RouteSettings) -> None:
        super().__init__(config, router, settings.drain_timeout, settings.arrival_timeout or None)
        self._router = router

    async def startup(self, sockets: Any = None) -> None:
        await self._router.begin()
        await super().startup(sockets)

    def signalled(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        if number == getattr(signal, "SIGHUP", None):
            loop.call_soon_threadsafe(self._router.reload)
        else:
            super().signalled(loop, number)
