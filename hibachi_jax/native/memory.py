"""Memory for weights that a step reads from end to end: large pages, which the processor looks up far less often."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

SLAB = 64 << 20  # bytes; NumPy asks the kernel for huge pages for what is this large
ALIGNED = 64  # bytes: a cache line, and what JAX wants in order not to copy


class Slabs:
    """Uninitialised arrays, one after another in large pieces of memory. What nobody writes to takes no memory.

    A slab goes when the last of its arrays has gone.
    """

    def __init__(self) -> None:
        self._slab = np.empty(0, np.uint8)
        self._at = 0
        self._lock = threading.Lock()

    def empty(self, count: int, dtype: Any) -> np.ndarray[Any, np.dtype[Any]]:
        """An array [count] that begins on a cache line."""
        size = count * np.dtype(dtype).itemsize
        with self._lock:
            if self._at + size > len(self._slab):
                self._slab = np.empty(max(SLAB, size + ALIGNED), np.uint8)
                self._at = -self._slab.ctypes.data % ALIGNED
            piece = self._slab[self._at : self._at + size]
            self._at += size + -size % ALIGNED
        return piece.view(dtype)
