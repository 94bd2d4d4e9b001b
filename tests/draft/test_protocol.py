"""What is left of a drafter's proposals: only what can be used, and nothing is raised."""

import re

import numpy as np
import pytest

from hibachi.engine.speculation.protocol import checked


class Raises:
    def __init__(self, error):
        self.error = error

    def __array__(self, *args, **more):
        raise self.error

    def __repr__(self):
        raise self.error


def left(found, most, vocab_size=100):
    out = checked(found, most, vocab_size)
    assert all(x.dtype == np.int32 and x.ndim == 1 for x in out.proposals)
    assert len(out.proposals) == len(most)
    return [x.tolist() for x in out.proposals], out.wrong


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64])
def test_integers_of_any_kind_are_taken(dtype):
    found = [np.array([1, 99], dtype), np.array([3], dtype)]
    assert left(found, [2, 2]) == ([[1, 99], [3]], None)
    assert left([[1, 2], (3,)], [2, 2]) == ([[1, 2], [3]], None)
    assert left(iter(found), [2, 2]) == ([[1, 99], [3]], None)


def test_a_row_may_have_none():
    assert left([[], np.zeros(0), np.zeros(0, np.int32)], [2, 2, 2]) == ([[], [], []], None)
    assert left([], []) == ([], None)


def test_too_many_are_cut():
    assert left([[1, 2, 3], [4, 5, 6]], [1, 2]) == ([[1], [4, 5]], None)


@pytest.mark.parametrize("token", [-1, 100, 2**31, -(2**31) - 1, 2**63])
def test_proposals_end_before_a_token_that_is_not_in_the_vocabulary(token):
    assert left([np.array([1, token, 2]) if token < 2**63 else np.array([1, token, 2], np.uint64)], [3]) == (
        [[1]],
        None,
    )
    assert left([[token]], [3]) == ([[]], None)


@pytest.mark.parametrize(
    "row, wrong",
    [
        ([1.0, 2.0], "the dtype float64"),
        ([True], "the dtype bool"),
        (["1"], "the dtype <U1"),
        (np.array([1, None]), "the dtype object"),
        ([2**64], "the dtype object"),
        ([[1, 2]], r"integers \[at most 2\], got the shape \[1, 2\]"),
        (7, r"the shape \[\]"),
        (None, r"the shape \[\]"),
        ([[1], [2, 3]], "got .*: ValueError"),
        (Raises(TypeError("on the device")), "a value of type Raises: TypeError: on the device"),
    ],
)
def test_a_row_without_an_array_of_integers_has_none(row, wrong):
    rows, why = left([[1], row, [2], row], [2] * 4)
    assert rows == [[1], [], [2], []]
    assert why.startswith("row 1: expected an array of integers")
    assert re.search(wrong, why), why


@pytest.mark.parametrize(
    "found, wrong",
    [
        ([[1]], "expected 2 arrays, one for each row, got 1"),
        ([[1], [2], [3]], "expected 2 arrays, one for each row, got 3"),
        (None, "expected a sequence of 2 arrays, got None: TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_other_than_one_array_a_row_is_none_for_all(found, wrong):
    assert left(found, [2, 2]) == ([[], []], wrong)


def test_what_is_left_is_a_copy():
    found = np.array([1, 2], np.int32)
    (row,), _ = checked([found], [2], 100)
    found[:] = 9
    assert row.tolist() == [1, 2]
