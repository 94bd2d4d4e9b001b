"""What a model's `encode` makes of a request's inputs, once for each request: it is kept beside the request's row.

It is kept as pasts are: rows side by side, shorter ones with zeros in front. So an array of ones that `encode` returns
with the others is the mask of what is real.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.nested import arrays_in, with_arrays
from hibachi.engine.runners.extra_inputs import LENGTHS, ExtraInputs, example, parameters_of, wanted
from hibachi.engine.runners.owncache.alike import ALIKE, ALIKE_ROUGH, apart, largest
from hibachi.engine.runners.owncache.layout import Layout, Leaf, Past, has_views
from hibachi.engine.runners.owncache.rows import RowPasts
from hibachi.errors import ConfigError, InvalidModelOutput

MOST = 2**13  # positions that are encoded in one call of several requests


class Encoded:
    """The outputs of `encode` by row.

    encode: the model's method, called with arrays of a batch of one. If it takes `lengths`, it may get those of several
    requests, with zeros in front of shorter ones. theirs: calls it, so that errors are the model's.
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
        self._grows = self._growing()
        self._more: int | None = None  # positions of the outputs beyond those of the input; None means they have none
        self._written = has_views(backend)  # arrays can be written to
        trees = [self._called([self._examples(i)]) for i in range(LENGTHS)]
        self._layout = _layout_of(trees[0], trees[1], backend, self.name)
        self._rows = RowPasts(self._layout, backend.shapes.length)
        self._tried = {i: self._past(tree, [i]) for i, tree in enumerate(trees)}
        self._shares = bool(self._grows) and not backend.shapes.compiled  # calls; else each width is another shape
        if self._shares:
            self._try_together()
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

    def of(self, rows: Sequence[int], size: int, together: bool = False) -> Any:
        """For rows of a call and filler, as `step` gets it: arrays [size, ...]. together: those of several rows may be
        encoded in one call, which may change bits.
        """
        of = self._rows.of
        fresh = [row for row in rows if row not in of]
        for some in self._fitting(fresh) if together and self._shares else [[row] for row in fresh]:
            given = [self._given(row) for row in some]
            past = self._past(self._called(given), some)
            of |= dict(zip(some, self._parted(past, given), strict=True))
            self._source |= {row: next(self._count) for row in some}
        counts = [of[row].counts[of[row].place(row)] for row in rows]
        found = self._rows.gathered([*rows], counts, size)
        of |= dict.fromkeys(rows, found)
        return found.tree

    def _fitting(self, rows: Sequence[int]) -> Iterator[list[int]]:
        """Rows of like length together, as many as fit."""
        lengths = {row: len(self._beside.given(row, self._grows)) for row in rows}
        part = list[int]()
        for row in sorted(rows, key=lengths.__getitem__):
            if part and (len(part) + 1) * lengths[row] > MOST:
                yield part
                part = []
            part.append(row)
        if part:
            yield part

    def tried(self, which: Sequence[int]) -> Any:
        """For a trial: of these examples, which differ in their length."""
        pasts = [self._tried[i % LENGTHS] for i in which]
        width = max(past.width for past in pasts)
        return self._layout.joined([self._layout.part(past, [0], width) for past in pasts]).tree

    def _examples(self, i: int) -> dict[str, HostArray]:
        return {name: example(self._beside.declared.inputs[name], i) for name in self._names}

    def _given(self, row: int) -> dict[str, HostArray]:
        return {name: self._beside.given(row, name) for name in self._names}

    def _growing(self) -> str:
        """The input whose lengths it takes; "" means that it takes none. Raises ConfigError."""
        declared = self._beside.declared.inputs
        if "lengths" not in parameters_of(self._encode) or "lengths" in declared:
            return ""
        found = [name for name in self._names if None in declared[name].shape]
        if len(found) != 1 or None in declared[found[0]].shape[1:]:
            raise ConfigError(
                f"{self.name} takes `lengths`: expected one input hibachi.Input((None, ...)) whose they are; got "
                f"{', '.join(sorted(found)) or 'none'}. Without `lengths` it gets one request at a time."
            )
        return found[0]

    def _try_together(self) -> None:
        """Check that requests get beside others what they get alone, whatever is in front. Raises ConfigError."""
        given, alone = [self._examples(i) for i in range(LENGTHS)], [*self._tried.values()]
        more = {past.width - len(one[self._grows]) for past, one in zip(alone, given, strict=True) if past.width}
        if len(more) > 1:
            raise ConfigError(
                f"{self.name} takes `lengths`: expected arrays as long as the input, or longer by the same number; got "
                f"{', '.join(str(past.width) for past in alone)} for inputs of "
                f"{', '.join(str(len(one[self._grows])) for one in given)}. Without `lengths` it gets one request at a "
                f"time."
            )
        self._more = next(iter(more), None)
        for padding in range(2):
            parts = self._parted(self._past(self._called(given, padding), [*range(LENGTHS)]), given)
            for part, one in zip(parts, alone, strict=True):
                alike = ALIKE if self._layout.fine(one.arrays[0]) else ALIKE_ROUGH
                for leaf, got, want in zip(self._layout.leaves, part.arrays, one.arrays, strict=True):
                    expected = self._host(want)
                    if apart(self._host(got), expected) > alike * largest(expected):
                        raise ConfigError(
                            f"{self.name} takes `lengths`: expected the same {leaf.place or 'array'} beside a longer "
                            f"request; got another. Make a mask and positions from lengths: row i has its own values "
                            f"last, behind padding. Without `lengths` it gets one request at a time."
                        )

    def _parted(self, past: Past, given: Sequence[dict[str, HostArray]]) -> list[Past]:
        """A past for each request, without the padding that was in front of it."""
        if len(given) == 1:
            return [past]
        if self._more is not None:
            past.counts = [len(one[self._grows]) + self._more for one in given]
        return [self._layout.part(past, [i], past.counts[i]) for i in range(len(given))]

    def _host(self, array: Array) -> HostArray:
        return self._backend.get(self._backend.float32(array))

    def _called(self, given: Sequence[dict[str, HostArray]], padding: int = 0) -> Any:
        """Copies, in memory row by row: the model may use again what it returned, and a row alone gets the bits that it
        gets in company. given: of each request. padding: what is in front of shorter ones.
        """
        backend = self._backend
        arrays = {name: np.stack([one[name] for one in given]) for name in self._names if name != self._grows}
        if self._grows:
            each = [one[self._grows] for one in given]
            lengths = np.array([*map(len, each)], np.int32)
            arrays[self._grows] = np.full((len(each), lengths.max(), *each[0].shape[1:]), padding, each[0].dtype)
            for row, array in zip(arrays[self._grows], each, strict=True):
                row[len(row) - len(array) :] = array
            arrays["lengths"] = lengths
        tree = self._theirs(self._encode, **{name: backend.put(array) for name, array in arrays.items()})
        if not self._written:
            return tree
        return with_arrays(tree, backend.owns, [backend.copy(array) for _, array in arrays_in(tree, backend.owns)])

    def _past(self, tree: Any, rows: list[int]) -> Past:
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
            expected[0] = len(rows)
            if leaf.position is not None and len(shape) == len(expected):
                width = width or int(shape[leaf.position])
                expected[leaf.position] = width
            if shape != tuple(expected) or array.dtype != leaf.dtype:
                raise InvalidModelOutput(
                    f"{self.name} must return an array {leaf.place} of shape {tuple(expected)} and dtype {leaf.dtype}, "
                    f"as for other requests; got {shape} of {array.dtype}."
                )
        past = Past(tree, found, rows, [width] * len(rows), width, len(rows))
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
