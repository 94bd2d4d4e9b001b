"""Proposals for rows that decode: made before a step is planned, judged when it is over."""

from __future__ import annotations

import numpy as np

from hibachi.draft.config import SpeculativeConfig
from hibachi.draft.howmany import HowMany
from hibachi.draft.ngram import NgramDrafter
from hibachi.draft.protocol import NOTHING, Drafter, Tokens, checked
from hibachi.guide.protocol import GuideFailed
from hibachi.plan.scheduler import Scheduler
from hibachi.plan.sequence import Seq
from hibachi.plan.step import StepPlan
from hibachi.runners.job import Job
from hibachi.runners.meters import Drafted
from hibachi.runners.runner import BaseRunner, Outcome

FEW = 8  # rows of a step in which grammars are asked for what is forced: each such token costs a mask


class Drafting:
    """Sets the proposals of the running rows. k: the most of a row. how: chooses how many pay; None means all."""

    def __init__(self, drafter: Drafter, k: int, vocab_size: int, how: HowMany | None = None) -> None:
        self._drafter, self._k, self._vocab, self._how = drafter, k, vocab_size, how
        self.drafted = Drafted()
        self._untried: dict[Seq, Tokens] = {}  # proposals that no row has computed: what comes judges them too

    def propose(self, scheduler: Scheduler, runner: BaseRunner) -> list[tuple[int, int]]:
        """Returns the sequences, by number, that have proposals now, and how many."""
        table = scheduler.table
        self._untried.clear()
        seqs = [
            seq
            for seq in scheduler.order
            if seq.row >= 0
            and table.emitted[seq.row]
            and table.known[seq.row] - table.computed[seq.row] == 1
            and not seq.paused
        ]
        most = [min(self._k, int(table.end[seq.row] - table.known[seq.row]) - 1) for seq in seqs]
        seqs, most = [s for s, n in zip(seqs, most, strict=True) if n > 0], [n for n in most if n > 0]
        for seq in scheduler.order:
            seq.draft = 0
        if not seqs:
            return []
        few = len(seqs) <= FEW
        forced = [self._forced(seq, n, scheduler) if few else NOTHING for seq, n in zip(seqs, most, strict=True)]
        found: list[Tokens] = [NOTHING] * len(seqs)
        if self._how is None or self._how.worth(len(seqs), sum(most)):
            tokens = [runner.tokens_of(seq.row, int(table.known[seq.row])) for seq in seqs]
            found = checked(self._drafter.propose(seqs, tokens, most), most, self._vocab).proposals
        found = [sure if len(sure) else guess for sure, guess in zip(forced, found, strict=True)]
        counts = [len(each) for each in found]
        if self._how is not None:
            rates = [1.0 if len(s) else self._how.records.rate(q) for s, q in zip(forced, seqs, strict=True)]
            counts = self._how.choose(len(seqs), counts, rates, scheduler.budget - len(seqs))
        for seq, each, n in zip(seqs, found, counts, strict=True):
            job: Job = seq.owner
            job.draft, seq.draft = each[:n], n
            if not n and len(each):
                self._untried[seq] = each
        return [(seq.number, seq.draft) for seq in seqs if seq.draft]

    def _forced(self, seq: Seq, most: int, scheduler: Scheduler) -> Tokens:
        """What the grammar of a guided row leaves no choice about."""
        guided = seq.owner.guided
        if guided is None or guided.seen != scheduler.known(seq) - seq.prompt_len:
            return NOTHING
        try:
            return np.array(guided.guide.forced(most), np.int32)
        except GuideFailed:  # the draw will find out
            return NOTHING

    def judge(self, plan: StepPlan, outcome: Outcome, seconds: float) -> None:
        """A step is over, and took so long: which proposals were right."""
        draft, how = plan.draft, self._how
        if how is not None:
            how.costs.note(int(plan.q.sum()) + (0 if draft is None else int(draft.sum())), seconds)
        for part in outcome.parts:
            if part.tokens is None or (draft is None and not self._untried):
                continue
            counts = np.ones(len(part.idx), np.int64) if part.counts is None else part.counts
            first = np.cumsum(counts) - counts
            for i, n, at in zip(part.idx.tolist(), counts.tolist(), first.tolist(), strict=True):
                seq, tried = plan.seqs[i], 0 if draft is None else int(draft[i])
                if tried:
                    right = max(n - 1, 0)
                    self.drafted.note(tried, right)
                elif (guess := self._untried.get(seq)) is not None and n:
                    tried, right = 1, int(part.tokens[at] == guess[0])
                if tried and how is not None and seq.owner is not None:
                    how.records.note(seq, tried, right)

    def forget(self, seq: Seq) -> None:
        """The request is over."""
        if self._how is not None:
            self._how.records.forget(seq)
        self._untried.pop(seq, None)
        if (forget := getattr(self._drafter, "forget", None)) is not None:
            forget(seq)


def made(config: SpeculativeConfig, vocab_size: int) -> Drafting:
    drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    return Drafting(drafter, config.num_speculative_tokens, vocab_size, HowMany() if config.auto else None)
