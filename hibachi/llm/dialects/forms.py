"""The form that an answer must have, as requests say it: in the words of OpenAI, vLLM, llama.cpp and TGI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType
from msgspec.json import encode

from hibachi.errors import FieldPath, InvalidRequest
from hibachi.llm.dialects.errors import Refused, unsupported
from hibachi.llm.dialects.extensible import Extensible
from hibachi.structured import StructuredOutputs

Schema: TypeAlias = dict[str, Any]
Fields: TypeAlias = dict[str, Any]  # of `StructuredOutputs`
Backend: TypeAlias = Literal["auto", "guidance", "llguidance"]
OURS = "structured_outputs"
REFUSED = {"structured_outputs.structural_tag": "Text around forms is said by a grammar"}
"""Fields that may only be null, and why."""
DEFAULTS: dict[str, tuple[Any, str]] = {
    "structured_outputs.disable_fallback": (False, "There is nothing else to fall back to"),
    "structured_outputs.disable_any_whitespace": (False, "whitespace_pattern says which blanks may come"),
    "structured_outputs.disable_additional_properties": (False, "The schema says it: additionalProperties"),
}
"""Fields of vLLM's that may only have this value or null, and why."""
_PLAIN = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}
"""Fields of a body that say a form by themselves, and which field of `StructuredOutputs` that is."""
_SAME = ("json", "json_object", "regex", "choice", "grammar", "whitespace_pattern", "one_of_as_any_of")


class Structured(Struct, kw_only=True, forbid_unknown_fields=True):
    """As vLLM says it: exactly one of json (a JSON schema, as an object or in a text), json_object, regex, choice and
    grammar (Lark's or GBNF). whitespace_pattern: a regular expression for the blanks between JSON's tokens.
    one_of_as_any_of: read `oneOf` in a schema as `anyOf`.
    """

    json: Schema | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    one_of_as_any_of: bool | None = None
    # As their default only: see `DEFAULTS`.
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    # Known, and refused by name.
    structural_tag: Any | UnsetType = UNSET


class NamedSchema(Extensible, kw_only=True):
    """OpenAI's. The answer keeps to the schema whatever `strict` says; without one it is any JSON object. name: any
    text, as clients send what a type is called, such as "Answer[int]".
    """

    name: str
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class GivenSchema(Extensible, kw_only=True):
    """TGI's, which need not have a name."""

    name: str | None = None
    description: str | None = None
    schema: Schema
    strict: bool | None = None


class TextFormat(Extensible, tag="text"):
    """Any text."""


class JsonObjectFormat(Extensible, kw_only=True, tag="json_object"):
    """Any JSON object. With a schema, one that keeps to it: `schema` as llama.cpp has it, or `value` as TGI does."""

    schema: Schema | None = None
    value: Schema | str | None = None


class JsonSchemaFormat(Extensible, kw_only=True, tag="json_schema"):
    """JSON that keeps to a schema: `json_schema` as OpenAI has it, or `value` as TGI does."""

    json_schema: NamedSchema | None = None
    value: GivenSchema | None = None


class JsonFormat(Extensible, kw_only=True, tag="json"):
    """TGI's. value: a JSON schema, as an object or in a text."""

    value: Schema | str


class RegexFormat(Extensible, kw_only=True, tag="regex"):
    """TGI's. value: a regular expression for the whole answer."""

    value: str


Grammar: TypeAlias = JsonObjectFormat | JsonSchemaFormat | JsonFormat | RegexFormat
Format: TypeAlias = TextFormat | Grammar


def check_served(body: Any, refused: Mapping[str, str], defaults: Mapping[str, tuple[Any, str]]) -> None:
    """Raises Refused for fields that are known and not served. refused: may only be null, and why. defaults: may only
    have this value or null, and why.
    """
    for name, why in refused.items():
        if getattr(body, name.rpartition(".")[2], UNSET) not in (UNSET, None):
            raise unsupported(name, why)
    for name, (default, why) in defaults.items():
        if getattr(body, name.rpartition(".")[2], None) not in (None, default):
            raise unsupported(name, f"{why}, so only {encode(default).decode()} is")


