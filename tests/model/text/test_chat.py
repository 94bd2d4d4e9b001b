"""Chat templates, against transformers' apply_chat_template; hostile ones; where a model has them."""

import copy
import itertools
import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from hibachi.errors import InvalidModelFiles, InvalidRequest
from hibachi.llm.tokenizers import Tokenizer, render_chat, sandbox

from .made import BYTES, DATA, byte_level
from .templates import FEATURES, HOSTILE

HELLO = [{"role": "user", "content": " Hi <é> "}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def reference():
    """(template, messages, variables) -> what transformers makes of it, or the exception."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), **SPECIAL)

    def render(template, messages, **variables):
        return tokenizer.apply_chat_template(
            copy.deepcopy(messages), chat_template=template, tokenize=False, **copy.deepcopy(variables)
        )

    return render


def same(reference, template, messages, **variables):
    """Both give the same, or both refuse. Returns what they give."""
    try:
        expected = reference(template, messages, **variables)
    except Exception as e:
        with pytest.raises(InvalidRequest):
            render_chat(template, messages, **SPECIAL, **variables)
        return e
    assert render_chat(template, messages, **SPECIAL, **variables) == expected
    return expected


# ---- templates at hand -----------------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "  You are\nhelpful & <b>kind</b>. "}
TALK = [
    {"role": "user", "content": "Hello,\n\n\r\nworld"},
    {"role": "assistant", "content": " Hi! 👋 "},
    {"role": "user", "content": "What is 1 < 2 && \"3\" > '2'? {{ x }} {% y %}"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Wetter für einen Ort <heute>\n & morgen",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Köln", "北京"]}, "days": {"type": "integer"}},
                "required": ["city"],
                "items": {"type": "string"},
            },
        },
    },
    {"type": "function", "function": {"name": "f", "parameters": {}}},
]
CALLS = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 2, "x": 1.0}},
            },
            {"name": "f", "arguments": {"none": None, "yes": True, "list": [1.5, -0.0, 1e30, "'\"<>&"]}},
        ],
    },
    {"role": "tool", "content": '{"t": 21}'},
    {"role": "tool", "content": ""},
    {"role": "assistant", "content": "21 °C"},
]
CONVERSATIONS = {
    "one": TALK[:1],
    "several": TALK,
    "system": [SYSTEM, *TALK],
    "answered": [SYSTEM, *TALK[:2]],
    "context": [SYSTEM, {"role": "context", "content": " Facts.\n"}, *TALK],
    "tool calls": CALLS,
    "tool calls and system": [SYSTEM, *CALLS],
    "tool roles": [
        TALK[0],
        {"role": "assistant_tool_call", "content": "f()"},
        {"role": "tool_response", "content": "1"},
    ],
    "two users": [TALK[0], TALK[0]],
    "assistant first": TALK[1:],
    "system last": [*TALK, SYSTEM],
    "unknown role": [{"role": "dog", "content": "wuff"}],
    "no content": [{"role": "user"}],
    "no role": [{"content": "x"}],
    "null": [{"role": "user", "content": None, "name": None}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image", "image": object()}]}],
    "numbers": [{"role": "user", "content": 3}, {"role": "assistant", "content": 1.0}],
    "long": [{"role": "user", "content": "word " * 50_000}],
    "many": [SYSTEM, *itertools.islice(itertools.cycle(TALK[:2]), 201)],
    "reasoning": [TALK[0], {**TALK[1], "reasoning": "hm\n"}, TALK[2]],
}
ODD = [
    "",
    " ",
    "\n",
    "\n\n x \n",
    "\t\u00a0\u3000x\u2028",
    "é\u0301 😀 \u200d \ufeff",
    "<|im_end|></s><s>[INST]",
    "\\n \\",
    "\x00\x7f",
    "&lt;",
]
CONVERSATIONS |= {
    f"odd {i}": [{"role": r, "content": t} for r in ("system", "user", "assistant")] for i, t in enumerate(ODD)
}

AT_HAND = [*sorted((DATA / "chat_templates").glob("*.jinja")), DATA / "smollm2" / "chat_template.jinja"]


@pytest.mark.parametrize("file", AT_HAND, ids=lambda f: f.stem)
def test_templates_at_hand_render_as_in_transformers(reference, file):
    template, texts = file.read_text(), []
    for messages in CONVERSATIONS.values():
        for go_on, tools in ((True, None), (False, None), (True, TOOLS)):
            texts.append(same(reference, template, messages, add_generation_prompt=go_on, tools=tools))
    assert len({t for t in texts if isinstance(t, str)}) >= 15


def test_there_are_as_many_templates_as_we_say():
    assert len(AT_HAND) == 19


# ---- what newer templates use ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", FEATURES.values(), ids=FEATURES)
def test_features_of_templates_render_as_in_transformers(reference, template):
    for messages in ([SYSTEM, *TALK], CALLS, CONVERSATIONS["parts"], CONVERSATIONS["reasoning"]):
        for tools in (None, TOOLS):
            same(reference, template, messages, tools=tools, add_generation_prompt=True)


def test_a_template_sees_the_variables_that_are_passed(reference):
    template = "{{ enable_thinking }}{{ documents }}{{ custom.a[0] }}{{ bos_token }}{{ number }}{{ big }}{{ numpy }}"
    documents = [{"title": "t", "text": "x"}]
    variables = {"enable_thinking": False, "documents": documents, "custom": {"a": (1,)}, "number": 2.0, "big": 10**30}
    variables["numpy"] = [np.int64(3), np.float32(0.5), np.bool_(False)]
    assert same(reference, template, HELLO, **variables).startswith("False[{'title': 't'")


def test_the_conversation_is_left_alone():
    messages = [{"role": "user", "content": "x", "reasoning": "y", "list": [1]}]
    before = copy.deepcopy(messages)
    with pytest.raises(InvalidRequest, match="it changes the conversation"):
        render_chat("{{ messages[0].list.append(2) }}", messages)
    assert messages == before


def test_images_are_named_by_their_type():
    class Picture:
        secret = "not for templates"

        def save(self, path):
            raise AssertionError("called")

    messages = [{"role": "user", "content": [{"type": "image", "image": Picture()}]}]
    template = "{{ messages[0].content[0].image }}{{ messages[0].content[0].image.secret }}"
    assert render_chat(template, messages) == "<Picture>"


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", [["x"], [3], [None], [["role", "user"]]])
def test_a_message_must_be_an_object(messages):
    with pytest.raises(InvalidRequest, match="takes messages such as"):
        render_chat("{{ messages[0].content }}", messages)


def test_a_template_says_why_it_refuses():
    with pytest.raises(InvalidRequest, match="refuses this conversation: roles must alternate"):
        render_chat("{{ raise_exception('roles must alternate') }}", HELLO)


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(InvalidRequest, match=r"valid Unicode: .*surrogates not allowed"):
        render_chat("{{ messages[0].content }}", [{"role": "user", "content": "\ud800"}])


def test_a_conversation_that_is_too_deep_is_refused():
    deep = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="too deep"):
        render_chat("x", [{"role": "user", "content": deep}])


@pytest.mark.parametrize(
    "template", ["{% for", "{{ x | no_such_filter }}", "{{ x is no_such_test }}", "{{ no_such() }}"]
)
def test_a_broken_template_is_a_fault_of_the_files(template):
    with pytest.raises(InvalidModelFiles, match=r"cannot be run: .*Mend or replace it"):
        render_chat(template, HELLO)


# ---- hostile templates -----------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch):
    """A sandbox with less time than the usual one."""
    box = sandbox.Sandbox()
    monkeypatch.setattr(sandbox, "SECONDS", 2.0)
    monkeypatch.setattr(sandbox, "render", box.render)
    yield
    box.stop()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_stopped(template):
    started = time.monotonic()
    with pytest.raises((InvalidRequest, InvalidModelFiles)):
        render_chat(template, HELLO)
    assert time.monotonic() - started < 10
    assert render_chat("{{ messages[0].role }}", HELLO) == "user"  # and the next one is served


def test_an_endless_template_says_that_it_is_one():
    with pytest.raises(InvalidRequest, match="ran out of fuel"):
        render_chat(HOSTILE["nested loops"], HELLO)
    with pytest.raises(InvalidRequest, match="crashed, or took more than 10 s or 1024 MiB"):
        render_chat(HOSTILE["a namespace in itself"], HELLO)


def test_a_template_that_takes_its_time_is_killed(monkeypatch):
    """Sorting again and again what is sorted costs no fuel."""
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    box = sandbox.Sandbox()
    slow = "{% set l = range(99999) | list %}{% for i in range(999) %}{% set x = l | sort(reverse=i % 2) %}{% endfor %}"
    started = time.monotonic()
    assert box.render(slow, {})[0] == "failed"
    assert time.monotonic() - started < 5
    box.stop()


def test_the_present_can_be_another():
    form = "{{ strftime_now('%Y-%m-%d %H:%M') }}"
    assert render_chat(form, HELLO, strftime_now=365 * 86400) == "1971-01-01 00:00"  # in UTC, wherever that is run
    assert render_chat(form, HELLO, strftime_now=0.5) == "1970-01-01 00:00"
    assert render_chat(form, HELLO) > "2024"
    for wrong in (1e300, "now", True):
        with pytest.raises(InvalidRequest):
            render_chat(form, HELLO, strftime_now=wrong)


@pytest.mark.parametrize("name", ["/etc/passwd", "../../etc/passwd", "template_worker.py"])
def test_a_template_reads_no_files(name):
    for tag in (f"{{% include '{name}' %}}", f"{{% import '{name}' as x %}}", f"{{% extends '{name}' %}}"):
        with pytest.raises(InvalidRequest, match="template not found"):
            render_chat(tag, HELLO)


@pytest.mark.parametrize(
    "expression",
    [
        "messages.__class__",
        "messages[0].__class__",
        "messages[0]['__class__']",
        "messages[0] | attr('__class__')",
        "messages[0].content.__class__",
        "raise_exception.__globals__",
        "strftime_now.__globals__",
        "messages[0].get.__self__",
        "'' .__class__",
        "x[0].value.__class__",
        "messages | map(attribute='__class__') | first",
        "new_list_of_python.__globals__",
        "new_list_of_python().__class__",
    ],
)
def test_a_template_sees_nothing_of_python(expression):
    assert render_chat("{{ " + expression + " is defined }}", HELLO, x=[1.0]) == "False"


NUMBERS = (
    "{{ x }} {{ -x }} {{ x + 1 }} {{ x * 2 }} {{ x / 2 }} {{ x // 2 }} {{ x ** 2 }}|{{ x | round }} {{ x | abs }}"
    "{{ x == 1 }} {{ x in [1, 2] }} {{ [x, 3] | max }} {{ [x, 2] | sum }} {{ x is float }} {{ x < 2 }}"
    "{{ '%.2f' | format(x) }} {{ '%d, %5d' | format(x, 2) }} {{ x | string }} {{ x ~ 'a' ~ x }} {{ x | int }}"
    "{{ x | tojson }} {{ [x, 1] | tojson }} {{ {'x': x, 'd': d} | tojson }} {{ (x) | tojson }} {{ [x, 1] | join(',') }}"
    "{{ d }} {{ d.x }} {{ d | tojson }} {{ d.x | tojson }} {{ d['x'] | string }} {{ d.l | first | tojson }}"
    "{{ x | replace('1', '2') }} {{ 'x' }} {{ 1e20 }} {{ 1e-7 }} {{- 1E16 -}} {{ 1e20 * 10 }} {{ 1e20 == 1e20 }}"
)


@pytest.mark.parametrize("x", [1.0, -3.0, 0.0, 2.5, 1e15, 1e20, 1e-7, 123456.0, 7], ids=str)
def test_numbers_are_as_in_transformers(reference, x):
    assert isinstance(same(reference, NUMBERS, HELLO, x=x, d={"x": x, "one": 1, "l": [x, 1, 2.0]}), str)


@pytest.mark.parametrize("form", ["{0.__class__}", "{0[__class__]}", "{0.append.__self__}"])
def test_a_template_formats_nothing_of_python(form):
    with pytest.raises(InvalidRequest):
        render_chat("{{ form.format(messages) }}", HELLO, form=form)


def test_the_process_of_templates_has_no_environment_of_ours():
    assert render_chat("{{ environ is defined }}{{ os is defined }}{{ open is defined }}", HELLO) == "False" * 3


def test_many_threads_render_at_once():
    texts, template = {}, "{% for i in range(50) %}{{ messages[0].content }}{% endfor %}"

    def render(i):
        texts[i] = {render_chat(template, [{"role": "user", "content": f"<{i}>"}]) for _ in range(20)}

    threads = [threading.Thread(target=render, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert texts == {i: {f"<{i}>" * 50} for i in range(8)}


FORK = """
import os
from hibachi.llm.tokenizers import render_chat, sandbox
hello = [{"role": "user", "content": "hello"}]
assert render_chat("a", hello) == "a"
child = os.fork()
if child == 0:
    fine = False
    try:
        fine = render_chat("b", hello) == "b"
    finally:
        os._exit(0 if fine else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert render_chat("c", hello) == "c"
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_has_a_sandbox_of_its_own():
    """In a process of its own: this one may hold libraries that no fork survives."""
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)


# ---- where a model has its templates ---------------------------------------------------------------------------------


def model(folder, template="{{ bos_token }}{{ eos_token }}|{{ messages[0].content }}", place="jinja file"):
    byte_level().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": None}
    if place == "config":
        config["chat_template"] = template
    if place == "named list":
        config["chat_template"] = [{"name": "default", "template": template}, {"name": "rag", "template": "no"}]
    if place == "jinja file":
        config["chat_template"] = "the file wins"
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("place", ["jinja file", "config", "named list"])
def test_the_template_is_found_in_the_files_of_the_model(tmp_path, place):
    tokenizer = Tokenizer.load(model(tmp_path, place=place))
    assert tokenizer.render_chat(HELLO) == "<s></s>| Hi <é> "
    assert tokenizer.chat_template == tokenizer.chat_templates["default"]


def test_newlines_of_a_template_are_read_as_written_anywhere(tmp_path):
    (model(tmp_path) / "chat_template.jinja").write_bytes(b"a\r\n{% if true %}\r\nb{% endif %}\r\n")
    assert Tokenizer.load(tmp_path).render_chat(HELLO) == "a\nb"  # as transformers reads text files


def test_several_templates_and_which_is_used(tmp_path):
    folder = model(tmp_path, template="usual")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ tools | length }}")
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
    tokenizer = Tokenizer.load(folder)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert set(tokenizer.chat_templates) == set(theirs.chat_template) == {"default", "tool_use", "rag"}
    for options in (
        {},
        {"tools": TOOLS},
        {"chat_template": "rag"},
        {"chat_template": "rag", "tools": TOOLS},
        {"tools": []},
    ):
        expected = theirs.apply_chat_template(HELLO, tokenize=False, **options)
        assert tokenizer.render_chat(HELLO, **options) == expected
    assert tokenizer.render_chat(HELLO, chat_template="{{ messages | length }} here") == "1 here"


