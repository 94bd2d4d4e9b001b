"""The storm: a router before upstreams that fail, clients that leave, and reloads; every answer is accounted for.

`faulty.py` has the upstreams. They die and come back, break what they answer at any place, are busy, slow or sick, and
of a hundred prompts one kills or fails whoever sees it. 40 clients send requests, and leave when they like. A request
may fail for what its upstreams have done to it, by the list in `_excuse`, and for nothing else; every other one must
have its own answer, whole. Meanwhile the slots are counted every 2 ms; in the end nothing is held.

    python -m tests.router.storm --requests 10000 --seed 7

The same seed gives the same requests and the same faults to each; when they come is up to the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hibachi.router.client import not_opened
from hibachi.router.policies import at_home
from hibachi.router.run import Router, RouterServer
from hibachi.router.settings import settle
from hibachi.router.upstreams import Place, Upstream, UpstreamState
from hibachi.server.web.address import bound
from hibachi.server.web.server import config_of
from hibachi.server.web.tenants import Tenants

from .faulty import AFTER, ANSWER, BUSY, DIED_AFTER, FAULTS, HALF, ILL, LEAVING, Attempt, Book, Mock, Told

CLIENTS = 40
MODELS = ("a", "b")
QUEUE = 60  # requests that may wait: more than clients, and fewer than in the rush at the end
RUSH = 100
POLICIES = (
    "least-connection", "least-latency", "round-robin", "power-of-two", "least-load", "prefix-affine", "sticky",
)  # fmt: skip
GENERATES, OBJECT, OTHER = "generates", "object", "other"
LEAVES = 1.0  # seconds in which an upstream's connection is closed when the client has left
SOON = 15.0  # seconds until all is well after the storm


@dataclass
class Request:
    """n: in X-Test. own: in the body; another's where the same body is sent again. leave: seconds, or after a chunk."""

    n: int
    own: int
    kind: str
    head: bytes  # without X-Test
    body: bytes
    told: Told
    stream: bool
    model: str = ""
    session: str = ""
    leave: float | None = None
    leave_chunk: int | None = None
    again: Request | None = None  # it is that one once more


@dataclass
class Got:
    status: int = 0
    body: bytes = b""
    whole: bool = False
    sent: float = 0.0
    left: float = 0.0  # when the client went
    ended: float = 0.0
    error: str = ""


@dataclass
class Asked:
    """What the router did for a request. outcome: a status, "connect", "broken", "cancelled" or what was raised."""

    where: str
    began: float
    ended: float = 0.0
    outcome: Any = ""
    alone: bool = False  # nobody else was there for this request then


@dataclass
class Report:
    seed: int
    policy: str = ""
    seconds: float = 0.0
    right: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # excused, by why
    deeds: Counter[str] = field(default_factory=Counter)
    trouble: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    retried: int = 0  # requests that more than one upstream had, and that have their answer
    looks: int = 0
    lag: float = 0.0  # the longest that the loop did nothing else
    leaving: float = 0.0  # the longest that an upstream was left with a request of nobody
    waiting: int = 0
    most: float = 0.0
    calm: float = 0.0
    refused: int = 0  # in the rush
    wrong: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.wrong and self.right > 0

    def complain(self, what: str) -> None:
        if len(self.wrong) < 200:
            self.wrong.append(what)

    def __str__(self) -> str:
        rows: list[tuple[str, Any]] = [
            ("seed, policy", f"{self.seed}, {self.policy}"),
            ("seconds", f"{self.seconds:.0f}"),
            ("requests", self.right + sum(self.failed.values())),
            ("right and whole", self.right),
            ("of these, tried more than once", self.retried),
            *((f"excused: {what}", n) for what, n in sorted(self.failed.items())),
            *((f"answers: {what}", n) for what, n in sorted(self.statuses.items())),
            *((f"upstreams: {what}", n) for what, n in sorted(self.deeds.items())),
            *((f"trouble: {what}", n) for what, n in sorted(self.trouble.items())),
            ("looks at the slots", self.looks),
            ("the most that waited; of 100 at once, refused", f"{self.waiting}; {self.refused}"),
            ("the longest that the loop was busy", f"{1000 * self.lag:.0f} ms"),
            ("an upstream had the request of a client that left for, at most", f"{1000 * self.leaving:.0f} ms"),
            ("the slowest answer", f"{self.most:.2f} s"),
            ("all was well after", f"{self.calm:.2f} s"),
            ("**wrong**", f"**{len(self.wrong)}**"),
        ]
        table = (f"| {what} | {f'{n:,}' if isinstance(n, int) else n} |" for what, n in rows)
        return "\n".join(["| storm | |\n|---|---|", *table])


