"""Log-probabilities: the definition for one row, and what is computed of many at once."""

import numpy as np
import pytest

from hibachi.engine.sampling.logprobs import Likely, likely, logprobs, named

from .libraries import INF, every_library, host
from .reference import log_softmax


def test_logprobs_are_the_top_and_the_token_by_probability():
    row = np.array([1.0, 3.0, 2.0, 3.0, -INF], np.float32)
    logs = log_softmax(row.tolist())
    got = logprobs(row, token=0, n=2)
    assert list(got) == [1, 3, 0]
    np.testing.assert_allclose(list(got.values()), [logs[1], logs[3], logs[0]], rtol=1e-6)
    assert list(logprobs(row, token=3, n=1)) == [1, 3]
    assert list(logprobs(row, token=1, n=1)) == [1]
    assert list(logprobs(row, token=2, n=0)) == [2]
    assert list(logprobs(row, token=4, n=99)) == [1, 3, 2, 0, 4]
    assert logprobs(row, token=4, n=0) == {4: -INF}


@every_library
@pytest.mark.parametrize("vocab", [12, 10_000])
def test_many_rows_at_once_give_the_same(library, vocab):
    rng = np.random.default_rng(0)
    rows = rng.normal(0, 4, (20, vocab)).astype(np.float32)
    rows[3, 20:] = -INF
    tokens = rng.integers(0, vocab, 20).astype(np.int32)
    k = min(16, vocab)
    some = host(library, likely, rows, tokens, k=k)
    for i, token in enumerate(tokens.tolist()):
        for n in (0, 1, 4, 11):
            expected = logprobs(rows[i], token, n)
            got = named(some, i, token, n, vocab)
            assert list(got) == list(expected)
            np.testing.assert_allclose(list(got.values()), list(expected.values()), rtol=3e-6, atol=1e-6)


@every_library
def test_of_the_token_alone_no_list_is_needed(library):
    rows, tokens = np.array([[0.0, 1.0, 2.0]] * 3, np.float32), np.array([2, 0, 1], np.int32)
    run = library.compile(lambda x, t: likely(library, x, t, k=0))
    some = run(library.put(rows), library.put(tokens))
    assert some.values is None and some.ids is None
    some = Likely(*map(library.get, some[:3]), None, None)
    logs = log_softmax([0.0, 1.0, 2.0])
    for i, token in enumerate(tokens.tolist()):
        assert named(some, i, token, 0, 3) == pytest.approx({token: logs[token]}, abs=1e-6)


@every_library
def test_ties_at_the_end_of_the_list_take_the_whole_row(library):
    """Of equals the lower id is named; libraries list any of them."""
    row = np.zeros(50, np.float32)
    row[7] = 1
    some = host(library, likely, row[None], np.array([30], np.int32), k=16)
    assert named(some, 0, 30, 5, 50) is None
    assert list(named(some, 0, 30, 1, 50)) == [7, 30]
    assert list(logprobs(row, 30, 5)) == [7, 0, 1, 2, 3, 30]


@every_library
def test_a_row_that_is_not_finite_gives_nan_and_harms_nobody(library):
    rows = np.array([[0.0, 1.0, 0.5], [np.nan, 0, 0], [INF, 0, 0], [-INF, -INF, -INF]], np.float32)
    some = host(library, likely, rows, np.zeros(4, np.int32), k=2)
    assert list(named(some, 0, 0, 1, 3)) == [1, 0]
    assert all(np.isnan(named(some, i, 0, 0, 3)[0]) for i in (1, 2, 3))
