"""Proposals for rows that decode: asked for before a step is planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from hibachi.plan.scheduler import Scheduler
from hibachi.runners.job import Job
from hibachi.runners.runner import Runner
from hibachi.tensor.array_backend import HostArray


class Drafter(Protocol):
    """Proposes the tokens that may come next."""

    def propose(self, tokens: Sequence[HostArray], most: Sequence[int]) -> Sequence[Any]:
        """tokens: of each row all so far, int32 [n]. most: how many may be proposed. Returns as many int32 arrays."""
        ...


class Drafting:
    """Sets the proposals of the running rows. k: the most for a row."""

    def __init__(self, drafter: Drafter, k: int, vocab_size: int) -> None:
        self._drafter, self._k, self._vocab = drafter, k, vocab_size
        self.drafted = self.accepted = 0

    def propose(self, scheduler: Scheduler, runner: Runner) -> list[tuple[int, int]]:
        """Returns the sequences, by number, that have proposals now, and how many."""
        seqs, table = [], scheduler.table
        for seq in scheduler.order:
            seq.draft = 0
            row = seq.row
            if row >= 0 and table.emitted[row] and table.known[row] - table.computed[row] == 1 and not seq.paused:
                seqs.append(seq)
        if not seqs:
            return []
        tokens = [runner.tokens_of(seq.row, int(table.known[seq.row])) for seq in seqs]  # type: ignore[attr-defined]
        for seq, found in zip(seqs, self._drafter.propose(tokens, [self._k] * len(seqs)), strict=True):
            job: Job = seq.owner
            job.draft = np.asarray(found, np.int32)[: self._k]
            seq.draft = len(job.draft)
        return [(seq.number, seq.draft) for seq in seqs if seq.draft]
