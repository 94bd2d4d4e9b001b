"""Arrow's batches as rows; values that Python's types cannot hold exactly become ISO 8601 text."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import zoneinfo
from collections.abc import Callable, Generator
from typing import Any

from hibachi.common.installed import need
from hibachi.offline.files import jsonl
from hibachi.offline.files.rows import BATCH, Row

A_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def arrow() -> Any:
    """The module pyarrow. Raises MissingExtra."""
    return need("pyarrow", "Parquet", BATCH)


def type_of(kind: str) -> Any:
    """The type of a result column of this kind (`Field`)."""
    pa = arrow()
    return {
        "text": pa.string(),
        "int": pa.int64(),
        "float": pa.float64(),
        "bool": pa.bool_(),
        "ints": pa.list_(pa.int64()),
        "floats": pa.list_(pa.float64()),
        "json": pa.string(),
    }[kind]


def rows_of(
    batch: Any, name: str, number: int, line: int, skip: Callable[[int], bool] | None
) -> Generator[Row, None, None]:
    """The rows of a pyarrow.RecordBatch. line: of its first, in its file."""
    kept = range(batch.num_rows)
    size = batch.nbytes // max(len(kept), 1)
    if skip is not None:
        kept = [i for i in kept if not skip(number + i)]  # type: ignore[assignment]  # integers, as the range is
        if len(kept) < batch.num_rows:
            batch = batch.take(arrow().array(kept, arrow().int64()))
    names = batch.schema.names
    columns = [values(column) for column in batch.columns]
    cells = zip(*columns, strict=True) if columns else itertools.repeat(())
    for at, (i, row) in enumerate(zip(kept, cells, strict=False)):
        yield Row(number + i, name, line + i, dict(zip(names, row, strict=True)), None, size, "row", (batch, at))


# ---- values ----------------------------------------------------------------------------------------------------------


def values(array: Any) -> list[Any]:
    """The array's values, as Python has them: a time of nanoseconds that datetime cannot hold is ISO 8601 text."""
    pa = arrow()
    if _whole_type(pa, array.type):
        try:
            return list(array.to_pylist())
        except (ValueError, OverflowError, TypeError, pa.ArrowException):  # years over 9999, unknown zones
            pass
    return [_value(pa, each) for each in array]


def _whole_type(pa: Any, kind: Any) -> bool:
    """Can Python hold all its values in years 1 to 9999? Not nanoseconds, which pandas is needed for."""
    if getattr(kind, "unit", None) == "ns":
        return False
    if isinstance(kind, pa.BaseExtensionType):
        return _whole_type(pa, kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _whole_type(pa, kind.value_type)
    return all(_whole_type(pa, kind.field(i).type) for i in range(kind.num_fields))


def _value(pa: Any, scalar: Any) -> Any:
    kind = scalar.type
    if not scalar.is_valid:
        return None
    if isinstance(kind, pa.BaseExtensionType):
        return _value(pa, scalar.value)
    if pa.types.is_dictionary(kind):
        return _value(pa, scalar.value)
    if pa.types.is_timestamp(kind):
        return timestamp(scalar.value, kind.unit, kind.tz)
    if pa.types.is_time(kind):
        return _time(scalar.value, kind.unit)
    if pa.types.is_duration(kind):
        return _duration(scalar.value, kind.unit)
    if pa.types.is_struct(kind):
        return {name: _value(pa, each) for name, each in scalar.items()}
    if pa.types.is_map(kind):
        return [(_value(pa, each["key"]), _value(pa, each["value"])) for each in scalar.values]
    if hasattr(kind, "value_type"):  # lists of all kinds
        return [_value(pa, each) for each in scalar.values]
    for known in (scalar.as_py, lambda: scalar.cast(pa.string()).as_py()):
        with contextlib.suppress(ValueError, OverflowError, TypeError, pa.ArrowException):
            return known()
    if hasattr(scalar, "as_buffer"):  # a text that is not UTF-8
        return bytes(scalar.as_buffer()).decode("utf-8", "surrogateescape")
    return str(scalar)


def _zone(name: str) -> datetime.tzinfo:
    """UTC for a zone that this machine does not know: the instant is the same."""
    if name[:1] in "+-":
        hours, _, minutes = name[1:].partition(":")
        offset = datetime.timedelta(hours=int(hours), minutes=int(minutes or 0))
        return datetime.timezone(-offset if name[0] == "-" else offset)
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return datetime.UTC


def timestamp(value: int, unit: str, zone: str | None) -> Any:
    """A datetime, or ISO 8601 text of nanoseconds, or, outside of the years 1 to 9999, the number as text."""
    seconds, rest = divmod(value * (10**9 // A_SECOND[unit]), 10**9)
    try:
        made = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(seconds=seconds)
        made = made.astimezone(_zone(zone)) if zone else made.replace(tzinfo=None)
    except OverflowError:
        return f"{value} {unit} after 1970-01-01"
    if rest % 1000 == 0:
        return made.replace(microsecond=rest // 1000)
    text = made.isoformat()
    return f"{text[:19]}.{rest:09d}{text[19:]}"


def _time(value: int, unit: str) -> Any:
    seconds, rest = divmod(value * (10**9 // A_SECOND[unit]), 10**9)
    made = datetime.time(seconds // 3600, seconds // 60 % 60, seconds % 60, rest // 1000)
    return made if rest % 1000 == 0 else f"{made.isoformat('seconds')}.{rest:09d}"


def _duration(value: int, unit: str) -> Any:
    nanos = value * (10**9 // A_SECOND[unit])
    try:
        return jsonl.nanoseconds(nanos) if nanos % 1000 else datetime.timedelta(microseconds=nanos // 1000)
    except OverflowError:
        return jsonl.nanoseconds(nanos)
