"""Rules for the arguments of a call, by the tool's schema and the notation in which the model writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hibachi.engine.guide.worker import Refused
from hibachi.llm.chatformat.format import Arguments, Json, Python, Quoted, Tagged
from hibachi.llm.chatformat.grammar.joining import Schema
from hibachi.llm.chatformat.grammar.lark import Rules, chain, quoted, repeated
from hibachi.llm.chatformat.grammar.notations import Literals, PythonWords, QuotedWords
from hibachi.llm.chatformat.grammar.schemas import (
    alone,
    alternatives,
    as_json,
    check_keywords,
    no_name,
    number,
    properties,
    resolved,
)
from hibachi.llm.chatformat.grammar.strings import string_body
from hibachi.llm.chatformat.reading.schema_types import ALL, Typed, value_of
from hibachi.llm.chatformat.reading.slots import SLOT
from hibachi.llm.chatformat.reading.values import escaped

COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "minProperties", "propertyNames")
CHOOSING = ("allOf", "anyOf", "oneOf", "enum", "const")
NOTES = ("title", "description", "default", "examples")
MOST = 64  # objects whose entries have texts of their own
WORD = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"  # for names that the schema leaves open


def arguments(rules: Rules, dialect: Arguments, parameters: Schema) -> str:
    """The name of a rule, or an expression, for the arguments of one call. Raises Refused."""
    schema = as_object(parameters)
    if isinstance(dialect, Json):
        return quoted("{}") if is_empty(schema) else rules.json(closed(schema))
    top = resolved(schema, schema)
    check_keywords(top)
    if found := next((key for key in CHOOSING if key in top), None):
        raise Refused("`properties` are needed at its top in the form in which this model writes calls", found)
    if isinstance(dialect, Tagged):
        return TaggedWords(rules, dialect, schema).entries(top)
    if isinstance(dialect, Python):
        return Literals(rules, PythonWords(rules), schema).keywords(top)
    assert isinstance(dialect, Quoted)
    return Literals(rules, QuotedWords(rules, dialect.quote), schema).object(top, top=True)


def as_object(parameters: Any) -> dict[str, Any]:
    """The schema of arguments; nothing means there are none."""
    if not isinstance(parameters, Mapping):
        raise Refused("it must be a JSON schema of an object")
    schema = dict(parameters)
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise Refused('its `type` must be "object", as arguments have names', "type")
    return {**schema, "type": "object"}


def is_empty(schema: Schema) -> bool:
    """No arguments. To JSON Schema any would do, but the client has named none."""
    named = schema.get("properties") or schema.get("required")
    more = schema.get("additionalProperties", False) is not False  # {} is as good as true
    known = {"type", "properties", "required", "additionalProperties", "$schema", *NOTES}
    return not named and not more and not set(schema) - known


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Without further arguments, unless the schema speaks of them: a function takes no others."""
    if "additionalProperties" in schema or any(key in schema for key in COMBINING):
        return schema
    names, given = [name for name, *_ in properties(schema)], schema.get("properties", {})
    return {**schema, "additionalProperties": False} if names and all(n in given for n in names) else schema


