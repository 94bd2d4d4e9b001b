"""The pool of cache blocks. Block 0 is the trash block that padding writes to; nobody owns it.

A block is free, held (perhaps by several sequences), or idle: held by nobody, with contents that may serve again. What
a full block holds is published in a trie, a dictionary from (its predecessor, its own tokens) to the block. The
predecessor is named by a number that is never given twice, and tokens are compared as they are: no hash is trusted. The
root is the sequence's salt, so what was published under one salt is not found under another.

Idle blocks are taken in the order in which they were left. A sequence leaves its last block first, so tails go before
the heads that they hang on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice


class BlockPool:
    """Blocks 1 to total - 1. Free ones are handed out last in, first out, so that warm memory is reused.

    A block is sound once an output that was computed over it was finite. One that is not may hold NaN, which attention
    would carry over from hidden positions: it is noted in `dirty` before somebody else gets it.
    """

    def __init__(self, total: int, block_size: int) -> None:
        self.total, self.block_size = total, block_size
        self.evictions = 0  # idle blocks that were taken for something else
        self.dirty: list[int] = []  # to be overwritten with zeros before the next step
        self._free = list(range(total - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # the one left first comes first
        self._holders = [0] * total
        self._sound = bytearray(total)
        self._trie: dict[tuple[Hashable, Hashable], int] = {}
        self._place: list[tuple[Hashable, Hashable] | None] = [None] * total  # where in the trie, if published
        self._node = [0] * total  # the number of what is published
        self._nodes = 0

    @property
    def usable(self) -> int:
        return max(self.total - 1, 0)

    @property
    def free(self) -> int:
        """Blocks that can be had, idle ones among them."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def blocks_for(self, positions: int) -> int:
        """How many blocks hold this many positions."""
        return -(-positions // self.block_size)

    # ---- hold and leave ----------------------------------------------------------------------------------------

    def alloc(self, n: int) -> list[int] | None:
        """`n` blocks, or None (and nothing taken) if there are fewer."""
        if n > len(self._free) + len(self._idle):
            return None
        for _ in range(n - len(self._free)):
            block, _ = self._idle.popitem(last=False)
            self._withdraw(block)
            self._free.insert(0, block)
            self.evictions += 1
            if not self._sound[block]:
                self.dirty.append(block)
        at = len(self._free) - n
        taken = self._free[at:]
        del self._free[at:]
        for block in taken:
            self._holders[block] = 1
            self._sound[block] = False
        return taken[::-1]

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for published blocks."""
        for block in blocks:
            self._holders[block] += 1
            self._idle.pop(block, None)

    def release(self, blocks: Sequence[int], *, sound: int) -> None:
        """One holder less. sound: how many of them are (see the class), the first ones."""
        self.vouch(blocks[:sound])
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                if self._place[block] is not None:
                    self._idle[block] = None
                else:
                    self._give_back(block)

    def vouch(self, blocks: Iterable[int]) -> None:
        """They are sound."""
        for block in blocks:
            self._sound[block] = True

    def unsound(self, blocks: Iterable[int]) -> list[int]:
        return [block for block in blocks if not self._sound[block]]

    def _give_back(self, block: int) -> None:
        if not self._sound[block]:
            self.dirty.append(block)
        self._free.append(block)

    # ---- the trie ----------------------------------------------------------------------------------------------

    @staticmethod
    def root(salt: Hashable) -> Hashable:
        return (salt,)  # equal to no number of a node

    def match(self, salt: Hashable, keys: Sequence[Hashable], most: int) -> tuple[list[int], Hashable]:
        """The published blocks of the longest known prefix, at most `most`, and the node at its end."""
        found: list[int] = []
        node = self.root(salt)
        for key in islice(keys, most):
            block = self._trie.get((node, key))
            if block is None:
                break
            found.append(block)
            node = self._node[block]
        return found, node

    def publish(self, block: int, parent: Hashable, key: Hashable) -> Hashable:
        """Make a full block known; returns its node: of what is known already, if it is the same."""
        place = parent, key
        known = self._trie.get(place)
        if known is not None:
            return self._node[known]
        self._trie[place] = block
        self._place[block] = place
        self._nodes += 1
        self._node[block] = self._nodes
        return self._nodes

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Nobody finds them any more, nor what was published behind them."""
        for block in blocks:
            self._withdraw(block)
            if block in self._idle:
                del self._idle[block]
                self._give_back(block)

    def withdraw_nodes(self, published: Iterable[tuple[int, Hashable]]) -> None:
        """`withdraw` for (block, node), but of blocks that hold something else by now."""
        self.withdraw(block for block, node in published if self._node[block] == node)

    def _withdraw(self, block: int) -> None:
        place = self._place[block]
        if place is not None:
            del self._trie[place]
            self._place[block] = None

    def reset(self) -> bool:
        """Forget all that is published; False, and nothing done, while a sequence holds a block."""
        if self.free < self.usable:
            return False
        self.withdraw(list(self._trie.values()))
        return True

    # ---- invariants --------------------------------------------------------------------------------------------

    def check(self, held: list[int]) -> None:
        """Assert that blocks are free, idle, or held as often as `held` names them, and that the trie is right."""
        holders = [0] * self.total
        for block in held:
            holders[block] += 1
        where = sorted([*self._free, *self._idle, *set(held)])
        assert where == list(range(1, self.total)), "a block is lost, or held and free at once"
        assert holders == self._holders, "a block has holders that nobody knows"
        assert all(self._place[block] is not None for block in self._idle), "an idle block that nobody can find"
        assert all(self._place[block] is None for block in self._free), "a free block is published"
        assert all(self._place[block] == place for place, block in self._trie.items()), "the trie is wrong"
        assert len(self._trie) == sum(place is not None for place in self._place), "a block was published twice"
