"""Upstreams that fail fast attract nothing: what is a fault of theirs, how it weighs, and how an answer ends then."""

from __future__ import annotations

import json
import random
import threading
import time

import pytest

from hibachi.router import outliers
from hibachi.router.dialects import stream_form
from hibachi.router.health import Thresholds, bad_check, good_check
from hibachi.router.inspect_answer import LONGEST_LINE, reader_of
from hibachi.router.policynames import POLICIES
from hibachi.router.upstreams import Place, Upstream, UpstreamState

from .broken import BODY, CHAT, CUT, DONE, EVENT, FAILED, HEAD, KINDS, ask_all, broken, good
from .conftest import eventually, routing
from .mocks import CLOSE, RESET, chunk, sse

SSE, JSON = {"Content-Type": "text/event-stream; charset=utf-8"}, {"Content-Type": "application/json"}


def quick(kind: str, policy: str, requests: int) -> bool:
    first = kind == "cuts the stream"
    if requests > 30:
        return policy == "least-connection" and (first or kind == "alternates")
    return policy == "least-connection" or first


@pytest.mark.parametrize(
    "kind, policy, requests, at_once, most",
    [
        pytest.param(kind, policy, *load, marks=() if quick(kind, policy, load[0]) else pytest.mark.slow)
        for kind in KINDS
        for policy in POLICIES
        for load in ((30, 1, 2), (1000, 16, 20))
    ],
)
def test_who_is_broken_is_met_by_few(kind, policy, requests, at_once, most):
    bad, well = broken(kind), good()
    try:
        with routing(bad, well, policy=policy, check_interval=10.0) as here:
            ask_all(here, requests, at_once)
            assert len(bad.requests) <= most
            assert len(bad.requests) + len(well.requests) >= requests
            if kind != "alternates":
                assert len(well.requests) >= requests - most
    finally:
        bad.close()
        well.close()


def test_who_waits_is_not_given_to_who_is_broken():
    """With one request at a time for each, as with text-inference-batcher, the broken one is nearly always free."""
    bad, well = broken("cuts the stream"), good()
    try:
        with routing(bad, well, max_connections=1) as here:
            ask_all(here, 100, 16)
            assert len(bad.requests) <= 4 and len(well.requests) >= 96
    finally:
        bad.close()
        well.close()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", ["slow, then cuts", "ends without its end", "200 with an error"])
def test_where_all_are_broken_they_still_get_requests(count, kind):
    all_broken = [broken(kind) for _ in range(count)]
    try:
        with routing(*all_broken) as here:
            began = time.monotonic()
            ask_all(here, 40, 8)
            assert time.monotonic() - began < 10
            assert sum(len(one.requests) for one in all_broken) == 40
            assert kind != "slow, then cuts" or min(one.most for one in all_broken) == 8 // count
    finally:
        for one in all_broken:
            one.close()


def test_a_suspect_is_tried_with_one_request_at_a_time_and_comes_back(mock, route, monkeypatch):
    monkeypatch.setattr(outliers, "SPARSE", 40.0)
    bad, well, gate = mock("m", script=lambda r: CUT), good(), threading.Event()
    well.delay = 0.05  # so that it is not asked first
    here = route(bad, well)
    ask_all(here, 4, 1)
    assert len(bad.requests) == 1 and not here.of(bad).mass  # a failure is no latency
    (told,) = [u for u in here.ask("/upstreams", None).json["upstreams"] if u["name"] == bad.url]
    assert told["state"] == "tried" and "50% of its answers failed of late (it did not end its answer" in told["why"]
    assert here.figures()[f'hibachi_route_up{{upstream="{bad.url}"}}'] == 0.5
    checks = len(bad.checks)
    eventually(lambda: len(bad.checks) > checks + 2)  # a list of models does not mend it
    assert outliers.suspect(here.of(bad))
    bad.script = lambda r: [gate, *sse([EVENT, DONE])]
    bad.requests.clear()
    asking = [here.asking(CHAT, BODY) for _ in range(12)]
    eventually(lambda: bad.running == 1)
    ask_all(here, 12, 1)
    assert len(bad.requests) == 1
    gate.set()
    assert all(each.result().whole for each in asking)
    for _ in range(20):
        ask_all(here, 12, 3)
    assert not outliers.suspect(here.of(bad)) and len(bad.requests) > 60
    well.close()


