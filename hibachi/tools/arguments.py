"""Rules for the arguments of a call, by the tool's schema and the notation in which the model writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hibachi.guide.worker import Refused
from hibachi.tools.format import Arguments, Json, Python, Quoted, Tagged
from hibachi.tools.lark import Rules, chain, quoted, repeated
from hibachi.tools.notations import Literals, PythonWords, QuotedWords
from hibachi.tools.schemas import (
    Schema,
    alone,
    alternatives,
    as_json,
    number,
    properties,
    resolved,
    string_body,
)

COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")
WORD = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"  # for names that the schema leaves open


def arguments(rules: Rules, dialect: Arguments, parameters: Schema) -> str:
    """The name of a rule, or an expression, for the arguments of one call. Raises Refused."""
    schema = as_object(parameters)
    if isinstance(dialect, Json):
        return quoted("{}") if is_empty(schema) else rules.json(closed(schema))
    schema = resolved(schema, schema)
    if isinstance(dialect, Tagged):
        return TaggedWords(rules, dialect, schema).entries(schema)
    if isinstance(dialect, Python):
        return Literals(rules, PythonWords(rules), schema).keywords(schema)
    assert isinstance(dialect, Quoted)
    return Literals(rules, QuotedWords(rules, dialect.quote), schema).object(schema)


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
    return not schema.get("properties") and not any(
        schema.get(key) for key in (*COMBINING, "additionalProperties", "required")
    )


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Without further arguments, unless the schema speaks of them: a function takes no others."""
    if "additionalProperties" in schema or any(key in schema for key in COMBINING):
        return schema
    return {**schema, "additionalProperties": False}


class TaggedWords:
    """Arguments between texts of their own, see `Tagged`."""

    def __init__(self, rules: Rules, dialect: Tagged, root: Schema) -> None:
        self._rules, self._dialect, self._root = rules, dialect, root
        self._open: list[str] = []  # references that are being followed

    def entries(self, schema: Schema) -> str:
        """All that an object holds. Names that its schema does not have do not come, unless it has none at all."""
        if any(key in schema for key in ("allOf", "anyOf", "oneOf", "patternProperties")):
            raise Refused("`properties` are needed at its top in the form in which this model writes calls", "anyOf")
        found = properties(schema)
        more = schema.get("additionalProperties", False)
        if not found and more is not False:
            between = self._rules.fixed(self._dialect.between)
            each = self._entry("", more)
            return self._rules.rule(f"({each} ({between} {each})*)?", "entries")
        parts = [(self._entry(name, each), needed) for name, each, needed in found]
        return chain(self._rules, parts, self._rules.fixed(self._dialect.between))

    def _entry(self, name: str, schema: Any) -> str:
        """One argument. name: "" means any."""
        rules, dialect = self._rules, self._dialect
        end = dialect.end.replace("{key}", name)
        kinds = alternatives(schema, self._root)
        begin = dialect.open.replace("{key}", name)
        if not name and "{key}" in f"{dialect.open}{dialect.close}{dialect.end}":
            raise Refused("names of properties are needed in the form in which this model writes calls", "properties")
        word = [] if name else [rules.terminal(WORD, "WORD")]
        if not dialect.kinds:
            close = dialect.close.replace("{key}", name)
            lead = [rules.fixed(begin), *word, rules.fixed(close)] if word else [rules.fixed(begin + name + close)]
            return rules.rule(" ".join([*lead, self._value(kinds, end)]), "entry")
        found = []
        for kind in [each for k in kinds for each in typed(k)]:
            said = "number" if kind["type"] == "integer" else kind["type"]
            close = dialect.kinds.get(said, dialect.close).replace("{key}", name)
            lead = [rules.fixed(begin), *word, rules.fixed(close)] if word else [rules.fixed(begin + name + close)]
            found.append(" ".join([*lead, self._value([kind], end)]))
        return rules.rule(" | ".join(found), "entry")

    def _value(self, kinds: list[Schema], end: str) -> str:
        """A value and the text that ends it. Where it may be a string it is any text, or else one of what is listed."""
        texts = [kind for kind in kinds if kind.get("type", "string") == "string"]
        if not texts:
            return self._rules.rule(" | ".join(self._other(kind, end) for kind in kinds), "value")
        bodies = [self._rules.either(kind["enum"]) if "enum" in kind else string_body(kind) for kind in texts]
        for kind in kinds:
            bodies += plain(kind)
        return self._raw(" | ".join(f"({body})" for body in bodies), end)

    def _raw(self, body: str, end: str) -> str:
        rules, core = self._rules, self._dialect.end.partition("{key}")[0].strip()
        if not self._dialect.cdata:
            return rules.before(core or end, body, end)
        bare = rules.terminal(f"({body}) & /[^<&\\n]*/", "BARE")
        within = rules.before("]]>", body, "]]>" + end)
        return rules.rule(f"{bare} {rules.fixed(end)} | {quoted('<![CDATA[')} {within}", "raw")

    def _other(self, kind: Schema, end: str) -> str:
        """A value that is no string, and the end."""
        rules, dialect = self._rules, self._dialect
        if dialect.item is not None and kind["type"] == "object" and "enum" not in kind:
            return f"{self.entries(kind)} {rules.fixed(end)}"
        if dialect.item is not None and kind["type"] == "array" and "enum" not in kind:
            each = self._entry(dialect.item, kind.get("items", True))
            least, most = kind.get("minItems", 0), kind.get("maxItems", "")
            return f"{repeated(each, rules.fixed(dialect.between), least, most)} {rules.fixed(end)}"
        schema = number(kind) if kind["type"] in ("number", "integer") else alone(kind, self._root)
        return f"{rules.json(schema)} {rules.fixed(end)}"


def typed(kind: Schema) -> list[Schema]:
    """Schemas with a type each: a schema without one is of any."""
    if "type" in kind:
        return [kind]
    return [{**kind, "type": name} for name in ("string", "number", "boolean", "object", "array", "null")]


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
