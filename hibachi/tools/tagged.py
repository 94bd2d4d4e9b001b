"""Arguments that stand between texts of their own, made JSON by the types of the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from hibachi.tools.fit import NO, SLOT, WAIT, bare, held, match
from hibachi.tools.format import Tagged
from hibachi.tools.values import PYTHON_VALUE, Values, escaped

ALL: Final = frozenset(("string", "number", "integer", "boolean", "object", "array", "null"))
STRING: Final = frozenset(("string",))
_DEPTH = 16
_PYTHON = {"True": "true", "False": "false", "TRUE": "true", "FALSE": "false", "None": "null"}


class TaggedArguments:
    """The arguments of one call as they come, see `hibachi.tools.values.Arguments`. Strings are given on in pieces,
    other values at their end.

    tail: what ends the call. types: of a property, by its name.
    """

    def __init__(self, form: Tagged, tail: str, types: Callable[[str], Collection[str]]) -> None:
        self.done = self.broken = False
        self.rest, self.closing = "", "{}"
        self._form, self._types = form, types
        self._opens = opens(form, tail)
        self._closes = _closes(form)
        self._out: list[str] = []
        self._text, self._at = "", 0
        self._step = self._between
        self._allowed: Collection[str] = ALL
        self._value: list[str] = []  # pieces of one that is no string
        self._end = self._end_word = self._lead = ""

    def feed(self, text: str) -> str:
        """The JSON text that `text` gives."""
        self._text, self._at = self._text[self._at :] + text, 0
        while not (self.done or self.broken) and self._step():
            pass
        if self.done or self.broken:
            self.rest, self._text, self._at = self._text[self._at :], "", 0
        out, self._out = "".join(self._out), []
        return out

    def _between(self) -> bool:
        """Before an argument, or the end of the call."""
        at = self._opens(self._text, self._at)
        if at == WAIT:
            return False
        if at < 0 or at == self._at:
            self.done = True
            return False
        self._at, self._step = at, self._key
        return True

    def _key(self) -> bool:
        text, start = self._text, self._at
        for at in range(start, min(len(text), start + SLOT)):
            ends = [(match(close, text, at), close) for close in self._closes if close[0] == text[at]]
            if any(end >= 0 for end, _ in ends):
                end, close = max(ends)
                return self._begin_value(text[start:at].strip(), end, close)
            if any(end == WAIT for end, _ in ends):
                return False
        self.broken = len(text) - start >= SLOT
        return False

    def _begin_value(self, key: str, at: int, close: str) -> bool:
        trail, types = self._closes[close]
        for letter in trail:  # blanks that belong to the format, where they come
            if at == len(self._text):
                return False
            if self._text[at] != letter:
                break
            at += 1
        self._at, self._step = at, self._read
        self._allowed = self._types(key) if types is None else types
        end = self._form.end.replace("{key}", key)
        self._end, self._end_word = bare(end), end.split()[0]
        self._lead = end[: len(end) - len(end.lstrip())]
        self._out.append(f'{"{" if self.closing == "{}" else ", "}"{escaped(key)}": ')
        self.closing = "}"
        if self._is_string:
            self._out.append('"')
        return True

    @property
    def _is_string(self) -> bool:
        return set(self._allowed) == STRING

    def _read(self) -> bool:
        """Reads a value up to its end."""
        text, start = self._text, self._at
        at = text.find(self._end_word, start)
        while at >= 0:
            behind = match(self._end, text, at)
            if behind >= 0:
                stop = at - len(self._lead) if text.endswith(self._lead, start, at) else at
                self._give(text[start:stop])
                return self._end_value(behind)
            if behind == WAIT:
                break
            at = text.find(self._end_word, at + 1)
        stop = at if at >= 0 else len(text)
        full = self._lead + self._end_word
        kept = max(held(text[:stop], full, start), held(text[:stop], self._end_word, start)) if at < 0 else 0
        if at >= 0 and text.endswith(self._lead, start, at):
            kept = len(self._lead)
        self._give(text[start : stop - kept])
        self._at = stop - kept
        return False

    def _give(self, text: str) -> None:
        if self._is_string:
            self._out.append(escaped(text))
        elif text:
            self._value.append(text)

    def _end_value(self, at: int) -> bool:
        if self._is_string:
            self._out.append('"')
        else:
            self._out.append(value_of("".join(self._value), self._allowed))
            self._value = []
        self._at, self._step = at, self._between
        return True


def opens(form: Tagged, tail: str) -> Callable[[str, int], int]:
    """A finder of the text before a name: it gives the place behind it, or the place itself if the call ends there."""
    ends = bare(tail.split()[0]) if tail.split() else ""
    beginnings = [bare(form.open)]
    if bare(form.between):
        beginnings.insert(0, bare(form.between + form.open))

    def find(text: str, at: int) -> int:
        if ends and (found := match(ends, text, at)) != NO:
            return at if found >= 0 else WAIT
        found = [match(beginning, text, at) for beginning in beginnings]
        best = max(found)
        return best if best >= 0 else WAIT if WAIT in found else NO

    return find


def _closes(form: Tagged) -> dict[str, tuple[str, frozenset[str] | None]]:
    """By each text that may stand between a name and its value, without blanks: the blanks at its end, and the types
    of the value that it tells.
    """
    out: dict[str, tuple[str, frozenset[str] | None]] = {}
    for close in (form.close, *form.kinds.values()):
        if bare(close):
            types = frozenset(kind for kind, text in form.kinds.items() if text == close)
            types |= {"integer"} if "number" in types else frozenset()
            out[bare(close)] = (close[len(close.rstrip()) :], types or None)
    return out


# ---- types of values ---------------------------------------------------------------------------------------------


def types_of(schema: Any, root: Any = None, depth: int = 0) -> frozenset[str]:
    """The types in JSON's words that a value of a JSON schema may have. All of them, where the schema does not say.

    root: the schema that "$ref" means; None means this one.
    """
    root = schema if root is None else root
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return ALL
    out = _named(schema.get("type"))
    if isinstance(schema.get("enum"), list):
        out &= frozenset().union(*map(_types, schema["enum"]))
    if "const" in schema:
        out &= _types(schema["const"])
    if isinstance(ref := schema.get("$ref"), str):
        out &= types_of(_referred(ref, root), root, depth + 1)
    for word in ("anyOf", "oneOf"):
        if isinstance(forms := schema.get(word), list) and forms:
            out &= frozenset().union(*(types_of(form, root, depth + 1) for form in forms))
    if isinstance(forms := schema.get("allOf"), list):
        for form in forms:
            out &= types_of(form, root, depth + 1)
    return out or ALL


def property_types(schema: Any, name: str) -> frozenset[str]:
    """The types that property `name` of an object may have."""
    found: Any = schema
    for _ in range(_DEPTH):
        if not isinstance(found, Mapping):
            return ALL
        properties = found.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return types_of(properties[name], schema)
        if not isinstance(found.get("$ref"), str):
            break
        found = _referred(found["$ref"], schema)
    if isinstance(found, Mapping) and isinstance(found.get("additionalProperties"), Mapping):
        return types_of(found["additionalProperties"], schema)
    return ALL


def value_of(text: str, types: Collection[str]) -> str:
    """The JSON text of a value that a model wrote: JSON if it is of one of `types` and no string, else the string."""
    stripped = text.strip()
    try:
        value = json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        given = _pythons(stripped, types)
    else:
        given = stripped if not isinstance(value, str) and _types(value) & set(types) else None
    return f'"{escaped(text)}"' if given is None else given


def _pythons(text: str, types: Collection[str]) -> str | None:
    """What a model wrote as Python does, where the schema says that it is no string."""
    if len(types) == len(ALL):
        return None
    if text in _PYTHON:
        word = _PYTHON[text]
        return word if ("null" if word == "null" else "boolean") in types else None
    if text[:1] not in ("{", "[", "(") or not {"object", "array"} & set(types):
        return None
    values = Values(PYTHON_VALUE, value=True)
    out = values.feed(text)
    return out if values.done and not values.rest.strip() else None


def _named(types: Any) -> frozenset[str]:
    names = frozenset([types] if isinstance(types, str) else types if isinstance(types, list) else ()) & ALL
    return (names | {"integer"} if "number" in names else names) or ALL


def _types(value: Any) -> frozenset[str]:
    if value is None:
        return frozenset(("null",))
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, int):
        return frozenset(("integer", "number"))
    if isinstance(value, float):
        return frozenset(("integer", "number") if value.is_integer() else ("number",))
    return frozenset(("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object",))


def _referred(ref: str, root: Any) -> Any:
    found = root
    for part in ref.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
