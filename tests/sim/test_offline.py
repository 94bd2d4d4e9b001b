"""Runs offline: all requests are there at the start, in the file's order or composed."""

import json
import random

import numpy as np
import pytest

from hibachi.engine.scheduler.policy import Fair, Fcfs
from hibachi.engine.simulator.feed import Arrivals, Offline
from hibachi.engine.simulator.simulate import Setup, simulate
from hibachi.engine.simulator.steptime import StepTime
from hibachi.engine.simulator.trace import Trace
from hibachi.errors import ConfigError

from ..lib.command import called
from .test_replay import lru_hit_rate

SIZE = 64  # tokens of a piece


def trace_of(prompt, output, keys=None, apart=1.0):
    """Requests `apart` seconds from each other."""
    at = np.rint(np.arange(len(prompt)) * apart * 10**12).astype(np.int64)
    numbers = np.array(prompt, np.int64), np.array(output, np.int64), np.zeros(len(prompt), np.int64)
    return Trace("own", at, *numbers, None, keys, SIZE if keys else 0)


def conversations(n, seed=0):
    """Requests that go on where others were, some pieces each, and come back after long."""
    rng = random.Random(seed)
    talks, fresh, keys = [()], iter(range(10**9)), []
    for _ in range(n):
        keys.append((rng.choice(talks) if rng.random() < 0.8 else ()) + tuple(next(fresh) for _ in range(3)))
        talks.append(keys[-1])
    prompt = [SIZE * len(own) - rng.randrange(SIZE) for own in keys]
    return trace_of(prompt, [rng.randint(1, 9) for _ in keys], keys)


@pytest.fixture(scope="module")
def talks():
    return conversations(600)


@pytest.mark.parametrize("rows, points", [(1, 0.01), (8, 0.03)])
def test_composed_finds_what_an_lru_finds_in_sorted_prompts(talks, rows, points):
    blocks = 150
    found = {
        order: simulate(talks, Setup(max_num_seqs=rows, num_blocks=blocks, order=order), StepTime(), Fcfs).summary()[
            "hit_rate"
        ]
        for order in ("file", "composed")
    }
    sorted_ = lru_hit_rate(talks, blocks, sorted(range(len(talks)), key=lambda i: talks.keys[i]))
    assert abs(found["composed"] - sorted_) < points
    if rows == 1:
        assert abs(found["file"] - lru_hit_rate(talks, blocks, range(len(talks)))) < points
    assert found["file"] < sorted_ - 0.2


def test_in_the_order_of_the_file_all_are_there_at_the_start():
    trace = trace_of([4] * 5, [3, 1, 2, 2, 1], apart=100.0)
    run = simulate(
        trace, Setup(max_num_seqs=2, order="file"), StepTime(step=1.0, token=0, row=0, position=0, pair=0), Fcfs
    )
    assert run.times("started").tolist() == [0, 0, 1, 3, 3] and run.times("last").tolist() == [3, 1, 3, 5, 4]
    assert run.summary()["most_waiting"] == 2  # no more than 4 are held, and 2 of them run


def test_composed_starts_the_longest_first_where_nothing_is_shared():
    trace = trace_of([64, 64, 68, 64], [3, 5, 1, 6], keys=[(7,), (7,), (8,), (7,)])
    setup = Setup(max_num_seqs=1, num_blocks=99, order="composed", enable_prefix_caching=False)
    time = StepTime(step=1.0, token=0, row=0, position=0, pair=0)
    assert simulate(trace, setup, time, Fcfs).times("started").tolist() == [12, 6, 11, 0]
    rolling = Setup(max_num_seqs=1, order="composed", window=2)
    assert simulate(trace, rolling, time, Fcfs).times("started").tolist() == [5, 0, 14, 8]


def test_leaps_change_nothing(talks):
    setup = Setup(max_num_seqs=4, num_blocks=150, order="composed", window=50)
    fast, slow = (simulate(talks, setup, StepTime(), Fcfs, fast=fast).outcome for fast in (True, False))
    assert fast.last.tolist() == slow.last.tolist() and fast.hit_tokens == slow.hit_tokens and fast.steps == slow.steps


def test_feeds():
    trace = trace_of([4] * 3, [3, 9, 3], apart=1e-12)
    feed = Arrivals(trace)
    assert [feed.take(1, 99) for _ in range(3)] == [0, 1, None] and feed.next == 2
    assert feed.take(2, 99) == 2 and feed.next == float("inf") and feed.take(10**12, 0) is None
    for order, expected in (("file", [0, 1, 2]), ("composed", [1, 0, 2])):
        offline = Offline(trace, 2, order, 10, lambda i: None)
        assert offline.take(0, 2) is None and offline.next == float("inf")
        assert [offline.take(0, 1) for _ in range(4)] == [*expected, None]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"order": "best"}, "order must be one of file, composed, or None; got 'best'"),
        ({"order": "file", "scheduling_policy": "fair"}, "scheduling_policy='fcfs' with order='file'; got 'fair'"),
        (
            {"order": "composed", "max_num_queued_reqs": 5},
            "expected no max_num_queued_reqs with order='composed'; got 5",
        ),
        ({"order": "composed", "window": 0}, "window must be at least 1; got 0"),
    ],
)
def test_what_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        simulate(trace_of([4], [4]), Setup(**wrong), StepTime(), Fair if "policy" in wrong else Fcfs)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command(capsys, tmp_path):
    file, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    lines = [
        {"timestamp": 1000 * i, "input_length": 1030, "output_length": 2, "hash_ids": [i % 20, 100 + i % 40, 1000 + i]}
        for i in range(80)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    hits = {}
    for order in (["file"], ["composed"], ["composed", "--window", 30]):
        status, text, err = called(
            capsys, "sim", file, "--order", *order, "--max-num-seqs", 1, "--num-blocks", 9, "--json", out
        )
        assert (status, err) == (0, "")
        assert text.startswith(f"trace.jsonl: 80 requests at once, order {order[0]}, 82,400 tokens of prompts")
        data = json.loads(out.read_text())
        [run] = data["runs"]
        assert data["trace"]["seconds"] == 0
        assert (run["setup"]["order"], run["setup"]["window"]) == (order[0], order[-1] if order[2:] else 4096)
        hits[len(order), order[0]] = run["hit_rate"]
    assert hits[1, "file"] < 0.1 < hits[3, "composed"] < hits[1, "composed"] and hits[1, "composed"] > 0.5
