"""Arrays of a library on the CPU, as kernels are told of them: where they lie, and how far apart their rows are."""

from __future__ import annotations

from ctypes import addressof, c_char
from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.kernels.memory import Slabs

LANES_OF_PANEL = 48  # as in linear.h


def address_of(t: Array) -> int:
    """Where an array of NumPy lies."""
    try:
        return addressof(c_char.from_buffer(t))  # in a quarter of the time that NumPy's own answer takes
    except (TypeError, ValueError):  # an array that is read-only, empty or not row by row
        at: int = t.__array_interface__["data"][0]
        return at


class HostArrays(ArrayBackend):
    """What a library's class says of its arrays, and what follows from it."""

    codes: dict[Any, int]
    """Of the dtypes that kernels compute, as in operations.cpp."""
    _run: Any
    """The functions of the library of kernels."""

    def address(self, t: Array) -> int:
        """Where an array lies in the host's memory."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new array, row by row, with anything in it. dtype: of this library."""
        raise NotImplementedError

    def from_host(self, t: HostArray, dtype: Any) -> Array:
        """The same memory as an array of this library; of a host array of `BITS`."""
        raise NotImplementedError

    def strides(self, t: Array) -> tuple[int, ...]:
        """In elements."""
        raise NotImplementedError

    def rows(self, x: Array) -> tuple[Array, int]:
        """x [..., dim] as rows that lie equally far apart: an array that holds them and how many elements that is."""
        if x.ndim == 2:
            apart, one = self.strides(x)
            if one == 1 and apart >= x.shape[1]:
                return x, apart
        return self.row_major(x), x.shape[-1] if x.ndim else 1

    def index(self, t: Array) -> Array:
        """As int32, row by row."""
        return self.row_major(t if t.dtype == self.xp.int32 else self.xp.astype(t, self.xp.int32))

    def _pointer(self, t: Array | None) -> int | None:
        return None if t is None else self.address(t)

    def _over_time(self, x: Array) -> tuple[Array, int]:
        """x [rows, tokens, dim] with all tokens equally far apart, and how many elements that is."""
        row, apart, one = self.strides(x)
        if one == 1 and apart >= x.shape[2] and (row == apart * x.shape[1] or len(x) == 1):
            return x, apart
        return self.row_major(x), x.shape[2]


class PackedWeight:
    """A matrix [out, in] in panels of a kind, a name of `INTO` in packing.py; those of int8 have a scale for each row.

    dtype: of what it is multiplied with. pointers: of the panels and the scales, None if there are none.
    """

    __slots__ = ("data", "dtype", "kind", "pointers", "scales", "shape")

    def __init__(
        self, shape: tuple[int, int], dtype: Any, kind: str, data: HostArray, scales: HostArray | None = None
    ) -> None:
        self.shape, self.dtype, self.kind, self.data, self.scales = shape, dtype, kind, data, scales
        self.pointers = data.ctypes.data, None if scales is None else scales.ctypes.data

    def columns(self, first: int, end: int, slabs: Slabs) -> PackedWeight:
        """A matrix of some columns. Raises ConfigError where these begin or end within a group of rounded rows."""
        n, k = self.shape
        panels = -(-n // LANES_OF_PANEL)
        lanes = self.data.view(np.uint32).reshape(panels, -1, LANES_OF_PANEL)
        at, to = first * lanes.shape[1] // k, end * lanes.shape[1] // k
        held = slabs.empty(panels * (to - at) * LANES_OF_PANEL * 4, np.uint8).view(self.data.dtype)
        held.view(np.uint32).reshape(panels, -1, LANES_OF_PANEL)[...] = lanes[:, at:to]
        return PackedWeight((n, end - first), self.dtype, self.kind, held, self.scales)
