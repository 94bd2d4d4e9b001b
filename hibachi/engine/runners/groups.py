"""Which rows share a call where models are shown whole sequences, and trials of which calls give each row the same bits
whatever other rows share them.

Libraries choose their code by the shape of a call. Where shapes are equal, a row hardly ever depends on the other rows.
So a row has a width of its own, and calls have one of a few numbers of rows: those between which no bit differs. Where
the width changes no bit either, rows of all lengths share calls.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from hibachi.backend.array_backend import HostArray
from hibachi.common.phases import phases_shown
from hibachi.common.shapes import size_for
from hibachi.engine.runners.calls import drop_frames, is_signal
from hibachi.engine.scheduler.step import StepPlan
from hibachi.errors import NotDeterministic, text_of

log: logging.Logger = logging.getLogger("hibachi.engine")

STEP = 16  # positions: widths are multiples of it, from 256 on of an eighth of the power of two below


def bucket(length: int) -> int:
    """The width of a row of this many tokens where its width must not depend on the other rows."""
    step = max(STEP, (1 << (length - 1).bit_length()) >> 4)
    return -(-length // step) * step


@dataclass(frozen=True, slots=True)
class Call:
    """A forward pass. idx [n]: places in the plan. width: positions that each row is shown. rows: >= n; the rows after
    n are filler.
    """

    idx: Any
    width: int
    rows: int


class Traceless(NamedTuple):
    """Calls of one width in which the other rows change no bit of a row. sizes: the numbers of rows that they may have,
    ascending. joined: rows for which a smaller width would do get the same bits with this one.
    """

    sizes: tuple[int, ...]
    joined: bool


class Known(Protocol):
    """Knowledge about which calls of a model leave a row's bits unchanged."""

    def of(self, width: int) -> Traceless: ...


class Alone:
    """The grouping for a model of which nothing is known: one row a call, of its own width, is always right."""

    def of(self, width: int) -> Traceless:
        return Traceless((1,), False)


@dataclass(frozen=True, slots=True)
class Grouping:
    """How rows are grouped into calls.

    padded: rows of different lengths may share a call. longest: the greatest width. known: calls in which no row
    changes another's bits; None means calls are as large as possible, and as wide as the longest row. bucket: the width
    for a length, where a row's width must be its own.
    """

    padded: bool = False
    longest: int = 2**31
    known: Known | None = None
    bucket: Callable[[int], int] = bucket

    def width(self, length: int) -> int:
        """The width of a row of this many tokens, where its width must be its own."""
        return min(self.bucket(length), self.longest)

    def calls(self, plan: StepPlan, *, kinds: bool) -> list[Call]:
        """The calls of a step. kinds: tokens may be of several kinds."""
        # (The others have no new token yet, and no cache to fill; or go on from another.)
        wanted = np.flatnonzero(plan.emit & (plan.q > 0) if plan.linked else plan.emit)
        if not len(wanted):
            return []
        lengths = plan.end
        groups = _apart(wanted, [plan.seqs[i].owner.kind for i in wanted.tolist()]) if kinds else [wanted]
        out = list[Call]()
        for idx in groups:
            own = lengths[idx]
            if self.known is not None:
                out += self._traceless(self.known, idx, own)
            elif self.padded or (own == own[0]).all():
                out.append(Call(idx, int(own.max()), len(idx)))
            else:
                out += [Call(some, n, len(some)) for some, n in ((idx[own == n], n) for n in np.unique(own).tolist())]
        return out

    def _traceless(self, known: Known, idx: Any, lengths: Any) -> list[Call]:
        if not self.padded:
            apart = [(idx[lengths == n], n, known.of(self.width(n))) for n in np.unique(lengths).tolist()]
        else:
            widths = np.array([self.width(n) for n in lengths.tolist()])
            found = {width: known.of(width) for width in np.unique(widths).tolist()}
            if joined := [width for width, calls in found.items() if calls.joined]:
                widths[np.isin(widths, joined)] = max(joined)
            apart = [(idx[widths == width], width, found[width]) for width in np.unique(widths).tolist()]
        return [call for some, width, calls in apart for call in _cut(some, width, calls.sizes)]


def _cut(idx: Any, width: int, sizes: tuple[int, ...]) -> list[Call]:
    calls, done = list[Call](), 0
    while done < len(idx):
        size = size_for(len(idx) - done, sizes)
        calls.append(Call(idx[done : done + size], width, size))
        done += size
    return calls


def _apart(idx: Any, kinds: list[Any]) -> list[Any]:
    found: dict[Any, list[int]] = {}
    for i, kind in zip(idx.tolist(), kinds, strict=True):
        found.setdefault(kind, []).append(i)
    return [idx] if len(found) == 1 else [np.array(members) for members in found.values()]


BASE = 8  # rows of a call that others are compared with
SIZES = (1, 2, 4, 8, 16, 32, 64)
FIRST = 13, 45  # tokens of the longest row of the first trials
MOST_ROWS = 32  # texts of a trial
MOST_TOKENS = 2**15  # tokens of a call that is tried, as others wait meanwhile. Longer rows are alone

TOLD_AFTER = 2.0  # seconds of trials, until a program without a terminal command is told of them


