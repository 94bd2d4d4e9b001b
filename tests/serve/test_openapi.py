"""The description of the routes leaves none out, and is true: they answer what it says, with the statuses it says."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import shlex
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from hibachi.errors import EngineFailed, ModelError, QueueFull
from hibachi.llm.dialects.openai.answers import encode
from hibachi.llm.dialects.responses.answers import Response, ResponseReasoning, ResponseText
from hibachi.llm.dialects.responses.items import Message
from hibachi.llm.dialects.responses.store import KnownItems
from hibachi.llm.own import open_model
from hibachi.server.app import ROUTES, application, tells
from hibachi.server.docspage import curl
from hibachi.server.metrics import is_work, metrics_for
from hibachi.server.served import Served
from hibachi.server.server import surrounded
from hibachi.server.settings import ServeSettings
from hibachi.server.web.exchange import Exchange
from hibachi.server.web.tenants import Tenant, Tenants

from .conftest import CHATML

jsonschema = pytest.importorskip("jsonschema")

OWN = f"{Path(__file__).with_name('anytoken.py')}:"
KEYS = Tenants((("k", "t"),), {"t": Tenant(admin=True)})
HERE = ("127.0.0.1", 1)
NOTHING = dict.fromkeys(("instructions", "max_output_tokens", "previous_response_id")) | {
    "parallel_tool_calls": True,
    "reasoning": ResponseReasoning(None, None),
    "store": True,
    "temperature": 1.0,
    "text": ResponseText({"type": "text"}),
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "metadata": {},
}


class Site:
    """An application without a network. Every answer must be as its own description says. Texts are short."""

    def __init__(self, what, root_path="", names=("tiny",), tenants=None):
        template = CHATML if hasattr(what, "tokenizer") else None
        settings = ServeSettings(served_model_name=names, max_tokens=4)
        self.served = Served(what, settings, template, tenants)
        _, self.more = metrics_for(self.served)
        inner = application(self.served, self.more)
        self.paths = {(min(r.methods - {"HEAD"}), re.sub(r":\w+}", "}", r.path)) for r in inner.routes}
        self.app = surrounded(inner, tells(self.served), frozenset(), frozenset({"here"}), root_path)
        self.document = self.ask("GET", "/openapi.json", check=False).json()

    def ask(self, method, path, check=True, **request):
        if check and "{response}" in path:  # one that is kept
            for tenant in ("", "t"):
                kept = Response(**NOTHING, id="resp_here", created_at=1, model="tiny")
                store = self.served.responses.of(tenant)
                store.keep("resp_here", encode(kept), KnownItems(), [Message(role="user", content="a")], [])

        address = path.replace("{model}", "tiny").replace("{response}", "resp_here" if check else "resp_nope")

        async def asked():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False, client=HERE)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                return await client.request(method, address, **request)

        answer = asyncio.run(asked())
        if check:
            self.check(method, path, answer)
        return answer

    def operations(self):
        return [(m.upper(), path, o) for path, found in self.document["paths"].items() for m, o in found.items()]

    def check(self, method, path, answer):
        responses = self.document["paths"][path][method.lower()]["responses"]
        assert str(answer.status_code) in responses, (method, path, answer.status_code, answer.text[:300])
        kind = answer.headers["content-type"].partition(";")[0]
        schema = responses[str(answer.status_code)]["content"][kind]["schema"]
        if kind == "application/json":
            self.validate(schema, answer.json())
        elif kind == "text/event-stream":
            for event in answer.text.strip().split("\n\n"):
                data = event.rpartition("\n")[2].removeprefix("data: ")  # behind its name, if it has one
                told = schema["properties"]["data"]
                end, told = told.get("anyOf", ({}, told))
                if data != end.get("const"):
                    self.validate(told["contentSchema"], json.loads(data))

    def validate(self, schema, value):
        jsonschema.Draft202012Validator({"components": self.document["components"], **schema}).validate(value)


@pytest.fixture(scope="module")
def tiny():
    with open_model("tiny", max_num_seqs=4, max_num_queued_reqs=8) as found:
        yield found


@pytest.fixture(scope="module", params=["Codebooks", "Classifier", "Next"])
def own(request):
    with open_model(OWN + request.param) as found:
        yield Site(found)


def example(operation):
    return operation["requestBody"]["content"]["application/json"]["example"]


def sent(operation, **more):
    """Arguments of a request with the example as its body."""
    return {"json": example(operation) | more} if "requestBody" in operation else {}


# ---- what is in it ---------------------------------------------------------------------------------------------------


def test_every_route_is_described(tiny):
    site = Site(tiny)
    classify = {("POST", "/classify")}  # the only one that has no effect on a model that makes texts
    assert {(m, path) for m, path, _ in site.operations()} == site.paths - classify
    assert len({o["operationId"] for *_, o in site.operations()}) == len(site.operations())
    assert all(o["summary"].endswith((".", "?")) and "\n" not in o["summary"] for *_, o in site.operations())
    assert all(route.about.example for route in ROUTES if route.about.body is not None)
    rooms = {"/v1/completions": "openai", "/v1/messages": "messages", "/v1/responses": "responses", "/generate": "tgi"}
    assert {path: o["tags"] for _, path, o in site.operations() if path in rooms} == {p: [r] for p, r in rooms.items()}


def test_every_reference_leads_somewhere(tiny):
    found = Site(tiny).document
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(found)))
    assert names and names <= found["components"]["schemas"].keys()
    assert found["openapi"] == "3.1.0" and found["servers"] == [{"url": "/"}] and "tiny" in found["info"]["title"]


def test_a_field_that_is_refused_by_name_is_not_described(tiny):
    schemas = Site(tiny).document["components"]["schemas"]
    fields = schemas["CompletionBody"]
    assert {"prompt", "user", "stop"} <= fields["properties"].keys() and fields["required"] == ["prompt"]
    assert {"suffix", "prompt_embeds"}.isdisjoint(fields["properties"]) and fields["additionalProperties"] is False
    assert "additionalProperties" not in schemas["TextBlock"]  # to which newer clients may add


def test_the_fields_of_a_query_are_described(tiny):
    (operation,) = [o for _, path, o in Site(tiny).operations() if path == "/v1/generate"]
    found = {p["name"]: p for p in operation["parameters"]}
    assert {"max_tokens", "stop", "cache_salt"} <= found.keys() and {"prompt", "input"}.isdisjoint(found)
    assert found["max_tokens"]["schema"] == {"type": "integer"} and found["max_tokens"]["in"] == "query"
    assert "application/json" in found["stop"]["content"]


# ---- it is true ------------------------------------------------------------------------------------------------------


def test_the_examples_are_answered(tiny):
    site = Site(tiny)
    for method, path, operation in site.operations():
        assert site.ask(method, path, **sent(operation)).status_code == 200, path
        if "text/event-stream" in operation["responses"]["200"]["content"]:
            answer = site.ask(method, path, **sent(operation, stream=True))
            assert answer.headers["content-type"].startswith("text/event-stream") and '"error":{' not in answer.text, (
                path
            )
    messages = [{"role": "user", "content": "Emma"}]
    for body in ({"prompt": "It is"}, {"messages": messages}, {"inputs": "It is"}):
        for stream in (False, True):
            assert site.ask("POST", "/invocations", json=body | {"stream": stream}).status_code == 200
    assert isinstance(site.ask("POST", "/tokenize", json={"inputs": "It is"}).json(), list)


def test_what_other_models_have_no_use_for_is_left_out(own):
    """Its examples would be refused."""
    described = {(m, path): o for m, path, o in own.operations()}
    assert described.keys() < own.paths
    for (method, path), operation in described.items():
        assert own.ask(method, path, **sent(operation)).status_code == 200, path
    examples = {(r.method, r.path): r.about.example for r in ROUTES if r.about.body is not None}
    for method, path in own.paths - described.keys():
        body = examples.get((method, path))
        answer = own.ask(method, path, check=False, json=None if body is None else body(own.served))
        nothing = answer.text == '{"prompt":""}'  # POST /detokenize of a model that has no texts
        assert answer.status_code in (400, 422) or nothing or '"error"' in answer.text, path


def once(error):
    """A function that raises it the first time."""

    async def raises(self, *args, **kwargs):
        if errors:
            raise errors.pop()
        return await answer(self, *args, **kwargs)

    errors, answer = [error], Exchange.answer
    return raises


def raising(error):
    async def raises(*args, **kwargs):
        raise error

    return raises


async def slow():
    yield b"{"
    await asyncio.sleep(5)
    yield b"}"


def test_the_statuses_are_those_that_are_given(tiny, monkeypatch):
    """Every kind of failure, on every route: what comes is described, and what is described came."""
    site = Site(tiny, tenants=KEYS)
    served, key = site.served, {"Authorization": "Bearer k"}
    found = {}

    def tried(method, path, operation, headers=None, twice=(), **more):
        request = {**sent(operation), "headers": [*{**key, **dict(headers or {})}.items()], **more}
        request["headers"] += twice
        found.setdefault((method, path), set()).add(site.ask(method, path, **request).status_code)

    def broken(place, name, value, *told, **more):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, value)
            tried(*told, **more)

    for told in site.operations():
        method, path, operation = told
        work, asks = is_work(method, path), "429" in operation["responses"]
        tried(*told)
        tried(*told, twice=[("Authorization", "Bearer x")])
        tried(*told, headers={"x": "x" * 70_000})
        tried(*told, headers={"Host": "elsewhere"})
        tried(*told, headers={"Accept": "image/png"})
        tried(*told, headers={"Authorization": "Bearer x"})
        broken(Served, "why_not_live", lambda *_: "It does not.", *told)
        if "requestBody" not in operation:
            broken(Exchange, "answer", once(RuntimeError()), *told)
            broken(Served, "ask", raising(EngineFailed("no")), *told)
            continue
        broken(Served, "body", raising(RuntimeError()), *told)
        tried(*told, headers={"Content-Type": "image/png"}, json=None, content=b"{}")
        tried(*told, json=None, content=b"{", headers={"Content-Type": "application/json"})
        tried(*told, json=example(operation) | {"there_is_none": 1})
        tried(*told, json=example(operation) | {"model": "nope"})  # where there is no such field, it is a wrong one
        broken(served, "settings", replace(served.settings, max_body_size=1), *told)
        late = replace(served.settings, arrival_timeout=0.001)
        broken(served, "settings", late, *told, json=None, content=slow())
        broken(served, "draining", True, *told)
        if work:
            broken(served.gate, "most", 0, *told)
        if asks:
            broken(Served, "body", raising(ModelError("no")), *told)
            broken(Served, "body", raising(QueueFull("no")), *told)
    for path, body in (("/invocations", {"prompt": "a"}), ("/tokenize", {"inputs": "a"})):  # in their other dialect
        told = "POST", path, {"requestBody": {"content": {"application/json": {"example": body}}}}
        tried(*told, json=body | {"model": "nope"})
        tried(*told, json=body | {"there_is_none": 1})
        broken(Served, "read", raising(ModelError("no")), *told)
    for method, path in [told for told in found if "{response}" in told[1]]:
        found[method, path].add(site.ask(method, path, headers=key, check=False).status_code)
    found["GET", "/v1/models/{model}"].add(site.ask("GET", "/v1/models/nope", headers=key, check=False).status_code)
    described = {(m, path): set(map(int, o["responses"])) for m, path, o in site.operations()}
    assert {k: v ^ described[k] for k, v in found.items() if v != described[k]} == {}


def test_keys_are_asked_for_where_they_are(tiny):
    keyed, open_ = Site(tiny, tenants=KEYS), Site(tiny)
    assert keyed.document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    for method, path, operation in keyed.operations():
        guarded = keyed.ask(method, path, **sent(operation)).status_code == 401
        assert guarded == (operation.get("security") == [{"key": []}]) == ("401" in operation["responses"]), path
    assert "securitySchemes" not in open_.document["components"]
    assert not any("security" in o or "401" in o["responses"] for *_, o in open_.operations())


# ---- the page --------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """links: where it leads. ids: places in it. text: what is read. Every element that begins must end."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.links, self.ids, self.text = [], set(), [], [], ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.links += [value for name, value in attributes if name in ("href", "src")]
        self.ids += [value for name, value in attributes if name == "id"]
        assert not any(name.startswith("on") or name == "style" for name, _ in attributes)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_shows_every_route_field_and_status(tiny):
    site = Site(tiny)
    page = Page(site.ask("GET", "/docs").text)
    lines = [line for line in page.text.splitlines() if line]
    for method, path, operation in site.operations():
        title, summary = f"{method} {path}", operation["summary"]
        (place,) = [i for i, line in enumerate(lines) if line == title and lines[i + 1].startswith(summary)]
        own = " ".join(lines[place : place + 80])
        assert all(status in own for status in operation["responses"]) and operation["operationId"] in page.ids
    for name, schema in site.document["components"]["schemas"].items():
        assert f"type-{name}" in page.ids
        assert all(field in page.text for field in schema.get("properties", ()))
    assert len(page.ids) == len(set(page.ids))


