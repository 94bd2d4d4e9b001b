"""Promises that a backend is known not to keep, each with the reason: a file beside the backend."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from hibachi.errors import ConfigError


class Gap(NamedTuple):
    line: int
    pattern: str
    reason: str

    def about(self, promise: str) -> bool:
        """promise: the name of its test."""
        return fnmatchcase(_plain(promise), _plain(self.pattern))


def read_gaps(path: Path) -> list[Gap]:
    """The lines of a file: `name or glob of the promise # reason`. Empty lines, and those that begin with #, are none.

    Raises ConfigError for a line without a name or without a reason, and for a file that cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"Known gaps: {path} cannot be read ({e}). Name a text file.") from e
    gaps = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, reason = (part.strip() for part in line.partition("#"))
        if not name or not reason:
            raise ConfigError(
                f"{path}, line {number}: expected `name or glob of a promise # reason`; got {line.strip()!r}. "
                f"Say why the promise is not kept, for whoever meets it."
            )
        gaps.append(Gap(number, name, reason))
    return gaps


def _plain(name: str) -> str:
    """A promise may be named as in the report, as its test, or as in a report's last line."""
    return name.split("::")[-1].strip().replace(" ", "_").removeprefix("test_")
