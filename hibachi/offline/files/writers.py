"""The output: rows as they came and their results, in any of the formats. Equal rows give equal bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, Protocol, cast

from hibachi.errors import ConfigError
from hibachi.offline.files import arrowtypes, compressed, delimited, jsonl, parquet
from hibachi.offline.files.arrowtypes import Column
from hibachi.offline.files.compressed import Compression, Plain
from hibachi.offline.files.rows import Row
from hibachi.offline.files.sources import BY_SUFFIX, COMPRESSED, Sources, by_suffix

CHUNK = 1 << 16  # bytes that are compressed at a time
PART_ROWS, PART_BYTES = 1024, 8 << 20  # of rows that are made arrays of at a time
GROUP_ROWS, GROUP_BYTES = 65_536, 64 << 20  # of a row group of Parquet

REPLACED = "value of the input replaced by a result of the same name"

Form = tuple[Literal["jsonl", "csv", "tsv", "parquet"], Compression | None]


@dataclass(frozen=True)
class Field:
    """A result column. Any value may be None.

    kind: of its values. ints and floats are lists: list<int64> and list<double> in Parquet, JSON text in CSV. json is
    any value that JSON has: as it is in JSON Lines, its text in CSV and Parquet.
    """

    name: str
    kind: Literal["text", "int", "float", "bool", "ints", "floats", "json"]


class Writer(Protocol):
    """Rows to a file. `remarks` counts what could not be written as it was."""

    remarks: Counter[str]

    def write(self, row: Row, results: Mapping[str, Any]) -> None:
        """The row's own columns, then the results (None for those that are not there). Raises OSError."""

    def close(self) -> None:
        """End the format and flush the file, which stays open. Raises OSError. A writer may be dropped unclosed."""


def form_of(name: str, format: str | None = None) -> Form:
    """Format and compression of an output, by `format` ("csv", "jsonl.gz"), else by its name. Raises ConfigError."""
    known, compression = by_suffix(name)
    if format is not None:
        known, told = by_suffix("x." + format.lower())
        if known is None:
            raise ConfigError(
                f"format {format!r}: expected jsonl, csv, tsv or parquet, or jsonl.gz, csv.zst and so on."
            )
        compression = told or compression
    if known is None:
        raise ConfigError(
            f"{name}: expected a name that tells the output's format ({', '.join(BY_SUFFIX)}; behind all but Parquet's "
            f"also {', '.join(COMPRESSED)}), or --format."
        )
    if known == "parquet" and compression:
        raise ConfigError(f"{name}: expected Parquet as it is; it compresses its columns itself. Drop .gz or .zst.")
    return cast(Form, (known, compression))


def open_writer(
    file: BinaryIO,
    form: Form,
    *,
    sources: Sources | None,
    results: Sequence[Field],
    delimiter: str | None = None,
    stop: int | None = None,
) -> Writer:
    """A writer to `file`, a buffered binary file, which it never closes.

    sources: the columns of these are carried through, before the results; None means results only. For CSV and Parquet
    all rows of JSON Lines are read first, to learn their columns; with stop, those before the row of this number.
    delimiter: of CSV. Raises ConfigError, InvalidInput.
    """
    format, compression = form
    delimiter = delimited.checked_delimiter(delimiter)
    if twice := [name for name, times in Counter(field.name for field in results).items() if times > 1]:
        raise ConfigError(f"expected result columns of different names; more than once: {', '.join(twice)}.")
    if format == "jsonl":
        return _JsonLines(file, compression, sources, results)
    if format == "parquet":
        carried = arrowtypes.columns(sources, stop=stop) if sources is not None else []
        _collides([column.name for column in carried], results)
        return _Parquet(file, carried, results)
    names = arrowtypes.names(sources, stop=stop) if sources is not None else []
    _collides(names, results)
    return _Delimited(file, compression, names, results, delimiter or ("\t" if format == "tsv" else ","))


