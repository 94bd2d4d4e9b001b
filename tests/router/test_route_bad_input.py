"""Whatever comes from either side: a clear answer, no mistake of the router's, no hang, and the next one is served."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from hibachi.router.policies import Homes
from hibachi.router.upstreams import UpstreamState

from .conftest import BODY, JSON, ROOT, Here, eventually, request
from .mocks import CLOSE, HANG, RESET, chunk, error, full, of_json, sse

EVENTS = [b'data: {"n": %d}\n\n' % n for n in range(4)]
CUT_OFF = "ASGI callable returned without completing response."
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def no_mistakes(caplog):
    """The router makes none of its own: nothing in the log is an error, but for what uvicorn says of answers that are
    cut off (`test_an_answer_that_is_cut_off_is_no_mistake_of_ours`).
    """
    yield
    errors = [r.getMessage() for r in caplog.get_records("call") if r.levelno >= logging.ERROR]
    assert not [words for words in errors if words != CUT_OFF]


pytestmark = pytest.mark.usefixtures("no_mistakes")


def still_serves(here: Here) -> None:
    eventually(lambda: here.router.fleet.ready)
    assert here.ask().status == 200
    eventually(lambda: all(u.in_flight == 0 for u in here.router.fleet.upstreams))


def said(here: Here, data: bytes) -> bytes:
    """What the router says to these bytes until it closes."""
    with here.wire() as wire:
        return wire.send(data).rest()


# ---- requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
def test_what_is_no_json_object(mock, route, path):
    one = mock()
    here = route(one)
    for body in (b"{", b"[]", b"\xff\xfe", b'{"model": "\xff"}', b'{"model": 5}', b'{"model": NaN}', b"\0" * 9):
        answer = here.ask(path, body)
        assert answer.status == 400, answer.body
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["code"] == "invalid_json" or answer.error["param"] == "model"
    assert not one.requests
    still_serves(here)


def test_a_model_nobody_has_and_none_where_there_are_several(mock, route):
    here = route(mock("a"), mock("b"))
    unknown = here.ask("/v1/chat/completions", b'{"model": "c"}')
    none = here.ask("/v1/chat/completions", b"{}")
    assert (unknown.status, unknown.error["param"], unknown.error["code"]) == (404, "model", "model_not_found")
    assert (none.status, none.error["param"], none.error["code"]) == (400, "model", "model_missing")
    for answer in (unknown, none):
        assert answer.error["message"].endswith("a, b.")
        assert answer[b"content-type"] == b"application/json"


def test_a_model_with_odd_letters_is_told_in_one_line(mock, route):
    here = route(mock("a"))
    answer = here.ask("/v1/completions", json.dumps({"model": "x\r\nSet-Cookie: a=b\0" + "y" * 9000}).encode())
    assert answer.status == 404 and len(answer.body) < 1000
    assert not answer.all(b"set-cookie")


def test_where_all_are_ill_each_one_says_why(mock, route):
    refusing, ill, odd, locked = (mock() for _ in range(4))
    refusing.stop()
    ill.check = lambda r: [error(503)]
    odd.check = lambda r: [full(200, b'{"data": 5}')]
    locked.check = lambda r: [error(401)]
    answer = route(refusing, ill, odd, locked, wait_for=0.2).ask()
    assert answer.status == 503 and answer[b"retry-after"]
    words = answer.error["message"]
    assert f"{refusing.url}: no connection (" in words
    assert f"{ill.url}: it answered a check (GET /v1/models) with 503" in words
    assert f"{odd.url}: it answered a check (GET /v1/models) with something else" in words
    assert f"{locked.url}: it answered a check with 401: it wants a key" in words


@pytest.mark.parametrize(
    "lines",
    [
        [b"Content-Length: 32", b"Transfer-Encoding: chunked"],
        [b"Transfer-Encoding: chunked", b"Content-Length: 32"],
        [b"Content-Length: 32", b"Content-Length: 31"],
        [b"Content-Length: 32", b"Content-Length: 32"],
        [b"Content-Length: 32, 32"],
        [b"Content-Length: +32"],
        [b"Content-Length: -1"],
        [b"Content-Length: 0x20"],
        [b"Content-Length: 99999999999999999999999"],
        [b"Transfer-Encoding: xchunked"],
        [b"Transfer-Encoding: chunked, identity"],
        [b"Transfer-Encoding : chunked"],
        [b"Content-Length : 32"],
    ],
    ids=lambda lines: b" & ".join(lines).decode(),
)
def test_bodies_whose_end_can_be_read_in_two_ways(mock, route, lines):
    """Refused, so that nobody smuggles a request (RFC 9112, 6.3)."""
    one = mock()
    here = route(one)
    smuggled = b"0\r\n\r\n" + request("POST", "/v1/smuggled", BODY)
    answer = said(here, request("POST", "/v1/completions", None, JSON, *lines) + BODY + smuggled)
    assert not answer or re.match(rb"HTTP/1.1 4(00|13) ", answer), answer
    assert answer.count(b"HTTP/1.1") < 2 and not one.requests
    still_serves(here)


@pytest.mark.parametrize(
    "line",
    [
        b"X-A: a\rSet-Cookie: b", b"X-A: a\nX-B", b"X-A: a\0b", b"X A: b", b"X-A\r: b", b": b", b"X-A",
        b"X-A: a\r\n folded: b", b"X-A: \x01", b"Host: another",
    ],
)  # fmt: skip
def test_headers_that_are_none(mock, route, line):
    """400, or at most a header with that value: never two."""
    one = mock()
    here = route(one)
    with here.wire() as wire:
        answer = wire.send(request("POST", "/v1/completions", BODY, line)).answer()
    assert answer.status in (200, 400)
    for r in one.requests:
        assert answer.status == 200 and {n.lower() for n, _ in r.headers} <= {b"host", b"content-length", b"x-a"}
        assert not any(c in value for _, value in r.headers for c in b"\r\n\0")
    still_serves(here)


def test_headers_in_latin_1_and_paths_with_odd_bytes(mock, route):
    one = mock()
    here = route(one)
    with here.wire() as wire:
        answer = wire.send(request("POST", "/v1/completions", BODY, b"X-A: \xe9")).answer()
        assert (answer.status, answer.error["code"]) == (400, "invalid_http")
    with here.wire() as wire:
        answer = wire.send(request("GET", b"/v1/\xc3\xa9")).answer()
        assert (answer.status, answer.error["code"]) == (400, "invalid_http")
    assert not one.requests
    still_serves(here)


@pytest.mark.parametrize(
    "lines", [[b"X-A: " + b"x" * 70_000], [b"X-%d: 1" % n for n in range(200)], [b"X-A: " + b"x" * 10_000_000]]
)
def test_heads_that_are_too_large(mock, route, lines):
    one = mock()
    here = route(one)
    with here.wire() as wire:
        try:
            wire.send(request("POST", "/v1/completions", BODY, *lines))
        except ConnectionError:
            assert len(lines[0]) > 1 << 20  # it was closed before all had gone
        else:
            answer = wire.answer()
            assert (answer.status, answer.error["code"]) == (431, "headers_too_large")
    assert not one.requests
    still_serves(here)


def test_a_target_that_is_too_large(mock, route):
    here = route(mock())
    with here.wire() as wire:
        assert wire.send(request("GET", "/v1/" + "x" * 70_000)).answer().status in (400, 431)
    still_serves(here)


@pytest.mark.parametrize("data", [b"GET / HTT", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-", b""], ids=range(3))
def test_heads_that_never_end(mock, route, data):
    """Slowloris: the connection is closed in time."""
    here = route(mock(), arrival_timeout=0.4)
    began = time.monotonic()
    with here.wire() as wire:
        wire.send(data)
        assert wire.rest() == b""
    assert time.monotonic() - began < 5
    still_serves(here)


def test_a_body_that_never_ends(mock, route):
    one = mock()
    here = route(one, arrival_timeout=0.4)
    for lines, more in [
        ([b"Content-Length: 99"], b'{"model"'),
        ([b"Transfer-Encoding: chunked"], chunk(b'{"model"')),
    ]:
        with here.wire() as wire:
            answer = wire.send(request("POST", "/v1/completions", None, JSON, *lines) + more).answer()
            assert (answer.status, answer.error["code"], answer[b"connection"]) == (408, "arrival_timeout", b"close")
    assert not one.requests
    still_serves(here)


def test_a_client_that_leaves_within_its_body(mock, route):
    one = mock()
    here = route(one)
    with here.wire() as wire:
        wire.send(request("POST", "/v1/completions", None, JSON, b"Content-Length: 3000000") + b"x" * 2_000_000)
    eventually(lambda: here.router.forwarder.meter.left == 1)
    assert not one.requests
    still_serves(here)


def test_bodies_that_are_too_large(mock, route):
    """Also one whose length is not announced."""
    one = mock()
    here = route(one, max_body_size=3_000_000)
    with here.wire() as wire:
        answer = wire.send(request("POST", "/v1/completions", None, JSON, b"Content-Length: 3000001")).answer()
        assert (answer.status, answer.error["code"], answer[b"connection"]) == (413, "body_too_large", b"close")
    with here.wire() as wire:
        wire.send(request("POST", "/v1/completions", None, JSON, b"Transfer-Encoding: chunked"))
        wire.send(chunk(b"x" * 1_000_000) * 3 + b"1\r\nx")
        assert wire.answer().status == 413
    assert here.ask("/v1/completions", BODY + b" " * (3_000_000 - len(BODY))).status == 200
    assert len(one.requests) == 1
    still_serves(here)


def test_other_protocols_do_not_pass(mock, route):
    one = mock()
    here = route(one)
    lines = b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: x", b"Sec-WebSocket-Version: 13"
    with here.wire() as wire:
        answer = wire.send(request("GET", "/v1/realtime", None, *lines)).answer()
    assert (answer.status, answer.error["code"]) == (501, "upgrade_not_supported")
    assert b"HTTP/1.1 200" not in said(here, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert not one.requests
    still_serves(here)


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(300), b"\r\n\r\n\r\nX\r\n\r\n", b"GET\r\n\r\n", b"\0" * 999],
    ids=range(4),
)
def test_what_is_no_http(mock, route, data):
    here = route(mock(), arrival_timeout=2.0)
    assert said(here, data).startswith(b"HTTP/1.1 400")
    still_serves(here)


def test_connect_and_odd_methods(mock, route):
    """A proxy for whatever there is, it is not."""
    one = mock()
    here = route(one)
    with here.wire() as wire:
        assert not wire.send(b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: x\r\n\r\n").rest().startswith(b"HTTP/1.1 2")
    with here.wire() as wire:
        assert wire.send(request("OPTIONS", "/v1/completions")).answer().status == 200
    assert here.ask("http://127.0.0.1:1/metrics", None).body.startswith(b"# HELP")  # its own, wherever that is
    still_serves(here)


@pytest.mark.parametrize(
    "path",
    ["/metrics/x", "/v1/metrics", "/debug/x", "/v1/sleep", "/wake_up", "/v1/load_lora_adapter", "/v1/x/../metrics",
     "/v1/../metrics", "/v1/%2e%2e/sleep", "/v1//sleep", "/v1/..%2freset_prefix_cache", "/reset_prefix_cache", "/x"],
)  # fmt: skip
def test_what_only_operators_may_do_does_not_pass(mock, route, path):
    """Also where something behind the router puts a path in order."""
    one = mock()
    here = route(one)
    assert here.ask(path, b"{}").status == 404
    assert not one.requests


# ---- upstreams -------------------------------------------------------------------------------------------------


def test_an_upstream_that_never_answers(mock, route):
    one = mock(script=lambda r: [HANG])
    here = route(one, timeout=0.5)
    began = time.monotonic()
    answer = here.ask()
    assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
    assert 0.5 <= time.monotonic() - began < 5
    assert one.requests[0].left.wait(20)
    one.script = one.says_who
    still_serves(here)


@pytest.mark.parametrize("more", [[CLOSE], [b"5\r\nab", CLOSE], [b"zz\r\n"], [RESET], [b"\r\n\r\n"]], ids=range(5))
def test_an_answer_in_chunks_that_breaks_off(mock, route, more):
    """The client sees that it is not whole, and what came before is the same."""
    gate = threading.Event()
    one = mock(script=lambda r: [CHUNKED, chunk(EVENTS[0]), gate, *more])
    here = route(one, idle_timeout=3.0)
    with here.wire() as wire:
        wire.send(request("POST", "/v1/completions", BODY))
        assert wire.head().status == 200
        assert wire.until(EVENTS[0]).endswith(EVENTS[0])
        gate.set()
        assert not wire.rest().endswith(b"0\r\n\r\n")
    errors = eventually(lambda: here.of(one).errors)
    assert errors == {"cut off": 1}
    one.script = one.says_who
    still_serves(here)


@pytest.mark.parametrize("size", [0, 3, 300_000])
def test_an_answer_shorter_than_it_says(mock, route, size):
    one = mock(script=lambda r: [b"HTTP/1.1 200 OK\r\nContent-Length: 400000\r\n\r\n" + b"x" * size, 0.05, CLOSE])
    here = route(one)
    with here.wire() as wire:
        answer = wire.send(request("POST", "/v1/completions", BODY)).answer()
    assert answer.status == 200 and not answer.whole and len(answer.wire) <= size
    one.script = one.says_who
    still_serves(here)


def test_an_answer_longer_than_it_says(mock, route):
    """What is too much goes nowhere, least of all to the next client."""
    evil = full(200, b'{"evil": 1}')
    one = mock(script=lambda r: [full(200, b"abc") + evil])
    here = route(one)
    for _ in range(3):
        with here.wire() as wire:
            answer = wire.send(request("POST", "/v1/completions", BODY)).answer()
            assert (answer.body, wire.data) == (b"abc", b"")
    one.script = one.says_who
    still_serves(here)


@pytest.mark.parametrize(
    "data",
    [
        b"garbage\r\n\r\n", b"\0" * 5000, b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", b"HTTP/1.1 200 OK\r\nNo colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nX-Large: " + b"x" * 10_000_000 + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-A: a\rb\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-A: a\0b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 999 No\r\nContent-Length: 0\r\n\r\n",
    ],
    ids=["garbage", "zeros", "no status", "no length", "a length below 0", "no header", "half a head",
         "length and chunks", "two lengths", "ssh", "a head of 10 MB", "101", "CR in a header", "NUL in a header",
         "999"],
)  # fmt: skip
def test_answers_that_are_no_http(mock, route, data):
    """502 with what was wrong, and no 500."""
    one = mock(script=lambda r: [data, 0.05, CLOSE])
    here = route(one)
    answer = here.ask()
    assert answer.status == 502, answer.head
    assert answer.error["code"] == "upstream_failed"
    one.script = one.says_who
    still_serves(here)


@pytest.mark.parametrize("line", [b"X-A: \x01", b"X-A: a\x7f", b"X-A: \xff\xfe", b"X-A: a\tb"], ids=range(4))
def test_odd_letters_in_headers_of_answers(mock, route, line):
    """They pass, or the answer is a 502: no 500, and no mistake of the router's."""
    one = mock(script=lambda r: [full(200, b"abc", line)])
    here = route(one)
    answer = here.ask()
    assert (answer.status, answer.body) == (200, b"abc") or (answer.status, answer.error["code"]) == (
        502, "upstream_failed",
    )  # fmt: skip
    one.script = one.says_who
    still_serves(here)


