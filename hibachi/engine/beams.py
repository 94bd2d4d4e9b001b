"""Beam search: the rows of a request go on from one another, so that the likeliest sequences stay.

As transformers defines it (`GenerationMixin._beam_search`): of all rows' next tokens the likeliest are looked at, one
and a half times as many as there are beams or more. Those that end, among the first ones, become results; the others go
on. What ends the search is `early_stopping`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.engine.guide.protocol import GuideFailed
from hibachi.engine.runners.guiding import Guided, stuck
from hibachi.engine.runners.job import Job, Linked, stopped
from hibachi.engine.runners.linked import Draws, LinkRows
from hibachi.engine.runners.runner import NOT_FINITE, Part, Sampler
from hibachi.engine.runners.sampler import RowSampler, nothing_left
from hibachi.engine.scheduler.sequence import Seq, linked
from hibachi.engine.scheduler.step import StepPlan
from hibachi.errors import HibachiError, NonFiniteOutput
from hibachi.request import Beams, Finish

LOWEST = np.float32(-np.inf)


class FoundBeam(NamedTuple):
    """A sequence that is complete. score: see `Beams`. tokens: of the output. finish: why it ended. stop: with a stop
    token.
    """

    score: float
    tokens: list[int]
    finish: Finish
    stop: bool


@dataclass(frozen=True, slots=True)
class SearchState:
    """Of a search after some tokens: for each row its score, float32 [width], -inf for one that is there for nothing,
    and its guide. results: the best first. trail: of each token so far, the rows that they went on from and ids.
    """

    scores: HostArray
    guides: list[Guided | None]
    results: list[FoundBeam] = field(default_factory=list)
    trail: tuple[Any, HostArray, HostArray] | None = None

    def tokens(self, row: int) -> list[int]:
        out, trail = [], self.trail
        while trail is not None:
            trail, parents, ids = trail
            out.append(int(ids[row]))
            row = int(parents[row])
        return out[::-1]


def search(jobs: list[Job], silent: Sequence[Job], beams: Beams, backend: ArrayBackend) -> None:
    """Link the jobs of a caller, and others that are there for the search only."""
    for job in silent:
        job.silent = True
    rows = [*jobs, *silent]
    ticket = linked([job.seq for job in rows], alike=len(rows) > 1, parts=False)  # one has nothing to fork from
    Linked(ticket, rows, Search(beams, rows, backend))


class Search(Draws):
    """The search of one request. Its states by the number of tokens: a step that did not happen is drawn again."""

    kind: Hashable = "beams"

    def __init__(self, beams: Beams, jobs: list[Job], backend: ArrayBackend) -> None:
        self._beams, self._jobs, self._backend = beams, jobs, backend
        self._states: list[SearchState] = []

    @override
    def draw(self, sampler: Sampler, plan: StepPlan, links: Sequence[LinkRows], out: Array) -> Part:
        assert isinstance(sampler, RowSampler)
        at = np.array([i for link in links for i in link.at])
        idx = np.array([i for link in links for i in link.places])
        real = idx[plan.q[idx] > 0]
        jobs: list[Job] = [plan.seqs[i].owner for i in real.tolist()]
        for link in links:
            link.linked.draws.guide(int(plan.end[link.places[0]]))
        wide = max(link.linked.draws.candidates(sampler.vocab_size) for link in links)
        ranked = sampler.ranked(sampler.rows(out, at), jobs, plan.rows[real], plan.end[real], wide)
        fine = ranked.values.max(axis=1) < np.inf  # not of NaN
        tokens, over = np.zeros(len(idx), np.int32), np.zeros(len(idx), bool)
        faults, parents = dict[int, HibachiError](), list[tuple[Seq, Seq]]()
        first = place = 0
        for link in links:
            search, n, width = link.linked.draws, len(link.at), len(link.places)
            mine, rows = slice(first, first + n), slice(place, place + width)
            first, place = first + n, place + width
            fault = next((ranked.faults[i] for i in range(mine.start, mine.stop) if i in ranked.faults), None)
            if not fine[mine].all():
                fault = NonFiniteOutput(NOT_FINITE)
            if fault is None:
                try:
                    most = search.candidates(sampler.vocab_size)
                    moved, ids, ended = search.advance(
                        ranked.values[mine, :most], ranked.ids[mine, :most], int(plan.end[link.places[0]])
                    )
                except HibachiError as e:
                    fault = e
            if fault is not None:
                faults[link.places[0]] = fault
                continue
            tokens[rows], over[rows] = ids, ended
            seqs = [job.seq for job in link.linked.jobs]
            parents += [(seqs[k], seqs[of]) for k, of in enumerate(moved.tolist()) if of != k]
        return Part(idx, tokens, None, over, faults=faults, heads=0, parents=parents)

    # ---- one search ----------------------------------------------------------------------------------------------

    def candidates(self, vocab: int) -> int:
        """How many of the likeliest tokens of each row are looked at."""
        stop = self._jobs[0].stop
        ends = 0 if stop is None or stop.tokens is None else len(stop.tokens)
        return min(max(2, 1 + ends) * len(self._jobs), vocab)

    def guide(self, position: int) -> None:
        """Give each row the guide that it has at this position."""
        n = position - self._jobs[0].seq.prompt_len
        if not n:
            self._states[:] = [self._begin()]
        del self._states[n + 1 :]
        if n:
            self._states[n - 1].guides.clear()  # never to be gone back to
        for job, guided in zip(self._jobs, self._states[n].guides, strict=True):
            job.guided = guided

    def _begin(self) -> SearchState:
        scores = np.full(len(self._jobs), LOWEST)
        scores[0] = 0
        return SearchState(scores, [job.guided for job in self._jobs])

    def advance(self, values: HostArray, ids: HostArray, position: int) -> tuple[HostArray, HostArray, bool]:
        """Take the next tokens. values, ids [rows, k]: of the rows that were computed.

        Returns for each row the one that it goes on from, and its token, [width]; and whether the search is over.
        Raises InvalidRequest.
        """
        job, width = self._jobs[0], len(self._jobs)
        n = position - job.seq.prompt_len
        state = self._states[n]
        scores = (state.scores[: len(values), None] + values).reshape(-1)
        rows, tokens = np.repeat(np.arange(len(values)), values.shape[1]), ids.reshape(-1).astype(np.int32)
        order = np.lexsort((rows, tokens, -scores))[: self.candidates(scores.size)]
        order = order[np.isfinite(scores[order])]
        scores, rows, tokens = scores[order], rows[order], tokens[order]
        stops = np.zeros(len(order), bool)
        if job.stop is not None and len(order):
            stops = stopped([job] * len(order), tokens, None, self._backend, np.full(len(order), position))
        going, results, guides = list[int](), list(state.results), dict[int, Guided | None]()
        last = position + 1 >= job.seq.end
        for i, (stop, row, token) in enumerate(zip(stops.tolist(), rows.tolist(), tokens.tolist(), strict=True)):
            if len(going) == width:
                break
            guided = state.guides[row]
            if guided is not None and not stop:
                guides[i] = guided = guided.fork()
                try:
                    whole = guided.came(token)
                except GuideFailed as e:
                    raise stuck(e) from None
            else:
                whole = False
            if not (stop or whole or last):
                going.append(i)
            elif i < width:
                score = float(scores[i]) / (n + 1) ** self._beams.length_penalty
                finish = Finish.STOP if stop or whole else Finish.LENGTH
                results.append(FoundBeam(score, [*state.tokens(row), token], finish, stop))
        if not (going or results):
            raise nothing_left()
        results = sorted(results, key=lambda result: -result.score)[:width]
        best = float(scores[going[0]]) if going else None
        over = best is None or self._settled(results, best, n + 1)
        moved, ids_, kept = self._placed(rows[going].tolist())
        new = SearchState(np.full(width, LOWEST), [None] * width, results, (state.trail, moved, ids_))
        seen = set[int]()
        for row, k in enumerate(kept):
            ids_[row], new.guides[row] = tokens[going[k]], guides.get(going[k])
            if k not in seen:  # of equal rows, the first is there for something
                seen.add(k)
                new.scores[row] = scores[going[k]]
        self._states.append(new)
        return moved, ids_, over

    def _placed(self, parents: list[int]) -> tuple[HostArray, HostArray, list[int]]:
        """Rows for those that go on from `parents` [m], the best first: for each row [width] the row that it goes on
        from, room for its token, and which of the m it is. The first that goes on from a row stays in it; rows that are
        left are as the best is.
        """
        width = len(self._jobs)
        moved, which = np.arange(width), [-1] * width
        later = list[int]()
        for k, row in enumerate(parents):
            if which[row] < 0:
                which[row] = k
            else:
                later.append(k)
        free = [row for row in range(width) if which[row] < 0]
        if parents:
            for row, k in zip(free, later + [0] * (len(free) - len(later)), strict=True):
                moved[row], which[row] = parents[k], k
        return moved, np.zeros(width, np.int32), which if parents else []

    def _settled(self, results: list[FoundBeam], best: float, n: int) -> bool:
        """Whether the search ends after n tokens. best: the score of the best that goes on, not over its length."""
        beams, width = self._beams, len(self._jobs)
        if len(results) < width:
            return False
        if beams.early_stopping is True:
            return True
        length = n
        if beams.early_stopping == "never" and beams.length_penalty > 0:
            length = self._jobs[0].seq.end - self._jobs[0].seq.prompt_len
        return bool(best / length**beams.length_penalty <= results[-1].score)

    @override
    def tell(self, job: Job, reason: Finish) -> tuple[Finish, list[int]]:
        k, results = self._jobs.index(job), self._states[-1].results if self._states else []
        channel = job.channel
        if k >= len(results):  # there were no more
            channel.score = -np.inf
            return reason, []
        result = results[k]
        channel.score = result.score
        shown = result.tokens
        if result.stop:
            channel.stop_token = shown[-1]
            shown = shown if job.request.include_stop is not False else shown[:-1]
        return result.finish, shown
