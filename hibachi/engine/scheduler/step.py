"""The plan of a step, and its result."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

from hibachi.engine.scheduler.copies import Copied
from hibachi.engine.scheduler.rows import Bools, Index, Ints
from hibachi.engine.scheduler.sequence import Seq

Sent: TypeAlias = "list[tuple[Seq, int]]"  # sequences that lost their row, and the row that each had
# The sequence that published blocks in a step; how many it had published before, and the node of the last of them; the
# new (block, node) pairs.
Published: TypeAlias = "tuple[Seq, int, Hashable, list[tuple[int, Hashable]]]"


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step: B rows, single-token rows first, others in the order of service. Arrays are [B]."""

    seqs: list[Seq]
    fresh: list[Seq]  # sequences that just got their row
    rows: Index  # the row of each
    start: Ints  # tokens computed before this step
    q: Ints  # tokens to compute now, >= 1
    emit: Bools  # reaches the end of the known tokens, so a new token is sampled
    generation: Ints
    tokens: int  # the sum of q
    preempted: Sent = field(default_factory=list)
    published: list[Published] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)  # (row, checkpoint) that it starts from
    # (sequence, row, checkpoint) to write after the step
    saves: list[tuple[Seq, int, int]] = field(default_factory=list)
    copies: list[Copied] = field(default_factory=list)  # of what its blocks were found in; see `Copies`
    draft: Ints | None = None  # proposed tokens to compute behind the q tokens; None means no row has any
    end: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.start + self.q


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of a step. alive: which of the emitting rows still belong to their sequence; None means all."""

    alive: Bools | None
    finished: list[Seq]


@dataclass(slots=True)
class SchedulerCounts:
    """Counters from the start on."""

    prefix_queries: int = 0  # prompt tokens of started sequences that were allowed to share
    prefix_hits: int = 0  # of these, tokens that were found computed
    preemptions: int = 0