def test_the_page_needs_nothing_and_runs_nothing(tiny):
    answer = Site(tiny).ask("GET", "/docs")
    page, policy = Page(answer.text), answer.headers["content-security-policy"]
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "form", "base", "object"})
    assert {link for link in page.links if not link.startswith("#")} == {"/openapi.json"}
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    style = answer.text.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'; ") and "unsafe" not in policy
    assert "url(" not in style and "@import" not in style and answer.headers["x-content-type-options"] == "nosniff"


def test_names_are_shown_as_text(tiny):
    name = "<script>alert(1)</script>"
    page = Page(Site(tiny, names=[name]).ask("GET", "/docs").text)
    assert "script" not in page.tags and name in page.text


def test_the_commands_of_the_page_are_shell():
    """Quotes in an example and all."""
    body = {"prompt": "It's $HOME"}
    operation = {"requestBody": {"content": {"application/json": {"example": body}}}, "security": []}
    words = shlex.split(curl("POST", "/v1/{model}", operation, "/llm"))
    assert words[:4] == ["curl", "-sSX", "POST", "$URL/llm/v1/$MODEL"]
    assert "Authorization: Bearer $KEY" in words and json.loads(words[-1]) == body


def test_both_know_the_path_that_a_proxy_has_for_the_server(tiny):
    site = Site(tiny, root_path="/llm")
    assert site.document["servers"] == [{"url": "/llm"}]
    for path in ("/docs", "/llm/docs"):
        text = site.ask("GET", path, check=False).text
        assert 'href="/llm/openapi.json"' in text and "$URL/llm/v1/models" in text
    assert site.ask("GET", "/llm/v1/models", check=False).status_code == 200


def test_both_are_there_for_head_and_without_a_key(tiny):
    site = Site(tiny, tenants=KEYS)
    for path in ("/openapi.json", "/docs"):
        whole, head = site.ask("GET", path), site.ask("HEAD", path, check=False)
        assert head.status_code == 200 and head.headers["content-length"] == str(len(whole.content))
        assert site.ask("POST", path, check=False).status_code == 405
