"""Wrong shapes and places are errors on every library: kernels read nothing outside of arrays."""

from __future__ import annotations

import numpy as np
import pytest

import hibachi
from hibachi.request import DRAWN

from ..lib.filters import DEFAULTS
from .native import skip_without

skip_without()


@pytest.fixture(params=["numpy", "torch", "jax"])
def library(request):
    pytest.importorskip(f"hibachi_{request.param}" if request.param != "numpy" else "numpy")
    loaded = hibachi.load_backend(request.param)
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
        lambda: library.draw(x, [ones(library, 3)] * len(DRAWN) + [ones(library, 2)]),
    ):
        with pytest.raises(ValueError, match=r"expected .* as x is \[3, 8\]; got"):
            wrong()


def test_rows_without_numbers_end_nothing(library):
    """They ended the process, as somebody divided by their length."""
    none = ones(library, 3, 0)
    for got in (
        library.rms_norm(none, ones(library, 0), 1e-5),
        library.layer_norm(none, ones(library, 0), None, 1e-5),
        library.silu(none),
        library.rope(ones(library, 3, 0, 4), ones(library, 3, 1, 2), ones(library, 3, 1, 2)),
    ):
        assert 0 in library.get(got).shape
    into, out = ([library.put_weight(np.ones(s, np.float32), "float32")] * 3 for s in ((12, 8), (8, 6)))
    nobody = library.put(np.zeros((3, 0), np.int32))
    assert not library.get(library.experts(ones(library, 3, 8), nobody, none, into, out, "silu", gated=True)).any()


def test_turns_of_other_sizes_and_dtypes(library):
    x, turns = ones(library, 4, 1, 8), ones(library, 4, 1, 4)
    wrong = ones(library, 4, 1, 3)
    for cos, sin in ((turns, wrong), (wrong, turns)):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            library.get(library.rope(x, cos, sin))
    right = library.get(library.rope(x, turns, turns))
    assert (right[..., :4] == 0).all() and (right[..., 4:] == 2).all()


def test_parameters_of_a_draw_may_have_other_dtypes_and_be_next_to_nothing(library):
    logits = library.put(np.float32([[1.5, 1, 1, 1, 1, 1, 1, 1]] * 8))
    u = np.linspace(0.05, 0.95, 8)

    def drawn(**given):
        kinds = dict.fromkeys(DRAWN, np.float32) | {"temperature": np.float16, "top_k": np.int16}
        parameters = [library.put(np.full(8, (DEFAULTS | given)[name], kind)) for name, kind in kinds.items()]
        return library.get(library.draw(logits, [*parameters, library.put(u.astype(np.float32))])[0]).tolist()

    assert drawn() == [0, 0, 2, 3, 4, 5, 6, 7]
    for name in ("top_p", "typical_p"):
        assert len(set(drawn(**{name: 1e-50}))) < 8, name  # 0 in float32 kept all
    assert drawn(top_p=1e-50) == drawn(top_k=1) == [0] * 8
    assert drawn(top_p=0.5, min_p=1.1) == drawn(top_p=0.5, min_p=1.1)  # nothing is left: it looked for ever
