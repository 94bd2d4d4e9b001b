"""What a past of a model's own holds besides arrays: understood where rows join, or refused by its place."""

from __future__ import annotations

import enum
import sys
import threading
from collections import deque

import numpy as np
import pytest

from hibachi import AutoregressiveBatchInference, ConfigError, InvalidModelOutput, OwnCache, SamplingParams

PROMPTS = [[(7 * i + 3) % 47 + 3 for i in range(n)] for n in (3, 8, 20, 40)]


def answers(model, backend, prompts, *, together, **options):
    """Tokens and log-probabilities of each."""
    greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    with AutoregressiveBatchInference(
        model, backend=backend, max_model_len=64, deterministic=False, **options
    ) as engine:
        streams, tokens = [], []
        for prompt in prompts:
            streams.append(engine.run(prompt, greedy))
            if not together:
                tokens.append(streams[-1].collect())
        tokens = [s.collect() for s in streams] if together else tokens
        return [(t, [max(step.values()) for step in s.logprobs]) for t, s in zip(tokens, streams, strict=True)]


class Sums:
    """The next token is the sum of all before it. `data(past, rows, width)`: what else is in its past."""

    past = OwnCache()
    vocab_size = 50

    def __init__(self, data):
        self.data = data

    def step(self, tokens, lengths, past):
        seen = tokens if past is None else np.concatenate([past["seen"], tokens], axis=1)
        rows, width = seen.shape
        real = np.arange(width) >= width - lengths[:, None]
        logits = np.eye(self.vocab_size, dtype=np.float32)[(seen * real).sum(axis=1) % self.vocab_size]
        if past is not None and "width" in past:
            assert past["width"] == seen.shape[1] - tokens.shape[1] and past["deep"][0][1]["rows"] == rows + 2
        return logits, {"seen": seen} | self.data(past, rows, width)


NAN = float("nan")
UNDERSTOOD = {
    "what equals itself by its parts": lambda past, rows, width: {"a": np.array([NAN]), "b": deque([np.arange(3)])},
    "counters": lambda past, rows, width: {"width": width, "deep": ((0, {"rows": rows + 2}),)},
    "constants": lambda past, rows, width: {"a": [True, None, "x", {1, 2}, deque([3]), np.arange(3), np.float32(2)]},
    "what has no value": lambda past, rows, width: {"lock": threading.Lock(), "file": sys.__stderr__},
}
REFUSED = {
    "a counter of calls": (lambda past, rows, width: {"n": past["n"] + 1 if past else 1}, r"\['n'\] is 1, and 2"),
    "a flag": (lambda past, rows, width: {"went_on": past is not None}, r"\['went_on'\] is False, and True"),
    "a list of a number a row": (lambda past, rows, width: {"l": [width] * rows}, r"\['l'\]\[0\]|\['l'\]\[2\]"),
    "a list that grows": (lambda past, rows, width: {"l": [0] * width}, r"\['l'\]\[3\] is None, and 0"),
    "a set": (lambda past, rows, width: {"s": {width}}, r"\['s'\] is"),
    "another library's array": (lambda past, rows, width: {"s": deque([rows])}, r"\['s'\] is"),
    "a share": (lambda past, rows, width: {"s": 1 / width}, r"\['s'\] is"),
    "an array without rows": (lambda past, rows, width: {"n": np.array([width])}, r"\['n'\] is"),
    "two at once": (lambda past, rows, width: {"n": 2 * width}, r"\['n'\] is 6, and 8 with 4 tokens and not 3"),
}


@pytest.mark.parametrize("what", UNDERSTOOD)
def test_numbers_that_count_and_what_stays_the_same_are_understood(what):
    model = Sums(UNDERSTOOD[what])
    alone, beside = (answers(model, "numpy", PROMPTS, together=together) for together in (False, True))
    assert [tokens for tokens, _ in alone] == [tokens for tokens, _ in beside]


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_stay_one_rows_is_refused_by_its_place(what):
    data, said = REFUSED[what]
    with pytest.raises(ConfigError, match=rf"Sums.step: the past's ({said}).*DynamicCache"):
        AutoregressiveBatchInference(Sums(data), backend="numpy", max_model_len=64)


class Key(enum.Enum):
    WIDTH = 0


@pytest.mark.parametrize("key", (Key.WIDTH, np.int64(3)))
def test_a_number_by_a_key_that_cannot_be_written_is_refused(key):
    with pytest.raises(ConfigError, match=r"counts, so it must be found again: expected keys that"):
        AutoregressiveBatchInference(Sums(lambda past, rows, width: {key: width}), backend="numpy", max_model_len=64)


@pytest.mark.parametrize("later, got", [(lambda width: {"n": 5}, "5"), (lambda width: {}, "None")])
def test_a_number_that_stops_counting_fails_the_request_by_its_place(later, got):
    model = Sums(lambda past, rows, width: {"n": width} if width < 12 else later(width))
    with AutoregressiveBatchInference(model, backend="numpy", max_model_len=64) as engine:
        stream = engine.run(PROMPTS[1], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        with pytest.raises(InvalidModelOutput, match=rf"'n'\] counts its positions .* expected 12; got {got}\."):
            stream.collect()


class Marked(dict):
    """A dict of another class."""


class Shares(Sums):
    """One array in two places; from 12 positions on in a dict of another class."""

    def step(self, tokens, lengths, past):
        logits, new = super().step(tokens, lengths, past)
        new |= {"also": new["seen"]}
        return logits, Marked(new) if new["seen"].shape[1] > 12 else new


class Net:
    """Says nothing of itself yet, and raises another error than a missing attribute's."""

    def __getattr__(self, name):
        raise RuntimeError("not loaded")


class Breaks(Sums):
    chunk_size, net = 20, Net()

    def step(self, tokens, lengths, past):
        if past is not None and (lengths > 20).any() and (tokens.shape[1] > 1 or len({*lengths.tolist()}) > 1):
            raise ValueError("20 is the most")
        return super().step(tokens, lengths, past)


@pytest.mark.parametrize(
    "make, told",
    [
        (Shares, []),
        (
            Breaks,
            ["it failed (ValueError: 20 is the most) where several tokens cross 20", "a row beside one longer than"],
        ),
    ],
)
def test_odd_caches_are_right_and_the_log_says_what_they_cost(make, told, caplog):
    model = make(lambda past, rows, width: {})
    found = answers(model, "numpy", PROMPTS, together=True, max_num_batched_tokens=16)
    assert [tokens for tokens, _ in found] == [[next_of(prompt, i) for i in range(8)] for prompt in PROMPTS]
    assert all(words in caplog.text for words in told) and bool(told) == ("as " in caplog.text)


def next_of(prompt, i):
    """What comes after the prompt and i more."""
    text = [*prompt]
    for _ in range(i + 1):
        text.append(sum(text) % 50)
    return text[-1]
