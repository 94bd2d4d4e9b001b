"""A tensor as it lies in a file: its numbers are mapped when they are wanted, some at a time, and not kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from hibachi.errors import InvalidModelFiles

HostArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

WINDOW = 1 << 24
"""How many bytes are mapped at a time, so that the pages of a file do not pile up in memory."""
PLAIN = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""As what NumPy sees numbers, by the words of safetensors and GGUF; it has no bfloat16, and is shown the bits."""
BLOCKS = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q8_0": (32, 34)}
"""Numbers of a block and its bytes, of what kernels take as it lies in a file: see `hibachi.backend.packing`."""
AGAIN = "Copy or download the file again"


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor [..., n, k] in a file, row by row, that nobody has read.

    dtype: in the words of its format, such as "BF16". offset: bytes before it. order: which of the rows of a matrix is
    row 0, 1 and so on, int32 [n]; None means that they lie in their order.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    order: HostArray | None = None

    @property
    def packs(self) -> bool:
        """Whether kernels take its rows as they lie in the file."""
        return self.dtype in BLOCKS and len(self.shape) > 1

    @property
    def row_bytes(self) -> int:
        numbers, size = BLOCKS.get(self.dtype, (1, 8))  # F64, which kernels do not take; no other is read
        return self.shape[-1] // numbers * size

    def __iter__(self) -> Iterator[Self]:
        """What lies along the first dimension, such as the matrices of experts."""
        n, *one = self.shape
        size = math.prod(one[:-1]) * self.row_bytes
        return (replace(self, shape=tuple(one), offset=self.offset + i * size) for i in range(n))

    def read(self, dtype: npt.DTypeLike | None = None) -> HostArray:
        """Its numbers in memory of their own, cast while reading, without a second copy.

        Its own dtype is one of `PLAIN`. dtype: None means as they are stored, and float32 for bfloat16, exactly. Raises
        InvalidModelFiles for a file that is shorter than it was.
        """
        stored = np.dtype(PLAIN[self.dtype])
        usual = np.float32 if self.dtype == "BF16" else stored.newbyteorder("=")
        out = np.empty(self.shape, usual if dtype is None else dtype)
        flat = out.reshape(-1)
        for start, part in windows(self.file, self.offset, stored, flat.size, WINDOW // stored.itemsize):
            into = flat[start : start + len(part)]
            if self.dtype == "BF16":
                widen(part, into)
            else:
                into[...] = part
        return out if self.order is None else out[self.order]

    def rows(self, multiple: int) -> Iterator[HostArray]:
        """The rows of a matrix as they lie in the file, uint8 [some, row_bytes]: mapped a multiple of this number at a
        time, but for the last ones. All at once if they have another order. Raises InvalidModelFiles as `read` does.
        """
        n, size = self.shape[0], self.row_bytes
        few = max(1, WINDOW // (multiple * size)) * multiple if self.order is None else n
        for _, part in windows(self.file, self.offset, np.dtype(np.uint8), n * size, few * size):
            yield part.reshape(-1, size)


def part(w: HostArray | Stored, which: slice) -> Any:
    """Some rows of a matrix; of one in a file they are not read."""
    if not isinstance(w, Stored):
        return w[which]
    start, stop, _ = which.indices(w.shape[0])
    if w.order is not None and not np.array_equal(np.sort(w.order[start:stop]), np.arange(start, stop)):
        return w.read()[which]
    order = None if w.order is None else (w.order[start:stop] - np.int32(start)).astype(np.int32)
    return replace(w, shape=(stop - start, *w.shape[1:]), offset=w.offset + start * w.row_bytes, order=order)


def columns(w: HostArray | Stored, first: int, end: int) -> HostArray:
    """Some columns of a matrix. Of one in a file, of numbers and not of blocks, only their pages are read; bfloat16
    comes as its bits, in a dtype that `pack` knows.
    """
    if not isinstance(w, Stored):
        return w[:, first:end]
    stored = np.dtype([("bfloat16", "<u2")]) if w.dtype == "BF16" else np.dtype(PLAIN[w.dtype])
    at, to = first * stored.itemsize, end * stored.itemsize
    found: HostArray = np.concatenate([np.ascontiguousarray(rows[:, at:to]) for rows in w.rows(1)]).view(stored)
    return found if w.order is None else found[w.order]


def equal(a: Stored, b: Stored) -> bool:
    """Whether two tensors of `PLAIN` dtypes are the same numbers in one shape; a few megabytes are mapped at a time.

    Raises InvalidModelFiles as `Stored.read` does.
    """
    return a.shape == b.shape and all(map(np.array_equal, _numbers(a), _numbers(b)))


def _numbers(t: Stored) -> Iterator[HostArray]:
    """As many at a time for every dtype."""
    for _, part in windows(t.file, t.offset, np.dtype(PLAIN[t.dtype]), math.prod(t.shape), WINDOW // 8):
        if t.dtype == "BF16":
            widen(part, wide := np.empty(part.shape, np.float32))
        yield wide if t.dtype == "BF16" else part


def windows(file: Path, offset: int, stored: np.dtype[Any], count: int, step: int) -> Iterator[tuple[int, HostArray]]:
    """(index, the next numbers) of `count` numbers in a file, of which at most `step` are mapped at a time.

    Raises InvalidModelFiles if the file is no longer that long.
    """
    for start in range(0, count, step):
        few = min(step, count - start)
        try:
            yield start, np.memmap(file, stored, "r", offset + start * stored.itemsize, (few,))
        except (OSError, ValueError) as e:
            raise InvalidModelFiles(f"{file} has changed since it was opened: {e}. {AGAIN}.") from e


def widen(bits: HostArray, into: HostArray) -> None:
    """Write bfloat16 numbers, given by their bits as uint16: each is the upper half of a float32."""
    wide = into if into.dtype == np.float32 else np.empty(into.shape, np.float32)
    whole = wide.view(np.uint32)
    whole[...] = bits
    np.left_shift(whole, 16, out=whole)
    if wide is not into:
        into[...] = wide
