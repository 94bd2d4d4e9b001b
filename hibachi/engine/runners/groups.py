"""Grouping of rows into calls, where a model is shown whole sequences, and the shape of each call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from hibachi.common.shapes import size_for
from hibachi.engine.scheduler.step import StepPlan

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
        wanted = np.flatnonzero(plan.emit)  # the others have no new token yet, and no cache to fill
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
