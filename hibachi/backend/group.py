"""Several processes that compute one model: what a backend asks of them, and how sums are added up whoever has what.

A product over columns that lie in several processes is cut into leaves, and leaves are added as a binary tree of
neighbours. A process has some leaves that stand together, as many as any other and a power of two, so it adds up a part
of the tree by itself. The result has the same bits for any number of processes, one included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from hibachi.errors import ConfigError, EngineFailed

T = TypeVar("T")
MOST_LEAVES = 128


class GroupLost(EngineFailed):
    """A process of the group has ended or hangs; no step of this group can be computed any more."""


class RankGroup(Protocol):
    """The processes that compute one model together. rank: of this one, from 0 to before size. host: where rank 0 can
    be reached. sums: how many were added up.
    """

    rank: int
    size: int
    host: str
    sums: int
    facts: dict[str, str]
    """What must be the same on all ranks, by name, besides what the engine knows: such as a digest of the files."""

    def sum(self, x: Any) -> Any:
        """The sum of the x of all ranks, float32 of one shape, added as a tree; it is in x. Raises GroupLost."""
        ...

    def gather(self, x: Any, columns: int) -> Any:
        """On rank 0 the x of all ranks side by side, [n, columns], of which each has its `share`; on others x. Raises
        GroupLost.
        """
        ...

    def meet(self, name: str, value: bytes | None, timeout: float) -> bytes:
        """What rank 0 says under a name; others, which give None, wait for it. Raises GroupLost."""
        ...

    def check(self) -> None:
        """Raises GroupLost if a process that this one has started has ended."""
        ...

    def abort(self) -> None:
        """End the calls of all ranks that wait for this one: they raise GroupLost."""
        ...

    def renew(self, epoch: int) -> None:
        """Meet the other ranks again, all with one number; what was before is aborted here."""
        ...

    def close(self) -> None: ...


def tree(parts: Sequence[Any]) -> Any:
    """The sum of arrays, added as a binary tree of neighbours."""
    left = list(parts)
    while len(left) > 1:
        left = [left[i] + left[i + 1] if i + 1 < len(left) else left[i] for i in range(0, len(left), 2)]
    return left[0]


def check_leaves(leaves: Any, size: int) -> int:
    """The number of leaves for so many processes; None means one each. Raises ConfigError."""
    if leaves is None:
        return size
    if not isinstance(leaves, int) or isinstance(leaves, bool) or not 1 <= leaves <= MOST_LEAVES:
        raise ConfigError(
            f"tp_leaves must be an integer from 1 to {MOST_LEAVES} (or None: one a rank); got {leaves!r}."
        )
    each, rest = divmod(leaves, size)
    if rest or each & (each - 1) or not each:
        fit = ", ".join(str(size << i) for i in range(8) if size << i <= MOST_LEAVES)
        raise ConfigError(
            f"tp_leaves must be tensor_parallel_size times a power of two, so that each rank adds up a part of the "
            f"tree: expected one of {fit}; got {leaves}."
        )
    return leaves


def share(n: int, rank: int, size: int) -> slice:
    """The part of n things that a rank has: equal parts, the last ones smaller where n is no multiple."""
    each = -(-n // size)
    return slice(min(rank * each, n), min((rank + 1) * each, n))
