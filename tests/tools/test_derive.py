"""Formats derived from chat templates: what they are, that calls are read again, and templates that mean no good."""

import importlib.util
import random
import string
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hibachi.errors import InvalidRequest
from hibachi.llm.chatformat.format import HERMES, THINK, ChatFormat, History, ReasoningFormat, Slot, Thinking
from hibachi.llm.chatformat.templates.choosing import Formats
from hibachi.llm.chatformat.templates.derive import derive
from hibachi.llm.chatformat.templates.known import KNOWN
from hibachi.llm.chatformat.templates.probes import MOST, USER, Template
from hibachi.llm.chatformat.templates.trial import heard
from hibachi.llm.chatformat.tools import Tool
from hibachi.llm.tokenizers import render_chat

ROOT = Path(__file__).parents[2]
OURS = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
FETCHED = ROOT / ".templates"

spec = importlib.util.spec_from_file_location("templates", ROOT / "tools" / "templates.py")
table = importlib.util.module_from_spec(spec)
sys.modules["templates"] = table  # for its dataclass
spec.loader.exec_module(table)


def rendering(text):
    return lambda messages, **variables: render_chat(
        text, messages, **{"bos_token": "<s>", "eos_token": "</s>", **variables}
    )


def ours(name):
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text()


@pytest.mark.parametrize("file", OURS, ids=lambda f: f.stem)
def test_random_calls_are_read_again(file):
    row = table.row(file.stem, file.read_text(), Formats(), 10)
    assert row.form.source == "derived" and not row.wrong, row.wrong[0]
    assert (row.form.tools is not None) == row.writes == (file.stem != "deaf")
    assert row.form.shows == (file.stem not in ("deaf", "fenced"))
    assert "wrong" not in row.reasoning


@pytest.mark.parametrize(
    "name, record",
    [
        ("hermes", "hermes"),
        ("thinking", "hermes"),
        ("functions", "qwen3_coder"),
        ("keys", "glm45"),
        ("fenced", "deepseek_v3"),
        ("numbered", "kimi_k2"),
        ("python", "lfm2"),
        ("quoted", "gemma4"),
        ("action", "cohere"),
    ],
)
def test_a_format_is_what_we_know_of_its_family(name, record):
    assert derive(rendering(ours(name))).tools == KNOWN[record].tools


def test_the_generic_format_is_that_of_hermes():
    assert KNOWN["hermes"].tools == HERMES


