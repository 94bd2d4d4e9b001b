"""Calls a model that keeps a cache of its own, with the past of each row put together by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hibachi.backend.array_backend import ArrayBackend, HostArray
from hibachi.backend.nested import arrays_in, with_arrays
from hibachi.engine.kinds import takes_lengths
from hibachi.engine.ladder import ModelKind
from hibachi.engine.runners.extra_inputs import ENCODED, KEEP, parameters_of
from hibachi.engine.runners.owncache.encoder import Encoded
from hibachi.engine.runners.owncache.layout import Layout, Past, layout_of
from hibachi.engine.runners.runner import check_output
from hibachi.testing.verify.drive import Driver, Found, Outputs, Span, logits_shape


class OwnDriver(Driver):
    """Between levels 1 and 2. vocab: size of the logits; None means tokens come out."""

    vocab: int | None
    with_lengths: bool

    def __init__(self, model: Any, backend: ArrayBackend, vocab: int | None) -> None:
        super().__init__(model, backend, f"{type(model).__name__}.step")
        self.vocab, self.with_lengths = vocab, takes_lengths(model, ModelKind.OWN_CACHE)
        self._keeps = vocab is not None and KEEP in parameters_of(model.step)
        self._layout: Layout | None = None
        self._encoded: Encoded | None = None

    @property
    def layout(self) -> Layout:
        """Found with the first tokens of the rows."""
        if self._layout is None:
            ids = np.concatenate([*self.tokens.values()])

            def first(rows: int, tokens: int) -> Any:
                batch = np.resize(ids, (rows, tokens, *ids.shape[1:]))
                return self.step(batch, np.full(rows, tokens, np.int32), None, [""] * rows)[1]

            with self.backend.guard():
                if callable(encode := getattr(self.model, "encode", None)):
                    beside, name = self.beside([""]), type(self.model).__name__
                    self._encoded = Encoded(encode, self.backend, beside, name, lambda f, **given: f(**given))
                self._layout = layout_of(self.model.past, first, self.backend, self.name)
        return self._layout

    def fresh(self, **layout: Any) -> OwnSession:
        return OwnSession(self)

    def step(self, tokens: HostArray, lengths: HostArray, past: Any, rows: Sequence[str]) -> tuple[HostArray, Any]:
        """rows: names of requests."""
        given = {"tokens": (self.put(tokens), tokens)}
        if self.with_lengths:
            given["lengths"] = (self.put(lengths), lengths)
        named, kept = self.named(self.model.step, rows, lengths, tokens.shape[1]), dict[str, Any]()
        if self._encoded is not None:
            names = list(self.tokens)
            which = [names.index(row.partition("#")[0]) if row else 0 for row in rows]
            owns, tree = self.backend.owns, self._encoded.tried(which)
            places = [place for place, _ in arrays_in(tree, owns)]
            own = [self.backend.copy(array) for _, array in arrays_in(tree, owns)]
            kept = {f"encoded{place}": (a, self.host(a)) for place, a in zip(places, own, strict=True)}
            named[ENCODED] = with_arrays(tree, owns, own)
        if self._keeps:
            named[KEEP] = 1
        found = self.model.step(*(native for native, _ in given.values()), past, **named)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise Found(f"{self.name} must return a pair (logits, past); got {type(found).__name__}.")
        shape = (len(tokens), *logits_shape(self.vocab, tokens.shape[2:]))
        kind = tokens.dtype.kind if self.vocab is None else "logits"
        shown = (shape[0], 1, *shape[1:]) if self._keeps else shape
        out = self.backend.xp.reshape(check_output(found[0], self.backend, shown, self.name, kind=kind), shape)
        for name, (native, host) in (given | kept).items():
            self.check_untouched(name, native, host)
        return self.host(out), found[1]

    @property
    def floats(self) -> list[bool]:
        """Of which arrays of a past the values are real numbers, which can be NaN."""
        isdtype = self.backend.xp.isdtype
        return [isdtype(leaf.dtype, "real floating") for leaf in self.layout.leaves]


class OwnSession:
    """The pasts of requests, each of one row and in memory of its own."""

    def __init__(self, driver: OwnDriver) -> None:
        self._driver = driver
        self._pasts: dict[str, Past] = {}

    def call(self, pieces: Sequence[Span], **how: Any) -> Outputs:
        """The calls that an engine makes of this: rows with equally many new tokens share one."""
        d, groups = self._driver, dict[tuple[int, int], list[Span]]()
        for p in pieces:
            groups.setdefault((p.end - p.start, min(p.start, 1) if d.with_lengths else p.start), []).append(p)
        out: Outputs = {}
        with d.backend.guard():
            for group in groups.values():
                out |= self._step(group)
        return out

    def spoil(self, row: str) -> None:
        """Fill the past of a request with NaN."""
        past, layout = self._pasts[row], self._driver.layout
        arrays = [a + float("nan") if real else a for a, real in zip(past.arrays, self._driver.floats, strict=True)]
        self._pasts[row] = layout.with_arrays(past, arrays)

    def _step(self, pieces: Sequence[Span]) -> Outputs:
        d, layout = self._driver, self._driver.layout
        ends = [p.end for p in pieces]
        before: Past | None = None
        if pieces[0].start:
            width = max(p.start for p in pieces)
            before = layout.joined([layout.part(self._pasts[p.row], [0], width) for p in pieces])
        tokens, rows = np.stack([d.of(p.row)[p.start : p.end] for p in pieces]), [p.row for p in pieces]
        logits, tree = d.step(tokens, np.array(ends, np.int32), None if before is None else before.tree, rows)
        after = layout.taken(tree, before, range(len(pieces)), ends, len(pieces), tokens.shape[1])
        for i, p in enumerate(pieces):
            mine = layout.part(after, [i], p.end)
            self._pasts[p.row] = layout.with_arrays(mine, [d.backend.copy(a) for a in mine.arrays])
        return {(p.row, p.end): logits[i] for i, p in enumerate(pieces) if p.emit}
