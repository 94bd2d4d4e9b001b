"""Records by name, and templates that are recognized; formats that are kept."""

import json
import threading

import pytest

from hibachi.errors import ConfigError, InvalidRequest
from hibachi.llm.chatformat.format import PLAIN, THINK, ReasoningFormat, Thinking
from hibachi.llm.chatformat.reading.whole import read
from hibachi.llm.chatformat.templates.choosing import MOST, Formats
from hibachi.llm.chatformat.templates.known import KNOWN, REASONING_NAMES, TOOL_NAMES, named, recognized
from hibachi.llm.chatformat.tools import Tool, Toolbox, ToolCall
from hibachi.llm.chatformat.write import written

BOX = Toolbox(
    tuple(
        Tool(name, {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})
        for name in ("get_weather", "note-it")
    )
)
LISTS = [
    [("get_weather", {"city": "Köln, 東京", "days": 3})],
    [("note-it", {})],
    [("get_weather", {"city": "x"}), ("note-it", {"days": -1}), ("get_weather", {"city": "two\nlines"})],
]


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("calls", LISTS, ids=["one", "none", "three"])
def test_what_a_record_writes_it_reads(name, calls):
    form = KNOWN[name]
    calls = calls[: form.tools.most]
    sent = [ToolCall(n, json.dumps(a, ensure_ascii=False), f"Ab34567{i:02}") for i, (n, a) in enumerate(calls)]
    text = written(form.tools, sent)
    assert text.startswith(form.prompted)
    answer = read(form, BOX, Thinking.MAY, text[len(form.prompted) :])
    assert [(c.name, json.loads(c.arguments)) for c in answer.calls] == calls and answer.content == ""
    assert all(call.complete for call in answer.calls)


@pytest.mark.parametrize("name", KNOWN)
def test_text_without_calls_is_said(name):
    form = KNOWN[name]
    text = form.before_said.removeprefix(form.prompted) + "The weather? It is fine [1], as {always}. a(b)"
    answer = read(form, BOX, Thinking.MAY, text)
    assert not answer.calls and answer.content == "The weather? It is fine [1], as {always}. a(b)"


def test_names_of_other_servers_are_known():
    for name in ("hermes", "llama3_json", "mistral", "qwen3_xml", "deepseek_v3", "deepseek_v31", "glm45", "openai"):
        assert name in TOOL_NAMES
        assert named(name, None).over(PLAIN).tools is not None
    for name in ("deepseek_r1", "qwen3", "openai_gptoss", "mistral", "granite"):
        assert name in REASONING_NAMES
        assert named(None, name).over(PLAIN).reasoning is not None
    assert named("openai", None).over(PLAIN).tools == KNOWN["gpt_oss"].tools
    assert named(None, "qwen3").over(PLAIN).reasoning == THINK


@pytest.mark.parametrize("tool, reasoning", [("herms", None), (None, "deepseek"), ("", None), ("Hermes", None)])
def test_an_unknown_name_is_refused_with_those_that_are(tool, reasoning):
    with pytest.raises(ConfigError, match=r"parser '.*' is not known: expected one of auto, .*(hermes|qwen3)"):
        named(tool, reasoning)
    with pytest.raises(ConfigError):
        Formats(tool, reasoning)


def test_none_and_auto_leave_what_was_found():
    assert named(None, "auto").over(KNOWN["glm45"]) == KNOWN["glm45"]


def test_tools_and_reasoning_are_named_apart():
    found = named("hermes", "mistral").over(KNOWN["gpt_oss"])
    assert found.tools == KNOWN["hermes"].tools and found.reasoning == ReasoningFormat("[THINK]", "[/THINK]")
    assert (found.prompted, found.before_said) == ("", "")
    found = named("openai", None).over(PLAIN)
    assert named("openai", "seed_oss").over(PLAIN).reasoning == ReasoningFormat("<seed:think>", "</seed:think>")
    assert found.prompted and found.reasoning == KNOWN["gpt_oss"].reasoning and found.source == "openai"


