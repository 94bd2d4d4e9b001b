"""What the base class computes with an array-API namespace alone, against plain NumPy."""

import math

import numpy as np
import pytest

from hibachi import ArrayBackend, InvalidTensorOperation, NumpyBackend, Paged, StepInputs
from hibachi.engine.scheduler.lower import lower

from .native import far_off

BASE = ArrayBackend(np)
INVARIANT = NumpyBackend().invariant()
rng = np.random.default_rng(0)


def random(*shape):
    return rng.normal(size=shape).astype(np.float32)


def test_take_of_any_shape():
    t = random(7, 2, 3)
    for idx in (np.array([[0, 6], [3, 3]]), np.array([5]), np.zeros((0, 2), int), np.array([[[1]]])):
        assert np.array_equal(BASE.take(t, idx), t[idx]) and BASE.take(t, idx).shape == (*idx.shape, 2, 3)


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_scatter_rows_replaces_the_named_and_no_other(shape):
    dst, src = random(6, *shape), random(3, *shape)
    want = dst.copy()
    want[[0, 4, 2]] = src
    assert np.array_equal(BASE.scatter_rows(dst, np.array([0, 4, 2]), src), want)
    assert np.array_equal(BASE.scatter_rows(dst, np.zeros(0, int), src[:0]), dst)


def test_storable_marks_keys_of_values_that_are_not_finite():
    k, v = random(4, 2, 3), random(4, 2, 5)
    v[1, 0, 4], v[2, 1, 0], v[3, 1, 2] = math.nan, -math.inf, 1e6
    for backend in (BASE, NumpyBackend()):
        with np.errstate(over="ignore" if backend is BASE else "raise"):
            keys, values = backend.storable(k, v, np.float16)  # in which 1e6 is infinite
        bad = np.array([[0, 0], [1, 0], [0, 1], [0, 1]], bool)
        assert np.isnan(keys[bad]).all() and (values[bad] == 0).all()
        assert np.array_equal(keys[~bad], k[~bad]) and np.array_equal(values[~bad], v[~bad])


