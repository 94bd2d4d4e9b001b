"""Bodies of Anthropic's Messages API become chats, and what is found in a text becomes content blocks."""

from __future__ import annotations

import json
from functools import partial

import pytest

pytest.importorskip("msgspec")

from hibachi.errors import (
    DeadlineExceeded,
    EngineFailed,
    InternalError,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    place_of,
)
from hibachi.llm.chatformat.format import CallArguments, CallBegun, CallEnded, Reasoned, Said
from hibachi.llm.chatformat.messages import IMAGE
from hibachi.llm.dialects.dialects import ANTHROPIC, key_of, spoken
from hibachi.llm.dialects.errors import Refused, as_refused, refusing
from hibachi.llm.dialects.json_limits import check_weight
from hibachi.llm.dialects.messages.answers import SIGNATURE, model, models
from hibachi.llm.dialects.messages.bodies import PAGE, CountBody, MessagesBody
from hibachi.llm.dialects.messages.parse import SWITCHES, chat_of, in_body
from hibachi.llm.dialects.messages.writing import ContentBlocks, joined, named
from hibachi.llm.dialects.openai import parse as openai
from hibachi.llm.dialects.openai.bodies import Bounds, read
from hibachi.request import SamplingParams

ON, OFF = (dict.fromkeys(SWITCHES, on) for on in (True, False))
HELLO = {"role": "user", "content": "hello"}
WEATHER = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def asked(kind=MessagesBody, **body):
    given = {"model": "m", "messages": [HELLO], **({} if kind is CountBody else {"max_tokens": 5}), **body}
    return chat_of(read(kind, json.dumps(given).encode(), PAGE))


def text(said):
    return {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}


def call(id, name="weather", **given):
    return {"type": "tool_use", "id": id, "name": name, "input": given, "caller": {"type": "direct"}}


def cut(id):
    return {**call(id), "incomplete": True}


def result(id, content=None, **more):
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


# ---- bodies --------------------------------------------------------------------------------------------------------


