"""Which answers the grammars of tool calls allow: walked by texts, and drawn at random and read again."""

import json
import random
import re
import time
from types import SimpleNamespace

import pytest

from hibachi.engine.guide.protocol import Grammar
from hibachi.engine.guide.worker import FREE
from hibachi.errors import InvalidRequest
from hibachi.llm.chatformat.format import PLAIN, THINK, ChatFormat, Thinking
from hibachi.llm.chatformat.grammar import answer as answers
from hibachi.llm.chatformat.grammar.answer import checked_form, served_form, unchecked_form
from hibachi.llm.chatformat.marks import texts
from hibachi.llm.chatformat.reading.parser import Parser
from hibachi.llm.chatformat.reading.reader import AnswerReader
from hibachi.llm.chatformat.reading.whole import joined
from hibachi.llm.chatformat.templates.known import KNOWN
from hibachi.llm.chatformat.tools import Tool, Toolbox, ToolCall
from hibachi.llm.chatformat.write import written
from hibachi.structured import StructuredOutputs

from ..guide import made
from . import made as given
from .formats import CODE, FORMATS, NOW, PROMPTED, REASONING, WEATHER, chat
from .grammars import END_IDS, IDS, SPECIAL_IDS, Read, drawn, grammar, guide_of, ids, setting, special, walked


def paris(tools, prompted):
    """A call of WEATHER without its end, behind the text that leads to it; and what makes it whole."""
    text = written(tools, [ToolCall("get_weather", '{"city": "Paris", "days": 3}', "a1B2c3D4e")])
    begun, last, rest = text.strip().removeprefix(prompted).partition("3")
    return begun + last, rest.removesuffix("<|over|>")


PARIS = {name: paris(tools, PROMPTED.get(name, "")) for name, tools in FORMATS.items()}
CHOSEN = (WEATHER, NOW)


def call(name):
    return "".join(PARIS[name])


@pytest.mark.parametrize("name", FORMATS)
class TestRequired:
    def test_a_call_comes_and_ends(self, name):
        begun, rest = PARIS[name]
        assert walked(grammar(name, tools=CHOSEN), begun) == "goes on"
        assert walked(grammar(name, tools=CHOSEN), begun + rest) == "ends"
        read = Read(name, begun + rest)
        read.check()
        assert [[n, json.loads(a)] for n, a in read.calls] == [["get_weather", {"city": "Paris", "days": 3}]]

    def test_text_does_not(self, name):
        for text in ("Hello", "I call " + call(name)):
            assert walked(grammar(name, tools=CHOSEN), text).startswith("refused")

    def test_nor_the_end(self, name):
        assert walked(grammar(name, tools=CHOSEN), "") == "goes on"

    def test_nor_another_name(self, name):
        found = grammar(name, tools=CHOSEN)
        assert walked(found, call(name).replace("get_weather", "get_weathers")).startswith("refused: s")
        assert walked(found, call(name).replace("get_weather", "code")).startswith("refused: code")
        only = grammar(name, tools=CHOSEN, allowed=frozenset({"now"}))
        assert walked(only, call(name)).startswith("refused: get")

    def test_nor_a_value_beyond_the_schema(self, name):
        found = grammar(name, tools=CHOSEN)
        for old, new, left in (("3", "z", "z"), ("3", "41", "1"), ("Paris", "Parisian", "an")):
            text = walked(found, call(name).replace(old, new, 1))
            assert text.startswith("refused: ") and left in text[:14]

    def test_nor_arguments_without_what_is_required(self, name):
        begun, rest = PARIS[name]
        at = begun.index("city")
        assert walked(grammar(name, tools=CHOSEN), begun[:at] + begun[begun.index("days") :] + rest).startswith(
            "refused: d"
        )

    def test_nor_an_argument_that_the_tool_does_not_have(self, name):
        assert walked(grammar(name, tools=CHOSEN), call(name).replace("days", "dags")).startswith("refused: ")

    def test_one_call_where_none_are_parallel(self, name):
        text = call(name)
        found = grammar(name, tools=CHOSEN, parallel=False)
        assert walked(found, text) == "ends" and guide_ends(found, text)
        if name not in ("alone", "headed"):
            several = grammar(name, tools=CHOSEN)
            assert walked(several, twice(name)) == "ends"
            assert walked(found, twice(name)).startswith("refused")

    def test_without_arguments(self, name):
        found = grammar(name, tools=(Tool("now", {"type": "object", "properties": {}}),))
        for seed in range(3):
            read = Read(name, drawn(found, seed), tools=(NOW,))
            assert read.complete and {a for _, a in read.calls} == {"{}"}, read.calls


def twice(name):
    tools, (begun, rest) = FORMATS[name], PARIS[name]
    whole = begun + rest
    one = whole.removeprefix(tools.begin.lstrip()).removesuffix(tools.end.rstrip())
    return tools.begin.lstrip() + one + tools.between + one + tools.end.rstrip()


def guide_ends(found, text):
    guide = guide_of(found)
    guide.advance(ids(text))
    return guide.complete