class TaggedWords:
    """Arguments between texts of their own, see `Tagged`."""

    def __init__(self, rules: Rules, dialect: Tagged, root: Schema) -> None:
        self._rules, self._dialect, self._root = rules, dialect, root
        self._objects = 0
        self._barred: list[str] = []  # arguments, for which the reader of calls would take them in a value

    def entries(self, schema: Schema) -> str:
        """All that an object holds. Names that its schema does not have do not come, unless it has none at all."""
        self._objects += 1
        if self._objects > MOST:
            raise Refused(f"it has more than {MOST} objects that are written without JSON, or one that holds itself")
        found = properties(schema)
        if self._objects == 1 and self._dialect.item is None:
            end, close = self._dialect.end, self._dialect.close.lstrip()[:1]
            begin = end[: len(end) - len(end.lstrip())] + self._dialect.open.strip()
            self._barred = [f"{begin}{self._dialect.written(name)}{close}" for name, *_ in found]
        more = schema.get("additionalProperties", False)
        if not found and more is not False:
            return self._rules.rule(repeated(*self._entry("", more), 0, ""), "entries")
        if odd := [name for name, _, needed in found if needed and not self._can_be_read(name)]:
            raise no_name(odd[0])
        written = [each for each in found if self._can_be_read(each[0])]
        return chain(self._rules, [(*self._entry(name, each), needed) for name, each, needed in written])

    def _can_be_read(self, name: str) -> bool:
        """Whether a name ends where it does, and not before: none of the texts behind it begins within it. Longer names
        are not read.
        """
        if not 0 < len(name) < SLOT or name != name.strip():
            return False
        letters = "".join(self._dialect.written(name).split())
        closes = ("".join(text.split()) for text in (self._dialect.close, *self._dialect.kinds.values()))
        return all((letters + text).find(text) == len(letters) for text in closes)

    def _entry(self, name: str, schema: Any) -> tuple[str, str]:
        """One argument as the first, and as it is behind another. name: "" means any."""
        dialect = self._dialect
        if not name and "{key}" in f"{dialect.open}{dialect.close}{dialect.end}":
            raise Refused("names of properties are needed in the form in which this model writes calls", "properties")
        kinds, read = alternatives(schema, self._root), Typed(schema, self._root).types
        first = self._led(name, kinds, read, "")
        return first, self._led(name, kinds, read, dialect.between) if dialect.between else first

    def _led(self, name: str, kinds: list[Schema], read: frozenset[str], lead: str) -> str:
        """One argument behind a text. Both are one, as the lexer never goes back: what ends them all may begin like
        what comes between two. read: the types that the reader of calls takes a text for.
        """
        dialect = self._dialect
        begin, end = lead + dialect.open.replace("{key}", name), dialect.end.replace("{key}", name)
        if not dialect.kinds:
            value = self._value(kinds, read, end)
            return self._rules.rule(f"{self._named(begin, name, dialect.close)} {value}", "entry")
        found = []
        for kind in [each for k in kinds for each in typed(k)]:
            close = dialect.kinds.get("number" if kind["type"] == "integer" else kind["type"], dialect.close)
            only = frozenset((kind["type"],))  # as is written
            found.append(f"{self._named(begin, name, close)} {self._value([kind], only, end)}")
        return self._rules.rule(" | ".join(found), "entry")

    def _named(self, begin: str, name: str, close: str) -> str:
        rules = self._rules
        if name:
            return rules.fixed(begin + self._dialect.written(name) + close.replace("{key}", name))
        return " ".join([rules.fixed(begin), rules.terminal(WORD, "WORD"), rules.fixed(close)])

    def _value(self, kinds: list[Schema], read: frozenset[str], end: str) -> str:
        """A value and the text that ends it. Where it may be a string it is any text, or else one of what is listed."""
        strings = [kind for kind in kinds if kind.get("type", "string") == "string"]
        others = [kind for kind in kinds if kind.get("type", "string") != "string"]
        listed = [text for kind in strings for text in kind.get("enum", ())]
        free = [string_body(kind) for kind in strings if "enum" not in kind]
        # A text that looks like another value would be read as that.
        apart = [" & ~".join([f"({body})", *looks([*others, *unlisted(kinds, read)])]) for body in free]
        plain_ = [text for text in listed if self._is_read(text, read, end)]
        bodies = [*apart, *map(quoted, plain_), *(body for kind in others for body in plain(kind))]
        found = [self._bare(either(bodies), end)] if free or plain_ else self._others(others, end)
        within = [*free, *(quoted(text) for text in listed if "]]>" not in text)]
        if self._dialect.cdata and within:
            found.append(f"{quoted('<![CDATA[')} {self._rules.before(']]>', either(within), ']]>' + end)}")
        if not found:
            raise Refused("the keyword `enum` has no text that this model can write as a value", "enum")
        return self._rules.rule(" | ".join(found), "value")

    def _is_read(self, text: str, read: frozenset[str], end: str) -> bool:
        """Whether a string that is written as it is will be read as this string."""
        if (self._dialect.cdata and re.search(r"[<&\n]", text)) or end.split()[0] in text:
            return False
        return value_of(text, read, self._dialect.python) == f'"{escaped(text)}"'

    def _bare(self, body: str, end: str) -> str:
        """A text and what ends it; no more than a line where others stand between brackets of XML."""
        rules = self._rules
        if not self._dialect.cdata:
            return rules.before(end.split()[0], body, end, self._barred)
        line = rules.terminal(f"({body}) & /[^<&\\n]*/", "BARE")
        return f"{line} {rules.fixed(end)}"

    def _others(self, kinds: list[Schema], end: str) -> list[str]:
        """Values that are no strings, and the end. Where nothing would be read as an object, an array is not empty."""
        least = int(self._dialect.item is not None and any(kind["type"] == "object" for kind in kinds))
        return [self._other(kind, end, least) for kind in kinds if kind.get("maxItems") != 0 or not least]

    def _other(self, kind: Schema, end: str, least: int) -> str:
        """least: entries of an array that has no brackets."""
        rules, dialect = self._rules, self._dialect
        if dialect.item is not None and kind["type"] == "object" and "enum" not in kind:
            return f"{self.entries(kind)} {rules.fixed(end)}"
        if dialect.item is not None and kind["type"] == "array" and "enum" not in kind:
            each = self._entry(dialect.item, kind.get("items", True))
            asked = kind.get("minItems", 0)
            several = repeated(*each, max(least, asked) if isinstance(asked, int) else asked, kind.get("maxItems", ""))
            return f"{several} {rules.fixed(end)}"
        schema = number(kind) if kind["type"] in ("number", "integer") else alone(kind, self._root)
        return f"{rules.json(schema)} {rules.fixed(end)}"


