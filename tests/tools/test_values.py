"""Arguments in each dialect, made JSON."""

import json

import pytest

from hibachi.errors import InvalidRequest
from hibachi.llm.chatformat.format import Tagged
from hibachi.llm.chatformat.reading.schema_types import ALL, Typed, value_of
from hibachi.llm.chatformat.reading.tagged import TaggedArguments
from hibachi.llm.chatformat.reading.values import JSON, PYTHON, ValueRules, Values
from hibachi.llm.chatformat.tools import ToolCall
from hibachi.llm.chatformat.write import written

from .made import FORMATS

QUOTED = ValueRules(('<|"|>', '"'), None, named=True)
PARAMETERS = Tagged("<parameter=", ">\n", "\n</parameter>\n")


def fed(reader, pieces):
    """The JSON text, whether the arguments ended, and what was not read."""
    out = ""
    for piece in pieces:
        if reader.done or reader.broken:
            reader.rest += piece
        else:
            out += reader.feed(piece)
    return out, reader.done, reader.rest


def whole_and_by_letters(make, text):
    whole = fed(make(), [text])
    assert fed(make(), text) == whole
    return whole


def values(rules, text):
    return whole_and_by_letters(lambda: Values(rules), text)


def tagged(form, text, schema, tail="</function>"):
    def make():
        return TaggedArguments(form, tail, Typed(schema))

    out, done, rest = whole_and_by_letters(make, text)
    assert done, text
    assert rest.lstrip().startswith(tail)
    reader = make()
    reader.feed(text)
    return json.loads(out + reader.closing)


@pytest.mark.parametrize(
    "text",
    ['{"a" : [1, -2.50e+7, true, null, {}] ,\n "b\\u00e9\\\\": "x\\n\\"{"}', "{}", "{ }", '{"a": {"b": {"c": []}}}'],
)
def test_json_is_given_on_as_it_comes(text):
    assert values(JSON, text + "}\nrest") == (text, True, "}\nrest")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": "two\nlines\t"}', {"a": "two\nlines\t"}),
        (r'{"a": "it\'s"}', {"a": "it's"}),
        (r'{"a": "C:\dir \u12"}', {"a": "C:\\dir \\u12"}),
    ],
)
def test_strings_that_are_nearly_json_are_mended(text, value):
    out, done, _ = values(JSON, text)
    assert (done, json.loads(out)) == (True, value)


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "[]",
        "{,}",
        '{"a"}',
        '{"a": }',
        '{"a": 1,}',
        '{"a": 01}',
        '{"a": tru}',
        '{"a": NaN}',
        '{"a": 1 2}',
        '{"a": [}',
        "{'a': 1}",
    ],
)
def test_what_is_no_json_is_not_taken_for_some(text):
    assert not values(JSON, text + " ")[1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        ("a=1", {"a": 1}),
        ("city='Paris', days=3,", {"city": "Paris", "days": 3}),
        (
            "b=[1, None, True, False], c={'k': (1, 2,), 3: \"x\"}",
            {"b": [1, None, True, False], "c": {"k": [1, 2], "3": "x"}},
        ),
        (
            "a=1_000, b=0x1f, c=.5, d=-1e3, e=true, f=null",
            {"a": 1000, "b": 31, "c": 0.5, "d": -1000.0, "e": True, "f": None},
        ),
        (r"a='\x41\u00e9\U0001F600\101\7\n\'\"\\\d', b=''", {"a": "Aé😀A\7\n'\"\\\\d", "b": ""}),
        ("a='''it's\n'x' ''', b=\"\"", {"a": "it's\n'x' ", "b": ""}),
        ("a='it's', b='x'y'", {"a": "it's", "b": "x'y"}),
        ("a=[[], {}], b = ')'", {"a": [[], {}], "b": ")"}),
    ],
)
def test_keywords_of_python(text, value):
    out, done, rest = values(PYTHON, text + ")]")
    assert (done, rest, json.loads(out)) == (True, ")]", value)


@pytest.mark.parametrize(
    "text", ["3)", "a=b c)", "a)", "a=1 b=2)", "a=float('nan'))", "a=[1)", "a=f'x')", "a={1})", "a=inf)"]
)
def test_what_is_no_keyword_of_python(text):
    assert not values(PYTHON, text)[1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{}", {}),
        ('{city:<|"|>Pa"r\\is<|<|"|>,n:3}', {"city": 'Pa"r\\is<|', "n": 3}),
        ('{a:[true,<|"|>x<|"|>,null],<|"|>k:k<|"|>:{b:{}}}', {"a": [True, "x", None], "k:k": {"b": {}}}),
        ('{ a : "plain" , }', {"a": "plain"}),
    ],
)
def test_json_with_quotes_of_its_own(text, value):
    out, done, rest = values(QUOTED, text + "<end>")
    assert (done, rest, json.loads(out)) == (True, "<end>", value)


