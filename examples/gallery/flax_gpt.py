"""A decoder of Flax's modules (nnx), with a cache of a fixed size that it writes into: the rung between levels 1 and 2.

In the checkout, in an environment of its own:

    pip install ".[jax,serve]" "flax>=0.12"
    python examples/gallery/flax_gpt.py
    hibachi serve examples/gallery/flax_gpt.py:Gpt
    curl http://127.0.0.1:8000/v1/generate -H "Content-Type: application/json" \\
        -d '{"prompt": [1, 2, 3], "temperature": 0}'

As in nnx.MultiHeadAttention with `decode=True`, keys and values lie in arrays with room for LONGEST positions. To the
engine such a cache is a state: no axis of it grows, and rows need not be aligned. Each row has its own place in it,
made from `lengths`. The cache that a step is given is its own to write into, so it is donated to the compiled
function, which copies nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from side_by_side import arguments, compare, work

import hibachi

VOCAB, LONGEST = 1000, 128
SIZES = {"tiny": (32, 2, 2), "real": (512, 6, 8)}  # width, layers, heads


class Block(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.attention = nnx.MultiHeadAttention(heads, width, rngs=rngs)
        self.before, self.after = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x, place, past):  # (rows, new, width), (rows, new), (keys, values)
        y, of = self.before(x), self.attention
        at = jnp.arange(len(x))[:, None], slice(None), place
        new = zip(past, (of.key(y), of.value(y)), strict=True)
        keys, values = (old.at[at].set(one, mode="promise_in_bounds") for old, one in new)  # (rows, heads, all, dim)
        scores = of.query(y).swapaxes(1, 2) @ keys.mT * of.head_dim**-0.5
        seen = jnp.arange(LONGEST) <= place[:, None, :, None]
        mixed = jax.nn.softmax(jnp.where(seen, scores, -1e9)) @ values
        x = x + of.out(mixed.swapaxes(1, 2))
        return x + self.down(nnx.gelu(self.up(self.after(x)))), (keys, values)


class Net(nnx.Module):
    def __init__(self, width, layers, heads, rngs):
        self.embed, self.place = nnx.Embed(VOCAB, width, rngs=rngs), nnx.Embed(LONGEST, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm, self.head = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, VOCAB, rngs=rngs)
        self.shape = heads, LONGEST, width // heads

    def __call__(self, tokens, start, past=None):
        """tokens (rows, new), of which the first is at start (rows,) -> logits, the cache."""
        place = start[:, None] + jnp.arange(tokens.shape[1])
        x, now = self.embed(tokens) + self.place(place), []
        for i, block in enumerate(self.blocks):
            x, new = block(x, place, past[i] if past else (jnp.zeros((len(x), *self.shape)),) * 2)
            now.append(new)
        return self.head(self.norm(x)), now


class Gpt:
    backend, past, vocab_size, max_model_len = "jax", hibachi.OwnCache(), VOCAB, LONGEST

    def __init__(self, net=None):
        self.net = compiled(net or network("tiny"))

    def step(self, tokens, lengths, past):
        logits, past = self.net(tokens, lengths - tokens.shape[1], past)
        return logits[:, -1], past


def compiled(net):
    """The network as a function that writes into the cache that it is given."""
    graph, weights = nnx.split(net)
    run = jax.jit(lambda weights, past, *args: nnx.merge(graph, weights)(*args, past), donate_argnums=1)
    return lambda tokens, start, past: run(weights, past, tokens, start)


def network(size):
    return Net(*SIZES[size], rngs=nnx.Rngs(0))


def main():
    asked = arguments(__doc__)
    net, (prompts, new) = network(asked.size), work(VOCAB, asked.size)
    library = compiled(net)

    def own(prompt):
        tokens = np.zeros(
            (1, 64), np.int32
        )  # one length, as each would be compiled; what follows the prompt is not seen
        tokens[0, : len(prompt)] = prompt
        logits, past = library(tokens, np.zeros(1, np.int32), None)
        found = [int(np.asarray(logits)[0, len(prompt) - 1].argmax())]
        for n in range(len(prompt), len(prompt) + new - 1):
            logits, past = library(np.array([found[-1:]], np.int32), np.array([n], np.int32), past)
            found.append(int(np.asarray(logits).argmax()))
        return found

    compare(Gpt(net), own, prompts, new, asked)


if __name__ == "__main__":
    main()