# ---- what is whose fault -----------------------------------------------------------------------------------------

CREATED = b'event: response.created\ndata: {"type": "response.created", "response": {"error": null}}\n\n'
STARTS = b'event: message_start\ndata: {"type": "message_start", "message": {"content": []}}\n\n'
TOKEN = b'data: {"token": {"id": 1, "text": "a"}, "generated_text": null, "details": null}\n\n'
QUOTED = b'data: {"choices": [{"delta": {"content": "data: [DONE]\\n\\"error\\": {}"}}]}\n\n'


def responses(kind, error=b"null"):
    about = b'{"type": "response.%s", "sequence_number": 2, "response": {"error": %s}}' % (kind, error)
    return b"event: response.%s\ndata: %s\n\n" % (kind, about)


@pytest.mark.parametrize(
    "path, whole, more",
    [
        (CHAT, EVENT + DONE, b""),
        ("/v1/engines/m/completions", EVENT + b"data:[DONE]\n\n", b""),
        (CHAT, (EVENT + DONE).replace(b"\n", b"\r\n"), b""),
        ("/v1/responses", CREATED + responses(b"completed"), DONE),
        ("/v1/responses", CREATED + responses(b"incomplete"), b""),
        ("/v1/responses", CREATED + responses(b"completed", b'null, "x": "' + b"x" * 99_999 + b'"'), b""),
        ("/v1/messages", STARTS + b'event: message_stop\ndata: {"type": "message_stop"}\n\n', b""),
        ("/generate_stream", TOKEN + TOKEN.replace(b"null", b'"a"', 1), b""),
        ("/v1/generate", b'data: {"tokens": [1]}\n\ndata: {"finish_reason": "stop", "stop_reason": null}\n\n', b""),
    ],
)  # fmt: skip
def test_a_stream_without_its_last_event_is_a_fault(path, whole, more):
    """However its bytes come, and all of them pass."""
    first = whole[: whole.index(b"\n\n" if b"\r" not in whole else b"\r\n\r\n") + 2]
    for told, right in ((whole + more, True), (first, False), (first + QUOTED, False), (b"", False)):
        for size in (1, 7, 10**9):
            reader = reader_of(stream_form(path), SSE)
            parts = [reader.feed(told[i : i + size]) for i in range(0, len(told), size)]
            assert b"".join([*parts, reader.end()]) == told
            assert (not reader.fault, reader.refused) == (right, False), (told[:200], size)
    assert not reader_of(stream_form("/v1/audio/speech"), SSE).fault  # whose end is not known


ERRORS = [  # and whether it blames the request
    ({"error": {"message": "no", "type": "server_error", "param": None, "code": "engine_failed"}}, False),
    ({"error": {"message": "no"}}, False),
    ({"error": "no", "error_type": "generation"}, False),
    ({"type": "error", "error": {"type": "api_error", "message": "no"}}, False),
    ({"object": "error", "message": "no", "type": "internal_error", "code": 500}, False),
    ({"type": "error", "sequence_number": 1, "code": "model_fault", "message": "no", "param": None}, False),
    ({"type": "response.failed", "response": {"error": {"code": "server_error", "message": "no"}}}, False),
    ({"error": {"message": "no", "type": "invalid_request_error", "param": "prompt"}}, True),
    ({"error": {"message": "no", "type": "BadRequestError", "code": 400}}, True),
    ({"error": {"message": "no", "code": 429, "status": "RESOURCE_EXHAUSTED"}}, True),
    ({"error": "no", "error_type": "validation"}, True),
    ({"type": "error", "error": {"type": "overloaded_error", "message": "no"}}, True),
    ({"type": "error", "error": {"type": "api_error", "details": {"error_code": "context_length_exceeded"}}}, True),
    ({"type": "response.failed", "response": {"error": {"code": "rate_limit_exceeded", "message": "no"}}}, True),
]


