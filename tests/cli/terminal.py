"""A command in a terminal of a given size, and what its screen shows."""

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time

PATIENCE = 50
COMMAND = [sys.executable, "-m", "hibachi"]
TOKEN = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n])|\x1b([78D])|(\x1b)")


class Screen:
    """The lines of a terminal, of unlimited width, after what was written to it. Knows only what we use."""

    def __init__(self, rows):
        self.rows, self.lines = rows, [[]]  # those that have scrolled out included
        self.row = self.column = 0
        self.saved = 0, 0

    @property
    def top(self):
        return max(0, len(self.lines) - self.rows)

    def write(self, text):
        for number, command, start, end, letter, cursor, other in TOKEN.findall(text):
            assert not other, "an escape sequence that nobody expected"
            line = self.lines[self.row]
            if letter:
                line.extend(" " * (self.column - len(line)))
                line[self.column : self.column + 1] = [letter]
                self.column += 1
            elif cursor:
                self.move(cursor)
            elif start:
                self.column = 0
            elif end:
                self.row += 1
                if self.row == len(self.lines):
                    self.lines.append([])
            else:
                self.command(command, number)

    def move(self, cursor):
        """ "7" saves the place of the cursor, as it is on the screen, "8" goes back there, "D" goes down a line."""
        if cursor == "7":
            self.saved = self.row - self.top, self.column
        elif cursor == "8":
            self.row, self.column = self.top + self.saved[0], self.saved[1]
        else:
            self.row += 1
            if self.row == len(self.lines):
                self.lines.append([])

    def command(self, command, number):
        if command == "A":
            self.row = max(self.top, self.row - int(number or 1))
        elif command == "B":
            self.row = min(self.top + self.rows - 1, self.row + int(number or 1))
            assert self.row < len(self.lines), "a line that is not there"
        elif command == "K":
            del self.lines[self.row][self.column :]
        elif command == "J" and number == "2":
            self.lines[self.top :] = [[] for _ in self.lines[self.top :]]
        elif command == "J":
            del self.lines[self.row][self.column :]
            del self.lines[self.row + 1 :]
        elif command == "H":
            self.row, self.column = self.top, 0
        else:
            assert (command, number) in {("m", "1"), ("m", "22"), ("h", "?7"), ("l", "?7")}, (command, number)

    @property
    def text(self):
        return ["".join(line).rstrip() for line in self.lines]


class Terminal:
    """A running command; `read` until a text has come, or until its end."""

    def __init__(self, *args, rows=24, columns=80, **env):
        self.master, slave = pty.openpty()
        self.resize(rows, columns)
        full = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        full |= {"TERM": "xterm", "PYTHONIOENCODING": "utf-8"} | env
        self.process = subprocess.Popen([*COMMAND, *args], stdin=slave, stdout=slave, stderr=slave, env=full)
        os.close(slave)
        self.output = ""

    def resize(self, rows, columns):
        termios.tcsetwinsize(self.master, (rows, columns))

    def read(self, until=None):
        deadline = time.monotonic() + PATIENCE
        data = self.output.encode()
        while until is None or until.encode() not in data:
            assert time.monotonic() < deadline, f"no {until!r} in {data!r}"
            if not select.select([self.master], [], [], 1)[0]:
                continue
            try:
                got = os.read(self.master, 65536)
            except OSError:  # Linux: the other side is closed
                got = b""
            if not got:
                break
            data += got
        self.output = data.decode(errors="ignore")
        return self.output

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.master)
