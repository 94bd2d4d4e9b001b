"""Drawing tokens from logits by the inverse of their distribution function, with random numbers from the host.

A draw depends on the row's own logits, parameters and number `u`, and on nothing else in the batch: the distribution
function runs in the order of the vocabulary, so a filter on one row changes no bit in another.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

from hibachi.tensor.array_backend import Array, ArrayBackend

HostArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))


def uniforms(seed: HostArray, position: HostArray) -> HostArray:
    """seed [n] and position [n], integers >= 0 -> float32 [n] in the open interval (0, 1).

    Number `position` (from 0) of the SplitMix64 generator that starts at `seed`, computed directly: Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants of Vigna's splitmix64.c.
    """
    z = np.asarray(seed, np.uint64) + (np.asarray(position, np.uint64) + np.uint64(1)) * _GAMMA  # wraps, as it should
    for shift, factor in _MIX:
        z = (z ^ (z >> shift)) * factor
    z ^= z >> np.uint64(31)
    # 23 bits and a half: the middles of 2^23 equal cells, exact in float32, and never 0 or 1.
    return ((z >> np.uint64(41)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def greedy(backend: ArrayBackend, logits: Array) -> Array:
    """logits [n, V] -> int32 [n]: the most likely token, the first one among equals."""
    return backend.xp.astype(backend.xp.argmax(logits, axis=-1), backend.xp.int32)


def row_finite(backend: ArrayBackend, logits: Array) -> Array:
    """logits [n, V] -> bool [n]: has the row something to draw from? False with a NaN or +inf, or with -inf only.

    Some -inf are fine: they are tokens that cannot come.
    """
    return backend.xp.isfinite(backend.xp.max(logits, axis=-1))


def sample(
    backend: ArrayBackend,
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    u: Array,
    *,
    filtered: bool = True,
) -> Array:
    """One token for each row: int32 [n].

    logits [n, V], any float dtype; temperature, top_p and u float32 [n]; top_k int32 [n]; u in (0, 1). A row with
    temperature 0 takes the most likely token. Other rows draw from softmax(logits / temperature), restricted to the
    top_k most likely tokens (top_k <= 0: all) and then to the smallest set of most likely tokens with a share of top_p
    in the mass that is left (top_p >= 1: all). Ties with the last token kept are kept.

    filtered: False if no row has a filter, which gives the same tokens without a sort. Rows without finite logits give
    any token (see `row_finite`).
    """
    xp = backend.xp
    logits = backend.float32(logits)
    top = xp.max(logits, axis=-1, keepdims=True)
    fine = xp.isfinite(top)  # other rows become zeros: what they give does not matter, but NumPy would warn
    scaled = xp.where(fine, logits, xp.zeros_like(logits)) - xp.where(fine, top, xp.zeros_like(top))
    scaled = scaled / xp.clip(temperature, min=1e-30)[:, None]
    weights = xp.exp(scaled)  # not normalised: the largest is 1
    if filtered:
        kept = weights >= _cutoff(backend, weights, top_k, top_p)[:, None]
        weights = xp.where(kept, weights, xp.zeros_like(weights))
    # Excluded tokens get 0 in the sums as well: parallel sums may fall by a rounding, and must not select one of them.
    sums = xp.where(weights > 0, xp.cumulative_sum(weights, axis=-1), xp.zeros_like(weights))
    passed = sums > u[:, None] * xp.max(sums, axis=-1, keepdims=True)  # u < 1, so the last token with a weight passes
    drawn = xp.argmax(xp.astype(passed, xp.int8), axis=-1)
    return xp.where(temperature > 0, xp.astype(drawn, xp.int32), greedy(backend, logits))


def _cutoff(backend: ArrayBackend, weights: Array, top_k: Array, top_p: Array) -> Array:
    """The smallest weight [n, V] that the filters of a row keep: [n]; 0 for a row without filters."""
    xp = backend.xp
    ranked = xp.flip(xp.sort(weights, axis=-1, stable=False), axis=-1)  # JAX sorts upwards twice as fast as downwards
    rank = xp.arange(weights.shape[1], dtype=xp.int32, device=backend.device)[None, :]
    inf = xp.full_like(ranked, math.inf)
    kth = xp.min(xp.where(rank < top_k[:, None], ranked, inf), axis=-1)
    kth = xp.where(top_k > 0, kth, xp.zeros_like(kth))
    mass = xp.where(ranked >= kth[:, None], ranked, xp.zeros_like(ranked))
    before = xp.cumulative_sum(mass, axis=-1) - mass  # of the more likely tokens
    within = before < top_p[:, None] * xp.sum(mass, axis=-1, keepdims=True)
    pth = xp.min(xp.where(within, ranked, inf), axis=-1)
    return xp.where(top_p < 1, xp.maximum(kth, pth), kth)


def logprobs(row: HostArray, token: int, n: int) -> dict[int, float]:
    """Natural log-probabilities of the n most likely tokens and of `token`, most likely first (of equals: lower id).

    row [V]: the raw logits of one token, on the host; the softmax is computed in float64.
    """
    row = np.asarray(row, np.float64)
    with np.errstate(invalid="ignore"):  # a row without finite logits gives NaN
        top = row.max()
        logs = row - (top + np.log(np.exp(row - top).sum()))
    n = min(n, len(row))
    wanted = {token}
    if n:
        likely = np.flatnonzero(row >= np.partition(row, -n)[-n])  # n of them, or more with ties
        wanted.update(sorted(likely.tolist(), key=lambda i: (-row[i], i))[:n])
    return {i: float(logs[i]) for i in sorted(wanted, key=lambda i: (-row[i], i))}