def _collides(names: Sequence[str], results: Sequence[Field]) -> None:
    if both := [field.name for field in results if field.name in names]:
        raise ConfigError(f"expected result columns that the input has not; it has {', '.join(both)}.")


class _Bytes:
    """A file that gets bytes, compressed or not."""

    def __init__(self, file: BinaryIO, compression: Compression | None) -> None:
        self.remarks: Counter[str] = Counter()
        self._file = file
        self._below = Plain(file)
        self._to = compressed.compressing(self._below, compression)
        self._waiting: list[bytes] = []
        self._size = 0

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._size += len(data)
        if self._size >= CHUNK:
            self._send()

    def _send(self) -> None:
        data, self._waiting, self._size = b"".join(self._waiting), [], 0
        self._to.write(data)

    def close(self) -> None:
        self._below.check()
        self._send()
        self._to.close()
        self._file.flush()

    def __del__(self) -> None:
        compressed.quietly_dead(getattr(self, "_below", None))


class _JsonLines(_Bytes):
    def __init__(
        self, file: BinaryIO, compression: Compression | None, sources: Sources | None, results: Sequence[Field]
    ) -> None:
        super().__init__(file, compression)
        self._carries = sources is not None
        self._fixed = {  # the columns that a row of this file has, also where it cannot be read
            each.name: dict.fromkeys(each.columns or ())
            for each in (sources.files if sources is not None else ())
            if each.format in ("csv", "tsv")
        }
        self._names = [field.name for field in results]

    def write(self, row: Row, results: Mapping[str, Any]) -> None:
        values: dict[str, Any] = {}
        if self._carries:
            values = row.values
            if row.error is not None and row.file in self._fixed:
                values = self._fixed[row.file] | values
            if not values.keys().isdisjoint(self._names):
                self.remarks[REPLACED] += 1
                values = {name: value for name, value in values.items() if name not in self._names}
        out = {**values, **{name: results.get(name) for name in self._names}}
        self._put(jsonl.encoded(jsonl.text_of(out, self.remarks) + "\n", self.remarks))


class _Delimited(_Bytes):
    def __init__(
        self,
        file: BinaryIO,
        compression: Compression | None,
        names: Sequence[str],
        results: Sequence[Field],
        delimiter: str,
    ) -> None:
        super().__init__(file, compression)
        self._names, self._results = names, results
        self._cells = delimited.Cells(delimiter, self.remarks)
        self._put(self._cells.line([*names, *(field.name for field in results)]))

    def write(self, row: Row, results: Mapping[str, Any]) -> None:
        cells = [row.values.get(name) for name in self._names]
        for field in self._results:
            value = results.get(field.name)
            if field.kind == "json" and value is not None:
                value = jsonl.text_of(value, self.remarks)
            cells.append(value)
        self._put(self._cells.line(cells))


class _Parquet:
    """Parts of rows become arrays, and arrays a row group: sizes depend on the rows alone."""

    def __init__(self, file: BinaryIO, carried: Sequence[Column], results: Sequence[Field]) -> None:
        pa = self._pa = parquet.arrow()
        of_kind = {
            "text": pa.string(),
            "int": pa.int64(),
            "float": pa.float64(),
            "bool": pa.bool_(),
            "ints": pa.list_(pa.int64()),
            "floats": pa.list_(pa.float64()),
            "json": pa.string(),
        }
        self.remarks: Counter[str] = Counter()
        self._carried = carried
        self._results = [Column(f.name, of_kind[f.kind], "json" if f.kind == "json" else None) for f in results]
        self._schema = pa.schema([(column.name, column.type) for column in [*carried, *self._results]])
        self._file = file
        self._below = Plain(file)
        self._to = parquet.library().ParquetWriter(self._below, self._schema)
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
            rows, self._group_rows, self._group_bytes = self._group_rows, 0, 0
            self._to.write_table(self._pa.concat_tables(parts), row_group_size=rows)

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
