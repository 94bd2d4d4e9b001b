"""A GRU of Equinox at level 2: the engine keeps the state.

In the checkout, in an environment of its own:

    pip install ".[jax,serve]" "equinox>=0.13"
    python examples/gallery/equinox_gru.py
    hibachi serve examples/gallery/equinox_gru.py:Gru
    curl http://127.0.0.1:8000/v1/generate -H "Content-Type: application/json" \\
        -d '{"prompt": [1, 2, 3], "temperature": 0}'

An Equinox network is for one example, so `jax.vmap` is over the rows. The engine compiles `step`, whose weights come
from `params`; what is no array stays apart.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from side_by_side import arguments, compare, work

import hibachi

VOCAB, LONGEST = 1000, 256
SIZES = {"tiny": 32, "real": 512}


class Net(eqx.Module):
    embed: eqx.nn.Embedding
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, width, key):
        first, second, third = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(VOCAB, width, key=first)
        self.cell = eqx.nn.GRUCell(width, width, key=second)
        self.head = eqx.nn.Linear(width, VOCAB, key=third)

    def __call__(self, h, token):
        h = self.cell(self.embed(token), h)
        return h, self.head(h)


class Gru:
    backend, vocab_size, max_model_len = "jax", VOCAB, LONGEST

    def __init__(self, net=None):
        self.params, self.rest = eqx.partition(net or network("tiny"), eqx.is_array)

    def cache_spec(self):
        return [hibachi.State((self.rest.cell.hidden_size,))]

    def step(self, params, cache, x):
        net = jax.vmap(eqx.combine(params, self.rest))
        h, logits = jax.lax.scan(net, cache[0], x.tok.reshape(len(cache[0]), -1).T)  # tokens (new, rows)
        return logits.swapaxes(0, 1).reshape(-1, VOCAB)[x.last], [h]


def network(size):
    return Net(SIZES[size], jax.random.key(0))


@eqx.filter_jit
def onward(net, h, tokens):
    """After these tokens: the state, and the next token."""
    h, logits = jax.lax.scan(lambda h, token: net(h, token), h, tokens)
    return h, logits[-1].argmax(keepdims=True)


def main():
    asked = arguments(__doc__)
    net, (prompts, new) = network(asked.size), work(VOCAB, asked.size)

    def own(prompt):
        h, token = onward(net, jnp.zeros(net.cell.hidden_size), jnp.array(prompt))
        found = [int(token[0])]
        for _ in range(new - 1):
            h, token = onward(net, h, token)
            found.append(int(token[0]))
        return found

    compare(Gru(net), own, prompts, new, asked)


if __name__ == "__main__":
    main()
