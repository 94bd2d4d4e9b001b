"""Sampling: the random numbers, the distribution, the filters, and the same draw on every library."""

import array_api_strict
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hibachi.decode.logprobs import logprobs
from hibachi.decode.sampling import How, greedy, row_finite, sample
from hibachi.decode.uniforms import uniforms
from hibachi.tensor.array_backend import ArrayBackend
from hibachi.tensor.numpy_backend import NumpyBackend
from hibachi_jax import JaxBackend
from hibachi_torch import TorchBackend

NUMPY = NumpyBackend()
LIBRARIES = {
    "numpy": NUMPY,
    "torch": TorchBackend("cpu"),
    "jax": JaxBackend("cpu"),
    "array_api_strict": ArrayBackend(array_api_strict),
}
INF = float("inf")

every_library = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


def draw(logits, temperature, top_k, top_p, u, *, filtered=True, library=NUMPY):
    """`sample` on host arrays; scalars hold for all rows."""
    logits = np.asarray(logits, np.float32)
    columns = [
        (temperature, np.float32),
        (top_k, np.int32),
        (top_p, np.float32),
        (0, np.float32),
        (1, np.float32),
        (u, np.float32),
    ]
    arrays = [np.broadcast_to(np.asarray(c, dtype), len(logits)).copy() for c, dtype in columns]
    run = library.compile(lambda x, how: sample(library, x, how, filtered=filtered, typical=False))
    return library.get(run(library.put(logits), How(*map(library.put, arrays))))


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The slow and obvious definition: probabilities [V] in float64."""
    p = np.exp((logits - np.max(logits)) / temperature, dtype=np.float64)
    p /= p.sum()
    if 0 < top_k < len(p):
        p[p < sorted(p)[-top_k]] = 0
        p /= p.sum()
    if top_p < 1:
        kept = 0.0
        for i in sorted(range(len(p)), key=lambda i: -p[i]):
            if kept >= top_p:
                break
            kept, smallest = kept + p[i], p[i]
        p[p < smallest] = 0
        p /= p.sum()
    return p


# ---- random numbers ------------------------------------------------------------------------------------------


def splitmix64(seed):
    """Vigna's splitmix64.c, step by step."""
    x, mask = seed, 2**64 - 1
    while True:
        x = (x + 0x9E3779B97F4A7C15) & mask
        z = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


@pytest.mark.parametrize("seed", [0, 1234567, 2**64 - 1])
def test_uniforms_are_splitmix64_by_position(seed):
    numbers = splitmix64(seed)
    expected = [next(numbers) for _ in range(100)]
    if seed == 1234567:
        assert expected[:3] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    u = uniforms(np.full(100, seed, np.uint64), np.arange(100, dtype=np.int32))
    assert u.dtype == np.float32
    assert u.tolist() == [((z >> 41) + 0.5) / 2**23 for z in expected]


def test_uniforms_stay_inside_the_interval_and_are_even():
    u = uniforms(np.arange(200_000, dtype=np.uint64), np.full(200_000, 7))
    assert u.min() > 0 and u.max() < 1
    counts = np.histogram(u, bins=50, range=(0, 1))[0]
    assert abs(counts - 4000).max() < 4.5 * np.sqrt(4000)
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.01  # neighbouring seeds are no neighbours


# ---- the distribution ----------------------------------------------------------------------------------------

LOGITS = np.array([0.3, -1.0, 2.0, 0.3, -INF, 1.2, -3.0, 0.0], np.float32)
SETTINGS = [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.8), (1.3, 5, 0.7), (1.0, 1, 0.01)]


@pytest.mark.parametrize("temperature, top_k, top_p", SETTINGS)
def test_draws_follow_the_distribution(temperature, top_k, top_p):
    n = 40_000
    u = uniforms(np.full(n, 11, np.uint64), np.arange(n))
    drawn = draw(np.tile(LOGITS, (n, 1)), temperature, top_k, top_p, u)
    counts = np.bincount(drawn, minlength=8)
    expected = n * distribution(LOGITS, temperature, top_k, top_p)
    assert (counts[expected == 0] == 0).all()
    some = expected > 0
    chi2 = ((counts - expected)[some] ** 2 / expected[some]).sum()
    assert chi2 < 30  # for 7 degrees of freedom: 1 in 10,000


rows = st.lists(st.sampled_from([-INF, -4.0, -1.0, 0.0, 0.25, 0.5, 3.0]), min_size=2, max_size=12).filter(
    lambda row: max(row) > -INF
)


@settings(max_examples=300)
@given(
    row=rows,
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    top_k=st.integers(-1, 13),
    top_p=st.sampled_from([1e-6, 0.1, 0.37, 0.5, 0.83, 0.99, 1.0]),
    u=st.integers(0, 2**23 - 1).map(lambda i: (i + 0.5) / 2**23),
)
def test_filters_keep_what_the_definition_keeps(row, temperature, top_k, top_p, u):
    p = distribution(np.array(row), temperature, top_k, top_p)
    [token] = draw([row], temperature, top_k, top_p, u)
    assert p[token] > 0
    before = p[:token].sum()
    assert before - 1e-5 < u < before + p[token] + 1e-5


def test_ties_with_the_last_token_kept_are_kept():
    row, u = [[0.0, 1.0, 0.0, 0.0, -5.0]], np.linspace(0.01, 0.99, 50)
    for filters in (dict(top_k=2, top_p=1.0), dict(top_k=0, top_p=0.5)):
        assert {int(draw(row, 1.0, u=x, **filters)[0]) for x in u} == {0, 1, 2, 3}


