"""Guided requests in a step: which tokens may come, and which requests are complete with the token that has come.

All that guides compute is timed, for `Turns`. Where many rows turn slow in one step, those of them that nobody has
waited for yet end with an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from hibachi.backend.array_backend import HostArray
from hibachi.backend.masks import ALL, forbid, words
from hibachi.engine.guide.protocol import Guide, GuideFailed, GuideMaker
from hibachi.engine.guide.turns import BURST, FREE, LONG, MOST, SUDDEN, FormTime
from hibachi.engine.runners.tokentable import TokenTable
from hibachi.errors import HibachiError, InvalidRequest

AT_ONCE = 16  # rows of one form whose masks are computed in one call: between two calls the clock is read
TOO_LONG = "Its tokens take too long to work out."


class Guided:
    """A request's guide, and how many tokens of its output it has seen.

    What is drawn is told to the guide at once. If the step then fails, the guide takes back what has not come.

    closed: end tokens that do not end this request, so they may not come. form, latest: as of `turns.InTurn`. took:
    seconds for its next token so far, before its mask.
    """

    __slots__ = ("closed", "form", "guide", "guides", "latest", "seen", "took")

    def __init__(self, guides: GuideMaker, guide: Guide, ends: Collection[int], form: FormTime) -> None:
        """ends: the request's stop tokens."""
        self.guides, self.guide, self.seen, self.form = guides, guide, 0, form
        self.took = self.latest = 0.0
        self.closed: tuple[int, ...] = tuple(i for i in guides.eos_ids if i not in ends)

    def bring_to(self, n: int, read: Callable[[int, int], HostArray]) -> None:
        """Bring the guide to the first n tokens. read: the tokens from one place to another. Raises GuideFailed."""
        if self.seen > n:
            self.guide.take_back(self.seen - n)
        elif self.seen < n:
            self.guide.advance(read(self.seen, n).tolist())
        self.seen = n

    def fork(self) -> Guided:
        """A guide of its own for another request, which has seen the same tokens."""
        new = Guided(self.guides, self.guide.fork(), self.guides.eos_ids, self.form)
        new.closed, new.seen = self.closed, self.seen
        return new

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
        failed = masks([jobs[i].guided for i in ready], into)
        if not whole:
            bits[ready] = into
        for i, failure in zip(ready, failed, strict=True):
            if failure is not None:
                bits[i] = ALL
                faults[i] = stuck(failure)
            if closed := jobs[i].guided.closed:
                forbid(bits[i], closed)
    return bits, faults


def masks(some: Sequence[Guided], bits: HostArray) -> list[GuideFailed | None]:
    """Fill bits, uint32 [n, words], with the masks of n rows, and note what they take. Returns failures by place."""
    failed: list[GuideFailed | None] = [None] * len(some)
    began = perf_counter()
    for part in _parts(some):
        form, now = some[part[0]].form, perf_counter()
        if form.hopeless or (form.seconds > LONG and now - began > MOST):
            for i in part:
                failed[i] = GuideFailed(TOO_LONG)
            continue
        whole = len(part) == len(some)
        into = bits if whole else np.empty((len(part), bits.shape[1]), np.uint32)
        found = some[part[0]].guides.masks([some[i].guide for i in part], into)
        note([some[i] for i in part], now)
        if whole:
            return found
        bits[part] = into
        for i, failure in zip(part, found, strict=True):
            failed[i] = failure
    return failed


def _parts(some: Sequence[Guided]) -> Iterator[list[int]]:
    """Places of rows whose masks are computed together: ordinary ones of one maker, then each form that is slow."""
    left = list(range(len(some)))
    while ordinary := [i for i in left if not some[i].form.slow]:  # one may turn slow with each call
        had = Counter[FormTime]()
        part = []
        for i in ordinary:
            if some[i].guides != some[ordinary[0]].guides:
                continue
            had[some[i].form] += 1
            if had[some[i].form] <= AT_ONCE:
                part.append(i)
        yield part
        if len(part) == len(left):
            return
        done = set(part)
        left = [i for i in left if i not in done]
    slow: dict[FormTime, list[int]] = {}
    for i in left:
        slow.setdefault(some[i].form, []).append(i)
    for form, places in sorted(slow.items(), key=lambda item: item[0].seconds):
        n = max(1, min(AT_ONCE, int(BURST / max(form.seconds, FREE))))
        for i in range(0, len(places), n):
            yield places[i : i + n]


def note(some: Sequence[Guided], began: float, tokens: Sequence[int] | None = None) -> None:
    """The next tokens of these rows were worked out together since `began`, by `time.perf_counter()`.

    tokens: how many of each row; None means one.
    """
    now = perf_counter()
    n = len(some) if tokens is None else sum(tokens)
    each, forms = (now - began) / n, {guided.form for guided in some}
    if len(forms) == 1 or now - began + sum([guided.took for guided in some]) > SUDDEN + FREE * n:
        for form in forms:
            mine = [i for i, guided in enumerate(some) if guided.form is form]
            count = len(mine) if tokens is None else sum(tokens[i] for i in mine)
            form.note(count, each * count + sum(some[i].took for i in mine))
    for guided in some:
        guided.took, guided.latest = 0.0, now


def completed(jobs: Sequence[Any], tokens: HostArray, stopped: Any, skip: Any) -> tuple[Any, dict[int, HibachiError]]:
    """Tell guides which token has come: returns which requests are complete with it, bool [n], and errors by place.

    tokens int32 [n]. stopped [n]: a stop token has come, which no guide is told of. skip [n]: the token counts for
    nothing.
    """
    whole, faults = np.zeros(len(jobs), bool), dict[int, HibachiError]()
    began = now = perf_counter()
    last: dict[FormTime, float] = {}  # what a row of each form has just taken
    for i, job in enumerate(jobs):
        guided: Guided | None = job.guided
        if guided is None or stopped[i] or skip[i]:
            continue
        if now - began > MOST and last.get(guided.form, 0.0) > LONG:
            faults[i] = stuck(GuideFailed(TOO_LONG))
            continue
        try:
            whole[i] = guided.came(int(tokens[i]))
        except GuideFailed as e:
            faults[i] = stuck(e)
        before, now = now, perf_counter()
        guided.took += now - before
        last[guided.form] = now - before
    return whole, faults


def stuck(error: GuideFailed) -> InvalidRequest:
    why = str(error).rstrip(".")
    return InvalidRequest(
        f"The output cannot go on in the form that structured_outputs or allowed asks for: {why}. Make the form "
        f"simpler, or loosen what else limits tokens."
    )
