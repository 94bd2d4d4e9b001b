"""Calls as a format writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hibachi.errors import InvalidRequest
from hibachi.llm.chatformat.format import Json, Python, Quoted, Slot, Tagged, ToolFormat
from hibachi.llm.chatformat.reading.values import escaped
from hibachi.llm.chatformat.tools import ToolCall

_BARE = re.compile(r"[\w.-]+")
_XML = re.compile(r"[<&\n]")


class _Number(str):
    """A number as JSON writes it."""


@dataclass(frozen=True, slots=True)
class _Style:
    string: Callable[[str], str]
    key: Callable[[str], str]
    words: tuple[str, str, str]  # null, false, true
    colon: str = ": "
    comma: str = ", "


def written(format: ToolFormat, calls: Sequence[ToolCall]) -> str:
    """All calls of one answer. Blanks and numbers are as the format and JSON have them.

    A string that holds what ends a string in the format is written all the same, and will be read as ending there.
    Raises InvalidRequest if arguments are no JSON object.
    """
    texts = ["".join(_part(format, part, call, i) for part in format.call) for i, call in enumerate(calls)]
    return format.begin + format.between.join(texts) + format.end


def _part(format: ToolFormat, part: str | Slot, call: ToolCall, i: int) -> str:
    if not isinstance(part, Slot):
        return part
    if part is Slot.ARGUMENTS:
        return _arguments(format, call)
    slots = {Slot.NAME: call.name, Slot.ID: call.id or "", Slot.NUMBER: str(format.first_number + i)}
    return slots.get(part, "function")


def _arguments(format: ToolFormat, call: ToolCall) -> str:
    try:
        values = json.loads(call.arguments or "{}", parse_int=_Number, parse_float=_Number)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InvalidRequest(
            f"Expected the arguments of a call of {call.name!r} as the JSON text of an object, such as '{{\"a\": 1}}', "
            f"got {call.arguments[:100]!r}."
        )
    dialect = format.arguments
    if isinstance(dialect, Json):
        return _literal(values, _Style(_quoted, _quoted, ("null", "false", "true")))
    if isinstance(dialect, Python):
        style = _Style(_python, _python, ("None", "False", "True"))
        return ", ".join(f"{key}={_literal(value, style)}" for key, value in values.items())
    if isinstance(dialect, Quoted):
        return _literal(values, _quoting(dialect.quote))
    return _elements(dialect, list(values.items()))


def _literal(value: Any, style: _Style) -> str:
    if isinstance(value, _Number):
        return str(value)
    if isinstance(value, str):
        return style.string(value)
    if isinstance(value, dict):
        entries = (style.key(key) + style.colon + _literal(entry, style) for key, entry in value.items())
        return "{" + style.comma.join(entries) + "}"
    if isinstance(value, list):
        return "[" + style.comma.join(_literal(entry, style) for entry in value) + "]"
    return style.words[0 if value is None else 1 + bool(value)]


def _quoted(text: str) -> str:
    return f'"{escaped(text)}"'


def _python(text: str) -> str:
    return "'" + escaped(text).replace("'", "\\'") + "'"


def _quoting(quote: str) -> _Style:
    def string(text: str) -> str:
        return quote + text + quote

    def key(text: str) -> str:
        return text if _BARE.fullmatch(text) else string(text)

    return _Style(string, key, ("null", "false", "true"), ":", ",")


def _elements(dialect: Tagged, values: Sequence[tuple[str, Any]]) -> str:
    elements = []
    for key, value in values:
        close = dialect.kinds.get(_kind(value), dialect.close)
        around = [text.replace("{key}", key) for text in (dialect.open, close, dialect.end)]
        elements.append(around[0] + dialect.written(key) + around[1] + _element(dialect, value) + around[2])
    return dialect.between.join(elements)


def _element(dialect: Tagged, value: Any) -> str:
    if dialect.item is not None and isinstance(value, dict):
        return _elements(dialect, list(value.items()))
    if dialect.item is not None and isinstance(value, list):
        return _elements(dialect, [(dialect.item, entry) for entry in value])
    if isinstance(value, str) and not isinstance(value, _Number):
        return f"<![CDATA[{value}]]>" if dialect.cdata and _XML.search(value) else value
    return _literal(value, _Style(_quoted, _quoted, ("null", "false", "true")))


def _kind(value: Any) -> str:
    if isinstance(value, _Number):
        return "number"
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return "string" if isinstance(value, str) else "object" if isinstance(value, dict) else "array"
