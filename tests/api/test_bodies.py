"""Bodies as they come: every field by its name, with its type, and what it is when it is left out."""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from msgspec import UNSET, Struct

from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.forms import (
    GivenSchema,
    JsonFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    RegexFormat,
    Structured,
    TextFormat,
)
from hibachi.llm.dialects.messages.bodies import MessagesBody
from hibachi.llm.dialects.openai.bodies import (
    IGNORED,
    Bounds,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Document,
    EmbeddingBody,
    Prediction,
    RerankBody,
    ScoreBody,
    StreamOptions,
    TextPart,
    TokenizeBody,
    WarmBody,
    read,
    taken,
)
from hibachi.llm.dialects.responses.bodies import ResponsesBody

NAMES = (
    "openai.bodies",
    "forms",
    "messages.bodies",
    "responses.bodies",
    "responses.items",
    "tgi.bodies",
    "tokens.bodies",
)
SPEC = Path(__file__).parents[1] / "data" / "openai-openapi.json"
OPTIONS = StreamOptions(include_usage=True, continuous_usage_stats=True, include_obfuscation=False)
# What is read of JSON texts; and JSON texts that are of another type, with where in the field, and what was found.
INT = {"0": 0, "-7": -7, "18446744073709551616": 2**64}, {'"7"': "str", "7.5": "float", "true": "bool", "[7]": "array"}
FLOAT = {"0.5": 0.5, "-1": -1.0, "1e300": 1e300}, {'"1"': "str", "false": "bool", "[1.0]": "array", "{}": "object"}
BOOL = {"true": True, "false": False}, {"1": "int", '"true"': "str", "[]": "array"}
TEXT = {'""': "", '"é\\n"': "é\n"}, {"7": "int", "true": "bool", '["a"]': "array"}
TEXTS = {"[]": [], '["a", ""]': ["a", ""]}, {'"a"': "str", "7": "int", "{}": "object", '["a", 7]': "[1] int"}
STOPS = {'"a"': "a", '["a", "b"]': ["a", "b"]}, {"7": "int", "true": "bool", "{}": "object", "[null]": "[0] null"}
IDS = {"[]": [], "[7, -1]": [7, -1]}, {"7": "int", '"7"': "str", "[7, 1.5]": "[1] float", "[true]": "[0] bool"}
PROMPT = (
    {'"a"': "a", "[7, 8]": [7, 8], '["a", [7]]': ["a", [7]], "[]": []},
    {
        "7": "int",
        "{}": "object",
        "null": "null",
        "[1.5]": "[0] float",
        '[[7, "a"]]': "[0][1] str",
        "[null]": "[0] null",
    },
)
BIAS = {'{"7": 1.5, "8": -1}': {"7": 1.5, "8": -1.0}}, {"[]": "array", "7": "int", '{"7": "a"}': "[...] str"}
OBJECT = {"{}": {}, '{"a": [1]}': {"a": [1]}}, {"[]": "array", "7": "int", '"a"': "str"}
OBJECTS = {"[]": [], '[{"a": 1}]': [{"a": 1}]}, {"{}": "object", '"a"': "str", "[{}, 7]": "[1] int"}
SIDE = {'"left"': "left", '"right"': "right"}, {"7": "int", "[]": "array"}
FORMAT = {'"float"': "float", '"base64"': "base64"}, {"7": "int", "[]": "array"}
STREAM = (
    {
        "{}": StreamOptions(include_usage=False, continuous_usage_stats=False, include_obfuscation=UNSET),
        '{"include_usage": true, "continuous_usage_stats": true, "include_obfuscation": false}': OPTIONS,
    },
    {
        "[]": "array",
        "true": "bool",
        '{"include_usage": 1}': ".include_usage int",
        '{"continuous_usage_stats": 1}': ".continuous_usage_stats int",
        '{"include_obfuscation": "no"}': ".include_obfuscation str",
    },
)
BACKEND = {'"auto"': "auto", '"guidance"': "guidance", '"llguidance"': "llguidance"}, {"7": "int", "[]": "array"}
SCHEMA = OBJECT[0] | {'"{}"': "{}"}, {"[]": "array", "7": "int", "true": "bool"}
NAMED = {"name": "a", "description": "b", "schema": {"c": []}, "strict": False}
FORM = (
    {
        '{"type": "text"}': TextFormat(),
        '{"type": "json_object"}': JsonObjectFormat(),
        '{"schema": {"a": 1}, "type": "json_object"}': JsonObjectFormat(schema={"a": 1}),
        '{"type": "json_object", "value": "{}"}': JsonObjectFormat(value="{}"),
        f'{{"type": "json_schema", "json_schema": {json.dumps(NAMED)}}}': JsonSchemaFormat(
            json_schema=NamedSchema(name="a", description="b", schema={"c": []}, strict=False)
        ),
        '{"type": "json_schema", "value": {"schema": {}}}': JsonSchemaFormat(value=GivenSchema(schema={})),
        '{"type": "json", "value": {"a": 1}}': JsonFormat(value={"a": 1}),
        '{"type": "regex", "value": "a"}': RegexFormat(value="a"),
    },
    {
        "[]": "array",
        '"text"': "str",
        "7": "int",
        '{"type": "json_object", "schema": "{}"}': ".schema str",
        '{"type": "json_schema", "json_schema": 7}': ".json_schema int",
        '{"type": "json_schema", "json_schema": {"name": 7}}': ".json_schema.name int",
        '{"type": "json_schema", "json_schema": {"name": "a", "schema": true}}': ".json_schema.schema bool",
        '{"type": "json_schema", "json_schema": {"name": "a", "strict": "yes"}}': ".json_schema.strict str",
        '{"type": "json_schema", "value": {"schema": "{}"}}': ".value.schema str",
        '{"type": "json", "value": null}': ".value null",
        '{"type": "regex", "value": {}}': ".value object",
    },
)
STRUCTURED = (
    {
        "{}": Structured(),
        '{"json": {"a": 1}, "json_object": true, "regex": "b", "choice": ["c"], "grammar": "d"}': Structured(
            json={"a": 1}, json_object=True, regex="b", choice=["c"], grammar="d"
        ),
        '{"json": "{}", "whitespace_pattern": " ", "one_of_as_any_of": true}': Structured(
            json="{}", whitespace_pattern=" ", one_of_as_any_of=True
        ),
        '{"disable_fallback": true, "disable_any_whitespace": false, "structural_tag": 7}': Structured(
            disable_fallback=True, disable_any_whitespace=False, structural_tag=7
        ),
    },
    {
        "[]": "array",
        '"a"': "str",
        '{"json": []}': ".json array",
        '{"json_object": 1}': ".json_object int",
        '{"regex": {}}': ".regex object",
        '{"choice": "a"}': ".choice str",
        '{"choice": ["a", 7]}': ".choice[1] int",
        '{"grammar": 7}': ".grammar int",
        '{"one_of_as_any_of": "no"}': ".one_of_as_any_of str",
    },
)
PREDICTION = (
    {
        '{"type": "content", "content": "a"}': Prediction("content", "a"),
        '{"type": "content", "content": []}': Prediction("content", []),
        '{"type": "content", "content": [{"type": "text", "text": "a"}]}': Prediction(
            "content", [TextPart("text", "a")]
        ),
    },
    {
        "[]": "array",
        '"a"': "str",
        '{"type": "content", "content": 7}': ".content int",
        '{"type": "content", "content": null}': ".content null",
        '{"type": "content", "content": ["a"]}': ".content[0] str",
        '{"type": "content", "content": [{"type": "text", "text": null}]}': ".content[0].text null",
    },
)
ANY = {"7": 7, '"a"': "a", "[null]": [None], '{"a": 1}': {"a": 1}}, {}
NEEDED = object()

