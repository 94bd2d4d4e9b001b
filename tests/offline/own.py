"""Models of one's own, as users write them."""

from __future__ import annotations

import os

import numpy as np

from hibachi import Input

made: list[str] = []  # which were made


class Logits:
    """Level 1: the next token is the last one more. Raises at 13, returns NaN at 17."""

    vocab_size, max_model_len = 32, 64

    def logits(self, tokens, lengths):
        if (tokens == 13).any():
            raise ValueError("thirteen")
        out = np.eye(32, dtype=np.float32)[(tokens[:, -1] + 1) % 32] * 50
        out[(tokens == 17).any(-1)] = np.nan
        return out


class Letters:
    def encode(self, text):
        return [ord(c) - 97 for c in text]

    def decode(self, ids):
        if 25 in ids:
            raise KeyError("z")
        return "".join(chr(97 + i) for i in ids)


class Texts(Logits):
    tokenizer = Letters()
    eos_ids = (12,)


class Tokens:
    """Level 0, tokens that are integers. Raises at 13."""

    max_model_len = 64
    eos_ids = (7,)
    vocab_size = 100  # which says nothing about its level

    def __init__(self):
        made.append("Tokens")

    def forward(self, tokens):
        if (tokens == 13).any():
            raise ValueError("thirteen")
        return tokens[:, -1] + 1


class Vectors:
    """Level 0, tokens that are vectors of floats; asynchronous."""

    max_model_len = 64

    async def forward(self, tokens):
        return tokens[:, -1] * np.float32(0.5)


class Dies(Tokens):
    """Takes its process along at 13."""

    def forward(self, tokens):
        if (tokens == 13).any():
            os._exit(7)
        return tokens[:, -1] + 1


def tokens():
    return Tokens()


def logits():
    made.append("logits")
    return Logits()


tokens_object = Tokens()
made.clear()


class Sums:
    """Feed-forward. Raises at 13."""

    def forward(self, x):
        if (x == 13).any():
            raise ValueError("thirteen")
        assert x.dtype == np.float32, x.dtype
        return np.stack([x.sum(-1), (x**2).sum(-1)], -1)


class Apart(Sums):
    def forward(self, x):
        return {"sum": x.sum(-1), "both": (x, x**2)}


class Kinds(Sums):
    labels = "sum", "squares"


class Mean:
    async def forward(self, x):
        return x.mean(-1)


class Dtype:
    def forward(self, x):
        return np.full(len(x), x.dtype.itemsize * (1 if x.dtype.kind == "i" else -1))


class NaN:
    def forward(self, x):
        return np.where(x.sum(-1) > 3, np.nan, 1.0)


class Few:
    def forward(self, x):
        return x.sum(-1)[:0]


class Complex:
    def forward(self, x):
        return x.sum(-1) + 1j


class Long:
    def forward(self, x):
        return x.sum(-1).astype(np.longdouble)


class Sung:
    """Frames of two codebooks, which the engine draws: all ids are equally likely."""

    vocab_size, codebooks, max_model_len = 8, 2, 64

    def logits(self, tokens, lengths):
        return np.zeros((len(tokens), 2, 8), np.float32)


class Drawing:
    """Level 0, real values: the uniform number of each step."""

    draws, max_model_len, token = 1, 64, np.float32(0)

    def forward(self, tokens, uniform):
        return uniform[:, 0] + tokens[:, -1] * 0


class Spoken(Drawing):
    """The same, with a speaker."""

    inputs = {"speaker": Input((2,))}  # noqa: RUF012

    def forward(self, tokens, uniform, speaker):
        return uniform[:, 0] + speaker[:, 0]
