"""What NumPy does in its own way equals the definition."""

import sys
from pathlib import Path

import numpy as np
import pytest

import hibachi
from hibachi.engine.build import cached_runner
from hibachi.model.files import locate, open_files
from hibachi.model.registry import load_model
from hibachi.plan.limits import Limits
from hibachi.plan.scheduler import Scheduler
from hibachi.runners.sampler import RowSampler
from hibachi.runners.tokentable import IDS, History, Tables
from hibachi.tensor.numpy_backend import NumpyBackend

PACKAGE = Path(hibachi.__file__).parent


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


@pytest.mark.parametrize("exact", [False, True], ids=["plain", "invariant"])
def test_no_array_of_a_step_is_of_another_precision(exact):
    """Every array that any line of the model, the kernels or sampling holds, looked at line by line."""
    backend = NumpyBackend().invariant() if exact else NumpyBackend()
    model = load_model(open_files(locate("tiny")), backend)
    limits, seen, wide = Limits(4, 64, 64, 64, 17, 16), set(), set()
    tables = Tables(4, IDS)
    sampler = RowSampler(backend, 4, model.vocab_size, tables.of(IDS))
    runner = cached_runner(model, backend, Scheduler(limits), tables, sampler, "float32")
    runner.inputs.block_table[:] = np.arange(1, 17).reshape(4, 4)
    watched = tuple(str(PACKAGE / part) for part in ("tensor", "model", "decode"))

    def look(frame, event, arg):
        if not frame.f_code.co_filename.startswith(watched):
            return None
        for name, value in [*frame.f_locals.items(), ("what it returns", arg)]:
            if isinstance(value, np.ndarray) and value.ndim:
                seen.add(value.dtype.name)
                if value.dtype == np.float64:
                    wide.add(f"{frame.f_code.co_qualname}: {name}")
        return look

    rows = np.arange(4)
    for row in rows:
        tables.fill(row, IDS, History(np.arange(3, 64, dtype=np.int32)))
    sys.settrace(look)
    try:
        for start, each in ((0, [1, 5, 33, 2]), (40, [1, 1, 1, 1])):
            x = runner.inputs.packed(rows, np.full(4, start, np.int32), np.array(each, np.int32), np.ones(4, bool))
            out, runner.memory.cache = runner.main.step(model.params, runner.memory.cache, x)
            sampler._greedy(out)
    finally:
        sys.settrace(None)
    assert {"float32", "int32"} <= seen
    assert not wide
