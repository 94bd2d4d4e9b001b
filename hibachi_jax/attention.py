"""Attention over a paged cache in loops that turn as often as the sequences are long, in programs of fixed shape.

A cache is [blocks, kv_heads, block_size, dim]: the keys of a head lie together, as products want them. Each turn copies
SPAN positions of a few sequences, so that what it copies stays in the processor's cache until it has been multiplied,
and keeps a running softmax (Milakov & Gimelshein 2018). Single tokens go in groups of rows of about one length; longer
pieces by query tiles, one after another.

Bounds of loops and what is added to them name their dtype: with jax_enable_x64 a number of Python's has 64 bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from hibachi.backend.array_backend import Array
from hibachi.backend.attention_terms import by_distance, terms
from hibachi.backend.layout import StepInputs

SPAN = 64  # cached positions of a turn for single tokens
TILE_SPAN = 128  # for a query tile
GROUP = 16  # rows of a group


class Scoring(NamedTuple):
    """How scores become weights; bias [heads, n] and sinks [heads] are float32, see `ArrayBackend.attend`."""

    scale: float
    window: int | None
    softcap: float | None
    bias: Array | None = None
    sinks: Array | None = None


def scoring(b: Any, q: Array, scale: Any, window: int | None, softcap: Any, bias: Any, sinks: Any) -> Scoring:
    """The arguments of `ArrayBackend.attend`. Numbers become Python's, as NumPy's would make 64 bits of 32."""
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    window, softcap = None if window is None else int(window), None if softcap is None else float(softcap)
    return Scoring(scale, window, softcap, *terms(b, bias, sinks, q.shape[1]))


def attend(q: Array, keys: Array, values: Array, x: StepInputs[Array], how: Scoring) -> Array:
    """q [T, heads, dim] over what the cache holds up to each token's position: [T, heads, v_dim]."""
    (tokens, heads, dim), kv_heads, v_dim = q.shape, keys.shape[1], values.shape[3]
    q = q.reshape(tokens, kv_heads, heads // kv_heads, dim)
    if x.tile_q.shape[1] == 1:  # each token by itself
        first, real = x.tile_q[:, 0], jnp.max(x.tile_of) + 1
        out = _singles(q[first], keys, values, x.block_table[x.tile_row], x.pos[first], real, how)[x.tile_of]
        return out.reshape(tokens, heads, v_dim)
    rows = min(x.block_table.shape[0], tokens)
    count = jnp.sum(x.cu_q[1:] - x.cu_q[:-1] == 1, dtype=jnp.int32)  # rows of one token; they come first
    out = _singles(q[:rows], keys, values, x.block_table[:rows], x.pos[:rows], count, how)
    tiled = _tiles(q, keys, values, x, count, how)[x.tile_of]
    alone = (jnp.arange(tokens, dtype=jnp.int32) < count)[:, None, None, None]
    out = jnp.where(alone, jnp.pad(out, ((0, tokens - rows), (0, 0), (0, 0), (0, 0))), tiled)
    return out.reshape(tokens, heads, v_dim)


def _singles(q: Array, keys: Array, values: Array, table: Array, pos: Array, count: Array, how: Scoring) -> Array:
    """The first `count` rows, one token each: q [B, kv_heads, group, dim] -> [B, kv_heads, group, v_dim]."""
    rows = q.shape[0]
    each = min(GROUP, rows)
    pos = jnp.where(jnp.arange(rows, dtype=jnp.int32) < count, pos, 0)
    order = jnp.argsort(-pos)  # rows of about one length together
    fill = -rows % each
    sorted_q, sorted_table, sorted_pos = (
        jnp.pad(a[order], ((0, fill), *((0, 0),) * (a.ndim - 1))) for a in (q, table, pos)
    )

    def group(i: Array, out: Array) -> Array:
        some, blocks, at = (lax.dynamic_slice_in_dim(a, i * each, each) for a in (sorted_q, sorted_table, sorted_pos))
        done = _look(some, at[:, None], blocks, keys, values, SPAN, how)
        return lax.dynamic_update_slice_in_dim(out, done, i * each, 0)

    out = jnp.zeros((rows + fill, *q.shape[1:3], values.shape[3]), values.dtype)
    return lax.fori_loop(jnp.int32(0), -(-count // each), group, out)[jnp.argsort(order)]


def _tiles(q: Array, keys: Array, values: Array, x: StepInputs[Array], first: Array, how: Scoring) -> Array:
    """The query tiles from `first` on: q [T, kv_heads, group, dim] -> [N * tile, kv_heads, group, v_dim]."""
    (n, tile), (_, kv_heads, group, dim) = x.tile_q.shape, q.shape
    v_dim = values.shape[3]

    def one(i: Array, out: Array) -> Array:
        tokens = x.tile_q[i]
        row = x.tile_row[i]
        at = jnp.minimum(x.pos[tokens], x.kv_len[row] - 1)  # places that are not used hold the first token of all
        queries = q[tokens].transpose(1, 2, 0, 3).reshape(1, kv_heads, group * tile, dim)
        done = _look(queries, at[None], x.block_table[row][None], keys, values, TILE_SPAN, how)
        return lax.dynamic_update_slice_in_dim(out, done, i, 0)

    out = jnp.zeros((n, kv_heads, group * tile, v_dim), values.dtype)
    out = lax.fori_loop(first, jnp.max(x.tile_of) // tile + 1, one, out)
    out = out.reshape(n, kv_heads, group, tile, v_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(n * tile, kv_heads, group, v_dim)


def _look(q: Array, at: Array, table: Array, keys: Array, values: Array, span: int, how: Scoring) -> Array:
    """q [C, kv_heads, M, dim], M = group * tile, at positions [C, tile], blocks [C, width]: [C, kv_heads, M, v_dim]."""
    (count, kv_heads, many, _), tile = q.shape, at.shape[1]
    size, v_dim = values.shape[2:]
    blocks = max(1, span // size)
    span = blocks * size
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % blocks)))
    turned = q.swapaxes(2, 3)

    def turn(i: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, mass, total = sums
        piece = lax.dynamic_slice_in_dim(table, i * blocks, blocks, axis=1)
        k, v = _copied(keys, piece), _copied(values, piece)
        if many < 16:  # XLA copies the matrix on the right of a product: it is to be the smaller one
            scores = (k @ turned).swapaxes(2, 3)
        else:
            scores = q @ k.swapaxes(2, 3)
        scores = scores.astype(jnp.float32) * how.scale
        if how.softcap is not None:
            scores = jnp.tanh(scores / how.softcap) * how.softcap
        seen, place = i * span + jnp.arange(span, dtype=jnp.int32), at[:, :, None]
        hidden = seen > place if how.window is None else (seen > place) | (seen <= place - how.window)
        hidden = jnp.tile(hidden, (1, many // tile, 1))[:, None]
        if how.bias is not None:
            scores = scores + by_distance(jnp, how.bias, place - seen, kv_heads).reshape(scores.shape)
        scores = jnp.where(hidden, -jnp.inf, scores)
        higher = jnp.maximum(top, scores.max(axis=-1))
        weights, keep = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
        part = (weights.astype(v.dtype) @ v).astype(jnp.float32)
        return higher, mass * keep + weights.sum(axis=-1), total * keep[..., None] + part

    shape = (count, kv_heads, many)
    if how.sinks is None:
        top = jnp.full(shape, jnp.finfo(jnp.float32).min, jnp.float32)  # -inf minus itself would be NaN
        mass = jnp.zeros(shape, jnp.float32)
    else:
        top = jnp.broadcast_to(jnp.repeat(how.sinks.reshape(kv_heads, -1), tile, axis=1), shape)
        mass = jnp.ones(shape, jnp.float32)  # of exp(sink - top)
    start = top, mass, jnp.zeros((*shape, v_dim), jnp.float32)
    begin = jnp.int32(0) if how.window is None else jnp.maximum(jnp.min(at) - how.window + 1, 0) // span
    _, mass, total = lax.fori_loop(begin, jnp.max(at) // span + 1, turn, start)
    return (total / mass[..., None]).astype(values.dtype)


def _copied(half: Array, blocks: Array) -> Array:
    """Blocks [C, n] of one half of a cache, side by side: [C, kv_heads, n * block_size, dim]."""
    _, kv_heads, size, dim = half.shape
    flat = half.reshape(-1, size * dim)
    rows = blocks[:, None, :] * kv_heads + jnp.arange(kv_heads, dtype=jnp.int32)[:, None]
    found = flat.at[rows].get(mode="promise_in_bounds")
    return found.reshape(len(blocks), kv_heads, -1, dim)
