"""How a format writes calls, made ready to find them in a text that still grows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from hibachi.llm.chatformat.format import Call, Python, Quoted, Slot, Tagged, ToolFormat
from hibachi.llm.chatformat.reading.schema_types import Typed
from hibachi.llm.chatformat.reading.slots import NO, SLOT, WAIT, Finder, Fit, bare, fit, match, merged, skip
from hibachi.llm.chatformat.reading.tagged import TaggedArguments, beginning
from hibachi.llm.chatformat.reading.values import JSON, PYTHON, ArgumentsReader, ValueRules, Values
from hibachi.llm.chatformat.tools import Toolbox

_CLOSERS = re.compile(r"[\]})\s]*")
_KEYWORD = re.compile(r"""\s*(?:[^\s,=()\[\]{}"']{1,256}\s*=|\))""")
_BEGINNING = re.compile(r"""\s*(?:[^\s,=()\[\]{}"']{0,256}\s*)?\Z""")

Parts = tuple[str | Slot, ...]


@dataclass(frozen=True, slots=True)
class Spelling:
    """A way to write a call. firsts: the parts before its arguments where it is the first of several, nexts: where it
    follows another, tail: those behind them, end: those behind all calls. word: the first word behind arguments.
    begins: finds where arguments begin. unmarked: nothing says that it is a call.
    """

    firsts: tuple[Parts, ...]
    nexts: tuple[Parts, ...]
    tail: Parts
    end: Parts
    word: str
    begins: Finder
    unmarked: bool

    @property
    def grouped(self) -> bool:
        """Something may stand between calls, or behind all."""
        return bool(self.nexts or self.end)


class BegunCall(NamedTuple):
    """The beginning of a call that was found. end: where its arguments begin."""

    end: int
    name: str
    id: str | None
    spelling: Spelling


class CallReader:
    """Finds the pieces of calls. Its methods answer as those of `slots` do: NO, WAIT, or what they found.

    markers: texts that calls begin with anywhere. alone: they may begin without one, where the answer does.
    """

    def __init__(self, format: ToolFormat, toolbox: Toolbox) -> None:
        self._format, self._toolbox = format, toolbox
        self._names = frozenset(toolbox.schemas)
        self.alone = format.alone or not format.marker.strip()
        others = (*format.spellings, *(() if self.alone else _slips(format.call)))
        self._spellings = [self._spelling(format.call), *map(self._other, others)]
        marks = {"" if self.alone else format.marker.strip()}
        marks |= {_text(call, 0) for call, one in zip(others, self._spellings[1:], strict=True) if not one.unmarked}
        self.markers = tuple(sorted(filter(None, marks), key=len, reverse=True))

    def first(self, text: str, at: int) -> BegunCall | int:
        """The first call of several up to its arguments."""
        return self._found([(one, parts) for one in self._spellings for parts in one.firsts], text, at)

    def next(self, text: str, at: int) -> BegunCall | int:
        """Another call behind one, up to its arguments."""
        return self._found([(one, parts) for one in self._spellings for parts in one.nexts], text, at)

    def tail(self, spelling: Spelling, text: str, at: int) -> int:
        """What stands behind the arguments. Brackets that are missing there, or too many, do no harm."""
        return _closed(spelling.tail, text, at)

    def end(self, spelling: Spelling, text: str, at: int) -> int:
        """What stands behind all calls."""
        return _closed(spelling.end, text, at) if spelling.end else NO

    def stops(self, spelling: Spelling) -> tuple[str, ...]:
        """The texts that end arguments which are none."""
        return tuple(dict.fromkeys(filter(None, (_core(spelling.tail), _core(spelling.end), *self.markers))))

    def arguments(self, begun: BegunCall) -> ArgumentsReader:
        """A reader of the arguments of a call."""
        dialect = self._format.arguments
        if isinstance(dialect, Tagged):
            return TaggedArguments(dialect, begun.spelling.word, Typed(self._toolbox.schemas.get(begun.name, {})))
        if isinstance(dialect, Quoted):
            return Values(ValueRules((dialect.quote, '"'), None, named=True))
        return Values(PYTHON if isinstance(dialect, Python) else JSON)

    def _spelling(self, call: Call) -> Spelling:
        """The way of the format itself."""
        format = self._format
        head, tail = _around(call)
        between, whole = bare(format.between), format.begin.strip() or format.end.strip()
        nexts = [merged((format.between, *head)), merged(head)] if between else [merged(head)] if whole else []
        return self._made((merged((format.begin, *head)),), tuple(nexts), (tail, (format.end,)), self.alone)

    def _other(self, call: Call) -> Spelling:
        """A further way, which brings what stands around all calls: it may be a list."""
        begin, marker = self._format.begin, self._format.marker.strip()
        head, tail = _around(call)
        first, last = _text(call, 0), _text(call, -1)
        ends: tuple[Call, Call] = tail, ()
        nexts: tuple[Parts, ...] = ()
        if "[{" in bare(first) and "}]" in bare(last):
            closed = last.index("}") + 1
            nexts = (merged((", " + first[first.index("{") :], *head[1:])),)
            ends = (*tail[:-1], last[:closed]), (last[closed:],)
        firsts = (merged(head), *((merged((begin, *head)),) if begin.strip() else ()))
        return self._made(firsts, nexts, ends, self.alone and first.startswith(marker))

    def _made(
        self, firsts: tuple[Parts, ...], nexts: tuple[Parts, ...], ends: tuple[Call, Call], unmarked: bool
    ) -> Spelling:
        words = [part.split()[0] for part in (*ends[0], *ends[1]) if isinstance(part, str) and part.strip()]
        word, dialect = words[0] if words else "", self._format.arguments
        if isinstance(dialect, Tagged):
            begins = beginning(dialect, word)
        else:
            begins = _keyword if isinstance(dialect, Python) else _brace
        return Spelling(firsts, nexts, merged(ends[0]), merged(ends[1]), word, begins, unmarked)

    def _found(self, ways: list[tuple[Spelling, Parts]], text: str, at: int) -> BegunCall | int:
        wait = NO
        for spelling, parts in ways:
            found = fit(parts, text, at, spelling.begins, self._names)
            if isinstance(found, Fit):
                # where nothing marks calls, only those of the request's tools are some
                if not spelling.unmarked or found.name in self._names:
                    return BegunCall(found.end, found.name, found.id, spelling)
            elif found == WAIT:
                wait = WAIT
        return wait


_ARGUMENTS = {'"arguments"': '"parameters"', '"parameters"': '"arguments"'}


def _slips(call: Call) -> list[Call]:
    """What models write in the place of a call in JSON where nothing guides them: arguments by their other name, and a
    fence of Markdown within the marks.
    """
    name = next((name for name in _ARGUMENTS for part in call if isinstance(part, str) and name in part), None)
    if name is None:
        return []
    other = _ARGUMENTS[name]
    ways = [tuple(part if isinstance(part, Slot) else part.replace(name, other) for part in call)]
    before, begun, first = _text(call, 0).partition("{")
    last, closed, behind = _text(call, -1).rpartition("}")
    if before.strip() and begun and closed and behind.strip():
        ways.append((f"{before}```json\n{{{first}", *call[1:-1], f"{last}}}\n```{behind}"))
    return ways


def _around(call: Call) -> tuple[Call, Call]:
    """The parts before arguments, and those behind them."""
    at = call.index(Slot.ARGUMENTS)
    return call[:at], call[at + 1 :]


def _text(call: Call, i: int) -> str:
    part = call[i]
    return "" if isinstance(part, Slot) else part.strip()


def _brace(text: str, at: int) -> int:
    return match("{", text, at)


def _keyword(text: str, at: int) -> int:
    if _KEYWORD.match(text, at):
        return at
    return WAIT if len(text) - at < 2 * SLOT and _BEGINNING.match(text, at) else NO


def _core(parts: Parts) -> str:
    """The last text of parts without the signs of JSON before it, which ends them for sure; "" if there is none."""
    last = parts[-1] if parts else ""
    core = "" if isinstance(last, Slot) else last.lstrip(']}),:"')
    return core if len(core) > 1 else ""


def _closed(parts: Parts, text: str, at: int) -> int:
    """Where closing parts end. An id in them may be missing; of brackets before the last text any number may stand."""
    found = fit(parts, text, at, _anything)
    if found == NO and Slot.ID in parts and isinstance(last := parts[-1], str):
        found = fit((last.lstrip('"'),), text, at, _anything)
    if isinstance(found, Fit):
        return found.end
    core = _core(parts)
    if not core or found == WAIT:
        return found
    closers = _CLOSERS.match(text, skip(text, at))
    here = at if closers is None else closers.end()
    return NO if here - at > SLOT else match(core, text, here)


def _anything(_: str, at: int) -> int:
    return at
