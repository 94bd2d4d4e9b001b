"""Models whose tokens can be computed in one's head.

Most of them sum: the next token is one more than the sum of all before, modulo 10, and `expected(prompt, n)` is what
every rung must answer. A token that is lost, padded in, read from a foreign block or computed twice changes all that
come after it. Their logits leave no doubt, so sampling draws the right token at every temperature.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.layout import CacheSpec, OwnCache, Paged, State, StepInputs

VOCAB = 10
SURE = 1000.0


def expected(prompt: Any, n: int) -> list[Any]:
    """The n tokens after `prompt`: 1 2 -> 4, 8, 6, 2, 4, 8, ... Tokens that are arrays go on element by element."""
    total = np.sum(prompt, axis=0)
    out = []
    for _ in range(n):
        out.append(((total + 1) % VOCAB).tolist())
        total = total + out[-1]
    return out


class Toy:
    """Remembers what it was shown, if it is not compiled: one (tokens, lengths or None) a forward pass, on the host."""

    def __init__(self, backend: ArrayBackend) -> None:
        self.backend = backend
        self.seen: list[tuple[HostArray, HostArray | None]] = []

    def _see(self, tokens: Array, lengths: Array = None) -> None:
        get = self.backend.get
        self.seen.append((get(tokens).copy(), None if lengths is None else get(lengths).copy()))


class Count(Toy):
    """Level 0. The next token is one more than the last, so padding on the left does no harm."""

    def forward(self, tokens: Array) -> Array:
        self._see(tokens)
        return tokens[:, -1, ...] + 1


class Halve(Toy):
    """Level 0, for continuous values. The next token is half of the last, in all its elements."""

    def forward(self, tokens: Array) -> Array:
        self._see(tokens)
        return tokens[:, -1, ...] / 2


class SumTokens(Toy):
    """Level 0. Tokens of any shape: each element is a sequence of its own. Padding is masked by `lengths`."""

    def forward(self, tokens: Array, lengths: Array) -> Array:
        self._see(tokens, lengths)
        return self.backend.program(_next)(tokens, lengths)


class SumLogits(SumTokens):
    """Level 1: the same, as logits (`margin` for the right token, 0 for the others)."""

    vocab_size = VOCAB

    def __init__(self, backend: ArrayBackend, margin: float = SURE) -> None:
        super().__init__(backend)
        self.margin = margin

    def logits(self, tokens: Array, lengths: Array) -> Array:
        self._see(tokens, lengths)
        return self.backend.program(_next_logits)(tokens, lengths) * self.margin

    forward = None  # type: ignore[assignment]  # one rung only


class SumOwn(Toy):
    """Between levels 1 and 2: a cache of its own keeps each token, and the sum is made of it anew.

    new_only: `step` returns the new positions only.
    """

    vocab_size = VOCAB
    max_model_len = 64
    past = OwnCache()

    def __init__(self, backend: ArrayBackend, new_only: bool = False) -> None:
        super().__init__(backend)
        self.new_only = new_only

    def step(self, tokens: Array, lengths: Array, past: Any) -> tuple[Array, Any]:
        self._see(tokens, lengths)
        b = self.backend
        new = b.float32(tokens)[:, None, :]
        seen = new if past is None else b.xp.concat([past["layers"][0][0], new], axis=2)
        logits = b.program(_own_logits)(seen, lengths)
        return logits, {"layers": [(new if self.new_only else seen,)]}


class SumOwnState(Toy):
    """Likewise, with the running sum of each row as the whole cache; it needs no lengths."""

    vocab_size = VOCAB
    max_model_len = 64
    past = OwnCache()

    def step(self, tokens: Array, past: Any) -> tuple[Array, Any]:
        self._see(tokens)
        b, xp = self.backend, self.backend.xp
        sums = xp.sum(b.float32(tokens), axis=1, keepdims=True)
        sums = (sums if past is None else past + sums) % VOCAB
        return one_hot(b, (sums[:, 0] + 1) % VOCAB) * SURE, sums


class SumPaged(Toy):
    """Level 2: the sum is read back through the paged cache, as the mean that uniform attention computes."""

    vocab_size: int | None = VOCAB
    params: Any = None
    max_model_len = 64

    def cache_spec(self) -> CacheSpec:
        return [Paged(kv_heads=1, k_dim=2, v_dim=1)]

    def step(self, params: Any, cache: list[Any], x: StepInputs[Array]) -> tuple[Array, list[Any]]:
        sums, layer = self._sums(x.tok, cache[0], x)
        return one_hot(self.backend, (sums[:, 0] + 1) % VOCAB) * SURE, [layer]

    def _sums(self, values: Array, layer: Any, x: StepInputs[Array]) -> tuple[Array, Any]:
        """Sums of `values` [T, *any] up to the tokens whose output is wanted: [n_out, elements]; the new cache."""
        b, xp = self.backend, self.backend.xp
        v = xp.reshape(b.float32(values), (values.shape[0], 1, -1))
        nothing = xp.concat([v[..., :1], v[..., :1]], axis=-1) * 0
        mean, layer = b.attend(nothing, nothing, v, layer, x)
        totals = xp.round(mean[:, 0, :] * xp.reshape(b.float32(x.pos + 1), (-1, 1)))
        return b.take(totals, x.last), layer


class SumFrames(SumPaged):
    """Level 2 that returns tokens: frames of three codes, each of which is a sequence of its own."""

    vocab_size = None
    codes = 3

    def cache_spec(self) -> CacheSpec:
        return [Paged(kv_heads=1, k_dim=2, v_dim=self.codes)]

    def step(self, params: Any, cache: list[Any], x: StepInputs[Array]) -> tuple[Array, list[Any]]:
        sums, layer = self._sums(x.tok, cache[0], x)
        return self.backend.xp.astype((sums + 1) % VOCAB, x.tok.dtype), [layer]


class SumState(Toy):
    """Level 2 with a recurrent state: the running sum of each row."""

    vocab_size: int | None = VOCAB
    params: Any = None
    max_model_len = 64

    def cache_spec(self) -> CacheSpec:
        return [State(shape=(1,))]

    def step(self, params: Any, cache: list[Any], x: StepInputs[Array]) -> tuple[Array, list[Any]]:
        b, (state,) = self.backend, cache
        tokens = b.xp.reshape(b.float32(x.tok), (state.shape[0], -1))
        sums = (state + b.xp.cumulative_sum(tokens, axis=1)) % VOCAB
        logits = one_hot(b, (b.take(b.xp.reshape(sums, (-1,)), x.last) + 1) % VOCAB) * SURE
        return logits, [sums[:, -1:]]


class SumBoth(SumPaged):
    """Level 2 with a paged layer and a recurrent one; they must agree, else the answer is the token 0."""

    def __init__(self, backend: ArrayBackend) -> None:
        super().__init__(backend)
        self._recurrent = SumState(backend)

    def cache_spec(self) -> CacheSpec:
        return [*super().cache_spec(), *self._recurrent.cache_spec()]

    def step(self, params: Any, cache: list[Any], x: StepInputs[Array]) -> tuple[Array, list[Any]]:
        xp = self.backend.xp
        paged, layer = super().step(None, cache[:1], x)
        recurrent, state = self._recurrent.step(None, cache[1:], x)
        agree = xp.all(paged == recurrent, axis=-1, keepdims=True)
        zero = one_hot(self.backend, xp.zeros_like(recurrent[:, 0])) * SURE
        return xp.where(agree, paged, zero), [*layer, *state]


class TinyDecoder(Toy):
    """Level 2. The block of Llama in small, with random weights: no head to compute its tokens in, but an oracle.

    weights: the arrays of `tiny_weights()`, which a slow implementation may read as well.
    """

    vocab_size: int | None = 32
    max_model_len = 64
    hidden, heads, kv_heads, head_dim, inner, layers, eps, theta = 16, 4, 2, 8, 24, 2, 1e-5, 100.0

    def __init__(self, backend: ArrayBackend, weights: dict[str, Any]) -> None:
        super().__init__(backend)
        matrices = ("qkv", "o", "gate_up", "down")
        self.params: dict[str, Any] = {
            "embed": backend.put_weight(weights["embed"], "float32"),  # the head as well
            "norm": backend.put(weights["norm"]),
            "cos": backend.put(weights["cos"]),
            "sin": backend.put(weights["sin"]),
            "layers": [
                {n: backend.put_weight(w, "float32") if n in matrices else backend.put(w) for n, w in layer.items()}
                for layer in weights["layers"]
            ],
        }

    def cache_spec(self) -> CacheSpec:
        return [Paged(self.kv_heads, self.head_dim, self.head_dim)] * self.layers

    def step(self, params: Any, cache: list[Any], x: StepInputs[Array]) -> tuple[Array, list[Any]]:
        b, h = self.backend, self.backend.weight_rows(params["embed"], x.tok)
        cos, sin = (b.take(params[name], x.pos)[:, None, :] for name in ("cos", "sin"))
        queries, keys, new = self.heads, self.heads + self.kv_heads, []
        for layer, memory in zip(params["layers"], cache, strict=True):
            qkv = b.linear(b.rms_norm(h, layer["attn_norm"], self.eps), layer["qkv"])
            qkv = b.xp.reshape(qkv, (x.tok.shape[0], -1, self.head_dim))
            q, k = b.rope(qkv[:, :queries, :], cos, sin), b.rope(qkv[:, queries:keys, :], cos, sin)
            a, memory = b.attend(q, k, qkv[:, keys:, :], memory, x)
            new.append(memory)
            h = h + b.linear(b.xp.reshape(a, (x.tok.shape[0], -1)), layer["o"])
            gate_up = b.linear(b.rms_norm(h, layer["mlp_norm"], self.eps), layer["gate_up"])
            h = h + b.linear(b.silu(gate_up[:, : self.inner]) * gate_up[:, self.inner :], layer["down"])
        h = b.rms_norm(b.take(h, x.last), params["norm"], self.eps)
        return b.linear(h, params["embed"]), new


def tiny_weights(seed: int = 0) -> dict[str, Any]:
    """Weights of a `TinyDecoder`: float32 host arrays, the same for a seed."""
    t, random = TinyDecoder, np.random.default_rng(seed)

    def draw(*shape: int) -> HostArray:
        drawn: HostArray = random.normal(size=shape) * shape[-1] ** -0.5
        return drawn.astype(np.float32)

    def norm() -> HostArray:
        return (1 + draw(t.hidden)).astype(np.float32)

    angles = np.outer(np.arange(t.max_model_len), t.theta ** (-2 * np.arange(t.head_dim // 2) / t.head_dim))
    return {
        "embed": draw(32, t.hidden) * 4,
        "norm": norm(),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "layers": [
            {
                "attn_norm": norm(),
                "mlp_norm": norm(),
                "qkv": draw((t.heads + 2 * t.kv_heads) * t.head_dim, t.hidden),
                "o": draw(t.hidden, t.heads * t.head_dim),
                "gate_up": draw(2 * t.inner, t.hidden),
                "down": draw(t.hidden, t.inner),
            }
            for _ in range(t.layers)
        ],
    }


def _next(backend: ArrayBackend, tokens: Array, lengths: Array) -> Array:
    xp, (rows, width) = backend.xp, tokens.shape[:2]
    place = backend.put(_range(width))
    real = xp.reshape(place, (1, -1)) >= width - xp.reshape(xp.astype(lengths, place.dtype), (-1, 1))
    real = xp.reshape(real, (rows, width, *(1,) * (tokens.ndim - 2)))
    kept = xp.where(real, tokens, xp.zeros_like(tokens))
    return xp.astype((xp.sum(kept, axis=1) + 1) % VOCAB, tokens.dtype)


def _next_logits(backend: ArrayBackend, tokens: Array, lengths: Array) -> Array:
    return one_hot(backend, _next(backend, tokens, lengths))


def _own_logits(backend: ArrayBackend, seen: Array, lengths: Array) -> Array:
    return _next_logits(backend, seen[:, 0, :], lengths) * SURE


def one_hot(backend: ArrayBackend, ids: Array) -> Array:
    """[n, VOCAB] with 1.0 at `ids` [n], and 0.0 elsewhere."""
    xp, vocab = backend.xp, backend.put(_range(VOCAB))
    hit = xp.reshape(xp.astype(ids, vocab.dtype), (-1, 1)) == xp.reshape(vocab, (1, -1))
    return backend.float32(hit)


def _range(n: int) -> HostArray:
    return np.arange(n, dtype=np.int32)
