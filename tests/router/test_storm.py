"""The storm: a router before upstreams that fail, clients that leave, and reloads; every answer is accounted for.

A request may fail for what its upstreams have done to it, and for nothing else; every other one has its own answer,
whole. In the end nothing is held. HIBACHI_FUZZ_SEED says what is drawn; when it comes is up to the machine.
"""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import time
from collections import defaultdict
from contextlib import contextmanager

import pytest

from hibachi.router.upstreams import UpstreamState

from .conftest import JSON, eventually, request
from .mocks import CLOSE, RESET, chunk, error, of_json, sse

SEED = int(os.environ.get("HIBACHI_FUZZ_SEED", "7"))
CLIENTS, LIMIT, POLICIES = 20, 4, ("least-connection", "round-robin", "power-of-two", "prefix-affine")
CUT_OFF = "ASGI callable returned without completing response."  # what uvicorn says of answers that are cut off
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
# Before the first byte of an answer: another upstream is to be tried.
FAULTS = {
    "500": [error(500)],
    "502": [error(502)],
    "closed": [CLOSE],
    "reset": [RESET],
    "half a head": [b"HTTP/1.1 200 O", CLOSE],
    "no HTTP": [b"SSH-2.0\r\n\r\n", CLOSE],
}
OTHERS = {
    "busy": [error(429, "busy")],
    "busy for now": [error(503, "busy", b"Retry-After: 0")],
    "broke after the first byte": [CHUNKED, chunk(b'data: {"n'), 0.01, CLOSE],
}
DEEDS = FAULTS | OTHERS


class Storm:
    def __init__(self, here, mocks, seed, count):
        self.here, self.mocks, self.seed, self.numbers = here, mocks, seed, iter(range(count))
        self.lock, self.wrong, self.right = threading.Lock(), [], 0
        self.attempts = defaultdict(list)  # of each request: (upstream, what it did)
        self.deaths = []  # when an upstream ended, was told to, or left the configuration
        for mock in mocks:
            mock.script = lambda r, mock=mock: self.answer(mock, r)

    def drawn(self, n):
        return random.Random(f"{self.seed} {n}")

    def answer(self, mock, r):
        n, streams = int(r[b"x-test"]), r.json.get("stream")
        rng = self.drawn(f"{n} attempt {len(self.attempts[n])}")
        deed = rng.choice(list(DEEDS)) if rng.random() < (0.2 if self.attempts[n] else 0.12) else "answer"
        self.attempts[n].append((mock, deed))
        yield rng.choice((0.0, 0.005, 0.05))
        if deed != "answer":
            yield from DEEDS[deed]
        elif streams:
            yield from sse([b'data: {"n": %d, "i": %d}\n\n' % (n, i) for i in range(3)], 0.002)
        else:
            yield of_json({"n": n})

    def client(self):
        while (n := next(self.numbers, None)) is not None:
            rng, since = self.drawn(n), time.monotonic()
            generates, streams = rng.random() < 0.85, rng.random() < 0.5
            path = "/v1/completions" if generates else "/v1/whatever"
            body = json.dumps({"model": "m", "n": n, "stream": streams, "prompt": "y" * rng.randrange(3000)})
            with self.here.wire() as wire:
                wire.send(request("POST", path, body.encode(), JSON, b"X-Test: %d" % n))
                if rng.random() < 0.08:
                    time.sleep(rng.random() / 20)
                    continue  # it leaves
                try:
                    answer = wire.answer()
                except EOFError:
                    answer = None
            why = self.judged(n, answer, generates, streams, since)
            with self.lock:
                self.wrong += [f"{n}: {why}; {answer} after {self.attempts[n]}"] if why else []

    def judged(self, n, answer, generates, streams, since):
        """What is wrong with it."""
        tried = self.attempts[n]
        faults = [mock for mock, deed in tried if deed in FAULTS]
        broke = [i for i, (_, deed) in enumerate(tried) if deed == "broke after the first byte"]
        if len(faults) > (2 if generates else 1) or len(set(faults)) < len(faults):
            return "failed at too many upstreams, or twice at one"
        if broke and broke[0] != len(tried) - 1:
            return "sent again after the first byte of an answer"
        if answer is None or not answer.whole:
            return None if broke or self.died(since) else "no whole answer, and none was broken"
        if answer.status == 200:
            data = [b'data: {"n": %d, "i": %d}\n\n' % (n, i) for i in range(3)]
            came, broken, _ = answer.body.partition(b'data: {"error":')
            if streams and broken and b"".join(data).startswith(came):
                return None if self.died(since) else "ended by an error, and none was broken"
            self.right += 1
            return None if answer.body == (b"".join(data) if streams else b'{"n": %d}' % n) else "another's answer"
        if not answer.error["message"]:
            return "an error in no form"
        excused = len(faults) > (1 if generates else 0) or broke or self.died(since)
        return None if excused or (tried and tried[-1][1] in OTHERS) else "failed, and should not have"

    def died(self, since):
        return any(when >= since - 0.5 for when in self.deaths)

    def trouble(self, over, written):
        """Upstreams end and begin again, or leave the configuration and come back; one at a time."""
        rng = self.drawn("trouble")
        while not over.wait(rng.expovariate(8)):
            mock = rng.choice(self.mocks)
            self.deaths.append(time.monotonic())
            if stopped := rng.random() < 0.5:
                mock.stop(gently=rng.random() < 0.3)
            else:
                written(self.mocks, without=mock)
                self.here.call(self.here.router.reload)
            time.sleep(rng.uniform(0.02, 0.3))
            self.deaths.append(time.monotonic())
            if stopped:
                mock.start()
            else:
                written(self.mocks)
            self.here.call(self.here.router.reload)

    def watch(self, over):
        while not over.wait(0.002):
            fleet = self.here.router.fleet
            for u in (*fleet.upstreams, *fleet.leaving):
                if not 0 <= u.in_flight <= LIMIT:
                    self.wrong.append(f"{u.name} has {u.in_flight} requests and may have {LIMIT}")


