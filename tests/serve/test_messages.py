"""Anthropic's Messages API: what is answered is what the chat route answers, in Anthropic's shapes."""

from __future__ import annotations

import json

import httpx
import pytest

from hibachi.llm.own import open_texts
from hibachi.llm.remote.llm import RemoteLLM
from hibachi.request import SamplingParams
from hibachi.server.web import comments
from hibachi.server.web.tenants import Tenants

from .conftest import CHATML, Gate, site
from .saying import CALL, THOUGHT, saying, told
from .test_streams import at_rest, send, until

PATH = "/v1/messages"
HELLO = {"role": "user", "content": "How do you do?"}
BODY = {"model": "tiny", "max_tokens": 8, "messages": [HELLO], "temperature": 0}
VERSION = {"anthropic-version": "2023-06-01"}


def events(text):
    """Names and data of a stream, in their order. The name is the type of the data."""
    found = []
    for one in text.split("\n\n"):
        if one.strip() and not one.startswith(":"):
            name, data = one.strip().split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}", one
    return found


def whole(server, **more):
    answer = server.post(PATH, {**BODY, **more})
    assert answer.status_code == 200, answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    return answer.json()


def refused(answer, status=400):
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["type"] == "error" and body["request_id"] == answer.headers["request-id"]
    assert set(body) == {"type", "error", "request_id"} and {"type", "message"} <= set(body["error"])
    return body["error"]


# ---- text ----------------------------------------------------------------------------------------------------------


def test_the_text_is_that_of_a_chat(server):
    chat = server.post("/v1/chat/completions", {**BODY, "messages": [HELLO]}).json()
    answer = whole(server)
    assert answer["id"].startswith("msg_") and answer["model"] == "tiny"
    assert (answer["type"], answer["role"], answer["stop_sequence"]) == ("message", "assistant", None)
    (block,) = answer["content"]
    assert (block["type"], block["text"]) == ("text", chat["choices"][0]["message"]["content"])
    assert answer["stop_reason"] == {"length": "max_tokens", "stop": "end_turn"}[chat["choices"][0]["finish_reason"]]
    used = answer["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert used["output_tokens"] == chat["usage"]["completion_tokens"]
    assert used["cache_creation_input_tokens"] == 0


def test_tokens_that_were_cached_are_told_apart(server):
    body = {"system": "Of caches. " * 12}
    first, again = (whole(server, **body)["usage"] for _ in range(2))
    assert again["cache_read_input_tokens"] >= 16 and again["input_tokens"] > 0
    assert sum((again["cache_read_input_tokens"], again["input_tokens"])) == sum(
        (first["cache_read_input_tokens"], first["input_tokens"])
    )


# ---- counting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"system": "Be brief"}, {"messages": [HELLO, HELLO, {**HELLO, "content": []}]}])
def test_the_count_is_that_of_the_prompt(server, more):
    body = {"model": "tiny", "messages": [HELLO], **more}
    counted = server.post(f"{PATH}/count_tokens", body)
    used = whole(server, **more)["usage"]
    assert counted.json() == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}
    refused(server.post(f"{PATH}/count_tokens", {"model": "other", "messages": [HELLO]}), 404)


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_a_body_without_a_limit_or_a_model_or_that_is_no_json(server):
    for missing in ("max_tokens", "model", "messages"):
        body = {k: v for k, v in BODY.items() if k != missing}
        assert refused(server.post(PATH, body))["message"] == f"The field {missing} is missing."
    assert "JSON" in refused(server.client.post(PATH, content="{"))["message"]
    assert refused(server.client.post(PATH, content=b"x", headers={"content-type": "text/plain"}), 415)
    assert refused(server.post(PATH, {**BODY, "model": "other"}), 404)["type"] == "not_found_error"
    assert refused(server.client.get(PATH), 405)["type"] == "invalid_request_error"
    assert refused(server.post(f"{PATH}/batches", {}), 404)["type"] == "not_found_error"


def test_what_has_no_effect_is_taken(server):
    """`?beta=true`, the header of betas, marks for a cache."""
    mark = {"type": "ephemeral", "ttl": "1h"}
    marked = [{"role": "user", "content": [{"type": "text", "text": HELLO["content"], "cache_control": mark}]}]
    body = {**BODY, "messages": marked, "metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": mark}
    body |= {"output_config": {"effort": "high"}, "diagnostics": {"previous_message_id": None}}
    answer = server.client.post(f"{PATH}?beta=true", json=body, headers={**VERSION, "anthropic-beta": "a-1,b-2"})
    assert answer.json()["content"] == whole(server)["content"]


