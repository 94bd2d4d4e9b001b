"""Reasoning, what is said and calls in the text of an answer, however it is cut into pieces."""

import json
from dataclasses import replace
from random import Random

import pytest

from hibachi.llm.chatformat.format import (
    HERMES,
    PLAIN,
    THINK,
    CallArguments,
    CallBegun,
    CallEnded,
    ChatFormat,
    Reasoned,
    Said,
    Slot,
    Tagged,
    Thinking,
    ToolFormat,
)
from hibachi.llm.chatformat.reading.parser import Parser
from hibachi.llm.chatformat.reading.whole import Answer, joined, read
from hibachi.llm.chatformat.templates.known import KNOWN
from hibachi.llm.chatformat.tools import Tool, Toolbox, ToolCall
from hibachi.llm.chatformat.write import written

from .made import ANSWERS, BOX, CHANNELS, FORMATS, FULL, calls_of, events_of, pieces_of, text_of, toolbox_of

every_format = pytest.mark.parametrize("name", FORMATS)
HERMES_CHAT = FORMATS["hermes"]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PARIS = [CallBegun(0, "get_weather"), CallArguments(0, '{"city": "Paris"}'), CallEnded(0)]


def parsed(text, format=HERMES_CHAT, thinking=Thinking.MAY, **options):
    """The events of a text, whole and letter by letter."""
    whole = events_of(format, [text], thinking=thinking, **options)
    assert events_of(format, text, thinking=thinking, **options) == whole
    return whole


# ---- said ------------------------------------------------------------------------------------------------------------


def test_plain_text_is_said_at_once_and_as_it_is():
    parser = Parser(PLAIN, Toolbox(), Thinking.NONE)
    assert [parser.feed(text) for text in (" a", "", "<tool_call>", "\n")] == [
        [Said(" a")],
        [],
        [Said("<tool_call>")],
        [Said("\n")],
    ]
    assert parser.end() == []


def test_only_what_may_be_a_marker_is_held_back():
    parser = Parser(HERMES_CHAT, BOX, Thinking.NONE)
    fed = [parser.feed(text) for text in ("Hel", "lo ", "wor<", "b>ld <tool_", "cal>", "\n\n", "x")]
    assert fed == [
        [Said("Hel")],
        [Said("lo")],
        [Said(" wor")],
        [Said("<b>ld")],
        [Said(" <tool_cal>")],
        [],
        [Said("\n\nx")],
    ]


@pytest.mark.parametrize("mode", ["none", "no tools"])
def test_without_tools_markers_are_said(mode):
    box = Toolbox() if mode == "no tools" else Toolbox(BOX.tools, mode="none")
    assert events_of(HERMES_CHAT, CALL, box) == [Said(CALL)]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call> is a marker",
        'a <tool_call>\n{"name": "f", "arguments": 3}\n</tool_call> b\n',
        '<tool_call>\n{"nam": "f"}',
        "a < b <tool_call",
        '<tool_call>\n{"name": "' + "x" * 300 + '", "arguments": {}}',
        "\n <to",
    ],
)
def test_what_begins_like_a_call_and_is_none_is_said_as_it_came(text):
    assert parsed(text) == [Said(text)]


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_blanks_around_calls_are_left_out():
    assert parsed(f"Let me see.\n\n{CALL}\n") == [Said("Let me see."), *PARIS]
    assert parsed(f"\n{CALL} \n Done. ") == [*PARIS, Said("Done. ")]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name":"get_weather","arguments":{"city": "Paris"}}</tool_call>',
        '<tool_call>\n\n{ "name" : "get_weather" ,\n"arguments":\n{"city": "Paris"}\n}\n\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}',
    ],
)
def test_blanks_and_brackets_that_models_forget_do_no_harm(text):
    assert parsed(text) == PARIS


def test_arguments_come_as_the_text_does():
    parser = Parser(HERMES_CHAT, BOX, Thinking.NONE)
    parser.feed('<tool_call>\n{"name": "get_weather", "arguments": {')
    assert parser.feed('"city": "Pa') == [CallArguments(0, '"city": "Pa')]
    assert parser.feed("ris") == [CallArguments(0, "ris")]
    assert parser.feed('"}}') == [CallArguments(0, '"}'), CallEnded(0)]