def test_a_plain_body_is_a_chat():
    chat = asked(
        system="be brief",
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stop_sequences=["X"],
        stream=True,
        metadata={"user_id": "u"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
    )
    assert chat.messages == [{"role": "system", "content": "be brief"}, HELLO]
    assert (chat.model, chat.max_tokens, chat.stop, chat.stream) == ("m", 5, ["X"], True)
    assert (chat.temperature, chat.top_p, chat.top_k) == (0.5, 0.9, 7)
    assert chat.tools is chat.tool_choice is chat.response_format is chat.continue_final_message is None


def test_blocks_of_text_are_joined():
    chat = asked(
        system=[text("one"), text("two")], messages=[{"role": "user", "content": [text("a"), text(""), text("b")]}]
    )
    assert chat.messages == [{"role": "system", "content": "one\ntwo"}, {"role": "user", "content": "a\nb"}]
    assert asked(system="").messages == [HELLO]


def test_what_differs_in_front_of_a_system_prompt_is_left_out():
    """Of Claude Code's: nothing behind it would be found in the cache."""
    billed = "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;"
    for system in ([text(billed), text("be brief")], billed + "\nbe brief"):
        assert asked(system=system).messages == [{"role": "system", "content": "be brief"}, HELLO]
    assert asked(system=[text(billed)]).messages == [HELLO]
    assert asked(system=f"say {billed}").messages[0]["content"] == f"say {billed}"


def test_what_the_system_says_later_on_stays_its_own_behind_results():
    late = {"role": "system", "content": "be kind"}
    first, *rest = asked(system="be brief", messages=[late, HELLO, late]).messages
    assert first == {"role": "system", "content": "be brief\nbe kind"} and rest == [HELLO, late]
    called = [HELLO, {"role": "assistant", "content": [call("1"), call("2")]}]
    results = [{"role": "user", "content": [result(id)]} for id in "12"]
    for behind in ([*results, late], [late, *results], [results[0], late, results[1]]):
        found = asked(messages=[*called, *behind]).messages
        assert [m["role"] for m in found] == ["user", "assistant", "tool", "tool", "system"]
    with pytest.raises(Refused, match="has a result already"):
        asked(messages=[*called, results[0], late, results[0]])
    with pytest.raises(Refused, match="messages is empty"):
        asked(system="s", messages=[])


def test_messages_of_one_role_in_a_row_are_one():
    two = [HELLO, {"role": "user", "content": [text("again")]}, {"role": "assistant", "content": "A"}, HELLO]
    assert [m["content"] for m in asked(messages=two).messages] == ["hello\nagain", "A", "hello"]


def test_calls_and_results_in_their_order():
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    said = [thought, {"type": "redacted_thinking", "data": "x"}, text("wait"), call("1", city="Ö"), call("2")]
    answered = [
        text("here"),
        result("2", "rain"),
        result("1", [text("sun"), {"type": "image", "source": {}}], is_error=True),
    ]
    messages = [HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": answered}]
    _, assistant, *results = asked(messages=messages, tools=[WEATHER]).messages
    assert assistant["content"] == "wait" and assistant["reasoning_content"] == "hm"
    assert [(c["id"], json.loads(c["function"]["arguments"])) for c in assistant["tool_calls"]] == [
        ("1", {"city": "Ö"}),
        ("2", {}),
    ]
    assert results == [
        {"role": "tool", "tool_call_id": "2", "content": "rain"},
        {"role": "tool", "tool_call_id": "1", "content": f"Error: sun\n{IMAGE}"},
        {"role": "user", "content": "here"},
    ]


def test_a_message_of_calls_alone_has_no_text():
    messages = [HELLO, {"role": "assistant", "content": [call("1")]}, {"role": "user", "content": [result("1")]}]
    _, assistant, answered = asked(messages=messages).messages
    assert assistant["content"] is None and answered == {"role": "tool", "tool_call_id": "1", "content": ""}


def of(*content, role="assistant"):
    return {"role": role, "content": [*content]}


THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([of(text("a"), cut("1")), HELLO], ["hello", "a", "hello"]),
        ([of(text("a"), cut("1")), of(result("1"), text("b"), role="user")], ["hello", "1", "", "b"]),
        ([of(cut("1")), of(result("1", "x"), text("b"), role="user")], ["hello", "1", "x", "b"]),
        ([of(THOUGHT, cut("1")), HELLO], ["hello\nhello"]),
        ([of(text(""), cut("1")), of(text("b")), HELLO], ["hello", "b", "hello"]),
        ([of(call("1"), cut("2")), of(result("2", "y"), result("1", "x"), role="user")], ["hello", "12", "y", "x"]),
        ([of(cut("1")), of(call("1")), of(result("1", "x"), role="user")], ["hello", "1", "x"]),
        ([of(cut("1"))], ["hello"]),
        ([of(text("a"), cut("1"))], ["hello", "a"]),
        ([of(), HELLO], ["hello", "", "hello"]),
        ([of(call("1"), {**cut("2"), "incomplete": False}), HELLO], ["hello", "12", "hello"]),
    ],
)
def test_a_call_that_was_cut_off_has_not_been_made_unless_it_has_a_result(messages, shown):
    chat = asked(messages=[HELLO, *messages])
    assert [
        m["content"] if "tool_calls" not in m else "".join(c["id"] for c in m["tool_calls"]) for m in chat.messages
    ] == shown
    assert chat.continue_final_message is (True if shown == ["hello", "a"] else None)


def test_where_only_a_call_that_was_cut_off_is_there_is_no_message():
    assert asked(messages=[of(cut("1"))]).messages == []
    with pytest.raises(Refused, match="of the assistant"):
        asked(messages=[of(cut("1"), role="user")])


