"""Describes routes in OpenAPI 3.1, from the types that read their bodies and write their answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Raw, Struct, defstruct, structs
from msgspec.json import schema_components

from hibachi.llm.dialects.extensible import Extensible
from hibachi.llm.dialects.openai.bodies import IGNORED

JSON, EVENTS = "application/json", "text/event-stream"
BINARY: Mapping[str, Any] = {"type": "string", "format": "binary"}
TEXT: Mapping[str, Any] = {"type": "string"}
_REF = "#/components/schemas/{name}"
_KEY = "key"
_WORDS = {
    200: "It worked.",
    400: "The request cannot be served: what is wrong with it.",
    401: "The key is missing or unknown.",
    403: "Who asks may not, or by this name of the server.",
    404: "There is nothing of that name.",
    406: "The header Accept names no form that there is.",
    408: "The body did not come in time, or the answer would not.",
    413: "The body is too large.",
    415: "The body is of a type that is not read.",
    422: "The request cannot be served: what is wrong with it.",
    424: "The model failed on this request.",
    429: "Too much is asked at once. Try again later.",
    431: "The headers are too large.",
    500: "The server made a mistake; its log says more.",
    503: "Nothing can be served for now. Try again later.",
    504: "The answer would not come in time.",
    529: "Nothing can be served for now. Try again later.",
}


class ErrorAbout(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    """As OpenAI tells errors."""

    error: ErrorAbout


class TgiError(Struct):
    """As text-generation-inference tells errors."""

    error: str
    error_type: str


class Packed(Struct, forbid_unknown_fields=True):
    """An array. data: base64 of its bytes, in C order."""

    dtype: str
    shape: list[int]
    data: str


Array = float | list[Any] | Packed
Schema = Mapping[str, Any]
Content = Mapping[str, Any]  # by media type: a type that msgspec knows, a tuple of such, or a schema


@dataclass(frozen=True, slots=True)
class Operation:
    """One route. reads: types of its body; {} means there is none. answers: types by status. events: types of the data
    of events, where one of `answers` is a stream; end: the last event's data, if it is no JSON. query: a type whose
    fields are the parameters. path: with parameters in braces. keyed: a key is needed. example: of a JSON body.
    """

    method: str
    path: str
    text: str
    tag: str
    answers: Mapping[int, Content]
    reads: Content = field(default_factory=dict)
    events: Sequence[Any] = ()
    end: str | None = None
    query: Any = None
    keyed: bool = False
    example: Any = None

    @property
    def types(self) -> Iterable[Any]:
        """All that schemas are made of."""
        for content in (self.reads, *self.answers.values()):
            for kind, t in content.items():
                if kind != EVENTS and not isinstance(t, Mapping):
                    yield from t if isinstance(t, tuple) else (t,)
        yield from self.events


def document(operations: Sequence[Operation], title: str, version: str, root: str) -> dict[str, Any]:
    """The OpenAPI document. root: the path in front of all others; "" for none."""
    types = list(dict.fromkeys(t for o in operations for t in o.types))
    found, components = schema_components([_shown(t) for t in types], ref_template=_REF)
    for one in components.values():
        _tidy(one)
    for extensible in Extensible.__subclasses__():
        components.get(extensible.__name__, {}).pop("additionalProperties", None)
    schemas = dict(zip(types, found, strict=True))
    paths: dict[str, Any] = {}
    for o in operations:
        paths.setdefault(re.sub(r":\w+}", "}", o.path), {})[o.method.lower()] = _operation(o, schemas)
    keys = {_KEY: {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "servers": [{"url": root or "/"}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            **({"securitySchemes": keys} if any(o.keyed for o in operations) else {}),
        },
    }


def _operation(o: Operation, schemas: Mapping[Any, Schema]) -> dict[str, Any]:
    def schema(kind: str, t: Any) -> Any:
        if kind == EVENTS:
            data = {"type": "string", "contentMediaType": JSON, "contentSchema": _any_of(o.events, schemas)}
            told = data if o.end is None else {"anyOf": [{"const": o.end}, data]}
            return {"type": "object", "required": ["data"], "properties": {"data": told}}
        return t if isinstance(t, Mapping) else _any_of(t if isinstance(t, tuple) else (t,), schemas)

    def contents(given: Content) -> dict[str, Any]:
        return {kind: {"schema": schema(kind, t)} for kind, t in given.items()}

    summary, _, more = o.text.partition("\n\n")
    found: dict[str, Any] = {
        "operationId": "_".join([o.method.lower(), *re.findall(r"\w+", re.sub(r":\w+}", "", o.path))]),
        "summary": " ".join(summary.split()),
        "tags": [o.tag],
    }
    if more:
        found["description"] = " ".join(more.split())
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)", o.path)
    ]
    if o.query is not None:
        _, own = schema_components([_shown(o.query)], ref_template=_REF)
        parameters += [_parameter(name, s) for name, s in own[o.query.__name__]["properties"].items()]
    if parameters:
        found["parameters"] = parameters
    if o.reads:
        found["requestBody"] = {"required": True, "content": contents(o.reads)}
        if o.example is not None:
            found["requestBody"]["content"][JSON]["example"] = o.example
    found["responses"] = {
        str(status): {"description": _WORDS[status], **({"content": contents(content)} if content else {})}
        for status, content in sorted(o.answers.items())
    }
    if o.keyed:
        found["security"] = [{_KEY: []}]
    return found


def _parameter(name: str, schema: Schema) -> dict[str, Any]:
    """Of a query, where nothing stands for null. What is no plain value is written as JSON."""
    given = [s for s in schema.get("anyOf", [schema]) if s.get("type") != "null"]
    told: dict[str, Any] = {"anyOf": given} if len(given) > 1 else dict(given[0])
    if schema.get("default") is not None:
        told["default"] = schema["default"]
    plain = all("enum" in s or s.get("type") not in ("array", "object", None) for s in given)
    about = {"description": "Beside a body that is an array, or bytes, and none of JSON or msgpack."}
    form = {"schema": told} if plain else {"content": {JSON: {"schema": told}}}
    return {"name": name, "in": "query", **about, **form}


def _any_of(types: Sequence[Any], schemas: Mapping[Any, Schema]) -> Schema:
    found = [schemas[t] for t in types]
    return found[0] if len(found) == 1 else {"anyOf": found}


def _shown(t: Any) -> Any:
    """The type, or one like it where it puts off reading a part."""
    if not (isinstance(t, type) and issubclass(t, Struct)):
        return t
    fields = structs.fields(t)
    if not any(f.type is Raw for f in fields):
        return t
    told: list[Any] = [_read_later(f) if f.type is Raw else (f.name, f.type, f.default) for f in fields]
    return defstruct(
        t.__name__, told, kw_only=True, forbid_unknown_fields=t.__struct_config__.forbid_unknown_fields, module=__name__
    )


def _read_later(f: structs.FieldInfo) -> tuple[Any, ...]:
    return (f.name, Array) if f.required else (f.name, Array | None, None)


def _tidy(schema: dict[str, Any]) -> None:
    """Takes out fields that are known only so that they can be refused by name."""
    if schema.get("additionalProperties") is not False:
        return
    required, properties = schema.get("required", ()), schema["properties"]
    for name in [n for n, s in properties.items() if s == {} and n not in required and n not in IGNORED]:
        del properties[name]
