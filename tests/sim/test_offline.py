"""Runs offline: all requests are there at the start, in the file's order or composed."""

import json
import random
from collections import OrderedDict

import numpy as np
import pytest

from benchmarks.bench.work import make
from hibachi.engine.scheduler.policy import Fair, Fcfs
from hibachi.engine.simulator.feed import Arrivals, Offline
from hibachi.engine.simulator.simulate import Setup, simulate
from hibachi.engine.simulator.steptime import StepTime
from hibachi.engine.simulator.trace import Trace
from hibachi.errors import ConfigError

from ..lib.command import called

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


def lru_hit_rate(trace, capacity, order):
    """Of the tokens of prompts, those that a cache of so many pieces has when they are computed in this order."""
    cache, hit = OrderedDict(), 0
    for i in order:
        prompt, full = int(trace.prompt[i]), trace.keys[i][: int(trace.prompt[i]) // SIZE]
        known = next((n for n, key in enumerate(full) if key not in cache), len(full))
        hit += min(known, (prompt - 1) // SIZE) * SIZE
        for key in reversed(full):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hit / int(trace.prompt.sum())


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


def test_a_rolling_window_finds_more_than_batches_of_its_size(talks):
    """It waits for what joins a group, where a batch is over."""
    window, blocks = 100, 150
    rolling = simulate(
        talks, Setup(max_num_seqs=1, num_blocks=blocks, order="composed", window=window), StepTime(), Fcfs
    )
    order = [
        i
        for start in range(0, len(talks), window)
        for i in sorted(range(start, start + window), key=lambda i: talks.keys[i])
    ]
    assert rolling.summary()["hit_rate"] > lru_hit_rate(talks, blocks, order)


def test_the_places_are_busy_to_the_end():
    """Requests as of W1, each at most 256 tokens in and out; prompts are computed within the steps of others."""
    work = make("W1", 1000, requests=1000)
    trace = trace_of([len(r.prompt) for r in work], [r.max_tokens for r in work])
    least = max(int(trace.output.max()), int(trace.output.sum()) / 64)
    steps = {
        order: simulate(
            trace, Setup(max_num_seqs=64, max_num_batched_tokens=2048, order=order), StepTime(), Fcfs
        ).outcome.steps
        for order in ("file", "composed")
    }
    assert least <= steps["composed"] <= 1.02 * least < 1.1 * least < steps["file"]


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


def test_what_cannot_be_served_is_passed_over():
    trace = trace_of([4, 90, 4, 90], [3] * 4)
    for order in ("file", "composed"):
        run = simulate(trace, Setup(max_num_seqs=1, max_model_len=20, order=order), StepTime(), Fcfs)
        assert run.outcome.refused == {"PromptTooLong": 2} and run.done.tolist() == [True, False, True, False]


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


@pytest.mark.parametrize(
    "args, status, message",
    [
        (["--order", "best"], 2, "invalid choice: 'best'"),
        (["--window", "9"], 2, "--window goes with --order composed"),
        (["--order", "file", "--window", "9"], 2, "--window goes with --order composed"),
        (["--order", "composed", "--window", "0"], 1, "window must be at least 1; got 0"),
        (["--order", "composed", "--scheduling-policy", "fair"], 1, "expected scheduling_policy='fcfs'"),
        (["--order", "file", "--max-num-queued-reqs", "5"], 1, "expected no max_num_queued_reqs"),
    ],
)
def test_what_the_command_refuses(capsys, args, status, message):
    got, out, err = called(capsys, "sim", "--synthetic", "9", *args)
    assert got == status and message in err and not out and "Traceback" not in err
