"""Arguments that stand between texts of their own, made JSON by the types of the tool's schema."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from hibachi.llm.chatformat.format import Tagged
from hibachi.llm.chatformat.reading.schema_types import ALL, STRING, Typed, value_of
from hibachi.llm.chatformat.reading.slots import BLANKS, NO, SLOT, WAIT, Finder, bare, best, held, match, skip
from hibachi.llm.chatformat.reading.values import escaped

_CDATA = ("<![CDATA[", "]]>")
_WORDS = ("true", "false", "null", "none")  # that are no strings, in some case
_LONG = 6  # letters that are more than a word has
_LETTERS = "tfnTFN"
_MARKS = re.compile(r"[\"'\\]")


@dataclass(slots=True)
class _Level:
    """An object or an array that is open. end: the text that ends it, without blanks; "" for all arguments."""

    typed: Typed
    end: str = ""
    array: bool | None = False  # None means that its first entry will say
    empty: bool = True


class TaggedArguments:
    """The arguments of one call as they come, see `ArgumentsReader`. Strings are given on in pieces, other values at
    their end.

    tail: the texts behind all arguments, a line each, of which one ends them. typed: the schema of the arguments.

    The text that ends a value is a part of it unless another argument or one of the texts follows. Where it is missing,
    a value ends in front of an argument that the schema names and that has not come, which the grammar does not write
    in a value, or of all texts if the answer ends with them.
    """

    def __init__(self, dialect: Tagged, tail: str, typed: Typed) -> None:
        self.done = self.broken = False
        self.rest, self.closing = "", "{}"
        self._dialect, self._closes = dialect, _closes(dialect)
        self._firsts = BLANKS + "".join(close[0] for close in self._closes)
        self._seen = 0  # letters behind the place that are no end of a name
        self._begins = beginning(dialect, tail)
        self._words = list(map(bare, tail.splitlines()))
        self._gaps = [text.split()[0] for text in (dialect.open, tail) if text.strip()]  # where an end may be missing
        self._left = set(typed.names())  # that have not come
        self._last = False
        self._levels = [_Level(typed)]
        self._out: list[str] = []
        self._text, self._at = "", 0
        self._step = self._between
        self._key_text = ""
        self._typed = typed  # of the value
        self._allowed: Collection[str] = ()  # its types
        self._value: list[str] = []  # pieces of one that is no string
        self._is_string = False
        self._undecided, self._begun = False, ""  # whether it may be one; what it begins with
        self._end = self._word = self._lead = ""  # of the value; its first word; the blanks before it
        self._quotes: bool | None = False  # whether strings may be within the value; None: its first letter will say
        self._within = ""  # the quote that is open

    def feed(self, text: str, last: bool = False) -> str:
        """The JSON text that `text` gives. last: no more comes."""
        self._text, self._at, self._last = self._text[self._at :] + text, 0, last
        while not (self.done or self.broken) and self._step():
            pass
        if self.done or self.broken:
            self.rest, self._text, self._at = self._text[self._at :], "", 0
        out, self._out = "".join(self._out), []
        return out

    # ---- steps: each reads something, or says False, as it needs more text -----------------------------------------

    def _between(self) -> bool:
        """Before an argument or an entry, or where all of them end."""
        level = self._levels[-1]
        if level.end:
            end = match(level.end, self._text, self._at)
            if end >= 0:
                return self._end_level(end)
            if end == WAIT:
                return False
        at = self._begins(self._text, self._at)
        if at == WAIT:
            return False
        if at < 0 or at == self._at:
            self.done, self.broken = not level.end, bool(level.end)
            return False
        self._at, self._step, self._seen = at, self._key, 0
        return True

    def _key(self) -> bool:
        text, start = self._text, self._at
        for at in range(start + self._seen, min(len(text), start + SLOT)):
            self._seen = at - start
            if text[at] not in self._firsts:
                continue
            ends = [(self._close_of(close, text[start:at], at), close) for close in self._closes]
            best, close = max(ends)
            if best >= 0:
                return self._begin_value(text[start:at].strip(), best, close)
            if any(end == WAIT for end, _ in ends):
                return False
        self.broken = len(text) - start >= SLOT
        return False

    def _close_of(self, close: str, name: str, at: int) -> int:
        return match(close.replace("{key}", bare(name)), self._text, at)

    def _begin_value(self, written: str, at: int, close: str) -> bool:
        key = self._dialect.read(written)
        trail, types = self._closes[close]
        for letter in trail:  # blanks that belong to the format, where they come
            if at == len(self._text):
                return False
            if self._text[at] != letter:
                break
            at += 1
        self._left.discard(key)
        level = self._levels[-1]
        if level.array is None:
            level.array = key == self._dialect.item and ("object" not in level.typed.types or self._arrays(level.typed))
            self._out.append("[" if level.array else "{")
        self._typed = level.typed.item() if level.array else level.typed.property(key)
        self._allowed = self._typed.types if types is None else types
        self._is_string = set(self._allowed) == STRING
        end = self._dialect.end.replace("{key}", written)
        self._end, self._word, self._lead = bare(end), end.split()[0], end[: len(end) - len(end.lstrip())]
        name = "" if level.array else f'"{escaped(key)}": '
        self._out.append(("{" if len(self._levels) == 1 and level.empty else "" if level.empty else ", ") + name)
        level.empty, self.closing = False, "}"
        self._at, self._step = at, self._look
        return True

    @staticmethod
    def _arrays(typed: Typed) -> bool:
        return "array" in typed.types

    def _look(self) -> bool:
        """At what a value begins with: entries of its own, a string between brackets of XML, or itself."""
        text, dialect = self._text, self._dialect
        if dialect.item is not None and {"object", "array"} & set(self._allowed):
            end = match(self._end, text, self._at)
            at = match(bare(dialect.open), text, self._at) if end == NO else end
            if at == WAIT:
                return False
            if at >= 0 and end == NO:
                self._levels.append(_Level(self._typed, self._end, None))
                self._at, self._step, self._seen = at, self._key, 0
                return True
        if dialect.cdata:
            at = match(_CDATA[0], text, self._at)
            if at == WAIT:
                return False
            if at >= 0:
                self._end, self._word, self._lead = _CDATA[1] + self._end, _CDATA[1], ""
                self._is_string = "string" in self._allowed
                self._at = at
        if self._is_string:
            self._out.append('"')
        self._undecided, self._begun = not self._is_string and "string" in self._allowed, ""
        self._quotes, self._within = False if "string" in self._allowed else None, ""
        self._step = self._read
        return True

    def _read(self) -> bool:
        """Reads a value up to its end."""
        text, start = self._text, self._at
        seen, within = start, self._within
        if self._quotes is None and (first := text[start:].lstrip()[:1]):
            self._quotes = first in "{[("
        words = self._ends()
        for found in re.compile("|".join(map(re.escape, words))).finditer(text, start):
            at = found.start()
            if self._quotes:
                within, seen = quote_open(text[seen:at], within, text[seen - 1] if seen > start else self._before()), at
            if within or (end := self._ended(start, at)) == NO:  # within a string of the value it does not end
                continue
            lead = self._lead or ("\n" if end in (at, WAIT) else "")  # behind which the text that ends it is missing
            stop = at - len(lead) if text.endswith(lead, start, at) else at
            self._give(text[start:stop])
            self._at = stop
            return end != WAIT and self._end_value(end)
        kept = max(held(text, lead + word, start) for word in words for lead in (self._lead, "\n", ""))
        self._give(text[start : len(text) - kept])
        self._at = len(text) - kept
        return False

    def _ends(self) -> list[str]:
        """What the texts begin with at which a value may end."""
        if len(self._levels) > 1 or self._dialect.item is not None or self._word == _CDATA[1]:
            return [self._word]
        return list(dict.fromkeys((self._word, *self._gaps)))

    def _ended(self, start: int, at: int) -> int:
        """Where a value has ended that may end at a place, or NO or WAIT."""
        text = self._text
        end = match(self._end, text, at)
        if end >= 0:
            level = self._levels[-1].end
            behind = best(self._begins(text, end), match(level, text, end) if level else NO)
            return end if behind >= 0 else behind
        if end == WAIT:
            return WAIT
        if len(self._ends()) == 1 or (self._lead and not text.endswith(self._lead, start, at)):
            return NO
        found = best(self._over(at), self._opened(at))
        return at if found >= 0 else NO if self._last else found

    def _over(self, at: int) -> int:
        """Where a call ends behind which nothing comes."""
        end = at
        for word in self._words:
            found = match(word, self._text, end)
            if found == WAIT and not self._last:
                return WAIT
            end = max(end, found)
        if end == at or skip(self._text, end) < len(self._text):
            return NO
        return end if self._last else WAIT

    def _opened(self, at: int) -> int:
        """Where an argument begins that the schema names and that has not come."""
        text = self._text
        start = match(bare(self._dialect.open), text, at)
        end = start
        while 0 <= end < min(len(text), start + SLOT) and text[end] not in self._firsts:
            end += 1
        if start < 0 or end == len(text):
            return NO if start == NO else WAIT
        name = text[start:end].strip()
        known = self._dialect.read(name) in self._left
        return best(*(self._close_of(close, name, end) for close in self._closes)) if known else NO

    def _give(self, text: str) -> None:
        if self._is_string:
            self._out.append(escaped(text))
        elif text:
            last = self._before()
            self._value.append(text)
            if self._quotes:
                self._within = quote_open(text, self._within, last)
            if self._undecided and (begun := (self._begun + (text if self._begun else text.lstrip()))[:_LONG]):
                self._begun, self._undecided = begun, begun[0] in _LETTERS and len(begun) < _LONG
                if not _may_be_other(begun):
                    self._is_string = True
                    self._out.append(f'"{escaped("".join(self._value))}')
                    self._value = []

    def _before(self) -> str:
        """The last letter of the value so far."""
        return self._value[-1][-1] if self._value else ""

    def _end_value(self, at: int) -> bool:
        if self._is_string:
            self._out.append('"')
        else:
            text, types = "".join(self._value), self._allowed
            if self._dialect.item is not None and not text.strip() and "string" not in types:
                self._out.append("{}" if "object" in types else "[]" if "array" in types else "null")
            else:
                self._out.append(value_of(text, types, self._dialect.python))
            self._value = []
        self._at, self._step = at, self._between
        return True

    def _end_level(self, at: int) -> bool:
        self._out.append("]" if self._levels.pop().array else "}")
        self._at = at
        return True


def quote_open(text: str, within: str, last: str = "") -> str:
    """The quote of the string that is open behind a text, with a backslash if that escapes what comes next; "" for
    none. A quote behind a letter, as in "it's", opens none. within: the same of what was before the text. last: the
    letter before the text.
    """
    at = 1 if len(within) > 1 and text else 0
    within = within[:1] if text else within
    while found := _MARKS.search(text, at):
        sign, at = found[0], found.end()
        if not within:
            before = text[at - 2] if at > 1 else last
            within = sign if sign != "\\" and not before.isalnum() else ""
        elif sign == "\\":
            if at == len(text):
                return within + sign
            at += 1
        elif sign == within:
            within = ""
    return within


def _may_be_other(text: str) -> bool:
    """Whether a value that begins like this may be something else than a string."""
    if text[0] in _LETTERS:
        return len(text) < _LONG or text[:_LONG].strip().lower() in _WORDS
    return text[0] in "0123456789-{[("


def beginning(dialect: Tagged, tail: str) -> Finder:
    """A finder of the text before a name: it gives the place behind it, or the place itself if the call ends there with
    one of the texts of `tail`.
    """
    words = [bare(line) for line in tail.splitlines()]
    beginnings = [bare(dialect.between + dialect.open), bare(dialect.open)]

    def find(text: str, at: int) -> int:
        ends = [match(word, text, at) for word in words]
        if max(ends, default=NO) >= 0:
            return at
        found = [match(text_before, text, at) for text_before in beginnings]
        return WAIT if WAIT in ends else best(*found)

    return find


def _closes(dialect: Tagged) -> dict[str, tuple[str, frozenset[str] | None]]:
    """By each text that may stand between a name and its value, without blanks: the blanks at its end, and the types
    of the value that it tells.
    """
    out: dict[str, tuple[str, frozenset[str] | None]] = {}
    for close in (dialect.close, *dialect.kinds.values()):
        if bare(close):
            types = frozenset(kind for kind, text in dialect.kinds.items() if text == close)
            if dialect.kinds and not types:
                types = ALL - dialect.kinds.keys() - {"integer"}
            types |= {"integer"} if "number" in types else frozenset()
            out[bare(close)] = (close[len(close.rstrip()) :], types or None)
    return out