@pytest.mark.parametrize("name", FORMATS)
class TestAuto:
    def test_any_text_comes(self, name):
        found = grammar(name, "auto", tools=CHOSEN)
        for text in ("", "Hello é\n", "{1: 'x'} <tool> <|other|> <tool_cal [TOOL_"):
            assert walked(found, text) == "ends"

    def test_from_the_marker_on_calls_do(self, name):
        found = grammar(name, "auto", tools=CHOSEN)
        begun, rest = PARIS[name]
        before = "" if FORMATS[name].alone or name in PROMPTED else "I look. "
        assert walked(found, before + begun) == "goes on"
        assert walked(found, before + begun + rest) == "ends"
        assert walked(found, before + begun.replace("get_weather", "get_time") + rest).startswith("refused: t")
        assert walked(found, before + begun.replace("Paris", "Parisian") + rest).startswith("refused: an")

    def test_text_comes_between_calls_where_each_has_its_marker(self, name):
        tools = FORMATS[name]
        if tools.begin or tools.alone or tools.most == 1:
            pytest.skip("calls of this format come together")
        found = grammar(name, "auto", tools=CHOSEN)
        text = f"One: {call(name)} and two: {call(name)} done."
        assert walked(found, text) == "ends"
        assert walked(grammar(name, "auto", tools=CHOSEN, parallel=False), text).startswith("refused:  and")

    def test_the_marker_that_is_written_out_is_one(self, name):
        """In other tokens than the special one, as who reads the text sees no difference."""
        marker = FORMATS[name].marker.strip().removeprefix(PROMPTED.get(name, ""))
        found = grammar(name, "auto", tools=CHOSEN)
        guide = guide_of(found)
        if name in PROMPTED:
            guide.advance(setting().cut(FORMATS[name].marker))
        else:
            guide.advance(setting().cut(marker))
        assert not guide.may_end


PROSE = [
    "The tag MARK opens it.",
    "Write `MARK`.",
    'The "MARK" tag',
    "It is MARK",
    "Two: 'MARK' ‘MARK’ (MARK)",
    "a MARK\nb",
]


@pytest.mark.parametrize("text", PROSE)
@pytest.mark.parametrize("name", [name for name in FORMATS if not FORMATS[name].alone and name not in PROMPTED])
def test_a_marker_in_prose_is_said(name, text):
    """Written out, behind something else in its line, or right behind a quote that opens; also as one token there."""
    found = grammar(name, "auto", tools=CHOSEN)
    told = text.replace("MARK", FORMATS[name].marker.strip())
    assert walked(found, [*told.encode()]) == "ends" and Read(name, told, "auto").said == told
    if "`" in text or '"' in text:
        assert walked(found, told) == "ends"
    quoted = f"So: `{call(name)}` is one."
    assert walked(found, quoted) == "ends" and Read(name, quoted, "auto").said == quoted
    for lead in ("\n", ' He said "no" '):
        for spell in (call(name), call(name).replace("Paris", "Parisian")):
            became = walked(found, [*(told + lead).encode(), *ids(spell)])
            assert became.startswith("refused: an" if "Parisian" in spell else "ends")
        assert len(Read(name, told + lead + call(name), "auto").calls) == 1


@pytest.mark.parametrize("how", REASONING)
@pytest.mark.parametrize("mode", ["auto", "required"])
class TestReasoning:
    def test_comes_first_and_calls_in_it_are_none(self, mode, how):
        name = "headed" if how == "headed" else "hermes"
        reasoning = REASONING[how]
        opened = grammar(name, mode, Thinking.OPEN, reasoning=reasoning, tools=CHOSEN)
        may = grammar(name, mode, Thinking.MAY, reasoning=reasoning, tools=CHOSEN)
        thought = f"<tool_call> {FORMATS[name].marker}x, hm" + reasoning.end
        full = PROMPTED.get(name, "") + call(name)
        for found, begin in ((opened, ""), (may, reasoning.begin.removeprefix(PROMPTED.get(name, "")))):
            assert walked(found, begin + thought + full) == "ends"
            assert walked(found, begin + thought) == ("ends" if mode == "auto" else "goes on")
            assert walked(found, begin + "so") == ("ends" if mode == "auto" else "goes on")
            assert walked(found, begin + thought + full.replace("Paris", "Parisian")).startswith("refused: an")
        assert walked(may, call(name)) == "ends"
        if mode == "required":
            assert walked(may, "So, " + call(name)).startswith("refused")
            assert walked(opened, call(name)) == "goes on"
            assert walked(opened, thought + "So, " + call(name)).startswith("refused")

    def test_a_form_begins_behind_it(self, mode, how):
        if how == "headed":
            return
        answer = StructuredOutputs(choice=["yes", "no"])
        reasoning = REASONING[how]
        found = grammar("hermes", "none", Thinking.OPEN, answer, reasoning=reasoning, tools=CHOSEN)
        assert walked(found, "yes") == "goes on"
        assert walked(found, f"yes or no?{reasoning.end}\n\nyes") == "ends"
        assert walked(found, f"yes or no?{reasoning.end}maybe").startswith("refused: m")


