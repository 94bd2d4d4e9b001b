"""What steps with proposals cost, and what is made of it."""

import time

import pytest

from hibachi import AutoregressiveBatchInference, NumpyBackend
from hibachi.testing.bench.speculation import BATCHES, ROOM, SIZES, gains, step_costs, told
from hibachi.testing.toys import SumPaged


class Slow(SumPaged):
    """Half a millisecond for each token. sizes: of the steps of single rows."""

    def __init__(self, backend):
        super().__init__(backend)
        self.sizes = []

    def step(self, params, cache, x):
        self.sizes.append((len(x.tok), len(x.last)))
        time.sleep(0.0005 * len(x.tok))
        return super().step(params, cache, x)


def test_each_size_is_measured_with_outputs_of_all_its_tokens():
    model = Slow(NumpyBackend())
    options = dict(max_model_len=ROOM, max_num_seqs=1, cache_tokens=ROOM, overlap=False, deterministic=False)
    with AutoregressiveBatchInference(model, **options) as e:
        costs = step_costs(e)
        assert e.core.drafting is None
    assert tuple(costs) == SIZES
    assert {(n, n) for n in SIZES} <= set(model.sizes)
    assert all(seconds >= 0.0005 * n for n, seconds in costs.items())
    assert 0.0005 * 64 <= costs[64] < 3 * 0.0005 * 64


def test_what_pays():
    flat = gains(dict.fromkeys(SIZES, 0.01))  # as many tokens as there are, at no cost
    assert tuple(flat) == BATCHES
    for each, gain in flat.values():
        assert each == 8 and gain == pytest.approx(sum(0.8**n for n in range(9)))
    assert set(gains({n: 0.001 * n for n in SIZES}).values()) == {(0, 1.0)}  # nothing is gained
    # As on a processor: the same up to 4 tokens, then by the token.
    found = gains(dict(zip(SIZES, (0.0102, 0.0108, 0.0114, 0.015, 0.026, 0.052, 0.1), strict=True)))
    assert found[1][1] > 2.5 > found[2][1] > found[4][1] > found[8][1] >= 1.0


def test_it_is_told_in_a_small_table():
    text = told(dict.fromkeys(SIZES, 0.00125))
    assert "tokens        1       2" in text and "ms         1.25    1.25" in text
    assert "     1  4.3x the tokens per second, 8 proposals a request" in text
    assert told({n: 0.001 * n for n in SIZES}).count("no proposals") == 4
