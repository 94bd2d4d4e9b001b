"""Samples token ids from logits for the rows of a step: the parameters of each row, and few batched draws.

The program that draws for a row depends on the row's own parameters and logits, never on its neighbours: programs
differ in rounding, and a request must get the same tokens whatever shares the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.rowedits import RowEdits, penalised
from hibachi.engine.runners.tokentable import TokenTable
from hibachi.engine.sampling import draw as sampling
from hibachi.engine.sampling.draw import CANDIDATES, FAR, NEAR, PLAIN, WORTH, path_of
from hibachi.engine.sampling.logprobs import Likely, likely, logprobs, mass_of, named
from hibachi.engine.sampling.rows import top_of_row
from hibachi.engine.sampling.uniforms import uniforms
from hibachi.errors import HibachiError, InvalidRequest
from hibachi.request import FILTERS, SamplingParams

log: logging.Logger = logging.getLogger("hibachi.engine")
LOGITS = "The engine takes the softmax itself: leave it out, or return the log of the probabilities."
ROUNDED = 1e-2  # off the sum of probabilities that may be of 16 bits
LOOKS, SURE = 8, 3  # calls of an engine that are looked at, until so many of their rows are probabilities
LIKELY = (16, 128)  # sizes of the list of most likely tokens for log-probabilities; for longer ones, the whole row


@dataclass(slots=True)
class Drawn:
    """Result of a draw for n rows."""

    tokens: HostArray  # int32 [n], or [n, codebooks]
    bad: Any  # bool [n]: the model's logits were not finite; None means all were
    logprobs: dict[int, Any]  # log-probabilities by place, where asked for: {id: number}, or one for each codebook
    faults: dict[int, HibachiError] = field(default_factory=dict)  # other errors of requests, by place


class RankedTokens(NamedTuple):
    """The most likely tokens of n rows: log-probabilities, float32 [n, k], falling, NaN last, and ids, int [n, k], of
    equal ones the lower first; errors of requests by place.
    """

    values: HostArray
    ids: HostArray
    faults: dict[int, HibachiError]


class RowSampler:
    """Sampling parameters by row, and the draw for a step. Randomness comes from the host, by (seed, position)."""

    backend: ArrayBackend
    vocab_size: int
    shape: tuple[int, ...]
    """Of the logits of one token."""
    depth: Any = None  # see `hibachi.engine.runners.runner.Sampler`

    def __init__(self, backend: ArrayBackend, rows: int, vocab_size: int, table: TokenTable, model: str = "") -> None:
        """model: its name, to be told if what it returns are no logits; "" means it is known to return these."""
        self._model, self._looks, self._alike = model, LOOKS if model and vocab_size > 2 else 0, 0
        self.backend, self.vocab_size, self.shape = backend, vocab_size, (vocab_size,)
        self._edits = RowEdits(backend, rows, vocab_size, table)
        self._path = np.zeros(rows, np.int32)
        self._filters = {f.name: np.zeros(rows, np.int32 if f.integer else np.float32) for f in FILTERS if f.draws}
        self._temperature = self._filters["temperature"]
        self._seed = np.zeros(rows, np.uint64)
        self._asked = np.zeros(rows, bool)  # wants log-probabilities
        self._asks = False  # does a row?
        self._greedy = backend.program(_greedy)

    def admit(self, job: Job, at: int | slice | None = None, seed: Any = None) -> None:
        """at, seed: of its codebooks; None means that it is drawn in the row of its sequence, by its own seed."""
        row = job.seq.row if at is None else at
        self.set(row, job.sampling, job.seed if seed is None else seed)
        self._asked[row] = job.sampling.logprobs is not None
        self._asks = bool(self._asked.any())
        self._edits.admit(job, row)

    def set(self, row: int | slice, params: SamplingParams, seed: Any) -> None:
        """How a row is drawn from now on, without changes to its logits."""
        self._path[row] = path_of(params, self.vocab_size)
        self._seed[row] = seed
        for name, column in self._filters.items():
            column[row] = getattr(params, name)
        self._filters["top_k"][row] = min(max(params.top_k, 0), self.vocab_size)

    def draw(
        self, logits: Array, jobs: Sequence[Job], rows: Any, positions: Any, how: sampling.How | None = None
    ) -> Drawn:
        """One token for each job. logits [m, vocab], m >= n (rows beyond n are padding); rows, positions [n]. how: of
        these rows, as `hows` gives it; None means that it is made here.
        """
        positions = np.asarray(positions)
        special = self._edits.wanted(rows, positions) if self._edits.some else None
        faults: dict[int, HibachiError] = {}
        if special is None or not special.any():
            tokens, ok = self.choose(logits, rows, positions, how)
        else:
            tokens, ok = np.zeros(len(rows), np.int32), np.ones(len(rows), bool)
            if len(at := np.flatnonzero(~special)):
                tokens[at], ok[at] = self.choose(self.rows(logits, at), rows[at], positions[at])
            at = np.flatnonzero(special)
            tokens[at], ok[at], faults = self._choose_changed(logits, at, jobs, rows[at], positions[at])
        found = {}
        if self._asks and (asked := {i: n for i, job in enumerate(jobs) if (n := job.sampling.logprobs) is not None}):
            at = np.array(list(asked))
            of = logits if len(at) == logits.shape[0] else self.rows(logits, at)
            found = dict(zip(asked, self.logprobs(of, tokens[at], list(asked.values())), strict=True))
        return Drawn(tokens, None if np.count_nonzero(ok) == len(ok) else ~ok, found, faults)

    def looks_back(self, rows: Any) -> Any:
        """Which rows draw a token by what came before it, besides by its logits: bool [n]."""
        return self._edits.looks_back(rows)

    def sure(self, jobs: Sequence[Job], rows: Any, positions: Any) -> Any:
        """How many of their first proposals rows get without a look at logits, int32 [n]: those that a guide leaves no
        choice about, where nothing else decides, and nobody wants their log-probabilities.
        """
        sure = np.array([job.sure if job.sampling.logprobs is None else 0 for job in jobs], np.int32)
        return np.where(self._edits.only_guided(rows, positions), sure, 0) if sure.any() else sure

    def plain(self, jobs: Sequence[Job], rows: Any, positions: Any) -> bool:
        """Whether `begin`, and `begin_late` where they are guided, can draw for these: not where the host must see
        logits or tokens before the draw is over.
        """
        return (
            (self.backend.draws or not (self._path[rows] != PLAIN).any())
            and not self._edits.wanted_at_once(rows, np.asarray(positions)).any()
            and not (self._asks and self._asked[rows].any())
            and self.backend.draw_rows is None
        )

    def begin(self, logits: Array, rows: Any, positions: Any, how: sampling.How | None = None) -> tuple[Array, Array]:
        """`draw` for rows that are `plain`, on the device: tokens int32 [m], and which rows are finite, bool [m]."""
        if not self._temperature[rows].any():
            greedy: tuple[Array, Array] = self._greedy(logits)
            return greedy
        found: tuple[Array, Array]
        how = how or self._how(rows, positions, logits.shape[0])
        if self.backend.draws:
            found = self.backend.program(_drawn)(logits, how)
        else:
            found = self.backend.program(sampling.draw_by, PLAIN)(logits, how)[:2]
        return found

    def begin_late(
        self, logits: Array, at: Any, jobs: Sequence[Job], rows: Any, positions: Any
    ) -> tuple[Array, Array, Array, dict[int, HibachiError]]:
        """`begin` for the guided rows `at` [n] of the logits, once the tokens before are known. rows, positions [n]: of
        these jobs.

        Returns their tokens, which rows can be drawn from, and which were finite, [m >= n] each; and errors by place.
        """
        padded = self._padded(at)
        filled = _longer(rows, len(padded))
        changed, before, faults = self._edits.apply(logits, padded, jobs, filled, positions)
        ids, ok = self.begin(changed, rows, positions)
        return ids, ok, before, faults

    def logprobs(self, logits: Array, tokens: HostArray, wanted: Sequence[int]) -> list[dict[int, float]]:
        """{token id: log-probability} of the `wanted` most likely tokens and of `tokens` [n]. logits [m, vocab]."""
        get, put = self.backend.get, self.backend.put
        n, m = len(tokens), logits.shape[0]
        if not n:  # a piece of a chunk in which no output is wanted
            return []
        sizes = [self._list_size(w) for w in wanted]
        size = sizes[0]
        if any(other != size for other in sizes):  # the length of a row's list decides how ties are broken
            named_by: dict[int, dict[int, float]] = {}
            for size in dict.fromkeys(sizes):
                at = np.array([i for i, other in enumerate(sizes) if other == size])
                some_of = self.logprobs(self.rows(logits, at), tokens[at], [wanted[i] for i in at])
                named_by.update(zip(at.tolist(), some_of, strict=True))
            return [named_by[i] for i in range(n)]
        one = self.backend.draw_rows
        if one is not None and m != one:
            groups = [np.arange(i, min(i + one, n)) for i in range(0, n, one)]
            found = [
                self.logprobs(self.rows(logits, at), tokens[at], [wanted[i] for i in at.tolist()]) for at in groups
            ]
            return [each for group in found for each in group]
        of = np.concatenate([tokens, np.zeros(m - n, tokens.dtype)]).astype(np.int32)
        some = self.backend.program(_likely, size)(logits, put(of))
        some = Likely(*(None if part is None else get(part) for part in some))
        out = []
        for i, (token, w) in enumerate(zip(tokens.tolist(), wanted, strict=True)):
            names = None
            if w < size or size in (0, self.vocab_size):
                names = named(some, i, token, w, self.vocab_size)
            out.append(logprobs(get(logits[i, ...]), token, w) if names is None else names)
        return out

    def ranked(self, logits: Array, jobs: Sequence[Job], rows: Any, positions: Any, k: int) -> RankedTokens:
        """The k most likely tokens of each of n rows, after their changes. logits [m, vocab], m >= n; rows, positions
        [n].
        """
        n, k = len(rows), min(k, self.vocab_size)
        special = self._edits.wanted(rows, positions) if self._edits.some else np.zeros(n, bool)
        x, faults, logs = logits, dict[int, HibachiError](), False
        mass = self.backend.program(_mass)(logits)
        if special.any():
            at = np.flatnonzero(special)
            some = [jobs[i] for i in at.tolist()]
            if any(job.sampling.logits_processors or penalised(job.sampling) for job in some):
                x, logs = self.backend.program(_log)(logits, mass), True  # what these are given
            padded = self._padded(at)
            changed, _, failed = self._edits.apply(x, padded, some, _longer(rows[at], len(padded)), positions[at])
            if len(at) < n:
                x = self.backend.float32(self.rows(x, np.arange(n)))  # a copy, which may be written to
                changed = self.backend.scatter_rows(x, self.backend.put(padded.astype(np.int32)), changed)
            x = changed
            faults = {int(at[i]): fault for i, fault in failed.items()}
        top = self.backend.program(_top, min(k + 1, self.vocab_size))(x)
        values, ids, sums = (each[:n] for each in self.backend.fetch((*top, mass))())
        order = np.lexsort((ids, -values), axis=-1)
        values, ids = np.take_along_axis(values, order, axis=1), np.take_along_axis(ids, order, axis=1)
        tied = (values[:, k - 1] == values[:, -1]) & np.isfinite(values[:, -1]) & (values.shape[1] > k)
        for i in np.flatnonzero(tied).tolist():  # libraries take any of those that are equal
            row = self.backend.get(self.backend.float32(x[i, ...]))
            ids[i, :k] = np.argsort(-row, kind="stable")[:k]
        with np.errstate(invalid="ignore"):  # of infinities
            return RankedTokens(values[:, :k] - (0 if logs else sums[:, None]), ids[:, :k], faults)

    def _list_size(self, wanted: int) -> int:
        """Length of the list of most likely tokens for a row that asks for this many; 0 means none."""
        return min(next((s for s in LIKELY if wanted < s), LIKELY[-1]), self.vocab_size) if wanted else 0

    def _look(self, logits: HostArray) -> None:
        """Warn once if the first logits of an engine are probabilities."""
        found = probabilities(logits)
        self._alike += found
        self._looks = 0 if found < 0 or self._alike >= SURE else self._looks - 1
        if found > 0 and self._alike >= SURE:
            log.warning("%s returns probabilities (never negative, sum 1). %s", self._model, LOGITS)

    # ---- which program -----------------------------------------------------------------------------------------

    def _choose_changed(
        self, logits: Array, at: Any, jobs: Sequence[Job], rows: Any, positions: Any
    ) -> tuple[HostArray, HostArray, dict[int, HibachiError]]:
        """`choose` for rows `at` of the logits, after their logit changes; and errors by place in `jobs`."""
        padded = self._padded(at)
        chosen = [jobs[i] for i in at.tolist()]
        changed, before, faults = self._edits.apply(logits, padded, chosen, _longer(rows, len(padded)), positions)
        tokens, ok = self.choose(changed, rows, positions)
        before = self.backend.get(before)[: len(at)]
        for i in np.flatnonzero(before & ~ok).tolist():
            faults.setdefault(i, nothing_left())
        return tokens, before, {int(at[i]): fault for i, fault in faults.items()}

    def choose(
        self, logits: Array, rows: Any, positions: Any, how: sampling.How | None = None
    ) -> tuple[HostArray, HostArray]:
        """Tokens int32 [n], and which rows are finite. logits [m, vocab]; rows, positions [n]; how: as for `draw`."""
        n = len(rows)
        if self._looks:
            self._look(self.backend.get(self.backend.float32(logits))[:n])
        if not np.count_nonzero(self._temperature[rows]):
            return self._best(logits, n)
        paths = self._path[rows]
        if self.backend.draws:
            tokens, ok = self.backend.fetch(self.begin(logits, rows, positions, how))()
            return tokens[:n], ok[:n]
        if (paths == paths[0]).all():
            return self._run(int(paths[0]), logits, rows, positions, how)
        tokens, ok = np.zeros(n, np.int32), np.zeros(n, bool)
        for path in np.unique(paths).tolist():
            at = np.flatnonzero(paths == path)
            tokens[at], ok[at] = self._run(path, self.rows(logits, at), rows[at], positions[at])
        return tokens, ok

    def _best(self, logits: Array, n: int) -> tuple[HostArray, HostArray]:
        if (found := self.backend.best_on_host(logits)) is not None:
            return found[0][:n], np.isfinite(found[1][:n])
        tokens, ok = self.backend.fetch(self._greedy(logits))()
        return tokens[:n], ok[:n]

    def _run(
        self, path: int, logits: Array, rows: Any, positions: Any, how: sampling.How | None = None
    ) -> tuple[HostArray, HostArray]:
        """Draw for rows of one path. Rows whose candidate list was too short are drawn again from a longer one."""
        n = len(rows)
        if path == PLAIN and not self._temperature[rows].any():
            return self._best(logits, n)
        size = self.backend.draw_rows
        if size is not None and logits.shape[0] != size:  # the bits of a draw may depend on the shape
            groups = [np.arange(i, min(i + size, n)) for i in range(0, n, size)]
            drawn = [self._run(path, self.rows(logits, at), rows[at], positions[at]) for at in groups]
            return np.concatenate([ids for ids, _ in drawn]), np.concatenate([ok for _, ok in drawn])
        how = how or self._how(rows, positions, logits.shape[0])
        ids, ok, inside = self.backend.program(sampling.draw_by, path)(logits, how)
        tokens, ok, *found = self.backend.fetch([t for t in (ids, ok, inside) if t is not None])()
        tokens, ok = tokens[:n], ok[:n]
        if found and len(at := np.flatnonzero(~found[0][:n] & ok)):
            tokens = tokens.copy()  # the array of a library may be read-only
            further = path + (2 if path % 4 == NEAR and self.vocab_size < WORTH * CANDIDATES[FAR] else 1)
            tokens[at] = self._run(further, self.rows(logits, at), rows[at], positions[at])[0]
        return tokens, ok

    def hows(self, rows: Any, positions: Any, m: int) -> Sequence[sampling.How | None]:
        """How each of k sets of rows [k, n] is drawn at these positions [n], m >= n rows at a time."""
        if not np.count_nonzero(self._temperature[rows]):
            return [None] * len(rows)
        of_all = self._how(rows, positions, m)
        return [sampling.How(*(each[i, ...] for each in of_all)) for i in range(len(rows))]

    def _how(self, rows: Any, positions: Any, m: int) -> sampling.How:
        """For rows [..., n]: arrays [..., m]."""
        columns = [column[rows] for column in self._filters.values()]
        columns.append(uniforms(self._seed[rows], positions))
        return sampling.How(*(self.backend.put(_longer(c, m)) for c in columns))

    def rows(self, logits: Array, at: Any) -> Array:
        """Rows `at` of the logits; padded with more rows if the backend wants few shapes."""
        return self.backend.take(logits, self.backend.put(self._padded(at).astype(np.int32)))

    def _padded(self, at: Any) -> Any:
        if not self.backend.shapes.compiled:
            return at
        one = self.backend.draw_rows
        fill = -len(at) % one if one is not None else (1 << (len(at) - 1).bit_length()) - len(at)
        return _longer(at, len(at) + fill)


def _longer(a: HostArray, size: int) -> HostArray:
    """Filled up along its last axis with the last element."""
    more = size - a.shape[-1]
    return np.pad(a, [*[(0, 0)] * (a.ndim - 1), (0, more)], mode="edge") if more > 0 else a


_NOTHING_LEFT = (
    "The request leaves no token that can come: its structured_outputs, allowed, allowed_token_ids, bad_words, "
    "min_tokens, logit_bias, penalties and logits_processors, with what the model's files forbid, together gave every "
    "token -inf, or one of them infinity or NaN. Loosen them."
)


def nothing_left() -> InvalidRequest:
    return InvalidRequest(_NOTHING_LEFT)


def _greedy(backend: ArrayBackend, logits: Array) -> tuple[Array, Array]:
    return sampling.best(backend, logits)


def _drawn(backend: ArrayBackend, logits: Array, how: sampling.How) -> tuple[Array, Array]:
    ids, most = backend.draw(logits, how)
    return ids, backend.xp.isfinite(most)


def _likely(backend: ArrayBackend, k: int, logits: Array, of: Array) -> Likely:
    return likely(backend, logits, of, k=k)


def _mass(backend: ArrayBackend, logits: Array) -> Array:
    """The logarithm of the sum of exp(logit) of each row, [n]."""
    top, mass = mass_of(backend, backend.float32(logits))
    return top + backend.xp.log(mass)


def _log(backend: ArrayBackend, logits: Array, mass: Array) -> Array:
    """The log-probabilities [n, V]. mass [n]: see `_mass`."""
    return backend.float32(logits) - mass[:, None]


def _top(backend: ArrayBackend, k: int, x: Array) -> tuple[Array, Array]:
    return top_of_row(backend, backend.float32(x), k)


def probabilities(rows: HostArray) -> int:
    """How many of these logits [n, vocab] are probabilities, never negative and with the sum 1; -1 if some are not.

    Rows of one number other than 0, and rows of equal numbers, count for neither: rules and constants have them.
    """
    told = rows[(np.count_nonzero(rows, axis=1) > 1) & (rows.max(axis=1) > rows.min(axis=1))]
    alike = (told.min(axis=1, initial=0) >= 0) & (np.abs(told.sum(axis=1) - 1) < ROUNDED)
    return len(told) if alike.all() else -1
