"""Looks from outside: /health at any time, and what is held when nobody asks for anything."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .house import HOSTILE_MOST, KEYS, QUEUED, ROWS
from .report import MIB
from .wire import Wire, ask, request

HEALTH = 1.0  # seconds that an answer may take
RESTING = 5.0  # seconds until nothing runs after all have left: less than their requests would take
LEFT = 1.5  # seconds until the request of a client that left has ended, as far as /metrics knows
POOLED = 5  # threads that the server's pools have at most, begun when they are first needed
GRAMMARS = 2 + (os.cpu_count() or 1)  # threads of the engine, likewise: two compile grammars, others fill masks
KEPT = 60 * MIB  # bytes that a process may hold more at the end than in an early pause


@contextmanager
def polled(storm: Any) -> Iterator[None]:
    """Ask for /health all the time, in a thread that the clients do not hold up."""
    over = threading.Event()

    def poll() -> None:
        while not over.wait(0.2):
            _health(storm)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _health(storm: Any) -> None:
    report, since, starved = storm.report, time.monotonic(), storm.house.starved()
    connection = http.client.HTTPConnection("127.0.0.1", storm.port, timeout=20)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        status, body = answer.status, answer.read()
    except (OSError, http.client.HTTPException) as e:
        storm.judge.complain(f"/health: {e!r} after {time.monotonic() - since:.1f} s")
        return
    finally:
        connection.close()
    took = time.monotonic() - since
    net = took - (storm.house.starved() - starved)
    report.polls += 1
    report.health, report.health_net = max(report.health, took), max(report.health_net, net)
    if status != 200 and not storm.judge.excused(since):
        storm.judge.complain(f"/health: {status} {body!r}, and no engine was killed")
    if net > HEALTH:
        storm.judge.complain(f"/health took {took:.2f} s, {net:.2f} without the machine's own delays")


async def rest(storm: Any) -> None:
    """Who left is forgotten, and nothing is held."""
    since, wrong = time.monotonic(), ["no look"]
    while wrong and time.monotonic() < since + RESTING:
        await asyncio.sleep(0.1)
        wrong = _at_rest(await _metrics(storm.port))
    storm.report.resting.append(time.monotonic() - since)
    if wrong:
        storm.judge.complain("at rest, after the storm: " + "; ".join(wrong))
    body = f'{{"prompt": "She was", "max_tokens": 1, "n": {HOSTILE_MOST}}}'.encode()
    answer = await ask(storm.port, request("POST", "/v1/completions", body, KEYS["hostile"]))
    if answer.status != 200:
        storm.judge.complain(f"a tenant that has nothing may not have all it may: {answer.status} {answer.body!r}")
    await _left(storm)
    await asyncio.sleep(0.5)
    storm.report.held.append(storm.house.belongings())


async def _left(storm: Any) -> None:
    """A client that leaves ends its request: all its continuations, of which each would take seconds."""
    body = {"prompt": "She was", "max_tokens": 500, "ignore_eos": True, "n": ROWS + QUEUED, "stream": True}
    body |= {"logprobs": 20, "typical_p": 0.9, "top_p": 0.9, "repetition_penalty": 1.1}
    wire = await Wire.open(storm.port)
    await wire.send(request("POST", "/v1/completions", json.dumps(body).encode(), KEYS["quiet"]))
    await wire.more()
    wire.close()
    until, running = time.monotonic() + LEFT, 1.0
    while running and time.monotonic() < until:
        await asyncio.sleep(0.1)
        running = (await _metrics(storm.port))["hibachi_requests_running"]
    if running:
        storm.judge.complain(f"{running:g} continuations ran {LEFT:g} s after their client left")


async def _metrics(port: int) -> dict[str, float]:
    """Each name's sum over its labels."""
    answer = await ask(port, request("GET", "/metrics", None, KEYS["boss"]))
    found: dict[str, float] = {}
    for name, value in re.findall(rb"^(\w+)(?:\{.*\})? (\S+)$", answer.body, re.MULTILINE):
        found[name.decode()] = found.get(name.decode(), 0.0) + float(value)
    return found


def _at_rest(found: dict[str, float]) -> list[str]:
    """What of the figures is not as it should be."""
    expected = {f"hibachi_requests_{what}": 0.0 for what in ("open", "running", "waiting", "paused")}
    expected |= {"hibachi_streams_open": 0, "hibachi_http_requests_open": 1, "hibachi_up": 1}
    expected["hibachi_cache_free_blocks"] = found["hibachi_cache_blocks"]
    ended = found["hibachi_requests_finished_total"] + found.get("hibachi_requests_rejected_total", 0.0)
    expected["hibachi_requests_total"] = ended
    expected["hibachi_tenant_requests_total"] = found["hibachi_requests_finished_total"]
    return [f"{name} is {found[name]:g}; expected {n:g}" for name, n in expected.items() if found[name] != n]


def compare(storm: Any) -> None:
    """An early pause and the last. Where there are many it is the second, as some of the memory is first used late."""
    held = storm.report.held
    first, last = held[min(1, max(0, len(held) - 3))], held[-1]
    for name in first.keys() & last.keys():
        pools = {"threads": POOLED, "threads of the engine": GRAMMARS}
        more = KEPT if "memory" in name else pools.get(name, 0)
        if last[name] - first[name] > more:
            storm.judge.complain(f"{name}: {first[name]} in an early pause, and {last[name]} in the last")
