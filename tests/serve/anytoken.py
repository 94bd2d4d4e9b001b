"""Models whose tokens are no text, for `hibachi serve`: opened by this file's path."""

import os
import time

import numpy as np

from hibachi import Input, NumpyBackend
from hibachi.testing.toys import SumOwn


class Codebooks:
    """Four codebooks: what comes next is each number of the last token, and its place more, modulo 16."""

    token, stop_token = np.zeros(4, np.int32), np.full(4, 9, np.int32)

    def forward(self, x):
        return (x[:, -1] + np.arange(4, dtype=np.int32)) % 16


class Rising:
    """Real values that stop at a threshold; half a unit a step. Bytes of type audio/pcm are its own."""

    token = np.float32(0)

    @staticmethod
    def stop_rule(batch):
        return batch >= 3

    def forward(self, x):
        return x[:, -1] + np.float32(0.5)

    def read(self, data, kind):
        if kind != "audio/pcm":
            raise ValueError(f"expected audio/pcm; got {kind}")
        if len(data) % 2:
            raise ValueError("half a sample is missing")
        return (np.frombuffer(data, "<i2") / 2).astype(np.float32)

    def write(self, tokens):
        return (tokens * 2).astype("<i2").tobytes(), "audio/pcm"


class Classifier:
    """Is the sum of three numbers small or large?"""

    labels, token = ["small", "large"], np.zeros(3, np.float32)

    def forward(self, x):
        total = x.sum(axis=1)
        return np.stack([-total, total], axis=1)

    def write(self, output):
        return self.labels[int(output.argmax())].encode(), "text/plain"


class Several:
    """Feed-forward: three arrays for each input."""

    feedforward, token = True, np.zeros(3, np.float32)

    def forward(self, x):
        return {"ids": x.argsort(axis=1), "scores": (np.sort(x, axis=1), x[:, 0])}


class Next:
    """Level 1: token ids, of which 9 is the last."""

    vocab_size, max_model_len, eos_ids = 10, 64, (9,)

    def logits(self, tokens, lengths):
        return np.eye(10, dtype=np.float32)[(tokens[:, -1] + 1) % 10] * 50


class Slow:
    """Counts, a hundredth of a second a step. At -1 it fails, at 1,000 it returns NaN."""

    token = np.zeros(256, np.float32)
    pause = float(os.environ.get("ANYTOKEN_PAUSE", "0.01"))

    def forward(self, x):
        time.sleep(self.pause)
        last = x[:, -1]
        if (last == -1).any():
            raise RuntimeError("it fails at -1")
        return np.where(last >= 1000, np.float32(np.nan), last + 1)


class Double:
    """Tokens are float32, and what it returns float64."""

    token = np.zeros(2, np.float32)

    def forward(self, x):
        return x[:, -1].astype(np.float64) + 0.1


class Constant:
    """Its `write` writes into what it gets."""

    token = np.float32(0)

    def forward(self, x):
        return np.full(len(x), 5, np.float32)

    def write(self, tokens):
        tokens *= 2
        return b"%d" % tokens[0], "text/plain"


class Wide:
    """The same token again, a quarter of a megabyte."""

    token = np.zeros(1 << 16, np.float32)

    def forward(self, x):
        return x[:, -1]


class Sung:
    """Level 1, frames of two codebooks: of all ids the same logits, but of the second codebook only even ones."""

    vocab_size, codebooks, max_model_len = 8, 2, 64

    def logits(self, tokens, lengths):
        flat = np.zeros((len(tokens), 2, 8), np.float32)
        flat[:, 1, 1::2] = -np.inf
        return flat


class Spoken:
    """Level 0, real values [2]: what is drawn, and the request's speaker and the hour of the last position."""

    token, draws = np.zeros(2, np.float32), 1
    inputs = {"speaker": Input((2,)), "hours": Input((), "int32", per="position")}  # noqa: RUF012

    def forward(self, tokens, normal, speaker, hours):
        return np.stack([normal[:, 0], speaker.sum(axis=1) + hours[:, -1]], axis=1)


class Remembers(SumOwn):
    """Ids, with a cache of its own."""

    deterministic = False

    def __init__(self):
        super().__init__(NumpyBackend())
