"""Schemas that say things in several places at once, where arguments are not written as JSON: held to, or refused."""

import json
import random

import pytest

from hibachi.errors import InvalidRequest
from hibachi.llm.chatformat.grammar.joining import combined
from hibachi.llm.chatformat.tools import Tool

from .grammars import Read, grammar, setting, walked
from .randomtools import CombinedTool
from .test_random_tools import count_checked

IN = {
    "python": "<|calls|>[t(x=%s)]<|/calls|>",
    "quoted": "<|call|>call:t{x:%s}<|/call|>",
    "keyed": "<tool_call>t\n<arg_key>x</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
}
STRINGS = {"python": "'%s'", "quoted": '<|"|>%s<|"|>', "keyed": "%s"}
EMPTY = {
    "python": "<|calls|>[t()]<|/calls|>",
    "quoted": "<|call|>call:t{}<|/call|>",
    "keyed": "<tool_call>t\n\n</tool_call>",
}


def tool(x, **more):
    return Tool("t", {"type": "object", "properties": {"x": x}, "required": ["x"], **more})


def value(name, given):
    if isinstance(given, str):
        return STRINGS[name] % given
    return json.dumps(given) if name != "quoted" else json.dumps(given, separators=(",", ":")).replace('"', "")


WORDS = {"$defs": {"s": {"type": "string", "maxLength": 3, "title": "S"}}}
HELD = [  # a schema; values that it takes; values that it does not
    ({"$ref": "#/$defs/s", "maxLength": 2, "description": "short"}, ["ab"], ["abc"]),
    ({"$ref": "#/$defs/s", "maxLength": 9, "title": "T", "default": "a"}, ["abc"], ["abcd"]),
    ({"type": "string", "maxLength": 3, "anyOf": [{"maxLength": 9}, {"minLength": 2}]}, ["abc"], ["abcd"]),
    ({"type": "string", "enum": ["a", "b"], "allOf": [{"enum": ["b", "c"]}]}, ["b"], ["a", "c"]),
    ({"allOf": [{"type": "integer", "minimum": 2}, {"type": "number", "maximum": 3}]}, [2, 3], [1, 4]),
    ({"type": "integer", "minimum": 4, "anyOf": [{"minimum": 1, "maximum": 5}, {"minimum": 7}]}, [4, 5, 8], [1, 6]),
    ({"type": ["integer", "string"], "anyOf": [{"type": "number"}, {"type": "null"}]}, [1], ["a"]),
    ({"type": "integer", "enum": [1.0, 2.0, 2.5]}, [1, 2], [3]),
    ({"type": "integer", "enum": [1, 5, 6], "minimum": 4, "multipleOf": 5}, [5], [1, 6]),
    ({"enum": ["a", "abc", 7], "minLength": 2, "exclusiveMaximum": 7}, ["abc"], ["a", 7]),
    ({"enum": ["a", "b", 1], "const": 1.0}, [1], ["a"]),
    ({"enum": ["2024-02-30", "2024-02-29"], "format": "date"}, ["2024-02-29"], ["2024-02-30"]),
    ({"enum": [True, 1], "allOf": [{"enum": [1, "a"]}]}, [1], ["a"]),
    ({"anyOf": [{"enum": ["a"], "minLength": 2}, {"const": "b"}, False]}, ["b"], ["a"]),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "c": {"type": "integer"}},
            "required": ["c"],
            "anyOf": [{"required": ["a"]}, {"properties": {"b": {"type": "integer"}}, "required": ["b"]}],
        },
        [{"a": 1, "c": 2}, {"c": 1, "b": 2}],
        [{"a": 1}, {"c": 2}, {}],
    ),
    ({"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}}, [{"a": 1}], [{"a": "s"}, {}]),
    ({"additionalProperties": {"type": "integer"}}, [{"a": 1}], [{"a": "s"}]),
]


@pytest.mark.parametrize("name", IN)
@pytest.mark.parametrize("schema, right, wrong", HELD)
def test_all_that_a_schema_says_holds(name, schema, right, wrong):
    tools = (tool(schema, **WORDS),)
    found = grammar(name, tools=tools)
    setting().check(grammar=found.text)
    for each in right:
        text = IN[name] % value(name, each)
        assert walked(found, text) == "ends", each
        Read(name, text, tools=tools).check()
    for each in wrong:
        assert walked(found, IN[name] % value(name, each)) != "ends", each


NOT_HELD = [
    ({"enum": ["a"], "pattern": "a"}, "`pattern` is not supported beside `enum`"),
    ({"const": {}, "required": ["a"]}, "`required` is not supported beside `enum`"),
    ({"const": 1, "enum": [2]}, "no value satisfies it"),
    ({"type": "string", "allOf": [{"type": "integer"}]}, "no value satisfies it"),
    ({"type": "string", "minLength": 3, "allOf": [{"maxLength": 2}]}, "no value satisfies it"),
    ({"anyOf": []}, "no value satisfies it"),
    ({"pattern": "a", "allOf": [{"pattern": "b"}]}, "`pattern` says two things"),
    ({"properties": {"a": {}}, "allOf": [{"properties": {"a": {"type": "null"}}}]}, "`properties` says two things"),
    ({"properties": {"a": {}}, "required": ["a"], "allOf": [{"additionalProperties": False}]}, "required"),
    ({"properties": {"a": False}, "required": ["a"]}, "required"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "required"),
    ({"anyOf": [{"type": "null"}], "allOf": [{"anyOf": [{}]}]}, "`anyOf` says two things"),
    ({"type": "string", "format": "idn-email"}, "`format` has the value 'idn-email'"),
    ({"type": "string", "format": 3}, "`format`"),
    ({"type": "integer", "enum": [1], "minimum": "0"}, "`minimum`"),
    ({"enum": [*range(99)], "anyOf": [{}] * 999}, "`anyOf` has too many parts"),
    ({"$ref": "#/$defs/a"}, "`$ref` is in a circle"),
]
CIRCLE = {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}


@pytest.mark.parametrize("name", IN)
@pytest.mark.parametrize("schema, why", NOT_HELD)
def test_what_cannot_hold_at_once_is_refused_by_name(name, schema, why):
    with pytest.raises(InvalidRequest) as caught:
        found = grammar(name, tools=(tool(schema, **{"$defs": CIRCLE}),))
        setting().check(grammar=found.text)  # of what is JSON the library says it
    assert why in str(caught.value)


@pytest.mark.parametrize("name", IN)
@pytest.mark.parametrize(
    "more",
    [
        {"anyOf": [{"required": ["x"]}, {"required": ["y"]}]},
        {"oneOf": [{"required": ["x"]}]},
        {"allOf": [{"anyOf": [{"required": ["x"]}]}]},
        {"enum": [{"x": 1}]},
    ],
)
def test_the_arguments_as_a_whole_have_no_alternatives(name, more):
    with pytest.raises(InvalidRequest, match="`properties` are needed at its top"):
        grammar(name, tools=(Tool("t", {"type": "object", "properties": {"x": {"type": "integer"}}, **more}),))


@pytest.mark.parametrize("name", IN)
def test_what_only_holds_together_is_one_at_the_top(name):
    schema = {"properties": {"x": {"type": "integer"}}, "allOf": [{"required": ["x"]}, {"title": "T"}], "title": "U"}
    found = grammar(name, tools=(Tool("t", schema),))
    assert walked(found, EMPTY[name]).startswith("refused") and walked(found, IN[name] % "1") == "ends"


@pytest.mark.parametrize("name", IN)
def test_a_name_that_is_only_required_has_the_schema_of_further_ones(name):
    found = grammar(
        name, tools=(Tool("t", {"type": "object", "required": ["x"], "additionalProperties": {"type": "integer"}}),)
    )
    assert walked(found, IN[name] % "1") == "ends"
    assert walked(found, IN[name] % value(name, "s")).startswith("refused: ")


@pytest.mark.parametrize("name", IN)
def test_schemas_of_frameworks_are_served(name):
    """As pydantic, zod and OpenAPI write them."""
    notes = {"title": "X", "description": "what", "default": None, "examples": [1], "deprecated": True}
    for schema, right in (
        ({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}], **notes}, 3),
        ({"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}], **notes}, "km"),
        ({"$ref": "#/$defs/Unit", **notes}, "km"),
        ({"allOf": [{"$ref": "#/$defs/Unit"}], **notes}, "km"),
        ({"const": "a", "type": "string", **notes}, "a"),
        ({"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083, **notes}, "https://a.b/c"),
        ({"type": "string", "format": "date-time", **notes}, "2024-02-29T10:00:00Z"),
        ({"$ref": "#/$defs/Node", **notes}, {"n": 1, "next": {"n": 2}}),
    ):
        defined = {
            "Unit": {"enum": ["km", "mi"], "title": "Unit", "description": "of lengths", "type": "string"},
            "Node": {
                "type": "object",
                "properties": {"n": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/Node"}]}},
                "required": ["n"],
                "additionalProperties": False,
                "title": "Node",
            },
        }
        top = {"$schema": "https://json-schema.org/draft/2020-12/schema", "additionalProperties": False}
        tools = (tool(schema, **{"$defs": defined}, **top),)
        text = IN[name] % value(name, right)
        assert walked(grammar(name, tools=tools), text) == "ends", schema
        Read(name, text, tools=tools).check()


FORMATS = {  # texts that are of it, and texts that are not
    "date": (["2024-02-29", "2000-02-29", "1999-04-30"], ["2023-02-29", "1900-02-29", "2024-04-31", "24-01-01", ""]),
    "time": (["10:00:00Z", "23:59:59.123+02:00"], ["10:00", "24:00:00Z", "10:00:00"]),
    "date-time": (["2024-01-01T10:00:00Z", "2024-01-01T10:00:00.5-08:00"], ["2024-01-01", "2024-01-01 10:00:00Z"]),
    "duration": (["P1D", "PT5M", "P1Y2M3DT4H5M6S", "P3W"], ["P", "PT", "1D", "P1Y3D", "P1DT", "P1W1D"]),
    "email": (["a@b.c", "jane.doe+x@mail.example.com"], ["a", "a@", "@b", "a b@c", "a..b@c"]),
    "hostname": (["localhost", "a-b.example.com"], ["-a", "a-", "a..b", "a_b", ""]),
    "ipv4": (["192.168.0.1", "255.255.255.255"], ["256.1.1.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (
        ["::", "::1", "2001:db8::1", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::"],
        ["1:2:3", "1::2::3", "12345::", "1:2:3:4:5:6:7:8:9", "1:2:3:4:5:6:7:8::", ":1"],
    ),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
    "uri": (["https://u@example.com:80/a?b=c#d", "mailto:a@b.c", "file:///x"], ["a b:c", "/x", "http://a b", "%:a"]),
    "starts_with": (["x y"], []),
}


@pytest.mark.parametrize("name", IN)
@pytest.mark.parametrize("format", FORMATS)
def test_formats_of_strings(name, format):
    found = grammar(name, tools=(tool({"type": "string", "format": format, "maxLength": 40}),))
    right, wrong = FORMATS[format]
    for each in right:
        assert walked(found, IN[name] % value(name, each)) == "ends", each
    for each in wrong:
        assert walked(found, IN[name] % value(name, each)) != "ends", each
    assert walked(found, IN[name] % value(name, right[0] + "x" * 40)) != "ends"


def test_a_text_does_not_look_like_a_value_that_is_left_out():
    """The reader of calls takes it for one, by the types that the schema names."""
    x = {"anyOf": [{"type": "string"}, {"enum": [3, True], "minimum": 5, "allOf": [{"enum": [3]}, {"minimum": 1}]}]}
    found = grammar("keyed", tools=(tool(x),))
    assert walked(found, IN["keyed"] % "a") == walked(found, IN["keyed"] % "None of 3") == "ends"
    for text in ("3", "7"):
        assert walked(found, IN["keyed"] % text).startswith("refused"), text


def test_two_schemas_are_one():
    one = {"type": ["number", "string"], "title": "a", "required": ["a"], "format": "path", "minimum": 1}
    other = {"type": "integer", "title": "b", "required": ["b", "a"], "format": "uri", "minimum": 2.5, "maximum": 3}
    assert combined(one, other) == {
        **{"type": ["integer"], "title": "a", "required": ["a", "b"], "format": "uri", "minimum": 2.5, "maximum": 3}
    }
    assert combined({}, other) == combined(other, {}) == other


def check(seed, names):
    rng = random.Random(seed)
    return count_checked(rng, CombinedTool(rng).tool(), names)


@pytest.mark.parametrize("name", ["python", "quoted", "tagged"])
def test_random_answers_keep_to_random_schemas_that_are_combined(name):
    assert sum(check(seed, [name]) for seed in range(25)) > 5


def test_many_random_answers_keep_to_random_schemas_that_are_combined():
    names = ["python", "quoted", "tagged", "keyed", "cdata", "typed", "nested"]
    assert sum(check(seed, names) for seed in range(3000, 3150)) > 300
