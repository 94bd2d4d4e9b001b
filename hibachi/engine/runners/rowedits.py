"""Changes to logits before the draw, as some requests want them: records on the host, and the change of a step.

The order is that of `SamplingParams`. Rows that want no change are never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hibachi.backend import masks
from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.common.shapes import CallShapes
from hibachi.engine.runners.guiding import allowed
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.tokentable import TokenTable
from hibachi.engine.sampling import edits
from hibachi.errors import HibachiError, InvalidRequest, text_of
from hibachi.request import MOST_INT, SamplingParams


class TokenList:
    """Different token ids, and a number for each of them."""

    __slots__ = ("_ids", "_places", "_values")

    def __init__(self) -> None:
        self._ids, self._values = np.zeros(16, np.int32), np.zeros(16, np.float32)
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, token: int, value: float) -> None:
        """Add to the number of a token, which is 0 for one that is new."""
        place = self._places.get(token)
        if place is None:
            place = len(self._places)
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._values = np.concatenate([self._values, np.zeros_like(self._values)])
            self._places[token] = place
            self._ids[place] = token
        self._values[place] += value

    def read(self) -> tuple[HostArray, HostArray]:
        """Ids int32 and numbers float32, [len]; of an empty list token 0 and the number 0."""
        n = len(self._places) or 1
        return self._ids[:n], self._values[:n]


def _side_by_side(lists: Sequence[TokenList], rows: int, shapes: CallShapes) -> tuple[HostArray, HostArray]:
    """Ids and numbers of the lists, [rows, W]: shorter lists repeat their first token, and rows beyond the lists are
    like the last. shapes: the allowed W.
    """
    parts = [each.read() for each in lists]
    size = np.array([len(ids) for ids, _ in parts])
    width = int(size.max())
    at = np.arange(shapes.list_length(width))
    at = np.where(at < size[:, None], at, 0) + (np.cumsum(size) - size)[:, None]
    if rows > len(lists):
        at = np.pad(at, ((0, rows - len(lists)), (0, 0)), mode="edge")
    ids, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    return ids[at], values[at]


class Changes:
    """The changes that a request wants. The request keeps them, as a vocabulary may be long."""

    bias: TokenList
    counts: TokenList

    __slots__ = ("bias", "counted", "counts", "kept")

    def __init__(self, counted: int) -> None:
        self.bias, self.counts = TokenList(), TokenList()
        self.counted: int = counted  # tokens of the row that are in `counts`
        self.kept: HostArray | None = None  # where only some tokens are allowed: packed bits, uint32 [words]


class RowEdits:
    """Logit changes by row: biases and bans, penalties, the mask of allowed tokens, processors."""

    backend: ArrayBackend
    vocab_size: int
    table: TokenTable

    def __init__(self, backend: ArrayBackend, rows: int, vocab_size: int, table: TokenTable) -> None:
        self.backend, self.vocab_size, self.table = backend, vocab_size, table
        self._always = np.zeros(rows, bool)  # wants changes in every step
        self._guided = np.zeros(rows, bool)  # likewise, but these can be made late: see `RowSampler.plain`
        self._looks = np.zeros(rows, bool)  # what it changes depends on the tokens before
        # The length before which some tokens may not come: ends, or those banned first.
        self._until = np.zeros(rows, np.int32)
        self.some: bool = False  # does a row want changes, in any step?
        self._factor = np.ones(rows, np.float32)
        self._presence, self._frequency = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
        self._add, self._penalise = backend.program(edits.add_bias), backend.program(edits.penalise)

    def admit(self, job: Job, row: int | slice) -> None:
        params, start = job.sampling, job.seq.prompt_len
        bad_words, banned_first = job.request.bad_words, job.request.banned_first
        self._guided[row] = job.guided is not None
        self._looks[row] = bool(job.guided or params.logits_processors) or penalised(params)
        self._looks[row] |= any(len(word) > 1 for word in bad_words)
        self._always[row] = bool(
            params.logit_bias or bad_words or params.allowed_token_ids or params.logits_processors
        ) or penalised(params)
        least = max(params.min_tokens if self._stop_tokens(job) else 0, bool(banned_first))
        self._until[row] = min(start + least, MOST_INT) if least else 0
        self.some = bool(self._always.any() or self._guided.any() or self._until.any())
        job.changes = None
        if not np.any(self._always[row] | self._guided[row] | (self._until[row] > 0)):
            return
        changes = Changes(start)
        if params.allowed_token_ids is not None:
            changes.kept = masks.packed(params.allowed_token_ids, self.vocab_size)
        for token, value in dict(params.logit_bias).items():
            changes.bias.add(token, value)
        for token in (*(word[-1] for word in bad_words), *banned_first, *self._stop_tokens(job)):
            changes.bias.add(token, 0)
        self._factor[row] = params.repetition_penalty
        self._presence[row], self._frequency[row] = params.presence_penalty, params.frequency_penalty
        if params.repetition_penalty != 1 and job.request.embeds is None:
            for token in np.unique(job.request.prompt).tolist():
                changes.counts.add(token, 0)
        job.changes = changes

    def wanted(self, rows: Any, positions: Any) -> Any:
        """Which rows want a change of the logits for the token at `positions`: bool [n]."""
        return self._guided[rows] | self.wanted_at_once(rows, positions)

    def looks_back(self, rows: Any) -> Any:
        """Rows whose changes depend on the tokens before: bool [n]."""
        return self._looks[rows]

    def only_guided(self, rows: Any, positions: Any) -> Any:
        """Rows for whose logits nothing but a guide wants a change: bool [n]."""
        return self._guided[rows] & ~self.wanted_at_once(rows, positions)

    def wanted_at_once(self, rows: Any, positions: Any) -> Any:
        """`wanted`, but for what a guide wants."""
        return self._always[rows] | (positions < self._until[rows])

    def apply(
        self, logits: Array, at: Any, jobs: Sequence[Job], rows: Any, positions: Any
    ) -> tuple[Array, Array, dict[int, HibachiError]]:
        """The changed logits of n jobs, which are rows `at` [m] of `logits` (m >= n; rows beyond n are padding).

        rows [m], positions [n]. Returns float32 [m, V]; whether the rows were finite before, bool [m]; errors by place.
        """
        put, shapes = self.backend.put, self.backend.shapes
        faults: dict[int, HibachiError] = {}
        changes, m = [job.changes for job in jobs], len(rows)
        x, finite = self.backend.kept_rows(
            logits, np.asarray(at, np.int32), self._bits(jobs, rows, positions, m, faults)
        )
        if not self.wanted_at_once(rows[: len(jobs)], positions).any():
            return x, finite, faults
        if any(len(each.bias) for each in changes):
            ids, bias = _side_by_side([each.bias for each in changes], m, shapes)
            for i, job in enumerate(jobs):
                self._ban(job, bias[i], ids[i], int(positions[i]))
            x = self._add(x, put(ids), put(bias))
        if any(job.sampling.logits_processors for job in jobs):
            x = self._process(x, jobs, positions, faults)
        if any(penalised(job.sampling) for job in jobs):
            for i, job in enumerate(jobs):
                self._count(job, int(positions[i]))
            ids, counts = _side_by_side([each.counts for each in changes], m, shapes)
            some = np.array([len(each.counts) > 0 for each in changes])
            factor = np.where(some, self._factor[rows[: len(jobs)]], np.float32(1))
            factor = np.broadcast_to(np.pad(factor, (0, m - len(jobs)), mode="edge")[:, None], ids.shape).copy()
            minus = self._frequency[rows, None] * counts + self._presence[rows, None] * (counts > 0)
            x = self._penalise(x, put(ids), put(factor), put(minus))
        return x, finite, faults

    def _bits(
        self, jobs: Sequence[Job], rows: Any, positions: Any, m: int, faults: dict[int, HibachiError]
    ) -> HostArray | None:
        """The tokens that may come, packed bits uint32 [m, words]: rows beyond the jobs are like the last. None: all
        tokens of all rows may.
        """
        guided = [i for i, job in enumerate(jobs) if job.guided is not None]
        listed = [i for i, job in enumerate(jobs) if job.changes.kept is not None]
        if not guided and not listed:
            return None
        if len(guided) == m and not listed:
            bits, failed = allowed(jobs, rows, positions, self.table, self.vocab_size)
            faults |= failed
            return bits
        bits = np.full((m, masks.words(self.vocab_size)), ~np.uint32(0))
        if guided:
            at = np.array(guided)
            some = [jobs[i] for i in guided]
            bits[at], failed = allowed(some, rows[at], positions[at], self.table, self.vocab_size)
            faults |= {guided[i]: e for i, e in failed.items()}
        for i in listed:
            bits[i] &= jobs[i].changes.kept
        bits[len(jobs) :] = bits[len(jobs) - 1]
        return bits

    def _stop_tokens(self, job: Job) -> list[int]:
        """The stop tokens that min_tokens forbids."""
        if job.sampling.min_tokens == 0 or job.stop is None or job.stop.tokens is None:
            return []
        return [i for i in job.stop.tokens.tolist() if 0 <= i < self.vocab_size]

    def _ban(self, job: Job, bias: HostArray, ids: HostArray, position: int) -> None:
        """Set tokens that may not come at this position to -inf. bias, ids [W]: the row's list."""
        row, start = job.seq.row, job.seq.prompt_len
        banned = self._stop_tokens(job) if position < start + job.sampling.min_tokens else []
        banned += job.request.banned_first if position == start else ()
        if job.request.bad_words:
            longest = max(map(len, job.request.bad_words))
            output = tuple(self.table.read(row, max(start, position + 1 - longest), position).tolist())
            banned = [*banned, *(w[-1] for w in job.request.bad_words if len(w) == 1 or output[1 - len(w) :] == w[:-1])]
        if banned:
            bias[np.isin(ids, banned)] = -np.inf  # everywhere: a list is padded with its first token

    def _process(self, x: Array, jobs: Sequence[Job], positions: Any, faults: dict[int, HibachiError]) -> Array:
        places, changed = [], []
        for i, job in enumerate(jobs):
            if processors := job.sampling.logits_processors:
                row, start = job.seq.row, job.seq.prompt_len
                output = self.table.read(row, start, int(positions[i])).tolist()
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
        except BaseException as e:  # SystemExit and CancelledError as well: they are no signals in this thread
            raise InvalidRequest(f"The logits processor {name} raised {text_of(e)}") from e
        shape = tuple(getattr(out, "shape", ()))
        if not self.backend.owns(out) or shape != (self.vocab_size,):
            raise InvalidRequest(
                f"The logits processor {name} must return an array of {self.backend.name} of shape "
                f"({self.vocab_size},); got {type(out).__qualname__} of shape {shape}. Return the changed logits."
            )
        return self.backend.float32(out)

    def _count(self, job: Job, position: int) -> None:
        """Bring the counts of a row up to its `position`."""
        if penalised(job.sampling):
            changes = job.changes
            if changes.counted > position:  # tokens that were drawn along proposals, in a step that failed
                for token in self.table.read(job.seq.row, position, changes.counted).tolist():
                    changes.counts.add(token, -1)
                changes.counted = position
            for token in self.table.read(job.seq.row, changes.counted, position).tolist():
                changes.counts.add(token, 1)
            changes.counted = position


def penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
