"""Which past each row is in, and how the rows of a call get into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hibachi.engine.runners.owncache.layout import Group, Layout, Past


class RowPasts:
    """Pasts by row. width: of a past whose longest row has so many positions."""

    of: dict[int, Past]

    def __init__(self, layout: Layout, width: Callable[[int], int]) -> None:
        self._layout, self._width = layout, width
        self.of = {}

    def forget(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.of.pop(row, None)

    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Rows go on from others: for each (from, to), where the first is in a past. They get into the same past, in
        the place that they had, so that the next call finds its rows in it.
        """
        source = {to: row for row, to in pairs if row in self.of}
        self.forget([to for _, to in pairs if to not in source])
        pasts = {id(past): past for pair in source.items() for row in pair if (past := self.of.get(row)) is not None}
        groups = []
        for past in pasts.values():
            rows = [row for row in past.rows if self.of.get(row) is past]
            rows += [to for to, row in source.items() if to not in self.of and self.of[row] is past]
            picks = [(of := self.of[source.get(row, row)], of.place(source.get(row, row))) for row in rows]
            counts = [of.counts[place] for of, place in picks]
            groups.append(Group(picks, rows, counts, self._width(max(counts))))
        self.forget([row for past in pasts.values() for row in past.rows if self.of.get(row) is past])
        for made in self._layout.arranged(groups):
            self.of |= dict.fromkeys(made.rows, made)

    def gathered(self, rows: list[int], counts: list[int], size: int) -> Past:
        """One past of just these rows, in this order, and filler. Rows that stay behind get pasts of their own.

        Where pasts were taken apart for it, these rows are in none afterwards.
        """
        first = self.of[rows[0]]
        if first.rows == rows and first.size == size and all(self.of[row] is first for row in rows):
            return first  # (a row that another request has got since then is in another past)
        pasts = [self.of[row] for row in rows]
        picks = [(past, past.place(row)) for past, row in zip(pasts, rows, strict=True)]
        picks += picks[-1:] * (size - len(rows))
        groups = [Group(picks, rows, counts, self._width(max(counts)))]
        for past in {id(past): past for past in pasts}.values():
            stay = [i for i, row in enumerate(past.rows) if row not in rows and self.of.get(row) is past]
            if stay:
                left = [past.counts[i] for i in stay]
                rest = [(past, i) for i in stay]
                groups.append(Group(rest, [past.rows[i] for i in stay], left, self._width(max(left))))
        for group in groups:
            self.forget(group.rows)  # until it has succeeded: the pasts are taken apart
        found, *others = self._layout.arranged(groups)
        for past in others:
            self.of |= dict.fromkeys(past.rows, past)
        return found