@pytest.mark.parametrize("first", [b"", chunk(EVENTS[0])], ids=["no byte", "one event"])
def test_an_answer_that_begins_and_never_goes_on(mock, route, first):
    one = mock(script=lambda r: [CHUNKED + first, HANG])
    here = route(one, idle_timeout=0.4)
    with here.wire() as wire:
        answer = wire.send(request("POST", "/v1/completions", BODY)).answer()
    assert answer.status == 200 and not answer.whole
    assert one.requests[0].left.wait(20)
    assert here.of(one).errors["idle"] == 1
    one.script = one.says_who
    still_serves(here)


def test_an_answer_that_is_cut_off_is_no_mistake_of_ours(mock, route, caplog):
    """One line tells of the upstream, and none of the server's inside."""
    one = mock(script=lambda r: [CHUNKED + chunk(EVENTS[0]), 0.05, CLOSE])
    here = route(one)
    with here.wire() as wire:
        wire.send(request("POST", "/v1/completions", BODY)).rest()
    eventually(lambda: here.router.forwarder.meter.running == 0)
    words = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(words) == 1 and "did not end its answer" in words[0]


def test_a_deep_body_of_a_503(mock, route):
    """Is looked at, and passes as it is."""
    data = b"[" * 100_000
    answer = route(mock(script=lambda r: [full(503, data)])).ask()
    assert (answer.status, answer.body) == (503, data)


