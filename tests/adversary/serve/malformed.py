"""Bytes that are no request, or not yet, or two: what a server on an open port gets to read."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from .house import ARRIVAL, KEYS
from .wire import Broken, Closed, Wire, request

PROMPT = b'{"prompt": "She was", "max_tokens": 2}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEAD += f"Authorization: Bearer {KEYS['hostile']}\r\n".encode()
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
SLACK = 3.0  # seconds by which a busy machine may be late


def _many(rng: random.Random) -> bytes:
    names = (f"X-{i}: {rng.random()}" for i in range(rng.choice((129, 1000))))
    return request("GET", "/health", None, None, *names)


def _pipelined(rng: random.Random) -> bytes:
    kinds = (
        request("POST", "/v1/completions", PROMPT, KEYS["hostile"]),
        request("GET", "/health"),
        request("GET", "/nowhere"),
        request("POST", "/v1/completions", b"{", KEYS["hostile"]),
    )
    return b"".join(rng.choice(kinds) for _ in range(8))


# What is sent at once, and how it may be answered; 0: the connection is closed without a word.
AT_ONCE: dict[str, tuple[Callable[[random.Random], bytes], tuple[int, ...]]] = {
    "garbage": (lambda r: r.randbytes(r.choice((1, 20, 3000, 200_000))), (0, 400, 431)),
    "a handshake of TLS": (lambda r: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + r.randbytes(400), (0, 400)),
    "a large header": (lambda r: HEAD + b"X: " + b"a" * r.choice((70_000, 100_000)) + b"\r\n\r\n", (431,)),
    "a long path": (lambda r: request("GET", "/" + "a" * r.choice((1000, 70_000))), (400, 404, 431)),
    "many headers": (_many, (431,)),
    "two hosts": (lambda r: HEAD + b"Host: y\r\nContent-Length: 2\r\n\r\n{}", (400,)),
    "no host": (lambda r: b"GET /health HTTP/1.1\r\n\r\n", (400,)),
    "two lengths": (lambda r: HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", (0, 400)),
    "a negative length": (lambda r: HEAD + b"Content-Length: -1\r\n\r\n{}", (0, 400)),
    "a huge length": (lambda r: HEAD + b"Content-Length: %s\r\n\r\n" % (b"9" * r.choice((9, 18, 400))), (0, 400, 413)),
    "both lengths": (lambda r: CHUNKED[:-2] + b"Content-Length: 5\r\n\r\n0\r\n\r\n", (0, 400)),
    "bad chunks": (lambda r: CHUNKED + r.choice((b"zz", b"-1", b"2\r\n{}XX", b"f" * 40)) + b"\r\n", (0, 400, 413)),
    "another version": (lambda r: b"GET /health HTTP/%s\r\n\r\n" % r.choice((b"2.0", b"x")), (0, 200, 400, 505)),
    "another protocol": (lambda r: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (0, 400, 404, 405, 505)),
    "an upgrade": (
        lambda r: request("GET", "/health", None, None, "Connection: Upgrade", "Upgrade: websocket"),
        (200, 400, 426),
    ),
    "an expectation": (
        lambda r: HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(PROMPT) + PROMPT,
        (200, 429),
    ),
    "two keys": (lambda r: HEAD + b"Authorization: Bearer x\r\nContent-Length: 2\r\n\r\n{}", (400,)),
    "a method that is none": (lambda r: b"FROB /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", (0, 400, 405)),
    "pipelined requests": (_pipelined, (200, 400, 404, 429)),
}  # fmt: skip


async def at_once(storm: Any, rng: random.Random) -> str:
    name = rng.choice(list(AT_ONCE))
    made, allowed = AT_ONCE[name]
    data, since = made(rng), time.monotonic()
    wanted = 8 if name == "pipelined requests" else 1
    said = f"{name}: {data[:300]!r}"
    storm.judge.last.append(said)
    wire = await Wire.open(storm.port)
    got: list[int] = []
    try:
        await wire.send(data)
        while len(got) < wanted:
            answer = await wire.answer()
            storm.judge.answer(answer, said, since)
            got.append(answer.status)
    except TimeoutError:
        storm.judge.complain(f"{said}\n  was not answered, and not closed: {got}")
    except Closed:
        got = got if wanted > 1 else [0]
    except Broken as e:
        storm.judge.complain(f"{said}\n  was answered with what is no HTTP: {e}")
    finally:
        wire.close()
    if not set(got) <= {*allowed, *((503,) if storm.judge.excused(since) else ())}:
        storm.judge.complain(f"{said}\n  was answered with {got}; expected of {allowed}")
    await asyncio.sleep(rng.random() * 0.2)
    if len(got) != wanted:
        storm.judge.complain(f"{said}\n  {wanted} requests got {len(got)} answers: {got}")
    return name


# The beginning, and what comes on and on, or nothing.
ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "half a line": (HEAD[:20], b""),
    "half the headers": (HEAD, b""),
    "half a body": (HEAD + b"Content-Length: 900\r\n\r\n" + PROMPT[:9], b""),
    "half a chunk": (CHUNKED + b"40\r\n{", b""),
    "nothing": (b"", b""),
    "headers without end": (HEAD, b"X-More: a\r\n"),
    "a line without end": (b"GET /", b"a"),
    "a body without end": (HEAD + b"Content-Length: 900000\r\n\r\n", b" "),
    "chunks without end": (CHUNKED, b"1\r\n \r\n"),
}


async def endless(storm: Any, rng: random.Random) -> str:
    """The server must tire of it in time."""
    name = rng.choice(list(ENDLESS))
    begin, more = ENDLESS[name]
    since, said = time.monotonic(), f"{name}: {begin[-80:]!r}, then {more!r} on and on"
    wire = await Wire.open(storm.port)
    try:
        async with asyncio.timeout(ARRIVAL + SLACK):
            await wire.send(begin)
            sending = asyncio.ensure_future(_on_and_on(wire, more))
            try:
                while True:
                    answer = await wire.answer()
                    code = storm.judge.answer(answer, said, since)
                    if (answer.status, code) != (408, "arrival_timeout"):
                        storm.judge.complain(f"{said}\n  got {answer.status} {code}; expected 408")
                    if answer.headers.get("connection") == "close":
                        break
            finally:
                sending.cancel()
    except Closed:
        pass
    except Broken as e:
        storm.judge.complain(f"{said}\n  was answered with what is no HTTP: {e}")
    except TimeoutError:
        storm.judge.complain(f"{said}\n  was neither answered nor closed within {ARRIVAL + SLACK:g} s")
    finally:
        wire.close()
    return name


async def _on_and_on(wire: Wire, more: bytes) -> None:
    try:
        while more:
            await asyncio.sleep(0.05)
            await wire.send(more)
    except Closed:
        pass
