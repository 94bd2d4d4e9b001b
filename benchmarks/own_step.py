"""What the engine adds to the steps of models that keep a cache of their own: the time of a step outside the model.

    OMP_NUM_THREADS=1 python benchmarks/own_step.py [--rounds 3]

Two transformers on PyTorch, six layers of 256 with random weights: GPT-2 of the library transformers, which returns its
whole cache, and one that returns the new positions only. 16 greedy requests decode at once: 64 new tokens after
prompts of 32 to 62. Of the steps that only decode, the mean time in the model and outside of it.
"""

import argparse
import statistics
import time
from pathlib import Path
from runpy import run_path

import torch
from ladder import Transformer

import hibachi

Gpt = run_path(str(Path(__file__).parents[1] / "examples" / "own_cache.py"))["Gpt"]
ROWS, NEW = 16, 64


class NewOnly:
    """Keys and values of the new positions are all that it returns."""

    vocab_size, max_model_len, past = 512, 256, hibachi.OwnCache()

    def __init__(self):
        torch.manual_seed(0)
        self.model = Transformer(256, 6).eval()

    def step(self, tokens, lengths, past):
        out, past = self.model.aligned(tokens, lengths, past)
        return out[:, -1], [tuple(half[:, :, -tokens.shape[1] :] for half in layer) for layer in past]


def timed(model):
    """The same model, which adds up the seconds and the calls of decoding all rows: in a list [seconds, calls]."""
    step, spent = model.step, [0.0, 0]

    def timed_step(tokens, lengths, past):
        begin = time.perf_counter()
        found = step(tokens, lengths, past)
        if tokens.shape == (ROWS, 1):
            spent[0] += time.perf_counter() - begin
            spent[1] += 1
        return found

    model.step = timed_step
    return spent


def measure(model):
    """Milliseconds of a step that decodes all rows: in the model, and outside of it."""
    spent = timed(model)
    prompts = [torch.randint(model.vocab_size, (32 + 2 * i,)).tolist() for i in range(ROWS)]
    greedy = hibachi.SamplingParams(temperature=0, max_tokens=NEW)
    with hibachi.AutoregressiveBatchInference(model, backend="torch", deterministic=False, max_num_seqs=ROWS) as engine:
        for stream in [engine.run(prompt, greedy) for prompt in prompts]:
            stream.collect()
        spent[:] = 0.0, 0
        before = engine.meters().decode
        for stream in [engine.run(prompt[::-1], greedy) for prompt in prompts]:
            stream.collect()
        decode = engine.meters().decode
    seconds, steps = decode.seconds.sum - before.seconds.sum, decode.seconds.count - before.seconds.count
    inside = 1e3 * spent[0] / spent[1]
    return inside, 1e3 * seconds / steps - inside


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of which medians are taken (default: 3)")
    rounds = parser.parse_args().rounds
    print("model                      in the model  outside  share")
    for name, make in {"GPT-2, whole cache": Gpt, "new positions only": NewOnly}.items():
        found = [measure(make()) for _ in range(rounds)]
        inside, outside = (statistics.median(each) for each in zip(*found, strict=True))
        print(f"{name:26} {inside:9.2f} ms {outside:5.2f} ms {outside / (inside + outside):6.1%}", flush=True)


if __name__ == "__main__":
    main()
