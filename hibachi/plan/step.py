"""A step as it is planned, and what came of it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

from hibachi.plan.rows import Bools, Index, Ints
from hibachi.plan.sequence import Seq

Sent: TypeAlias = "list[tuple[Seq, int]]"  # sequences that lost their row, and the row that each had
# Who published blocks in a step; how many were published before, and the node of the last; the new (block, node).
Published: TypeAlias = "tuple[Seq, int, Hashable, list[tuple[int, Hashable]]]"


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step: B rows, single-token rows first, others in the order of service. Arrays are [B]."""

    seqs: list[Seq]
    fresh: list[Seq]  # those that just got their row
    rows: Index  # the row of each
    start: Ints  # tokens computed before this step
    q: Ints  # tokens to compute now, >= 1
    emit: Bools  # reaches the end of the known tokens: a new token is wanted
    generation: Ints
    preempted: Sent = field(default_factory=list)
    published: list[Published] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)  # (row, checkpoint) that it starts from
    saves: list[tuple[Seq, int, int]] = field(default_factory=list)  # (who, row, checkpoint) to write after the step

    @property
    def end(self) -> Ints:
        return self.start + self.q


@dataclass(frozen=True, slots=True)
class Committed:
    """What a step came to. alive: which of the emitting rows still belong to their sequence; None means all."""

    alive: Bools | None
    finished: list[Seq]


@dataclass(slots=True)
class SchedulerCounts:
    """Counters from the start on."""

    prefix_queries: int = 0  # tokens of sequences that started and might share
    prefix_hits: int = 0  # of these, tokens that were found computed
    preemptions: int = 0
