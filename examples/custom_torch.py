"""A model of your own on PyTorch: a GRU that learns a rhyme by heart, then recites it from several places at once.

The forward pass is the one it was trained with (level 0 of the ladder): token ids in, the next token id out. Prompts of
different lengths are batched without padding: rows of equal length share a call.
"""

import time

import torch
from torch import nn

import hibachi

RHYME = (
    "Twinkle, twinkle, little star,\nHow I wonder what you are!\n"
    "Up above the world so high,\nLike a diamond in the sky.\n"
)
ALPHABET = sorted(set(RHYME))
IDS = torch.tensor([ALPHABET.index(c) for c in RHYME])


class Reciter(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, len(ALPHABET))

    def scores(self, tokens):
        return self.head(self.gru(self.embed(tokens))[0])  # (B, S, letters)

    def forward(self, tokens):  # (B, S) -> (B,)
        return self.scores(tokens)[:, -1].argmax(-1)


def train(model, steps=100, length=20):
    """Windows from every place of the rhyme, all in each step."""
    windows = IDS.unfold(0, length + 1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        scores = model.scores(windows[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a model is slower with more
    model, began = Reciter(), time.perf_counter()
    loss = train(model)
    print(f"trained in {time.perf_counter() - began:.1f} s, loss {loss:.2f}")
    prompts = ["Twinkle, twi", "How I won", "Up above the ", "Like a dia"]
    end_of_line = torch.tensor([ALPHABET.index("\n")])
    with hibachi.AutoregressiveBatchInference(model, stop_token=end_of_line, max_model_len=64) as engine:
        streams = [engine.run(torch.tensor([ALPHABET.index(c) for c in p]), include_stop=False) for p in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            print(f"{prompt}|{''.join(ALPHABET[token] for token in stream)}")
        print(f"{engine.stats().mean_batch_size:.1f} tokens a step on average")


if __name__ == "__main__":
    main()