def test_a_name_that_no_tool_has_is_given_on_where_a_marker_says_that_it_is_a_call():
    text = '{"name": "other", "parameters": {}}'
    assert parsed(f"<tool_call>{text}</tool_call>".replace("parameters", "arguments"))[0] == CallBegun(0, "other")
    assert parsed(text, FORMATS["alone"]) == [Said(text)]
    assert parsed(text.replace("other", "f"), FORMATS["alone"])[0] == CallBegun(0, "f")


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("alone", "named twice")])
def test_a_call_that_is_cut_off_is_not_complete_and_nothing_of_it_is_said(name, cut):
    format = FORMATS[name]
    text = written(format.tools, [ToolCall("f", '{"city": "Paris"}', "abcdefghi")])
    for end in range(text.index("Par"), len(text)):
        answer = read(format, BOX, Thinking.NONE, "Wait. " + text[:end], cut)
        assert (answer.content.rstrip(), len(answer.calls)) == ("Wait.", 1)
        assert not answer.calls[0].complete or json.loads(answer.calls[0].arguments) == {"city": "Paris"}


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("alone", "named twice")])
def test_nothing_of_a_second_call_that_is_cut_off_is_said(name):
    format = FORMATS[name]
    one = ToolCall("f", "{}", "abcdefghi")
    text = "Wait. " + written(format.tools, [one, replace(one, arguments='{"a": 1}')])
    for end in range(len("Wait. " + written(format.tools, [one])) - len(format.tools.end), len(text)):
        content = read(format, BOX, Thinking.NONE, text[:end], cut=True).content
        assert content.replace("\n", "").replace(" ", "") in ("Wait.", f"Wait.{text[end - 1]}"), text[:end]


def test_the_beginning_of_a_call_is_not_said_where_the_answer_is_cut_off():
    text = f"Wait. {CALL}"
    for end in range(len("Wait. <t"), text.index("{")):
        assert events_of(HERMES_CHAT, text[:end], cut=True) == [Said("Wait.")]
    assert events_of(HERMES_CHAT, "1 <", cut=True) == [Said("1 <")]  # says too little


def test_arguments_that_are_none_are_given_on_and_their_call_is_not_complete():
    text = '<tool_call>\n{"name": "f", "arguments": {city: Paris}}\n</tool_call>\n' + CALL
    events = parsed(text)
    assert events[:3] == [CallBegun(0, "f"), CallArguments(0, "{city: Paris}}\n"), CallEnded(0, complete=False)]
    assert [type(event) for event in events[3:]] == [CallBegun, CallArguments, CallEnded]


def test_spellings_that_are_never_asked_for_are_read():
    text = 'Now <|python|>f|{"a": 1}<|eop|>[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    answer = read(FORMATS["spelled"], BOX, Thinking.NONE, text)
    assert answer == Answer(None, "Now ", [ToolCall("f", '{"a": 1}'), ToolCall("f", "{}")])


ONE = '"name": "get_weather", "arguments": {"city": "Paris"}'
SLIPS = [  # what models write where nothing guides them
    '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>',
    '<tool_call>\n{"parameters": {"city": "Paris"}, "name": "get_weather"}',
    CALL.replace('"name"', '"type": "function", "name"'),
    CALL.replace("arguments", "parameters"),
    CALL.replace("\n{", "\n```json\n{").replace("}\n", "}\n```\n"),
    CALL.replace("\n{", " ```json {").replace("}\n", "} ``` "),
    CALL.replace("\n", ""),
    CALL.removesuffix("\n</tool_call>"),
    CALL.removesuffix("}\n</tool_call>"),
    CALL.replace('": "g', '" :  "g').replace('": {', '"\n:{'),
]
SAID = [  # what is no call for sure is shown as it came
    '<tool_call>\n{"arguments": {"city": "Paris"}, "nom": "get_weather"}\n</tool_call>',
    '<tool_call>\n{"name": "get_weather", "arguments": "{}"}\n</tool_call>',
    f'<tool_call>\n{{"type": "function", "function": {{{ONE}}}}}\n</tool_call>',
    f"<tool_call>\n[{{{ONE}}}]\n</tool_call>",
    f"<tool_call>\n{{{ONE}}}\n</tool_call>".replace('"', "'"),
    f"```json\n{{{ONE}}}\n```",
]


