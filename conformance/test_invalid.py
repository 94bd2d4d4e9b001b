"""An operation that has no meaning raises InvalidTensorOperation before the array library is asked.

The libraries accept many of these silently, and differently: they broadcast, promote, clamp, count back.
"""

import pytest

from hibachi import InvalidTensorOperation

from .cases import call, repro, sample

pytestmark = pytest.mark.promise("invalid operations refused")

X = sample((2, 3))
NOT_INTEGERS = (True, 1.0, None, "0")


def refuses(backend, op, *args, says=()):
    """The call raises InvalidTensorOperation, whose message has all its parts and names what is in `says`."""
    try:
        got = call(backend, op, *args)
    except InvalidTensorOperation as e:
        assert e.op == op, f"{repro(op, *args)} blamed {e.op!r}"
        for part in ("op", "expected", "got", "mend"):
            assert getattr(e, part) and getattr(e, part) in str(e), f"no {part!r} in: {e}"
        for word in says:
            assert str(word) in str(e), f"no {word!r} in: {e}"
    except Exception as e:
        raise AssertionError(f"{repro(op, *args)} let {type(e).__module__}.{type(e).__name__} out: {e}") from e
    else:
        raise AssertionError(f"{repro(op, *args)} was accepted and gave {got!r}")


def refuses_dims(backend, op, beyond, *args, x=X):
    """op(x, dim, *args) is refused for dims beyond the rank, negative ones, and ones that are no integers."""
    for dim in (beyond, beyond + 7, -1, -2, *NOT_INTEGERS):
        refuses(backend, op, x, dim, *args, says=[repr(dim)])


# cat


def test_cat_refuses_a_dimension_that_does_not_exist(backend):
    """H-06."""
    refuses_dims(backend, "cat", 2, x=[X, X])


def test_cat_refuses_arrays_of_rank_zero(backend):
    refuses(backend, "cat", [sample(()), sample(())], 0)


def test_cat_refuses_shapes_that_differ_elsewhere(backend):
    """H-06."""
    refuses(backend, "cat", [X, sample((2, 4))], 0, says=[(2, 3), (2, 4)])
    refuses(backend, "cat", [X, X, sample((3, 3))], 1, says=[(3, 3)])
    refuses(backend, "cat", [X, sample((1, 1))], 0)
    refuses(backend, "cat", [X, sample((0,))], 0)


def test_cat_refuses_ranks_that_differ(backend):
    refuses(backend, "cat", [X, sample((3,))], 0)
    refuses(backend, "cat", [X, sample((2, 3, 1))], 0)


def test_cat_refuses_dtypes_that_differ(backend):
    refuses(backend, "cat", [X, sample((2, 3), "float32")], 0, says=["int32", "float32"])
    refuses(backend, "cat", [X, X, sample((2, 3), "bool")], 0)


def test_cat_refuses_an_empty_list(backend):
    """H-06."""
    refuses(backend, "cat", [], 0)


def test_cat_refuses_an_array_in_place_of_a_list(backend):
    refuses(backend, "cat", X, 0)


# eq


def test_eq_refuses_to_broadcast(backend):
    """H-08."""
    for shape in ((3,), (1, 3), (2, 1), (), (2, 3, 1), (3, 2)):
        refuses(backend, "eq", X, sample(shape), says=[(2, 3), shape])


def test_eq_refuses_dtypes_that_differ(backend):
    refuses(backend, "eq", X, sample((2, 3), "float32"), says=["int32", "float32"])
    refuses(backend, "eq", X, sample((2, 3), "bool"))


# vectorize_dim


def test_vectorize_dim_refuses_a_dimension_that_does_not_exist(backend):
    refuses_dims(backend, "vectorize_dim", 2)


def test_vectorize_dim_refuses_rank_zero(backend):
    """H-11."""
    refuses(backend, "vectorize_dim", sample(()), 0)


# slice


def test_slice_refuses_a_dimension_that_does_not_exist(backend):
    refuses_dims(backend, "slice", 2, 0, 1)


def test_slice_refuses_to_pass_the_end(backend):
    """H-13."""
    for start, length in ((0, 4), (1, 3), (3, 1), (4, 0)):
        refuses(backend, "slice", X, 1, start, length, says=[start, length, (2, 3)])


