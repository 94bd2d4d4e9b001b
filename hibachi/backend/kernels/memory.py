"""Memory for what a step reads, weights and caches, in large pages, which the processor looks up far less often."""

from __future__ import annotations

import math
import threading
from typing import Any, TypeAlias

import numpy as np

SLAB = 64 << 20  # bytes; NumPy asks the kernel for huge pages for what is this large
ALIGNED = 64  # bytes: a cache line, and what JAX wants in order not to copy
SMALL = 1 << 17  # bytes; below, memory of the C library costs less than to look after it
HostArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def zeros(shape: tuple[int, ...], dtype: Any) -> HostArray:
    """An array of zeros that begins on a cache line. Pages that are never written take no memory."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    slab = np.zeros(size + ALIGNED, np.uint8)
    at = -slab.ctypes.data % ALIGNED
    found: HostArray = slab[at : at + size].view(dtype).reshape(shape)
    return found


class Slabs:
    """Uninitialised arrays, one after another in large pieces of memory. Pages that are never written take no memory.

    A slab is freed with the last of its arrays. Measured: two threads read 35 GB/s so, and 26 in pages of 4 KiB.
    """

    def __init__(self) -> None:
        self._slab = np.empty(0, np.uint8)
        self._at = 0
        self._lock = threading.Lock()

    def empty(self, count: int, dtype: Any) -> HostArray:
        """An array [count] that begins on a cache line."""
        size = count * np.dtype(dtype).itemsize
        with self._lock:
            if self._at + size > len(self._slab):
                self._slab = np.empty(max(SLAB, size + ALIGNED), np.uint8)
                self._at = -self._slab.ctypes.data % ALIGNED
            piece = self._slab[self._at : self._at + size]
            self._at += size + -size % ALIGNED
        return piece.view(dtype)


class Reused:
    """Uninitialised arrays, of which one gets the memory of another that nobody has any more, nor a part of it.

    For what a step needs for a moment. New memory of the system has to be cleared first: measured for 39 MB, that takes
    5 ms, or 30 where its pages are small, and to write to them takes 2.
    """

    def __init__(self) -> None:
        self._free: list[HostArray] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> HostArray:
        """An array that begins on a cache line."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size < SMALL:
            return _cut(np.empty(size + ALIGNED, np.uint8), shape, dtype)
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(0, np.uint8)
        if len(memory) < size + ALIGNED:
            memory = np.empty(size + ALIGNED, np.uint8)
        return _cut(np.asarray(_Owner(memory, self._free)), shape, dtype)


def _cut(memory: HostArray, shape: tuple[int, ...], dtype: Any) -> HostArray:
    """An array in a piece of memory, from the first cache line on."""
    at, size = -memory.ctypes.data % ALIGNED, math.prod(shape) * np.dtype(dtype).itemsize
    found: HostArray = memory[at : at + size].view(dtype).reshape(shape)
    return found


class _Owner:
    """What arrays in a piece of memory refer to, however they were cut out of each other. free: gets it at the end."""

    def __init__(self, memory: HostArray, free: list[HostArray]) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._memory, self._free = memory, free

    def __del__(self) -> None:
        if not self._free:  # one is enough, as steps follow each other
            self._free.append(self._memory)