@contextmanager
def telling(name: str) -> Iterator[None]:
    """While trials run that may take long: the log says so, where no phase is shown to a user."""
    if phases_shown():
        yield
        return
    told = (
        "%s takes long to be tried for whether other requests change the bits of one; requests wait meanwhile. "
        "deterministic=False leaves this out"
    )
    timer = threading.Timer(TOLD_AFTER, log.warning, (told, name))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


Ask = Callable[[list[HostArray], int, int], HostArray]
"""(prompts [length, *tok], width, rows) -> an output [n, ...] for each prompt, from one call with this many rows."""


class Trials:
    """Results of trials by the width of calls; each width is tried when it is first used.

    prompts: tokens of the model, to make rows of. grouping: the width of rows, and whether they may be padded. rows:
    the most there may be. one: calls have `rows` rows and their own width only, as each shape would be compiled.
    """

    def __init__(self, ask: Ask, prompts: Sequence[HostArray], grouping: Grouping, rows: int, *, one: bool) -> None:
        self._ask, self._prompts, self._grouping, self._rows, self._one = ask, prompts, grouping, rows, one
        self._known = dict[int, Traceless]()
        self.compared = 0  # outputs

    def begin(self) -> bool:
        """Run the first trials: does sharing calls work at all? Raises what the model raises."""
        for length in FIRST[:1] if self._one else FIRST:
            width = self._grouping.width(min(length, self._grouping.longest))
            if width not in self._known:
                found = self._try(width)
                if found is None:
                    return False
                self._known[width] = found
        return True

    def again(self) -> int:
        """Run the first trials once more, from scratch; returns how many outputs were compared.

        Raises NotDeterministic, and what the model raises.
        """
        fresh = Trials(self._ask, self._prompts, self._grouping, self._rows, one=self._one)
        if not fresh.begin():
            raise NotDeterministic(
                "Who shares a call changes the bits of a row: expected the same outputs in other places and beside "
                "others; they differ. Pass deterministic=False, or see `hibachi verify` for what depends on the batch."
            )
        return fresh.compared

    def of(self, width: int) -> Traceless:
        if (known := self._known.get(width)) is None:
            try:
                found = self._try(width)
            except BaseException as e:  # the row at fault is found when the rows themselves run
                if is_signal(e):
                    raise
                log.info("a call of width %d could not be tried: %s", width, text_of(e))
                drop_frames(e)
                found = None
            known = self._known[width] = found or Traceless((1,), False)
        return known

    def _try(self, width: int) -> Traceless | None:
        """Try a width. None means that even in calls of one shape a row's bits depend on the others."""
        base = self._rows if self._one else min(BASE, self._rows)
        if base * width > MOST_TOKENS:
            return Traceless((1,), False)
        sizes = [base]
        if not self._one:
            sizes = sorted({base, *(n for n in SIZES if n <= self._rows and n * width <= MOST_TOKENS)})
        padded, joined = self._grouping.padded, [w for w, known in self._known.items() if known.joined and w < width]
        texts = self._texts(width, min(2 * max(sizes[-1], base), MOST_ROWS), [*joined, width])
        want = self._outputs(texts, width, base, 0)
        for turn in (1, base // 2 + 1):  # other places, and others beside
            if not _equal(self._outputs(texts, width, base, turn), want):
                return None
        same = tuple(n for n in sizes if n == base or _equal(self._outputs(texts, width, n, n // 2), want))
        if len(same) < len(sizes):
            log.debug("width %d: calls of %s rows give other bits than those of %d", width, {*sizes} - {*same}, base)
        together = padded and not self._one
        if together:
            # Rows of all lengths may share a call if a row has the same bits in either width.
            for other in joined:
                mine = [i for i, text in enumerate(texts) if len(text) <= other]
                if mine and not _equal(self._outputs([texts[i] for i in mine], other, base, 0), want[mine]):
                    together = False
                    log.debug("a width of %d gives other bits than one of %d", width, other)
                    break
        return Traceless(same, together)

    def _outputs(self, texts: list[HostArray], width: int, rows: int, turn: int) -> HostArray:
        """The output of each text, in calls of this many rows that begin with text number `turn`."""
        order = [(i + turn) % len(texts) for i in range(len(texts))]
        parts = [self._ask([texts[i] for i in order[at : at + rows]], width, rows) for at in range(0, len(order), rows)]
        out = np.concatenate(parts)
        back = np.empty_like(out)
        back[order] = out
        self.compared += len(out)
        return back

    def _texts(self, width: int, n: int, widths: list[int]) -> list[HostArray]:
        """n rows out of prompts, repeated and shifted, or their tokens in any order; of several lengths if padded."""
        random, texts, grouping = np.random.default_rng(width), [], self._grouping
        for i in range(n):
            own = width
            if grouping.padded and i % 3:
                own = int(random.integers(1, min(widths[i % len(widths)], grouping.longest) + 1))
            prompt = np.roll(self._prompts[i % len(self._prompts)], -(i // len(self._prompts)), axis=0)
            if i % 2:
                prompt = prompt[random.integers(0, len(prompt), own)]
            texts.append(np.resize(prompt, (own, *prompt.shape[1:])))
        return texts


def _equal(a: HostArray, b: HostArray) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
