"""Proposals from a predicted text: they follow the answer, and find it again after a difference."""

import random

import numpy as np
import pytest

from hibachi.engine.speculation.ngram import LONG, NEAR, ExpectedTokens, predicted


def found(prediction, answer, k=4):
    """Told all at once; told token by token it must be the same."""
    ids = np.array(prediction, np.int32)
    slow, whole = ExpectedTokens(ids), ExpectedTokens(ids).find(np.array(answer, np.int32), k)
    for n in range(len(answer) + 1):
        last = slow.find(np.array(answer[:n], np.int32), k)
    assert whole.dtype == last.dtype == np.int32 and whole.tolist() == last.tolist()
    return whole.tolist()


TEXT = list(range(100, 130))


@pytest.mark.parametrize(
    "answer, next_",
    [
        ([], [100, 101, 102, 103]),
        ([100], [101, 102, 103, 104]),
        (TEXT[:28], [128, 129]),
        (TEXT, []),
        ([100, 101, 7], []),  # something else
        ([100, 101, 7, 103], [104, 105, 106, 107]),  # ... in the place of a token
        ([100, 101, 7, 102], [103, 104, 105, 106]),  # ... between two
        ([100, 101, 103], [104, 105, 106, 107]),  # one is left out
        ([100, 101, *TEXT[20:23]], [123, 124, 125, 126]),  # many are
        ([7, 8, 9, 100], [101, 102, 103, 104]),  # it begins later
        ([*TEXT, 100], []),  # it was left at the end: one token says nothing
        ([*TEXT, 100, 101, 102], [103, 104, 105, 106]),  # and begins anew
    ],
)
def test_it_goes_on_where_the_answer_stands(answer, next_):
    assert found(TEXT, answer) == next_ == predicted(TEXT, answer, 4)


def test_it_goes_on_behind_the_place_that_it_left_and_not_at_the_first_that_looks_alike():
    text = [1, 2, 3, 10, 1, 2, 3, 11, 1, 2, 3, 12]
    assert found(text, [1, 2, 3, 10, 9, 1, 2, 3], 1) == [11]
    assert found(text, [1, 2, 3, 10, 1, 2, 3, 11, 9, 1, 2, 3], 1) == [12]


def test_one_token_says_something_only_near_the_place_that_was_left():
    far = [1, 2, *range(100, 100 + NEAR), 7, 8]
    assert found(far, [1, 2, 9, 99 + NEAR], 1) == [7]
    assert found(far, [1, 2, 9, 7], 1) == []


def test_it_equals_the_definition():
    r = random.Random(0)
    for case in range(1500):
        words = r.choice((2, 5, 40))
        text = [r.randrange(words) for _ in range(r.randrange(1, 60))]
        answer = list(text)
        for _ in range(r.randrange(4)):
            at = r.randrange(len(answer) + 1)
            answer[at : at + r.randrange(5)] = [r.randrange(words + 2) for _ in range(r.randrange(5))]
        answer, k = answer[: r.randrange(len(answer) + 1)], r.randrange(1, 9)
        assert found(text, answer, k) == predicted(text, answer, k), case


def test_tokens_that_were_taken_back_have_not_come():
    mine = ExpectedTokens(np.array(TEXT, np.int32))
    for n in (9, 20, 4, 0, 7):
        assert mine.find(np.array(TEXT[:n], np.int32), 2).tolist() == TEXT[n : n + 2]


@pytest.mark.parametrize("text", [[5], [5, 6], [2**31 - 1, 0, 2**31 - 1, 0], [0] * 5000])
def test_short_and_dull_texts(text):
    for answer in ([], [5], text, [9], [0, 0, 0, 1], [2**31 - 1] * LONG):
        assert found(text, answer) == predicted(text, answer, 4)
