"""One request and its answer: where it goes, where it is tried again, and what passes."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import aiohttp
import msgspec

from hibachi.llm.dialects.dialects import key_of
from hibachi.llm.dialects.errors import LIMITED, SERVER, Refused
from hibachi.router import outliers
from hibachi.router.affine import PrefixAffine
from hibachi.router.body import Body
from hibachi.router.client import Headers, NoAnswer, UpstreamClient, is_ours, not_http, not_opened, words
from hibachi.router.dialects import stream_form
from hibachi.router.fleet import Fleet, shown
from hibachi.router.health import answered, drain, failed, put_back
from hibachi.router.inspect_answer import AnswerInspector, reader_of
from hibachi.router.inspect_body import Named
from hibachi.router.policies import Ask
from hibachi.router.proxying import Idle, relay, without_hops
from hibachi.router.queue import NoSlot, Queues, may_have
from hibachi.router.routes import RouteKind
from hibachi.router.upstreams import Times, Upstream, UpstreamState
from hibachi.server.web.deadlines import cut
from hibachi.server.web.exchange import Exchange

log: logging.Logger = logging.getLogger("hibachi.route")
HELD = 1 << 20  # bytes of an answer that is kept while another upstream is tried
HELD_FOR = 1.0  # seconds for them to come
POISON_FOR = 60.0  # seconds that a request which failed twice is not tried twice
MOST_POISON = 4096
UNWELL = (503, 529)  # the latter in Anthropic's dialect
LATE = 504  # a deadline in Anthropic's dialect, where others say 408; or a proxy had no answer: the code tells which


@dataclass(slots=True)
class ForwardMeter:
    """What became of requests, all upstreams together."""

    answers: dict[tuple[str, int], int] = field(default_factory=dict)  # by kind of path and status
    queued: Times = field(default_factory=Times)
    poisonous: int = 0
    left: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True)
class ForwardPatience:
    """Timeouts in seconds. slot: until an upstream is free, and again until the first byte. idle: between bytes; 0
    means any time.

    ready: until an upstream can be reached, where none can.
    """

    slot: float
    idle: float
    ready: float


@dataclass(slots=True)
class Forwarding:
    """A request as it is to be sent."""

    x: Exchange
    ask: Ask
    headers: Headers
    path: str  # and query, as it came
    body: Body
    kind: RouteKind
    again: bool = False  # may it be sent twice?
    tried: tuple[Upstream, ...] = ()
    faulty: list[Upstream] = field(default_factory=list)  # those that failed with it
    since: float | None = None  # when no upstream could be reached for the first time
    held: Held | None = None
    slot: Upstream | None = None  # that it has already
    kept: Named | None = None  # what it is about, in the memory of one upstream
    poisonous: bool = False

    def who(self) -> str:
        """The client of the request: its key, where there is one, else its address."""
        key = key_of(self.x.headers)
        return blake2b(key, digest_size=8).hexdigest() if key else str((self.x.client or ("",))[0])


@dataclass(slots=True)
class Held:
    """An answer that goes to the client if no other comes."""

    upstream: Upstream
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Broken(Exception):
    """What the upstream sent is not whole, and the client has some of it."""


class Forwarder:
    """dress: from headers of an upstream to those of the answer. recheck: asks for a check of an upstream at once.

    keyed: clients send keys of the router's, so that upstreams get their own.
    """

    def __init__(
        self,
        fleet: Fleet,
        lines: Queues,
        client: UpstreamClient,
        patience: ForwardPatience,
        dress: Callable[[Exchange, Upstream, list[tuple[bytes, bytes]]], list[tuple[bytes, bytes]]],
        recheck: Callable[[Upstream], None],
        *,
        keyed: bool = False,
    ) -> None:
        self.fleet, self.lines, self.client, self.patience = fleet, lines, client, patience
        self.meter = ForwardMeter()
        self._dress, self._recheck, self.keyed = dress, recheck, keyed
        self._poison: OrderedDict[bytes, float] = OrderedDict()  # when each may be tried twice again

    async def forward(self, job: Forwarding) -> None:
        """Raises Refused where no answer has begun, and Broken where one cannot be ended."""
        if self._poison and job.again:
            await self._look_up(job)
        while True:
            u = await self._slot(job)
            if u is None:
                return
            job.x.more["upstream"] = u.name
            try:
                self._count(job, u)
                if await self._attempt(job, u):
                    return
            finally:
                self.lines.give_back(u, job.ask)

    # ---- slots -------------------------------------------------------------------------------------------------

    async def _slot(self, job: Forwarding) -> Upstream | None:
        """None means there is none, and the client has the answer that was held. Raises Refused."""
        u, job.slot = job.slot or self.lines.take(job.ask, job.tried), None
        if u is None:
            try:
                u = await self._wait(job)
            except NoSlot as e:
                if job.held is None:
                    raise self._refused(job, e.why) from None
                await self._send_held(job, job.held)
                return None
        return u

    def _count(self, job: Forwarding, u: Upstream) -> None:
        u.used += 1
        u.retries += bool(job.tried)
        if job.ask.pieces and isinstance(policy := self.lines.policy, PrefixAffine):
            u.affine += policy.home(job.ask, self.fleet.taking(job.ask.model)) is u

    async def _wait(self, job: Forwarding) -> Upstream:
        """Raises NoSlot."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            return await self.lines.wait(job.ask, job.who(), self.patience.slot, job.tried)
        finally:
            seconds = loop.time() - began
            job.x.more["queued"] = job.x.more.get("queued", 0.0) + seconds
            self.meter.queued.add(seconds)

    def _refused(self, job: Forwarding, why: str) -> Refused:
        if why == "full":
            return later("Too many requests wait already. Try again later.", "queue_full", status=429, kind=LIMITED)
        if why == "late":
            told = f"none came within {self.patience.slot:g} s. Try again later."
            return later(f"Timeout waiting for a free upstream: {told}", "no_free_upstream")
        if why == "lost" and job.kept is not None:
            return lost(job.kept, "no connection to the server that kept it can be opened")
        if self.fleet.known and not self.fleet.having(job.ask.model):
            return unknown(job.ask.model, self.fleet.models)
        what = f" for {job.ask.model[:200]}" if job.ask.model else ""
        reasons = self.fleet.reasons(job.ask.model, job.ask.only)
        return later(f"No upstream takes requests{what}: {reasons}.", "no_upstream")

    def _others(self, job: Forwarding, *, soon: bool = False) -> bool:
        """Is there an upstream that takes such requests and has not had this one? soon: or that may take them again as
        soon as it has been checked, as it failed with a request only."""
        return any(
            u.takes or (soon and u.state is UpstreamState.ILL and not u.bad)
            for u in self.fleet.having(job.ask.model)
            if may_have(u, job.ask, job.tried)
        )

    # ---- one attempt -------------------------------------------------------------------------------------------

    async def _attempt(self, job: Forwarding, u: Upstream) -> bool:
        """Has the client its answer? Raises Refused and Broken."""
        loop = asyncio.get_running_loop()
        began, x = loop.time(), job.x
        try:
            async with asyncio.timeout(self.patience.slot):
                headers = job.headers
                if self.keyed and u.place.key:
                    headers = [*headers, ("Authorization", f"Bearer {u.place.key}")]
                answer = await self.client.ask(u.place, x.method, job.path, headers, job.body.to_send() or None)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as e:
            return await self._fault(job, u, e)
        try:
            if (why := not_http(answer)) is not None:
                return await self._fault(job, u, NoAnswer(why))
            if (done := await self._second_thoughts(job, u, answer)) is not None:
                return done
            x.more["ttft"] = seconds = loop.time() - began
            tells = answer.status < 400 and job.kind is RouteKind.GENERATES
            sample = u.took(seconds, telling=tells)
            if answer.status < 500:
                self._well(u)
            u.answers[answer.status] += 1
            read = tells and answer.status == 200
            reader = reader_of(stream_form(x.path), answer.headers) if read else AnswerInspector()
            try:
                await self._pass_on(job, u, answer, reader)
                if reader.fault:
                    u.errors["bad answer"] += 1
            finally:
                if reader.fault:
                    u.took_not(seconds, sample)
                    self._at_fault(u, reader.fault)
            if tells and not (reader.fault or reader.refused):
                outliers.whole(u)
            return True
        finally:
            if not (answer.content.at_eof() and answer.content.exception() is None):
                answer.close()
            else:
                answer.release()

    async def _fault(self, job: Forwarding, u: Upstream, e: BaseException) -> bool:
        """No answer came. False means it is to be tried again. Raises Refused."""
        if isinstance(e, ValueError) and not isinstance(e, aiohttp.ClientError):
            raise Refused(f"This request cannot be sent on: {e}.", code="invalid_http") from e
        if isinstance(e, TimeoutError) and not isinstance(e, aiohttp.ClientError):
            u.errors["first byte"] += 1
            u.took(self.patience.slot, telling=False)
            self._at_fault(u, f"it sent no byte within {self.patience.slot:g} s")
            if job.held is not None:
                await self._send_held(job, job.held)
                return True
            raise Refused(
                f"The upstream sent no byte of an answer within {self.patience.slot:g} s.",
                status=504, kind=SERVER, code="upstream_timeout",
            ) from e  # fmt: skip
        why = words(e)
        job.tried += (u,)
        if not_opened(e):
            u.errors["connect"] += 1
            if is_ours(e):
                log.error("no connection can be opened: %s", e)
                raise later("The router has no room for a further connection. Try again later.", "router_full") from e
            u.gone = True
            self._ill(u, why)
            return await self._reach_another(job)
        u.errors["broken"] += 1
        if await self._guilty(job, u, why) and self._others(job, soon=True):
            return False
        if job.held is not None:
            await self._send_held(job, job.held)
            return True
        if job.kept is not None and job.kept.param is not None:  # the client sends all of it, wherever that goes
            raise lost(job.kept, "the server that kept it did not answer") from e
        raise Refused(f"The upstream failed: {why}.", status=502, kind=SERVER, code="upstream_failed") from e

    async def _reach_another(self, job: Forwarding) -> bool:
        """Try another upstream; nothing was sent yet. Where none is left, wait for one to be ready, also one that was
        tried.
        """
        if self._others(job, soon=job.held is not None):
            return False
        if job.held is not None:
            await self._send_held(job, job.held)
            return True
        if self.fleet.lost(job.ask):
            raise self._refused(job, "lost")
        now = asyncio.get_running_loop().time()
        job.since = job.since or now
        if now - job.since < self.patience.ready:
            job.tried = tuple(job.faulty)
            if self._others(job):  # it was checked meanwhile, and is there; but let it breathe
                await asyncio.sleep(0.05)
            return False
        reasons = self.fleet.reasons(job.ask.model, job.ask.only)
        raise later(f"No upstream can be reached: {reasons}.", "no_upstream")

    async def _second_thoughts(self, job: Forwarding, u: Upstream, answer: aiohttp.ClientResponse) -> bool | None:
        """Looks at a status: None means the answer passes on; else as `_attempt`."""
        status, headers = answer.status, answer.headers
        busy = status == 429 or (status in UNWELL and "Retry-After" in headers)
        if not busy and (status < 500 or status in (501, 505) or not job.again):
            return None
        held, whole = await self._hold(u, answer)
        if (broke := answer.content.exception()) is not None:
            return await self._fault(job, u, broke)  # the client has received nothing of it
        if not whole:  # too long to be kept
            if not busy:
                await self._guilty(job, u, f"it answered a request with {status}")
            u.answers[status] += 1
            await self._pass_on(job, u, answer, AnswerInspector(), held.body)
            return True
        code = _code_of(held.body) if status in (*UNWELL, LATE) else ""
        u.answers[status] += 1
        job.tried += (u,)
        if status == LATE and code == "deadline_exceeded":
            self._well(u)  # the request had its time there, and would have no more elsewhere
        elif code == "shutting_down":
            drain(u, "it is shutting down")
            self.lines.changed()
            if self._others(job):
                return False  # it has not begun with it, so it may be done elsewhere, and waits for that
        elif busy and code != "engine_failed":
            job.slot = self.lines.take(job.ask, job.tried)
            if job.slot is not None:
                job.held = held
                return False
        elif await self._guilty(job, u, f"it answered a request with {status}") and self._others(job, soon=True):
            job.held = held
            return False
        await self._send_held(job, held)
        return True

    async def _hold(self, u: Upstream, answer: aiohttp.ClientResponse) -> tuple[Held, bool]:
        """An answer that is short and comes soon; False means it is not whole."""
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(HELD_FOR):
                while not answer.content.at_eof() and size < HELD:
                    parts.append(await answer.content.readany())
                    size += len(parts[-1])
        except (TimeoutError, aiohttp.ClientError):
            pass  # what is wrong shows when it is passed on
        held = Held(u, answer.status, list(answer.raw_headers), b"".join(parts))
        return held, answer.content.at_eof() and answer.content.exception() is None

    # ---- whose fault -------------------------------------------------------------------------------------------

    async def _guilty(self, job: Forwarding, u: Upstream, why: str) -> bool:
        """A request that was sent has failed. May it be sent once more?"""
        if job.poisonous:
            return False
        job.faulty.append(u)
        if len(job.faulty) == 1:
            self._ill(u, why)
            self._at_fault(u, why)
            return job.again
        for one in job.faulty:  # two have failed with it, so it is the fault of neither
            put_back(one)
        outliers.take_back(job.faulty[0])
        self._recheck(u)
        self.lines.changed()
        self.meter.poisonous += 1
        digest = await self._digest(job)
        self._poison.pop(digest, None)  # in the order of their times
        self._poison[digest] = asyncio.get_running_loop().time() + POISON_FOR
        while len(self._poison) > MOST_POISON:
            self._poison.popitem(last=False)
        log.warning("request %s failed on %s; both go on", job.x.id, " and ".join(o.name for o in job.faulty))
        return False

    async def _look_up(self, job: Forwarding) -> None:
        """Has it failed twice not long ago?"""
        now = asyncio.get_running_loop().time()
        while self._poison and next(iter(self._poison.values())) <= now:
            self._poison.popitem(last=False)
        if self._poison and await self._digest(job) in self._poison:
            job.poisonous, job.again = True, False

    @staticmethod
    async def _digest(job: Forwarding) -> bytes:
        return await job.body.digest(job.x.method.encode(), job.path.encode())

    def _ill(self, u: Upstream, why: str) -> None:
        if u.takes:
            log.warning("%s takes no requests until its next good check: %s", u.name, why)
        failed(u, why)
        self._recheck(u)
        self.lines.changed()

    def _at_fault(self, u: Upstream, why: str) -> None:
        """An answer of it that had begun, or should have, is a fault of its."""
        before = outliers.suspect(u)
        outliers.fault(u, why, asyncio.get_running_loop().time())
        others = any(not outliers.suspect(other) for other in self.fleet.upstreams)
        if outliers.suspect(u) and not before and others:
            log.warning("%s gets few requests while others take them: %s", u.name, outliers.told(u))
        self._recheck(u)

    def _well(self, u: Upstream) -> None:
        if u.state is UpstreamState.TRIED:
            answered(u)
            self.lines.serve(u)

    # ---- what passes -------------------------------------------------------------------------------------------

    async def _send_held(self, job: Forwarding, held: Held) -> None:
        job.held = None
        job.x.more["upstream"] = held.upstream.name
        await job.x.start(held.status, self._headers(job.x, held.upstream, held.headers))
        await job.x.write(held.body if job.x.method != "HEAD" else b"", more=False)

    def _headers(self, x: Exchange, u: Upstream, given: Any) -> list[tuple[bytes, bytes]]:
        return self._dress(x, u, without_hops(given))

    async def _pass_on(
        self, job: Forwarding, u: Upstream, answer: aiohttp.ClientResponse, reader: AnswerInspector, first: bytes = b""
    ) -> None:
        """The answer as it comes; first: what has come of it already. Raises Broken."""
        x = job.x
        headers = self._headers(x, u, answer.raw_headers)
        if answer.status in (204, 304):  # uvicorn wants as many bytes as that says, though here it only tells
            headers = [(name, value) for name, value in headers if name.lower() != b"content-length"]
        await x.start(answer.status, headers)
        if first:
            await x.write(first)
        watch = Idle(self.patience.idle, answer, x.receive)
        try:
            await relay(x, answer.content, reader, watch)
        except (aiohttp.ClientError, OSError) as e:
            why = f"no byte for {self.patience.idle:g} s" if watch.over else words(e)
            refused = later("The upstream did not end its answer.", "upstream_failed", status=502)
            if self.client.closed:
                refused = later("The router is shutting down.", "shutting_down")
            elif not reader.finished():
                reader.fault = f"it did not end its answer: {why}"
            last = None if "Content-Length" in answer.headers else reader.broken(refused, x.id)
            if last is None:
                cut(x.receive)
            else:
                answer.close()
                watch.writes()  # so that a client that does not read is cut off
                await x.write(last, more=False)
            if last != b"":  # an end was missing
                u.errors["idle" if watch.over else "cut off"] += 1
                raise Broken(f"{u.name} did not end its answer: {why}") from e
        finally:
            watch.stop()


