"""From the journal to the output: rows in the input's order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from hibachi.offline.files.format import Field, RowWriter
from hibachi.offline.files.rows import Row
from hibachi.offline.files.sources import Sources
from hibachi.offline.files.table import FileForm
from hibachi.offline.files.writers import open_writer
from hibachi.offline.journal import Journal

CHANGED = Field("changed", "text")
"""A column of runs with accepted changes: what was not as at the run's start when the row was computed."""


class Output:
    """Writes the rows whose results are in the journal.

    rows: of the input, those that are part of the run. carried: of whose columns output rows have a copy; None means of
    none. fields: the columns of results; prefix: in front of their names. marks: a text for each of the journal's
    heads; None means no row is marked. limit: only so many rows of the input have columns. written, failed: rows.
    """

    def __init__(
        self,
        file: BinaryIO,
        form: FileForm,
        journal: Journal,
        rows: Iterator[Row],
        *,
        carried: Sources | None,
        fields: Sequence[Field],
        prefix: str = "",
        marks: Sequence[str | None] | None = None,
        limit: int | None = None,
    ) -> None:
        self._journal, self._rows, self._marks = journal, rows, marks
        names = [Field(prefix + f.name, f.kind) for f in (*fields, *((CHANGED,) if marks else ()))]
        self._names = {f.name: prefix + f.name for f in (*fields, CHANGED)}
        self._writer: RowWriter = open_writer(file, form, sources=carried, results=names, stop=limit)
        self._held: Row | None = None
        self.written = self.failed = 0

    def advance(self) -> bool:
        """Write all rows up to the first that is not done; True means all are written."""
        while True:
            row = self._held if self._held is not None else next(self._rows, None)
            if row is None:
                return True
            if not self._journal.has(row.number):
                self._held = row
                return False
            self._held = None
            self._write(row)

    def _write(self, row: Row) -> None:
        _, values = self._journal.result(row.number)
        failed = self._journal.failed(row.number)
        if failed and isinstance(why := values.get("error"), str):
            values["error"] = f"{row.place}: {why}"
        named = {self._names.get(name, name): value for name, value in values.items()}
        if self._marks is not None:
            named[self._names["changed"]] = self._marks[min(self._journal.segment(row.number), len(self._marks) - 1)]
        self._writer.write(row, named)
        self.written += 1
        self.failed += failed

    @property
    def remarks(self) -> Counter[str]:
        return self._writer.remarks

    def close(self) -> None:
        """The end of the format. Raises OSError."""
        self._writer.close()


def write_errors(file: BinaryIO, journal: Journal, rows: Iterable[Row]) -> None:
    """A line of JSON for each of these rows, which failed: where it stands, and why. Raises OSError."""
    for row in rows:
        _, values = journal.result(row.number)
        told = {"row": row.number, "file": row.file, row.unit: row.line, "error": error_of(values)}
        if isinstance(custom := row.values.get("custom_id"), str):
            told["custom_id"] = custom
        file.write(json.dumps(told).encode() + b"\n")


def error_of(values: dict[str, Any]) -> str:
    """The words of an error, in whatever form a work tells it."""
    error = values.get("error")
    return str(error["message"]) if isinstance(error, dict) else str(error)