def test_an_answer_that_is_begun_goes_on():
    chat = asked(messages=[HELLO, {"role": "assistant", "content": "I"}])
    assert chat.continue_final_message is True and chat.add_generation_prompt is False
    chat = asked(messages=[HELLO, {"role": "assistant", "content": ""}])
    assert chat.messages == [HELLO] and chat.continue_final_message is None


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ],
)
def test_which_tool_is_wanted(choice, expected):
    chat = asked(tools=[WEATHER], tool_choice=choice)
    assert chat.tool_choice == expected and chat.parallel_tool_calls is None
    alone = asked(tools=[{**WEATHER, "type": "custom"}], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert alone.parallel_tool_calls is False


def test_tools_as_openai_has_them():
    (tool,) = asked(tools=[{**WEATHER, "strict": True, "cache_control": {"type": "ephemeral"}}]).tools
    function = {"name": "weather", "description": "of a city", "parameters": WEATHER["input_schema"], "strict": True}
    assert tool == {"type": "function", "function": function}
    assert asked(tools=[], tool_choice={"type": "auto"}).tools is None


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_the_form_of_an_answer(field):
    form = {"type": "json_schema", "schema": {"type": "object"}}
    chat = asked(**{field: form if field == "output_format" else {"format": form}})
    assert chat.response_format.json_schema.schema == {"type": "object"}


@pytest.mark.parametrize(
    ("thinking", "variables", "told"),
    [
        (None, OFF, False),
        ({"type": "disabled"}, OFF, False),
        ({"type": "enabled", "budget_tokens": 1024}, ON, True),
        ({"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, ON, False),
        ({"type": "adaptive"}, None, True),
        ({"type": "adaptive", "display": "updates"}, None, True),  # of Claude Code
    ],
)
def test_reasoning_is_off_unless_it_is_asked_for(thinking, variables, told):
    chat = asked(thinking=thinking)
    assert (chat.chat_template_kwargs, chat.include_reasoning) == (variables, told)


@pytest.mark.parametrize("keep", ["all", {"type": "all"}, 5])
def test_a_context_may_be_kept_but_not_managed(keep):
    """As Claude Code sends it."""
    managed = {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}
    if keep == 5:
        with pytest.raises(Refused, match="context_management is not supported"):
            asked(context_management=managed)
    else:
        assert asked(context_management=managed).messages == [HELLO]


def test_a_count_needs_no_limit():
    assert asked(CountBody, tools=[WEATHER], system="s").max_tokens is None
    with pytest.raises(Refused, match="max_tokens"):
        asked(CountBody, max_tokens=5)


BAD = [
    ({"max_tokens": None}, "max_tokens", "max_tokens: Expected `int`, got `null`"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be an integer >= 1; got 0"),
    ({"max_tokens": "5"}, "max_tokens", "max_tokens: Expected `int`, got `str`"),
    ({"messages": "hi"}, "messages", "messages: Expected `array`, got `str`"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "messages[0].role"),
    ({"n": 2}, "n", "Unknown field: n"),
    ({"container": "c"}, "container", "container is not supported: Nothing runs code here"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "mcp_servers is not supported"),
    ({"context_management": {"a": 1}}, "context_management", "context_management is not supported"),
    ({"context_management": 5}, "context_management", "context_management is not supported"),
    ({"context_management": {"edits": 5}}, "context_management", "context_management is not supported"),
    ({"thread": {"type": "create"}}, "thread", "thread is not supported: Nothing is kept between requests"),
    ({"compaction": {"a": 1}}, "compaction", "compaction is not supported"),
    ({"inference_geo": "eu"}, "inference_geo", "inference_geo is not supported"),
    ({"speed": "fast"}, "speed", "speed: expected 'standard'; got 'fast'"),
    ({"system": [{"type": "image"}]}, "system[0].type", "system[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type", "'image'"),
    ({"thinking": {"type": "much"}}, "thinking.type", "expected 'adaptive' or 'disabled' or 'enabled'; got"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema", "The field tools[0].input_schema is missing"),
    ({"tools": [{**WEATHER, "input_schema": 5}]}, "tools[0].input_schema", "tools[0].input_schema: Expected `object`"),
    ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading", "so only false is"),
    ({"tools": [{**WEATHER, "input_examples": [{}]}]}, "tools[0].input_examples", "so only [] is"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "there are no tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name", "tool_choice.name is missing"),
    ({"tools": [WEATHER], "tool_choice": {"type": "any", "name": "a"}}, "tool_choice.name", "is for the type 'tool'"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'assistant' or 'system' or 'user'; got"),
    ({"tool_choice": "any"}, "tool_choice", "tool_choice: Expected `object | null`, got `str`"),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD, ids=lambda v: v if isinstance(v, str) else "")
def test_what_is_wrong_is_told_by_its_name(body, param, words):
    with pytest.raises(Refused) as found:
        asked(**body)
    assert found.value.param == param and words in str(found.value), str(found.value)


@pytest.mark.parametrize("kind", ["document", "search_result", "server_tool_use", "container_upload"])
def test_blocks_that_are_not_read_are_told_by_their_kind(kind):
    for content in ([{"type": kind}], [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": kind}]}]):
        with pytest.raises(Refused, match=rf"type is not supported as '{kind}'"):
            asked(messages=[{"role": "user", "content": content}])


def test_a_tool_of_chats_is_told_the_form():
    with pytest.raises(Refused, match=r"tools\[0\] of type 'function' is not supported: Here a tool has name, descr"):
        asked(tools=[{"type": "function", "function": {"name": "x"}}])


@pytest.mark.parametrize("kind", ["web_search_20250305", "bash_20250124", "text_editor_20250728", "memory_20250818"])
def test_tools_of_servers_are_told_by_their_type(kind):
    with pytest.raises(Refused, match=rf"tools\[1\] of type '{kind}' is not supported"):
        asked(tools=[WEATHER, {"type": kind, "name": "x", "max_uses": 3}])


@pytest.mark.parametrize(
    ("messages", "place", "words"),
    [
        (
            [{"role": "user", "content": [result("1")]}],
            "messages[0].content[0].tool_use_id",
            "'1' is not of a tool_use",
        ),
        (
            [HELLO, {"role": "assistant", "content": [call("1")]}, {"role": "user", "content": [result("1")] * 2}],
            "messages[2].content[1].tool_use_id",
            "'1' has a result already",
        ),
        (
            [
                HELLO,
                {"role": "assistant", "content": [call("1")]},
                HELLO,
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": [result("1")]},
            ],
            "messages[4].content[0].tool_use_id",
            "'1' is not of a tool_use in the message before",
        ),
        ([{"role": "assistant", "content": [call("1"), call("1")]}, HELLO], "messages[0].content[1].id", "of its own"),
        ([{"role": "assistant", "content": [result("1")]}], "messages[0].content[0]", "of the user"),
        ([{"role": "user", "content": [call("1")]}], "messages[0].content[0]", "of the assistant"),
        ([HELLO, {"role": "assistant", "content": [call("1")]}], "messages", "the last message calls a tool"),
        (
            [HELLO, {"role": "assistant", "content": [text("a"), call("1", "")]}, HELLO],
            "messages[1].content[1].name",
            "the name of a tool",
        ),
    ],
)
def test_calls_and_results_that_do_not_belong_together(messages, place, words):
    with pytest.raises(Refused) as found:
        asked(messages=messages)
    assert found.value.param == place and words in str(found.value), str(found.value)


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        (
            {"tools": [{**WEATHER, "name": "reasoning_effort"}] * 2},
            "tools.1.name is 'reasoning_effort', which tools.0 is called as well. Give each tool a name of its own.",
            "tools[1].name",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "response_format"}},
            "tool_choice names 'response_format', and no tool has this name; there are: weather.",
            "tool_choice",
        ),
        (
            {"tools": [{**WEATHER, "name": "tools[0].function"}]},
            "tools.0.name must have 1 to 128 letters, digits and any of _ - . : /; got 'tools[0].function'. Rename the "
            "tool.",
            "tools[0].name",
        ),
        (
            {"tools": [{**WEATHER, "input_schema": {"properties": {"stop": "messages[0].content"}}}]},
            "tools.0.input_schema.properties must be schemas by name; got {'stop': 'messages[0].content'}.",
            "tools[0].input_schema.properties",
        ),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences has 17 entries; at most 16 are served.", "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences must be non-empty strings; got [''].", "stop_sequences"),
        ({"temperature": -1.0}, "temperature must be a finite number >= 0 (0 is greedy); got -1.0.", "temperature"),
    ],
)
def test_what_is_refused_of_a_chat_names_the_fields_of_a_message_and_nothing_else(fields, message, param):
    """Also where a client has called something as a field of a chat is called."""
    body = read(MessagesBody, json.dumps({"model": "m", "messages": [HELLO], "max_tokens": 1, **fields}).encode(), PAGE)
    chat = chat_of(body)
    with pytest.raises(Refused) as found, refusing(partial(in_body, body)):
        openai.chat(chat, SamplingParams(), Bounds())
    assert (ANTHROPIC.error(found.value)["error"]["message"], found.value.param) == (message, param)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "tool_result"}], "The field messages.0.content.0.tool_use_id is missing."),
        ([call("a")], "messages.0.content.0: a block 'tool_use' stands in a message of the assistant."),
        (7, "messages.0.content: Expected `str | array`, got `int`."),
    ],
)
def test_places_are_written_as_anthropics_api_does(content, message):
    with pytest.raises(Refused) as found:
        asked(messages=[{"role": "user", "content": content}])
    assert ANTHROPIC.error(found.value)["error"]["message"] == message


