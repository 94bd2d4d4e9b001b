"""Backends with something wrong. What they keep of their promises is what NumPy's keeps."""

import ctypes
import os
import threading
import time

from hibachi import NumpyBackend

FOR_EVER = 10_000  # seconds


class Faulty(NumpyBackend):
    """Three faults and a hang."""

    def __init__(self, device=None):
        super().__init__(device)
        self._busy = threading.Lock()

    def pop(self, t, dim, index):
        kept = super().pop(t, dim, index)  # refuses what must be refused
        return kept if t.shape[dim] == 1 else super().pop(t, int(dim), (int(index) + 1) % t.shape[dim])

    def idx_where_all_true(self, t, dim):
        super().idx_where_all_true(t, dim)
        return [int(i) for i in t.any(tuple(d for d in range(t.ndim) if d != dim)).nonzero()[0]]

    def write_cache(self, cache, slot, rows):
        return super().write_cache(cache, slot[:-1], rows[:-1])

    def take(self, t, idx):
        with self._busy:
            return super().take(t, idx) if idx.size else self.take(t, idx)


class NoPut(NumpyBackend):
    def put(self, a, dtype=None):
        raise TypeError("expected 2 tensors, got 0x7f12")


class NoPrograms(NumpyBackend):
    def program(self, fn, *given):
        raise RuntimeError("cannot compile this")


class NoAttention(NumpyBackend):
    def attend(self, *args, **special):
        raise IndexError(f"no tile {len(args[0])}")


class SlowCache(NumpyBackend):
    def make_cache(self, *args, **sizes):
        time.sleep(FOR_EVER)


class Holding(NumpyBackend):
    """In a library that does not give Python's lock back, so that no thread of Python can do anything about it."""

    def silu(self, x):
        ctypes.PyDLL(None).sleep(FOR_EVER)


class Crashing(NumpyBackend):
    def silu(self, x):
        ctypes.string_at(0)


class Leaving(NumpyBackend):
    def silu(self, x):
        os._exit(0)


class SlowToClose(NumpyBackend):
    """Its thread outlives the last promise."""

    def __init__(self, device=None):
        super().__init__(device)
        threading.Thread(target=time.sleep, args=(FOR_EVER,)).start()


def never():
    time.sleep(FOR_EVER)
