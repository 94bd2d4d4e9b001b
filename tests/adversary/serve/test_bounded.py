"""What a stranger sends is bounded before it costs: headers, rows, texts, vectors, and an engine that does not read."""

import asyncio
import http.client
import json
import os
import resource
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import msgspec
import pytest

from hibachi.errors import PromptTooLong
from hibachi.llm.dialects.errors import Refused
from hibachi.server import streaming, tokenizing
from hibachi.server.tokenizing import Tokenizing
from hibachi.server.web.deadlines import MOST_BYTES

from ...engine.models import until
from ...serve import test_run
from ...serve.conftest import CHATML, ENGINES, site
from ...serve.test_metrics import scrape

WHICH = pytest.mark.parametrize("which", ENGINES)


def resident(pid):
    """MiB"""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


@contextmanager
def connected(port):
    with socket.create_connection(("127.0.0.1", int(port)), timeout=20) as sock:
        yield sock


def answer_of(sock):
    """All that comes until the end."""
    found = b""
    with suppress(ConnectionResetError):
        while data := sock.recv(65536):
            found += data
    return found.decode()


def alive(server):
    """Seconds until /health has answered."""
    began = time.monotonic()
    assert server.ask("GET", "/health")[0] == 200
    return time.monotonic() - began


# ---- headers (finding 2) -------------------------------------------------------------------------------------------


def test_2_headers_without_end_cost_no_memory(start):
    server = start("--engine", "own").ready()
    before = resident(server.popen.pid)

    def flood(_):
        with connected(server.port) as sock, suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n")
            for _ in range(300):
                sock.sendall(b"X-Filler: " + b"a" * 2**20 + b"\r\n")

    with ThreadPoolExecutor(4) as pool:
        flooding = pool.map(flood, range(4))
        assert max(alive(server) for _ in range(20)) < 1
        list(flooding)
    assert resident(server.popen.pid) - before < 20
    assert "431 code=headers_too_large" in server.wait_for("headers_too_large")


@pytest.fixture(scope="module")
def small():
    with (
        ENGINES["child"]("tiny", max_num_seqs=4, max_num_queued_reqs=4) as texts,
        site(texts, chat_template=CHATML) as here,
    ):
        yield here


HEADERS = {
    "in one": b"X-Long: " + b"a" * MOST_BYTES + b"\r\n",
    "many": b"X-A: b\r\n" * 129,
    "many long ones": b"".join(b"X-%d: %s\r\n" % (n, b"a" * 1000) for n in range(100)),
}


@pytest.mark.parametrize("headers", HEADERS.values(), ids=HEADERS.keys())
@pytest.mark.parametrize("path", ["/health", "/nope"])
def test_2_headers_that_are_too_large(small, headers, path):
    with connected(small.port) as sock:
        sock.sendall(b"GET %s HTTP/1.1\r\nHost: a\r\n%s\r\n" % (path.encode(), headers))
        sock.settimeout(5)
        found = sock.recv(65536).decode()
    assert found.startswith("HTTP/1.1 431 ") and '"code":"headers_too_large"' in found