# Each field: its type, and what it is when it is left out. Null is the same as leaving it out where that is None.


def of(type_, names, default=None):
    return dict.fromkeys(names.split(), (type_, default))


FREE = dict.fromkeys(IGNORED, (ANY, UNSET))
GENERATION = {
    **FREE,
    **of(TEXT, "model cache_salt request_id guided_regex guided_grammar grammar guided_whitespace_pattern"),
    **of(
        INT,
        "max_tokens n seed best_of top_k min_tokens prompt_logprobs priority "
        "num_speculative_tokens truncate_prompt_tokens thinking_token_budget "
        "stream_interval routed_experts_prompt_start",
    ),
    **of(
        FLOAT,
        "temperature top_p presence_penalty frequency_penalty min_p typical_p "
        "repetition_penalty timeout queue_timeout length_penalty",
    ),
    **of(STOPS, "stop"),
    **of(BIAS, "logit_bias"),
    **of(
        BOOL,
        "stream ignore_eos include_stop_str_in_output return_token_ids "
        "return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens "
        "use_beam_search watermarking return_token_offsets return_mm_kwargs",
    ),
    **of(STREAM, "stream_options"),
    **of(IDS, "stop_token_ids allowed_token_ids"),
    **of(TEXTS, "bad_words guided_choice"),
    **of(PREDICTION, "prediction"),
    **of(SIDE, "truncation_side"),
    **of(OBJECT, "vllm_xargs kv_transfer_params ec_transfer_params json_schema"),
    **of(ANY, "logprob_token_ids repetition_detection", UNSET),
    **of(FORM, "response_format"),
    **of(STRUCTURED, "structured_outputs"),
    **of(SCHEMA, "guided_json"),
    **of(BACKEND, "guided_decoding_backend"),
}
RANKING = {
    **FREE,
    **of(TEXT, "model request_id"),
    **of(INT, "truncate_prompt_tokens priority"),
    **of(SIDE, "truncation_side"),
    **of(BOOL, "use_activation"),
}
DOCUMENTS = (
    {"[]": [], '["a", {"text": "b"}]': ["a", Document("b")]},
    {'"a"': "str", "[7]": "[0] int", '[{"text": 7}]': "[0].text int"},
)
FIELDS = {
    CompletionBody: {
        **GENERATION,
        **of(PROMPT, "prompt", NEEDED),
        **of(BOOL, "echo"),
        **of(INT, "logprobs"),
        **of(BOOL, "add_special_tokens", True),
        **of(ANY, "prompt_embeds suffix", UNSET),
    },
    ChatBody: {
        **GENERATION,
        **of(OBJECTS, "messages", NEEDED),
        **of(INT, "max_completion_tokens top_logprobs"),
        **of(BOOL, "logprobs parallel_tool_calls continue_final_message echo include_reasoning return_prompt_text"),
        **of(OBJECTS, "tools documents"),
        **of(ANY, "tool_choice"),
        **of(BOOL, "add_generation_prompt", True),
        **of(BOOL, "add_special_tokens", False),
        **of(OBJECT, "media_io_kwargs mm_processor_kwargs chat_template_kwargs"),
        **of(ANY, "moderation modalities audio functions function_call verbosity web_search_options", UNSET),
        **of(TEXT, "chat_template reasoning_effort"),
    },
    EmbeddingBody: {
        **FREE,
        **of(PROMPT, "input", NEEDED),
        **of(TEXT, "model"),
        **of(FORMAT, "encoding_format"),
        **of(INT, "dimensions"),
    },
    TokenizeBody: {
        **of(TEXT, "model prompt"),
        **of(OBJECTS, "messages tools"),
        **of(BOOL, "add_special_tokens add_generation_prompt", True),
        **of(BOOL, "continue_final_message return_token_strs", False),
        **of(OBJECT, "chat_template_kwargs"),
    },
    DetokenizeBody: {
        **of(TEXT, "model"),
        **of(IDS, "tokens", NEEDED),
    },
    ScoreBody: {
        **RANKING,
        **of(STOPS, "text_1 text_2 data_1 data_2 queries items documents"),
    },
    RerankBody: {
        **RANKING,
        **of(TEXT, "query", NEEDED),
        **of(DOCUMENTS, "documents", NEEDED),
        **of(INT, "top_n"),
        **of(BOOL, "return_documents"),
    },
    WarmBody: {
        **FREE,
        **of(TEXT, "model text cache_salt"),
        **of(OBJECTS, "messages tools documents"),
        **of(BOOL, "pin add_special_tokens"),
        **of(FLOAT, "importance"),
        **of(BOOL, "add_generation_prompt", True),
        **of(OBJECT, "chat_template_kwargs"),
        **of(INT, "priority"),
        **of(FLOAT, "timeout queue_timeout"),
    },
}
LEAST = {
    CompletionBody: {"prompt": "a"},
    ChatBody: {"messages": [{"role": "user"}]},
    EmbeddingBody: {"input": "a"},
    TokenizeBody: {},
    DetokenizeBody: {"tokens": [7]},
    ScoreBody: {},
    RerankBody: {"query": "a", "documents": ["b"]},
    WarmBody: {},
}


