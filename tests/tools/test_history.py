"""Conversations with calls, as clients send them, in templates of many forms."""

from dataclasses import replace
from pathlib import Path

import pytest

from hibachi.errors import InvalidRequest
from hibachi.llm.chatformat.errors import BadField
from hibachi.llm.chatformat.format import HERMES, ChatFormat, History
from hibachi.llm.chatformat.history import as_objects, as_written
from hibachi.llm.chatformat.talk import Talk
from hibachi.llm.tokenizers import render_chat

TEMPLATES = {f.stem: f.read_text() for f in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}


class Words:
    """What of a tokenizer a conversation needs."""

    special_ids = ()

    def __init__(self, template):
        self.chat_templates = {"default": template}

    def render_chat(self, messages, chat_template=None, **variables):
        given = {"bos_token": "<s>", "eos_token": "</s>", **variables}
        return render_chat(self.chat_templates["default"], messages, **given)

    guarded = bare = staticmethod(str)

    def split_special(self, text):
        return [text]


def tool(name, **more):
    return {"type": "function", "function": {"name": name, **more}}


def call(ident, name, arguments):
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}


FULL = {"type": "object", "properties": {"city": {"type": "string", "description": "x"}}, "required": ["city"]}
TOOLS = [tool("look_up", description="d", parameters=FULL), tool("send_off", description="d", parameters=FULL)]
CALLS = [
    call("call_aaaaaaaaaaaa", "look_up", '{"city": "Aone"}'),
    call("call_bbbbbbbbbbbb", "send_off", '{"city": "Btwo"}'),
]
RESULTS = [
    {"role": "tool", "tool_call_id": "call_aaaaaaaaaaaa", "content": "Rone"},
    {"role": "tool", "tool_call_id": "call_bbbbbbbbbbbb", "content": "Rtwo"},
]
WORDS = ["look_up", "Aone", "send_off", "Btwo", "Rone", "Rtwo"]


def written(template, messages, tools=TOOLS):
    variables = {"tools": tools, "add_generation_prompt": True}
    return Talk(Words(template)).prompt_text([as_objects(m, ("m",)) for m in messages], variables)


def behind(text, word):
    assert word in text
    return text.partition(word)[2]


TALK = [{"role": "user", "content": "Uone"}, {"role": "assistant", "content": None, "tool_calls": CALLS}, *RESULTS]
SHOWN = [name for name in TEMPLATES if name not in ("deaf", "fenced", "nine", "quoted")]


@pytest.mark.parametrize("name", SHOWN)
def test_calls_and_results_are_shown(name):
    template = TEMPLATES[name]
    text = behind(written(template, TALK), "Uone")
    missing = [word for word in WORDS if word not in text]
    assert not missing
    again = [*TALK, {"role": "assistant", "content": "Sdone"}, {"role": "user", "content": "Utwo"}]
    assert [w for w in [*WORDS, "Sdone", "Utwo"] if w not in behind(written(template, again), "Uone")] == []


def test_a_template_that_says_nothing_of_tools_is_refused():
    for name in ("deaf", "fenced"):
        with pytest.raises(BadField, match="tools is not supported"):
            written(TEMPLATES[name], TALK)


def test_calls_that_a_content_would_hide_are_shown():
    """The template has an answer of text, or of calls."""
    template = TEMPLATES["fenced"].replace("{{- bos_token }}", "{{- tools | tojson }}")
    talk = [TALK[0], {**TALK[1], "content": "Sone"}]
    text = behind(written(template, talk), "Uone")
    assert all(word in text for word in ("Sone", "look_up", "Aone", "send_off", "Btwo"))


def test_reasoning_of_what_is_shown_apart_is_written_once():
    said = {
        "role": "assistant",
        "content": "Sone",
        "reasoning_content": "Rone",
        "reasoning": "Rone",
        "tool_calls": CALLS,
    }
    first, second = as_written([said], ChatFormat(HERMES, history=History(beside="content")))
    assert first == {"role": "assistant", "content": "Sone", "reasoning_content": "Rone", "reasoning": "Rone"}
    assert {**second, "content": None} == {"role": "assistant", "content": None, "tool_calls": CALLS}


@pytest.mark.parametrize(
    ("ids", "results", "expected"),
    [
        ([None, None], [None, None], "A0B1"),
        (["a", "b"], ["b", "a"], "A1B0"),
        (["a", "b"], ["b", None], "A1B0"),
        (["a", "b"], [None, None], "A0B1"),
        (["a", None], ["a", "x"], "A0B1"),
        ([None, None], ["x", "y"], "A0B1"),
        (["a", "a"], ["a", "a"], "A0B1"),
        ([None, None], [None], "A0B"),
        (["a", "b"], ["b", "x", "b"], "AB021"),
        ([None, None], [None, None, None], "A0B12"),
    ],
)
def test_where_one_call_is_written_results_follow_their_calls(ids, results, expected):
    """A result without an id is of the first call that has none yet."""
    calls = [{"id": id, "function": {"name": name}} for id, name in zip(ids, "AB", strict=True)]
    talk = [{"role": "assistant", "tool_calls": calls}]
    talk += [{"role": "tool", "tool_call_id": id, "content": str(n)} for n, id in enumerate(results)]
    found = as_written(talk, ChatFormat(replace(HERMES, most=1)))
    shown = [m["content"] or "".join(c["function"]["name"] for c in m["tool_calls"]) for m in found]
    assert "".join(shown) == expected


@pytest.mark.parametrize(
    "bare",
    [
        tool("look_up"),
        tool("look_up", parameters={}),
        tool("look_up", parameters={"type": "object", "properties": {"city": {}}}),
    ],
)
def test_tools_without_all_their_parts_are_completed_where_a_template_wants_them(bare):
    wants = TEMPLATES["hermes"].replace(
        "(tool | tojson)",
        "tool.function.description + (tool.function.parameters.properties | length | string) + (tool | tojson)",
    )
    assert wants != TEMPLATES["hermes"]
    assert '"description": ""' in written(wants, TALK, [bare])
    assert '"description"' not in written(TEMPLATES["hermes"], TALK, [bare])


def test_what_is_refused_all_the_same_says_why():
    template = TEMPLATES["hermes"].replace("(tool | tojson)", "tool.function.other + ''")
    with pytest.raises(InvalidRequest, match="other"):
        written(template, TALK)


def test_the_role_developer_is_system_where_it_is_not_shown():
    """The template speaks of developers, and shows no message of theirs."""
    hides = "{# developer #}" + TEMPLATES["hermes"].replace(
        "{%- for message in messages %}", "{%- for message in messages if message.role != 'developer' %}"
    )
    talk = [{"role": "developer", "content": "Dev"}, *TALK]
    assert "<|im_start|>system\nDev" in written(hides, talk)
    knows = "{# developer #}" + TEMPLATES["hermes"]
    assert "<|im_start|>developer\nDev" in written(knows, talk)
