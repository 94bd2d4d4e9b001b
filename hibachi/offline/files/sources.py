"""The files of an input: which they are, what they hold, and their rows one after the other."""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
import stat
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from hibachi.errors import ConfigError
from hibachi.offline.files import compressed, delimited, jsonl, parquet
from hibachi.offline.files.compressed import Compression, Damaged
from hibachi.offline.files.rows import InvalidInput, Row

Format = Literal["jsonl", "csv", "tsv", "parquet", "empty"]

BY_SUFFIX: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
COMPRESSED: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
IN_WORDS = {
    "jsonl": "JSON Lines",
    "csv": "delimited text (CSV)",
    "tsv": "delimited text (TSV)",
    "parquet": "Parquet",
    "gzip": "gzip",
    "zstd": "zstd",
}
STRANGE = {  # beginnings of what is refused by name
    b"PARE": "an encrypted Parquet file; decrypt it first",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"BZh": "bzip2; decompress it first",
    b"\xfd7zXZ": "xz; decompress it first",
    b"ARROW1": "an Arrow (Feather) file; write it as Parquet first",
    b"Obj\x01": "Avro; write it as Parquet or JSON Lines first",
    codecs.BOM_UTF32_LE: "text in UTF-32; give --encoding utf-32 (CSV), or write it as UTF-8",
    codecs.BOM_UTF16_LE: "text in UTF-16; give --encoding utf-16 (CSV), or write it as UTF-8",
    codecs.BOM_UTF16_BE: "text in UTF-16; give --encoding utf-16 (CSV), or write it as UTF-8",
}
SOME = 1 << 16  # bytes looked at, at a time
FIRST_LINES = 10  # of JSON, among which keys are looked for


def by_suffix(name: str) -> tuple[Format | None, Compression | None]:
    """What a file's name says: out.csv.gz is ("csv", "gzip"); None where it says nothing."""
    suffixes = [suffix.lower() for suffix in PurePath(name).suffixes]
    compression = COMPRESSED.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    return BY_SUFFIX.get(suffixes[-1]) if suffixes else None, compression


def expand(names: Sequence[str]) -> list[str]:
    """Files, patterns (also with **) and folders (their files of known suffixes, sorted) as files, in that order.

    Raises ConfigError for what is not there, cannot be read, is empty or has been named before.
    """
    out: list[str] = []
    seen: dict[str, str] = {}
    if not names:
        raise ConfigError("input: expected at least one file, folder or pattern; got none.")
    for name in names:
        for path in _files_of(name):
            real = os.path.realpath(path)
            if real in seen:
                raise ConfigError(f"input: expected each file once; {path} is also there as {seen[real]}.")
            seen[real] = path
            out.append(path)
    return out


def _files_of(name: str) -> list[str]:
    if os.path.isdir(name):
        return _in_folder(name)
    if os.path.lexists(name) or not glob.has_magic(name):
        return [_file(name)]
    found = [path for path in sorted(glob.glob(name, recursive=True)) if not os.path.isdir(path)]
    if not found:
        raise ConfigError(f"{name}: expected a pattern that some file matches; none does (in {os.getcwd()}).")
    return [_file(path) for path in found]


def _in_folder(name: str) -> list[str]:
    def fail(error: OSError) -> None:
        raise ConfigError(f"{error.filename}: expected a folder that can be read: {error.strerror}.") from error

    found = []
    for folder, inner, files in os.walk(name, onerror=fail, followlinks=False):
        inner[:] = [each for each in inner if not each.startswith(".")]
        found += [os.path.join(folder, file) for file in files if not file.startswith(".") and by_suffix(file)[0]]
    if not found:
        raise ConfigError(f"{name}: expected a folder with files of rows ({', '.join(BY_SUFFIX)}); it has none.")
    return [_file(path) for path in sorted(found)]


def _file(path: str) -> str:
    try:
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError as e:
        raise ConfigError(f"{path}: expected a file that can be read: {e.strerror or e}.") from e
    if not regular:
        raise ConfigError(f"{path}: expected a regular file, which can be read more than once; this is none.")
    return path


_AHEAD = 1 << 16  # rows of a batch at most


