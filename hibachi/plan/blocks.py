"""The pool of cache blocks: which are free. Block 0 is the trash block that padding writes to; nobody owns it."""

from __future__ import annotations


class BlockPool:
    """Blocks 1 to total - 1, handed out and taken back; last in, first out, so that warm memory is reused."""

    def __init__(self, total: int, block_size: int) -> None:
        self.total, self.block_size = total, block_size
        self._free = list(range(total - 1, 0, -1))

    @property
    def usable(self) -> int:
        return max(self.total - 1, 0)

    @property
    def free(self) -> int:
        return len(self._free)

    def blocks_for(self, positions: int) -> int:
        """How many blocks hold this many positions."""
        return -(-positions // self.block_size)

    def alloc(self, n: int) -> list[int] | None:
        """`n` blocks, or None (and nothing taken) if there are fewer."""
        if n > len(self._free):
            return None
        at = len(self._free) - n
        taken, self._free = self._free[at:], self._free[:at]
        return taken[::-1]

    def release(self, blocks: list[int]) -> None:
        self._free.extend(reversed(blocks))

    def check(self, held: list[int]) -> None:
        """Assert that every block is either free or held once."""
        assert sorted(held + self._free) == list(range(1, self.total)), "a block is lost, shared or held twice"
