"""From logits to token ids for the rows of a step: the parameters of each row, and one batched draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from hibachi.decode import sampling
from hibachi.engine.job import Job
from hibachi.tensor.array_backend import Array, ArrayBackend, HostArray


class RowSampler:
    """Sampling parameters by row, and the draw for a step. Randomness comes from the host, by (seed, position)."""

    def __init__(self, backend: ArrayBackend, rows: int, vocab_size: int) -> None:
        self.backend, self.vocab_size = backend, vocab_size
        self._temperature = np.zeros(rows, np.float32)
        self._top_k = np.zeros(rows, np.int32)
        self._top_p = np.ones(rows, np.float32)
        self._seed = np.zeros(rows, np.uint64)
        self._greedy, self._plain, self._filtered = _programs(backend)

    def admit(self, job: Job) -> None:
        params, row = job.params, job.seq.row
        assert params is not None
        self._temperature[row], self._seed[row] = params.temperature, job.seed
        self._top_k[row], self._top_p[row] = max(params.top_k, 0), params.top_p

    def draw(
        self, logits: Array, jobs: Sequence[Job], rows: Any, positions: Any
    ) -> tuple[HostArray, Any, dict[int, dict[int, float]]]:
        """One token for each job. logits [m, vocab], m >= n (rows beyond n are padding); rows, positions [n].

        Returns tokens int32 [n], not-finite flags bool [n] (or None), and {place: log-probabilities} where asked for.
        """
        n, m = len(jobs), logits.shape[0]
        temperature = self._temperature[rows]
        if not temperature.any():
            ids, finite = self._greedy(logits)
        else:
            top_k, top_p = self._top_k[rows], self._top_p[rows]
            draw = self._filtered if top_k.any() or (top_p < 1).any() else self._plain
            u = sampling.uniforms(self._seed[rows], np.asarray(positions))
            columns = (temperature, top_k, top_p, u)
            if m > n:
                columns = tuple(np.concatenate([c, np.zeros(m - n, c.dtype)]) for c in columns)
            ids, finite = draw(logits, *map(self.backend.put, columns))
        tokens = self.backend.get(ids)[:n]
        ok = self.backend.get(finite)[:n]
        logprobs = {}
        for i, job in enumerate(jobs):
            if job.params is not None and job.params.logprobs is not None:
                row = self.backend.get(logits[i, ...])
                logprobs[i] = sampling.logprobs(row, int(tokens[i]), job.params.logprobs)
        return tokens, None if ok.all() else ~ok, logprobs


@lru_cache(maxsize=16)
def _programs(backend: ArrayBackend) -> tuple[Callable[..., tuple[Array, Array]], ...]:
    """Greedy, plain and filtered draws, compiled once for all engines on a backend."""
    draws = (partial(_greedy, backend), partial(_sample, backend, False), partial(_sample, backend, True))
    return tuple(map(backend.compile, draws))


def _greedy(backend: ArrayBackend, logits: Array) -> tuple[Array, Array]:
    return sampling.greedy(backend, logits), sampling.row_finite(backend, logits)


def _sample(
    backend: ArrayBackend,
    filtered: bool,
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    u: Array,
) -> tuple[Array, Array]:
    ids = sampling.sample(backend, logits, temperature, top_k, top_p, u, filtered=filtered)
    return ids, sampling.row_finite(backend, logits)
