"""Pages of other origins, names that lead to loopback, and a server under a path of a proxy (SERVER.md 2.4, 2.11)."""

from __future__ import annotations

import re
import socket
from types import SimpleNamespace

import pytest

from hibachi.errors import ConfigError
from hibachi.server.app import application, tells
from hibachi.server.server import surrounded
from hibachi.server.web.cors import OURS, origins_of
from hibachi.server.web.hosts import hosts_for
from hibachi.server.web.rooted import Rooted, root_of
from hibachi.server.web.tenants import Tenants

from .conftest import ENGINES, site

PAGE, LOCAL, EVIL = "https://page.example", "http://localhost:3000", "https://evil.example"
KEYED = {"Authorization": "Bearer k"}
ASKING = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-mine"}


@pytest.fixture(scope="module")
def model():
    with ENGINES["own"]("tiny", max_num_seqs=4) as texts:
        yield texts


@pytest.fixture(scope="module")
def here(model):
    """A server with a key, for pages of two origins."""
    with site(model, allowed_origins=(PAGE, LOCAL), tenants=Tenants((("k", "k"),)), max_body_size=2000) as found:
        yield found


def said(answer):
    """What an answer tells a browser, and caches."""
    return {n: v for n, v in answer.headers.items() if n.startswith(("access-control", "vary"))}


def marks(origin):
    return {
        "access-control-allow-origin": origin,
        "access-control-expose-headers": OURS.decode(),
        "vary": "Origin",
    }


def preflight(server, origin, path="/v1/completions", **more):
    return server.client.options(path, headers={"Origin": origin, **ASKING, **more})


