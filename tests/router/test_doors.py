"""Keys, pages of other origins, TLS, what the router answers itself, and two routers that do not talk."""

import json
import socket
import ssl
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager, suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hibachi.errors import HibachiError
from hibachi.router import addresses as places
from hibachi.router import status
from hibachi.router.upstreams import UpstreamState

from .conftest import BODY, ROOT, ask, eventually, request, routing
from .mocks import HANG, full, of_json

KEY = b"Authorization: Bearer ours"


# ---- keys ----------------------------------------------------------------------------------------------------------


def test_with_keys_of_its_own_strangers_stay_out_and_upstreams_get_their_own(mock, route):
    a = mock("m")
    router = route(a, api_key="ours", upstream_key="theirs")
    assert eventually(lambda: a.checks)[0][b"authorization"] == b"Bearer theirs"
    for lines in ((), (b"Authorization: Bearer other",), (b"Authorization: ours",)):
        answer = router.ask("/v1/completions", BODY, *lines)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert router.ask("/v1/models", None, *lines).status == router.ask("/upstreams", None, *lines).status == 401
    assert not a.requests
    assert router.ask("/v1/completions", BODY, KEY).status == 200
    assert a.requests[0][b"authorization"] == b"Bearer theirs"
    assert [router.ask(path, None).status for path in ("/health", "/ready", "/metrics")] == [200] * 3


def test_without_them_the_key_of_the_client_goes_on_as_it_is(mock, route):
    a = mock("m")
    router = route(a, upstream_key="theirs")
    for line in (b"Authorization: Bearer mine", b"Authorization: Basic eDp5", b"X-Api-Key: mine"):
        assert router.ask("/v1/completions", BODY, line).status == 200
    first, second, third = (r.all(b"authorization") for r in a.requests)
    assert (first, second, third) == ([b"Bearer mine"], [b"Basic eDp5"], [])


# ---- pages of other origins ----------------------------------------------------------------------------------------


def allowed(answer):
    return {
        n.decode().lower(): v.decode() for n, v in answer.headers if n.lower().startswith((b"access-control", b"vary"))
    }


ORIGIN = b"Origin: https://page.example"
PREFLIGHT = b"Access-Control-Request-Method: POST"


def test_pages_of_any_origin(mock, route):
    a = mock("m", script=lambda r: [full(200, b"{}", b"Access-Control-Allow-Origin: https://other")])
    router = route(a, allowed_origins="*")
    with router.wire() as wire:
        wire.send(
            b"OPTIONS /v1/completions HTTP/1.1\r\nHost: x\r\n%s\r\nAccess-Control-Request-Method: POST\r\n"
            b"Access-Control-Request-Headers: authorization, x-mine\r\n\r\n" % ORIGIN
        )
        answer = wire.answer()
    assert answer.status == 204 and allowed(answer) == {
        "access-control-allow-origin": "*",
        "access-control-expose-headers": "*",
        "access-control-allow-methods": "POST",
        "access-control-allow-headers": "authorization, x-mine",
        "access-control-max-age": "600",
    }
    assert not a.requests
    for body in (BODY, b"{broken"):  # errors of the router, too
        found = allowed(router.ask("/v1/completions", body, ORIGIN))
        assert found == {"access-control-allow-origin": "*", "access-control-expose-headers": "*"}


def test_pages_of_some_origins_and_without_the_option_what_upstreams_say(mock, route):
    a = mock("m", script=lambda r: [full(200, b"{}", b"Access-Control-Allow-Origin: https://theirs")])
    router = route(a, allowed_origins="https://page.example")
    assert allowed(router.ask("/v1/completions", BODY, ORIGIN))["access-control-allow-origin"] == "https://page.example"
    assert allowed(router.ask("/v1/completions", BODY, b"Origin: https://evil.example")) == {"vary": "Origin"}
    plain = route(a)
    assert allowed(plain.ask("/v1/completions", BODY, ORIGIN)) == {"access-control-allow-origin": "https://theirs"}


