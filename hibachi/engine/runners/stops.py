"""Stop rules compiled for one shape of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hibachi.backend.array_backend import HostArray
from hibachi.errors import InvalidRequest, shown
from hibachi.request import StopRule


class Stopper:
    """Stop rules for one token shape; `match` judges all rows of a forward pass at once.

    tokens: of all rules, [n, *tok]. atol: of each, [n, ...], compared with its distances; 0 means all are exact. where:
    the only predicate.
    """

    atol: Any
    where: Callable[[Any], Any] | None

    def __init__(self, rule: StopRule, shape: tuple[int, ...], dtype: Any, own: StopRule | None = None) -> None:
        """own: the engine's rule, with its own tolerances; at most one of the two rules has a predicate."""
        rules = [rule] if own is None else [rule, own]
        tokens = [as_token(t, shape, dtype, "stop token") for r in rules for t in r.tokens]
        self.tokens: HostArray | None = np.stack(tokens) if tokens else None
        off = np.array([r.atol for r in rules for _ in r.tokens])
        self.atol = off.reshape(-1, *(1,) * len(shape)) if off.any() else 0
        self.where = next((r.where for r in rules if r.where is not None), None)

    def match(self, tokens: HostArray) -> Any:
        """Which of `tokens` [n, *tok] are equal to a stop token in all their elements: bool [n]."""
        if self.tokens is None:
            return np.zeros(len(tokens), bool)
        axes = tuple(range(2, tokens.ndim + 1))
        if isinstance(self.atol, int):
            return (tokens[:, None] == self.tokens).all(axis=axes).any(axis=1)
        wide = tokens if tokens.dtype.kind == "f" else tokens.astype(np.float64)  # differences of unsigned ones wrap
        with np.errstate(invalid="ignore", over="ignore"):  # of infinities
            near = (np.abs(wide[:, None] - self.tokens) <= self.atol) | (tokens[:, None] == self.tokens)
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
