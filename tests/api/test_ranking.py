"""Texts that are compared, and inputs that are put into classes: what is asked, and the numbers of the answer."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from msgspec import Raw, to_builtins
from numpy.testing import assert_allclose

from hibachi.errors import ModelError
from hibachi.llm.dialects import ranking
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.openai.bodies import Bounds, RerankBody, ScoreBody, read
from hibachi.llm.dialects.vectors import shortened

SMALL = Bounds(prompts=3)


def scored(**fields):
    return ranking.scored(read(ScoreBody, json.dumps(fields).encode()), SMALL)


def ranked(**fields):
    return ranking.ranked(read(RerankBody, json.dumps({"query": "q"} | fields).encode()), SMALL)


def refused(ask, *args, **fields):
    with pytest.raises(Refused) as caught:
        ask(*args, **fields)
    assert caught.value.status == 400
    return caught.value.param, caught.value.code


# ---- what is asked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one, other", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_pairs_of_texts(one, other):
    assert scored(**{one: "a", other: "b"}) == (["a"], ["b"])
    assert scored(**{one: "a", other: ["b", "c"]}) == (["a"], ["b", "c"])
    assert scored(**{one: ["a", "b"], other: ["c", "d"]}) == (["a", "b"], ["c", "d"])
    assert refused(scored, **{one: ["a", "b"], other: "c"}) == (one, "invalid_value")
    assert refused(scored, **{one: ["a", "b"], other: ["c", "d", "e"]}) == (one, "invalid_value")
    for nothing in ("", []):
        assert refused(scored, **{one: "a", other: nothing}) == (other, "empty_array")
        assert refused(scored, **{one: nothing, other: "b"}) == (one, "empty_array")
    assert refused(scored, **{one: "a", other: list("bcde")}) == (other, "invalid_value")


def test_a_pair_has_two_sides():
    for fields in (
        {},
        {"text_1": "a"},
        {"text_1": "a", "documents": "b"},
        {"text_1": "a", "text_2": "b", "items": "c"},
    ):
        assert refused(scored, **fields) == ("text_1", "missing_required_parameter")


def test_documents():
    assert ranked(documents=["a", {"text": "b"}]) == (["a", "b"], 2)
    assert ranked(documents=["a", "b"], top_n=1) == (["a", "b"], 1)
    assert ranked(documents=["a", "b"], top_n=0) == ranked(documents=["a", "b"], top_n=None) == (["a", "b"], 2)
    assert ranked(documents=["a"], top_n=10**30) == (["a"], 10**30)
    assert refused(ranked, documents=[]) == ("documents", "empty_array")
    assert refused(ranked, documents=list("abcd")) == ("documents", "invalid_value")
    assert refused(ranked, documents=["a"], top_n=-1) == ("top_n", "invalid_value")


def test_nothing_is_applied_to_a_cosine():
    unsupported = "use_activation", "unsupported_parameter"
    assert refused(scored, text_1="a", text_2="b", use_activation=True) == unsupported
    assert refused(ranked, documents=["a"], use_activation=True) == unsupported
    assert scored(text_1="a", text_2="b", use_activation=False) == (["a"], ["b"])


# ---- numbers ---------------------------------------------------------------------------------------------------------


def vectors(*rows):
    return [np.array(row, np.float32) for row in rows]


def test_cosines():
    """Of vectors of any length: some models do not give unit ones."""
    found = ranking.cosines(vectors([3, 4]), vectors([30, 40], [-3, -4], [4, -3], [1, 0]))
    assert found == pytest.approx([1, -1, 0, 0.6]) and all(-1 <= x <= 1 for x in found)
    assert ranking.cosines(vectors([1, 0], [0, 2]), vectors([1, 0], [3, 0])) == [1.0, 0.0]
    assert ranking.cosines(vectors([0, 0]), vectors([1, 0], [0, 0])) == [0.0, 0.0]
    huge = ranking.cosines(vectors([3e38, 3e38]), vectors([3e38, 0]))
    assert huge == pytest.approx([math.sqrt(0.5)])


def test_the_best_come_first():
    found = ranking.ranking([0.1, 0.9, 0.9, -0.5], list("abcd"), 3, "7", "tiny", 12, with_texts=True)
    assert to_builtins(found) == {
        "id": "rerank-7",
        "model": "tiny",
        "usage": {"prompt_tokens": 12, "total_tokens": 12},
        "results": [
            {"index": 1, "relevance_score": 0.9, "document": {"text": "b"}},
            {"index": 2, "relevance_score": 0.9, "document": {"text": "c"}},
            {"index": 0, "relevance_score": 0.1, "document": {"text": "a"}},
        ],
    }
    short = ranking.ranking([0.1, 0.9], list("ab"), 10**30, "7", "tiny", 12, with_texts=False).results
    assert to_builtins(short) == [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}]


def test_vectors_may_be_shortened():
    long = vectors([3, 4, 12], [0, 0, 5])
    assert [v.tolist() for v in shortened(long, None)] == [[3, 4, 12], [0, 0, 5]]
    first, second = shortened(long, 2)
    assert_allclose(first, [0.6, 0.8], rtol=1e-7)
    assert second.tolist() == [0, 0] and first.dtype == second.dtype == np.float32
    assert_allclose(shortened(long, 3)[0], np.array([3, 4, 12]) / 13, rtol=1e-6)
    assert refused(shortened, long, 4) == ("dimensions", "invalid_value")


def test_softmax_of_huge_logits():
    assert_allclose(ranking.softmax(np.array([0.0, math.log(3)])), [0.25, 0.75])
    assert ranking.softmax(np.array([1e308, -1e308])).tolist() == [1.0, 0.0]


def test_what_a_classifier_returns():
    assert ranking.output(np.float32([[1, 2]]), 2).tolist() == [1.0, 2.0]
    for wrong in ([1.0], [1.0, 2.0, 3.0], [1.0, np.nan], [np.inf, 0.0]):
        with pytest.raises(ModelError, match="one finite number for each of its 2 labels"):
            ranking.output(np.array(wrong), 2)


# ---- inputs ----------------------------------------------------------------------------------------------------------


def inputs(given, shape=None, dtype="float32"):
    kind = None if shape is None else (shape, dtype)
    found = ranking.inputs(Raw(json.dumps(given).encode()), kind, SMALL)
    return [(one.tolist(), one.dtype.kind) for one in found]


def test_inputs_of_a_known_shape():
    """One of them, or several; 1 means 1.0 where floats are wanted."""
    assert inputs([1, 2.5], (2,)) == [([1, 2.5], "f")] and inputs([1, 2], (2,), "int64") == [([1, 2], "i")]
    assert inputs([[1, 2], [3, 4]], (2,)) == [([1, 2], "f"), ([3, 4], "f")]
    assert inputs(7, ()) == [(7, "f")] and inputs([7, 8], ()) == [(7, "f"), (8, "f")]
    assert inputs([[1], [2]], (2, 1)) == [([[1], [2]], "f")]
    assert len(inputs([list(range(9))] * 3, (9,))) == 3  # more numbers than there may be inputs
    for wrong in ([1], [[1]], [[[1, 2]]], 7, [[1, 2, 3]], []):
        assert refused(inputs, wrong, (2,)) == ("input", "invalid_value")


def test_inputs_of_any_shape():
    """Then the list is one of inputs."""
    assert inputs([1, [2.5], [[3]]]) == [(1, "i"), ([2.5], "f"), ([[3]], "i")]
    packed = {"dtype": "float32", "shape": [1], "data": "AACAPw=="}
    assert inputs([packed]) == [([1.0], "f")] and inputs(packed, (1,)) == [([1.0], "f")]
    for wrong in (7, "a", None, {"a": 1}):
        assert refused(inputs, wrong) == ("input", "invalid_value")


@pytest.mark.parametrize("wrong", [[[1, [2]], [1]], [["a", "b"]], [[None, 1]], [[10**30, "x"]], [{"a": 1}]], ids=str)
@pytest.mark.parametrize("shape", [None, (2,)])
def test_what_is_no_input(shape, wrong):
    param, _ = refused(inputs, wrong, shape)
    assert param.startswith("input")


@pytest.mark.parametrize("shape", [None, (2,), ()])
def test_how_many_inputs(shape):
    one = [1, 2] if shape is None else np.ones(shape).tolist()
    assert len(inputs([one] * 3, shape)) == 3
    assert refused(inputs, [one] * 4, shape) == ("input", "invalid_value")
    if shape != (2,):
        assert refused(inputs, [], shape) == ("input", "empty_array")


def test_lists_in_lists_in_lists():
    deep = "[" * 500 + "]" * 500
    for kind in (None, ((2,), "float32")):
        assert refused(ranking.inputs, Raw(f"[{deep}]".encode()), kind, SMALL)[0].startswith("input")