@pytest.mark.parametrize("system", [None, "be brief"])
def test_what_is_refused_of_a_call_is_told_of_its_block(system):
    told = {"role": "assistant", "content": [text("a"), call("1"), cut("2"), call("3")]}
    answered = {"role": "user", "content": [result("1"), result("2"), result("3")]}
    body = {"model": "m", "messages": [HELLO, HELLO, told, answered, HELLO, {**told, "content": [call("4")]}, HELLO]}
    body = read(CountBody, json.dumps({**body, "system": system}).encode(), PAGE)
    messages = chat_of(body).messages
    for id, place in (
        ("1", "messages[2].content[1]"),
        ("3", "messages[2].content[3]"),
        ("4", "messages[5].content[0]"),
    ):
        calls = [(i, j, c["id"]) for i, m in enumerate(messages) for j, c in enumerate(m.get("tool_calls") or ())]
        [(i, j)] = [at for *at, given in calls if given == id]
        at = ("messages", i, "tool_calls")
        for ours, theirs in (
            ((*at, j, "function", "arguments"), f"{place}.input"),
            ((*at, j, "function", "name"), f"{place}.name"),
            ((*at, j), place),
            *([(at, place)] if j == 0 else []),
        ):
            with pytest.raises(Refused) as told_, refusing(partial(in_body, body)):
                raise Refused.at(ours, f" is wrong: {place_of(at)}")
            assert (told_.value.param, str(told_.value)) == (theirs, f"{theirs} is wrong: {place_of(at)}")
    with pytest.raises(Refused, match=r"^messages is wrong"), refusing(partial(in_body, body)):
        raise Refused.at(("messages", 99, "tool_calls", 0, "function", "arguments"), " is wrong")


