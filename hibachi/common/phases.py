"""Shows a person what takes long: a line below the text of a terminal that says what is done and how far it is.

Code deep inside the library reports its long parts by `phase`, which shows nothing by itself. A command shows them, on
a terminal, by `showing_phases`. Bars and pictures are in `hibachi.common.progress`.

Nothing here fails the work: if the terminal goes away, nothing is shown any more. TERM=dumb is treated as a pipe.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TextIO, cast

INTERRUPTED = 130  # exit status, as shells report a program that Ctrl-C ended
SHOW_AFTER = 0.6  # seconds of work until its phase is shown: what ends before does not flicker
_TICK = 0.2  # seconds from one drawing of a phase to the next
_PAUSE = 0.5  # a phase that begins so soon after another belongs to the same piece of work


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
    microsecond. total: of what `update` counts, in `unit`; None means unknown. measure: counts instead of `update`,
    called from another thread whenever the phase is drawn; it must not raise.
    """
    return Phase(what, total, unit, measure)


@contextmanager
def showing_phases(file: TextIO | None = None) -> Iterator[None]:
    """Show the phases of this process, which runs a command, on a terminal; on anything else nothing is shown.

    file: None means standard error.
    """
    out = PhaseOutput(file)
    before, _phases.command = _phases.command, True
    drawn = is_live(out.file) and not _phases.shown
    files = sys.stdout, sys.stderr
    if drawn:
        _phases.show(out)
        sys.stdout, sys.stderr = (cast(TextIO, _Above(f)) if is_live(f) else f for f in files)
    try:
        yield
    finally:
        _phases.command = before
        if drawn:
            _phases.hide()
            sys.stdout, sys.stderr = files


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process of a command without cleaning up: for work whose threads cannot be interrupted.

    Elsewhere, and where Ctrl-C does not raise KeyboardInterrupt, this changes nothing.
    """
    here = threading.current_thread() is threading.main_thread()
    if not (here and _phases.command and signal.getsignal(signal.SIGINT) is signal.default_int_handler):
        yield
        return

    def end(*_: object) -> None:
        _phases.hide()
        PhaseOutput().write("\n")  # the terminal wrote ^C into the line
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def in_command() -> bool:
    """Does this process run a command, so that nothing but its own lines may appear?"""
    return _phases.command


def phases_shown() -> bool:
    """Whether phases are shown to a user."""
    return _phases.shown


class _Phases:
    """The phases of this process that have begun and not ended, and the thread that draws the latest of them.

    It is drawn in the line below the cursor, which goes back to where it was: so it harms no text that is being
    written, by whatever thread, and is gone with its end.
    """

    def __init__(self) -> None:
        self._running: list[Phase] = []
        self._lock = threading.RLock()
        self._out: PhaseOutput | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Event()
        self._since = self._ended = 0.0
        self._drawn = False
        self.command = False  # this process runs a command

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

    def show(self, out: PhaseOutput) -> None:
        with self._lock:
            self._out, self._drawn = out, False
        self._thread = threading.Thread(target=self._tick, args=(out,), name="hibachi-phases", daemon=True)
        self._thread.start()

    def hide(self) -> None:
        with self._lock:
            self._erase()
            self._out = None
        self._changed.set()
        if self._thread is not None:
            self._thread.join(5 * _TICK)  # else a thread that draws could meet the end of the interpreter

    def _tick(self, out: PhaseOutput) -> None:
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

    def make_room(self) -> None:
        """Erase the line, as something is about to be written where it stands. It comes back below."""
        if self._drawn:
            with self._lock:
                self._erase()


class _Above:
    """A file of a terminal on which phases are shown: what is written goes above them. All else is the file's own."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        _phases.make_room()
        return self._file.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        _phases.make_room()
        self._file.writelines(lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


_phases = _Phases()


# ---- terminals ------------------------------------------------------------------------------------------------------


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


class PhaseOutput:
    """Writes to a file for as long as that works. file: None means standard error."""

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


def duration(seconds: float) -> str:
    """12.3 s, 4:05 min, 3:07:00 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(min(seconds, 1e9))
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600:,}:{whole // 60 % 60:02}:{whole % 60:02} h"


def short_bytes(n: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if n >= unit:
            return f"{n / unit:.1f} {name}"
    return f"{n} B"


def short_duration(seconds: float | None) -> str:
    """3.2 ms, 1.5 s, 280 s; "-" for None and NaN."""
    if seconds is None or seconds != seconds:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size * 0.9995:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns" if seconds else "0 s"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
