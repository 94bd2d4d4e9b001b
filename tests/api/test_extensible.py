"""What newer clients add: fields that nobody knows, on three APIs, and names of other makers."""

import json
import logging
import re
from pathlib import Path

import pytest
from msgspec.json import encode

from hibachi.llm.chatformat import once
from hibachi.llm.chatformat.asked import as_shown, toolbox_of
from hibachi.llm.chatformat.errors import BadField
from hibachi.llm.chatformat.messages import plain_messages
from hibachi.llm.dialects import extensible
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.messages.bodies import MessagesBody
from hibachi.llm.dialects.messages.parse import chat_of
from hibachi.llm.dialects.openai.bodies import Bounds, ChatBody, read, taken
from hibachi.llm.dialects.openai.parse import chat
from hibachi.llm.dialects.responses.bodies import ResponsesBody
from hibachi.llm.dialects.responses.items import SKIPPED
from hibachi.llm.dialects.responses.parse import as_chat, own_items
from hibachi.request import SamplingParams

AGENTS = Path(__file__).parents[2] / "docs" / "agents.md"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = {"name": "look", "arguments": "{}"}
CHAT = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": CALL}]},
        {"role": "tool", "tool_call_id": "c", "content": "b"},
    ],
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    "prediction": {"type": "content", "content": [{"type": "text", "text": "p"}]},
}
RESPONSES = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "s"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "b"}]},
    ],
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "tools": [
        {"type": "function", "name": "look", "parameters": SCHEMA},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}]},
    ],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
}
MESSAGES = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t"}, {"type": "redacted_thinking", "data": ""},
            {"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "b"}]}]},
    ],
    "tools": [{"name": "look", "input_schema": SCHEMA}],
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
}  # fmt: skip
ROUTES = {
    "chats": (ChatBody, CHAT, lambda body: body),
    "responses": (ResponsesBody, RESPONSES, lambda body: as_chat(body, own_items(body, Bounds()))),
    "messages": (MessagesBody, MESSAGES, chat_of),
}
NAMED = {"chats": 4, "responses": 8, "messages": 6}  # kinds of places
CLOSED = ("output_config", "text", "prediction")  # what the request itself says, in several fields


def extended(value, added, name=None, at=""):
    """The value with a field that nobody knows in each object that may have one."""
    if isinstance(value, list):
        return [extended(each, added, name, f"{at}[]") for each in value]
    if not isinstance(value, dict) or (name in ("input", "arguments") and at.endswith("input")) or value is SCHEMA:
        return value
    more = {"x_metadata": added} if at and name not in CLOSED else {}
    return more | {key: extended(inner, added, key, f"{at}.{key}") for key, inner in value.items()}


@pytest.fixture(autouse=True)
def log(monkeypatch, caplog):
    monkeypatch.setattr(extensible, "_once", once.Once(logging.getLogger("hibachi.chat")))
    caplog.set_level(logging.WARNING, "hibachi.chat")
    return caplog


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("added", [1, None, "é", eval("[" * 100 + "]" * 100)], ids=["1", "null", "text", "deep"])
def test_fields_that_nobody_knows_are_passed_over_and_named_once(route, added, log):
    kind, body, chat_from = ROUTES[route]

    def read_of(given):
        found = chat_from(read(kind, encode(given)))
        for message in found.messages if route == "chats" else ():  # templates may read what is in messages and tools
            extended_parts = [message, *(message["content"] if isinstance(message["content"], list) else ())]
            for each in [
                *extended_parts,
                *(c for call in message.get("tool_calls") or () for c in (call, call["function"])),
            ]:
                each.pop("x_metadata", None)
        parsed = chat(found, SamplingParams(), Bounds())
        return parsed.chat.messages, parsed.params, [tool.name for tool in parsed.chat.toolbox.tools], parsed.prediction

    plain = read_of(body)
    for _ in range(3):
        assert read_of(extended(body, added)) == plain
    said = [record.getMessage().partition(": ")[2] for record in log.records]
    assert len(said) == len(set(said)) == NAMED[route] and all(line.endswith(".x_metadata'") for line in said)
    for name in ("mesage", "tol_choice"):
        with pytest.raises(Refused, match=f"Unknown field: {name}") as caught:
            read(kind, encode({**extended(body, added), name: added}))
        assert caught.value.path == (name,)


def test_the_log_grows_no_further_than_it_may_whatever_is_sent(log):
    hostile = [{"role": "user", "content": "a", f"x{i}" + "y" * 9999: 1, f"\x1b[2J{i}": 1} for i in range(300)]
    read(MessagesBody, encode({**MESSAGES, "messages": hostile}))
    assert len(log.records) == once.MOST
    assert all(len(record.getMessage()) < 400 and "\x1b" not in record.getMessage() for record in log.records)


