"""Matrices become the panels of hibachi's kernels, from arrays and from files that nobody has read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from hibachi.backend.kernels.memory import Slabs
from hibachi.backend.stored import HostArray, Stored

Rows: TypeAlias = "HostArray | Stored"
"""A matrix [n, k]."""

FROM = {"F32": 0, "BF16": 1, "F16": 2, "Q4_0": 3, "Q8_0": 4}  # as in operations.cpp
INTO = {"float32": 0, "bfloat16": 1, "int8": 2, "q4_0": 3, "q8_0": 4}  # as in blocks.h
QUANTIZED = {"q4_0", "q8_0"}  # of these, what a file may have already
BITS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    **dict.fromkeys(("int8", *QUANTIZED), np.dtype(np.uint8)),
}


def joined(parts: Sequence[Rows]) -> HostArray:
    """One matrix of those that lie in it one below the other, read where they are in files."""
    read = [part.read() if isinstance(part, Stored) else part for part in parts]
    return read[0] if len(read) == 1 else np.concatenate(read)


def as_stored(parts: Sequence[Rows]) -> str | None:
    """The name of `INTO` for parts that are multiplied as they lie in a file, in blocks; None if they are not."""
    [kind, *others] = {part.dtype.lower() if isinstance(part, Stored) else "" for part in parts}
    return kind if kind in QUANTIZED and not others else None


def quantization_of(backend: Any, params: Any) -> str:
    """What the matrices in a tree of weights are kept in: as `backend.quantization`, and "q4_0", "q8_0" or
    "q4_0+q8_0" if some stayed as they lie in a file.
    """

    def kinds(tree: Any) -> set[str]:
        if isinstance(tree, (dict, list, tuple)):
            return set().union(*map(kinds, tree.values() if isinstance(tree, dict) else tree))
        return {getattr(tree, "kind", "")}

    if backend.quantization != "none":
        return str(backend.quantization)
    return "+".join(sorted(kinds(params) & QUANTIZED)) or "none"


def pack(parts: Sequence[Rows], into: str, run: Any, slabs: Slabs) -> tuple[HostArray, HostArray | None]:
    """The panels of a matrix [n, k], as of `BITS`, and of int8 the scales of its rows, float32.

    parts: what lies in it one below the other, of any numbers; those in files are mapped, a few megabytes at a time.
    into: a name of `INTO`. run: the functions of the kernels. Raises ValueError for parts of several widths,
    InvalidModelFiles for a file that has changed.
    """
    n, k, panel = sum(part.shape[0] for part in parts), parts[0].shape[1], run.panel()
    if any(part.shape[1] != k for part in parts):
        raise ValueError(f"expected parts of {k} columns; got {', '.join(str(p.shape) for p in parts)}.")
    data = slabs.empty(run.packed(INTO[into], n, k), np.uint8).view(BITS[into])
    scales = slabs.empty(-(-n // panel) * panel, np.float32) if into == "int8" else None
    done = 0
    for part in parts:
        order = part.order if isinstance(part, Stored) else None
        for kind, rows in _pieces(part, panel):
            places = (None if t is None else t.ctypes.data for t in (rows, order, data, scales))
            run.pack(FROM[kind], INTO[into], *places, done, len(rows), n, k)
            done += len(rows)
    return data, scales


def _pieces(part: Rows, panel: int) -> Iterator[tuple[str, HostArray]]:
    """Some of the rows at a time, with a name of `FROM`."""
    if isinstance(part, Stored):
        for rows in part.rows(panel):
            yield part.dtype, rows
        return
    whole = np.asarray(part)
    if whole.dtype.name == "bfloat16" or whole.dtype.names == ("bfloat16",):  # of ml_dtypes, and NumpyBackend's bits
        yield "BF16", np.ascontiguousarray(whole)
    elif whole.dtype == np.float16:
        yield "F16", np.ascontiguousarray(whole)
    else:
        yield "F32", np.ascontiguousarray(whole, dtype=np.float32)
