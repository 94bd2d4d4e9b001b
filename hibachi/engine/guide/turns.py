"""Turns: forms whose tokens take long to work out share a small part of the time, so that others keep their pace.

What a form takes is counted for all rows of its grammar together. Rows of forms that take more than ordinary ones go in
turns: the form that has taken least first, as many rows as there is time for. The others keep what they have and wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

FREE = 1e-4  # seconds for a token of a row that count for nothing: ordinary schemas take less
SUDDEN = 2e-3  # seconds beyond that in a call for several forms, until which nobody asks whose they were
SHARE = 0.12  # of the time, for what counts, while others compute
BURST = 0.05  # seconds of it at once
MOST = 0.2  # seconds that all may wait at once
LONG = 4e-3  # seconds for a token, of which many at once are `MOST`
FADE = 0.97  # how much of what a token has taken is left with each later call
TRIES = 3  # tokens that took `MOST` each, one after the other


class FormTime:
    """What the tokens of one grammar take, in seconds. A single long call says nothing: all threads stop at times.

    seconds: for a token of a row, beyond `FREE`, the most of late; 0 means it is as quick as ordinary ones. spent: of
    all rows so far. unpaid: of that, what `Turns` has not counted yet. known: something was measured.
    """

    __slots__ = ("__weakref__", "_guess", "_late", "_latest", "_turns", "known", "seconds", "spent", "unpaid")

    def __init__(self, turns: Turns, spent: float) -> None:
        self._turns, self.spent, self.known = turns, spent, False
        self.seconds = self.unpaid = self._latest = 0.0
        self._guess = False  # `seconds` is what was expected
        self._late = 0  # tokens one after the other that took `MOST`

    @property
    def slow(self) -> bool:
        return self.seconds > 0.0

    @property
    def hopeless(self) -> bool:
        """Single tokens take longer than others may be made to wait."""
        return self._late >= TRIES

    def note(self, rows: int, seconds: float) -> None:
        """A token of each of these rows has taken so long together."""
        latest = max(seconds - FREE * rows, 0.0) / rows
        sure = self.slow or seconds > MOST / 2
        each, self._latest = latest if sure else min(latest, self._latest), latest
        self.unpaid += each * rows
        self._late = self._late + 1 if latest > MOST else 0
        self.seconds, self._guess = each if self._guess else max(each, FADE * self.seconds), False
        if self.seconds < FREE:
            self.seconds = 0.0
        if self.slow:
            self._turns.some = True

    def expect(self, seconds: float) -> None:
        """A first token of a row has taken so long, while no step waited for it."""
        if not self.known:
            self.known = self._guess = True
            self._latest = self.seconds = max(seconds - 2 * FREE, 0.0)


class InTurn(Protocol):
    """A row that takes turns. latest: when it last had a token, by `time.perf_counter()`."""

    form: FormTime
    latest: float


R = TypeVar("R", bound=InTurn)


class Turns:
    """Who goes on. some: whether there may be a form that is slow."""

    def __init__(self) -> None:
        self.some: bool = False
        self._forms: WeakValueDictionary[str, FormTime] = WeakValueDictionary()
        self._left = BURST  # seconds that rows may take now; below 0 they have taken too much
        self._at = perf_counter()

    def form(self, source: str) -> FormTime:
        """The times of a grammar. One that is new is as if it had taken what the one that took least has."""
        if (form := self._forms.get(source)) is None:
            spent = min((f.spent for f in list(self._forms.values()) if f.slow), default=0.0)
            form = self._forms.setdefault(source, FormTime(self, spent))
        return form

    def go(self, rows: Sequence[R], *, others: bool, now: float) -> list[R]:
        """Those of these rows, all of slow forms, that may compute a token now. others: there are rows beside them.

        now: by `time.perf_counter()`.
        """
        self._left = min(self._left + SHARE * (now - self._at), BURST)
        self._at = now
        for form in {row.form for row in rows}:
            self._left -= form.unpaid
            form.spent += form.unpaid
            form.unpaid = 0.0
        if not others:
            self._left = max(self._left, BURST)
        going, left = list[R](), self._left
        for row in sorted(rows, key=lambda row: (row.form.spent, row.latest)):
            if left <= 0:
                break
            left -= row.form.seconds
            going.append(row)
        return going
