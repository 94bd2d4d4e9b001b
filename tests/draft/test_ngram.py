"""Proposals by n-grams. V-20 to V-26 are what vLLM answers: tokens; least, most, k, max_len."""

import random

import numpy as np
import pytest

from hibachi.engine.speculation import ngram as module
from hibachi.engine.speculation.ngram import NgramDrafter, NgramIndex, ngram
from hibachi.errors import ConfigError

VLLM = {
    "V-20": ([1, 2, 3, 4, 1, 2], (2, 2, 3, 100), [3, 4, 1]),
    "V-21": ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], (1, 3, 2, 100), [9, 1]),
    "V-22": ([1, 2, 3, 4, 5], (1, 3, 2, 100), []),
    "V-23": ([1, 2, 1, 2, 1], (1, 2, 4, 100), [2, 1]),
    "V-24": ([1, 2, 3, 4, 1, 2], (2, 2, 3, 7), [3]),
    "V-24, no room": ([1, 2, 3, 4, 1, 2], (2, 2, 3, 6), []),
    "V-25": ([5, 5, 5, 5], (1, 4, 3, 100), [5]),
    "V-26": ([1], (2, 2, 3, 100), []),
}


@pytest.mark.parametrize("tokens, asked, found", VLLM.values(), ids=VLLM)
def test_what_is_proposed_is_what_vllm_proposes(tokens, asked, found):
    least, most, k, max_len = asked
    assert ngram(tokens, least, most, k, max_len) == found
    index = NgramIndex(least, most)
    index.extend(tokens)
    assert index.find(k, max_len).tolist() == found


def differences(index_class, seed, cases):
    """Where the index is not the definition, of random rows that grow by some tokens and are cut now and then."""
    draw = random.Random(seed)
    wrong = []
    for case in range(cases):
        least = draw.randint(1, 5)
        most = draw.choice([least, least + draw.randint(1, 3)])
        index, tokens, kinds = index_class(least, most), [], draw.randint(1, 4)
        for _ in range(draw.randint(1, 6)):
            more = [draw.randint(0, kinds) for _ in range(draw.choice([0, 1, 1, 2, 9]))]
            if draw.random() < 0.2:
                n = draw.randint(0, len(tokens))
                tokens = tokens[:n]
                index.cut(n)
            tokens += more
            index.extend(more)
            k, max_len = draw.randint(0, 5), draw.choice([None, len(tokens) + draw.randint(0, 3)])
            if index.find(k, max_len).tolist() != ngram(tokens, least, most, k, max_len) or len(index) != len(tokens):
                wrong.append((case, tokens, least, most, k, max_len))
    return wrong


@pytest.mark.parametrize("seed", range(3))
def test_the_index_is_the_definition_in_3000_random_rows(seed, monkeypatch):
    monkeypatch.setattr(module, "_BY_ONE", 4)  # tables are made anew as well
    assert not differences(NgramIndex, seed, 1000)


class Latest(NgramIndex):
    """A planted bug: finds the latest place instead of the earliest."""

    def find(self, k, max_len=None):
        tokens = self._tokens.tolist()
        for m in range(self._tables[0].m, self._tables[-1].m - 1, -1):
            for first in range(len(tokens) - m - 1, -1, -1):
                if tokens[first : first + m] == tokens[len(tokens) - m :]:
                    return np.array(tokens[first + m : first + m + k], np.int32)
        return np.zeros(0, np.int32)


class Uncut(NgramIndex):
    """A planted bug: what is cut stays in the tables."""

    def _fill(self):
        pass


@pytest.mark.parametrize("bug", [Latest, Uncut])
def test_a_planted_bug_is_found(bug):
    assert differences(bug, 0, 100)


def test_many_tokens_at_once_are_as_one_by_one():
    draw = random.Random(1)
    phrases = [[draw.randint(0, 50_000) for _ in range(draw.randint(3, 20))] for _ in range(30)]
    tokens = [t for _ in range(60) for t in draw.choice(phrases)] + [-1, 2**31 - 1, -(2**31)] * 5
    at_once, by_one = NgramIndex(2, 4), NgramIndex(2, 4)
    at_once.extend(tokens)
    for token in tokens:
        by_one.append(token)
    for token in tokens[:40]:
        at_once.append(token)
        by_one.append(token)
        tokens.append(token)
        assert at_once.find(5).tolist() == by_one.find(5).tolist() == ngram(tokens, 2, 4, 5)
        assert at_once.find(5).dtype == np.int32


def test_ngrams_that_fall_into_one_slot_are_told_apart(monkeypatch):
    monkeypatch.setattr(module, "_FACTOR", 0)
    monkeypatch.setattr(module, "_BY_ONE", 4)
    assert not differences(NgramIndex, 2, 100)


def test_8192_tokens_take_less_than_half_a_megabyte():
    index = NgramIndex()
    index.extend(np.random.default_rng(0).integers(0, 50_000, 8192).tolist())
    for token in range(100):
        index.append(token)
    assert 4 * 8292 < index.nbytes < 200_000


def test_a_table_grows_with_its_row_and_stays_half_empty():
    index = NgramIndex(1, 1)
    for token in range(1000):
        index.append(token)
        assert index.nbytes >= 4 * len(index) + 4 * 2 * len(index)
    index.append(3)
    assert index.find(3).tolist() == [4, 5, 6]


@pytest.mark.parametrize("least, most", [(0, 3), (4, 3), (-1, -1)])
def test_lengths_that_make_no_sense_are_refused(least, most):
    with pytest.raises(ConfigError, match=f"1 <= least <= most; got least={least}, most={most}"):
        NgramIndex(least, most)
    with pytest.raises(ConfigError):
        NgramDrafter(least, most)


def rows(*rows):
    return [np.array(row, np.int32) for row in rows]


def proposed(drafter, keys, tokens, most):
    found = drafter.propose(keys, tokens, most)
    assert all(x.dtype == np.int32 for x in found)
    return [x.tolist() for x in found]


def test_each_request_has_an_index_that_follows_its_tokens():
    drafter = NgramDrafter(2, 2)
    assert proposed(drafter, ["a", "b"], rows([1, 2, 3, 1, 2], [1, 2, 4]), [2, 2]) == [[3, 1], []]
    assert proposed(drafter, ["b", "a"], rows([1, 2, 4, 1, 2], [1, 2, 3, 1, 2, 9]), [1, 2]) == [[4], []]
    assert proposed(drafter, ["a"], rows([1, 2, 3, 1, 2, 9]), [2]) == [[]]  # no token came
    assert proposed(drafter, ["a"], rows([1, 2, 3, 1, 2]), [9]) == [[3, 1, 2]]  # tokens were taken back
    assert proposed(drafter, ["a"], rows([1, 2, 3, 1, 2]), [0]) == [[]]


def test_a_forgotten_request_leaves_nothing():
    drafter = NgramDrafter(2, 2)
    proposed(drafter, ["a"], rows([1, 2, 3, 1, 2]), [2])
    drafter.forget("a")
    drafter.forget("never seen")
    assert proposed(drafter, ["a"], rows([7, 1, 2]), [2]) == [[]]


def test_without_lengths_five_tokens_must_have_been_there_before():
    drafter = NgramDrafter()
    row = [1, 2, 3, 4, 5, 6, 0]
    assert proposed(drafter, ["a"], rows([*row, 2, 3, 4, 5]), [1]) == [[]]
    assert proposed(drafter, ["b"], rows([*row, 1, 2, 3, 4, 5]), [1]) == [[6]]
