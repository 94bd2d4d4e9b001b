"""Files that are written whole or not at all."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from hibachi.common.locks import locked
from hibachi.errors import ConfigError

_FAR = (1 << 31) - 2  # a byte beyond what most files have, which also old C libraries can lock


class Busy(ConfigError):
    """Another process writes this output."""


def part_of(path: Path) -> Path:
    """Where a file is written before it takes its name."""
    return path.with_name(path.name + ".part")


@contextmanager
def into_place(path: Path, before: Callable[[dict[str, Any]], None]) -> Iterator[BinaryIO]:
    """A file to write to, which takes its name when the block ends, or is removed if the block raises.

    before: is told the size and digest of the file when it is on the disk, and has no name yet. What a run that was
    killed has left of it is removed first. Raises Busy, OSError, and ConfigError if something else is in its place.
    """
    part = part_of(path)
    file = _new(part)
    try:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
        except OSError as e:  # say of which file
            if not isinstance(e, BrokenPipeError):
                e.filename = e.filename or str(part)
            raise
        _let_go(file)
        before(seal(part))
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            _let_go(file)
            part.unlink(missing_ok=True)
        raise
    finally:
        with suppress(OSError):  # after an error, of which this is the same again
            file.close()
    sync_folder(path.parent)


def _new(part: Path) -> BinaryIO:
    """A file that was not there, under a lock. Raises as `into_place` does."""
    check_regular(part)
    with suppress(FileNotFoundError), open(part, "r+b", opener=unlinked) as left:
        lock(left.fileno(), part)
        _let_go(left)
        part.unlink()
    try:
        file = part.open("xb")  # which follows no link
    except FileExistsError:
        raise Busy(_busy(part)) from None
    try:
        lock(file.fileno(), part)
    except BaseException:
        file.close()
        raise
    return file


def _let_go(file: BinaryIO) -> None:
    """On Windows, where a file that is open can neither be renamed nor removed. Elsewhere it stays open and locked."""
    if sys.platform == "win32":
        file.close()


def check_regular(path: Path) -> None:
    """What is there under a name that a run writes, if anything is, must be a file, and no link. Raises ConfigError."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise ConfigError(
                f"{path} is a link, or no regular file, and a run would write there. Remove it, or choose another "
                f"output."
            )


def unlinked(path: str, flags: int) -> int:
    """For `open`: does not follow a link."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def lock(file: int, path: Path) -> None:
    """Lock a file until it is closed, or the process ends in any way. Raises Busy."""
    if sys.platform == "win32":
        _lock_far(file, path)
    else:
        mine = locked(file)
        if mine is False:
            raise Busy(_busy(path))
        if mine is None:
            return
    try:
        gone = not os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        gone = True
    if gone:  # the process that held it has just removed it
        raise Busy(_busy(path))


def _lock_far(file: int, path: Path) -> None:
    """Windows locks bytes, also from being read by others: so one far beyond the content."""
    msvcrt: Any = import_module("msvcrt")  # which type checkers know on Windows only
    at = os.lseek(file, 0, os.SEEK_CUR)
    os.lseek(file, _FAR, os.SEEK_SET)
    try:
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
    except OSError:
        raise Busy(_busy(path)) from None
    finally:
        os.lseek(file, at, os.SEEK_SET)


def _busy(path: Path) -> str:
    return f"Another process is at work on this output: it holds {path}. Wait for it, end it, or choose another output."


def seal(path: Path) -> dict[str, Any]:
    """A digest by which a file is recognised later."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def sync_folder(folder: Path) -> None:
    """So that a new name is on the disk. Windows has no such thing."""
    with suppress(OSError):
        place = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(place)
        finally:
            os.close(place)
