"""Where the upstreams are: UPSTREAMS, flags, the file; what is refused; addresses of names."""

import asyncio
import socket

import pytest

from hibachi.errors import ConfigError
from hibachi.router import settings
from hibachi.router.addresses import origin_of, places_of, resolved, target
from hibachi.router.upstreams import Place


def places(environment=None, file=None, **flags):
    found = settings.settle(flags, environment or {}, file)
    return places_of(found, environment or {})


def urls(given):
    return [p.url for p in places({"UPSTREAMS": given})]


TWO = ["http://llama.ai:6666", "http://falcon.ai:6667"]


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(",".join(TWO), id="B-01"),
        pytest.param(f" {TWO[0]}/ , {TWO[1]}// ", id="B-02"),
        pytest.param(f"{TWO[0]},,{TWO[1]},", id="empty"),
        pytest.param(f"HTTP://Llama.ai:6666,{TWO[1]},{TWO[0]}", id="twice"),
    ],
)
def test_b01_b02_a_list_of_upstreams(given):
    assert urls(given) == TWO


@pytest.mark.parametrize(
    "given, says",
    [
        pytest.param("".join(TWO), "is not a valid URL", id="B-03"),
        pytest.param(f"[{','.join(TWO)}]", r"\[http://llama.ai:6666 is not a valid URL", id="B-04"),
        pytest.param("", "UPSTREAMS is missing", id="B-05"),
        pytest.param("http://", "http:// is not a valid URL: it has no host", id="B-06"),
        pytest.param("websocket://a:1", "is not a valid URL: websocket:// is not supported", id="B-07"),
        pytest.param("http://a:1/p", r"is not a valid URL: it should not have a path \(/p\)", id="B-08"),
        ("a:1", "begins neither with http:// nor with https://"),
        ("http://a:0", "0 is no port"),
        ("http://a:99999", "Port out of range"),
        ("http://a:1?x=1", "nothing after the port"),
        ("http://us er", "no name of a host"),
        ("http://me:secret@a", "Give the upstream a key instead"),
    ],
)
def test_b03_to_b08_what_is_no_upstream(given, says):
    with pytest.raises(ConfigError, match=says) as e:
        urls(given)
    assert "secret" not in str(e.value)


def test_b05_unset():
    with pytest.raises(ConfigError, match="UPSTREAMS is missing"):
        places()


def test_tibs_variables_and_its_defaults():
    found = settings.settle({}, {"UPSTREAMS": "http://a"})
    assert (found.max_connections, found.allowed_origins, found.port, found.timeout, found.wait_for) == (
        1,
        ("*",),
        8000,
        600,
        5,
    )
    environment = {
        "UPSTREAMS": "http://a",
        "MAX_CONNECT_PER_UPSTREAM": "666",
        "WAIT_FOR": "30000",
        "TIMEOUT": "60000",
        "DEBUG": "true",
        "TIB_PORT": "8889",
    }
    found = settings.settle({}, environment)
    assert (found.max_connections, found.port, found.timeout, found.wait_for) == (666, 8889, 60.0, 30.0)
    assert found.log_level == "debug"
    assert settings.settle({"timeout": "5"}, environment).timeout == 5.0
    found = settings.settle({}, {})
    assert (found.max_connections, found.allowed_origins) == (64, None)
    for name, value in (("TIMEOUT", "soon"), ("MAX_CONNECT_PER_UPSTREAM", "0"), ("TIB_PORT", "x"), ("TIMEOUT", "-1")):
        with pytest.raises(ConfigError, match=name):
            settings.settle({}, {name: value})


FILE = """
policy = "round-robin"
max-connections = 7

[[upstream]]
url = "https://A.example:8443/"
limit = 2
weight = 2.5
key_env = "A_KEY"
server-name = "a.internal"
models = ["m"]

[[upstream]]
url = "http://b.example:8000"
"""


def test_a_file_of_upstreams(tmp_path):
    file = tmp_path / "route.toml"
    file.write_text(FILE)
    a, b = places({"A_KEY": "sk-1"}, str(file))
    assert a == Place(
        "https://a.example:8443", "", 2, 2.5, ("m",), key="sk-1", server_name="a.internal"
    ) and b == Place("http://b.example:8000", limit=7)
    assert "sk-1" not in repr(a)
    more = places({"A_KEY": "sk-1", "UPSTREAMS": "http://c"}, str(file), upstream="http://d", upstream_key="k")
    assert [p.url for p in more] == [a.url, b.url, "http://d", "http://c"]
    assert [p.key for p in more] == ["sk-1", "k", "k", "k"]


@pytest.mark.parametrize(
    "text, says",
    [
        ("upstream = 5", r"expected \[\[upstream\]\]"),
        ("[[upstream]]\nlimit = 1", "url is missing"),
        ('[[upstream]]\nurl = "http://a"\nlimit = 0', "limit must be an integer >= 1; got 0"),
        ('[[upstream]]\nurl = "http://a"\nweight = -1', "weight must be a number above 0"),
        ('[[upstream]]\nurl = "http://a"\nkey = 5', "key must be a text; got something else"),
        ('[[upstream]]\nurl = "http://a"\nkey = "secret\\n"', "key must be a text; got something else"),
        ('[[upstream]]\nurl = "http://a"\nmodels = "m"', "models must be a list of texts"),
        ('[[upstream]]\nurl = "http://a"\nwait = 1', "wait is not known. Expected url, limit"),
        ('[[upstream]]\nurl = "http://a"\nkey_env = "NOT_SET"', "the variable NOT_SET"),
        ('[[upstream]]\nurl = "http://a"\nkey = "a"\nkey_env = "B"', "got both"),
        ('[[upstream]]\nurl = "http://a"\n[[upstream]]\nurl = "http://a/"', "is there twice"),
        ('[[upstream]]\nurl = "https://a"\nca = "/no/such"', "ca /no/such"),
        ("[[upstream", "expected TOML"),
        ("max-conections = 5", "Did you mean max-connections"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, text, says):
    file = tmp_path / "route.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says) as e:
        places({}, str(file))
    assert "secret" not in str(e.value)


def test_names_with_several_addresses(monkeypatch):
    answers = {"one": ["10.0.0.1"], "two": ["10.0.0.3", "10.0.0.2", "10.0.0.2"], "both": ["10.0.0.4", "::1"]}

    async def getaddrinfo(host, port, *, type):
        if host not in answers:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET6 if ":" in a else socket.AF_INET, type, 0, "", (a, 0)) for a in answers[host]]

    async def test():
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
        given = [Place(f"http://{name}:8000") for name in ("one", "two", "both", "none", "127.0.0.1", "localhost")]
        found = await resolved(given, [])
        assert [p.name for p in found] == [
            "http://one:8000",
            "http://two:8000@10.0.0.2",
            "http://two:8000@10.0.0.3",
            "http://both:8000",
            "http://none:8000",
            "http://127.0.0.1:8000",
            "http://localhost:8000",
        ]
        del answers["two"]  # what cannot be found out just now stays
        assert await resolved(given, found) == found

    _run(test)


def _run(test):
    """On asyncio's own loop, whose methods can be replaced."""
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(test())


def test_what_is_asked_at_an_address():
    assert target(Place("http://a:1")) == ("http://a:1", None, None)
    assert target(Place("https://a:1", "10.0.0.1")) == ("https://10.0.0.1:1", "a:1", "a")
    assert target(Place("https://a", "fe80::1", server_name="b")) == ("https://[fe80::1]", "a", "b")
    assert origin_of("http://[::1]:80/", "x") == "http://[::1]:80"