def test_a_preflight_of_a_stranger_goes_no_further(mock, route):
    a = mock("m")
    router = route(a, allowed_origins="https://page.example")
    for origin, wanted in (("https://page.example", 204), ("https://evil.example", 403)):
        with router.wire() as wire:
            wire.send(request("OPTIONS", "/v1/completions", None, f"Origin: {origin}".encode(), PREFLIGHT))
            answer = wire.answer()
        assert answer.status == wanted and ("access-control-allow-origin" in allowed(answer)) == (wanted == 204)
    assert not a.requests


def test_what_is_no_http_is_marked_too(mock, route):
    for cors in ("*", "https://page.example"):
        with route(mock("m"), allowed_origins=cors).wire() as wire:
            wire.send(b"GET / HTTP/1.1\r\nHost: x\r\n" + ORIGIN + b"\r\nX-A: b\r\nno header\r\n\r\n")
            answer = wire.answer()
        assert answer.status == 400 and allowed(answer)["access-control-allow-origin"] == cors


def test_what_an_upstream_says_of_caches_is_kept(mock, route):
    a = mock("m", script=lambda r: [full(200, b"{}", b"Vary: Accept-Encoding", b"vary: Accept")])
    router = route(a, allowed_origins="https://page.example")
    for line in (ORIGIN, b"X-A: b"):
        lines = [value for name, value in router.ask("/v1/completions", BODY, line).headers if name.lower() == b"vary"]
        assert lines == [b"Accept-Encoding, Accept, Origin"]
    a.script = lambda r: [full(200, b"{}", b"Vary: accept, origin")]
    assert allowed(router.ask("/v1/completions", BODY, ORIGIN))["vary"] == "accept, origin"
    assert allowed(route(a, allowed_origins="*").ask("/v1/completions", BODY, ORIGIN))["vary"] == "accept, origin"


def test_with_tibs_variables_any_page_may_ask(mock):
    a = mock("m")
    with routing(environment={"UPSTREAMS": a.url}) as router:
        assert allowed(router.ask("/v1/completions", BODY, ORIGIN))["access-control-allow-origin"] == "*"
        assert router.of(a).place.limit == 1


# ---- TLS -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Of a server that is called gpu-1, signed by itself."""
    folder = tmp_path_factory.mktemp("certificate")
    cert, key = folder / "cert.pem", folder / "key.pem"
    how = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=gpu-1 -addext"
    files = ["subjectAltName=DNS:gpu-1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", "req", *how.split(), *files], check=True, capture_output=True)
    return str(cert), str(key)


