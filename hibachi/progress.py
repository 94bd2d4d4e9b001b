"""What a person sees of work that takes long: frames at the bottom of a terminal, a bar, or a line a minute in a pipe.

Code deep inside the library reports its long parts by `phase`, which shows nothing by itself; a command shows them, on
a terminal, by `showing_phases`.

Nothing here fails the work: if the terminal goes away or the pipe is closed, nothing is shown any more. There are no
colours, so NO_COLOR changes nothing; TERM=dumb is treated as a pipe.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self, TextIO

FRAME = 0.1  # seconds from one frame to the next
FIRST = 5.0  # seconds until the first line in a pipe ...
EVERY = 60.0  # ... and from each to the next
BAR = 20  # columns
SHOW_AFTER = 1.0  # seconds of work until its phase is shown: what ends before does not flicker
_TICK = 0.2  # seconds from one drawing of a phase to the next
_PAUSE = 0.5  # a phase that begins so soon after another belongs to the same piece of work


def is_live(file: TextIO) -> bool:
    """May lines of it be drawn anew? Only on a terminal that understands how."""
    try:
        return file.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    except (AttributeError, OSError, ValueError):  # closed, or no file
        return False


def size_of(file: TextIO) -> os.terminal_size:
    """Columns and lines of its terminal, which COLUMNS and LINES overrule; 80 x 24 if it has none."""
    sizes = [_number(os.environ.get(name)) for name in ("COLUMNS", "LINES")]
    if not all(sizes):
        try:
            own = os.get_terminal_size(file.fileno())
        except (AttributeError, OSError, ValueError):
            own = os.terminal_size((0, 0))
        sizes = [a or b or c for a, b, c in zip(sizes, own, (80, 24), strict=True)]
    return os.terminal_size(sizes)


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


class Output:
    """Writes to a file for as long as that works. file: None: standard error."""

    def __init__(self, file: TextIO | None = None) -> None:
        self.file: TextIO = sys.stderr if file is None else file
        self.gone = False

    def write(self, text: str) -> None:
        if self.gone:
            return
        try:
            self.file.write(text)
            self.file.flush()
        except (AttributeError, OSError, ValueError):  # no file, a reader that left, a closed file, another encoding
            self.gone = True


class Screen:
    """The last lines of a terminal. Each frame takes the place of the one before."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._out = Output(file)
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

    total: None: nobody knows. unit: what is counted, in the plural. what: stands in front. file: None: standard error.
    live: None: if the file is a terminal. before: so much was done earlier, which says nothing of the speed.
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
        self._out = Output(file)
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


# ---- phases ----------------------------------------------------------------------------------------------------------


class Phase:
    """A part of long work, as a context manager: what is done, and how far it is. See `phase`."""

    def __init__(self, what: str, total: int | None, unit: str, measure: Callable[[], int] | None) -> None:
        self._what, self._total, self._unit, self._measure = what, total, unit, measure
        self._done: int | None = None if total is None else 0
        self._began = time.monotonic()

    def update(self, done: int, what: str | None = None) -> None:
        """So much is done. what: from now on the phase is called so."""
        self._done = done
        self._what = what or self._what

    def line(self, width: int, now: float) -> str:
        """At most `width` characters of ASCII: the figures are whole where they fit, the words are cut."""
        done = self._done if self._measure is None else self._measure()
        figures = [duration(now - self._began)]
        if done is not None:
            count = f"{done:,}" if self._total is None else f"{done:,}/{self._total:,}"
            figures.insert(0, f"{count} {self._unit}".rstrip())
        told = "  ".join(figures)
        if len(told) + 10 > width:
            told = told.replace(f" {self._unit}", "") if self._unit else told
        words = self._what.encode("ascii", "replace").decode()
        room = max(width - len(told) - 2, 0)
        return f"{words[:room]}  {told}"[:width]

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        _phases.begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        _phases.end(self)


def phase(what: str, total: int | None = None, unit: str = "", measure: Callable[[], int] | None = None) -> Phase:
    """Report a part of work that may take longer than a second: `with phase("reading weights", 30, "layers") as p:`.

    A user sees it while a command shows phases (`showing_phases`), and the innermost one only; else it costs a
    microsecond. total: of what `update` counts, in `unit`; None: unknown. measure: counts instead of `update`, called
    from another thread whenever the phase is drawn; it must not raise.
    """
    return Phase(what, total, unit, measure)


@contextmanager
def showing_phases(file: TextIO | None = None) -> Iterator[None]:
    """Show all phases of this process on a terminal; on anything else nothing is shown. file: None: standard error."""
    out = Output(file)
    if not is_live(out.file) or _phases.shown:
        yield
        return
    _phases.show(out)
    try:
        yield
    finally:
        _phases.hide()


def phases_shown() -> bool:
    """Does somebody see the phases?"""
    return _phases.shown


class _Phases:
    """The phases of this process that have begun and not ended, and the thread that draws the latest of them.

    It is drawn in the line below the cursor, which goes back to where it was: so it harms no text that is being
    written, by whatever thread, and is gone with its end.
    """

    def __init__(self) -> None:
        self._running: list[Phase] = []
        self._lock = threading.RLock()
        self._out: Output | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Event()
        self._since = self._ended = 0.0
        self._drawn = False

    @property
    def shown(self) -> bool:
        return self._out is not None

    def begin(self, one: Phase) -> None:
        with self._lock:
            now = time.monotonic()
            if not self._running and now - self._ended > _PAUSE:
                self._since = now
            self._running.append(one)
        self._changed.set()

    def end(self, one: Phase) -> None:
        with self._lock:
            if one in self._running:
                self._running.remove(one)
            if not self._running:
                self._ended = time.monotonic()
                self._erase()

    def show(self, out: Output) -> None:
        with self._lock:
            self._out, self._drawn = out, False
        self._thread = threading.Thread(target=self._tick, args=(out,), name="hibachi-progress", daemon=True)
        self._thread.start()

    def hide(self) -> None:
        with self._lock:
            self._erase()
            self._out = None
        self._changed.set()
        if self._thread is not None:
            self._thread.join(5 * _TICK)  # else a thread that draws could meet the end of the interpreter

    def _tick(self, out: Output) -> None:
        while self._out is out:
            if not self._running:
                self._changed.wait()
                self._changed.clear()
                continue
            self.draw(time.monotonic())
            time.sleep(_TICK)

    def draw(self, now: float) -> None:
        with self._lock:
            if self._out is None or not self._running or now - self._since < SHOW_AFTER:
                return
            line = self._running[-1].line(size_of(self._out.file).columns - 1, now)
            # Clear what is below, make sure that there is a line below, go there and come back.
            self._out.write(f"\x1b[J\x1bD\x1b[A\x1b7\x1b[B\r{line}\x1b[K\x1b8")
            self._drawn = True

    def _erase(self) -> None:
        if self._drawn and self._out is not None:
            self._out.write("\x1b[J")
            self._drawn = False


_phases = _Phases()


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


def duration(seconds: float) -> str:
    """12.3 s, 4:05 min, 3:07:00 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(min(seconds, 1e9))
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600:,}:{whole // 60 % 60:02}:{whole % 60:02} h"