@pytest.mark.parametrize(
    "request_",
    [b"GET /ready HTTP/1.1\r\n\r\n", b"GET /ready HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"nonsense\r\n\r\n"],
)
def test_20_what_is_no_http_is_told_as_json(small, request_):
    with connected(small.port) as sock:
        sock.sendall(request_)
        found = sock.recv(65536).decode()
    assert found.startswith("HTTP/1.1 400 ") and json.loads(found.partition("\r\n\r\n")[2])["error"]["code"]


def test_20_of_two_keys_none_counts(small):
    headers = [("Authorization", "Bearer a"), ("Authorization", "Bearer b")]
    assert small.client.get("/v1/models", headers=headers).status_code == 400


def test_19_no_redirect_names_the_host_of_the_client(small):
    answer = small.client.post("/v1/completions/", json={"prompt": "a"}, headers={"Host": "evil.example"})
    assert answer.status_code == 404 and "location" not in answer.headers


# ---- rows (findings 3 and 16) --------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{"n": 128}, {"best_of": 128}, {"n": 2, "best_of": 128}])
@WHICH
def test_3_rows_are_counted_before_anything_is_made_of_them(which, more, monkeypatch):
    with (
        ENGINES[which]("tiny", max_num_seqs=4, max_num_queued_reqs=4) as texts,
        site(texts, max_num_queued_reqs=4) as here,
    ):
        monkeypatch.setattr(texts.engine, "check", None)
        answer = here.post("/v1/completions", {"prompt": ["a"] * 1024, **more})
        assert answer.status_code == 400 and "at most 8 fit in at once" in answer.json()["error"]["message"]
        answer = here.post("/v1/completions", {"prompt": ["a"] * 8, "max_tokens": 2, "n": 1})
        assert answer.status_code == 500, "these would have been made"


@WHICH
def test_3_a_queue_without_room_is_found_before_anything_is_made(which, monkeypatch):
    with ENGINES[which]("tiny", max_num_seqs=4, max_num_queued_reqs=4) as texts, site(texts) as here:
        made = []
        prepare = texts.engine.check
        monkeypatch.setattr(texts.engine, "check", lambda *a, **k: made.append(1) or prepare(*a, **k))
        answer = here.post("/v1/completions", {"prompt": ["a"] * 9})
        assert answer.status_code == 429 and not made
        assert len(here.complete(["a"] * 4, n=2)["choices"]) == 8


def test_16_most_new_tokens_are_the_operators(small):
    with site(small.served.what, max_tokens=5) as here:
        for asked in (None, 3, 5, 100):
            body = {} if asked is None else {"max_tokens": asked}
            used = here.post("/v1/completions", {"prompt": "a", "ignore_eos": True} | body).json()["usage"]
            assert used["completion_tokens"] == min(asked or 16, 5)


# ---- texts (finding 5) ---------------------------------------------------------------------------------------------

LONG = "word " * (3 * 2**20)


def test_5_a_text_that_must_be_too_long_is_not_read(small, monkeypatch):
    monkeypatch.setattr(type(small.texts.tokenizer), "encode", None)
    for body in ({"prompt": LONG}, {"prompt": ["a", LONG]}):
        answer = small.post("/v1/completions", body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    answer = small.post("/v1/embeddings", {"input": LONG})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    with pytest.raises(PromptTooLong, match="cut into tokens"):
        small.texts.generate(LONG)
    ids = small.post("/v1/completions", {"prompt": [5] * 10**6})
    assert ids.json()["error"]["code"] == "context_length_exceeded"


SLEEPY = '''
import time
import numpy as np

class Sleepy:
    """Reads a text for a second for each thousand characters, in this thread."""

    vocab_size, max_model_len = 256, 100_000

    class tokenizer:
        @staticmethod
        def encode(text):
            time.sleep(len(text) / 1e4)
            return list(text.encode())[:8]
        decode = staticmethod(lambda ids: bytes(ids).decode("latin-1"))

    deterministic = False  # no calls but those of requests

    def logits(self, tokens, lengths):
        return np.eye(256, dtype=np.float32)[tokens[:, -1]] * 10
'''


@pytest.fixture
def sleepy(tmp_path):
    file = tmp_path / "sleepy.py"
    file.write_text(SLEEPY)
    with ENGINES["own"](f"{file}:Sleepy", max_num_seqs=4) as texts, site(texts) as here:
        yield here


def test_5_who_sends_a_long_text_holds_up_nobody(sleepy):
    with ThreadPoolExecutor(3) as pool:
        bodies = [{"prompt": "x" * 30_000, "max_tokens": 1}, {"prompt": "x" * 20_000, "max_tokens": 1}]
        asked = [pool.submit(sleepy.post, "/v1/completions", body) for body in bodies]
        asked.append(pool.submit(sleepy.post, "/tokenize", {"prompt": "x" * 20_000}))
        time.sleep(0.2)
        worst = 0.0
        while not all(a.done() for a in asked):
            began = time.monotonic()
            assert sleepy.client.get("/health").status_code == 200
            worst = max(worst, time.monotonic() - began)
        assert worst < 1, "a text was read by the event loop"
        assert [a.result().status_code for a in asked] == [200] * 3


WIDE = (16 << 20) - 100
HELLO = b'"messages":[{"role":"user","content":"a"}]'
MANY = {
    "/v1/chat/completions": b"{" + HELLO + b',"tools":[%s]}',
    "/v1/responses": b'{"input":[%s]}',
    "/v1/messages": b'{"model":"tiny","max_tokens":1,' + HELLO + b',"tools":[%s]}',
    "/v1/completions": b'{"prompt":[%s]}',
    "/v1/generate": b'{"prompt":[%s]}',
    "/tokenize": b'{"messages":[%s]}',
}


@pytest.mark.parametrize("path", MANY)
def test_5_bodies_of_very_many_values_are_not_read(small, path, monkeypatch):
    def never(*_):
        raise AssertionError("it was read")

    monkeypatch.setattr(msgspec.json, "decode", never)
    body = MANY[path] % (b"[]," * (WIDE // 3))
    answer = small.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413 and "too many values" in answer.text


def test_5_nor_are_those_of_msgpack(small):
    """Reading these held the event loop for a second."""
    body = b"\x81\xa6prompt\xdd" + (WIDE - 12).to_bytes(4, "big") + b"\x90" * (WIDE - 12)
    answer = small.client.post("/v1/generate", content=body, headers={"Content-Type": "application/msgpack"})
    assert answer.status_code == 413 and "too many values" in answer.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_5_long_answers_are_written_beside_the_event_loop(path, small, monkeypatch):
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "prompt": "a"}
    fields = {"/v1/completions": ("prompt", "max_tokens"), "/v1/responses": ()}.get(path, ("messages", "max_tokens"))
    body = {"model": "tiny", "temperature": 0} | {name: asked[name] for name in fields}
    if path == "/v1/responses":
        body |= {"input": "a", "max_output_tokens": 9}
    seen, encode = [], streaming.encode

    def noted(answer):
        seen.append(threading.current_thread().name)
        return encode(answer)

    monkeypatch.setattr(streaming, "encode", noted)
    answers = []
    for most in (8, 99 if path == "/v1/responses" else 9):  # there the answer repeats its request
        monkeypatch.setattr(streaming, "LONG", most)
        answer = small.post(path, body).json()
        answers.append({name: value for name, value in answer.items() if name in ("choices", "content", "output")})
    assert "hibachi-short" in seen[0] and "hibachi-short" not in seen[1]
    assert path == "/v1/responses" or answers[0] == answers[1]


def test_5_a_long_prompt_is_written_beside_the_event_loop_before_its_text(small, monkeypatch):
    """It is the first chunk of a stream, and of each continuation."""
    body = {"prompt": [97, 98, 99], "max_tokens": 3, "temperature": 0, "n": 2, "echo": True, "logprobs": 1}
    whole = small.post("/v1/completions", body).json()["choices"]
    seen, events = [], streaming._events

    def noted(writer, chunks):
        seen.append("hibachi-short" in threading.current_thread().name)
        return events(writer, chunks)

    monkeypatch.setattr(streaming, "_events", noted)
    for most in (11, 12):  # 3 tokens, 2 numbers each, 2 continuations
        monkeypatch.setattr(streaming, "LONG", most)
        seen.clear()
        *lines, done, _ = small.post("/v1/completions", body | {"stream": True}).text.split("\n\n")
        assert done == "data: [DONE]" and seen == [most == 11, *[False] * (len(seen) - 1)]
        each = [choice for line in lines for choice in json.loads(line.removeprefix("data: "))["choices"]]
        for choice in whole:
            own = [part for part in each if part["index"] == choice["index"]]
            tokens = [token for part in own if part["logprobs"] for token in part["logprobs"]["tokens"]]
            assert "".join(part["text"] for part in own) == choice["text"]
            assert tokens == choice["logprobs"]["tokens"]


async def whole(reading, size, tenant=""):
    """Once as much as this may be read: two at once, of half that size each."""
    while True:
        try:
            return all(await asyncio.gather(*(reading.run(size // 2, lambda: 9, tenant) for _ in range(2))))
        except Refused:
            await asyncio.sleep(0.01)


def test_5_long_texts_wait_for_long_texts_only_and_not_without_end(monkeypatch):
    monkeypatch.setattr(tokenizing, "MOST", 1_000_000)
    gate = threading.Event()

    async def main():
        reading = Tokenizing()
        long = [asyncio.ensure_future(reading.run(400_000, gate.wait)) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert await asyncio.wait_for(reading.run(5_000, lambda: 7), 20) == 7
        assert await reading.run(10, lambda: 8) == 8
        with pytest.raises(Refused, match="Too much text of yours waits"):
            await reading.run(400_000, gate.wait)
        long[1].cancel()  # who leaves before it begins
        gate.set()
        assert await long[0]
        with pytest.raises(ZeroDivisionError):
            await reading.run(5_000, lambda: 1 // 0)
        assert await whole(reading, 1_000_000)  # nothing is held of those before

    try:
        asyncio.run(asyncio.wait_for(main(), 20))
    finally:
        gate.set()


def test_5_a_tenants_texts_wait_for_one_of_another_at_most():
    gate = threading.Event()

    async def main():
        reading = Tokenizing()
        many = [asyncio.ensure_future(reading.run(5_000, gate.wait, "a")) for _ in range(9)]
        await asyncio.sleep(0.01)
        assert await asyncio.wait_for(reading.run(5_000, lambda: 7, "b"), 20) == 7
        many[-1].cancel()
        await asyncio.sleep(0)
        gate.set()
        assert all(await asyncio.gather(*many[:-1])) and await whole(reading, tokenizing.MOST, "a")

    try:
        asyncio.run(asyncio.wait_for(main(), 20))
    finally:
        gate.set()


def test_5_one_text_larger_than_the_bound_goes_if_nothing_waits(monkeypatch):
    monkeypatch.setattr(tokenizing, "MOST", 10_000)
    assert asyncio.run(Tokenizing().run(50_000, lambda: 1)) == 1


# ---- vectors (finding 7) -------------------------------------------------------------------------------------------


@WHICH
def test_7_vectors_are_counted_cancelled_and_measured_as_texts_are(which):
    with ENGINES[which]("tiny", max_num_seqs=2, max_num_queued_reqs=30) as texts, site(texts) as here:
        answer = here.post("/v1/embeddings", {"input": ["a"] * 33})
        assert answer.status_code == 429 and answer.json()["error"]["code"] == "queue_full"
        assert here.post("/v1/embeddings", {"input": ["a", "b"]}).status_code == 200
        with pytest.raises(Exception, match="timed out"):
            here.client.post("/v1/embeddings", json={"input": ["hello world " * 40] * 30}, timeout=0.05)
        until(lambda: texts.engine.health().state == "idle" and not scrape(here)["hibachi_requests_open"])
        found = scrape(here)
    assert found["hibachi_requests_rejected_total", "queue_full", "429"] == 1
    assert found["hibachi_requests_finished_total", "stop"] == 1
    assert found["hibachi_requests_finished_total", "cancelled"] == 1
    assert found["hibachi_prompt_tokens_total"] < 31 * 200, "the ones whose client left were not computed"


def test_7_vectors_have_a_deadline():
    with ENGINES["own"]("tiny", max_num_seqs=1) as texts, site(texts, request_timeout=1e-4) as here:
        answer = here.post("/v1/embeddings", {"input": ["hello world " * 40] * 30})
        assert answer.status_code == 408 and answer.json()["error"]["code"] == "deadline_exceeded"


# ---- an engine that does not read (finding 6) ----------------------------------------------------------------------


@pytest.mark.parametrize("how", [pytest.param("stopped", marks=pytest.mark.slow), "hangs"])
def test_6_an_engine_that_does_not_read_takes_nothing_else_down(start, model, how):
    server = start("--model", model, "--stall-after", "1", "--drain-timeout", "1").ready()
    if how == "stopped":
        os.kill(server.engine, signal.SIGSTOP)
    with ThreadPoolExecutor(40) as pool:
        if how == "hangs":
            pool.submit(server.ask, "POST", "/v1/completions", {"prompt": "hog", "max_tokens": 2})
        body = {"prompt": [5] * 400, "max_tokens": 2}
        asked = [pool.submit(server.ask, "POST", "/v1/completions", body) for _ in range(80)]
        slowest = 0.0
        for _ in range(15):
            began = time.monotonic()
            server.ask("GET", "/health")
            server.ask("GET", "/metrics")
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.1)
        assert slowest < 1
        until(lambda: server.ask("GET", "/health")[0] == 503)
        status, headers, text = server.ask("POST", "/v1/completions", body)
        assert status == 503 and json.loads(text)["error"]["code"] == "engine_stalled" and headers["Retry-After"]
        began = time.monotonic()
        server.popen.send_signal(signal.SIGTERM)
        server.popen.wait(20)
        assert time.monotonic() - began < 1 + 3 + 0.5
        for one in asked:
            with suppress(Exception):
                one.result()
    with pytest.raises(ProcessLookupError):
        until(lambda: os.kill(server.engine, 0))


# ---- no descriptors left (finding 17) ------------------------------------------------------------------------------


FEW = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); from hibachi.cli import main; main()"


def test_17_running_out_of_descriptors_is_told_and_passes(start, monkeypatch):
    monkeypatch.setattr(test_run, "COMMAND", [test_run.COMMAND[0], "-c", FEW, "serve"])
    server = start().ready()
    many = []
    for _ in range(100):
        with suppress(OSError):
            many.append(socket.create_connection(("127.0.0.1", int(server.port)), timeout=1))
    server.wait_for("no file descriptors are left")
    for sock in many:
        sock.close()

    def answers():
        with suppress(OSError, http.client.HTTPException):
            return alive(server) < 5

    until(answers)


@WHICH
def test_who_leaves_with_a_request_behind_another_ends_the_one_being_answered(which):
    with ENGINES[which]("tiny", max_num_seqs=2) as texts, site(texts) as here:
        with connected(here.port) as sock:
            body = json.dumps({"prompt": "a", "max_tokens": 500, "ignore_eos": True}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            sock.sendall(
                head + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
            )
            until(lambda: texts.stats().running)
        until(lambda: not scrape(here)["hibachi_requests_open"])
        found = scrape(here)
    assert found["hibachi_requests_finished_total", "cancelled"] == 1


def test_2_headers_behind_a_request_that_is_being_answered_are_bounded_too(start):
    server = start("--engine", "own").ready()
    before = resident(server.popen.pid)
    with connected(server.port) as sock:
        body = json.dumps({"prompt": "a", "max_tokens": 500, "ignore_eos": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"GET /health HTTP/1.1\r\n")
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(100):
                sock.sendall(b"X-A: b\r\n" * 2**17)
    assert resident(server.popen.pid) - before < 20
    server.wait_for("headers_too_large")