def test_an_answer_that_goes_on_slowly_is_not_idle(mock, route):
    one = mock(script=lambda r: sse(EVENTS * 2, 0.15))
    with route(one, idle_timeout=0.8).wire() as wire:
        answer = wire.send(request("POST", "/v1/completions", BODY)).answer()
    assert answer.whole and answer.body == b"".join(EVENTS * 2)


def test_an_early_refusal_of_a_large_body(mock, route):
    """An upstream that answers 413 and closes, before it has read: the client hears of it."""
    one = mock(script=lambda r: [error(413, "too_large", b"Connection: close"), 0.2, CLOSE])
    one.deaf = lambda r: True
    here = route(one)
    answer = here.ask("/v1/completions", b'{"model": "m", "prompt": "%s"}' % (b"x" * 5_000_000))
    assert (answer.status, answer.error["code"]) == (413, "too_large")
    one.deaf, one.script = lambda r: False, one.says_who
    still_serves(here)


def test_lists_of_models_that_are_too_large_or_odd(mock, route):
    here = route(one := mock(), check_interval=0.05)
    for data, words in [
        (b'{"data": [' + b" " * (5 << 20) + b"]}", "longer than"),
        (b'{"data": [{"id": 5}]}', None),
        (b'{"data": [{"id": "m"}, 5]}', "something else"),
        (b'{"data": null}', "something else"),
        (b"[" * 100_000, "something else"),
    ]:
        one.check = lambda r, data=data: [full(200, data)]
        n = len(one.checks)
        eventually(lambda n=n: len(one.checks) > n + 4)
        if words:
            assert words in here.of(one).why
        else:
            assert here.of(one).takes and not here.of(one).models
    one.check = None
    still_serves(here)


