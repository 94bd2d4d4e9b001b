"""Checks of the files that a run writes: whether they can be written, and whether existing ones are its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from hibachi.errors import ConfigError
from hibachi.offline.journal import Journal
from hibachi.offline.whole import into_place, part_of, seal

OUTPUT, ERRORS = "end", "errors"  # names of the journal's notes


class RunPlace:
    """A file of a run, which is known again by the journal's note of it.

    name: of that note. said: what the note says besides; {} without one. whole: the file is there as it was written
    last.
    """

    def __init__(self, path: Path, journal: Journal, name: str, *, overwrite: bool) -> None:
        """overwrite: whatever is there may be replaced. Raises ConfigError if that is needed; OSError."""
        self.path, self._journal, self._name, self._overwrite = path, journal, name, overwrite
        self.said: dict[str, Any] = journal.notes.get(name) or {}
        self._there = seal(path) if path.exists() else None
        self.whole = self._there is not None and self._there == self.said.get("output")
        if overwrite or self._there is None:
            return
        if self._there not in (self.said.get("output"), self.said.get("replaces")):
            raise ConfigError(
                f"{path} is there already, and is not what a run of this journal wrote. Move it, choose another "
                f"file, or replace it with --overwrite."
            )

    def check_part(self) -> None:
        """For a run that begins: check that the temporary file belongs to no other run. Raises ConfigError."""
        if not self._overwrite and os.path.lexists(part := part_of(self.path)):
            raise ConfigError(
                f"{part} is there already, and a run would write {self.path} under this name first. Move it, choose "
                f"another file, or replace it with --overwrite."
            )

    @contextmanager
    def writing(self, more: Callable[[], dict[str, Any]] = dict) -> Iterator[BinaryIO]:
        """The file, which takes its name when the block ends. more: what else the note is to say, asked at the end.
        Raises ConfigError if another file has appeared there; OSError."""

        def before(sealed: dict[str, Any]) -> None:
            there = seal(self.path) if self.path.exists() else None
            if there not in (None, self._there) and not self._overwrite:
                raise ConfigError(
                    f"{self.path} has changed since the run began, and would be replaced. Move it, and run the same "
                    f"command again."
                )
            self._journal.note(self._name, {"output": sealed, "replaces": there, **more()})

        with into_place(self.path, before) as file:
            yield file


def check_places(files: Sequence[Path], inputs: Sequence[str], own: Sequence[Path]) -> None:
    """Check that these files can be written. inputs: files that are read. own: further ones that are written. Raises
    ConfigError.
    """
    for file in files:
        _check_place(file)
    for file in (*files, *own):
        for name in inputs:
            with suppress(OSError):
                if file.exists() and os.path.samefile(file, name):
                    raise ConfigError(f"{file} would be written and is an input, {name}. Choose another name for it.")
    named = [f.resolve() for f in (*files, *own)]
    if len(set(named)) < len(named):
        raise ConfigError(f"Two files would be written under one name: {', '.join(map(str, (*files, *own)))}.")


def _check_place(file: Path) -> None:
    if file.is_dir():
        raise ConfigError(f"The output {file} is a folder: expected a file's name. Name one in it.")
    if file.exists() and not file.is_file():
        raise ConfigError(f"The output {file} is no regular file; - writes to standard output.")
    if not file.parent.is_dir():
        raise ConfigError(f"The output {file} cannot be written: there is no folder {file.parent}. Make it first.")
    if not os.access(file.parent, os.W_OK):
        raise ConfigError(f"The output {file} cannot be written: nothing can be written into {file.parent}.")
    if file.exists() and not os.access(file, os.W_OK):
        raise ConfigError(f"The output {file} cannot be written, its permissions say.")