# ---- values that stand between texts of their own --------------------------------------------------------------------


def test_blanks_of_the_format_are_no_part_of_values_and_all_others_are():
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": "string"}, "c": {"type": "string"}}}
    text = "<parameter=a>\n\n x \n\n</parameter>\n<parameter=b></parameter><parameter=c>x</parameter>\n</function>"
    assert tagged(PARAMETERS, text, schema) == {"a": "\n x \n", "b": "", "c": "x"}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "17", "17"),
        ({"type": "integer"}, " 17 ", 17),
        ({"type": "integer"}, "17.0", 17.0),
        ({"type": "integer"}, "17.5", "17.5"),
        ({"type": "integer"}, "many", "many"),
        ({"type": "number"}, "17", 17),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({"type": "array"}, "['a', None]", ["a", None]),
        ({"type": "object"}, "{'a': \"it's\"}", {"a": "it's"}),
        ({"type": "object"}, "{broken", "{broken"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "nothing", "nothing"),
        ({"type": ["string", "integer"]}, "17", 17),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "{}", "{}"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"$ref": "#/$defs/n"}, "17", 17),
        ({"$ref": "#/$defs/loop"}, "17", 17),
        ({"$ref": "#/$defs/either/anyOf/1"}, "17", "17"),
        ({"$ref": "other.json#/$defs/word"}, "17", 17),
        ({"allOf": [{"$ref": "#/$defs/n"}, {"minimum": 3}]}, "17", 17),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({}, "17", 17),
        ({}, '"x"', '"x"'),
        ({}, "None", "None"),
        ({}, "NaN", "NaN"),
        ({}, "", ""),
        ({}, "text\nof lines", "text\nof lines"),
        ({}, "      [1, 2]", [1, 2]),
        ({}, "false  ", False),
        ({}, "false  x", "false  x"),
        (True, "true", True),
        ({"type": "string", "enum": "broken"}, "17", "17"),
        ({"type": 3, "anyOf": 3, "$ref": 3, "enum": []}, "17", 17),
    ],
)
def test_the_schema_says_what_a_value_is(schema, text, value):
    kinds = {
        "n": {"type": "integer"},
        "word": {"type": "string"},
        "loop": {"$ref": "#/$defs/loop"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    }
    root = {"$defs": kinds, "properties": {"a": schema}}
    got = tagged(PARAMETERS, f"<parameter=a>\n{text}\n</parameter>\n</function>", root)
    assert got == {"a": value}
    assert type(got["a"]) is type(value)


def test_a_property_may_be_of_a_form_that_the_schema_refers_to():
    schema = {
        "$ref": "#/$defs/x",
        "$defs": {"x": {"properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "string"}}},
    }
    text = "<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>"
    assert tagged(PARAMETERS, text, schema) == {"a": "1", "b": "2"}


def test_strings_come_in_pieces_and_other_values_whole():
    reader = TaggedArguments(
        PARAMETERS, "</function>", Typed({"properties": {"a": {"type": "string"}, "b": {"type": "array"}}})
    )
    pieces = [
        "<parameter=a>\nPar",
        'is"',
        " </p",
        "\n</parameter>\n<parameter=b>\n[1,",
        " 2]",
        "\n</parameter>",
        "</function>",
    ]
    assert [reader.feed(piece) for piece in pieces] == [
        '{"a": "Par', 'is\\"', " ", '</p", "b": ', "", "", "[1, 2]"
    ]  # fmt: skip


def test_a_string_is_known_by_its_first_letter_where_there_is_no_schema():
    reader = TaggedArguments(PARAMETERS, "</function>", Typed({}))
    assert reader.feed("<parameter=a>\nPar") == '{"a": "Par'
    assert reader.feed("\n</parameter>\n<parameter=b>\nfal") == '", "b": '
    assert reader.feed("con") == '"falcon'


@pytest.mark.parametrize("word", ["anyOf", "allOf", "oneOf"])
def test_a_schema_that_refers_to_itself_many_times_takes_no_time(word):
    loop = {word: [{"$ref": "#"}] * 20}
    assert Typed(loop).types == Typed(loop).property("a").types == Typed(loop).item().types == ALL


@pytest.mark.parametrize(
    ("text", "value"),
    [("[it's]", "[it's]"), ("['it's']", ["it's"]), ('["it\'s", "</p>"]', ["it's", "</p>"]), ("['</p>']", ["</p>"])],
)
def test_a_quote_behind_a_letter_begins_no_string_in_which_an_end_would_be_none(text, value):
    schema = {"properties": {"a": {"type": "array"}}}
    whole = f"<p=a>{text}</p><p=b>1</p></call>"
    for pieces in ([whole], whole):
        reader = TaggedArguments(Tagged("<p=", ">", "</p>"), "</call>", Typed(schema))
        out = "".join(map(reader.feed, pieces)) + reader.closing
        assert reader.done and json.loads(out) == {"a": value, "b": 1}


@pytest.mark.parametrize("ref", ["List%3Ccity%3E", "List<city>", "100%", "a~1b", "a%7E1b", "%C3%A9"])
def test_a_reference_is_a_uri(ref):
    root = {"$defs": {name: {"type": "integer"} for name in ("List<city>", "100%", "a/b", "é")}}
    assert Typed({"$ref": f"#/$defs/{ref}"}, root).types == {"integer"}


@pytest.mark.parametrize("schema", [{"enum": [10**400]}, {"const": 10**400}])
def test_integers_in_a_schema_may_be_larger_than_any_float(schema):
    assert Typed(schema).types == {"integer", "number"}


@pytest.mark.parametrize(("python", "value"), [(True, True), (False, "True")])
def test_values_of_python_are_read_without_a_schema_if_the_format_says_so(python, value):
    assert json.loads(value_of("True", ALL, python)) == value


def test_nested_entries_are_objects_or_arrays():
    form = Tagged("<", ">", "</{key}>", item="item")
    schema = {
        "properties": {"o": {"type": "object"}, "a": {"type": "array"}, "e": {"type": "array"}, "i": {"type": "object"}}
    }
    text = "<o><k>1</k><a><item>x</item></a></o><a><item>1</item><item><b>2</b></item></a><e></e><i><item>1</item></i>"
    assert tagged(form, text + "</call>", schema, "</call>") == {
        "o": {"k": 1, "a": ["x"]},
        "a": [1, {"b": 2}],
        "e": [],
        "i": {"item": 1},
    }


def test_a_string_that_begins_like_an_entry_is_a_string():
    form, schema = Tagged("]<", ">", "]</{key}>", item="item"), {"properties": {"city": {"type": "string"}}}
    assert tagged(form, "]<city>]<b>Rome]</city></function>", schema) == {"city": "]<b>Rome"}


def test_strings_between_brackets_of_xml():
    form = Tagged('<param name="', '">', "</param>", cdata=True)
    schema = {"properties": {"a": {"type": "string"}, "n": {"type": "object"}}}
    text = '<param name="a"><![CDATA[a </param> ]] b]]></param><param name="n"><![CDATA[{"k": 1}]]></param></function>'
    assert tagged(form, text, schema) == {"a": "a </param> ]] b", "n": {"k": 1}}


# ---- written ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ["[]", "{", "3", "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(arguments):
    with pytest.raises(InvalidRequest, match=r"Expected the arguments of a call of 'f' as the JSON text of an object"):
        written(FORMATS["hermes"].tools, [ToolCall("f", arguments)])


def test_calls_are_written_as_templates_write_them():
    calls = [ToolCall("f", '{"city": "Paris", "n": 1.50}'), ToolCall("g", "")]
    assert written(FORMATS["hermes"].tools, calls) == (
        '<tool_call>\n{"name": "f", "arguments": {"city": "Paris", "n": 1.50}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    )
    assert written(FORMATS["python"].tools, calls) == "<|calls|>[f(city='Paris', n=1.50), g()]<|/calls|>"
    assert written(FORMATS["tagged"].tools, calls[:1]) == (
        "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n<parameter=n>\n1.50\n</parameter>\n</function>\n</tool_call>"
    )
    assert written(FORMATS["quoted"].tools, calls[:1]) == '<|call|>call:f{city:<|"|>Paris<|"|>,n:1.50}<|/call|>'
    assert written(FORMATS["numbered"].tools, calls).count(":1<|args|>") == 1
