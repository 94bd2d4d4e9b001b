"""The engine's record of a request, the stop rules of a batch, and the host's table of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hibachi.engine.stream import Channel
from hibachi.errors import InvalidRequest
from hibachi.plan.sequence import Seq
from hibachi.request import SamplingParams, StopRule
from hibachi.tensor.array_backend import Array, ArrayBackend, HostArray


@dataclass(slots=True, eq=False)
class Job:
    """What the engine keeps of a request, beside the scheduler's `Seq`."""

    seq: Seq
    channel: Channel[Any]
    prompt: Any  # host array [n, *tok]; a feed-forward input
    stop: Stopper | None = None
    include_stop: bool = True
    params: SamplingParams | None = None
    seed: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids that may not come one after another
    embeds: HostArray | None = None  # [n, hidden] float32: what the prompt is, if it has no tokens
    history: Any = None  # prompt and what was generated, host array [n, *tok], of one that lost its row
    scores: list[dict[int, float] | None] | None = None  # log-probabilities of the prompt's tokens, if asked for

    @property
    def sampling(self) -> SamplingParams:
        """The parameters of a request that is sampled."""
        assert self.params is not None
        return self.params

    @property
    def tokens(self) -> HostArray:
        """What is known when it gets a row, [n, *tok]."""
        tokens: HostArray = self.prompt if self.history is None else self.history
        return tokens

    @property
    def unscored(self) -> int:
        """How many of the first tokens must have their output looked at: all but the last of the prompt."""
        return 0 if self.scores is None else self.seq.prompt_len - 1


class Stopper:
    """A stop rule, made ready for one token shape; `match` judges all rows of a forward pass at once."""

    def __init__(self, rule: StopRule, shape: tuple[int, ...], dtype: Any) -> None:
        self.tokens = np.stack([as_token(t, shape, dtype, "stop token") for t in rule.tokens]) if rule.tokens else None
        self.atol, self.where = rule.atol, rule.where

    def match(self, tokens: HostArray) -> Any:
        """Which of `tokens` [n, *tok] are equal to a stop token in all their elements: bool [n]."""
        if self.tokens is None:
            return np.zeros(len(tokens), bool)
        axes = tuple(range(2, tokens.ndim + 1))
        near = np.abs(tokens[:, None] - self.tokens) <= self.atol if self.atol else tokens[:, None] == self.tokens
        return near.all(axis=axes).any(axis=1)


def stopped(jobs: Sequence[Job], tokens: HostArray, batch: Array, backend: ArrayBackend, positions: Any = None) -> Any:
    """Which requests end with their new token: bool [n]. tokens [n, *tok] on the host; batch: natively, or None.

    positions [n]: where the tokens stand, if they were sampled: before its min_tokens no request ends.
    """
    groups: dict[Stopper, list[int]] = {}
    for i, job in enumerate(jobs):
        if job.stop is not None:
            groups.setdefault(job.stop, []).append(i)
    out = np.zeros(len(jobs), bool)
    for rule, members in groups.items():
        everyone = len(members) == len(jobs)
        mine: Any = slice(None) if everyone else np.array(members)
        out[mine] = rule.match(tokens[mine])
        if rule.where is not None:  # it gets arrays of its own, which it may write into
            if batch is None:
                native = backend.put(tokens[mine].copy())
            else:
                native = backend.copy(batch) if everyone else backend.take(batch, backend.put(mine))
            out[mine] |= _ask(rule.where, native, len(members), backend)
    if positions is not None and out.any():
        least = [job.seq.prompt_len + (job.params.min_tokens if job.params else 0) for job in jobs]
        out &= np.asarray(positions) + 1 >= np.array(least)
    return out


def _ask(where: Callable[[Any], Any], batch: Array, n: int, backend: ArrayBackend) -> Any:
    """What a stop predicate says of n rows, on the host: bool [n]."""
    try:
        hit = where(batch)
        hit = backend.get(hit) if backend.owns(hit) else np.asarray(hit)
    except Exception as e:
        raise InvalidRequest(f"The stop predicate raised {type(e).__name__}: {e}") from e
    if hit.shape != (n,):
        raise InvalidRequest(
            f"The stop predicate must return one bool for each of {n} rows, shape ({n},); got shape {hit.shape}. "
            f"Reduce over the token's own dimensions."
        )
    return hit.astype(bool)


def as_token(value: Any, shape: tuple[int, ...], dtype: Any, what: str) -> HostArray:
    """One token as a host array of this shape: from a number, or an array of shape (*tok) or (1, *tok)."""
    token = np.asarray(value)
    if token.dtype.kind not in "iufb":
        raise InvalidRequest(f"The {what} must be a number or an array of numbers; got {value!r}.")
    if token.shape == (1, *shape):
        token = token[0]
    if token.shape != shape:
        raise InvalidRequest(
            f"The {what} must have the shape of one token, {shape} or {(1, *shape)}; got {token.shape}. "
            f"Reshape it, or check the dimensions of the prompt: (sequence, *token)."
        )
    if np.dtype(dtype).kind in "iu" and not np.array_equal(token, token.astype(dtype)):
        raise InvalidRequest(f"The {what} must hold integers, as the tokens do; got {token}.")
    return token.astype(dtype)


def misfits(values: HostArray, cast: HostArray) -> list[tuple[int, Any]]:
    """(row, first value) of the rows of `values` [n, ...] that another dtype could not hold, as `cast` shows.

    Integers must be equal; floats are rounded, but may not become infinite.
    """
    if np.can_cast(values.dtype, cast.dtype, "safe"):
        return []
    lost = np.isfinite(values) & ~np.isfinite(cast) if cast.dtype.kind == "f" else values != cast
    lost = lost.reshape(len(values), -1)
    return [(i, values.reshape(lost.shape)[i, lost[i].argmax()]) for i in np.flatnonzero(lost.any(axis=1)).tolist()]


class TokenTable:
    """The tokens of all running rows, on the host: what is fed to the model and compared with stop tokens."""

    def __init__(self, rows: int, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape = shape
        self.values = np.zeros((rows, 64, *shape), dtype)

    def fill(self, row: int, prompt: HostArray) -> None:
        self._widen(len(prompt) + 1)
        self.values[row, : len(prompt)] = prompt

    def window(self, rows: Any, width: int) -> HostArray:
        """A copy of the first `width` positions of `rows`."""
        self._widen(width)
        out: HostArray = self.values[rows, :width]
        return out

    def kept(self, row: int, length: int) -> HostArray:
        """A copy of the first `length` tokens of a row."""
        return self.values[row, :length].copy()

    def write(self, rows: Any, positions: Any, tokens: HostArray) -> None:
        """One new token for each of `rows`, at its position."""
        if len(rows):
            self._widen(int(positions.max()) + 1)
            self.values[rows, positions] = tokens

    def _widen(self, width: int) -> None:
        have = self.values.shape[1]
        if width > have:
            more = np.zeros((self.values.shape[0], max(width, 2 * have) - have, *self.shape), self.values.dtype)
            self.values = np.concatenate([self.values, more], axis=1)