# ---- what an upstream keeps ------------------------------------------------------------------------------------


def test_what_a_path_names_belongs_to_one_upstream(mock, route):
    """So that requests for it need a header that says which belong together."""
    three = [mock() for _ in range(3)]
    here = route(*three)
    for path in ("/v1/files", "/v1/files/a", "/v1/batches/b", "/v1/responses/c", "/v1/chat/completions/d"):
        answer = here.ask(path, None)
        assert (answer.status, answer.error["code"]) == (400, "sticky_header_missing")
        assert "X-Session-Id" in answer.error["message"]
        ports = {here.ask(path, body, b"X-Session-Id: me").json["port"] for body in (None, b"{}", None)}
        assert len(ports) == 1
    for n in range(40):
        here.ask("/v1/files", None, b"X-Session-Id: %d" % n)
    assert all(u.requests for u in three)
    assert all(r[b"x-session-id"] for u in three for r in u.requests)


def test_what_one_upstream_keeps_is_asked_of_no_other(mock, route):
    """Not even when that one is gone."""
    two = mock(), mock()
    here = route(*two, wait_for=0.5, check_interval=60)
    home = Homes().of(b"me", here.router.fleet.upstreams)
    gone, other = two if two[0].url == home.name else two[::-1]
    gone.stop()
    for _ in range(2):
        answer = here.ask("/v1/files/a", None, b"X-Session-Id: me")
        assert answer.status == 503
    assert not other.requests
    assert here.ask().status == 200


