"""Large rows in parts: what would be slow over a whole vocabulary is done on few parts of it.

Functions of x [n, V] and of nothing else, so that they may be compiled.
"""

from __future__ import annotations

from collections.abc import Callable

from hibachi.backend.array_backend import Array, ArrayBackend

_CHUNKS = 64
_SMALL = 4096  # columns up to which it is not worth it


def pick(backend: ArrayBackend, x: Array, at: Array) -> Array:
    """x [n, m] at the places `at` [n, k] of each row: [n, k]."""
    starts = _range(backend, x.shape[0])[:, None] * x.shape[1]
    return backend.take(backend.xp.reshape(x, (-1,)), at + starts)


def top_of_row(backend: ArrayBackend, x: Array, k: int) -> tuple[Array, Array]:
    """`backend.top`, with less work: the k largest stand in the k blocks of columns with the largest maxima."""
    xp, (n, size) = backend.xp, x.shape
    width = 32
    blocks = size // width
    if blocks < 4 * k:
        return backend.top(x, k)
    head = blocks * width
    # Block b has the columns b, b + blocks, ...: maxima along the rows of a matrix are the fastest everywhere.
    maxima = xp.max(xp.reshape(x[:, :head], (n, width, blocks)), axis=1)
    chosen = xp.astype(backend.top(maxima, k)[1], xp.int32, copy=False)
    columns = chosen[:, None, :] + _range(backend, width)[None, :, None] * blocks
    columns = xp.reshape(columns, (n, width * k))
    if head < size:
        tail = xp.broadcast_to(head + _range(backend, size - head)[None, :], (n, size - head))
        columns = xp.concat([columns, tail], axis=1)
    values, at = backend.top(pick(backend, x, columns), k)
    return values, pick(backend, columns, at)


def argmax(backend: ArrayBackend, x: Array) -> Array:
    """Where the largest of each row is, the first one among equals: int32 [n]."""
    xp = backend.xp
    if x.shape[1] < _SMALL:
        return xp.astype(xp.argmax(x, axis=-1), xp.int32)
    chunk = xp.argmax(_each_chunk(backend, x, xp.max), axis=-1)
    columns, _ = _columns(backend, x, chunk)
    at = xp.argmax(pick(backend, x, columns), axis=-1)  # a column that occurs twice is the last
    return xp.astype(pick(backend, columns, at[:, None])[:, 0], xp.int32)


def total(backend: ArrayBackend, x: Array) -> Array:
    """Sums of the rows: [n]. In chunks, because libraries may sum a matrix of one row in another order."""
    if x.shape[1] < _SMALL:
        return backend.xp.sum(x, axis=-1)
    return backend.xp.sum(_each_chunk(backend, x, backend.xp.sum), axis=-1)


def invert(backend: ArrayBackend, weights: Array, u: Array) -> Array:
    """Where the sums of weights [n, V] along each row first exceed the share u [n] of the whole: int [n].

    weights >= 0, some of each row > 0; u in (0, 1). The place has a weight > 0, whatever is rounded.
    """
    xp = backend.xp
    if weights.shape[1] < _SMALL:
        sums = _sums(backend, weights)
        return _first_above(backend, sums, u * xp.max(sums, axis=-1))
    masses = _each_chunk(backend, weights, xp.sum)
    sums = _sums(backend, masses)
    share = u * xp.max(sums, axis=-1)
    chunk = _first_above(backend, sums, share)
    before = pick(backend, xp.cumulative_sum(masses, axis=-1) - masses, chunk[:, None])[:, 0]
    columns, real = _columns(backend, weights, chunk)
    inner = pick(backend, weights, columns)
    inner = _sums(backend, xp.where(real, inner, xp.zeros_like(inner)))
    at = _first_above(backend, inner, share - before)
    return pick(backend, columns, at[:, None])[:, 0]


def _sums(backend: ArrayBackend, weights: Array) -> Array:
    """Sums along each row, but 0 at places without a weight: parallel sums may fall by a rounding."""
    sums = backend.xp.cumulative_sum(weights, axis=-1)
    return backend.xp.where(weights > 0, sums, backend.xp.zeros_like(sums))


def _first_above(backend: ArrayBackend, sums: Array, limit: Array) -> Array:
    """Where `_sums` first exceed `limit` [n]; if rounding has it that they never do, where they reach their largest."""
    xp = backend.xp
    found = xp.logical_or(sums > limit[:, None], sums == xp.max(sums, axis=-1, keepdims=True))
    return xp.argmax(xp.astype(xp.logical_and(found, sums > 0), xp.int8), axis=-1)


def _each_chunk(backend: ArrayBackend, x: Array, reduce: Callable[..., Array]) -> Array:
    """`reduce` over each of the chunks of a row, and over what is left at the end: [n, chunks]."""
    xp, (n, size) = backend.xp, x.shape
    head = size // _CHUNKS * _CHUNKS
    out = reduce(xp.reshape(x[:, :head], (n, _CHUNKS, -1)), axis=-1)
    if head == size:
        return out
    return xp.concat([out, reduce(x[:, head:], axis=-1, keepdims=True)], axis=1)


def _columns(backend: ArrayBackend, x: Array, chunk: Array) -> tuple[Array, Array]:
    """The columns of one chunk a row: [n, width]; the last one is short: which of them are real (the others repeat)."""
    width, last = x.shape[1] // _CHUNKS, x.shape[1] - 1
    columns = chunk[:, None] * width + _range(backend, width)[None, :]
    return backend.xp.clip(columns, max=last), columns <= last


def _range(backend: ArrayBackend, n: int) -> Array:
    return backend.xp.arange(n, dtype=backend.xp.int32, device=backend.device)
