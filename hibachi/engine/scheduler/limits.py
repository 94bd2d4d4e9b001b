"""What a step and the memory can hold."""

from __future__ import annotations

from dataclasses import dataclass

from hibachi.errors import PromptTooLong


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

    def __post_init__(self) -> None:
        assert 0 < self.rows <= self.budget and self.chunk > 0 and self.max_model_len > 1, self
        assert self.prefill is None or self.prefill > 0, self

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
