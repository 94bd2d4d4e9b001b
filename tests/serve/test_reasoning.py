"""Reasoning and calls in answers of a template that writes them, whole and streamed."""

from __future__ import annotations

import json

import pytest

from .saying import CALL, OTHER, THOUGHT, saying, told

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    with saying(tmp_path_factory.mktemp("says")) as found:
        yield found


@pytest.fixture(scope="module")
def ask(here):
    """ask(text, **fields): the message of an answer that says so, and why it ended; whole and streamed are the same."""

    def call(text, **fields):
        body = {"messages": told(text), "temperature": 0, "max_tokens": 400, "request_id": "it", **fields}
        answer = here.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        lines = here.post("/v1/chat/completions", {**body, "stream": True}).text.split("\n\n")[:-2]
        streamed = joined([json.loads(line.removeprefix("data: ")) for line in lines])
        assert streamed == (choice["message"], choice["finish_reason"])
        return choice["message"], choice["finish_reason"]

    return call


def joined(chunks):
    message, why, calls = {"role": None, "content": None, "refusal": None}, None, []
    for choice in (c for chunk in chunks for c in chunk["choices"]):
        delta, why = choice["delta"], choice["finish_reason"]
        message["role"] = delta.get("role") or message["role"]
        for name in ("content", "reasoning_content", "reasoning"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    return message, why


def test_thoughts_and_words_are_told_apart(ask):
    message, why = ask(THOUGHT + "It is bright.")
    assert (message["reasoning_content"], message["content"], why) == ("Let me see.", "It is bright.", "stop")
    assert "reasoning" not in message


def test_thoughts_words_and_calls(ask):
    message, why = ask(THOUGHT + "I look.\n" + CALL + "\n" + OTHER, tools=[LOOK])
    assert (message["reasoning_content"], message["content"], why) == ("Let me see.", "I look.", "tool_calls")
    first, second = message["tool_calls"]
    assert json.loads(first["function"]["arguments"]) == {"at": 'the "sun"\n猫'}
    assert json.loads(second["function"]["arguments"]) == {"at": ""}
    assert first["id"] != second["id"]


def test_thoughts_may_be_left_out(ask):
    message, _ = ask(THOUGHT + "It is bright.", include_reasoning=False)
    assert message == {"role": "assistant", "content": "It is bright.", "refusal": None}


def test_tokens_of_thoughts_are_counted(here):
    def details(text, **fields):
        body = {"messages": told(text), "max_tokens": 400, "temperature": 0, **fields}
        return here.post("/v1/chat/completions", body).json()["usage"]["completion_tokens_details"]

    assert details(THOUGHT + "It.") == {"reasoning_tokens": len(THOUGHT.rstrip())}
    assert details("It.") == {"reasoning_tokens": 0}
    assert details(THOUGHT + "It.", include_reasoning=False) == {"reasoning_tokens": len(THOUGHT.rstrip())}
    body = {"messages": told(THOUGHT), "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    last = here.post("/v1/chat/completions", body).text.split("\n\n")[-3]
    assert json.loads(last.removeprefix("data: "))["usage"]["completion_tokens_details"]["reasoning_tokens"] == 28


FIELDS = [
    ({"reasoning_field": "reasoning"}, {"reasoning": "Let me see.", "content": "It."}),
    ({"reasoning_field": "both"}, {"reasoning": "Let me see.", "reasoning_content": "Let me see.", "content": "It."}),
    ({"reasoning_parser": "none"}, {"content": THOUGHT + "It."}),
    (
        {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"},
        {"reasoning_content": "Let me see.", "content": "It."},
    ),
]


@pytest.mark.parametrize("settings, expected", FIELDS, ids=["other name", "both names", "none", "named"])
def test_what_the_operator_says(tmp_path, settings, expected):
    with saying(tmp_path, **settings) as here:
        body = {"messages": told(THOUGHT + "It."), "temperature": 0, "max_tokens": 100}
        message = here.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert {name: message[name] for name in expected} == expected
    named = {name for name in ("reasoning", "reasoning_content") if name in message}
    assert named == expected.keys() - {"content"}


@pytest.mark.parametrize(
    "template", ["{% for i in range(10**9) %}{% endfor %}think", "{{ raise_exception('no') }}think"]
)
def test_a_template_that_never_ends_or_raises(tmp_path, template):
    with saying(tmp_path, template) as here:
        for fields in ({}, {"tools": [LOOK]}, {"reasoning_effort": "low"}):
            answer = here.post("/v1/chat/completions", {"messages": told("a"), **fields})
            assert answer.status_code == 400
        assert here.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_variables_of_the_template_may_have_any_name(here):
    body = {"messages": told("Hi."), "max_tokens": 4}
    for name, status in ("template", 200), ("messages", 200), ("nulls", 200), ("self", 400):
        answer = here.post("/v1/chat/completions", {**body, "chat_template_kwargs": {name: "x"}})
        assert answer.status_code == status, answer.text
    assert "'self'" in answer.json()["error"]["message"], "the library of templates takes it"