def raw(server, text):
    """The head of an answer, its names in lower case."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(text.replace("\n", "\r\n").encode("latin-1"))
        data = b""
        while b"\r\n\r\n" not in data and (part := sock.recv(65536)):
            data += part
    return data.partition(b"\r\n\r\n")[0].decode("latin-1").lower()


# ---- what browsers ask and get -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/health", "/no/such/route"])
def test_a_preflight_needs_no_key_and_gets_what_it_asks_for(here, path):
    answer = preflight(here, LOCAL, path)
    assert (answer.status_code, answer.content) == (204, b"")
    assert said(answer) == marks(LOCAL) | {
        "access-control-allow-methods": "POST",
        "access-control-allow-headers": "authorization, x-mine",
        "access-control-max-age": "600",
    }
    found = preflight(here, PAGE, **{"Access-Control-Request-Private-Network": "true"})
    assert found.headers["access-control-allow-private-network"] == "true"


def test_options_that_is_no_preflight_is_a_request_like_others(here):
    for headers in ({"Origin": PAGE}, ASKING):
        answer = here.client.options("/v1/completions", headers=headers)
        assert answer.status_code == 405 and "access-control-max-age" not in answer.headers
    assert here.client.get("/v1/models", headers={"Origin": PAGE, **ASKING}).status_code == 401


@pytest.mark.parametrize(
    "origin",
    [
        EVIL, "null", "http://page.example", "https://page.example:8443", "https://page.example.", "https://a.page.example",
        "HTTPS://PAGE.EXAMPLE", "https://page.example/", "https://page.example, http://localhost:3000", "*", "", "é",
    ],
)  # fmt: skip
def test_a_stranger_gets_none(here, origin):
    for text in ("OPTIONS /v1/models HTTP/1.1\nAccess-Control-Request-Method: GET\n", "GET /version HTTP/1.1\n"):
        head = raw(here, f"{text}Host: x\nOrigin: {origin}\n\n")
        assert head.startswith("http/1.1 403 " if text.startswith("OPTIONS") else "http/1.1 200 ")
        assert "access-control" not in head and "\nvary: origin" in head


def test_a_stranger_reads_in_the_answer_to_its_preflight_why(here):
    answer = preflight(here, EVIL)
    assert answer.json()["error"]["code"] == "origin_not_allowed" and EVIL in answer.json()["error"]["message"]


def test_every_answer_is_marked(here):
    """Also those of requests that failed, of routes that do not exist, and streams."""
    body = {"prompt": "a", "max_tokens": 2}
    cases = [
        (200, "POST", "/v1/completions", KEYED, body),
        (200, "POST", "/v1/completions", KEYED, body | {"stream": True}),
        (200, "GET", "/health", {}, None),
        (400, "POST", "/v1/completions", KEYED, body | {"max_tokens": -1}),
        (401, "POST", "/v1/completions", {}, body),
        (404, "GET", "/no/such/route", {}, None),
        (405, "GET", "/v1/completions", {}, None),
        (413, "POST", "/v1/completions", KEYED, body | {"prompt": "a" * 3000}),
        (415, "POST", "/v1/completions", KEYED | {"Content-Type": "text/plain"}, body),
        (431, "GET", "/health", {f"X-{i}": "a" for i in range(130)}, None),
    ]
    for status, method, path, headers, json in cases:
        answer = here.client.request(method, path, json=json, headers={"Origin": PAGE, **headers})
        assert (answer.status_code, said(answer)) == (status, marks(PAGE))
    assert said(here.client.get("/version")) == {"vary": "Origin"}  # a cache must not give this one to a page


def test_what_is_no_http_is_marked_where_its_origin_is_here(here):
    begun = f"GET /version HTTP/1.1\nHost: x\nOrigin: {PAGE}\n"
    too_large = raw(here, begun + "X-A: " + "a" * 70_000)
    malformed = raw(here, begun + "X-A: b\nno header\n\n")
    assert re.match(r"http/1.1 431 ", too_large) and malformed.startswith("http/1.1 400 ")
    for head in (too_large, malformed):
        assert head.count(f"\naccess-control-allow-origin: {PAGE}\r") == 1 and "\nvary: origin" in head
    assert "access-control" not in raw(here, "nonsense\n\n")


def test_a_preflight_is_bounded_as_other_requests_are(here):
    head = f"OPTIONS / HTTP/1.1\nHost: x\nOrigin: {PAGE}\nAccess-Control-Request-Method: GET\n"
    assert raw(here, head + "X-A: b\n" * 130 + "\n").startswith("http/1.1 431 ")
    assert raw(here, head + "Host: y\n\n").startswith("http/1.1 400 ")


def test_headers_of_ours_can_be_read(here):
    """Whatever we send under x-, and Anthropic's request-id, a page may read by its name."""
    exposed = OURS.decode().lower().split(", ")
    ids = {"prompt": [1, 2], "max_tokens": 3, "temperature": 0}
    first = here.post("/v1/completions", ids | {"return_token_ids": True}, headers=KEYED).json()["choices"][0]
    ids["stop"] = first["token_ids"][:1]
    inputs = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    sent = set()
    for path, body, accept in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}, "*/*"),
        ("/generate", inputs, "*/*"),
        ("/generate_stream", inputs, "*/*"),
        ("/v1/generate", {**ids, "stream": False}, "application/x-npy"),
    ):
        answer = here.post(path, body, headers=KEYED | {"Accept": accept})
        assert answer.status_code == 200, answer.text
        sent |= {n for n in answer.headers if n.startswith("x-")} - {"x-accel-buffering"}  # which is for proxies
    assert {"x-stop-reason", "x-finish-reason", "x-compute-type"} < sent
    sent |= {"request-id"} & {*here.post("/v1/messages", {}, headers=KEYED).headers}
    assert sent | {"retry-after"} == {*exposed}


def test_any_origin_and_none(model):
    with site(model, allowed_origins=("*", PAGE)) as server:
        for origin in (EVIL, "null"):
            found = marks("*") | {"vary": ""}
            answer = server.client.get("/version", headers={"Origin": origin})
            assert {"vary": "", **said(answer)} == found
            assert preflight(server, origin).status_code == 204
        assert "access-control-allow-origin: *" in raw(server, "nonsense\n\n")
    with site(model) as server:
        assert not said(server.client.get("/version", headers={"Origin": PAGE}))
        assert preflight(server, PAGE).status_code == 405


