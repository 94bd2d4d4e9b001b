"""Arrays in nested objects: tuples, lists, dicts and any objects with attributes, such as the caches of libraries.

What is no array, and no container of arrays, stays as it is: numbers, texts, functions, modules of a network. Numbers
that others should be in place of are named by their place.
"""

from __future__ import annotations

import ast
import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array

_DATA = bool, int, float, complex, str, bytes, set, frozenset, deque, bytearray, np.ndarray, np.generic


def arrays_in(tree: Any, owns: Callable[[Any], bool]) -> list[tuple[str, Array]]:
    """Each array with its place, such as "[0].keys", always in the same order. owns: is this an array?

    An array that lies in two places is found twice; a container that does, once.
    """
    return [(place or "the cache itself", leaf) for place, leaf in _leaves(tree, owns, "", set()) if owns(leaf)]


def data_in(tree: Any, owns: Callable[[Any], bool]) -> dict[str, Any]:
    """What else is data, by its place: numbers, texts, sets, arrays of other libraries. Not what has its own identity,
    such as a lock or a file."""
    leaves = _leaves(tree, owns, "", set())
    return {place: leaf for place, leaf in leaves if not owns(leaf) and (leaf is None or isinstance(leaf, _DATA))}


def reader(place: str) -> Callable[[Any], Any]:
    """What reads a place of a tree. It raises LookupError, AttributeError or TypeError where there is none. Raises
    ValueError for a place that has a key other than a number or a text."""
    steps: list[Callable[[Any], Any]] = []
    node = ast.parse(f"_{place}", mode="eval").body
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            steps.append(attrgetter(node.attr))
        else:
            assert isinstance(node, ast.Subscript)
            steps.append(itemgetter(ast.literal_eval(node.slice)))
        node = node.value
    return lambda tree: reduce(lambda found, step: step(found), reversed(steps), tree)


def _leaves(tree: Any, owns: Callable[[Any], bool], place: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if owns(tree) or tree is None or isinstance(tree, _DATA):
        yield place, tree
        return
    if id(tree) in seen:
        return
    seen.add(id(tree))
    for name, child in _children(tree):
        yield from _leaves(child, owns, f"{place}{name}", seen)


def _children(tree: Any) -> list[tuple[str, Any]]:
    if isinstance(tree, dict):
        return [(f"[{key!r}]", value) for key, value in tree.items()]
    if isinstance(tree, (list, tuple)):
        return [(f"[{i}]", value) for i, value in enumerate(tree)]
    return [(f".{name}", getattr(tree, name)) for name in _attributes(tree)]


def _attributes(tree: Any) -> list[str]:
    """Names of the attributes that an object's own caches lie in; none of a network, whose arrays are weights."""
    if tree is None or isinstance(tree, (type, *_DATA)) or callable(tree):
        return []
    names = [*getattr(tree, "__dict__", ())]
    for cls in type(tree).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [n for n in ((slots,) if isinstance(slots, str) else slots) if not n.startswith("__")]
    return [name for name in dict.fromkeys(names) if hasattr(tree, name)]


def with_arrays(
    tree: Any, owns: Callable[[Any], bool], arrays: list[Array], numbers: Mapping[str, Any] | None = None
) -> Any:
    """A copy of `tree` with other arrays in the places of its own, in the order of `arrays_in`, and other `numbers`, by
    their places. What holds neither is not copied.
    """
    left = iter(arrays)
    made = _with(tree, owns, left, {}, numbers or {}, "")
    assert next(left, None) is None
    return made


HOLE = object()
"""Stands for an array in a container that was emptied."""


def emptied(tree: Any, owns: Callable[[Any], bool]) -> Any:
    """A copy of `tree` that holds on to none of its arrays; `filled` puts others in their places."""
    return with_arrays(tree, owns, [HOLE for _ in arrays_in(tree, owns)])


def filled(tree: Any, arrays: list[Array], numbers: Mapping[str, Any] | None = None) -> Any:
    """A copy of what `emptied` returned, with these arrays, in the order of `arrays_in`, and `numbers`."""
    return with_arrays(tree, lambda child: child is HOLE, arrays, numbers)


def _with(
    tree: Any,
    owns: Callable[[Any], bool],
    left: Iterator[Array],
    made: dict[int, Any],
    numbers: Mapping[str, Any],
    place: str,
) -> Any:
    if owns(tree):
        return next(left)
    if place in numbers:
        return numbers[place]
    if id(tree) in made:
        return made[id(tree)]
    if not (children := _children(tree)):
        return tree
    if not isinstance(tree, tuple):
        try:
            made[id(tree)] = copy.copy(tree)  # first: what is inside may lead back to it
        except Exception:
            if arrays_in(tree, owns):
                raise
            return tree  # a file, say, which there is once
    new = [_with(child, owns, left, made, numbers, f"{place}{name}") for name, child in children]
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
