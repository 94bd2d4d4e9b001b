"""Vectors and likelihoods of given texts."""

from __future__ import annotations

from dataclasses import dataclass

from hibachi.backend.array_backend import HostArray
from hibachi.errors import InvalidRequest
from hibachi.llm.textstream import Completion
from hibachi.request import Prompt, SamplingParams

SCORING = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """The vector of one text: float32 [hidden], on the host."""

    prompt: Prompt
    prompt_token_ids: list[int]
    embedding: HostArray


@dataclass(frozen=True, slots=True)
class Score:
    """The likelihood of a continuation after a prompt.

    token_ids: of the continuation. logprobs: the natural log-probability of each. logprob: their sum, the
    log-likelihood of the continuation. greedy: whether each of them is the most likely token.
    """

    prompt: Prompt
    continuation: Prompt
    token_ids: list[int]
    logprobs: list[float]
    logprob: float
    greedy: bool


def score_of(prompt: Prompt, continuation: Prompt, out: Completion, length: int) -> Score:
    """The score of the last `length` tokens of a completion's prompt."""
    scores, ids = out.prompt_logprobs, out.prompt_token_ids
    assert scores is not None
    chosen, likely = ids[-length:], scores[-length:]
    logprobs = [by_id[token] for token, by_id in zip(chosen, likely, strict=True) if by_id is not None]
    greedy = all(by_id is not None and by_id[t] >= max(by_id.values()) for t, by_id in zip(chosen, likely, strict=True))
    return Score(prompt, continuation, chosen, logprobs, float(sum(logprobs)), greedy)


def paired(prompts: list[Prompt], continuations: list[Prompt]) -> list[tuple[Prompt, Prompt]]:
    """Each prompt with its continuation; a single prompt goes with all of them."""
    if len(prompts) == 1:
        prompts = prompts * len(continuations)
    if len(prompts) != len(continuations):
        raise InvalidRequest(
            f"Expected a continuation for each of {len(prompts)} prompts, or one prompt; got {len(continuations)}."
        )
    return list(zip(prompts, continuations, strict=True))
