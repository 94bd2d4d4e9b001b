"""The works: the same for everybody, of the sizes that were promised, and files that say what is wrong with them."""

import json
from itertools import pairwise

import pytest

from benchmarks.bench import work
from hibachi.errors import ConfigError
from hibachi.testing.bench.work import TimedRequest

VOCABULARY = 5000


@pytest.mark.parametrize("name", work.NAMES)
def test_the_same_seed_gives_the_same_work(name):
    assert work.make(name, VOCABULARY, seed=3) == work.make(name, VOCABULARY, seed=3)
    assert work.make(name, VOCABULARY, seed=3) != work.make(name, VOCABULARY, seed=4)


@pytest.mark.parametrize("name", work.NAMES)
def test_another_turn_has_other_tokens_in_the_same_lengths(name):
    one, two = (work.make(name, VOCABULARY, turn=turn) for turn in (1, 2))
    assert [(r.arrival, len(r.prompt), r.max_tokens) for r in one] == [
        (r.arrival, len(r.prompt), r.max_tokens) for r in two
    ]
    assert all(a.prompt[:16] != b.prompt[:16] for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", work.NAMES)
def test_every_token_is_in_the_vocabulary(name):
    assert {t for r in work.make(name, 7) for t in r.prompt} == {3, 4, 5, 6}


def test_sizes():
    many = [work.make("W1", VOCABULARY, seed=seed) for seed in range(20)]
    prompt, new = (sum(each) / (20 * 64) for each in zip(*map(work.totals, many), strict=True))
    assert prompt == pytest.approx(77, abs=4) and new == pytest.approx(69, abs=4)
    assert all(len(requests) == 64 and not any(r.arrival for r in requests) for requests in many)
    w2 = work.make("W2", VOCABULARY)
    assert {tuple(r.prompt[:512]) for r in w2} == {tuple(w2[0].prompt[:512])}
    assert len({tuple(r.prompt[512:]) for r in w2}) == 64 and {len(r.prompt) for r in w2} == {528}
    [w4] = work.make("W4", VOCABULARY)
    assert (len(w4.prompt), w4.max_tokens) == (128, 128)
    w5 = work.make("W5", VOCABULARY)
    assert [(len(r.prompt), r.max_tokens, r.arrival) for r in w5] == [(1024, 16, 0.0)] * 16


def test_arrivals_have_the_rate_that_is_asked_for():
    requests = work.at_rate(work.make("W3", VOCABULARY, requests=4000), 8.0)
    assert requests[0].arrival == 0 and requests[-1].arrival == pytest.approx(500, rel=0.05)
    gaps = sorted(b.arrival - a.arrival for a, b in pairwise(requests))
    assert gaps[2000] == pytest.approx(0.693 / 8, rel=0.1)  # the median of an exponential distribution
    assert not any(r.arrival for r in work.at_rate(requests, None))


def test_a_file_holds_what_was_written(tmp_path):
    requests = work.make("W3", VOCABULARY, requests=5)
    work.write(requests, tmp_path / "w.jsonl")
    assert work.read(tmp_path / "w.jsonl", VOCABULARY) == requests


def test_a_file_is_read_in_the_order_of_arrival(tmp_path):
    work.write([TimedRequest(0, 2.0, [5], 1), TimedRequest(1, 1.0, [6], 1)], tmp_path / "w.jsonl")
    assert [r.id for r in work.read(tmp_path / "w.jsonl")] == [1, 0]


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"prompt": []}, "at least one"),
        ({"prompt": [1.5]}, "a list of token ids"),
        ({"prompt": [True]}, "a list of token ids"),
        ({"prompt": [VOCABULARY]}, "token ids below 5000"),
        ({"prompt": "hello"}, "a list of token ids"),
        ({"max_tokens": 0}, "an integer >= 1"),
        ({"arrival": -1}, "a number >= 0"),
        ({"arrival": float("nan")}, "a number >= 0"),
        ({"more": 1}, "an object with arrival, id, max_tokens, prompt"),
    ],
)
def test_a_bad_line_is_named(tmp_path, change, expected):
    good = {"id": 0, "arrival": 0.0, "prompt": [1], "max_tokens": 1}
    (tmp_path / "w.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(good | change) + "\n")
    with pytest.raises(ConfigError, match=f"line 2: expected .*{expected}"):
        work.read(tmp_path / "w.jsonl", VOCABULARY)


def test_nothing_is_no_work(tmp_path):
    (tmp_path / "w.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no request"):
        work.read(tmp_path / "w.jsonl")
    with pytest.raises(ConfigError, match="one of W1"):
        work.make("W9", VOCABULARY)
    with pytest.raises(ConfigError, match="more than 3 tokens"):
        work.make("W1", 3)
