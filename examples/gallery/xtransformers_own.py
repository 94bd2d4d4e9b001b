"""A decoder of x-transformers, with the cache that the library returns: the rung between levels 1 and 2.

In the checkout, in an environment of its own:

    pip install ".[torch,serve]" "x-transformers>=2.31"
    python examples/gallery/xtransformers_own.py
    hibachi serve examples/gallery/xtransformers_own.py:Decoded
    curl http://127.0.0.1:8000/v1/generate -H "Content-Type: application/json" \\
        -d '{"prompt": [1, 2, 3], "temperature": 0}'

The network is given the new tokens only: `input_not_include_cache`, and `cache_age=0`, with which it drops none of
them. How long the cache is it must be told, as rows that come and go make it longer or shorter. `seq_start_pos` is
what its own `generate` uses for prompts of different lengths.
"""

from dataclasses import replace

import torch
from side_by_side import arguments, compare, work
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

import hibachi

VOCAB, LONGEST = 1000, 256
SIZES = {"tiny": {"dim": 32, "depth": 2, "heads": 2}, "real": {"dim": 256, "depth": 6, "heads": 8}}


class Decoded:
    backend, vocab_size, max_model_len, past = "torch", VOCAB, LONGEST, hibachi.OwnCache(only="cached_kv")

    def __init__(self, net=None):
        self.net = net or network("tiny")

    def step(self, tokens, lengths, past):
        before = past.attn_intermediates[0].cached_kv[0].shape[2] if past else 0
        how = {
            "cache": past and replace(past, cache_length=before),
            "seq_start_pos": before + tokens.shape[1] - lengths,
        }
        out, past = self.net(tokens.long(), input_not_include_cache=True, cache_age=0, return_intermediates=True, **how)
        return out[:, -1], past


def network(size):
    torch.manual_seed(0)
    return TransformerWrapper(num_tokens=VOCAB, max_seq_len=LONGEST, attn_layers=Decoder(**SIZES[size])).eval()


def library(net, new):
    """From a prompt to the likeliest tokens, by the library's `generate`, which keeps a cache too."""
    wrapped = AutoregressiveWrapper(net)
    return lambda prompt: wrapped.generate(torch.tensor([prompt]), new, temperature=0.0)[0].tolist()


def main():
    asked = arguments(__doc__)
    net, (prompts, new) = network(asked.size), work(VOCAB, asked.size)
    compare(Decoded(net), library(net, new), prompts, new, asked)


if __name__ == "__main__":
    main()
