"""CSV and TSV, as Python's csv module reads them (strictly), with a header."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO, ClassVar

from typing_extensions import override

from hibachi.errors import ConfigError, shown
from hibachi.offline.files import arrowtypes, compressed, jsonl
from hibachi.offline.files.compressed import Compression, Damaged
from hibachi.offline.files.format import (
    BytesWriter,
    Field,
    LinesFormat,
    Rows,
    RowWriter,
    Skip,
    Source,
    Start,
    Written,
    check_collisions,
)
from hibachi.offline.files.rows import LINE_LIMIT, InvalidInput, Row

PIECE = 1 << 16  # characters of a record that is too long, read at a time
UTF8 = "utf-8"
UNDECODABLE = "hibachi.offline.undecodable"


def _undecodable(error: UnicodeError) -> tuple[str, int]:
    """Half a surrogate pair, which no valid text has, in place of a byte: the row with it can be told."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\udcff", error.end


codecs.register_error(UNDECODABLE, _undecodable)


def checked_encoding(name: str | None) -> str:
    """The codec's name, UTF-8 where none is named. Raises ConfigError."""
    try:
        codec = codecs.lookup(name or UTF8).name
        b"a".decode(codec, "replace")
    except (LookupError, UnicodeError) as e:
        raise ConfigError(f"encoding {name!r}: expected the name of a text encoding that Python has; {e}.") from e
    return "utf-8-sig" if codec == UTF8 else codec


def checked_delimiter(delimiter: str | None) -> str | None:
    r"""One character; `\t` may be written as two. Raises ConfigError."""
    if delimiter == "\\t":
        return "\t"
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n\0'):
        raise ConfigError(
            f"delimiter {delimiter!r}: expected one character, and none of quote, line end and NUL. For a tab, \\t."
        )
    return delimiter


class _TooLong(Exception):
    """A record has more than LINE_LIMIT characters."""


class _Lines:
    """The lines that csv.reader asks for, and what it does not say: where a record began and how long it is."""

    def __init__(self, text: io.TextIOWrapper, delimiter: str) -> None:
        self._text = text
        self._delimiter = delimiter
        self._cut = False  # were the last characters cut off between a carriage return and what came then?
        self.line = 0  # read so far
        self.begin()

    def begin(self) -> None:
        """A new record begins with the next line."""
        self.first = self.line + 1
        self.size = 0
        self.undecodable = False
        self._piece = ""

    def __iter__(self) -> Iterator[str]:
        return self

    def _readline(self, most: int) -> str:
        text = self._text.readline(most)
        if self._cut and text == "\n":
            text = self._text.readline(most)
        self._cut = len(text) == most and text.endswith("\r")
        return text

    def __next__(self) -> str:
        text = self._readline(LINE_LIMIT + 1)
        if not text:
            raise StopIteration
        self.size += len(text)
        if self.size > LINE_LIMIT:
            self._piece = text
            raise _TooLong
        self.line += 1
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                self.undecodable = True
        return text

    def pass_over(self) -> None:
        """After _TooLong: go to the end of the record, holding nothing of it. csv.reader goes on with the next."""
        quoted = self.line >= self.first  # only inside quotes is there a second line
        piece, opens = self._piece, -1 if quoted else 0  # where a quote begins a field, or goes on with one in quotes
        while piece:
            at = 0
            while (at := piece.find('"', at)) >= 0:
                was, quoted = quoted, not quoted and (at == opens or piece[at - 1 : at] == self._delimiter)
                at += 1
                opens = at if was else -1
            if piece.endswith(("\n", "\r")):
                self.line += 1
                if not quoted:
                    return
            opens = 0 if opens == len(piece) or (not quoted and piece.endswith(self._delimiter)) else -1
            piece = self._readline(PIECE)
            self.size += len(piece)


def _reader(lines: _Lines, delimiter: str) -> Iterator[list[str]]:
    if csv.field_size_limit() < LINE_LIMIT:  # one for the process; what is longer is stopped by _Lines
        csv.field_size_limit(LINE_LIMIT)
    return csv.reader(lines, delimiter=delimiter, strict=True)


@contextlib.contextmanager
def _text(file: BinaryIO, encoding: str) -> Generator[io.TextIOWrapper, None, None]:
    """The file's text; the file stays open."""
    text = io.TextIOWrapper(file, encoding=encoding, errors=UNDECODABLE, newline="")
    try:
        yield text
    finally:
        text.detach()


def header(file: BinaryIO, name: str, delimiter: str, encoding: str) -> list[str]:
    """The names of the columns; none where the file has no line with anything in it. Raises ConfigError."""
    with _text(file, encoding) as text:
        lines = _Lines(text, delimiter)
        return _header(lines, _reader(lines, delimiter), name, encoding)


def _header(lines: _Lines, reader: Iterator[list[str]], name: str, encoding: str) -> list[str]:
    shown_encoding = UTF8 if encoding == "utf-8-sig" else encoding
    try:
        names: list[str] = []
        while not names:
            lines.begin()
            names = next(reader, [])
            if not lines.size:
                break
    except _TooLong:
        raise InvalidInput(f"{name}: expected a header; line {lines.first} has more than {LINE_LIMIT} bytes.") from None
    except (csv.Error, UnicodeError, Damaged, OSError) as e:
        raise InvalidInput(f"{name}: expected a header, the names of the columns, in {shown_encoding}: {e}.") from e
    if lines.undecodable:
        raise InvalidInput(
            f"{name}: expected a header in {shown_encoding}; it has bytes that are none. See --encoding."
        )
    if any("\0" in each for each in names):
        raise InvalidInput(f"{name}: expected a header, the names of the columns; it has NUL bytes. See --encoding.")
    if "" in names:
        raise ConfigError(f"{name}: expected a name for each column; column {names.index('') + 1} has none.")
    if twice := [shown(each) for each, times in Counter(names).items() if times > 1]:
        raise ConfigError(f"{name}: expected each column's name once; more than once: {', '.join(twice)}.")
    return names


