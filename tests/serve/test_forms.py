"""Forms of answers over HTTP: who checks them, on which thread, and how what is wrong with one is told."""

from __future__ import annotations

import asyncio
import json
import re
import threading

import pytest

from hibachi.errors import InvalidRequest, QueueFull
from hibachi.llm.own import open_texts
from hibachi.llm.texts import Texts
from hibachi.request import SamplingParams
from hibachi.server import tenant_pool as aside
from hibachi.server.served import LARGE_FORM, Served
from hibachi.server.settings import ServeSettings
from hibachi.server.tgi_settings import TgiAsked
from hibachi.structured import StructuredOutputs

from .conftest import CHATML, site

MESSAGES = [{"role": "user", "content": "Emma"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["yes", "no"]}},
    "required": ["a"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
JSON, REGEX = StructuredOutputs(json=SCHEMA), StructuredOutputs(regex="[ab]{3}")

# Routes, what says a form there, the field that it has, and what it means.
WAYS = [
    ("/v1/completions", {"prompt": "Emma", "guided_json": SCHEMA}, "guided_json", JSON),
    ("/v1/completions", {"prompt": "Emma", "response_format": NAMED}, "response_format.json_schema.schema", JSON),
    ("/v1/completions", {"prompt": ["a", "b"], "structured_outputs": {"regex": "[ab]{3}"}}, None, REGEX),
    ("/v1/chat/completions", {"messages": MESSAGES, "json_schema": SCHEMA}, "json_schema", JSON),
    ("/v1/chat/completions", {"messages": MESSAGES, "guided_regex": "[ab]{3}"}, "guided_regex", REGEX),
    ("/invocations", {"messages": MESSAGES, "guided_regex": "[ab]{3}"}, "guided_regex", REGEX),
    ("/v1/generate", {"prompt": [1, 2], "structured_outputs": {"regex": "[ab]{3}"}}, None, REGEX),
]
OF_TGI = {"inputs": "Emma", "parameters": {"grammar": {"type": "json", "value": SCHEMA}, "max_new_tokens": 4}}


@pytest.fixture(scope="module")
def texts():
    with open_texts("tiny", max_num_seqs=4) as found:
        yield found


@pytest.fixture(scope="module")
def here(texts):
    with site(texts, chat_template=CHATML) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_known(texts, monkeypatch):
    """So that forms are checked, whatever the tests before have asked for."""
    monkeypatch.setattr(texts, "knows_form", lambda params: False)


@pytest.fixture
def checked(texts, monkeypatch):
    """The calls of `check_form`: what it was given, and on which thread."""
    calls = []

    def check_form(params):
        calls.append((params.structured_outputs, threading.current_thread().name))

    monkeypatch.setattr(texts, "check_form", check_form)
    return calls


@pytest.fixture
def refusing(texts, monkeypatch):
    """No form is good enough."""

    def check_form(params):
        raise InvalidRequest.at(("structured_outputs", params.structured_outputs.kind), " is too much.")

    monkeypatch.setattr(texts, "check_form", check_form)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, body, field, form", WAYS)
def test_a_form_is_checked_before_it_is_queued(here, texts, checked, monkeypatch, path, body, field, form, stream):
    queued, run = [], texts.engine.submit_many
    monkeypatch.setattr(texts.engine, "submit_many", lambda job, n: queued.append(job.request.params) or run(job, n))
    answer = here.post(path, {**body, "max_tokens": 4, "stream": stream})
    assert answer.status_code == 200 and '"error"' not in answer.text
    assert [of for of, _ in checked] == [form] and checked[0][1].startswith("hibachi-check")
    assert {params.structured_outputs for params in queued} == {form}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, body, field, form", WAYS)
def test_what_is_wrong_with_it_is_told_by_its_name(here, refusing, path, body, field, form, stream):
    answer = here.post(path, {**body, "stream": stream})
    name = field or f"structured_outputs.{form.kind}"
    said = {"message": f"{name} is too much.", "type": "invalid_request_error", "param": name, "code": "invalid_value"}
    assert (answer.status_code, answer.json()) == (400, {"error": said})


def test_tgi_tells_it_in_its_own_way(here, texts, checked, monkeypatch):
    for path in ("/generate", "/", "/generate_stream"):
        assert here.post(path, OF_TGI).status_code == 200
    assert [of for of, _ in checked] == [JSON] * 3

    def refuse(params):
        raise InvalidRequest.at(("structured_outputs", "json"), " is too much.")

    monkeypatch.setattr(texts, "check_form", refuse)
    said = {"error": "Input validation error: grammar.value is too much.", "error_type": "validation"}
    for path in ("/generate", "/", "/invocations"):
        answer = here.post(path, OF_TGI)
        assert (answer.status_code, answer.json()) == (422, said)
    answer = here.post("/generate_stream", OF_TGI)
    assert answer.status_code == 200 and json.loads(answer.text.removeprefix("data:")) == said


def test_what_is_refused_when_it_is_queued_has_its_name_too(here, texts, monkeypatch):
    """A form may be known no longer, or not go with another parameter."""

    def refuse(*_, **__):
        raise InvalidRequest.at(("structured_outputs", "json"), " does not go with it.")

    monkeypatch.setattr(texts.engine, "check", refuse)
    for path, body, field, _ in WAYS:
        error = here.post(path, body).json()["error"]
        assert error["param"] == (field or "structured_outputs.json"), path
        assert error["message"] == f"{error['param']} does not go with it."


def test_nothing_is_checked_where_no_form_is_asked_for(here, texts, checked, monkeypatch):
    assert here.complete("Emma", response_format={"type": "text"})["choices"] == here.complete("Emma")["choices"]
    here.post("/v1/generate", {"prompt": [1], "max_tokens": 1})
    here.post("/generate", {"inputs": "Emma", "parameters": {"max_new_tokens": 1}})
    assert not checked
    monkeypatch.setattr(texts, "knows_form", lambda params: params.structured_outputs == JSON)
    for body in ({"guided_json": SCHEMA}, {"guided_regex": "a"}):
        here.complete("Emma", **body)
    assert [of.kind for of, _ in checked] == ["regex"]


def test_others_go_on_while_one_is_checked(here, texts, monkeypatch):
    let, begun = threading.Event(), threading.Event()

    def slow(params):
        begun.set()
        assert let.wait(30)

    monkeypatch.setattr(texts, "check_form", slow)
    found = []
    asker = threading.Thread(target=lambda: found.append(here.complete("Emma", guided_regex="a")))
    asker.start()
    try:
        assert begun.wait(10)
        assert here.complete("Emma")["choices"] and not found
    finally:
        let.set()
        asker.join(10)
    assert found[0]["choices"]


def test_slow_checks_of_a_tenant_are_in_nobody_s_way(here, texts, monkeypatch):
    monkeypatch.setattr(aside, "MOST", 18)
    let, running = threading.Event(), []

    def slow(params):
        if params.structured_outputs == JSON:
            running.append(let.wait(10))

    monkeypatch.setattr(texts, "check_form", slow)
    slow_one, other = SamplingParams(structured_outputs=JSON), SamplingParams(structured_outputs=REGEX)

    async def ask(served):
        theirs = [asyncio.ensure_future(served.check_form(slow_one, "emma")) for _ in range(9)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="9 forms"):
            await served.check_form(other, "emma")
        async with asyncio.timeout(5):
            await served.check_form(other, "anne")
        let.set()
        await asyncio.gather(*theirs)
        await served.check_form(other, "emma")

    asyncio.run(ask(Served(texts, ServeSettings())))
    assert running == [True] * 9


@pytest.mark.parametrize("tenant", ["", "emma"])
def test_large_forms_wait_for_each_other_and_small_ones_do_not(here, texts, monkeypatch, tenant):
    let, running = threading.Event(), []

    def slow(params):
        if len(params.structured_outputs.text) > LARGE_FORM:
            running.append(params)
            assert let.wait(30)

    monkeypatch.setattr(texts, "check_form", slow)
    large = [SamplingParams(structured_outputs={"regex": "a" * (LARGE_FORM + n)}) for n in (1, 2, 3)]

    async def ask(served):
        names = [f"{tenant} {i}" if tenant else "" for i in range(len(large))]  # of tenants of their own
        theirs = [asyncio.ensure_future(served.check_form(*each)) for each in zip(large, names, strict=True)]
        async with asyncio.timeout(10):
            for _ in range(9):
                await served.check_form(SamplingParams(structured_outputs=REGEX), tenant)
        assert len(running) == 1
        let.set()
        await asyncio.gather(*theirs)

    asyncio.run(ask(Served(texts, ServeSettings())))
    assert len(running) == 3


def test_tgis_flag_turns_forms_off(texts, checked):
    with site(texts, chat_template=CHATML, tgi=TgiAsked(disable_grammar_support=True)) as off:
        for path, body, field, _ in WAYS:
            error = off.post(path, body).json()["error"]
            name = field or "structured_outputs"
            assert (error["param"], error["code"]) == (name, "unsupported_parameter"), path
            assert error["message"].startswith(f"{name} is not supported: ")
        answer = off.post("/generate", OF_TGI)
        assert answer.status_code == 422 and "--disable-grammar-support" in answer.json()["error"]
        assert off.complete("Emma")["choices"] and not checked


# ---- whole requests, where an engine can guide -----------------------------------------------------------------------

guides = pytest.mark.skipif(not hasattr(Texts, "check_form"), reason="no engine guides yet")


@guides
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, body, field, form", [way for way in WAYS if way[0] != "/v1/generate"])
def test_an_answer_has_the_form(here, path, body, field, form, stream):
    pytest.importorskip("llguidance")
    answer = here.post(path, {**body, "max_tokens": 40, "stream": stream, "temperature": 0})
    assert answer.status_code == 200, answer.text
    events = [e.removeprefix("data: ") for e in answer.text.split("\n\n") if e.startswith("data: {")]
    found: dict[int, str] = {}
    for one in map(json.loads, events) if stream else (answer.json(),):
        for choice in one["choices"]:
            part = choice.get("text") or choice.get("delta", choice.get("message", {})).get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + part
    for text in found.values():
        assert json.loads(text)["a"] in ("yes", "no") if form is JSON else re.fullmatch("[ab]{3}", text)


@guides
def test_an_answer_of_tgis_has_the_form(here):
    pytest.importorskip("llguidance")
    body = {**OF_TGI, "parameters": {**OF_TGI["parameters"], "max_new_tokens": 40}}
    whole = here.post("/generate", body).json()["generated_text"]
    events = here.post("/generate_stream", body).text.strip().split("\n\n")
    assert json.loads(whole)["a"] in ("yes", "no")
    assert json.loads(events[-1].removeprefix("data:"))["generated_text"] == whole


@guides
def test_what_is_no_form_is_refused(here):
    pytest.importorskip("llguidance")
    for body, param in (
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": "start: ("}, "guided_grammar"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex"),
    ):
        answer = here.post("/v1/completions", {"prompt": "a", **body})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