@pytest.mark.parametrize("how", ["text", "special"])
@pytest.mark.parametrize("name", ["hermes", "tagged", "named", "numbered", "alone"])
class TestFurtherReasoning:
    """Behind other reasoning, and behind calls, as the parser reads it."""

    def tell(self, name, how, text, thinking=Thinking.MAY):
        """What becomes of a text, and the calls that are read."""
        reasoning = REASONING[how]
        text = text.replace("{", reasoning.begin).replace("}", reasoning.end)
        for mark, put in (("CALL", call(name)), ("ODD", call(name).replace("Paris", "Parisian"))):
            text = text.replace(mark, put)
        found = grammar(name, "auto", thinking, reasoning=reasoning, tools=CHOSEN)
        return walked(found, text), len(Read(name, text, "auto", thinking, CHOSEN, reasoning).calls)

    def test_calls_in_it_are_none(self, name, how):
        for thought in ("hm CALL", "hm ODD", ""):
            for end in ("}", "}\n\n", "} So.", ""):
                assert self.tell(name, how, f"{{a}}\n{{{thought}{end}") == ("ends", 0)
                assert self.tell(name, how, f"a}}{{b}}\n\n{{{thought}{end}", Thinking.OPEN) == ("ends", 0)

    def test_behind_it_they_keep_to_their_schemas(self, name, how):
        assert self.tell(name, how, "{a}\n{b ODD}\nCALL") == ("ends", 1)
        became, read = self.tell(name, how, "{a}\n{b ODD}\nODD")
        assert became.startswith("refused: an") and read == 1

    def test_it_comes_behind_calls(self, name, how):
        if self.tell(name, how, "CALL\n\n")[0] != "ends":
            pytest.skip("nothing comes behind calls of this format")
        for end in ("}", "} So.", ""):
            assert self.tell(name, how, f"CALL\n{{b ODD{end}") == ("ends", 1)
        assert self.tell(name, how, "{a}CALL\n{b ODD}\n{ODD}CALL\n{ODD") == ("ends", 2)
        became, read = self.tell(name, how, "CALL\n{b ODD}\nODD")
        assert became.startswith("refused: an") and read == 2

    def test_what_is_said_holds_none(self, name, how):
        """So a call in it is one."""
        if how == "special" or FORMATS[name].alone:
            return  # the mark does not come in what is said, or calls do not
        became, read = self.tell(name, how, "{a}\nSo {b ODD}")
        assert became.startswith("refused: an") and read == 1


@pytest.mark.parametrize("how", ["text", "special"])
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in PROMPTED])
def test_what_the_grammar_takes_for_a_call_the_parser_reads_as_one(name, how):
    """Of marks and calls in any order: calls that break their schemas are refused, but not those in thoughts."""
    rng, reasoning = random.Random(name + how), REASONING[how]
    right, odd = call(name), call(name).replace("Paris", "Parisian")
    for thinking in (Thinking.MAY, Thinking.OPEN):
        found = grammar(name, "auto", thinking, reasoning=reasoning, tools=CHOSEN)
        for _ in range(12):
            pieces = [
                reasoning.begin,
                reasoning.begin,
                reasoning.end,
                reasoning.end,
                right,
                odd,
                "\n",
                "So ",
                "`",
                ' "',
            ]
            text = "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 8)))
            became = walked(found, text)
            read = Read(name, text, "auto", thinking, CHOSEN, reasoning)
            if became == "ends" or became.startswith("refused: an"):
                assert (became != "ends") == any("Parisian" in arguments for _, arguments in read.calls), text


ANSWER = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
ANSWERS = [
    (StructuredOutputs(json=ANSWER), '{"ok": true}', '{"ok": 1}'),
    (StructuredOutputs(json_object=True), '{"a": [1]}', "[1]"),
    (StructuredOutputs(regex="[0-9]{2}/[0-9]"), "12/3", "1a"),
    (StructuredOutputs(choice=["yes", "no"]), "no", "nope"),
    (StructuredOutputs(grammar='start: "a" x | start_not\nx: "start"\nstart_not: "b"'), "astart", "c"),
    (
        StructuredOutputs(
            grammar='root ::= call json-1 | "\\"root ::= %gbnf \\"b" # start\ncall ::= "a" [/"a-c] call?\n'
            'json-1 ::= "LEAD" | "(" json-1 ")"'
        ),
        'aaa/a"(LEAD)',
        "(",
    ),
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("answer", ANSWERS, ids=[f"{answer.kind} {i}" for i, (answer, *_) in enumerate(ANSWERS)])
def test_beside_a_form_a_call_or_the_form_comes(name, answer):
    form, right, wrong = answer
    found = grammar(name, "auto", answer=form, tools=CHOSEN)
    assert walked(found, right) == "ends"
    assert walked(found, wrong).startswith("refused")
    assert walked(found, call(name)) == "ends"
    if (name, form.kind) != ("alone", "json_object"):  # any object is one
        assert walked(found, call(name).replace("Paris", "Parisian")).startswith("refused: an")
    required = grammar(name, "required", answer=form, tools=CHOSEN)
    assert walked(required, call(name)) == "ends"
    assert walked(required, right).startswith("refused")


def test_gbnf_behind_reasoning_and_beside_tools_is_refused_as_by_itself():
    answer = StructuredOutputs(grammar='root ::= "a"+')
    found = grammar("hermes", "none", Thinking.OPEN, answer, reasoning=REASONING["text"])
    assert walked(found, "So b.</think>\n\naa") == "ends"
    assert walked(found, "So b.</think>\n\nb").startswith("refused: b")
    for text, why in (
        ("root ::= (", "it is no GBNF"),
        ("root ::= x", "Rule 'x' not found"),
        ('{"a": "b"}', "got JSON"),
    ):
        with pytest.raises(InvalidRequest, match=rf"^structured_outputs\.grammar: .*{why}"):
            reader = AnswerReader(chat("hermes"), Toolbox(CHOSEN))
            checked_form(reader, StructuredOutputs(grammar=text), special, setting().guides.check)


def test_names_of_a_callers_grammar_may_be_those_of_ours():
    """Whatever ours are called, and words in texts, expressions and tokens stay as they are."""
    bare = grammar("hermes", "auto", answer=StructuredOutputs(grammar='start: "a"'), tools=CHOSEN).text
    names = re.findall(r"(?m)^(\w+)", bare)
    assert {"call_", "LEAD_"} <= {name.rstrip("0123456789") for name in names}
    ours = [name for name in names if name != "start"]
    rules = "".join(f'{name}: "{name}"\n' for name in ours)
    answer = StructuredOutputs(
        grammar=f'start: "a" more <|start|> /start/ // start call_1\nmore: {" ".join(ours)}\n{rules}'
    )
    found = grammar("hermes", "auto", answer=answer, tools=CHOSEN)
    assert walked(found, f"a{''.join(ours)}<|start|>start") == "ends"
    assert walked(found, call("hermes")) == "ends"


def test_a_callers_grammar_cannot_use_our_rules():
    answer = StructuredOutputs(grammar='start: "a" call_1')
    with pytest.raises(InvalidRequest, match="call_1"):
        reader = AnswerReader(chat("hermes"), Toolbox(CHOSEN))
        checked_form(reader, answer, special, setting().guides.check)


def test_where_nothing_is_asked_for_there_is_no_form():
    answer = StructuredOutputs(json_object=True)
    for toolbox in (Toolbox(), Toolbox(CHOSEN, "none")):
        for thinking in Thinking:
            assert (
                unchecked_form(AnswerReader(ChatFormat(FORMATS["hermes"], THINK), toolbox, thinking), None, special)
                is None
            )
        assert unchecked_form(AnswerReader(chat("hermes"), toolbox), answer, special) is answer
    assert unchecked_form(AnswerReader(PLAIN, Toolbox(CHOSEN)), None, special) is None
    with pytest.raises(InvalidRequest, match="not known how the model writes calls"):
        unchecked_form(AnswerReader(PLAIN, Toolbox(CHOSEN, "required")), None, special)
    with pytest.raises(InvalidRequest, match="no tool that may be called"):
        unchecked_form(AnswerReader(chat("hermes"), Toolbox(CHOSEN, "required", frozenset())), None, special)


@pytest.mark.parametrize("name", ["tagged", "keyed"])
def test_no_value_holds_what_is_read_as_another_argument(name):
    """As where the end of a value is missing: the reader takes it for one that has not come."""
    strings = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
    found, tagged = grammar(name, tools=(Tool("note", strings),)), FORMATS[name].arguments
    text = written(FORMATS[name], [ToolCall("note", '{"a": "VALUE"}')]).strip()
    lead, close = tagged.end[: len(tagged.end) - len(tagged.end.lstrip())], tagged.kinds.get("string", tagged.close)
    another = f"x{lead}{tagged.open}NAME{close}y"
    assert walked(found, text.replace("VALUE", f"see {tagged.open} and {tagged.open}c{close}")) == "ends"
    assert walked(found, text.replace("VALUE", another.replace("NAME", "c"))) == "ends"
    assert walked(found, text.replace("VALUE", another.replace("NAME", "b"))).startswith("refused")


NEVER = [
    {"type": "string", "pattern": "^a{3}$", "maxLength": 2},
    {"type": "string", "pattern": "^x", "format": "date"},
    {"type": "string", "format": "date", "maxLength": 5},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 3},
]