# ---- requests --------------------------------------------------------------------------------------------------------


def drawn(seed: int, n: int) -> Request:
    """The same for the same seed and number."""
    rng = random.Random(f"{seed} request {n}")
    kind = rng.choices((GENERATES, OBJECT, OTHER), (85, 8, 7))[0]
    model, stream, said, session = rng.choice(MODELS), False, {}, ""
    method = "POST"
    if kind == GENERATES:
        path = rng.choice(("/v1/completions", "/v1/completions", "/v1/chat/completions", "/v1/embeddings"))
        stream = path == "/v1/completions" and rng.random() < 0.7
        filler = "y" * (rng.randrange(1 << 18, 5 << 18) if rng.random() < 0.005 else rng.randrange(3000))
        said = {"model": model, "n": n, "prompt": filler, "stream": stream}
    elif kind == OBJECT:
        session = f"s{rng.randrange(12)}"
        method, path = rng.choice((("POST", "/v1/files"), ("GET", "/v1/files/f1"), ("DELETE", "/v1/files/f1")))
        said = {"n": n} if method == "POST" else {}
    else:
        method, path = rng.choice((("POST", "/v1/whatever"), ("GET", f"/v1/models/{model}"), ("GET", "/version")))
        said = {"n": n, "model": model} if method == "POST" else {}
    body = json.dumps(said).encode() if said else b""
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k{rng.randrange(3)}\r\n"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    if session:
        head += f"X-Session-Id: {session}\r\n"
    request = Request(n, n, kind, head.encode(), body, _told(rng, kind), stream, model, session)
    if rng.random() < 0.08:
        if stream and rng.random() < 0.5:
            request.leave_chunk = rng.randrange(request.told.chunks)
            request.told.gap = max(request.told.gap, 0.01)
        else:
            request.leave = rng.expovariate(12)
            if rng.random() < 0.5:
                request.told.slow = 8.0  # so that it ends by being left only
    return request


def _told(rng: random.Random, kind: str) -> Told:
    told = Told(
        chunks=rng.randrange(1, 8), gap=rng.choice((0, 0, 0.002, 0.01)), size=rng.choice((5, 200, 200, 30000)),
        slow=rng.choice((0, 0, 0.005, 0.02)), chunked=rng.random() < 0.5,
    )  # fmt: skip
    if kind == GENERATES and rng.random() < 0.01:
        told.poison = rng.choice(("500", "broke before the first byte", "die"))
        return told
    if rng.random() < 0.03:
        told.slow = rng.uniform(0.05, 0.4)
    for share in (0.12, 0.2):  # of the first attempts, and of those that follow a fault
        if rng.random() > share:
            break
        what = rng.choices((*FAULTS, *BUSY, AFTER), (*(2 for _ in FAULTS), 3, 3, 3))[0]
        told.deeds.append(what)
    return told


def repeated(of: Request, n: int) -> Request:
    """The same body, with another number; the upstreams do nothing to it, or the same as to all of its kind."""
    told = Told(poison=of.told.poison)
    return Request(n, of.own, of.kind, of.head, of.body, told, of.stream, of.model, of.session, again=of)


# ---- a client --------------------------------------------------------------------------------------------------------