def attended(q, k, v, *, scale=None, window=None, softcap=None, bias=None, sinks=()):
    """Causal attention of one sequence, a position and a head at a time, in float64."""
    group, out = q.shape[1] // k.shape[1], np.zeros((*q.shape[:2], v.shape[2]))
    for at in range(len(q)):
        first = 0 if window is None else max(0, at + 1 - window)
        for head in range(q.shape[1]):
            keys, values = (t[first : at + 1, head // group].astype(np.float64) for t in (k, v))
            scores = keys @ q[at, head] * (q.shape[2] ** -0.5 if scale is None else scale)
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            if bias is not None:
                scores += far_off(bias, at - np.arange(first, at + 1))[head]
            more = np.exp([sinks[head] - scores.max()]) if len(sinks) else 0.0
            weights = np.exp(scores - scores.max())
            out[at, head] = weights @ values / (weights.sum() + more)
    return out


@pytest.mark.parametrize(
    "how",
    [
        *({}, {"scale": 0.7}, {"window": 5}, {"softcap": 1.5}, {"softcap": 3.0, "window": 9}),
        *({"bias": random(4, 9)}, {"sinks": random(4)}, {"bias": random(4, 2) / 9, "sinks": random(4), "window": 70}),
    ],
    ids=lambda how: ", ".join(how),
)
@pytest.mark.parametrize("library", [BASE, NumpyBackend(), INVARIANT], ids=["base", "numpy", "invariant"])
@pytest.mark.parametrize("heads, kv_heads, dim, v_dim, size, length", [(4, 2, 8, 8, 4, 29), (3, 3, 16, 6, 16, 600)])
def test_attention_is_that_of_the_definition(library, how, heads, kv_heads, dim, v_dim, size, length):
    q, k, v = random(length, heads, dim), random(length, kv_heads, dim), random(length, kv_heads, v_dim)
    how = how | {name: how[name][:heads] for name in ("bias", "sinks") if name in how}
    want, width = attended(q, k, v, **how), -(-length // size)
    table = np.arange(width, 0, -1, dtype=np.int32)[None]
    cache = library.make_cache(Paged(kv_heads, dim, v_dim), blocks=width + 1, block_size=size, rows=1, dtype="float32")
    at = 0
    for n in (1, 7, 1, length - 10, 1):  # tokens and chunks
        arrays = (np.array([x], np.int32) for x in (0, at, n))
        packed = lower(*arrays, np.ones(1, bool), table, size, tiles=library.shapes.choices)
        fields = {name: library.put(getattr(packed, name)) for name in packed.__slots__}
        x = StepInputs(tok=fields["pos"], **fields)
        got, cache = library.attend(*(t[at : at + n] for t in (q, k, v)), cache, x, **how)
        np.testing.assert_allclose(got, want[at : at + n], atol=2e-5)
        at += n


@pytest.mark.parametrize("size", [32, 640, 641, 1280, 1281, 2000])
@pytest.mark.parametrize("out", [64, 96, 100])
def test_products_with_weights_in_any_form(size, out):
    w, bias = random(out, size), random(out)
    for backend in (NumpyBackend(), INVARIANT):
        weight = backend.put_weight(w, "float32")
        assert np.array_equal(
            backend.weight_rows(weight, np.array([[1, 0], [out - 1, 40]])), w[[[1, 0], [out - 1, 40]]]
        )
        for rows in (1, 2, 31, 32, 33, 70):
            x = random(rows, size)
            np.testing.assert_allclose(backend.linear(x, weight, bias), x @ w.T + bias, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "call, op",
    [
        (lambda b, t: b.pop(t, 0, 3), "pop"),
        (lambda b, t: b.pop(t, 0, -1), "pop"),
        (lambda b, t: b.pop(t, 2, 0), "pop"),
        (lambda b, t: b.slice(t, 0, 2, 2), "slice"),
        (lambda b, t: b.slice(t, 0, -1, 1), "slice"),
        (lambda b, t: b.slice(t, 0, 0, -1), "slice"),
        (lambda b, t: b.repeat(t, 0, -1), "repeat"),
        (lambda b, t: b.unsqueeze(t, 3), "unsqueeze"),
        (lambda b, t: b.unsqueeze(t, -1), "unsqueeze"),
        (lambda b, t: b.idx_where_all_true(t, 0), "idx_where_all_true"),
        (lambda b, t: b.shape([1]), "shape"),
    ],
)
def test_operations_without_a_meaning_are_refused(call, op):
    with pytest.raises(InvalidTensorOperation) as e:
        call(NumpyBackend(), random(3, 2))
    assert e.value.op == op


def test_what_an_operation_expected_and_got_may_be_anything():
    e = InvalidTensorOperation("pop", expected=(2, 3), got=None, mend="Take one inside")
    assert (e.expected, e.got, str(e)) == ("(2, 3)", "None", "pop: expected (2, 3); got None. Take one inside.")


def test_operations_at_their_edges():
    b, t = NumpyBackend(), random(3, 2)
    assert np.array_equal(b.pop(t, 0, 0), t[1:]) and np.array_equal(b.pop(t, 0, 2), t[:2])
    assert np.array_equal(b.pop(t, 1, 1), t[:, :1])
    assert b.slice(t, 0, 3, 0).shape == (0, 2) and np.array_equal(b.slice(t, 1, 1, 1), t[:, 1:])
    assert b.repeat(t, 1, 0).shape == (3, 0) and np.array_equal(b.repeat(t, 1, 2), np.tile(t, (1, 2)))
    assert b.unsqueeze(t, 2).shape == (3, 2, 1) and b.unsqueeze(t, 0).shape == (1, 3, 2)
    assert b.idx_where_all_true(np.array([[True, True], [True, False], [True, True]]), 0) == [0, 2]
