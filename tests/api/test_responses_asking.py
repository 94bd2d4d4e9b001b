"""What a body of a response asks for: items as messages, fields as those of a chat, and refusals by name."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest

pytest.importorskip("msgspec")


from hibachi.llm.chatformat.messages import IMAGE
from hibachi.llm.dialects.errors import Refused, refusing
from hibachi.llm.dialects.forms import JsonObjectFormat, JsonSchemaFormat, NamedSchema
from hibachi.llm.dialects.openai import parse as openai
from hibachi.llm.dialects.openai.bodies import Bounds, read
from hibachi.llm.dialects.openai.conversation import conversation
from hibachi.llm.dialects.responses.bodies import ResponsesBody
from hibachi.llm.dialects.responses.items import as_kept, kept
from hibachi.llm.dialects.responses.parse import LOGPROBS, as_chat, in_body, own_items, shortened, starts, turns
from hibachi.request import SamplingParams

BOUNDS = Bounds()
FUNCTION = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}


def body_of(input="a", **fields):
    return read(ResponsesBody, json.dumps({"input": input, **fields}).encode())


def chat_of(input="a", **fields):
    body = body_of(input, **fields)
    return as_chat(body, own_items(body, BOUNDS))


def refused(call, *args, **fields):
    with pytest.raises(Refused) as found:
        call(*args, **fields)
    return found.value


# ---- items -----------------------------------------------------------------------------------------------------------


def user(content):
    return {"role": "user", "content": content}


def call(n, **more):
    return {"type": "function_call", "call_id": f"c{n}", "name": "f", "arguments": json.dumps({"n": n}), **more}


def called(*numbers):
    each = [
        {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": json.dumps({"n": n})}}
        for n in numbers
    ]
    return {"tool_calls": each}


def thought(text, **more):
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}], **more}


PART = {"type": "output_text", "annotations": [], "logprobs": []}


def spoke(text, **more):
    content = [{**PART, "text": text}]
    return {"type": "message", "role": "assistant", "id": "msg_1", "content": content, "status": "completed", **more}


def result(n, output="1"):
    return {"type": "function_call_output", "call_id": f"c{n}", "output": output}


def answered(n, content="1"):
    return {"role": "tool", "tool_call_id": f"c{n}", "content": content}


ASSISTANT = {"role": "assistant", "content": None}
ITEMS = {  # items of an input, and the messages that they stand for
    "a text": ("Hello", [user("Hello")]),
    "easy messages": (
        [{"role": role, "content": role} for role in ("system", "developer", "user", "assistant", "user")],
        [{"role": role, "content": role} for role in ("system", "developer", "user", "assistant", "user")],
    ),
    "parts": (
        [user([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]), spoke("c")],
        [user("a\nb"), {"role": "assistant", "content": "c"}],
    ),
    "a refusal": (
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
        [{"role": "assistant", "content": "No."}],
    ),
    "a call and its result": (
        [user("a"), call(1, id="fc_1", status="completed"), result(1), spoke("b")],
        [user("a"), {**ASSISTANT, **called(1)}, answered(1), {"role": "assistant", "content": "b"}],
    ),
    "what a client has read in them": (
        [call(1, parsed_arguments={"n": 1}), result(1), spoke("b", content=[{**PART, "text": "b", "parsed": None}])],
        [{**ASSISTANT, **called(1)}, answered(1), {"role": "assistant", "content": "b"}],
    ),
    "a whole turn": (
        [thought("I"), spoke("a"), call(1), call(2), result(1), result(2, [{"type": "input_text", "text": "2"}])],
        [
            {"role": "assistant", "content": "a", "reasoning_content": "I", **called(1, 2)},
            answered(1),
            answered(2, "2"),
        ],
    ),
    "an image in a result": (
        [call(1), result(1, [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:,"}])],
        [{**ASSISTANT, **called(1)}, answered(1, f"a\n{IMAGE}")],
    ),
    "a text behind calls": ([call(1), spoke("a")], [{"role": "assistant", "content": "a", **called(1)}]),
    "two texts": ([spoke("a"), spoke("b")], [{"role": "assistant", "content": text} for text in "ab"]),
    "two turns": (
        [thought("I"), call(1), result(1), thought("see"), spoke("a")],
        [
            {**ASSISTANT, "reasoning_content": "I", **called(1)},
            answered(1),
            {"role": "assistant", "content": "a", "reasoning_content": "see"},
        ],
    ),
    "reasoning behind a text": (
        [spoke("a"), thought("I")],
        [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "", "reasoning_content": "I"}],
    ),
    "reasoning in summary": (
        [
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "I"}],
                "encrypted_content": None,
            }
        ],
        [{"role": "assistant", "content": "", "reasoning_content": "I"}],
    ),
    "a call that was cut off": (
        [user("a"), spoke("b"), call(1, status="incomplete")],
        [user("a"), {"role": "assistant", "content": "b"}],
    ),
    "a result for one that was cut off": (
        [user("a"), call(2), call(1, status="incomplete"), result(2), result(1), call(1), result(1)],
        [
            user("a"),
            {**ASSISTANT, "tool_calls": [*called(2)["tool_calls"], {**called(1)["tool_calls"][0], "incomplete": True}]},
            answered(2),
            answered(1),
            {**ASSISTANT, **called(1)},
            answered(1),
        ],
    ),
    "what a client has in them besides": (
        [{**call(1), "async": None, "created_by": "me"}, {**result(1), "async": False, "async_": None}],
        [{**ASSISTANT, **called(1)}, answered(1)],
    ),
}


def as_sent(messages):
    """Messages with the arguments of their calls as JSON in a text."""
    for function in (call["function"] for message in messages for call in message.get("tool_calls", ())):
        function["arguments"] = json.dumps(function["arguments"])
    return messages


@pytest.mark.parametrize("name", ITEMS)
def test_items_are_messages(name):
    given, wanted = ITEMS[name]
    chat = chat_of(given, instructions="Be brief.")
    assert as_sent(chat.messages) == [{"role": "system", "content": "Be brief."}, *wanted]


@pytest.mark.parametrize("name", ITEMS)
def test_items_that_were_kept_are_the_same_messages_and_as_openai_describes_them(name, described):
    given, wanted = ITEMS[name]
    data = [as_kept(item, f"x_{i}") for i, item in enumerate(own_items(body_of(given), BOUNDS))]
    for one in data:
        described("ItemResource", json.loads(one))
    messages = conversation([message for message, _ in turns(kept(one) for one in data)], 4096)
    assert as_sent(messages) == wanted


@pytest.mark.parametrize(
    ("item", "param", "code"),
    [
        ({"type": "computer_call", "id": "cu_1"}, "input[1].type", "unsupported_parameter"),
        ({"type": "computer_call_output"}, "input[1].type", "unsupported_parameter"),
        ({"type": 7}, "input[1].type", "unsupported_parameter"),
        ({}, "input[1].id", "missing_required_parameter"),
        ({"role": "user"}, "input[1].content", "missing_required_parameter"),
        ({"role": "tool", "content": "a"}, "input[1].role", "invalid_type"),
        (user(7), "input[1].content", "invalid_type"),
        (user([{"type": "input_image", "image_url": "data:,"}]), "input[1].content[0].type", "unsupported_parameter"),
        (user([{"type": "input_file", "file_id": "f"}]), "input[1].content[0].type", "unsupported_parameter"),
        (user([{"type": "input_text", "text": 7}]), "input[1].content[0].text", "invalid_type"),
        (call(1, namespace=7), "input[1].namespace", "invalid_type"),
        (call(1, caller="n"), "input[1].caller", "unsupported_parameter"),
        ({**call(1), "call_id": ""}, "input[1].call_id", "invalid_value"),
        (result(1, [{"type": "input_file"}]), "input[1].output[0].type", "unsupported_parameter"),
        (thought("a", encrypted_content="x"), "input[1].encrypted_content", "unsupported_parameter"),
        ({"type": "item_reference"}, "input[1].id", "missing_required_parameter"),
    ],
)
def test_items_that_are_none(item, param, code):
    found = refused(chat_of, [user("a"), item])
    assert (found.param, found.code, found.status) == (param, code, 400)
    assert param in str(found)


def test_at_most_so_many_items():
    found = refused(own_items, body_of([user("a")] * 16385), BOUNDS)
    assert (found.param, str(found)) == ("input", "input has 16385 items; at most 16384 are served.")


# ---- fields ----------------------------------------------------------------------------------------------------------


def test_what_is_said_in_other_words():
    body = chat_of(
        max_output_tokens=7,
        temperature=0.5,
        top_logprobs=3,
        include=[LOGPROBS, "reasoning.encrypted_content"],
        tools=[FUNCTION, {"type": "function", "name": "time"}],
        tool_choice={"type": "function", "name": "time"},
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        text={
            "verbosity": "medium",
            "format": {"type": "json_schema", "name": "n", "schema": {"a": 1}, "strict": True},
        },
    )
    assert (body.max_completion_tokens, body.temperature, body.logprobs, body.top_logprobs) == (7, 0.5, True, 3)
    functions = [{"name": "weather", "parameters": {"type": "object"}, "strict": True}, {"name": "time"}]
    assert body.tools == [{"type": "function", "function": one} for one in functions]
    assert body.tool_choice == {"type": "function", "function": {"name": "time"}}
    assert (body.parallel_tool_calls, body.reasoning_effort) == (False, "low")
    assert body.response_format == JsonSchemaFormat(json_schema=NamedSchema(name="n", schema={"a": 1}, strict=True))


def test_what_says_nothing_asks_for_nothing():
    """Clients send such fields with every request."""
    plain = chat_of()
    assert plain == chat_of(
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        include=[],
        text={"format": {"type": "text"}},
        reasoning={"effort": None},
        truncation="disabled",
        background=False,
        top_logprobs=0,
        metadata={"a": "b"},
        store=True,
        user="u",
        service_tier="auto",
        client_metadata={"session": "s"},
        prompt_cache_key="k",
        safety_identifier="s",
        conversation=None,
        prompt=None,
    )
    assert (plain.tools, plain.tool_choice, plain.response_format, plain.logprobs) == (None, None, None, None)
    assert plain.reasoning_effort is None


def test_any_json_object():
    assert chat_of(text={"format": {"type": "json_object"}}).response_format == JsonObjectFormat()


def test_some_of_the_tools():
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    named = [{"type": "function", "function": {"name": "weather"}}]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    assert chat_of(tools=[FUNCTION], tool_choice=choice).tool_choice == allowed


SPACE = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [{**FUNCTION, "description": "W."}]}
INNER = {"type": "function", "name": "find"}


def test_tools_in_a_namespace_are_called_by_its_name_and_theirs():
    inner = {**SPACE, "tools": [*SPACE["tools"], INNER]}
    chat = chat_of([user("a"), call(1, name="find", namespace="crm"), result(1, "b")], tools=[FUNCTION, inner])
    functions = [tool["function"] for tool in chat.tools]
    assert [(f["name"], f.get("description")) for f in functions] == [
        ("weather", None), ("crm__weather", "W."), ("crm__find", "Customers.")
    ]  # fmt: skip
    assert functions[1]["parameters"] == {"type": "object"} and functions[1]["strict"] is True
    assert chat.messages[1]["tool_calls"][0]["function"]["name"] == "crm__find"


@pytest.mark.parametrize("named", [{"name": "weather", "namespace": "crm"}, {"name": "crm__weather"}])
def test_a_tool_in_a_namespace_is_demanded(named):
    wanted = {"type": "function", "function": {"name": "crm__weather"}}
    assert chat_of(tools=[SPACE], tool_choice={"type": "function", **named}).tool_choice == wanted
    some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", **named}]}
    assert chat_of(tools=[SPACE], tool_choice=some).tool_choice["allowed_tools"]["tools"] == [wanted]


@pytest.mark.parametrize(
    ("space", "param", "code"),
    [
        ({**SPACE, "name": ""}, "tools[1].name", "invalid_value"),
        ({**SPACE, "tools": [{**INNER, "name": ""}]}, "tools[1].tools[0].name", "invalid_value"),
        ({**SPACE, "tools": None}, "tools[1].tools", "invalid_type"),
        ({**SPACE, "tools": [FUNCTION, {"type": "custom", "name": "c"}]}, "tools[1].tools[1].type",
         "unsupported_parameter"),
        ({**SPACE, "tools": [SPACE]}, "tools[1].tools[0].type", "unsupported_parameter"),
        ({**SPACE, "tools": [{**INNER, "strict": 7}]}, "tools[1].tools[0].strict", "invalid_type"),
    ],
)  # fmt: skip
def test_namespaces_that_are_wrong(space, param, code):
    found = refused(chat_of, tools=[FUNCTION, space])
    assert (found.param, found.code) == (param, code)


SCHEMA = {"type": "object", "properties": {"tools[0].function": {"type": "string"}}, "required": 7}


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        (
            {"tools": [SPACE, {**FUNCTION, "name": "max_tokens"}, {**FUNCTION, "name": "max_tokens"}]},
            "tools[2].name is 'max_tokens', which tools[1] is called as well. Give each tool a name of its own.",
            "tools[2].name",
        ),
        (
            {"tools": [{**SPACE, "tools": [INNER, INNER]}]},
            "tools[0].tools[1].name is 'crm__find', which tools[0].tools[0] is called as well. Give each tool a name "
            "of its own.",
            "tools[0].tools[1].name",
        ),
        (
            {"tools": [SPACE, {**FUNCTION, "name": "tools[0].function.name"}]},
            "tools[1].name must have 1 to 128 letters, digits and any of _ - . : /; got 'tools[0].function.name'. "
            "Rename the tool.",
            "tools[1].name",
        ),
        (
            {"tools": [{**FUNCTION, "parameters": SCHEMA | {"required": "tools[0].function.parameters.required"}}]},
            "tools[0].parameters.required must be a list of names; got 'tools[0].function.parameters.required'.",
            "tools[0].parameters.required",
        ),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "tool_choice"}},
            "tool_choice names 'tool_choice', and no tool has this name; there are: weather.",
            "tool_choice",
        ),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": 7}},
            "tool_choice.name must be the name of a tool; got 7.",
            "tool_choice.name",
        ),
        ({"top_logprobs": 30, "include": [LOGPROBS]}, "top_logprobs must be at most 20; got 30.", "top_logprobs"),
        (
            {"max_output_tokens": 0},
            "max_output_tokens must be an integer >= 1 (or None: no limit); got 0.",
            "max_output_tokens",
        ),
    ],
)
def test_what_refuses_a_chat_names_the_fields_of_a_response_and_nothing_else(fields, message, param):
    """Also where a client has called something as a field of a chat is called."""
    body = body_of(**fields)

    def refuse():
        chat = as_chat(body, own_items(body, BOUNDS))
        with refusing(partial(in_body, body.tools)):
            openai.chat(chat, SamplingParams(), BOUNDS)

    found = refused(refuse)
    assert (str(found), found.param, found.code) == (message, param, "invalid_value")


REFUSED = {
    "background": True,
    "conversation": "conv_1",
    "prompt": {"id": "pmpt_1"},
    "max_tool_calls": 3,
    "context_management": [{"type": "compaction"}],
    "moderation": {"model": "m"},
    "include": ["file_search_call.results"],
    "tool_choice": {"type": "web_search_preview"},
    "text.verbosity": "low",
    "reasoning.summary": "none",
    "reasoning.generate_summary": "brief",
    "reasoning.context": "all_turns",
    "reasoning.mode": "pro",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_by_name(name):
    first, _, inner = name.partition(".")
    value = {inner: REFUSED[name]} if inner else REFUSED[name]
    found = refused(chat_of, **{first: value})
    assert (found.param, found.code) == (name, "unsupported_parameter")
    assert str(found).startswith(f"{name} is not supported")


BUILT_IN = (
    *("web_search", "web_search_preview", "file_search", "computer", "computer_use_preview", "code_interpreter"),
    *("mcp", "image_generation", "local_shell", "shell", "custom", "apply_patch", "tool_search"),
)


def test_a_value_that_is_refused_is_named_and_so_is_the_form_of_tools():
    assert str(refused(chat_of, background=True)).startswith("background is not supported as True: An answer")
    words = str(refused(chat_of, tools=[{"type": "function", "function": {"name": "f"}}]))
    assert words.endswith("name, description and parameters stand beside type.")


@pytest.mark.parametrize("kind", BUILT_IN)
def test_tools_that_openai_runs_are_refused_by_name(kind):
    found = refused(chat_of, tools=[FUNCTION, {"type": kind, "name": "a"}])
    assert (found.param, found.code) == ("tools[1].type", "unsupported_parameter")
    assert repr(kind) in str(found)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"nonsense": 1}, "nonsense", "unknown_parameter"),
        ({"messages": []}, "messages", "unknown_parameter"),
        ({"store": "yes"}, "store", "invalid_type"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n"}}},
            "text.format.schema",
            "missing_required_parameter",
        ),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "unsupported_parameter"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "invalid_value"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "invalid_value"),
        ({"metadata": {"a" * 65: ""}}, "metadata", "invalid_value"),
        ({"metadata": {"a": "b" * 513}}, "metadata", "invalid_value"),
        ({"metadata": {"a": 1}}, "metadata[...]", "invalid_type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function", "unknown_parameter"),
        ({"tools": [{**FUNCTION, "strict": "yes"}]}, "tools[0].strict", "invalid_type"),
        ({"tools": [{**FUNCTION, "defer_loading": True}]}, "tools[0].defer_loading", "unsupported_parameter"),
        ({"tool_choice": {"type": "allowed_tools", "tools": 7}}, "tool_choice.tools", "invalid_type"),
        ({"tool_choice": 7}, "tool_choice", "unsupported_parameter"),
    ],
)
def test_fields_that_are_wrong(fields, param, code):
    found = refused(chat_of, **fields)
    assert (found.param, found.code, found.status) == (param, code, 400)


def test_no_input():
    found = refused(read, ResponsesBody, b"{}")
    assert (found.param, found.code) == ("input", "missing_required_parameter")


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("instructions", [None, "Be brief."])
@pytest.mark.parametrize(
    ("items", "param", "words"),
    [
        ([result(1)], "call_id", "names a call that was not made"),
        ([call(1, status="incomplete"), result(2)], "call_id", "names a call that was not made"),
        ([thought("I"), spoke("a"), call(1), call(2, name="")], "name", "must be the name"),
    ],
)
def test_what_is_wrong_with_an_item_is_said_of_its_place(items, param, words, instructions, before):
    """before: items that are kept."""
    given = [user("a"), spoke("b"), thought("c"), user("d"), *items]
    body = body_of(given, instructions=instructions)
    found = refused(lambda: as_chat(body, own_items(body, BOUNDS), before))
    place = f"input[{len(given) - 1 - before}].{param}"
    assert found.param == place and str(found).startswith(f"{place} ") and words in str(found), str(found)
    assert found.code == "invalid_value"
    kept = refused(lambda: as_chat(body, own_items(body, BOUNDS), len(given)))
    assert kept.param == "input"  # what a client does not send has no place


@pytest.mark.parametrize(
    ("chat", "ours"),
    [
        (("messages", 3, "content"), "input"),
        (("response_format", "json_schema", "schema"), "text.format.schema"),
        (("response_format", "type"), "text.format.type"),
        (("reasoning_effort",), "reasoning.effort"),
        (("temperature",), "temperature"),
    ],
)
def test_what_else_is_told_of_a_refusal_stays(chat, ours):
    """The template may say anything, and what it says is not rewritten."""

    def refuse():
        with refusing(partial(in_body, None)):
            raise Refused(chat, " is no ", "messages[3].content", status=404, param=chat, code="c", headers={"A": "b"})

    found = refused(refuse)
    assert (str(found), found.param, found.status, found.code) == (f"{ours} is no messages[3].content", ours, 404, "c")
    assert found.headers == {"A": "b"}


def test_reasoning_in_many_items_is_joined_once():
    item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 3500}]}
    body = body_of([item] * 4096)
    begun = time.process_time()
    [message] = as_chat(body, own_items(body, BOUNDS)).messages
    assert time.process_time() - begun < 1  # 4 s, if each was copied for the next
    assert message["reasoning_content"] == "\n".join(["x" * 3500] * 4096)


def test_what_no_model_is_shown_of_an_item_takes_no_room():
    part = {**PART, "text": "a", "annotations": [[]] * 9, "logprobs": [[]] * 9}
    [item] = own_items(body_of([{"role": "assistant", "content": [part]}]), BOUNDS)
    assert as_kept(item, "x") == as_kept(own_items(body_of([spoke("a")]), BOUNDS)[0], "x")


def test_calls_of_functions_are_waited_for():
    tool = {"type": "function", "name": "f"}
    assert chat_of("a", tools=[{**tool, "async": False}]).tools == chat_of("a", tools=[tool]).tools
    assert refused(chat_of, "a", tools=[{**tool, "async": True}]).param == "tools[0].async"


def test_a_conversation_begins_where_no_result_is_left_without_its_call():
    """Also where the user says something before a result comes."""
    given = [user("a"), call(1), user("b"), result(1), spoke("c"), user("d"), call(2), result(2), user("e")]
    chat = chat_of(given)
    texts = [chat.messages[i]["content"] for i in starts(chat)]
    assert texts == ["d", "e"]
    for start in starts(chat):
        conversation(shortened(chat, start).messages, 99)
