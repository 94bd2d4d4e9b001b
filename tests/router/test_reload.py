"""Upstreams come, go and change, and the router ends: nobody's request is lost over it."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time

import pytest

from hibachi.router import run
from hibachi.router.policies import Homes
from hibachi.router.upstreams import Place, Upstream, UpstreamState

from .conftest import BODY, JSON, Wire, ask, eventually, hup, request
from .mocks import full, of_json, sse

EVENTS = [b'data: {"n": %d}\n\n' % n for n in range(4)]
TABLE = "[[upstream]]\nurl = '{}'\n"


@pytest.fixture
def written(tmp_path):
    """written(text): the file of the configuration, whose name it returns."""

    def write(text):
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(tmp_path / "route.toml")
        return str(tmp_path / "route.toml")

    return write


def streaming(port: int) -> Wire:
    """A request whose first event is here."""
    wire = Wire(port, seconds=60).send(request("POST", "/v1/completions", b'{"model": "m", "stream": true}', JSON))
    wire.until(EVENTS[0] + b"\r\n")
    return wire


def rest(wire: Wire) -> bytes:
    """The events that follow, which must come to their end."""
    with wire:
        wire.data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + wire.data
        answer = wire.answer()
    assert answer.whole
    return answer.body


REST = b"".join(EVENTS[1:])


def names(port: int) -> dict[str, dict]:
    return {u["name"]: u for u in ask(port, "/upstreams", None).json["upstreams"]}


# ---- SIGHUP ----------------------------------------------------------------------------------------------------


def test_the_file_is_read_again_and_no_stream_breaks(mock, spawn, written):
    """One upstream stays with another limit, one leaves with a stream on it, one comes."""
    gate = threading.Event()
    stays, leaves, comes = mock("m"), mock("m"), mock("m")
    stays.delay, leaves.script = 0.3, lambda r: sse(EVENTS, gate)
    config = written(TABLE.format(stays.url) + "limit = 3\n" + TABLE.format(leaves.url))
    router = spawn("--port", "0", "--config", config, "--check-interval", "0.2").listening()
    wire = streaming(router.port)
    assert leaves.running == 1
    written(TABLE.format(stays.url) + "limit = 5\nweight = 2\n" + TABLE.format(comes.url))
    hup(router)
    eventually(lambda: names(router.port).get(comes.url, {}).get("state") == "up")
    now = names(router.port)
    assert (now[stays.url]["state"], now[stays.url]["limit"]) == ("up", 5)
    assert (now[leaves.url]["state"], now[leaves.url]["in_flight"]) == ("draining", 1)
    assert {ask(router.port).json["port"] for _ in range(6)} <= {stays.port, comes.port}
    assert len(leaves.requests) == 1
    gate.set()
    assert rest(wire) == REST
    n = len(leaves.checks)
    assert ask(router.port).status == 200
    checks = len(comes.checks)
    eventually(lambda: len(comes.checks) > checks + 3)
    assert len(leaves.checks) == n  # nobody asks it any more


def test_a_smaller_limit_holds_from_then_on(mock, spawn, written):
    gate = threading.Event()
    one = mock(script=lambda r: [gate, of_json({})])
    config = written(TABLE.format(one.url) + "limit = 2\n")
    router = spawn("--port", "0", "--config", config).listening()
    asked = []

    def go():
        asked.append(ask(router.port).status)

    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads[:2]:
        thread.start()
    eventually(lambda: one.running == 2)
    written(TABLE.format(one.url) + "limit = 1\n")
    hup(router)
    eventually(lambda: names(router.port)[one.url]["limit"] == 1)
    for thread in threads[2:]:
        thread.start()
    eventually(lambda: ask(router.port, "/upstreams", None).json["waiting"] == 2)
    one.most = 0
    gate.set()
    for thread in threads:
        thread.join()
    assert asked == [200] * 4 and one.most == 1


def test_who_waits_gets_what_comes(mock, spawn, written):
    """A limit that grows, and an upstream that comes, serve those who wait."""
    gate = threading.Event()
    one, other = mock(script=lambda r: [gate, of_json({})]), mock()
    config = written(TABLE.format(one.url) + "limit = 1\n")
    router = spawn("--port", "0", "--config", config).listening()
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(ask(router.port))) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: ask(router.port, "/upstreams", None).json["waiting"] == 2)
    written(TABLE.format(one.url) + "limit = 1\n" + TABLE.format(other.url))
    hup(router)
    eventually(lambda: len(answers) == 2)
    assert {a.json["port"] for a in answers} == {other.port}
    gate.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("text", ["[[upstream]\n", "[[upstream]]\nurl = 'http://x/p'\n", "[[upstream]]\n", "", None])
def test_a_broken_file_changes_nothing(mock, spawn, written, tmp_path, text):
    one = mock()
    config = written(TABLE.format(one.url))
    router = spawn("--port", "0", "--config", config).listening()
    if text is None:
        (tmp_path / "route.toml").unlink()
    else:
        written(text)
    hup(router)
    assert "was not read again" in router.said and "Traceback" not in router.said
    assert ask(router.port).json["port"] == one.port
    assert router.process.poll() is None
    if text:
        other = mock()
        written(TABLE.format(other.url))
        hup(router)  # and a good one later does
        eventually(lambda: names(router.port).get(other.url, {}).get("state") == "up")
        assert list(names(router.port)) == [other.url]


# ---- the end ---------------------------------------------------------------------------------------------------


def test_running_streams_end_whole_after_sigterm(mock, spawn):
    """New requests are refused meanwhile, and the status is 0."""
    gate = threading.Event()
    one = mock(script=lambda r: sse(EVENTS, gate))
    router = spawn("--port", "0", one.url).listening()
    wire, kept = streaming(router.port), Wire(router.port)
    router.signal(signal.SIGTERM)
    eventually(lambda: "draining: 1 requests are running" in router.said)
    with kept:
        answer = kept.send(request("POST", "/v1/completions", BODY, JSON)).answer()
    assert (answer.status, answer.error["code"], answer[b"connection"]) == (503, "shutting_down", b"close")
    assert ask(router.port, "/ready", None).status == 503
    stranger = request("GET", "/health").replace(b"localhost", b"evil.example")
    with Wire(router.port) as other:  # a page whose name leads to this machine
        assert other.send(stranger).answer().error["code"] == "host_not_allowed"
    assert router.process.poll() is None
    gate.set()
    assert rest(wire) == REST
    assert router.ends() == 0
    assert "Traceback" not in router.said
    assert len(one.requests) == 1


def test_who_waits_when_the_end_comes_is_served(mock, spawn):
    gate = threading.Event()
    one = mock(script=lambda r: [gate, of_json({})])
    router = spawn("--port", "0", "--max-connections", "1", one.url).listening()
    answers = []
    two = [threading.Thread(target=lambda: answers.append(ask(router.port).status)) for _ in range(2)]
    for thread in two:
        thread.start()
    eventually(lambda: ask(router.port, "/upstreams", None).json["waiting"] == 1)
    router.signal(signal.SIGTERM)
    eventually(lambda: "draining" in router.said)
    gate.set()
    for thread in two:
        thread.join()
    assert answers == [200, 200]
    assert router.ends() == 0


def test_what_takes_too_long_is_cut_off(mock, spawn):
    """After the time that there is; the client is told that its answer is not whole."""
    never = threading.Event()
    one = mock(script=lambda r: sse(EVENTS, never))
    router = spawn("--port", "0", "--drain-timeout", "0.3", one.url).listening()
    wire = streaming(router.port)
    router.signal(signal.SIGTERM)
    with wire:
        assert b'"message":"The router is shutting down."' in wire.rest()
    assert router.ends() == 0
    assert "1 requests were not done after 0.3 s, and are cut off" in router.said
    assert one.requests[0].left.wait(20)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(mock, spawn, second):
    never = threading.Event()
    one = mock(script=lambda r: sse(EVENTS, never))
    router = spawn("--port", "0", "--drain-timeout", "60", one.url).listening()
    with streaming(router.port):
        router.signal(signal.SIGTERM)
        eventually(lambda: "draining" in router.said)
        router.signal(second)
        assert router.ends(20) == 128 + second


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_end_of_a_router_that_does_nothing(mock, spawn, number):
    """Also with an idle connection to it."""
    router = spawn("--port", "0", mock().url).listening()
    with Wire(router.port) as wire:
        assert wire.send(request("GET", "/health")).answer().status == 200
        began = time.monotonic()
        router.signal(number)
        assert router.ends() == 0
    assert time.monotonic() - began < 10
    assert "Traceback" not in router.said


# ---- a rolling update ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gently", [True, False], ids=["that drain", "that die"])
def test_two_upstreams_are_replaced_in_turn_and_no_request_fails(mock, route, gently):
    """Under a steady load. Requests that a dying server had are sent to the other one."""
    two = mock(), mock()
    for one in two:
        one.script = lambda r, one=one: [0.01, of_json({"port": one.port})]
    here = route(*two, check_interval=0.1, wait_for=10.0)
    over, found, wrong = threading.Event(), [], []

    def client():
        while not over.is_set():
            try:
                answer = here.ask()
                found.append(answer.json["port"])
                if answer.status != 200:
                    wrong.append(answer)
            except Exception as e:
                wrong.append(e)

    clients = [threading.Thread(target=client) for _ in range(4)]
    for thread in clients:
        thread.start()
    try:
        for one in two:
            other = two[1] if one is two[0] else two[0]
            for u in two:
                n = len(u.requests)
                eventually(lambda u=u, n=n: len(u.requests) > n + 5)
            one.stop(gently=gently)
            n = len(other.requests)
            eventually(lambda other=other, n=n: len(other.requests) > n + 20)
            eventually(lambda one=one: not here.of(one).takes)
            one.start()
            eventually(lambda one=one: here.of(one).state is UpstreamState.UP)
    finally:
        over.set()
        for thread in clients:
            thread.join()
    assert not wrong, (len(wrong), len(found), wrong[0])
    assert set(found) == {u.port for u in two}


# ---- names -----------------------------------------------------------------------------------------------------


@pytest.fixture
def addresses(monkeypatch):
    """A list that says what the name `many.test` stands for; with nothing in it, nobody knows."""
    told = []
    before = asyncio.base_events.BaseEventLoop.getaddrinfo

    async def look(self, host, port, **more):
        if host != "many.test":
            return await before(self, host, port, **more)
        if not told:
            raise socket.gaierror(socket.EAI_AGAIN, "nobody knows")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port or 0)) for address in told]

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", look)
    # In the place of uvloop, whose loop cannot be changed.
    monkeypatch.setattr("uvicorn.config.Config.get_loop_factory", lambda self: asyncio.SelectorEventLoop)
    return told


def test_a_name_with_several_addresses_is_several_upstreams(mock, route, addresses):
    """Looked up again every so often; each is asked with the name as its Host."""
    one = mock(script=lambda r: [full(200, r[b"host"])])
    addresses += ["127.0.0.1", "127.0.0.2"]
    place = f"http://many.test:{one.port}"
    here = route(place, resolve_interval=0.1)
    fleet = here.router.fleet
    listed = lambda: [u.name for u in fleet.upstreams]  # noqa: E731
    assert listed() == [f"{place}@127.0.0.1", f"{place}@127.0.0.2"]
    assert {c[b"host"] for c in one.checks} == {place.removeprefix("http://").encode()}
    answer = here.ask()
    assert answer.body == place.removeprefix("http://").encode()
    assert answer[b"x-upstream-origin"].decode() == f"{place} (127.0.0.1)"
    first = fleet.upstreams[0]
    addresses[:] = ["127.0.0.1", "127.0.0.3"]
    eventually(lambda: listed() == [f"{place}@127.0.0.1", f"{place}@127.0.0.3"])
    assert fleet.upstreams[0] is first  # with all that is known of it
    addresses.clear()
    time.sleep(0.5)
    assert listed() == [f"{place}@127.0.0.1", f"{place}@127.0.0.3"]  # nobody knows better
    addresses += ["127.0.0.1"]
    eventually(lambda: listed() == [place])


def test_an_older_look_does_not_undo_a_newer_one(mock, route, written, monkeypatch, caplog):
    """The names of the first file are found after those of the second."""
    one, two, three = mock(), mock(), mock()
    written(TABLE.format(one.url))
    here = route(config=written(TABLE.format(one.url)), resolve_interval=0)
    slow, calls = threading.Event(), []

    before = run.resolved

    async def resolved(places, known):
        calls.append(places)
        if len(calls) == 1:
            while not slow.is_set():
                await asyncio.sleep(0.005)
        return await before(places, known)

    monkeypatch.setattr(run, "resolved", resolved)
    caplog.set_level("INFO", "hibachi.route")
    fleet = here.router.fleet
    written(TABLE.format(two.url))
    here.call(here.router.reload)
    eventually(lambda: len(calls) == 1)
    written(TABLE.format(three.url))
    here.call(here.router.reload)
    eventually(lambda: caplog.text.count("the configuration was read again") == 2)
    time.sleep(0.1)
    slow.set()
    time.sleep(0.3)
    eventually(lambda: [u.name for u in fleet.upstreams] == [three.url], 3)


def test_addresses_of_a_long_name_have_homes_of_their_own():
    """What comes after the first 64 letters of a name tells them apart as well."""
    name = "http://hibachi-inference-servers.production-of-models.svc.cluster.local:8000"
    four = [Upstream(Place(name, f"10.0.0.{n}"), UpstreamState.UP) for n in range(4)]
    homes = {Homes().of(b"%d" % n, four).name for n in range(100)}
    assert len(homes) == 4
