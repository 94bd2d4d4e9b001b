"""The form that an answer must have, in each of the words that say it; what is refused, and by which name."""

from __future__ import annotations

import json

import pytest

from hibachi.errors import InvalidRequest
from hibachi.llm.dialects import forms
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.forms import refused as refusal
from hibachi.llm.dialects.openai import parse as asking
from hibachi.llm.dialects.openai.bodies import Bounds, ChatBody, CompletionBody, read
from hibachi.llm.dialects.tgi.bodies import GenerateBody
from hibachi.llm.dialects.tgi.limits import TgiLimits
from hibachi.llm.dialects.tgi.parse import generation
from hibachi.llm.dialects.tokens.bodies import Given
from hibachi.llm.dialects.tokens.parse import AskedModel, asked_of
from hibachi.request import SamplingParams
from hibachi.structured import MOST_BYTES, StructuredOutputs

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["é", 10**30, 0.5, None]}}}
JSON = StructuredOutputs(json=SCHEMA)
OBJECT = StructuredOutputs(json_object=True)
REGEX = StructuredOutputs(regex="[a-z]+")
CHOICE = StructuredOutputs(choice=["yes", "no"])
GBNF = StructuredOutputs(grammar='root ::= "a"')
TEXT = json.dumps(SCHEMA)


def completion(**fields):
    body = read(CompletionBody, json.dumps({"prompt": "a", **fields}).encode())
    return asking.completion(body, SamplingParams(), Bounds())


def chat(**fields):
    body = read(ChatBody, json.dumps({"messages": [{"role": "user", "content": "a"}], **fields}).encode())
    return asking.chat(body, SamplingParams(), Bounds())


def tgi(*, stream=False, **parameters):
    body = read(GenerateBody, json.dumps({"inputs": "a", "parameters": parameters}).encode())
    return generation(body, TgiLimits(), Bounds(), 100, stream=stream).asked


def tokens(structured, *, defaults=SamplingParams(), feedforward=False, query=False):  # noqa: B008
    if query:
        given = Given(b"", "application/octet-stream", [("structured_outputs", json.dumps(structured))])
    else:
        body = {"prompt": [1], "structured_outputs": structured}
        given = Given(json.dumps(body).encode(), "application/json")
    return asked_of(given.said, None, AskedModel(Bounds(), feedforward, defaults))[0]


def refused(ask, *args, **fields):
    with pytest.raises(Refused) as caught:
        ask(*args, **fields)
    error = caught.value
    assert error.status == 400 and error.kind == "invalid_request_error"
    return str(error), error.param, error.code


BOTH = pytest.mark.parametrize("ask", [completion, chat])

# What a request says, which field of it that is, and what it means.
FORMATS = [
    ({"type": "json_object"}, "type", OBJECT),
    ({"type": "json_object", "schema": SCHEMA}, "schema", JSON),
    ({"type": "json_object", "value": SCHEMA}, "value", JSON),
    ({"type": "json_object", "value": TEXT}, "value", JSON),
    ({"type": "json_schema", "json_schema": {"name": "a-Z_0", "schema": SCHEMA}}, "json_schema.schema", JSON),
    (
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": False, "description": "b"}},
        "json_schema.schema",
        JSON,
    ),
    ({"type": "json_schema", "json_schema": {"name": "a", "strict": True}}, "json_schema", OBJECT),
    *(
        ({"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMA}}, "json_schema.schema", JSON)
        for name in ("Answer[int]", "", "a b", "é", "a" * 65)
    ),
    ({"type": "json_schema", "value": {"name": "a b", "schema": SCHEMA, "strict": True}}, "value.schema", JSON),
    ({"type": "json_schema", "value": {"schema": SCHEMA}}, "value.schema", JSON),
    ({"type": "json", "value": SCHEMA}, "value", JSON),
    ({"type": "json", "value": TEXT}, "value", JSON),
    ({"type": "regex", "value": "[a-z]+"}, "value", REGEX),
]
FIELDS = [
    *(({"response_format": said}, f"response_format.{field}", form) for said, field, form in FORMATS),
    ({"guided_json": SCHEMA}, "guided_json", JSON),
    ({"guided_json": TEXT}, "guided_json", JSON),
    ({"guided_json": {}}, "guided_json", StructuredOutputs(json={})),
    ({"guided_regex": "[a-z]+"}, "guided_regex", REGEX),
    ({"guided_choice": ["yes", "no"]}, "guided_choice", CHOICE),
    ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", GBNF),
    ({"grammar": 'root ::= "a"'}, "grammar", GBNF),
    ({"json_schema": SCHEMA}, "json_schema", JSON),
    ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs", JSON),
    ({"structured_outputs": {"json": TEXT, "regex": None, "json_object": False}}, "structured_outputs", JSON),
    ({"structured_outputs": {"json_object": True}}, "structured_outputs", OBJECT),
    ({"structured_outputs": {"regex": "[a-z]+"}}, "structured_outputs", REGEX),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "structured_outputs", CHOICE),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs", GBNF),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " *", "one_of_as_any_of": True}},
        "structured_outputs",
        StructuredOutputs(json=SCHEMA, whitespace_pattern=" *", one_of_as_any_of=True),
    ),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " *"},
        "guided_json",
        StructuredOutputs(json=SCHEMA, whitespace_pattern=" *"),
    ),
    (
        {"response_format": {"type": "json_object"}, "guided_whitespace_pattern": ""},
        "response_format.type",
        StructuredOutputs(json_object=True, whitespace_pattern=""),
    ),
]


