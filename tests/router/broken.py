"""Upstreams that are broken in one way each, as hand-made bytes, beside one that is good."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

from .conftest import Here
from .mocks import CLOSE, Answer, Mock, chunk, error, of_json, sse

CHAT = "/v1/chat/completions"
BODY = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "Emma"}]}'
EVENT = b'data: {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
FAILED = b'data: {"error": {"message": "no", "type": "server_error", "param": null, "code": null}}\n\n'
HEAD = next(iter(sse(())))
CUT = [HEAD, chunk(EVENT), 0.0, CLOSE]
GOOD = 0.02  # seconds to the first byte of a good answer

KINDS: dict[str, Callable[[int], Answer]] = {  # of the number of the request
    "cuts the stream": lambda n: CUT,
    "ends without its end": lambda n: sse([EVENT, EVENT]),
    "error first": lambda n: sse([FAILED, DONE]),
    "200 with an error": lambda n: [of_json({"error": {"message": "no", "type": "server_error", "code": None}})],
    "500": lambda n: [error(500)],
    "closes": lambda n: [CLOSE],
    "slow, then cuts": lambda n: [0.1, HEAD, chunk(EVENT), 0.05, CLOSE],
    "alternates": lambda n: CUT if n % 2 else sse([EVENT, DONE]),
}


def good() -> Mock:
    return Mock("m", script=lambda r: [GOOD, *sse([EVENT, DONE])]).start()


def broken(kind: str) -> Mock:
    """Its checks are good, and quick."""
    number, script = count(), KINDS[kind]
    return Mock("m", script=lambda r: script(next(number))).start()


def ask_all(here: Here, requests: int, at_once: int) -> None:
    """Streams of chats, so many at a time."""
    left = iter(range(requests))
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                if next(left, None) is None:
                    return
            here.ask(CHAT, BODY)

    clients = [threading.Thread(target=client) for _ in range(at_once)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
