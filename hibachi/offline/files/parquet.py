"""Parquet, read in small batches."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

from typing_extensions import override

from hibachi.errors import ConfigError, shown
from hibachi.offline.files import arrowtypes, compressed
from hibachi.offline.files.arrow import arrow, rows_of, type_of
from hibachi.offline.files.arrowtypes import Column
from hibachi.offline.files.compressed import Compression, Plain
from hibachi.offline.files.format import Field, Format, Rows, RowWriter, Skip, Source, Start, Written, check_collisions
from hibachi.offline.files.rows import InvalidInput, Row

BATCH_ROWS = 1024
BATCH_BYTES = 4 << 20
BUFFER = 1 << 20  # bytes of each column that are read at a time
PART_ROWS, PART_BYTES = 1024, 8 << 20  # of rows that are made arrays of at a time
GROUP_ROWS, GROUP_BYTES = 65_536, 64 << 20  # of a row group


def library() -> Any:
    """The module pyarrow.parquet. Raises MissingExtra."""
    arrow()
    return importlib.import_module("pyarrow.parquet")


def opened(path: str, name: str) -> Any:
    """A pyarrow.parquet.ParquetFile. Raises InvalidInput, or ConfigError for columns of one name."""
    pa = arrow()
    try:
        file = library().ParquetFile(path, pre_buffer=False, buffer_size=BUFFER)
        names = file.schema_arrow.names
    except (pa.ArrowException, OSError) as e:
        raise InvalidInput(f"{name}: expected a whole Parquet file; {e}.") from e
    if twice := {each for each in names if names.count(each) > 1}:
        raise ConfigError(f"{name}: expected each column's name once; more than once: {shown(sorted(twice))}.")
    return file


def read(path: str, name: str, number: int = 0, skip: Callable[[int], bool] | None = None) -> Generator[Row, None, int]:
    """Rows, as `Format.rows`."""
    pa = arrow()
    with opened(path, name) as file:
        first = number  # of this file
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if not rows or (skip is not None and all(map(skip, range(number, number + rows)))):
                number += rows
                continue
            batches = file.iter_batches(batch_size=_rows_at_once(file, group), row_groups=[group], use_threads=False)
            while True:
                try:
                    batch = next(batches, None)
                except (pa.ArrowException, OSError) as e:
                    raise InvalidInput(f"{name}, after row {number - first}: {e}.") from e
                if batch is None:
                    break
                yield from rows_of(batch, name, number, number - first + 1, skip)
                number += batch.num_rows
    return number


def _rows_at_once(file: Any, group: int) -> int:
    about = file.metadata.row_group(group)
    fit = BATCH_BYTES * int(about.num_rows) // max(int(about.total_byte_size), 1)
    return max(1, min(BATCH_ROWS, fit))


# ---- the format ------------------------------------------------------------------------------------------------------


class Columnar(Format):
    """A format of typed columns, written in groups of rows by one of pyarrow's writers."""

    is_text = False
    needs_pyarrow = True
    ahead = 1 << 16

    @abstractmethod
    def sink(self, file: Any, schema: Any) -> Any:
        """pyarrow's writer to a file."""

    @abstractmethod
    def write_group(self, sink: Any, table: Any) -> None:
        """All rows of a pyarrow.Table as one group."""

    @override
    def carried(self, rows: Rows, stop: int | None) -> list[str]:
        return [column.name for column in arrowtypes.columns(rows, stop=stop)]

    @override
    def writer(self, file: BinaryIO, compression: Compression | None, of: Written) -> RowWriter:
        carried = arrowtypes.columns(of.rows, stop=of.stop) if of.rows is not None else []
        check_collisions([column.name for column in carried], of.results)
        return _GroupWriter(file, carried, of.results, self)


