"""NaN stays with its request: what a request leaves in its cache blocks does not reach the next owner of these blocks.

The outputs of the requests that leave NaN behind are finite here, so nothing but the attention of the next owner can
keep it out.
"""

from contextlib import suppress
from itertools import product

import numpy as np
import pytest

from hibachi import AutoregressiveBatchInference, NonFiniteOutput, NumpyBackend, Paged, SamplingParams
from hibachi_torch import TorchBackend

POISON = 13  # a token whose key and value are NaN
BLOCK = 4
VOCAB = 40


def native():
    return TorchBackend("cpu", native=True)


def jax(native=False, **options):
    from hibachi_jax import JaxBackend

    return JaxBackend("cpu", native=native, **options)


BACKENDS = {
    "numpy": NumpyBackend,
    "numpy invariant": lambda: NumpyBackend().invariant(),
    "torch": lambda: TorchBackend("cpu"),
    "torch invariant": lambda: TorchBackend("cpu").invariant(),
    "torch native": native,
    "torch native int8": lambda: TorchBackend("cpu").quantized("int8"),
    "jax": jax,
    "jax invariant": lambda: jax().invariant(),
    "jax native": lambda: jax(native=True),
}
QUICK = [
    *product([name for name in BACKENDS if not name.startswith("jax")], ["float32"]),
    *product(["torch native", "torch"], ["bfloat16"]),
]
ALL = [*QUICK, *product([name for name in BACKENDS if name.startswith("jax")], ["float32"])]


class Hides:
    """Draws the sum of a sequence by itself, from the mean that uniform attention computes, and hides NaN."""

    vocab_size = None
    max_model_len = 64
    params = None
    window = None

    def __init__(self, backend, dtype="float32"):
        self.backend, self.dtype = backend, dtype

    def cache_spec(self):
        return [Paged(1, 2, 1, dtype=self.dtype)]

    def step(self, params, cache, x):
        b, xp = self.backend, self.backend.xp
        tokens = xp.astype(x.tok, b.dtype(self.dtype))
        v = xp.where(x.tok == POISON, tokens * float("nan"), tokens)[:, None, None]
        k = xp.concat([v, v], axis=2) * 0
        mean, layer = b.attend(xp.zeros_like(k), k, v, cache[0], x, window=self.window)
        sums = xp.round(b.float32(mean[:, 0, 0]) * b.float32(xp.minimum(x.pos + 1, xp.full_like(x.pos, 8))))
        return self.output(b.take(sums, x.last)), [layer]

    def output(self, sums):
        xp = self.backend.xp
        return xp.astype(xp.clip(xp.where(sums != sums, xp.full_like(sums, -7), sums), -7, POISON - 1), xp.int32)


class Windowed(Hides):
    """Returns logits, in which NaN would show, and sees two positions."""

    max_model_len = 200
    vocab_size = VOCAB
    window = 2

    def output(self, sums):
        ids = self.backend.put(np.arange(VOCAB, dtype=np.float32))
        return -self.backend.xp.abs(ids[None, :] - 1 - sums[:, None])


class Served:
    """An engine with so few cache blocks that requests get those of the last ones."""

    def __init__(self, model, rows=4, **options):
        spec = model.cache_spec()[0]
        cell = (spec.k_dim + spec.v_dim) * (2 if spec.dtype == "bfloat16" else 4)
        blocks = rows * model.max_model_len // BLOCK + 1
        options |= {"block_size": BLOCK, "max_batch_size": rows, "cache_bytes": blocks * BLOCK * cell}
        self.params = None if model.vocab_size is None else SamplingParams(temperature=0)
        self.engine = AutoregressiveBatchInference(model, backend=model.backend, prefix_cache=False, **options)

    def start(self, prompts):
        return [self.engine.run(prompt, self.params, max_new_tokens=4) for prompt in prompts]

    def ask(self, prompts):
        return [[int(token) for token in stream.collect()] for stream in self.start(prompts)]

    def leave_nan(self, prompts):
        """By requests that end well; or not, where their NaN shows."""
        for stream in self.start(prompts):
            with suppress(NonFiniteOutput):
                stream.collect()


def check(model, hostile, innocent, **options):
    """Each of the innocent gets what it gets where nobody was before."""
    clean, served = Served(model, **options), Served(model, **options)
    with clean.engine, served.engine:
        want = [clean.ask([prompt])[0] for prompt in innocent]
        for _ in range(2):
            served.leave_nan(hostile)
            assert served.ask(innocent[:1]) == want[:1]
            served.leave_nan(hostile)
            assert served.ask(innocent) == want


@pytest.mark.parametrize("name, dtype", ALL)
def test_h4_nan_that_a_model_hides_reaches_no_later_owner_of_its_blocks(name, dtype):
    """Tokens are ints, which nobody can look at for NaN."""
    model = Hides(BACKENDS[name](), dtype)
    check(model, [[5, 5, POISON, *[5] * 8, POISON, 5]] * 3, [[1, 2], [1, 1, 0, 1, 0], [2], [0] * 30 + [1]])


@pytest.mark.parametrize("name, dtype", QUICK)
def test_h4_blocks_that_are_taken_before_they_are_written(name, dtype):
    """A long prompt in chunks: most of its blocks are in the table and hold what the last owner left."""
    model = Hides(BACKENDS[name](), dtype)
    hostile = [[POISON] * 40] * 3
    check(model, hostile, [[0] * 30 + [1], [1] * 9 + [0] * 9, [2, 1]], rows=3, max_batch_tokens=7)
    check(model, hostile, [[0] * 30 + [1], [2, 1]], rows=3, max_batch_tokens=7, reserve_all=True)


@pytest.mark.parametrize("name, dtype", QUICK)
def test_h4_nan_before_a_window_reaches_no_later_owner_of_its_blocks(name, dtype):
    """Some kernels pass over what lies before the window, so the output is finite."""
    model = Windowed(BACKENDS[name](), dtype)
    prompt = ([5] * 5 + [POISON]) * 4 + [5] * 150
    check(model, [prompt], [[1, 2], [1] * 5], rows=1)
