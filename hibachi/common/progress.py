"""What a person sees of work that takes long: frames at the bottom of a terminal, a bar, or a line a minute in a pipe.

The long parts of work deep inside the library are shown by `hibachi.common.phases`.

Nothing here fails the work: if the terminal goes away or the pipe is closed, nothing is shown any more. There are no
colours, so NO_COLOR changes nothing; TERM=dumb is treated as a pipe.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, TextIO

from hibachi.common.phases import PhaseOutput, duration, is_live, size_of

FRAME = 0.1  # seconds from one frame to the next
FIRST = 5.0  # seconds until the first line in a pipe ...
EVERY = 60.0  # ... and from each to the next
BAR = 20  # columns


class Screen:
    """The last lines of a terminal. Each frame takes the place of the one before."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._out = PhaseOutput(file)
        self._size, self._height = self.size(), 0

    def size(self) -> os.terminal_size:
        return size_of(self._out.file)

    def draw(self, lines: Sequence[str]) -> None:
        """Show these, the last of them if there are too many. Too long ones are cut off by the terminal."""
        size = self.size()
        lines = lines[-max(size.lines - 1, 1) :]
        if size != self._size:  # the terminal has moved the old lines anywhere
            start = "\x1b[2J\x1b[H"
        else:
            start = f"\x1b[{self._height}A" if self._height else ""
        self._size, self._height = size, len(lines)
        # In one piece, so that nothing is left behind if we die: without wrapping, from the top, each line to its end.
        frame = "".join(f"{line}\x1b[K\n" for line in lines)
        self._out.write(f"\x1b[?7l{start}\r{frame}\x1b[J\x1b[?7h")

    def say(self, line: str, below: Sequence[str] = ()) -> None:
        """Leave a line above the frame, for good, and draw these below it."""
        self.draw([line, *below])
        self._height = min(self._height, len(below))


class Shown(Protocol):
    """Progress as it is shown, by us or by tqdm."""

    def update(self, done: int, **figures: float | str) -> None:
        """So much is done. figures: by their units, `**{"tokens/s": 312.5}`; those not told again stay."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class _Closes:
    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Progress(_Closes):
    """How far work has come: on a terminal a bar, drawn ten times a second at most; in a pipe a line after a few
    seconds and then one a minute; at the end a line that says what it came to. Nothing is drawn but in `update`.

    total: None means nobody knows. unit: what is counted, in the plural. what: stands in front. file: None means
    standard error.
    live: None means if the file is a terminal. before: so much was done earlier, which says nothing of the speed.
    """

    def __init__(
        self,
        total: int | None,
        unit: str,
        file: TextIO | None = None,
        live: bool | None = None,
        *,
        what: str = "",
        before: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._unit, self._what = total, unit, f"{what}  " if what else ""
        self._before = self._done = before
        self._figures: dict[str, float | str] = {}
        self._clock, self._began = clock, clock()
        self._out = PhaseOutput(file)
        self._screen = Screen(file) if (is_live(self._out.file) if live is None else live) else None
        self._next = self._began + (0.0 if self._screen else FIRST)
        self._closed = False

    def update(self, done: int, **figures: float | str) -> None:
        """So much is done, `before` included. See `Shown`."""
        self._done = done
        self._figures |= figures
        now = self._clock()
        if now < self._next or self._closed:
            return
        if self._screen is not None:
            self._next = now + FRAME
            self._screen.draw([self._line(now, bar=True)])
        else:
            self._next = now + EVERY
            self._out.write(self._line(now, bar=False) + "\n")

    def say(self, line: str) -> None:
        """A line that stays, above the bar."""
        if self._screen is None:
            self._out.write(line + "\n")
        else:
            self._screen.say(line, [] if self._closed else [self._line(self._clock(), bar=True)])

    def close(self, *, whole: bool = False) -> None:
        """The last line. whole: all is done, though `total` was guessed otherwise. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        if whole:
            self._total = None
        line = self._result(self._clock())
        if self._screen is not None:
            self._screen.say(line)
        else:
            self._out.write(line + "\n")

    @property
    def _speed(self) -> float:
        """Units a second, of this run."""
        seconds = self._clock() - self._began
        return (self._done - self._before) / seconds if seconds > 0 else 0.0

    def _line(self, now: float, *, bar: bool) -> str:
        seconds, total = now - self._began, self._total
        if total is None:
            so_far, left = f"{self._done:,} {self._unit}", ""
        else:
            share = min(1.0, self._done / total) if total else 1.0
            drawn = f"[{'#' * int(BAR * share):{BAR}}] " if bar else ""
            so_far = f"{drawn}{self._done:,}/{total:,} {self._unit}, {int(100 * share)} %"
            left = f", {duration((total - self._done) / self._speed)} left" if self._speed and share < 1 else ""
        return "  ".join([self._what + so_far, *self._rates(), f"{duration(seconds)}{left}"])

    def _result(self, now: float) -> str:
        done = f"{self._done:,} {self._unit}"
        if self._total is not None and self._done < self._total:
            done = f"ended at {self._done:,} of {self._total:,} {self._unit}"
        return "  ".join([f"{self._what}{done} in {duration(now - self._began)}", *self._rates()])

    def _rates(self) -> list[str]:
        own = {f"{self._unit}/s": self._speed} if self._speed else {}
        return [f"{x if isinstance(x, str) else figure(x)} {name}" for name, x in (own | self._figures).items()]


# ---- tqdm ------------------------------------------------------------------------------------------------------------


class _Tqdm(_Closes):
    """tqdm's bar."""

    def __init__(self, tqdm: Any, total: int | None, unit: str) -> None:
        self._bar = tqdm(total=total, unit=f" {unit}")

    def update(self, done: int, **figures: float | str) -> None:
        own = {name: x if isinstance(x, str) else figure(x) for name, x in figures.items()}
        self._bar.set_postfix(own, refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def shown(total: int | None, unit: str) -> Shown:
    """tqdm's bar where that is installed, which notebooks know; else ours. Both on standard error."""
    try:
        tqdm = importlib.import_module("tqdm.auto")
    except ImportError:
        return Progress(total, unit)
    return _Tqdm(tqdm.tqdm, total, unit)


def figure(x: float) -> str:
    """Three digits, or all of a large number: 0.123, 12.3, 1,234."""
    return f"{x:,.0f}" if isinstance(x, int) or abs(x) >= 100 else f"{x:.3g}"
