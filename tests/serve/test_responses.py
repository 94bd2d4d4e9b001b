"""OpenAI's route for responses, over HTTP: whole and streamed, what is kept, other tenants, and bad input."""

from __future__ import annotations

import json
import threading

import httpx
import pytest

from hibachi.llm.dialects.responses import answers
from hibachi.server.web.tenants import Tenants

from .conftest import CHATML, ENGINES, Gate, site

URL = "/v1/responses"
ASKED = {"temperature": 0, "max_output_tokens": 6}


def user(text):
    return {"role": "user", "content": text}


def respond(server, input, status=200, headers=None, **fields):
    answer = server.post(URL, {"input": input, **ASKED, **fields}, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


def events_of(server, input, **fields):
    body = {"input": input, "stream": True, **ASKED, **fields}
    with server.client.stream("POST", URL, json=body) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        return parsed("".join(answer.iter_text()))


def parsed(text):
    assert text.endswith("\n\n")
    found = []
    for event in text[:-2].split("\n\n"):
        if not event.startswith(":"):
            name, data = event.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def text_of(response):
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_a_response_is_what_a_chat_would_say(server, described):
    told = respond(server, "Hello", instructions="Be brief.", metadata={"a": "b"})
    described("Response", told)
    messages = [{"role": "system", "content": "Be brief."}, user("Hello")]
    chat = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 6}).json()
    assert text_of(told) == chat["choices"][0]["message"]["content"]
    assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (told["model"], told["instructions"], told["metadata"]) == ("tiny", "Be brief.", {"a": "b"})
    assert (told["usage"]["input_tokens"], told["usage"]["output_tokens"]) == (chat["usage"]["prompt_tokens"], 6)
    tag = server.client.get("/v1/models").json()["data"][0]["server"]
    assert told["id"].startswith(f"resp_{tag}_") and len(tag) == 8


def test_the_events_of_a_stream_end_with_the_whole_answer(server, described):
    events = events_of(server, "Hello")
    for event in events:
        described("ResponseStreamEvent", event)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    kinds = [e["type"].removeprefix("response.") for e in events if e not in deltas]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.done"),
        *("content_part.done", "output_item.done", "incomplete"),
    ]
    last, whole = events[-1]["response"], respond(server, "Hello")
    assert "".join(e["delta"] for e in deltas) == text_of(last) == text_of(whole)
    assert deltas  # several, unless the machine is so busy that all of it has come before it is looked for
    for one in (last, whole):
        for item in (one, *one["output"]):
            item.pop("id")
        one.pop("created_at")
        one["usage"].pop("input_tokens_details")
    assert last == whole


LARGE = {"type": "function", "name": "f", "description": "x" * 50_000, "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "large"),
    [
        ({}, set()),
        ({"tools": [LARGE], "tool_choice": "none"}, {"response.created", "response.incomplete"}),
        (
            {"include": ["message.output_text.logprobs"], "top_logprobs": 20, "max_output_tokens": 200},
            {"response.output_text.done", "response.output_item.done", "response.incomplete"},
        ),
    ],
    ids=["small", "large request", "long answer"],
)
def test_large_events_are_written_beside_the_event_loop(server, monkeypatch, fields, large):
    """Those that repeat what was asked, or all that was said: streams of others wait meanwhile."""
    threads, frame = {}, answers.frame

    def framed(event):
        threads[event.__struct_config__.tag] = threading.current_thread().name
        return frame(event)

    monkeypatch.setattr(answers, "frame", framed)
    events_of(server, "Hello", ignore_eos=True, **fields)
    apart = {kind for kind, thread in threads.items() if thread.startswith("hibachi-short")}
    assert large <= apart and (large or not apart)


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_a_stream_is_kept_before_its_end_is_told(server):
    *_, last = events_of(server, "One?")
    id = last["response"]["id"]
    assert server.client.get(f"{URL}/{id}").json() == last["response"]
    assert respond(server, "Two?", previous_response_id=id)["status"] == "incomplete"


