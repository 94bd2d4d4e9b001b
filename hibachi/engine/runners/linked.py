"""Draws of rows that are linked: outputs wait here until those of all rows that draw together are there."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.nested import arrays_in, with_arrays
from hibachi.engine.runners.calls import Theirs
from hibachi.engine.runners.job import Job, Linked
from hibachi.engine.runners.runner import Outcome, Part, Sampler, isolate
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import StepPlan
from hibachi.request import Finish


class LinkRows(NamedTuple):
    """A link in a step. places: of its rows in the plan. at: which outputs are theirs, as far as they have some."""

    linked: Linked
    places: list[int]
    at: list[int]


class Draws(Protocol):
    """Draws the tokens of links.

    kind: links of one kind are drawn by one call, of the first one's `draw`.
    """

    kind: Hashable

    def draw(self, sampler: Sampler, plan: StepPlan, links: Sequence[LinkRows], out: Array) -> Part:
        """The new tokens of all rows of these links, whose outputs are rows of `out`."""
        ...

    def tell(self, job: Job, reason: Finish) -> tuple[Finish, list[int]]:
        """A job ends. Returns why, and the tokens that it gets at its end only."""
        return reason, []


def forked(plan: StepPlan, idx: Any) -> tuple[Any, Any, list[tuple[Seq, Seq]]]:
    """The rows idx [n] of a plan with those that go on from them, [m]; which of the n each of these draws from, [m];
    and (the other, the one that it goes on from).
    """
    place = {id(plan.seqs[i]): k for k, i in enumerate(idx.tolist())}
    pairs = [(i, first) for i in np.flatnonzero(plan.q == 0).tolist() if id(first := _first(plan.seqs[i])) in place]
    more, of = [i for i, _ in pairs], [place[id(first)] for _, first in pairs]
    at = np.concatenate([np.arange(len(idx)), np.array(of, np.int64)])
    return np.concatenate([idx, np.array(more, np.int64)]), at, [(plan.seqs[i], first) for i, first in pairs]


def _first(seq: Seq) -> Seq:
    assert seq.link is not None
    return seq.link.seqs[0]


@dataclass(slots=True)
class Waiting:
    """Outputs by the place of a row in the plan: an array, and which of its rows."""

    outs: dict[int, tuple[Array, int]] = field(default_factory=dict)
    rows: Any = None  # of the plan

    def keep(self, sampler: Sampler, plan: StepPlan, idx: Any, out: Array, at: Any) -> None:
        """Keep the outputs `at` of the rows idx [n] of a plan."""
        if self.rows is not plan.rows:  # what a step left that failed as a whole
            self.rows, self.outs = plan.rows, {}
        kept = sampler.rows(out, at)  # a copy: the memory is the model's, which may write its next output there
        self.outs.update(zip(idx[at].tolist(), [(kept, k) for k in range(len(at))], strict=True))

    def draw(self, sampler: Sampler, plan: StepPlan, backend: ArrayBackend, theirs: Theirs) -> Outcome:
        """Draw for all links of which every output is there: not where a row is at fault."""
        outs, self.outs = self.outs, {}
        outcome = Outcome([], {})
        if not outs:
            return outcome
        arrays = {id(array): array for array, _ in outs.values()}
        joined, sizes = _joined(list(arrays.values()), backend)
        first = dict(zip(arrays, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
        found: dict[Linked, list[tuple[int, int, int]]] = {}
        for place, (array, k) in outs.items():
            job: Job = plan.seqs[place].owner
            assert job.linked is not None
            found.setdefault(job.linked, []).append((job.member, place, first[id(array)] + k))
        vacant = np.flatnonzero(plan.q == 0).tolist()
        kinds: dict[Hashable, list[LinkRows]] = {}
        for linked, rows in found.items():
            assert linked.ticket.link is not None
            rows.sort()
            places = [place for _, place, _ in rows]
            places += [i for i in vacant if plan.seqs[i].link is linked.ticket.link]
            if len(places) == len(linked.ticket.link.seqs):
                kinds.setdefault(linked.draws.kind, []).append(LinkRows(linked, places, [at for *_, at in rows]))
        for links in kinds.values():
            outcome += _drawn(sampler, plan, links, joined, backend, theirs)
        return outcome


def _joined(outs: list[Array], backend: ArrayBackend) -> tuple[Array, list[int]]:
    """Outputs, or nestings of them, one after another; and how many rows each has."""
    found = [[array for _, array in arrays_in(out, backend.owns)] for out in outs]
    sizes = [int(arrays[0].shape[0]) for arrays in found]
    if len(outs) == 1:
        return outs[0], sizes
    return with_arrays(
        outs[0], backend.owns, [backend.xp.concat(list(c), axis=0) for c in zip(*found, strict=True)]
    ), sizes


def _drawn(
    sampler: Sampler, plan: StepPlan, links: list[LinkRows], out: Array, backend: ArrayBackend, theirs: Theirs
) -> Outcome:
    """Draw for links; one that fails, alone, is at fault."""
    by_place = {link.places[0]: link for link in links}

    def part(idx: Any) -> Part:
        some = [by_place[i] for i in idx.tolist()]
        draws: Draws = some[0].linked.draws
        return draws.draw(sampler, plan, some, out)

    return isolate(part, np.array(list(by_place)), backend, theirs)


def firsts(links: Sequence[LinkRows]) -> tuple[list[Job], Any]:
    """The first job of each link, and its place in the plan, [n]."""
    return [link.linked.jobs[0] for link in links], np.array([link.places[0] for link in links])


def for_all(part: Part, links: Sequence[LinkRows], tokens: HostArray) -> Part:
    """A part of the first row of each link, as one of all their rows, which get the same tokens."""
    owner = np.array([k for k, link in enumerate(links) for _ in link.places[1:]], np.int64)
    others = np.array([i for link in links for i in link.places[1:]], np.int64)
    at = np.concatenate([np.arange(len(links)), owner])
    part.heads = len(part.idx)
    part.idx, part.tokens, part.stopped = np.concatenate([part.idx, others]), tokens[at], part.stopped[at]
    part.bad = None if part.bad is None else np.concatenate([part.bad, np.zeros(len(others), bool)])
    part.whole = None if part.whole is None else part.whole[at]
    return part
