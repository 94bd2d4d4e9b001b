"""Anthropic's Messages API through the router: what passes, where it goes, whose it is, and what the router says."""

from __future__ import annotations

import json
import threading
from collections import Counter
from itertools import count

import pytest

from hibachi.router.upstreams import UpstreamState

from .conftest import BODY, eventually
from .mocks import full, of_json, sse

VERSION = b"anthropic-version: 2023-06-01"
PATH = "/v1/messages"


def body(n, turn=0, *, system=None, field="messages"):
    """Of conversation n. Its beginning is 4 KB long."""
    said = f"conversation {n} " + "and so on " * 400
    told = [{"role": "user", "content": [{"type": "text", "text": said}]}]
    told += [{"role": "user", "content": "go on"}] * turn
    given = {"model": "m", field: told, "max_tokens": 5}
    if system is not None:
        given[field], given["system"] = [{"role": "user", "content": f"turn {turn}"}], system(said)
    return json.dumps(given).encode()


COUNT = count()
SYSTEMS = {
    "text": lambda said: said,
    "billed": lambda said: [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={next(COUNT):05x};"},
        {"type": "text", "text": said},
    ],
    "blocks": lambda said: [{"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}],
}


@pytest.mark.parametrize("path, more", [
    (PATH, {}),
    (PATH, {"system": SYSTEMS["text"]}),
    (PATH, {"system": SYSTEMS["blocks"]}),
    (PATH, {"system": SYSTEMS["billed"]}),
    ("/v1/messages/count_tokens", {}),
    ("/v1/responses", {"field": "input"}),
], ids=["messages", "system", "blocks of system", "what differs in front", "count", "input"])  # fmt: skip
def test_conversations_stay_where_they_began(mock, route, path, more):
    four = [mock("m") for _ in range(4)]
    router = route(*four, policy="prefix-affine")

    def home(n, turn):
        return router.ask(path, body(n, turn, **more))[b"x-upstream-origin"]

    homes = [home(n, 0) for n in range(12)]
    assert homes == [home(n, 1) for n in range(12)] == [home(n, 2) for n in range(12)]
    assert len(Counter(homes)) > 1


def test_a_stream_passes_as_it_is(mock, route):
    events = [
        b"event: message_start\ndata: {}\n\n",
        b'event: ping\ndata: {"type": "ping"}\n\n',
        b"event: message_stop\n",
    ]
    a = mock("m", script=lambda r: sse(events))
    router = route(a)
    answer = router.ask(PATH + "?beta=true", BODY, VERSION, b"anthropic-beta: x", b"x-api-key: theirs")
    assert answer.body == b"".join(events)
    (sent,) = a.requests
    assert sent.target == b"/v1/messages?beta=true" and sent[b"x-api-key"] == b"theirs"
    assert (sent[b"anthropic-version"], sent[b"anthropic-beta"]) == (b"2023-06-01", b"x")


def overloaded(code):
    about = {"type": "overloaded_error", "message": "no", **({"details": {"error_code": code}} if code else {})}
    return of_json({"type": "error", "error": about}, 529, b"Retry-After: 1")


@pytest.mark.parametrize("code", ["shutting_down", "out_of_memory", None])
def test_what_is_overloaded_is_tried_elsewhere(mock, route, code):
    """Also where it says so in Anthropic's words, and is not ill for that."""
    a, b = mock("m"), mock("m")
    router = route(a, b)
    a.script = b.script = lambda r: [overloaded(code)] if r is first() else [of_json({"ok": True})]

    def first():
        return min((r for u in (a, b) for r in u.requests), key=lambda r: r.came)

    assert router.ask(PATH, BODY).json == {"ok": True}
    assert len(a.requests) == len(b.requests) == 1
    assert all(not u.bad and not u.faults for u in (router.of(a), router.of(b)))


def test_an_engine_that_failed_is_ill(mock, route):
    a, b = mock("m"), mock("m")
    router = route(a, b)
    a.script = b.script = lambda r: [overloaded("engine_failed")] if len(a.requests + b.requests) < 2 else [full()]
    assert router.ask(PATH, BODY).status == 200
    assert router.of(a).faults + router.of(b).faults == 1


def late(code):
    about = {"type": "timeout_error", "message": "no", "details": {"error_code": code}}
    return of_json({"type": "error", "error": about}, 504)


def test_a_late_request_is_no_fault_of_its_server(mock, route):
    """408 in OpenAI's dialect is 504 in Anthropic's: both pass on as they are, however often they come."""
    a, b = mock("m"), mock("m")
    a.script = b.script = lambda r: [late("deadline_exceeded")]
    router = route(a, b, check_interval=30)
    answers = [router.ask(PATH, BODY) for _ in range(3)]
    assert {(answer.status, answer.error["details"]["error_code"]) for answer in answers} == {
        (504, "deadline_exceeded")
    }
    assert len(a.requests + b.requests) == 3 and not router.router.forwarder.meter.poisonous
    assert all((u.state, u.faults) == (UpstreamState.UP, 0) for u in (router.of(a), router.of(b)))
    assert router.of(a).answers[504] + router.of(b).answers[504] == 3


@pytest.mark.parametrize("code", ["upstream_timeout", "broken"])
def test_another_504_is_a_fault(mock, route, code):
    """Such as that of a router or a proxy whose server says nothing."""
    a, b = mock("m"), mock("m")
    a.script = b.script = lambda r: [late(code)] if len(a.requests + b.requests) < 2 else [full()]
    router = route(a, b)
    assert router.ask(PATH, BODY).status == 200
    assert router.of(a).faults + router.of(b).faults == 1


def test_clients_are_told_apart_by_either_header(mock, route):
    go = threading.Event()
    a = mock("m", script=lambda r: [go, of_json({})])
    router = route(a, max_connections=1, max_num_queued_reqs=3)
    greedy, same, small = b"x-api-key: greedy", b"Authorization: Bearer greedy", b"x-api-key: small"
    asking = [router.asking(PATH, BODY, greedy)]
    eventually(lambda: a.running == 1)
    for n, header in enumerate((greedy, same, greedy)):
        asking.append(router.asking(PATH, BODY, header))
        eventually(lambda n=n: router.waiting == n + 1)
    other = router.asking(PATH, BODY, small)
    refused = asking[-1].result()  # its newest
    assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
    go.set()
    assert other.result().status == 200
    assert [each.result().status for each in asking[:-1]] == [200] * 3


def test_models_in_both_shapes(mock, route):
    a, b = mock("m"), mock("n/o")
    a.check = lambda r: [of_json({"data": [{"id": "m", "created": 86400, "max_model_len": 512}]})]
    b.check = lambda r: [of_json({"data": [{"id": "n/o", "created": "long ago", "max_model_len": None}]})]
    router = route(a, b)
    page = router.ask("/v1/models", None, VERSION).json
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("m", "n/o", False)
    one, two = page["data"]
    assert one == {
        "type": "model", "id": "m", "display_name": "m", "created_at": "1970-01-02T00:00:00Z", "max_input_tokens": 512,
        "lifecycle": "active",
    }  # fmt: skip
    assert (two["id"], two["created_at"], two["max_input_tokens"]) == ("n/o", "1970-01-01T00:00:00Z", None)
    assert [m["id"] for m in router.ask("/v1/models", None).json["data"]] == ["m", "n/o"]


def test_errors_about_models_are_in_the_clients_dialect(mock, route):
    router = route(mock("m"), api_key="k")
    answer = router.ask("/v1/models", None, VERSION)
    assert (answer.status, answer.json["type"], answer.error["type"]) == (401, "error", "authentication_error")
    answer = router.ask("/v1/models/other", None, VERSION, b"x-api-key: k")
    assert (answer.status, answer.error["type"]) == (404, "not_found_error")
    assert router.ask("/v1/models/other", None, b"x-api-key: k").error["type"] == "invalid_request_error"
