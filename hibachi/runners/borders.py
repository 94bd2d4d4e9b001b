"""Lengths at which a model computes otherwise, as it names them: windows, chunks, the context before LongRoPE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NAMES = "window", "chunk_size", "original_max_position"  # parts of names, as in configs of transformers
DEEP = 4  # objects or mappings within others


def borders_of(model: Any) -> set[int]:
    """Numbers of such a name among a model's attributes, its networks', and those of their `config`."""
    return set(_named(model, DEEP))


def _named(of: Any, deep: int) -> Iterator[int]:
    for name, value in _attributes(of).items():
        if type(value) is int and value > 0 and any(part in str(name).lower() for part in NAMES):
            yield value
        elif deep and (isinstance(value, Mapping) or hasattr(value, "config") or name in ("config", "spied")):
            yield from _named(value, deep - 1)


def _attributes(of: Any) -> Mapping[Any, Any]:
    if isinstance(of, Mapping):
        return of
    return {**vars(type(of)), **vars(of)} if hasattr(of, "__dict__") and not isinstance(of, type) else {}
