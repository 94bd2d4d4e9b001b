"""Draws of tokens with several codebooks against the distributions that they should have: 60 chi-square tests.

`python -m tests.engine.chi_square` prints the table.
"""

import math

import numpy as np

import hibachi
from hibachi import SamplingParams
from tests.decode.reference import distribution
from tests.engine.frames import Flat

N = 4000  # frames drawn in each setting, one for each seed
SETTINGS = {
    "temperature 1": ({}, {}, {}, {}),
    "temperature 0.5 and 2": ({"temperature": 0.5}, {"temperature": 2.0}, {}, {"temperature": 0.7}),
    "top_k": ({"top_k": 4}, {"top_k": 2}, {"top_k": 7}, {}),
    "top_p": ({"top_p": 0.8}, {"top_p": 0.5}, {"top_p": 0.99}, {"top_p": 0.9, "temperature": 2.0}),
    "min_p and typical_p": ({"min_p": 0.2}, {"typical_p": 0.7}, {"min_p": 0.05, "top_k": 5}, {"typical_p": 0.9}),
}
LOGITS = np.random.default_rng(11).normal(size=(4, 12)) * 1.5
BACKENDS = ("numpy", "torch", "jax")


def p_value(counts, expected):
    """Of chi-square, cells that expect fewer than five pooled. expected: probabilities, some of them 0."""
    from scipy.stats import chi2

    assert not counts[expected == 0].any(), "a token came that cannot come"
    want = expected * counts.sum()
    order = np.argsort(want)
    cells, pool = [], [0.0, 0.0]
    for i in order:
        pool = [pool[0] + counts[i], pool[1] + want[i]]
        if pool[1] >= 5:
            cells.append(pool)
            pool = [0.0, 0.0]
    if pool[1] and cells:
        cells[-1] = [cells[-1][0] + pool[0], cells[-1][1] + pool[1]]
    statistic = sum((got - e) ** 2 / e for got, e in cells)
    return float(chi2.sf(statistic, max(1, len(cells) - 1))) if len(cells) > 1 else 1.0


def drawn(backend, setting, first=0, n=N):
    """Frames [n, 4], one token for each of n seeds from the first one on."""
    model = Flat(LOGITS, backend)
    params = SamplingParams(max_tokens=1, codebooks=SETTINGS[setting])
    with hibachi.AutoregressiveBatchInference(model, max_num_seqs=256, backend=backend, deterministic=False) as engine:
        streams = [engine.run(np.zeros((1, 4), int), params.with_(seed=first + i)) for i in range(n)]
        return np.stack([np.asarray(stream.collect()[0]) for stream in streams])


def cases(backends=BACKENDS, n=N):
    """(backend, setting, codebook, p-value) of each, with seeds of its own."""
    for b, backend in enumerate(BACKENDS):
        for s, (setting, each) in enumerate(SETTINGS.items() if backend in backends else ()):
            frames = drawn(backend, setting, (b * len(SETTINGS) + s) * N, n)
            for k, how in enumerate(each):
                counts = np.bincount(frames[:, k], minlength=LOGITS.shape[1])
                yield backend, setting, k, p_value(counts, np.array(distribution(LOGITS[k], **how)))


def main():
    found = list(cases())
    print(f"{'':24}{'codebook 0':>12}{'1':>10}{'2':>10}{'3':>10}   p-values, {N} frames each")
    for at in range(0, len(found), 4):
        backend, setting, _, _ = found[at]
        print(f"{backend + ', ' + setting:32}" + "".join(f"{p:10.3f}" for *_, p in found[at : at + 4]))
    least = min(p for *_, p in found)
    print(
        f"{len(found)} cases; the least p is {least:.4f} (by chance about {1 / len(found):.3f}), > 1e-3: {least > 1e-3}"
    )
    assert math.isfinite(least)


if __name__ == "__main__":
    main()
