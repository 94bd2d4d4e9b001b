"""Several processes that compute one model: what a backend asks of them, and how sums are added up whoever has what.

Processes stand in stages, each with some of the layers, and those of a stage share each of its matrices.

A product over columns that lie in several processes is cut into leaves, and leaves are added as a binary tree of
neighbours. A process has some leaves that stand together, as many as any other and a power of two, so it adds up a part
of the tree by itself. The result has the same bits for any number of processes, one included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from hibachi.errors import ConfigError, EngineFailed

MOST_LEAVES = 128


class GroupLost(EngineFailed):
    """A process of the group has ended or hangs; no step of this group can be computed any more."""


class RankPlace(NamedTuple):
    """Where a rank stands: its stage, of so many, and which of the `tp_size` ranks of that stage it is."""

    stage: int
    stages: int
    tp_rank: int
    tp_size: int

    @property
    def first(self) -> bool:
        """Whether its stage is the first one."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether its stage is the last one."""
        return self.stage == self.stages - 1

    def of_stage(self, stage: int) -> int:
        """The rank of another stage that has this one's shares."""
        return (stage + 1) % self.stages * self.tp_size + self.tp_rank


def place_of(rank: int, size: int, stages: int) -> RankPlace:
    """The last stage has the first ranks, as rank 0 samples from what it computes."""
    tp_size = size // stages
    return RankPlace((rank // tp_size - 1) % stages, stages, rank % tp_size, tp_size)


class RankGroup(Protocol):
    """The processes that compute one model together. rank: of this one, from 0 to before size. host: where rank 0 can
    be reached. sums: how many were added up.
    """

    rank: int
    size: int
    place: RankPlace
    host: str
    sums: int
    facts: dict[str, str]
    """What must be the same on all ranks, by name, besides what the engine knows: such as a digest of the files."""

    def sum(self, x: Any) -> Any:
        """The sum of the x of a stage's ranks, float32 of one shape, added as a tree; it is in x. Raises GroupLost."""
        ...

    def gather(self, x: Any, columns: int) -> Any:
        """On the first rank of a stage the x of its ranks side by side, [n, columns], of which each has its `share`; on
        others x. Raises GroupLost.
        """
        ...

    def collect(self, x: Any) -> Any:
        """On rank 0 the x of all ranks side by side, of one shape [n, m]; on others x. Raises GroupLost."""
        ...

    def send(self, x: Any) -> None:
        """Hand x over to the next stage, which need not wait for it yet. Raises GroupLost."""
        ...

    def receive(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """What the stage before has sent. Raises GroupLost."""
        ...

    def meet(self, name: str, value: bytes | None, timeout: float) -> bytes:
        """What rank 0 says under a name; others, which give None, wait for it. Raises GroupLost."""
        ...

    def check(self) -> None:
        """Raises GroupLost if a process that this one has started has ended."""
        ...

    def cancel(self) -> None:
        """From any thread: calls of ranks of this host that wait for others raise GroupLost, until `renew`."""
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