class _Enough(Exception):
    """No further row is wanted."""


def _before(stop: int, skip: Callable[[int], bool] | None, ahead: int) -> Callable[[int], bool]:
    """skip, which raises _Enough at `stop`. ahead: so many rows later, as of a batch that was read whole some rows may
    come before it; 0 means as soon as none is left, before the next is read."""

    def passed(number: int) -> bool:
        if number >= stop + ahead:
            raise _Enough
        skipped = number >= stop or (skip is not None and skip(number))
        if skipped and not ahead and number + 1 >= stop:
            raise _Enough
        return skipped

    return passed


@dataclass(frozen=True)
class Source:
    """One file. columns: of JSON Lines, those of the first row that can be read; None where there is none."""

    name: str  # as the user named it
    path: str
    format: Format
    compression: Compression | None
    columns: tuple[str, ...] | None
    delimiter: str = ","
    encoding: str = "utf-8-sig"
    schema: Any = None  # of Parquet: the pyarrow.Schema


class Sources:
    """Files as one list of rows, each file's format found by its content."""

    def __init__(self, names: Sequence[str], *, delimiter: str | None = None, encoding: str | None = None) -> None:
        """names: files, as `expand` gives them; delimiter, encoding: of CSV. Raises ConfigError, InvalidInput."""
        delimiter = delimited.checked_delimiter(delimiter)
        codec = delimited.checked_encoding(encoding)
        self.files = [_looked_at(name, delimiter, codec) for name in names]

    @property
    def columns(self) -> list[str] | None:
        """Names known before rows are read, in order of first appearance; None means no row of JSON Lines told any."""
        if any(file.columns is None for file in self.files):
            return None
        return list(dict.fromkeys(name for file in self.files for name in file.columns or ()))

    @property
    def types(self) -> dict[str, str]:
        """Arrow's types of the columns of Parquet files, as text; all of them where files differ: "int64 | string"."""
        out: dict[str, str] = {}
        for field in (field for file in self.files if file.schema is not None for field in file.schema):
            kind = str(field.type)
            if kind not in out.setdefault(field.name, kind).split(" | "):
                out[field.name] += f" | {kind}"
        return out

    def rows(self, skip: Callable[[int], bool] | None = None, *, stop: int | None = None) -> Iterator[Row]:
        """Row by row, in bounded memory; rows whose number skip() is true for are passed over. Raises InvalidInput.

        stop: the number before which it ends.
        """
        with suppress(_Enough):
            for row in self._rows(skip, stop):
                yield row
                if row.number + 1 == stop:
                    return

    def _rows(self, skip: Callable[[int], bool] | None, stop: int | None) -> Iterator[Row]:
        """As `rows`; where the last ones are passed over, it may raise _Enough."""
        number = 0
        for file in self.files:
            if stop is not None and number >= stop:
                return
            wanted = skip if stop is None else _before(stop, skip, _AHEAD if file.format == "parquet" else 0)
            number = yield from self._rows_of(file, number, wanted)

    def _rows_of(self, file: Source, number: int, skip: Callable[[int], bool] | None) -> Generator[Row, None, int]:
        if file.format == "empty":
            return number
        if file.format == "parquet":
            return (yield from parquet.read(file.path, file.name, number, skip))
        try:
            content = compressed.opened(file.path, file.compression)
        except OSError as e:
            raise InvalidInput(f"{file.name}: {e.strerror or e}.") from e
        with content:
            if file.format == "jsonl":
                return (yield from jsonl.read(content, file.name, number, skip))
            return (yield from delimited.read(content, file.name, file.delimiter, file.encoding, number, skip))

    def content(self) -> list[dict[str, Any]]:
        """What each file holds: {"name", "bytes", "sha256"} of the file as it is on disk."""
        out = []
        for file in self.files:
            try:
                with open(file.path, "rb") as raw:
                    digest = hashlib.file_digest(raw, "sha256").hexdigest()
                    out.append({"name": file.name, "bytes": raw.tell(), "sha256": digest})
            except OSError as e:
                raise InvalidInput(f"{file.name}: {e.strerror or e}.") from e
        return out

    def signature(self) -> tuple[Any, ...]:
        """Another one where a file was written to since; found without reading."""
        out = []
        for file in self.files:
            try:
                about = os.stat(file.path)
            except OSError as e:
                raise InvalidInput(f"{file.name}: {e.strerror or e}.") from e
            out.append((about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns))
        return tuple(out)


