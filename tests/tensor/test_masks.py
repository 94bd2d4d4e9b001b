"""Packed bits of tokens, as the host has them."""

import numpy as np
import pytest

from hibachi import ArrayBackend, NumpyBackend, load_backend
from hibachi.backend.masks import ALL, checked, forbid, forbidden, packed, words


@pytest.mark.parametrize("size", (1, 31, 32, 33, 64, 1000))
def test_a_token_has_its_bit_and_no_other(size):
    ids = sorted({0, size // 2, size - 1})
    bits = packed(ids, size)
    assert bits.dtype == np.uint32 and bits.shape == (words(size),) and words(size) * 32 - size in range(32)
    assert [t for t in range(size) if bits[t // 32] >> np.uint32(t % 32) & 1] == ids
    assert np.bitwise_count(bits).sum() == len(ids)
    assert np.flatnonzero(~forbidden(bits[None], (1, size))[0]).tolist() == ids


def test_tokens_are_forbidden_in_place_and_no_others():
    bits = np.full((2, words(70)), ALL, np.uint32)
    forbid(bits[1], (0, 31, 32, 69, 31))
    found = forbidden(bits, (2, 70))
    assert np.flatnonzero(found[1]).tolist() == [0, 31, 32, 69] and not found[0].any()


@pytest.mark.parametrize("name", ("numpy", "torch", "jax"))
def test_what_every_library_can_do_is_what_each_does(name):
    """`ArrayBackend`'s own way, which the classes of these libraries replace where it is slow."""
    backend = load_backend(name).plain()
    x, size = np.random.default_rng(0).normal(size=(4, 75)).astype(np.float32), 75
    bits = np.random.default_rng(1).integers(0, 2**32, (4, words(size)), dtype=np.uint32)
    want = NumpyBackend(native=False).keep_bits(x.copy(), bits)
    np.testing.assert_array_equal(backend.get(ArrayBackend.keep_bits(backend, backend.put(x.copy()), bits)), want)
    np.testing.assert_array_equal(backend.get(backend.keep_bits(backend.put(x.copy()), bits)), want)
    np.testing.assert_array_equal(want, np.where(forbidden(bits, x.shape), np.float32(-np.inf), x))


def test_ids_come_in_any_order_and_more_than_once():
    np.testing.assert_array_equal(packed((7, 40, 7, 0), 41), packed([0, 7, 40], 41))


@pytest.mark.parametrize("bits", (np.zeros((2, 2), np.int32), np.zeros((2, 1), np.uint32), np.zeros((2, 2), bool)))
def test_other_bits_are_refused(bits):
    with pytest.raises(ValueError, match=r"expected bits uint32 \[2, 2\], 32 tokens a word, as .* are \[2, 40\]; got"):
        checked(bits, (2, 40))


def test_bits_that_lie_in_another_way_are_the_same_bits():
    bits = np.arange(12, dtype=np.uint32).reshape(4, 3)
    for way in (np.asfortranarray(bits), np.repeat(bits, 2, axis=1)[:, ::2], bits.tobytes()):
        given = np.frombuffer(b"0" + way, np.uint8)[1:].view(np.uint32).reshape(4, 3) if isinstance(way, bytes) else way
        found = checked(given, (4, 70))
        np.testing.assert_array_equal(found, bits)
        assert found.flags.c_contiguous and found.flags.aligned