def test_slice_refuses_a_negative_start(backend):
    refuses(backend, "slice", X, 1, -1, 1)
    refuses(backend, "slice", X, 1, -3, 3)


def test_slice_refuses_a_negative_length(backend):
    refuses(backend, "slice", X, 1, 2, -1)
    refuses(backend, "slice", X, 1, 0, -1)


def test_slice_refuses_bounds_that_are_not_integers(backend):
    for n in NOT_INTEGERS:
        refuses(backend, "slice", X, 1, n, 1)
        refuses(backend, "slice", X, 1, 0, n)


# idx_where_all_true


def test_idx_where_all_true_refuses_a_dimension_that_does_not_exist(backend):
    """H-16."""
    refuses_dims(backend, "idx_where_all_true", 2, x=sample((2, 3), "bool"))


def test_idx_where_all_true_refuses_what_is_not_bool(backend):
    for dtype in ("int32", "float32"):
        refuses(backend, "idx_where_all_true", sample((2, 3), dtype), 0, says=[dtype, "bool"])


# pop


def test_pop_refuses_a_dimension_that_does_not_exist(backend):
    refuses_dims(backend, "pop", 2, 0)


def test_pop_refuses_an_index_that_does_not_exist(backend):
    """H-18."""
    refuses(backend, "pop", X, 0, 3, says=["Index 3 is out of bounds for dimension 0 with size 2"])
    refuses(backend, "pop", X, 1, 3, says=["Index 3 is out of bounds for dimension 1 with size 3"])
    refuses(backend, "pop", sample((2, 0)), 1, 0, says=["Index 0 is out of bounds for dimension 1 with size 0"])


def test_pop_refuses_a_negative_index(backend):
    refuses(backend, "pop", X, 0, -1, says=["Index -1 is out of bounds"])
    refuses(backend, "pop", X, 1, -3)


def test_pop_refuses_an_index_that_is_not_an_integer(backend):
    for index in NOT_INTEGERS:
        refuses(backend, "pop", X, 1, index)


# repeat


def test_repeat_refuses_a_dimension_that_does_not_exist(backend):
    """H-19."""
    refuses_dims(backend, "repeat", 2, 2)


def test_repeat_refuses_a_negative_count(backend):
    refuses(backend, "repeat", X, 0, -1, says=[-1])


def test_repeat_refuses_a_count_that_is_not_an_integer(backend):
    for times in NOT_INTEGERS:
        refuses(backend, "repeat", X, 0, times)


# unsqueeze


def test_unsqueeze_refuses_a_dimension_that_does_not_exist(backend):
    """H-03."""
    refuses_dims(backend, "unsqueeze", 3)
    refuses(backend, "unsqueeze", sample(()), 1)


# all of them


def test_rank_zero_is_refused_where_a_dimension_is_needed(backend):
    x = sample(())
    refuses(backend, "slice", x, 0, 0, 0)
    refuses(backend, "idx_where_all_true", sample((), "bool"), 0)
    refuses(backend, "pop", x, 0, 0)
    refuses(backend, "repeat", x, 0, 1)


class Foreign:
    """Looks like an array, and NumPy would convert it; but no library made it."""

    shape, ndim, dtype = (2, 3), 2, X.dtype

    def __array__(self, dtype=None, copy=None):
        return X


def test_what_is_not_an_array_of_the_library_is_refused(backend):
    x = backend.put(X)
    for wrong in ([[1, 2, 3], [4, 5, 6]], [True, False], (1, 2), 5, 1.0, None, "abc", range(3), Foreign()):
        refuses(backend, "shape", wrong)
        refuses(backend, "cat", [x, wrong], 0)
        refuses(backend, "eq", x, wrong)
        refuses(backend, "eq", wrong, x)
        refuses(backend, "vectorize_dim", wrong, 0)
        refuses(backend, "slice", wrong, 0, 0, 1)
        refuses(backend, "idx_where_all_true", wrong, 0)
        refuses(backend, "pop", wrong, 0, 0)
        refuses(backend, "repeat", wrong, 0, 2)
        refuses(backend, "unsqueeze", wrong, 0)
