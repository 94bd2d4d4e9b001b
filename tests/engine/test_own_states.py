"""Models whose past is states, without `lengths`: rows of any length share a call where that is right."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hibachi import AutoregressiveBatchInference, OwnCache, SamplingParams

from .models import PATIENCE

PROMPTS = [[(5 * i + n) % 47 + 3 for i in range(n)] for n in (3, 8, 20, 8, 11, 4)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Sums:
    """The next token is the sum of all before it, and of how many they are in row `counts_of`, None: in none."""

    past, vocab_size, counts_of = OwnCache(), 50, None

    def __init__(self):
        self.rows = []

    def step(self, tokens, past):
        self.rows.append(len(tokens))
        before, seen = (0, 0) if past is None else (past["sum"], past["seen"])
        total, seen = before + tokens.sum(axis=1), seen + np.full(len(tokens), tokens.shape[1])
        more = 0 if self.counts_of is None else seen[self.counts_of]
        return np.eye(50, dtype=np.float32)[(total + more) % 50], {"sum": total, "seen": seen}


class CountsOfFirst(Sums):
    """Right for rows of one length."""

    counts_of = 0


class Ids(CountsOfFirst):
    """Returns ids itself, of which a trial cannot tell what is right."""

    vocab_size, example_prompts = None, (np.arange(3, dtype=np.int32),)

    def step(self, tokens, past):
        logits, past = super().step(tokens, past)
        return logits.argmax(axis=1).astype(np.int32), past


def right(prompt, counts):
    tokens = [*prompt]
    for _ in range(8):
        tokens.append((sum(tokens) + len(tokens) * counts) % 50)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("make", (Sums, CountsOfFirst, Ids))
def test_rows_of_any_length_share_a_call_where_that_is_right(make):
    model = make()
    with AutoregressiveBatchInference(model, backend="numpy", max_model_len=64, max_num_seqs=6) as engine:
        model.rows.clear()
        prompts = PROMPTS if model.vocab_size else [np.array(prompt, np.int32) for prompt in PROMPTS]
        streams = [engine.run(p, GREEDY) if model.vocab_size else engine.run(p, max_tokens=8) for p in prompts]
        assert [[*map(int, s.collect())] for s in streams] == [right(prompt, make is not Sums) for prompt in PROMPTS]
    assert (max(model.rows) > 2) == (make is Sums)  # two prompts are of one length


@pytest.mark.parametrize("make, warned", [(CountsOfFirst, 1), (Sums, 0)])
def test_calls_of_one_row_are_warned_of_once_where_lengths_are_others(make, warned, caplog):
    model, both = make(), threading.Event()
    both.set()
    inner = model.step
    model.step = lambda tokens, past: inner(tokens, past) if both.wait(PATIENCE) else None
    with AutoregressiveBatchInference(model, backend="numpy", max_model_len=256) as engine:
        both.clear()  # however long the second one takes to come
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        streams = [engine.run(PROMPTS[2][:n], params) for n in (3, 8)]
        both.set()
        for stream in streams:
            stream.collect()
    assert caplog.text.count("CountsOfFirst.step: most calls have one row, as rows of one length only") == warned
