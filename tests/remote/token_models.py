"""Models that make no text, as users write them: of each rung, and feed-forward."""

import enum
import time
from dataclasses import replace

import numpy as np

from hibachi import Input, NumpyBackend
from hibachi.errors import ModelError
from hibachi.request import SamplingParams
from hibachi.testing.toys import SumPaged


class Steps:
    """Level 0, any token: the next is the last one plus 1. Raises at -13, is slow at 1000, returns NaN after -5."""

    def forward(self, tokens):
        if (tokens == -13).any():
            raise ValueError("thirteen")
        if (tokens[:, 0] == 1000).any():
            time.sleep(0.005)
        out = tokens[:, -1] + 1
        return np.where(out == -4, np.nan, out) if out.dtype.kind == "f" else out


class Wide:
    """Level 0, tokens of 4 KiB."""

    max_model_len = 10_000

    def forward(self, tokens):
        return tokens[:, -1]


class Frames:
    """Level 0, four codebooks; a frame of zeros ends a piece."""

    token, stop_token = np.zeros(4, np.int16), [0, 0, 0, 0]
    example_prompts = ([[7, 7, 7, 7]],)

    def forward(self, tokens):
        return (tokens[:, -1] - np.array([1, 2, 3, 4], np.int16)).clip(0)


class Falling:
    """Level 0, a height in metres and a speed; a second a step until it has landed."""

    token = 0.0, 0.0

    def forward(self, tokens):
        height, speed = tokens[:, -1, 0], tokens[:, -1, 1]
        return np.stack([height - speed, speed + 9.81], axis=1)

    def stop_rule(self, now):
        assert now.ndim == 2, now.shape
        return now[:, 0] <= 0


class Kind(enum.StrEnum):
    """Of this module, which the process that asks cannot import."""

    TEXT = "text/plain"


class Own:
    """Feed-forward. What it returns and raises is of classes that only its own process knows."""

    labels, token = [Kind.TEXT], np.zeros(1, np.float32)

    def forward(self, x):
        if (x == 13).any():
            raise ModelError(Own())
        return np.array([Own()] * len(x)) if (x == 99).any() else x

    def read(self, data, kind):
        raise ModelError(Own()) if data else ValueError("\udcff" * 9999)

    def write(self, tokens):
        return b"", Kind.TEXT


class Kinds:
    """A classifier of three numbers, for whoever sends them as text."""

    labels = "first", "second", "third"
    token = np.zeros(3, np.float32)

    def forward(self, x):
        assert x.dtype == np.float32, x.dtype
        if (x == 13).any():
            raise ValueError("thirteen")
        return np.where(x == 99, np.nan, x) / x.sum(-1, keepdims=True)

    def read(self, data, kind):
        if data == b"slow":
            time.sleep(0.2)
        if data == b"exit":
            raise SystemExit(3)
        if data == b"object":
            return [None]
        if kind != "text/plain":
            raise ValueError(f"send text/plain, not {kind}")
        return np.array([float(word) for word in data.split()])

    def write(self, tokens):
        if tokens.size == 1:
            return {1: "no bytes", 2: (b"", "text/plain\r\nX: y"), 3: 1 / 0 if tokens[0] == 3 else None}[int(tokens[0])]
        return b"|".join(b"%g" % t for t in tokens.ravel().tolist()), "text/plain; charset=utf-8"


class Ids:
    """Level 1: the next id is the last one more."""

    vocab_size, max_model_len, eos_ids = 32, 64, (20,)
    default_params = SamplingParams(temperature=0, max_tokens=3)

    def logits(self, tokens, lengths):
        return np.eye(32, dtype=np.float32)[(tokens[:, -1] + 1) % 32] * 50


class Strange:
    """Feed-forward, and its labels are none."""

    labels = 1, 2

    def forward(self, x):
        return x


class Misfit:
    """Its stop token is not of its tokens' shape."""

    token, stop_token = np.zeros(4, int), [0, 0]

    def forward(self, tokens):
        return tokens[:, -1]


class Walks:
    """A random walk: seeds and inputs of requests cross the pipe."""

    draws, max_model_len, token = 1, 1000, np.float64(0)
    example_prompts = ([0.0, 1.0, 2.0],)
    inputs = {"scale": Input(()), "drift": Input((), "float64", per="position")}  # noqa: RUF012

    def forward(self, tokens, normal, scale, drift):
        return tokens[:, -1] + scale * normal[:, 0] + drift[:, -1]


class Shifted(SumPaged):
    """Level 2: an input is added to each token before it is cached."""

    inputs = {"shift": Input((), "int32")}  # noqa: RUF012

    def __init__(self):
        super().__init__(NumpyBackend())

    def step(self, params, cache, x):
        return super().step(params, cache, replace(x, tok=(x.tok + x.inputs["shift"][x.seg]) % 10))
