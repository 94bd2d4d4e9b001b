"""The input of a run: its files, the rows that are wanted, and checks that it has not changed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

from hibachi.errors import ConfigError
from hibachi.offline.batch import PIPE, Batch
from hibachi.offline.checks import apart
from hibachi.offline.drive import digest_of
from hibachi.offline.files.rows import InvalidInput, Row
from hibachi.offline.files.sources import Sources, expand
from hibachi.offline.files.table import FileForm
from hibachi.offline.journal import Journal
from hibachi.offline.tasks.task import RowTask

LARGE = 256 << 20  # bytes of an input that takes a while to read
FEW = 3  # edited rows, in a message
SUSPECT = "suspect"  # a note: of heads, under which rows may have been read that the digests do not tell of


class RowInput:
    """digests: of each file what it holds, and not when it was written. names: as the files are called now."""

    def __init__(
        self, batch: Batch, *, spool: Path, own: Sequence[Path] = (), says: Callable[[str], None] | None = None
    ) -> None:
        """spool: where what comes by a pipe is kept, if there is one. own: files of an earlier start, which are left
        out where a folder or a pattern has them. says: is told before it takes long. Raises ConfigError,
        InvalidInput."""
        self._batch = batch
        names = []
        for name, found in _expanded(batch.inputs):
            if name == PIPE:
                _keep(spool)
            names += [str(spool)] if name == PIPE else [f for f in found if f == name or Path(f).resolve() not in own]
        self.sources = Sources(names, delimiter=batch.delimiter, encoding=batch.encoding)
        if PIPE in batch.inputs:
            files = self.sources.files
            self.sources.files = [replace(f, name="standard input") if f.path == str(spool) else f for f in files]
        self._signature = self.sources.signature()
        size = sum(os.path.getsize(file.path) for file in self.sources.files)
        if size > LARGE and says is not None:
            says(f"Reading the input ({size / 2**30:,.1f} GiB), by which the run is known again ...")
        self.digests = self._look()
        self.names = list(self.digests)

    def rename(self, names: Sequence[str]) -> None:
        """Call the files as when the run was begun, so that rows bear the same names however often it is resumed."""
        self.sources.files = [replace(f, name=name) for f, name in zip(self.sources.files, names, strict=True)]
        self.digests = dict(zip(names, self.digests.values(), strict=True))

    def _look(self) -> dict[str, str]:
        return {f["name"]: f"{f['bytes']} bytes, sha256 {f['sha256']}" for f in self.sources.content()}

    def rows(self, skip: Callable[[int], bool] = lambda number: False) -> Iterator[Row]:
        """Of the run, without those that are skipped."""
        batch = self._batch
        return self.sources.rows(lambda number: not batch.selects(number) or skip(number), stop=batch.limit)

    def read(self, work: RowTask, skip: Callable[[int], bool] = lambda number: False) -> Iterator[Row]:
        """Of the run, without those that are skipped; but a work that compares rows gets all, and sees those of other
        shards."""
        batch = self._batch
        rows = self.sources.rows(stop=batch.limit) if work.compares else self.rows(skip)
        for row in apart(rows, work, batch.prefix):
            if batch.selects(row.number):
                yield row
            else:
                _show(work, row)

    def columns(self, form: FileForm) -> list[str] | None:
        """Whose names an output of this form has beside those of results, as far as that is known before all is
        computed; None means nothing is. Raises ConfigError for those that it cannot have."""
        sources, stop = self.sources, self._batch.limit
        try:
            return form.format.carried(sources, stop)
        except InvalidInput:  # said when it is read on: what stands before is computed
            return sources.columns

    def left(self, work: RowTask, journal: Journal, head: Mapping[str, Any]) -> Iterator[Row]:
        """The rows that are to be computed. One that was computed when the input was another is compared with what it
        was. head: of this run."""
        suspect = journal.notes.get(SUSPECT, [])
        same = [same_input(h, head) and i not in suspect for i, h in enumerate(journal.heads)]

        def known(number: int) -> bool:
            return journal.has(number) and same[journal.segment(number)]

        for row in self.read(work, known):
            if journal.has(row.number):
                if known(row.number) or journal.result(row.number)[0] == digest_of(row):
                    _show(work, row)
                    continue
                journal.forget(row.number)
            yield row

    def edited(self, work: RowTask, journal: Journal) -> str:
        """The rows that have changed since they were computed, as a line for people."""
        places: list[str] = []
        for row in apart(self.rows(lambda number: not journal.has(number)), work, self._batch.prefix):
            if journal.result(row.number)[0] != digest_of(row):
                places.append(row.place)
                if len(places) > FEW:
                    return f"edited since they were computed: {'; '.join(places[:FEW])}; and more"
        return f"edited since they were computed: {'; '.join(places) or 'no rows'}"

    def check(self, journal: Journal) -> None:
        """Check that the input was not written to since the run began. Raises InvalidInput, and notes it."""
        now = self.sources.signature()
        if now == self._signature:
            return
        if self._look() != self.digests:
            journal.note(SUSPECT, sorted({*journal.notes.get(SUSPECT, []), len(journal.heads) - 1}))
            raise InvalidInput(
                "The input was changed while the run read it. Put it back as it was; or take it as it is now with "
                "--accept-changes, which computes the changed rows again."
            )
        self._signature = now


def _keep(spool: Path) -> None:
    """Write standard input there. Raises OSError."""
    try:
        with open(spool, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            shutil.copyfileobj(getattr(sys.stdin, "buffer", BytesIO()), file)  # it may be closed
    except OSError as e:
        e.filename = e.filename or str(spool)
        raise


def _expanded(inputs: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each name, and the files that it stands for. Raises ConfigError."""
    if inputs.count(PIPE) > 1:
        raise ConfigError(f"Standard input can be read once; got {PIPE} {inputs.count(PIPE)} times among the inputs.")
    if names := [name for name in inputs if name != PIPE]:
        expand(names)  # no file twice
    return [(name, [] if name == PIPE else expand([name])) for name in inputs]


def _show(work: RowTask, row: Row) -> None:
    """A row that is computed elsewhere, or was before."""
    if row.error is None:  # as one that cannot be read is not compared when it is computed
        work.seen(row)


def same_input(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Of heads: whatever its files are called."""
    return list(one["input"].values()) == list(other["input"].values())