def test_an_upstream_that_said_it_ends_and_goes_on_is_used_again(mock, route):
    """As a balancer does, one of whose servers ends: its checks stay good."""
    one = mock(script=lambda r: [error(503, "shutting_down")])
    here = route(one)
    assert here.ask().error["code"] == "shutting_down"
    one.script = one.says_who
    n = len(one.checks)
    eventually(lambda: len(one.checks) > n + 2)
    eventually(lambda: here.of(one).takes, 3)
    still_serves(here)


# ---- words -----------------------------------------------------------------------------------------------------


def test_errors_are_in_the_words_of_their_path(mock, route):
    here = route(mock("a"), mock("b"))
    for path in ("/generate", "/generate_stream"):
        answer = here.ask(path, b'{"model": "c"}').json
        assert answer == {"error": answer["error"], "error_type": "validation"}
        assert answer["error"].startswith("No upstream found with c")
        assert here.ask(path, b"{").status == 422  # as an upstream says it
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = here.ask(path, b'{"model": "c"}').json
        assert (answer["type"], answer["error"]["type"]) == ("error", "not_found_error")
        named = here.ask(path, b'{"model": "c"}', b"X-Request-Id: mine")
        assert named.json["request_id"] == named[b"request-id"].decode() == "mine"
        assert here.ask(path, b"{").json["error"]["type"] == "invalid_request_error"
    assert here.ask("/v1/completions", b"{").error["type"] == "invalid_request_error"


