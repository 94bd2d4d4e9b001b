"""JSON Lines: an object a line, in UTF-8."""

from __future__ import annotations

import base64
import datetime
import json
import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

from typing_extensions import override

from hibachi.errors import ConfigError, shown
from hibachi.offline.files import compressed
from hibachi.offline.files.compressed import Compression, Damaged
from hibachi.offline.files.format import BytesWriter, Field, LinesFormat, Rows, RowWriter, Skip, Source, Start, Written
from hibachi.offline.files.rows import LINE_LIMIT, InvalidInput, Row

BOM = b"\xef\xbb\xbf"
DEEPEST = 200  # arrays and objects in each other; a limit of ours, as Python's depends on the depth of the caller
PIECE = 1 << 20  # bytes of a line that is too long, read at a time
FIRST_LINES = 10  # among which keys are looked for
REPLACED = "value of the input replaced by a result of the same name"

NOT_FINITE = "NaN or infinity written as null"
SURROGATE = "half a surrogate pair written as its escape"

JSON_NAMES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}


def read(
    file: BinaryIO, name: str, number: int = 0, skip: Callable[[int], bool] | None = None
) -> Generator[Row, None, int]:
    """Rows from `number` on; returns the number after the last. Raises InvalidInput where it cannot read on."""
    line = 0
    while True:
        try:
            data = file.readline(LINE_LIMIT + 1)
            size = len(data)
            whole = size <= LINE_LIMIT or data.endswith(b"\n")
            if not whole:
                while piece := file.readline(PIECE):
                    size += len(piece)
                    if piece.endswith(b"\n"):
                        break
        except (Damaged, OSError) as e:
            raise InvalidInput(f"{name}, after line {line}: {e}.") from e
        if not size:
            return number
        line += 1
        if line == 1 and data.startswith(BOM):
            data = data[len(BOM) :]
        if not data or data.isspace():
            continue
        number += 1
        if skip is not None and skip(number - 1):
            continue
        if whole:
            values, error = parsed(data)
        else:
            values, error = {}, f"expected a line of at most {LINE_LIMIT} bytes; it has {size}"
        yield Row(number - 1, name, line, values, error, size)


class _Refused(ValueError):
    """JSON that Python would take and we do not."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise _Refused(f"expected each key of an object once; {shown(twice)} is there more than once")
    return made


_decode = json.JSONDecoder(object_pairs_hook=_object).decode


def parsed(data: bytes) -> tuple[dict[str, Any], str | None]:
    """The object of a line, and None; or an empty one, and what is wrong."""
    try:
        text = data.decode().rstrip("\r\n")
        value = _decode(text)
        if type(value) is dict and (text.count("{") + text.count("[") <= DEEPEST or not _deep(value)):
            return value, None
    except UnicodeDecodeError as e:
        return {}, f"expected UTF-8; byte {e.start + 1} of the line, 0x{data[e.start]:02x}, is none ({e.reason})"
    except json.JSONDecodeError as e:
        return {}, f"expected a JSON object; at character {e.pos + 1} {shown(e.doc[e.pos : e.pos + 40])}: {e.msg}"
    except _Refused as e:
        return {}, str(e)
    except RecursionError:
        value = {}
    except ValueError as e:  # of an integer of thousands of digits
        return {}, f"expected numbers that can be read: {e}"
    if type(value) is dict:
        return {}, f"expected at most {DEEPEST} arrays and objects in each other; here are more"
    return {}, f"expected a JSON object; got {JSON_NAMES.get(type(value), 'a number')}: {shown(value)}"


def _deep(value: Any) -> bool:
    """Is it nested more deeply than is allowed?"""
    level, depth = [value], 0
    while level:
        depth += 1
        inner: list[Any] = []
        for each in level:
            inner.extend(v for v in (each.values() if type(each) is dict else each) if type(v) in (dict, list))
        level = inner
        if depth > DEEPEST:
            return True
    return False


# ---- writing ---------------------------------------------------------------------------------------------------------


def duration(value: datetime.timedelta) -> str:
    """ISO 8601, in seconds: PT90.5S."""
    micros = (value.days * 86400 + value.seconds) * 1_000_000 + value.microseconds
    return nanoseconds(micros * 1000)


def nanoseconds(value: int) -> str:
    """The duration in ISO 8601: PT90.5S."""
    seconds, rest = divmod(abs(value), 1_000_000_000)
    fraction = f".{rest:09d}".rstrip("0") if rest else ""
    return f"{'-' if value < 0 else ''}PT{seconds}{fraction}S"


def plain(value: Any) -> Any:
    """What JSON has no kind for, in one that it has: times in ISO 8601, bytes in base64, all others as their text."""
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return duration(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    return str(value)


_finite = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=plain).encode


def text_of(value: Any, remarks: Counter[str]) -> str:
    """JSON on one line. It can have halves of surrogate pairs; `encoded` makes escapes of them."""
    try:
        return _finite(value)
    except (ValueError, TypeError):  # a number that JSON has not, or a key that is no text (of a map in Parquet)
        return _finite(_tamed(value, remarks))


def _tamed(value: Any, remarks: Counter[str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        remarks[NOT_FINITE] += 1
        return None
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(plain(key)): _tamed(v, remarks) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tamed(v, remarks) for v in value]
    return value


def encoded(text: str, remarks: Counter[str]) -> bytes:
    """UTF-8, with escapes (of JSON, and of Python) for halves of surrogate pairs."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        remarks[SURROGATE] += 1
        return text.encode("utf-8", "backslashreplace")


# ---- the format ------------------------------------------------------------------------------------------------------


class JsonLines(LinesFormat):
    name = "jsonl"
    title = words = "JSON Lines"
    suffixes = (".jsonl", ".ndjson", ".json")
    own_keys = True

    @override
    def sniff(self, start: Start) -> bool:
        return start.first == "{"

    @override
    def look(self, source: Source, start: Start) -> Source:
        if not start.in_utf8:
            raise ConfigError(
                f"{source.name}: expected JSON Lines in UTF-8; these are in {source.encoding}. Write them as UTF-8."
            )
        return replace(source, columns=self._keys(source))

    def _keys(self, source: Source) -> tuple[str, ...] | None:
        with compressed.opened(source.path, source.compression) as content:
            try:
                for row in read(content, source.name):
                    if row.error is None:
                        return tuple(row.values)
                    if row.number + 1 >= FIRST_LINES:
                        break
            except InvalidInput:  # said when it is read on
                pass
        return None

    @override
    def read(self, content: BinaryIO, source: Source, number: int, skip: Skip | None) -> Generator[Row, None, int]:
        return (yield from read(content, source.name, number, skip))

    @override
    def carried(self, rows: Rows, stop: int | None) -> list[str] | None:
        return rows.columns  # has of each row what that has

    @override
    def writer(self, file: BinaryIO, compression: Compression | None, of: Written) -> RowWriter:
        return _JsonlWriter(file, compression, of.rows, of.results)


class _JsonlWriter(BytesWriter):
    def __init__(
        self, file: BinaryIO, compression: Compression | None, rows: Rows | None, results: Sequence[Field]
    ) -> None:
        super().__init__(file, compression)
        self._carries = rows is not None
        self._fixed = {  # the columns that a row of this file has, also where it cannot be read
            each.name: dict.fromkeys(each.columns or ())
            for each in (rows.files if rows is not None else ())
            if not each.own_keys
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
        self._put(encoded(text_of(out, self.remarks) + "\n", self.remarks))