def with_field(kind, field, value):
    """The least body of its kind, with a field that is written as this JSON."""
    rest = json.dumps({k: v for k, v in LEAST[kind].items() if k != field})
    return f"{rest[:-1]}{', ' if rest != '{}' else ''}{json.dumps(field)}: {value}}}".encode()


def refused(kind, body):
    with pytest.raises(Refused) as caught:
        read(kind, body)
    error = caught.value
    assert (error.status, error.kind, error.headers) == (400, "invalid_request_error", {})
    if error.code != "invalid_json":
        with pytest.raises(Refused) as caught:
            taken(kind, json.loads(body))
        assert vars(caught.value) == vars(error) and str(caught.value) == str(error)
    return str(error), error.param, error.code


def each(what):
    """(kind, field, what of it) for every field."""
    return [
        pytest.param(kind, field, what(*about), id=f"{kind.__name__}-{field}")
        for kind, fields in FIELDS.items()
        for field, about in fields.items()
    ]


@pytest.mark.parametrize("name", NAMES)
def test_no_record_takes_a_field_that_it_does_not_know(name):
    """A misspelt field is an error wherever it stands."""
    module = import_module(f"hibachi.llm.dialects.{name}")
    records = [c for _, c in inspect.getmembers(module, inspect.isclass) if issubclass(c, Struct)]
    own = [c for c in records if c.__module__ == module.__name__ and not c.__name__.startswith("_")]
    assert own and not [c.__name__ for c in own if not c.__struct_config__.forbid_unknown_fields]


