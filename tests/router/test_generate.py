"""/v1/generate through the router: the model stands in a body of JSON or msgpack, or in the query."""

import msgspec
import pytest

from hibachi.llm.dialects.errors import Refused
from hibachi.router.inspect_body import look, model_of_query
from hibachi.router.routes import RouteKind, Routes

from .mocks import CLOSE, RESET, full, sse

PATH = "/v1/generate"
NPY = b"\x93NUMPY\x01\x00v\x00" + bytes(200)
MSGPACK = b"application/msgpack"
pack = msgspec.msgpack.encode


@pytest.mark.parametrize("kind", [MSGPACK, b"application/x-msgpack", b"Application/vnd.msgpack; x=y"])
def test_the_model_in_msgpack(kind):
    body = pack({"prompt": {"data": bytes(300), "model": "inner"}, "model": "m"})
    assert look(body, kind, b"", text=100) == ("m", b"")
    assert look(pack({"prompt": [1]}), kind, b"")[0] is None
    with pytest.raises(Refused, match="expected a text"):
        look(pack({"model": 5}), kind, b"")


@pytest.mark.parametrize("body", [b"", pack([1]), pack({"model": "m"})[:-1], b"\x81\xa1x" + b"\x91" * 100_000, b"{}"])
def test_what_is_no_map_in_msgpack(body):
    with pytest.raises(Refused, match="no valid map in msgpack") as e:
        look(body, MSGPACK, b"")
    assert (e.value.status, e.value.code) == (400, "invalid_msgpack")
    assert look(body, MSGPACK, b"", strict=False) == (None, b"")


@pytest.mark.parametrize(
    "query, model",
    [
        (b"model=m%20n&max_tokens=3", "m n"),
        (b"max_tokens=3", None),
        (b"", None),
        (b"model=", None),
        (b"model=\xff", None),
        (b"&".join([b"a=1"] * 2000), None),
    ],
)
def test_the_model_in_a_query(query, model):
    assert model_of_query(query) == model


@pytest.mark.parametrize("path", [PATH, "/v1/warm"])
def test_it_may_be_tried_again_elsewhere(path):
    assert Routes().kind("POST", path) is RouteKind.GENERATES


def test_what_is_warmed_goes_where_those_who_begin_so_will_go():
    body = b'{"model": "m", "text": "' + b"a" * 3000 + b'"}'
    warmed, asked = (look(b, b"application/json", b"", text=2048) for b in (body, body.replace(b'"text"', b'"prompt"')))
    assert warmed == asked and warmed[0] == "m" and len(warmed[1]) == 2048


def test_a_comment_is_the_first_byte(mock, route):
    """Behind it nothing is tried again, on any path; before it, it is."""
    good = list(sse([b": waiting\n\n", b"data: 1\n\n"]))
    for path in ("/v1/completions", "/generate_stream", PATH):
        bad, other = mock("m", script=lambda r: [*good[:2], CLOSE]), mock("m", script=lambda r: good)
        other.delay = 0.05  # so that it is not asked first
        here = route(bad, other)
        answer = here.ask(path, b'{"model": "m"}')
        assert answer.status == 200 and answer.body.startswith(b': waiting\n\ndata: {"error":')
        assert (len(bad.requests), len(other.requests)) == (1, 0)
    bad, other = mock("m", script=lambda r: [RESET]), mock("m", script=lambda r: good)
    other.delay = 0.05
    answer = route(bad, other).ask(PATH, b'{"model": "m"}')
    assert (answer.status, answer.whole, answer.body) == (200, True, b": waiting\n\ndata: 1\n\n")
    assert (len(bad.requests), len(other.requests)) == (1, 1)


@pytest.mark.parametrize("kind, where", [("generation", 1), ("overloaded", 0)])
def test_an_engine_that_failed_is_a_fault_in_tgis_words_too(mock, route, kind, where):
    body = b'{"error": "no", "error_type": "%s"}' % kind.encode()
    bad = mock("m", script=lambda r: [full(503, body, b"Retry-After: 1")])
    here = route(bad)
    assert here.ask("/generate", b'{"inputs": "a"}').body == body
    assert (here.of(bad).why == "it answered a request with 503") == bool(where)


def test_bodies_of_every_type_go_to_who_has_the_model_as_they_came(mock, route):
    a, b = mock("a"), mock("b")
    router = route(a, b)
    sent = {
        "msgpack": (PATH, pack({"model": "b", "prompt": [1]}), MSGPACK),
        "npy": (f"{PATH}?model=b&max_tokens=3", NPY, b"application/x-npy"),
        "own": (f"{PATH}?model=b", b"RIFF" + bytes(range(256)), b"audio/wav"),
        "json": (PATH, b'{"model": "b", "prompt": [[1, 2]]}', b"application/json"),
    }
    for target, body, kind in sent.values():
        answer = router.ask(target, body, b"Content-Type: " + kind)
        assert answer.status == 200
    assert not a.requests
    assert [(r.target.decode(), r.body, r[b"content-type"]) for r in b.requests] == list(sent.values())
    for target, name in ((PATH, "model_missing"), (f"{PATH}?model=c", "model_not_found")):
        assert router.ask(target, NPY, b"Content-Type: application/x-npy").error["code"] == name
    assert router.ask("/v1/completions?model=b", b'{"prompt": "x"}').error["code"] == "model_missing"


def test_an_answer_in_bytes_passes_and_a_failure_is_tried_elsewhere(mock, route):
    bad = mock("m", script=lambda request: [full(503, b"{}")])
    good = mock("m", script=lambda request: [full(200, b"\xc0\x81\xa1x\x00", b"Content-Type: application/msgpack")])
    router = route(bad, good)
    for _ in range(4):
        answer = router.ask(f"{PATH}?model=m", NPY, b"Content-Type: application/x-npy")
        assert (answer.status, answer.wire) == (200, b"\xc0\x81\xa1x\x00")
