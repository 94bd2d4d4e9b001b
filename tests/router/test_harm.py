"""How one client or one upstream could harm others, and does not."""

import gzip
import json
import threading
import time
import urllib.parse

import pytest

from hibachi.router.health import failed
from hibachi.router.upstreams import UpstreamState

from .conftest import BODY, eventually, request
from .mocks import HANG, chunk, full, of_json

PACKED = gzip.compress(b'{"a": "%s"}' % (b"x" * (31 << 20)))
FORM = b"Content-Type: multipart/form-data; boundary=b"


def test_bytes_that_nobody_asked_for_answer_nobody(mock, route):
    """An upstream sends a second answer on a connection that is idle by then."""
    a = mock("m", script=lambda r: [of_json({"mine": r.json["n"]}), 0.05, of_json({"stolen": 1})])
    router = route(a)
    for n in range(4):
        answer = router.ask("/v1/completions", b'{"model": "m", "n": %d}' % n)
        assert (answer.status, answer.json) == (200, {"mine": n})
        time.sleep(0.15)


@pytest.mark.parametrize(
    "lines, body",
    [
        ((FORM,), b"--b\r\n" + b"content-disposition:" * 50_000 + b"\r\n\r\nx\r\n--b--"),
        ((FORM,), b"--b\r\n" + b"content-disposition: name=x;" * 30_000),
        ((b"Content-Type: application/x-www-form-urlencoded",), b"a=1&" * 250_000),
        ((b"Content-Type: application/json", b"Content-Encoding: gzip"), PACKED),
    ],
    ids=["heads", "names", "fields", "packed"],
)  # fmt: skip
def test_a_body_that_is_hard_to_read_holds_up_nobody(mock, route, lines, body):
    router = route(mock("m"))
    slowest, over = 0.0, threading.Event()

    def others():
        nonlocal slowest
        while not over.is_set():
            began = time.monotonic()
            assert router.ask("/health", None).status == 200
            slowest = max(slowest, time.monotonic() - began)

    beside = threading.Thread(target=others)
    beside.start()
    began = time.monotonic()
    try:
        asking = [router.asking("/v1/completions", body, *lines) for _ in range(2)]
        assert all(each.result().status in (200, 413) for each in asking)
    finally:
        over.set()
        beside.join()
    assert slowest < 2 and time.monotonic() - began < 10  # it was 3 s for each, and more than a minute for larger ones


def test_what_unpacks_to_too_much_is_refused(mock, route):
    body = gzip.compress(b'{"model": "m", "prompt": "%s"}' % (b"x" * (40 << 20)))
    answer = route(mock("m")).ask("/v1/completions", body, b"Content-Type: application/json", b"Content-Encoding: gzip")
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")


def test_a_client_that_stops_reading_gives_its_slot_back(mock, route):
    big = b"x" * (1 << 20)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    a = mock("m", script=lambda r: [head, *[chunk(big)] * 60, b"0\r\n\r\n"])
    router = route(a, max_connections=1, idle_timeout=0.5)
    with router.wire(small=True) as wire:
        wire.send(request("POST", "/v1/completions", BODY, b"Content-Type: application/json"))
        eventually(lambda: a.running == 1)
        a.script = a.says_who
        assert router.ask("/v1/completions", BODY).status == 200  # as soon as the other is cut off
        assert a.requests[0].left.wait(5)


def test_bodies_in_files_have_room_for_so_much(mock, route):
    a = mock("m", script=lambda r: [HANG])
    router = route(a, max_body_size="3M", max_bodies_size="5M")
    body = json.dumps({"model": "m", "prompt": "x" * 2_500_000}).encode()
    with router.wire() as one, router.wire() as two:
        for wire in (one, two):
            wire.send(request("POST", "/v1/completions", body, b"Content-Type: application/json"))
        eventually(lambda: a.running == 2)
        answer = router.ask("/v1/completions", body)
        assert (answer.status, answer.error["code"]) == (503, "router_full")
    a.script = a.says_who
    eventually(lambda: router.ask("/v1/completions", body).status == 200)


