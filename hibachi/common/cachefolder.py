"""The folder for files that are made once for a machine and kept, and how a file gets there whole or not at all."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path:
    """The folder $XDG_CACHE_HOME/hibachi, else ~/.cache/hibachi; it may not exist yet. Raises OSError for a user
    without a home.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hibachi"
    except RuntimeError as e:
        raise FileNotFoundError(f"there is no home to keep anything in, and XDG_CACHE_HOME is not set ({e})") from e


def keep(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises OSError."""
    made = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        made.write_text(text)
        move(made, path)
    except OSError:
        with suppress(OSError):
            made.unlink()
        raise


def move(made: Path, to: Path) -> None:
    """Move a file that was written under another name into its place. Raises OSError.

    The contents are flushed to disk before the file gets its name; otherwise a machine that goes down could leave an
    empty file of that name.
    """
    with made.open("rb+") as file:
        os.fsync(file.fileno())
    made.replace(to)
