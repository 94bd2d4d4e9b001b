"""Shows an answer as it comes: what the model thinks apart from what it says."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from hibachi.common.phases import is_live
from hibachi.errors import printable
from hibachi.llm.chatformat.format import Event, Reasoned, Said


class ShownAnswer:
    """One answer, on standard output. Thoughts are dimmed, and a blank line stands behind them.

    Where standard output is no terminal, it gets nothing but what is said, as whoever reads it expects; thoughts then
    go to standard error. Where nothing can be dimmed they stand in brackets.
    """

    def __init__(self) -> None:
        self._aside: TextIO = sys.stdout if sys.stdout.isatty() else sys.stderr
        dims = is_live(self._aside) and not os.environ.get("NO_COLOR")
        self._open, self._close = ("\x1b[2m", "\x1b[22m") if dims else ("(", ")")
        self._thinks = False  # thoughts are being written
        self._said: list[str] = []
        self._thought: list[str] = []

    @property
    def said(self) -> str:
        return "".join(self._said)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of its conversation. Its template decides what becomes of thoughts."""
        found: dict[str, Any] = {"role": "assistant", "content": self.said}
        return found | {"reasoning_content": "".join(self._thought)} if self._thought else found

    def tell(self, events: Iterable[Event]) -> None:
        """Show more of it."""
        for event in events:
            if isinstance(event, Reasoned):
                self._think(event.text)
            elif isinstance(event, Said):
                self._say(event.text)

    def _think(self, text: str) -> None:
        if not self._thinks:
            parted = "\n\n" if self._said and self._aside is sys.stdout else ""
            self._aside.write(parted + self._open)
            self._thinks = True
        self._thought.append(text)
        _write(self._aside, text)

    def _say(self, text: str) -> None:
        self._stop_thinking("\n\n" if self._aside is sys.stdout else "\n")
        self._said.append(text)
        _write(sys.stdout, text)

    def _stop_thinking(self, behind: str) -> None:
        if self._thinks:
            self._thinks = False
            self._aside.write(self._close + behind)
            self._aside.flush()

    def end(self) -> None:
        """Nothing more comes: the terminal is as it was. The line is not ended."""
        self._stop_thinking("" if self._aside is sys.stdout else "\n")


def _write(file: TextIO, text: str) -> None:
    """A terminal is not steered by what a model writes; tabs do no harm."""
    if file.isatty():
        text = "\t".join(printable(part, lines=True) for part in text.split("\t"))
    file.write(text)
    file.flush()
