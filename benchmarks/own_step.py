"""What the engine adds to the steps of models that keep a cache of their own: the time of a step outside the model.

    OMP_NUM_THREADS=1 python benchmarks/own_step.py [--rounds 3]

Two transformers on PyTorch, six layers of 256 with random weights: GPT-2 of the library transformers, which returns its
whole cache, and one that returns the new positions only. 16 greedy requests decode at once: 64 new tokens after
prompts of 32 to 62. Of the steps that only decode, the mean time in the model and outside of it.

And one like CSM, four layers of 512, that draws frames of 32 codebooks in depth by as many layers: 8 new frames, drawn
by temperature and top_k.
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
BOOKS, FRAMES = 32, 8


class NewOnly:
    """Keys and values of the new positions are all that it returns."""

    vocab_size, max_model_len, past = 512, 256, hibachi.OwnCache()

    def __init__(self):
        torch.manual_seed(0)
        self.model = Transformer(256, 6).eval()

    def step(self, tokens, lengths, past):
        out, past = self.model.aligned(tokens, lengths, past)
        return out[:, -1], [tuple(half[:, :, -tokens.shape[1] :] for half in layer) for layer in past]


class InDepth:
    """Frames of 32 codebooks; `depth` sees the code before, and has keys and values of those before it as its past."""

    vocab_size, codebooks, max_model_len, past = 512, BOOKS, 256, hibachi.OwnCache()

    def __init__(self):
        torch.manual_seed(0)
        self.backbone, self.decoder = Transformer(512, 4).eval(), Transformer(512, 4).eval()
        self.codes = torch.nn.Embedding(BOOKS * self.vocab_size, 512).eval()
        self.first = torch.arange(BOOKS) * self.vocab_size
        self.backbone.embed = self.decoder.embed = self.backbone.head = torch.nn.Identity().eval()

    def step(self, tokens, lengths, past):
        out, past = self.backbone.aligned(self.codes(tokens + self.first).sum(2), lengths, past)
        return out[:, -1], [tuple(half[:, :, -tokens.shape[1] :] for half in layer) for layer in past]

    def depth(self, k, given, codes, past):
        x = given if k == 0 else self.codes(codes[:, k - 1] + self.first[k - 1])
        out, past = self.decoder.net(x[:, None], past)
        return out[:, 0], past


def timed(model):
    """The same model, which adds up the seconds and the calls of decoding all rows: in a list [seconds, calls]."""
    step, spent, decodes = model.step, [0.0, 0], False

    def timed_step(tokens, lengths, past):
        nonlocal decodes
        begin, decodes = time.perf_counter(), tokens.shape[:2] == (ROWS, 1)
        found = step(tokens, lengths, past)
        if decodes:
            spent[0] += time.perf_counter() - begin
            spent[1] += 1
        return found

    model.step = timed_step
    if isinstance(model, InDepth):
        depth = model.depth

        def timed_depth(k, given, codes, past):
            begin = time.perf_counter()
            found = depth(k, given, codes, past)
            spent[0] += (time.perf_counter() - begin) * decodes
            return found

        model.depth = timed_depth
    return spent


def measure(model):
    """Milliseconds of a step that decodes all rows: in the model, and outside of it."""
    spent = timed(model)
    frame, how = (), hibachi.SamplingParams(temperature=0, max_tokens=NEW)
    if isinstance(model, InDepth):
        frame, how = (BOOKS,), hibachi.SamplingParams(temperature=0.9, top_k=50, seed=0, max_tokens=FRAMES)
    prompts = [torch.randint(model.vocab_size, (32 + 2 * i, *frame)).tolist() for i in range(ROWS)]
    with hibachi.AutoregressiveBatchInference(model, backend="torch", deterministic=False, max_num_seqs=ROWS) as engine:
        for stream in [engine.run(prompt, how) for prompt in prompts]:
            stream.collect()
        spent[:] = 0.0, 0
        before = engine.meters().decode
        for stream in [engine.run(prompt[::-1], how) for prompt in prompts]:
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
    for name, make in {"GPT-2, whole cache": Gpt, "new positions only": NewOnly, "in depth": InDepth}.items():
        found = [measure(make()) for _ in range(rounds)]
        inside, outside = (statistics.median(each) for each in zip(*found, strict=True))
        print(f"{name:26} {inside:9.2f} ms {outside:5.2f} ms {outside / (inside + outside):6.1%}", flush=True)


if __name__ == "__main__":
    main()