@BOTH
@pytest.mark.parametrize("fields, said, form", FIELDS, ids=lambda x: json.dumps(x)[:40] if isinstance(x, dict) else "")
def test_what_says_a_form(ask, fields, said, form):
    found = ask(**fields, temperature=0.5)
    assert found.params == SamplingParams(temperature=0.5, max_tokens=found.params.max_tokens, structured_outputs=form)
    assert found.form == said


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said, field, form", FORMATS)
def test_what_says_a_form_to_tgi(stream, said, field, form):
    """Also a schema without "properties", which TGI's own compiler could not take."""
    found = tgi(grammar=said, stream=stream)
    assert found.params.structured_outputs == form and found.form == f"grammar.{field}"
    assert tgi(grammar=None).params == tgi().params and tgi().form is None


@BOTH
def test_what_says_none(ask):
    plain = ask()
    assert plain.params.structured_outputs is plain.form is None
    nothing = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "grammar")
    for fields in (
        {"response_format": {"type": "text"}},
        {"grammar": ""},  # llama.cpp's way to say so
        {"guided_decoding_backend": "guidance"},
        dict.fromkeys((*nothing, "json_schema", "guided_grammar", "guided_whitespace_pattern")),
    ):
        assert ask(**fields) == plain
    found = ask(response_format={"type": "text"}, guided_regex="[a-z]+")
    assert (found.form, found.params.structured_outputs) == ("guided_regex", REGEX)


def test_the_order_of_a_schema_is_kept():
    found = completion(guided_json=SCHEMA).params.structured_outputs
    assert json.loads(found.json) == SCHEMA and found.json.index('"b"') < found.json.index('"a"')


@BOTH
def test_a_request_says_one_form(ask):
    one = {
        "response_format": {"type": "json_object"},
        "structured_outputs": {"regex": "a"},
        "guided_json": {},
        "guided_regex": "a",
        "guided_choice": ["a"],
        "guided_grammar": "a",
        "grammar": "a",
        "json_schema": {},
    }
    for i, first in enumerate(one):
        for second in list(one)[i + 1 :]:
            words = f"{first} and {second} each say what form the answer must have. Send one of them."
            found = refused(ask, **{second: one[second], first: one[first]})
            assert found == (words, second, "invalid_value")


WRONG = [
    ({"guided_regex": "x" * (MOST_BYTES + 1)}, "guided_regex", f"at most {MOST_BYTES} bytes"),
    ({"guided_json": {"a": "x" * MOST_BYTES}}, "guided_json", f"at most {MOST_BYTES} bytes"),
    ({"guided_json": "{"}, "guided_json", "must be a JSON schema"),
    ({"guided_choice": []}, "guided_choice", "none of them empty"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "none of them empty"),
    ({"guided_choice": ["a"] * 40_000}, "guided_choice", "1 to 32768 texts"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "none was asked for"),
    ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "is for JSON; got regex"),
    (
        {"guided_whitespace_pattern": " ", "structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        "guided_whitespace_pattern",
        "mean the same",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "got json, regex"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "none of them empty"),
    ({"structured_outputs": {"json": "["}}, "structured_outputs.json", "must be a JSON schema"),
    (
        {"structured_outputs": {"regex": "a", "one_of_as_any_of": True}},
        "structured_outputs.one_of_as_any_of",
        "is for json",
    ),
    ({"response_format": {"type": "json", "value": "{"}}, "response_format.value", "must be a JSON schema"),
    (
        {"response_format": {"type": "json_object", "schema": {}, "value": {}}},
        "response_format.value",
        "and response_format.schema mean the same",
    ),
    (
        {"response_format": {"type": "json_schema", "value": {"schema": {}}, "json_schema": {"name": "a"}}},
        "response_format.value",
        "and response_format.json_schema mean the same",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"a": "x" * MOST_BYTES}}}},
        "response_format.json_schema.schema",
        f"at most {MOST_BYTES} bytes",
    ),
]


@BOTH
@pytest.mark.parametrize("fields, param, words", WRONG, ids=lambda x: json.dumps(x)[:60])
def test_a_wrong_form_is_refused_by_the_name_that_it_has(ask, fields, param, words):
    message, named, code = refused(ask, **fields)
    assert (named, code) == (param, "invalid_value") and words in message and len(message) < 600
    assert message.startswith(param) and ("structured_outputs" in param or not message.startswith("structured"))


