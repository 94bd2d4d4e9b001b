"""hibachi's kernels beside the operations of each library: who has them, who goes without, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from hibachi import NumpyBackend, load_backend
from hibachi.backend.kernels.library import NUMERICS, SWITCH, NativeUnavailable, library

from .native import forget, skip_without, without_compiler

skip_without()


@pytest.fixture(params=["numpy", "torch", "jax"])
def kind(request, monkeypatch):
    """kind(native): a backend of a library."""
    pytest.importorskip(request.param if request.param == "numpy" else f"hibachi_{request.param}")
    monkeypatch.delenv(SWITCH, raising=False)
    plain = type(load_backend(request.param, device="cpu").plain())
    return lambda **native: plain("cpu", **native)


def told(backend):
    """What it says of kernels."""
    [line] = [line for line in backend.remarks() if line.startswith("hibachi's kernels: ")]
    return line


def test_a_backend_is_native_unless_somebody_goes_without(kind, monkeypatch):
    plain = kind(native=False)
    assert not plain.native and "not in use here; " in told(plain)
    for native in (None, True):
        found = kind(native=native)
        assert found.native and found.deterministic and found.invariant() is found
        assert type(found) is not type(plain) and type(found.plain()) is type(plain)
        assert f"numerics {NUMERICS}" in found.fingerprint()
        assert told(found).startswith(f"hibachi's kernels: {library()}; ")
    assert plain.invariant().deterministic and not plain.invariant().native
    monkeypatch.setenv(SWITCH, "none")
    assert type(kind()) is type(plain)
    assert "not in use here; not used, as HIBACHI_VARIANT=none is set" in told(kind())
    if plain.name != "jax":  # which goes without
        with pytest.raises(NativeUnavailable, match="HIBACHI_VARIANT=none is set"):
            kind(native=True)


def test_without_a_compiler_a_backend_goes_without_and_says_so_once(kind, monkeypatch, tmp_path, caplog):
    forget(monkeypatch, tmp_path)
    assert "not in use here; to be compiled by" in told(kind(native=False))
    assert not list(tmp_path.iterdir())
    without_compiler(monkeypatch, tmp_path)
    for _ in range(2):
        assert not kind().native and "not in use here; there are none: no C++ compiler was found" in told(kind())
    why = "no C++ compiler was found. Install g++ or clang++, or set CXX."
    assert [r.getMessage() for r in caplog.records if r.name.startswith("hibachi")] == [
        f"There are no kernels for this machine: {why} Models compute the same, many times slower."
    ]
    if kind().name != "jax":
        with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler"):
            kind(native=True)


def test_products_that_do_not_fit_are_refused_and_those_of_nothing_are_empty(kind):
    backend = kind(native=True)
    w = backend.put_weight(np.zeros((4, 6), "float32"), "float32")

    def normal(*shape, dtype="float32"):
        return backend.put(np.random.default_rng(0).normal(size=shape).astype("float32"), dtype)

    for x, b in (
        (normal(2, 5), None),
        (normal(2, 6, dtype="bfloat16"), None),
        (normal(2, 6), normal(3)),
        (normal(2, 6), normal(4, dtype="bfloat16")),
    ):
        with pytest.raises(ValueError, match=r"expected x \[\.\.\., 6\]"):
            backend.linear(x, w, b)
    for wrong in (4, -1):
        with pytest.raises((IndexError, RuntimeError), match="A place lies outside"):
            backend.get(backend.weight_rows(w, backend.put(np.array([wrong], np.int32))))
    for rows in ((0,), (2, 0)):
        assert backend.linear(normal(*rows, 6), w).shape == (*rows, 4)


def test_float32_is_what_numpy_computes_in():
    """float32 times an integer array is float64 on NumPy: what was meant is float32."""
    backend = NumpyBackend(native=True)
    weight, x = backend.put_weight(np.ones((4, 6), np.float32), "float32"), np.ones((2, 6)) / 3
    got = backend.linear(x, weight)
    assert got.dtype == np.float32 and (got == backend.linear(x.astype(np.float32), weight)).all()
