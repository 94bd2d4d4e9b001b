"""Runs the promises in a process of their own, and in another one after it hangs or dies. See `journal`.

Only a process can be cut off wherever it is: an exception reaches neither the code of a library nor another thread, and
a thread that is left alone keeps its locks.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hibachi.testing.causes import Frame, hung_at
from hibachi.testing.journal import LINES, LOADING, STACKS, parsed

LOOK = 0.05  # seconds from one look at the process to the next
GRACE = 5.0  # seconds that it gets to write its stacks, or to end
SOONER = 10  # where a promise hung before, the stacks are looked at so many times as often ...
ENOUGH = 2  # ... and a promise that stands there so many times in a row hangs as well
PYTEST_CODES = range(6)  # with which pytest ends; any other is that of a process that died
CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import pytest; sys.exit(pytest.main(sys.argv[2:]))"


def watched(arguments: Sequence[str], limit: float, *, to_stderr: bool = False) -> int:
    """pytest's exit code for these arguments. limit: seconds for a promise; 0 means none. to_stderr: what pytest
    prints.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # not without the process below
    with TemporaryDirectory(prefix="hibachi-conformance-") as folder:
        return _Watch(Path(folder), arguments, limit, to_stderr).run()


class _Watch:
    def __init__(self, folder: Path, arguments: Sequence[str], limit: float, to_stderr: bool) -> None:
        self.folder, self.arguments, self.limit, self.to_stderr = folder, list(arguments), limit, to_stderr
        self.known: list[Frame] = []  # where promises hung, inside a backend
        self.looks = 1  # at the stacks of a promise, until its time is over
        self.now: dict[str, Any] = {}  # what the process is at: its line with "start", "load" or "finished"
        self.own: dict[str, list[str]] = {}  # the files of each backend
        self.read = 0  # bytes of the journal

    def run(self) -> int:
        (self.folder / LINES).touch()
        more = [f"--hibachi-journal={self.folder}"]
        while True:
            self.looks = SOONER if self.known else 1
            self._write(every=self.limit / self.looks)
            code, cut = self._one(more)
            more += ["-o", "console_output_style=classic"]  # no percentages, as what was before is not shown again
            if "finished" in self.now:
                return int(self.now["finished"])
            if cut:
                continue
            died = code not in PYTEST_CODES
            if "start" in self.now or ("load" in self.now and died):
                self._cut("crashed", f"The process ended with {_ending(code)}", self._stacks())
            elif died:
                self._say(f"The process ended with {_ending(code)}, between two promises.")
                return 1
            else:
                return code or 1  # pytest refused its arguments, say

    def _one(self, more: list[str]) -> tuple[int, bool]:
        """The exit code of one process, and whether it was cut off."""
        command = [sys.executable, "-P", "-u", "-c", CHILD, json.dumps(sys.path), *self.arguments, *more]
        process = subprocess.Popen(command, stdout=sys.stderr if self.to_stderr else None)
        interrupted: float | None = None
        self.now = {}
        try:
            while True:
                try:
                    code = process.wait(LOOK)
                except subprocess.TimeoutExpired:
                    self._look()
                except KeyboardInterrupt:  # the process gets it as well, and may have something to say
                    interrupted = time.time()
                else:
                    self._look()
                    return code, False
                if interrupted is not None and time.time() > interrupted + GRACE:
                    raise KeyboardInterrupt
                if "finished" in self.now and time.time() > self.now["at"] + GRACE:
                    return 0, True  # a library left something behind that does not end
                if self.limit and (stacks := self._over()) is not None:
                    at = self.now
                    process.kill()
                    process.wait()
                    self._look()
                    if self.now is at:  # it did not go on at the last moment
                        self._cut("hung", f"No end after {time.time() - at['at']:.3g} s", stacks)
                    return 0, True
        finally:
            process.kill()
            process.wait()

    def _look(self) -> None:
        """Read what was added to the journal."""
        with (self.folder / LINES).open("rb") as file:
            file.seek(self.read)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self.read += len(text)
        for line in parsed(text.decode()):
            self.own |= line.get("own", {})
            if "start" in line or "load" in line or "finished" in line:
                self.now = line
            elif self.now and ("loaded" in line or line.get("done") == self.now.get("start", "")):
                self.now = {}

    def _over(self) -> str | None:
        """The stacks of a promise, or of a backend that is being loaded, that hangs; None means it does not, or not
        yet.
        """
        if "start" not in self.now and "load" not in self.now:
            return None
        limit = self.limit * (LOADING if "load" in self.now else 1)
        dumps = self._stacks().split("Timeout (")[1:]
        if len(dumps) >= self.looks or time.time() > self.now["at"] + limit + GRACE:
            time.sleep(LOOK)  # until the last line is written
            return self._stacks().rpartition("Timeout (")[2]
        stands = {self._place(dump) for dump in dumps[-ENOUGH:]} if len(dumps) >= ENOUGH and self.known else {None}
        return dumps[-1] if stands <= {*self.known} else None

    def _cut(self, how: str, text: str, stacks: str) -> None:
        """Write down what became of the promise, or of the backend, that the process was at."""
        where, _ = hung_at(stacks, self._files())
        if how == "hung" and (place := self._place(stacks)) is not None:
            self.known.append(place)
        what, named = ("cut", self.now["start"]) if "start" in self.now else ("lost", self.now["load"])
        seconds = time.time() - self.now["at"]
        self._write(**{what: named}, how=how, text=text, where=list(map(str, where)), seconds=seconds)
        at = f", at {where[0]}" if where else ""
        self._say(f"{named}: {text}{at}. Going on in a new process.")
        (self.folder / STACKS).write_text("")

    def _say(self, text: str) -> None:
        print(f"\n{text}", file=sys.stderr if self.to_stderr else sys.stdout, flush=True)

    def _files(self) -> list[str]:
        return self.own.get(self.now.get("backend") or "", [])

    def _place(self, stacks: str) -> Frame | None:
        """The innermost frame inside the backend, if the process hangs there."""
        where, inside = hung_at(stacks, self._files())
        return next((frame for frame in where if frame.within(self._files())), None) if inside else None

    def _stacks(self) -> str:
        try:
            return (self.folder / STACKS).read_text(errors="replace")
        except FileNotFoundError:  # the process has not come so far
            return ""

    def _write(self, **line: Any) -> None:
        with (self.folder / LINES).open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(line) + "\n")  # a line before it may not have come to its end


def _ending(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"