# ---- the setting ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, found",
    [
        (None, set()), ((), set()), (("*",), {"*"}), ((PAGE, "*"), {"*"}), ((PAGE, LOCAL), {PAGE, LOCAL}),
        (("https://Page.Example/",), {PAGE}), (("https://page.example:443", "http://page.example:80"), {PAGE, "http://page.example"}),
        (("https://page.example:80",), {"https://page.example:80"}), (("null",), {"null"}), (("http://[::1]:3000",), {"http://[::1]:3000"}),
        (("chrome-extension://abcdefgh",), {"chrome-extension://abcdefgh"}),
    ],
)  # fmt: skip
def test_origins_are_kept_as_browsers_write_them(given, found):
    assert origins_of(given, "--allowed-origins") == found


@pytest.mark.parametrize(
    "given",
    [
        "page.example", "https://", "https://page.example/app", "https://a b", "https://*.page.example",
        "//page.example", "https://page.example:port", "https://me@page.example", "https://page.example//", '["*"]', "https://é.example",
        "https://a,https://b", "https://page.example\n",
    ],
)  # fmt: skip
def test_an_origin_that_none_could_have_is_refused(given):
    with pytest.raises(ConfigError, match=r"^--allowed-origins: expected origins, such as https://page\.example"):
        origins_of((PAGE, given), "--allowed-origins")


# ---- names that lead to loopback -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loopback(model):
    """As `hibachi serve --host gpu-1 --allowed-origins https://page.example` would be, if gpu-1 is this machine."""
    hosts = hosts_for(SimpleNamespace(host="GPU-1", uds=None), frozenset({PAGE}), False)
    with site(model, hosts=hosts, allowed_origins=(PAGE,)) as found:
        yield found


def by_name(server, name, more=""):
    return raw(server, f"GET /version HTTP/1.1\nHost: {name}\n{more}\n")


@pytest.mark.parametrize(
    "name",
    [
        "localhost", "localhost:8000", "LocalHost:1", "localhost.", "a.localhost:80", "127.0.0.1", "127.0.0.1:8000",
        "127.9.8.7", "[::1]", "[::1]:8000", "gpu-1:8000", "page.example", "page.example:8443",
    ],
)  # fmt: skip
def test_names_of_this_machine_are_answered_to(loopback, name):
    assert by_name(loopback, name).startswith("http/1.1 200 ")


@pytest.mark.parametrize(
    "name",
    [
        "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
        "evillocalhost",
        "10.0.0.1", "0.0.0.0", "[::2]", "::1", "[::1", "localhost:80:80",
        "localhost@evil.example", "", "a.page.example", "\xe9",
        "[gpu-1]",
    ],
)  # fmt: skip
def test_other_names_are_those_of_pages_that_lead_here(loopback, name):
    """And no header tells otherwise, as such a page may send any."""
    more = "X-Forwarded-Host: localhost\nForwarded: host=localhost\n"
    head = by_name(loopback, name, more)
    assert head.startswith("http/1.1 403 ") and "content-type: application/json" in head


def test_a_name_that_is_refused_is_told_with_what_to_do(loopback):
    answer = loopback.client.get("/v1/models", headers={"Host": "api.example", "Origin": PAGE})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (403, "host_not_allowed") and said(answer) == marks(PAGE)
    assert "'api.example'" in error["message"] and "--allowed-origins" in error["message"]
    metrics = loopback.client.get("/metrics").text
    assert re.search(r'^hibachi_http_requests_total\{method="-",route="-",status="403"\} [1-9]', metrics, re.MULTILINE)


@pytest.mark.parametrize("root", ["", "/llm"])
def test_a_name_that_is_refused_is_told_in_the_words_of_its_route(model, root):
    with site(model, hosts=frozenset(), root_path=root) as server:
        for path in ("/generate", "/generate_stream"):
            answer = server.post(root + path, {"inputs": "a"}, headers={"Host": "api.example"})
            assert answer.status_code == 403 and answer.json()["error_type"] == "authentication"
        answer = server.client.get(root + "/info", headers={"Host": "localhost"})
        assert answer.status_code == 200


