"""How much an object has in its memory, whatever it calls it: for tests that nothing stays of what has gone."""

from collections.abc import Sized
from typing import Any


def kept(of: Any) -> int:
    """The number of entries of all its containers, of those within them, and of those of our objects that it has."""
    names = [name for kind in type(of).__mro__ for name in getattr(kind, "__slots__", ())]
    own = {**vars(of)} if hasattr(of, "__dict__") else {name: getattr(of, name) for name in names if hasattr(of, name)}
    return sum(map(_entries, own.values()))


def _entries(value: Any) -> int:
    if isinstance(value, dict):
        return sum(1 + _entries(inner) for inner in value.values())
    if isinstance(value, (str, bytes, int, float)):
        return 0
    if isinstance(value, (list, tuple, set, frozenset)) or (
        isinstance(value, Sized) and type(value).__module__ == "collections"
    ):
        return len(value)
    return kept(value) if type(value).__module__.startswith("hibachi") else 0