def typed(kind: Schema) -> list[Schema]:
    """Schemas with a type each: a schema without one is of any."""
    if "type" in kind:
        return [kind]
    return [{**kind, "type": name} for name in ("string", "number", "boolean", "object", "array", "null")]


def either(bodies: list[str]) -> str:
    return " | ".join(f"({body})" for body in bodies)


def unlisted(kinds: list[Schema], read: frozenset[str]) -> list[Schema]:
    """Types that a text would be read as, and no value of which may come."""
    types = {kind.get("type", "") for kind in kinds}
    types |= {"integer"} if "number" in types else {"number"} if "integer" in types else set()
    # Where all may be read, what is not among the kinds is of a type that the schema says nothing about.
    return [] if read == ALL else [{"type": kind, "enum": []} for kind in sorted(read - types)]


def looks(kinds: list[Schema]) -> list[str]:
    """What values look like of which not any will do, but some: numbers, objects and arrays; words."""
    bounded = {kind.get("type") for kind in kinds if set(kind) - {"type", *NOTES}}
    found = ["/[ \\t\\r\\n]*[-0-9{\\[(](?s:.)*/"] if bounded & {"number", "integer", "object", "array"} else []
    return [*found, "/(?i:[ \\t\\r\\n]*(true|false)[ \\t\\r\\n]*)/"] if "boolean" in bounded else found


def plain(kind: Schema) -> list[str]:
    """What a value beside a string may be: what a regular expression can say. Of others the string is left."""
    match kind.get("type"):
        case "null":
            return ['"null"']
        case "boolean" | "integer" | "number" if "enum" in kind:
            return [quoted(as_json(value)) for value in kind["enum"]]
        case "boolean":
            return ['"true" | "false"']
        case "integer" if not set(number(kind)) - {"type"}:
            return ["/-?(0|[1-9][0-9]*)/"]
    return []