def test_no_host_and_two_are_malformed_and_no_more(loopback):
    assert raw(loopback, "GET /version HTTP/1.1\n\n").startswith("http/1.1 400 ")
    assert raw(loopback, "GET /version HTTP/1.1\nHost: evil.example\nHost: localhost\n\n").startswith("http/1.1 400 ")
    assert raw(loopback, "GET /version HTTP/1.0\n\n").startswith("http/1.1 200 ")


def test_names_count_only_where_a_browser_could_be_led(model):
    settings = SimpleNamespace(host="127.0.0.1", uds=None)
    assert hosts_for(settings, frozenset(), False) == {"127.0.0.1"}
    assert hosts_for(settings, frozenset(), True) is None  # other machines reach it, by names that we do not know
    assert hosts_for(SimpleNamespace(host="127.0.0.1", uds="s"), frozenset(), False) is None
    assert hosts_for(settings, frozenset({"*"}), False) is None
    assert hosts_for(settings, frozenset({LOCAL, "http://[::1]:3000", "null"}), False) == {
        "127.0.0.1", "localhost", "[::1]",
    }  # fmt: skip
    with site(model) as server:
        assert by_name(server, "evil.example").startswith("http/1.1 200 ")


# ---- under a path of a proxy ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rooted(model):
    with site(model, root_path="/ai/llm") as found:
        yield found


@pytest.mark.parametrize("prefix", ["", "/ai/llm"])
def test_routes_are_found_whether_the_proxy_takes_the_path_off_or_not(rooted, prefix):
    get = rooted.client.get
    assert get(f"{prefix}/v1/models").json()["data"][0]["id"] == "tiny"
    assert get(f"{prefix}/v1/models/tiny").json()["id"] == "tiny"
    answer = rooted.post(f"{prefix}/v1/completions", {"prompt": "a", "max_tokens": 2})
    assert answer.status_code == 200 and answer.json()["choices"]
    for path in ("/nothing", "/v1/completions/", "//version", "/llm/version", "/ai/version"):
        assert get(f"{rooted.url}{prefix}{path}").status_code == 404
    assert get(f"{prefix}/v1/completions").status_code == 405


def test_a_path_that_only_begins_alike_is_another(rooted):
    for path in ("/ai/llm2/version", "/ai/llmversion", "/ai/llm/ai/llm/version"):
        assert rooted.client.get(path).status_code == 404
    statuses = {rooted.client.get(path).status_code for path in ("/ai/llm", "/ai/llm/", "/")}
    assert len(statuses) == 1


def test_what_a_route_sees_is_as_asgi_says():
    """`path` begins with `root_path`: what names our address to a client asks for that."""
    seen = []

    async def app(scope, receive, send):
        seen.append((scope["root_path"], scope["path"]))

    around = Rooted(app, "/llm")
    for path in ("/llm/v1/models", "/v1/models", "/llm", "/", "/llm2", "*"):
        with pytest.raises(StopIteration):
            around({"path": path}, None, None).send(None)
    assert seen == [("/llm", p) for p in ("/llm/v1/models", "/llm/v1/models", "/llm/", "/llm/", "/llm/llm2", "/llm*")]


@pytest.mark.parametrize(
    "given", ["llm", "/", "/llm/", "//llm", "/a//b", "/a b", "/llm?x", "/a%20b", "https://x/llm", "/é"]
)
def test_a_root_path_is_a_path(given):
    with pytest.raises(ConfigError, match=r"^--root-path: expected a path such as /llm"):
        root_of(given)


def test_a_root_path_is_none_of_our_own(rooted):
    app = application(rooted.served)
    for root in ("/v1", "/health", "/v1/chat"):
        with pytest.raises(ConfigError, match=rf"^--root-path {root}: our own routes begin so"):
            surrounded(app, tells(rooted.served), frozenset(), None, root)
    assert root_of(None) == "" and root_of("/v1beta") == "/v1beta"
    surrounded(app, tells(rooted.served), frozenset(), None, "/v1beta")
