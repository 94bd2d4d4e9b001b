"""What each rung of the ladder brings: 16 requests at once in an engine, beside the model's own loop, one by one.

    python benchmarks/ladder.py [--rounds 3]

Two networks on PyTorch, of random weights: a GRU (two layers of 512) and a transformer (four layers of 256). Their own
loops keep the state, or keys and values, as loops that people write do. Greedy, prompts of 32, 64 new tokens each.
Loops and engines take turns; medians.
"""

import argparse
import statistics
import time

import torch

import hibachi

VOCAB, PROMPT, NEW, ROWS = 512, 32, 64, 16


class Gru(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru = torch.nn.Embedding(VOCAB, 512), torch.nn.GRU(512, 512, 2, batch_first=True)
        self.head = torch.nn.Linear(512, VOCAB)

    def net(self, tokens, past=None):  # (B, S) -> (B, S, V), the past
        out, past = self.gru(self.embed(tokens), past)
        return self.head(out), past


class Transformer(torch.nn.Module):
    def __init__(self, width=256, layers=4):
        super().__init__()
        linear = torch.nn.Linear
        self.embed, self.place = torch.nn.Embedding(VOCAB, width), torch.nn.Embedding(256, width)
        self.qkv = torch.nn.ModuleList(linear(width, 3 * width) for _ in range(layers))
        self.out = torch.nn.ModuleList(linear(width, width) for _ in range(layers))
        self.up = torch.nn.ModuleList(linear(width, 4 * width) for _ in range(layers))
        self.down = torch.nn.ModuleList(linear(4 * width, width) for _ in range(layers))
        self.head = linear(width, VOCAB)

    def net(self, tokens, past=None):
        past = past or [None] * len(self.qkv)
        begin = past[0][0].shape[2] if past[0] else 0
        attend = torch.nn.functional.scaled_dot_product_attention

        def layer(i, qkv):
            q, k, v = qkv.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, S, dim) each
            if past[i]:
                k, v = torch.cat([past[i][0], k], 2), torch.cat([past[i][1], v], 2)
            past[i] = k, v
            return attend(q, k, v, is_causal=not begin).transpose(1, 2).flatten(2)

        return self.layers(tokens, torch.arange(begin, begin + tokens.shape[1]), layer), past

    def aligned(self, tokens, lengths, past):
        """`net` for rows of several lengths, right-aligned: (B, q), (B,), the past -> (B, q, V), the past."""
        n = tokens.shape[1]
        width = n + (past[0][0].shape[2] if past else 0)
        place = torch.arange(width) - (width - lengths[:, None])
        mask = ((place[:, None] >= 0) & (place[:, None] <= place[:, -n:, None]))[:, None]
        new = []

        def layer(i, qkv):
            q, k, v = qkv.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            if past:
                k, v = torch.cat([past[i][0], k], 2), torch.cat([past[i][1], v], 2)
            new.append((k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)

        return self.layers(tokens, place[:, -n:].clamp(min=0), layer), new

    def layers(self, tokens, places, attend):
        x = self.embed(tokens) + self.place(places)
        for i, (qkv, out, up, down) in enumerate(zip(self.qkv, self.out, self.up, self.down, strict=True)):
            x = x + out(attend(i, qkv(torch.nn.functional.layer_norm(x, x.shape[-1:]))))
            x = x + down(torch.nn.functional.gelu(up(torch.nn.functional.layer_norm(x, x.shape[-1:]))))
        return self.head(x)


class Tokens:  # level 0
    def __init__(self, model):
        self.model = model

    def forward(self, tokens):
        return self.model.net(tokens)[0][:, -1].argmax(-1)


class Logits:  # level 1
    vocab_size, max_model_len = VOCAB, 256

    def __init__(self, model):
        self.model = model

    def logits(self, tokens, lengths):
        return self.model.net(tokens)[0][:, -1]


class OwnState:  # a cache of its own: a state needs no lengths
    vocab_size, past = VOCAB, hibachi.OwnCache()

    def __init__(self, model):
        self.model = model

    def step(self, tokens, past):
        out, past = self.model.net(tokens, past)
        return out[:, -1], past


class OwnPast(OwnState):  # a cache of its own: keys and values
    def step(self, tokens, lengths, past):
        out, past = self.model.aligned(tokens, lengths, past)
        return out[:, -1], past


class Recurrent:  # level 2 with a State
    vocab_size, max_model_len, params = VOCAB, 256, None

    def __init__(self, model):
        self.model = model

    def cache_spec(self):
        return [hibachi.State((2, 512))]

    def step(self, params, cache, x):
        out, past = self.model.net(x.tok.reshape(len(cache[0]), -1), cache[0].transpose(0, 1).contiguous())
        return out.flatten(0, 1)[x.last], [past.transpose(0, 1)]


class Attention:  # level 2 with Paged
    vocab_size, max_model_len, params = VOCAB, 256, None

    def __init__(self, model, backend):
        self.model, self.backend = model, backend

    def cache_spec(self):
        return [hibachi.Paged(kv_heads=4, k_dim=64, v_dim=64)] * len(self.model.qkv)

    def step(self, params, cache, x):
        new = list(cache)

        def attend(i, qkv):
            q, k, v = qkv.unflatten(-1, (3, 4, -1)).unbind(1)  # (T, heads, dim) each
            out, new[i] = self.backend.attend(q, k, v, cache[i], x)
            return out.flatten(1)

        return self.model.layers(x.tok, x.pos, attend)[x.last], new


@torch.inference_mode()
def own_loop(model, prompts):
    """The tokens of every prompt, one by one, with a cache."""
    found = []
    for prompt in prompts:
        tokens, past, ours = prompt[None], None, []
        for _ in range(NEW):
            out, past = model.net(tokens, past)
            tokens = out[:, -1].argmax(-1, keepdim=True)
            ours.append(int(tokens))
        found.append(ours)
    return found


def timed(work):
    begin = time.perf_counter()
    return work(), time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns, of which medians are taken (default: 3)")
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    prompts = torch.randint(0, VOCAB, (ROWS, PROMPT))
    backend = hibachi.load_backend("torch")
    print("network      you write          own loop  at once   ratio  same tokens")
    for model, own, cached in ((Gru(), OwnState, Recurrent), (Transformer(), OwnPast, lambda m: Attention(m, backend))):
        rungs = {"forward(tokens)": Tokens, "logits(...)": Logits, "step(..., past)": own, "step(..., x)": cached}
        for name, make in rungs.items():
            with hibachi.AutoregressiveBatchInference(make(model.eval()), backend=backend, max_model_len=256) as engine:
                # Level 0 returns tokens and has nothing to sample.
                greedy = hibachi.SamplingParams(temperature=0, max_tokens=NEW)
                asked = {"max_tokens": NEW} if make is Tokens else {"params": greedy}

                def at_once(engine=engine, asked=asked):
                    streams = [engine.run(prompt, **asked) for prompt in prompts]
                    return [[int(token) for token in stream.collect()] for stream in streams]

                at_once()
                loop, ours, pairs = [], [], []
                for _ in range(rounds):
                    theirs, seconds = timed(lambda model=model: own_loop(model, prompts))
                    loop.append(seconds)
                    found, seconds = timed(at_once)
                    ours.append(seconds)
                    pairs.append(loop[-1] / ours[-1])
            same = sum(a == b for a, b in zip(theirs, found, strict=True))
            tokens = ROWS * NEW
            print(
                f"{type(model).__name__:12} {name:16} {tokens / statistics.median(loop):8,.0f} "
                f"{tokens / statistics.median(ours):8,.0f} {statistics.median(pairs):6.1f}x  {same} of {ROWS}",
                flush=True,
            )


if __name__ == "__main__":
    main()
