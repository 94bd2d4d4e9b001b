"""Random numbers by seed and position, and the seeds of several continuations."""

import numpy as np
import pytest

from hibachi.engine.sampling.uniforms import fork, uniform, uniforms


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


def test_the_first_continuation_has_the_seed_itself():
    assert [fork(seed, 0) for seed in (0, 7, 2**64 - 1)] == [0, 7, 2**64 - 1]


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_other_continuations_have_numbers_of_their_own(seed):
    """Not the seed's numbers, nor each other's, at another position."""
    seeds = [fork(seed, i) for i in range(50)]
    assert len({*seeds}) == 50 and all(0 <= s < 2**64 for s in seeds)
    numbers = uniforms(np.repeat(np.array(seeds, np.uint64), 200), np.tile(np.arange(200), 50)).reshape(50, 200)
    assert len(np.unique(numbers)) > 50 * 200 - 20  # of 2^23 cells: a few fall together by chance
    assert abs(np.corrcoef(numbers[:5]) - np.eye(5)).max() < 0.25


def test_seeds_that_differ_by_multiples_of_64_bits_are_one():
    assert fork(3, 4) == fork(3 + 2**64, 4)


def test_one_number_is_the_same_as_among_many():
    seeds = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
    for seed in seeds.tolist():
        for position in (0, 1, 77, 10**6):
            (among,) = uniforms(np.array([seed], np.uint64), np.array([position]))
            assert np.float32(uniform(seed, position)) == among
