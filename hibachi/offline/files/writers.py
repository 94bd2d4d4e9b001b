"""The output: rows as they came and their results, in any of the formats. Equal rows give equal bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import BinaryIO

from hibachi.errors import ConfigError
from hibachi.offline.files import delimited
from hibachi.offline.files.format import Field, RowWriter, Written
from hibachi.offline.files.sources import Sources
from hibachi.offline.files.table import FileForm


def open_writer(
    file: BinaryIO,
    form: FileForm,
    *,
    sources: Sources | None,
    results: Sequence[Field],
    delimiter: str | None = None,
    stop: int | None = None,
) -> RowWriter:
    """A writer to `file`, a buffered binary file, which it never closes.

    sources: the columns of these are carried through, before the results; None means results only. For CSV and Parquet
    all rows of JSON Lines are read first, to learn their columns; with stop, those before the row of this number.
    delimiter: of CSV. Raises ConfigError, InvalidInput.
    """
    if twice := [name for name, times in Counter(field.name for field in results).items() if times > 1]:
        raise ConfigError(f"expected result columns of different names; more than once: {', '.join(twice)}.")
    sign = delimited.checked_delimiter(delimiter)
    return form.format.writer(file, form.compression, Written(sources, results, sign, stop))
