"""Models whose tokens can be computed in one's head: the next token is one more than the sum of all before, modulo 10.

`expected(prompt, n)` is what every rung must answer. The sum runs over the whole sequence, so a token that is lost,
padded in, read from a foreign block or computed twice changes everything after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hibachi.tensor.array_backend import Array, ArrayBackend
from hibachi.tensor.cache import CacheSpec, Paged, State, StepInputs

VOCAB = 10


def expected(prompt: Sequence[int], n: int) -> list[int]:
    """The n tokens after `prompt`: 1 2 -> 4, 8, 6, 2, 4, 8, ..."""
    total, out = sum(prompt), []
    for _ in range(n):
        out.append((total + 1) % VOCAB)
        total += out[-1]
    return out


class SumTokens:
    """Level 0. Tokens of any shape: each element is a sequence of its own. Padding is masked by `lengths`."""

    def __init__(self, backend: ArrayBackend) -> None:
        self.backend = backend

    def forward(self, tokens: Array, lengths: Array) -> Array:
        xp, (rows, width) = self.backend.xp, tokens.shape[:2]
        place = self.backend.put(_range(width))
        real = xp.reshape(place, (1, -1)) >= width - xp.reshape(xp.astype(lengths, place.dtype), (-1, 1))
        real = xp.reshape(real, (rows, width, *(1,) * (tokens.ndim - 2)))
        kept = xp.where(real, tokens, xp.zeros_like(tokens))
        return xp.astype((xp.sum(kept, axis=1) + 1) % VOCAB, tokens.dtype)


class SumLogits(SumTokens):
    """Level 1: the same, as logits (5 for the right token, 0 for the others)."""

    vocab_size = VOCAB

    def logits(self, tokens: Array, lengths: Array) -> Array:
        return one_hot(self.backend, SumTokens.forward(self, tokens, lengths))

    forward = None  # type: ignore[assignment]  # one rung only


class SumPaged:
    """Level 2: the sum is read back through the paged cache, as the mean that uniform attention computes."""

    vocab_size: int | None = VOCAB
    params: Any = None
    max_model_len = 128

    def __init__(self, backend: ArrayBackend) -> None:
        self.backend = backend

    def cache_spec(self) -> CacheSpec:
        return [Paged(kv_heads=1, k_dim=2, v_dim=1)]

    def step(self, params: Any, cache: list[Any], x: StepInputs[Array]) -> tuple[Array, list[Any]]:
        b = self.backend
        v = b.xp.reshape(b.float32(x.tok), (-1, 1, 1))
        nothing = b.xp.concat([v, v], axis=-1) * 0
        mean, layer = b.attend(nothing, nothing, v, cache[0], x)
        total = b.xp.round(b.xp.reshape(mean, (-1,)) * b.float32(x.pos + 1))
        return one_hot(b, (b.take(total, x.last) + 1) % VOCAB), [layer]


class SumState:
    """Level 2 with a recurrent state: the running sum of each row."""

    vocab_size: int | None = VOCAB
    params: Any = None
    max_model_len = 128

    def __init__(self, backend: ArrayBackend) -> None:
        self.backend = backend

    def cache_spec(self) -> CacheSpec:
        return [State(shape=(1,))]

    def step(self, params: Any, cache: list[Any], x: StepInputs[Array]) -> tuple[Array, list[Any]]:
        b, (state,) = self.backend, cache
        tokens = b.xp.reshape(b.float32(x.tok), (state.shape[0], -1))
        sums = (state + b.xp.cumulative_sum(tokens, axis=1)) % VOCAB
        return one_hot(b, (b.take(b.xp.reshape(sums, (-1,)), x.last) + 1) % VOCAB), [sums[:, -1:]]


class SumBoth(SumState):
    """Level 2 with a paged layer and a recurrent one; they must agree, else the answer is the token 0."""

    def cache_spec(self) -> CacheSpec:
        return [Paged(kv_heads=1, k_dim=2, v_dim=1), State(shape=(1,))]

    def step(self, params: Any, cache: list[Any], x: StepInputs[Array]) -> tuple[Array, list[Any]]:
        paged, layer = SumPaged(self.backend).step(None, cache[:1], x)
        recurrent, state = super().step(None, cache[1:], x)
        agree = self.backend.xp.all(paged == recurrent, axis=-1, keepdims=True)
        zero = one_hot(self.backend, self.backend.xp.zeros_like(recurrent[:, 0]))
        return self.backend.xp.where(agree, paged, zero), [*layer, *state]


def one_hot(backend: ArrayBackend, ids: Array) -> Array:
    """Logits [n, VOCAB] with 5 at `ids` [n]."""
    vocab = backend.put(_range(VOCAB))
    hit = backend.xp.reshape(backend.xp.astype(ids, vocab.dtype), (-1, 1)) == backend.xp.reshape(
        vocab, (1, -1)
    )
    return backend.float32(hit) * 5


def _range(n: int) -> Any:
    return np.arange(n, dtype=np.int32)
