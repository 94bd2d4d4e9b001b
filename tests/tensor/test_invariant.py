"""Invariant kernels of NumPy and PyTorch, over numbers of rows and places; each number of threads by itself."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hibachi import ArrayBackend, ConfigError, NumpyBackend, UnsupportedOperation
from hibachi_torch import TorchBackend

SWEEP = Path(__file__).with_name("sweep.py")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "what",
    [
        *("numpy float32", "numpy float32 plain"),
        *(
            pytest.param(what, marks=pytest.mark.slow)
            for what in ("torch bfloat16", "torch float32 plain", "torch bfloat16 plain")
        ),
    ],
    ids=lambda w: w.replace(" ", "-"),
)
def test_no_row_of_any_company_differs_from_the_row_alone(what, threads):
    env = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    done = subprocess.run([sys.executable, SWEEP, *what.split()], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "numerics cpu-2" in done.stdout or f"{threads} threads" in done.stdout


@pytest.mark.parametrize("make", [NumpyBackend, lambda: TorchBackend("cpu")])
def test_invariant_backends_agree_with_the_others_up_to_rounding(make):
    plain, ours = make(), make().invariant()
    random = np.random.default_rng(0)
    x, w, b = (random.normal(size=s).astype(np.float32) for s in ((5, 96), (64, 96), (64,)))
    for backend in (plain, ours):
        got = backend.get(backend.linear(backend.put(x), backend.put_weight(w, "float32"), backend.put(b)))
        np.testing.assert_allclose(got, x @ w.T + b, atol=1e-5)
    for name in ("silu", "gelu", "gelu_tanh", "softmax"):
        one, other = (b.get(getattr(b, name)(b.put(40 * x))) for b in (plain, ours))
        np.testing.assert_allclose(one, other, atol=1e-5, err_msg=name)


def test_weights_can_be_looked_up_before_and_after_they_are_multiplied_with():
    b = TorchBackend("cpu", native=False).invariant()
    w = np.arange(64, dtype=np.float32).reshape(8, 8)
    at, x = b.put(np.array([[3, 0], [7, 7]])), b.put(np.eye(8, dtype=np.float32))
    for first in ("look", "multiply"):
        weight = b.put_weight(w, "float32")
        for what in (first, "look", "multiply", "look"):
            if what == "look":
                assert b.get(b.weight_rows(weight, at)).tolist() == w[[[3, 0], [7, 7]]].tolist()
            else:
                assert b.get(b.linear(x, weight)).tolist() == w.T.tolist()


def test_no_rows_and_leading_dimensions():
    for b in (NumpyBackend().invariant(), TorchBackend("cpu").invariant()):
        w = b.put_weight(np.ones((64, 8), np.float32), "float32")
        for shape in ((0, 8), (8,), (2, 3, 8)):
            assert b.linear(b.put(np.ones(shape, np.float32)), w).shape == (*shape[:-1], 64)


def test_other_dtypes_are_invariant_too():
    for b, dtype in ((NumpyBackend().invariant(), "float64"), (TorchBackend("cpu").invariant(), "float64")):
        x = np.random.default_rng(0).normal(size=(40, 96))
        w = b.put_weight(np.random.default_rng(1).normal(size=(64, 96)), dtype)
        alone = np.concatenate([b.get(b.linear(b.put(x[i : i + 1]), w)) for i in range(40)])
        for n in (2, 3, 5, 8, 11, 40):
            assert np.array_equal(b.get(b.linear(b.put(x[:n]), w)), alone[:n]), (b, n)


def test_invariant_is_itself_where_it_is_so_already():
    for b in (NumpyBackend().invariant(), TorchBackend("cpu").invariant()):
        assert b.deterministic and b.invariant() is b and not b.prefers_invariant


def test_a_class_of_somebodys_own_is_not_replaced():
    class Own(NumpyBackend):
        pass

    assert not Own().prefers_invariant
    with pytest.raises(UnsupportedOperation, match=r"Own .numpy. has no kernels.*Pass deterministic=False"):
        Own().invariant()
    with pytest.raises(UnsupportedOperation, match="Pass deterministic=False"):
        ArrayBackend(np).invariant()


def test_the_fingerprint_names_library_threads_and_kernels():
    plain, ours = NumpyBackend(native=False), NumpyBackend(native=False).invariant()
    assert ours.fingerprint().startswith(f"numpy {np.__version__}; cpu, ")
    assert " threads; kernels " in ours.fingerprint() and plain.fingerprint() != ours.fingerprint()
    assert NumpyBackend().fingerprint() == f"numpy {np.__version__}; cpu; numerics cpu-2"  # which is all that counts
    with pytest.raises(ConfigError):
        NumpyBackend("cuda")
