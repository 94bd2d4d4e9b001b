"""Lengths at which a model computes otherwise, as it names them: windows, chunks, the context before LongRoPE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ORIGINAL = "original_max_position"
NAMES = "window", "chunk_size", ORIGINAL  # parts of names, as in configs of transformers
DEEP = 4  # objects or mappings within others


def borders_of(model: Any) -> dict[int, bool]:
    """Numbers of such a name among a model's attributes, its networks', and those of their `config`; of each, whether
    it is LongRoPE's, beyond which one long row changes all others."""
    found = dict[int, bool]()
    for n, long in _named(model, DEEP):
        found[n] = found.get(n, False) or long
    return found


def _named(of: Any, deep: int) -> Iterator[tuple[int, bool]]:
    own = _attributes(of)
    for name, value in own.items():
        if type(value) is int and value > 0 and any(part in str(name).lower() for part in NAMES):
            yield value, ORIGINAL in str(name) and "longrope" in (own.get("rope_type"), own.get("type"))
        elif deep and (isinstance(value, Mapping) or name in ("config", "spied") or _has_config(value)):
            yield from _named(value, deep - 1)


def _has_config(value: Any) -> bool:
    try:
        return hasattr(value, "config")
    except Exception:  # a property of its own may raise what it likes
        return False


def _attributes(of: Any) -> Mapping[Any, Any]:
    if isinstance(of, Mapping):
        return of
    return {**vars(type(of)), **vars(of)} if hasattr(of, "__dict__") and not isinstance(of, type) else {}
