"""What NumPy does in its own way equals the definition."""

import sys
from pathlib import Path

import numpy as np
import pytest

import hibachi
from hibachi.backend.kernels.library import why_missing
from hibachi.backend.numpy_backend import InvariantNumpyBackend, NumpyBackend
from hibachi.engine.build import cached_runner
from hibachi.engine.runners.sampler import RowSampler
from hibachi.engine.runners.tokentable import IDS, Tables, TokenHistory
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.step import Limits
from hibachi.llm.model.files import locate, open_files
from hibachi.llm.model.registry import load_model

PACKAGE = Path(hibachi.__file__).parent


BACKENDS = {
    "plain": lambda: NumpyBackend(native=False),
    "invariant": InvariantNumpyBackend,
    "native": lambda: NumpyBackend(native=True),
}


@pytest.fixture(params=BACKENDS)
def numpy_backend(request):
    if request.param == "native" and why_missing():
        pytest.skip(why_missing())
    return BACKENDS[request.param]()


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


def test_linear_takes_plain_arrays_too(numpy_backend):
    x, w = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(numpy_backend.linear(x, w), x @ w.T)


@pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
def test_bfloat16_is_kept_as_its_bits_rounded_to_even():
    backend = NumpyBackend(native=True)
    half = 2.0**-8  # of the last bit of numbers from 1 to 2
    numbers = [
        1,
        1 + half,
        1 + 3 * half,
        1 + 1.01 * half,
        -(1 + half),
        0.0,
        -0.0,
        1e-45,
        3.4e38,
        np.inf,
        -np.inf,
        np.nan,
    ]
    want = [1, 1, 1 + 4 * half, 1 + 2 * half, -1, 0.0, -0.0, 0.0, np.inf, np.inf, -np.inf, np.nan]
    kept = backend.put(np.array(numbers, np.float32), "bfloat16")
    assert kept.dtype == backend.dtype("bfloat16") and kept.itemsize == 2
    got = backend.get(kept)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.array(want, np.float32))
    np.testing.assert_array_equal(np.signbit(got[5:7]), [False, True])
    np.testing.assert_array_equal(backend.get(backend.put(kept, "bfloat16")), got)
    with pytest.raises(TypeError):
        kept + kept  # NumPy computes nothing with them, so that nothing wrong comes out


@pytest.mark.parametrize("kind", BACKENDS)
def test_no_array_of_a_step_is_of_another_precision(kind):
    """Every array that any line of the model, the kernels or sampling holds, looked at line by line."""
    if kind == "native" and why_missing():
        pytest.skip(why_missing())
    backend = BACKENDS[kind]()
    model = load_model(open_files(locate("tiny")), backend)
    limits, seen, wide = Limits(4, 64, 64, 64, 17, 16), set(), set()
    tables = Tables(4, IDS)
    sampler = RowSampler(backend, 4, model.vocab_size, tables.of(IDS))
    runner = cached_runner(model, backend, Scheduler(limits), tables, sampler, "float32")
    runner.inputs.block_table[:] = np.arange(1, 17).reshape(4, 4)
    watched = tuple(str(PACKAGE / part) for part in ("backend", "llm/model", "engine/sampling"))

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
        tables.fill(row, IDS, TokenHistory(np.arange(3, 64, dtype=np.int32)))
    sys.settrace(look)
    try:
        for start, each in ((0, [1, 5, 33, 2]), (40, [1, 1, 1, 1])):
            x = runner.inputs.packed(rows, np.full(4, start, np.int32), np.array(each, np.int32), np.ones(4, bool))
            out, runner.memory.cache = runner.main.step(model.params, runner.memory.cache, x)
            backend.best(out)
    finally:
        sys.settrace(None)
    assert {"float32", "int32"} <= seen
    assert not wide
