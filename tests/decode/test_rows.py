"""Rows in parts: the same as over the whole row, whatever its length."""

import numpy as np
import pytest

from hibachi.engine.sampling.rows import argmax, invert, pick, top_of_row, total

from .libraries import INF, LIBRARIES, every_library, host

# Below and above the length from which rows are cut; a multiple of the parts and not; a prime.
LENGTHS = [1, 100, 4096, 9192, 10007]


def rows(size, n=4, seed=0):
    return np.random.default_rng(seed).normal(size=(n, size)).astype(np.float32)


@every_library
def test_pick_takes_from_each_row_its_own(library):
    x, at = rows(7), np.array([[0, 6], [3, 3], [1, 0], [5, 2]], np.int32)
    np.testing.assert_array_equal(host(library, pick, x, at), np.take_along_axis(x, at, axis=1))


@every_library
@pytest.mark.parametrize("size", LENGTHS)
def test_argmax_is_the_first_of_the_largest(library, size):
    x = rows(size, n=6)
    x[1] = 2.5
    x[2, [size // 3, size - 1]] = 9
    x[3, -1] = 9
    x[4, :] = -INF
    x[4, size // 2] = -50
    found = host(library, argmax, x)
    assert found.dtype == np.int32 and found.tolist() == x.argmax(axis=1).tolist()


@every_library
@pytest.mark.parametrize("size", LENGTHS)
def test_top_of_row_are_the_largest(library, size):
    x = rows(size)
    x[1, :-1] = -INF
    for k in {min(k, size) for k in (1, 3, 64, 100)}:
        values, ids = host(library, top_of_row, x, k=k)
        np.testing.assert_array_equal(values, -np.sort(-x, axis=1)[:, :k])
        np.testing.assert_array_equal(np.take_along_axis(x, ids.astype(int), axis=1), values)
        assert all(len({*row}) == k for row in ids.tolist())


@every_library
@pytest.mark.parametrize("size", LENGTHS)
def test_totals_are_the_sums(library, size):
    x = abs(rows(size))
    np.testing.assert_allclose(host(library, total, x), x.sum(axis=1, dtype=np.float64), rtol=1e-5)


@every_library
@pytest.mark.parametrize("size", LENGTHS)
def test_invert_finds_the_place_at_which_the_share_is_passed(library, size):
    n = 200
    rng = np.random.default_rng(1)
    weights = np.where(rng.random((n, size)) < 0.5, 0, rng.random((n, size)) ** 9).astype(np.float32)
    weights[:, 0] += weights.sum(axis=1) == 0
    u = ((rng.integers(0, 2**23, n) + 0.5) / 2**23).astype(np.float32)
    u[:2] = 0.5 / 2**23, (2**23 - 0.5) / 2**23
    at = host(library, invert, weights, u)
    sums = np.cumsum(weights, axis=1, dtype=np.float64)
    share = sums / sums[:, -1:]
    place = np.arange(n)
    assert (weights[place, at] > 0).all()
    assert (share[place, at] > u - 1e-5).all()
    assert (share[place, at] - weights[place, at] / sums[:, -1] < u + 1e-5).all()


@every_library
@pytest.mark.parametrize("size", [50, 10007])
@pytest.mark.parametrize("only", [0, 0.4, 1])
def test_invert_finds_the_only_place_with_a_weight(library, size, only):
    place = round(only * (size - 1))
    weights = np.zeros((3, size), np.float32)
    weights[:, place] = 1e-30, 1, 1e30
    for u in (0.5 / 2**23, 0.5, (2**23 - 0.5) / 2**23):
        assert host(library, invert, weights, np.full(3, u, np.float32)).tolist() == [place] * 3


@pytest.mark.parametrize("name", ["numpy", "torch", "array_api_strict"])  # XLA's order of summing depends on the shape
def test_a_row_is_summed_alike_alone_and_among_others(name):
    """Bit for bit: a request must get the same tokens whoever shares its batch."""
    library = LIBRARIES[name]
    x = abs(rows(40_000, n=9))
    u = np.linspace(0.1, 0.9, 9).astype(np.float32)
    together = host(library, total, x), host(library, invert, x, u)
    for i in range(9):
        one = slice(i, i + 1)
        assert host(library, total, x[one])[0] == together[0][i]
        assert host(library, invert, x[one], u[one])[0] == together[1][i]
