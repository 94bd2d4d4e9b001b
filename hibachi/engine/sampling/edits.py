"""Changes to some logits of a row: what may not come, what should come less often.

A row's changes touch the few tokens that it names, so they are lists of places [m, W], padded by repeating an entry,
and never a matrix of the vocabulary's size. Definitions are vLLM's.
"""

from __future__ import annotations

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend
from hibachi.engine.sampling.rows import pick

_quiet = np.errstate(invalid="ignore", over="ignore")  # of rows that are not finite


@_quiet
def add_bias(backend: ArrayBackend, logits: Array, ids: Array, bias: Array) -> Array:
    """bias [m, W] added to the logits of ids [m, W]; -inf for one that may not come. May overwrite `logits`."""
    return _put_back(backend, logits, ids, pick(backend, logits, ids) + bias)


@_quiet
def penalise(backend: ArrayBackend, logits: Array, ids: Array, factor: Array, minus: Array) -> Array:
    """Logits of ids [m, W] divided by `factor` if they are positive, else multiplied; then less `minus` [m, W].

    The factor is the repetition penalty (Keskar et al. 2019, "CTRL"), `minus` are the presence and frequency penalties
    of the OpenAI API. May overwrite `logits`.
    """
    values = pick(backend, logits, ids)
    values = backend.xp.where(values > 0, values / factor, values * factor) - minus
    return _put_back(backend, logits, ids, values)


def _put_back(backend: ArrayBackend, logits: Array, ids: Array, values: Array) -> Array:
    xp, (m, size) = backend.xp, logits.shape
    starts = xp.arange(m, dtype=xp.int32, device=backend.device)[:, None] * size
    flat = xp.reshape(logits, (-1,))
    flat = backend.scatter_rows(flat, xp.reshape(ids + starts, (-1,)), xp.reshape(values, (-1,)))
    return xp.reshape(flat, (m, size))
