"""Whatever comes in: a clear refusal, no error of the server's own, no hang, and the next request is served."""

from __future__ import annotations

import json
import random
import socket

import pytest

from hibachi.llm.dialects.json_limits import DEEPEST

from .conftest import site
from .saying import saying, told
from .test_streams import send

POSTS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"),
    *("/score", "/rerank", "/classify", "/v1/warm"),
)


def raw(server, body, path="/v1/completions", kind="application/json"):
    return server.client.post(path, content=body, headers={"Content-Type": kind})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"{",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": 99999999999999999999999999}',
        b'{"prompt": [99999999999999999999]}',
        b'{"prompt": [1.5]}',
        b'{"prompt": [true]}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 50000 + b"]" * 50000 + b"}",
        b'{"messages": ' + b'{"a":' * 50000 + b"1" + b"}" * 50000 + b"}",
        b'{"messages": [{"role": 1, "content": "a"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        b'{"input": [], "dimensions": 3}',
        b'{"tokens": [5000000]}',
        b'{"prompt": "a", "logit_bias": {"99999": 1}}',
        b'{"prompt": "a", "allowed_token_ids": [99999]}',
        b'{"prompt": "a", "priority": 1e400}',
    ],
)
def test_bodies_that_say_nothing(server, body):
    for path in POSTS:
        answer = raw(server, body, path)
        if answer.status_code == 200:  # it meant something to this route
            continue
        assert answer.status_code in (400, 422), (path, answer.text)
        assert answer.json()["error"]["message"]
    assert server.complete("Emma")["choices"]


HELLO = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, '
LOOK = b'"tools": [{"type": "function", "name": "look"}]'
DEEP = {  # where a value of any depth may stand
    "what is echoed": ("/v1/responses", b'{"input": "a", %s, "tool_choice": {"type": "function", "x": ~}}' % LOOK),
    "a tool": ("/v1/responses", b'{"input": "a", "tools": [{"type": "function", "name": "look", "parameters": ~}]}'),
    "a template's": ("/v1/chat/completions", HELLO + b'"chat_template_kwargs": {"a": ~}}'),
    "what has no effect": ("/v1/chat/completions", HELLO + b'"metadata": ~}'),
    "Anthropic's": ("/v1/messages", HELLO + b'"model": "tiny", "metadata": ~}'),
    "its count": ("/v1/messages/count_tokens", HELLO.replace(b'"max_tokens": 2, ', b'"model": "tiny", "metadata": ~}')),
    "a prompt's": ("/v1/completions", b'{"prompt": "a", "metadata": ~}'),
    "TGI's": ("/generate", b'{"inputs": "a", "stream": ~}'),
    "tokens": ("/v1/generate", b'{"prompt": [1], "inputs": ~}'),
    "vectors": ("/v1/embeddings", b'{"input": "a", "metadata": ~}'),
}


@pytest.mark.parametrize(("path", "body"), DEEP.values(), ids=DEEP.keys())
def test_bodies_that_are_nested_too_deep(server, path, body):
    """What reads them goes a little deeper than what writes them."""
    for deep in (DEEPEST, 965, 970, 975, 100_000, 400_000):
        for more in (body, body.replace(b"{", b'{"stream": true, ', 1)):
            answer = raw(server, more.replace(b"~", b'{"a":' * deep + b"1" + b"}" * deep), path)
            assert answer.status_code in (400, 422) and "nested too deep" in answer.text, answer.text
    answer = raw(server, body.replace(b"~", b"[" * (DEEPEST - 9) + b"]" * (DEEPEST - 9)), path)
    assert answer.status_code < 500 and "too deep" not in answer.text, answer.text


def test_other_kinds_of_content(server):
    for kind in ("text/plain", "application/xml", "multipart/form-data"):
        assert raw(server, b'{"prompt": "a"}', kind=kind).status_code == 415
    assert raw(server, b'{"prompt": "a", "max_tokens": 1}', kind="application/json; charset=utf-8").status_code == 200


