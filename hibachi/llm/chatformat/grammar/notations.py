"""Rules for values that are written neither as JSON nor as plain text: as Python does, or with quotes of their own."""

from __future__ import annotations

import re
from typing import Any, Protocol

from hibachi.engine.guide.worker import Refused
from hibachi.llm.chatformat.grammar.joining import Schema
from hibachi.llm.chatformat.grammar.lark import Rules, chain, joined, quoted, repeated
from hibachi.llm.chatformat.grammar.schemas import alternatives, no_name, number, properties
from hibachi.llm.chatformat.grammar.strings import is_shaped, string_body

BARE = re.compile(r"[\w.-]+")
KEYWORD = re.compile(r"""[^\s,=()\[\]{}"']{1,256}""")
IDENTIFIER = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


class Words(Protocol):
    """How a notation writes strings, names and what stands between values; all are parts of rules."""

    comma: str
    colon: str
    true: str
    false: str
    null: str

    def string(self, schema: Schema) -> str: ...

    def given(self, text: str) -> str:
        """Exactly this string."""
        ...

    def key(self, name: str) -> str:
        """A name in an object."""
        ...

    def any_key(self) -> str: ...


class PythonWords:
    """As `repr` and people write: strings between quotes of either kind. Words of JSON are read as well."""

    comma, colon = "/, ?/", "/: ?/"
    true, false, null = '"True"', '"False"', '"None"'

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def string(self, schema: Schema) -> str:
        written = [self._between(schema, quote) for quote in "'\""]
        return self._rules.terminal(" | ".join(written), "STRING")

    def _between(self, schema: Schema, quote: str) -> str:
        if is_shaped(schema):  # of which is taken what needs no escapes
            body = f"({string_body(schema)}) & /[^{quote}\\\\\\n\\r]*/"
        else:
            body = string_body(schema, f"[^{quote}\\\\\\n\\r]|\\\\[nrt'\"\\\\]")
        return f"{quoted(quote)} ({body}) {quoted(quote)}"

    def given(self, text: str) -> str:
        return quoted(python_string(text))

    def key(self, name: str) -> str:
        return self._rules.terminal(f"{quoted(python_string(name))} | {quoted(python_string(name, chr(34)))}", "KEY")

    def any_key(self) -> str:
        return self.string({})