def test_what_else_is_told_of_a_refusal_stays():
    of_body = partial(in_body, read(CountBody, json.dumps({"model": "m", "messages": [HELLO]}).encode(), PAGE))
    more = {"status": 429, "kind": "k", "code": "c", "headers": {"Retry-After": "5"}}
    for ours, theirs in (
        (("response_format", "json_schema", "schema"), "output_config.format"),
        (("response_format", "type"), "output_config.format.type"),
        (("reasoning_effort",), "output_config.effort"),
        (("tool_choice", "function", "name"), "tool_choice.name"),
    ):
        with pytest.raises(Refused) as told, refusing(of_body):
            raise Refused(ours, " is no reasoning_effort", param=ours, **more)
        found = told.value
        assert (str(found), found.param) == (f"{theirs} is no reasoning_effort", theirs)
        assert {name: getattr(found, name) for name in more} == more
    with pytest.raises(Refused, match=r"^stop_sequences is too long") as told, refusing(of_body):
        raise InvalidRequest.at(("stop",), " is too long")
    assert (told.value.status, told.value.param) == (400, None)


# ---- answers -------------------------------------------------------------------------------------------------------


def parts_of(events, *, reasoning=True):
    blocks = ContentBlocks(lambda given, number: given or f"toolu_{number}", reasoning=reasoning)
    parts = [part for event in events for part in blocks.add([event])]
    return blocks, [*parts, *blocks.end()]


def sent(parts):
    """As it comes to a client: each data of an event, whose name is its type."""
    found = []
    for part in parts:
        first, second, *rest = named(part).decode().split("\n")
        data = json.loads(second.removeprefix("data: "))
        assert first == f"event: {data['type']}" and rest == ["", ""]
        found.append(data)
    return found


EVERYTHING = [
    Reasoned("so "),
    Reasoned("so"),
    Said("\n"),
    Said("look"),
    Said(" here"),
    CallBegun(0, "f"),
    CallArguments(0, '{"a": '),
    CallArguments(0, "1}"),
    CallEnded(0),
    Said("\n"),
    CallBegun(1, "g", "its own"),
    CallArguments(1, "{}"),
    CallEnded(1),
]