def read(
    file: BinaryIO,
    name: str,
    delimiter: str,
    encoding: str,
    number: int = 0,
    skip: Callable[[int], bool] | None = None,
) -> Generator[Row, None, int]:
    """Rows of texts, as `jsonl.read`."""
    with _text(file, encoding) as text:
        lines = _Lines(text, delimiter)
        reader = _reader(lines, delimiter)
        names = _header(lines, reader, name, encoding)
        while True:
            lines.begin()
            error, cells = None, []
            try:
                cells = next(reader, [])
                if not cells:
                    if not lines.size:
                        return number
                    continue
            except _TooLong:
                lines.pass_over()
                error = f"expected a row of at most {LINE_LIMIT} characters; it has {lines.size}"
                error += f" and ends in line {lines.line}. Is a quote not closed?" if lines.line > lines.first else ""
            except csv.Error as e:
                error = _wrong(e, lines)
            except (Damaged, OSError, UnicodeError) as e:
                raise InvalidInput(f"{name}, after line {lines.line}: {e}.") from e
            number += 1
            if skip is not None and skip(number - 1):
                continue
            if error is None and len(cells) != len(names):
                error = f"expected {len(names)} cells, as in the header; got {len(cells)}"
            if lines.undecodable:
                error, cells = "expected bytes of the file's encoding (see --encoding); this row has others", []
            yield Row(number - 1, name, lines.first, dict(zip(names, cells, strict=False)), error, lines.size)


def _wrong(error: csv.Error, lines: _Lines) -> str:
    if "unexpected end" in str(error):
        return f"expected the quote that this row opens to be closed; it is open at the file's end, line {lines.line}"
    return f"expected quotes around whole cells, and quotes in them doubled: {error} (line {lines.line})"


# ---- writing ---------------------------------------------------------------------------------------------------------


class Cells:
    """Values to a line. Written by hand, as csv.writer of Python 3.11 leaves a bare carriage return without quotes."""

    def __init__(self, delimiter: str, remarks: Counter[str]) -> None:
        self._delimiter = delimiter
        self._search = re.compile(f'["\r\n\ufeff{re.escape(delimiter)}]').search
        self._remarks = remarks

    def line(self, values: Iterable[Any]) -> bytes:
        r"""In UTF-8, ended by \n."""
        texts = []
        for value in values:
            text = value if type(value) is str else self._cell(value)
            texts.append('"' + text.replace('"', '""') + '"' if self._search(text) else text)
        if len(texts) == 1 and not texts[0].strip():
            texts = [f'"{texts[0]}"']  # an empty line is no row, and a file of blanks is an empty one
        return jsonl.encoded(self._delimiter.join(texts) + "\n", self._remarks)

    def _cell(self, value: Any) -> str:
        if value is None:
            return ""
        if isinstance(value, float):
            return repr(float(value))
        if isinstance(value, (bool, dict, list, tuple)):
            return jsonl.text_of(value, self._remarks)
        return str(value) if isinstance(value, int) else str(jsonl.plain(value))


# ---- the formats -----------------------------------------------------------------------------------------------------


class Delimited(LinesFormat):
    """delimiter: where none is named."""

    delimiter: ClassVar[str] = ","
    name = "csv"
    title = "CSV"
    words = "delimited text (CSV)"
    suffixes = (".csv",)
    header = 1

    @override
    def sniff(self, start: Start) -> bool:
        return start.first not in ("{", "[")

    @override
    def look(self, source: Source, start: Start) -> Source:
        source = replace(source, delimiter=source.delimiter or self.delimiter)
        with compressed.opened(source.path, source.compression) as content:
            return replace(source, columns=tuple(header(content, source.name, _sign(source), source.encoding)))

    @override
    def read(self, content: BinaryIO, source: Source, number: int, skip: Skip | None) -> Generator[Row, None, int]:
        return (yield from read(content, source.name, _sign(source), source.encoding, number, skip))

    @override
    def carried(self, rows: Rows, stop: int | None) -> list[str]:
        return arrowtypes.names(rows, stop=stop)

    @override
    def writer(self, file: BinaryIO, compression: Compression | None, of: Written) -> RowWriter:
        names = self.carried(of.rows, of.stop) if of.rows is not None else []
        check_collisions(names, of.results)
        return _DelimitedWriter(file, compression, names, of.results, self.delimiter)


class Tabbed(Delimited):
    delimiter = "\t"
    name = "tsv"
    title = "TSV"
    words = "delimited text (TSV)"
    suffixes = (".tsv",)


def _sign(source: Source) -> str:
    assert source.delimiter is not None
    return source.delimiter


class _DelimitedWriter(BytesWriter):
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
        self._cells = Cells(delimiter, self.remarks)
        self._put(self._cells.line([*names, *(field.name for field in results)]))

    def write(self, row: Row, results: Mapping[str, Any]) -> None:
        cells = [row.values.get(name) for name in self._names]
        for field in self._results:
            value = results.get(field.name)
            if field.kind == "json" and value is not None:
                value = jsonl.text_of(value, self.remarks)
            cells.append(value)
        self._put(self._cells.line(cells))