def test_no_room_on_the_disk_is_told(mock, route, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    router = route(mock("m"))
    monkeypatch.setattr("hibachi.router.body.tempfile.TemporaryFile", full_disk)
    answer = router.ask("/v1/completions", json.dumps({"model": "m", "prompt": "x" * 2_000_000}).encode())
    assert (answer.status, answer.error["code"]) == (503, "router_full")


def test_a_hung_upstream_gets_no_more_than_its_first_requests(mock, route):
    """Checks of it succeed, but it answers nothing."""
    hung, good = mock("m", script=lambda r: [HANG]), mock("m")
    router = route(hung, good, timeout=0.3)
    found = [router.ask("/v1/completions", BODY).status for _ in range(6)]
    assert found.count(504) <= 1 and found[-1] == 200


@pytest.mark.parametrize("lines, size", [(200, 50_000), (1, 10_000_000), (3000, 100)])
def test_a_fat_head(mock, route, lines, size):
    a = mock("m")
    a.script = lambda r: [full(200, b"{}", *[b"X-A: " + b"a" * size] * lines)]
    router = route(a)
    answer = router.ask("/v1/completions", BODY)
    assert answer.status == 502 and len(answer.head) < 10_000
    a.script = a.says_who
    eventually(lambda: router.ask("/v1/completions", BODY).status == 200)


def test_a_model_of_no_letters_is_no_model(mock, route):
    router = route(mock("m"), mock("n"))
    assert router.ask("/v1/completions", b'{"model": ""}').error["code"] == "model_missing"


def test_the_model_of_the_body_comes_before_that_of_the_path(mock, route):
    a, b = mock("m"), mock("n")
    router = route(a, b)
    assert router.ask("/v1/engines/m/completions", b'{"model": "n"}').json["port"] == b.port
    assert router.ask("/v1/engines/m/completions", b"{}").json["port"] == a.port


def test_a_session_whose_home_lacks_the_model_is_served_all_the_same(mock, route):
    upstreams = [mock("m"), mock("n"), mock("n")]
    router = route(*upstreams)
    for n in range(6):
        assert router.ask("/v1/responses", BODY, b"X-Session-Id: %d" % n).json["port"] == upstreams[0].port


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1//files/x", "/v1/files"])
def test_what_one_upstream_keeps_wants_the_header_however_it_is_written(mock, route, path):
    router = route(mock("m"), mock("m"))
    answer = router.ask(path, b"{}")
    assert answer.status == 400 and "X-Session-Id" in answer.body.decode()


@pytest.mark.parametrize("path", ["/server_info", "/v1/..%5cmetrics"])
def test_more_that_does_not_pass(mock, route, path):
    a = mock("m")
    assert route(a).ask(path, None).status == 404 and not a.requests


def test_who_asks_for_much_makes_room_in_a_full_line(mock, route):
    go = threading.Event()
    a = mock("m", script=lambda r: [go, of_json({})])
    router = route(a, max_connections=1, max_num_queued_reqs=3)
    greedy, small = b"Authorization: Bearer greedy", b"Authorization: Bearer small"
    asking = [router.asking("/v1/completions", BODY, greedy)]
    eventually(lambda: a.running == 1)
    for n in range(3):
        asking.append(router.asking("/v1/completions", BODY, greedy))
        eventually(lambda n=n: router.waiting == n + 1)
    other = router.asking("/v1/completions", BODY, small)
    assert asking[-1].result().status == 429  # its newest
    assert router.ask("/v1/completions", BODY, greedy).status == 429
    go.set()
    assert other.result().status == 200
    assert [each.result().status for each in asking[:-1]] == [200] * 3


def test_a_client_does_not_choose_its_address(mock, route, caplog):
    router = route(mock("m"))
    with caplog.at_level("INFO", "hibachi.request"):
        router.ask("/v1/completions", BODY, b"X-Forwarded-For: 9.9.9.9", b"X-Request-Id: mine")
        eventually(lambda: "mine" in caplog.text)
    assert "9.9.9.9" not in caplog.text


def test_anthropics_key_is_a_key_and_goes_no_further(mock, route):
    a = mock("m")
    router = route(a, api_key="ours", upstream_key="theirs")
    assert router.ask("/v1/messages", BODY, b"x-api-key: ours").status == 200
    assert router.ask("/v1/messages", BODY, b"x-api-key: other").status == 401
    assert router.ask("/v1/completions", BODY, b"x-api-key: ours").status == 200  # whichever way it goes
    assert router.ask("/v1/completions", BODY, b"x-api-key: ours", b"Authorization: Bearer ours").status == 200
    assert router.ask("/v1/completions", BODY, b"x-api-key: ours", b"Authorization: Bearer other").status == 401
    for path in ("/v1/models", "/upstreams"):
        assert router.ask(path, None, b"x-api-key: ours").status == 200
        assert router.ask(path, None, b"x-api-key: other").status == 401
    assert all(not r.all(b"x-api-key") and r[b"authorization"] == b"Bearer theirs" for r in a.requests)


def test_own_answers_are_for_pages_too_and_for_head(mock, route):
    router = route(mock("m"), allowed_origins="*")
    answer = router.ask("/v1/models", None, b"Origin: https://page.example")
    assert answer[b"access-control-allow-origin"] == b"*"
    with router.wire() as wire:
        assert wire.send(request("HEAD", "/ready")).answer(head=True).status == 200


def test_a_line_of_the_log_is_a_line(mock, route, caplog, monkeypatch):
    router = route(mock("m"))

    def fails(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(router.router.forwarder.lines, "take", fails)
    path = "/v1/x" + urllib.parse.quote("\nFORGED")
    assert router.ask(path, None).status == 500
    (told,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "\nFORGED" not in told.getMessage()


def test_who_fails_and_is_well_again_during_one_check_serves_who_waits(mock, route, monkeypatch):
    """It is tried before and after the check: that looked as if nothing had happened, and a free slot was given to
    nobody until the next check."""
    monkeypatch.setattr("hibachi.router.checks.WHILE_ILL", 60.0)
    a = mock("m")
    router = route(a, check_interval=60.0, wait_for=20.0, fall=1)
    u, go = router.of(a), threading.Event()
    a.check = lambda request: [go, of_json({"data": [{"id": "m"}]})]
    router.call(lambda: setattr(u, "state", UpstreamState.TRIED))
    router.call(router.router.reload)  # which checks all at once
    eventually(lambda: len(a.checks) > 1)
    router.call(lambda: failed(u, "it failed"))
    asking = router.asking("/v1/completions", BODY)
    eventually(lambda: router.waiting)
    a.check = None
    go.set()
    assert asking.result().status == 200


def test_names_of_models_are_short_and_on_one_line(mock, route, caplog):
    """An upstream may call its models what it likes."""
    with caplog.at_level("INFO", "hibachi.route"):
        router = route(mock("x" * 1_000_000, "a\nFORGED"))
        eventually(lambda: "takes requests" in caplog.text)
    (line,) = [r.getMessage() for r in caplog.records if "takes requests" in r.getMessage()]
    message = router.ask("/v1/completions", b'{"model": "other"}').error["message"]
    assert all(len(told) < 400 and "\n" not in told and "FORGED" in told for told in (line, message))
