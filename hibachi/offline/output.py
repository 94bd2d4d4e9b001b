"""From the journal to the output: rows in the input's order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from hibachi.offline.files.format import Field, RowWriter
from hibachi.offline.files.rows import Row, id_text
from hibachi.offline.journal import Journal

CHANGED = Field("changed", "text")
"""A column of runs with accepted changes: what was not as at the run's start when the row was computed."""


class Output:
    """Writes the rows whose results are in the journal.

    writer: of the columns of results, and of `CHANGED` if rows are marked; their names have a prefix. rows: of the
    input, those that are part of the run. marks: a text for each of the journal's heads; None means no row is marked.
    written, failed: rows.
    """

    def __init__(
        self,
        writer: RowWriter,
        journal: Journal,
        rows: Iterator[Row],
        prefix: str = "",
        marks: Sequence[str | None] | None = None,
    ) -> None:
        self.writer, self._journal, self._rows = writer, journal, rows
        self._prefix, self._marks = prefix, marks
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
            self.write(row)

    def write(self, row: Row) -> None:
        _, values = self._journal.result(row.number)
        failed = self._journal.failed(row.number)
        if failed and isinstance(why := values.get("error"), str):
            values["error"] = f"{row.place}: {why}"
        if self._marks is not None:
            values[CHANGED.name] = self._marks[min(self._journal.segment(row.number), len(self._marks) - 1)]
        self.writer.write(row, {self._prefix + name: value for name, value in values.items()})
        self.written += 1
        self.failed += failed

    @property
    def remarks(self) -> Counter[str]:
        return self.writer.remarks

    def close(self) -> None:
        """The end of the format. Raises OSError."""
        self.writer.close()


def write_errors(file: BinaryIO, journal: Journal, rows: Iterable[Row]) -> None:
    """A line of JSON for each of these rows, which failed: where it stands, and why. Raises OSError."""
    for row in rows:
        _, values = journal.result(row.number)
        told = {"row": row.number, "file": row.file, row.unit: row.line, "error": error_of(values)}
        if (custom := id_text(row.values.get("custom_id"))) is not None:
            told["custom_id"] = custom
        file.write(json.dumps(told).encode() + b"\n")


def error_of(values: dict[str, Any]) -> str:
    """The words of an error, in whatever form a work tells it."""
    error = values.get("error")
    return str(error["message"]) if isinstance(error, dict) else str(error)