def test_statuses_of_the_routers_own_in_other_words(mock, route):
    one = mock()
    here = route(one, wait_for=0.1, timeout=0.3)
    one.script = lambda r: [HANG]
    assert here.ask("/generate", BODY).json["error_type"] == "incomplete_generation"
    assert here.ask("/v1/messages", BODY).json["error"]["type"] == "timeout_error"
    one.check, one.script = lambda r: [error(500)], lambda r: [CLOSE]
    eventually(lambda: here.of(one).state is UpstreamState.ILL)
    answer = here.ask("/v1/messages", BODY)
    assert (answer.status, answer.json["error"]["type"]) == (529, "overloaded_error")
    assert answer[b"retry-after"] == b"1"


def test_too_many_wait(mock, route):
    gate = threading.Event()
    one = mock(script=lambda r: [gate, of_json({})])
    here = route(one, max_connections=1, max_num_queued_reqs=2)
    three = [here.asking() for _ in range(3)]
    eventually(lambda: one.running == 1 and here.waiting == 2)
    for path, kind in (("/v1/completions", "rate_limit_error"), ("/v1/messages", "rate_limit_error")):
        answer = here.ask(path, BODY)
        assert (answer.status, answer.error["type"], answer[b"retry-after"]) == (429, kind, b"1")
    assert here.ask("/generate", BODY).json["error_type"] == "overloaded"
    gate.set()
    assert [a.result().status for a in three] == [200] * 3


# ---- settings --------------------------------------------------------------------------------------------------


def ended(*flags: str, **environment: str) -> tuple[int, str]:
    """Status and standard error of a router that does not come to be."""
    made = subprocess.run(
        [sys.executable, "-m", "hibachi", "route", *flags],
        env={"PATH": "", **environment}, cwd=ROOT, capture_output=True, timeout=60,
    )  # fmt: skip
    return made.returncode, made.stderr.decode()


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        status, words = ended("--port", str(port), "http://127.0.0.1:1")
    assert status == 1
    assert re.fullmatch(rf"hibachi: Cannot listen on 127.0.0.1:{port}: [^\n]*\n", words), words


@pytest.mark.parametrize(
    ("flags", "file", "words"),
    [
        ([], None, "UPSTREAMS is missing"),
        (["http://user:sk-secret@x"], None, "a URL with a user"),
        (["http://x", "--policy", "best"], None, "expected one of least-connection"),
        (["http://x", "--api-keys", "/none"], None, "/none"),
        ([], "[[upstream]\n", "expected TOML"),
    ],
    ids=lambda v: None if isinstance(v, str) and "\n" in v else str(v)[:30],
)
def test_wrong_settings_are_told_in_a_line(tmp_path, flags, file, words):
    if file is not None:
        (tmp_path / "route.toml").write_text(file)
        flags = ["--config", str(tmp_path / "route.toml"), *flags]
    status, told = ended("--port", "0", *flags)
    assert status == 1
    assert words in told and told.startswith("hibachi: ") and told.count("\n") == 1, told
    assert "sk-secret" not in told and "Traceback" not in told


