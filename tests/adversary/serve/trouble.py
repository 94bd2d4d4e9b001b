"""What befalls the engine's process in a storm: it is killed, and must be there again; it stands still for a while."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from contextlib import suppress
from typing import Any

from .house import KEYS
from .wire import ask, request

AGAIN = 30.0  # seconds until a new engine must serve, where others test beside it


async def trouble(storm: Any, rng: random.Random, seconds: float) -> None:
    """Kills and stops, one after the other."""
    until, kills = time.monotonic() + seconds - 2, True
    while (wait := rng.uniform(0.15, 0.3) * min(seconds, 30.0)) < until - time.monotonic():
        await asyncio.sleep(wait)
        if (engine := storm.house.engine) is not None:
            await (_kill(storm, engine) if kills else _stop(storm, engine, rng.uniform(0.5, 2.0)))
            kills = not kills


async def _kill(storm: Any, engine: int) -> None:
    began = time.monotonic()
    lost = [began, float("inf")]
    storm.judge.lost.append(lost)
    os.kill(engine, signal.SIGKILL)
    data = request("POST", "/v1/completions", b'{"prompt": "She was", "max_tokens": 1}', KEYS["quiet"])
    while True:
        sent = time.monotonic()
        answer = await ask(storm.port, data)
        storm.judge.answer(answer, "a request after a kill", sent)
        if answer.status == 200 and storm.house.engine not in (engine, None):
            break
        if sent - began > AGAIN:
            storm.judge.complain(f"no new engine serves {AGAIN:g} s after the kill: {answer.body[:300]!r}")
            break
        await asyncio.sleep(0.05)
    lost[1] = time.monotonic()
    storm.report.kills.append(lost[1] - began)


async def _stop(storm: Any, engine: int, seconds: float) -> None:
    stopped = [time.monotonic(), float("inf")]
    storm.judge.stopped.append(stopped)
    os.kill(engine, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)
    stopped[1] = time.monotonic() + 0.5  # until its first words are here
    storm.report.stops += 1
