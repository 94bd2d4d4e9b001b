"""The formats there are, by what the names of files say, and outputs in them: equal rows give equal bytes. A new format
is a file beside this, and a line in FORMATS; its beginning is no longer STRANGE.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import BinaryIO, NamedTuple

from hibachi.errors import ConfigError
from hibachi.offline.files.compressed import Compression
from hibachi.offline.files.delimited import Delimited, Tabbed
from hibachi.offline.files.format import Field, Format, Rows, RowWriter, Written
from hibachi.offline.files.jsonl import JsonLines
from hibachi.offline.files.parquet import Parquet

FORMATS: tuple[Format, ...] = (JsonLines(), Parquet(), Delimited(), Tabbed())  # as they are tried on a content
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
BY_SUFFIX = {suffix: format for format in FORMATS for suffix in format.suffixes}
COMPRESSED: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
NAMES = [format.name for format in sorted(FORMATS, key=lambda f: not f.is_text)]
TITLES = [format.title for format in sorted(FORMATS, key=lambda f: not f.is_text)]


class FileForm(NamedTuple):
    """What an output is: its format and compression."""

    format: Format
    compression: Compression | None


def either(words: list[str]) -> str:
    """a, b or c"""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def by_suffix(name: str) -> tuple[Format | None, Compression | None]:
    """What a file's name says: out.csv.gz is CSV in gzip; None where it says nothing."""
    suffixes = [suffix.lower() for suffix in PurePath(name).suffixes]
    compression = COMPRESSED.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    return BY_SUFFIX.get(suffixes[-1]) if suffixes else None, compression


def form_of(name: str, format: str | None = None) -> FileForm:
    """Format and compression of an output, by `format` ("csv", "jsonl.gz"), else by its name. Raises ConfigError."""
    known, compression = by_suffix(name)
    if format is not None:
        known, told = by_suffix("x." + format.lower())
        if known is None:
            raise ConfigError(f"format {format!r}: expected {either(NAMES)}, or jsonl.gz, csv.zst and so on.")
        compression = told or compression
    if known is None:
        plain = either([each.title for each in FORMATS if not each.is_text])
        raise ConfigError(
            f"{name}: expected a name that tells the output's format ({', '.join(BY_SUFFIX)}; behind all but {plain}'s "
            f"also {', '.join(COMPRESSED)}), or --format."
        )
    if not known.is_text and compression:
        raise ConfigError(
            f"{name}: expected {known.title} as it is; it compresses its columns itself. Drop .gz or .zst."
        )
    return FileForm(known, compression)


def open_writer(
    file: BinaryIO, form: FileForm, *, sources: Rows | None, results: Sequence[Field], stop: int | None = None
) -> RowWriter:
    """A writer to `file`, a buffered binary file, which it never closes.

    sources: the columns of these are carried through, before the results; None means results only. For CSV and Parquet
    all rows of JSON Lines are read first, to learn their columns; with stop, those before the row of this number.
    Raises ConfigError, InvalidInput.
    """
    if twice := [name for name, times in Counter(field.name for field in results).items() if times > 1]:
        raise ConfigError(f"expected result columns of different names; more than once: {', '.join(twice)}.")
    return form.format.writer(file, form.compression, Written(sources, results, stop))
