"""Which rows share a call, where a model is shown whole sequences, and of which shape the call is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hibachi.plan.step import StepPlan

STEP = 16  # positions: widths are multiples of it, from 256 on of an eighth of the power of two below


def bucket(length: int) -> int:
    """The width of a row of so many tokens where its width must not depend on who else is there."""
    step = max(STEP, (1 << (length - 1).bit_length()) >> 4)
    return -(-length // step) * step


@dataclass(frozen=True, slots=True)
class Call:
    """idx [n]: places in the plan. width: positions that each row is shown. rows: >= n, of which the last are fill."""

    idx: Any
    width: int
    rows: int


@dataclass(frozen=True, slots=True)
class Grouping:
    """padded: rows of different lengths may share a call. sizes: the numbers of rows that a call may have, ascending; a
    row's width then depends on its own length alone. None: any number, as wide as the longest. longest: the widest."""

    padded: bool = False
    sizes: tuple[int, ...] | None = None
    longest: int = 2**31

    def calls(self, plan: StepPlan, *, kinds: bool) -> list[Call]:
        """The calls of a step. kinds: tokens may be of several."""
        wanted = np.flatnonzero(plan.emit)  # the others have no new token yet, and no cache to fill
        if not len(wanted):
            return []
        lengths = plan.end
        groups = _apart(wanted, [plan.seqs[i].owner.kind for i in wanted.tolist()]) if kinds else [wanted]
        out = list[Call]()
        for idx in groups:
            widths = lengths[idx]
            if self.padded and self.sizes is None:
                out.append(Call(idx, int(widths.max()), len(idx)))
                continue
            if self.padded:
                widths = np.array([min(bucket(n), self.longest) for n in widths.tolist()])
            if (widths == widths[0]).all():
                out += self._cut(idx, int(widths[0]))
            else:
                for width in np.unique(widths).tolist():
                    out += self._cut(idx[widths == width], width)
        return out

    def _cut(self, idx: Any, width: int) -> list[Call]:
        """Calls for rows of one width."""
        if self.sizes is None:
            return [Call(idx, width, len(idx))]
        calls, done = list[Call](), 0
        while done < len(idx):
            left = len(idx) - done
            size = max(n for n in self.sizes if n == self.sizes[0] or 2 * left > n)  # more than half full
            calls.append(Call(idx[done : done + size], width, size))
            done += size
        return calls


def _apart(idx: Any, kinds: list[Any]) -> list[Any]:
    found: dict[Any, list[int]] = {}
    for i, kind in zip(idx.tolist(), kinds, strict=True):
        found.setdefault(kind, []).append(i)
    return [idx] if len(found) == 1 else [np.array(members) for members in found.values()]
