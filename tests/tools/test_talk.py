"""Conversations in the form that a template takes, and what is refused because it would not be shown."""

import json

import pytest

pytest.importorskip("minijinja")

from hibachi.llm.chatformat.asked import as_shown, toolbox_of
from hibachi.llm.chatformat.errors import BadField
from hibachi.llm.chatformat.format import Thinking
from hibachi.llm.chatformat.history import as_objects
from hibachi.llm.chatformat.reading.whole import Answer
from hibachi.llm.chatformat.talk import Talk
from hibachi.llm.chatformat.templates.choosing import Parsers
from hibachi.llm.tokenizers.chat import choose_template, render_chat
from hibachi.structured import StructuredOutputs

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}}}} for name in ("weather", "news")
]  # fmt: skip
SHOWS = "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
CALL = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
CALLED = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
HERMES = (
    SHOWS + "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n" + CALL + "\n</tool_call>{% endfor %}[end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ONE = HERMES.replace("{% for c in m.tool_calls or [] %}", "{% for c in (m.tool_calls or [])[:1] %}")
_TWO = "{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('one') }}{% endif %}"
STRICT = HERMES.replace("[{{ m.role }}]", _TWO + "[{{ m.role }}]")
PLAIN = SHOWS + (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
DROPS = PLAIN.removeprefix(SHOWS)
ADDS = HERMES.replace("{{ m.content }}", "{{ '' + m.content }}")
AS_TEXT = HERMES.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}").replace(
    "[{{ m.role }}]", "{% for c in m.tool_calls or [] %}{% if c.function.arguments is mapping %}"
    "{{ raise_exception('a text') }}{% endif %}{% endfor %}[{{ m.role }}]"
)  # fmt: skip
NINE = HERMES.replace(
    "<tool_call>\n", "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}<tool_call>\n"
)


class Tokenizer:
    """A template, and no tokens."""

    special_ids = frozenset()

    def __init__(self, **templates):
        self.chat_templates = templates

    def render_chat(self, messages, chat_template=None, **variables):
        tools = variables.get("tools") is not None
        return render_chat(choose_template(self.chat_templates, chat_template, tools=tools), messages, **variables)

    guarded = bare = staticmethod(str)

    def split_special(self, text):
        return [text]


def talk(template, **parsers):
    return Talk(Tokenizer(default=template), None, Parsers(**parsers))


def history(*names, content=None):
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": n, "arguments": json.dumps({"city": f"Bath {i}"})}}
        for i, n in enumerate(names)
    ]
    sent = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content, "tool_calls": calls}]
    results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": f"R{i}"} for i in range(len(names))]
    return [as_objects(m, ("m",)) for m in [*sent, *results]]


def prompt(given, messages, tools=TOOLS, add_generation_prompt=True, **more):
    variables = {"tools": as_shown(tools), "add_generation_prompt": add_generation_prompt}
    return given.prompt(messages, variables, toolbox_of(tools), **more)


@pytest.mark.parametrize("content", [None, "", "Well"])
@pytest.mark.parametrize("template", [HERMES, ADDS, AS_TEXT, NINE], ids=["hermes", "adds", "as text", "nine"])
def test_calls_are_written_as_the_model_writes_them(template, content):
    text, reader = prompt(talk(template), history("weather", "news", content=content))
    said = text.partition("[assistant]")[2].partition("[end]")[0]
    answer = reader.read(said, cut=False)
    assert [(c.name, json.loads(c.arguments)) for c in answer.calls] == [
        ("weather", {"city": "Bath 0"}),
        ("news", {"city": "Bath 1"}),
    ]
    assert answer.content == (content or "") and "[tool]R0[end]\n[tool]R1[end]" in text
    assert "None" not in text


