"""The storm: hostile clients against a `hibachi serve`, beside innocent ones that must notice nothing.

The server is a process, its engine another. Hostile clients of one tenant (clients.py) send random bodies (bodies.py),
bytes that are no request (malformed.py), floods, and leave as they like; now and then the engine is killed or stopped.
Innocent requests (innocents.py) of two other tenants run beside them: what they get must equal their answers from before
the storm. Every answer is well formed, none is a fault of ours, /health answers at any time, and in the end nothing is
held.

    python -m tests.adversary.serve.storm --seed 7 --seconds 60

The same seed gives each client the same requests in the same order; when they come is up to the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .clients import CLIENTS, STREAM, Move
from .house import DRAIN, HOSTILE_MOST, KEYS, House
from .innocents import INNOCENTS, Innocent, content, send
from .malformed import HEAD
from .report import MIB, Judge, Report
from .wire import Answer, Broken, Closed, Wire, ask, request

QUIET, BUSY = 2, 4  # innocent clients of each tenant
BLAST = 60.0  # seconds of storm, at most, before a pause in which nothing may be held
KEPT = 60 * MIB  # bytes that a process may hold more than in the first pause
SLOW, STILL, AGAIN = 30.0, 10.0, 10.0  # seconds: for an innocent request, between two of its chunks, for a new engine
HEALTH = 1.0  # seconds
OVERTIME = 3.0  # seconds for the end, after those of the requests


class Storm:
    def __init__(self, house: House, seed: int, only: str | None = None) -> None:
        """only: a pattern, for bisecting: the hostile clients whose names match."""
        self.clients = [(move, count) for move, count in CLIENTS if only is None or re.search(only, move.__name__)]
        self.house, self.port, self.seed = house, house.port, seed
        self.judge = Judge()
        self.report = self.judge.report
        self.over = asyncio.Event()
        self.solo: dict[str, Any] = {}

    # ---- from beginning to end -------------------------------------------------------------------------------------

    async def run(self, seconds: float) -> None:
        polling = threading.Thread(target=self._poll, daemon=True)
        self._polls = True
        polling.start()
        for innocent in INNOCENTS:
            answer, _ = await send(self.port, innocent, "quiet")
            assert answer.status == 200, (innocent.name, answer.body)
            self.solo[innocent.name] = content(answer)
        began, blast = time.monotonic(), 0
        warm_up = min(seconds / 4, 15.0)
        while (left := began + seconds - time.monotonic()) > 1:
            # The first one warms up: what is made once is made, and the first pause is what others are held against.
            await self._blast(blast, min(left, BLAST) if blast else warm_up)
            await self._pause()
            blast += 1
        self.report.seconds = time.monotonic() - began
        self._compare()
        self._polls = False
        polling.join()
        await self._end()

    async def _blast(self, n: int, seconds: float) -> None:
        """All clients at once."""
        self.over.clear()
        hostile, innocent = [], []
        for move, count in self.clients:
            hostile += [self._actor(self._hostile, move, f"{move.__name__} {i} {n}") for i in range(count)]
        for tenant, count in (("quiet", QUIET), ("busy", BUSY)):
            innocent += [self._actor(self._innocent, tenant, f"{tenant} {i} {n}") for i in range(count)]
        chaos = asyncio.create_task(self._chaos(n, seconds))
        await asyncio.sleep(seconds)
        self.over.set()
        await asyncio.wait([chaos, *innocent])
        for client in hostile:  # they vanish
            client.cancel()
        await asyncio.wait(hostile)

    def _actor(self, act: Callable[[Any, random.Random], Awaitable[None]], what: Any, name: str) -> asyncio.Task[None]:
        async def repeat() -> None:
            rng = random.Random(f"{self.seed} {name}")
            while not self.over.is_set():
                try:
                    await act(what, rng)
                except Exception:
                    self.judge.complain(f"the client {name} failed:\n{traceback.format_exc()[-2000:]}")
                    await asyncio.sleep(0.1)

        return asyncio.create_task(repeat(), name=name)

    async def _hostile(self, move: Move, rng: random.Random) -> None:
        done = await move(self, rng)
        self.report.clients[done] += 1

    # ---- innocents ---------------------------------------------------------------------------------------------

    async def _innocent(self, tenant: str, rng: random.Random) -> None:
        """A request, which is sent again only where the engine was lost."""
        innocent, began = rng.choice(INNOCENTS), time.monotonic()
        while True:
            since, wrong = time.monotonic(), None
            try:
                answer, times = await send(self.port, innocent, tenant)
                code = self.judge.answer(answer, f"innocent {innocent.name}", since)
                if answer.status == 200 and code is None:
                    break
                wrong = f"{answer.status} {answer.body[-400:]!r}"
            except (Closed, Broken, TimeoutError) as e:
                wrong = repr(e)
            if not self.judge.excused(since):
                self.report.innocent.append(time.monotonic() - began)
                self.judge.complain(f"the innocent request {innocent.name} of {tenant} got {wrong}")
                return
            self.report.resent += 1
            await asyncio.sleep(0.1)
        self._note(innocent, tenant, answer, times, time.monotonic() - began)

    def _note(self, innocent: Innocent, tenant: str, answer: Answer, times: list[float], took: float) -> None:
        report, away = self.report, self.judge.excused(times[0] - took, stops=True)
        got, want = content(answer), self.solo[innocent.name]
        report.equal += got == want
        report.innocent.append(took)
        if got != want:
            self.judge.complain(f"the innocent request {innocent.name} of {tenant} got\n{got}\ninstead of\n{want}")
        still = max((b - a for a, b in zip(times, times[1:], strict=False)), default=0.0)
        if not away:
            report.still = max(report.still, still)
            if took > SLOW or still > STILL:
                self.judge.complain(f"the innocent request {innocent.name} of {tenant} took {took:.1f} s, {still:.1f} still")

    # ---- the engine ----------------------------------------------------------------------------------------------

    async def _chaos(self, n: int, seconds: float) -> None:
        """Kills and stops. The first blast has none, so that the engine whose memory is measured is warm."""
        rng, until = random.Random(f"{self.seed} chaos {n}"), time.monotonic() + seconds
        kill = n > 0
        while n > 0:
            await asyncio.sleep(rng.uniform(0.15, 0.3) * min(seconds, 30.0))
            if time.monotonic() > until - 2:
                return
            await (self._kill() if kill else self._stop(rng.uniform(0.5, 2.0)))
            kill = not kill

    async def _kill(self) -> None:
        if (engine := self.house.engine) is None:
            return
        began = time.monotonic()
        lost = [began, float("inf")]
        self.judge.lost.append(lost)
        os.kill(engine, signal.SIGKILL)
        data = request("POST", "/v1/completions", b'{"prompt": "She was", "max_tokens": 1}', KEYS["quiet"])
        while True:
            sent = time.monotonic()
            answer = await ask(self.port, data)
            self.judge.answer(answer, "a request after a kill", sent)
            if answer.status == 200 and self.house.engine not in (engine, None):
                break
            if sent - began > AGAIN:
                self.judge.complain(f"no new engine serves {AGAIN:g} s after the kill: {answer.body[:300]!r}")
                break
            await asyncio.sleep(0.05)
        lost[1] = time.monotonic()
        self.report.kills.append(lost[1] - began)

    async def _stop(self, seconds: float) -> None:
        if (engine := self.house.engine) is None:
            return
        stopped = [time.monotonic(), float("inf")]
        self.judge.stopped.append(stopped)
        os.kill(engine, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.kill(engine, signal.SIGCONT)
        stopped[1] = time.monotonic() + 0.5  # until its first words are here
        self.report.stops += 1

    # ---- what is looked at ---------------------------------------------------------------------------------------

    def _poll(self) -> None:
        """/health, in a thread that the clients do not hold up."""
        while self._polls:
            since, starved = time.monotonic(), self.house.starved()
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
                connection.request("GET", "/health")
                answer = connection.getresponse()
                status, body = answer.status, answer.read()
                connection.close()
            except (OSError, http.client.HTTPException) as e:
                self.judge.complain(f"/health: {e!r} after {time.monotonic() - since:.1f} s")
            else:
                took = time.monotonic() - since
                net = took - (self.house.starved() - starved)
                self.report.polls += 1
                self.report.health, self.report.health_net = max(self.report.health, took), max(self.report.health_net, net)
                if status != 200 and not self.judge.excused(since):
                    self.judge.complain(f"/health: {status} {body!r}, and no engine was killed")
                if net > HEALTH:
                    self.judge.complain(f"/health took {took:.2f} s, {net:.2f} without the machine's own delays")
            time.sleep(0.2)

    async def _pause(self) -> None:
        """Nobody asks for anything: within some seconds nothing is held."""
        until, wrong = time.monotonic() + 15, ["no look"]
        while wrong and time.monotonic() < until:
            await asyncio.sleep(0.3)
            wrong = self._held_at_rest(await self._metrics())
        if wrong:
            self.judge.complain("at rest, after the storm: " + "; ".join(wrong))
        body = f'{{"prompt": "She was", "max_tokens": 1, "n": {HOSTILE_MOST}}}'.encode()
        answer = await ask(self.port, request("POST", "/v1/completions", body, KEYS["hostile"]))
        if answer.status != 200:
            self.judge.complain(f"a tenant that has nothing may not have all it may: {answer.status} {answer.body!r}")
        await asyncio.sleep(0.5)
        self.report.held.append(self.house.belongings())

    async def _metrics(self) -> dict[str, float]:
        """Each series, and each name's sum over its labels."""
        answer = await ask(self.port, request("GET", "/metrics", None, KEYS["boss"]))
        found: dict[str, float] = {}
        for name, labels, value in re.findall(rb"^(\w+)(\{.*\})? (\S+)$", answer.body, re.MULTILINE):
            found[name.decode()] = found.get(name.decode(), 0.0) + float(value)
            found[(name + labels).decode()] = float(value)
        return found

    @staticmethod
    def _held_at_rest(found: dict[str, float]) -> list[str]:
        expected = {f"hibachi_requests_{what}": 0.0 for what in ("open", "running", "waiting", "paused")}
        expected |= {"hibachi_streams_open": 0, "hibachi_http_requests_open": 1, "hibachi_up": 1}
        expected["hibachi_cache_free_blocks"] = found["hibachi_cache_blocks"]
        ended = found["hibachi_requests_finished_total"] + found.get("hibachi_requests_rejected_total", 0.0)
        expected["hibachi_requests_total"] = ended
        expected["hibachi_tenant_requests_total"] = found["hibachi_requests_finished_total"]
        return [f"{n} is {found[n]:g}; expected {value:g}" for n, value in expected.items() if found[n] != value]

    def _compare(self) -> None:
        """The first pause and the last."""
        first, last = self.report.held[0], self.report.held[-1]
        for name in first.keys() & last.keys():
            more = last[name] - first[name]
            if more > (KEPT if "memory" in name else 0):
                self.judge.complain(f"{name}: {first[name]} in the first pause, and {last[name]} in the last")

    async def _end(self) -> None:
        """SIGTERM, while some still read, some do not, and some still send."""
        kept = [await Wire.open(self.port, small=True) for _ in range(3)]
        try:
            long = STREAM | {"n": 8, "logprobs": 20}
            body = str(long).replace("'", '"').replace("True", "true").encode()
            await kept[0].send(request("POST", "/v1/completions", body, KEYS["hostile"]))
            await kept[1].send(HEAD + b"Content-Length: 100\r\n\r\n{")
            await kept[2].send(HEAD[:30])
            await asyncio.sleep(0.5)
            self.report.end = status, took = await asyncio.to_thread(self.house.end, DRAIN + OVERTIME + 5)
        finally:
            for wire in kept:
                wire.close()
        if status != 0 or took > DRAIN + OVERTIME:
            self.judge.complain(f"SIGTERM: status {status} after {took:.1f} s; expected 0 within {DRAIN + OVERTIME:g} s")


def storm(seed: int, seconds: float, only: str | None = None) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        house = House(Path(folder))
        try:
            run = Storm(house, seed, only)
            try:
                asyncio.run(run.run(seconds))
            except Exception:
                run.judge.complain(f"the storm broke off; the server {'lives' if house.lives else 'is dead'}\n"
                                   f"{traceback.format_exc()[-3000:]}")  # fmt: skip
            run.report.log, wrong = house.look_at_log()
            for what in wrong:
                run.judge.complain(what)
        finally:
            house.clear()
    return run.report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="of storm (default: 600)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="PATTERN", help="hostile clients whose names match")
    args = parser.parse_args()
    report = storm(args.seed, args.seconds, args.only)
    for what in report.wrong:
        print(f"WRONG: {what}".encode(errors="backslashreplace").decode())
    print(report)
    return not report.good


if __name__ == "__main__":
    sys.exit(main())