def test_harmony_is_read_as_its_models_write_it():
    form = KNOWN["gpt_oss"]
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.note-it <|constrain|>json<|message|>"
        '{"days": 1}<|call|>'
    )
    answer = read(form, BOX, Thinking.MAY, text)
    assert (answer.reasoning, answer.content) == ("Hm.", "Let me look.")
    assert [(c.name, c.arguments) for c in answer.calls] == [("note-it", '{"days": 1}')]
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Fine.<|return|>"
    answer = read(form, BOX, Thinking.MAY, text)
    assert (answer.reasoning, answer.content, answer.calls) == ("Hm.", "Fine.", [])


def test_the_token_before_a_call_of_llama_is_left_out():
    answer = read(
        KNOWN["llama3_json"], BOX, Thinking.NONE, '<|python_tag|>{"name": "note-it", "parameters": {"days": 1}}'
    )
    assert [c.name for c in answer.calls] == ["note-it"] and answer.content == ""


def test_a_template_of_llama_has_it_too():
    text = (
        "{# <|python_tag|> #}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
        "{% else %}{{ m.content }}{% endfor %}<|eot|>{% endfor %}"
    )
    assert Formats().of(text, rendering(text)).silent == ("<|python_tag|>",)
    without = text.replace("<|python_tag|>", "")
    assert Formats().of(without, rendering(without)).silent == ()


# ---- templates -------------------------------------------------------------------------------------------------------

SAYS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
GRANITE = "{# respond only with <|tool_call|> followed by a JSON list #}{{ tools | tojson }}" + SAYS


def rendering(text, asked=None):
    from hibachi.llm.tokenizers import render_chat

    def render(messages, **variables):
        if asked is not None:
            asked.append(text)
        return render_chat(text, messages, **variables)

    return render


LLAMA4 = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|header_start|>{{ m.role }}<|header_end|>"
    "{% if m.tool_calls %}<|python_start|>{{ m.content or '' }}<|python_end|>{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}'
    "{% else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>{% endif %}"
)


@pytest.mark.parametrize("before", ["", "<|python_start|><|python_end|>", "<|python_start|>Well.<|python_end|>"])
def test_calls_of_llama_4_need_no_marks(before):
    form = Formats().of(LLAMA4, rendering(LLAMA4))
    answer = read(form, BOX, Thinking.NONE, before + '{"name": "note-it", "parameters": {"days": 1}}')
    assert form.source == "llama4_json" and [c.name for c in answer.calls] == ["note-it"]
    assert answer.content == ("Well." if "Well" in before else "")


def test_a_template_that_writes_no_calls_is_recognized():
    found = Formats().of(GRANITE, rendering(GRANITE))
    assert (found.source, found.tools, found.shows) == ("granite", KNOWN["granite"].tools, True)
    assert recognized(SAYS) is None and Formats().of(SAYS, rendering(SAYS)).tools is None


def test_a_record_that_does_not_fit_is_not_taken():
    """It looks like Granite's, and writes calls like Hermes."""
    calls = (
        '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|end|>"
    )
    text = GRANITE.replace("<|end|>", calls)
    found = Formats().of(text, rendering(text))
    assert found.source == "derived" and found.tools.marker == "<tool_call>"


def test_a_format_is_found_once():
    asked = []
    formats = Formats()
    first = formats.of(GRANITE, rendering(GRANITE, asked))
    count = len(asked)
    assert formats.of(GRANITE, rendering(GRANITE, asked)) is first and len(asked) == count > 5


def test_names_are_taken_over_what_is_found():
    assert Formats("hermes", "qwen3").of(GRANITE, rendering(GRANITE)).tools == KNOWN["hermes"].tools


def test_few_templates_are_kept():
    def refuse(messages, **variables):
        raise InvalidRequest("no")

    formats = Formats()
    first = formats.of("0", refuse)
    for i in range(1, MOST + 1):
        formats.of(str(i), refuse)
    assert formats.of(str(MOST), refuse) is formats.of(str(MOST), refuse)
    assert formats.of("0", refuse) is not first


def test_many_threads_ask_at_once():
    formats = Formats()
    found = []
    threads = [threading.Thread(target=lambda: found.append(formats.of(GRANITE, rendering(GRANITE)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(one == found[0] for one in found)
