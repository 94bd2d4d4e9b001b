"""How a format writes calls, made ready to find them in a text that still grows."""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    follows another, tail: those behind them, end: those behind all calls. words: those behind arguments, a line each.
    begins: finds where arguments begin. offered: only the request's tools are called so, as nothing else says that it
    is a call.
    """

    firsts: tuple[Parts, ...]
    nexts: tuple[Parts, ...]
    tail: Parts
    end: Parts
    words: str
    begins: Finder
    offered: bool

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
        slips = [] if self.alone else [self._own(call, offered) for call, offered in _slips(format)]
        others = [self._other(call) for call in format.spellings]
        self._spellings = [self._own(format.call), *others, *slips]
        marks = {"" if self.alone else format.marker.strip()}
        marks |= {_text(call, 0) for call, one in zip(format.spellings, others, strict=True) if not one.offered}
        if bare_call := _without_mark(format):
            self._spellings.append(self._own(bare_call, offered=True))
            marks.add(_text(bare_call, 0))
        self.markers = tuple(sorted(filter(None, marks), key=len, reverse=True))
        begin, head, end = bare(format.begin), _text(format.call, 0).split(), bare(format.end)
        around = begin and head and end.strip("]})") and not self.alone
        self._group = (begin, head[0], end) if around else None

    def first(self, text: str, at: int) -> BegunCall | int:
        """The first call of several up to its arguments."""
        return self._found([(one, parts) for one in self._spellings for parts in one.firsts], text, at)

    def next(self, text: str, at: int) -> BegunCall | int:
        """Another call behind one, up to its arguments."""
        return self._found([(one, parts) for one in self._spellings for parts in one.nexts], text, at)

    def group(self, text: str, at: int) -> BegunCall | int:
        """What stands around all calls where none follows at once: the end does, and the call that is found has no
        name, or a few words come before the first, which are left out.
        """
        if self._group is None:
            return NO
        begin, head, end = self._group
        inside = match(begin, text, at)
        if inside < 0:
            return inside
        if (closed := match(end, text, inside)) != NO:
            return WAIT if closed == WAIT else BegunCall(inside, "", None, self._spellings[0])
        place = text.find(head, inside, inside + SLOT)
        if place >= 0:
            return self.next(text, place)
        return WAIT if len(text) - inside < SLOT else NO

    def tail(self, spelling: Spelling, text: str, at: int) -> int:
        """What stands behind the arguments. Brackets that are missing there, or too many, do no harm."""
        return _closed(spelling.tail, text, at)

    def closed(self, spelling: Spelling, text: str, at: int) -> bool:
        """Whether the brackets have come that close a call in JSON behind its arguments."""
        first = spelling.tail[0] if spelling.tail else ""
        brackets = "" if isinstance(first, Slot) else first[: len(first) - len(first.lstrip("]}"))]
        return match(brackets, text, at) >= 0

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
            return TaggedArguments(dialect, begun.spelling.words, Typed(self._toolbox.schemas.get(begun.name, {})))
        if isinstance(dialect, Quoted):
            return Values(ValueRules((dialect.quote, '"'), None, named=True))
        return Values(PYTHON if isinstance(dialect, Python) else JSON)

    def _own(self, call: Call, offered: bool = False) -> Spelling:
        """The way of the format itself, or one that differs within a call."""
        format = self._format
        head, tail = _around(call)
        between, whole = bare(format.between), format.begin.strip() or format.end.strip()
        nexts = [merged((format.between, *head)), merged(head)] if between else [merged(head)] if whole else []
        return self._made((merged((format.begin, *head)),), tuple(nexts), (tail, (format.end,)), self.alone or offered)

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
        return self._made(firsts, nexts, ends, self.alone and first[:1] == marker[:1])

    def _made(
        self, firsts: tuple[Parts, ...], nexts: tuple[Parts, ...], ends: tuple[Call, Call], offered: bool
    ) -> Spelling:
        texts = [part for part in (*ends[0], *ends[1]) if isinstance(part, str)]
        lines = (line.strip() for text in texts for line in text.splitlines())
        words, dialect = "\n".join(dict.fromkeys(filter(None, lines))), self._format.arguments
        last = firsts[0][-1]
        if Slot.ARGUMENTS in firsts[0] or (isinstance(last, str) and last.endswith(("/>", "|>"))):
            begins: Finder = _anything
        elif isinstance(dialect, Tagged):
            begins = beginning(dialect, words)
        else:
            begins = _keyword if isinstance(dialect, Python) else _brace
        return Spelling(firsts, nexts, merged(ends[0]), merged(ends[1]), words, begins, offered)

    def _found(self, ways: list[tuple[Spelling, Parts]], text: str, at: int) -> BegunCall | int:
        wait = NO
        for spelling, parts in ways:
            found = fit(parts, text, at, spelling.begins, self._names)
            if isinstance(found, Fit):
                if not spelling.offered or found.name in self._names:
                    return BegunCall(found.end, found.name, found.id, spelling)
            elif found == WAIT:
                wait = WAIT
        return wait


_ARGUMENTS = {'"arguments"': '"parameters"', '"parameters"': '"arguments"'}
_OBJECT = re.compile(r"""(?s)(.*\{\s*)("[a-z_]+":\s*")""")  # up to a name
_MIDDLE = re.compile(r"""",\s*("[a-z_]+":\s*)""")


def _slips(format: ToolFormat) -> Iterator[tuple[Call, bool]]:
    """What models write in the place of a call where nothing guides them, and whether that is a call of the request's
    tools only: another name for arguments in JSON, a type or the arguments in front of the name, a fence of Markdown
    within the marks; a name without "functions." in front; an element that is closed where it is opened.
    """
    call = format.call
    name = call.index(Slot.NAME)
    before = call[name - 1] if name else ""
    if isinstance(before, str) and before.endswith("functions."):
        yield (*call[: name - 1], before.removesuffix("functions."), *call[name:]), True
    if isinstance(format.arguments, Tagged) and isinstance(opened := call[name + 1], str) and opened.strip() == '">':
        yield (*call[: name + 1], opened.replace(">", "/>"), Slot.ARGUMENTS, ""), False
    word = next((word for word in _ARGUMENTS for part in call if isinstance(part, str) and word in part), None)
    if word is None:
        return
    renamed = tuple(part if isinstance(part, Slot) else part.replace(word, _ARGUMENTS[word]) for part in call)
    yield renamed, False
    for first, *more in (call, renamed):
        found = _OBJECT.fullmatch(first) if isinstance(first, str) else None
        middle = _MIDDLE.fullmatch(second) if found and isinstance(second := more[1], str) else None
        if found is None or middle is None or more[2] is not Slot.ARGUMENTS:
            continue
        begin, named = found.groups()
        end = "}" + _text(call, -1).partition("}")[2]
        yield (f'{begin}"type": "function", {named}', *more[:3], end), False
        yield (begin + middle[1], Slot.ARGUMENTS, f", {named}", Slot.NAME, f'"{end}'), False
    before, begun, rest = _text(call, 0).partition("{")
    last, closed, behind = _text(call, -1).rpartition("}")
    if before.strip() and begun and closed and behind.strip():
        yield (f"{before}```json\n{{{rest}", *call[1:-1], f"{last}}}\n```{behind}"), False


def _without_mark(format: ToolFormat) -> Call | None:
    """A call whose first text is a mark and the beginning of an element, `<tool_call><function=`, without the mark."""
    mark, first = format.marker.strip(), _text(format.call, 0)
    rest = first.removeprefix(mark).strip() if mark else ""
    return (rest, *format.call[1:]) if rest != first and re.fullmatch(r"<\w+\W+", rest) else None


def _around(call: Call) -> tuple[Call, Call]:
    """The parts up to arguments, or up to the name where that comes later, and those behind arguments."""
    at, name = call.index(Slot.ARGUMENTS), call.index(Slot.NAME)
    return call[:at] if name < at else (*call[: name + 1], '"'), call[at + 1 :]


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
