"""What is made once for a machine and kept: where, and how a file comes to be there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/hibachi, else ~/.cache/hibachi; perhaps not there yet. Raises OSError for a user without home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hibachi"
    except RuntimeError as e:
        raise FileNotFoundError(f"there is no home to keep anything in, and XDG_CACHE_HOME is not set ({e})") from e


def move(made: Path, to: Path) -> None:
    """Put a file that was written under another name in its place. Raises OSError.

    It is on the disk before it has the name: else a machine that goes down leaves a file of that name without contents.
    """
    with made.open("rb+") as file:
        os.fsync(file.fileno())
    made.replace(to)
