"""The caches that models keep themselves ("pasts"): where rows and positions lie in them, and how rows join and part.

In a past, rows stand right-aligned: the newest position of each is the last one, and what lies before a shorter row is
padding, zeros or whatever. An array without an axis of positions is a state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend
from hibachi.backend.layout import OwnCache
from hibachi.backend.nested import arrays_in, emptied, filled, with_arrays
from hibachi.engine.runners.owncache.data import Number, data_in_past, data_of, same, unknown, windows_beside
from hibachi.errors import ConfigError, InvalidModelOutput, shown


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array of a past. place: such as "[0].keys". batch, position: axes; None means it has none."""

    place: str
    batch: int | None
    position: int | None
    shape: tuple[int, ...]  # with 0 at these axes
    dtype: Any
    windows: tuple[int, ...] = ()  # positions that it may stop at: see `windows_beside`

    @property
    def parted(self) -> bool:
        """Whether each row has positions of its own in it."""
        return self.position is not None and self.batch is not None


@dataclass(slots=True, eq=False)
class Past:
    """A past of the rows `rows` [n] of the batch, and perhaps filler rows after them.

    tree: as the model returned it, whose arrays are `arrays`. counts [n]: positions of each. width: positions that the
    arrays have. size: rows that they have, filler included. room: for each array a longer one that it is the first
    positions of, or None; new positions are written behind it.
    """

    tree: Any
    arrays: list[Array]
    rows: list[int]
    counts: list[int]
    width: int
    size: int
    room: list[Array] = field(default_factory=list)  # empty where no array has any

    def place(self, row: int) -> int:
        return self.rows.index(row)

    def twin(self) -> Past:
        """Another record of the same arrays, which may be taken apart."""
        return replace(self, arrays=[*self.arrays], room=[])

    def let_go(self, i: int) -> None:
        """Hold on to array i no more."""
        self.tree = self.arrays[i] = None
        if self.room:
            self.room[i] = None


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A past to be made: of each of `picks` [size] the row at that place of a past, with `width` positions.

    rows, counts [n]: as of the `Past`. What comes after the first n picks is filler.
    """

    picks: Sequence[tuple[Past, int]]
    rows: list[int]
    counts: list[int]
    width: int

    @property
    def unchanged(self) -> bool:
        """Whether it is a past as it is."""
        past = self.picks[0][0]
        return self.width == past.width and [*self.picks] == [(past, i) for i in range(past.size)]

    @property
    def sources(self) -> list[tuple[Past, list[int]]]:
        """The pasts, in the order of `picks`, with the places in each."""
        found: list[tuple[Past, list[int]]] = []
        for past, place in self.picks:
            if not found or found[-1][0] is not past:
                found.append((past, []))
            found[-1][1].append(place)
        return found


class Layout:
    """Where rows and positions lie in the pasts of a model. name: of its method, for errors."""

    leaves: tuple[Leaf, ...]

    def __init__(
        self,
        leaves: Sequence[Leaf],
        backend: ArrayBackend,
        name: str,
        only: str | None = None,
        data: tuple[Sequence[Number], Mapping[str, Any]] = ((), {}),
    ) -> None:
        """only: see `OwnCache`. data: of `data_of`."""
        self.leaves, self.backend, self.name, self._only = tuple(leaves), backend, name, only
        self._numbers, self._constant = data
        self._views = has_views(backend)
        self._new_only = False  # the model has returned new positions only
        self._most: dict[int, int] = {}  # positions that arrays stop at, the newest, as they reached that many

    @property
    def position_bytes(self) -> int:
        """Bytes that a position of a row takes."""
        found = 0
        for leaf in self.leaves:
            if leaf.position is not None:
                others = [n for axis, n in enumerate(leaf.shape) if axis not in (leaf.batch, leaf.position)]
                found += int(np.prod(others, dtype=np.int64)) * _itemsize(leaf.dtype, self.backend.xp)
        return found

    @property
    def counts_nothing(self) -> bool:
        """Whether all of a past is states, which do not say how many tokens came before."""
        return all(leaf.position is None for leaf in self.leaves) and all(number.rows for number in self._numbers)

    def fine(self, out: Array) -> bool:
        """Whether a past and such an output have no floats of fewer than 32 bits."""
        xp = self.backend.xp
        dtypes = [out.dtype, *(leaf.dtype for leaf in self.leaves)]
        return all(_itemsize(d, xp) >= 4 for d in dtypes if xp.isdtype(d, ("real floating", "complex floating")))

    def said(self) -> str:
        """In words: how many arrays, what the first one looks like, and what a position takes."""
        leaf = self.leaves[0]
        names = {leaf.batch: "rows", leaf.position: "positions"}
        sizes = ", ".join(names.get(axis) or str(n) for axis, n in enumerate(leaf.shape))
        what = "1 array" if len(self.leaves) == 1 else f"{len(self.leaves)} arrays, the first"
        each = f"{self.position_bytes} bytes a position" if self.position_bytes else "a state of one size"
        return f"{what}{f' {leaf.place}' if leaf.place else ''} ({sizes}) of {leaf.dtype}; {each}"

    def taken(
        self, tree: Any, before: Past | None, rows: Sequence[int], counts: Sequence[int], size: int, new: int
    ) -> Past:
        """The past that a call has returned: `new` positions after those of `before`, for `size` rows.

        The model returned all positions, or the new ones only. counts: positions of each of `rows` after the call.
        before: it is taken apart where new positions are written behind its own. Raises InvalidModelOutput.
        """
        owns = self.backend.owns
        tree = belonging(tree, self.backend, self._only)
        found = arrays_in(tree, owns)
        if [place for place, _ in found] != [leaf.place for leaf in self.leaves]:
            places = ", ".join(place for place, _ in found) or "none"
            raise InvalidModelOutput(
                f"{self.name} must return a past with arrays at {', '.join(leaf.place for leaf in self.leaves)}; got "
                f"{places}. Return (logits, past), with the same past as in other calls."
            )
        width = (0 if before is None else before.width) + new
        arrays = [array for _, array in found]
        short = []
        for i, (leaf, array) in enumerate(zip(self.leaves, arrays, strict=True)):
            self._check(i, leaf, array, size, width, new)
            if leaf.position is not None and array.shape[leaf.position] != self._wanted(i, width):
                short.append(i)
        for number in self._numbers:
            try:
                value = number.read(tree)
            except (LookupError, AttributeError, TypeError):
                value = None
            if value != number.of(width, size):
                raise InvalidModelOutput(
                    f"{self.name} must return a past whose {number.place} counts its "
                    f"{'rows' if number.rows else 'positions'} as in other calls: expected "
                    f"{number.of(width, size)}; got {shown(value)}."
                )
        if not short:
            return Past(tree, arrays, [*rows], [*counts], width, size)
        assert before is not None
        self._new_only = True
        room = before.room or [None] * len(arrays)
        for i in short:
            arrays[i], room[i] = self._appended(self.leaves[i], before.arrays[i], room[i], arrays[i], before.width)
            before.tree = before.arrays[i] = None
        return Past(with_arrays(tree, owns, arrays), arrays, [*rows], [*counts], width, size, room)

    def _appended(self, leaf: Leaf, old: Array, room: Array, new: Array, width: int) -> tuple[Array, Array]:
        """An array of `width` positions with new ones behind, and where there is room for more. room: of the old one.

        Room grows by a fifth, so that a position is copied some five times, however many steps there are.
        """
        axis = leaf.position
        assert axis is not None
        if not self._views:
            return self.backend.xp.concat([old, new], axis=axis), None
        end = width + new.shape[axis]
        if room is None or room.shape[axis] < end:
            room = self._new(leaf, 0 if leaf.batch is None else old.shape[leaf.batch], _with_room(end), clear=False)
            room[_along(axis, 0, width)] = old
        room[_along(axis, width, end)] = new
        return room[_along(axis, 0, end)], room

    def _new(self, leaf: Leaf, rows: int, positions: int, *, clear: bool) -> Array:
        """clear: it is not written to where it will be looked at, so it must be zeros."""
        sizes = {leaf.batch: rows, leaf.position: positions}
        shape = tuple(sizes.get(axis, n) for axis, n in enumerate(leaf.shape))
        xp, device = self.backend.xp, self.backend.device
        if clear or not self._views:
            return xp.zeros(shape, dtype=leaf.dtype, device=device)
        return xp.empty(shape, dtype=leaf.dtype, device=device)

    def block(self, positions: int) -> list[Array]:
        """One row of so many positions of each array that has any: zeros, in the shape of `cut`."""
        return [self._new(leaf, 1, positions, clear=True) for leaf in self.leaves if leaf.parted]

    def _wanted(self, i: int, width: int) -> int:
        """Positions of array i in a past of `width`."""
        return min(width, self._most.get(i, width))

    def _check(self, i: int, leaf: Leaf, array: Array, size: int, width: int, new: int) -> None:
        shape = list(leaf.shape)
        if leaf.batch is not None:
            shape[leaf.batch] = size
        have = array.shape[leaf.position] if leaf.windows and len(array.shape) == len(shape) else width
        if have < width and have in leaf.windows:
            self._most.setdefault(i, have)
        width = self._wanted(i, width)
        widths = [width, new]
        if leaf.position is not None and len(array.shape) == len(shape) and array.shape[leaf.position] in widths:
            shape[leaf.position] = array.shape[leaf.position]
        elif leaf.position is not None:
            shape[leaf.position] = width
        if tuple(array.shape) != tuple(shape) or array.dtype != leaf.dtype:
            only = f", or the {new} new ones only" if leaf.position is not None and new != width else ""
            raise InvalidModelOutput(
                f"{self.name} must return a past whose array {leaf.place} has shape {tuple(shape)} and dtype "
                f"{leaf.dtype}: {size} rows{f', {width} positions{only}' if leaf.position is not None else ''}; got "
                f"{tuple(array.shape)} of {array.dtype}. Return the past that was given, with the new positions behind."
            )

    def arranged(self, groups: Sequence[Group]) -> list[Past]:
        """Pasts of rows of others. These are taken apart, array by array, so that no more than one array of each is
        there twice at any time.

        Where nothing changes, arrays are the same ones. If it raises, the others are lost.
        """
        pasts = {id(past): past for group in groups for past, _ in group.picks}.values()
        whole = {id(group.picks[0][0]): k for k, group in reversed([*enumerate(groups)]) if group.unchanged}
        same = [
            whole.get(id(group.picks[0][0])) == k for k, group in enumerate(groups)
        ]  # one only, as it is written to
        sources = [group.sources for group in groups]
        made = []
        for group, as_is in zip(groups, same, strict=True):
            tree = group.picks[0][0].tree
            tree = tree if as_is else emptied(tree, self.backend.owns)
            made.append(Past(tree, [], group.rows, group.counts, group.width, len(group.picks)))
        for i, leaf in enumerate(self.leaves):
            for k, new in enumerate(made):
                first = sources[k][0][0]
                if same[k]:
                    array, room = first.arrays[i], first.room[i] if first.room else None
                else:
                    array, room = self._joined(leaf, i, sources[k], new)
                new.arrays.append(array)
                new.room.append(room)
            for past in pasts:
                past.let_go(i)
        for k, new in enumerate(made):
            if not same[k]:
                new.tree = filled(new.tree, new.arrays, self._counted(new.width, new.size))
            if all(room is None for room in new.room):
                new.room = []
        return made

    def _joined(self, leaf: Leaf, i: int, sources: Sequence[tuple[Past, list[int]]], new: Past) -> tuple[Array, Array]:
        """Array i of a new past, and where there is room for more positions."""
        first, places = sources[0]
        width = self._wanted(i, new.width)
        if leaf.batch is None:
            return self._wide(leaf, first.arrays[i], self._wanted(i, first.width), width), None
        if not self._views:
            parts = [
                self._wide(
                    leaf, self._rows(leaf, past.arrays[i], past.size, places), self._wanted(i, past.width), width
                )
                for past, places in sources
            ]
            return (self.backend.xp.concat(parts, axis=leaf.batch) if len(parts) > 1 else parts[0]), None
        grows = self._new_only and leaf.position is not None
        padded = any(past.width < new.width for past, _ in sources)
        positions = _with_room(width) if grows else width
        array = room = self._new(leaf, new.size, positions, clear=padded and leaf.position is not None)
        if grows and leaf.position is not None:
            array = room[_along(leaf.position, 0, width)]
        at = 0
        for past, places in sources:
            there = self._wanted(i, past.width)
            have = min(there, width)
            for begin, end in _ranges(places):
                to, of = [slice(None)] * len(leaf.shape), [slice(None)] * len(leaf.shape)
                to[leaf.batch], of[leaf.batch] = slice(at, at + end - begin), slice(begin, end)
                if leaf.position is not None:
                    to[leaf.position] = slice(width - have, width)
                    of[leaf.position] = slice(there - have, there)
                array[tuple(to)] = past.arrays[i][tuple(of)]
                at += end - begin
        return array, room if grows else None

    def part(self, past: Past, places: Sequence[int], width: int) -> Past:
        """Some rows of a past, at these places, with `width` positions: the last ones, or padding before them.

        The past stays as it is. Where nothing changes, the arrays are the same ones.
        """
        of = past.twin()
        real = [i for i in places if i < len(past.rows)]
        group = Group([(of, i) for i in places], [past.rows[i] for i in real], [past.counts[i] for i in real], width)
        return self.arranged([group])[0]

    def widened(self, past: Past, width: int) -> Past:
        """The same rows with `width` positions. The past is taken apart."""
        if width == past.width:
            return past
        return self.arranged([Group([(past, i) for i in range(past.size)], past.rows, past.counts, width)])[0]

    def repeated(self, past: Past, width: int) -> Past:
        """A past of so many positions, for a trial: those of another, again and again."""
        xp, arrays = self.backend.xp, list[Array]()
        for i, (leaf, array) in enumerate(zip(self.leaves, past.arrays, strict=True)):
            if leaf.position is not None:
                places = np.arange(self._wanted(i, width), dtype=np.int32) % array.shape[leaf.position]
                array = xp.take(array, self.backend.put(places), axis=leaf.position)
            arrays.append(array)
        tree = with_arrays(past.tree, self.backend.owns, arrays, self._counted(width, past.size))
        return Past(tree, arrays, past.rows, [width] * len(past.rows), width, past.size)

    def joined(self, parts: Sequence[Past]) -> Past:
        """Pasts of one width, side by side. They are taken apart."""
        picks = [(part, i) for part in parts for i in range(part.size)]
        rows, counts = [row for part in parts for row in part.rows], [n for part in parts for n in part.counts]
        return self.arranged([Group(picks, rows, counts, parts[0].width)])[0]

    def shortened(self, past: Past, places: Sequence[int], drop: int) -> Past:
        """The rows at these places without their last `drop` positions. The past stays as it is."""
        width, whole, arrays = past.width - drop, [*places] == [*range(past.size)], list[Array]()
        for leaf, array in zip(self.leaves, past.arrays, strict=True):
            array = self._rows(leaf, array, past.size, places)
            arrays.append(array if leaf.position is None else array[_along(leaf.position, 0, width)])
        rows, counts = [past.rows[i] for i in places], [past.counts[i] - drop for i in places]
        tree = with_arrays(past.tree, self.backend.owns, arrays, self._counted(width, len(rows)))
        return Past(tree, arrays, rows, counts, width, len(rows), past.room if whole else [])

    def _counted(self, width: int, size: int) -> dict[str, int]:
        return {number.place: number.of(width, size) for number in self._numbers}

    def check_constant(self, tree: Any) -> None:
        """That what is no array is in a past that goes on as in a first one. Raises ConfigError."""
        numbers = {number.place for number in self._numbers}
        shared = {leaf.place for leaf in self.leaves if leaf.batch is None and leaf.position is None}
        now = data_in_past(tree, self.backend, self._only, shared)
        for place in sorted((self._constant.keys() | now.keys()) - numbers):
            if not same(before := self._constant.get(place), after := now.get(place)):
                raise unknown(self.name, place, before, after, "when tokens follow")

    # ---- prefixes ----------------------------------------------------------------------------------------------

    @property
    def uncut(self) -> str:
        """The place of an array of which no prefix can be cut, as it is a state, or holds the newest positions only; ""
        means there is none."""
        found = (leaf for leaf in self.leaves if (leaf.batch is None) != (leaf.position is None) or leaf.windows)
        return next((leaf.place for leaf in found), "")

    def template(self, past: Past) -> Past:
        """All that is in a past besides positions of rows."""
        arrays = [a if leaf.position is None else None for leaf, a in zip(self.leaves, past.arrays, strict=True)]
        return Past(emptied(past.tree, self.backend.owns), arrays, [], [], 0, 0)

    def cut(self, past: Past, place: int, begin: int, end: int) -> list[Array]:
        """Positions `begin` to `end` - 1 of a row: [1 row, those positions] of each array, None of those without. Views
        where a library has them.
        """
        at = past.width - past.counts[place] + begin
        index = None if self._views else self.backend.put(np.arange(at, at + end - begin, dtype=np.int32))
        row = None if self._views else self.backend.put(np.array([place], np.int32))
        found: list[Array] = []
        for leaf, array in zip(self.leaves, past.arrays, strict=True):
            if leaf.position is None or leaf.batch is None:
                found.append(None)
            elif self._views:
                where = [slice(None)] * len(leaf.shape)
                where[leaf.batch], where[leaf.position] = slice(place, place + 1), slice(at, at + end - begin)
                found.append(array[tuple(where)])
            else:  # by arrays of places: where they are numbers, a library that compiles does so for each
                take = self.backend.xp.take
                found.append(take(take(array, row, axis=leaf.batch), index, axis=leaf.position))
        return found

    def begun(self, template: Past, blocks: Sequence[list[Array]], row: int, count: int, width: int) -> Past:
        """The past of one row of `count` positions, from equal blocks as `cut` returns them, which are taken apart."""
        each = count // len(blocks)
        padding, rest = divmod(width - count, each)
        arrays = [*template.arrays]
        for i, leaf in enumerate(self.leaves):
            if leaf.position is not None:
                parts = [block[i] for block in blocks]
                for block in blocks:
                    block[i] = None
                nothing = [self._new(leaf, 1, n, clear=True) for n in (rest, each if padding else 0) if n]
                parts = [*nothing[: rest > 0], *nothing[-1:] * padding, *parts]
                arrays[i] = self.backend.xp.concat(parts, axis=leaf.position)
        return Past(filled(template.tree, arrays, self._counted(width, 1)), arrays, [row], [count], width, 1)

    def finite(self, past: Past) -> bool:
        """Whether all positions are finite, where they are floats: a model may write NaN into a past unnoticed."""
        xp = self.backend.xp
        floats = [
            array
            for leaf, array in zip(self.leaves, past.arrays, strict=True)
            if leaf.position is not None and xp.isdtype(leaf.dtype, ("real floating", "complex floating"))
        ]
        return not floats or bool(self.backend.get(xp.all(xp.stack([xp.all(xp.isfinite(a)) for a in floats]))))

    def with_arrays(self, past: Past, arrays: list[Array]) -> Past:
        """The same past in other memory."""
        tree = with_arrays(past.tree, self.backend.owns, arrays)
        return Past(tree, arrays, past.rows, past.counts, past.width, past.size)

    def _rows(self, leaf: Leaf, array: Array, size: int, places: Sequence[int]) -> Array:
        if leaf.batch is None or [*places] == [*range(size)]:
            return array
        first, last = places[0], places[-1] + 1
        if [*places] == [*range(first, last)]:
            return array[_along(leaf.batch, first, last)]
        index = self.backend.put(np.array(places, np.int32))
        return self.backend.xp.take(array, index, axis=leaf.batch)

    def _wide(self, leaf: Leaf, array: Array, now: int, wanted: int) -> Array:
        if leaf.position is None or now == wanted:
            return array
        axis = leaf.position
        if now > wanted:
            return array[_along(axis, now - wanted, now)]
        shape = [*array.shape]
        shape[axis] = wanted - now
        xp = self.backend.xp
        padding = xp.zeros(tuple(shape), dtype=array.dtype, device=self.backend.device)
        return xp.concat([padding, array], axis=axis)


def has_views(backend: ArrayBackend) -> bool:
    """Whether an array can be written to, and what is cut out of it shows that."""
    xp = backend.xp
    whole = xp.zeros((2, 2), dtype=xp.float32, device=backend.device)
    half = whole[:, :1]
    try:
        whole[:, :1] = xp.ones_like(half)
    except Exception:  # each library has its own for what is never written to
        return False
    return bool(backend.get(half)[0, 0] == 1)


def _with_room(positions: int) -> int:
    return positions + max(8, positions // 5)


def _along(axis: int, begin: int, end: int) -> tuple[Any, ...]:
    """The index of a range of one axis."""
    return (*(slice(None),) * axis, slice(begin, end), ...)


def _ranges(places: Sequence[int]) -> list[tuple[int, int]]:
    """Places as ranges (first, one beyond the last), in their order."""
    found: list[tuple[int, int]] = []
    for place in places:
        if found and found[-1][1] == place:
            found[-1] = found[-1][0], place + 1
        else:
            found.append((place, place + 1))
    return found


def belonging(tree: Any, backend: ArrayBackend, only: str | None) -> Any:
    """A past without the arrays that do not belong to the cache. only: see `OwnCache`."""
    found = arrays_in(tree, backend.owns) if only is not None else []
    if all(only is None or only in place for place, _ in found):
        return tree
    return with_arrays(tree, backend.owns, [array if only and only in place else None for place, array in found])


def _itemsize(dtype: Any, xp: Any) -> int:
    size = getattr(dtype, "itemsize", None)
    if isinstance(size, int):
        return size
    if xp.isdtype(dtype, "bool"):
        return 1
    limits = xp.iinfo(dtype) if xp.isdtype(dtype, "integral") else xp.finfo(dtype)
    return int(limits.bits) // 8


TRIED = (2, 3), (3, 3), (2, 4)  # rows and tokens of the calls by which axes are found

Call = Callable[[int, int], Any]
"""(rows, tokens) -> the past of a first call with that many rows of as many tokens."""


def layout_of(spec: OwnCache, call: Call, backend: ArrayBackend, name: str) -> Layout:
    """Find the layout of a model's pasts by calling it. Raises ConfigError, and what `call` raises."""
    for what, axis in (("batch", spec.batch), ("position", spec.position)):
        if axis is not None and (not isinstance(axis, int) or isinstance(axis, bool)):
            raise ConfigError(
                f"OwnCache({what}=...) must be an axis, an integer (None: it is found); got {shown(axis)}."
            )
    if spec.only is not None and not isinstance(spec.only, str):
        raise ConfigError(f"OwnCache(only=...) must be a text (None: all arrays belong); got {shown(spec.only)}.")
    trees = [call(rows, n) for rows, n in TRIED]
    found = [arrays_in(belonging(tree, backend, spec.only), backend.owns) for tree in trees]
    base, rows, tokens = found
    if not base:
        raise ConfigError(
            f"{name} must return (logits, past) with arrays of {backend.name} in the past; found none. Return the "
            f"model's cache, such as `past_key_values`."
        )
    if any([place for place, _ in one] != [place for place, _ in base] for one in found):
        raise ConfigError(
            f"{name} must return a past with the same arrays in every call; got {len(base)}, {len(rows)} and "
            f"{len(tokens)} of them in three calls. Make all of them in the first call."
        )
    leaves = []
    for (place, a), (_, b), (_, c) in zip(base, rows, tokens, strict=True):
        batch = _axis(a, b, f"{name}: the past's array {place}", "rows", 2, 3)
        position = _axis(a, c, f"{name}: the past's array {place}", "tokens", 3, 4)
        for what, given, real in (("batch", spec.batch, batch), ("position", spec.position, position)):
            if given is not None and real is not None and given not in (real, real - len(a.shape)):
                raise ConfigError(
                    f"{name}: OwnCache({what}={given}) does not fit the past's array {place} of shape "
                    f"{tuple(a.shape)}: expected {what}={real}. Leave it out, and it is found."
                )
        shape = [0 if axis in (batch, position) else int(n) for axis, n in enumerate(a.shape)]
        leaves.append(Leaf(place, batch, position, tuple(shape), a.dtype))
    if all(leaf.batch is None for leaf in leaves):
        raise ConfigError(
            f"{name}: no array of the past has an axis of rows; expected one that is 2 long for 2 rows and 3 for 3. "
            f"Return the past of all rows."
        )
    shared = {leaf.place for leaf in leaves if leaf.batch is None and leaf.position is None}
    numbers, constant = data_of(trees, backend, spec.only, name, shared, TRIED)
    grow = {leaf.place for leaf in leaves if leaf.batch is not None and leaf.position is not None}
    leaves = [replace(f, windows=windows_beside(f.place, constant)) if f.place in grow else f for f in leaves]
    return Layout(leaves, backend, name, spec.only, (numbers, constant))


def _axis(a: Array, b: Array, what: str, of: str, before: int, after: int) -> int | None:
    """The axis in which two arrays differ; None means none. Raises ConfigError unless it is as long as it should be."""
    if len(a.shape) != len(b.shape):
        raise ConfigError(f"{what} must have as many dimensions in every call; got {len(a.shape)} and {len(b.shape)}.")
    axes = [i for i, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if n != m]
    if not axes:
        return None
    if len(axes) > 1 or (a.shape[axes[0]], b.shape[axes[0]]) != (before, after):
        raise ConfigError(
            f"{what} must be as long in one axis as there are {of}; got shape {tuple(a.shape)} for {before} and "
            f"{tuple(b.shape)} for {after} {of}. Give rows and positions axes of their own."
        )
    return axes[0]
