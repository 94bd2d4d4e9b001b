"""What newer clients add to messages, items, blocks, parts and tools is no mistake: it is passed over."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from msgspec import Struct, inspect

from hibachi.errors import FieldPath
from hibachi.llm.chatformat.once import Once

_once = Once(logging.getLogger("hibachi.chat"))


class Extensible(Struct, forbid_unknown_fields=True):
    """A part of a body whose unknown fields are passed over, see `without_unknown`; those of the body are refused."""


def pass_over(what: str, name: str) -> None:
    """The log says once what is passed over."""
    _once.warning((what, hash(name)), f"{what} that are not known here are passed over in requests: %s", name)


def without_unknown(kind: Any, value: Any, within: FieldPath = ()) -> Any:
    """Parsed JSON that is to be read as `kind`, without unknown fields of records that are Extensible. within: where in
    a body it stands.
    """
    path = "".join("[]" if isinstance(step, int) else f".{step}" for step in within)
    return _without(_described(kind), value, path.lstrip("."))


_described = lru_cache(inspect.type_info)


def _without(place: inspect.Type, value: Any, path: str) -> Any:
    if isinstance(value, list):
        items = [part.item_type for part in parts(place) if isinstance(part, inspect.ListType)]
        return [_without(items[0], item, f"{path}[]") for item in value] if items else value
    records = [part for part in parts(place) if isinstance(part, inspect.StructType)] if isinstance(value, dict) else []
    tagged = [part for part in records if part.tag_field and value.get(part.tag_field) == part.tag]
    if not (found := tagged or [part for part in records if part.tag_field is None]):
        return value
    known = {field.encode_name: field.type for field in found[0].fields}
    own, kept = path and f"{path}.", dict[str, Any]()
    for name, inner in value.items():
        if name in known:
            kept[name] = _without(known[name], inner, own + name)
        elif name == found[0].tag_field or not issubclass(found[0].cls, Extensible):
            kept[name] = inner
        else:
            pass_over("Fields", own + name)
    return kept


def parts(place: inspect.Type) -> Iterator[inspect.Type]:
    """The types of a union, or the type itself."""
    if isinstance(place, inspect.UnionType):
        for each in place.types:
            yield from parts(each)
    else:
        yield place
