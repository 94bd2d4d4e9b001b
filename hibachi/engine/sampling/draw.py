"""Drawing tokens from logits by the inverse of their distribution function, with random numbers from the host.

A draw depends on the row's own logits, parameters and number `u`, and on nothing else in the batch: the distribution
function runs in the order of the vocabulary, so a filter on one row changes no bit in another.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend
from hibachi.engine.sampling.rows import argmax, invert, pick, top_of_row, total
from hibachi.request import SamplingParams

# How a row is drawn: one of these, and two flags. The near ones are right for most rows; the others go one further.
PLAIN, NEAR, FAR, FULL = range(4)
MASS, TYPICAL = 4, 8
CANDIDATES = {NEAR: 64, FAR: 1024}  # tokens looked at
WORTH = 4  # below this ratio of vocabulary to candidates, sorting the whole row takes no longer
_quiet = np.errstate(invalid="ignore", over="ignore", divide="ignore")  # rows that are not finite give anything


class How(NamedTuple):
    """How each row is drawn, arrays [n]: `hibachi.request.DRAWN`, and u; all float32 but top_k, which is int32. In the
    order of `How` in draw.h of the kernels.

    The logits are divided by the temperature. Then filters leave the most likely tokens, each among those that the
    one before it left: of at least the share min_p of the most likely one's probability (0 means all); the top_k most
    likely (<= 0: all); the smallest set of most likely ones with a share of top_p of their mass (>= 1: all). Last,
    typical_p: the smallest set with this share of the mass of those whose information is nearest to the entropy (>= 1:
    all). Ties with the last token kept are kept. u in (0, 1) is the random number.

    Sources: top_k: Fan et al. 2018; top_p: Holtzman et al. 2020; min_p: Nguyen et al. 2024; typical_p: Meister et al.
    2023, "Locally typical sampling".
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    typical_p: Array
    u: Array


def path_of(params: SamplingParams, vocab_size: int) -> int:
    """The program that first draws for a row with these parameters."""
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    typical = TYPICAL if params.typical_p < 1 else 0
    if params.temperature == 0:
        return PLAIN
    if params.min_p > 0:
        return NEAR | typical
    if top_k:
        fitting = (p for p, size in CANDIDATES.items() if top_k < size and (p == NEAR or WORTH * size <= vocab_size))
        return next(fitting, FULL) | typical
    if params.top_p < 1:
        return NEAR | MASS | typical
    return FULL | typical if typical else PLAIN


def draw_by(backend: ArrayBackend, path: int, logits: Array, how: How) -> tuple[Array, Array, Array | None]:
    """A token for each row by the program `path`, int32 [n]; which rows are finite; and, where it looks at candidates
    only, for which rows these were enough, bool [n] each.
    """
    kind, mass, typical = path % 4, bool(path & MASS), bool(path & TYPICAL)
    finite = row_finite(backend, logits)
    if size := CANDIDATES.get(kind):
        ids, inside = sample_near(backend, logits, how, min(size, logits.shape[1]), mass=mass, typical=typical)
        return ids, finite, inside
    return sample(backend, logits, how, filtered=kind == FULL, typical=typical), finite, None


def greedy(backend: ArrayBackend, logits: Array) -> Array:
    """logits [n, V] -> int32 [n]: the most likely token, the first one among equals."""
    return argmax(backend, logits)


def row_finite(backend: ArrayBackend, logits: Array) -> Array:
    """logits [n, V] -> bool [n]: has the row something to draw from? False with a NaN or +inf, or with -inf only.

    Some -inf are fine: they are tokens that cannot come.
    """
    return backend.xp.isfinite(backend.xp.max(logits, axis=-1))


def best(backend: ArrayBackend, logits: Array) -> tuple[Array, Array]:
    """`greedy` and `row_finite`, in one pass where the backend can."""
    found = backend.best(logits)
    if found is None:
        return greedy(backend, logits), row_finite(backend, logits)
    return found[0], backend.xp.isfinite(found[1])


@_quiet
def sample(backend: ArrayBackend, logits: Array, how: How, *, filtered: bool = True, typical: bool = True) -> Array:
    """One token for each row: int32 [n]. logits [n, V], any float dtype. Temperature 0 takes the most likely token.

    filtered, typical: False if no row has a filter, or typical_p, which gives the same tokens without the sort that
    each of them costs. Rows without finite logits give any token (see `row_finite`).
    """
    xp = backend.xp
    weights = _weights(backend, logits, how.temperature)
    if filtered:
        ranked = xp.flip(xp.sort(weights, axis=-1, stable=False), axis=-1)  # JAX sorts upwards twice as fast
        weights = _drop(backend, weights, _cutoff(backend, ranked, how)[0])
    if typical:
        weights = _typical(backend, weights, how.typical_p)
    drawn = invert(backend, weights, how.u)
    return xp.where(how.temperature > 0, xp.astype(drawn, xp.int32), greedy(backend, logits))


