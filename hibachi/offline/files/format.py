"""What a format of files is: how it is told, read, counted and written. `table` lists the formats there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, Literal, NamedTuple, Protocol

from typing_extensions import override

from hibachi.errors import ConfigError
from hibachi.offline.files import compressed
from hibachi.offline.files.compressed import Compression, Plain
from hibachi.offline.files.rows import InvalidInput, Row

CHUNK = 1 << 16  # bytes that are compressed at a time
MOST = 8 << 30  # bytes of a file whose lines are counted
_PIECE = 1 << 20  # bytes that are counted at a time
Skip = Callable[[int], bool]


@dataclass(frozen=True)
class Field:
    """A result column. Any value may be None.

    kind: of its values. ints and floats are lists: list<int64> and list<double> in Parquet, JSON text in CSV. json is
    any value that JSON has: as it is in JSON Lines, its text in CSV and Parquet.
    """

    name: str
    kind: Literal["text", "int", "float", "bool", "ints", "floats", "json"]


class RowWriter(Protocol):
    """Rows to a file. `remarks` counts what could not be written as it was."""

    remarks: Counter[str]

    def write(self, row: Row, results: Mapping[str, Any]) -> None:
        """The row's own columns, then the results (None for those that are not there). Raises OSError."""

    def close(self) -> None:
        """End the format and flush the file, which stays open. Raises OSError. A writer may be dropped unclosed."""


class Start(NamedTuple):
    """How the content of a file begins, decompressed. head: its first bytes. first: the first character that is not
    blank, "" where there is none. in_utf8: whether that is of UTF-8, and not of the encoding that was named."""

    head: bytes
    first: str
    in_utf8: bool


@dataclass(frozen=True)
class Source:
    """One file. format: None means there is nothing in it. columns: where rows have keys of their own, those of the
    first row that can be read; None where there is none."""

    name: str  # as the user named it
    path: str
    format: Format | None
    compression: Compression | None
    columns: tuple[str, ...] | None = ()
    delimiter: str | None = None
    encoding: str = "utf-8-sig"
    schema: Any = None  # of formats that have types: the pyarrow.Schema

    @property
    def own_keys(self) -> bool:
        return self.format is not None and self.format.own_keys


class Rows(Protocol):
    """An input, as writers see it: `sources.Sources`."""

    files: list[Source]

    @property
    def columns(self) -> list[str] | None: ...

    def rows(self, skip: Skip | None = None, *, stop: int | None = None) -> Iterator[Row]: ...


class Written(NamedTuple):
    """What an output has. rows: whose columns are carried; None means none are. stop: only the rows before this number
    are asked for their columns."""

    rows: Rows | None
    results: Sequence[Field]
    stop: int | None


class Format(ABC):
    """name: as it is in --format. title: for people; words: the same, longer. suffixes: of files.

    own_keys: each row has keys of its own, so that all columns are known only when all rows are read.
    needs_pyarrow: it is read and written with it. ahead: rows that are read at once, at most.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    words: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    own_keys: ClassVar[bool] = False
    is_text: ClassVar[bool] = True
    needs_pyarrow: ClassVar[bool] = False
    ahead: ClassVar[int] = 0

    @abstractmethod
    def sniff(self, start: Start) -> bool:
        """Whether a file that begins so is of this format, or may be: the first one in the table that it may be of
        counts, unless its name says another."""

    @abstractmethod
    def look(self, source: Source, start: Start) -> Source:
        """The source with its columns. Raises ConfigError, InvalidInput."""

    @abstractmethod
    def rows(self, source: Source, number: int, skip: Skip | None) -> Generator[Row, None, int]:
        """Rows from `number` on, but those that are skipped; returns the number after the last. Raises InvalidInput
        where it cannot read on."""

    @abstractmethod
    def count(self, source: Source) -> int | None:
        """Rows, about, found much faster than they are read; None means unknown before the end."""

    @abstractmethod
    def carried(self, rows: Rows, stop: int | None) -> list[str] | None:
        """The columns of the input that an output has, as far as they are known. Raises ConfigError, InvalidInput."""

    @abstractmethod
    def writer(self, file: BinaryIO, compression: Compression | None, of: Written) -> RowWriter:
        """A writer to `file`, which it never closes. Raises ConfigError, InvalidInput."""


class LinesFormat(Format):
    """Text in lines, compressed or not. header: lines that are no rows."""

    header: ClassVar[int] = 0

    @abstractmethod
    def read(self, content: BinaryIO, source: Source, number: int, skip: Skip | None) -> Generator[Row, None, int]:
        """As `rows`, from the decompressed content."""

    @override
    def rows(self, source: Source, number: int, skip: Skip | None) -> Generator[Row, None, int]:
        try:
            content = compressed.opened(source.path, source.compression)
        except OSError as e:
            raise InvalidInput(f"{source.name}: {e.strerror or e}.") from e
        with content:
            return (yield from self.read(content, source, number, skip))

    @override
    def count(self, source: Source) -> int | None:
        """Lines: blank ones and quoted line ends count too."""
        if source.compression is not None:
            return None
        lines, last = 0, b"\n"
        with open(source.path, "rb") as raw:
            while chunk := raw.read(_PIECE):
                lines += chunk.count(b"\n")
                last = chunk[-1:]
                if raw.tell() > MOST:
                    return None
        return max(lines + (last != b"\n") - self.header, 0)


def check_collisions(names: Sequence[str], results: Sequence[Field]) -> None:
    """names: of carried columns. Raises ConfigError."""
    if both := [field.name for field in results if field.name in names]:
        raise ConfigError(f"expected result columns that the input has not; it has {', '.join(both)}.")


class BytesWriter:
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