def test_each_block_begins_goes_on_and_ends():
    blocks, parts = parts_of(EVERYTHING)
    told = sent(parts)
    assert [(t["type"].removeprefix("content_block_"), t["index"]) for t in told] == [
        *[("start", 0), ("delta", 0), ("delta", 0), ("delta", 0), ("stop", 0)],
        *[("start", 1), ("delta", 1), ("delta", 1), ("stop", 1)],
        *[("start", 2), ("delta", 2), ("delta", 2), ("stop", 2)],
        *[("start", 3), ("delta", 3), ("stop", 3)],
    ]
    assert told[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert told[3]["delta"] == {"type": "signature_delta", "signature": SIGNATURE}
    assert told[5]["content_block"] == {"type": "text", "text": ""}
    begun = {"type": "tool_use", "id": "toolu_0", "name": "f", "input": {}, "caller": {"type": "direct"}}
    assert told[9]["content_block"] == begun
    assert told[10]["delta"] == {"type": "input_json_delta", "partial_json": '{"a": '}
    assert blocks.called


UNREAD = ["1e999", "-1e999", "9" * 5000, "[" * 195 + "]" * 195, "[" * 990 + "]" * 990, '"\\ud800"']


@pytest.mark.parametrize("value", UNREAD, ids=lambda value: value[:7])
def test_a_call_that_nobody_can_read_is_marked(value):
    whole = [CallBegun(0, "f"), CallArguments(0, "{}"), CallEnded(0)]
    text = f'{{"at": {value}}}'
    blocks, parts = parts_of([*whole, CallBegun(1, "f"), *(CallArguments(1, sign) for sign in text), CallEnded(1)])
    told = sent(parts)
    assert "".join(t["delta"]["partial_json"] for t in told if t.get("delta")) == "{}" + text
    assert told[-1] == {"type": "content_block_stop", "index": 1, "incomplete": True}
    first, block = joined(parts)
    assert block.input == first.input == {} and block.incomplete and not first.incomplete and not blocks.called


@pytest.mark.parametrize("value", ["1e308", "9" * 400, "[" * 194 + "]" * 194, f'"{"[" * 999}"'], ids=lambda v: v[:7])
def test_what_can_be_sent_back_is_no_mistake(value):
    blocks, parts = parts_of([CallBegun(0, "f"), CallArguments(0, f'{{"at": {value}}}'), CallEnded(0)])
    (block,) = joined(parts)
    assert block.input == {"at": json.loads(value)} and not block.incomplete and blocks.called
    back = {"role": "assistant", "content": [call("1", **block.input)]}
    given = {"model": "m", "max_tokens": 5, "messages": [HELLO, back, {"role": "user", "content": [result("1")]}]}
    check_weight(json.dumps(given).encode())


def test_blanks_alone_are_said_only_where_nothing_else_is():
    assert joined(parts_of([Said(" "), Said("\n")])[1])[0].text == " \n"
    assert joined(parts_of([])[1]) == []
    assert joined(parts_of([Said("a "), Said(" ")])[1])[0].text == "a  "


def test_models_in_anthropics_form():
    one = model("a/b", 86400.0, 512)
    assert (one.created_at, one.display_name, one.max_input_tokens) == ("1970-01-02T00:00:00Z", "a/b", 512)
    page = models([one, model("c", 0, None)])
    assert (page.first_id, page.last_id, page.has_more) == ("a/b", "c", False)
    assert models([]).first_id is None


# ---- errors and keys -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidRequest("x"), 400, "invalid_request_error", None),
        (Refused("x", status=401), 401, "authentication_error", None),
        (Refused("x", status=403, code="c"), 403, "permission_error", "c"),
        (Refused("x", status=404), 404, "not_found_error", None),
        (Refused("x", status=405), 405, "invalid_request_error", None),
        (Refused("x", status=408, code="arrival_timeout"), 408, "invalid_request_error", "arrival_timeout"),
        (Refused("x", status=413), 413, "request_too_large", None),
        (QueueFull("x"), 429, "rate_limit_error", "queue_full"),
        (InternalError("x"), 500, "api_error", "internal_error"),
        (EngineFailed("x"), 529, "overloaded_error", "engine_failed"),
        (DeadlineExceeded("x"), 504, "timeout_error", "deadline_exceeded"),
    ],
)
def test_errors_in_anthropics_words(error, status, kind, code):
    refused = as_refused(error)
    body = ANTHROPIC.told(refused, "req")
    assert ANTHROPIC.status(refused) == status
    assert body["type"] == "error" and body["request_id"] == "req" and body["error"]["type"] == kind
    assert body["error"].get("details", {}).get("error_code") == code


def test_a_prompt_that_is_too_long_is_told_so_that_agents_see_it():
    told = ANTHROPIC.error(as_refused(PromptTooLong("9 tokens.")))
    assert told["error"]["message"] == "prompt is too long: 9 tokens."


def test_where_a_key_stands():
    assert key_of({}) is None
    assert key_of({b"x-api-key": b"k"}) == b"Bearer k"
    assert key_of({b"x-api-key": b"k", b"authorization": b"Bearer a"}) == b"Bearer a"


def test_models_are_listed_in_two_dialects():
    version = {b"anthropic-version": b"2023-06-01"}
    for path in ("/v1/models", "/v1/models/a/b"):
        assert spoken(path, version, None) is ANTHROPIC and spoken(path, {}, None) is None
    assert spoken("/v1/completions", version, None) is spoken("/v1/modelsx", version, None) is None
