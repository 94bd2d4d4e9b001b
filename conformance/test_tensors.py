"""The nine operations do what NumPy does, for ranks 0 to 9, empty arrays, and integers, floats and bools."""

import numpy as np
import pytest

from .cases import along_dims, call, expect, sample, samples

pytestmark = pytest.mark.promise("nine operations")

X = sample((2, 3))  # [[1, 2, 3], [4, 5, 6]]
X3 = sample((2, 3, 4))


def array(*rows, dtype="int32"):
    return np.array(rows, dtype)


# shape, unsqueeze


def test_shape_lists_the_sizes_from_the_outside_in(backend):
    """H-01, H-20."""
    expect(backend, (2, 3, 4), "shape", X3)
    for x in samples():
        expect(backend, x.shape, "shape", x)


def test_unsqueeze_inserts_an_axis_of_size_one_anywhere(backend):
    """H-02, H-20."""
    for dim, shape in enumerate([(1, 2, 3), (2, 1, 3), (2, 3, 1)]):
        expect(backend, X.reshape(shape), "unsqueeze", X, dim)
    for x in samples():
        for dim in {0, x.ndim // 2, x.ndim}:
            expect(backend, np.expand_dims(x, dim), "unsqueeze", x, dim)


# cat


def test_cat_joins_in_order_along_any_dimension(backend):
    """H-04, H-05, H-20."""
    y = sample((2, 3), first=7)
    expect(backend, sample((4, 3)), "cat", [X, y], 0)
    expect(backend, array([1, 2, 3, 7, 8, 9], [4, 5, 6, 10, 11, 12]), "cat", [X, y], 1)
    for x, dim in along_dims():
        y = np.flip(x, dim)
        expect(backend, np.concatenate([x, y, x], dim), "cat", [x, y, x], dim)


def test_cat_of_one_array_equals_it(backend):
    expect(backend, X, "cat", [X], 1)


def test_cat_with_an_empty_array_adds_nothing(backend):
    expect(backend, X, "cat", [X[:0], X, X[:0]], 0)
    expect(backend, X, "cat", [X, X[:, :0]], 1)


# eq


def test_eq_compares_element_by_element_into_bools(backend):
    """H-20."""
    expect(backend, array([0, 1, 0], [1, 0, 1], dtype=bool), "eq", X, array([0, 2, 0], [4, 0, 6]))
    for x in samples():
        other = np.roll(x, 1)
        expect(backend, np.asarray(x == other), "eq", x, other)
        expect(backend, np.ones(x.shape, bool), "eq", x, x)


def test_eq_with_itself_is_true_in_every_row(backend):
    """H-07: and with X + 1 in none."""
    same, other = call(backend, "eq", X, X), call(backend, "eq", X, X + 1)
    expect(backend, [0, 1], "idx_where_all_true", same, 0)
    expect(backend, [], "idx_where_all_true", other, 0)


def test_eq_says_that_nan_differs_from_nan(backend):
    x = np.array([1, np.nan], "float32")
    expect(backend, np.array([True, False]), "eq", x, x)


# vectorize_dim


def test_vectorize_dim_gives_the_slices_without_their_dimension(backend):
    """H-09, H-20."""
    expect(backend, [array(1, 2, 3), array(4, 5, 6)], "vectorize_dim", X, 0)
    expect(backend, [array(1, 4), array(2, 5), array(3, 6)], "vectorize_dim", X, 1)
    for x, dim in along_dims():
        expect(backend, [np.asarray(x.take(i, dim)) for i in range(x.shape[dim])], "vectorize_dim", x, dim)


def test_vectorize_dim_of_a_size_zero_dimension_is_empty(backend):
    """H-10."""
    expect(backend, [], "vectorize_dim", sample((0, 3)), 0)
    expect(backend, [], "vectorize_dim", sample((2, 0)), 1)


def test_vectorize_dim_undoes_unsqueeze_and_cat(backend):
    rows = [backend.put(row) for row in X]
    stacked = backend.cat([backend.unsqueeze(row, 0) for row in rows], 0)
    expect(backend, list(X), "vectorize_dim", stacked, 0)


# slice


def test_slice_takes_a_range_of_one_dimension(backend):
    """H-12, H-20."""
    expect(backend, X3[:1], "slice", X3, 0, 0, 1)
    expect(backend, X3[:, 1:3], "slice", X3, 1, 1, 2)
    expect(backend, X3[:, :, :2], "slice", X3, 2, 0, 2)
    for x, dim in along_dims():
        start = min(1, x.shape[dim])
        want = x.take(np.arange(start, x.shape[dim]), dim)
        expect(backend, want, "slice", x, dim, start, x.shape[dim] - start)


def test_slice_of_length_zero_is_empty_and_allowed_up_to_the_end(backend):
    """H-13."""
    for start in range(4):
        expect(backend, X[:, :0], "slice", X, 1, start, 0)


# idx_where_all_true


def test_idx_where_all_true_wants_every_element_true(backend):
    """H-14, H-15, H-20."""
    x = array([1, 1], [0, 1], [1, 0], dtype=bool)
    expect(backend, [0], "idx_where_all_true", x, 0)
    expect(backend, [], "idx_where_all_true", x, 1)
    x = array([1, 0], [1, 0], [1, 1], dtype=bool)
    expect(backend, [2], "idx_where_all_true", x, 0)
    expect(backend, [0], "idx_where_all_true", x, 1)
    for x, dim in along_dims("bool"):
        rest = tuple(d for d in range(x.ndim) if d != dim)
        expect(backend, np.flatnonzero(x.all(rest)).tolist(), "idx_where_all_true", x, dim)


def test_idx_where_all_true_lists_python_ints_in_rising_order(backend):
    x = sample((9,), "bool")
    expect(backend, [0, 1, 3, 4, 6, 7], "idx_where_all_true", x, 0)
    assert {type(i) for i in call(backend, "idx_where_all_true", x, 0)} == {int}


def test_idx_where_all_true_holds_for_rows_without_elements(backend):
    expect(backend, [0, 1], "idx_where_all_true", sample((2, 0), "bool"), 0)
    expect(backend, [], "idx_where_all_true", sample((2, 0), "bool"), 1)


# pop


def test_pop_removes_exactly_one_position(backend):
    """H-17, H-20."""
    expect(backend, array([4, 5, 6]), "pop", X, 0, 0)
    expect(backend, array([1, 3], [4, 6]), "pop", X, 1, 1)
    expect(backend, array([1, 2], [4, 5]), "pop", X, 1, 2)
    for x, dim in along_dims():
        for index in {0, x.shape[dim] // 2} & {*range(x.shape[dim])}:
            expect(backend, np.delete(x, index, dim), "pop", x, dim, index)


def test_pop_of_the_only_position_leaves_size_zero(backend):
    expect(backend, X[:0], "pop", X[:1], 0, 0)


# repeat


def test_repeat_tiles_and_does_not_interleave(backend):
    """H-19, H-20."""
    expect(backend, array(*[[1, 2, 3]] * 4), "repeat", X[:1], 0, 4)
    expect(backend, array([1, 2, 1, 2, 1, 2], [3, 4, 3, 4, 3, 4]), "repeat", array([1, 2], [3, 4]), 1, 3)
    for x, dim in along_dims():
        expect(backend, np.concatenate([x, x], dim), "repeat", x, dim, 2)


def test_repeat_zero_times_is_empty_and_once_is_the_same(backend):
    expect(backend, X[:0], "repeat", X, 0, 0)
    expect(backend, X, "repeat", X, 1, 1)


# all of them


def test_the_operations_leave_their_arguments_as_they_were(backend):
    x = backend.put(X.copy())
    (
        backend.shape(x),
        backend.cat([x, x], 0),
        backend.eq(x, x),
        backend.vectorize_dim(x, 0),
        backend.slice(x, 1, 0, 2),
    )
    backend.pop(x, 0, 0), backend.repeat(x, 1, 2), backend.unsqueeze(x, 1)
    np.testing.assert_array_equal(backend.get(x), X)


def test_numpy_integers_count_as_dimensions_and_sizes(backend):
    zero, one = np.int64(0), np.int32(1)
    expect(backend, X[1:], "slice", X, zero, one, one)
    expect(backend, X[1:], "pop", X, zero, zero)
    expect(backend, X, "repeat", X, one, one)
    expect(backend, X[:, None], "unsqueeze", X, one)