@pytest.mark.parametrize("text", SLIPS)
def test_harmless_slips_are_read(text):
    assert parsed("Look. " + text) == [Said("Look."), *PARIS]


@pytest.mark.parametrize("text", SAID)
def test_what_may_be_no_call_is_said(text):
    assert joined(parsed("Look. " + text)) == Answer(None, "Look. " + text, [])


NOTE = Toolbox((Tool("note", {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}),))
VALUES = [  # of `a`, which hold what ends values and calls, and marks
    "Close {end} and {tail} and {open}c{close} here.",
    "{end} at first",
    "two {end}{end}",
    "{marker}",
    "<![CDATA[ {end} ]",
]


@pytest.mark.parametrize(
    "name", [n for n, form in KNOWN.items() if isinstance(form.tools.arguments, Tagged) and n != "minimax_m3"]
)
@pytest.mark.parametrize("value", VALUES)
def test_what_ends_a_value_ends_it_only_where_the_call_goes_on(name, value):
    form, tagged = KNOWN[name], KNOWN[name].tools.arguments
    parts = {"open": tagged.open, "close": tagged.close, "end": tagged.end, "tail": form.tools.call[-1].split("\n")[0]}
    value = value.format(marker=form.tools.marker, **{part: text.strip() for part, text in parts.items()})
    text = written(form.tools, [ToolCall("note", json.dumps({"a": value, "b": "x"}))])
    answer = joined(parsed(text[len(form.prompted) :], form, toolbox=NOTE))
    assert [json.loads(call.arguments) for call in answer.calls] == [{"a": value, "b": "x"}]


@pytest.mark.parametrize(
    "name", ["qwen3_coder", "glm45", "glm47", "deepseek_v32", "deepseek_v41", "minimax_m2", "seed_oss"]
)
@pytest.mark.parametrize("missing", ["a", "b"])
def test_a_value_whose_end_is_missing_ends_with_the_next_or_the_call(name, missing):
    form = KNOWN[name]
    text = written(form.tools, [ToolCall("note", '{"a": "one", "b": "two"}')])
    end = form.tools.arguments.end
    first, second, rest = text.split(end)
    lead = end[: len(end) - len(end.lstrip())] or "\n" * (name == "glm45")
    text = f"{first}{lead}{second}{end}{rest}" if missing == "a" else f"{first}{end}{second}{lead}{rest}"
    answer = joined(parsed(text, form, toolbox=NOTE))
    assert [json.loads(call.arguments) for call in answer.calls] == [{"a": "one", "b": "two"}]
    assert missing == "a" or not joined(parsed(text, form, toolbox=NOTE, cut=True)).called


@pytest.mark.parametrize(
    "name, text, calls, content",
    [
        ("qwen3_coder", "Hm <function=f>\n<parameter=a>\nx\n</parameter>\n</function>", 1, "Hm"),
        ("qwen3_coder", "The <function=other>\n<parameter=a>\nx\n</parameter>\n</function>", 0, None),
        ("qwen3_coder", "The tag <function=f> opens", 0, None),
        ("kimi_k2", "A <|tool_calls_section_begin|><|tool_calls_section_end|> b", 0, "A b"),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|>so<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}",
            1,
            "",
        ),
        ("kimi_k2", "A <|tool_calls_section_begin|> so", 0, None),
        (
            "deepseek_v4",
            '<｜DSML｜tool_calls><｜DSML｜invoke name="f"/><｜DSML｜invoke name="f"/></｜DSML｜tool_calls>',
            2,
            "",
        ),
        ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>', 1, ""),
        ("gpt_oss", "<|channel|>commentary to=python <|constrain|>code<|message|>1<|call|>", 1, ""),
        ("gpt_oss", " to=functions.f<|channel|>analysis json<|message|>{}<|call|>", 1, ""),
        ("gpt_oss", "<|channel|>analysis to=functions.f<|constrain|>json<|message|>{}", 1, ""),
        ("llama3_json", '<|python_tag|>{"type": "function", "name": "f", "arguments": {}}', 1, ""),
    ],
)
def test_slips_of_families(name, text, calls, content):
    answer = joined(parsed(text, KNOWN[name]))
    assert (len(answer.calls), answer.content) == (calls, text if content is None else content)


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("gemma4", "a CALL b", "a  b"),
        ("gemma4", "aCALLb", "ab"),
        ("gemma4", "a\nCALLb", "a\nb"),
        ("gemma4", "a CALL\n\nb", "a \nb"),
        ("gemma4", " CALL b", "b"),
        ("gemma4", "a CALL CALL b", "a  b"),
        ("hermes", "a CALL b", "a b"),
        ("hermes", "a\n\nCALL\nb", "a\nb"),
    ],
)
def test_what_is_said_around_calls_is_as_it_came_but_for_lines(name, text, said):
    call = written(KNOWN[name].tools, [ToolCall("f", "{}")])
    assert joined(parsed(text.replace("CALL", call), KNOWN[name])).content == said