@pytest.mark.parametrize("schema", NEVER, ids=lambda schema: str(len(str(schema))))
@pytest.mark.parametrize("name", FORMATS)
def test_an_argument_that_no_value_satisfies_is_refused_by_the_tool(name, schema):
    """Where it must come; where it need not come, the tool is refused or it does not come."""
    bad = {"type": "object", "properties": {"p": schema, "q": {"enum": [1]}}, "additionalProperties": False}
    needed = (NOW, Tool("bad", {**bad, "required": ["p"]}))
    with pytest.raises(InvalidRequest, match=r"^tools\[1\]\.function\.parameters: .*no value satisfies"):
        reader = AnswerReader(chat(name), Toolbox(needed, "required"))
        checked_form(reader, None, special, setting().guides.check, ids=SPECIAL_IDS, ends=END_IDS)
    if name == "nested":
        return  # which cannot say just any object
    reader = AnswerReader(chat(name), Toolbox((Tool("bad", bad),), "auto"))
    found = checked_form(reader, None, special, setting().guides.check, ids=SPECIAL_IDS, ends=END_IDS)
    for seed in range(8):
        drawn(found, seed, (FORMATS[name].marker.strip(),))


def test_a_regex_beside_tools_has_classes_of_ascii():
    found = grammar("hermes", "auto", answer=StructuredOutputs(regex=r"\d\w\s[^\d]"), tools=CHOSEN)
    assert walked(found, "5a ٣") == "ends"
    assert [walked(found, text)[:7] for text in ("٣", "5é", "5a\xa0", "5a 5")] == ["refused"] * 4


@pytest.mark.parametrize("mode", ["required", "auto"])
@pytest.mark.parametrize("name", FORMATS)
def test_random_answers_are_read_as_calls_that_keep_to_their_schemas(name, mode):
    """The soak; `make test` draws a few."""
    reasoning = REASONING["headed" if name == "headed" else "special"]
    marks = (FORMATS[name].marker.strip(), reasoning.begin, reasoning.end)
    ended = 0
    for seed in range(4):
        thinking = (Thinking.NONE, Thinking.MAY, Thinking.OPEN)[seed % 3]
        found = grammar(name, mode, thinking, reasoning=reasoning)
        text = drawn(found, seed, marks if mode == "auto" else ())
        if text is None:
            continue
        ended += 1
        read = Read(name, text, mode, thinking, reasoning=reasoning)
        read.check()
        if mode == "required":
            assert read.calls and not read.said, text
    assert ended


