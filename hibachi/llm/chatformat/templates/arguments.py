"""Arguments that are no JSON object, taken apart: tags around each, keywords of Python, names without quotes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from hibachi.llm.chatformat.format import Arguments, Python, Quoted, Slot, Tagged, ToolFormat
from hibachi.llm.chatformat.templates.probes import (
    KEYS,
    NUMBER,
    VALUES,
    Called,
    Template,
    Unclear,
    same_beginning,
    same_end,
    whole_tags,
)

_OPENS = re.compile(r"[<\[{(\"]")
_VALUES: dict[str, Any] = {
    "number": NUMBER,
    "boolean": True,
    "object": {KEYS[1]: VALUES[1]},
    "array": [VALUES[1]],
    "null": None,
}


def taken_apart(template: Template, found: ToolFormat, call: Called) -> ToolFormat:
    """The format, whose ARGUMENTS now reach from the name of an argument to its value, with what is around each."""
    at = found.call.index(Slot.ARGUMENTS)
    x, w = _text(found.call, at - 1), _text(found.call, at + 1)
    close, close_number, z = _closes(template, call)
    if z is None or close is None:
        raise Unclear("no two arguments")
    if close_number is not None and close_number != close and close.startswith(close_number):
        return _quoted(found, at, close, close_number)
    opened = _beginning(x, z)
    rest = z[: len(z) - len(opened)]
    n = whole_tags(rest, same_beginning(rest, w))
    inner, end, post = x[: len(x) - len(opened)], rest[:n], w[n:]
    if not (opened.strip() and close.strip() and end.strip()):
        raise Unclear("arguments without texts around them")
    dialect = Tagged(open=opened, close=close, end=end, between=rest[n:])
    parts = [*found.call[: at - 1], *_texts(inner), Slot.ARGUMENTS, *_texts(post), *found.call[at + 2 :]]
    return replace(found, call=tuple(parts), arguments=_values(template, call, dialect))


def _text(parts: tuple[str | Slot, ...], at: int) -> str:
    part = parts[at] if 0 <= at < len(parts) else ""
    return part if isinstance(part, str) else ""


def _texts(text: str) -> list[str]:
    return [text] if text else []


def _closes(template: Template, call: Called) -> tuple[str | None, str | None, str | None]:
    """What stands between name and value of a string and of a number, and between two arguments."""
    two = template.called(replace(call, arguments={KEYS[0]: VALUES[0], KEYS[1]: VALUES[1]}))
    number = _behind(template.called(replace(call, arguments={KEYS[0]: NUMBER})), KEYS[0])
    if two is None or not re.search(f"{KEYS[0]}.*{VALUES[0]}.*{KEYS[1]}.*{VALUES[1]}", two, re.DOTALL):
        return None, None, None
    close = two.partition(KEYS[0])[2].partition(VALUES[0])[0]
    z = two.partition(VALUES[0])[2].partition(KEYS[1])[0]
    if KEYS[0] in two.partition(VALUES[0])[2]:  # written again behind the value
        z = _between_with_key(two)
    return close, None if number is None else number.partition(str(NUMBER))[0], z


def _between_with_key(two: str) -> str:
    """From the first value to the second name, in a text where names stand behind values again."""
    behind = two.partition(VALUES[0])[2]
    again = behind.index(KEYS[0]) + len(KEYS[0])
    return behind[: again - len(KEYS[0])] + "{key}" + behind[again:].partition(KEYS[1])[0]


def _behind(text: str | None, word: str) -> str | None:
    return text.partition(word)[2] if text is not None and word in text else None


def _beginning(x: str, z: str) -> str:
    """The text before a name: with what both end, from the beginning of a tag."""
    both = x[len(x) - same_end(x, z) :]
    found = _OPENS.search(both)
    return both[found.start() :] if found else both


def _quoted(found: ToolFormat, at: int, close: str, close_number: str) -> ToolFormat:
    """Strings have quotes: keywords of Python, or an object whose names have none."""
    quote = close[len(close_number) :]
    before, behind = _text(found.call, at - 1), _text(found.call, at + 1)
    if not behind.startswith(quote):
        raise Unclear("quotes that are not closed")
    behind = behind[len(quote) :]
    dialect: Arguments
    if close_number == "=" and quote in ("'", '"'):
        dialect = Python()
    elif close_number == ":" and before.endswith("{") and behind.startswith("}"):
        dialect, before, behind = Quoted(quote), before[:-1], behind[1:]
    else:
        raise Unclear("quotes of no known kind")
    parts = [*found.call[: at - 1], *_texts(before), Slot.ARGUMENTS, *_texts(behind), *found.call[at + 2 :]]
    return replace(found, call=tuple(parts), arguments=dialect)


# ---- values ----------------------------------------------------------------------------------------------------------


def _values(template: Template, call: Called, dialect: Tagged) -> Tagged:
    """The dialect with what it does to values of other types, and to strings that look like tags."""
    kinds: dict[str, str] = {}
    for kind, value in _VALUES.items():
        text = _behind(template.called(replace(call, arguments={KEYS[0]: value})), KEYS[0])
        if text is None:
            continue
        if kind == "array" and text.startswith(dialect.close + dialect.open) and VALUES[1] in text:
            item = text[len(dialect.close + dialect.open) :].partition(dialect.close)[0]
            dialect = replace(dialect, item=item)
            continue
        if dialect.item is not None:
            continue
        close, python = _spelled(text, value, dialect.end)
        if close is not None and close != dialect.close:
            kinds[kind] = close
        dialect = replace(dialect, python=dialect.python or python)
    marked = _behind(template.called(replace(call, arguments={KEYS[0]: f"{VALUES[0]}<b"})), KEYS[0])
    cdata = marked is not None and marked.startswith(f"{dialect.close}<![CDATA[{VALUES[0]}<b]]>")
    return replace(dialect, kinds=kinds, cdata=cdata)


def _spelled(text: str, value: Any, end: str) -> tuple[str | None, bool]:
    """What stands before a value, and whether it is written as Python has it."""
    before, found, _ = text.partition(end)
    for spelling, python in ((json.dumps(value), False), (repr(value), True)):
        if found and before.endswith(spelling):
            return before[: len(before) - len(spelling)], python
    return None, False
