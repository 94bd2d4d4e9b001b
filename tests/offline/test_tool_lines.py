"""OpenAI's batch lines with tools: the same bytes in every run, and what a server would answer."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("msgspec")

import hibachi.offline
from hibachi.errors import ConfigError
from hibachi.llm.own import open_texts

from . import ran
from .ran import TEMPLATE

HI = [{"role": "user", "content": "hi"}]
PARAMETERS = {"properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
VISIT = {"type": "function", "function": {"name": "v", "parameters": PARAMETERS}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "v", "arguments": '{"a": 1}'}}
TURN = [
    *HI,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "18 C"},
]
GENERIC = ("--chat-template", TEMPLATE, "--tool-call-parser", "generic")


@pytest.fixture(autouse=True, scope="module")
def room():
    """The others share an engine with half the context."""
    with pytest.MonkeyPatch.context() as patch, open_texts("tiny") as texts:
        patch.setitem(ran.SHARED, "tiny", texts)
        yield


def line(own, **body):
    more = {"messages": HI, "tools": [VISIT], "max_tokens": 90, **body}
    return {"custom_id": own, "method": "POST", "url": "/v1/chat/completions", "body": more}


LINES = [
    line("must", tool_choice="required", parallel_tool_calls=False, n=2),
    line("may", max_tokens=4),
    line("next", messages=TURN, max_tokens=4),
    line("cut", tool_choice="required", max_tokens=30, temperature=0),
    line("wrong", tool_choice={"type": "function", "function": {"name": "other"}}),
    line("twice", tools=[VISIT, VISIT]),
]


def test_lines_with_tools_are_answered_the_same_by_all(runs, server):
    assert runs({"in.jsonl": LINES}, *GENERIC) == 3
    must, may, turn, cut, wrong, twice = rows = runs.rows()
    assert json.dumps(runs.at(server)) == json.dumps(rows)
    for choice in must["response"]["body"]["choices"]:
        [call] = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]).keys() == {"a"} and choice["finish_reason"] == "tool_calls"
    ids = {c["message"]["tool_calls"][0]["id"] for c in must["response"]["body"]["choices"]}
    assert len(ids) == 2
    assert may["response"]["body"]["choices"][0]["message"]["content"]
    assert turn["response"]["status_code"] == 200
    [choice] = cut["response"]["body"]["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["tool_calls"][0]["incomplete"] is True
    assert wrong["response"]["body"]["error"]["param"] == "tool_choice"
    assert twice["response"]["body"]["error"]["param"] == "tools[1].function.name"


FUNCTION = VISIT["function"]
TURNS = [
    {"custom_id": own, "method": "POST", "url": url, "body": body}
    for own, url, body in (
        (
            "response",
            "/v1/responses",
            {
                "input": HI,
                "store": True,
                "tools": [{"type": "function", **FUNCTION}],
                "tool_choice": "required",
                "parallel_tool_calls": False,
            },
        ),
        (
            "message",
            "/v1/messages",
            {
                "messages": HI,
                "max_tokens": 90,
                "tools": [{"name": "v", "input_schema": PARAMETERS}],
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            },
        ),
        ("before", "/v1/responses", {"input": "hi", "previous_response_id": "resp_1"}),
        ("item", "/v1/responses", {"input": [{"id": "msg_1"}]}),
        ("stream", "/v1/messages", {"messages": HI, "max_tokens": 9, "stream": True}),
    )
]


def test_responses_and_messages_are_answered_the_same_by_all(runs, server):
    assert runs({"in.jsonl": TURNS}, *GENERIC) == 3
    rows = runs.rows()
    assert json.dumps(runs.at(server)) == json.dumps(rows)
    response, message, before, item, stream = (row["response"] for row in rows)
    assert [r["status_code"] for r in (response, message, before, item, stream)] == [200, 200, 400, 400, 400]
    for call in response["body"]["output"]:
        assert call["type"] == "function_call" and json.loads(call["arguments"]).keys() == {"a"}
    assert re.fullmatch("resp_[0-9a-f]{24}", response["body"]["id"]) and response["body"]["store"] is False
    assert message["body"]["content"][0]["type"] == "tool_use" and message["body"]["stop_reason"] == "tool_use"
    assert re.fullmatch("msg_[0-9a-f]{24}", message["body"]["id"])
    assert before["body"]["error"]["param"] == "previous_response_id" and item["body"]["error"]["param"] == "input[0]"
    assert stream["body"]["type"] == "error" and stream["body"]["request_id"] == stream["request_id"]
    assert response["body"]["completed_at"] == 99
    assert runs({"in.jsonl": TURNS}, *GENERIC, "--validate") == 1
    assert runs({"in.jsonl": TURNS[:2]}, *GENERIC, "--validate") == 0


def test_without_the_flag_they_are_refused_by_name(runs):
    assert runs({"in.jsonl": LINES[1:3]}, "--chat-template", TEMPLATE) == 3
    assert [row["response"]["body"]["error"]["param"] for row in runs.rows()] == ["tools", "tools"]


def test_a_parser_that_there_is_not_ends_the_run_at_once_by_where_it_was_named(runs, monkeypatch):
    given, words = {"in.jsonl": LINES[1:2]}, ": expected one of auto, generic, apertus, "
    assert runs(given, "--tool-call-parser", "nonsense") == 1
    assert runs.told.startswith(f"hibachi: --tool-call-parser{words}") and "got 'nonsense'" in runs.told
    (runs.folder / "c.toml").write_text('tool-call-parser = "nonsense"')
    assert runs(given, "--config", str(runs.folder / "c.toml")) == 1
    assert f"c.toml: tool-call-parser{words}" in runs.told
    monkeypatch.setenv("HIBACHI_REASONING_PARSER", "nonsense")
    assert runs(given) == 1 and "HIBACHI_REASONING_PARSER: expected one of auto, none, " in runs.told
    assert runs.loaded == 0
    for name in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match=f"^{name}: expected one of auto, "):
            hibachi.offline.run("in.jsonl", "out.jsonl", settings={name: "nonsense"})
