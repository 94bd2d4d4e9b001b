"""What an engine has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of an engine. Counters run from its start."""

    waiting: int = 0  # requests in the queue
    running: int = 0  # requests that hold a row
    max_num_seqs: int = 0  # rows
    steps: int = 0
    step_seconds: float = 0.0  # time spent in steps
    prompt_tokens: int = 0  # of requests admitted
    new_tokens: int = 0  # delivered
    finished: int = 0  # requests that ended, for whatever reason
    failed: int = 0  # of these, with an error
    blocks: int = 0  # cache blocks; 0 means the model keeps no cache
    free_blocks: int = 0  # that can be had, those with contents that may serve again among them
    cached_blocks: int = 0  # of these, with such contents
    prefix_queries: int = 0  # tokens of requests that started and might have shared
    prefix_hits: int = 0  # of these, tokens that were found in the cache
    evictions: int = 0  # blocks with such contents that were taken for something else
    preemptions: int = 0  # times that a request lost its row, to compute again later

    @property
    def mean_batch_size(self) -> float:
        """New tokens a step."""
        return self.new_tokens / self.steps if self.steps else 0.0


@dataclass(slots=True)
class Counts:
    """The counters of `Stats`."""

    steps: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0
    finished: int = 0
    failed: int = 0
