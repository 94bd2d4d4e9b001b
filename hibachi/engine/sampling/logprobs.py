"""Natural log-probabilities of tokens: what is needed of many rows on the device, and the definition for one row.

They are those of the raw logits, before temperature, penalties and filters.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend
from hibachi.engine.sampling.rows import pick, top_of_row, total

HostArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Likely(NamedTuple):
    """Of n rows: enough to name the log-probabilities of one token and of the most likely ones."""

    top: Array  # [n] the largest logit
    mass: Array  # [n] sum of exp(logit - top)
    own: Array  # [n] the logit of the token
    values: Array | None  # [n, k] the largest logits, falling
    ids: Array | None  # [n, k] their token ids


@np.errstate(invalid="ignore", over="ignore")
def mass_of(backend: ArrayBackend, logits: Array) -> tuple[Array, Array]:
    """The largest of each row of float32 logits [n, V], and the sum of exp(logit - largest): [n] each."""
    if backend.draws:
        found: tuple[Array, Array] = backend.mass(logits)
        return found
    top = backend.xp.max(logits, axis=-1)
    return top, total(backend, backend.xp.exp(logits - top[:, None]))


@np.errstate(invalid="ignore", over="ignore")
def likely(backend: ArrayBackend, logits: Array, tokens: Array, *, k: int) -> Likely:
    """logits [n, V], tokens int32 [n] -> what `named` needs for up to k - 1 of the most likely tokens (k = 0: none)."""
    logits = backend.float32(logits)
    top, mass = mass_of(backend, logits)
    own = pick(backend, logits, tokens[:, None])[:, 0]
    return Likely(top, mass, own, *(top_of_row(backend, logits, k) if k else (None, None)))


def named(some: Likely, i: int, token: int, n: int, vocab: int) -> dict[int, float] | None:
    """`logprobs` of row i from host arrays; None if ties make it necessary to look at the whole row."""
    log_mass = float(some.top[i]) + math.log(float(some.mass[i]))
    found = {token: float(some.own[i]) - log_mass}
    if n:
        assert some.values is not None and some.ids is not None
        values, ids = some.values[i].tolist(), some.ids[i].tolist()
        n, k = min(n, vocab), len(ids)
        if k < vocab and values[n - 1] == values[-1]:
            return None
        ranked = sorted(zip(values, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
        found.update({j: value - log_mass for value, j in ranked[:n]})
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


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
        most = np.flatnonzero(row >= np.partition(row, -n)[-n])  # n of them, or more with ties
        wanted.update(sorted(most.tolist(), key=lambda i: (-row[i], i))[:n])
    return {i: float(logs[i]) for i in sorted(wanted, key=lambda i: (-row[i], i))}
