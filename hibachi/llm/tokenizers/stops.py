"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Looks for stop strings; lets through what can no longer become a part of one.

    Each string has an automaton of its own (Knuth, Morris and Pratt 1977), so that a character costs the same however
    long the strings are and wherever pieces end. The string that is complete first ends the text, and of several that
    are complete at once the longest: that does not depend on how the text is cut.

    include: the text ends behind the stop string, not in front of it; then nothing is held back.
    found: the stop string that has ended the text.
    """

    found: str | None

    __slots__ = ("_begins", "_held", "_include", "_matched", "_open", "_stops", "found")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [(s, _borders(s)) for s in stops]
        self._matched = [0] * len(stops)  # how many characters of each the text ends with
        self._open = False  # more than none, of any
        self._begins = _first_letters(tuple(stops)).search
        self._include = include
        self._held = ""
        self.found = None

    @property
    def holds(self) -> int:
        """How many characters are held back."""
        return len(self._held)

    def restart(self) -> None:
        """What was held back is none; the text goes on as if it began."""
        self._matched, self._open, self._held = [0] * len(self._stops), False, ""

    def push(self, piece: str) -> str:
        """The text that is out of danger now. After `found` nothing comes."""
        if not self._open and not self._begins(piece):
            return piece
        end = size = 0
        which = ""
        for i, (stop, borders) in enumerate(self._stops):
            at, matched = _scan(stop, borders, piece, self._matched[i])
            self._matched[i] = matched
            if matched == len(stop) and (not size or (at, -matched) < (end, -size)):
                end, size, which = at, matched, stop
        text = self._held + piece
        if size:
            end += len(self._held)
            self.found, self._held = which, ""
            return text[: end if self._include else end - size]
        return self._let_through(text)

    def pass_by(self, piece: str) -> str:
        """`push` for a piece in which no stop string ends the text; one may begin in it."""
        for i, (stop, borders) in enumerate(self._stops):
            at, matched = _scan(stop, borders, piece, self._matched[i])
            rest = piece[at:]
            while matched == len(stop):
                at, matched = _scan(stop, borders, rest, borders[-1])
                rest = rest[at:]
            self._matched[i] = matched
        return self._let_through(self._held + piece)

    def _let_through(self, text: str) -> str:
        longest = max(self._matched)
        self._open = longest > 0
        if self._include:
            return text
        cut = len(text) - longest
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text


def _scan(stop: str, borders: Sequence[int], piece: str, matched: int) -> tuple[int, int]:
    """Reads a piece: where it stopped, and how many characters of `stop` then match; all of them: it is found."""
    at = 0
    if not matched:
        at = piece.find(stop[0])
        if at < 0:
            return len(piece), 0
    while at < len(piece):
        letter = piece[at]
        while matched and stop[matched] != letter:
            matched = borders[matched - 1]
        at += 1
        if stop[matched] == letter:
            matched += 1
            if matched == len(stop):
                break
    return at, matched


@lru_cache(maxsize=64)
def _first_letters(stops: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("[" + "".join(re.escape(s[0]) for s in stops) + "]")


@lru_cache(maxsize=64)
def _borders(stop: str) -> tuple[int, ...]:
    """For each beginning of `stop`, the length of its longest proper end that is a beginning as well."""
    borders, matched = [0], 0
    for letter in stop[1:]:
        while matched and stop[matched] != letter:
            matched = borders[matched - 1]
        matched += stop[matched] == letter
        borders.append(matched)
    return tuple(borders)
