"""The journal of a run, in a file beside its output: a line for each finished row, so that nothing is computed twice.

Each line is the CRC-32 of the rest in eight hexadecimal digits, a blank, and JSON on one line. The first line
identifies the run; the others are results, in the order in which they came, and notes. A later result of a row replaces
an earlier one. What was flushed survives the death of this process at once, and that of the machine after `SYNC_EVERY`
seconds at most.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hibachi.errors import ConfigError
from hibachi.offline.whole import check_regular, lock, sync_folder, unlinked

SYNC_EVERY = 1.0  # seconds
HEAD, RESULT, FAULT, NOTE = "head", "row", "error", "note"
_HEAD, _FAULT, _NOTE = (f'["{what}"'.encode() for what in (HEAD, FAULT, NOTE))  # how these lines begin
_NONE = -1  # the place of a result that is not there


class Journal:
    """Open for one run, and locked against others.

    damaged: (line, byte) of lines whose checksum is wrong. One without its end, which can only be the last, was torn
    when it was written, and is dropped.
    heads: what made the run, the first time and wherever a change was accepted. notes: others' lines, by their names.
    """

    path: Path
    heads: list[dict[str, Any]]
    notes: dict[str, Any]
    damaged: list[tuple[int, int]]

    def __init__(self, path: str | Path) -> None:
        """Raises Busy, OSError, and ConfigError for a file that is no journal, or a link."""
        self.path = Path(path)
        check_regular(self.path)
        self._file = open(self.path, "a+b", buffering=1 << 16, opener=unlinked)  # noqa: SIM115 - `close` closes it
        try:
            lock(self._file.fileno(), self.path)
            self._forget_all()
            self._end = self._read()
        except BaseException:
            self._file.close()
            raise
        self._dirty, self._unsynced, self._synced = False, False, time.monotonic()

    def _forget_all(self) -> None:
        self.heads, self.notes, self.damaged = [], {}, []
        self._places = array("q")  # by row: where its line begins
        self._failed = bytearray()  # by row: 1, if that is an error
        self._segment = bytearray()  # by row: how many heads stood before it, less one; 255: or more
        self.done: int = 0

    # ---- reading -----------------------------------------------------------------------------------------------

    def _read(self) -> int:
        """All lines; returns where the next one goes, which is where a torn one began."""
        at = 0
        self._file.seek(0)
        if not _begins_head(self._file.read(64)):
            self._refuse()
        self._file.seek(0)
        for line, raw in enumerate(self._file, 1):
            text = _checked(raw)
            if text is not None:
                self._take(text, at)
            elif raw.endswith(b"\n"):
                self.damaged.append((line, at))
            else:
                self._file.truncate(at)
                break
            at += len(raw)
        if at and not self.heads:
            self._refuse_headless()
        return at

    def _refuse(self) -> None:
        raise ConfigError(
            f"{self.path} is no journal of hibachi's, and a run would write its own there. Move it, or choose another "
            f"output."
        )

    def _refuse_headless(self) -> None:
        raise ConfigError(
            f"{self.path} is damaged where it says what made the run (line 1, byte 0), so what was done cannot be "
            f"used. Remove it to begin anew."
        )

    def _take(self, text: bytes, at: int) -> None:
        if text.startswith(_HEAD):
            self.heads.append(json.loads(text)[1])
        elif not self.heads:
            self._refuse_headless()
        elif text.startswith(_NOTE):
            _, name, what = json.loads(text)
            self.notes[name] = what
        else:  # of a result no more is read than whose it is
            what, row, _ = text.split(b",", 2)
            self._keep(int(row), at, what == _FAULT)

    def _keep(self, row: int, at: int, failed: bool) -> None:
        short = row + 1 - len(self._places)
        if short > 0:
            more = max(short, len(self._places) // 2 + 1024)
            self._places.extend([_NONE] * more)
            self._failed.extend(bytes(more))
            self._segment.extend(bytes(more))
        self.done += self._places[row] == _NONE
        self._places[row], self._failed[row] = at, failed
        self._segment[row] = min(len(self.heads) - 1, 255)

    # ---- what is there -----------------------------------------------------------------------------------------

    def has(self, row: int) -> bool:
        return row < len(self._places) and self._places[row] != _NONE

    def failed(self, row: int) -> bool:
        """Is its result an error?"""
        return self.has(row) and bool(self._failed[row])

    def segment(self, row: int) -> int:
        """Under which of `heads` it was computed."""
        return self._segment[row]

    @property
    def failures(self) -> int:
        return self._failed.count(1)

    @property
    def size(self) -> int:
        """Bytes."""
        return self._end

    def result(self, row: int) -> tuple[int, Any]:
        """The digest of the row, and what became of it. Raises ConfigError if the line has changed on the disk."""
        if self._dirty:
            self.flush()
        raw = self._line_at(self._places[row])
        text = _checked(raw)
        found = None if text is None else json.loads(text)
        if found is None or found[0] not in (RESULT, FAULT) or found[1] != row:
            raise ConfigError(f"{self.path} has changed while it was used: what it holds of row {row} cannot be read.")
        return found[2], found[3]

    def _line_at(self, at: int) -> bytes:
        found, want = b"", 1 << 12
        while True:
            more = self._read_at(at + len(found), want)
            found += more
            end = found.find(b"\n")
            if end >= 0 or not more:
                return found[: end + 1]
            want *= 2

    def _read_at(self, at: int, size: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self._file.fileno(), size, at)
        self._file.seek(at)  # on Windows; what is written goes to the end nevertheless
        return self._file.read(size)

    def forget(self, row: int) -> None:
        """It is to be computed again."""
        if self.has(row):
            self._places[row], self._failed[row] = _NONE, 0
            self.done -= 1

    def failed_rows(self, before: int) -> Iterator[int]:
        """Whose errors stand in the first so many bytes."""
        at = self._failed.find(1)
        while at >= 0:
            if self._places[at] < before:
                yield at
            at = self._failed.find(1, at + 1)

    # ---- writing -----------------------------------------------------------------------------------------------

    def head(self, what: Mapping[str, Any]) -> None:
        self.write([HEAD, what])
        self.sync()
        sync_folder(self.path.parent)  # the file itself may be new
        self.heads.append(dict(what))

    def note(self, name: str, what: Any) -> None:
        """On the disk when this returns."""
        self.write([NOTE, name, what])
        self.sync()
        self.notes[name] = what

    def clear(self) -> None:
        """Begin anew."""
        self._forget_all()
        self._file.truncate(0)
        self._end = 0
        self.sync()

    def row(self, row: int, digest: int, result: Any, *, failed: bool = False) -> None:
        at = self._end
        self.write([FAULT if failed else RESULT, row, digest, result])
        self._keep(row, at, failed)

    def write(self, entry: list[Any]) -> None:
        """A line, as all others are written by."""
        text = json.dumps(entry, ensure_ascii=True, separators=(",", ":")).encode()
        line = b"%08x %b\n" % (zlib.crc32(text), text)
        with self._named():
            self._file.write(line)
        self._end += len(line)
        self._dirty = self._unsynced = True

    def flush(self) -> None:
        """Out of this process; on the disk as well, if that was not done for `SYNC_EVERY` seconds."""
        if self._dirty:
            with self._named():
                self._file.flush()
            self._dirty = False
        if self._unsynced and time.monotonic() - self._synced > SYNC_EVERY:
            self.sync()

    def sync(self) -> None:
        with self._named():
            self._file.flush()
            os.fsync(self._file.fileno())
        self._dirty, self._unsynced, self._synced = False, False, time.monotonic()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors say of which file."""
        try:
            yield
        except OSError as e:
            e.filename = e.filename or str(self.path)
            raise

    def close(self) -> None:
        """What cannot be written any more (a full disk) is lost: `flush` would have said so. A journal that says
        nothing is removed."""
        with suppress(OSError):
            if not self.heads and not self._end and not self._file.closed:
                self.path.unlink(missing_ok=True)  # still under the lock
        with suppress(OSError):
            self._file.close()


def _checked(raw: bytes) -> bytes | None:
    """What a line says; None if it is not whole."""
    if raw[-1:] != b"\n" or raw[8:9] != b" ":
        return None
    text = raw[9:-1]
    try:
        return text if int(raw[:8], 16) == zlib.crc32(text) else None
    except ValueError:
        return None


def _begins_head(raw: bytes) -> bool:
    """May a journal begin so? Of its head there may be a part, and zeros, as when the machine died."""
    raw = raw.rstrip(b"\0")
    text = raw[9:]
    checksum = all(c in b"0123456789abcdef" for c in raw[:8]) and raw[8:9] in (b"", b" ")
    return checksum and (text.startswith(_HEAD) or _HEAD.startswith(text))