@pytest.mark.parametrize("told, blames", ERRORS)
def test_an_error_with_status_200_is_a_fault_unless_it_blames_the_request(told, blames):
    data = json.dumps(told).encode()
    for before in (b"", EVENT, b": waiting\n\n"):
        for after in (b"", DONE):
            reader = reader_of(stream_form(CHAT), SSE)
            reader.feed(before + b"data: " + data + b"\n\n" + after)
            reader.end()
            assert (bool(reader.fault), reader.refused) == (not blames, blames)
    reader = reader_of(None, JSON)
    assert reader.feed(data) == data and not reader.end()
    assert (bool(reader.fault), reader.refused) == (not blames, blames)


@pytest.mark.parametrize(
    "body, fault",
    [
        (b'{"object": "response", "error": null, "tools": [{"properties": {"error": {"type": "string"}}}]}', False),
        (b'[{"generated_text": "a \\"error\\""}]\n', False),
        (b'{"error": {"message": "' + b"x" * 99_999 + b'"}}', False),  # no error is as long
        (b'{"choices": [{"text": "a', True),
        (b"", True),
    ],
)
def test_what_is_an_answer_in_json(body, fault):
    reader = reader_of(None, JSON)
    assert b"".join([reader.feed(body[i : i + 1000]) for i in range(0, len(body), 1000)]) == body
    assert (reader.end(), bool(reader.fault)) == (b"", fault)


def test_an_event_error_is_one_whatever_its_data():
    reader = reader_of(None, SSE)
    reader.feed(b"event: error\n")
    reader.feed(b"data: out of luck\n\n")
    assert reader.fault == "an event of a stream is an error"
    long = b"data: " + b"x" * LONGEST_LINE
    assert reader.feed(long) == long and reader.feed(b"x") == b"" and reader.end() == b"x"


# ---- how a stream that breaks ends -------------------------------------------------------------------------------

NUMBERED = b'data: {"type": "response.created", "sequence_number": 41}\n\n'


@pytest.mark.parametrize(
    "path, before, name, kind",
    [
        (CHAT, EVENT, None, ("error", "code", "upstream_failed")),
        ("/v1/completions", b"", None, ("error", "code", "upstream_failed")),
        ("/v1/responses", NUMBERED, "error", ("type", "error")),
        ("/v1/messages", STARTS, "error", ("error", "type", "api_error")),
        ("/generate_stream", TOKEN, None, ("error_type", "incomplete_generation")),
    ],
)
@pytest.mark.parametrize("torn", [b"", b'data: {"half'])
def test_a_stream_that_breaks_ends_with_an_event_of_its_dialect(mock, route, path, before, name, kind, torn):
    """Behind whole events only, so that clients read it."""
    one = mock("m", script=lambda r: [HEAD, chunk(before + torn or b": waiting\n\n"), 0.02, CLOSE])
    answer = route(one).ask(path, BODY)
    assert answer.whole and answer.status == 200
    assert answer.body.startswith(before) and b"half" not in answer.body
    events = [e for e in answer.body.decode().split("\n\n") if e.strip() and e + "\n\n" != DONE.decode()]
    field, _, data = events[-1].rpartition("data: ")
    assert field == (f"event: {name}\n" if name else "")
    told = json.loads(data)
    assert answer.body.endswith(DONE) == (path in (CHAT, "/v1/completions"))
    if before is NUMBERED:
        assert told["sequence_number"] == 42 and told["code"] == "upstream_failed"
    for key in kind[:-1]:
        told = told[key]
    assert told == kind[-1]


