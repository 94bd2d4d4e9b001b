"""Guided requests in a step: which tokens may come, and which requests are complete with the token that has come."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from hibachi.backend.array_backend import HostArray
from hibachi.backend.masks import ALL, forbid, words
from hibachi.engine.guide.protocol import Guide, GuideFailed, Guides
from hibachi.engine.runners.tokentable import TokenTable
from hibachi.errors import HibachiError, InvalidRequest


class Guided:
    """A request's guide, and how many tokens of its output it has seen.

    What is drawn is told to the guide at once. If the step then fails, the guide takes back what has not come.

    closed: end tokens that do not end this request, so they may not come.
    """

    __slots__ = ("closed", "guide", "guides", "seen")

    def __init__(self, guides: Guides, guide: Guide, ends: Collection[int]) -> None:
        """ends: the request's stop tokens."""
        self.guides, self.guide, self.seen = guides, guide, 0
        self.closed: tuple[int, ...] = tuple(i for i in guides.eos_ids if i not in ends)

    def bring_to(self, n: int, read: Callable[[int, int], HostArray]) -> None:
        """Bring the guide to the first n tokens. read: the tokens from one place to another. Raises GuideFailed."""
        if self.seen > n:
            self.guide.take_back(self.seen - n)
        elif self.seen < n:
            self.guide.advance(read(self.seen, n).tolist())
        self.seen = n

    def came(self, token: int) -> bool:
        """A token has come; returns whether the output is complete with it. Raises GuideFailed."""
        self.guide.advance([token])
        self.seen += 1
        return self.guide.complete


def allowed(
    jobs: Sequence[Any], rows: Any, positions: Any, table: TokenTable, vocab_size: int
) -> tuple[HostArray, dict[int, HibachiError]]:
    """What may come next of guided jobs [n]: bits as in `Guides.masks`, uint32 [n, ceil(vocab_size / 32)], and errors
    by place, whose bits are all ones. rows, positions [n]: of the tokens that are to be drawn.
    """
    bits = np.full((len(jobs), words(vocab_size)), ALL, np.uint32)
    faults: dict[int, HibachiError] = {}
    ready = []
    for i, (job, row, position) in enumerate(zip(jobs, rows.tolist(), positions.tolist(), strict=True)):
        first = job.seq.prompt_len
        if job.guided.seen == position - first:
            ready.append(i)
            continue

        def read(start: int, end: int, row: int = row, first: int = first) -> HostArray:
            return table.read(row, first + start, first + end)

        try:
            job.guided.bring_to(position - first, read)
        except GuideFailed as e:
            faults[i] = stuck(e)
        else:
            ready.append(i)
    if ready:
        whole = len(ready) == len(jobs)
        into = bits if whole else np.empty((len(ready), bits.shape[1]), np.uint32)
        guides: Guides = jobs[ready[0]].guided.guides
        failed = guides.masks([jobs[i].guided.guide for i in ready], into)
        if not whole:
            bits[ready] = into
        for i, failure in zip(ready, failed, strict=True):
            if failure is not None:
                bits[i] = ALL
                faults[i] = stuck(failure)
            if closed := jobs[i].guided.closed:
                forbid(bits[i], closed)
    return bits, faults


def completed(jobs: Sequence[Any], tokens: HostArray, stopped: Any, skip: Any) -> tuple[Any, dict[int, HibachiError]]:
    """Tell guides which token has come: returns which requests are complete with it, bool [n], and errors by place.

    tokens int32 [n]. stopped [n]: a stop token has come, which no guide is told of. skip [n]: the token counts for
    nothing.
    """
    whole, faults = np.zeros(len(jobs), bool), dict[int, HibachiError]()
    for i, job in enumerate(jobs):
        if job.guided is not None and not stopped[i] and not skip[i]:
            try:
                whole[i] = job.guided.came(int(tokens[i]))
            except GuideFailed as e:
                faults[i] = stuck(e)
    return whole, faults


def stuck(error: GuideFailed) -> InvalidRequest:
    why = str(error).rstrip(".")
    return InvalidRequest(
        f"The output cannot go on in the form that structured_outputs asks for: {why}. Make the form simpler, or "
        f"loosen what else limits tokens."
    )
