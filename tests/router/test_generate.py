"""/v1/generate through the router: the model stands in a body of JSON or msgpack, or in the query."""

import msgspec
import pytest

from hibachi.api.errors import Refused
from hibachi.router.peek import look, model_of_query
from hibachi.router.routes import Kind, Routes

from .mocks import full

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


def test_it_may_be_tried_again_elsewhere():
    assert Routes().kind("POST", PATH) is Kind.GENERATES


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
