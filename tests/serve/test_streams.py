"""Clients that leave, and clients that read slowly."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest

from .conftest import ENGINES, site


def until(true, seconds=10.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def at_rest(server):
    """Nothing runs or waits, and all cache blocks are back."""
    stats = server.texts.stats()
    return not stats.running and not stats.waiting and stats.free_blocks == stats.blocks


def send(server, body, path="/v1/completions"):
    """A request on a socket of its own; the caller reads the answer, or leaves."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.sendall(head.encode() + data)
    return sock


LONG = {"prompt": "It is a truth", "max_tokens": 500, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module", params=ENGINES)
def slow(request, slow_model):
    """A server with sixteen rows, of a model that takes 50 ms or more for a step."""
    with ENGINES[request.param](slow_model, max_num_seqs=16) as texts, site(texts) as here:
        yield here


@pytest.mark.parametrize("stream", (True, False))
def test_who_leaves_frees_its_place_at_once(slow, stream):
    """V-40, over HTTP, and also before the first token."""
    until(lambda: at_rest(slow))
    before = slow.texts.stats().new_tokens
    sockets = [send(slow, {**LONG, "max_tokens": 400, "stream": stream, "n": 8}) for _ in range(4)]
    until(lambda: slow.texts.stats().running)
    for sock in sockets:
        sock.close()
    until(lambda: at_rest(slow))
    # 20 steps of 400: a second or more, in which a child, too, has said that they run.
    assert slow.texts.stats().new_tokens - before < 16 * 20


def test_who_leaves_while_it_waits_is_forgotten(server):
    busy = [send(server, {**LONG, "stream": True, "n": 8}) for _ in range(2)]  # all rows
    until(lambda: server.texts.stats().running == 16)
    late = [send(server, {**LONG, "stream": s}) for s in (True, False)]
    until(lambda: server.texts.stats().waiting == 2)
    for sock in late:
        sock.close()
    until(lambda: not server.texts.stats().waiting)
    for sock in busy:
        sock.close()
    until(lambda: at_rest(server))


def test_chunks_leave_when_the_step_ends(gated):
    """Each token is in a chunk of its own, which comes while the next step is still held."""
    gate, server = gated
    with send(server, {**LONG, "max_tokens": 20, "stream": True}) as sock, sock.makefile("rb") as answer:
        sock.settimeout(10)
        for i in range(20):
            gate.let()
            assert text_of(next(events(answer))) == chr(ord("h") + 1 + i)  # the prompt ends with "h"
        gate.open()
        assert not any(map(text_of, events(answer)))


def events(answer):
    """What a stream of chunks brings, but for the end."""
    for line in answer:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


def text_of(event):
    return "".join(choice["text"] for choice in event["choices"])


def test_a_slow_reader_is_waited_for_and_holds_up_nobody(server):
    """What it does not read is bounded: by the socket's buffers, and by pause_after tokens here."""
    slow = socket.create_connection(("127.0.0.1", server.port))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    data = json.dumps({**LONG, "stream": True, "n": 16, "logprobs": 20}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    slow.sendall(f"{head}\r\n\r\n".encode() + data)
    until(lambda: server.texts.health().paused == 16, 30)
    done = []

    def other():
        done.append(server.complete("Emma", max_tokens=50)["usage"]["completion_tokens"])

    threads = [threading.Thread(target=other) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert len(done) == 4
    assert server.texts.health().paused
    slow.close()
    until(lambda: at_rest(server))


def test_it_reads_on_and_gets_the_whole(server):
    sock = send(server, {**LONG, "max_tokens": 300, "stream": True, "logprobs": 20, "n": 4})
    time.sleep(1.0)
    got = b""
    while b"[DONE]" not in got:
        part = sock.recv(65536)
        assert part
        got += part
        time.sleep(0.002)
    sock.close()
    assert got.count(b'"token_logprobs"') >= 4
    assert got.count(b'"finish_reason":"length"') == 4


def test_request_ids_come_back(server):
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "abc-7"})
    assert answer.headers["x-request-id"] == "abc-7" and answer.json()["id"].startswith("cmpl-")
    again = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "abc-7"})
    assert again.json()["id"] != answer.json()["id"], "an answer's id is its own"
    mine = server.complete("a", max_tokens=1, request_id="mine-1")
    assert mine["id"] == "cmpl-mine-1"
    made = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "a b"})
    assert made.headers["x-request-id"] != "a b" and len(made.headers["x-request-id"]) == 24
    refused = server.post("/v1/completions", {"prompt": 1}, headers={"X-Request-Id": "bad-1"})
    assert refused.headers["x-request-id"] == "bad-1"


def test_prefix_hits_are_told(server):
    prompt = (
        "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want."
    )
    server.complete(prompt, max_tokens=2)
    again = server.complete(prompt, max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert again and again % 16 == 0
