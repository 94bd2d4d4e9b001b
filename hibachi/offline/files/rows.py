"""One row of the input, whatever file it came from."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from hibachi.errors import ConfigError

LINE_LIMIT = 16 << 20  # bytes of a line of JSON, characters of a record of CSV; above, a row is passed over as an error
BATCH = "batch"  # the extra that brings pyarrow


class InvalidInput(ConfigError):
    """An input file cannot be read, or not be read on from some place, which the message names."""


@dataclass(slots=True)
class Row:
    """A row, or why there is none.

    number: over all inputs together, from 0. file: as the user named it. line: from 1, where the row begins; in a
    Parquet file (`unit` is "row") the row's number in its file. error: why this row cannot be read; `values` is then
    what could be read of it. size: bytes, roughly. arrow: for a row of a Parquet file, the pyarrow.RecordBatch that
    it is in, and its index there, so that it can be written as it was.
    """

    number: int
    file: str
    line: int
    values: dict[str, Any]
    error: str | None = None
    size: int = 0
    unit: Literal["line", "row"] = "line"
    arrow: tuple[Any, int] | None = field(default=None, repr=False, compare=False)

    @property
    def place(self) -> str:
        """For messages: FILE, line 7."""
        return f"{self.file}, {self.unit} {self.line}"


def id_text(own: Any) -> str | None:
    """A custom_id as a text, whatever it is: by it a caller finds the row."""
    return own if own is None or isinstance(own, str) else json.dumps(own, default=str)[:200]
