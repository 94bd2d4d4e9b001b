"""What NumPy does in its own way equals the definition."""

import numpy as np
import pytest

from hibachi.tensor.numpy_backend import NumpyBackend


@pytest.fixture(params=[False, True], ids=["plain", "tiles"])
def numpy_backend(request):
    b = NumpyBackend()
    b._tiled = request.param
    return b


@pytest.mark.parametrize("out, size", [(64, 8), (192, 640), (96, 700), (80, 1300), (100, 8), (1, 3)])
@pytest.mark.parametrize("rows", [(), (0,), (1,), (2, 3), (32,), (33,), (200,)])
def test_linear_is_the_product_in_every_form_of_the_weight(numpy_backend, rows, out, size):
    rng = np.random.default_rng(0)
    x, w, b = (rng.normal(size=s).astype(np.float32) for s in ((*rows, size), (out, size), (out,)))
    weight = numpy_backend.put_weight(w, "float32")
    expected = x.astype(np.float64) @ w.T + b
    got = numpy_backend.linear(x, weight, b)
    assert got.dtype == np.float32 and got.shape == expected.shape
    np.testing.assert_allclose(got, expected, atol=1e-3)
    np.testing.assert_array_equal(numpy_backend.linear(x, weight), numpy_backend.linear(x, weight, 0 * b))


def test_tiles_are_for_float32_and_whole_tiles():
    b = NumpyBackend()
    b._tiled = True
    shapes = {
        (dtype, out): b.put_weight(np.zeros((out, 8)), dtype).shape
        for dtype in ("float32", "float16")
        for out in (128, 100)
    }
    assert shapes.pop(("float32", 128)) == (2, 8, 64)
    assert all(shape == (out, 8) for (_, out), shape in shapes.items())


def test_linear_takes_plain_arrays_too(numpy_backend):
    x, w = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(numpy_backend.linear(x, w), x @ w.T)