@pytest.mark.parametrize(
    "name, reasoning, switch, effort",
    [
        ("hermes", None, None, False),
        ("thinking", THINK, "enable_thinking", False),
        ("keys", THINK, "enable_thinking", False),
        ("fenced", THINK, None, False),
        ("typed", THINK, "enable_thinking", False),
        ("quoted", ReasoningFormat("<|channel>thought", "<channel|>"), "enable_thinking", False),
        ("channels", ReasoningFormat("<|begin|>assistant<|think|>", "<|end|>"), None, True),
        ("action", ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"), None, False),
        ("deaf", None, None, False),
    ],
)
def test_reasoning_and_what_turns_it_on(name, reasoning, switch, effort):
    found = derive(rendering(ours(name)))
    assert (found.reasoning, found.switch, found.effort) == (reasoning, switch, effort)


def test_the_form_of_history_that_shows_calls():
    assert derive(rendering(ours("hermes"))).history == History()
    assert derive(rendering(ours("fenced"))).history == History("text", "null", "content")
    assert derive(rendering(ours("single"))).history == History(beside="calls")
    assert derive(rendering(ours("nine"))).tools.id == "nine letters"
    printed = ours("hermes").replace("(call.function.arguments | tojson)", "(call.function.arguments | string)")
    assert derive(rendering(printed)).history == History("text")  # as an object it would be Python's
    split = ours("hermes").replace("message.content or ''", "message.content if loop.last else message.content.strip()")
    assert split != ours("hermes") and derive(rendering(split)).history == History(content="empty")


def test_one_call_at_most_and_two_at_most():
    assert derive(rendering(ours("single"))).tools.most == 1
    assert derive(rendering(ours("fenced"))).tools.most is None
    ends = (
        ours("fenced")
        .replace("call_end｜>'.replace('", "")
        .replace(
            "```<｜tool▁call▁end｜>'",
            "```<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.index0 and not loop.last else '')",
        )
    )
    assert derive(rendering(ends)).tools.most == 2


def test_numbers_of_calls():
    for name, number, parts in (("action", 0, 7), ("typed", 1, 7), ("numbered", 0, 7)):
        tools = derive(rendering(ours(name))).tools
        assert tools.first_number == number and Slot.NUMBER in tools.call and len(tools.call) == parts


def test_a_header_of_the_prompt_that_comes_again_before_each_call():
    again = ours("channels").replace("{{- '<|tool_calls|>' }}", "").replace("{{- '<|calls|>' }}", "")
    again = again.replace("{{- '<|call|>'", "{{- ('<|begin|>assistant' if loop.index0 else '') + '<|call|>'")
    found, call = derive(rendering(again)), "<|call|>a<|name|>f<|args|>{}<|call_end|>"
    assert found.tools.marker == "<|begin|>assistant<|call|>" and found.prompted == "<|begin|>assistant"
    for front, times in (("", 1), ("<|think|>Hm<|end|><|begin|>assistant", 2)):
        answer = heard(found, front + "<|begin|>assistant".join([call] * times), (Tool("f", {}),))
        assert [(c.name, c.id, c.complete) for c in answer.calls] == [("f", "a", True)] * times and not answer.content


def test_plans_in_front_of_calls_are_reasoning_by_coheres_name():
    always = (
        "{%- if message.tool_calls %}{{ '<|START_THINKING|>' ~ message.tool_plan ~ '<|END_THINKING|>' }}{% endif %}"
    )
    lines = ours("action").splitlines(keepends=True)
    text = "".join(f"    {always}\n" if "message.reasoning_content" in line else line for line in lines)
    text = text[: text.index("<|ASSISTANT|>' + (")] + "<|ASSISTANT|>' }}{%- endif %}"
    found = derive(rendering(text))
    assert found.reasoning == ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>")
    plain = derive(rendering(ours("action")))
    assert found.tools == plain.tools
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "reasoning_content": "I look."}]
    said[1]["tool_calls"] = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}]
    assert "<|START_THINKING|>I look.<|END_THINKING|>" in rendering(text)(said)


def test_what_is_around_an_answer_of_text():
    found = derive(rendering(ours("channels")))
    assert found.prompted == "<|begin|>assistant" and found.before_said == "<|begin|>assistant<|content|>"
    behind = "<|begin|>assistant<|content|>Hello<|end|>"
    for answer in (f"<|think|>Hm.<|end|>{behind}", "<|content|>Hello<|end|>"):
        assert heard(found, answer, ()).content == "Hello"
    found = derive(rendering(ours("action")))
    assert found.before_said == "<|START_RESPONSE|>" and "<|END_RESPONSE|>" in found.silent
    answer = heard(found, "Hm.<|END_THINKING|><|START_RESPONSE|>Hello<|END_RESPONSE|>", (), Thinking.OPEN)
    assert (answer.reasoning, answer.content) == ("Hm.", "Hello")


def test_a_mistral_that_leaves_out_ids_is_read():
    found = derive(rendering(ours("nine")))
    answer = heard(found, '[TOOL_CALLS][{"name": "note-it", "arguments": {"days": 1}}]', table.TOOLS)
    assert [(c.name, c.arguments, c.complete) for c in answer.calls] == [("note-it", '{"days": 1}', True)]


# ---- templates that are odd, wrong or hostile ------------------------------------------------------------------------

HERMES_TEXT = ours("hermes")


@pytest.mark.parametrize(
    "old, new",
    [
        ("(call.function.arguments | tojson)", "(call.function.arguments | tojson | upper)"),
        ("(call.function.arguments | tojson)", "(call.function.arguments | tojson | replace('東', ''))"),
        ("(call.function.arguments | tojson)", "(call.function.arguments | length | string)"),
        ("(call.function.arguments | tojson)", "(call.function.arguments | tojson)[:40]"),
        ("call.function.name", "(call.function.name | reverse)"),
        ("call.function.name", "(call.function.name | truncate(6, true, '', 0))"),
        ("for call in message.tool_calls or []", "for call in (message.tool_calls or []) | reverse"),
        ("for call in message.tool_calls or []", "for call in (message.tool_calls or [])[:0]"),
    ],
)
def test_what_cannot_be_read_again_is_not_derived(old, new):
    assert HERMES_TEXT.count(old) == 1
    assert derive(rendering(HERMES_TEXT.replace(old, new))).tools is None