LOOKS_SPECIAL = re.compile(r"<\|[^|<>]*\|>|<｜[^｜<>]*｜>|\[[A-Z_/ ]+\]|\]<\]minimax\[>\[|<\|[a-z_]+>|<[a-z_]+\|>")
CALLED = {name: record for name, record in KNOWN.items() if record.tools is not None}


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", CALLED)
def test_what_every_known_format_writes_may_come(name, as_tokens):
    """Its marks are special tokens of the model, or text."""
    record = CALLED[name]
    names = sorted({m for text in texts(record) for m in LOOKS_SPECIAL.findall(text)}) if as_tokens else []
    end = 256 + len(names)
    own = made.Setting(made.of_bytes([*(n.encode() for n in names), b"<eos>"], special=range(256, end), ends=(end,)))
    find = re.compile(f"({'|'.join(map(re.escape, names))})") if names else re.compile("(\0)")

    def cut(text):
        return [256 + names.index(part) if part in names else part for part in find.split(text) if part]

    for mode in ("required", "auto"):
        calls = given.calls_of(random.Random(name + mode), 1 if record.tools.most == 1 else None)
        calls = [ToolCall(c.name, plain(c.arguments), c.id) for c in {c.name: c for c in calls}.values()]
        form_of = unchecked_form(
            AnswerReader(record, given.toolbox_of(calls, mode=mode)),
            None,
            cut,
            ids=range(256, end),
            ends=(end,),
        )
        text = written(record.tools, calls).strip().removeprefix(record.prompted.lstrip())
        guide = own.guides.compile(Grammar(f"{form_of.text}{FREE}"))  # a process that checks would take longer
        guide.advance([i for part in cut(text) for i in ([part] if isinstance(part, int) else part.encode())])
        assert guide.may_end


def plain(arguments):
    """Without characters that a grammar leaves out, and names with blanks, which free objects in XML have not."""
    return arguments.replace("\\u0007", "").replace("long key", "key")


def test_going_back_compiles_nothing(monkeypatch):
    """Also where text was free: proposals and forced tokens are taken back all the time."""
    guide = guide_of(grammar("hermes", "auto", Thinking.MAY, reasoning=THINK))
    monkeypatch.setattr(type(setting().guides), "matcher", lambda *_: pytest.fail("compiled"))
    text = ids("<think>So</think>Hm\n<tool_call>\n")
    for token in text:
        guide.forced(8)
        guide.advance([token])
    assert b"".join(setting().vocabulary.tokens[i] for i in guide.forced(20)[0]).startswith(b'{"name": "')
    guide.take_back(len(text))
    guide.advance(ids("Hello"))
    assert guide.may_end and not guide.complete


# ---- schemas -------------------------------------------------------------------------------------------------------


def refusing(schema, name="hermes", **more):
    tools = (NOW, Tool("bad", schema, **more))
    return lambda mode: checked_form(
        AnswerReader(chat(name), Toolbox(tools, mode)),
        None,
        special,
        setting().guides.check,
        ends=(IDS["<|eos|>"],),
    )


BAD = [
    ({"type": "object", "properties": {"x": {"not": {"type": "string"}}}}, "`not`"),
    ({"type": "object", "properties": {"x": {"type": "strin"}}}, "`type`"),
    ({"type": "object", "properties": {"x": {"$ref": "#/$defs/nowhere"}}}, "`\\$ref`"),
    ({"type": "array"}, "its `type` must be"),
    ({"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)"}}}, "`pattern`"),
    ({"type": "object", "properties": {"x": {}, "y": {}}, "minProperties": 1}, "(`minP|min/maxP)roperties"),
]


@pytest.mark.parametrize("name", ["hermes", "tagged", "python", "quoted"])
@pytest.mark.parametrize("schema, why", BAD)
def test_a_schema_that_cannot_be_done_is_refused_by_the_name_of_its_tool(name, schema, why):
    with pytest.raises(InvalidRequest, match=rf"^tools\[1\]\.function\.parameters: .*{why}.*\.$"):
        refusing(schema, name)("required")
    with pytest.raises(InvalidRequest, match=r"^tools\[1\]\.function\.parameters: "):
        refusing(schema, name, strict=True)("auto")


@pytest.mark.parametrize(
    "name, schema, why",
    [
        *((name, {"type": "string", "pattern": 3}, "`pattern`") for name in ("tagged", "python", "quoted")),
        ("quoted", {"enum": ['a<|"|>b']}, 'a text with <|"|>, which the model cannot write'),
    ],
)
def test_a_value_that_the_notation_cannot_say_is_refused(name, schema, why):
    with pytest.raises(InvalidRequest) as caught:
        refusing({"type": "object", "properties": {"x": schema}}, name)("required")
    assert str(caught.value).startswith("tools[1].function.parameters: ") and why in str(caught.value)