def test_keys_are_never_logged(mock, spawn, tmp_path):
    """Neither those of the router nor those of upstreams, nor what clients send; nor are queries and bodies."""
    one = mock()
    one.check = lambda r: [error(401, "sk-echo")]
    (tmp_path / "route.toml").write_text(f"[[upstream]]\nurl = '{one.url}'\nkey = 'sk-upstream'\nmodels = ['m']\n")
    router = spawn(
        "--port", "0", "--config", str(tmp_path / "route.toml"), "--api-key", "sk-mine", "--upstream-key", "sk-all",
        "--log-level", "debug", "--drain-timeout", "1",
    )  # fmt: skip
    eventually(lambda: "routing to" in router.said, 60)
    port = int(re.search(r"on http://[^ ]*:(\d+)", router.said)[1])
    here = Here(None, None, port)
    eventually(lambda: here.ask("/v1/completions", BODY, b"Authorization: Bearer sk-mine").status == 200)
    assert one.requests[-1][b"authorization"] == b"Bearer sk-upstream"
    assert here.ask("/v1/completions?key=sk-query", BODY, b"Authorization: Bearer sk-wrong").status == 401
    assert (
        here.ask("/v1/completions", b'{"model": "m", "key": "sk-body"', b"Authorization: Bearer sk-mine").status == 400
    )
    one.script = lambda r: [b"HTTP/1.1 sk-status\r\n\r\n", CLOSE]
    assert here.ask("/v1/completions", BODY, b"Authorization: Bearer sk-mine").status == 502
    for path in ("/upstreams", "/metrics", "/v1/models"):
        told = here.ask(path, None, b"Authorization: Bearer sk-mine").body
        assert not re.search(rb"sk-(mine|upstream|all|wrong|query|body)", told)
    router.process.terminate()
    router.ends()
    for key in ("sk-mine", "sk-upstream", "sk-all", "sk-wrong", "sk-query", "sk-body"):
        assert key not in router.said


@pytest.fixture
def keepers(mock, route):
    """A router before three servers that keep responses; one of them tells of another model as well."""
    names = ("aaaaaaaa", "bbbbbbbb", "cccccccc")
    three = [mock() for _ in names]

    def tell(one, name):
        entries = [{"id": model, "object": "model", "server": name} for model in ("m", f"only-{name}")]
        one.check = lambda request: [of_json({"object": "list", "data": entries})]

    for one, name in zip(three, names, strict=True):
        tell(one, name)
    return dict(zip(names, three, strict=True)), route(*three, policy="round-robin"), tell


def test_what_names_a_response_goes_to_the_server_that_keeps_it(keepers):
    """Without a header, from body and path; and whatever the header says."""
    servers, here, _ = keepers
    for name, one in servers.items():
        id = f"resp_{name}_01"
        reference = {"type": "item_reference", "id": f"msg_{name}_01_0"}
        bodies = [{"previous_response_id": id, "input": "a"}]
        for each in (reference, {**reference, "type": None}, {"id": reference["id"]}):
            bodies.append({"input": [{"role": "user", "content": "a"}, each]})
        for body in ({**given, **model} for given in bodies for model in ({"model": "m"}, {})):
            told = json.dumps(body).encode()
            for lines in ((), (b"X-Session-Id: me",)):
                assert [here.ask("/v1/responses", told, *lines).json["port"] for _ in range(3)] == [one.port] * 3
        for path in (f"/v1/responses/{id}", f"/v1/responses/{id}/input_items"):
            assert [here.ask(path, None).json["port"] for _ in range(3)] == [one.port] * 3
    first = {here.ask("/v1/responses", b'{"model": "m", "input": "a"}').json["port"] for _ in range(12)}
    assert len(first) > 1  # one that goes on from nothing


