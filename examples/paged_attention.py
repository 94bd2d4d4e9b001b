"""An attention model on the engine's paged cache (level 2), on any backend: what came next the last time?

Two attention layers with weights set by hand form an induction head (Olsson et al. 2022). The first attends to the
position before and copies its token; the second attends to places whose copied token is the current one and reads
what stands there. A backend other than NumPy is named on the command line: python paged_attention.py torch
"""

import sys

import numpy as np

import hibachi
from hibachi import Paged

LETTERS = "abcdefghijklmnopqrstuvwxyz "
VOCAB, TURNS, SHARP = len(LETTERS), 2 * np.pi / 512, 1e6


class InductionHead:
    """A hibachi.CachedModel: keys and values go into the cache, and only new tokens come in."""

    vocab_size, max_model_len = VOCAB, 512

    def __init__(self, backend):
        self.backend = backend
        angles = TURNS * np.arange(self.max_model_len)
        circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)  # of each position
        self.params = {
            "tokens": backend.put(np.eye(VOCAB, dtype=np.float32)),
            "here": backend.put(circle.astype(np.float32)),
            "before": backend.put(np.roll(circle, 1, axis=0).astype(np.float32)),
        }

    def cache_spec(self):
        return [Paged(kv_heads=1, k_dim=2, v_dim=VOCAB), Paged(kv_heads=1, k_dim=VOCAB, v_dim=VOCAB)]

    def step(self, params, cache, x):
        b, (first, second) = self.backend, cache
        token = b.take(params["tokens"], x.tok)[:, None, :]  # (T, heads = 1, VOCAB): one-hot
        query, key = (b.take(params[name], x.pos)[:, None, :] for name in ("before", "here"))
        copied, first = b.attend(query, key, token, first, x, scale=SHARP)
        found, second = b.attend(token, copied, token, second, x, scale=30.0)
        return 10 * b.take(found[:, 0, :], x.last), [first, second]  # logits: from 0 to 10


def main():
    backend = hibachi.load_backend(sys.argv[1] if len(sys.argv) > 1 else "numpy")
    prompts = ["jumping jum", "thunder thunder t", "question qu"]
    greedy = hibachi.SamplingParams(temperature=0, max_tokens=20)
    with hibachi.AutoregressiveBatchInference(InductionHead(backend), block_size=8) as engine:
        streams = [engine.run([LETTERS.index(c) for c in p], greedy) for p in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            print(f"{prompt}|{''.join(LETTERS[i] for i in stream)}")
        stats = engine.stats()
    print(f"{backend.name}: {stats.new_tokens} tokens in {stats.steps} steps, {stats.blocks} cache blocks")


if __name__ == "__main__":
    main()
