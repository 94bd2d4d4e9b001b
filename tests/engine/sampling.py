"""A sampler with rows in the midst of their output, without an engine around it."""

import numpy as np

from hibachi import SamplingParams, StopRule
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.sampler import RowSampler
from hibachi.engine.runners.stops import Stopper
from hibachi.engine.runners.tokentable import TokenTable
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.streams.channel import Channel
from hibachi.request import Request


class Row:
    """A request: its parameters, what it has so far, and what only the engine or the tokenizer knows."""

    def __init__(self, params=None, prompt=(0,), output=(), *, seed=0, stop_tokens=(), bad_words=()):
        self.params = params or SamplingParams()
        self.prompt, self.output, self.seed = list(prompt), list(output), seed
        self.stop_tokens, self.bad_words = list(stop_tokens), tuple(map(tuple, bad_words))


class Rows:
    """All of them in one sampler. draw(logits): the tokens that they would get next."""

    def __init__(self, backend, vocab, rows):
        self.backend, self.vocab, self.given = backend, vocab, rows
        self.table = TokenTable(len(rows), (), np.dtype(np.int32))
        self.sampler = RowSampler(backend, len(rows), vocab, self.table)
        self.jobs, self.positions = [], []
        for i, row in enumerate(rows):
            job = Job(
                Seq(len(row.prompt), None, row=i),
                Channel(),
                Request(np.array(row.prompt, np.int32), row.params, bad_words=row.bad_words),
                stop=Stopper(StopRule(row.stop_tokens), (), np.int32) if row.stop_tokens else None,
                seed=row.seed,
            )
            self.table.fill(i, job.history)
            self.sampler.admit(job)
            self.jobs.append(job)
            self.positions.append(len(row.prompt))
            for token in row.output:
                self.append(i, token)

    def append(self, i, token):
        self.table.write(np.array([i]), np.array([self.positions[i]]), np.array([token]))
        self.positions[i] += 1

    def draw(self, logits, at=None):
        """What the sampler returns for the rows `at` (all of them, unless said otherwise), of logits [rows, vocab]."""
        at = list(range(len(self.jobs))) if at is None else at
        logits = np.broadcast_to(np.asarray(logits, np.float32), (len(self.jobs), self.vocab))[at]
        positions = np.array([self.positions[i] for i in at])
        with self.backend.guard():
            jobs = [self.jobs[i] for i in at]
            return self.sampler.draw(self.backend.put(logits.copy()), jobs, np.array(at), positions)