def test_several_templates_and_none_is_the_usual_one():
    tokenizer = Tokenizer(byte_level(), chat_template={"rag": "r", "tool_use": "t"})
    assert tokenizer.chat_template is None and tokenizer.render_chat(HELLO, tools=TOOLS) == "t"
    with pytest.raises(InvalidRequest, match=r"several chat templates and no default.*\['rag', 'tool_use'\]"):
        tokenizer.render_chat(HELLO)


@pytest.mark.parametrize("bad", [3, [3], [{"name": "default"}], [{"template": "x"}], {"default": 3}])
def test_a_template_of_the_wrong_type_is_refused(tmp_path, bad):
    model(tmp_path, template=bad, place="config")
    with pytest.raises(InvalidModelFiles, match=r"tokenizer_config\.json: chat_template must be a text"):
        Tokenizer.load(tmp_path)


def test_a_template_that_cannot_be_read_is_refused(tmp_path):
    (model(tmp_path) / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InvalidModelFiles, match=r"chat_template\.jinja cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_model_without_a_template_says_so():
    with pytest.raises(InvalidRequest, match=r"no chat template.*Send plain text"):
        BYTES.render_chat(HELLO)


# ---- what templates of calls want ------------------------------------------------------------------------------------

FILLED = {
    "append and pop": "{% set ns = namespace(ids=[], n=0) %}{% for m in messages %}{% set _ = ns.ids.append(m.role) %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.ids }}{{ ns.ids.pop(0) }}{{ ns.ids | join('-') }}{{ ns.ids | length }}"
    "{% if ns.ids %}{{ ns.ids[0] }}{{ ns.ids[-1] }}{% endif %}",
    "a variable": "{% set seen = [ ] %}{% for m in messages %}{% set _ = seen.append(m.content) %}{% endfor %}"
    "{{ seen | tojson }}{{ messages[0].role in seen }}{{ seen == [] }}",
    "extend and insert": "{% set x = [] %}{% set _ = x.extend(['b', 'c']) %}{% set _ = x.insert(0, 'a') %}{{ x }}"
    "{{ x + ['d'] }}{% for y in x %}{{ loop.index }}{{ y }}{% endfor %} x = [] {{ x[1:] }}",
    "of lists": "{% set x = [] %}{% for m in messages %}{% set y = [] %}{% set _ = y.append(m.role) %}"
    "{% set _ = x.append(y) %}{% endfor %}{{ x }}{{ x | map('first') | list }}",
}


@pytest.mark.parametrize("template", FILLED.values(), ids=FILLED)
def test_lists_can_be_filled_as_in_jinja2(template):
    """transformers does not let templates do it, and templates do."""
    jinja2 = pytest.importorskip("jinja2")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    expected = environment.from_string(template).render(messages=TALK)
    assert render_chat(template, TALK) == expected


def test_what_is_given_cannot_be_filled():
    with pytest.raises(InvalidRequest, match="changes the conversation"):
        render_chat("{% set x = [] %}{{ messages.append(1) }}{{ x }}", HELLO)


def test_a_list_that_is_filled_without_end_is_stopped():
    template = "{% set x = [] %}{% for i in range(9999) %}{% for j in range(9999) %}{% set _ = x.append(x) %}"
    with pytest.raises(InvalidRequest):
        render_chat(template + "{% endfor %}{% endfor %}{{ x }}", HELLO)


def test_a_null_counts_as_missing_unless_it_is_asked_for():
    template = "{{ messages[0].content is defined }} {{ messages[0].content is none }}"
    messages = [{"role": "assistant", "content": None}]
    assert render_chat(template, messages) == "False False"
    assert render_chat(template, messages, nulls=True) == "True True"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_all_its_names(name):
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.reasoning }}|{{ m.thinking }}{% endfor %}"
    assert render_chat(template, [{"role": "assistant", name: "Hm."}]) == "Hm.|Hm.|Hm."
    given = [{"role": "assistant", "reasoning_content": None, name: "Hm."}]
    assert render_chat(template, given, nulls=True).replace("None", "Hm.") == "Hm.|Hm.|Hm."


def test_a_template_that_adds_functions_and_the_time_is_given_them():
    template = "{%- set s = '' + functions -%}{%- set s = s + ' at ' + datetime + '.' -%}{{ s }}{{ tools is none }}"
    text = render_chat(template, HELLO, tools=[{"name": "é"}], strftime_now=0)
    assert text == '[\n    {\n        "name": "é"\n    }\n] at Jan 01 1970 00:00:00 GMT.False'
    assert render_chat(template, HELLO, functions="f", datetime="now") == "f at now.True"
    assert render_chat("{{ functions is defined }}{{ datetime is defined }}", HELLO) == "FalseFalse"
