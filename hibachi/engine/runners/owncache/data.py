"""What pasts hold besides arrays, where it must follow when rows join: numbers that count positions or rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hibachi.backend.array_backend import ArrayBackend
from hibachi.backend.nested import arrays_in, data_in, reader
from hibachi.errors import ConfigError, shown


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a past that counts its positions, those of padding included, or its rows."""

    place: str
    rows: bool
    more: int  # than there are
    read: Callable[[Any], Any]  # of a past; raises where there is none

    def of(self, width: int, size: int) -> int:
        return (size if self.rows else width) + self.more


def data_in_past(tree: Any, backend: ArrayBackend, only: str | None, arrays: Container[str] = ()) -> dict[str, Any]:
    """What is data in a past; arrays: places of those that have neither rows nor positions."""
    found = {place: backend.get(array) for place, array in arrays_in(tree, backend.owns) if place in arrays}
    found |= data_in(tree, backend.owns)
    return {place: value for place, value in found.items() if only is None or only in place}


def data_of(
    trees: Sequence[Any],
    backend: ArrayBackend,
    only: str | None,
    name: str,
    arrays: Container[str],
    tried: Sequence[tuple[int, int]],
) -> tuple[list[Number], dict[str, Any]]:
    """What is no array in the pasts of calls of `tried` rows and tokens: numbers that count, and what was the same in
    all, by its place. Raises ConfigError for anything else: it would stay one row's where rows join."""
    base, rows, tokens = (data_in_past(tree, backend, only, arrays) for tree in trees)
    a: Any
    b: Any
    c: Any  # for mypy
    numbers, constant = list[Number](), dict[str, Any]()
    for place in sorted(base.keys() | rows.keys() | tokens.keys()):
        a, b, c = values = [found.get(place) for found in (base, rows, tokens)]
        if same(a, b) and same(a, c):
            constant[place] = a
        elif {type(value) for value in values} == {int} and sorted((b - a, c - a)) == [0, 1]:
            numbers.append(Number(place, b > a, a - tried[0][0 if b > a else 1], _reader(place, name)))
        elif not same(a, b):
            raise unknown(name, place, a, b, f"with {tried[1][0]} rows and not {tried[0][0]}")
        else:
            raise unknown(name, place, a, c, f"with {tried[2][1]} tokens and not {tried[0][1]}")
    return numbers, constant


def _reader(place: str, name: str) -> Callable[[Any], Any]:
    try:
        return reader(place)
    except (ValueError, SyntaxError) as e:
        raise ConfigError(
            f"{name}: the past's {place} counts, so it must be found again: expected keys that are numbers or texts. "
            f"Name it by a text."
        ) from e


def same(a: Any, b: Any) -> bool:
    """Whether data is equal; NaN is equal to NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if isinstance(a, deque):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or a != a != b)


def unknown(name: str, place: str, a: Any, b: Any, when: str) -> ConfigError:
    return ConfigError(
        f"{name}: the past's {place} is {shown(a)}, and {shown(b)} {when}: expected what a past has besides arrays to "
        f"be the same in every call, or to count its positions or rows. Where rows join, it would stay that of one of "
        f"them. Keep it in an array with an axis of rows, or take a cache without it: with transformers, begin with "
        f"`past or transformers.DynamicCache()`."
    )


def windows_beside(array: str, constant: Mapping[str, Any]) -> tuple[int, ...]:
    """How many of its newest positions the array at a place may hold at most: where a number beside it is called a
    window, that many or one fewer, as a new one comes with each call. So in transformers."""
    beside = array.rpartition(".")[0]
    named = [v for place, v in constant.items() if place.rpartition(".")[0] == beside and "window" in place.lower()]
    return tuple(n for v in named if type(v) is int and v > 1 for n in (v - 1, v))