def test_what_is_said_at_once_is_no_reasoning_though_the_prompt_has_opened_it():
    text = "<|open|>response<|sep|>Hi<|close|>response<|sep|>"
    assert parsed(text, KNOWN["kimi_k3"], thinking=Thinking.OPEN) == [Said("Hi")]


def test_a_call_that_the_limit_cuts_off_before_it_is_closed_is_not_complete():
    text = CALL.removesuffix("}\n</tool_call>")
    assert [read(HERMES_CHAT, BOX, Thinking.NONE, text, cut).called for cut in (True, False)] == [False, True]


def test_a_format_without_a_mark_is_read_as_it_is_alone():
    """Its calls look like an answer in JSON."""
    call = ('{"name": "', Slot.NAME, '", "parameters": ', Slot.ARGUMENTS, "}")
    alone = ChatFormat(replace(HERMES, call=call, marker='{"name": "', alone=True, most=1))
    assert read(alone, BOX, Thinking.NONE, f"{{{ONE}}}").content == f"{{{ONE}}}"


def test_a_list_that_is_another_spelling_holds_any_number_of_calls():
    call = ('[TOOL_CALLS][{"name": "', Slot.NAME, '", "arguments": ', Slot.ARGUMENTS, "}]")
    format = ChatFormat(replace(FORMATS["named"].tools, spellings=(call,)))
    one = '{"name": "f", "arguments": {"a": 1}}'
    for text in (
        f"[TOOL_CALLS][{one}]",
        f"[TOOL_CALLS] [{one}, {one}, {one}]\n",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{"a": 1}',
    ):
        answer = read(format, BOX, Thinking.NONE, text)
        assert (answer.content, set(answer.calls)) == ("", {ToolCall("f", '{"a": 1}')})
        assert len(answer.calls) == text.count("f[") + text.count('"f"')


def test_an_answer_in_json_is_no_call_of_a_format_without_a_marker():
    call = ('{"name": "', Slot.NAME, '", "arguments": ', Slot.ARGUMENTS, "}")
    format = ChatFormat(replace(FORMATS["alone"].tools, marker='{"name"', spellings=(call,)))
    for text in ('{"name": "Bob", "arguments": {"a": 1}}', 'So: {"name": "f", "arguments": {}}'):
        assert parsed(text, format) == [Said(text)]
    assert len(read(format, BOX, Thinking.NONE, '{"name": "f", "arguments": {"a": 1}}').calls) == 1


