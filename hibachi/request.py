"""The words that every floor shares: sampling parameters, when to stop, why a request ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from hibachi.errors import InvalidRequest


class Finish(StrEnum):
    """Why a stream ended. Compares equal to its value: `stream.finish_reason == "stop"`."""

    STOP = "stop"  # a stop token, a stop string or a stop predicate
    LENGTH = "length"  # the limit of new tokens, or the end of the context
    CANCELLED = "cancelled"  # the consumer closed or dropped its stream
    ERROR = "error"  # the request failed; iterating its stream raises the error
    CLOSED = "closed"  # the engine was closed first


def _check(ok: bool, name: str, expected: str, got: object) -> None:
    if not ok:
        raise InvalidRequest(f"{name} must be {expected}; got {got!r}.")


def _tuple(x: object) -> tuple[Any, ...]:
    """Its elements; none for None. What has no elements is one, for the check that follows."""
    return () if x is None else tuple(x) if isinstance(x, Iterable) else (x,)


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_real(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens from logits and when to end; defaults are vLLM's.

    temperature: 0 is greedy (argmax); otherwise logits are divided by it.
    top_k: keep the k most likely tokens (0 or -1: all). top_p: keep the smallest set with this much probability mass.
    Ties with the last kept token are kept too.
    seed: the same seed, prompt and logits give the same tokens, whoever shares the batch; None draws a fresh seed.
    max_tokens: limit of new tokens; None: up to the end of the context.
    stop: strings that end the text and are not part of it (`hibachi.LLM` only). stop_token_ids: token ids that end it.
    ignore_eos: do not end at the model's own end-of-sequence token.
    logprobs: with each token, the log-probabilities of the N most likely tokens and of the token itself; natural
    logarithm, of the raw logits (before temperature, top-k and top-p).

    Raises InvalidRequest for a value out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        t, k, p, seed = self.temperature, self.top_k, self.top_p, self.seed
        _check(_is_real(t) and t >= 0, "temperature", "a finite number >= 0 (0 is greedy)", t)
        _check(_is_int(k) and k >= -1, "top_k", "an integer >= -1 (0 or -1: no limit)", k)
        _check(_is_real(p) and 0 < p <= 1, "top_p", "a number in (0, 1]", p)
        _check(seed is None or (_is_int(seed) and seed >= 0), "seed", "an integer >= 0 (or None)", seed)
        n, lp = self.max_tokens, self.logprobs
        _check(n is None or (_is_int(n) and n >= 1), "max_tokens", "an integer >= 1 (or None: no limit)", n)
        _check(lp is None or (_is_int(lp) and lp >= 0), "logprobs", "an integer >= 0 (or None: none)", lp)
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple(self.stop)
        _check(all(isinstance(s, str) and s for s in stop), "stop", "non-empty strings", self.stop)
        object.__setattr__(self, "stop", stop)
        ids = tuple(int(i) if hasattr(i, "__index__") else i for i in _tuple(self.stop_token_ids))
        _check(all(_is_int(i) and i >= 0 for i in ids), "stop_token_ids", "integers >= 0", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def with_(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed. Raises InvalidRequest for an unknown field."""
        if unknown := changes.keys() - {f.name for f in fields(self)}:
            raise InvalidRequest(f"SamplingParams has no field {', '.join(sorted(unknown))}.")
        return replace(self, **changes)


def as_params(value: object, default: SamplingParams) -> SamplingParams:
    """The parameters that a caller passed; None: the default. Raises InvalidRequest for anything else."""
    if value is None:
        return default
    if not isinstance(value, SamplingParams):
        raise InvalidRequest(f"params must be a SamplingParams (or None); got {value!r}. Write SamplingParams(...).")
    return value


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a request ends, other than by its limit of new tokens.

    tokens: stop tokens, each of the token shape `tok` (an int for scalar tokens); one of them, equal in all elements,
    ends the request. atol: for tokens of floats, how far an element may be off.
    where: called once a step with the native array (B, *tok) of the new tokens of all requests that share this
    predicate; returns a bool array (B,) of the library, or anything NumPy reads as one.
    """

    tokens: Sequence[Any] = ()
    where: Callable[[Any], Any] | None = None
    atol: float = 0.0

    def __post_init__(self) -> None:
        _check(self.where is None or callable(self.where), "where", "a callable (or None)", self.where)
        _check(_is_real(self.atol) and self.atol >= 0, "atol", "a finite number >= 0", self.atol)
