"""Arrays in nested objects: tuples, lists, dicts and any objects with attributes, such as the caches of libraries.

What is no array, and no container of arrays, stays as it is: numbers, texts, functions, modules of a network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from hibachi.tensor.array_backend import Array


def arrays_in(tree: Any, owns: Callable[[Any], bool]) -> list[tuple[str, Array]]:
    """Each array with its place, such as "[0].keys", always in the same order. owns: is this an array?

    An array that lies in two places is found twice; a container that does, once.
    """
    return list(_found(tree, owns, "", set()))


def _found(tree: Any, owns: Callable[[Any], bool], place: str, seen: set[int]) -> Iterator[tuple[str, Array]]:
    if owns(tree):
        yield place or "the cache itself", tree
        return
    if id(tree) in seen:
        return
    seen.add(id(tree))
    for name, child in _children(tree):
        yield from _found(child, owns, f"{place}{name}", seen)


def _children(tree: Any) -> list[tuple[str, Any]]:
    if isinstance(tree, dict):
        return [(f"[{key!r}]", value) for key, value in tree.items()]
    if isinstance(tree, (list, tuple)):
        return [(f"[{i}]", value) for i, value in enumerate(tree)]
    return [(f".{name}", getattr(tree, name)) for name in _attributes(tree)]


def _attributes(tree: Any) -> list[str]:
    """Names of the attributes that an object's own caches lie in; none of a network, whose arrays are weights."""
    if tree is None or isinstance(tree, (type, str, bytes, int, float, complex)) or callable(tree):
        return []
    names = [*getattr(tree, "__dict__", ())]
    for cls in type(tree).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [n for n in ((slots,) if isinstance(slots, str) else slots) if not n.startswith("__")]
    return [name for name in dict.fromkeys(names) if hasattr(tree, name)]


def with_arrays(tree: Any, owns: Callable[[Any], bool], arrays: list[Array]) -> Any:
    """A copy of `tree` with other arrays in the places of its own, in the order of `arrays_in`. What holds no array is
    not copied.
    """
    left = iter(arrays)
    made = _with(tree, owns, left, {})
    assert next(left, None) is None
    return made


HOLE = object()
"""Stands for an array in a container that was emptied."""


def emptied(tree: Any, owns: Callable[[Any], bool]) -> Any:
    """A copy of `tree` that holds on to none of its arrays; `filled` puts others in their places."""
    return with_arrays(tree, owns, [HOLE for _ in arrays_in(tree, owns)])


def filled(tree: Any, arrays: list[Array]) -> Any:
    """A copy of what `emptied` returned, with these arrays, in the order of `arrays_in`."""
    return with_arrays(tree, lambda child: child is HOLE, arrays)


def _with(tree: Any, owns: Callable[[Any], bool], left: Iterator[Array], made: dict[int, Any]) -> Any:
    if owns(tree):
        return next(left)
    if id(tree) in made:
        return made[id(tree)]
    if not (children := _children(tree)):
        return tree
    if not isinstance(tree, tuple):
        made[id(tree)] = copy.copy(tree)  # first: what is inside may lead back to it
    new = [_with(child, owns, left, made) for _, child in children]
    if all(a is b for a, (_, b) in zip(new, children, strict=True)):
        made[id(tree)] = tree
    elif isinstance(tree, tuple):
        made[id(tree)] = type(tree)(*new) if hasattr(tree, "_fields") else type(tree)(new)
    else:
        _put(made[id(tree)], tree, new)
    return made[id(tree)]


def _put(other: Any, tree: Any, new: list[Any]) -> None:
    """Give `other`, a copy of a container, these children in the order of `_children`."""
    if isinstance(tree, dict):
        other.update(zip(tree, new, strict=True))
    elif isinstance(tree, list):
        other[:] = new
    else:
        for name, child in zip(_attributes(tree), new, strict=True):
            if getattr(other, name) is not child:
                object.__setattr__(other, name, child)  # also of a frozen dataclass
