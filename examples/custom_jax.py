"""A model of your own on JAX: a neural language model (Bengio et al. 2003) that learns to count in English.

JAX compiles once for every shape. A model that takes `lengths` and a padding token lets the engine pad its
batches to few shapes; this one looks at the last 16 letters only, and saw padding before the text in training.
"""

import time

import jax
import jax.numpy as jnp

import hibachi

ONES = ["", "-one", "-two", "-three", "-four", "-five", "-six", "-seven", "-eight", "-nine"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
TEXT = " ".join(ten + one for ten in TENS for one in ONES) + " "
ALPHABET = "_" + "".join(sorted(set(TEXT)))  # 0 is padding
WINDOW, WIDTH, HIDDEN = 16, 12, 128


def encode(text):
    return jnp.array([ALPHABET.index(c) for c in text], jnp.int32)


def scores(params, window):  # (B, WINDOW) -> (B, letters)
    x = params["embed"][window].reshape(len(window), WINDOW * WIDTH)
    return jnp.tanh(x @ params["hidden"]) @ params["out"]


def loss(params, window, target):
    return -jnp.take_along_axis(jax.nn.log_softmax(scores(params, window)), target[:, None], 1).mean()


@jax.jit
def train(params, windows, targets):
    """200 steps of Adam (Kingma and Ba 2015) over the whole text."""

    def step(carry, i):
        params, m, v = carry
        grads = jax.grad(loss)(params, windows, targets)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, v, grads)
        rate = 0.02 * jnp.sqrt(1 - 0.99 ** (i + 1)) / (1 - 0.9 ** (i + 1))
        return (jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, m, v), m, v), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(step, (params, zeros, zeros), jnp.arange(200))[0][0]


class Counter:
    def __init__(self, params):
        self.params = params
        self._scores = jax.jit(scores)

    def forward(self, tokens, lengths):  # (B, S), (B,) -> (B,)
        window = jnp.pad(tokens, ((0, 0), (WINDOW, 0)))[:, -WINDOW:]
        return self._scores(self.params, window).argmax(-1).astype(jnp.int32)


def main():
    keys, began = jax.random.split(jax.random.key(0), 3), time.perf_counter()
    params = {
        "embed": 0.5 * jax.random.normal(keys[0], (len(ALPHABET), WIDTH)),
        "hidden": jax.random.normal(keys[1], (WINDOW * WIDTH, HIDDEN)) / WIDTH,
        "out": jax.random.normal(keys[2], (HIDDEN, len(ALPHABET))) / HIDDEN,
    }
    ids = jnp.pad(encode(TEXT), (WINDOW, 0))
    windows = jnp.stack([ids[i : i + WINDOW] for i in range(len(TEXT))])
    params = train(params, windows, ids[WINDOW:])
    print(f"trained in {time.perf_counter() - began:.1f} s, loss {loss(params, windows, ids[WINDOW:]):.3f}")
    prompts = ["thirty-four ", "fifty-eight fifty-", "sixty-nine "]
    with hibachi.AutoregressiveBatchInference(Counter(params), padding_token=0, max_model_len=256) as engine:
        streams = [engine.run(encode(p), max_tokens=36) for p in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            print(f"{prompt}|{''.join(ALPHABET[int(token)] for token in stream)}")


if __name__ == "__main__":
    main()