def form_of(body: Any) -> tuple[str, StructuredOutputs] | None:
    """The field of a completion's or a chat's body that says a form, and the form. None means any text. Raises Refused,
    also where two fields say one.
    """
    given = list(_said_in(body))
    if len(given) > 1:
        first, second = (said.partition(".")[0] for said, _ in given[:2])
        raise Refused(
            f"{first} and {second} each say what form the answer must have. Send one of them.",
            param=second,
            code="invalid_value",
        )
    blanks = body.guided_whitespace_pattern
    if not given:
        if blanks is not None:
            raise _invalid("guided_whitespace_pattern", "is of a form of JSON, and none was asked for")
        return None
    [(said, fields)] = given
    if blanks is not None:
        if "whitespace_pattern" in fields:
            raise _invalid("guided_whitespace_pattern", "and structured_outputs.whitespace_pattern mean the same")
        fields["whitespace_pattern"] = blanks
    return said, made(said, fields)


def of_format(given: Format, field: str) -> tuple[str, Fields] | None:
    """What says the form, and the form. field: that holds `given`. None means any text. Raises Refused."""
    if isinstance(given, TextFormat):
        return None
    if isinstance(given, JsonObjectFormat):
        name = _one_of(given, field, "schema", "value")
        return (f"{field}.type", {"json_object": True}) if name is None else _json(f"{field}.{name}", given, name)
    if isinstance(given, JsonSchemaFormat):
        name = _one_of(given, field, "json_schema", "value")
        if name is None:
            missing = (field, "json_schema")
            raise Refused("The field ", missing, " is missing.", param=missing, code="missing_required_parameter")
        inner: NamedSchema | GivenSchema = getattr(given, name)
        if inner.schema is None:
            return f"{field}.{name}", {"json_object": True}
        return _json(f"{field}.{name}.schema", inner, "schema")
    if isinstance(given, JsonFormat):
        return _json(f"{field}.value", given, "value")
    return f"{field}.value", {"regex": given.value}


def of_structured(given: Structured) -> Fields:
    """The fields that were sent. Raises Refused."""
    check_served(given, REFUSED, DEFAULTS)
    return {name: value for name in _SAME if (value := getattr(given, name)) is not None}


def made(said: str, fields: Fields) -> StructuredOutputs:
    """said: the field of the request that says the form. Raises Refused, which names it."""
    schema = fields.get("json")
    try:
        if isinstance(schema, dict):  # as a text it is cheap to measure, and large ones are refused for their size
            fields = {**fields, "json": encode(schema).decode()}
        return StructuredOutputs(**fields)
    except InvalidRequest as e:
        raise refused(e, said) from None
    except (UnicodeError, TypeError, ValueError, RecursionError) as e:
        raise _invalid(said, f"cannot be said in JSON: {e}") from None


def refused(error: InvalidRequest, said: str | None) -> Refused:
    """What is wrong with a form, by the name that it has in the request. said: the field that says it; None means
    `structured_outputs`.
    """
    path, words = error.path or (), error.words
    name: FieldPath = tuple((said or OURS).split("."))
    if path[:1] == (OURS,):
        if name[0] == OURS:
            name = path
        elif path[-1] == "whitespace_pattern":
            name = ("guided_whitespace_pattern",)
        words = (name, *words[1:])
    return Refused(*words, param=name, code="invalid_value")


@contextmanager
def said_by(said: str | None) -> Iterator[None]:
    """Where an engine refuses a form, `refused` tells of it."""
    try:
        yield
    except InvalidRequest as e:
        if e.path is None or e.path[0] != OURS:
            raise
        raise refused(e, said) from e


def _said_in(body: Any) -> Iterator[tuple[str, Fields]]:
    if body.response_format is not None and (found := of_format(body.response_format, "response_format")):
        yield found
    if body.structured_outputs is not None:
        yield OURS, of_structured(body.structured_outputs)
    for name, kind in _PLAIN.items():
        value = getattr(body, name)
        if value is not None and (name, value) != ("grammar", ""):  # which is none to llama.cpp
            yield name, {kind: value}


def _json(said: str, holder: Any, name: str) -> tuple[str, Fields]:
    return said, {"json": getattr(holder, name)}


def _one_of(given: Any, field: str, *names: str) -> str | None:
    found = [name for name in names if getattr(given, name) is not None]
    if len(found) > 1:
        raise _invalid(f"{field}.{found[1]}", f"and {field}.{found[0]} mean the same")
    return found[0] if found else None


def _invalid(name: str, why: str) -> Refused:
    return Refused.at(tuple(name.split(".")), f" {why}.")
