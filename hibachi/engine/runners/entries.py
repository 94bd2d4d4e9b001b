"""Entries of tiers: the bytes of one block, or of one row's state, in all arrays of a cache one after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.engine.scheduler.step import EntryLoads, EntryStores


class Kind(NamedTuple):
    """An entry's part of one array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def kinds_of(arrays: Sequence[Array], backend: ArrayBackend) -> list[Kind]:
    """Of arrays [n, ...] as `ArrayBackend.bits` returns them."""
    return [Kind(a.shape[1:], a.dtype) for a in backend.fetch(arrays)()]


def bytes_of(kinds: Sequence[Kind]) -> int:
    return sum(kind.size * kind.dtype.itemsize for kind in kinds)


class Entries(NamedTuple):
    """What was read to be kept. names: of the entries. arrays: waits for them, [as many or more, ...] each."""

    names: list[bytes]
    arrays: Callable[[], list[HostArray]]

    def data(self) -> list[bytes]:
        """The bytes of each entry; waits for the device."""
        raw = [np.ascontiguousarray(a).reshape(len(a), -1).view(np.uint8) for a in self.arrays()]
        return [b"".join([memoryview(a[i]) for a in raw]) for i in range(len(self.names))]

    def importance(self) -> list[float]:
        """The mean norm of the keys of each: 0 where they are no floats that NumPy has."""
        keys = [a for a in self.arrays()[::2] if a.dtype.kind == "f"]
        return [
            float(np.mean([np.sqrt(np.mean(np.square(a[i], dtype=np.float64))) for a in keys])) if keys else 0.0
            for i in range(len(self.names))
        ]


class EntrySource(Protocol):
    """What of a runner has entries: its memory, or the prefixes of its own caches."""

    def entry_kinds(self) -> tuple[list[Kind], list[Kind]]:
        """Of a block, and of a recurrent state. Raises UnsupportedOperation."""
        ...

    def outgoing(self, stores: EntryStores) -> tuple[list[Entries], list[Entries]]:
        """What is in these blocks, and in these checkpoints."""
        ...

    def incoming(self, loads: EntryLoads) -> None:
        """Write entries into blocks, and into the states of rows."""
        ...


def arrays_of(entries: Sequence[bytes], kinds: Sequence[Kind], n: int) -> list[HostArray]:
    """Arrays [n, ...] with these entries first, and zeros behind them. Raises ValueError for one of another size."""
    out, at = [], 0
    for kind in kinds:
        whole = np.zeros((n, *kind.shape), kind.dtype)
        for i, data in enumerate(entries):
            whole[i] = np.frombuffer(data, kind.dtype, kind.size, at).reshape(kind.shape)
        at += kind.size * kind.dtype.itemsize
        out.append(whole)
    if any(len(data) != at for data in entries):
        raise ValueError(f"An entry must have {at} bytes; got {sorted({len(data) for data in entries})}.")
    return out