def test_a_response_is_read_and_forgotten(server, described):
    told = respond(server, [user("One?"), {"role": "assistant", "content": "1"}, user("Two?")])
    path = f"{URL}/{told['id']}"
    assert server.client.get(path).json() == told
    assert server.client.get(f"{path}?stream=false").json() == told
    assert error_of(server.client.get(f"{path}?stream=true"), 400)["param"] == "stream"
    listed = server.client.get(f"{path}/input_items").json()
    described("ResponseItemList", listed)
    assert [item["content"][0]["text"] for item in listed["data"]] == ["Two?", "1", "One?"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (
        listed["data"][0]["id"],
        listed["data"][2]["id"],
        False,
    )
    part = server.client.get(f"{path}/input_items?order=asc&limit=1&after={listed['last_id']}").json()
    assert (part["data"], part["has_more"]) == ([listed["data"][1]], True)
    assert server.client.delete(path).json() == {"id": told["id"], "object": "response", "deleted": True}
    for answer in (server.client.get(path), server.client.delete(path), server.client.get(f"{path}/input_items")):
        assert error_of(answer, 404)["code"] == "response_not_found"
    gone = error_of(server.post(URL, {"input": "a", "previous_response_id": told["id"]}), 404)
    assert (gone["code"], gone["param"], gone["type"]) == (
        "previous_response_not_found",
        "previous_response_id",
        "invalid_request_error",
    )
    reference = {"type": "item_reference", "id": told["output"][0]["id"]}
    assert error_of(server.post(URL, {"input": [reference]}), 404)["code"] == "item_not_found"


def test_the_methods_of_a_response_are_told(server):
    """Those of all routes with its path, whatever its id."""
    answer = server.client.put(f"{URL}/resp_1")
    error = error_of(answer, 405)
    assert error["code"] == "method_not_allowed" and error["message"].endswith("no such method, but DELETE, GET, HEAD.")
    assert answer.headers["allow"] == "DELETE, GET, HEAD"
    assert server.client.post(f"{URL}/a/input_items").headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("query", "param"),
    [("order=up", "order"), ("limit=0", "limit"), ("limit=101", "limit"), ("limit=a", "limit"), ("after=x", "after")],
)
def test_lists_that_cannot_be(server, query, param):
    id = respond(server, "One?")["id"]
    status = 404 if param == "after" else 400
    assert error_of(server.client.get(f"{URL}/{id}/input_items?{query}"), status)["param"] == param


def test_store_false_keeps_nothing(server):
    before = len(server.served.responses.of(""))
    told = respond(server, "One?", store=False)
    assert told["store"] is False
    assert error_of(server.client.get(f"{URL}/{told['id']}"), 404)
    assert len(server.served.responses.of("")) == before


@pytest.fixture(scope="module")
def others():
    """A server with two tenants, whose stores hold little."""
    tenants = Tenants((("k1", "one"), ("k2", "two")))
    settings = {"chat_template": CHATML, "tenants": tenants, "responses_store": 20_000}
    with ENGINES["own"]("tiny", max_num_seqs=4) as texts, site(texts, **settings) as here:
        yield here


def key(k):
    return {"Authorization": f"Bearer {k}"}


def test_what_another_tenant_keeps_is_as_if_it_were_not_there(others):
    told = respond(others, "One?", headers=key("k1"))
    id, item = told["id"], told["output"][0]["id"]
    never = id[:-4] + ("0000" if id[-4:] != "0000" else "1111")

    def tries(id, item):
        path, mine = f"{URL}/{id}", key("k2")
        yield others.client.get(path, headers=mine)
        yield others.client.delete(path, headers=mine)
        yield others.client.get(f"{path}/input_items", headers=mine)
        yield others.post(URL, {"input": "a", "previous_response_id": id}, headers=mine)
        yield others.post(URL, {"input": [{"type": "item_reference", "id": item}]}, headers=mine)

    for theirs, none in zip(tries(id, item), tries(never, f"{item}0"), strict=True):
        assert theirs.status_code == none.status_code == 404
        assert theirs.text.replace(id, never).replace(f"{item}'", f"{item}0'") == none.text
    assert others.client.get(f"{URL}/{id}", headers=key("k1")).json() == told
    assert others.client.get(f"{URL}/{id}").status_code == 401


