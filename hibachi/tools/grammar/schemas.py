"""JSON schemas, as far as arguments need them that are not written as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from hibachi.guide.worker import Refused
from hibachi.tools.grammar.lark import ANY
from hibachi.tools.references import referred

Schema: TypeAlias = Mapping[str, Any]
TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
# What says more than the grammars here can, by themselves or beside others.
BEYOND = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "uniqueItems",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "patternProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
    "minProperties",
    "maxProperties",
    "prefixItems",
    "$dynamicRef",
)
MOST = 512  # schemas in `anyOf`, nested ones included
DEEPEST = 32  # references, one after the other


def resolved(schema: Any, root: Schema) -> Schema:
    """The schema that `$ref` means, if it says nothing else. Raises Refused."""
    for _ in range(DEEPEST):
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            raise Refused("a schema in it is no object")
        if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
            schema = {**without(schema, "allOf"), **resolved(schema["allOf"][0], root)}
        elif "$ref" in schema:
            schema = {**without(schema, "$ref"), **resolved(target(schema["$ref"], root), root)}
        else:
            return schema
    raise Refused("the keyword `$ref` is in a circle", "$ref")


def without(schema: Schema, key: str) -> dict[str, Any]:
    return {k: v for k, v in schema.items() if k != key}


def target(ref: Any, root: Schema) -> Any:
    """`referred`, which raises Refused here."""
    try:
        return referred(ref, root)
    except LookupError:
        raise Refused("the keyword `$ref` names what is not within the schema; nothing is fetched", "$ref") from None


def alone(schema: Any, root: Schema) -> dict[str, Any]:
    """A part of a schema as a schema of its own, with what its references mean."""
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise Refused("a schema in it is no object")
    found = list(references(schema))
    if not found:
        return dict(schema)
    places = {name: root[name] for name in ("$defs", "definitions") if name in root}
    if all(ref.startswith(("#/$defs/", "#/definitions/")) for ref in (*found, *references(places))):
        return {**schema, **places}
    return {**moved(schema, "tool"), "$defs": {"tool": moved(root, "tool")}}


def references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(ref := schema.get("$ref"), str):
            yield ref
        schema = [*schema.values()]
    if isinstance(schema, list):
        for each in schema:
            yield from references(each)


def moved(schema: Any, name: str) -> Any:
    """A schema that stands below `$defs` by this name: its references lead there."""
    if isinstance(schema, Mapping):
        found = {k: moved(v, name) for k, v in schema.items()}
        ref = found.get("$ref")
        if isinstance(ref, str) and ref.startswith("#"):
            found["$ref"] = f"#/$defs/{name}{ref[1:]}"
        return found
    return [moved(each, name) for each in schema] if isinstance(schema, list) else schema


def alternatives(schema: Any, root: Schema) -> list[Schema]:
    """Schemas of one type each, or without any, one of which the value keeps to. `oneOf` is read as `anyOf`.

    Raises Refused for what a grammar over other notations than JSON cannot do.
    """
    return _alternatives(schema, root, [])


def _alternatives(schema: Any, root: Schema, seen: list[None]) -> list[Schema]:
    """seen: one for each schema that was looked at."""
    seen.append(None)
    if len(seen) > MOST:
        raise Refused(f"it has more than {MOST} alternatives in one place")
    schema = resolved(schema, root)
    if beyond := next((k for k in BEYOND if k in schema), None):
        raise Refused(f"the keyword `{beyond}` is not supported in the form in which this model writes calls", beyond)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            rest = without(schema, key)
            return [
                each
                for part in schema[key]
                if part is not False
                for each in _alternatives({**rest, **resolved(part, root)}, root, seen)
            ]
    if "allOf" in schema:
        raise Refused("the keyword `allOf` is not supported in the form in which this model writes calls", "allOf")
    if "const" in schema or "enum" in schema:
        return list(_values(schema))
    kinds = schema.get("type", _implied(schema))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, Sequence) or not all(kind in TYPES for kind in kinds):
        raise Refused("the keyword `type` has a value that is not supported", "type")
    return [{**schema, "type": kind} for kind in kinds] or [without(schema, "type")]


def _implied(schema: Schema) -> list[str]:
    """The types that the keywords are about: models keep to what is meant."""
    if "properties" in schema or "required" in schema:
        return ["object"]
    if "items" in schema:
        return ["array"]
    if any(k in schema for k in ("pattern", "minLength", "maxLength", "format")):
        return ["string"]
    return ["number"] if any(k in schema for k in NUMERIC) else []


NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def _values(schema: Schema) -> Iterator[Schema]:
    """Each type of the values that are listed, with those of its values."""
    given = [schema["const"]] if "const" in schema else schema["enum"]
    if not isinstance(given, list):
        raise Refused("the keyword `enum` has a value that is not supported", "enum")
    kinds = schema.get("type", list(TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    by_kind: dict[str, list[Any]] = {}
    for value in given:
        kind = type_of(value)
        if kind in kinds or (kind == "integer" and "number" in kinds):
            by_kind.setdefault(kind, []).append(value)
    if not by_kind:
        raise Refused("no value satisfies it")
    for kind, values in by_kind.items():
        yield {"type": kind, "enum": values}


def type_of(value: Any) -> str:
    """In JSON's words."""
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def number(schema: Schema) -> dict[str, Any]:
    """Of a schema of a number, what bounds it."""
    return {k: schema[k] for k in ("type", "enum", *NUMERIC) if k in schema}


