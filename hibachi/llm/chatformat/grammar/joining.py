"""Two JSON schemas that hold at once, as one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from hibachi.engine.guide.worker import Refused, says_nothing

Schema: TypeAlias = Mapping[str, Any]
TYPES: Final = ("string", "number", "integer", "boolean", "object", "array", "null")
NUMERIC: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# What says more than the grammars here can, by themselves or beside others.
BEYOND: Final = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "uniqueItems",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "patternProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
    "minProperties",
    "maxProperties",
    "prefixItems",
    "$dynamicRef",
    "$recursiveRef",
)
LEAST: Final = ("minimum", "exclusiveMinimum", "minLength", "minItems")
MOST: Final = ("maximum", "exclusiveMaximum", "maxLength", "maxItems")
MEMBERS: Final = ("properties", "additionalProperties")
# What says something about a value. All else is a note to the reader, such as a title.
OTHERS: Final = (
    "type",
    "enum",
    "const",
    "multipleOf",
    "pattern",
    "format",
    "items",
    "required",
    "anyOf",
    "oneOf",
    "allOf",
)
SAYING: Final = frozenset((*OTHERS, *LEAST, *MOST, *BEYOND))


class NoValue(Refused):
    """No value satisfies a schema. Of several it is left out."""

    def __init__(self) -> None:
        super().__init__("no value satisfies it")


def combined(one: Schema, other: Schema) -> Schema:
    """A schema of the values that keep to both. Of what only notes say, the first's is kept.

    Raises Refused for a keyword that both have and that no schema here can say at once.
    """
    found = {**other, **one}
    for key in one:
        if key in SAYING and key in other:
            found[key] = _both(key, one[key], other[key])
    if any(key in one for key in MEMBERS) and any(key in other for key in MEMBERS):
        found.update(_members(one, other))
    return found


def _both(key: str, one: Any, other: Any) -> Any:
    """What a keyword says, where two values of it hold."""
    if key == "type":
        return _common(kinds_of({"type": one}), kinds_of({"type": other}))
    if same(one, other) or says_nothing(key, other):
        return one
    if says_nothing(key, one):
        return other
    if key == "const":
        raise NoValue
    if key in (*LEAST, *MOST) and _is_number(one) and _is_number(other):
        return max(one, other) if key in LEAST else min(one, other)
    if key in ("enum", "required") and isinstance(one, list) and isinstance(other, list):
        if key == "required":
            return list({marked(name): name for name in (*one, *other)}.values())
        listed = set(map(marked, other))
        return [value for value in one if marked(value) in listed]
    raise twice(key)


def _common(one: list[str], other: list[str]) -> list[str]:
    """Types that both allow: an integer is a number."""
    both = _wide(one) & _wide(other)
    if not both:
        raise NoValue
    return [kind for kind in TYPES if kind in both and not (kind == "integer" and "number" in both)]


def _wide(kinds: list[str]) -> set[str]:
    return {*kinds, *(("integer",) if "number" in kinds else ())}


def _members(one: Schema, other: Schema) -> dict[str, Any]:
    """`properties` and `additionalProperties` of both."""
    ours, theirs = (each.get("properties", {}) for each in (one, other))
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        raise Refused("the keyword `properties` has a value that is not supported", "properties")
    found = {name: each if name in theirs else _also(each, other) for name, each in ours.items()}
    found |= {name: _also(each, one) for name, each in theirs.items() if name not in ours}
    if any(name in theirs and not same(each, theirs[name]) for name, each in ours.items()):
        raise twice("properties")
    more = [each["additionalProperties"] for each in (one, other) if "additionalProperties" in each]
    joined = {"properties": found} if "properties" in one or "properties" in other else {}
    return {**joined, "additionalProperties": _more(more[0], more[-1])} if more else joined


def _also(schema: Any, other: Schema) -> Any:
    """The schema of a property that only `additionalProperties` of the other is about."""
    return _more(schema, other.get("additionalProperties", True))


def _more(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    if _says_none(other) or same(one, other):
        return one
    if _says_none(one):
        return other
    raise twice("additionalProperties")


def _says_none(schema: Any) -> bool:
    return schema is True or schema == {}


def twice(key: str) -> Refused:
    return Refused(
        f"the keyword `{key}` says two things at once, which is not supported in the form in which this model writes "
        f"calls",
        key,
    )


def kinds_of(schema: Schema) -> list[str]:
    """The types that a schema allows. Raises Refused."""
    kinds = schema.get("type", list(TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, Sequence) or not kinds or not all(kind in TYPES for kind in kinds):
        raise Refused("the keyword `type` has a value that is not supported", "type")
    return list(kinds)


def same(one: Any, other: Any) -> bool:
    """Whether two values of JSON are equal: 1 is 1.0, and is not true."""
    return marked(one) == marked(other)


def marked(value: Any) -> Hashable:
    """What is equal where two values of JSON are."""
    if isinstance(value, Mapping):
        return "object", frozenset((name, marked(each)) for name, each in value.items())
    if isinstance(value, list):
        return "array", tuple(map(marked, value))
    return ("boolean", value) if isinstance(value, bool) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
