"""The contract between hibachi and an array library: the crate's nine operations over native arrays.

A backend is a stateless object; arrays are the library's own and are never wrapped. Dimension 0 is the batch, 1 the
sequence, the rest belong to the token. Every operation raises `InvalidTensorOperation` for arguments that have no
meaning, before the library is called: libraries accept several of these silently, and differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

BATCH_DIM = 0
SEQ_DIM = 1

T = TypeVar("T")


@runtime_checkable
class Unsqueezable(Protocol[T]):
    """Arrays that can gain an axis."""

    def unsqueeze(self, t: T, dim: int) -> T:
        """Insert an axis of size 1 at `dim`, 0 <= dim <= rank."""
        ...


@runtime_checkable
class Backend(Unsqueezable[T], Protocol[T]):
    """The nine operations that batching needs of an array library: these eight, and `unsqueeze`.

    name: of the backend. Each operation raises InvalidTensorOperation for arguments that have no meaning, before the
    library is called; docs/backends.md says which.
    """

    name: str

    def shape(self, t: T) -> tuple[int, ...]:
        """Sizes, outermost first."""
        ...

    def cat(self, ts: Sequence[T], dim: int) -> T:
        """Join along `dim`; all other sizes, and the dtypes, are equal."""
        ...

    def eq(self, a: T, b: T) -> T:
        """Elementwise equality of two arrays of one shape and dtype; an array of bool."""
        ...

    def vectorize_dim(self, t: T, dim: int) -> list[T]:
        """The slices along `dim`, each without that dimension."""
        ...

    def slice(self, t: T, dim: int, start: int, length: int) -> T:
        """`length` positions of `dim` from `start`; start + length <= size; length may be 0."""
        ...

    def idx_where_all_true(self, t: T, dim: int) -> list[int]:
        """Indices along `dim` of a bool array at which every element is true."""
        ...

    def pop(self, t: T, dim: int, index: int) -> T:
        """The array without position `index` of `dim`."""
        ...

    def repeat(self, t: T, dim: int, times: int) -> T:
        """The array laid `times` times one after another along `dim` (tiled: 1 2 -> 1 2 1 2)."""
        ...