def _looked_at(name: str, delimiter: str | None, encoding: str) -> Source:
    try:
        with open(name, "rb") as raw:
            head = raw.read(8)
    except OSError as e:
        raise ConfigError(f"{name}: expected a file that can be read: {e.strerror or e}.") from e
    said, said_compression = by_suffix(name)
    compression = next((kind for magic, kind in compressed.MAGIC.items() if head.startswith(magic)), None)
    if said_compression != compression and (said_compression or said):
        _contradicts(name, said_compression or said or "", compression or "no compressed data")
    if head.startswith(b"PAR1"):
        _agrees(name, said, "parquet")
        with parquet.opened(name, name) as file:
            schema = file.schema_arrow
        return Source(name, name, "parquet", None, tuple(schema.names), schema=schema)
    try:
        with compressed.opened(name, compression) as content:
            first, head, in_utf8 = _first_character(content, encoding)
    except (Damaged, OSError) as e:
        raise InvalidInput(f"{name}: {e}.") from e
    if head.startswith(b"PAR1"):
        raise ConfigError(f"{name}: expected rows; got Parquet inside {compression}. Decompress it first.")
    strange = next((what for magic, what in STRANGE.items() if head.startswith(magic)), None)
    if strange and not (encoding.startswith(("utf-16", "utf-32")) and "UTF" in strange):
        raise ConfigError(f"{name}: expected JSON Lines, CSV or Parquet; got {strange}.")
    if first == "[":
        raise ConfigError(
            f"{name}: expected JSON Lines, an object a line; got a JSON array. To convert it: "
            f"python -c 'import json, sys; [print(json.dumps(row)) for row in json.load(sys.stdin)]' < IN > OUT"
        )
    if not first:
        if said == "parquet":
            _contradicts(name, said, "nothing")
        return Source(name, name, "empty", compression, ())
    if first == "{":
        _agrees(name, said, "jsonl")
        if not in_utf8:
            raise ConfigError(f"{name}: expected JSON Lines in UTF-8; these are in {encoding}. Write them as UTF-8.")
        return Source(name, name, "jsonl", compression, _keys(name, compression))
    kind: Format = "tsv" if said == "tsv" else "csv"
    _agrees(name, said, kind)
    sign = delimiter or ("\t" if kind == "tsv" else ",")
    with compressed.opened(name, compression) as content:
        columns = tuple(delimited.header(content, name, sign, encoding))
    return Source(name, name, kind, compression, columns, sign, encoding)


def _agrees(name: str, said: Format | None, found: Format) -> None:
    if said is not None and said != found:
        _contradicts(name, said, found)


def _contradicts(name: str, said: str, found: str) -> None:
    raise ConfigError(
        f"{name}: by its name expected {IN_WORDS[said]}; by its content it is {IN_WORDS.get(found, found)}. "
        "Give it the name of what it is."
    )


def _first_character(content: Any, encoding: str) -> tuple[str, bytes, bool]:
    """The first that is not blank ("": there is none), the file's first bytes, and whether it is of UTF-8."""
    head = b""
    as_utf8, as_told = (codecs.getincrementaldecoder(each)("replace") for each in ("utf-8-sig", encoding))
    while data := content.read1(SOME):
        head = head or data
        first = as_utf8.decode(data).lstrip()[:1]
        if first in ("{", "["):
            return first, head, True
        try:
            told = as_told.decode(data).lstrip()[:1]
        except UnicodeError:  # said with the header
            told = "?"
        if told:
            return told, head, False
    return "", head, True


def _keys(name: str, compression: Compression | None) -> tuple[str, ...] | None:
    with compressed.opened(name, compression) as content:
        try:
            for row in jsonl.read(content, name):
                if row.error is None:
                    return tuple(row.values)
                if row.number + 1 >= FIRST_LINES:
                    break
        except InvalidInput:  # said when it is read on
            pass
    return None
