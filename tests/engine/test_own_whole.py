"""Models that forget their past where several tokens follow it: their prompts come whole."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from hibachi import AutoregressiveBatchInference, ConfigError, OwnCache, SamplingParams

PROMPTS = [[(5 * i + n) % 47 + 3 for i in range(n)] for n in (3, 8, 40, 21, 8, 33)]
SMALL = dict(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Sums:
    """The next token is the sum of all before it, of which it keeps a state; with `forgets` only of the last chunk."""

    past, vocab_size, forgets = OwnCache(), 50, True

    def step(self, tokens, lengths, past):
        before = 0 if past is None or (self.forgets and tokens.shape[1] > 1) else past["sum"]
        total = before + tokens.sum(axis=1)
        return np.eye(50, dtype=np.float32)[total % 50], {"sum": total}


def right(prompt):
    tokens = [*prompt]
    for _ in range(8):
        tokens.append(sum(tokens) % 50)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("forgets", (True, False))
def test_prompts_come_whole_where_chunks_would_be_forgotten(forgets, caplog):
    caplog.set_level(logging.WARNING)
    model = Sums()
    model.forgets = forgets
    with AutoregressiveBatchInference(model, backend="numpy", **SMALL) as engine:
        streams = [engine.run(prompt, GREEDY) for prompt in PROMPTS]
        assert [s.collect() for s in streams] == [right(prompt) for prompt in PROMPTS]
    assert ("Sums.step: prompts come whole, not in chunks, as outputs are others" in caplog.text) == forgets


class Once(Sums):
    """Some calls spoil the past that they are given, and fail."""

    calls = -80  # those of the start

    def step(self, tokens, lengths, past):
        self.calls += 1
        if past is not None and self.calls > 0 and self.calls % 3 == 0:
            past["sum"][:] = 7
            raise RuntimeError("sometimes")
        return super().step(tokens, lengths, past)


def test_a_call_that_fails_once_harms_nobody():
    with AutoregressiveBatchInference(Once(), backend="numpy", **SMALL) as engine:
        streams = [engine.run(prompt, GREEDY) for prompt in PROMPTS]
        assert [s.collect() for s in streams] == [right(prompt) for prompt in PROMPTS]


class Refuses(Sums):
    def step(self, tokens, lengths, past):
        if past is not None and tokens.shape[1] > 1:
            raise ValueError("one at a time")
        return super().step(tokens, lengths, past)


def test_prompts_come_whole_where_a_chunk_is_refused(caplog):
    with AutoregressiveBatchInference(
        Refuses(), backend="numpy", max_model_len=64, max_num_batched_tokens=16
    ) as engine:
        assert [engine.run(prompt, GREEDY).collect() for prompt in PROMPTS] == [right(prompt) for prompt in PROMPTS]
    assert "it failed where several tokens followed a past: ValueError: one at a time" in caplog.text


class Leaks(Sums):
    """A row gets something of its neighbours, far more than rounding."""

    forgets = False

    def step(self, tokens, lengths, past):
        logits, past = super().step(tokens, lengths, past)
        return logits + 0.02 * (len(tokens) > 2), past


def test_what_is_no_rounding_is_refused():
    with pytest.raises(
        ConfigError, match=r"Leaks.step must return the same outputs whoever shares the call.* by up to 0.02"
    ):
        AutoregressiveBatchInference(Leaks(), backend="numpy", max_model_len=64)
