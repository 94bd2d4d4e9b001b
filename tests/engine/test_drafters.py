"""Drafters of a user's own, in a thread of their own: good ones save steps, and no bad one harms a request."""

import logging
import os
import threading

import numpy as np
import pytest

from hibachi import AutoregressiveBatchInference, ConfigError, NumpyBackend, SamplingParams
from hibachi.engine.speculation import drafting as askers
from hibachi.engine.speculation import find
from hibachi.engine.speculation.drafter_thread import DrafterThread
from hibachi.engine.speculation.howmany import HowMany
from hibachi.llm.remote.llm import RemoteLLM
from hibachi.testing.toys import SumPaged, expected

GREEDY = SamplingParams(temperature=0, max_tokens=20)


class Right:
    """Proposes what comes."""

    def __init__(self, vocab_size=10):
        self.threads, self.keys, self.over = set(), set(), set()

    def propose(self, keys, tokens, most):
        self.threads.add(threading.current_thread())
        self.keys |= set(keys)
        return [np.array(expected(row.tolist(), n)) for row, n in zip(tokens, most, strict=True)]

    def forget(self, key):
        self.over.add(key)


class Does:
    """Calls a function for what it returns; counts the calls."""

    def __init__(self, what):
        self.what, self.calls = what, 0

    def propose(self, keys, tokens, most):
        self.calls += 1
        return self.what(tokens, most)


def engine(drafter, k=4, **config):
    return AutoregressiveBatchInference(
        SumPaged(NumpyBackend()),
        max_model_len=64,
        overlap=False,
        speculative_config={"method": drafter, "num_speculative_tokens": k, **config},
    )


def answers(e, n=6):
    streams = [e.run([i, 2], GREEDY) for i in range(n)]
    return [s.collect() for s in streams]


WANT = [expected([i, 2], 20) for i in range(6)]


@pytest.fixture
def patient(monkeypatch):
    """Steps wait for whatever comes in half a minute: a busy machine decides nothing."""
    monkeypatch.setattr(askers, "LEAST_WAIT", 30.0)
    monkeypatch.setattr(askers, "MOST_WAIT", 30.0)


def test_a_drafter_saves_steps_from_a_thread_of_its_own(patient):
    mine = Right()
    with engine(mine) as e:
        assert answers(e) == WANT
        assert e.stats().steps < 12 and e.core.drafting.drafted.accepted > 60
        aside = e.core.drafting.asker.aside
    (thread,) = mine.threads
    assert thread.name == "hibachi-drafter" and thread.daemon
    thread.join(30)
    assert not thread.is_alive() and aside.off
    assert len(mine.keys) == 6 and mine.over >= mine.keys


def test_an_installed_one_is_made_for_each_engine(patient, monkeypatch):
    made = []
    monkeypatch.setattr("hibachi.common.installed.entry_points", lambda group: [Point(made)])
    for n in (1, 2):
        with engine("right") as e:
            assert answers(e) == WANT
            assert e.core.drafting.drafted.accepted
        assert len(made) == n
    with pytest.raises(ConfigError, match="method must be one of ngram, draft_model, right"):
        engine("left")


class Point:
    name, value = "right", "theirs:Right"

    def __init__(self, made):
        self.made = made

    def load(self):
        def make(vocab_size):
            assert vocab_size == 10
            self.made.append(Right())
            return self.made[-1]

        return make


def raises(error):
    def what(tokens, most):
        raise error

    return what


BAD = {
    "raises": raises(ValueError("no idea")),
    "ends its thread": raises(SystemExit()),
    "interrupts": raises(KeyboardInterrupt()),
    "none": lambda tokens, most: None,
    "too few rows": lambda tokens, most: [],
    "too many rows": lambda tokens, most: [[1]] * (len(most) + 1),
    "floats": lambda tokens, most: [np.ones(n) for n in most],
    "matrices": lambda tokens, most: [np.ones((n, 2), int) for n in most],
    "texts": lambda tokens, most: ["ab" for _ in most],
    "ragged": lambda tokens, most: [[[1], [2, 3]] for _ in most],
}
STRANGE = {
    "negative": lambda tokens, most: [[-1, 2] for _ in most],
    "beyond the vocabulary": lambda tokens, most: [[10, 2] for _ in most],
    "beyond int32": lambda tokens, most: [[2**40] for _ in most],
    "too many": lambda tokens, most: [[1] * 10_000 for _ in most],
    "nothing": lambda tokens, most: [[] for _ in most],
    "wrong": lambda tokens, most: [[(expected(t.tolist(), 1)[0] + 1) % 10] for t in tokens],
    "writes into its input": lambda tokens, most: [t.fill(0) or [1] for t in tokens],
}