def test_what_is_driven_out_is_not_found(others):
    ids = [respond(others, "a" * 300, headers=key("k1"))["id"] for _ in range(12)]
    store = others.served.responses.of("one")
    assert store.size <= 20_000
    found = [others.client.get(f"{URL}/{id}", headers=key("k1")).status_code for id in ids]
    assert found == sorted(found, reverse=True) and set(found) == {200, 404}
    lost = others.post(URL, {"input": "a", "previous_response_id": ids[0]}, headers=key("k1"))
    assert error_of(lost, 404)["code"] == "previous_response_not_found"


def test_a_server_that_keeps_nothing():
    settings = {"chat_template": CHATML, "responses_store": 0}
    with ENGINES["own"]("tiny", max_num_seqs=2) as texts, site(texts, **settings) as here:
        told = respond(here, "One?", store=True)
        assert told["store"] is False
        assert here.client.get("/v1/models").json()["data"][0]["server"] is None
        lost = here.post(URL, {"input": "a", "previous_response_id": told["id"]})
        assert error_of(lost, 404)["code"] == "previous_response_not_found"


# ---- what does not fit -----------------------------------------------------------------------------------------------


# ---- bad input -------------------------------------------------------------------------------------------------------


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=ENGINES)
def gated(request, tmp_path):
    """A gate and the server of its model, which has a chat template."""
    gate = Gate(tmp_path)
    with ENGINES[request.param](gate.model, max_num_seqs=2) as texts, site(texts, chat_template=CHATML) as here:
        yield gate, here
        gate.open()
    gate.close()


def test_a_client_that_stops_reading_harms_nobody(gated):
    """Its response is not kept, and those beside it are answered."""
    gate, here = gated
    beside = []
    gate.let(40)
    with here.client.stream("POST", URL, json={"input": "a", "stream": True, "max_output_tokens": 400}) as answer:
        next(answer.iter_bytes())
        reader = threading.Thread(target=lambda: beside.append(respond(here, "Hello", store=False)))
        reader.start()
        while reader.is_alive():
            gate.let()
            reader.join(0.02)
    gate.open()
    for _ in range(200):
        if not here.served.open_requests:
            break
        threading.Event().wait(0.05)
    assert here.served.open_requests == 0
    assert text_of(beside[0])
    assert len(here.served.responses.of("")) == 0


def test_a_response_whose_engine_closes_has_failed(gated, described):
    gate, here = gated
    failed = []

    def read():
        with httpx.stream("POST", here.url + URL, json={"input": "a", "stream": True}, timeout=60) as answer:
            lines = []
            for line in answer.iter_lines():
                lines.append(line)
                if "output_text.delta" in line:
                    begun.set()
            failed.extend(parsed("\n".join(lines) + "\n"))

    begun = threading.Event()
    reader = threading.Thread(target=read)
    reader.start()
    gate.let(40)
    assert begun.wait(30)
    closing = threading.Thread(target=here.texts.close)
    closing.start()
    gate.open()
    reader.join(30)
    closing.join(30)
    last = failed[-1]
    described("ResponseStreamEvent", last)
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    assert [e["sequence_number"] for e in failed] == list(range(len(failed)))
    assert len(here.served.responses.of("")) == 0


def test_a_deadline_ends_a_response(slow_model):
    with ENGINES["own"](slow_model, max_num_seqs=2) as texts, site(texts, chat_template=CHATML) as here:
        answer = here.post(URL, {"input": "a", "timeout": 0.3})
        assert error_of(answer, 408)["code"] == "deadline_exceeded"
        assert answer.headers["x-should-retry"] == "false"  # clients would ask twice more
        *_, last = events_of(here, "a", timeout=1.0, max_output_tokens=300)
        assert last["type"] == "response.failed" and last["response"]["output"]
        here.served.drain()
        assert error_of(here.post(URL, {"input": "a"}), 503)["code"] == "shutting_down"
