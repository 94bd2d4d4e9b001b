"""Which values a field may have that takes only certain ones, for errors that say what was expected."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from msgspec import inspect


def choices(kind: Any, path: str) -> tuple[Any, ...]:
    """The values of the Literal at a path, such as `messages[0].role`, in a type that msgspec reads, in the order of
    the alphabet. Empty if there is none.
    """
    try:
        places = [inspect.type_info(kind)]
    except TypeError:  # msgspec reads it, and cannot describe it
        return ()
    for step in re.findall(r"\[[^]]*\]|[^.\[]+", path):
        places = [inner for place in places for inner in _inner(place, step)]
    found = (place for outer in places for place in _parts(outer) if isinstance(place, inspect.LiteralType))
    return tuple(value for literal in found for value in literal.values)


def _inner(place: inspect.Type, step: str) -> Iterator[inspect.Type]:
    for part in _parts(place):
        if isinstance(part, inspect.StructType):
            yield from (field.type for field in part.fields if field.encode_name == step)
        elif step.startswith("[") and isinstance(part, inspect.ListType):
            yield part.item_type
        elif step.startswith("[") and isinstance(part, inspect.DictType):
            yield part.value_type


def _parts(place: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(place, inspect.UnionType):
        for each in place.types:
            yield from _parts(each)
    else:
        yield place