def test_what_is_wrong_beside_a_field_that_nobody_knows_is_told_by_its_place():
    for wrong in ({"role": "user"}, {"role": "none", "content": "a"}):
        with pytest.raises(Refused) as caught:
            taken(MessagesBody, {**MESSAGES, "messages": [{**wrong, "x": 1}]})
        assert caught.value.path[:2] == ("messages", 0)
    with pytest.raises(Refused, match="valid JSON"):
        read(MessagesBody, encode(MESSAGES)[:-1].replace(b'"role"', b'"x":1,"role"') + b",")


def test_items_that_say_nothing_to_a_model_are_passed_over_and_others_refused(log):
    """The page lists them."""
    [listed] = re.findall(r"\*\*Passed over\*\*.*?\n\n", AGENTS.read_text(), re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == set(SKIPPED)
    skipped = [{"type": kind, "id": f"x{i}", "action": {}} for i, kind in enumerate(SKIPPED)]
    items = [skipped[0], RESPONSES["input"][0], *skipped, *RESPONSES["input"][1:]]
    body = ResponsesBody(input=items)
    assert (
        as_chat(body, own_items(body, Bounds())).messages
        == ROUTES["responses"][2](ResponsesBody(input=RESPONSES["input"])).messages
    )
    assert len(log.records) == len(SKIPPED)
    wrong = ResponsesBody(input=[*items, {"type": "function_call_output", "call_id": "none", "output": ""}])
    with pytest.raises(Refused) as caught:
        as_chat(wrong, own_items(wrong, Bounds()))
    assert caught.value.path == ("input", len(items), "call_id")
    other = ResponsesBody(input=[{"type": "mcp_call"}])
    with pytest.raises(Refused, match=r"input\[0\].type is not supported: 'mcp_call'"):
        own_items(other, Bounds())


def test_encrypted_content_may_be_empty():
    for content in (None, ""):
        own_items(ResponsesBody(input=[{**RESPONSES["input"][1], "encrypted_content": content}]), Bounds())


@pytest.mark.parametrize("more", [
    {"reasoning_text": "So."},
    {"reasoning": None, "reasoning_text": "", "reasoning_details": [
        {"type": "reasoning.text", "text": "S"}, {"type": "reasoning.summary", "summary": "o."},
        {"type": "reasoning.encrypted", "data": "x"}, 7]},
    {"reasoning_content": "So.", "reasoning_details": [{"text": "No."}], "reasoning_text": "No."},
])  # fmt: skip
def test_reasoning_by_the_names_of_others(more):
    [message] = plain_messages([{"role": "assistant", "content": "a", **more}])
    assert message["reasoning_content"] == "So."
    for odd in ({"reasoning_details": "x"}, {"reasoning_text": 7}, {"reasoning_details": [{"text": 7}]}):
        assert "reasoning_content" not in plain_messages([{"role": "assistant", "content": "a", **odd}])[0]


def tool(**function):
    return [{"type": "function", "function": {"name": "look", **function}}]


def test_parameters_by_another_name_and_nulls_in_them():
    whole = {"type": "object", "properties": {"type": {"enum": [None], "default": None}, "a": {"items": {}}}}
    nulls = {
        **whole, "required": None, "additionalProperties": None, "$defs": None,
        "properties": {**whole["properties"], "a": {"items": {"anyOf": None}, "properties": None, "type": None}},
    }  # fmt: skip
    for given in ({"parameters": nulls}, {"input_schema": nulls}, {"parameters": None, "input_schema": whole}):
        sent = tool(**given, description="d")
        assert toolbox_of(sent).tools[0].parameters == whole
        assert as_shown(sent) == tool(parameters=whole, description="d")
        assert [*as_shown(sent)[0]["function"]] == ["name", "parameters", "description"]
    nothing = {"type": "object", "properties": {}}
    assert toolbox_of(tool(parameters={"properties": None})).tools[0].parameters == {}
    assert toolbox_of(tool()).tools[0].parameters == nothing
    body = ResponsesBody(input="a", tools=[{"type": "function", "name": "look", "input_schema": nulls}])
    assert toolbox_of(as_chat(body, own_items(body, Bounds())).tools).tools[0].parameters == whole


@pytest.mark.parametrize("schema, place", [
    ({"type": "OBJECT"}, ()),
    ({"type": "object", "properties": {"a": {"type": "STRING"}}}, ("properties", "a")),
    ({"anyOf": [{}, {"items": {"type": "Integer"}}]}, ("anyOf", 1, "items")),
])  # fmt: skip
def test_types_in_the_letters_of_others_are_refused_by_name(schema, place):
    for field in ("parameters", "input_schema"):
        with pytest.raises(BadField, match=r"must be '[a-z]+', as JSON schemas spell it") as caught:
            toolbox_of(tool(**{field: schema}))
        assert caught.value.path == ("tools", 0, "function", field, *place, "type")
    toolbox_of(tool(parameters={"properties": {"a": {"type": "float", "enum": [{"type": "STRING"}]}}}))
    assert json.dumps(as_shown(tool(parameters=SCHEMA))) == json.dumps(tool(parameters=SCHEMA))
