"""What an engine counts as it steps: against what it did, here and in another process."""

from __future__ import annotations

import pickle
import threading
import time

import numpy as np
import pytest

from hibachi import LLM, AutoregressiveBatchInference, SamplingParams
from hibachi.engine.runners.meters import KEPT, STEP_TIME, Drafted, Histogram, Meters, Proposals, Steps
from hibachi.engine.speculation.config import MOST, SpeculativeConfig
from hibachi.llm.remote.llm import RemoteLLM

from ..lib.waits import until

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


# ---- histograms ------------------------------------------------------------------------------------------------------


def test_a_value_is_counted_where_it_is_at_most_the_bound():
    h = Histogram((1, 2, 5))
    for value in (0, 1, 1.5, 2, 5, 5.1):
        h.add(value)
    h.add(2, times=3)
    assert h.counts == [2, 5, 1, 1] and h.count == 9
    assert h.sum == pytest.approx(0 + 1 + 1.5 + 2 + 5 + 5.1 + 6)


def test_bounds_stay_as_they_are():
    """Prometheus keeps a series for each: with other bounds, a quantile over both versions of a server is wrong."""
    steps = Steps()
    assert steps.rows.bounds == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    assert steps.tokens.bounds == (*steps.rows.bounds, 2048, 4096, 8192, 16384)
    assert steps.occupancy.bounds == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    assert Drafted().kept(0).bounds == KEPT == (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
    for seconds in (steps.seconds, steps.model, steps.host, Meters().grammars):
        assert seconds.bounds == STEP_TIME
    assert (len(STEP_TIME), STEP_TIME[0], STEP_TIME[-1]) == (28, 5e-5, 10)


def test_as_many_proposals_as_are_usual_are_told_apart_and_the_most_are_in_a_bound():
    usual = SpeculativeConfig().num_speculative_tokens
    assert KEPT[: usual + 1] == (*range(usual + 1),) and KEPT[-1] == MOST


def test_meters_can_be_pickled():
    meters = Meters(failed=3, memory=(1, 2))
    meters.decode.add(3, 4, 8, 0.5, 0.25)
    other = pickle.loads(pickle.dumps(meters))
    assert other.decode.tokens.sum == 4 and other.decode.host.sum == 0.25 and other.failed == 3
    assert other.host_share == 0.5 and other.padding_share == 0.0 and Meters().host_share == 0.0
    assert len(pickle.dumps(meters)) < 4096  # four times a second


# ---- an engine -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[LLM, RemoteLLM], ids=["own", "child"])
def texts(request):
    pytest.importorskip("tokenizers")
    with request.param("tiny", max_num_seqs=8, max_num_batched_tokens=64) as found:
        yield found


def settled(texts):
    """Figures in which all that has ended is counted: a child tells them now and then."""
    seen = []

    def still():
        seen.append((texts.stats(), texts.meters().computed))
        return len(seen) > 40 and len(set(map(repr, seen[-40:]))) == 1

    until(still)
    return texts.stats(), texts.meters()


def phases(meters):
    return meters.prefill, meters.decode


def test_rows_tokens_and_times_are_those_of_the_steps(texts):
    before, was = settled(texts)
    prompts = [[i + 3] * n for i, n in enumerate((40, 3, 7, 100, 2, 5, 9, 11, 4, 6))]
    texts.generate(prompts, GREEDY)
    stats, meters = settled(texts)

    def gained(name, of=lambda h: h.sum):
        return [of(getattr(s, name)) - of(getattr(w, name)) for s, w in zip(phases(meters), phases(was), strict=True)]

    new = 10 * 12
    assert stats.new_tokens - before.new_tokens == new
    assert sum(gained("rows", lambda h: h.count)) == stats.steps - before.steps
    # Each token but the last of each is computed once: prompts in chunks, and what was generated.
    assert sum(gained("tokens")) == sum(map(len, prompts)) + new - 10
    assert meters.computed - was.computed == sum(gained("tokens")) and meters.padding == was.padding
    assert sum(gained("occupancy")) == pytest.approx(sum(gained("rows")) / 8)
    assert gained("tokens")[1] == gained("rows")[1]  # one for each row
    assert gained("tokens")[0] >= sum(map(len, prompts))
    for seconds, model, host in zip(gained("seconds"), gained("model"), gained("host"), strict=True):
        assert seconds == pytest.approx(model + host) and min(seconds, model, host) > 0
    assert sum(gained("seconds")) == pytest.approx(stats.step_seconds - before.step_seconds)
    assert 0 < meters.host_share < 1
    assert meters.limit == 8 and meters.block_size == 16 and meters.failed == 0


# ---- padding ---------------------------------------------------------------------------------------------------------


class Longest:
    """Level 1: the most likely token is the length; remembers what it was shown."""

    vocab_size = 64

    def __init__(self):
        self.shapes, self.all_are_there = [], threading.Event()

    def logits(self, tokens, lengths):
        self.all_are_there.wait(20)
        self.shapes.append(tokens.shape)
        return np.eye(self.vocab_size)[lengths]


def test_shorter_rows_that_are_filled_up_are_padding():
    model = Longest()
    with AutoregressiveBatchInference(
        model, max_model_len=60, backend="numpy", padding_token=0, deterministic=False
    ) as engine:
        streams = [engine.run(np.arange(1, n + 1), max_tokens=6) for n in (3, 10, 20)]
        model.all_are_there.set()
        for stream in streams:
            stream.collect()
        meters = engine.meters()
    shown = sum(rows * width for rows, width in model.shapes)
    wanted = sum(n + i for n in (3, 10, 20) for i in range(6))
    assert meters.computed == shown and meters.padding == shown - wanted > 0
    assert meters.padding_share == pytest.approx((shown - wanted) / shown)
    assert meters.block_size == 0  # no cache


# ---- what goes wrong -------------------------------------------------------------------------------------------------


class Fails:
    """Level 0. Memory runs out in the first step, after a while."""

    def __init__(self):
        self.left = 2  # a request is tried again before its step fails

    def forward(self, tokens):
        if self.left:
            self.left -= 1
            time.sleep(0.2)
            raise MemoryError
        return tokens[:, -1] + 1


def test_steps_that_failed_are_counted_and_their_time_is_nobodys():
    with AutoregressiveBatchInference(Fails(), max_model_len=60, backend="numpy") as engine:
        assert len(engine.run(np.arange(5), max_tokens=4).collect()) == 4
        meters, steps = engine.meters(), engine.stats().steps
    assert meters.failed == 1
    assert meters.prefill.rows.count + meters.decode.rows.count == steps
    assert meters.prefill.model.sum + meters.decode.model.sum < 0.2


def test_checks_are_not_counted():
    pytest.importorskip("tokenizers")
    with LLM("tiny", deterministic=True) as llm:
        assert llm.meters().computed == 0
        assert llm.selfcheck() and llm.meters().computed == 0


def test_steps_that_overlap_are_measured_too():
    pytest.importorskip("tokenizers")
    with LLM("tiny", overlap=True, deterministic=False) as llm:
        llm.generate([[5, 6], [7]], GREEDY)
        stats, meters = llm.stats(), llm.meters()
    steps = [*phases(meters)]
    assert sum(s.rows.count for s in steps) == stats.steps
    assert 0 < sum(s.model.sum for s in steps) <= sum(s.seconds.sum for s in steps)


def test_proposals_by_who_made_them():
    drafted = Drafted()
    drafted.note("ngram", 4, 2)
    drafted.note("forced", 3, 3)
    kept = pickle.loads(pickle.dumps(drafted.copy()))
    drafted.note("ngram", 1, 0)
    assert (kept.steps, kept.proposed, kept.accepted, kept.by_position) == (2, 7, 5, [2, 2, 1])
    assert kept.by == {"ngram": Proposals(1, 4, 2, [1, 1]), "forced": Proposals(1, 3, 3, [1, 1, 1])}
    assert drafted.by["ngram"] == Proposals(2, 5, 2, [1, 1])
