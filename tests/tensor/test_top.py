"""`top`: the k largest of each row, as every backend finds them."""

import array_api_strict
import numpy as np
import pytest

from hibachi.backend.array_backend import ArrayBackend
from hibachi.backend.numpy_backend import NumpyBackend
from hibachi_jax import JaxBackend
from hibachi_torch import TorchBackend

BACKENDS = NumpyBackend(), TorchBackend("cpu"), JaxBackend("cpu"), ArrayBackend(array_api_strict)


@pytest.mark.parametrize("library", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("k", [1, 5, 36, 37])
def test_top_is_the_beginning_of_the_sorted_row(library, k):
    x = np.random.default_rng(0).normal(size=(5, 37)).astype(np.float32)
    x[1, 3], x[2] = -np.inf, 1.5  # one that is not finite, and a row of equals
    values, places = map(library.get, library.top(library.put(x), k))
    np.testing.assert_array_equal(values, -np.sort(-x, axis=1)[:, :k])
    assert places.dtype.kind == "i" and all(len({*row}) == k for row in places.tolist())
    np.testing.assert_array_equal(np.take_along_axis(x, places.astype(int), axis=1), values)
