"""What the promises are tried on, and how a backend's answer is compared with NumPy's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

DTYPES = ("int32", "int64", "float32", "bool")
SMALL = ((3,), (2, 3), (2, 3, 4))
EMPTY = ((0,), (0, 3), (2, 0), (2, 0, 2), (1, 2, 1, 2, 0, 1, 2, 1, 2))
LARGE = ((2, 1, 3, 2), (1, 2, 1, 3, 2), (2, 1, 2, 1, 3, 1), (1, 2, 1, 2, 1, 2, 2), (2, 1, 1, 2, 1, 2, 1, 2),
         (1, 2, 1, 1, 2, 1, 2, 1, 2))  # fmt: skip


class WrongAnswer(AssertionError):
    """cause: what is wrong, whatever the arguments were; the report has one block for it."""

    def __init__(self, op: str, message: str) -> None:
        super().__init__(message)
        self.cause = f"wrong answer of {op}"


def sample(shape: tuple[int, ...], dtype: str = "int32", first: int = 1) -> np.ndarray:
    """1, 2, 3, ... in row-major order (the X of the crate's tests); bool: true where not divisible by 3."""
    x = np.arange(first, first + int(np.prod(shape, dtype=int))).reshape(shape)
    return np.asarray(x % 3 > 0 if dtype == "bool" else x, dtype)


def samples(dtype: str | None = None) -> Iterator[np.ndarray]:
    """Arrays of every rank from 0 to 9, with and without elements; of `dtype`, or of each in turn."""
    for each in [dtype] if dtype else DTYPES:
        yield from (sample(shape, each) for shape in ((), (2, 3), (2, 0)))
    for i, shape in enumerate((*SMALL, *EMPTY, *LARGE)):
        yield sample(shape, dtype or DTYPES[i % len(DTYPES)])


def along_dims(dtype: str | None = None) -> Iterator[tuple[np.ndarray, int]]:
    """Arrays of rank 1 to 9, and dimensions of them: all of small ones, one of large ones."""
    for x in samples(dtype):
        yield from ((x, dim) for dim in range(x.ndim) if x.ndim <= 3 or dim == x.ndim // 2)


def call(backend: Any, op: str, *args: Any) -> Any:
    """backend.op(*args), where host arrays (also in a list) are put on the device first."""

    def put(a: Any) -> Any:
        if isinstance(a, list):
            return [put(each) for each in a]
        return backend.put(a) if isinstance(a, np.ndarray) else a

    return getattr(backend, op)(*map(put, args))


def expect(backend: Any, want: Any, op: str, *args: Any, atol: float = 0.0) -> None:
    """The call gives `want`: an array, a list of arrays, or anything else that compares by ==.

    Values are equal (or within atol), shapes are, and dtypes are those the backend keeps such an array in:
    a library may lack int64, but then everywhere.
    """
    got = call(backend, op, *args)
    if isinstance(want, list) and any(isinstance(w, np.ndarray) for w in want):
        wrong = f"{len(got)} arrays" if len(got) != len(want) else None
        pairs = list(zip(got, want, strict=False))
    else:
        pairs = [(got, want)] if isinstance(want, np.ndarray) else []
        wrong = f"{got!r}" if not pairs and (type(got) is not type(want) or got != want) else None
    for g, w in pairs:
        wrong = wrong or difference(backend, np.asarray(backend.get(g)), w, atol)
    if wrong:
        raise WrongAnswer(op, f"{repro(op, *args)} gave {wrong}; NumPy says {short(want)}")


def difference(backend: Any, got: np.ndarray, want: np.ndarray, atol: float = 0.0) -> str | None:
    """What is wrong with `got`, or None."""
    if got.shape != want.shape:
        return f"shape {got.shape} for {want.shape}"
    kept = backend.get(backend.put(want)).dtype
    if got.dtype != kept:
        return f"dtype {got.dtype} for {kept}"
    equal = np.array_equal(got, want) if not atol else np.allclose(got, want, rtol=atol, atol=atol)
    return None if equal else short(got)


def repro(op: str, *args: Any) -> str:
    """The call as a line to paste, where `put = backend.put`."""
    return f"backend.{op}({', '.join(map(short, args))})"


def short(a: Any) -> str:
    if isinstance(a, list):
        return f"[{', '.join(map(short, a))}]"
    if not isinstance(a, np.ndarray):
        return repr(a)
    values = np.array2string(a.ravel(), separator=",", threshold=24).replace("\n", "").replace(" ", "")
    return f"put(np.array({values},'{a.dtype}').reshape{a.shape})"