def test_temperature_zero_takes_the_first_maximum():
    rows = [[0, 2, 2, 1], [5, 1, 5, 5], [-INF, -INF, -1, -INF]]
    assert draw(rows, 0.0, 2, 0.5, 0.9).tolist() == [1, 0, 2]
    assert draw(rows, [0.0, 1e-6, 1e-6], 1, 1.0, 0.9).tolist() == [1, 3, 2]  # not zero: drawn among the tied


@every_library
def test_the_ends_of_the_interval_select_tokens_that_can_come(library):
    row = [[-INF, -INF, 0.0, -200.0, 1.0, -INF]]
    for u, token in ((0.5 / 2**23, 2), ((2**23 - 0.5) / 2**23, 4)):
        for filtered in (False, True):
            assert draw(row, 1.0, 0, 1.0, u, filtered=filtered, library=library).tolist() == [token]
            assert draw(row, 1.0, 2, 0.999, u, library=library).tolist() == [token]


# ---- rows and libraries --------------------------------------------------------------------------------------


def batch(n=400, vocab=300, seed=0):
    """Logits, temperatures, filters and numbers of n rows; every third row has no filter, some are greedy."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (n, vocab)).astype(np.float32)
    free = np.arange(n) % 3 == 0
    top_k = np.where(free, 0, rng.integers(-1, vocab + 10, n))
    top_p = np.where(free, 1.0, rng.uniform(0.05, 1.0, n))
    temperature = np.where(np.arange(n) % 7 == 0, 0.0, rng.uniform(0.2, 2.0, n))
    return logits, temperature, top_k, top_p, uniforms(np.full(n, 5, np.uint64), np.arange(n)), free


@every_library
def test_a_row_does_not_depend_on_the_filters_of_others(library):
    *args, free = batch()
    mixed = draw(*args, library=library)[free]
    logits, temperature, _, _, u = (a[free] for a in args)
    alone = draw(logits, temperature, 0, 1.0, u, filtered=False, library=library)
    assert mixed.tolist() == alone.tolist()


@pytest.mark.parametrize("name", ["torch", "jax", "array_api_strict"])
def test_libraries_agree_but_for_borders(name):
    logits, temperature, top_k, top_p, u, _ = batch()
    here = draw(logits, temperature, top_k, top_p, u)
    there = draw(logits, temperature, top_k, top_p, u, library=LIBRARIES[name])
    differ = np.flatnonzero(here != there)
    assert len(differ) <= 2
    for i in differ:
        p = np.cumsum(distribution(logits[i], temperature[i], top_k[i], top_p[i]))
        assert abs(p - u[i]).min() < 1e-5


@every_library
def test_a_result_is_int32_on_the_library(library):
    assert draw([[0.0, 1.0]], 1.0, 0, 1.0, 0.5, library=library).dtype == np.int32
    ids = greedy(library, library.put(np.array([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]], np.float32)))
    assert library.get(ids).tolist() == [1, 0] and library.get(ids).dtype == np.int32


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_half_precision_logits_are_fine(name):
    library = LIBRARIES[name]
    logits = library.put(batch()[0], "bfloat16")
    exact = library.get(library.float32(logits))
    t, k, p, u = np.float32(batch()[1]), np.int32(batch()[2]), np.float32(batch()[3]), batch()[4]
    how = How(*map(library.put, (t, k, p, np.zeros_like(p), np.ones_like(p), u)))
    ids = library.get(sample(library, logits, how))
    assert (ids == draw(exact, t, k, p, u, library=library)).all()


@every_library
def test_rows_without_finite_logits_are_flagged(library):
    nan = float("nan")
    rows = [[0.0, 1.0], [nan, 1.0], [1.0, nan], [INF, 0.0], [-INF, -INF], [-INF, 0.0], [INF, -INF]]
    finite = library.get(row_finite(library, library.put(np.array(rows, np.float32))))
    assert finite.tolist() == [True, False, False, False, False, True, False]


@every_library
def test_a_bad_row_leaves_its_neighbours_alone(library):
    logits, temperature, top_k, top_p, u, _ = batch(n=20)
    good = draw(logits, temperature, top_k, top_p, u, library=library)
    logits[7], logits[8, 3], logits[9, 0] = -INF, float("nan"), INF
    rest = np.delete(np.arange(20), [7, 8, 9])
    got = draw(logits, temperature, top_k, top_p, u, library=library)
    assert got[rest].tolist() == good[rest].tolist()
    assert ((got >= 0) & (got < logits.shape[1])).all()


# ---- log-probabilities ---------------------------------------------------------------------------------------


def test_logprobs_are_the_top_and_the_token_by_probability():
    row = np.array([1.0, 3.0, 2.0, 3.0, -INF], np.float32)
    logs = np.log(
        np.exp(row.astype(np.float64)) / np.exp(row.astype(np.float64)).sum(), where=row > -INF, out=row * 1.0
    )
    got = logprobs(row, token=0, n=2)
    assert list(got) == [1, 3, 0]
    np.testing.assert_allclose(list(got.values()), logs[[1, 3, 0]], rtol=1e-6)
    assert list(logprobs(row, token=3, n=1)) == [1, 3]
    assert list(logprobs(row, token=1, n=1)) == [1]
    assert list(logprobs(row, token=2, n=0)) == [2]
    assert list(logprobs(row, token=4, n=99)) == [1, 3, 2, 0, 4]
    assert logprobs(row, token=4, n=0) == {4: -INF}


def test_logprobs_of_large_logits_are_finite():
    got = logprobs(np.array([1e4, 1e4 - 1], np.float32), token=1, n=2)
    np.testing.assert_allclose(list(got.values()), [-0.3132617, -1.3132617], rtol=1e-6)