@pytest.mark.parametrize("name", ["hermes", "tagged", "python", "quoted"])
def test_where_the_model_may_choose_such_a_tool_takes_any_object(name):
    found = refusing(BAD[0][0], name)("auto")
    texts = {
        "hermes": '<tool_call>\n{"name": "bad", "arguments": {"y": [1]}}\n</tool_call>',
        "tagged": "<tool_call>\n<function=bad>\n<parameter=y>\n[1]\n</parameter>\n</function>\n</tool_call>",
        "python": "<|calls|>[bad(y=[1])]<|/calls|>",
        "quoted": "<|call|>call:bad{y:[1]}<|/call|>",
    }
    assert walked(found, texts[name]) == "ends"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_it_takes_no_longer_than_this_to_find_out_whose_schema_is_refused(mode, monkeypatch):
    asked, now = [], [0.0]

    def slow(found):
        asked.append(found.kind)
        now[0] += 3
        if found.kind != "json_object" and len(asked) < 40:
            raise InvalidRequest.at(("structured_outputs", "grammar"), ": it is too complex.")

    monkeypatch.setattr(answers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    box = Toolbox(tuple(Tool(f"t{i}", {"type": "object"}) for i in range(30)), mode)
    more = {"special": special, "check": slow, "ends": (IDS["<|eos|>"],)}
    if mode == "auto":
        assert served_form(AnswerReader(chat("hermes"), box), None, **more) is None
    else:
        with pytest.raises(InvalidRequest, match=r"^tools: their schemas are too complex: checking"):
            served_form(AnswerReader(chat("hermes"), box), None, **more)
    assert 4 <= len(asked) <= 6


def test_a_form_beside_tools_is_refused_as_such():
    with pytest.raises(InvalidRequest, match=r"^structured_outputs\.json: the keyword `not`"):
        answer = StructuredOutputs(json={"not": {}})
        checked_form(AnswerReader(chat("hermes"), Toolbox(CHOSEN)), answer, special, setting().guides.check)


def test_formats_that_say_nothing_and_references_work_in_properties():
    tool = Tool(
        "t",
        {
            "type": "object",
            "properties": {
                "path": {"type": "string", "format": "path", "maxLength": 2},
                "tree": {"$ref": "#/properties/node"},
                "node": {
                    "type": "object",
                    "properties": {"next": {"anyOf": [{"$ref": "#/properties/node"}, {"type": "null"}]}},
                    "additionalProperties": False,
                },
            },
            "required": ["tree"],
        },
    )
    texts = {
        "hermes": '<tool_call>\n{"name": "t", "arguments": {"tree": {"next": {"next": null}}}}\n</tool_call>',
        "tagged": "<tool_call>\n<function=t>\n<parameter=tree>\n"
        '{"next": {"next": null}}\n</parameter>\n</function>\n</tool_call>',
        "python": "<|calls|>[t(tree={'next': {'next': None}})]<|/calls|>",
        "quoted": "<|call|>call:t{tree:{next:{next:null}}}<|/call|>",
    }
    for name, text in texts.items():
        found = grammar(name, tools=(tool,))
        assert walked(found, text) == "ends", name
        wrong = text.replace("null", "1").replace("None", "1")
        assert walked(found, wrong).startswith("refused: 1"), name


@pytest.mark.parametrize(
    "schema, right, wrong",
    [
        ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, "{'a': 1}", "1"),
        ({"items": {"type": "integer"}}, "[1]", "{"),
        ({"maxLength": 2}, "'ab'", "1"),
        ({"minimum": 1}, "2", "'a'"),
    ],
)
def test_a_schema_without_a_type_has_the_one_that_its_keywords_are_about(schema, right, wrong):
    tool = Tool("t", {"type": "object", "properties": {"x": schema}, "required": ["x"]})
    found = grammar("python", tools=(tool,))
    assert walked(found, f"<|calls|>[t(x={right})]<|/calls|>") == "ends"
    assert walked(found, f"<|calls|>[t(x={wrong})]<|/calls|>").startswith("refused: " + wrong[0])


@pytest.mark.parametrize("name", ["hermes", "python"])
def test_what_is_required_may_be_no_property(name):
    texts = {
        "hermes": '<tool_call>\n{"name": "t", "arguments": {%s}}\n</tool_call>',
        "python": "<|calls|>[t(%s)]<|/calls|>",
    }
    found = grammar(name, tools=(Tool("t", {"properties": {"a": {"type": "null"}}, "required": ["b"]}),))
    given = {"hermes": '"b": 1', "python": "b=1"}[name]
    assert walked(found, texts[name] % given) == "ends" and walked(found, texts[name] % "").startswith("refused")


@pytest.mark.parametrize("name", ["hermes", "python"])
def test_a_property_may_have_any_value_or_none_at_all(name):
    texts = {
        "hermes": '<tool_call>\n{"name": "t", "arguments": {%s}}\n</tool_call>',
        "python": "<|calls|>[t(%s)]<|/calls|>",
    }
    one, other = {"hermes": ('"a": [1]', '"b": [1]'), "python": ("a=[1]", "b=[1]")}[name]
    found = grammar(name, tools=(Tool("t", {"properties": {"a": True, "b": False}}),))
    assert walked(found, texts[name] % one) == "ends" and walked(found, texts[name] % other).startswith("refused")


def test_a_marker_may_come_in_any_tokens():
    """`<tool_call>` is a token here, and letters are, too."""
    found, text = grammar("hermes", tools=CHOSEN), call("hermes")
    assert walked(found, text) == walked(found, list(text.encode())) == "ends"
    assert IDS["<tool_call>"] in ids(text)
    assert walked(grammar("hermes", "auto", tools=CHOSEN), list(text.replace("Paris", "Parisian").encode())) != "ends"


def test_many_tools_are_served_or_refused_by_their_size():
    few = [Tool(f"tool_{i}", {}) for i in range(10_000)]
    found = grammar("hermes", "auto", tools=tuple(few))
    assert len(found.text) < 2**19
    text = '<tool_call>\n{"name": "tool_%d", "arguments": {}}\n</tool_call>'
    small = grammar("hermes", tools=tuple(few[:300]))
    assert walked(small, text % 299) == "ends" and walked(small, text % 300).startswith("refused: 0")
    with pytest.raises(InvalidRequest, match=r"tools: .*Send fewer tools"):
        grammar("hermes", tools=tuple(Tool(t.name, {**WEATHER.parameters, "title": t.name}) for t in few))