@contextmanager
def behind_tls(mock, cert, key):
    """(port, names that clients asked for): TLS before a mock, as a proxy that ends it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    names = []
    context.sni_callback = lambda _, name, __: names.append(name)
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source, to):
        try:
            while part := source.recv(65536):
                to.sendall(part)
        except OSError:
            pass
        finally:
            for end in (source, to):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def accept():
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                front = context.wrap_socket(plain, server_side=True)
            except OSError:
                plain.close()
                continue
            back = socket.create_connection(("127.0.0.1", mock.port))
            for pair in ((front, back), (back, front)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1], names
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_upstreams_with_tls_are_looked_at_under_their_names(mock, tmp_path, certificate):
    a = mock("m")
    file = tmp_path / "route.toml"
    with behind_tls(a, *certificate) as (port, names):
        url = f"https://127.0.0.1:{port}"

        def configured(*lines):
            file.write_text("\n".join(["[[upstream]]", f'url = "{url}"', *lines]))
            return routing(config=str(file), wait_for=0.05)

        with configured(f'ca = "{certificate[0]}"', 'server-name = "gpu-1"') as router:
            answer = router.ask("/v1/completions", BODY)
            assert answer.status == 200 and answer[b"x-upstream-origin"] == url.encode()
        assert set(names) == {"gpu-1"}
        for lines in ((), (f'ca = "{certificate[0]}"',), (f'ca = "{certificate[0]}"', 'server-name = "gpu-2"')):
            with configured(*lines) as router:
                answer = router.ask("/v1/completions", BODY)
                assert answer.status == 503 and "its certificate is not trusted" in answer.error["message"]


def test_addresses_of_a_name_are_asked_under_that_name(mock, tmp_path, certificate, monkeypatch):
    a = mock("m")

    async def two(place):
        return ["127.0.0.1", "127.0.0.2"]

    monkeypatch.setattr(places, "_addresses", two)
    file = tmp_path / "route.toml"
    with behind_tls(a, *certificate) as (port, names):
        file.write_text(f'[[upstream]]\nurl = "https://gpu-1:{port}"\nca = "{certificate[0]}"\n')
        with routing(config=str(file)) as router:
            assert sorted(u.place.address for u in router.router.fleet.upstreams) == ["127.0.0.1", "127.0.0.2"]
            answer = router.ask("/v1/completions", BODY)
            assert answer.status == 200
            assert answer[b"x-upstream-origin"] == f"https://gpu-1:{port} (127.0.0.1)".encode()
        assert set(names) == {"gpu-1"} and a.requests[0][b"host"] == f"gpu-1:{port}".encode()


# ---- what it answers itself ----------------------------------------------------------------------------------------


def test_b23_models_of_all_each_once(mock, route):
    a, b = mock("m", "x"), mock("m")
    router = route(a, b)
    data = router.ask("/v1/models", None).json["data"]
    assert {entry["id"]: entry["upstreams"] for entry in data} == {"m": [a.url, b.url], "x": [a.url]}
    plain = route(a, origin_header=False)
    assert all("upstreams" not in entry for entry in plain.ask("/v1/models", None).json["data"])


def test_health_is_the_routers_own_and_ready_needs_an_upstream(mock, route):
    a = mock("m")
    router = route(a)
    assert router.ask("/ready", None).status == 200
    a.stop()
    eventually(lambda: not router.of(a).takes)
    assert router.ask("/health", None).status == 200
    answer = router.ask("/ready", None)
    assert answer.status == 503 and a.url in answer.json["reason"]
    a.start()
    eventually(lambda: router.ask("/ready", None).status == 200)


def test_metrics_are_what_a_reader_of_prometheus_takes(mock, route):
    a, b = mock("m"), mock("n")
    router = route(a, b)
    for _ in range(3):
        router.ask("/v1/completions", BODY)
    router.ask("/v1/completions", b'{"model": "none"}')
    b.stop()
    eventually(lambda: router.of(b).state is UpstreamState.ILL)
    page = router.ask("/metrics", None)
    assert page[b"content-type"].startswith(b"text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(page.body.decode()):
        assert family.name.startswith("hibachi_route_") and family.documentation.endswith(".")
        for sample in family.samples:
            found[sample.name, *(v for _, v in sorted(sample.labels.items()))] = sample.value
    assert found["hibachi_route_requests_total", a.url] == 3
    assert found["hibachi_route_answers_total", "200", a.url] == 3
    assert found["hibachi_route_up", a.url] == 1 and found["hibachi_route_up", b.url] == 0
    assert found["hibachi_route_first_byte_seconds_count", a.url] == 3
    assert found["hibachi_route_first_byte_seconds_bucket", "+Inf", a.url] == 3
    assert found["hibachi_route_client_answers_total", "generates", "200"] == 3
    assert found["hibachi_route_client_answers_total", "generates", "404"] == 1
    assert found["hibachi_route_in_flight", a.url] == found["hibachi_route_waiting",] == 0


def test_status_is_a_table(mock, route):
    a, b = mock(*(f"model-{i}" for i in range(9))), mock("m")
    router = route(a, b, api_key="ours")
    b.stop()
    eventually(lambda: router.of(b).state is UpstreamState.ILL)
    text = status.fetched(router.url, "ours")
    head, first, second, why, last = text.splitlines()
    assert head.split() == ["upstream", "state", "in", "flight", "latency", "requests", "errors", "models"]
    assert first.startswith(a.url) and first.endswith("model-0, model-1, model-2, model-3 and 5 more")
    assert second.split()[:2] == [b.url, "ill"] and why.startswith(f"{b.url}: no connection")
    assert last == "0 requests wait; policy least-connection"
    with pytest.raises(HibachiError, match="it wants a key"):
        status.fetched(router.url, None)
    with pytest.raises(HibachiError, match="there is no router"):
        status.fetched("127.0.0.1:9", None)


def test_it_starts_without_any_array_library():
    program = (
        "import sys, hibachi.cli.route, hibachi.router.run; print(sorted({'numpy', 'torch', 'jax'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


# ---- policies that ask -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, busy, idle",
    [
        (b"/load", b'{"server_load": 9}', b'{"server_load": 0}'),
        (b"/metrics", b'# x\nvllm:num_requests_waiting{model_name="m"} 9.0\n', b"hibachi_requests_waiting 0\n"),
        (b"/metrics", b"tgi_queue_size 9\n", b"tgi_queue_size 0\n"),
    ],
    ids=["/load", "vllm and hibachi", "tgi"],
)
def test_least_load_goes_by_what_servers_say(mock, route, path, busy, idle):
    a, b = mock("m"), mock("m")
    a.loads, b.loads = {path: busy}, {path: idle}
    router = route(a, b, policy="least-load", check_interval=0.05)
    eventually(lambda: (router.of(a).load, router.of(b).load) == (9, 0))
    assert {router.ask("/v1/completions", BODY)[b"x-upstream-origin"].decode() for _ in range(5)} == {b.url}


# ---- two routers -----------------------------------------------------------------------------------------------------


def chat(n, turn=0):
    text = f"conversation {n} " + "and so on " * 300
    messages = [{"role": "user", "content": text}, *({"role": "user", "content": "go on"} for _ in range(turn))]
    return json.dumps({"model": "m", "messages": messages}).encode()


def test_two_routers_before_four_upstreams_agree_without_talking(mock, route):
    """Of homes of prefixes, and of sessions; limits are those of each."""
    four = [mock("m") for _ in range(4)]
    first, second = route(*four, policy="prefix-affine"), route(*four[::-1], policy="prefix-affine")

    def went(router, n, turn):
        return router.ask("/v1/chat/completions", chat(n, turn))[b"x-upstream-origin"]

    homes = [went((first, second)[n % 2], n, 0) for n in range(24)]
    assert homes == [went((second, first)[n % 2], n, 1) for n in range(24)]
    assert len(Counter(homes)) == 4 and sum(first.of(u).affine + second.of(u).affine for u in four) == 48

    def session(router, n):
        return router.ask("/v1/files", b"data", b"X-Session-Id: %d" % n)[b"x-upstream-origin"]

    assert [session(first, n) for n in range(12)] == [session(second, n) for n in range(12)]


def test_limits_are_those_of_each_router(mock, route):
    go = threading.Event()
    a = mock("m", script=lambda r: [go, of_json({})])
    routers = [route(a, max_connections=2) for _ in range(2)]
    asking = [router.asking("/v1/completions", BODY) for router in routers for _ in range(3)]
    eventually(lambda: a.running == 4 and all(router.waiting == 1 for router in routers))
    assert [router.of(a).in_flight for router in routers] == [2, 2]
    go.set()
    assert [each.result().status for each in asking] == [200] * 6


def test_the_log_has_the_id_of_the_client_and_no_secret(mock, route, caplog):
    a = mock("m")
    router = route(a)
    with caplog.at_level("INFO", "hibachi.request"):
        ask(router.port, "/v1/completions", BODY, b"X-Request-Id: my-id", b"Authorization: Bearer secret")
        eventually(lambda: "my-id" in caplog.text)
    (line,) = [r.getMessage() for r in caplog.records if "my-id" in r.getMessage()]
    assert line.startswith("POST /v1/completions 200 ") and f"upstream={a.url}" in line and "ttft=" in line
    assert "secret" not in caplog.text and "Emma" not in caplog.text
    assert a.requests[0][b"x-request-id"] == b"my-id"


@pytest.mark.parametrize("size", [10, 100_000, 3_000_000])
def test_b20_a_client_that_leaves_after_a_body_of_any_size(mock, route, size):
    a = mock("m", script=lambda r: [HANG])
    router = route(a)
    body = json.dumps({"model": "m", "prompt": "x" * size}).encode()
    with router.wire() as wire:
        wire.send(request("POST", "/v1/completions", body, b"Content-Type: application/json"))
        eventually(lambda: a.running == 1)
    assert a.requests[0].left.wait(5)
    eventually(lambda: router.of(a).in_flight == 0)
