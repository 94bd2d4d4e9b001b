"""NaN stays with its request: what a request leaves in cache blocks does not reach those that get or share them.

The outputs of the requests that leave NaN behind are finite here, so nothing but attention can keep it from others.
"""

from contextlib import suppress
from itertools import product

import numpy as np
import pytest

from hibachi import AutoregressiveBatchInference, NonFiniteOutput, NumpyBackend, Paged, SamplingParams, State
from hibachi_torch import TorchBackend

POISON = 13  # a token whose key and value are NaN
HIDDEN = -7  # what is drawn from NaN
BLOCK = 4


def jax(**options):
    from hibachi_jax import JaxBackend

    return JaxBackend("cpu", **options)


BACKENDS = {
    "numpy": NumpyBackend,
    "numpy invariant": lambda: NumpyBackend().invariant(),
    "torch": lambda: TorchBackend("cpu", native=False),
    "torch invariant": lambda: TorchBackend("cpu", native=False).invariant(),
    "torch native": lambda: TorchBackend("cpu", native=True),
    "torch native int8": lambda: TorchBackend("cpu", native=True).quantized("int8"),
    "jax": lambda: jax(native=False),
    "jax invariant": lambda: jax(native=False).invariant(),
    "jax native": lambda: jax(native=True),
}
JAX = [name for name in BACKENDS if name.startswith("jax")]  # they compile, so they are tried on few shapes
CASES = [
    *product([name for name in BACKENDS if name not in JAX], ["float32"]),
    *product(["torch", "torch native"], ["bfloat16"]),
]


class Hides:
    """Draws the sum of the last tokens by itself, from the mean that uniform attention computes, and hides NaN."""

    vocab_size, max_model_len, params = None, 64, None
    window, layers = None, 1

    def __init__(self, backend, dtype="float32"):
        self.backend, self.dtype = backend, dtype

    def cache_spec(self):
        return [Paged(1, 2, 1, dtype=self.dtype)] * self.layers

    def step(self, params, cache, x):
        b, xp, kept = self.backend, self.backend.xp, []
        tokens = xp.astype(x.tok, b.dtype(self.dtype))
        h = xp.where(x.tok == POISON, tokens * float("nan"), tokens)[:, None, None]
        for layer in cache:
            k = xp.concat([h, h], axis=2) * 0
            h, layer = b.attend(xp.zeros_like(k), k, h, layer, x, window=self.window)
            kept.append(layer)
        sums = xp.round(b.float32(h[:, 0, 0]) * b.float32(xp.minimum(x.pos + 1, xp.full_like(x.pos, 8))))
        return self.output(b.take(sums, x.last)), kept

    def output(self, sums):
        xp = self.backend.xp
        shown = xp.where(sums != sums, xp.full_like(sums, HIDDEN), xp.minimum(sums, xp.full_like(sums, POISON - 1)))
        return xp.astype(shown, xp.int32)


class Windowed(Hides):
    """Returns logits, in which NaN would show, and sees two positions."""

    vocab_size, max_model_len = 40, 200
    window = 2

    def output(self, sums):
        ids = self.backend.put(np.arange(self.vocab_size, dtype=np.float32))
        return -self.backend.xp.abs(ids[None, :] - 1 - sums[:, None])


class TwoLayers(Hides):
    layers = 2


class Served:
    """An engine with so few cache blocks that requests get those of the last ones."""

    def __init__(self, model, rows=4, **options):
        spec = model.cache_spec()[0]
        cell = model.layers * (spec.k_dim + spec.v_dim) * (2 if spec.dtype == "bfloat16" else 4)
        blocks = rows * model.max_model_len // BLOCK + 1
        options = {"block_size": BLOCK, "max_num_seqs": rows, "enable_prefix_caching": False} | options
        options["kv_cache_memory_bytes"] = blocks * BLOCK * cell
        self.params = None if model.vocab_size is None else SamplingParams(temperature=0)
        self.engine = AutoregressiveBatchInference(model, backend=model.backend, **options)

    def start(self, prompts):
        return [self.engine.run(prompt, self.params, max_tokens=4) for prompt in prompts]

    def ask(self, prompts):
        return [[int(token) for token in stream.collect()] for stream in self.start(prompts)]

    def leave_nan(self, prompts):
        """By requests that end well; or not, where their NaN shows."""
        for stream in self.start(prompts):
            with suppress(NonFiniteOutput):
                stream.collect()


