"""JAX with compiled programs of fixed shape, so that a token's result does not depend on what else is in the batch.

XLA chooses kernels, fusions and the order of sums by shape, and documents none of it. What holds is that a program
computes each of its rows alike. So a step is always made of programs of STEP_TOKENS tokens: larger steps are several
calls, smaller ones are padded. The only number that grows with a sequence is how often attention's loop over cached
positions runs, and a turn in which a token sees nothing leaves all its bits as they are.

Larger programs read the weights less often. They do the same as long as XLA multiplies matrices of 8 and of 32 rows in
the same order, which the engine tries out before it uses them. Sums over a row, where XLA is known to take another
order, run in tiles of STEP_TOKENS rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from typing_extensions import override

from hibachi.backend.array_backend import Array, ArrayBackend, LayerCache
from hibachi.backend.attention_terms import by_distance
from hibachi.backend.layout import Paged, State, StepInputs
from hibachi.common.shapes import CallShapes
from hibachi_jax.attention import Scoring, scoring
from hibachi_jax.backend import JaxBackend

STEP_TOKENS = 8
SPAN = 128  # cached positions that a turn of attention's loop looks at


class InvariantJaxBackend(JaxBackend):
    """`JaxBackend` with steps of fixed shape: `JaxBackend().invariant()`."""

    deterministic = True
    shapes = CallShapes(few="all", multiple=STEP_TOKENS, sizes=(STEP_TOKENS, 32), tiles=(1, 1))
    kernels = f"steps of {STEP_TOKENS} tokens"

    def __init__(self, device: Any = None) -> None:
        super().__init__(device)
        self._turns = self._loops = False  # a product with a turned weight depends on how many rows there are
        self.shapes = type(self).shapes

    @override
    def make_cache(self, spec: Paged | State, *, blocks: int, block_size: int, rows: int, dtype: str) -> LayerCache:
        return ArrayBackend.make_cache(self, spec, blocks=blocks, block_size=block_size, rows=rows, dtype=dtype)

    @override
    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        rows = x.reshape(-1, x.shape[-1])
        fill = -len(rows) % STEP_TOKENS
        if not fill:
            return super().linear(x, w, b)
        y = super().linear(jnp.pad(rows, ((0, fill), (0, 0))), w, b)
        return y[: len(rows)].reshape(*x.shape[:-1], y.shape[-1])

    @override
    def rms_norm(self, x: Array, w: Array, eps: float) -> Array:
        norm = super().rms_norm
        return _by_tiles(lambda rows: norm(rows, w, eps), x)

    @override
    def layer_norm(self, x: Array, w: Array, b: Array | None, eps: float) -> Array:
        norm = super().layer_norm
        return _by_tiles(lambda rows: norm(rows, w, b, eps), x)

    @override
    def softmax(self, x: Array) -> Array:
        return _by_tiles(super().softmax, x)

    @override
    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        cache: LayerCache,
        x: StepInputs[Array],
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        bias: Array | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, LayerCache]:
        how = scoring(self, q, scale, window, softcap, bias, sinks)
        k, v = self.storable(k, v, cache[1].dtype)
        keys, values = self.write_cache(cache[0], x.slot, k), self.write_cache(cache[1], x.slot, v)

        def look(q: Array, pos: Array, seg: Array) -> Array:
            return _attend(q, keys, values, x.block_table[seg], pos, how)

        return _by_tiles(look, q, x.pos, x.seg), (keys, values)


def _by_tiles(f: Callable[..., Array], *rows: Array) -> Array:
    """f(*rows), for a function of each row by itself, on tiles of STEP_TOKENS rows one after another."""
    n = len(rows[0])
    if n == STEP_TOKENS:
        return f(*rows)
    fill = -n % STEP_TOKENS
    tiles = [jnp.pad(r, ((0, fill), *((0, 0),) * (r.ndim - 1))).reshape(-1, STEP_TOKENS, *r.shape[1:]) for r in rows]
    out = jax.lax.map(lambda tile: f(*tile), tiles)
    return out.reshape(-1, *out.shape[2:])[:n]


def _attend(q: Array, keys: Array, values: Array, table: Array, pos: Array, how: Scoring) -> Array:
    """Attention of each token to the positions up to its own: q [T, heads, dim] -> [T, heads, v_dim].

    keys, values [blocks, block_size, kv_heads, ...]; table [T, width]: the blocks of each token's sequence; pos [T].

    A running softmax over pieces of the cache (Milakov & Gimelshein 2018). A piece that is hidden from a token leaves
    the maximum, multiplies the sums by exp(0) and adds 0 to them: they keep their bits.
    """
    (tokens, heads, dim), (size, kv_heads, v_dim) = q.shape, values.shape[1:]
    blocks = max(1, SPAN // size)  # of a piece
    span = blocks * size
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % blocks)))
    q = q.reshape(tokens, kv_heads, heads // kv_heads, dim)
    at = pos[:, None]

    def turn(i: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, mass, total = sums
        piece = jax.lax.dynamic_slice_in_dim(table, i * blocks, blocks, axis=1)
        k, v = keys[piece].reshape(tokens, span, kv_heads, dim), values[piece].reshape(tokens, span, kv_heads, v_dim)
        seen = i * span + jnp.arange(span, dtype=jnp.int32)
        hidden = seen > at if how.window is None else (seen > at) | (seen <= at - how.window)  # [T, span]
        scores = jnp.einsum("tkgd,tskd->tkgs", q, k).astype(jnp.float32) * how.scale
        if how.softcap is not None:
            scores = jnp.tanh(scores / how.softcap) * how.softcap
        if how.bias is not None:
            scores = scores + by_distance(jnp, how.bias, (at - seen)[:, None, :], kv_heads)[..., 0, :]
        scores = jnp.where(hidden[:, None, None, :], -jnp.inf, scores)
        higher = jnp.maximum(top, scores.max(axis=-1))
        weights, keep = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
        part = jnp.einsum("tkgs,tskd->tkgd", weights.astype(v.dtype), v).astype(jnp.float32)
        return higher, mass * keep + weights.sum(axis=-1), total * keep[..., None] + part

    if how.sinks is None:
        top = jnp.full(q.shape[:-1], jnp.finfo(jnp.float32).min, jnp.float32)  # -inf minus itself would be NaN
        mass = jnp.zeros(q.shape[:-1], jnp.float32)
    else:
        top = jnp.broadcast_to(how.sinks.reshape(kv_heads, -1), q.shape[:-1])
        mass = jnp.ones(q.shape[:-1], jnp.float32)  # of exp(sink - top)
    start = top, mass, jnp.zeros((*q.shape[:-1], v_dim), jnp.float32)
    _, mass, total = jax.lax.fori_loop(jnp.int32(0), jnp.max(pos) // span + 1, turn, start)
    return (total / mass[..., None]).astype(values.dtype).reshape(tokens, heads, v_dim)
