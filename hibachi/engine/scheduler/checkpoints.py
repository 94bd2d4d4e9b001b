"""Recurrent states kept by prefix: unlike keys and values they cannot be put together from blocks.

A checkpoint is the state of all layers after a prefix of full blocks. It can be found once the sequence that made it
has sampled a token: only then is it known to be finite. The least recently used checkpoint is replaced.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from typing import TypeAlias

Prefix: TypeAlias = tuple[Hashable, ...]  # the salt, and the keys of its blocks


class Checkpoints:
    """Slots 0 to total - 1. every: blocks from one checkpoint of a long prompt to the next."""

    evictions: int
    total: int
    every: int

    def __init__(self, total: int, every: int) -> None:
        self.total, self.every = total, every
        self.evictions = 0
        self._free = list(range(total - 1, -1, -1))
        self._found: OrderedDict[Prefix, int] = OrderedDict()  # the one used first comes first
        self._sizes: Counter[int] = Counter()  # how many have so many blocks

    def mark(self, start: int, length: int, block_size: int) -> int | None:
        """Where the next checkpoint of `length` known tokens is to be made when `start` are computed; None means
        nowhere.

        At the last full block that another prompt could share, and at intervals before it.
        """
        last = (length - 1) // block_size
        step = self.every * block_size
        at = min((start // step + 1) * step, last * block_size)
        return at if at > start else None

    def find(self, salt: Hashable, keys: Sequence[Hashable], most: int) -> tuple[int, int] | None:
        """The longest prefix of at most `most` blocks that is kept: (blocks, slot)."""
        for n in sorted((n for n in self._sizes if n <= min(most, len(keys))), reverse=True):
            prefix = (salt, *keys[:n])
            slot = self._found.get(prefix)
            if slot is not None:
                self._found.move_to_end(prefix)
                return n, slot
        return None

    def knows(self, salt: Hashable, keys: Sequence[Hashable], n: int) -> bool:
        return (salt, *keys[:n]) in self._found

    def reserve(self) -> int | None:
        """A slot to write to; None if all are being written to."""
        if self._free:
            return self._free.pop()
        if not self._found:
            return None
        prefix, slot = self._found.popitem(last=False)
        self._shrink(prefix)
        self.evictions += 1
        return slot

    def release(self, slot: int) -> None:
        """Give back a reserved slot whose contents are not wanted."""
        self._free.append(slot)

    def publish(self, salt: Hashable, keys: Sequence[Hashable], n: int, slot: int) -> None:
        """Publish the state after the first n blocks, which is in this slot and finite."""
        prefix = (salt, *keys[:n])
        if prefix in self._found:
            self.release(slot)
            return
        self._found[prefix] = slot
        self._sizes[n] += 1

    def reset(self) -> None:
        """Forget everything that can be found."""
        self._free += self._found.values()
        self._found.clear()
        self._sizes.clear()

    def _shrink(self, prefix: Prefix) -> None:
        n = len(prefix) - 1
        self._sizes[n] -= 1
        if not self._sizes[n]:
            del self._sizes[n]

    def check(self, reserved: list[int]) -> None:
        """Assert that every slot is free, findable or reserved, once."""
        assert sorted([*self._free, *self._found.values(), *reserved]) == list(range(self.total)), "a slot is lost"
        assert +self._sizes == Counter(len(p) - 1 for p in self._found), "sizes are wrong"
