"""How a format writes calls, made ready to find them in a text that still grows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from hibachi.tools.elements import TaggedArguments, beginning
from hibachi.tools.fit import NO, SLOT, WAIT, Finder, Fit, bare, fit, match, merged, skip
from hibachi.tools.format import Call, Python, Quoted, Slot, Tagged, ToolFormat
from hibachi.tools.schema_types import Typed
from hibachi.tools.tools import Toolbox
from hibachi.tools.values import JSON, PYTHON, Arguments, Rules, Values

_CLOSERS = re.compile(r"[\]})\s]*")
_KEYWORD = re.compile(r"""\s*(?:[^\s,=()\[\]{}"']{1,256}\s*=|\))""")
_BEGINNING = re.compile(r"""\s*(?:[^\s,=()\[\]{}"']{0,256}\s*)?\Z""")

Parts = tuple[str | Slot, ...]


@dataclass(frozen=True, slots=True)
class Spelling:
    """A way to write a call. firsts: the parts before its arguments where it is the first of several, nexts: where it
    follows another, tail: those behind them. word: the first word behind them. begins: finds where arguments begin.
    """

    firsts: tuple[Parts, ...]
    nexts: tuple[Parts, ...]
    tail: Parts
    word: str
    begins: Finder
    unmarked: bool = False


class Begun(NamedTuple):
    """The beginning of a call that was found. end: where its arguments begin."""

    end: int
    name: str
    id: str | None
    spelling: Spelling


class CallReader:
    """Finds the pieces of calls. Its methods answer as those of `hibachi.tools.fit` do: NO, WAIT, or what they found.

    markers: texts that calls begin with anywhere. alone: they may begin without one, where the answer does. grouped:
    something may stand between calls, or behind all.
    """

    def __init__(self, form: ToolFormat, toolbox: Toolbox) -> None:
        self._form, self._toolbox = form, toolbox
        self._names = frozenset(toolbox.schemas)
        marker = form.marker.strip()
        self.alone = form.alone or not marker
        marks = ["" if self.alone else marker, *(_first_text(call) for call in form.spellings)]
        self.markers = tuple(sorted(filter(None, set(marks)), key=len, reverse=True))
        self._end = merged((form.end,))
        self._spellings = [self._spelling(call, bool(i)) for i, call in enumerate((form.call, *form.spellings))]
        self.grouped = any(one.nexts for one in self._spellings) or bool(self._end)

    def first(self, text: str, at: int) -> Begun | int:
        """The first call of several up to its arguments."""
        return self._found([(one, parts) for one in self._spellings for parts in one.firsts], text, at)

    def next(self, text: str, at: int) -> Begun | int:
        """Another call behind one, up to its arguments."""
        return self._found([(one, parts) for one in self._spellings for parts in one.nexts], text, at)

    def tail(self, spelling: Spelling, text: str, at: int) -> int:
        """What stands behind the arguments. Brackets that are missing there, or too many, do no harm."""
        return _closed(spelling.tail, text, at)

    def end(self, text: str, at: int) -> int:
        """What stands behind all calls."""
        return _closed(self._end, text, at) if self._end else NO

    def stops(self, spelling: Spelling) -> tuple[str, ...]:
        """The texts that end arguments which are none."""
        return tuple(dict.fromkeys(filter(None, (_core(spelling.tail), _core(self._end), *self.markers))))

    def arguments(self, begun: Begun) -> Arguments:
        """A reader of the arguments of a call."""
        form = self._form.arguments
        if isinstance(form, Tagged):
            return TaggedArguments(form, begun.spelling.word, Typed(self._toolbox.schemas.get(begun.name, {})))
        if isinstance(form, Quoted):
            return Values(Rules((form.quote, '"'), None, named=True))
        return Values(PYTHON if isinstance(form, Python) else JSON)

    def _spelling(self, call: Call, other: bool) -> Spelling:
        form = self._form
        at = call.index(Slot.ARGUMENTS)
        head, tail = call[:at], call[at + 1 :]
        texts = [part for part in (*tail, form.end) if isinstance(part, str) and part.strip()]
        word = texts[0].split()[0] if texts else ""
        firsts = [merged((form.begin, *head))] if form.begin.strip() or not other else []
        if other:
            firsts.append(merged(head))
        between, whole = bare(form.between), form.begin.strip() or form.end.strip()
        nexts = [merged((form.between, *head)), merged(head)] if between else [merged(head)] if whole else []
        arguments = form.arguments
        begins = beginning(arguments, word) if isinstance(arguments, Tagged) else _keyword
        if not isinstance(arguments, (Tagged, Python)):
            begins = _brace
        return Spelling(tuple(firsts), tuple(nexts), merged(tail), word, begins, self.alone and not other)

    def _found(self, forms: list[tuple[Spelling, Parts]], text: str, at: int) -> Begun | int:
        wait = NO
        for spelling, parts in forms:
            found = fit(parts, text, at, spelling.begins, self._names)
            if isinstance(found, Fit):
                # where nothing marks calls, only those of the request's tools are some
                if not spelling.unmarked or found.name in self._names:
                    return Begun(found.end, found.name, found.id, spelling)
            elif found == WAIT:
                wait = WAIT
        return wait


def _first_text(call: Call) -> str:
    return call[0].strip() if isinstance(call[0], str) else ""


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