@BOTH
def test_a_schema_that_is_missing(ask):
    expected = ("The field response_format.json_schema is missing.", "response_format.json_schema")
    assert refused(ask, response_format={"type": "json_schema"}) == (*expected, "missing_required_parameter")


@BOTH
def test_vllms_options_say_what_holds_anyway(ask):
    for name in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties"):
        assert ask(structured_outputs={"regex": "[a-z]+", name: False}).params.structured_outputs == REGEX
        message, param, code = refused(ask, structured_outputs={"regex": "a", name: True})
        assert (param, code) == (f"structured_outputs.{name}", "unsupported_parameter")
        assert message.startswith(f"{param} is not supported: ") and message.endswith(", so only false is.")
    assert ask(structured_outputs={"regex": "[a-z]+", "structural_tag": None}).form == "structured_outputs"
    _, param, code = refused(ask, structured_outputs={"structural_tag": "{}"})
    assert (param, code) == ("structured_outputs.structural_tag", "unsupported_parameter")
    _, param, code = refused(ask, guided_decoding_backend="xgrammar")
    assert (param, code) == ("guided_decoding_backend", "invalid_type")


def test_what_no_json_can_say():
    """Rows of a batch are no JSON any more when they are read."""
    body = CompletionBody(prompt="a", guided_json={"a": "\ud800"})
    _, param, code = refused(asking.completion, body, SamplingParams(), Bounds())
    assert (param, code) == ("guided_json", "invalid_value")
    deep: dict = {}
    for _ in range(100_000):
        deep = {"a": deep}
    body = CompletionBody(prompt="a", json_schema=deep)
    _, param, code = refused(asking.completion, body, SamplingParams(), Bounds())
    assert (param, code) == ("json_schema", "invalid_value")
    while deep:  # or to forget it would be as deep
        deep = deep["a"]


def test_tokens_of_any_kind():
    for query in (False, True):
        found = tokens({"grammar": "start: <[0-5]>+"}, query=query)
        assert found.params.structured_outputs == StructuredOutputs(grammar="start: <[0-5]>+")
    defaults = SamplingParams(structured_outputs=REGEX)
    assert tokens(None, defaults=defaults).params.structured_outputs == REGEX
    for wrong, param in (
        ({}, "structured_outputs"),
        ({"choice": [""]}, "structured_outputs.choice"),
        ({"structural_tag": "a"}, "structured_outputs.structural_tag"),
        ({"grammar": 7}, "structured_outputs.grammar"),
        ({"a": 7}, "structured_outputs.a"),
    ):
        assert refused(tokens, wrong)[1] == param
    for more in ({"defaults": None}, {"feedforward": True}):
        message, param, code = refused(tokens, {"regex": "a"}, **more)
        assert (param, code) == ("structured_outputs", "unsupported_parameter") and "this model" in message
    with pytest.raises(Refused) as caught:
        Given(b"", "application/octet-stream", [("structured_outputs", "{")])
    assert caught.value.param == "structured_outputs"


def about(kind, words):
    return InvalidRequest.at((forms.OURS, kind), words)


@pytest.mark.parametrize(
    "error, said, told, param",
    [
        (about("json", " is too large."), "guided_json", "guided_json is too large.", "guided_json"),
        (about("json", ": no."), "grammar.value", "grammar.value: no.", "grammar.value"),
        (InvalidRequest.at((forms.OURS,), " cannot do it."), "json_schema", "json_schema cannot do it.", "json_schema"),
        (about("regex", ": no."), "structured_outputs", "structured_outputs.regex: no.", None),
        (about("regex", ": no."), None, "structured_outputs.regex: no.", "structured_outputs.regex"),
        (about("whitespace_pattern", ": no."), "json_schema", "guided_whitespace_pattern: no.", None),
        (about("json", ": structured_outputs.json"), "guided_json", "guided_json: structured_outputs.json", None),
        (InvalidRequest("It is too large."), "guided_json", "It is too large.", "guided_json"),
        (InvalidRequest("It is too large."), None, "It is too large.", "structured_outputs"),
    ],
)
def test_what_an_engine_refuses_later_has_the_name_of_the_request(error, said, told, param):
    found = refusal(error, said)
    assert (str(found), found.code) == (told, "invalid_value")
    assert found.param == (param or told.partition(":")[0])


def test_only_a_form_is_told_by_its_name():
    with pytest.raises(Refused) as caught, forms.said_by("guided_json"):
        raise about("json", ": no.")
    assert caught.value.param == "guided_json"
    with pytest.raises(InvalidRequest, match="The prompt is"), forms.said_by("guided_json"):
        raise InvalidRequest("The prompt is no good.")