def test_raw_text_ends_at_what_closes_it_and_nowhere_else():
    found = grammar("tagged", tools=(Tool("t", {"properties": {"x": {"type": "string"}}, "required": ["x"]}),))
    lead = "<tool_call>\n<function=t>\n<parameter=x>\n"
    tail = "\n</parameter>\n</function>\n</tool_call>"
    for value in ("", "a\n\n<b> </parameter", 'say "no" {', "</function>"):
        assert walked(found, lead + value + tail) == "ends"
        read = Read("tagged", lead + value + tail, tools=(Tool("t", {"properties": {"x": {"type": "string"}}}),))
        assert json.loads(read.calls[0][1]) == {"x": value}
    assert walked(found, lead + "a</parameter>b" + tail).startswith("refused")


def test_a_raw_text_does_not_look_like_another_value_that_the_schema_bounds():
    """It would be read as that."""
    either = {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "integer", "maximum": 9}]}
    found = grammar("keyed", tools=(Tool("t", {"properties": {"x": either}, "required": ["x"]}),))
    text = "<tool_call>t\n<arg_key>x</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"
    assert walked(found, text % "ab12") == "ends" and walked(found, text % "12").startswith("refused: 12")
    either = {"type": ["string", "integer", "null"]}
    found = grammar("keyed", tools=(Tool("t", {"properties": {"x": either}, "required": ["x"]}),))
    assert walked(found, text % "12") == walked(found, text % "null") == walked(found, text % "-x") == "ends"


def one(schema, name="x", needed=True):
    return (Tool("t", {"type": "object", "properties": {name: schema}, "required": [name] if needed else []}),)


IN_TAGS = {
    "tagged": "<tool_call>\n<function=t>\n<parameter=x>\n%s\n</parameter>\n</function>\n</tool_call>",
    "keyed": "<tool_call>t\n<arg_key>x</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "cdata": '<function name="t"><param name="x">%s</param></function>',
    "nested": '<|mini|><tool_call>\n<|mini|><invoke name="t"><|mini|><x>%s<|mini|></x>'
    "<|mini|></invoke>\n<|mini|></tool_call>",
}
LISTED = [  # what a value between tags is read as, or None where it may not come
    ("keyed", {"enum": ["true", False]}, {"true": None, "false": False}),
    ("keyed", {"anyOf": [{"type": "string"}, {"const": False}]}, {"true": None, "false": False, "truth": "truth"}),
    ("keyed", {"enum": ["1", "a", 2.5]}, {"1": None, "a": "a", "2.5": 2.5}),
    ("keyed", {"enum": ["1", 2.5]}, {"1": None, "2.5": 2.5}),
    ("keyed", {"enum": ["-1.5", -3]}, {"-1.5": None, "-3": -3}),
    ("keyed", {"anyOf": [{"enum": ["{}"]}, {"type": "object", "required": ["a"]}]}, {"{}": None, '{"a":1}': {"a": 1}}),
    ("tagged", {"enum": ["a", "</parameter>"]}, {"a": "a", "</parameter>": None}),
    ("cdata", {"enum": ["1", "a", 2.5]}, {"1": None, "a": "a", "2.5": 2.5, "<![CDATA[1]]>": "1"}),
    ("cdata", {"enum": ["]]>", "<"]}, {"]]>": "]]>", "<": None, "<![CDATA[<]]>": "<", "<![CDATA[]]>": None}),
    ("cdata", {"enum": ["]]>"]}, {"]]>": "]]>", "<![CDATA[": None}),
    ("keyed", {"type": "string", "pattern": r"^\d\w$"}, {"1a": "1a", "1é": None, "\u0663a": None}),
    ("keyed", {"type": "string", "pattern": r"^[\d-]\W$"}, {"-é": "-é", "-a": None, "\u0663-": None}),
    ("tagged", {"type": "object"}, {'{"a": "</parameter>"}': {"a": "</parameter>"}}),
    ("cdata", {"type": "array"}, {'["]]>","\\\\","</param>"]': ["]]>", "\\", "</param>"]}),
    ("python", {"type": "array", "maxItems": 1}, {"[]": [], "[1]": [1], "[1, 2]": None}),
    ("nested", {"type": "array", "maxItems": 1, "items": {"type": "integer"}}, {"": []}),
    ("nested", {"anyOf": [{"type": "object", "required": ["a"]}, {"type": "array"}]}, {"": None}),
    ("nested", {"anyOf": [{"type": "object", "properties": {}}, {"type": "array", "maxItems": 0}]}, {"": {}}),
]


@pytest.mark.parametrize(("more", "became"), [(True, "ends"), ({}, "ends"), (False, "refused: ")])
def test_a_tool_that_names_no_arguments_may_allow_any(more, became):
    schema = {"type": "object", "properties": {}, "additionalProperties": more}
    text = walked(grammar("named", tools=(Tool("t", schema),)), '[TOOL_CALLS]t[ARGS]{"a": 1}')
    assert text.startswith(became)


@pytest.mark.parametrize(("name", "schema", "values"), LISTED)
def test_what_is_listed_comes_where_it_is_read_as_what_it_is(name, schema, values):
    tools = one(schema)
    found = grammar(name, tools=tools)
    setting().check(grammar=found.text)  # there is a way on
    around = IN_TAGS.get(name, "<|calls|>[t(x=%s)]<|/calls|>")
    for text, value in values.items():
        became = walked(found, around % text)
        assert became == "ends" if value is not None else became != "ends", (text, became)
        if value is not None:
            for pieces in ([around % text], around % text):
                parser = Parser(chat(name), Toolbox(tools, "required"), Thinking.NONE)
                events = [event for piece in pieces for event in parser.feed(piece)] + parser.end()
                [call] = joined(events).calls
                assert call.complete and json.loads(call.arguments) == {"x": value}


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        ("tagged", "a>b"),
        ("tagged", " a"),
        ("cdata", 'a">'),
        ("cdata", ""),
        ("python", "a b"),
        ("python", "a'"),
        ("tagged", "k" * 256),
        ("typed", "k" * 300),
    ],
)
def test_names_that_would_be_read_as_others_do_not_come(name, odd):
    optional = grammar(name, tools=one({"type": "integer"}, odd, needed=False))
    assert {a for _, a in Read(name, drawn(optional, 1), tools=one({}, odd, needed=False)).calls} == {"{}"}
    with pytest.raises(InvalidRequest, match=r"^tools\[0\].function.parameters: .* in `required` is no name"):
        grammar(name, tools=one({"type": "integer"}, odd))