@pytest.mark.parametrize("template", [ONE, STRICT], ids=["drops the others", "refuses"])
def test_where_one_call_is_written_each_is_a_message_and_its_result_follows(template):
    text, _ = prompt(talk(template), history("weather", "news", content="Well"))
    order = [text.index(part) for part in ("Well", "Bath 0", "[tool]R0", "Bath 1", "[tool]R1")]
    assert order == sorted(order) and text.count("Well") == 1


@pytest.mark.parametrize("base", [HERMES, ADDS, NINE, ONE], ids=["hermes", "adds", "nine", "one"])
def test_where_results_need_names_they_are_those_of_their_calls(base):
    needs = "{% if m.role == 'tool' and not m.name %}{{ raise_exception('a name') }}{% endif %}[{{ m.role }}]"
    text, _ = prompt(talk(base.replace("[{{ m.role }}]", needs + "{{ m.name }}")), history("weather", "news"))
    assert text.index("[tool]weatherR0") < text.index("[tool]newsR1")
    text, _ = prompt(talk(base.replace("[{{ m.role }}]", "[{{ m.role }}]{{ m.name }}")), history("weather", "news"))
    assert "[tool]R0" in text


def test_calls_that_a_template_drops_are_refused_by_name_or_said():
    with pytest.raises(BadField) as caught:
        talk(PLAIN).prompt_text(history("weather"), {})
    assert caught.value.path == ("messages", 1, "tool_calls")
    text, _ = prompt(talk(PLAIN, tools="hermes"), history("weather", content="Well"))
    assert (
        '[assistant]Well\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bath 0"}}\n</tool_call>[end]' in text
    )


def test_an_answer_goes_on_behind_calls_that_are_said():
    begun = [*history("weather"), {"role": "assistant", "content": "It is"}]
    text, _ = prompt(talk(PLAIN, tools="hermes"), begun, open_end=True, add_generation_prompt=False)
    assert text.endswith("[assistant]It is") and "<tool_call>" in text
    with pytest.raises(BadField) as caught:
        talk(PLAIN).prompt_text(begun, {}, open_end=True)
    assert caught.value.path == ("messages", 1, "tool_calls")


def test_reasoning_is_looked_for_unless_it_is_said_to_be_text():
    thinks = "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    template = (
        thinks + "{% endif %}{{ m.content }}[end]\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    asks = [{"role": "user", "content": "Hi"}], {"add_generation_prompt": True}
    _, reader = talk(template).prompt(*asks)
    assert reader.read("<think>So</think>Yes", cut=False) == Answer("So", "Yes")
    assert talk(template, reasoning="none").prompt(*asks)[1] is None


@pytest.mark.parametrize(
    ("content", "thinking"),
    [
        ("<think>\nabc", Thinking.OPEN),
        ("<think>", Thinking.OPEN),
        ("<think>a</think>\n<think>b", Thinking.OPEN),
        (f"{CALLED}\n<think>b", Thinking.OPEN),
        ("<think>a</think>", Thinking.NONE),
        ("<think>a</think>\n\nThe ans", Thinking.NONE),
        ("The ans", Thinking.NONE),
        ("The tag <think> is", Thinking.NONE),
        ("", Thinking.MAY),
    ],
)
def test_an_answer_goes_on_in_its_reasoning_or_behind_it(content, thinking):
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    text, reader = prompt(talk(HERMES, reasoning="think"), begun, open_end=True, add_generation_prompt=False)
    assert text.endswith(f"[assistant]{content}") and reader.thinking is thinking
    form = talk(HERMES).form(reader, StructuredOutputs(json_object=True), lambda _: None, ())
    assert ("</think>" in form.text) == (thinking is not Thinking.NONE)


def test_further_messages_of_an_answer_that_goes_on_may_think():
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The ans"}]
    _, reader = prompt(talk(PLAIN, tools="gpt_oss"), begun, open_end=True, add_generation_prompt=False)
    more = "wer.<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
    assert reader.read(more, cut=False) == Answer("So.", "wer.")