# ---- reasoning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "thinking", "events"),
    [
        ("<think>\nhm \n</think>\n\nHi", Thinking.MAY, [Reasoned("hm"), Said("Hi")]),
        ("\nhm\n</think>\n\nHi", Thinking.OPEN, [Reasoned("hm"), Said("Hi")]),
        ("<think>\nhm</think>Hi", Thinking.OPEN, [Reasoned("hm"), Said("Hi")]),
        ("\n</think>\nHi", Thinking.OPEN, [Said("Hi")]),
        ("<think>\n\n</think>\n\nHi", Thinking.MAY, [Said("Hi")]),
        ("</think>\n\nHi", Thinking.MAY, [Said("Hi")]),
        (" Hi", Thinking.MAY, [Said(" Hi")]),
        ("hm", Thinking.OPEN, [Reasoned("hm")]),
        ("a <think> b", Thinking.MAY, [Said("a <think> b")]),
        ("<think>a</think>", Thinking.NONE, [Said("<think>a</think>")]),
        (f"hm</think>\n{CALL}", Thinking.OPEN, [Reasoned("hm"), *PARIS]),
        (f"{CALL}\n<think>\nso</think>\n Hi", Thinking.MAY, [*PARIS, Reasoned("so"), Said("Hi")]),
        (f"maybe {CALL}</think>Hi", Thinking.OPEN, [Reasoned(f"maybe {CALL}"), Said("Hi")]),
        ("<thi", Thinking.MAY, [Said("<thi")]),
    ],
)
def test_reasoning(text, thinking, events):
    assert parsed(text, thinking=thinking) == events


def test_what_belongs_together_is_joined_by_new_lines():
    text = f"One.\n{CALL}\n<think>a</think><think>b\n</think>\nTwo.\n\nThree.\n{CALL}\nFour."
    answer = read(HERMES_CHAT, BOX, Thinking.MAY, text)
    assert (answer.content, answer.reasoning) == ("One.\nTwo.\n\nThree.\nFour.", "a\nb")
    assert [call.arguments for call in answer.calls] == ['{"city": "Paris"}'] * 2


def test_whether_it_reasons_now():
    parser = Parser(ChatFormat(None, THINK), Toolbox(), Thinking.MAY)
    seen = [(parser.feed(text), parser.reasoning)[1] for text in ("\n<thi", "nk>a", "b</thi", "nk>", "c")]
    assert seen == [False, True, True, False, False]
    assert Parser(ChatFormat(None, THINK), Toolbox(), Thinking.OPEN).reasoning


def test_the_beginning_of_the_end_of_reasoning_is_not_given_where_the_answer_is_cut_off():
    assert parsed("hm </thi", thinking=Thinking.OPEN, cut=True) == [Reasoned("hm")]
    assert parsed("hm </thi", thinking=Thinking.OPEN) == [Reasoned("hm </thi")]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Hi", ("So.", "Hi", 0)),
        ("<|channel|>commentary to=functions.f<|message|>{}<|call|>", (None, "", 1)),
        (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", (None, "", 1)),
        ("<|channel|>final<|message|> Hi <|end|>", (None, " Hi", 0)),
        ("Hi", (None, "Hi", 0)),
    ],
)
def test_channels(text, answer):
    parsed(text, CHANNELS)
    got = read(CHANNELS, BOX, Thinking.MAY, text)
    assert (got.reasoning, got.content, len(got.calls)) == answer


@pytest.mark.parametrize(
    "text, said",
    [
        ("<response>Fine.</response>", "Fine."),
        ("<think>Hm.</think>\n<response>Fine.</response>\n", "Fine."),
        ("<response>Fine.</response>\n<tool_call>", "Fine.\n<tool_call>"),
        ("Write <response>ok</response> there.", "Write <response>ok</response> there."),
        ("<think>Hm.</think><response>So: <response>ok</response>, say</response>", "So: <response>ok</response>, say"),
        ("Fine.</response><", "Fine.</response><"),
    ],
)
def test_an_element_around_what_is_said_is_left_out_and_one_within_it_said(text, said):
    parsed(text, ANSWERS)
    assert read(ANSWERS, BOX, Thinking.MAY, text).content == said


def test_a_marker_that_comes_twice_is_read_alike_however_it_is_cut():
    call = ("Action: ", Slot.NAME, "\nAction Input: ", Slot.ARGUMENTS, "\n")
    format = ChatFormat(ToolFormat(call=call, marker="Action:"))
    text = 'Action:Action: get_weather\nAction Input: {"city": "Paris"}\n'
    assert parsed(text, format) == [Said("Action:"), *PARIS]


# ---- any text, cut anywhere ------------------------------------------------------------------------------------------


