"""Masks of tokens in milliseconds, medians: 64 rows of logits, of which few, most or half of the tokens may come.

From logits to rows in which all other tokens have -inf, and whether the rows were finite. Before: a copy of the rows,
masks as bool [rows, vocabulary], and `where`. After: packed bits and `kept_rows`. Mask: `keep_bits` alone, on rows that
are a copy already. What to expect at 151,936 tokens: bits are nothing (1.2 MB); float32 logits are 39 MB, which take
2 ms to read, as much to write, and 5 to 30 ms to get new memory for.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from hibachi import ArrayBackend, NumpyBackend, load_backend
from hibachi.backend.array_backend import Array, HostArray

VOCABULARIES = 49_152, 128_256, 151_936
FEW = 100  # tokens that may come, or that may not


def masks(rows: int, vocab: int) -> dict[str, HostArray]:
    """bool [rows, vocab] by name: tokens here and there, all but these, and runs of 64 tokens."""
    few = np.zeros((rows, vocab), bool)
    few[:, np.random.default_rng(0).integers(0, vocab, FEW)] = True
    runs = np.broadcast_to(np.arange(vocab) // 64 % 2 == 0, (rows, vocab))
    return {"few": few, "most": ~few, "half": runs.copy()}


def packed(mask: HostArray) -> HostArray:
    wide = np.pad(mask, ((0, 0), (0, -mask.shape[1] % 32)))
    return np.packbits(wide, axis=1, bitorder="little").view(np.uint32)


def _copied(backend: ArrayBackend, logits: Array, at: Array) -> tuple[Array, Array]:
    x = backend.float32(backend.take(logits, at))
    return x, backend.xp.isfinite(backend.xp.max(x, axis=-1))


def _where(backend: ArrayBackend, x: Array, kept: Array) -> Array:
    return backend.xp.where(kept, x, backend.xp.full_like(x, -math.inf))


def before(backend: ArrayBackend, logits: Array, at: HostArray, of_row: HostArray) -> tuple[Array, Array]:
    x, finite = backend.program(_copied)(logits, backend.put(at))
    kept = np.ones(of_row.shape, bool)
    for i, row in enumerate(of_row):
        kept[i] = row
    return backend.program(_where)(x, backend.put(kept)), finite


def after(backend: ArrayBackend, logits: Array, at: HostArray, of_row: HostArray) -> tuple[Array, Array]:
    bits = np.full(of_row.shape, ~np.uint32(0))
    for i, row in enumerate(of_row):
        bits[i] = row
    return backend.kept_rows(logits, at, bits)


def in_turns(backend: ArrayBackend, calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Medians of calls that take turns, so that what else the machine does slows them alike."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 1):  # the first one compiles
        for call, took in zip(calls, times, strict=True):
            began = perf_counter()
            with backend.guard():
                found = call()
                backend.get(found[0, :1])  # waits
            if turn:
                took.append(perf_counter() - began)
            del found
    return [median(took) * 1e3 for took in times]


def measure(backend: ArrayBackend, logits: Array, mask: HostArray, repeats: int) -> list[float]:
    """Before, after, and the mask alone."""
    at, bits = np.arange(len(mask), dtype=np.int32), packed(mask)
    with backend.guard():
        rows = backend.float32(backend.copy(logits))

    def alone() -> Array:
        nonlocal rows
        rows = backend.keep_bits(rows, bits)
        return rows

    def first(how: Callable[..., tuple[Array, Array]], of_row: HostArray) -> Callable[[], Array]:
        return lambda: how(backend, logits, at, of_row)[0]

    return in_turns(backend, [first(before, mask), first(after, bits), alone], repeats)


def backends(names: list[str]) -> dict[str, ArrayBackend]:
    """With hibachi's kernels and without, those of the libraries that are here."""
    found: dict[str, ArrayBackend] = {}
    for name in names:
        try:
            first = load_backend(name)
        except Exception as e:  # of whatever kind: a library that is not here
            print(f"{name}: {e}")
            continue
        found[f"{name}, kernels" if first.native else name] = first
        if first.plain() is not first:
            found[name] = first.plain()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", nargs="*", default=["numpy", "torch", "jax", "mlx"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, nargs="*", default=VOCABULARIES)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    print(f"| {args.rows} rows | dtype | vocabulary | may come | before | after | mask |")
    print("|---|---|---|---|---|---|---|")
    rng = np.random.default_rng(0)
    for label, backend in backends(args.backend).items():
        for dtype in ("float32", "bfloat16"):
            if dtype == "bfloat16" and isinstance(backend, NumpyBackend):
                continue  # there are no such numbers
            for vocab in args.vocab:
                logits = backend.put(rng.normal(size=(args.rows, vocab)).astype(np.float32), dtype)
                for name, mask in masks(args.rows, vocab).items():
                    took = " | ".join(f"{ms:.2f}" for ms in measure(backend, logits, mask, args.repeats))
                    print(f"| {label} | {dtype} | {vocab:,} | {name} | {took} |", flush=True)