@pytest.mark.parametrize("name", ["tagged", "typed", "cdata", "keyed"])
def test_the_longest_name_that_comes_is_read(name):
    tools = one({"type": "integer", "maximum": 9, "minimum": 0}, "k" * 255)
    read = Read(name, drawn(grammar(name, tools=tools), 1, most=3000), tools=tools)
    read.check()
    assert read.calls


@pytest.mark.parametrize("known", [("ns:do",), ("ns:do", "ns"), ("ns", "ns:do:it", "ns:do")])
def test_the_name_of_a_tool_may_hold_what_stands_behind_names(known):
    tools = tuple(Tool(name, {"type": "object"}) for name in known)
    for name in known:
        text = f"<|calls|><|call|>functions.{name}:0<|args|>{{}}<|/call|><|/calls|>"
        assert walked(grammar("numbered", tools=tools), text) == "ends"
        for pieces in ([text], text):
            parser = Parser(chat("numbered"), Toolbox(tools, "required"), Thinking.NONE)
            events = [event for piece in pieces for event in parser.feed(piece)] + parser.end()
            assert [(call.name, call.complete) for call in joined(events).calls] == [(name, True)]


def test_the_pattern_of_a_raw_text_may_stand_anywhere_unless_it_says_so():
    for pattern, right, wrong in (("b|^c", "abc", "ac"), ("^a/b$", "a/b", "a/bc"), (r"^[|\]]\|$", "||", "|")):
        tool = Tool("t", {"properties": {"x": {"type": "string", "pattern": pattern}}, "required": ["x"]})
        found = grammar("keyed", tools=(tool,))
        text = "<tool_call>t\n<arg_key>x</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"
        assert walked(found, text % right) == "ends"
        assert walked(found, text % wrong).startswith("refused")


def test_an_answer_ends_where_the_format_writes_an_end_token():
    """`<|over|>` ends an answer, so it comes as such, and no further call does."""
    found = grammar("headed", "auto", tools=(CODE, NOW))
    guide = guide_of(found)
    guide.advance(ids(" to=functions.now<|channel|>commentary json<|message|>{}"))
    assert guide.complete and setting().allowed(guide) == {IDS["<|over|>"], IDS["<|eos|>"]}


class TestTheMarkerIsInThePrompt:
    """Functionary's prompt ends with the text that both a call and what is said begin with."""

    def tell(self, text, mode="auto", tools=CHOSEN, **more):
        reader = AnswerReader(KNOWN["functionary_v32"], Toolbox(tools, mode, **more), Thinking.NONE)
        return walked(unchecked_form(reader, None, special, ids=IDS.values(), ends=()), text)

    def test_the_first_call_keeps_to_its_schema_as_later_ones_do(self):
        good, odd = (f'get_weather\n{{"city": "{city}", "days": 3}}' for city in ("Paris", "Parisian"))
        for before in ("", f"{good}>>>", "all\nI look.>>>"):
            assert self.tell(before + good) == "ends"
            assert self.tell(before + odd).startswith("refused: an")
            assert self.tell(before + "get_time\n{}").startswith("refused: t")
        assert self.tell(f"{good}>>>{good}", parallel=False).startswith("refused: >>>")

    def test_what_is_said_begins_as_it_was_trained_to(self):
        assert self.tell("all\nHello >> you") == "ends"
        assert self.tell("Hello").startswith("refused") and self.tell("") == "goes on"
        assert self.tell("all\nHello", "required").startswith("refused")

    def test_a_tool_may_begin_as_what_is_said_does(self):
        named = tuple(Tool(name, {"type": "object", "properties": {}}) for name in ("all_of_it", "all"))
        assert self.tell("all_of_it\n{}", tools=named[:1]) == self.tell("all\nHello", tools=named[:1]) == "ends"
        assert self.tell("all\nHello", tools=named) == "ends"


@pytest.mark.parametrize("name", ["hermes", "tagged", "python", "quoted", "nested"])
def test_schemas_that_grow_without_end_are_bounded(name):
    """Each object names the next one several times, or itself; or `anyOf` holds itself."""
    many = {
        f"d{i}": {"type": "object", "properties": {f"p{k}": {"$ref": f"#/$defs/d{i + 1}"} for k in range(8)}}
        for i in range(40)
    }
    many["d40"] = {"type": "integer"}
    itself = {"type": "object", "properties": {f"p{k}": {"$ref": "#/$defs/x"} for k in range(8)}}
    for schema in (
        {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": many},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": itself}},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}] * 3}}},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"allOf": [{"$ref": "#/$defs/x"}]}}},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
        {"$ref": "#"},
    ):
        began = time.process_time()
        try:
            found = grammar(name, tools=(Tool("t", schema),))
            assert len(found.text) < 2**18
        except InvalidRequest as e:
            assert str(e).startswith("tools[0].function.parameters: ")
        assert time.process_time() - began < 1