@pytest.mark.parametrize("kind", FIELDS)
def test_every_field_of_a_body_is_in_these_tables(kind):
    assert set(kind.__struct_fields__) == set(FIELDS[kind])


@pytest.mark.parametrize("kind, field, known", each(lambda known, default: known[0]))
def test_what_a_field_may_say(kind, field, known):
    for text, value in known.items():
        found = getattr(read(kind, with_field(kind, field, text)), field)
        assert found == value and type(found) is type(value), text
        assert taken(kind, json.loads(with_field(kind, field, text))) == read(kind, with_field(kind, field, text))


@pytest.mark.parametrize("kind, field, default", each(lambda known, default: default))
def test_a_field_that_is_not_sent(kind, field, default):
    if default is NEEDED:
        rest = json.dumps({k: v for k, v in LEAST[kind].items() if k != field}).encode()
        expected = f"The field {field} is missing."
        assert refused(kind, rest) == (expected, field, "missing_required_parameter")
    else:
        assert getattr(read(kind, json.dumps(LEAST[kind]).encode()), field) is default


@pytest.mark.parametrize("kind, field, default", each(lambda known, default: default))
def test_a_field_that_is_null(kind, field, default):
    """As if it were not there, where that says nothing by itself."""
    body = with_field(kind, field, "null")
    if default is None or default is UNSET:
        assert getattr(read(kind, body), field) is None
    else:
        message, param, code = refused(kind, body)
        assert message.startswith(f"{field}: Expected `") and message.endswith("`, got `null`.")
        assert (param, code) == (field, "invalid_type")


@pytest.mark.parametrize("kind, field, other", each(lambda known, default: known[1]))
def test_a_field_of_another_type(kind, field, other):
    for text, found in other.items():
        inside, _, got = found.rpartition(" ")
        message, param, code = refused(kind, with_field(kind, field, text))
        assert (param, code) == (field + inside, "invalid_type"), text
        assert message.startswith(f"{field}{inside}: Expected `") and message.endswith(f"`, got `{got}`."), text


@pytest.mark.parametrize("kind", FIELDS)
def test_fields_go_by_their_names(kind):
    """So that their order may change."""
    kind(**LEAST[kind])
    with pytest.raises(TypeError, match="positional"):
        kind(None, **LEAST[kind])


def test_a_vector_has_one_of_two_formats():
    message, param, code = refused(EmbeddingBody, b'{"input": "a", "encoding_format": "hex"}')
    assert message == "encoding_format: expected 'base64' or 'float'; got 'hex'."
    assert (param, code) == ("encoding_format", "invalid_type")


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_a_kind_of_form_that_is_not_served(kind):
    """By its name, whatever else it says."""
    for given in ('{"type": "structural_tag", "structures": []}', '{"format": {}, "type": "structural_tag"}'):
        message, param, code = refused(kind, with_field(kind, "response_format", given))
        expected = "response_format.type is not supported as 'structural_tag'; docs/serving.md lists what it may be."
        assert (message, param, code) == (expected, "response_format.type", "unsupported_parameter")
    message, param, _ = refused(kind, with_field(kind, "response_format", f'{{"type": "{"x" * 9999}"}}'))
    assert param == "response_format.type" and len(message) < 400
    for given, field in (("{}", "type"), ('{"type": "json_schema", "json_schema": {}}', "json_schema.name")):
        _, param, code = refused(kind, with_field(kind, "response_format", given))
        assert (param, code) == (f"response_format.{field}", "missing_required_parameter")


def test_a_field_of_another_route_is_told_what_it_is_called():
    for kind, sent, mine in (
        (ResponsesBody, "max_tokens", "max_output_tokens"),
        (ResponsesBody, "messages", "input"),
        (ResponsesBody, "response_format", "text.format"),
        (MessagesBody, "stop", "stop_sequences"),
        (ChatBody, "max_output_tokens", "max_tokens"),
        (ChatBody, "prompt", "messages"),
    ):
        with pytest.raises(
            Refused, match=rf"^Unknown field: {sent}\. .* here, and {mine} says the same; docs/.* lists"
        ):
            read(kind, json.dumps({"model": "m", sent: 1}).encode())


