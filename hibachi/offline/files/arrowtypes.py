"""The types of carried columns in a Parquet output: those of Parquet inputs, found from the values of all others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from hibachi.errors import ConfigError
from hibachi.offline.files import jsonl
from hibachi.offline.files.arrow import arrow
from hibachi.offline.files.format import Rows
from hibachi.offline.files.rows import InvalidInput

EXACT = 1 << 53  # integers up to here are floats too
MOST_COLUMNS = 10_000
BEYOND = "integer of a column beyond 64 bits written as text"


class SeenTypes:
    """What values a column of JSON has, or the items of its lists, or a key of its objects."""

    __slots__ = ("big", "inexact", "item", "keys", "kinds", "uneven")

    def __init__(self) -> None:
        self.kinds: set[type] = set()
        self.big = self.inexact = False  # integers beyond 64 bits; those that may be no float
        self.item: SeenTypes | None = None
        self.keys: dict[str, SeenTypes] | None = None
        self.uneven = False  # objects of different keys

    def add(self, value: Any) -> None:
        if value is None:
            return
        kind = type(value)
        self.kinds.add(kind)
        if kind is int:
            if not -EXACT <= value <= EXACT:
                self.inexact = True
                self.big |= not -(1 << 63) <= value < 1 << 63
        elif kind is list:
            self._items(value)
        elif kind is dict:
            if self.keys is None:
                self.keys = {key: SeenTypes() for key in value}
            if self.keys.keys() != value.keys():
                self.uneven = True
            else:
                for key, inner in value.items():
                    self.keys[key].add(inner)

    def _items(self, value: list[Any]) -> None:
        if self.item is None:
            self.item = SeenTypes()
        kinds = set(map(type, value))
        if kinds == {int}:  # of token ids, most of the time
            self.item.add(min(value))
            self.item.add(max(value))
        elif kinds and kinds <= {str, float, bool, type(None)}:
            self.item.kinds |= kinds - {type(None)}
        else:
            for inner in value:
                self.item.add(inner)

    def arrow(self) -> Any:
        """The type that holds all of them exactly; None means there is none, JSON text must do."""
        pa = arrow()
        flat = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
        if not self.kinds:
            return pa.null()
        if self.kinds == {int, float}:
            return None if self.inexact else pa.float64()
        if len(self.kinds) > 1 or self.big:
            return None
        (kind,) = self.kinds
        if kind is list:
            item = self.item.arrow() if self.item is not None else pa.null()
            return None if item is None else pa.list_(item)
        if kind is dict:
            inner = {key: seen.arrow() for key, seen in (self.keys or {}).items()}
            if self.uneven or not inner or None in inner.values():
                return None
            return pa.struct(list(inner.items()))
        return flat.get(kind)

    @property
    def only_integers(self) -> bool:
        return self.kinds == {int}


@dataclass(frozen=True)
class Column:
    """A carried column: its type, and for one whose values are made text of, how: as JSON, or an integer's digits."""

    name: str
    type: Any
    text: str | None = None  # None, "json", "digits"

    def array(self, values: list[Any], remarks: Counter[str]) -> Any:
        """The values as an array of the type. Raises InvalidInput."""
        pa = arrow()
        if self.text == "json":
            values = [None if value is None else jsonl.text_of(value, remarks) for value in values]
        elif self.text == "digits":
            remarks[BEYOND] += sum(type(v) is int and not -(1 << 63) <= v < 1 << 63 for v in values)
            values = [None if value is None else str(value) for value in values]
        try:
            try:
                return pa.array(values, self.type)
            except UnicodeEncodeError:
                return pa.array([_escaped(value, remarks) for value in values], self.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as e:
            raise InvalidInput(
                f"column {self.name!r}: expected values of the type {self.type}, which it had when it was first "
                f"read; {e}. Did the input change?"
            ) from e


def _escaped(value: Any, remarks: Counter[str]) -> Any:
    if isinstance(value, str):
        return jsonl.encoded(value, remarks).decode()
    if isinstance(value, list):
        return [_escaped(each, remarks) for each in value]
    if isinstance(value, dict):
        return {key: _escaped(each, remarks) for key, each in value.items()}
    return value


def names(rows: Rows, *, stop: int | None = None) -> list[str]:
    """All columns, in order of first appearance. Reads all rows where they have keys of their own, as JSON has.

    stop: the number of the row before which that ends. Raises ConfigError, InvalidInput.
    """
    if not any(file.own_keys for file in rows.files):
        return rows.columns or []
    order = dict.fromkeys(name for file in rows.files for name in file.columns or ())
    for row in rows.rows(stop=stop):
        if row.values.keys() - order.keys():
            order.update(dict.fromkeys(row.values))
            _not_too_many(order)
    return list(order)


def _not_too_many(found: dict[str, Any]) -> None:
    if len(found) > MOST_COLUMNS:
        raise ConfigError(
            f"expected at most {MOST_COLUMNS} different keys in all rows, a column each; got more. Write JSON Lines."
        )


def columns(rows: Rows, *, stop: int | None = None) -> list[Column]:
    """The carried columns of a Parquet output. Reads rows as `names` does. Raises ConfigError, InvalidInput."""
    pa = arrow()
    fields: dict[str, list[Any]] = {}  # of files that have the same columns in each row
    for file in rows.files:
        if file.schema is not None:
            for field in file.schema:
                fields.setdefault(field.name, []).append(_plain(pa, field))
        elif not file.own_keys:
            for name in file.columns or ():
                fields.setdefault(name, []).append(pa.field(name, pa.string()))
    seen: dict[str, SeenTypes] = {}
    if of_json := {file.name for file in rows.files if file.own_keys}:
        for row in rows.rows(stop=stop):
            if row.file in of_json:
                for name, value in row.values.items():
                    if (column := seen.get(name)) is None:
                        column = seen[name] = SeenTypes()
                        _not_too_many(seen)
                    if value is not None:
                        column.add(value)
    typed = all(file.schema is not None for file in rows.files if file.format is not None)
    order = dict.fromkeys(name for file in rows.files for name in file.columns or ()) | dict.fromkeys(seen)
    return [_column(pa, name, fields.get(name, []), seen.get(name), typed) for name in order]


def _plain(pa: Any, field: Any) -> Any:
    """The field without the file's own numbers, and without a dictionary, which is a way to store and no type."""
    metadata = {k: v for k, v in (field.metadata or {}).items() if k != b"PARQUET:field_id"}
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    return pa.field(field.name, kind, True, metadata or None)


def _column(pa: Any, name: str, fields: list[Any], seen: SeenTypes | None, typed: bool) -> Column:
    if seen is not None:
        kind = seen.arrow()
        if kind is None and not fields and seen.only_integers:
            return Column(name, pa.string(), "digits")
        if kind is None:
            return Column(name, pa.string(), "json")
        fields = [*fields, pa.field(name, kind)]
    kinds = {field.type for field in fields if not pa.types.is_null(field.type)}
    if len(kinds) <= 1:
        return Column(name, kinds.pop() if kinds else pa.null())
    try:
        schemas = [pa.schema([pa.field(name, kind)]) for kind in sorted(kinds, key=str)]
        one = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
        if not any(_loses(pa, kind, one) for kind in kinds):
            return Column(name, one)
    except pa.ArrowException:
        pass
    if typed:
        raise ConfigError(
            f"column {name!r}: expected one type in all files, or types that one holds exactly; got "
            f"{', '.join(sorted(map(str, kinds)))}. Write JSON Lines or CSV, or make the files alike."
        )
    return Column(name, pa.string(), "json")


def _loses(pa: Any, kind: Any, one: Any) -> bool:
    """Can a value of `kind` lose something as `one`? Lists and structures are trusted only where nothing changes."""
    if kind == one:
        return False
    of = pa.types
    if of.is_integer(kind):
        if of.is_floating(one):
            return bool(kind.bit_width > 32 or one.bit_width < 64)
        return not of.is_integer(one) or (of.is_unsigned_integer(kind) and kind.bit_width >= one.bit_width)
    if of.is_floating(kind):
        return not of.is_floating(one)
    if of.is_nested(kind):
        return True
    return bool(of.is_string(kind) and not of.is_large_string(one))
