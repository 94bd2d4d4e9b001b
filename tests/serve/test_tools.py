"""Tools and reasoning in chats over HTTP: with the generic format, under which any model can be made to call."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

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


@pytest.fixture(scope="module")
def refused(here):
    """refused(**fields): what is said about a body that is refused with 400."""

    def call(**fields):
        answer = here.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4, **fields})
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

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


def test_a_named_one_is_called_once_and_ends_as_a_call(chat):
    answer = chat(tools=[VISIT, PING], tool_choice={"type": "function", "function": {"name": "ping"}})
    [choice] = answer["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "ping", "arguments": "{}"} and choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("mode", ["required", "any"])
def test_only_allowed_ones_are_called(chat, mode):
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "ping"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed} if mode == "required" else "any"
    tools = [VISIT, PING] if mode == "required" else [PING]
    answer = chat(tools=tools, tool_choice=choice, parallel_tool_calls=False)
    assert [c["function"]["name"] for c in answer["choices"][0]["message"]["tool_calls"]] == ["ping"]


def test_several_calls(chat):
    """As many as the answer has room for: this model does not end by itself."""
    [choice] = chat(tools=[PING], tool_choice="required", max_tokens=130)["choices"]
    calls = choice["message"]["tool_calls"]
    assert len(calls) >= 2 and len({c["id"] for c in calls}) == len(calls)


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


def test_the_model_may_say_something_instead(chat, chunks):
    fields = {"tools": [VISIT], "max_tokens": 8}
    [choice] = chat(**fields)["choices"]
    assert choice["message"]["content"] and "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "length"
    [(message, _)] = gathered(chunks(**fields)).values()
    assert message["content"] == choice["message"]["content"]


def test_no_tools_no_change(chat):
    told = chat(max_tokens=8)["choices"]
    assert told == chat(max_tokens=8, tools=[VISIT], tool_choice="none")["choices"]
    assert told == chat(max_tokens=8, tools=[])["choices"]


def test_a_form_beside_tools(chat):
    """Under auto it is a call or the form."""
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"enum": ["yes", "no"]}}}
    message = chat(tools=[VISIT], response_format=form)["choices"][0]["message"]
    assert message.get("tool_calls") or json.loads(message["content"]) in ("yes", "no")
    assert chat(**ONE, response_format=form)["choices"][0]["message"]["tool_calls"], "required: a call only"


def test_logprobs_and_ids_of_tokens_come_whether_they_say_something_or_not(chat, chunks):
    fields = {**ONE, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    [choice] = chat(**fields)["choices"]
    scores, ids = [], []
    for chunk in chunks(**fields):
        for c in chunk["choices"]:
            scores += c["logprobs"]["content"] if c["logprobs"] else []
            ids += c.get("token_ids", [])
    assert ids == choice["token_ids"] and scores == choice["logprobs"]["content"] and len(ids) == len(scores) > 20


def test_stop_strings_end_calls_as_well(chat):
    [choice] = chat(**ONE, stop='"city"')["choices"]
    assert choice["stop_reason"] == '"city"' and choice["finish_reason"] == "stop"
    [call] = choice["message"]["tool_calls"]
    assert call["incomplete"] is True and '"city"' not in call["function"]["arguments"]


def test_an_answer_that_goes_on(chat):
    begun = [*CHAT, {"role": "assistant", "content": "It is a"}]
    fields = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 8}
    [choice] = chat(tools=[VISIT], echo=True, **fields)["choices"]
    assert choice["message"]["content"].startswith("It is a")


# ---- the next turn ---------------------------------------------------------------------------------------------------


def turns(arguments='{"city": "Rome"}', content=None, **result):
    call = {"id": "call_1", "type": "function", "function": {"name": "visit", "arguments": arguments}}
    return [
        *CHAT,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "18 C", **result},
    ]


def shown(here, messages, **more):
    """The text that the model is shown."""
    found = here.post("/tokenize", {"messages": messages, **more})
    assert found.status_code == 200, found.text
    return here.post("/detokenize", {"tokens": found.json()["tokens"]}).json()["prompt"]


def test_the_next_turn_is_text_in_any_template(here, chat):
    text = shown(here, turns(content="Well"), tools=[VISIT])
    call = '<tool_call>\n{"name": "visit", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert f"<|im_start|>assistant\nWell\n{call}<|im_end|>" in text
    assert "<|im_start|>user\n<tool_response>\n18 C\n</tool_response><|im_end|>" in text
    assert text.count('"name": "visit"') == 2 and "<tools>" in text.partition("<|im_start|>user")[0]
    assert chat(messages=turns(), tools=[VISIT], max_tokens=2)["choices"]
    assert chat(messages=turns(), max_tokens=2)["choices"], "without tools as well"


def test_a_developer_is_the_system_of_most_templates(here):
    two = [{"role": "system", "content": "A"}, {"role": "developer", "content": "B"}, *CHAT]
    assert shown(here, two).startswith("<|im_start|>system\nA\n\nB<|im_end|>\n<|im_start|>user")
    assert shown(here, two[1:]).startswith("<|im_start|>system\nB<|im_end|>")


def test_a_list_is_a_result(here):
    parts = [{"type": "text", "text": "18"}, {"type": "text", "text": "C"}]
    [*before, result] = turns()
    assert "<tool_response>\n18\nC\n</tool_response>" in shown(here, [*before, {**result, "content": parts}])


def test_a_result_without_an_id_is_of_the_first_call(chat):
    [*before, result] = turns()
    del result["tool_call_id"]
    assert chat(messages=[*before, result], max_tokens=2)


# ---- what is wrong ---------------------------------------------------------------------------------------------------

BAD = [
    ({"tools": [VISIT], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [VISIT, VISIT]}, "tools[1].function.name"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [tool("a", {"type": "array"})]}, "tools[0].function.parameters.type"),
    (
        {"tools": [PING, tool("a", {"properties": {"b": {"type": "nonsense"}}}, strict=True)]},
        "tools[1].function.parameters",
    ),
    (
        {"tools": [tool("a", {"properties": {"b": {"$ref": "#/nowhere"}}})], "tool_choice": "required"},
        "tools[0].function.parameters",
    ),
    ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type"),
    ({"tools": [tool(f"t{i}") for i in range(10_000)]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"functions": [{"name": "a"}]}, "functions"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"reasoning_effort": "none"}, "reasoning_effort"),
]


def test_what_is_wrong_is_refused_by_name_and_disturbs_nobody(here, chat):
    """Bad requests beside innocent ones, whose answers are what they are alone."""
    alone = chat(**ONE)["choices"][0]["message"]["tool_calls"][0]["function"]

    def bad(fields):
        answer = here.post("/v1/chat/completions", {"messages": CHAT, **fields[0]})
        error = answer.json()["error"]
        return answer.status_code, error["type"], error["param"], len(error["message"]) < 900

    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(chat, **ONE) for _ in range(4)]
        found = list(pool.map(bad, BAD))
        assert found == [(400, "invalid_request_error", field, True) for _, field in BAD]
        assert [g.result()["choices"][0]["message"]["tool_calls"][0]["function"] for g in good] == [alone] * 4


def test_a_schema_that_cannot_be_compiled_is_no_matter_where_nothing_must_come(chat):
    odd = tool("a", {"properties": {"b": {"type": "string", "pattern": "(?=x)y"}}})
    assert chat(tools=[odd], max_tokens=4)["choices"]


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
