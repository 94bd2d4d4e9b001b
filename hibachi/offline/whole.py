"""Files that are there whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


def part_of(path: Path) -> Path:
    """Where a file is written before it takes its name."""
    return path.with_name(path.name + ".part")


@contextmanager
def into_place(path: Path, before: Callable[[dict[str, Any]], None]) -> Iterator[BinaryIO]:
    """A file to write to, which takes its name when the block ends, or is removed if the block raises.

    before: is told the size and digest of the file when it is on the disk, and has no name yet. Raises OSError.
    """
    part = part_of(path)
    try:
        with part.open("wb") as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
            except OSError as e:  # say of which file
                if not isinstance(e, BrokenPipeError):
                    e.filename = e.filename or str(part)
                raise
        before(seal(part))
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def seal(path: Path) -> dict[str, Any]:
    """By which a file is known again."""
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