@contextmanager
def threads(*calls):
    running = [threading.Thread(target=call, args=args) for call, *args in calls]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        for thread in running:
            thread.join()


@pytest.mark.parametrize(
    "seed, count", [(SEED, 800), *(pytest.param(SEED + i, 10_000, marks=pytest.mark.slow) for i in range(2))]
)
def test_the_storm(mock, route, tmp_path, caplog, seed, count):
    mocks, file, over = [mock("m") for _ in range(5)], tmp_path / "route.toml", threading.Event()

    def written(places, without=None):
        tables = (f"[[upstream]]\nurl = '{m.url}'\nlimit = {LIMIT}\n" for m in places if m is not without)
        (tmp_path / "new").write_text("".join(tables))
        (tmp_path / "new").rename(file)
        return str(file)

    policy = POLICIES[seed % len(POLICIES)]
    here = route(config=written(mocks), policy=policy, wait_for=5.0, check_interval=0.1, resolve_interval=0)
    storm = Storm(here, mocks, seed, count)
    with threads((storm.trouble, over, written), (storm.watch, over)):
        try:
            with threads(*[(storm.client,)] * CLIENTS):
                pass
        finally:
            over.set()
    assert not storm.wrong, (len(storm.wrong), storm.wrong[:5])
    assert storm.right > count * 0.7
    fleet = here.router.fleet
    eventually(lambda: len(fleet.upstreams) == 5 and all(u.state is UpstreamState.UP for u in fleet.upstreams))
    eventually(lambda: not any(u.in_flight for u in (*fleet.upstreams, *fleet.leaving)))
    eventually(lambda: here.waiting == here.router.forwarder.meter.running == 0)
    errors = [r.getMessage() for r in caplog.get_records("call") if r.levelno >= logging.ERROR]
    assert not [words for words in errors if words != CUT_OFF]
