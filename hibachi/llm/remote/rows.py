"""Tokens that are arrays, on their way through the pipe: those of a step in one piece of memory, without pickling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import numpy as np

from hibachi.backend.array_backend import HostArray

Rows: TypeAlias = "tuple[list[int], HostArray]"
"""The numbers of n streams, and their tokens [n, *tok]."""
Heading: TypeAlias = "tuple[list[int], tuple[int, ...], Any]"
"""What is said of them before: the numbers, and the array's shape and dtype."""


class Gathered:
    """What the streams get in a step, where that is rows of native batches: each batch comes to the host once."""

    def __init__(self, to_host: Callable[[Any], HostArray], failed: Callable[[int, Exception], object]) -> None:
        """failed: told of each stream whose batch cannot come to the host."""
        self._to_host, self._failed = to_host, failed
        self._batches: dict[int, tuple[Any, list[int], list[int]]] = {}

    def add(self, number: int, batch: Any, place: int) -> None:
        """A row of a batch is for the stream of this number."""
        if (found := self._batches.get(id(batch))) is None:
            found = self._batches[id(batch)] = batch, [], []
        found[1].append(number)
        found[2].append(place)

    def taken(self) -> list[Rows]:
        """All that was added since."""
        batches, self._batches = self._batches, {}
        rows: list[Rows] = []
        for batch, numbers, places in batches.values():
            try:
                host = self._to_host(batch)
                whole = places == list(range(len(host)))
                rows.append((numbers, np.ascontiguousarray(host if whole else host[places])))
            except Exception as e:
                for number in dict.fromkeys(numbers):
                    self._failed(number, e)
        return rows


def headings(rows: Sequence[Rows]) -> list[Heading]:
    return [(numbers, array.shape, array.dtype) for numbers, array in rows]


def send(pipe: Connection, rows: Sequence[Rows]) -> None:
    """After the message with their headings."""
    for _, array in rows:
        if array.nbytes:
            pipe.send_bytes(array.reshape(-1).view(np.uint8).data)


def receive(pipe: Connection, told: Sequence[Heading]) -> list[Rows]:
    """What `send` has sent."""
    found: list[Rows] = []
    for numbers, shape, dtype in told:
        array = np.empty(shape, dtype)
        if array.nbytes:
            pipe.recv_bytes_into(array.reshape(-1).view(np.uint8).data)
        found.append((numbers, array))
    return found


def each(rows: Sequence[Rows]) -> Iterator[tuple[int, HostArray]]:
    """(number, token) for each, a copy: a token that is kept keeps no others. Those of a stream are in their order."""
    for numbers, array in rows:
        for i, number in enumerate(numbers):
            yield number, array[i, ...].copy()
