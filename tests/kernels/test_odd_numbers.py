"""Bits of kernels for numbers that models should not have, and for ties: they are written down here, as those of
test_numerics.py are, and were computed before the kernels were made fast on AVX2.
"""

from __future__ import annotations

import numpy as np
import pytest

from ..tensor.native import DTYPES, WRITTEN, computed, digest, every_variant, parameters, skip_without

skip_without()
from hibachi.backend.numpy_backend import Int8NumpyBackend, NativeNumpyBackend  # noqa: E402

SMALL = np.array([0, -0.0, 1e-45, -1e-45, 1e-39, 1e-30, 1, -1, 88, 89, -87, -88], np.float32)
LARGE = np.array([3.4e38, -3.4e38], np.float32)
INFINITE = np.array([np.inf, -np.inf, np.nan], np.float32)
NANS = np.array([0x7FC00001, 0xFFC00000, 0x7FA00000], np.uint32).view(np.float32)  # of other bits
ALL = np.concatenate((SMALL, LARGE, INFINITE, NANS))
COLUMNS = (1, 15, 16, 17, 100, 511, 512, 513, 1000, 4099)
EACH = 48  # rows of each number of columns

DRAWN = {
    "best": "ea78b03ac78a0e1f",
    "mass": "3f2ab10922c9544f",
    "draw": "8a5c0107fa9086d9",
}
COMPUTED = {
    "float32": "5700f5f13d710e22",
    "bfloat16": "62c1945b3dbefe29",
    "float32 int8": "6e26ce73c4ff758b",
    "bfloat16 int8": "858ea99547c4ce5d",
}


def planted(x, numbers, one_in, seed=0):
    """x with some of these numbers in one place of so many."""
    random = np.random.default_rng([seed, x.size])
    x = np.array(x, np.float32)
    places = random.integers(0, one_in, x.shape) == 0
    x[places] = numbers[random.integers(0, len(numbers), int(places.sum()))]
    return x


def logits(columns):
    """Rows of eight kinds, one after another."""
    random = np.random.default_rng(columns)
    whole = random.integers(-(2**14), 2**14, (EACH, columns))
    x = (whole / 2**10).astype(np.float32)
    with np.errstate(over="ignore"):
        x[1::8] = random.integers(-3, 4, x[1::8].shape)  # many are equal
        x[2::8] = planted(x[2::8], np.concatenate((SMALL, LARGE)), 20)
        x[3::8] = planted(x[3::8], INFINITE[1:2], 3)  # as masks leave them
        x[4::8] = planted(x[4::8], ALL, 300)
        x[5::8] *= np.float32(2.0**122)
        x[6::8] = whole[6::8] * np.float64(2.0**-149)  # all are denormal
        x[7::8] = random.integers(0, 2**32, x[7::8].shape, np.uint32).view(np.float32)
    return x


def drawn(backend):
    """{operation: {columns and output: array}}"""
    found = {name: {} for name in DRAWN}
    for columns in COLUMNS:
        x = backend.put(logits(columns))
        how = [backend.put(t) for t in parameters(EACH, seed=columns, names=WRITTEN)]
        for name, outputs in (
            ("best", backend.best(x)),
            ("mass", backend.mass(x)),
            ("draw", backend.draw(x, how)),
        ):
            found[name] |= {f"{columns} {i}": backend.get(t) for i, t in enumerate(outputs)}
    return found


def test_what_is_drawn_from_odd_logits_is_written_down(monkeypatch):
    for backend in every_variant(NativeNumpyBackend, monkeypatch):
        assert {name: digest(arrays)[:16] for name, arrays in drawn(backend).items()} == DRAWN, backend.library


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", (NativeNumpyBackend, Int8NumpyBackend))
def test_what_operations_make_of_odd_numbers_is_written_down(kind, dtype, monkeypatch):
    name = f"{dtype} int8" if kind is Int8NumpyBackend else dtype
    for each in every_variant(kind, monkeypatch):
        one = computed(each, dtype, lambda x: planted(x, SMALL, 20, seed=1))
        two = computed(each, dtype, lambda x: planted(x, ALL[len(SMALL) :], 400, seed=2))
        assert digest(one)[:8] + digest(two)[:8] == COMPUTED[name], each.library


def test_every_kind_of_number_is_there():
    x = np.concatenate([logits(n).ravel() for n in COLUMNS])
    assert {n.tobytes() for n in ALL} <= {n.tobytes() for n in x[: 2**20]}
    with np.errstate(invalid="ignore"):
        assert (np.abs(x) > 2.0**126).any() and ((np.abs(x) < 2.0**-126) & (x != 0)).any()
    usual = np.isfinite(logits(1000)).all(axis=1)
    assert 0.5 < usual.mean() < 0.9  # of others nothing is drawn
