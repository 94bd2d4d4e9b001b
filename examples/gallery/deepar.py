"""DeepAR of gluonts: forecasts, drawn from a distribution, of an LSTM: the rung between levels 1 and 2.

In the checkout, in an environment of its own:

    pip install ".[torch,serve]" "gluonts[torch]>=0.16"
    python examples/gallery/deepar.py
    hibachi serve examples/gallery/deepar.py:Forecast
    python examples/gallery/deepar.py --show  # bodies of requests for /v1/generate

The class returns values, not logits. What is known of a series comes as inputs, and `encode` has the library read it,
once for each request. A prompt is one value, the last that is known. A step gets a normal number for each row, which
the engine makes from the request's seed. Here the library's own loop is given the same numbers, so it draws the same
values.
"""

from copy import deepcopy
from unittest.mock import patch

import numpy as np
import torch
from gluonts.torch.distributions import NormalOutput
from gluonts.torch.model.deepar.module import DeepARModel
from gluonts.torch.util import lagged_sequence_values
from side_by_side import arguments, compare, normals

import hibachi
import hibachi_torch

AHEAD, CONTEXT, LAGS = 48, 48, [1, 2, 3, 7, 24]
KNOWN = CONTEXT + max(LAGS) - 1  # values of a history
SIZES = {"tiny": (16, 2), "real": (256, 2)}  # width, layers


class Forecast:
    backend, vocab_size, draws, max_model_len, past = "torch", None, 1, AHEAD + 1, hibachi.OwnCache()

    def __init__(self, net=None):
        self.reads, self.example_prompts = net or network("tiny"), [[0.0]]
        self.net = hibachi_torch.invariant(deepcopy(self.reads))  # the same bits, whoever shares the batch
        self.inputs = {"history": hibachi.Input((KNOWN,)), "calendar": hibachi.Input((KNOWN + AHEAD, 1))}

    def encode(self, history, calendar):
        args, scale, _, static, state = self.reads.unroll_lagged_rnn(
            *known(history, calendar), calendar[:, KNOWN, None]
        )
        return [each[:, -1] for each in args], scale, static, calendar[:, KNOWN:], swapped(state), history / scale

    def step(self, tokens, lengths, past, encoded, normal):
        args, scale, static, after, *start = encoded
        state, values = past or start
        for i in range(past is None, tokens.shape[1]):  # the prompt is read already
            now, at = tokens[:, i : i + 1].float() / scale, lengths - tokens.shape[1] + i
            lags = lagged_sequence_values(self.net.lags_seq, values, now, dim=-1)[:, 0]
            features = torch.cat([lags, static, after[torch.arange(len(at)), at]], dim=-1)
            out, state = self.net.rnn(features[:, None], swapped(state))
            args, state = [each[:, -1] for each in self.net.param_proj(out)], swapped(state)
            values = torch.cat([values[:, 1:], now], dim=-1)
        return (args[0] + args[1] * normal[:, 0]) * scale[:, 0], (state, values)


def swapped(state):  # (layers, rows, width) of an LSTM to (rows, layers, width), and back
    return tuple(each.transpose(0, 1).contiguous() for each in state)


def known(history, calendar):
    """What the library wants of the past: no features that stay, those of the hours, values, and that all are there."""
    nothing = torch.zeros(len(history), 1)
    return nothing.long(), nothing, calendar[:, :KNOWN], history, torch.ones_like(history)


def network(size):
    torch.manual_seed(0)
    width, layers = SIZES[size]
    sizes = {"context_length": CONTEXT, "prediction_length": AHEAD, "lags_seq": LAGS}
    return DeepARModel("h", hidden_size=width, num_layers=layers, distr_output=NormalOutput(), **sizes).eval()


def main():
    asked, random = arguments(__doc__), np.random.default_rng(0)
    net = network(asked.size)
    hours = np.arange(KNOWN + AHEAD)
    inputs = [
        {
            "history": (5 + np.sin(hours[:KNOWN] / 4 + i) + random.random(KNOWN)).tolist(),
            "calendar": (hours[:, None] % 24 / 24).tolist(),
        }
        for i in range(16)
    ]
    numbers = normals(1, AHEAD)

    @torch.inference_mode()
    def own(prompt, history, calendar, seed):
        history, calendar, given = torch.tensor([history]), torch.tensor([calendar]), iter(numbers[seed])
        with patch.object(torch, "normal", lambda mean, spread: mean + spread * float(next(given))):
            return net(*known(history, calendar), calendar[:, KNOWN:], num_parallel_samples=1)[0, 0].tolist()

    prompts = [given["history"][-1:] for given in inputs]
    compare(Forecast(net), own, prompts, AHEAD, asked, inputs, draws=True)


if __name__ == "__main__":
    main()