def properties(schema: Schema) -> list[tuple[str, Any, bool]]:
    """Names, schemas, and whether each must be there. Raises Refused."""
    found = schema.get("properties", {})
    needed = schema.get("required", [])
    if not isinstance(found, Mapping) or not isinstance(needed, list) or not all(isinstance(n, str) for n in needed):
        raise Refused("the keyword `properties` or `required` has a value that is not supported", "properties")
    missing = [name for name in needed if name not in found]
    return [
        *((name, each, name in needed) for name, each in found.items() if each is not False),
        *((name, True, True) for name in missing),
    ]


# ---- strings ---------------------------------------------------------------------------------------------------------


def string_body(schema: Schema, unit: str = "(?s:.)") -> str:
    """What a string may be, as the body of a terminal. unit: an expression for one character, as it is written."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not all(isinstance(n, int) and n >= 0 for n in (least, 0 if most is None else most)):
        raise Refused("the keyword `minLength` or `maxLength` has a value that is not supported", "maxLength")
    if least == 0 and most is None:
        body = f"/(?:{unit})*/"
    else:
        body = f"/(?:{unit}){{{least},{'' if most is None else most}}}/"
    pattern = schema.get("pattern")
    return body if pattern is None else f"{body} & ({pattern_body(pattern)})"


def pattern_body(pattern: Any) -> str:
    """A schema's pattern, which may stand anywhere in the text unless it says so, as the body of a terminal."""
    if not isinstance(pattern, str):
        raise Refused("the keyword `pattern` has a value that is not supported", "pattern")
    return " | ".join(map(_anchored, top_level(pattern)))


def _anchored(pattern: str) -> str:
    front = back = ANY
    if pattern.startswith("^"):
        pattern, front = pattern[1:], ""
    if pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2:
        pattern, back = pattern[:-1], ""
    inner = f"/(?:{slashed(pattern)})/" if pattern else ""
    return " ".join(part for part in (front, inner, back) if part) or '""'


def top_level(pattern: str) -> list[str]:
    """The alternatives of a regular expression."""
    found, depth, inside, at = [""], 0, False, 0
    while at < len(pattern):
        letter = pattern[at]
        part = pattern[at : at + 2] if letter == "\\" else letter
        if letter == "[" and not inside:
            inside = True
        elif letter == "]":
            inside = False
        elif not inside and letter in "()":
            depth += 1 if letter == "(" else -1
        if letter == "|" and not inside and depth == 0:
            found.append("")
        else:
            found[-1] += part
        at += len(part)
    return found


def slashed(pattern: str) -> str:
    """As it can stand between slashes."""
    found, at = [], 0
    while at < len(pattern):
        part = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        found.append({"/": "\\/", "\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(part, part))
        at += len(part)
    return "".join(found)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
