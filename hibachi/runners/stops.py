"""Stop rules, made ready for one shape of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hibachi.errors import InvalidRequest, shown
from hibachi.request import StopRule
from hibachi.tensor.array_backend import HostArray


class Stopper:
    """A stop rule, made ready for one token shape; `match` judges all rows of a forward pass at once."""

    atol: float
    where: Callable[[Any], Any] | None

    def __init__(self, rule: StopRule, shape: tuple[int, ...], dtype: Any) -> None:
        self.tokens: HostArray | None = (
            np.stack([as_token(t, shape, dtype, "stop token") for t in rule.tokens]) if rule.tokens else None
        )
        self.atol, self.where = rule.atol, rule.where

    def match(self, tokens: HostArray) -> Any:
        """Which of `tokens` [n, *tok] are equal to a stop token in all their elements: bool [n]."""
        if self.tokens is None:
            return np.zeros(len(tokens), bool)
        axes = tuple(range(2, tokens.ndim + 1))
        near = np.abs(tokens[:, None] - self.tokens) <= self.atol if self.atol else tokens[:, None] == self.tokens
        return near.all(axis=axes).any(axis=1)


def as_token(value: Any, shape: tuple[int, ...], dtype: Any, what: str) -> HostArray:
    """One token as a host array of this shape: from a number, or an array of shape (*tok) or (1, *tok)."""
    token = np.asarray(value)
    if token.dtype.kind not in "iufb":
        raise InvalidRequest(f"The {what} must be a number or an array of numbers; got {shown(value)}.")
    if token.shape == (1, *shape):
        token = token[0]
    if token.shape != shape:
        raise InvalidRequest(
            f"The {what} must have the shape of one token, {shape} or {(1, *shape)}; got {token.shape}. "
            f"Reshape it, or check the dimensions of the prompt: (sequence, *token)."
        )
    with np.errstate(invalid="ignore"):
        cast: HostArray = token.astype(dtype)
    if np.dtype(dtype).kind in "iu" and not np.array_equal(token, cast):
        raise InvalidRequest(f"The {what} must hold integers, as the tokens do; got {token}.")
    return cast
