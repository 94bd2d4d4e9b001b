"""What some requests want changed in their logits before the draw: the records on the host, and the change of a step.

The order is that of `SamplingParams`. Rows that want nothing are never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from hibachi.decode import edits
from hibachi.decode.sampling import row_finite
from hibachi.engine.job import Job, TokenTable
from hibachi.errors import HibachiError, InvalidRequest
from hibachi.request import SamplingParams
from hibachi.tensor.array_backend import Array, ArrayBackend, HostArray


class TokenLists:
    """For each row a list of different token ids, and a number for each of them."""

    def __init__(self, rows: int) -> None:
        self._ids = np.zeros((rows, 16), np.int32)
        self._values = np.zeros((rows, 16), np.float32)
        self.size = np.zeros(rows, np.int32)
        self._places: list[dict[int, int]] = [{} for _ in range(rows)]

    def clear(self, row: int) -> None:
        self.size[row] = self._ids[row, 0] = self._values[row, 0] = 0
        self._places[row] = {}

    def add(self, row: int, token: int, value: float) -> None:
        """Add to the number of a token, which is 0 for one that is new."""
        place = self._places[row].get(token)
        if place is None:
            place = self._places[row][token] = int(self.size[row])
            self.size[row] += 1
            if place == self._ids.shape[1]:
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)], axis=1)
                self._values = np.concatenate([self._values, np.zeros_like(self._values)], axis=1)
            self._ids[row, place], self._values[row, place] = token, 0
        self._values[row, place] += value

    def place(self, row: int, token: int) -> int:
        return self._places[row][token]

    def read(self, rows: Any, static: bool) -> tuple[HostArray, HostArray]:
        """Ids int32 and numbers float32 of `rows`, [m, W]: shorter lists repeat their first token.

        A row with an empty list has token 0, with the number 0. static: only few different W.
        """
        size = self.size[rows]
        width = max(1, int(size.max()))
        at = np.arange(_power(width) if static else width, dtype=np.int32)
        at = np.where(at < size[:, None], at, 0)
        return self._ids[rows[:, None], at], self._values[rows[:, None], at]


def _power(n: int) -> int:
    """The next power of four from 16 on."""
    out = 16
    while out < n:
        out *= 4
    return out


class RowEdits:
    """By row: biases and bans, penalties, the mask of allowed tokens, processors."""

    def __init__(self, backend: ArrayBackend, rows: int, vocab_size: int, table: TokenTable) -> None:
        self.backend, self.vocab_size, self.table = backend, vocab_size, table
        self._always = np.zeros(rows, bool)  # wants changes in every step
        self._until = np.zeros(rows, np.int32)  # length before which no stop token may come
        self._bias, self._counts = TokenLists(rows), TokenLists(rows)
        self._kept: dict[int, HostArray] = {}  # of rows with allowed tokens: bool [vocab_size]
        self._counted = np.zeros(rows, np.int32)  # tokens of the row that are in `_counts`
        self._factor = np.ones(rows, np.float32)
        self._presence, self._frequency = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
        self._copy, self._keep, self._add, self._penalise = _programs(backend)

    def admit(self, job: Job) -> None:
        params, row, start = job.sampling, job.seq.row, job.seq.prompt_len
        self._always[row] = bool(
            params.logit_bias or job.bad_words or params.allowed_token_ids or params.logits_processors
        ) or penalised(params)
        self._until[row] = start + params.min_tokens if self._stop_tokens(job) else 0
        self._kept.pop(row, None)
        if not self._always[row] and not self._until[row]:
            return
        if params.allowed_token_ids is not None:
            kept = self._kept[row] = np.zeros(self.vocab_size, bool)
            kept[list(params.allowed_token_ids)] = True
        self._bias.clear(row)
        for token, value in params.logit_bias:  # type: ignore[misc]
            self._bias.add(row, token, value)
        for token in (*(word[-1] for word in job.bad_words), *self._stop_tokens(job)):
            self._bias.add(row, token, 0)
        self._counts.clear(row)
        self._factor[row] = params.repetition_penalty
        self._presence[row], self._frequency[row] = params.presence_penalty, params.frequency_penalty
        self._counted[row] = start
        if params.repetition_penalty != 1 and job.embeds is None:
            for token in np.unique(job.prompt).tolist():
                self._counts.add(row, token, 0)

    def wanted(self, rows: Any, positions: Any) -> Any:
        """Which rows want a change of the logits for the token at `positions`: bool [n]."""
        return self._always[rows] | (positions < self._until[rows])

    def apply(
        self, logits: Array, at: Any, jobs: Sequence[Job], rows: Any, positions: Any
    ) -> tuple[Array, Array, dict[int, HibachiError]]:
        """The changed logits of n jobs, which are rows `at` [m] of `logits` (m >= n, those beyond are padding).

        rows [m], positions [n]. Returns float32 [m, V]; were the rows finite before, bool [m]; errors by place.
        """
        put, static = self.backend.put, self.backend.static_shapes
        x, finite = self._copy(logits, put(np.asarray(at, np.int32)))
        faults: dict[int, HibachiError] = {}
        if not self._kept.keys().isdisjoint(rows.tolist()):
            everything = np.ones(self.vocab_size, bool)
            x = self._keep(x, put(np.stack([self._kept.get(row, everything) for row in rows.tolist()])))
        if self._bias.size[rows].any():
            ids, bias = self._bias.read(rows, static)
            for i, job in enumerate(jobs):
                self._ban(job, bias[i], ids[i], int(positions[i]))
            x = self._add(x, put(ids), put(bias))
        if any(job.sampling.logits_processors for job in jobs):
            x = self._process(x, jobs, positions, faults)
        if any(penalised(job.sampling) for job in jobs):
            for i, job in enumerate(jobs):
                self._count(job, int(positions[i]))
            ids, counts = self._counts.read(rows, static)
            factor = np.where(self._counts.size[rows] > 0, self._factor[rows], np.float32(1))[:, None]
            minus = self._frequency[rows, None] * counts + self._presence[rows, None] * (counts > 0)
            x = self._penalise(x, put(ids), put(np.broadcast_to(factor, ids.shape).copy()), put(minus))
        return x, finite, faults

    def _stop_tokens(self, job: Job) -> list[int]:
        """Those that min_tokens forbids."""
        if job.sampling.min_tokens == 0 or job.stop is None or job.stop.tokens is None:
            return []
        return [i for i in job.stop.tokens.tolist() if 0 <= i < self.vocab_size]

    def _ban(self, job: Job, bias: HostArray, ids: HostArray, position: int) -> None:
        """-inf for the tokens that may not come at this position. bias, ids [W]: the row's list."""
        row, start = job.seq.row, job.seq.prompt_len
        banned = self._stop_tokens(job) if position < self._until[row] else []
        if job.bad_words:
            longest = max(map(len, job.bad_words))
            output = tuple(self.table.values[row, max(start, position + 1 - longest) : position].tolist())
            banned = [*banned, *(w[-1] for w in job.bad_words if len(w) == 1 or output[1 - len(w) :] == w[:-1])]
        if banned:
            bias[np.isin(ids, banned)] = -np.inf  # everywhere: a list is padded with its first token

    def _process(self, x: Array, jobs: Sequence[Job], positions: Any, faults: dict[int, HibachiError]) -> Array:
        places, changed = [], []
        for i, job in enumerate(jobs):
            if processors := job.sampling.logits_processors:
                row, start = job.seq.row, job.seq.prompt_len
                output = self.table.values[row, start : positions[i]].tolist()
                try:
                    logits = x[i, ...]
                    for processor in processors:
                        logits = self._ask(processor, output, logits)
                except InvalidRequest as e:
                    faults[i] = e
                    continue
                places.append(i)
                changed.append(self.backend.copy(logits))  # a processor may have one buffer for all requests
        if not places:
            return x
        return self.backend.scatter_rows(
            x, self.backend.put(np.array(places, np.int32)), self.backend.xp.stack(changed)
        )

    def _ask(self, processor: Callable[..., Any], output: list[int], logits: Array) -> Array:
        name = getattr(processor, "__qualname__", type(processor).__qualname__)
        try:
            out = processor(list(output), logits)
        except Exception as e:
            raise InvalidRequest(f"The logits processor {name} raised {type(e).__name__}: {e}") from e
        shape = tuple(getattr(out, "shape", ()))
        if not self.backend.owns(out) or shape != (self.vocab_size,):
            raise InvalidRequest(
                f"The logits processor {name} must return an array of {self.backend.name} of shape "
                f"({self.vocab_size},); got {type(out).__qualname__} of shape {shape}. Return the changed logits."
            )
        return self.backend.float32(out)

    def _count(self, job: Job, position: int) -> None:
        """Bring the counts of a row up to its `position`."""
        row = job.seq.row
        if penalised(job.sampling):
            for token in self.table.values[row, self._counted[row] : position].tolist():
                self._counts.add(row, token, 1)
            self._counted[row] = position


def penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


@lru_cache(maxsize=16)
def _programs(backend: ArrayBackend) -> tuple[Callable[..., Any], ...]:
    """Compiled once for all engines on a backend."""
    parts = (_copy, edits.keep_only, edits.add_bias, edits.penalise)
    return tuple(backend.compile(partial(part, backend)) for part in parts)


def _copy(backend: ArrayBackend, logits: Array, at: Array) -> tuple[Array, Array]:
    x = edits.rows_of(backend, logits, at)
    return x, row_finite(backend, x)