def later(words: str, code: str, *, status: int = 503, kind: str = SERVER) -> Refused:
    """What may go better in a second."""
    return Refused(words, status=status, kind=kind, code=code, headers={"Retry-After": "1"})


def unknown(model: str, models: list[str]) -> Refused:
    return Refused(
        f"No upstream found with {model[:200]}, all available models: {shown(models, 50)}.",
        status=404,
        param="model",
        code="model_not_found",
    )


def lost(named: Named, why: str) -> Refused:
    """What is named is not to be had: in the words and codes of our servers."""
    id = named.id[:100]
    if named.param is None:
        return Refused(f"Response with id {id!r} not found: {why}.", status=404, code="response_not_found")
    if named.param == "previous_response_id":
        what, then, code = "Previous response", "Send the whole conversation as input.", "previous_response_not_found"
    else:
        what, then, code = "Item", "Send the item itself.", "item_not_found"
    return Refused(f"{what} with id {id!r} not found: {why}. {then}", status=404, param=named.param, code=code)


def _code_of(body: bytes) -> str:
    """What our own servers say of what is `UNWELL` or `LATE`: "shutting_down", "engine_failed", ...; in TGI's dialect
    only the latter.
    """
    try:
        told = msgspec.json.decode(body)
        if told.get("error_type") == "generation":
            return "engine_failed"
        code = told["error"]["details"]["error_code"] if told.get("type") == "error" else told["error"]["code"]
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError, RecursionError):
        return ""
    return code if isinstance(code, str) else ""
