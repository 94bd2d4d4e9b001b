"""Calls a model that keeps a cache of its own, with the past of each row in memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from hibachi.backend.array_backend import ArrayBackend
from hibachi.backend.nested import arrays_in, with_arrays
from hibachi.engine.runners.extra_inputs import ENCODED
from hibachi.engine.runners.owncache.layout import Past
from hibachi.engine.runners.owncache.step import OwnStep, SteppedRows
from hibachi.engine.runners.tokentable import TokenKind
from hibachi.testing.verify.drive import Driver, Found, Outputs, Span


class OwnDriver(Driver):
    """Between levels 1 and 2. vocab: size of the logits; None means tokens come out."""

    vocab: int | None

    def __init__(self, model: Any, backend: ArrayBackend, vocab: int | None, *, rows: int) -> None:
        super().__init__(model, backend, "step", rows)
        self.vocab = vocab
        self.brought([""] * (rows + 1))  # of nobody, too

    @cached_property
    def step(self) -> OwnStep:
        """Made with the first tokens of the rows."""
        rows = [*self.tokens.values()]
        kind = TokenKind(rows[0].shape[1:], rows[0].dtype)
        with self.backend.guard():
            return OwnStep(self.model, self.beside, self.backend, kind, self.vocab, rows, self._call)

    def _call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if method != self.model.step:
            return method(*arguments, **named)
        owns, shown = self.backend.owns, dict(zip(("tokens", "lengths"), arguments[:-1], strict=False))
        if ENCODED in named:
            places = [place for place, _ in arrays_in(named[ENCODED], owns)]
            own = [self.backend.copy(array) for _, array in arrays_in(named[ENCODED], owns)]
            named[ENCODED] = with_arrays(named[ENCODED], owns, own)
            shown |= {f"encoded{place}": array for place, array in zip(places, own, strict=True)}
        with self.watching(shown):
            found = method(*arguments, **named)
            if not isinstance(found, (tuple, list)) or len(found) != 2:
                raise Found(f"{self.name} must return a pair (logits, past); got {type(found).__name__}.")
        return found

    def encoded(self, rows: Sequence[str]) -> Any:
        """What `encode` makes for these requests, as `step` gets it; None where it has none."""
        names = [*self.tokens]
        kept = self.step.encoded
        return None if kept is None else kept.tried([names.index(row.partition("#")[0]) for row in rows])

    def fresh(self, **layout: Any) -> OwnSession:
        return OwnSession(self)

    @property
    def floats(self) -> list[bool]:
        """Of which arrays of a past the values are real numbers, which can be NaN."""
        isdtype = self.backend.xp.isdtype
        return [isdtype(leaf.dtype, "real floating") for leaf in self.step.layout.leaves]


class OwnSession:
    """The pasts of requests, each of one row and in memory of its own."""

    def __init__(self, driver: OwnDriver) -> None:
        self._driver = driver
        self._pasts: dict[str, Past] = {}

    def call(self, pieces: Sequence[Span], **how: Any) -> Outputs:
        """The calls that an engine makes of this: rows with equally many new tokens share one."""
        d, groups = self._driver, dict[tuple[int, int], list[Span]]()
        with d.backend.guard():
            for p in pieces:
                start = min(p.start, 1) if d.step.with_lengths else p.start
                groups.setdefault((p.end - p.start, start), []).append(p)
            return {key: out for group in groups.values() for key, out in self._step(group).items()}

    def spoil(self, row: str) -> None:
        """Fill the past of a request with NaN."""
        past, layout = self._pasts[row], self._driver.step.layout
        arrays = [a + float("nan") if real else a for a, real in zip(past.arrays, self._driver.floats, strict=True)]
        self._pasts[row] = layout.with_arrays(past, arrays)

    def _step(self, pieces: Sequence[Span]) -> Outputs:
        d, layout, stepped = self._driver, self._driver.step.layout, SteppedRows(self._driver.step)
        places, names = range(len(pieces)), [p.row for p in pieces]
        if pieces[0].start:
            stepped.of = {i: replace(self._pasts[name].twin(), rows=[i]) for i, name in enumerate(names)}
        tokens = np.stack([d.of(p.row)[p.start : p.end] for p in pieces])
        whose, encoded = d.brought(names), d.encoded(names)
        out = d.step.compared(stepped.advance(places, [p.start for p in pieces], tokens, whose, encoded), tokens)
        for i, p in enumerate(pieces):
            mine = layout.part(stepped.of[i], [i], p.end)
            self._pasts[p.row] = layout.with_arrays(mine, [d.backend.copy(a) for a in mine.arrays])
        return {(p.row, p.end): row for p, row in zip(pieces, d.host(out), strict=True) if p.emit}
