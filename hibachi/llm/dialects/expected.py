"""Which fields and values were expected, for errors that say so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from msgspec import inspect

from hibachi.llm.dialects.extensible import parts

SAME = (  # what fields of the bodies of other routes are called
    ("max_tokens", "max_completion_tokens", "max_output_tokens"),
    ("messages", "input", "prompt"),
    ("response_format", "text.format", "output_config.format"),
    ("reasoning_effort", "reasoning.effort", "output_config.effort"),
    ("system", "instructions"),
    ("stop", "stop_sequences"),
)


def same(kind: Any, name: str) -> str:
    """What the field of another route is called in the body of type `kind`; "" if there is none."""
    own = getattr(kind, "__struct_encode_fields__", ())
    alike = (field for group in SAME if name in group for field in group)
    return next((field for field in alike if field != name and field.partition(".")[0] in own), "")


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
    found = (place for outer in places for place in parts(outer) if isinstance(place, inspect.LiteralType))
    return tuple(value for literal in found for value in literal.values)


def _inner(place: inspect.Type, step: str) -> Iterator[inspect.Type]:
    for part in parts(place):
        if isinstance(part, inspect.StructType):
            yield from (field.type for field in part.fields if field.encode_name == step)
        elif step.startswith("[") and isinstance(part, inspect.ListType):
            yield part.item_type
        elif step.startswith("[") and isinstance(part, inspect.DictType):
            yield part.value_type
