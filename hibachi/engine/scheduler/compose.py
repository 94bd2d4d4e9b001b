"""The order in which rows of a batch start: rows that share a prefix together, the longest first where nothing is
shared.

The rows that may start next stand in a radix tree of their prompts' blocks, which is walked depth first. So the next
row is one of those that share most with the last, because that is what the cache still holds; it does not matter
whether a row was there before or has joined meanwhile. Where nothing more is shared, the child of a node with the
longest row goes first: this keeps all places of the engine busy until the end (LPT scheduling). Only where some
children are groups and rows still join does the child with the oldest row go first: each group has then had the longest
time to gather before its turn.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np

Key: TypeAlias = "tuple[Hashable, ...] | bytes"

PATIENCE = 4096  # younger rows that may go before a row
RUN = 64  # rows between two that leave a subtree unfinished, so what it shares is rarely computed twice


def blocks_of(ids: Sequence[int] | np.ndarray[Any, Any], size: int) -> tuple[bytes, ...]:
    """The whole blocks of `size` token ids that a prompt begins with, as a key for `Composer.add`.

    () for ids that no int32 holds: such a prompt is refused when it starts.
    """
    whole = len(ids) // size * size
    part = ids[:whole]
    try:
        data = part.astype(np.int32).tobytes() if isinstance(part, np.ndarray) else array("i", part).tobytes()
    except OverflowError:
        return ()
    step = 4 * size
    return tuple([data[at : at + step] for at in range(0, len(data), step)])


class _Node:
    """A row (`children` is None), or what several rows begin with: the first `end` items of `key`.

    Its edge goes from its parent's end to its own. key: of any row below it, whole, so that cutting an edge in two and
    joining two costs nothing. name: its own among the parent's children. best: (-tokens, number) of its longest row.
    heap: (best, child), perhaps also such as are no longer true. groups: children that are not rows. before: of a row,
    how many were added before it.
    """

    __slots__ = ("before", "best", "children", "end", "groups", "heap", "key", "name", "parent")

    def __init__(self, parent: _Node | None, name: Hashable, key: Key, end: int, best: tuple[int, int]) -> None:
        self.parent, self.name, self.key, self.end, self.best = parent, name, key, end, best
        self.children: dict[Hashable, _Node] | None = None
        self.heap: list[tuple[tuple[int, int], _Node]] = []
        self.groups = self.before = 0

    def __lt__(self, other: _Node) -> bool:
        """Two entries of a heap for the same row: at most one of them is true, so either may come first."""
        return False

    def push(self, child: _Node) -> None:
        """Record the new best row of a child."""
        assert self.children is not None
        if len(self.heap) > 2 * len(self.children) + 8:  # more false entries than true ones
            self.heap = [(c.best, c) for c in self.children.values()]
            heapq.heapify(self.heap)
        else:
            heapq.heappush(self.heap, (child.best, child))

    def first(self) -> _Node:
        """The child with the longest row."""
        heap = self.heap
        while (child := heap[0][1]).parent is not self or child.best != heap[0][0]:
            heapq.heappop(heap)
        return child


class Composer:
    """A window of rows from which the next one to start is taken.

    block: items of a key that make one block, as prefixes are shared in whole blocks: 1 where each item is a block, 16
    for token ids as they are, 64 for the bytes of 16 int32.

    No row waits for ever: once `patience` younger rows went before a row (or as many as the window ever held, if that
    is more), it goes next. For this a subtree that still has rows is left at most every 64th time, so that groups stay
    together all the same. A row that finds k others is taken with at most patience + 65 (k + 1) takes, whatever joins;
    with 2 k + patience + 1 where nothing is shared.

    The result depends only on the calls. Memory: at most two nodes a row, however long the keys are.
    """

    def __init__(self, block: int = 1, *, patience: int = PATIENCE) -> None:
        if block < 1 or patience < 1:
            raise ValueError(f"block and patience must be at least 1; got {block} and {patience}.")
        self._block, self._patience = block, patience
        self._root = _Node(None, None, (), 0, (0, 0))
        self._root.children = {}
        self._rows: OrderedDict[int, _Node] = OrderedDict()  # in the order in which they came
        self._taken = 0
        self._last: Key = ()  # key of the last row taken
        self._joined = -RUN  # how many were taken when a row last joined those that were there at the start
        self._left = -RUN  # how many were taken when a row was last preferred for its age

    def __len__(self) -> int:
        return len(self._rows)

    # ---- in ----------------------------------------------------------------------------------------------------

    def add(self, number: int, key: Sequence[Hashable] | bytes, longest: int) -> None:
        """Let a row join.

        number: unique among the rows here. key: what its prompt begins with. longest: tokens of prompt and answer at
        most. Raises ValueError if the number is taken.
        """
        if number in self._rows:
            raise ValueError(f"Row {number} is here already: expected each number once.")
        own = key if isinstance(key, bytes) else tuple(key)
        size, block = len(own) - len(own) % self._block, self._block
        node, at = self._root, 0
        while True:
            assert node.children is not None
            name: Hashable = own[at : at + block] if at < size else number  # (no slice equals a number)
            child = node.children.get(name)
            if child is None:
                break
            at = self._agree(own, child.key, at + block, min(size, child.end))
            node = child if at == child.end and child.children is not None else self._cut(child, at)
        row = _Node(node, name, own, size, (-longest, number))
        row.before = self._taken + len(self._rows)
        node.children[name] = self._rows[number] = row
        self._patience = max(self._patience, len(self._rows))
        if self._taken:
            self._joined = self._taken
        best, below = row.best, row
        while True:
            node.push(below)
            if node.parent is None or best > node.best:
                break
            node.best = best
            node, below = node.parent, node

    def _agree(self, a: Key, b: Key, at: int, end: int) -> int:
        """Number of items that two keys have in common, in whole blocks; `at` of them are known, `end` is the most."""
        width = self._block
        while at < end:
            stop = min(at + width, end)
            if a[at:stop] == b[at:stop]:
                at, width = stop, 2 * width
            elif width == self._block:
                break
            else:
                width = max(width // 4 // self._block, 1) * self._block
        return at

    def _cut(self, child: _Node, at: int) -> _Node:
        """A node `at` items deep, in the middle of the child's edge."""
        parent = child.parent
        assert parent is not None and parent.children is not None
        node = _Node(parent, child.name, child.key, at, child.best)
        child.parent, child.name = node, child.key[at : at + self._block] if at < child.end else child.best[1]
        node.children = {child.name: child}
        node.groups = int(child.children is not None)
        parent.groups += 1 - node.groups
        node.push(child)
        parent.children[node.name] = node
        parent.push(node)
        return node

    # ---- out ---------------------------------------------------------------------------------------------------

    def take(self) -> int:
        """Remove the row to start next, and return its number. Raises IndexError if there is none."""
        if not self._rows:
            raise IndexError("No row is left to take.")
        node = self._nearest()
        oldest = next(iter(self._rows.values()))
        overdue = self._taken - oldest.before >= self._patience
        gathers = node.groups > 0 and self._taken - self._joined < RUN
        if overdue and self._taken - self._left >= RUN:
            node, self._left = oldest, self._taken
        elif (overdue or gathers) and self._below(oldest, node):  # it costs no prefix: the subtree is not left for it
            node = oldest
        row = node if node.children is None else self._rows[node.first().best[1]]
        self._remove(row)
        self._taken += 1
        self._last = row.key
        return row.best[1]

    def _nearest(self) -> _Node:
        """The subtree with the rows that share most with the last row taken."""
        key, size, block = self._last, len(self._last), self._block
        node, at = self._root, 0
        while node.children is not None and at == node.end < size:
            child = node.children.get(key[at : at + block])
            if child is None:
                break
            at = self._agree(key, child.key, at + block, min(size, child.end))
            node = child
        return node

    @staticmethod
    def _below(row: _Node, node: _Node) -> bool:
        above: _Node | None = row
        while above is not None and above is not node:
            above = above.parent
        return above is node

    def _remove(self, row: _Node) -> None:
        del self._rows[row.best[1]]
        node = row.parent
        assert node is not None and node.children is not None
        del node.children[row.name]
        row.parent = None
        if node.parent is not None and len(node.children) == 1:  # nothing parts here any more
            parent, [child] = node.parent, node.children.values()
            assert parent.children is not None
            child.parent, child.name = parent, node.name
            parent.children[node.name] = child
            parent.groups -= child.children is None
            parent.push(child)
            node.parent, node = None, parent
        while node.parent is not None and (best := node.first().best) != node.best:
            node.best = best
            node.parent.push(node)
            node = node.parent
