"""Asks each upstream by a timer what models it has, and at once where a request has failed."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from random import Random
from typing import Any

import msgspec

from hibachi.router.client import Headers, UpstreamClient, is_ours, not_opened, words
from hibachi.router.fleet import Fleet, shown
from hibachi.router.health import Thresholds, bad_check, good_check
from hibachi.router.outliers import suspect
from hibachi.router.upstreams import Upstream, UpstreamState

log: logging.Logger = logging.getLogger("hibachi.route")
JITTER = 0.1  # part of the time between two checks
WHILE_ILL = 1.0  # seconds at most from one check to the next
AT_LEAST = 0.02  # seconds between two checks, however many requests fail
LOADS = 1.0  # seconds from one question for its load to the next
MOST = 1 << 22  # bytes of an answer
WAITING = re.compile(
    rb"^(?:hibachi_requests_waiting|vllm:num_requests_waiting|tgi_queue_size)(?:\{[^}]*\})? +([0-9.eE+-]+)",
    re.MULTILINE,
)


class _Bad(Exception):
    """The answer to a check is not what it should be."""


class UpstreamChecks:
    """A task for each upstream. changed: called when an upstream takes requests now, or has other models."""

    def __init__(
        self,
        fleet: Fleet,
        client: UpstreamClient,
        changed: Callable[[], None],
        *,
        every: float,
        within: float,
        limits: Thresholds,
        loads: bool = False,
    ) -> None:
        self._fleet, self._client, self._changed = fleet, client, changed
        self._every, self._within, self._limits, self._loads = every, within, limits, loads
        self._tasks: dict[Upstream, list[asyncio.Task[None]]] = {}
        self._bells: dict[Upstream, asyncio.Event] = {}
        self._random = Random()
        self._told: dict[str, set[str | None]] = {}  # by model: numerics that were told to differ

    def follow(self) -> None:
        """Check the upstreams that are in the fleet now, and no others."""
        for u in [u for u in self._tasks if u not in self._fleet.upstreams]:
            for task in self._tasks.pop(u):
                task.cancel()
            del self._bells[u]
        for u in self._fleet.upstreams:
            if u not in self._tasks:
                self._bells[u] = asyncio.Event()
                self._tasks[u] = [asyncio.ensure_future(self._watch(u))]
                if self._loads:
                    self._tasks[u].append(asyncio.ensure_future(self._weigh(u)))

    def now(self, u: Upstream) -> None:
        """Check it at once."""
        if (bell := self._bells.get(u)) is not None:
            bell.set()

    def stop(self) -> None:
        for tasks in self._tasks.values():
            for task in tasks:
                task.cancel()
        self._tasks, self._bells = {}, {}

    async def _watch(self, u: Upstream) -> None:
        bell = self._bells[u]
        while True:
            bell.clear()
            try:
                await self.check(u)
            except Exception:
                log.exception("the check of %s failed by a mistake of ours", u.name)
            seconds = self._every * (1 + JITTER * (2 * self._random.random() - 1))
            if u.state is not UpstreamState.UP or u.bad:
                seconds = min(seconds, WHILE_ILL)
            with suppress(TimeoutError):
                await asyncio.wait_for(bell.wait(), seconds)
                await asyncio.sleep(AT_LEAST)

    async def check(self, u: Upstream) -> None:
        began, wrong, models, gone = asyncio.get_running_loop().time(), "", None, False
        try:
            async with asyncio.timeout(self._within):
                models = await self._models(u)
        except _Bad as e:
            wrong = str(e)
        except Exception as e:  # of aiohttp, of the system, of TLS
            if is_ours(e):
                log.error("a check could not be made: %s", e)
                return
            wrong, gone = words(e), not_opened(e)
        state, had, why, known = u.state, u.models, u.why, u.gone  # requests may have changed them meanwhile
        if models is None:
            bad_check(u, wrong, self._limits, gone=gone)
        else:
            good_check(u, models, asyncio.get_running_loop().time() - began, self._limits)
        if u.models.keys() != had.keys():
            self._fleet.changed()
        self._compare(u)
        if u.state is not state or (not u.takes and u.why != why):
            _tell(u, state)
        if u.state is not state or u.models.keys() != had.keys() or u.gone is not known or suspect(u):
            self._changed()  # a suspect may have rested long enough

    def _compare(self, u: Upstream) -> None:
        """Warn, once, that a model of this upstream has other bits elsewhere; not before all were asked once."""
        if any(each.state is UpstreamState.NEW for each in self._fleet.upstreams):
            return
        for model in u.models:
            found = self._fleet.numerics(model)
            if len(found) > 1 and not found.keys() <= self._told.setdefault(model, set()):
                self._told[model] |= found.keys()
                who = (f"{shown([n], 1) if n else 'none'} at {', '.join(names)}" for n, names in found.items())
                log.warning(
                    "upstreams of %s show different numerics: %s. The same request may have another answer at another "
                    "server. Run one version of hibachi on all, with the same --backend, --dtype and --numerics, or "
                    "give the models different names (--served-model-name)",
                    shown([model], 1),
                    "; ".join(who),
                )

    async def _models(self, u: Upstream) -> Mapping[str, Any]:
        """What `/v1/models` says. Raises _Bad, and what aiohttp raises."""
        status, body = await self._get(u, "/v1/models")
        if status in (401, 403):
            if u.place.models:
                return {}  # it is there, and which models it has is known
            given = "does not take our key" if u.place.key else "wants a key: give it one (--config: key, or key_env)"
            raise _Bad(f"it answered a check with {status}: it {given}")
        if status != 200:
            if u.place.models and status == 404:
                return {}
            raise _Bad(f"it answered a check (GET /v1/models) with {status}")
        try:
            found = msgspec.json.decode(body)
            return {entry["id"]: entry for entry in found["data"] if isinstance(entry["id"], str)}
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, RecursionError):
            raise _Bad("it answered a check (GET /v1/models) with something else than a list of models") from None

    async def _weigh(self, u: Upstream) -> None:
        """How much there is to do, by its own account."""
        path = "/load"
        while True:
            try:
                async with asyncio.timeout(self._within):
                    status, body = await self._get(u, path)
                    if status != 200 or (load := load_of(body, path)) is None:
                        path = "/metrics" if path == "/load" else "/load"
                        status, body = await self._get(u, path)
                        load = load_of(body, path) if status == 200 else None
                u.load = load
            except Exception:
                u.load = None
            await asyncio.sleep(min(LOADS, self._every))

    async def _get(self, u: Upstream, path: str) -> tuple[int, bytes]:
        headers: Headers = [("Accept", "*/*"), ("User-Agent", "hibachi-route")]
        if u.place.key:
            headers.append(("Authorization", f"Bearer {u.place.key}"))
        answer = await self._client.ask(u.place, "GET", path, headers, None)
        try:
            body = bytearray()
            async for part in answer.content.iter_any():
                body += part
                if len(body) > MOST:
                    raise _Bad(f"its answer to a check is longer than {MOST} bytes")
            return answer.status, bytes(body)
        finally:
            answer.close() if not answer.content.at_eof() else answer.release()


def load_of(body: bytes, path: str) -> float | None:
    """Requests that wait, of an answer of `/load` or `/metrics`; None means it does not say."""
    if path == "/metrics":
        found = [float(n) for n in WAITING.findall(body)]
        return sum(found) if found else None
    try:
        told = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(told, dict):
        return None
    for name in ("waiting", "server_load", "load"):
        n = told.get(name)
        if isinstance(n, (int, float)) and not isinstance(n, bool) and n >= 0:
            return float(n)
    return None


def _tell(u: Upstream, before: UpstreamState) -> None:
    if u.takes:
        again = " again" if before is not UpstreamState.NEW else ""
        log.info("%s takes requests%s; models: %s", u.name, again, shown(list(u.models), 8))
    else:
        log.warning("%s takes no requests: %s", u.name, u.why)
