"""Calls of rows with proposals: which tokens a piece of a step has, and where its outputs go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.runner import Part
from hibachi.engine.runners.sampler import Drawn, RowSampler


class Piece(NamedTuple):
    """Tokens of n rows in one call. own [n]: known ones. last [n]: the row has outputs. draft [n], proposals [sum]:
    tokens behind the known ones; None means there are none.
    """

    own: Any
    last: Any
    draft: Any = None
    proposals: HostArray | None = None


class Again(NamedTuple):
    """Rows, by their places among others, and what they compute again."""

    rows: Any
    ahead: Ahead


class Ahead:
    """What rows [B] compute in a step: known tokens up to `end`, and proposals behind them.

    draft [B]: how many of the latter, 0 where a row does not emit; proposals [sum]: one row's after another's. Both
    None means there are none.
    """

    def __init__(self, end: Any, emit: Any, draft: Any = None, proposals: HostArray | None = None) -> None:
        self._known, self._emit, self.draft, self._proposals = end, emit, draft, proposals
        self.end: Any = end if draft is None else end + draft
        self._first: Any = None if draft is None else np.cumsum(draft) - draft

    def piece(self, mine: Any, at: Any, n: Any) -> Piece:
        """Of the rows `mine`, so many tokens from there on, [n] each. Outputs are wanted of the last known token and of
        all proposals.
        """
        known, stop, emit = self._known[mine], at + n, self._emit[mine]
        if self.draft is None or self._proposals is None:
            return Piece(n, emit & (stop == known))
        draft, last = np.clip(stop - np.maximum(known, at), 0, n), emit & (stop >= known)
        first = self._first[mine] + np.maximum(at - known, 0)
        within = np.arange(draft.sum()) - np.repeat(np.cumsum(draft) - draft, draft)
        return Piece(n - draft, last, draft, self._proposals[np.repeat(first, draft) + within])

    def whole(self, start: Any) -> Piece:
        """All that the rows compute, from there on, [B]."""
        return Piece(self._known - start, self._emit, self.draft, self._proposals)

    @property
    def counts(self) -> Any:
        """How many outputs each row has, [B]."""
        return np.where(self._emit, 1 if self.draft is None else self.draft + 1, 0)

    def kept(self, part: Part, end: Any) -> Any:
        """Up to where the rows that emit have computed tokens that stay, [n].

        part: what these rows have drawn, in their order. end [n]: how many tokens they had before.
        """
        assert part.counts is not None
        return np.clip(end + part.counts - 1, end, self.end[np.flatnonzero(self._emit)])

    def wrong(self, part: Part, end: Any) -> Again:
        """The rows of which some proposals were wrong, and that go on: they keep what came before these. part, end: as
        of `kept`.
        """
        assert self._proposals is not None
        rows, kept = np.flatnonzero(self._emit), self.kept(part, end)
        over = part.stopped.copy()
        if part.bad is not None:
            over |= part.bad
        at = np.flatnonzero((kept < self.end[rows]) & ~over)
        rows, kept = rows[at], kept[at].astype(np.int32)
        known = np.minimum(self._known[rows], kept)
        draft = kept - known
        within = np.arange(draft.sum()) - np.repeat(np.cumsum(draft) - draft, draft)
        tokens = self._proposals[np.repeat(self._first[rows], draft) + within]
        return Again(rows, Ahead(known, np.zeros(len(rows), bool), draft, tokens))

    def outputs(self, mine: Any, piece: Piece) -> Any:
        """How many outputs each row has in this piece, [n]."""
        if piece.draft is None:
            return piece.last.astype(np.int64)
        return np.where(piece.last, piece.draft + (piece.own > 0), 0)


class Outs:
    """The logits of rows' outputs, in one call or several. counts [n]: outputs of each row."""

    def __init__(self, backend: ArrayBackend, counts: Any) -> None:
        self._backend = backend
        self._arrays: list[Array] = []
        self._first, self._done = np.cumsum(counts) - counts, np.zeros(len(counts), np.int64)
        total = int(counts.sum())
        self._which, self._at = np.zeros(total, np.int64), np.arange(total)

    def add(self, out: Array, mine: Any, counts: Any) -> None:
        """The outputs of a call, [m, vocab]: so many for each of the rows `mine`, one row's after another's, and
        padding. A row's outputs come in their order.
        """
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        self.put(out, np.repeat(self._first[mine] + self._done[mine], counts) + within)
        self._done[mine] += counts

    def put(self, out: Array, places: Any) -> None:
        """The outputs of a call, [m, vocab], which are those number `places` [n] of all, and padding; -1 for one that
        nobody wants.
        """
        at = np.flatnonzero(places >= 0)
        self._which[places[at]], self._at[places[at]] = len(self._arrays), at
        self._arrays.append(out)

    def draw(self, sampler: RowSampler, places: Any, jobs: Sequence[Job], rows: Any, positions: Any) -> Drawn:
        """`RowSampler.draw` from the outputs number `places` [n], in calls of the shapes that they have."""
        which = self._which[places]
        if (which == which[0]).all():
            return sampler.draw(self._rows(sampler, int(which[0]), self._at[places]), jobs, rows, positions)
        whole = Drawn(np.zeros(len(places), np.int32), np.zeros(len(places), bool), {})
        for k in np.unique(which).tolist():
            mine = np.flatnonzero(which == k)
            out = self._rows(sampler, k, self._at[places[mine]])
            part = sampler.draw(out, [jobs[i] for i in mine.tolist()], rows[mine], positions[mine])
            whole.tokens[mine] = part.tokens
            if part.bad is not None:
                whole.bad[mine] = part.bad
            whole.logprobs |= {int(mine[i]): found for i, found in part.logprobs.items()}
            whole.faults |= {int(mine[i]): fault for i, fault in part.faults.items()}
        return whole

    def _rows(self, sampler: RowSampler, k: int, at: Any) -> Array:
        return _rows_of(self._arrays[k], at, sampler, self._backend)


class OneCall:
    """`Outs` where one call has all of them, in their order: `out`, with padding at its end."""

    def __init__(self, backend: ArrayBackend, out: Array) -> None:
        self._backend, self._out = backend, out

    def draw(self, sampler: RowSampler, places: Any, jobs: Sequence[Job], rows: Any, positions: Any) -> Drawn:
        """As `Outs.draw`."""
        return sampler.draw(_rows_of(self._out, places, sampler, self._backend), jobs, rows, positions)


def _rows_of(out: Array, at: Any, sampler: RowSampler, backend: ArrayBackend) -> Array:
    if (len(at) == out.shape[0] or backend.shapes.compiled) and (at == np.arange(len(at))).all():
        return out  # what is more is padding, or not wanted
    return sampler.rows(out, at)