@pytest.mark.parametrize("what", BAD.values(), ids=BAD)
def test_a_bad_one_is_off_after_three_times_and_harms_nobody(patient, caplog, what):
    mine = Does(what)
    with engine(mine) as e:
        assert answers(e) == WANT
        assert e.core.drafting.asker.aside.off and mine.calls == 3
        assert e.stats().failed == 0
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


@pytest.mark.parametrize("what", STRANGE.values(), ids=STRANGE)
def test_proposals_that_are_of_no_use_harm_nobody(patient, what):
    with engine(Does(what)) as e:
        assert answers(e) == WANT
        assert not e.core.drafting.asker.aside.off and e.stats().failed == 0
        e.core.scheduler.check()


def test_one_that_hangs_is_waited_for_once_and_closing_does_not_wait(monkeypatch, caplog):
    gate, waits = threading.Event(), []
    take = DrafterThread.take
    monkeypatch.setattr(DrafterThread, "take", lambda self, wait: waits.append(wait) or take(self, wait))
    mine = Does(lambda tokens, most: gate.wait(60))
    try:
        with engine(mine) as e:
            assert answers(e) == WANT
            assert mine.calls == 1 and len(waits) == 3 and max(waits) <= 0.005
        assert [r.getMessage() for r in caplog.records if "is off" in r.getMessage()]
    finally:
        gate.set()


def test_with_auto_one_whose_time_does_not_pay_is_asked_now_and_then():
    """Steps of a ms, and a drafter that takes as long and is never right."""
    how = HowMany()
    for tokens in (1, 2, 3, 4, 5):
        for _ in range(3):
            how.costs.note(tokens, 1e-3 + 1e-5 * tokens)
    assert how.pays(1, [4], [0.6], 0.0) and how.pays(1, [4], [0.9], 1e-3)
    assert not how.pays(1, [4], [0.1], 1e-3) and not how.pays(1, [4], [0.9], 1.0)
    assert not how.pays(1, [0], [0.9], 0.0) and not how.pays(100, [4], [0.9], 0.0)

    aside = DrafterThread(Right(), 10, "mine")
    aside.seconds = 1e-3
    mine = askers.Apart(aside, how, "mine")
    row = askers.DraftingRow(object(), None, 4, 1)
    for _ in range(200):
        how.records.note(row.seq, 1, 0, "mine")
    asked = [mine._pays([row], 1) for _ in range(2 * askers.RETRY)]
    assert [i for i, yes in enumerate(asked) if yes] == [askers.RETRY - 1, 2 * askers.RETRY - 1]
    aside.seconds = 0.0
    for _ in range(200):
        how.records.note(row.seq, 1, 1, "mine")
    assert mine._pays([row], 1)


def test_an_engine_in_another_process_takes_names_only():
    with pytest.raises(ConfigError, match="the method of speculative_config is given by its name"):
        RemoteLLM("tiny", speculative_config={"method": Right(), "num_speculative_tokens": 2})


def test_a_name_reaches_an_engine_in_another_process(monkeypatch, tmp_path):
    info = tmp_path / "habit-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: habit\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{find.GROUP}]\nhabit = habit:Habit\n")
    (tmp_path / "habit.py").write_text(
        "import pathlib\n"
        "class Habit:\n"
        "    def __init__(self, vocab_size):\n"
        "        self.told = pathlib.Path(__file__).with_name('told')\n"
        "    def propose(self, keys, tokens, most):\n"
        "        self.told.write_text('asked')\n"
        "        return [row[:1] for row in tokens]\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(tmp_path)
    config = {"method": "habit", "num_speculative_tokens": 2}
    with RemoteLLM("tiny", backend="numpy", speculative_config=config) as llm:
        assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=5, ignore_eos=True))[0].token_ids) == 5
    assert (tmp_path / "told").read_text() == "asked"