def test_too_long(server):
    """Both numbers are told."""
    answer = server.post("/v1/completions", {"prompt": [5] * 600})
    assert answer.status_code == 400 and "600" in answer.text and "512" in answer.text
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    answer = server.post("/v1/completions", {"prompt": [5] * 500, "max_tokens": 100})
    assert answer.status_code == 400 and all(n in answer.text for n in ("100", "500", "512", "12"))
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "so " * 2000}]})
    assert answer.status_code == 400 and "512" in answer.text
    answer = server.post("/v1/embeddings", {"input": [5] * 600})
    assert answer.status_code == 400 and "600" in answer.text
    fits = server.post("/v1/completions", {"prompt": [5] * 500, "max_tokens": 12, "temperature": 0})
    assert fits.status_code == 200


def test_too_large(server):
    with site(server.texts, max_body_size=1000) as small:
        assert small.post("/v1/completions", {"prompt": "a" * 2000}).status_code == 413
        chunks = (b'{"prompt": "', *[b"a" * 100] * 20, b'"}')
        answer = small.client.post(
            "/v1/completions", content=iter(chunks), headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 413
    many = server.post("/v1/completions", {"prompt": ["a"] * 2000})
    assert many.status_code == 400 and many.json()["error"]["param"] == "prompt"


def test_routes_that_are_not_there(server):
    for method, path, status in (
        ("GET", "/nope", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/responses/compact", 404),  # of OpenAI's newer routes, which clients try: it looks like an id
        ("POST", "/v1/responses/input_tokens", 404),
        ("PUT", "/v1/responses/resp_1", 405),
        ("DELETE", "/health", 405),
        ("GET", "/v1/models/%00%ff/../x", 404),
    ):
        answer = server.client.request(method, path)
        assert answer.status_code == status and answer.json()["error"]["message"] and answer.headers["x-request-id"]


def test_routes_that_are_not_there_are_logged(server, caplog):
    """Once, and briefly."""
    with caplog.at_level("INFO", "hibachi.request"):
        for path in ("/nope", "/" + "ü" * 5000, "/health"):
            server.client.get(path, headers={"X-Request-Id": "mine"})
        server.client.delete("/v1/models")
    lines = [r.getMessage() for r in caplog.records if r.name == "hibachi.request"]
    assert [line.split()[0] + " " + line.split()[2] for line in lines] == ["GET 404", "GET 404", "DELETE 405"]
    assert lines[0].startswith("GET /nope 404 code=not_found total=") and " id=mine client=" in lines[0]
    assert max(map(len, lines)) < 300


def test_random_bytes_in_the_place_of_fields(server):
    """Mutated requests: none makes an error of the server's own."""
    rng = random.Random(0)
    good = [
        {"prompt": "Emma", "max_tokens": 2, "temperature": 0.5, "stop": ["x"], "n": 1, "logprobs": 1},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "top_p": 0.9, "stream": True},
        {"input": ["a", "b"], "encoding_format": "float"},
        {"tokens": [1, 2, 3]},
    ]
    values = [None, True, -1, 0, 1, 2**40, 1.5, "", "x", "\u0000", [], {}, [[]], [None], {"a": 1}, "💥" * 3, [1, "a"]]
    for _ in range(300):
        body = json.loads(json.dumps(rng.choice(good)))
        for _ in range(rng.randint(1, 3)):
            body[rng.choice([*body, "seed", "stream", "echo", "user", "stream_options"])] = rng.choice(values)
        if body.get("n") == 2**40 or body.get("max_tokens") is None:
            body["max_tokens"] = 2
        answer = server.post(rng.choice(POSTS), body)
        assert answer.status_code < 500, (body, answer.text)
    assert server.complete("Emma")["choices"]


def test_broken_http(server):
    for data in (
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: abc\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 200,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(10)
            said = sock.recv(4096)
            assert not said or b" 500 " not in said.split(b"\r\n")[0]
    sock = send(server, {"prompt": "a", "max_tokens": 5, "stream": True})
    sock.close()
    assert server.complete("Emma")["choices"]


@pytest.mark.parametrize(
    "template", ["{% for i in range(10**9) %}{% endfor %}think", "{{ raise_exception('no') }}think"]
)
def test_a_template_that_never_ends_or_raises(tmp_path, template):
    with saying(tmp_path, template) as here:
        for fields in (
            {},
            {"tools": [{"type": "function", "function": {"name": "look"}}]},
            {"reasoning_effort": "low"},
        ):
            answer = here.post("/v1/chat/completions", {"messages": told("a"), **fields})
            assert answer.status_code == 400
        assert here.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