class Parquet(Columnar):
    name = "parquet"
    title = words = "Parquet"
    suffixes = (".parquet", ".pq")

    @override
    def sniff(self, start: Start) -> bool:
        return start.head.startswith(b"PAR1")

    @override
    def look(self, source: Source, start: Start) -> Source:
        with opened(source.path, source.name) as file:
            schema = file.schema_arrow
        return replace(source, columns=tuple(schema.names), schema=schema)

    @override
    def rows(self, source: Source, number: int, skip: Skip | None) -> Generator[Row, None, int]:
        return (yield from read(source.path, source.name, number, skip))

    @override
    def count(self, source: Source) -> int | None:
        return int(library().read_metadata(source.path).num_rows)

    @override
    def sink(self, file: Any, schema: Any) -> Any:
        return library().ParquetWriter(file, schema)

    @override
    def write_group(self, sink: Any, table: Any) -> None:
        sink.write_table(table, row_group_size=table.num_rows)


class _GroupWriter:
    """Parts of rows become arrays, and arrays a group: sizes depend on the rows alone."""

    def __init__(self, file: BinaryIO, carried: Sequence[Column], results: Sequence[Field], format: Columnar) -> None:
        pa = self._pa = arrow()
        self.remarks: Counter[str] = Counter()
        self._carried = carried
        self._results = [Column(f.name, type_of(f.kind), "json" if f.kind == "json" else None) for f in results]
        self._schema = pa.schema([(column.name, column.type) for column in [*carried, *self._results]])
        self._file = file
        self._below = Plain(file)
        self._format = format
        self._to = format.sink(self._below, self._schema)
        self._rows: list[tuple[Row, Mapping[str, Any]]] = []  # of this part
        self._bytes = 0
        self._parts: list[Any] = []  # of this group
        self._group_rows = self._group_bytes = 0

    def write(self, row: Row, results: Mapping[str, Any]) -> None:
        self._rows.append((row, results))
        self._bytes += row.size + sum(len(v) for v in results.values() if isinstance(v, (str, list)))
        if len(self._rows) >= PART_ROWS or self._bytes >= PART_BYTES:
            self._end_part()
            if self._group_rows >= GROUP_ROWS or self._group_bytes >= GROUP_BYTES:
                self._end_group()

    def _end_part(self) -> None:
        if not self._rows:
            return
        rows, self._rows, self._bytes = self._rows, [], 0
        arrays = []
        runs = _runs([row for row, _ in rows])
        for column in self._carried:
            pieces = [self._carry(column, batch, run) for batch, run in runs]
            arrays.append(pieces[0] if len(pieces) == 1 else self._pa.concat_arrays(pieces))
        for column in self._results:
            arrays.append(column.array([results.get(column.name) for _, results in rows], self.remarks))
        part = self._pa.Table.from_arrays(arrays, schema=self._schema) if arrays else None
        if part is not None:
            self._parts.append(part)
            self._group_rows += len(rows)
            self._group_bytes += part.nbytes

    def _carry(self, column: Column, batch: Any, rows: list[Row]) -> Any:
        """One column of rows that are of one batch, or of none."""
        if batch is None or column.text is not None:
            return column.array([row.values.get(column.name) for row in rows], self.remarks)
        at = batch.schema.get_field_index(column.name)
        if at < 0:
            return self._pa.nulls(len(rows), column.type)
        first, last = _index(rows[0]), _index(rows[-1])
        if last - first + 1 == len(rows):
            array = batch.column(at).slice(first, len(rows))
        else:
            array = batch.column(at).take(self._pa.array([_index(row) for row in rows], self._pa.int64()))
        return array if array.type == column.type else array.cast(column.type)

    def _end_group(self) -> None:
        if self._parts:
            parts, self._parts = self._parts, []
            self._group_rows = self._group_bytes = 0
            self._format.write_group(self._to, self._pa.concat_tables(parts))

    def close(self) -> None:
        self._below.check()
        self._end_part()
        self._end_group()
        self._to.close()
        self._file.flush()

    def __del__(self) -> None:
        compressed.quietly_dead(getattr(self, "_below", None))


def _index(row: Row) -> int:
    return row.arrow[1] if row.arrow is not None else -1


def _runs(rows: list[Row]) -> list[tuple[Any, list[Row]]]:
    """Consecutive rows of one batch together, in ascending order of their places there."""
    out: list[tuple[Any, list[Row]]] = []
    for row in rows:
        batch = row.arrow[0] if row.arrow is not None else None
        if out and out[-1][0] is batch and (batch is None or _index(out[-1][1][-1]) < _index(row)):
            out[-1][1].append(row)
        else:
            out.append((batch, [row]))
    return out
