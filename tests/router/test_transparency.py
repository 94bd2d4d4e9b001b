"""What goes in comes out, byte by byte, in both directions; and the router does nothing of its own accord."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
import time
import zlib

import pytest

from .conftest import BODY, JSON, Process, Wire, eventually, request
from .mocks import CLOSE, HANG, Mock, Request, chunk, full, of_json

MIB = 1 << 20
MULTIPART = b"Content-Type: multipart/form-data; boundary=XyZ"
GZIP = b"Content-Encoding: gzip"
FORM = b"Content-Type: application/x-www-form-urlencoded"


def parts(*fields: tuple[bytes, bytes], more: bytes = b"") -> bytes:
    found = b"".join(
        b"--XyZ\r\nContent-Disposition: form-data; name=" + name + b"\r\n\r\n" + value + b"\r\n"
        for name, value in fields
    )
    return found + more + b"--XyZ--\r\n"


FILE = (
    b'--XyZ\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    b"RIFF\0\xff\r\n--XyW\r\n\r\n\0\r\n"
)
BODIES = {
    "numbers": (b'{"model":"m","a":[1.0,1e5,-0,1E+2,0.10,123456789012345678901234567890]}', JSON),
    "blanks": (b' \r\n{ "model" :\t"m" ,\n\n"prompt" : "a" } \n', JSON),
    "twice": (b'{"model": "other", "prompt": "a", "prompt": "b", "model": "m"}', JSON),
    "escapes": (b'{"model":"\\u006d","prompt":"\\u00e9\\ud83d\\ude00\\/"}', JSON),
    "other letters": ('{"model":"m","prompt":"été 😀 日本"}'.encode(), JSON),
    "with a charset": (b'{"model":"m"}', b"Content-Type:  Application/JSON ;charset=utf-8"),
    "no kind": (b'{"model":"m"}', b"X-None: 1"),
    "gzip": (gzip.compress(b'{"model":"m","prompt":"a"}', mtime=0), JSON, GZIP),
    "deflate": (zlib.compress(b'{"model":"m","prompt":"a"}'), JSON, b"Content-Encoding: deflate"),
    "form": (b"prompt=a+b%26&x=%C3%A9&model=m&y", FORM),
    "form with +": (b"model=%6d&file=a+b", FORM),
    "parts": (parts((b'"model"', b"m"), more=FILE), MULTIPART),
    "parts, the model last": (parts(more=FILE + parts((b'"model"', b"m"))[:-9]), MULTIPART),
    "parts, without quotes": (parts((b"model", b"m")), b'Content-Type: multipart/form-data;boundary="XyZ";x=1'),
}


def slurp(request_: Request) -> tuple[str, bytes, bytes]:
    return request_.method, request_.target, request_.body


# ---- bodies of requests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BODIES)
def test_a_body_goes_to_who_has_its_model_as_it_is(mock, route, name):
    body, *lines = BODIES[name]
    other, one = mock("other"), mock("m")
    here = route(other, one)
    with here.wire() as wire:
        answer = wire.send(request("POST", "/v1/completions", body, *lines)).answer()
    assert answer.status == 200, answer.body
    (r,) = one.requests
    assert (r.body, r.wire, other.requests) == (body, body, [])
    for line in lines:
        header, _, value = line.partition(b":")
        assert r[header] == value.strip()
    assert int(r[b"content-length"]) == len(body)


@pytest.mark.parametrize("kind", ["audio/wav", "application/octet-stream", "text/plain", "image/png"])
def test_bytes_that_name_no_model_pass(mock, route, kind):
    """Where there is one model only."""
    body = bytes(range(256)) * 9
    one = mock()
    with route(one).wire() as wire:
        wire.send(request("POST", "/v1/audio/transcriptions", body, b"Content-Type: " + kind.encode()))
        assert wire.answer().status == 200
    assert one.requests[0].body == body and one.requests[0][b"content-type"] == kind.encode()


def test_no_body_stays_none(mock, route):
    one = mock()
    with route(one).wire() as wire:
        assert wire.send(request("GET", "/v1/things")).answer().status == 200
        assert wire.send(request("DELETE", "/v1/things")).answer().status == 200
        assert wire.send(request("POST", "/v1/things", b"")).answer().status == 200
    assert [r.body for r in one.requests] == [b""] * 3
    assert one.requests[0].all(b"content-length") == one.requests[0].all(b"transfer-encoding") == []
    assert one.requests[2][b"content-length"] == b"0"


@pytest.mark.parametrize("sizes", [(1,) * 34, (5, 29), (34,)])
def test_a_chunked_body_arrives_whole(mock, route, sizes):
    """With its chunks put together, and a length."""
    body = b'{"model":"m","prompt":"0123456789"}'[:34] + b"}"
    one, at, wire_bytes = mock(), 0, b""
    for size in (*sizes, 1):
        wire_bytes += chunk(body[at : at + size])
        at += size
    with route(one).wire() as wire:
        wire.send(request("POST", "/v1/completions", None, JSON, b"Transfer-Encoding: chunked"))
        wire.send(wire_bytes + b"0\r\nX-Trailer: 1\r\n\r\n")
        assert wire.answer().status == 200
        wire.send(request("POST", "/v1/completions", body, JSON))  # and the connection is as good as new
        assert wire.answer().status == 200
    assert one.bodies == [body, body]
    assert one.requests[0].all(b"transfer-encoding") == []


@pytest.mark.parametrize("policy", ["least-connection", "prefix-affine"])
@pytest.mark.parametrize("size", [MIB - 1, MIB, MIB + 1, 3 * MIB + 7])
def test_bodies_that_go_through_a_file(mock, route, size, policy):
    """The model stands at the end, and other text looks like one."""
    head, tail = b'{"prompt": "model: \\"model\\": \\"other\\" ', b'", "model": "m"}'
    body = head + b"x" * (size - len(head) - len(tail)) + tail
    other, one = mock("other"), mock("m")
    here = route(other, one, policy=policy)
    assert here.ask("/v1/completions", body).status == 200
    (r,) = one.requests
    assert r.body == body and not other.requests


def test_a_large_form_with_its_model_at_the_end(mock, route):
    body = parts(more=FILE + FILE * 30000 + parts((b'"model"', b"m"))[:-9])
    assert len(body) > 2 * MIB
    other, one = mock("other"), mock("m")
    with route(other, one).wire() as wire:
        assert wire.send(request("POST", "/v1/audio/transcriptions", body, MULTIPART)).answer().status == 200
    assert one.bodies == [body]


def test_a_large_body_is_sent_again_as_it_is(mock, route):
    """The first server answers 500 before it has read it, and reads on while the second gets it."""
    body = b'{"model": "m", "prompt": "%s"}' % bytes(48 + i % 10 for i in range(20 * MIB))
    bad, good = mock(), mock()
    good.delay = 0.3
    bad.deaf = lambda r: True
    bad.script = lambda r: [full(500, b"{}", reason=b"No")]
    here = route(bad, good)
    assert here.ask("/v1/completions", body).json["port"] == good.port
    (r,) = good.requests
    assert r.size == len(body)
    assert hashlib.sha256(r.body).digest() == hashlib.sha256(body).digest()


def test_a_model_of_the_wrong_kind_in_a_large_body(mock, route):
    """400, also where the text is looked at."""
    here = route(mock(), mock(), policy="prefix-affine")
    answer = here.ask("/v1/completions", b'{"prompt": "%s", "model": 5}' % (b"x" * 2 * MIB))
    assert answer.status == 400, answer.body
    assert answer.error["param"] == "model"


def test_large_bodies_do_not_stay_in_memory(mock, spawn):
    """Of ten with 20 MB at once, it keeps less than two."""
    one = mock()
    one.keep = 0
    router: Process = spawn("--port", "0", "--drain-timeout", "1", one.url).listening()
    size = 20 * MIB
    head, tail = b'{"prompt": "', b'", "model": "m"}'
    one.script = lambda r: [gate, of_json({})]
    gate = threading.Event()
    seen = []

    def send():
        with Wire(router.port, seconds=60) as wire:
            whole = len(head) + size + len(tail)
            wire.send(request("POST", "/v1/completions", None, JSON, b"Content-Length: %d" % whole) + head)
            for _ in range(size // MIB):
                wire.send(b"x" * MIB)
            seen.append(wire.send(tail).answer().status)

    ask = [threading.Thread(target=send) for _ in range(10)]
    before = most = router.memory
    for thread in ask:
        thread.start()
    while one.running < 10 or any(r.size <= size for r in one.requests):
        most = max(most, router.memory)
        assert any(t.is_alive() for t in ask)
        time.sleep(0.01)
    most = max(most, router.memory)
    gate.set()
    for thread in ask:
        thread.join()
    assert seen == [200] * 10
    assert [r.size for r in one.requests] == [len(head) + size + len(tail)] * 10
    assert most - before < 40 * MIB, (most - before) / MIB


def test_expect_100_continue(mock, route):
    one = mock()
    with route(one).wire() as wire:
        wire.send(request("POST", "/v1/completions", None, JSON, b"Expect: 100-continue", b"Content-Length: 32"))
        assert wire.head().status == 100
        assert not one.requests
        assert wire.send(BODY).answer().status == 200
    (r,) = one.requests
    assert (r.body, r.all(b"expect")) == (BODY, [])


# ---- paths -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "/v1/things/a%2Fb", "/v1//things", "/v1/a/../b", "/v1/./a", "/v1/a;b=c", "/v1/a+b", "/v1/%C3%A9", "/v1/%c3%a9",
        "/v1/a%20b", "/v1/~a!$&'()*,;=:@", "/v1/a%00b", "/v1/a/", "/v1/%7Ea", "/v1/a?b", "/v1/a?b=c&b=d&",
        "/v1/a?b=%2F%3F/?&+", "/v1/a?b=%C3%A9;c", "/v1/a?a=http://x/../y", "/v1/a?%", "/v1/%zz", '/v1/a?{"a"}',
    ],
)  # fmt: skip
def test_a_path_and_its_query_stay_as_they_are_written(mock, route, target):
    one = mock()
    assert route(one).ask(target, None).status == 200
    assert one.requests[0].target.decode() == target


def test_an_absolute_target(mock, route):
    """As clients of a proxy write it."""
    one = mock()
    assert route(one).ask("http://router/v1/things?a=b", None).status == 200
    assert one.requests[0].target == b"/v1/things?a=b"


@pytest.mark.parametrize("target", ["/v1/models/m", "/v1/models/org%2Fm", "/v1/models/org/m"])
def test_a_model_in_the_path_of_a_question(mock, route, target):
    other, one = mock("other"), mock("m", "org/m")
    assert route(other, one).ask(target, None).json["port"] == one.port
    assert one.requests[0].target.decode() == target


# ---- headers ---------------------------------------------------------------------------------------------------


def test_headers_of_requests_stay_as_they_are(mock, route):
    """Their order as well; and there are no others than Host and Content-Length."""
    lines = [
        b"X-A: 1", b"X-B:  two words ", b"X-A: 2", b"Cookie: a=b; c=d", b"Accept: */*;q=0.1", b"X-Empty:",
        b"Forwarded: for=1.2.3.4", b"X-Forwarded-For: 9.9.9.9", b"Traceparent: 00-1-2-00", b"X-Request-Id: me",
        "X-Accent: é".encode(), b"Accept-Encoding: br, zstd;q=0.1", b"User-Agent: mine/1 (x)", b"If-None-Match: \"a\"",
        b"Via: 1.1 me", b"Origin: null", b"Authorization: Basic abc",
    ]  # fmt: skip
    one = mock()
    with route(one).wire() as wire:
        wire.send(request("POST", "/v1/completions", BODY, JSON, *lines)).answer()
    (r,) = one.requests
    wanted = [(n.lower(), v.strip()) for n, _, v in (line.partition(b":") for line in [JSON, *lines])]
    found = [(n.lower(), v) for n, v in r.headers]
    assert [h for h in found if h[0] not in (b"host", b"content-length")] == wanted
    assert (r[b"host"], r[b"content-length"]) == (one.url.removeprefix("http://").encode(), b"32")


def test_no_headers_are_added(mock, route):
    one = mock()
    with route(one).wire() as wire:
        wire.send(request("POST", "/v1/completions", BODY)).answer()
        wire.send(request("GET", "/v1/things")).answer()
    assert [sorted(n.lower() for n, _ in r.headers) for r in one.requests] == [[b"content-length", b"host"], [b"host"]]


def test_headers_of_one_connection_do_not_pass(mock, route):
    """Nor what Connection names."""
    one = mock()
    here = route(one, origin_header=False)
    one.script = lambda r: [
        full(
            200, b"x", b"Connection: keep-alive, X-Mine", b"X-Mine: 1", b"Keep-Alive: timeout=5", b"X-Own: 1",
            b"Proxy-Authenticate: Basic", b"Trailer: X", b"Connection: x-more", b"X-More: 2",
        )
    ]  # fmt: skip
    lines = (
        b"Connection: keep-alive, X-Hop", b"X-Hop: 1", b"Keep-Alive: 5", b"TE: trailers", b"Proxy-Authorization: x",
        b"Proxy-Connection: keep-alive", b"Trailer: X", b"X-Kept: 1", b"Connection: x-two", b"X-Two: 2",
    )  # fmt: skip
    with here.wire() as wire:
        answer = wire.send(request("POST", "/v1/completions", BODY, *lines)).answer()
    names = {n.lower() for n, _ in one.requests[0].headers}
    assert names == {b"host", b"content-length", b"x-kept"}
    assert {n.lower() for n, _ in answer.headers} == {b"content-length", b"x-own"}


def test_cookies_of_one_client_never_go_to_another(mock, route):
    one = mock()
    cookies = [b"a=1; Path=/; HttpOnly", b"b=2; Expires=Thu, 01 Jan 2099 00:00:00 GMT", b"a=3"]
    one.script = lambda r: [full(200, b"{}", *(b"Set-Cookie: " + c for c in cookies))]
    here = route(one)
    assert here.ask().all(b"set-cookie") == cookies
    here.ask()
    here.ask("/v1/completions", BODY, b"Cookie: mine=1")
    assert [r.all(b"cookie") for r in one.requests] == [[], [], [b"mine=1"]]


def test_headers_of_answers_stay_as_they_are(mock, route):
    """Their order and their repetitions too; date and server are the upstream's."""
    lines = [
        b"Date: Thu, 01 Jan 1970 00:00:00 GMT", b"Server: theirs/1", b"X-A: 1", b"X-B: 2", b"X-A: 3", b"X-Empty:",
        b"Content-Type: application/x-odd; a=b", b"ETag: W/\"x\"", b"X-Request-Id: theirs", b"Vary: a", b"Vary: b",
        "X-Accent: é".encode(), b"X-Latin: \xe9", b"Access-Control-Allow-Origin: http://x", b"Content-Encoding: odd",
    ]  # fmt: skip
    one = mock()
    one.script = lambda r: [full(200, b"data", *lines)]
    wanted = [(n.lower(), v.strip()) for n, _, v in (line.partition(b":") for line in lines)]
    wanted.append((b"content-length", b"4"))
    answer = route(one, origin_header=False).ask()
    assert [(n.lower(), v) for n, v in answer.headers] == wanted
    answer = route(one).ask()
    assert [(n.lower(), v) for n, v in answer.headers] == [*wanted, (b"x-upstream-origin", one.url.encode())]
    one.script = lambda r: [full(200)]
    answer = route(one, origin_header=False).ask()  # nothing is added
    assert [(n.lower(), v) for n, v in answer.headers] == [(b"content-length", b"0")]