def test_a_second_call_that_is_not_shown_means_one_at_most():
    text = HERMES_TEXT.replace("for call in message.tool_calls or []", "for call in (message.tool_calls or [])[:1]")
    found = derive(rendering(text))
    assert found.tools == replace(HERMES, between="", most=1)


def test_renderings_are_counted():
    for file in OURS:
        asked, given = [], rendering(file.read_text())

        def render(messages, asked=asked, given=given, **variables):
            asked.append(messages)
            return given(messages, **variables)

        derive(render)
        assert len(asked) <= MOST * 2 // 3, file.stem


def test_no_more_are_made_than_are_allowed():
    template = Template(lambda messages, **variables: messages[0]["content"], most=2)
    asked = [template.text([{"role": "user", "content": word}]) for word in ("a", "b", "a", "c", "b")]
    assert asked == ["a", "b", "a", None, "b"]


def test_one_that_refuses_everything_has_no_format():
    asked = []

    def render(messages, **variables):
        asked.append(messages)
        raise InvalidRequest("no")

    assert derive(render) == ChatFormat(shows=False)
    assert len(asked) <= MOST


def test_time_is_bounded(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    asked = []

    def render(messages, **variables):
        asked.append(messages)
        now[0] += 9.0
        return USER

    assert derive(render).tools is None and len(asked) == 3


def test_what_is_broken_where_only_a_probe_comes():
    """Chats without tools go on as before."""
    text = "{% if tools %}{{ tools | urlize }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert derive(rendering(text)).tools is None


def test_long_texts_are_not_compared():
    """They would take minutes: each bracket may be the beginning of arguments."""
    braces = "{{ '{' * 200000 }}"
    text = "{% for m in messages %}BRACES{{ m.content }}{% for c in m.tool_calls or [] %}<c>{{ c.function.name }} "
    text += "{{ c.function.arguments | tojson }}</c>{% endfor %}{% endfor %}"
    assert derive(rendering(text.replace("BRACES", braces))).tools is None
    deep = """{{ '{"a":' * 12000 }}"""
    derive(rendering(text.replace("BRACES", deep)))


def test_a_name_and_an_id_with_nothing_between_them():
    text = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<call>{{ c.id }}{{ c.function.name }}<args>{{ c.function.arguments | tojson }}</call>{% endfor %}{% endfor %}"
    )
    assert derive(rendering(text)).tools is None
    assert derive(rendering(text.replace("{{ c.function.name }}", "|{{ c.function.name }}"))).tools is not None


@pytest.mark.parametrize("seed", range(60))
def test_no_text_makes_it_raise(seed):
    """Texts that are parts of what a template gives, words of the probes among them, and those of chance."""
    chance = random.Random(seed)
    inner = rendering(chance.choice(OURS).read_text())

    def render(messages, **variables):
        if chance.random() < 0.2:
            raise InvalidRequest("no")
        text = inner(messages, **variables)
        for _ in range(chance.randrange(4)):
            i, j = sorted(chance.randrange(len(text) + 1) for _ in range(2))
            other = "".join(chance.choices(string.printable + "<|>[]{}" * 4 + "é東", k=chance.randrange(9)))
            text = chance.choice((text[:i] + other + text[j:], text[i:j] + text, text[::-1], other, text[:j]))
        return text

    derive(render)


# ---- those of others -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not (FETCHED / "fetched").exists(), reason="the templates are not there: make .templates/fetched")
def test_templates_of_seventy_models():
    formats = Formats()
    rows = {name: table.row(name, text, formats) for name, text in table.templates(FETCHED)}
    assert len(rows) == 70
    wrong = {name: row.wrong[0] for name, row in rows.items() if row.wrong}
    assert not wrong
    assert not [name for name, row in rows.items() if "wrong" in row.reasoning]
    writers = [row for row in rows.values() if row.writes]
    assert len(writers) == 63 and all(row.form.tools for row in writers)
    assert sum(row.form.source == "derived" for row in writers) == 59
    assert sum(row.form.reasoning is not None for row in rows.values()) == 45
    assert {name for name, row in rows.items() if row.left_out} == {"LFM2.5-8B-A1B", "MiniMax-M3"}
