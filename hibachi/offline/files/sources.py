"""The files of an input: which they are, what they hold, and their rows one after the other."""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from hibachi.errors import ConfigError
from hibachi.offline.files import compressed, delimited
from hibachi.offline.files.compressed import Damaged
from hibachi.offline.files.format import Source, Start
from hibachi.offline.files.rows import InvalidInput, Row
from hibachi.offline.files.table import BY_SUFFIX, FORMATS, STRANGE, TITLES, by_suffix, either

SOME = 1 << 16  # bytes looked at, at a time


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
            if file.format is not None:
                wanted = skip if stop is None else _before(stop, skip, file.format.ahead)
                number = yield from file.format.rows(file, number, wanted)

    def count(self) -> int | None:
        """About how many rows there are, for a bar; None means unknown before the end."""
        counts = [0 if file.format is None else file.format.count(file) for file in self.files]
        return sum(n for n in counts if n is not None) if None not in counts else None

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
        _contradicts(name, said_compression or (said.words if said else ""), compression or "no compressed data")
    try:
        with compressed.opened(name, compression) as content:
            start = _start(content, encoding)
    except (Damaged, OSError) as e:
        raise InvalidInput(f"{name}: {e}.") from e
    strange = next((what for magic, what in STRANGE.items() if start.head.startswith(magic)), None)
    if strange and not (encoding.startswith(("utf-16", "utf-32")) and "UTF" in strange):
        raise ConfigError(f"{name}: expected {either(TITLES)}; got {strange}.")
    if start.first == "[":
        raise ConfigError(
            f"{name}: expected JSON Lines, an object a line; got a JSON array. To convert it: "
            f"python -c 'import json, sys; [print(json.dumps(row)) for row in json.load(sys.stdin)]' < IN > OUT"
        )
    if not start.first:
        if said is not None and not said.is_text:
            _contradicts(name, said.words, "nothing")
        return Source(name, name, None, compression)
    found = next(format for format in (said, *FORMATS) if format is not None and format.sniff(start))
    if compression and not found.is_text:
        raise ConfigError(f"{name}: expected rows; got {found.title} inside {compression}. Decompress it first.")
    if said is not None and said != found:
        _contradicts(name, said.words, found.words)
    return found.look(Source(name, name, found, compression, delimiter=delimiter, encoding=encoding), start)


def _contradicts(name: str, said: str, found: str) -> None:
    raise ConfigError(
        f"{name}: by its name expected {said}; by its content it is {found}. Give it the name of what it is."
    )


def _start(content: Any, encoding: str) -> Start:
    """encoding: that of delimited text."""
    head = b""
    as_utf8, as_told = (codecs.getincrementaldecoder(each)("replace") for each in ("utf-8-sig", encoding))
    while data := content.read1(SOME):
        head = head or data
        first = as_utf8.decode(data).lstrip()[:1]
        if first in ("{", "["):
            return Start(head, first, True)
        try:
            told = as_told.decode(data).lstrip()[:1]
        except UnicodeError:  # said with the header
            told = "?"
        if told:
            return Start(head, told, False)
    return Start(head, "", True)
