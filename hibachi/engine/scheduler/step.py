"""What a step may hold, its plan and its result; the state of each row: arrays over all rows, so that a step reads and
writes many rows at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hibachi.engine.scheduler.copies import Copied
from hibachi.engine.scheduler.sequence import Seq
from hibachi.errors import PromptTooLong

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int32]]"
Index: TypeAlias = "np.ndarray[Any, np.dtype[np.intp]]"  # (NumPy looks these up ten times as fast as int32)
Bools: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"

NEVER = 2**30  # blocks; more than any sequence has


@dataclass(frozen=True, slots=True)
class Limits:
    """Capacity of a step and of the memory."""

    rows: int  # sequences that run at once
    budget: int  # tokens computed in one step, over all rows; at least `rows`
    chunk: int  # tokens of one sequence computed in one step
    max_model_len: int  # tokens of one sequence, prompt included
    blocks: int = 0  # cache blocks, with the trash block; 0 means the model keeps no cache
    block_size: int = 16
    max_num_queued_reqs: int | None = None  # longest queue, in sequences; None means any number
    prefill: int | None = None  # tokens of prompts in one step; None means as many as the budget allows
    # reserve blocks for all that a sequence may generate when it starts; then none is ever preempted
    reserve_all: bool = False
    checkpoints: int = 0  # recurrent states kept for prompts to come; 0 means the model has none, or nothing is shared
    checkpoint_every: int = 16  # blocks from one to the next
    copies: bool = False  # rows do not share blocks, but start with copies of what was computed: see `Copies`
    apart: bool = False  # blocks only count the memory of rows, which lies elsewhere: rows never share one
    # plans that are computed at the same time, each on another stage of the model; a row's next token is in no plan
    # before its last one is known
    stages: int = 1

    def __post_init__(self) -> None:
        assert 0 < self.rows <= self.budget and self.chunk > 0 and self.max_model_len > 1, self
        assert self.prefill is None or self.prefill > 0, self

    @property
    def rows_apart(self) -> bool:
        """Whether rows never share a block."""
        return self.apart or self.copies

    def fit(self, prompt_len: int, max_new: int | None) -> int:
        """The length at which such a sequence would end. Raises PromptTooLong if it can never be served."""
        longest = self.max_model_len
        if prompt_len >= longest:
            raise PromptTooLong(
                f"The prompt must leave room for one new token: expected at most {longest - 1} tokens; got "
                f"{prompt_len}. Shorten it, or raise max_model_len (now {longest})."
            )
        end = longest if max_new is None else min(prompt_len + max_new, longest)
        positions = (self.blocks - 1) * self.block_size  # one block is the trash block
        if self.blocks and end - 1 > positions:
            raise PromptTooLong(
                f"The cache has {positions} positions; this request may need {end - 1}: ask for fewer new tokens, or "
                f"give the engine more kv_cache_memory_bytes."
            )
        return end


class RowTable:
    """The counters of the sequence that holds each row; [rows], int32. Entries of rows that no sequence holds have no
    meaning.
    """

    def __init__(self, rows: int) -> None:
        self.known: Ints = np.zeros(rows, np.int32)  # tokens with a position, placeholders included
        # tokens that the model has computed, or computes in a planned step
        self.computed: Ints = np.zeros(rows, np.int32)
        self.done: Ints = np.zeros(rows, np.int32)  # tokens whose value is committed; known - done are placeholders
        self.gained: Ints = np.ones(
            rows, np.int32
        )  # tokens that the last committed step brought: these are not computed
        self.settled: Ints = np.zeros(rows, np.int32)  # tokens computed by committed steps that had chunks of prompts
        self.end: Ints = np.zeros(rows, np.int32)  # length at which it finishes
        self.capacity: Ints = np.zeros(rows, np.int32)  # positions that its blocks hold
        self.published: Ints = np.zeros(rows, np.int32)  # published blocks; NEVER means no more will be published
        self.emitted: Bools = np.zeros(rows, bool)  # it has sampled a token since it got its row
        self.generation: Ints = np.zeros(rows, np.int32)  # how often the row was given back (its generation)

    def enter(self, row: int, length: int, computed: int, end: int) -> None:
        """Give a sequence of `length` tokens, some of them found computed, this row."""
        self.known[row] = self.done[row] = length
        self.computed[row] = self.settled[row] = computed
        self.end[row] = end
        self.emitted[row] = False

    def advance(self, rows: Index, end: Ints, emit: Bools) -> None:
        """Plan a step that computes up to `end`, and leaves a placeholder where a new token is sampled."""
        self.computed[rows] = end
        self.known[rows] += emit

    def take_back(self, rows: Index, start: Ints, emit: Bools) -> None:
        """Undo `advance`: that step did not happen."""
        self.computed[rows] = start
        self.known[rows] -= emit

    def gain(self, rows: Index, end: Ints, counts: Ints | None, draft: Ints | None = None) -> Ints:
        """Record the tokens that a step sampled behind `end`; None means one for each row. Returns the lengths.

        draft: how many proposals were computed behind `end`: as many of them as came are computed.
        """
        if counts is None:
            self.gained[rows] = 1
            self.done[rows] = length = end + np.int32(1)
            return length
        assert not np.count_nonzero(self.known[rows] != end + 1), "a later step was planned"
        self.gained[rows] = counts
        self.known[rows] = self.done[rows] = length = end + counts
        if draft is not None:
            self.computed[rows] = np.maximum(end, np.minimum(length - 1, end + draft))
        return length

    def leave(self, row: int) -> None:
        self.generation[row] += 1


class KnownStart(NamedTuple):
    """What a starting sequence need not compute: full blocks, of which the last `loaded` come from a tier; and the
    checkpoint that it starts from, or a state from a tier.
    """

    blocks: int
    slot: int | None = None
    state: Any = None
    loaded: int = 0


class EntryLoad(NamedTuple):
    """To write into a block, or into the state of a row, before a step. of: the block's node in the trie, or the row's
    generation.
    """

    at: int
    of: Hashable
    data: Any


class EntryLoads(NamedTuple):
    """Into blocks, and into the states of rows."""

    blocks: list[EntryLoad]
    states: list[EntryLoad]


class EntryStores(NamedTuple):
    """(block, name), and (checkpoint, name) of recurrent states."""

    blocks: list[tuple[int, bytes]]
    states: list[tuple[int, bytes]]


Sent: TypeAlias = "list[tuple[Seq, int]]"  # sequences that lost their row, and the row that each had
# The sequence that published blocks in a step; how many it had published before, and the node of the last of them; its
# keys; the new (block, node) pairs.
Published: TypeAlias = "tuple[Seq, int, Hashable, list[Hashable], list[tuple[int, Hashable]]]"


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step: B rows, single-token rows first, others in the order of service. Arrays are [B]."""

    seqs: list[Seq]
    fresh: list[Seq]  # sequences that just got their row
    rows: Index  # the row of each
    start: Ints  # tokens computed before this step
    q: Ints  # tokens to compute now, >= 1; but see `linked`
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
    # Some of its sequences may be linked. Those with q = 0 go on from another, with its first new token.
    linked: bool = False
    # Before the step: what is read to be kept in tiers, and then what is written; None means there are no tiers.
    stores: EntryStores | None = None
    loads: EntryLoads | None = None
    end: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.start + self.q


class Move(NamedTuple):
    """What row `to` goes on from: the first `tokens` tokens of row `source`. block: (from, to), of which the contents
    are to be copied, as the last block is not full; None means there is none.
    """

    seq: Seq
    source: int
    to: int
    tokens: int
    block: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of a step. alive: which of the emitting rows still belong to their sequence; None means all."""

    alive: Bools | None
    finished: list[Seq]
    moves: Sequence[Move] = ()  # of rows that go on from others


@dataclass(slots=True)
class SchedulerCounts:
    """Counters from the start on."""

    prefix_queries: int = 0  # prompt tokens of started sequences that were allowed to share
    prefix_hits: int = 0  # of these, tokens that were found computed
    tier_hits: int = 0  # of these, tokens that were kept beside the device's memory
    preemptions: int = 0
