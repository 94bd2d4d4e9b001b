"""Models whose tokens have several codebooks, or that draw themselves, on every rung and every array library.

Their logits are exact sums of small numbers, so that alone, in company and on each library the same bits come out.
"""

import numpy as np

from hibachi import Input, OwnCache, State
from hibachi.backend.discover import resolve

K, V, H = 3, 7, 4
RNG = np.random.default_rng(5)
EMBED = RNG.integers(-3, 4, (K, V, H)).astype(np.float32)
HEAD = (RNG.integers(-4, 5, (H, K * V)) / 8).astype(np.float32)


class Frames:
    """What the rungs share: an embedding of a frame, and logits [B, K, V] of a sum of embeddings."""

    vocab_size, codebooks, max_model_len = V, K, 200

    def __init__(self, backend="numpy"):
        self.library = resolve(backend) if isinstance(backend, str) else backend
        self.backend = self.library.name
        self.embed, self.head = self.library.put(EMBED), self.library.put(HEAD)
        self.params = None

    def embedded(self, tokens):
        """[..., K] -> [..., H]"""
        xp, shape = self.library.xp, tuple(tokens.shape)
        flat = xp.reshape(tokens, (-1, K))
        found = sum(self.library.take(self.embed[k], flat[:, k]) for k in range(K))
        return xp.reshape(found, (*shape[:-1], H))

    def scored(self, h):
        """[n, H] -> [n, K, V]; the sums are made small again, by a rule that rounds nothing."""
        xp = self.library.xp
        small = h - 16 * xp.floor(h / 16) - 8
        return xp.reshape(small @ self.head, (h.shape[0], K, V))


class WholeFrames(Frames):
    def logits(self, tokens, lengths):
        xp, width = self.library.xp, tokens.shape[1]
        place = xp.arange(width, device=self.library.device)[None, :]
        real = xp.astype(place >= width - lengths[:, None], xp.float32)
        return self.scored(xp.sum(self.embedded(tokens) * real[:, :, None], axis=1))


class OwnFrames(Frames):
    past = OwnCache()

    def step(self, tokens, lengths, past):
        xp, new = self.library.xp, self.embedded(tokens)
        whole = new if past is None else xp.concat([past, new], axis=1)
        width = whole.shape[1]
        place = xp.arange(width, device=self.library.device)[None, :]
        real = xp.astype(place >= width - lengths[:, None], xp.float32)
        return self.scored(xp.sum(whole * real[:, :, None], axis=1)), new


class StateFrames(Frames):
    def cache_spec(self):
        return [State((H,))]

    def step(self, params, cache, x):
        xp, b = self.library.xp, x.row.shape[0]
        each = xp.reshape(self.embedded(x.tok), (b, -1, H))
        sums = cache[0][:, None, :] + xp.cumulative_sum(each, axis=1)
        flat = xp.reshape(sums, (-1, H))
        return self.scored(self.library.take(flat, x.last)), [sums[:, -1, :]]


RUNGS = {"whole": WholeFrames, "own": OwnFrames, "state": StateFrames}


class InDepth(Frames):
    """The step returns a hidden state; logits of a codebook depend on all ids before it in the frame."""

    def scored(self, h):
        return {"hidden": (h, [h[:, :1]])}

    def depth(self, k, given, codes, past):
        (h, (first,)), place = given["hidden"], np.arange(K)
        xp, flat = self.library.xp, self.library.put(EMBED.reshape(K * V, H))
        if past is None:
            past = first * 0 + h * 0
        else:
            drawn = xp.sum(xp.where(self.library.put(place)[None, :] == k - 1, codes, codes * 0), axis=1)
            past = past + self.library.take(flat, drawn + (k - 1) * V)
        every = super().scored(h + past)
        here = self.library.put(place)[None, :, None] == k
        return xp.sum(xp.where(here, every, every * 0), axis=1), past


class SizedDepth(InDepth):
    """Each codebook has a size of its own."""

    vocab_sizes = V, 3, 1

    def depth(self, k, given, codes, past):
        assert isinstance(k, int)  # each has a program of its own, as shapes differ
        logits, past = super().depth(k, given, codes, past)
        return logits[:, : self.vocab_sizes[k]], past


DEPTHS = {name: type(f"{rung.__name__}InDepth", (InDepth, rung), {}) for name, rung in RUNGS.items()}


class Flat(WholeFrames):
    """Always the same logits [K, V]."""

    def __init__(self, logits, backend="numpy"):
        super().__init__(backend)
        self.codebooks, self.vocab_size = logits.shape
        self.flat = self.library.put(logits.astype(np.float32))

    def logits(self, tokens, lengths):
        xp = self.library.xp
        return xp.broadcast_to(self.flat[None, ...], (tokens.shape[0], *self.flat.shape)) + 0


class DrawnState:
    """Level 2. Real values [2]: a running sum, and what is drawn."""

    vocab_size, params, draws, max_model_len = None, None, 2, 200

    def __init__(self, backend="numpy"):
        self.library = resolve(backend)
        self.backend = self.library.name

    def cache_spec(self):
        return [State((2,))]

    def step(self, params, cache, x):
        xp, b = self.library.xp, x.row.shape[0]
        sums = cache[0][:, None, :] + xp.cumulative_sum(xp.reshape(x.tok, (b, -1, 2)), axis=1)
        mean = self.library.take(xp.reshape(sums, (-1, 2)), x.last) * 0
        return mean + xp.stack([x.uniform[:, 0], x.normal[:, 1]], axis=1), [sums[:, -1, :]]


class DrawnWhole:
    """Level 0, the same."""

    draws, max_model_len = 2, 200

    def __init__(self, backend="numpy"):
        self.library = resolve(backend)
        self.backend = self.library.name

    def forward(self, tokens, uniform, normal):
        return tokens[:, -1, :] * 0 + self.library.xp.stack([uniform[:, 0], normal[:, 1]], axis=1)


class Told:
    """Level 2: returns what a step knows: [prompt_len, seed, was the last token new, speaker, covariate]."""

    vocab_size, params, max_model_len, knows = None, None, 100, ("prompt_len", "seed")
    inputs = {"speaker": Input((2,)), "hours": Input((), "int32", per="position")}  # noqa: RUF012

    def __init__(self, backend="numpy"):
        self.library = resolve(backend)
        self.backend = self.library.name

    def cache_spec(self):
        return [State((1,))]

    def step(self, params, cache, x):
        xp, take = self.library.xp, self.library.take
        seg = take(x.seg, x.last)
        columns = [
            take(x.prompt_len, seg),
            take(x.seed, seg),
            take(x.new, x.last),
            xp.sum(take(x.inputs["speaker"], seg), axis=1),
            take(x.inputs["hours"], x.last),
        ]
        return xp.stack([xp.astype(c, xp.float32) for c in columns], axis=1), [cache[0] + 1]


class ToldWhole:
    """Level 0, the same, but whether a token is new; of the hours the sum."""

    inputs, max_model_len = Told.inputs, 100

    def __init__(self, backend="numpy"):
        self.library = resolve(backend)
        self.backend = self.library.name

    def forward(self, tokens, prompt_len, seed, speaker, hours):
        xp = self.library.xp
        columns = [prompt_len, seed, prompt_len * 0, xp.sum(speaker, axis=1), xp.sum(hours, axis=1)]
        return xp.stack([xp.astype(c, xp.float32) for c in columns], axis=1)
