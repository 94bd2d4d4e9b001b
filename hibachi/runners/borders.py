"""Lengths at which a model computes otherwise, as it names them: windows, chunks, the context before LongRoPE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NAMES = "window", "chunk_size", "original_max_position"  # parts of names, as in configs of transformers
DEEP = 3  # mappings within mappings


def borders_of(model: Any) -> set[int]:
    """Numbers of that name among a model's attributes, and in the configs of the networks that it holds."""
    own = _attributes(model)
    configs = [getattr(network, "config", None) for network in [model, *own.values()]]
    return {n for found in (own, *map(_attributes, configs)) for n in _named(found, DEEP)}


def _attributes(of: Any) -> dict[str, Any]:
    if isinstance(of, Mapping):
        return dict(of)
    return {**vars(type(of)), **vars(of)} if hasattr(of, "__dict__") and not isinstance(of, type) else {}


def _named(found: Mapping[Any, Any], deep: int) -> Iterator[int]:
    for name, value in found.items():
        if type(value) is int and value > 0 and any(part in str(name).lower() for part in NAMES):
            yield value
        elif isinstance(value, Mapping) and deep:
            yield from _named(value, deep - 1)