@pytest.mark.parametrize(
    "path, begin",
    [
        ("/v1/audio/speech", HEAD + chunk(EVENT)),
        (CHAT, b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\n" + EVENT),
        (CHAT, b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{"),
    ],
)
def test_what_no_event_can_end_is_cut_off(mock, route, path, begin):
    one = mock("m", script=lambda r: [begin, 0.02, CLOSE])
    here = route(one)
    answer = here.ask(path, BODY)
    assert answer.status == 200 and not answer.whole
    assert here.of(one).last_fault.startswith("it did not end its answer")


@pytest.mark.parametrize("last, errors", [(DONE, 0), (FAILED, 1), (FAILED.replace(b"server", b"rate_limit"), 0)])
def test_what_breaks_behind_the_last_event_is_whole(mock, route, last, errors):
    one = mock("m", script=lambda r: [HEAD, chunk(EVENT + last), 0.02, RESET])
    here = route(one)
    answer = here.ask(CHAT, BODY)
    assert answer.whole and answer.body == EVENT + last
    eventually(lambda: not here.of(one).in_flight)
    assert here.of(one).errors.total() == errors and bool(here.of(one).last_fault) == bool(errors)


# ---- how faults weigh --------------------------------------------------------------------------------------------


def upstream(*answers: bool) -> Upstream:
    u = Upstream(Place("http://a"), UpstreamState.UP)
    for right in answers:
        outliers.whole(u) if right else outliers.fault(u, "no", 0.0)
    return u


def test_faults_weigh_by_their_share_of_recent_answers():
    assert not outliers.suspect(upstream(*[True] * 30, False))
    gaps = [upstream(*[i % n > 0 for i in range(400)]).gap for n in (50, 10, 4, 2, 1)]
    assert gaps == sorted(gaps) and gaps[0] < 1 < gaps[1] < 10 and gaps[3] > 250 and gaps[4] > 2000
    u = upstream(*[False] * 50, *[True] * 60)
    assert not outliers.suspect(u)  # what is long ago is forgotten


def test_what_mends_a_suspect_and_what_does_not():
    u, limits = upstream(False, False, False), Thresholds()
    before = u.gap
    for _ in range(9):
        good_check(u, {}, 0.01, limits)
    bad_check(u, "late", limits)
    good_check(u, {}, 0.01, limits)
    assert u.gap == before and outliers.suspect(u)
    outliers.fault(u, "no", 0.0)
    outliers.take_back(u)  # the request's fault, not its own
    assert u.gap < before
    bad_check(u, "no connection", limits, gone=True)
    good_check(u, {}, 0.01, limits)  # it began again
    assert 1 < u.gap < 50 and u.until == 0.0
    for _ in range(4):
        outliers.whole(u)
    assert not outliers.suspect(u)


def test_a_suspect_rests_for_a_number_of_requests_or_for_some_time():
    bad, well = upstream(False, False), upstream(True)
    both, gap = [bad, well], bad.gap
    assert outliers.trusted(both, 0.0) == [well] and outliers.trusted([bad], 0.0) == [bad]
    for _ in range(int(gap)):
        assert not outliers.given(well, both, 0.0) and bad not in outliers.trusted(both, 0.0)
    outliers.given(well, both, 0.0)
    assert bad in outliers.trusted(both, 0.0)
    bad.trial = object()
    assert bad not in outliers.trusted(both, 1e9)  # one at a time
    bad.trial = None
    assert outliers.given(bad, both, 0.0) and bad not in outliers.trusted(both, 0.0)
    assert bad in outliers.trusted(both, max(30.0, gap / 10) + 1e-6)
    assert not outliers.given(bad, [bad], 0.0)


def test_a_failure_is_no_latency():
    """What it was measured as can be taken back later, exactly."""
    draw = random.Random(1)
    for _ in range(100):
        u, kept, wrong = upstream(), [], []
        for _ in range(draw.randrange(12)):
            seconds = draw.random()
            (kept if draw.random() < 0.5 else wrong).append((seconds, u.took(seconds)))
        draw.shuffle(wrong)
        for seconds, number in wrong:
            u.took_not(seconds, number)
        weights = [0.8 ** (u.samples - n) for _, n in kept]
        mean = sum(w * seconds for w, (seconds, _) in zip(weights, kept, strict=True))
        assert u.latency == (pytest.approx(mean / sum(weights)) if kept else None) and bool(u.mass) == bool(kept)
        before = u.latency
        u.took_not(0.5, u.took(0.5, telling=False))  # it was none
        assert u.latency == before
