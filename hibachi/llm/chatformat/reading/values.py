"""Arguments of calls as they come, made JSON: of JSON, of Python's keywords, of JSON with quotes of its own."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Final, Protocol

from hibachi.llm.chatformat.reading.slots import SLOT, held, skip

SCALAR: Final = 4096
"""Characters that a number or a name has at most."""


class ArgumentsReader(Protocol):
    """Reads the arguments of one call.

    done: they have ended; broken: they are not what the format says. `rest` is then the text that was not read.
    closing: JSON text that is still to come, once the end of the call is sure.
    """

    done: bool
    broken: bool
    rest: str
    closing: str

    def feed(self, text: str, last: bool = False, /) -> str:
        """The JSON text that `text` gives. last: no more comes."""
        ...


@dataclass(frozen=True, slots=True)
class ValueRules:
    """How values are written. quotes: that open strings, longest first. escapes: in strings, None means none.

    exact: blanks and commas are given on as they come. keywords: all stands in the brackets of a call, whose end is
    not read. named: names of an object need no quotes.
    """

    quotes: tuple[str, ...]
    escapes: str | None
    exact: bool = False
    keywords: bool = False
    named: bool = False


JSON = ValueRules(('"',), "json", exact=True)
PYTHON = ValueRules(("'''", '"""', "'", '"'), "python", keywords=True)
PYTHON_VALUE = ValueRules(("'''", '"""', "'", '"'), "python")

_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SCALAR = re.compile(r"""[^\s,:=\[\]{}()"'<>|]+""")
_KEYWORD = re.compile(r"""[^,=()\[\]{}"']*""")
_NAME = re.compile(r"[^:]*")
_PAIRS = {"{": "}", "[": "]", "(": ")", "k": ")"}
_SIMPLE = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "a": "\\u0007", "v": "\\u000b", "\\": "\\\\"}
_SIMPLE |= {"'": "'", '"': '\\"', "\n": ""}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_OCTAL = re.compile(r"[0-7]{1,3}")
_HEX = re.compile(r"[0-9a-fA-F]*")


