"""JSON schemas, as far as arguments need them that are not written as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from fractions import Fraction
from typing import Any, Final

from hibachi.engine.guide.worker import Refused
from hibachi.llm.chatformat.grammar.joining import BEYOND, NUMERIC, NoValue, Schema, combined, kinds_of, same
from hibachi.llm.chatformat.grammar.strings import is_of_format
from hibachi.llm.chatformat.references import referred

MOST = 512  # schemas in `anyOf`, nested ones included
DEEPEST = 32  # references and `allOf`, one within the other
MOST_PARTS = 64  # schemas that are one by them
MOST_AGAIN = 2**15  # values and names that `anyOf` in one place repeats, as each of its parts holds what is beside it


def resolved(schema: Any, root: Schema) -> Schema:
    """The schema that is meant by `$ref`, `allOf` and what stands beside them. Raises Refused."""
    return _resolved(schema, root, 0, [])


def _resolved(schema: Any, root: Schema, depth: int, seen: list[None]) -> Schema:
    """seen: one for each schema that was looked at."""
    seen.append(None)
    if depth > DEEPEST or len(seen) > MOST_PARTS:
        raise Refused("the keyword `$ref` is in a circle, or too many schemas hold at once", "$ref")
    if schema is True:
        return {}
    if schema is False:
        raise NoValue
    if not isinstance(schema, Mapping):
        raise Refused("a schema in it is no object")
    parts = [target(schema["$ref"], root)] if "$ref" in schema else []
    if isinstance(schema.get("allOf"), list):
        parts += schema["allOf"]
        schema = without(schema, "allOf")
    found: Schema = without(schema, "$ref")
    for part in parts:
        found = combined(found, _resolved(part, root, depth + 1, seen))
    return found


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
    check_keywords(schema)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return _any_of(without(schema, key), schema[key], root, seen)
    if "allOf" in schema:
        raise Refused("the keyword `allOf` is not supported in the form in which this model writes calls", "allOf")
    if "const" in schema or "enum" in schema:
        return _values(schema)
    kinds = kinds_of(schema) if "type" in schema else _implied(schema)
    return [{**schema, "type": kind} for kind in kinds] or [schema]


def _any_of(rest: Schema, parts: list[Any], root: Schema, seen: list[None]) -> list[Schema]:
    """rest: what stands beside them."""
    found = list[Schema]()
    if len(parts) * sum(len(each) for each in rest.values() if isinstance(each, (list, Mapping))) > MOST_AGAIN:
        raise Refused("the keyword `anyOf` has too many parts for what stands beside it", "anyOf")
    for part in parts:
        with suppress(NoValue):
            found += _alternatives(combined(rest, resolved(part, root)), root, seen)
    if not found:
        raise NoValue
    return found


def _implied(schema: Schema) -> list[str]:
    """The types that the keywords are about: models keep to what is meant."""
    return [kind for kind, keys in ABOUT.items() if any(key in schema for key in keys)]


def check_keywords(schema: Schema) -> None:
    """Raises Refused for what grammars over other notations than JSON cannot do."""
    if beyond := next((k for k in BEYOND if k in schema), None):
        raise Refused(f"the keyword `{beyond}` is not supported in the form in which this model writes calls", beyond)


def _values(schema: Schema) -> list[Schema]:
    """Each type of the values that are listed, with those of its values that keep to the rest of the schema."""
    given = schema.get("enum", [schema.get("const")])
    if not isinstance(given, list):
        raise Refused("the keyword `enum` has a value that is not supported", "enum")
    kinds = kinds_of(schema)
    by_kind: dict[str, list[Any]] = {}
    for value in given:
        kind = type_of(value)
        if kind == "number" and "number" not in kinds and "integer" in kinds and value.is_integer():
            kind, value = "integer", int(value)
        typed = kind in kinds or (kind == "integer" and "number" in kinds)
        if typed and ("const" not in schema or same(value, schema["const"])) and _keeps_to(value, kind, schema):
            by_kind.setdefault(kind, []).append(value)
    if not by_kind:
        raise NoValue
    return [{"type": kind, "enum": values} for kind, values in by_kind.items()]


def _keeps_to(value: Any, kind: str, schema: Schema) -> bool:
    """Whether a value that is listed keeps to what the schema says about values of its type. Raises Refused."""
    kind = "number" if kind == "integer" else kind
    for key in ABOUT.get(kind, ()):
        if key in schema and key not in JUDGED and key != "format":
            raise Refused(f"the keyword `{key}` is not supported beside `enum` or `const`", key)
    judged = [key for key in ABOUT.get(kind, ()) if key in schema and key in JUDGED]
    if judged:
        size = exact(value if kind == "number" else len(value), "enum")
        if not all(JUDGED[key](size, exact(schema[key], key)) for key in judged):
            return False
    return kind != "string" or is_of_format(value, schema)


def exact(value: Any, key: str) -> Fraction | int:
    """A number in a schema, as its decimals say; whole ones as they are. Raises Refused."""
    wrong = not isinstance(value, (int, float)) or isinstance(value, bool) or value in (math.inf, -math.inf)
    if wrong or value != value or (key == "multipleOf" and value <= 0):
        raise Refused(f"the keyword `{key}` has a value that is not supported", key)
    return value if isinstance(value, int) else Fraction(str(value))


ABOUT: Final = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": NUMERIC,
}
JUDGED: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "minimum": lambda size, bound: size >= bound,
    "maximum": lambda size, bound: size <= bound,
    "exclusiveMinimum": lambda size, bound: size > bound,
    "exclusiveMaximum": lambda size, bound: size < bound,
    "multipleOf": lambda size, bound: size % bound == 0,
    "minLength": lambda size, bound: size >= bound,
    "maxLength": lambda size, bound: size <= bound,
    "minItems": lambda size, bound: size >= bound,
    "maxItems": lambda size, bound: size <= bound,
}


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
    others = schema.get("additionalProperties", True)
    parts = [(name, each, name in needed) for name, each in found.items()]
    parts += [(name, others, True) for name in dict.fromkeys(needed) if name not in found]
    if none := next((name for name, each, must in parts if must and each is False), None):
        raise Refused(f"{none[:80]!r} in `required` may have no value", "required")
    return [part for part in parts if part[1] is not False]


def no_name(name: str) -> Refused:
    """For a property that must come, whose name would be read as another."""
    return Refused(f"{name[:80]!r} in `required` is no name of an argument as this model writes them", "required")


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