def test_tools_that_a_template_drops_are_refused_or_described():
    with pytest.raises(BadField) as caught:
        prompt(talk(DROPS, tools="hermes"), [{"role": "user", "content": "Hi"}])
    assert caught.value.path == ("tools",) and "--tool-call-parser generic" in str(caught.value)
    text, _ = prompt(talk(DROPS, tools="generic"), history("weather"))
    assert text.startswith("[system]You can call tools") and '"name": "news"' in text
    assert "[user]<tool_response>\nR0\n</tool_response>[end]" in text


def test_described_where_there_is_no_system_message():
    refuses = "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}[{{ m.role }}]"
    no_system = DROPS.replace("[{{ m.role }}]", refuses)
    text, _ = prompt(talk(no_system, tools="generic"), [{"role": "user", "content": "Hi"}])
    assert text.startswith("[user]You can call tools") and text.endswith("\n\nHi[end]\n[assistant]")
    led = [{"role": "system", "content": "A"}, {"role": "user", "content": "Hi"}]
    text, _ = prompt(talk(no_system, tools="generic"), led)
    assert text.startswith("[user]You can call tools") and "<system-message>\nA\n</system-message>[end]" in text


def test_results_and_what_the_user_says_are_one_message():
    """As many templates want turns to alternate."""
    messages = [*history("weather", "news"), {"role": "user", "content": "And?"}, {"role": "user", "content": "Now?"}]
    text, _ = prompt(talk(DROPS, tools="generic"), messages)
    results = "[user]<tool_response>\nR0\n</tool_response>\n<tool_response>\nR1\n</tool_response>\nAnd?[end]"
    assert f"{results}\n[user]Now?[end]" in text


def test_a_developer_is_the_system_unless_the_template_knows_one():
    two = [{"role": "system", "content": "A"}, {"role": "developer", "content": "B"}, {"role": "user", "content": "Hi"}]
    assert talk(DROPS).prompt_text(two, {}).startswith("[system]A\n\nB[end]\n[user]")
    assert talk(DROPS).prompt_text(two[1:], {}).startswith("[system]B[end]")
    knows = DROPS + "{# developer #}"
    assert talk(knows).prompt_text(two, {}).startswith("[system]A[end]\n[developer]B[end]")


def test_a_template_of_its_own_for_tools():
    both = Talk(Tokenizer(default=DROPS, tool_use=HERMES))
    assert prompt(both, history("weather"))[1].format.tools is not None
    assert (
        both.prompt_text([{"role": "user", "content": "Hi"}], {"add_generation_prompt": True})
        == "[user]Hi[end]\n[assistant]"
    )


def test_effort(caplog):
    switch = DROPS + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    reads = DROPS + "{{ reasoning_effort }}"
    asks = [{"role": "user", "content": "Hi"}]
    assert talk(switch).prompt(asks, {}, effort="none")[0].endswith("<think></think>")
    assert talk(reads).prompt(asks, {}, effort="high")[0].endswith("high")
    for template, effort in ((switch, "low"), (reads, "none"), (DROPS, "low"), (DROPS, "none")):
        caplog.clear()
        for _ in range(2):  # it is a wish: said once that it has no effect
            assert talk(template).prompt(asks, {}, effort=effort)[0] == talk(template).prompt(asks, {})[0]
        told = [r.message for r in caplog.records if "has no effect" in r.message]
        assert told and all(("'none' turns off" in line) == (template is switch) for line in told)


def test_nothing_is_found_out_where_nobody_asks():
    """A chat without tools on a template that knows no thoughts is rendered once."""
    calls = []

    class Counting(Tokenizer):
        def render_chat(self, *args, **variables):
            calls.append(variables)
            return super().render_chat(*args, **variables)

    plain = Talk(Counting(default=DROPS))
    assert plain.prompt([{"role": "user", "content": "Hi"}], {})[1] is None
    assert len(calls) == 1
