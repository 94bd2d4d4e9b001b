"""Samples tokens of several codebooks: one id from the logits of each codebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.sampler import Drawn, RowSampler
from hibachi.engine.runners.tokentable import TokenTable
from hibachi.engine.sampling.uniforms import of_codebooks


class FrameSampler:
    """As `RowSampler`, for logits [n, codebooks, vocab]: each codebook of a row is drawn as a row of its own would be,
    with a seed of its own.
    """

    backend: ArrayBackend
    vocab_size: int
    shape: tuple[int, ...]

    def __init__(
        self, backend: ArrayBackend, rows: int, vocab_size: int, codebooks: int, table: TokenTable, model: str = ""
    ) -> None:
        self.backend, self.vocab_size, self.shape = backend, vocab_size, (codebooks, vocab_size)
        self._n, self._each = codebooks, RowSampler(backend, rows * codebooks, vocab_size, table, model)

    def admit(self, job: Job) -> None:
        first, params = job.seq.row * self._n, job.sampling
        for i, seed in enumerate(of_codebooks(job.seed, self._n)):
            self._each.set(first + i, params.of_codebook(i), seed)

    def draw(self, logits: Array, jobs: Sequence[Job], rows: Any, positions: Any) -> Drawn:
        """One token for each job: int32 [n, codebooks]. logits [m, codebooks, vocab], m >= n; rows, positions [n]."""
        flat = self._flat(logits)
        each = (np.asarray(rows)[:, None] * self._n + np.arange(self._n)).reshape(-1)
        ids, ok = self._each.choose(flat, each, np.repeat(positions, self._n))
        found = {}
        for i, job in enumerate(jobs):
            if (wanted := job.sampling.logprobs) is not None:
                at = np.arange(i * self._n, (i + 1) * self._n)
                found[i] = self._each.logprobs(self._each.rows(flat, at), ids[at], [wanted] * self._n)
        fine = ok.reshape(-1, self._n).all(axis=1)
        return Drawn(ids.reshape(-1, self._n), None if fine.all() else ~fine, found)

    def rows(self, logits: Array, at: Any) -> Array:
        """Rows `at` of the logits; padded with more rows if the backend wants few shapes."""
        return self._each.rows(logits, at)

    def plain(self, jobs: Sequence[Job], rows: Any, positions: Any) -> bool:
        """No step begins before the frames of the last one are read."""
        return False

    def _flat(self, logits: Array) -> Array:
        return self.backend.xp.reshape(logits, (-1, self.vocab_size))