@pytest.mark.parametrize("kind", FIELDS)
def test_a_field_that_nobody_knows(kind):
    """Refused by its name, however it is written."""
    for name in ("nonsense", "modle", "Model", "", "a\nb", "é"):
        near = " (did you mean model?)" if name.lower().startswith("mod") else ""
        expected = f"Unknown field: {name}. There is none of that name here{near}; docs/serving.md lists them."
        assert refused(kind, with_field(kind, name, "1")) == (expected, name, "unknown_parameter")


def test_a_long_name_or_value_is_not_repeated_whole():
    message, param, code = refused(CompletionBody, with_field(CompletionBody, "x" * 100_000, "1"))
    assert param == "x" * 200 and code == "unknown_parameter" and len(message) < 400
    message, param, code = refused(EmbeddingBody, with_field(EmbeddingBody, "encoding_format", f'"{"x" * 100_000}"'))
    assert param == "encoding_format" and code == "invalid_type" and len(message) < 400


@pytest.mark.parametrize("kind", FIELDS)
@pytest.mark.parametrize("body, got", [("null", "null"), ("[]", "array"), ('"x"', "str"), ("7", "int")])
def test_a_body_that_is_no_object(kind, body, got):
    assert refused(kind, body.encode()) == (f"The body: Expected `object`, got `{got}`.", None, "invalid_type")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"prompt": "a"', b'{"prompt": "\xff"}', b'{"prompt": "a"} x', b'{"prompt": NaN}', b"{'prompt': 1}"],
)
def test_a_body_that_is_no_json(body):
    message, param, code = refused(CompletionBody, body)
    assert message.startswith("The body must be valid JSON in UTF-8: ") and (param, code) == (None, "invalid_json")


@pytest.mark.parametrize("half", ["\\ud83d", "\\uDe00", "\\ud83d\\ud83d", "\\ud83d\\n"])
def test_half_of_a_surrogate_pair_is_a_letter_that_stands_for_it(half):
    """Clients cut texts within an emoji, and send the same again in each later request."""
    body = f'{{"model": "m", "prompt": "\\\\ud83d \\ud83d\\ude00 {half}", "user": 1.50}}'.encode()
    expected = "\\ud83d 😀 " + "\ufffd" * half.lower().count("\\u") + "\n" * half.endswith("n")
    assert read(CompletionBody, body).prompt == expected
    assert refused(CompletionBody, body[:-1])[2] == "invalid_json"


def test_a_body_that_is_nested_too_deep():
    for part in ("[", '{"a":'):
        body = f'{{"prompt": "a", "user": {part * 50_000}'.encode()
        assert refused(CompletionBody, body) == ("The body is nested too deep.", None, "invalid_json")


@pytest.mark.parametrize(
    "value, message",
    [
        ({"prompt": b"a"}, "prompt: Expected `str | array`, got `bytes`."),
        ({"prompt": "a", "n": np.int64(2)}, "n: Expected `int | null`, got `numpy.int64`."),
    ],
)
def test_a_record_of_what_json_does_not_have(value, message):
    with pytest.raises(Refused) as caught:
        taken(CompletionBody, value)
    assert str(caught.value) == message


def test_what_a_request_may_ask_for_unless_the_server_says_otherwise():
    found = Bounds()
    assert (found.n, found.prompts, found.logprobs, found.messages) == (128, 1024, 20, 16384)
    assert (found.stop, found.stop_length, found.bias, found.token_ids) == (16, 1024, 1024, 4096)


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, EmbeddingBody, StreamOptions])
def test_openai_s_fields_are_known(kind):
    """Whether they are served, ignored or refused: by its name, and not as if it had been made up."""
    schemas = json.loads(SPEC.read_text())["components"]["schemas"]

    def properties(schema):
        schema = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        parts = schema.get("allOf", []) + schema.get("anyOf", [])
        return set(schema.get("properties", {})).union(*map(properties, parts))

    theirs = {
        CompletionBody: "CreateCompletionRequest",
        ChatBody: "CreateChatCompletionRequest",
        EmbeddingBody: "CreateEmbeddingRequest",
        StreamOptions: "ChatCompletionStreamOptions",
    }
    expected = properties(schemas[theirs[kind]])
    assert len(expected) >= 2
    assert expected <= set(kind.__struct_fields__)
