"""RWKV as the library transformers computes it, which mixes the rows of a batch: `hibachi verify` finds it.

    hibachi verify --model examples/verify_rwkv.py:Rwkv --backend torch

Its weights are random, so nothing is downloaded. It needs the extras torch and hf.
"""

import torch
from transformers import RwkvConfig, RwkvForCausalLM

import hibachi


class Rwkv(torch.nn.Module):
    vocab_size, max_model_len, params = 200, 256, None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = RwkvConfig(vocab_size=200, hidden_size=64, num_hidden_layers=2, context_length=256)
        self.net = RwkvForCausalLM(config).eval()
        for weight in self.net.parameters():  # fresh ones are nearly all alike
            weight.data += torch.randn_like(weight) * 0.15

    def cache_spec(self):
        return [hibachi.State((64, 2))] * 5  # the five states of RWKV, each of (hidden size, layers)

    def step(self, params, cache, x):
        tokens = x.tok.reshape(len(x.start), -1)  # with a State, all rows of a call have equally many tokens
        past = [state.clone() for state in cache]  # transformers writes into them
        past[4][x.start == 0] = -1e38  # a maximum, which starts below all numbers; the engine starts it with 0
        out = self.net(tokens, state=past, use_cache=True)
        return out.logits.flatten(0, 1)[x.last], out.state
