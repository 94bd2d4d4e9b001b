"""What a model's `encode` makes of a request's inputs, once for each request: it is kept beside the request's row.

It is kept as pasts are: rows side by side, shorter ones with zeros in front. So an array of ones that `encode` returns
with the others is the mask of what is real.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.nested import arrays_in, with_arrays
from hibachi.engine.runners.extra_inputs import LENGTHS, ExtraInputs, example, wanted
from hibachi.engine.runners.owncache.layout import Layout, Leaf, Past, has_views
from hibachi.engine.runners.owncache.rows import RowPasts
from hibachi.errors import ConfigError, InvalidModelOutput


class Encoded:
    """The outputs of `encode` by row.

    encode: the model's method, called with arrays of a batch of one. theirs: calls it, so that errors are the model's.
    """

    def __init__(
        self,
        encode: Callable[..., Any],
        backend: ArrayBackend,
        beside: ExtraInputs,
        name: str,
        theirs: Callable[..., Any],
    ) -> None:
        """Raises ConfigError, and what the model raises."""
        self._encode, self._backend, self._beside, self._theirs = encode, backend, beside, theirs
        self.name = f"{name}.encode"
        self._names = wanted(encode, beside.declared) & beside.declared.inputs.keys()
        if not self._names:
            inputs = ", ".join(beside.declared.inputs) or "none declared"
            raise ConfigError(
                f"{self.name} must take inputs that the model declares: expected a parameter named as one of `inputs`; "
                f"got {inputs}. Declare inputs = {{name: hibachi.Input(...)}}."
            )
        self._written = has_views(backend)  # arrays can be written to
        trees = [self._called(self._examples(i)) for i in range(LENGTHS)]
        self._layout = _layout_of(trees[0], trees[1], backend, self.name)
        self._rows = RowPasts(self._layout, backend.shapes.length)
        self._tried = {i: self._past(tree, i) for i, tree in enumerate(trees)}
        self._source: dict[int, int | None] = {}  # which of all that was encoded a row has
        self._count = itertools.count()

    def forget(self, rows: Sequence[int]) -> None:
        self._rows.forget(rows)
        for row in rows:
            self._source.pop(row, None)

    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Rows get what others have: for each (from, to). Beams of one request have it already."""
        sources = {to: self._source.get(row) for row, to in pairs}
        self._rows.fork([(row, to) for row, to in pairs if sources[to] is None or sources[to] != self._source.get(to)])
        self._source |= sources

    def clear(self) -> None:
        self._rows.of.clear()
        self._source.clear()

    def of(self, rows: Sequence[int], size: int) -> Any:
        """For rows of a call and filler, as `step` gets it: arrays [size, ...]."""
        for row in rows:
            if row not in self._rows.of:
                self._rows.of[row], self._source[row] = (
                    self._past(self._called(self._given(row)), row),
                    next(self._count),
                )
        of = self._rows.of
        counts = [of[row].counts[of[row].place(row)] for row in rows]
        found = self._rows.gathered([*rows], counts, size)
        of |= dict.fromkeys(rows, found)
        return found.tree

    def tried(self, which: Sequence[int]) -> Any:
        """For a trial: of these examples, which differ in their length."""
        pasts = [self._tried[i % LENGTHS] for i in which]
        width = max(past.width for past in pasts)
        return self._layout.joined([self._layout.part(past, [0], width) for past in pasts]).tree

    def _examples(self, i: int) -> dict[str, HostArray]:
        return {name: example(self._beside.declared.inputs[name], i) for name in self._names}

    def _given(self, row: int) -> dict[str, HostArray]:
        return {name: self._beside.given(row, name) for name in self._names}

    def _called(self, given: dict[str, HostArray]) -> Any:
        """Copies, in memory row by row: the model may use again what it returned, and a row alone gets the bits that it
        gets in company.
        """
        backend = self._backend
        tree = self._theirs(self._encode, **{name: backend.put(array[None].copy()) for name, array in given.items()})
        if not self._written:
            return tree
        return with_arrays(tree, backend.owns, [backend.copy(array) for _, array in arrays_in(tree, backend.owns)])

    def _past(self, tree: Any, row: int) -> Past:
        """Raises InvalidModelOutput."""
        layout, arrays = self._layout, arrays_in(tree, self._backend.owns)
        if [place for place, _ in arrays] != [leaf.place for leaf in layout.leaves]:
            raise InvalidModelOutput(
                f"{self.name} must return arrays at {', '.join(leaf.place for leaf in layout.leaves)}, as for other "
                f"requests; got {', '.join(place for place, _ in arrays) or 'none'}."
            )
        found, width = [array for _, array in arrays], 0
        for leaf, array in zip(layout.leaves, found, strict=True):
            shape, expected = tuple(array.shape), list(leaf.shape)
            expected[0] = 1
            if leaf.position is not None and len(shape) == len(expected):
                width = width or int(shape[leaf.position])
                expected[leaf.position] = width
            if shape != tuple(expected) or array.dtype != leaf.dtype:
                raise InvalidModelOutput(
                    f"{self.name} must return an array {leaf.place} of shape {tuple(expected)} and dtype {leaf.dtype}, "
                    f"as for other requests; got {shape} of {array.dtype}."
                )
        past = Past(tree, found, [row], [width], width, 1)
        wide = self._backend.shapes.length(width) if width else 0
        return past if wide == width else layout.part(past, [0], wide)


def _layout_of(one: Any, other: Any, backend: ArrayBackend, name: str) -> Layout:
    """Find what grows with the inputs, by the outputs for two of different length. Raises ConfigError."""
    arrays, others = (arrays_in(tree, backend.owns) for tree in (one, other))
    if not arrays or [place for place, _ in arrays] != [place for place, _ in others]:
        raise ConfigError(
            f"{name} must return arrays of {backend.name}, at the same places for each request; got "
            f"{len(arrays)} and {len(others)} of them for two."
        )
    leaves, lengths = [], set()
    for (place, a), (_, b) in zip(arrays, others, strict=True):
        axes = _differing(a, b)
        if axes is None or len(axes) > 1 or 0 in axes or not len(a.shape) or a.shape[0] != 1:
            raise ConfigError(
                f"{name}: the array {place or 'it returns'} must have one row, and at most one other axis that grows "
                f"with the inputs; got shapes {tuple(a.shape)} and {tuple(b.shape)} for two requests."
            )
        if axes:
            lengths.add((int(a.shape[axes[0]]), int(b.shape[axes[0]])))
        shape = [0 if axis in (0, *axes) else int(n) for axis, n in enumerate(a.shape)]
        leaves.append(Leaf(place, 0, axes[0] if axes else None, tuple(shape), a.dtype))
    if len(lengths) > 1:
        raise ConfigError(
            f"{name} must return arrays that grow alike, so that they are padded alike; got lengths "
            f"{sorted(n for n, _ in lengths)} for one request. Return them at one length."
        )
    return Layout(leaves, backend, name)


def _differing(a: Array, b: Array) -> list[int] | None:
    """The axes in which two arrays differ; None means they differ in more than that."""
    if len(a.shape) != len(b.shape) or a.dtype != b.dtype:
        return None
    return [int(i) for i in np.flatnonzero(np.array(a.shape) != np.array(b.shape))]
