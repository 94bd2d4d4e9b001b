"""The pool of cache blocks. Block 0 is the trash block, which padding writes to; no sequence owns it.

A block is free, held (perhaps by several sequences), or idle: held by none, with contents that may be found again. The
contents of a full block are published in a trie, a dictionary from (its predecessor, its own tokens) to the block. The
predecessor is named by a number that is never given twice, and tokens are compared as they are: no hash is trusted. The
root is the sequence's salt, so blocks published under one salt are not found under another.

Idle blocks are reused in the order in which they became idle. A sequence releases its last block first, so tails go
before the heads that they hang on.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice


class BlockPool:
    """Blocks 1 to total - 1. Free ones are handed out last in, first out, so that warm memory is reused.

    A block is sound once an output that was computed over it was finite. Blocks of a failed request that are not sound
    must not be found again. A block is not cleared for its next owner: see `ArrayBackend.storable`.
    """

    total: int
    block_size: int
    evictions: int
    taken: int

    def __init__(self, total: int, block_size: int) -> None:
        self.total, self.block_size = total, block_size
        self.evictions = 0  # idle blocks that were reused for other contents
        self.taken = 0  # idle blocks that are not idle any more
        self._free = list(range(total - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # in the order in which they became idle
        self._held: set[int] = set()
        self._shared: dict[int, int] = {}  # held blocks with several holders: how many more than one
        self._unsound: set[int] = set()  # held and idle blocks that are not known to be sound
        self._trie: dict[tuple[Hashable, Hashable], int] = {}
        self._place: dict[int, tuple[Hashable, Hashable]] = {}  # where in the trie; of published blocks
        self._node = [0] * total  # the number of what is published
        self._nodes = 0
        self._names: dict[int, bytes] = {}  # of published blocks that are not known to be sound yet
        self.named: list[tuple[int, Hashable, bytes]] = []
        """(block, node, name) of published blocks that have become sound since this was emptied, if they have names."""

    @property
    def usable(self) -> int:
        return max(self.total - 1, 0)

    @property
    def free(self) -> int:
        """Number of blocks that can be allocated, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def empty(self) -> int:
        """Of the free blocks, those without contents that may be found again."""
        return len(self._free)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def node(self, block: int) -> Hashable:
        """The number of what is published in this block."""
        return self._node[block]

    def publishes(self, block: int, node: Hashable) -> bool:
        return block in self._place and self._node[block] == node

    def keeps(self, block: int, node: Hashable) -> bool:
        """Whether an idle block still has these contents."""
        return block in self._idle and self._node[block] == node

    def blocks_for(self, positions: int) -> int:
        """Number of blocks that hold this many positions."""
        return -(-positions // self.block_size)

    # ---- hold and leave ----------------------------------------------------------------------------------------

    def alloc(self, n: int) -> list[int] | None:
        """Allocate `n` blocks; None, and nothing allocated, if there are fewer."""
        if n > len(self._free) + len(self._idle):
            return None
        for _ in range(n - len(self._free)):
            block, _ = self._idle.popitem(last=False)
            self._withdraw(block)
            self.taken += 1
            # At the front, so that n blocks taken at once are those of n single calls, in their order (stretch.py needs
            # it).
            self._free.insert(0, block)
            self.evictions += 1
        at = len(self._free) - n
        taken = self._free[at:]
        del self._free[at:]
        self._unsound.update(taken)
        self._held.update(taken)
        return taken[::-1]

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to published blocks."""
        for block in blocks:
            if block in self._idle:
                del self._idle[block]
                self._held.add(block)
                self.taken += 1
            else:
                self._shared[block] = self._shared.get(block, 0) + 1

    def release(self, blocks: Sequence[int], *, sound: int) -> None:
        """Remove a holder. sound: how many of the blocks, counted from the first, are sound (see the class).

        Raises ValueError, and changes nothing, for a block that no sequence holds.
        """
        if not self._held.issuperset(blocks):
            raise ValueError(f"Blocks {sorted({*blocks} - self._held)} are not held: they were released twice.")
        self.vouch(blocks[:sound])
        if self._place.keys().isdisjoint(blocks) and self._shared.keys().isdisjoint(blocks):
            self._held.difference_update(blocks)
            self._give_back(blocks[::-1])  # without a look at each: a long request may have thousands
            return
        for block in reversed(blocks):
            if more := self._shared.pop(block, 0):
                if more > 1:
                    self._shared[block] = more - 1
                continue
            self._held.remove(block)
            if block in self._place:
                self._idle[block] = None
            else:
                self._give_back([block])

    def vouch(self, blocks: Iterable[int]) -> None:
        """Mark these blocks as sound."""
        if self._names:
            blocks = list(blocks)
            named = ((block, self._names.pop(block, None)) for block in blocks)
            self.named += [(block, self._node[block], name) for block, name in named if name is not None]
        self._unsound.difference_update(blocks)

    def unsound(self, blocks: Iterable[int]) -> list[int]:
        return [block for block in blocks if block in self._unsound]

    def _give_back(self, blocks: Sequence[int]) -> None:
        self._unsound.difference_update(blocks)
        self._free += blocks

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

    def publish(self, block: int, parent: Hashable, key: Hashable, name: bytes | None = None) -> Hashable:
        """Publish a full block; returns its node, or the node of equal contents that are published already. name: for
        `named`.
        """
        place = parent, key
        known = self._trie.get(place)
        if known is not None:
            # The block stays its owner's own copy; what comes after it is published behind the known one.
            return self._node[known]
        self._trie[place] = block
        self._place[block] = place
        self._nodes += 1
        self._node[block] = self._nodes
        if name is not None:
            self._names[block] = name
        return self._nodes

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Unpublish these blocks, and all that was published behind them."""
        for block in blocks:
            self._withdraw(block)
            if block in self._idle:
                del self._idle[block]
                self._give_back([block])
                self.taken += 1

    def withdraw_nodes(self, published: Iterable[tuple[int, Hashable]]) -> None:
        """`withdraw` for (block, node) pairs, except blocks that hold other contents by now."""
        self.withdraw(block for block, node in published if self._node[block] == node)

    def _withdraw(self, block: int) -> None:
        place = self._place.pop(block, None)
        self._names.pop(block, None)
        if place is not None:
            del self._trie[place]

    def drop(self) -> None:
        """Unpublish everything; idle blocks become free, and held ones stay with their holders."""
        self.withdraw(list(self._trie.values()))

    def reset(self) -> bool:
        """Forget all that is published; False, and nothing done, while a sequence holds a block."""
        if self.free < self.usable:
            return False
        self.drop()
        return True

    # ---- invariants --------------------------------------------------------------------------------------------

    def check(self, held: list[int]) -> None:
        """Assert that every block is free, idle, or held as often as `held` names it, and that the trie is right."""
        holders = Counter(held)
        where = sorted([*self._free, *self._idle, *holders])
        assert where == list(range(1, self.total)), "a block is lost, or held and free at once"
        assert self._held == holders.keys(), "a block is held by nobody"
        shared = {block: n - 1 for block, n in holders.items() if n > 1}
        assert shared == self._shared, "a block has holders that nobody knows"
        assert self._place.keys() >= self._idle.keys(), "an idle block that nobody can find"
        assert self._place.keys().isdisjoint(self._free), "a free block is published"
        assert self._unsound.isdisjoint(self._free), "a free block is unsound"
        assert {block: place for place, block in self._trie.items()} == self._place, "the trie is wrong"