def text_with_markers(random, format):
    """Pieces of calls that were written in the format, of its markers, and of other texts."""
    whole = written(format.tools, calls_of(random))
    marks = [format.tools.marker, format.tools.end, "<think>", "</think>", *format.silent, format.before_said]
    out = []
    for _ in range(random.randrange(1, 6)):
        one = random.choice(
            [whole, whole, random.choice(marks), text_of(random), random.choice([" ", "\n\n", "<", '"', "}"])]
        )
        start = random.choice([0, 0, 0, random.randrange(len(one) + 1)])
        out.append(one[start : random.choice([len(one), len(one), random.randrange(len(one) + 1)])])
    return "".join(out)


def check_cuts(name, seed, texts, cuts):
    """The events of texts that are cut: `texts` times `cuts` times."""
    random = Random(f"{name} {seed}")
    format = FORMATS[name]
    for _ in range(texts):
        text = text_with_markers(random, format)
        thinking, end = random.choice(list(Thinking)), random.random() < 0.5
        whole = events_of(format, [text], thinking=thinking, cut=end)
        check_whole(whole)
        if not end and thinking is not Thinking.OPEN:
            check_said(format, text, whole)
        for _ in range(cuts):
            pieces = pieces_of(random, text, random.choice([1, 2, 5, len(text)]))
            assert events_of(format, pieces, thinking=thinking, cut=end) == whole, (text, pieces)


def check_said(format, text, events):
    """What is neither reasoning nor a call is said exactly."""
    if all(isinstance(event, Said) for event in events) and not (format.silent or format.before_said):
        marks = ("<think>", "</think>", format.tools.begin.strip() + format.tools.end.strip() or "<think>")
        assert any(mark in text for mark in marks) or "".join(event.text for event in events) == text


def check_whole(events):
    """Calls come one after the other, and the arguments of complete ones are objects."""
    numbers = [event.number for event in events if isinstance(event, CallBegun)]
    assert numbers == list(range(len(numbers))) == [event.number for event in events if isinstance(event, CallEnded)]
    for call in joined(events).calls:
        assert not call.complete or isinstance(json.loads(call.arguments), dict)


@every_format
def test_a_text_cut_anywhere_gives_the_same(name):
    check_cuts(name, 0, texts=20, cuts=3)  # a thousand of all formats


@pytest.mark.slow
@every_format
def test_any_text_cut_anywhere_gives_the_same(name):
    check_cuts(name, 1, texts=1200, cuts=5)  # a hundred thousand of all formats


@every_format
def test_calls_that_were_written_are_read(name):
    random, format = Random(name), FORMATS[name]
    for _ in range(25):
        calls = calls_of(random)
        text = written(format.tools, calls).removeprefix(format.prompted)
        answer = read(format, toolbox_of(calls), Thinking.NONE, text)
        assert (answer.reasoning, answer.content) == (None, "")
        assert [(c.name, json.loads(c.arguments), c.complete) for c in answer.calls] == [
            (c.name, json.loads(c.arguments), True) for c in calls
        ], text


@every_format
def test_calls_behind_what_is_said_are_read_letter_by_letter(name):
    random, format = Random(name), FORMATS[name]
    calls = calls_of(random, 3)
    said = "" if format.tools.alone else "你 say <"
    text = said + written(format.tools, calls).removeprefix("" if said else format.prompted)
    events = events_of(format, text, toolbox_of(calls), Thinking.NONE)
    answer = joined(events)
    assert (answer.content, [c.name for c in answer.calls]) == (said, [c.name for c in calls])


def test_ids_are_those_of_the_text():
    calls = calls_of(Random(0), 2)
    assert [
        call.id
        for call in read(FORMATS["id first"], BOX, Thinking.NONE, written(FORMATS["id first"].tools, calls)).calls
    ] == [call.id for call in calls]


def test_every_character_of_a_string_comes_back():
    calls = [ToolCall("get_weather", json.dumps({"city": FULL + "x"}))]
    for name, format in FORMATS.items():
        answer = read(format, BOX, Thinking.NONE, written(format.tools, calls).removeprefix(format.prompted))
        assert [json.loads(call.arguments) for call in answer.calls] == [{"city": FULL + "x"}], name
    assert HERMES.marker == "<tool_call>"