@_quiet
def sample_near(
    backend: ArrayBackend, logits: Array, how: How, k: int, *, mass: bool = False, typical: bool = True
) -> tuple[Array, Array]:
    """`sample` from the k most likely tokens of each row, without a sort of the row: int32 [n], and bool [n].

    The second result says which rows are right: those whose filters keep only tokens among these k. For the others,
    call again with a larger k, or `sample`. Temperatures must be > 0. mass: for rows that have top_p, and neither top_k
    nor min_p in front of it: their share is one of the whole row. typical: as in `sample`.
    """
    xp = backend.xp
    values, ids = top_of_row(backend, logits, k)
    weights = _weights(backend, values, how.temperature)
    whole = None
    if mass:
        whole = total(backend, _weights(backend, logits, how.temperature))
    cutoff, base = _cutoff(backend, weights, how, whole)
    last = weights[:, -1]
    # tokens that are still less likely have no weight
    inside = xp.logical_or((cutoff if mass else base) > last, last <= 0)
    if k == logits.shape[1]:
        inside = xp.ones_like(inside)
    weights = _drop(backend, weights, cutoff)
    if typical:
        weights = _typical(backend, weights, how.typical_p)
    order = xp.argsort(ids, axis=-1)  # the distribution function runs in the order of the vocabulary
    weights, ids = pick(backend, weights, order), pick(backend, ids, order)
    drawn = pick(backend, ids, invert(backend, weights, how.u)[:, None])[:, 0]
    return xp.astype(drawn, xp.int32), inside


def _weights(backend: ArrayBackend, logits: Array, temperature: Array) -> Array:
    """Probabilities, but not normalised: the largest of each row is 1. float32 [n, V]."""
    xp = backend.xp
    logits = backend.float32(logits)
    top = xp.max(logits, axis=-1, keepdims=True)
    return xp.exp((logits - top) / xp.clip(temperature, min=1e-30)[:, None])


def _drop(backend: ArrayBackend, weights: Array, cutoff: Array) -> Array:
    return backend.xp.where(weights >= cutoff[:, None], weights, backend.xp.zeros_like(weights))


def _cutoff(backend: ArrayBackend, ranked: Array, how: How, whole: Array | None = None) -> tuple[Array, Array]:
    """The smallest weight that min_p, top_k and top_p of a row keep: [n]; the same without top_p. 0 means all.

    ranked [n, k]: its largest weights, falling. whole [n]: the mass that top_p is a share of; None means of those in
    `ranked` that the other two keep.
    """
    xp = backend.xp
    rank = xp.arange(ranked.shape[1], dtype=xp.int32, device=backend.device)[None, :]
    inf = xp.full_like(ranked, math.inf)
    kth = xp.min(xp.where(rank < how.top_k[:, None], ranked, inf), axis=-1)
    base = xp.maximum(how.min_p, xp.where(how.top_k > 0, kth, xp.zeros_like(kth)))
    mass = _drop(backend, ranked, base)
    if whole is None:
        whole = total(backend, mass)
    before = xp.cumulative_sum(mass, axis=-1) - mass  # of the more likely tokens
    within = before < (how.top_p * whole)[:, None]
    pth = xp.min(xp.where(within, ranked, inf), axis=-1)
    return xp.where(how.top_p < 1, xp.maximum(base, pth), base), base


def _typical(backend: ArrayBackend, weights: Array, typical_p: Array) -> Array:
    """weights [n, m] without those that typical_p excludes."""
    xp = backend.xp
    p = weights / total(backend, weights)[:, None]
    some = p > 0
    information = -xp.log(xp.where(some, p, xp.ones_like(p)))
    entropy = total(backend, p * information)[:, None]
    strange = xp.where(some, xp.abs(information - entropy), xp.full_like(p, math.inf))
    order = xp.argsort(strange, axis=-1)
    share, ranked = pick(backend, p, order), pick(backend, strange, order)
    within = xp.cumulative_sum(share, axis=-1) - share < typical_p[:, None]
    limit = xp.max(xp.where(within, ranked, xp.full_like(p, -math.inf)), axis=-1, keepdims=True)
    kept = xp.logical_or(typical_p[:, None] >= 1, strange <= limit)
    return xp.where(kept, weights, xp.zeros_like(weights))
