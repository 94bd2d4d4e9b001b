"""An nn.LSTM of PyTorch at level 2: the engine keeps both of its states.

In the checkout, in an environment of its own:

    pip install ".[torch,serve]"
    python examples/gallery/torch_lstm.py
    hibachi serve examples/gallery/torch_lstm.py:Lstm
    curl http://127.0.0.1:8000/v1/generate -H "Content-Type: application/json" \\
        -d '{"prompt": [1, 2, 3], "temperature": 0}'

`hibachi_torch.invariant` swaps modules for others that compute each row alike in any batch. The library's own loop is
run without oneDNN, with which single tokens take three times as long.
"""

import torch
from side_by_side import arguments, compare, work

import hibachi
import hibachi_torch

VOCAB, LONGEST = 1000, 256
SIZES = {"tiny": (32, 2), "real": (512, 2)}  # width, layers


class Net(torch.nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(VOCAB, width), torch.nn.Linear(width, VOCAB)
        self.lstm = torch.nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, tokens, past=None):
        out, past = self.lstm(self.embed(tokens), past)
        return self.head(out), past


class Lstm:
    backend, params, vocab_size, max_model_len = "torch", None, VOCAB, LONGEST

    def __init__(self, net=None):
        self.net = hibachi_torch.invariant(net or network("tiny"))  # the same bits, whoever shares the batch

    def cache_spec(self):
        return [hibachi.State((self.net.lstm.num_layers, self.net.lstm.hidden_size))] * 2

    def step(self, params, cache, x):
        past = tuple(each.transpose(0, 1).contiguous() for each in cache)  # (layers, rows, width)
        out, past = self.net(x.tok.reshape(len(cache[0]), -1), past)
        return out.flatten(0, 1)[x.last], [each.transpose(0, 1) for each in past]


def network(size):
    torch.manual_seed(0)
    return Net(*SIZES[size]).eval()


def main():
    asked = arguments(__doc__)
    torch.backends.mkldnn.enabled = False
    net, (prompts, new) = network(asked.size), work(VOCAB, asked.size)

    @torch.inference_mode()
    def own(prompt):
        tokens, past, found = torch.tensor([prompt]), None, []
        for _ in range(new):
            logits, past = net(tokens, past)
            tokens = logits[:, -1:].argmax(-1)
            found.append(int(tokens))
        return found

    compare(Lstm(network(asked.size)), own, prompts, new, asked)


if __name__ == "__main__":
    main()