def check(model, hostile, innocent, **options):
    """Each of the innocent gets what it gets where no request was before."""
    clean, served = Served(model, **options), Served(model, **options)
    with clean.engine, served.engine:
        want = [clean.ask([prompt])[0] for prompt in innocent]
        for _ in range(2):
            served.leave_nan(hostile)
            assert served.ask(innocent[:1]) == want[:1]
            served.leave_nan(hostile)
            assert served.ask(innocent) == want


@pytest.mark.parametrize("name, dtype", CASES)
def test_h4_nan_that_a_model_hides_reaches_no_later_owner_of_its_blocks(name, dtype):
    """Tokens are ints, which cannot be looked at for NaN."""
    model = Hides(BACKENDS[name](), dtype)
    check(model, [[5, 5, POISON, *[5] * 8, POISON, 5]] * 3, [[1, 2], [1, 1, 0, 1, 0], [2], [0] * 30 + [1]])


@pytest.mark.parametrize("name", JAX)
def test_h4_nan_that_a_model_hides_reaches_no_later_owner_on_jax(name):
    clean, served = (Served(TwoLayers(BACKENDS[each]()), rows=1, max_num_batched_tokens=4) for each in ("numpy", name))
    with clean.engine, served.engine:
        served.leave_nan([[1, POISON, 1, 1, 1, 1]])
        assert served.ask([[1, 2, 0], [0] * 6]) == clean.ask([[1, 2, 0], [0] * 6])


@pytest.mark.parametrize("name, dtype", CASES)
def test_h4_blocks_that_are_taken_before_they_are_written(name, dtype):
    """A long prompt in chunks: most of its blocks are in the table and hold what the last owner left."""
    model = Hides(BACKENDS[name](), dtype)
    hostile = [[POISON] * 40] * 3
    check(model, hostile, [[0] * 30 + [1], [1] * 9 + [0] * 9, [2, 1]], rows=3, max_num_batched_tokens=7)
    check(model, hostile, [[0] * 30 + [1], [2, 1]], rows=3, max_num_batched_tokens=7, reserve_all=True)


@pytest.mark.parametrize("name, dtype", CASES)
def test_h4_nan_before_a_window_reaches_no_later_owner_of_its_blocks(name, dtype):
    """Some kernels pass over what lies before the window, so the output is finite."""
    model = Windowed(BACKENDS[name](), dtype)
    check(model, [([5] * 5 + [POISON]) * 4 + [5] * 150], [[1, 2], [1] * 5], rows=1)


@pytest.mark.parametrize("name, dtype", CASES)
def test_h4_nan_reaches_no_request_that_shares_what_comes_before_it(name, dtype):
    """Within a chunk it is hidden from the tokens before it, of which the next layer keeps something in the blocks."""
    model = TwoLayers(BACKENDS[name](), dtype)
    check(model, [[1] * 9 + [POISON, 1]], [[1] * 9 + [0, 1], [1] * 8 + [2]], enable_prefix_caching=True)


class Recurrent(Hides):
    """The running sum of each row, in a state that the poison makes NaN for good."""

    def cache_spec(self):
        return [State((1,))]

    def step(self, params, cache, x):
        b, xp, (state,) = self.backend, self.backend.xp, cache
        tokens = xp.reshape(b.float32(x.tok), (state.shape[0], -1))
        sums = state + xp.cumulative_sum(xp.where(tokens == POISON, tokens * float("nan"), tokens), axis=1)
        return self.output(b.take(xp.reshape(sums, (-1,)), x.last)), [sums[:, -1:]]


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_h4_nan_in_a_recurrent_state_stays_in_its_row(name):
    """Rows that start get zeros, whatever the last request left; others run beside it, and a prefix is kept."""
    model, prompts = Recurrent(BACKENDS[name]()), [[1, 2], [1] * 9, [1] * 8 + [2]]
    with AutoregressiveBatchInference(model, backend=model.backend, block_size=BLOCK, max_num_seqs=2) as e:
        want = [[int(t) for t in e.run(prompt, max_tokens=4)] for prompt in prompts]
        for _ in range(2):
            streams = [e.run(prompt, max_tokens=4) for prompt in ([1] * 8 + [POISON], *prompts, [POISON])]
            got = [[int(t) for t in stream] for stream in streams]
            assert got[1:-1] == want and got[0] == got[-1] == [HIDDEN] * 4
