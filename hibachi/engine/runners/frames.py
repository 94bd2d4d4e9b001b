"""Samples tokens of several codebooks: one id from the logits of each codebook."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.infer import leaves, mapped
from hibachi.engine.runners.depth import DepthCalls, depth_of, sizes_of
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.sampler import Drawn, RowSampler
from hibachi.engine.runners.tokentable import TokenTable
from hibachi.engine.sampling.uniforms import of_codebooks
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.streams.channel import Channel
from hibachi.errors import HibachiError
from hibachi.request import Request, SamplingParams


class FrameSampler:
    """As `RowSampler`, for logits [n, codebooks, vocab], or for what the model's `depth` makes logits of: each codebook
    of a row is drawn as a row of its own would be, with a seed of its own.

    sizes: ids of each codebook. depth: None means that logits come of all codebooks at once.
    """

    backend: ArrayBackend
    vocab_size: int
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    depth: DepthCalls | None

    def __init__(self, backend: ArrayBackend, rows: int, model: Any, table: TokenTable) -> None:
        """Raises ConfigError."""
        self.backend, self.vocab_size, self.sizes = backend, model.vocab_size, sizes_of(model)
        self.depth, self._n = depth_of(model, backend), len(self.sizes)
        self.shape = self._n, self.vocab_size
        self._each = RowSampler(backend, rows * self._n, self.vocab_size, table, type(model).__name__)
        self._books: list[list[Job]] = [[] for _ in range(rows)]  # what each codebook of a row is drawn by
        self._nobody: Channel[Any] = Channel()
        self._k = [backend.put(np.array(k, np.int32)) for k in range(self._n)]
        ids = np.arange(self.vocab_size) < np.array(self.sizes)[:, None]
        self._real = None if ids.all() else backend.put(ids)  # bool [codebooks, vocab]: there is such an id

    def admit(self, job: Job) -> None:
        row, n, params, length = job.seq.row, self._n, job.sampling, job.seq.prompt_len
        seeds = of_codebooks(job.seed, n)
        if not params.codebooks:
            one = self._book(length, params)
            self._each.admit(one, slice(row * n, (row + 1) * n), seeds)
            self._books[row] = [one] * n
            return
        books = [self._book(length, params.of_codebook(k)) for k in range(n)]
        for k, book in enumerate(books):
            self._each.admit(book, row * n + k, seeds[k])
        self._books[row] = books

    def _book(self, length: int, params: SamplingParams) -> Job:
        """What a codebook is drawn by, which holds on to nothing of the request."""
        return Job(Seq(length, 1), self._nobody, Request(None, params))

    def draw(
        self,
        out: Any,
        jobs: Sequence[Job],
        rows: Any,
        positions: Any,
        mix: Callable[[Array], Array] | None = None,
        whose: HostArray | None = None,
    ) -> Drawn:
        """One token for each job: int32 [n, codebooks]. out: logits [m, codebooks, vocab], or arrays [m, ...] for
        `depth`, m >= n; rows, positions [n]. Raises what `depth` raises, and InvalidModelOutput.

        mix, whose: in depth, where several rows of the outputs belong to one job: from the logits of a codebook to
        those that are drawn from; and to which job each belongs, [m].
        """
        n, books = len(jobs), [self._books[row] for row in np.asarray(rows).tolist()]
        found = Drawn(np.zeros((n, self._n), np.int32), np.zeros(n, bool), {})
        scores, faults = dict[int, Any](), dict[int, HibachiError]()
        for places, drawn in self._drawn(out, books, rows, positions, mix, whose):
            found.tokens.reshape(-1)[places] = drawn.tokens
            if drawn.bad is not None:
                found.bad[places[drawn.bad] // self._n] = True
            scores |= {int(places[i]): each for i, each in drawn.logprobs.items()}
            faults |= {int(places[i]): fault for i, fault in drawn.faults.items()}
        for place, each in sorted(scores.items()):
            size = self.sizes[place % self._n]
            likely = each if self._real is None else {i: p for i, p in each.items() if i < size}
            found.logprobs.setdefault(place // self._n, []).append(likely)
        for place, fault in sorted(faults.items()):
            found.faults.setdefault(place // self._n, fault)
        return found if found.bad.any() else replace(found, bad=None)

    def rows(self, out: Any, at: Any) -> Any:
        """Rows `at` of the logits, or of all arrays; padded with more rows if the backend wants few shapes."""
        return mapped(lambda _, leaf: self._each.rows(leaf, at), out)

    def plain(self, jobs: Sequence[Job], rows: Any, positions: Any) -> bool:
        """No step begins before the frames of the last one are read."""
        return False

    def _drawn(
        self,
        out: Any,
        books: Sequence[list[Job]],
        rows: Any,
        positions: Any,
        mix: Callable[[Array], Array] | None,
        whose: HostArray | None,
    ) -> Iterator[tuple[HostArray, Drawn]]:
        """Draws, each with the places among the ids of all frames [n * codebooks] that it is for."""
        n, k = len(books), self._n
        places, each = np.arange(n * k), (np.asarray(rows)[:, None] * k + np.arange(k)).reshape(-1)
        if self.depth is None:
            logits = out if self._real is None else self.backend.program(_masked)(out, self._real)
            flat = self.backend.xp.reshape(logits, (-1, self.vocab_size))
            jobs = [book for row in books for book in row]
            yield places, self._each.draw(flat, jobs, each, np.repeat(positions, k))
            return
        backend, m = self.backend, leaves(out)[0].shape[0]
        self.depth.check(out, np.zeros((m, k), np.int32))
        plain = mix is None and (backend.asynchronous or backend.shapes.compiled)
        if plain and self._each.plain((), each, np.repeat(positions, k)):
            yield places, self._on_device(self.depth, out, each.reshape(n, k).T, positions)
            return
        codes, past, by_book = np.zeros((m, k), np.int32), None, each.reshape(n, k).T
        hows = self._each.hows(by_book, positions, m) if mix is None else [None] * k
        for i in range(k):
            # A copy, as the model may keep it in its past.
            logits, past = self.depth.logits(i, out, backend.put(codes.copy()), past)
            logits = logits if mix is None else mix(logits)
            jobs = [row[i] for row in books]
            drawn = self._each.draw(self._wide(i, logits), jobs, by_book[i], positions, hows[i])
            if drawn.bad is not None:
                drawn.tokens[drawn.bad] = 0  # any id that there is
            if whose is None:
                codes[:n, i] = drawn.tokens
            else:
                codes[: len(whose), i] = drawn.tokens[whose]
            yield places[i::k], drawn

    def _on_device(self, depth: DepthCalls, out: Any, each: HostArray, positions: Any) -> Drawn:
        """Draws of which the host sees no id before the frames [n, codebooks] are complete, as it would have to wait
        for the device. each [codebooks, n]: their rows in the sampler.
        """
        backend, m, past = self.backend, leaves(out)[0].shape[0], None
        hows = self._each.hows(each, positions, m)
        codes, fine = backend.put(np.zeros((m, self._n), np.int32)), backend.put(np.ones(m, bool))
        for i, k in enumerate(self._k):
            logits, past = depth.logits(i, out, codes, past)
            ids, ok = self._each.begin(self._wide(i, logits), each[i], positions, hows[i])
            codes, fine = backend.program(_noted)(codes, fine, k, ids, ok)
        tokens, finite = (a[: each.shape[1]] for a in backend.fetch([codes, fine])())
        return Drawn(tokens.reshape(-1), np.repeat(~finite, self._n), {})

    def _wide(self, k: int, logits: Array) -> Array:
        """Logits of codebook k as of the largest, so that one program draws from all."""
        more = self.vocab_size - self.sizes[k]
        return self.backend.program(_widened, more)(logits) if more else logits


def _masked(backend: ArrayBackend, logits: Array, real: Array) -> Array:
    logits = backend.float32(logits)
    return backend.xp.where(real[None, ...], logits, backend.xp.full_like(logits, -np.inf))


def _widened(backend: ArrayBackend, more: int, logits: Array) -> Array:
    logits = backend.float32(logits)
    xp = backend.xp
    nothing = xp.full((logits.shape[0], more), -np.inf, dtype=logits.dtype, device=backend.device)
    return xp.concat([logits, nothing], axis=1)


def _noted(backend: ArrayBackend, codes: Array, fine: Array, k: Array, ids: Array, ok: Array) -> tuple[Array, Array]:
    """The codes with the ids of codebook k, and which rows were finite until now. Of those that are not, id 0."""
    xp = backend.xp
    here = xp.arange(codes.shape[1], dtype=xp.int32, device=backend.device)[None, :] == k
    ids = xp.where(ok, ids, xp.zeros_like(ids))
    return xp.where(here, xp.astype(ids, codes.dtype)[:, None], codes), xp.logical_and(fine, ok)