# ---- answers ---------------------------------------------------------------------------------------------------


def test_redirects_are_the_clients(mock, route):
    one = mock()
    one.script = lambda r: [full(302, b"", b"Location: /v1/elsewhere")]
    answer = route(one).ask("/v1/things", None)
    assert (answer.status, answer[b"location"]) == (302, b"/v1/elsewhere")
    assert len(one.requests) == 1


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
def test_answers_are_not_unpacked(mock, route, encoding):
    data = gzip.compress(b'{"a": 1}', mtime=0) if encoding == "gzip" else b"\0\1\2 no such thing"
    one = mock()
    one.script = lambda r: [full(200, data, b"Content-Encoding: " + encoding.encode())]
    answer = route(one).ask()
    assert (answer.body, answer[b"content-encoding"]) == (data, encoding.encode())
    assert answer[b"content-length"] == b"%d" % len(data)


def test_heads_have_no_body(mock, route):
    one = mock()
    one.script = lambda r: [b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\nX-A: 1\r\n\r\n"]
    with route(one).wire() as wire:
        for _ in range(2):  # and the connection goes on
            answer = wire.send(request("HEAD", "/v1/things")).answer(head=True)
            assert (answer.status, answer[b"content-length"], answer[b"x-a"]) == (200, b"1234", b"1")
    assert [r.method for r in one.requests] == ["HEAD", "HEAD"]
    assert one.connections <= 2  # one of checks, which may be under way


@pytest.mark.parametrize(
    ("status", "line"),
    [(204, b"X-A: 1"), (304, b"X-A: 1"), (304, b"Content-Length: 5"), (204, b"Content-Length: 5")],
)
def test_answers_without_a_body(mock, route, status, line):
    """A 304 may say how long the answer to a GET would be (RFC 9110, 8.6), and nobody waits for that."""
    one = mock(script=lambda r: [b"HTTP/1.1 %d No\r\n%s\r\n\r\n" % (status, line)])
    with route(one).wire() as wire:
        for _ in range(2):
            answer = wire.send(request("GET", "/v1/things", None, b'If-None-Match: "a"')).answer()
            assert answer.status == status
            assert answer.all(b"x-a") == ([b"1"] if b"X-A" in line else [])
            wire.socket.settimeout(0.05)
            with pytest.raises(TimeoutError):  # nothing follows, and nobody closes
                wire.more()
            wire.socket.settimeout(20)


def test_chunks_are_passed_on_as_they_come(mock, route):
    """B-21, with bytes that are no text; what comes at once may be put together."""
    gates = [threading.Event() for _ in range(4)]
    data = [b"\0\xff", b"data: \xc3", b"\xa9\n", b"\r\n" * 40000]
    one = mock()

    def script(r):
        yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        for gate, part in zip(gates, data, strict=True):
            yield gate
            yield chunk(part)
        yield b"0\r\n\r\n"

    one.script = script
    with route(one).wire() as wire:
        wire.send(request("POST", "/v1/completions", BODY))
        assert wire.head()[b"transfer-encoding"] == b"chunked"
        for gate, part in zip(gates[:3], data[:3], strict=True):
            gate.set()
            assert wire.until(part + b"\r\n") == chunk(part)
        gates[3].set()
        whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        wire.data = whole + wire.data
        assert wire.answer().body == data[3]


def test_answers_that_end_with_their_connection(mock, route):
    one = mock()
    one.script = lambda r: [b"HTTP/1.1 200 OK\r\nX-A: 1\r\n\r\nabc", 0.02, b"def" * 50000, CLOSE]
    with route(one).wire() as wire:
        for _ in range(2):
            answer = wire.send(request("POST", "/v1/completions", BODY)).answer()
            assert answer.whole and answer.body == b"abc" + b"def" * 50000
            assert answer[b"transfer-encoding"] == b"chunked"


def test_a_client_of_http_1_0(mock, route):
    """Knows no chunks."""
    one = mock()
    one.script = lambda r: [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", chunk(b"abc"), b"0\r\n\r\n"]
    with route(one).wire() as wire:
        wire.send(b"POST /v1/completions HTTP/1.0\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY))
        answer = wire.rest()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head and body == b"abc"  # fails: chunks (uvicorn)


def test_hints_before_an_answer_do_not_hurt(mock, route):
    one = mock()
    one.script = lambda r: [b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", full(200, b"abc")]
    assert route(one).ask().body == b"abc"


def test_two_requests_sent_at_once_on_a_connection(mock, route):
    """Answers come in their order."""
    one = mock()
    one.script = lambda r: [0.1 if r.json["n"] == 0 else 0.0, of_json(r.json["n"])]
    with route(one).wire() as wire:
        wire.send(b"".join(request("POST", "/v1/completions", b'{"model": "m", "n": %d}' % n) for n in range(3)))
        assert [wire.answer().json for _ in range(3)] == [0, 1, 2]


def test_a_client_that_reads_slowly_slows_the_upstream(mock, spawn):
    """Of 50 MB nothing is piled up here."""
    one = mock()
    piece, n = b"x" * (1 << 16), 800
    sent = []

    def script(r):
        yield b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (n * len(piece))
        for _ in range(n):
            sent.append(len(piece))
            yield piece

    one.script = script
    router = spawn("--port", "0", "--drain-timeout", "1", one.url).listening()
    before = router.memory
    with Wire(router.port, small=True, seconds=60) as wire:
        wire.send(request("POST", "/v1/completions", BODY)).head()
        still = -1
        while still != len(sent):  # until nothing moves any more
            still = len(sent)
            time.sleep(0.3)
        assert 0 < len(sent) < n // 2, "all of it is somewhere on the way"
        most = router.memory
        size = len(wire.data)
        wire.data = b""
        while size < n * len(piece):
            assert wire.more()
            size += len(wire.data)
            wire.data = b""
            most = max(most, router.memory)
    assert size == n * len(piece)
    assert most - before < 20 * MIB, (most - before) / MIB


# ---- of its own accord -----------------------------------------------------------------------------------------


def test_proxies_of_the_environment_are_not_used(mock, spawn):
    one, proxy = mock(), mock()
    names = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
    router = spawn("--port", "0", one.url, **{name: proxy.url for name in names}, NO_PROXY="", no_proxy="").listening()
    with Wire(router.port) as wire:
        assert wire.send(request("POST", "/v1/completions", BODY)).answer().json["port"] == one.port
    assert proxy.connections == 0


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_nothing_is_sent_twice_where_it_may_have_been_done(mock, route, method):
    """A kept connection that ends with the next request on it: it arrived once, and the client hears of it."""
    one = mock()
    here = route(one, check_interval=60)
    used: set[int] = set()

    def script(r):
        if r.connection in used:
            return [CLOSE]
        used.add(r.connection)
        return [of_json({})]

    one.script = script
    used.update(r.connection for r in one.checks)
    one.hang_up()
    eventually(lambda: one.open == 0)
    with here.wire() as wire:
        assert wire.send(request(method, "/v1/things", b"")).answer().status == 200
        assert wire.send(request(method, "/v1/things", b"")).answer().status == 502
    first, second = one.requests
    assert first.connection == second.connection


def test_a_connection_that_ended_meanwhile_is_not_used(mock, route):
    """No error, and one request."""
    one = mock()
    here = route(one, check_interval=60)
    for n in range(5):
        assert here.ask().status == 200
        one.hang_up()
        eventually(lambda: one.open == 0)
        assert len(one.requests) == n + 1


def test_a_request_for_text_goes_to_another_when_its_connection_ends(mock, route):
    """Twice at most, and once to each."""
    two: list[Mock] = [mock(), mock()]
    here = route(*two, check_interval=60)
    assert here.ask().status == 200
    for one in two:
        one.requests.clear()
        one.check = lambda r: [HANG]
        one.script = lambda r: [CLOSE]
    answer = here.ask()
    assert answer.status == 502
    assert [len(u.requests) for u in two] == [1, 1]
    assert json.loads(two[0].bodies[0]) == json.loads(BODY)
