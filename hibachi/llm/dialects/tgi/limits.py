"""The most that a request in TGI's dialect may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from hibachi.llm.dialects.openai.bodies import Bounds


@dataclass(frozen=True, slots=True)
class TgiLimits:
    """The launcher's names and defaults. max_input_tokens, max_total_tokens: of a prompt, and of a prompt with what is
    new; None means what the context holds. max_concurrent_requests: None means any number.
    """

    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_client_batch_size: int = 4
    max_concurrent_requests: int | None = 128
    disable_grammar_support: bool = False  # no request may say what form its answer must have

    @classmethod
    def of(cls, bounds: Bounds) -> TgiLimits:
        """What a server allows that was not asked to be like TGI."""
        return cls(
            max_best_of=bounds.n,
            max_stop_sequences=bounds.stop,
            max_top_n_tokens=bounds.logprobs,
            max_client_batch_size=bounds.prompts,
            max_concurrent_requests=None,
        )

    def total(self, context: int) -> int:
        """Most tokens of a prompt with what is new. context: what the model's holds."""
        return context if self.max_total_tokens is None else min(self.max_total_tokens, context)

    def input(self, context: int) -> int:
        """Most tokens of a prompt: at least one more must fit."""
        most = self.total(context) - 1
        return most if self.max_input_tokens is None else min(self.max_input_tokens, most)