class Client:
    """One connection, kept while it lasts."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.reader: Any = None
        self.writer: Any = None

    async def send(self, request: Request) -> Got:
        got = Got(sent=time.monotonic())
        try:
            async with asyncio.timeout(request.leave if request.leave is not None else 60.0):
                await self._exchange(request, got)
        except TimeoutError:
            if request.leave is None:
                got.error = "no answer within 60 s"
            self._go(got)
        except (OSError, asyncio.IncompleteReadError, ValueError, asyncio.LimitOverrunError) as e:
            got.error = repr(e)[:200]
            self.close()
        got.ended = time.monotonic()
        return got

    async def _exchange(self, request: Request, got: Got) -> None:
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writer.write(request.head + b"X-Test: %d\r\n\r\n" % request.n + request.body)
        await self.writer.drain()
        reader = self.reader
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        got.status = int(head.split(" ", 2)[1])
        headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in head.split("\r\n")[1:])}
        if "content-length" in headers:
            left = int(headers["content-length"])
            while left:
                if not (part := await reader.read(min(left, 1 << 16))):
                    raise asyncio.IncompleteReadError(got.body, None)
                got.body += part
                left -= len(part)
        else:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                got.body += (await reader.readexactly(size + 2))[:-2]
                if request.leave_chunk is not None and got.body.count(b"\n\n") > request.leave_chunk:
                    self._go(got)
                    return
            await reader.readexactly(2)
        got.whole = True
        if headers.get("connection") == "close":
            self.close()

    def _go(self, got: Got) -> None:
        got.left = time.monotonic()
        self.close()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.transport.abort() if id(self) % 2 else self.writer.close()
            self.reader = self.writer = None


# ---- the storm -------------------------------------------------------------------------------------------------------


class _Server(RouterServer):
    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


class Storm:
    def __init__(self, seed: int, requests: int, folder: Path, *, upset: float = 1.0) -> None:
        """upset: how much trouble there is besides what each request meets."""
        self.seed, self.requests, self.upset = seed, requests, upset
        self.file = folder / "router.toml"
        self.rng = random.Random(f"{seed} storm")
        self.report = Report(seed, self.rng.choice(POLICIES))
        self.by_number: dict[int, Request] = {}
        self.results: dict[int, Got] = {}
        self.book = Book(lambda n: self.by_number[n].told)
        self.asked: defaultdict[int, list[Asked]] = defaultdict(list)
        self.mocks = [
            Mock(self.book, MODELS if i % 2 == 0 else ("a",)) for i in range(self.rng.randrange(4, 7) + 1)
        ]  # one is to spare
        self.by_url = {m.url: m for m in self.mocks}
        self.here: dict[str, Place] = {}
        self.fleets: list[tuple[float, list[Place]]] = []  # since when there were these
        self.next, self.repeats = 0, list[Request]()
        self.tasks = set[asyncio.Task[None]]()
        self.watched: dict[str, tuple[int, int]] = {}  # of each name: its limit, and how many it may have
        self.unknown = defaultdict[str, list[float]](list)  # when nobody was known to have a model

    # ---- from beginning to end -------------------------------------------------------------------------------------

    async def run(self) -> Report:
        report, began = self.report, time.monotonic()
        with _errors() as errors:
            for mock in self.mocks:
                await mock.start()
            for mock in self.mocks[:-1]:
                self.here[mock.url] = Place(mock.url, limit=self.rng.randrange(2, 9))
            self._write()
            flags = dict(
                policy=report.policy, check_interval=0.1, check_timeout=5.0, timeout=30.0, idle_timeout=30.0,
                connect_timeout=5.0, wait_for=5.0, max_num_queued_reqs=QUEUE, arrival_timeout=30.0, drain_timeout=10.0,
                resolve_interval=0.0, port=0,
            )  # fmt: skip
            settings = settle(flags, {}, str(self.file))
            with bound(settings) as (listeners, _, _):
                self.port = listeners[0].getsockname()[1]
                self.router = Router(settings, Tenants(), list(self.here.values()))
                config = config_of(self.router, 30.0, lambda *told: None, None, date_header=False)
                server = _Server(config, self.router, settings)
                serving = asyncio.ensure_future(server.serve(sockets=listeners))
                try:
                    await self._storm(serving)
                finally:
                    with contextlib.suppress(Exception):
                        server.stop()
                        await asyncio.wait_for(serving, 20.0)
                    logging.getLogger("uvicorn.error").setLevel(logging.NOTSET)  # as it was
            until = time.monotonic() + SOON
            while any(m.connections for m in self.mocks) and time.monotonic() < until:
                await asyncio.sleep(0.02)
            for mock in self.mocks:
                if mock.connections:
                    report.complain(f"{len(mock.connections)} connections to {mock.url} are open after the end")
                await mock.end()
            gc.collect()
            await asyncio.sleep(0.05)
        for line in errors[:5]:
            report.complain(f"{len(errors)} errors in the log, such as: {line}")
        report.seconds = time.monotonic() - began
        for wrong in self.book.wrong:
            report.complain(wrong)
        for what in self.book.attempts.values():
            report.deeds.update(a.what or "runs" for a in what)
        return report

    async def _storm(self, serving: asyncio.Future[None]) -> None:
        while not (hasattr(self.router, "forwarder") and self.router.fleet.known):
            if serving.done():
                serving.result()
            await asyncio.sleep(0.01)
        self._listen()
        self.fleets.append((time.monotonic(), [u.place for u in self.router.fleet.upstreams]))
        over = asyncio.Event()
        watching = asyncio.ensure_future(self._watch(over))
        troubling = asyncio.ensure_future(self._trouble())
        try:
            clients = [asyncio.ensure_future(self._client(i)) for i in range(CLIENTS)]
            for done in asyncio.as_completed(clients):
                await done
            troubling.cancel()
            await self._rest()
            for n, request in sorted(self.by_number.items()):
                self._judge(request, self.results[n])
            await self._rush()
            await self._rest()
        finally:
            troubling.cancel()
            over.set()
            await watching

    async def _client(self, i: int) -> None:
        client, rng = Client(self.port), random.Random(f"{self.seed} client {i}")
        while self.next < self.requests:
            n, self.next = self.next, self.next + 1
            if self.repeats and rng.random() < 0.3:
                request = repeated(self.repeats.pop(0), n)
            else:
                request = drawn(self.seed, n)
            self.by_number[n] = request
            got = self.results[n] = await client.send(request)
            bad = sum(a.what in ILL for a in self.book.attempts[n])
            if not got.left and request.kind == GENERATES and (bad >= 2 or request.told.poison) and rng.random() < 0.5:
                self.repeats.append(request)
            if rng.random() < 0.05:
                client.close()
        client.close()

    def _listen(self) -> None:
        """Note what the router sends where, and what comes of it."""
        client, ask = self.router._client, self.router._client.ask

        async def noted(place: Place, method: str, path: str, headers: Any, *more: Any) -> Any:
            n = next((int(value) for name, value in headers if name.lower() == "x-test"), None)
            if n is None:
                return await ask(place, method, path, headers, *more)
            asked = Asked(place.url, time.monotonic())
            self.asked[n].append(asked)
            try:
                answer = await ask(place, method, path, headers, *more)
                asked.outcome = answer.status
                return answer
            except asyncio.CancelledError:
                asked.outcome = "cancelled"
                raise
            except Exception as e:
                asked.outcome = "connect" if not_opened(e) else "broken"
                raise
            finally:
                asked.ended = time.monotonic()
                self._note_others(n, asked)
                asyncio.get_running_loop().call_later(0.003, self._note_others, n, asked)

        client.ask = noted  # type: ignore[method-assign]

    def _note_others(self, n: int, asked: Asked) -> None:
        """Who takes its requests, or will as soon as it has been checked, and has not had this one? One that does not
        answer checks is not there."""
        tried = {one.where for one in self.asked[n]}
        others = [u for u in self.router.fleet.having(self.by_number[n].model) if u.name not in tried]
        asked.alone |= not any(u.takes or (u.state is UpstreamState.ILL and not u.bad) for u in others)

    # ---- trouble -----------------------------------------------------------------------------------------------

    async def _trouble(self) -> None:
        rng, at = random.Random(f"{self.seed} trouble"), 0.0
        try:
            while self.upset:
                at += rng.expovariate(1 / 14) / self.upset
                while self.next < at:
                    await asyncio.sleep(0.005)
                await self._upset(rng)
        except Exception:
            self.report.complain(f"trouble is broken:\n{traceback.format_exc()}")

    async def _upset(self, rng: random.Random) -> None:
        what = rng.choices(("death", "leaves", "leaves quickly", "sick", "reload"), (5, 1, 1, 2, 5))[0]
        mock = rng.choice(self.mocks)
        if what != "reload" and (not mock.lives or mock.leaving or mock.sick or self._down() >= 2):
            return
        self.report.trouble[what] += 1
        if what == "death":
            mock.die()
            self._later(rng.uniform(0.02, 0.4), mock.start)
        elif what.startswith("leaves"):

            async def leave() -> None:
                await mock.leave(what == "leaves quickly")
                await asyncio.sleep(rng.uniform(0.02, 0.3))
                await mock.start()

            self._later(0.0, leave)
        elif what == "sick":
            mock.sick = True

            async def heal() -> None:
                mock.sick = False

            self._later(rng.uniform(0.1, 0.5), heal)
        else:
            await self._reload(rng)

    def _down(self) -> int:
        return sum(not m.lives or m.leaving or m.sick for m in self.mocks)

    def _later(self, seconds: float, do: Callable[[], Any]) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            await do()

        task = asyncio.ensure_future(wait())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _reload(self, rng: random.Random) -> None:
        """One comes, one goes, one has another limit or weight; always three, two of them with all models."""
        away = [m for m in self.mocks if m.url not in self.here]
        if away and rng.random() < 0.6:
            mock = rng.choice(away)
            self.here[mock.url] = Place(mock.url, limit=rng.randrange(2, 9))
        if rng.random() < 0.5:
            url = rng.choice(list(self.here))
            left = [self.by_url[u] for u in self.here if u != url]
            if len(left) >= 3 and sum(m.models == MODELS for m in left) >= 2:
                del self.here[url]
        for url in self.here:
            if rng.random() < 0.3:
                self.here[url] = Place(url, limit=rng.randrange(2, 9), weight=rng.choice((0.5, 1.0, 2.0)))
        await self._load()

    async def _load(self) -> None:
        self._write()
        want = dict(self.here)
        self._look()  # else two changes of a limit may come between two looks
        self.router.reload()
        until = time.monotonic() + SOON
        while {u.name: u.place for u in self.router.fleet.upstreams} != want:
            if time.monotonic() > until:
                raise TimeoutError("the configuration was not read again")
            await asyncio.sleep(0)
        self.fleets.append((time.monotonic(), [u.place for u in self.router.fleet.upstreams]))
        self._look()

    def _write(self) -> None:
        places = self.here.values()
        tables = (f'[[upstream]]\nurl = "{p.url}"\nlimit = {p.limit}\nweight = {p.weight}\n' for p in places)
        self.file.write_text("\n".join(tables))

    # ---- the watch ---------------------------------------------------------------------------------------------

    async def _watch(self, over: asyncio.Event) -> None:
        """Every 2 ms: no slot too many, none too few, and nobody waits beside a free one."""
        report, last = self.report, time.monotonic()
        while not over.is_set():
            await asyncio.sleep(0.002)
            now = time.monotonic()
            report.lag, last = max(report.lag, now - last - 0.002), now
            report.looks += 1
            try:
                self._look()
            except Exception:
                report.complain(f"the watch is broken:\n{traceback.format_exc()}")
                return

    def _look(self) -> None:
        report, fleet, lines = self.report, self.router.fleet, self.router._lines
        running: Counter[str] = Counter()
        limits: dict[str, int] = {}
        for u in (*fleet.leaving, *fleet.upstreams):
            if u.in_flight < 0:
                report.complain(f"{u.name} has {u.in_flight} requests")
            running[u.name] += u.in_flight
            limits[u.name] = u.place.limit
        for name, limit in limits.items():
            before, may = self.watched.get(name, (limit, limit))
            if limit != before:
                may = max(may, limit)
            if running[name] > may:
                report.complain(f"{name} has {running[name]} requests and may have {may} (limit {limit})")
                may = running[name]
            self.watched[name] = limit, max(limit, min(may, running[name]))
        report.waiting = max(report.waiting, lines.waiting)
        if not 0 <= lines.waiting <= QUEUE:
            report.complain(f"{lines.waiting} wait")
        if not 0 <= self.router.forwarder.meter.running <= CLIENTS + RUSH + 50:
            report.complain(f"{self.router.forwarder.meter.running} run")
        for model in MODELS:
            if not fleet.having(model):
                self.unknown[model].append(time.monotonic())
        for u in fleet.upstreams:
            if u.slots > 0 and lines.waiting and (waiter := self._could(u)) is not None:
                report.complain(f"{u.name} ({u.state.value}) has {u.slots} free slots, and one waits: {waiter.ask}")

    def _could(self, u: Upstream) -> Any:
        """Who waits, and could have a slot of this one?"""
        lines = self.router._lines
        mine = [model for model in lines._lines if model == "" or model in u.models]
        return next((w for model in mine if (w := lines._first(model, u)) is not None), None)

    # ---- the end -----------------------------------------------------------------------------------------------

    async def _rest(self) -> None:
        """All is well again, soon."""
        began = time.monotonic()
        while self.tasks:
            await asyncio.wait(self.tasks)
        for mock in self.mocks:
            await mock.start()
        self.here = {m.url: self.here.get(m.url, Place(m.url, limit=4)) for m in self.mocks}
        await self._load()
        while (wrong := self._unrest()) and time.monotonic() < began + SOON:
            await asyncio.sleep(0.02)
        for what in wrong:
            self.report.complain(f"{SOON:g} s after the storm: {what}")
        self.report.calm = max(self.report.calm, time.monotonic() - began)

    def _unrest(self) -> list[str]:
        router = self.router
        out = [
            f"{u.name} is {u.state.value}: {u.why}" for u in router.fleet.upstreams if u.state is not UpstreamState.UP
        ]
        for u in (*router.fleet.upstreams, *router.fleet.leaving):
            out += [f"{u.name} has {u.in_flight} requests"] if u.in_flight else []
        out += [f"{m.url} has {len(m.active)} requests" for m in self.mocks if m.active]
        counts = {"wait": router._lines.waiting, "run": router.forwarder.meter.running,
                  "are in lines": len(router._lines._lines)}  # fmt: skip
        return out + [f"{n} {what}" for what, n in counts.items() if n]

    async def _rush(self) -> None:
        """More at once than may wait: some are refused at once, the others are served in turn."""
        base, url = self.next, next(m.url for m in self.mocks if m.models == MODELS)
        self.here = {url: Place(url, limit=2)}
        await self._load()
        requests = []
        for n in range(base, base + RUSH):
            request = drawn(self.seed, n)
            body = json.dumps({"model": "a", "n": n}).encode()
            head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
            request = Request(n, n, GENERATES, head, body, Told(slow=0.02, chunks=1), False, "a")
            if n % 10 == 0:
                request.leave = 0.2
            self.by_number[n] = request
            requests.append(request)
        clients = [Client(self.port) for _ in requests]
        got = await asyncio.gather(*(c.send(r) for c, r in zip(clients, requests, strict=True)))
        for client in clients:
            client.close()
        self.report.refused = sum(g.status == 429 and b"queue_full" in g.body for g in got)
        for request, one in zip(requests, got, strict=True):
            if not (one.left or _right(request, one) or (one.status == 429 and b"queue_full" in one.body)):
                self.report.complain(f"in the rush: {_shown(request, one)}")
        if not self.report.refused:
            self.report.complain("in the rush nobody was refused")

    # ---- the verdict -------------------------------------------------------------------------------------------

    def _judge(self, request: Request, got: Got) -> None:
        report, n = self.report, request.n
        attempts, asked = self.book.attempts[n], self.asked[n]
        faults, broken, bad = self._faults(attempts, asked)
        if got.status:
            report.statuses[f"{got.status}{'' if got.whole else ', not whole'}"] += 1
        for what in bad:
            report.complain(f"{what}\n  {self._account(request, got)}")
        if broken and attempts[-1] is not broken[0]:
            report.complain(f"sent again after the first byte of an answer\n  {self._account(request, got)}")
        most = 1 if request.kind != GENERATES or self._put_back(request) else 2
        if len(faults) > most or len(set(faults)) < len(faults):
            report.complain(f"failed on {faults}; it may on {most}\n  {self._account(request, got)}")
        if request.session:
            self._check_home(request, got, attempts)
        if got.left:
            report.failed["its client left"] += 1
            slowest = max((a.ended - got.left for a in attempts), default=0.0)
            report.leaving = max(report.leaving, slowest)
            if slowest > LEAVES + report.lag or any(a.came > got.left + LEAVES + report.lag for a in attempts):
                report.complain(f"its client left, and it went on for {slowest:.1f} s\n  {self._account(request, got)}")
        elif _right(request, got):
            report.right += 1
            report.retried += len(asked) > 1
            report.most = max(report.most, got.ended - got.sent)
            if not attempts or attempts[-1].what != ANSWER:
                report.complain(f"an answer of nobody\n  {self._account(request, got)}")
        else:
            why = self._excuse(request, got, attempts, asked, faults, broken)
            if why is None:
                report.complain(f"failed, and should not have\n  {self._account(request, got)}")
                why = "nothing"
            report.failed[why] += 1
            half = request.kind != GENERATES and any(a.what == HALF for a in attempts)  # it passes on as it comes
            if not got.whole and not broken and not half:
                report.complain(f"no whole answer, and none was broken\n  {self._account(request, got)}")
            if got.whole and got.status >= 400:
                try:
                    json.loads(got.body)["error"]["message"]
                except (ValueError, KeyError, TypeError):
                    report.complain(f"an error in no form\n  {self._account(request, got)}")

    def _excuse(
        self,
        request: Request,
        got: Got,
        attempts: list[Attempt],
        asked: list[Asked],
        faults: list[str],
        broken: list[Attempt],
    ) -> str | None:
        """Why a request may have failed."""
        last = attempts[-1].what if attempts else ""
        if broken:
            return "broke after the first byte"
        if request.told.poison and faults:
            return "poison"
        if len(faults) >= 2:
            return "two upstreams failed"
        if faults and request.kind != GENERATES:
            return "failed, on a path that does not generate"
        if faults and self._put_back(request):
            return "failed once, as it had failed twice before"
        if faults and asked[-1].alone:
            return "failed once, and nobody else was there"
        if request.session and got.status == 503 and b"no_upstream" in got.body and len(self._homes(request, got)) > 1:
            return "its home left the configuration while it waited"
        if b"model_not_found" in got.body and self._nobody_had(request, got):
            return "who has its model was new, and not there"
        if got.whole and last in BUSY and got.status == int(last[:3]) and b"busy" in got.body:
            return "all busy"
        if got.whole and last == LEAVING and got.status == 503 and b"shutting_down" in got.body:
            return "shutting down, and nobody else there"
        return None

    def _faults(self, attempts: list[Attempt], asked: list[Asked]) -> tuple[list[str], list[Attempt], list[str]]:
        """(who failed with it after it was sent; answers that broke after the first byte; what the router takes for a
        fault, and is none)."""
        seen = [one for one in asked if one.outcome in ("broken", 500, 502)]
        left = Counter(a.where for a in attempts if a.what in ILL)
        spare, broken = Counter(one.where for one in seen) - left, []
        for a in attempts:
            if a.what in (AFTER, DIED_AFTER):
                if spare[a.where]:  # its first bytes were lost as the connection broke
                    spare[a.where] -= 1
                    left[a.where] += 1
                else:
                    broken.append(a)
        faults, wrong = list(left.elements()), []
        for one in seen:
            if left[one.where]:
                left[one.where] -= 1
            elif any(one.began - 0.05 - self.report.lag <= t <= one.ended for t in self.by_url[one.where].closings):
                faults.append(one.where)  # it was sent as its upstream died, or closed the connection
            else:
                wrong.append(f"the router saw {one.outcome} of {one.where}, which did nothing")
        return faults, broken, wrong

    def _put_back(self, request: Request) -> bool:
        """Has it failed twice before?"""
        while (request := request.again) is not None:  # type: ignore[assignment]
            if len(self._faults(self.book.attempts[request.n], self.asked[request.n])[0]) >= 2:
                return True
        return False

    def _check_home(self, request: Request, got: Got, attempts: list[Attempt]) -> None:
        """What a path names is at one upstream: it must not go to another."""
        homes = self._homes(request, got)
        for attempt in attempts:
            if attempt.where not in homes:
                self.report.complain(
                    f"went to {attempt.where}, and is at home in {homes}\n  {self._account(request, got)}"
                )

    def _nobody_had(self, request: Request, got: Got) -> bool:
        slack = 0.01 + self.report.lag
        return any(got.sent - slack <= t <= got.ended + slack for t in self.unknown[request.model])

    def _homes(self, request: Request, got: Got) -> set[str]:
        """Of all fleets that there were meanwhile."""
        homes = set[str]()
        for i, (since, places) in enumerate(self.fleets):
            until = self.fleets[i + 1][0] if i + 1 < len(self.fleets) else got.ended
            if since <= got.ended and until >= got.sent - self.report.lag:
                among = [Upstream(place) for place in places]
                homes.add(at_home(request.session.encode("latin-1"), among)[0].name)
        return homes

    def _account(self, request: Request, got: Got) -> str:
        events = [(a.came, f"{a.where[-5:]} had it for {1000 * (a.ended - a.came):.0f} ms: {a.what}")
                  for a in self.book.attempts[request.n]]  # fmt: skip
        events += [(a.began, f"the router asked {a.where[-5:]} for {1000 * (a.ended - a.began):.0f} ms: {a.outcome}")
                   for a in self.asked[request.n]]  # fmt: skip
        told = "".join(f"\n    {1000 * (t - got.sent):.0f} ms: {what}" for t, what in sorted(events))
        return f"{_shown(request, got)}{told}"


def _right(request: Request, got: Got) -> bool:
    """The answer of this request, whole."""
    if not got.whole or got.status != 200:
        return False
    if not request.stream:
        try:
            said = json.loads(got.body)
        except ValueError:
            return False
        text = request.told.size * request.told.chunks * "x"
        return said == {"n": request.own, "test": request.n, "text": text}
    *parts, last = [part.removeprefix(b"data: ") for part in got.body.split(b"\n\n")[:-1]]
    want = [{"n": request.own, "i": i, "text": "x" * request.told.size} for i in range(request.told.chunks)]
    return last == b"[DONE] %d" % request.own and [json.loads(part) for part in parts] == want


def _shown(request: Request, got: Got) -> str:
    first = request.head.split(b"\r\n")[0].decode()
    took, told = 1000 * (got.ended - got.sent), request.told
    again = f", the same as {request.again.n}" if request.again else ""
    plan = f"poison={told.poison!r} slow={told.slow:.3f} chunks={told.chunks}"
    return (
        f"{request.n}{again}: {first} ({request.kind}; {plan}): {got.status} {'whole' if got.whole else 'not whole'} "
        f"after {took:.0f} ms{' as its client left' if got.left else ''} {got.body[:200]!r} {got.error}"
    )


@contextlib.contextmanager
def _errors() -> Iterator[list[str]]:
    """What the log says at ERROR."""
    found = list[str]()

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            trace = "".join(traceback.format_exception(*record.exc_info))[-1500:] if record.exc_info else ""
            found.append(f"{record.name}: {record.getMessage()[:500]}\n{trace}")

    handler = Keep(logging.ERROR)
    loggers = [logging.getLogger(name) for name in ("", "hibachi", "uvicorn.error", "asyncio")]
    wanted = [one for one in loggers if one.name == "root" or not one.propagate]
    for one in wanted:
        one.addHandler(handler)
    try:
        yield found
    finally:
        for one in wanted:
            one.removeHandler(handler)


def storm(seed: int, requests: int, upset: float = 1.0, loop: str = "auto") -> Report:
    """loop: "auto": uvloop, where it is installed; "asyncio"."""
    factory: Any = None
    if loop == "auto":
        with contextlib.suppress(ImportError):
            import uvloop

            factory = uvloop.new_event_loop
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=factory) as runner:
        one = Storm(seed, requests, Path(folder), upset=upset)
        try:
            return runner.run(one.run())
        except Exception:
            one.report.complain(f"the storm broke off:\n{traceback.format_exc()}")
            return one.report


def command(seed: int, requests: int) -> str:
    return f"python -m tests.router.storm --requests {requests} --seed {seed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--upset", type=float, default=1.0, help="how often upstreams die and change (default: 1)")
    parser.add_argument("--loop", choices=("auto", "asyncio"), default="auto", help="auto: uvloop, if it is there")
    parser.add_argument("--show", type=int, default=20, help="how much of what is wrong is printed (default: 20)")
    args = parser.parse_args()
    os.environ.pop("UPSTREAMS", None)
    report = storm(args.seed, args.requests, args.upset, args.loop)
    for what in report.wrong[: args.show]:
        print(f"WRONG: {what}")
    print(report)
    return not report.good


if __name__ == "__main__":
    sys.exit(main())
