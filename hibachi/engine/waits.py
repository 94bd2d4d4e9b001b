"""Whether steps wait for the tokens of the step before, where they need not: only such steps can have proposals."""

from __future__ import annotations

from hibachi.engine.speculation.howmany import Costs

WINDOW = 16  # steps that are waited for, until they are judged
REST = 64, 4096  # steps between two such windows, at least and at most: twice as many each time that it did not pay
BETTER = 1.02  # gain from which steps are waited for further on


class Waits:
    """Tries now and then to wait for steps, and goes on as long as these bring more tokens per second, with their
    proposals, than steps that begin before the last one is read.

    always: steps are waited for without a trial.
    """

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self._ahead = Costs()  # of steps that begin before the last one is read
        self._left, self._rest = REST[0], REST[0]  # steps until the next window
        self._steps = 0  # of this window
        self._won = self._spent = 0.0  # seconds that its tokens would have taken otherwise, and did take
        self.waiting: bool = always
        """Whether the next step is waited for."""

    def note_ahead(self, rows: int, seconds: float) -> None:
        """A step of so many rows that decode has begun before the last one was read."""
        if self._always:
            return
        self._ahead.note(rows, seconds)
        self._left -= 1
        self.waiting = self._left <= 0 and self._ahead.knows(rows)

    def note_waited(self, rows: int, tokens: int, seconds: float) -> None:
        """A step of so many rows that decode was waited for, and has brought so many tokens."""
        if not self.waiting or self._always:
            return
        self._steps += 1
        if self._ahead.knows(rows):
            self._won += float(self._ahead.predict(rows)) * tokens / rows
            self._spent += seconds
        if self._steps < WINDOW:
            return
        pays = self._spent > 0 and self._won >= BETTER * self._spent
        self._steps, self._won, self._spent = 0, 0.0, 0.0
        if pays:
            self._rest = REST[0]
            return
        self._left, self._rest = self._rest, min(2 * self._rest, REST[1])
        self.waiting = False
