"""How a format writes calls, made ready to find them in a text that still grows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hibachi.tools.fit import NO, SLOT, WAIT, Finder, Fit, bare, fit, match, merged, skip
from hibachi.tools.format import Python, Quoted, Slot, Tagged, ToolFormat
from hibachi.tools.tagged import TaggedArguments, opens, property_types
from hibachi.tools.tools import Toolbox
from hibachi.tools.values import JSON, PYTHON, Arguments, Rules, Values

_CLOSERS = re.compile(r"[\]})\s]*")
_KEYWORD = re.compile(r"""\s*[^\s,=()\[\]{}"']{1,256}\s*=|\s*\)""")
_BEGINNING = re.compile(r"""\s*(?:[^\s,=()\[\]{}"']{0,256}\s*)?\Z""")


class CallReader:
    """Finds the pieces of calls. Its methods answer as those of `hibachi.tools.fit` do."""

    def __init__(self, form: ToolFormat, toolbox: Toolbox) -> None:
        at = form.call.index(Slot.ARGUMENTS)
        call = form.call[:at]
        self.marker = form.marker.strip()
        self.alone = form.alone or not self.marker
        self._form, self._toolbox = form, toolbox
        self._names = frozenset(toolbox.schemas)
        self._tail = merged(form.call[at + 1 :])
        self._begins = self._beginning()
        self._first = merged((form.begin, *call))
        self._nexts = [merged((form.between, *call))] if form.begin or form.end or bare(form.between) else []
        if bare(form.between):
            self._nexts.append(merged(call))
        self._end = merged((form.end,))
        self.grouped = bool(self._nexts)
        self.stops = tuple(dict.fromkeys(filter(None, (_core(self._tail), _core(self._end), self.marker))))

    def first(self, text: str, at: int) -> Fit | int:
        """The first call of several up to its arguments."""
        return self._known(fit(self._first, text, at, self._begins, self._names))

    def next(self, text: str, at: int) -> Fit | int:
        """Another call behind one, up to its arguments."""
        found = [fit(parts, text, at, self._begins, self._names) for parts in self._nexts]
        fits = [one for one in found if isinstance(one, Fit)]
        return self._known(fits[0] if fits else WAIT if WAIT in found else NO)

    def tail(self, text: str, at: int) -> int:
        """What stands behind the arguments. Brackets that are missing there, or too many, do no harm."""
        return _closed(self._tail, text, at)

    def end(self, text: str, at: int) -> int:
        """What stands behind all calls."""
        return _closed(self._end, text, at) if self._end else NO

    def arguments(self, name: str) -> Arguments:
        """A reader of the arguments of a call."""
        form = self._form.arguments
        if isinstance(form, Tagged):
            schema: Mapping[str, Any] = self._toolbox.schemas.get(name, {})
            return TaggedArguments(form, self._tail_text, lambda key: property_types(schema, key))
        if isinstance(form, Quoted):
            return Values(Rules((form.quote, '"'), None, named=True))
        return Values(PYTHON if isinstance(form, Python) else JSON)

    @property
    def _tail_text(self) -> str:
        """The first word behind the arguments, or of what ends all calls."""
        after = self._form.call[self._form.call.index(Slot.ARGUMENTS) + 1 :]
        texts = [part for part in (*after, self._form.end) if isinstance(part, str) and part.strip()]
        return texts[0].split()[0] if texts else ""

    def _beginning(self) -> Finder:
        form = self._form.arguments
        if isinstance(form, Tagged):
            return opens(form, self._tail_text)
        return _keyword if isinstance(form, Python) else _brace

    def _known(self, found: Fit | int) -> Fit | int:
        """Where nothing marks calls, only those of the request's tools are some."""
        if self.alone and isinstance(found, Fit) and found.name not in self._names:
            return NO
        return found


def _brace(text: str, at: int) -> int:
    return match("{", text, at)


def _keyword(text: str, at: int) -> int:
    if _KEYWORD.match(text, at):
        return at
    return WAIT if len(text) - at < 2 * SLOT and _BEGINNING.match(text, at) else NO


def _core(parts: tuple[str | Slot, ...]) -> str:
    """The last text of parts without brackets, which is what ends them for sure."""
    last = parts[-1] if parts else ""
    return "" if isinstance(last, Slot) else last.lstrip("]})")


def _closed(parts: tuple[str | Slot, ...], text: str, at: int) -> int:
    """Where closing parts end; of brackets before the last text any number may stand there."""
    whole = fit(parts, text, at, lambda _, here: here)
    if isinstance(whole, Fit):
        return whole.end
    core = _core(parts)
    if not core or whole == WAIT:
        return whole
    found = _CLOSERS.match(text, skip(text, at))
    here = at if found is None else found.end()
    return NO if here - at > SLOT else match(core, text, here)
