"""What hostile clients do. Each makes one move, and says what it was."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from . import bodies
from .house import KEYS
from .malformed import at_once, endless
from .wire import Answer, Broken, Closed, Wire, ask, request

Move = Callable[[Any, random.Random], Awaitable[str]]
HOSTILE = KEYS["hostile"]
STREAM = {"prompt": "She was", "max_tokens": 400, "stream": True, "ignore_eos": True, "temperature": 1.5}


def _stream(rng: random.Random) -> bytes:
    """A request for a stream that takes a while."""
    much: dict[str, Any] = {"n": rng.choice((1, 2, 6)), "logprobs": rng.choice((0, 20))}
    much["timeout"] = rng.choice((8, None))
    path, more = rng.choice((("/v1/completions", {}), ("/v1/chat/completions", {"messages": [bodies.TURN]})))
    if rng.random() < 0.4:
        return request("POST", *_called(rng), HOSTILE)
    body = STREAM | much | more
    if more:
        del body["prompt"]
        body |= {"logprobs": True, "top_logprobs": much["logprobs"]}
    return request("POST", path, json.dumps(body).encode(), HOSTILE)


def _called(rng: random.Random) -> tuple[str, bytes]:
    """A stream of calls, on one of the three routes that have tools."""
    path = rng.choice(("/v1/chat/completions", "/v1/responses", "/v1/messages"))
    body = dict(bodies.START[path]) | {"stream": True, "tools": bodies.tools_of(path)[0], "tool_choice": "required"}
    if path == "/v1/messages":
        body["tool_choice"] = {"type": "any"}
    body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 300
    return path, json.dumps(body).encode()


async def _said(storm: Any, wire: Wire, data: bytes, said: str) -> Answer | None:
    """Send a whole request and look at its answer. None: the connection is of no more use."""
    if said not in storm.judge.last:
        storm.judge.last.append(said)
    since = time.monotonic()
    try:
        await wire.send(data)
        answer = await wire.answer(head=data.startswith(b"HEAD"))
        storm.judge.answer(answer, said, since)
        return answer
    except Closed:
        if len(data) < 1 << 20:  # of larger ones the beginning may have been refused
            storm.judge.complain(f"{said}\n  was not answered: the connection was closed")
    except Broken as e:
        storm.judge.complain(f"{said}\n  was answered with what is no HTTP: {e}")
    except TimeoutError:
        storm.judge.complain(f"{said}\n  was not answered for {time.monotonic() - since:.0f} s")
    return None


async def random_bodies(storm: Any, rng: random.Random) -> str:
    """Several on one connection, as clients do."""
    wire = await Wire.open(storm.port)
    try:
        for _ in range(rng.choice((1, 4, 12))):
            body = bodies.draw(rng)
            key = rng.choices((HOSTILE, "wrong", None), (20, 1, 1))[0]
            data = request("POST", body.path, body.data, key, kind=body.kind)
            if (answer := await _said(storm, wire, data, body.said)) is None:
                break
            if (answer.status == 401) != (key != HOSTILE) and answer.status not in (400, 431):
                storm.judge.complain(f"{body.said}\n  with the key {key} got {answer.status}")
            if answer.headers.get("connection") == "close":
                break
            await asyncio.sleep(rng.random() * 0.05)
    finally:
        wire.close()
    return "random bodies"


async def long_texts(storm: Any, rng: random.Random) -> str:
    body, wire = bodies.long(rng), await Wire.open(storm.port)
    try:
        await _said(storm, wire, request("POST", body.path, body.data, HOSTILE), body.said)
    finally:
        wire.close()
    await asyncio.sleep(rng.random())
    return "long texts"


async def flood(storm: Any, rng: random.Random) -> str:
    """Many at once, and again at once where there is no room."""
    body = {"prompt": "She was", "max_tokens": rng.choice((1, 30, 100)), "n": rng.choice((1, 1, 4)), "temperature": 1}
    data = request("POST", "/v1/completions", json.dumps(body).encode(), HOSTILE)

    async def one() -> None:
        for _ in range(4):
            wire = await Wire.open(storm.port)
            try:
                answer = await _said(storm, wire, data, f"a flood of {body}")
            finally:
                wire.close()
            if answer is None or answer.status != 429:
                return
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        for _ in range(rng.choice((10, 25, 50))):
            group.create_task(one())
    await asyncio.sleep(rng.random())
    return "floods"


async def lazy(storm: Any, rng: random.Random) -> str:
    """Read a stream slowly, or never, and leave."""
    wire = await Wire.open(storm.port, small=True)
    until, slowly = time.monotonic() + rng.choice((0.5, 2, 5)), rng.random() < 0.5
    try:
        await wire.send(_stream(rng))
        while time.monotonic() < until:
            await asyncio.sleep(rng.choice((0.01, 0.1)))
            if slowly:
                async with asyncio.timeout(until - time.monotonic()):
                    await wire.more()
    except TimeoutError:
        pass
    except Closed:
        return "slow readers that were served"
    finally:
        _leave(wire, rng)
    return "slow readers" if slowly else "who never read"


async def vanish(storm: Any, rng: random.Random) -> str:
    """Leave while sending, before the answer, or within it."""
    wire, when = await Wire.open(storm.port), rng.choice(("while sending", "before the answer", "within the answer"))
    data = _stream(rng) if rng.random() < 0.7 else request("POST", "/v1/embeddings", b'{"input": ["a", "b"]}', HOSTILE)
    if when == "while sending" and rng.random() < 0.3:
        data = request("POST", "/tokenize", b'{"prompt": "' + b"a" * 1_000_000, HOSTILE)
    if when != "while sending" and rng.random() < 0.2:
        data += request("GET", "/health")  # another request waits behind the one that is left
    try:
        await wire.send(data[: rng.randrange(len(data))] if when == "while sending" else data)
        if when == "within the answer":
            async with asyncio.timeout(rng.choice((0.2, 1, 3))):  # it may still be in the queue
                for _ in range(rng.randrange(1, 6)):
                    await wire.more()
        await asyncio.sleep(rng.choice((0, 0.005, 0.1)))
        if rng.random() < 0.2:
            wire.say_no_more()
            await asyncio.sleep(0.2)
    except (Closed, TimeoutError):
        pass
    finally:
        _leave(wire, rng)
    return f"who left {when}"


def _leave(wire: Wire, rng: random.Random) -> None:
    if rng.random() < 0.5:
        wire.vanish()
    else:
        wire.close()


# (method, path, statuses by key: of the hostile tenant, of the admin, wrong, none)
LOOKS = (
    ("GET", "/v1/models", 200, 200, 401, 401),
    ("GET", "/v1/models/tiny", 200, 200, 401, 401),
    ("GET", "/v1/models/%00%ff..%2f" + "a" * 300, 404, 404, 401, 401),
    ("GET", "/debug/flight", 200, 200, 401, 401),
    ("GET", "/health", 200, 200, 200, 200),
    ("GET", "/ready", 200, 200, 200, 200),
    ("GET", "/version", 200, 200, 200, 200),
    ("GET", "/metrics", 200, 200, 200, 200),
    ("HEAD", "/metrics", 200, 200, 200, 200),
    ("GET", "/nowhere", 404, 404, 404, 404),
    ("GET", "/v1/completions", 405, 405, 405, 405),
    ("DELETE", "/v1/models", 405, 405, 405, 405),
    ("OPTIONS", "/v1/completions", 405, 405, 405, 405),
    ("POST", "/metrics?a=b", 405, 405, 405, 405),
)


async def look(storm: Any, rng: random.Random) -> str:
    """Whatever there is to see, by anybody; nobody sees what concerns others."""
    method, path, *statuses = rng.choice(LOOKS)
    who, key = rng.choice(list(enumerate((HOSTILE, KEYS["boss"], "wrong", None))))
    since, said = time.monotonic(), f"{method} {path} with the key {key}"
    answer = await ask(storm.port, request(method, path, None, key), head=method == "HEAD")
    storm.judge.answer(answer, said, since)
    away = answer.status == 503 and storm.judge.excused(since)
    if answer.status != statuses[who] and not away:
        storm.judge.complain(f"{said}\n  got {answer.status}: {answer.body[:200]!r}")
    names = [b'tenant="', b'tenant": "'] if key != HOSTILE else [b'"quiet"', b'"busy"', b'tenant="']
    if key != KEYS["boss"] and any(name in answer.body for name in names):
        storm.judge.complain(f"{said}\n  told of other tenants: {answer.body[:300]!r}")
    await asyncio.sleep(rng.random() * 0.3)
    return "looks"


CLIENTS: tuple[tuple[Move, int], ...] = (
    (random_bodies, 9),
    (long_texts, 1),
    (flood, 1),
    (at_once, 3),
    (endless, 3),
    (lazy, 3),
    (vanish, 3),
    (look, 2),
)
"""How many of each there are."""