def python_string(text: str, quote: str = "'") -> str:
    for old, new in (("\\", "\\\\"), (quote, "\\" + quote), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        text = text.replace(old, new)
    return f"{quote}{text}{quote}"


class QuotedWords:
    """Strings stand between quotes that do not come in them; names have none."""

    comma, colon = '","', '":"'
    true, false, null = '"true"', '"false"', '"null"'

    def __init__(self, rules: Rules, quote: str) -> None:
        self._rules, self._quote = rules, quote

    def string(self, schema: Schema) -> str:
        begin = self._rules.fixed(self._quote)
        return self._rules.rule(
            f"{begin} {self._rules.before(self._quote, string_body(schema), self._quote)}", "string"
        )

    def given(self, text: str) -> str:
        if self._quote in text:
            raise Refused(f"the keyword `enum` has a text with {self._quote}, which the model cannot write", "enum")
        quote = self._rules.cut(self._quote)
        return f"{joined(quote)} {quoted(text)} {joined(quote)}" if text else f"{joined(quote)} {joined(quote)}"

    def key(self, name: str) -> str:
        return quoted(name) if BARE.fullmatch(name) else self.given(name)

    def any_key(self) -> str:
        return self._rules.terminal(IDENTIFIER, "WORD")


class Literals:
    """Rules of values by their schemas. root: of the tool, where references lead. Raises Refused."""

    def __init__(self, rules: Rules, words: Words, root: Schema) -> None:
        self._rules, self._words, self._root = rules, words, root
        self._any = ""
        self._known: dict[int, str] = {}  # rules by the ids of parts of the root
        self._open: dict[int, str] = {}  # of those that are being made

    def keywords(self, schema: Schema) -> str:
        """The arguments of a call in Python, without its brackets."""
        found = properties(schema)
        more = schema.get("additionalProperties", False)
        if not found and more is not False:
            word = self._rules.terminal(f'{IDENTIFIER} "="', "WORD")
            each = self._rules.rule(f"{word} {self.any() if more is True else self.value(more)}", "argument")
            return repeated(each, f"{self._words.comma} {each}", 0, "")
        if odd := [name for name, _, needed in found if needed and not KEYWORD.fullmatch(name)]:
            raise no_name(odd[0])
        return self._chain(
            [
                (self._rules.rule(f"{quoted(name + '=')} {self.value(each)}", "argument"), needed)
                for name, each, needed in found
                if KEYWORD.fullmatch(name)
            ]
        )

    def _chain(self, parts: list[tuple[str, bool]]) -> str:
        return chain(self._rules, [(part, f"{self._words.comma} {part}", needed) for part, needed in parts])

    def value(self, schema: Any) -> str:
        """The name of a rule. It is made once for each part of the tool's schema, as values can hold themselves."""
        key = id(schema)
        if key in self._known:
            return self._known[key]
        if key in self._open:
            self._open[key] = self._open[key] or self._rules.reserve("value")
            return self._open[key]
        self._open[key] = ""
        body = self._alternatives(schema)
        name = self._open.pop(key)
        if name:
            self._rules.define(name, body)
        self._known[key] = name or self._rules.rule(body, "value")
        return self._known[key]

    def _alternatives(self, schema: Any) -> str:
        return " | ".join(self._one(kind) for kind in alternatives(schema, self._root))

    def _one(self, kind: Schema) -> str:
        if "enum" in kind:
            return " | ".join(self._given(value) for value in kind["enum"])
        match kind.get("type"):
            case "string":
                return self._words.string(kind)
            case "number" | "integer":
                return self._rules.json(number(kind))
            case "boolean":
                return f"{self._words.true} | {self._words.false}"
            case "null":
                return self._words.null
            case "array":
                return self._array(kind)
            case "object":
                return self.object(kind)
        return self.any()

    def _array(self, kind: Schema) -> str:
        each = self.value(kind["items"]) if "items" in kind else self.any()
        later = f"{self._words.comma} {each}"
        items = repeated(each, later, kind.get("minItems", 0), kind.get("maxItems", ""))
        return f'"[" {items} "]"'

    def object(self, kind: Schema, *, top: bool = False) -> str:
        """An object; names that the schema does not have do not come, unless it has none at all. top: all arguments."""
        words, rules = self._words, self._rules
        found = properties(kind)
        if not found:
            more = kind.get("additionalProperties", not top)
            if more is False:
                return '"{" "}"'
            entry = rules.rule(f"{words.any_key()} {words.colon} {self.any() if more is True else self.value(more)}")
            return f'"{{" ({entry} ({words.comma} {entry})*)? "}}"'
        parts = [
            (rules.rule(f"{words.key(name)} {words.colon} {self.value(each)}", "entry"), needed)
            for name, each, needed in found
        ]
        return f'"{{" {self._chain(parts)} "}}"'

    def any(self) -> str:
        """Any value."""
        if not self._any:
            words, rules = self._words, self._rules
            self._any = name = rules.reserve("any")
            entry = f"{words.any_key()} {words.colon} {name}"
            rules.define(
                name,
                f"{words.string({})} | {rules.json({'type': 'number'})} | {words.true} | {words.false} | {words.null}"
                f' | "[" ({name} ({words.comma} {name})*)? "]" | "{{" ({entry} ({words.comma} {entry})*)? "}}"',
            )
        return self._any

    def _given(self, value: Any) -> str:
        """Exactly this value."""
        words = self._words
        if value is None:
            return words.null
        if isinstance(value, bool):
            return words.true if value else words.false
        if isinstance(value, (int, float)):
            return quoted(repr(value))
        if isinstance(value, str):
            return words.given(value)
        if isinstance(value, list):
            inner = f" {words.comma} ".join(f"({self._given(each)})" for each in value)
            return f'"[" {inner} "]"'
        inner = f" {words.comma} ".join(f"{words.key(k)} {words.colon} {self._given(v)}" for k, v in value.items())
        return f'"{{" {inner} "}}"'
