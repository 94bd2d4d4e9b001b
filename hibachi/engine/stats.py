"""Statistics of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of an engine's figures. Counters run from its start."""

    waiting: int = 0  # requests in the queue
    held: int = 0  # of these, requests whose grammars are being made, or that wait for what a store has
    running: int = 0  # requests that hold a row
    max_num_seqs: int = 0  # rows
    steps: int = 0
    step_seconds: float = 0.0  # time spent in steps
    prompt_tokens: int = 0  # prompt tokens of admitted requests
    new_tokens: int = 0  # delivered
    finished: int = 0  # requests that ended, for any reason
    failed: int = 0  # of these, with an error
    blocks: int = 0  # cache blocks; 0 means the model keeps no cache
    free_blocks: int = 0  # available blocks, including those whose contents may be found again
    cached_blocks: int = 0  # of these, with such contents
    prefix_queries: int = 0  # prompt tokens of started requests that were allowed to share
    prefix_hits: int = 0  # of these, tokens that were found in the cache
    tier_hits: int = 0  # tokens that were loaded from host memory, a disk or a store
    evictions: int = 0  # cached blocks that were reused for other contents
    preemptions: int = 0  # times that a request lost its row and had to compute its tokens again

    @property
    def mean_batch_size(self) -> float:
        """New tokens per step."""
        return self.new_tokens / self.steps if self.steps else 0.0


@dataclass(slots=True)
class EngineCounts:
    """The counters of `Stats`."""

    steps: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0
    finished: int = 0
    failed: int = 0
