"""Backends of nine operations at their worst, beside requests that must not notice."""

import importlib.util
import threading
from pathlib import Path

import numpy as np
import pytest

from hibachi import (
    AutoregressiveBatchInference,
    BackendError,
    ConfigError,
    FeedforwardBatchInference,
    HibachiError,
    InvalidModelOutput,
    InvalidRequest,
)
from hibachi.backend.nine import OPERATIONS
from hibachi.engine.runners.nine import taken

from ..engine.models import ints

spec = importlib.util.spec_from_file_location("nine_numpy", Path(__file__).parents[2] / "examples" / "nine_numpy.py")
nine_numpy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nine_numpy)
Nine, Next = nine_numpy.Nine, nine_numpy.Next


def wrong(operation, change, when=lambda *args: True, times=10**9):
    """A backend whose operation gives change(result), where `when(result, *args)` says so, so many times."""
    left = [times]

    def broken(self, *args):
        out = getattr(Nine, operation)(self, *args)
        if left[0] and when(out, *args):
            left[0] -= 1
            return change(out)
        return out

    return type("Wrong", (Nine,), {operation: broken})()


def boom(out):
    raise RuntimeError("the library is in a bad mood")


def said(engine, *prompts):
    """What each stream gives, or the error that ends it."""
    streams = [engine.run(np.array(p), max_tokens=4) for p in prompts]
    out = []
    for stream in streams:
        try:
            out.append(ints(stream.collect()))
        except HibachiError as e:
            out.append(e)
    return out


HAS_SEVENTY = lambda out, *_: isinstance(out, np.ndarray) and (out == 70).any()  # noqa: E731 (read as a table)


@pytest.mark.parametrize(
    "nine",
    [
        wrong("cat", boom, HAS_SEVENTY),
        wrong("cat", lambda out: out[0], HAS_SEVENTY),
        wrong("cat", lambda out: out[:, :-1], HAS_SEVENTY),
        wrong("repeat", boom, HAS_SEVENTY),
        wrong("repeat", lambda out: out[..., None], HAS_SEVENTY),
        wrong("unsqueeze", lambda out: out[0], HAS_SEVENTY),
    ],
    ids=["raises", "a rank less", "a token less", "a copy raises", "a rank more", "no new axis"],
)
def test_the_step_of_whom_an_operation_fails_for_ends_and_others_live(nine):
    with AutoregressiveBatchInference(Next(), backend=nine, max_model_len=40) as engine:
        one, bad, two = said(engine, [1, 2], [67, 68], [3, 4])
        assert one == [3, 4, 5, 6] and two == [5, 6, 7, 8]
        assert isinstance(bad, BackendError) and "hibachi conformance" in str(bad)
        assert said(engine, [5]) == [[6, 7, 8, 9]]


@pytest.mark.parametrize("operation", ["cat", "repeat", "vectorize_dim", "eq", "idx_where_all_true", "shape"])
def test_an_operation_that_fails_once_harms_nobody(operation):
    backend = wrong(operation, boom, times=0)
    with AutoregressiveBatchInference(Next(), backend=backend, max_model_len=40) as engine:
        assert said(engine, [1, 2]) == [[3, 4, 5, 6]]
    later = []
    backend = wrong(
        operation, boom, lambda *_: threading.current_thread().name == "hibachi-engine" and len(later) > 0, 1
    )
    with AutoregressiveBatchInference(Next(), backend=backend, max_model_len=40) as engine:
        later.append(1)
        assert said(engine, [1, 2], [3, 4], [5, 6]) == [[3, 4, 5, 6], [5, 6, 7, 8], [7, 8, 9, 10]]


@pytest.mark.parametrize(
    "nine",
    [
        wrong("vectorize_dim", lambda out: out[:-1]),
        wrong("idx_where_all_true", lambda out: [*out, 99]),
        wrong("idx_where_all_true", lambda out: None),
        wrong("shape", lambda out: 3),
    ],
)
def test_an_operation_that_is_always_wrong_is_named(nine):
    with AutoregressiveBatchInference(Next(), backend=nine, max_model_len=40) as engine:
        try:
            (found,) = said(engine, [1, 2])
        except InvalidRequest as e:
            found = e
        assert isinstance(found, BackendError | InvalidRequest) and engine.health().state != "failed"


def test_own_stop_tokens_are_those_of_the_engine_too_with_and_without_a_dimension_for_the_batch():
    for token in (np.array(6), np.array([6])):
        with AutoregressiveBatchInference(Next(), backend=Nine(), stop_token=token, max_model_len=40) as engine:
            assert ints(engine.run(np.array([4])).collect()) == [5, 6]
            assert ints(engine.run(np.array([4]), stop_rule=np.array([5])).collect()) == [5]
            assert ints(engine.run(np.array([4]), stop_rule=np.array(9)).collect()) == [5, 6]


class Double:
    def forward(self, x):
        return x + x


def test_a_prompt_and_an_input_are_copied_once_and_whole():
    taken = []
    nine = wrong("repeat", lambda out: taken.append(out.shape) or out, lambda *_: not taken)
    with AutoregressiveBatchInference(Next(), backend=nine, max_model_len=40) as engine:
        prompt = np.array([1, 2, 3])
        stream = engine.run(prompt, max_tokens=2)
        prompt[:] = 50
        assert ints(stream.collect()) == [4, 5]
    assert taken == [(3,)]
    taken.clear()
    with FeedforwardBatchInference(Double(), backend=nine) as engine:
        assert engine.run(np.array([1.0, 2.0])).result().tolist() == [2.0, 4.0]
    assert taken == [(1, 2)]


def test_a_model_that_is_told_lengths_needs_put():
    class Told(Next):
        def forward(self, tokens, lengths):
            return super().forward(tokens)

    class Bare:
        name = "bare"

    for operation in OPERATIONS:
        setattr(Bare, operation, getattr(Nine, operation))
    with pytest.raises(ConfigError, match=r"Told.forward is told `lengths`.*Give it `put`"):
        AutoregressiveBatchInference(Told(), backend=Bare(), max_model_len=40)


def test_any_rows_are_taken_in_order():
    rows = np.arange(12).reshape(6, 2)
    for chosen in range(1, 2**6):
        places = [i for i in range(6) if chosen >> i & 1]
        assert taken(Nine(), rows, places, 6).tolist() == rows[places].tolist()


@pytest.mark.parametrize("answer", [None, (np.zeros(1),), [1], "x"])
def test_an_answer_that_is_no_array_is_named(answer):
    class Wrong(Next):
        def forward(self, tokens):
            return answer if 70 in tokens else super().forward(tokens)

    with AutoregressiveBatchInference(Wrong(), backend=Nine(), max_model_len=40) as engine:
        one, bad = said(engine, [1, 2], [69, 70])
        assert one == [3, 4, 5, 6] and isinstance(bad, InvalidModelOutput) and "Wrong.forward must return" in str(bad)