def escaped(text: str) -> str:
    """`text` as it stands within a string of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Values:
    """An object as it comes, see `ArgumentsReader`. Linear in the text, of which at most `SCALAR` characters are held
    back.

    value: reads one value of any kind instead.
    """

    def __init__(self, rules: ValueRules, value: bool = False) -> None:
        self.done = self.broken = False
        self.rest = self.closing = ""
        self._rules = rules
        self._out: list[str] = []
        self._stack: list[str] = []  # of brackets that are open; "k" is the one of a call
        self._text, self._at = "", 0
        self._quote = ""  # that ends the string
        self._is_key = False  # the string is the name of a property
        self._comma = False  # one has come that is not written yet
        self._step = self._value if value else self._open

    def feed(self, text: str, last: bool = False) -> str:
        """The JSON text that `text` gives. last: no more comes, which changes nothing."""
        self._text, self._at = self._text[self._at :] + text, 0
        while not (self.done or self.broken) and self._at < len(self._text) and self._step():
            pass
        if self.done or self.broken:
            self.rest, self._text, self._at = self._text[self._at :], "", 0
        out, self._out = "".join(self._out), []
        return out

    # ---- steps: each reads something, or says False, as it needs more text -----------------------------------------

    def _open(self) -> bool:
        if self._rules.keywords:
            self._stack.append("k")
            self._out.append("{")
            self._step = self._first
            return True
        self._at = skip(self._text, self._at)
        if self._at == len(self._text):
            return False
        return self._value() if self._text[self._at] == "{" else self._break()

    def _first(self) -> bool:
        """What comes behind an opening bracket, or behind a comma that may be the last."""
        if not self._blanks():
            return False
        if self._text[self._at] == _PAIRS[self._stack[-1]]:
            return self._close()
        return self._key() if self._stack[-1] in "{k" else self._value()

    def _value(self) -> bool:
        if not self._blanks():
            return False
        here = self._text[self._at]
        if here in "{[" or (here == "(" and self._rules.escapes == "python"):
            self._begin()
            self._out.append("[" if here == "(" else here)
            self._stack.append(here)
            self._at += 1
            self._step = self._first
            return True
        quote = self._opens()
        if quote is None:
            return False
        return self._begin_string(quote, False) if quote else self._scalar()

    def _key(self) -> bool:
        if not self._blanks():
            return False
        quote = self._opens()
        if quote is None:
            return False
        if quote:
            return self._begin_string(quote, True)
        keyword = self._stack[-1] == "k"
        if not (keyword or self._rules.named):
            return self._scalar(key=True) if self._rules.escapes == "python" else self._break()
        name = (_KEYWORD if keyword else _NAME).match(self._text, self._at)
        end = self._at if name is None else name.end()
        if end == len(self._text) and end - self._at <= SCALAR:
            return False
        key = self._text[self._at : end].strip()
        if not key or len(key) > SCALAR or end == len(self._text):
            return self._break()
        self._begin()
        self._out.append(f'"{escaped(key)}"')
        self._at, self._step = end, self._colon
        return True

    def _colon(self) -> bool:
        if not self._blanks():
            return False
        if self._text[self._at] != ("=" if self._stack[-1] == "k" else ":"):
            return self._break()
        self._out.append(":" if self._rules.exact else ": ")
        self._at, self._step = self._at + 1, self._value
        return True

    def _next(self) -> bool:
        """What comes behind a value."""
        if not self._blanks():
            return False
        here = self._text[self._at]
        if here == _PAIRS[self._stack[-1]]:
            return self._close()
        if here != ",":
            return self._break()
        self._at += 1
        if self._rules.exact:
            self._out.append(",")
            self._step = self._key if self._stack[-1] == "{" else self._value
        else:
            self._comma, self._step = True, self._first
        return True

    def _close(self) -> bool:
        opened = self._stack.pop()
        self._comma = False
        self._out.append("}" if opened in "{k" else "]")
        self._at += opened != "k"
        return self._end_value()

    def _end_value(self) -> bool:
        self.done = not self._stack
        self._step = self._next
        return True

    # ---- numbers and words -----------------------------------------------------------------------------------------

    def _scalar(self, key: bool = False) -> bool:
        found = _SCALAR.match(self._text, self._at)
        if found is None:
            return self._break()
        if found.end() == len(self._text) and found.end() - self._at <= SCALAR and self._stack:
            return False
        value = scalar(found[0], self._rules) if len(found[0]) <= SCALAR else None
        if value is None:
            return self._break()
        self._begin()
        self._out.append(f'"{value}"' if key else value)
        self._at = found.end()
        if not key:
            return self._end_value()
        self._step = self._colon
        return True

    # ---- strings -----------------------------------------------------------------------------------------------------

    def _opens(self) -> str | None:
        """The quote that comes, "" for none, None if that is not sure yet."""
        text, at = self._text, self._at
        for quote in self._rules.quotes:
            if text.startswith(quote, at):
                return quote
            if quote.startswith(text[at : at + len(quote)]):
                return None
        return ""

    def _begin_string(self, quote: str, key: bool) -> bool:
        self._begin()
        self._out.append('"')
        self._at += len(quote)
        self._quote, self._is_key = quote, key
        self._step = self._string
        return True

    def _string(self) -> bool:
        text, quote, start = self._text, self._quote, self._at
        end = text.find(quote, start)
        if self._rules.escapes:
            escape = text.find("\\", start, end if end >= 0 else len(text))
            if escape >= 0:
                self._out.append(escaped(text[start:escape]))
                self._at = escape
                return self._escape()
        if end < 0:
            stop = len(text) - held(text, quote, start)
            self._out.append(escaped(text[start:stop]))
            self._at = stop
            return False
        self._out.append(escaped(text[start:end]))
        self._at = end
        if self._rules.escapes == "python" and len(quote) == 1 and self._stack:
            ends = self._ends(end + 1)
            if ends is None:
                return False
            if not ends:
                self._out.append(escaped(quote))
                self._at += 1
                return True
        self._out.append('"')
        self._at += len(quote)
        if not self._is_key:
            return self._end_value()
        self._step = self._colon
        return True

    def _ends(self, at: int) -> bool | None:
        """Whether a quote before `at` ends a string, as some templates write strings without escapes: "it's"."""
        behind = skip(self._text, at)
        if behind - at > SLOT:
            return False
        return self._text[behind] in ",)]}:" if behind < len(self._text) else None

    def _escape(self) -> bool:
        text, at = self._text, self._at + 1
        if at == len(text):
            return False
        kind = text[at]
        python = self._rules.escapes == "python"
        if kind in _DIGITS and (python or kind == "u"):
            return self._hexadecimal(at, _DIGITS[kind])
        if python and (octal := _OCTAL.match(text, at)):
            if octal.end() == len(text) and len(octal[0]) < 3:
                return False
            self._out.append(escaped(chr(int(octal[0], 8))))
            self._at = octal.end()
            return True
        if python:
            out = _SIMPLE.get(kind)
        elif kind == "'":  # of no dialect of JSON, but of some models
            out = kind
        else:
            out = "\\" + kind if kind in '"\\/bfnrt' else None
        self._out.append("\\\\" + escaped(kind) if out is None else out)
        self._at = at + 1
        return True

    def _hexadecimal(self, at: int, digits: int) -> bool:
        found = _HEX.match(self._text, at + 1, at + 1 + digits)
        end = at + 1 if found is None else found.end()
        if end == at + 1 + digits:
            code = self._text[at + 1 : end]
            number = int(code, 16)
            if number > 0x10FFFF:
                return self._break()
            plain = digits == 4 or 0xD800 <= number < 0xE000
            self._out.append(f"\\u{code[-4:]}" if plain else escaped(chr(number)))
            self._at = end
            return True
        if end == len(self._text):
            return False
        self._out.append("\\\\")
        self._at = at
        return True

    # ---- what all steps use ------------------------------------------------------------------------------------------

    def _blanks(self) -> bool:
        """Reads blanks; False if nothing else has come."""
        at = skip(self._text, self._at)
        if self._rules.exact:
            self._out.append(self._text[self._at : at])
        self._at = at
        return at < len(self._text)

    def _begin(self) -> None:
        if self._comma:
            self._out.append(", ")
            self._comma = False

    def _break(self) -> bool:
        self.broken = True
        return False


def scalar(text: str, rules: ValueRules) -> str | None:
    """The JSON text of a number or a word, None if it is none."""
    if text in _WORDS:
        return text if text == _WORDS[text] else None if rules.exact else _WORDS[text]
    if _NUMBER.fullmatch(text):
        return text
    if rules.exact:
        return None
    try:
        return str(int(text, 0))
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    return repr(number) if math.isfinite(number) else None
