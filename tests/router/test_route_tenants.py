"""Tenants of a router before a server that has one key for all of them, or none."""

import json

import pytest

from hibachi.server.web.tenants import PART, Tenants, named_part

from ..serve.conftest import CHATML, ENGINES, site
from .conftest import BODY
from .mocks import full

URL = "/v1/responses"
A, B = b"Authorization: Bearer one", b"X-Api-Key: two"
MINE = PART.encode() + b": "


def of(name):
    """The header that the router sends for a tenant."""
    return MINE + named_part(name, ()).encode()


@pytest.fixture(scope="module")
def texts():
    with ENGINES["own"]("tiny", max_num_seqs=4) as found:
        yield found


@pytest.fixture(params=["no key", "one key"])
def server(request, texts):
    keys = (("theirs", "router"),) if request.param == "one key" else ()
    with site(texts, chat_template=CHATML, tenants=Tenants(keys)) as here:
        yield here


def respond(here, *lines, **fields):
    body = {"input": "One?", "temperature": 0, "max_output_tokens": 4, **fields}
    return here.ask(URL, json.dumps(body).encode(), *lines)


def deleted(here, path, *lines):
    with here.wire() as wire:
        return wire.send(
            b"\r\n".join((b"DELETE %s HTTP/1.1" % path.encode(), b"Host: localhost", *lines, b"", b""))
        ).answer()


def tries(here, told, *lines):
    """Statuses of all ways to what is kept; the last one forgets it."""
    path = f"{URL}/{told['id']}"
    reference = {"type": "item_reference", "id": told["output"][0]["id"]}
    return [
        here.ask(path, None, *lines).status,
        here.ask(f"{path}/input_items", None, *lines).status,
        respond(here, *lines, previous_response_id=told["id"], store=False).status,
        respond(here, *lines, input=[reference], store=False).status,
        deleted(here, path, *lines).status,
    ]


def test_what_another_tenant_of_the_router_keeps_is_not_found(server, route):
    here = route(server.url, api_key=["one", "two"], upstream_key="theirs")
    told = respond(here, A).json
    for lines in ((B,), (B, of("key1")), (B, of("key2")), (B, MINE + b"x", MINE + b"y")):
        assert tries(here, told, *lines) == [404] * 5
    other = respond(here, B).json
    assert tries(here, other, A, of("key2")) == [404] * 5
    assert tries(here, told, A) == tries(here, other, B) == [200] * 5
    assert tries(here, told, A) == [404] * 5


def test_routers_before_a_server_agree_and_one_behind_another_tells_tenants_apart(server, route):
    """Also where each has keys of its own."""
    inner = [route(server.url, api_key="middle", upstream_key="theirs") for _ in range(2)]
    outer = [route(each.url, api_key=["one", "two"], upstream_key="middle") for each in inner]
    told = respond(outer[0], A).json
    assert tries(outer[1], told, B) == [404] * 5
    assert tries(inner[0], told, b"Authorization: Bearer middle") == [404] * 5
    assert tries(outer[1], told, A) == [200] * 5


def test_without_keys_of_its_own_the_router_tells_nobody_apart(texts, route, mock):
    a = mock("m", script=lambda r: [full()])
    here = route(a)
    assert here.ask("/v1/completions", BODY, A).status == 200
    assert here.ask("/v1/completions", BODY, A, MINE + b"x").status == 200  # perhaps of a router in front
    assert [r.all(PART.encode()) for r in a.requests] == [[], [b"x"]]
    with site(texts, chat_template=CHATML) as server:
        here = route(server.url)
        assert tries(here, respond(here, A).json, B) == [200] * 5


def test_one_header_that_tells_no_name_and_no_key(mock, route):
    a = mock("m", script=lambda r: [full()])
    here = route(a, api_key=["one", "two"])
    for lines in ((A,), (A,), (B,), (A, MINE + b"x"), (A, MINE + b"x", MINE + b"y")):
        assert here.ask("/v1/completions", BODY, *lines).status == 200
    sent = [r.all(PART.encode()) for r in a.requests]
    assert {len(values) for values in sent} == {1}
    first, again, *others = (value for (value,) in sent)
    assert first == again and len({first, *others}) == 4
    assert all(len(value) == 32 and not {b"one", b"two", b"key1", b"x"} & {value} for value in (first, *others))


def test_tenants_of_the_router_share_cached_prefixes_only_where_the_server_lets_them(texts, route):
    def cached(here, prompt, line):
        body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
        return here.ask("/v1/completions", body, line).json["usage"]["prompt_tokens_details"]["cached_tokens"]

    for shares in (False, True):
        prompt = f"Emma Woodhouse, handsome, clever, and rich ({shares}). " * 6
        with site(texts, tenants=Tenants(share_prefixes=shares)) as server:
            here = route(server.url, api_key=["one", "two"])
            assert cached(here, prompt, A) == 0
            assert bool(cached(here, prompt, B)) is shares
            assert cached(here, prompt, A) > 0 and cached(here, prompt, B) > 0


@pytest.mark.parametrize("value", [b"", b"x" * 60_000, b"\xff\xfe", b"a b"])
def test_any_value_divides_and_none_is_refused(texts, route, value):
    with site(texts, chat_template=CHATML) as server:
        headers = {PART: value}
        told = server.post(URL, {"input": "One?", "max_output_tokens": 4}, headers=headers).json()
        path = f"{URL}/{told['id']}"
        assert server.client.get(path).status_code == 404
        assert server.client.get(path, headers={PART: value + b"x"}).status_code == 404
        assert server.client.get(path, headers=headers).status_code == 200
