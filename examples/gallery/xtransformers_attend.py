"""A decoder of x-transformers at level 2: the library's attention is replaced, and the engine keeps keys and values.

In the checkout, in an environment of its own:

    pip install ".[torch,serve]" "x-transformers>=2.31"
    python examples/gallery/xtransformers_attend.py
    hibachi serve examples/gallery/xtransformers_attend.py:Packed
    curl http://127.0.0.1:8000/v1/generate -H "Content-Type: application/json" \\
        -d '{"prompt": [1, 2, 3], "temperature": 0}'

All rows lie in one dimension, so the network sees one long row. Its module `Attend` is what mixes positions; in its
place `backend.attend` sees which tokens belong together. `hibachi_torch.invariant` makes the other products the same
in any batch.
"""

import torch
from side_by_side import arguments, compare, work
from x_transformers.attend import Intermediates
from xtransformers_own import LONGEST, VOCAB, library, network

import hibachi
import hibachi_torch


class Attended(torch.nn.Module):  # in the place of an Attend
    def __init__(self, owner, layer):
        super().__init__()
        self.of = owner, layer  # in a tuple, where torch does not look for modules

    def forward(self, q, k, v, **others):  # (1, heads, T, dim) each
        owner, i = self.of
        q, k, v = (each[0].transpose(0, 1) for each in (q, k, v))
        out, owner.cache[i] = owner.backend.attend(q, k, v, owner.cache[i], owner.x)
        return out.transpose(0, 1)[None], Intermediates()


class Packed:
    params, vocab_size, max_model_len = None, VOCAB, LONGEST
    backend = hibachi.load_backend("torch").invariant()  # the same bits, whoever shares the batch

    def __init__(self, net=None):
        self.net = hibachi_torch.invariant(net or network("tiny"))
        self.layers = [layer for layer in self.net.modules() if hasattr(layer, "attend")]
        for i, layer in enumerate(self.layers):
            layer.attend = Attended(self, i)

    def cache_spec(self):
        dim = self.layers[0].to_k.out_features // self.layers[0].kv_heads
        return [hibachi.Paged(layer.kv_heads, dim, dim) for layer in self.layers]

    def step(self, params, cache, x):
        self.cache, self.x = list(cache), x
        place = self.net.pos_emb(x.tok[None, :1], pos=x.pos[None])  # here, as the network would count in the long row
        return self.net(x.tok[None].long(), pos=place)[0][x.last], self.cache


def main():
    asked = arguments(__doc__)
    prompts, new = work(VOCAB, asked.size)
    compare(Packed(network(asked.size)), library(network(asked.size), new), prompts, new, asked)


if __name__ == "__main__":
    main()
