"""Which types a JSON schema gives to properties of arguments, and values that are read by them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from hibachi.llm.chatformat.reading.values import PYTHON_VALUE, Values, escaped
from hibachi.llm.chatformat.references import referred

ALL: Final = frozenset(("string", "number", "integer", "boolean", "object", "array", "null"))
STRING: Final = frozenset(("string",))
_MOST = 256  # schemas that are looked into for one, which may refer to each other or to itself
_UNIONS = ("anyOf", "oneOf")
_WORDS = {"True": "true", "False": "false", "TRUE": "true", "FALSE": "false", "None": "null"}


class Typed:
    """A schema of a value within the schema of a tool. It says what may stand there; unknown parts allow all."""

    def __init__(self, schema: Any, root: Any = None) -> None:
        self._schema = schema
        self._root = schema if root is None else root
        self._left = _MOST
        self.types = self._types(schema)

    def property(self, name: str) -> Typed:
        """The schema of a property of an object."""
        others: Any = None
        for part in self._parts():
            properties = part.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                return Typed(properties[name], self._root)
            others = part.get("additionalProperties") if others is None else others
        return Typed(others if isinstance(others, Mapping) else True, self._root)

    def names(self) -> list[str]:
        """The properties of an object that the schema names."""
        found = (part["properties"] for part in self._parts() if isinstance(part.get("properties"), Mapping))
        return [name for properties in found for name in properties if isinstance(name, str)]

    def item(self) -> Typed:
        """The schema of an item of an array."""
        for part in self._parts():
            if isinstance(part.get("items"), Mapping):
                return Typed(part["items"], self._root)
        return Typed(True, self._root)

    def _parts(self) -> Iterator[Mapping[str, Any]]:
        """The schema, and those that it is made of."""
        left = [self._schema]
        for _ in range(_MOST):
            if not left:
                return
            part = left.pop(0)
            if isinstance(part, Mapping):
                yield part
                left += [self._referred(part["$ref"])] if "$ref" in part else []
                left += [one for word in ("allOf", *_UNIONS) for one in _listed(part.get(word))]

    def _types(self, schema: Any) -> frozenset[str]:
        self._left -= 1
        if not isinstance(schema, Mapping) or self._left < 0:
            return ALL
        out = _named(schema.get("type"))
        if values := _listed(schema.get("enum")):
            out &= frozenset().union(*map(types_of, values))
        if "const" in schema:
            out &= types_of(schema["const"])
        if "$ref" in schema:
            out &= self._types(self._referred(schema["$ref"]))
        for part in _listed(schema.get("allOf")):
            out &= self._types(part)
        for word in _UNIONS:
            if options := _listed(schema.get(word)):
                out &= frozenset().union(*(self._types(part) for part in options))
        return out or ALL

    def _referred(self, ref: Any) -> Any:
        try:
            return referred(ref, self._root)
        except LookupError:
            return True


def types_of(value: Any) -> frozenset[str]:
    """The types that a value has in JSON's words."""
    if value is None:
        return frozenset(("null",))
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, (int, float)):
        whole = isinstance(value, int) or value.is_integer()  # not every integer is as small as a float
        return frozenset(("integer", "number") if whole else ("number",))
    return frozenset(("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object",))


def value_of(text: str, types: Collection[str], python: bool = False) -> str:
    """The JSON text of a value that a model wrote: JSON if it is of one of `types` and no string, else the string.

    python: it may be Python's too, also where all types are allowed.
    """
    stripped = text.strip()
    try:
        value = json.loads(stripped, parse_constant=_refuse)
        given = stripped if not isinstance(value, str) and types_of(value) & frozenset(types) else None
    except (ValueError, OverflowError, RecursionError):
        given = _pythons(stripped, types) if python or len(types) < len(ALL) else None
    return f'"{escaped(text)}"' if given is None else given


def _pythons(text: str, types: Collection[str]) -> str | None:
    """What a model wrote as Python does, if that is a value of one of the types."""
    if text in _WORDS:
        word = _WORDS[text]
        return word if ("null" if word == "null" else "boolean") in types else None
    if not ((text.startswith("{") and "object" in types) or (text.startswith(("[", "(")) and "array" in types)):
        return None
    values = Values(PYTHON_VALUE, value=True)
    out = values.feed(text)
    return out if values.done and not values.rest.strip() else None


def _named(types: Any) -> frozenset[str]:
    names = frozenset(name for name in _listed([types] if isinstance(types, str) else types) if isinstance(name, str))
    return ((names | {"integer"} if "number" in names else names) & ALL) or ALL


def _listed(value: Any) -> list[Any]:
    return value[:_MOST] if isinstance(value, list) else []


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
