"""Tools and reasoning in chats over HTTP: with the generic format, under which any model can be made to call."""

from __future__ import annotations

import json

import pytest

from hibachi.llm.own import open_texts

from .conftest import CHATML, site

CHAT = [{"role": "user", "content": "Hi"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Bath"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name, parameters=None, **more):
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **given, **more}}


VISIT, PING = tool("visit", CITY), tool("ping", {"type": "object", "properties": {}, "additionalProperties": False})
ONE = {"tools": [VISIT], "tool_choice": "required", "parallel_tool_calls": False}


@pytest.fixture(scope="module")
def texts():
    with open_texts("tiny", max_num_seqs=8, max_num_queued_reqs=64) as found:
        yield found


@pytest.fixture(scope="module")
def here(texts):
    with site(texts, chat_template=CHATML, tool_call_parser="generic") as found:
        yield found


@pytest.fixture(scope="module")
def chat(here):
    """chat(**fields): the body of an answer that must come."""

    def call(**fields):
        body = {"messages": CHAT, "temperature": 0, "max_tokens": 90, **fields}
        answer = here.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return call


@pytest.fixture(scope="module")
def chunks(here):
    """chunks(**fields): the chunks of a stream."""

    def call(**fields):
        body = {"messages": CHAT, "temperature": 0, "max_tokens": 90, "stream": True, **fields}
        lines = here.post("/v1/chat/completions", body).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    return call


def gathered(chunks):
    """What clients make of a stream: by choice, the message and the reason of its end."""
    found = {}
    for choice in (c for chunk in chunks for c in chunk["choices"]):
        message, reasons = found.setdefault(choice["index"], ({"content": "", "tool_calls": []}, []))
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"]) and call["type"] == "function"
                message["tool_calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            mine = message["tool_calls"][call["index"]]
            mine["arguments"] += call["function"]["arguments"]
            if call.get("incomplete"):
                mine["incomplete"] = True
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return found


def plain(message):
    """A whole message in the same form."""
    calls = [{"id": c["id"], **c["function"]} for c in message.get("tool_calls", ())]
    for mine, call in zip(calls, message.get("tool_calls", ()), strict=True):
        mine |= {"incomplete": True} if call.get("incomplete") else {}
    return {"content": message["content"] or "", "tool_calls": calls}


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_a_call_that_is_required(chat):
    answer = chat(**ONE)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None and message["role"] == "assistant"
    [call] = message["tool_calls"]
    assert call.keys() == {"id", "type", "function"} and call["type"] == "function"
    assert call["id"].startswith("call_") and len(call["id"]) == 29
    assert call["function"]["name"] == "visit"
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Bath")
    assert isinstance(call["function"]["arguments"], str)


@pytest.mark.parametrize("n", [1, 2])
def test_streamed_it_is_the_same(chat, chunks, n):
    fields = {**ONE, "n": n, "temperature": 1, "seed": 3, "request_id": "same"}
    whole = chat(**fields)["choices"]
    found = gathered(chunks(**fields))
    assert len(found) == n
    for choice in whole:
        message, reasons = found[choice["index"]]
        assert message == plain(choice["message"]) and reasons == [choice["finish_reason"]] == ["tool_calls"]


def test_a_stream_in_its_pieces(chunks):
    [first, *rest] = chunks(**ONE, stream_options={"include_usage": True})
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [c["choices"][0]["delta"]["tool_calls"] for c in rest if c["choices"] and c["choices"][0]["delta"]]
    begun, *more = [call for calls in deltas for call in calls]
    assert begun == {
        "index": 0,
        "id": begun["id"],
        "type": "function",
        "function": {"name": "visit", "arguments": ""},
    }
    assert len(more) > 2, "as they come"
    assert all(call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in more)
    assert json.loads("".join(call["function"]["arguments"] for call in more)).keys() == {"city"}
    assert rest[-2]["choices"][0]["finish_reason"] == "tool_calls" and rest[-2]["choices"][0]["delta"] == {}
    assert rest[-1]["choices"] == [] and rest[-1]["usage"]["completion_tokens"] > 10


@pytest.mark.parametrize("limit", [4, 44])
def test_a_call_that_is_cut_off_is_marked_and_is_no_text(chat, chunks, limit):
    fields = {**ONE, "max_tokens": limit, "request_id": "same"}
    [choice] = chat(**fields)["choices"]
    assert choice["finish_reason"] == "length" and not (choice["message"]["content"] or "").strip()
    calls = choice["message"].get("tool_calls", [])
    assert [c["incomplete"] for c in calls] == [True] * (limit == 44)
    [(message, reasons)] = gathered(chunks(**fields)).values()
    assert message == plain(choice["message"]) and reasons == ["length"]


def test_logprobs_and_ids_of_tokens_come_whether_they_say_something_or_not(chat, chunks):
    fields = {**ONE, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    [choice] = chat(**fields)["choices"]
    scores, ids = [], []
    for chunk in chunks(**fields):
        for c in chunk["choices"]:
            scores += c["logprobs"]["content"] if c["logprobs"] else []
            ids += c.get("token_ids", [])
    assert ids == choice["token_ids"] and scores == choice["logprobs"]["content"] and len(ids) == len(scores) > 20


# ---- the next turn ---------------------------------------------------------------------------------------------------


# ---- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/tokenize", "/v1/warm", "/chat_tokenize"])
def test_where_only_the_prompt_is_wanted_tools_are_checked_and_shown_alike(here, chat, path):
    answer = here.post(path, {"messages": CHAT, "tools": [VISIT]})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    wanted = chat(tools=[VISIT], max_tokens=1)["usage"]["prompt_tokens"]
    assert wanted == found.get("count", found.get("token_count", len(found.get("tokenize_response", ()))))
    for tools in ([{"type": "function"}], [VISIT, VISIT], [{"function": 7}]):
        wrong = here.post(path, {"messages": CHAT, "tools": tools})
        assert wrong.status_code in (400, 422) and "tools[" in wrong.text