def test_a_response_whose_server_is_gone_is_not_found(keepers):
    servers, here, tell = keepers
    body = b'{"model": "m", "input": "a", "previous_response_id": "resp_%s_01"}'
    lost = here.ask("/v1/responses", body % b"zzzzzzzz")
    assert (lost.status, lost.error["code"], lost.error["param"]) == (
        404,
        "previous_response_not_found",
        "previous_response_id",
    )
    for more in ({"type": "item_reference"}, {}):
        given = {"model": "m", "input": [{"role": "user", "content": "a"}, {"id": "msg_zzzzzzzz_01_0", **more}]}
        item = here.ask("/v1/responses", json.dumps(given).encode())
        assert (item.status, item.error["code"], item.error["param"]) == (404, "item_not_found", "input[1].id")
        assert item.error["message"].startswith("Item with id 'msg_zzzzzzzz_01_0' not found: ")
    path = here.ask("/v1/responses/resp_zzzzzzzz_01", None)
    assert (path.status, path.error["code"]) == (404, "response_not_found")
    one = servers["aaaaaaaa"]
    assert here.ask("/v1/responses", body % b"aaaaaaaa").json["port"] == one.port
    tell(one, "dddddddd")  # it began again
    eventually(lambda: here.of(one).servers == {"dddddddd"})
    assert here.ask("/v1/responses", body % b"aaaaaaaa").error["code"] == "previous_response_not_found"
    assert here.ask("/v1/responses", body % b"dddddddd").json["port"] == one.port
    one.script = lambda r: [RESET]  # as it dies
    dying = here.ask("/v1/responses", body % b"dddddddd")
    assert (dying.status, dying.error["code"]) == (404, "previous_response_not_found")
    assert here.ask("/v1/responses/resp_dddddddd_01", None).status == 502
    one.stop()
    for path, told in (("/v1/responses", body % b"dddddddd"), ("/v1/responses/resp_dddddddd_01", None)) * 2:
        began = time.monotonic()
        answer = here.ask(path, told)  # killed: what it kept was in its memory
        assert (answer.status, time.monotonic() - began < 0.5) == (404, True)  # wait_for is 1 s
        assert answer.error["code"].endswith("response_not_found") and "can be opened" in answer.error["message"]


@pytest.mark.parametrize(
    "given, param, code",
    [
        ({"previous_response_id": "resp_aaaaaaaa_01"}, "previous_response_id", "previous_response_not_found"),
        ({"input": [{"id": "msg_aaaaaaaa_01_0"}]}, "input[0].id", "item_not_found"),
    ],
)
def test_a_conversation_that_changes_to_a_model_of_another_server(keepers, given, param, code):
    """At once, and in words by which the client sends all of it."""
    _, here, _ = keepers
    began = time.monotonic()
    answer = here.ask("/v1/responses", json.dumps({"model": "only-bbbbbbbb", "input": "a", **given}).encode())
    assert time.monotonic() - began < 0.9  # wait_for is 1 s
    assert (answer.status, answer.error["param"], answer.error["code"]) == (404, param, code)
    assert "the server that keeps it does not have the model only-bbbbbbbb. Send the" in answer.error["message"]
    unknown = here.ask("/v1/responses", json.dumps({"model": "none", "input": "a", **given}).encode())
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
    about = b'{"model": "only-bbbbbbbb"}'  # what a path names has its model already
    assert here.ask("/v1/responses/resp_aaaaaaaa_01/cancel", about).status == 200


def test_one_upstream_of_several_models_gets_what_goes_on_without_a_model(keepers, route):
    servers, _, _ = keepers
    here = route(servers["aaaaaaaa"])
    for server in ("aaaaaaaa", "zzzzzzzz"):  # it says itself what it does not have
        assert here.ask("/v1/responses", b'{"previous_response_id": "resp_%s_01"}' % server.encode()).status == 200
    assert here.ask("/v1/responses", b'{"input": "a"}').error["code"] == "model_missing"


def test_a_router_behind_a_router_tells_of_all_servers(keepers, route):
    servers, here, _ = keepers
    [entry] = [entry for entry in here.ask("/v1/models", None).json["data"] if entry["id"] == "m"]
    assert sorted(entry["server"]) == sorted(servers)
    outer = route(here.url, next(iter(servers.values())))
    body = b'{"model": "m", "input": "a", "previous_response_id": "resp_cccccccc_01"}'
    assert outer.ask("/v1/responses", body).json["port"] == servers["cccccccc"].port
