"""Anthropic's Messages API with tools and reasoning: blocks whole and streamed, and the turns that follow."""

from __future__ import annotations

import json

import pytest

from hibachi.llm.own import open_texts

from .conftest import site
from .saying import CALL, THINKS, THOUGHT, saying, told
from .test_messages import BODY, PATH, events, folded, refused, streamed, whole

pytest.importorskip("llguidance")

TEMPLATE = (
    "{% if tools %}Tools: {% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}"
    '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Of a model that may think, and writes calls as many do."""
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bath"]}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": {**CITY, "additionalProperties": False}}
TIME = {"name": "time", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = {"tools": [WEATHER, TIME], "max_tokens": 200}


@pytest.fixture(scope="module")
def server():
    with open_texts("tiny", max_num_seqs=16) as texts, site(texts, chat_template=TEMPLATE) as here:
        yield here


def alike(whole_one, streamed_one):
    """The same but for ids."""
    one, two = (
        [{k: v for k, v in block.items() if k != "id"} for block in answer["content"]]
        for answer in (whole_one, folded(streamed_one))
    )
    return one == two and whole_one["stop_reason"] == folded(streamed_one)["stop_reason"]


def calls(answer):
    return [block for block in answer["content"] if block["type"] == "tool_use"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "tool", "name": "weather"}, {"weather"}),
        ({"type": "tool", "name": "time"}, {"time"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"weather", "time"}),
    ],
)
def test_a_call_that_is_wanted_comes(server, choice, names):
    answer = whole(server, **TOOLS, tool_choice=choice)
    (call,) = calls(answer)
    assert answer["stop_reason"] == "tool_use" and call["id"].startswith("toolu_") and call["name"] in names
    assert call["input"] == {} if call["name"] == "time" else call["input"]["city"] in ("Rome", "Bath")
    told = streamed(server, **TOOLS, tool_choice=choice)
    assert alike(answer, told)
    pieces = [e["delta"]["partial_json"] for e in told if e.get("delta", {}).get("type") == "input_json_delta"]
    assert json.loads("".join(pieces)) == call["input"]


def test_a_call_that_max_tokens_cuts_off_is_marked(server):
    wanted = {**TOOLS, "tool_choice": {"type": "tool", "name": "weather"}}
    uncut = whole(server, **wanted)
    given, cut = calls(uncut)[0]["input"], 0
    tokens = uncut["usage"]["output_tokens"]
    for most in (*range(1, tokens, 9), *range(tokens - 4, tokens)):
        answer, told = (f(server, **{**wanted, "max_tokens": most}) for f in (whole, streamed))
        assert answer["stop_reason"] == "max_tokens" and alike(answer, told)
        for block in answer["content"]:
            # Nothing that was not said: what may yet be the beginning of a call is text.
            assert block["type"] == "tool_use" or "<tool_call>".startswith(block["text"].strip())
        for call in calls(answer):  # at the end only the closing of a whole call is missing
            assert call["input"] == ({} if call.get("incomplete") else given)
            cut += call.get("incomplete", False)
    assert cut > 1


# ---- a model that says what it is told -------------------------------------------------------------------------------

LOOK = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}
OTHER = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
THINKING = {"thinking": {"type": "adaptive"}}


STUBBORN = THINKS.replace("enable_thinking is false", "false")
"""Its model thinks, whatever it is told."""


@pytest.fixture(scope="module", params=[THINKS, STUBBORN], ids=["turned off", "stubborn"])
def says(request, tmp_path_factory):
    """says(text, **fields): the message of an answer that says so; whole and streamed are the same."""
    with saying(tmp_path_factory.mktemp("says"), request.param) as here:

        def call(text, **fields):
            off = request.param is THINKS and fields.get("thinking", {}).get("type", "disabled") == "disabled"
            text = "<think>\n\n</think>\n\n" + text.removeprefix(THOUGHT) if off else text
            body = {"model": here.served.names[0], "messages": told(text), "max_tokens": 400, **fields}
            answer = whole(here, **body)
            assert alike(answer, streamed(here, **body))
            return answer

        yield call


def shapes(answer):
    names = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block["type"], block[names[block["type"]]]) for block in answer["content"]]


def test_what_is_thought_said_and_called_are_blocks_of_their_own(says):
    answer = says(THOUGHT + "I look.\n" + CALL + "\n" + OTHER, tools=[LOOK], **THINKING)
    assert shapes(answer) == [
        ("thinking", "Let me see."),
        ("text", "I look."),
        ("tool_use", {"at": 'the "sun"\n猫'}),
        ("tool_use", {}),
    ]
    assert answer["stop_reason"] == "tool_use" and answer["content"][0]["signature"]
    assert 0 < answer["usage"]["output_tokens_details"]["thinking_tokens"] < answer["usage"]["output_tokens"]


def test_a_call_that_nobody_can_read_is_marked(says):
    """The grammar of its tool allows such numbers, as JSON does."""
    given = '<tool_call>\n{"name": "look", "arguments": {"at": 1e999}}\n</tool_call>'
    look = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "number"}}}}
    answer = says(f"{OTHER}\n{given}", tools=[look])
    first, call = answer["content"]
    assert first["input"] == call["input"] == {} and "incomplete" not in first and call["incomplete"] is True
    assert answer["stop_reason"] == "end_turn"


def test_thoughts_that_nobody_asked_for_are_not_told(says):
    for more in ({}, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive", "display": "omitted"}}):
        answer = says(THOUGHT + "It is bright.", **more)
        assert shapes(answer) == [("text", "It is bright.")] and answer["stop_reason"] == "end_turn"


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
            "tools": [{**LOOK, "description": "Look there", "eager_input_streaming": True, **mark}],
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
            found.append(folded(events(answer.text)))
    first, again = found
    assert shapes(first) == shapes(again) == [("thinking", "Let me see."), ("tool_use", {"at": 'the "sun"\n猫'})]
    assert first["usage"] == again["usage"] and first["stop_reason"] == "tool_use"


def test_effort_reaches_a_template_that_reads_it(tmp_path):
    with saying(tmp_path) as here:
        body = {"model": here.served.names[0], "messages": told("so")}

        def counted(**more):
            return here.post(f"{PATH}/count_tokens", {**body, **more}).json()["input_tokens"]

        low, most = (counted(output_config={"effort": effort}) for effort in ("low", "max"))
        assert (low - counted(), most - low) == (len("EFFORT low"), len("high") - len("low"))


def test_a_schema_that_cannot_be_is_told_of_its_tool(server):
    wrong = {**WEATHER, "strict": True, "input_schema": {"properties": {"a": {"type": "no"}}}}
    assert "tools.0.input_schema" in refused(server.post(PATH, {**BODY, **TOOLS, "tools": [wrong]}))["message"]
