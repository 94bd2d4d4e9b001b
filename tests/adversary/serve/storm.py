"""The storm: hostile clients against a `hibachi serve`, beside innocent ones that must notice nothing.

The server is a process, its engine another. Hostile clients of one tenant (clients.py) send random bodies (bodies.py),
bytes that are no request (malformed.py), floods, and leave as they like; now and then the engine is killed or stopped
(trouble.py). Innocent requests (innocents.py) of two other tenants run beside them: what they get must equal their
answers from before the storm. Every answer is well formed, none is a fault of ours, /health answers at any time, and in
the end nothing is held (rest.py).

    python -m tests.adversary.serve.storm --seed 7 --seconds 60

The same seed gives each client the same requests in the same order; when they come is up to the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from .bodies import LARGEST
from .clients import CLIENTS, STREAM, Move
from .house import DRAIN, KEYS, House
from .innocents import INNOCENTS, Innocent, content, send
from .malformed import HEAD
from .report import Judge, Report
from .rest import compare, polled, rest
from .trouble import trouble
from .wire import Answer, Broken, Closed, Wire, ask, request

QUIET, BUSY = 2, 4  # innocent clients of each tenant
BLAST = 60.0  # seconds of storm, at most, before a pause in which nothing may be held
SLOW, STILL = 30.0, 10.0  # seconds: for an innocent request, and between two of its chunks
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
        with polled(self):
            for innocent in INNOCENTS:
                answer, _ = await send(self.port, innocent, "quiet")
                assert answer.status == 200, (innocent.name, answer.body)
                self.solo[innocent.name] = content(answer)
            for body in LARGEST:
                await ask(self.port, request("POST", body.path, body.data, KEYS["hostile"]))
            began, blast = time.monotonic(), 0
            while (left := began + seconds - time.monotonic()) > 1:
                # The first warms up: what is made once is made, and the pause after it is the measure of the others.
                await self._blast(blast, min(left, BLAST) if blast else min(seconds / 4, 15.0))
                await rest(self)
                blast += 1
            self.report.seconds = time.monotonic() - began
            compare(self)
        await self._end()

    async def _blast(self, n: int, seconds: float) -> None:
        """All clients at once."""
        until = time.monotonic() + seconds
        self.over.clear()
        hostile, innocent = [], []
        for move, count in self.clients:
            hostile += [self._actor(self._hostile, move, f"{move.__name__} {i} {n}") for i in range(count)]
        for tenant, count in (("quiet", QUIET), ("busy", BUSY)):
            innocent += [self._actor(self._innocent, tenant, f"{tenant} {i} {n}") for i in range(count)]
        if n:  # in the first blast there is no trouble, so that the engine whose memory is measured is warm
            await trouble(self, random.Random(f"{self.seed} trouble {n}"), seconds)
        await asyncio.sleep(max(until - time.monotonic(), 0.0))
        self.over.set()
        await asyncio.wait(innocent)
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
        still = max((b - a for a, b in itertools.pairwise(times)), default=0.0)
        if not away:
            report.still = max(report.still, still)
            if took > SLOW or still > STILL:
                self.judge.complain(
                    f"the innocent request {innocent.name} of {tenant} took {took:.1f} s, {still:.1f} still"
                )

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
            self.judge.complain(f"SIGTERM: status {status} after {took:.1f} s; expected 0 in {DRAIN + OVERTIME:g} s")


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
