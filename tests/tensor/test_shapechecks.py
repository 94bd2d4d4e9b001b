"""Wrong shapes and places are errors on every library: kernels read nothing outside of arrays."""

from __future__ import annotations

import numpy as np
import pytest

import hibachi

from .native import skip_without

skip_without()


@pytest.fixture(params=["numpy", "torch", "jax"])
def library(request):
    pytest.importorskip(f"hibachi_{request.param}" if request.param != "numpy" else "numpy")
    loaded = hibachi.load(request.param)
    assert loaded.native
    with loaded.guard():
        yield loaded


def ones(library, *shape):
    return library.put(np.ones(shape, np.float32))


def experts(library, chosen, *, x=None, weights=None, inner=6):
    chosen = np.array(chosen, np.int32).reshape(-1, 2)
    into = [library.put_weight(np.ones((2 * inner, 8), np.float32), "float32")] * 3
    out = [library.put_weight(np.ones((8, 6), np.float32), "float32")] * 3
    x = ones(library, len(chosen), 8) if x is None else x
    weights = ones(library, *chosen.shape) if weights is None else weights
    return library.get(library.experts(x, library.put(chosen), weights, into, out, "silu", gated=True))


def test_experts_that_are_not_there(library):
    for chosen in ([[0, 3]], [[-1, 0]], [[0, 1], [2, 2**31 - 1]]):
        with pytest.raises((IndexError, ValueError, RuntimeError), match="A place lies outside"):
            experts(library, chosen)
    assert experts(library, []).shape == (0, 8)


def test_experts_of_other_sizes(library):
    for how in (
        dict(x=ones(library, 2, 8)),
        dict(x=ones(library, 1, 9)),
        dict(weights=ones(library, 1, 1)),
        dict(weights=ones(library, 2, 1)),
        dict(inner=7),
    ):
        with pytest.raises(ValueError, match=r"experts: expected .* as x is .*; got"):
            experts(library, [[0, 1]], **how)


def test_more_experts_than_there_are(library):
    for k in (0, 6, -1):
        with pytest.raises(ValueError, match=r"route: expected .*1 <= k <= experts; got \[3, 5\]"):
            library.route(ones(library, 3, 5), k, normalised=True)
    weights, chosen = library.route(ones(library, 3, 5), 5, normalised=True)
    assert np.sort(library.get(chosen)).tolist() == [[0, 1, 2, 3, 4]] * 3
    assert library.get(weights).sum() == pytest.approx(3)


def test_odds_that_are_nan_choose_experts_that_are_there(library):
    weights, chosen = library.route(ones(library, 2, 5) * float("nan"), 2, normalised=False)
    assert np.isnan(library.get(weights)).all() and library.get(chosen).tolist() == [[0, 1]] * 2


def test_states_of_other_sizes(library):
    def f(*shape):
        return ones(library, *shape)

    for past, x, w, b in (
        ((2, 2, 5), (2, 3, 5), (4, 5), None),
        ((1, 3, 5), (2, 3, 5), (4, 5), None),
        ((2, 3, 5), (2, 3, 5), (4, 6), None),
        ((2, 3, 5), (2, 3, 5), (4, 5), (6,)),
    ):
        with pytest.raises(ValueError, match=r"convolve: expected past .*as x is \[2, 3, 5\]; got"):
            library.convolve(f(*past), f(*x), f(*w), None if b is None else f(*b))
    right = [(2, 4, 5), (2, 3, 5), (2, 3, 5), (2, 3, 5), (2, 3, 4), (2, 3, 4), (4, 5), (5,)]
    library.selective_scan(*(f(*shape) for shape in right))
    for i in (0, 2, 3, 5, 6, 7):
        wrong = [(*shape[:-1], shape[-1] + 1) if i == j else shape for j, shape in enumerate(right)]
        with pytest.raises(ValueError, match=r"selective_scan: expected .* as x is \[2, 3, 5\]; got"):
            library.selective_scan(*(f(*shape) for shape in wrong))


@pytest.mark.parametrize(("rows", "tokens"), [(0, 3), (2, 0), (0, 0)])
def test_states_of_no_rows_or_tokens(library, rows, tokens):
    def f(*shape):
        return ones(library, *shape)

    y, past = library.convolve(f(rows, 3, 5), f(rows, tokens, 5), f(4, 5))
    narrow = f(rows, tokens, 2)
    u, state = library.selective_scan(f(rows, 2, 5), y, y, y, narrow, narrow, f(2, 5), f(5))
    assert tuple(y.shape) == tuple(u.shape) == (rows, tokens, 5)
    assert (library.get(past) == 1).all() and (library.get(state) == 1).all()
    assert tuple(past.shape) == (rows, 3, 5) and tuple(state.shape) == (rows, 2, 5)


def test_vectors_of_other_lengths(library):
    x, w = ones(library, 3, 8), ones(library, 7)
    for wrong in (
        lambda: library.rms_norm(x, w, 1e-5),
        lambda: library.layer_norm(x, w, None, 1e-5),
        lambda: library.layer_norm(x, ones(library, 8), w, 1e-5),
        lambda: library.draw(x, [ones(library, 3)] * 5 + [ones(library, 2)]),
    ):
        with pytest.raises(ValueError, match=r"expected .* as x is \[3, 8\]; got"):
            wrong()