def test_keys_as_either_kind_of_client_sends_them(texts):
    with site(texts, chat_template=CHATML, tenants=Tenants((("k", "t"),))) as here:
        for headers in ({"x-api-key": "k"}, {"Authorization": "Bearer k"}):
            assert here.post(PATH, BODY, headers=headers).status_code == 200
            assert here.client.get("/v1/models", headers=headers).status_code == 200
        for headers in ({}, {"x-api-key": "other"}, {"x-api-key": "k", "Authorization": "Bearer other"}):
            assert refused(here.post(PATH, BODY, headers=headers), 401)["type"] == "authentication_error"
        assert refused(here.client.get("/v1/models", headers=VERSION), 401)["type"] == "authentication_error"
        two = httpx.post(here.url + PATH, json=BODY, headers=[("x-api-key", "k"), ("x-api-key", "k")])
        assert "at most one header X-Api-Key" in refused(two)["message"]


# ---- models --------------------------------------------------------------------------------------------------------


def test_models_in_anthropics_shape_where_its_version_is_sent(server):
    page = server.client.get("/v1/models?limit=1000", headers=VERSION).json()
    (model,) = page["data"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("tiny", "tiny", False)
    assert (model["type"], model["id"], model["display_name"], model["lifecycle"]) == (
        "model",
        "tiny",
        "tiny",
        "active",
    )
    assert model["max_input_tokens"] == 512 and model["created_at"].endswith("Z")
    assert server.client.get("/v1/models/tiny", headers=VERSION).json() == model
    assert refused(server.client.get("/v1/models/other", headers=VERSION), 404)["type"] == "not_found_error"
    assert "object" in server.client.get("/v1/models").json()


# ---- clients that wait, and clients that leave ---------------------------------------------------------------------


@pytest.fixture
def waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(comments, "EVERY", 0.05)
    gate = Gate(tmp_path)
    template = "{{ messages[0].content }}"
    with RemoteLLM(gate.model, max_num_seqs=1) as texts, site(texts, chat_template=template) as here:
        yield here, gate
        gate.open()
    gate.close()


def test_a_stream_that_waits_pings(waiting):
    here, gate = waiting
    body = {**BODY, "stream": True, "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
    with httpx.stream("POST", here.url + PATH, json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        assert answer.status_code == 200 and answer.headers["request-id"]
        assert [next(lines) for _ in range(6)] == ["event: ping", 'data: {"type":"ping"}', ""] * 2
        gate.open()
        told = events("\n".join(lines))
    assert "".join(e["delta"].get("text", "") for e in told if e["type"] == "content_block_delta") == "bc"


def test_an_error_in_a_stream_is_an_event(slow_model, monkeypatch):
    """Another request runs, so that these wait for longer than they may."""
    monkeypatch.setattr(comments, "EVERY", 0.05)
    with open_texts(slow_model, max_num_seqs=1) as texts, site(texts, chat_template="a", request_timeout=0.3) as here:
        running = texts.stream("a", SamplingParams(max_tokens=400))
        answer = here.post(PATH, {**BODY, "stream": True})
        assert answer.status_code == 200
        *pings, last = events(answer.text)
        assert {e["type"] for e in pings} == {"ping"} and last["error"]["type"] == "timeout_error"
        assert last["request_id"] == answer.headers["request-id"]
        assert refused(here.post(PATH, BODY), 504)["type"] == "timeout_error"
        running.close()


def test_who_stops_reading_and_leaves_holds_nothing(server):
    expected = whole(server)["content"]
    socks = [send(server, {**BODY, "stream": True, "max_tokens": 400}, PATH) for _ in range(4)]
    assert whole(server)["content"] == expected
    for sock in socks:
        sock.close()
    until(lambda: at_rest(server))


def test_an_agent_of_anthropics_is_at_home(tmp_path):
    """A body with all that Claude Code sends, in the middle of its work."""
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
    used = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "x"}, "caller": {"type": "direct"}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "hibachi"}

    def body(*billed, said=THOUGHT + CALL):
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>now</system-reminder>"}]},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "I look.", "citations": None}, used]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "none", "is_error": True, **mark}
                ],
            },
            {"role": "system", "content": "Be quick."},
            *told(said),
        ]
        return {
            "system": [*billed, {"type": "text", "text": "You are an agent.", **mark}],
            "messages": messages,
            "tools": [
                {
                    "name": "look",
                    "input_schema": {"type": "object"},
                    "description": "Look there",
                    "eager_input_streaming": True,
                    **mark,
                }
            ],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
            "metadata": {"user_id": "user_account__session_"},
            "max_tokens": 32_000,
            "temperature": 1,
            "top_k": 1,
        }

    with saying(tmp_path) as here:
        model, headers = here.served.names[0], {"anthropic-beta": "claude-code-20250219", "x-api-key": "k"}
        found = []
        for billed in ([], [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;"}]):
            sent = {**body(*billed), "model": model, "stream": True}
            answer = here.client.post(f"{PATH}?beta=true", json=sent, headers=headers)
            assert answer.status_code == 200, answer.text
            found.append(events(answer.text))
    for told_ in found:
        blocks = [e["content_block"]["type"] for e in told_ if e["type"] == "content_block_start"]
        assert blocks == ["thinking", "tool_use"]
    first, again = ([e for e in each if e["type"] == "message_delta"] for each in found)
    assert first == again and first[0]["delta"]["stop_reason"] == "tool_use"
