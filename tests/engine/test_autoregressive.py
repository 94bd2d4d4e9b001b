"""What the crate `hibachi` does, and what it should have done: level 0, one test per fact.

The model answers with the last token plus 1, stop is 9 and padding 0, as in the facts.
"""

import numpy as np
import pytest

from hibachi import (
    AutoregressiveBatchInference,
    ConfigError,
    Finish,
    InvalidModelOutput,
    InvalidRequest,
    ModelError,
)

from .models import PATIENCE, Gate, Next, ints

STOP, PAD = np.array([9]), np.array([0])


@pytest.fixture
def crate(serve):
    """An engine as the crate makes it: one stop token, one padding token, four rows."""

    def make(model=None, **options):
        return serve(model, **{"stop_token": STOP, "padding_token": PAD, "max_num_seqs": 4} | options)

    return make


@pytest.fixture
def together(crate):
    """together(prompts): an engine, its gate and one stream each; all prompts are in its first batch."""

    def start(*prompts, **options):
        gate = Gate()
        engine = crate(gate, **options)
        plug = engine.run([0], max_tokens=1)  # holds the engine until all prompts are queued
        gate.wait()
        streams = [engine.run(np.array(p)) for p in prompts]
        gate.let()
        plug.collect()
        gate.wait()
        gate.shapes.clear()
        return engine, gate, streams

    return start


def collect(streams):
    return [ints(s.collect()) for s in streams]


# ---- facts H-21 to H-42 ------------------------------------------------------------------------------------------


def test_padding_token_of_rank_0():
    """H-21: padding token rank 0 is a scalar token, and fits no other."""
    with AutoregressiveBatchInference(Next(), stop_token=STOP, padding_token=np.array(0)) as engine:
        assert ints(engine.run([7])) == [8, 9]
        with pytest.raises(InvalidRequest, match=r"The padding token .*\(2,\) or \(1, 2\); got \(\)"):
            engine.run([[1, 2]])


def test_padding_token_with_two_rows():
    """H-22: padding shape (2, 10) is a token of that shape: it fits no prompt of another, with or without a dimension
    for the batch."""
    engine = AutoregressiveBatchInference(Next(), stop_token=STOP, padding_token=np.zeros((2, 10)))
    with engine, pytest.raises(InvalidRequest, match=r"The padding token .*\(\) or \(1,\); got \(2, 10\)"):
        engine.run([1, 2])


def test_stop_token_of_another_rank(crate):
    """H-23: stop token of another rank than the model output → clear error, at the first request."""
    engine = crate(stop_token=np.zeros((1, 3)))
    with pytest.raises(InvalidRequest, match=r"stop token must have the shape of one token, \(\) .*got \(1, 3\)"):
        engine.run([1, 2])


def test_new_engine(crate):
    """H-24: new engine: queue empty."""
    stats = crate().stats()
    assert (stats.waiting, stats.running, stats.steps, stats.max_num_seqs) == (0, 0, 0, 4)


def test_length_of_an_item(crate):
    """H-25: run((3, 10) item): queued length 3; the rest is the token's shape."""
    model = Next()
    engine = crate(model, stop_token=None, padding_token=None)
    engine.run(np.zeros((3, 10), int), max_tokens=2).collect()
    assert model.shapes == [(1, 3, 10), (1, 4, 10)]


def test_item_of_rank_0(crate):
    """H-26: rank-0 item → error to the caller only."""
    engine = crate()
    with pytest.raises(InvalidRequest, match="rank 1 or higher; got a scalar"):
        engine.run(np.array(5))
    assert collect([engine.run([6])]) == [[7, 8, 9]]


def test_batch_of_one(crate):
    """H-27: batch of one (10,) request → model input (1, 10)."""
    model = Next()
    crate(model).run(np.arange(10), max_tokens=1).collect()
    assert model.shapes == [(1, 10)]


def test_adding_to_a_batch(together):
    """H-28: adding to (1, 10) → (2, 10)."""
    _, gate, streams = together(np.zeros(10, int), np.zeros(10, int))
    gate.open()
    next(streams[0])
    assert gate.shapes[0] == (2, 10)


def test_after_one_step(together):
    """H-29: after one step without stop: both requests got 1 item, lengths 11, active 2."""
    engine, gate, (a, b) = together(np.zeros(10, int), np.ones(10, int))
    gate.let()
    gate.wait()  # the second step has begun
    assert ints([next(a), next(b)]) == [1, 2]
    assert not a.channel.buffer and engine.stats().running == 2
    gate.open()
    next(a)
    assert gate.shapes[:2] == [(2, 10), (2, 11)]


def test_all_rows_stop(together):
    """H-30: all rows equal stop: both got the stop token, batch empty, active 0."""
    engine, gate, streams = together([1, 8], [2, 8])
    gate.open()
    assert collect(streams) == [[9], [9]]
    assert {s.finish_reason for s in streams} == {Finish.STOP}
    assert engine.stats().running == 0 and gate.shapes == [(2, 2)]


PROMPTS = [[1, 2, 5], [1, 1, 1, 1, 6], [3], [8, 8, 8, 8, 8, 8, 8, 8], [1, 2, 3, 4]]


@pytest.mark.parametrize("padding", [PAD, None], ids=["padded", "grouped"])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 3, 1]])
def test_mixed_lengths(together, order, padding):
    """H-31: mixed lengths, any order → each stream equals its solo run (this is the test the crate fails)."""
    prompts = [PROMPTS[i] for i in order]
    _, gate, streams = together(*prompts, padding_token=padding, max_num_seqs=3)
    gate.open()
    assert collect(streams) == [list(range(p[-1] + 1, 10)) for p in prompts]


@pytest.mark.parametrize("padding", [PAD, None], ids=["padded", "grouped"])
def test_longer_joiner(together, padding):
    """H-32: longer joiner mid-flight likewise."""
    engine, gate, [a] = together([3], padding_token=padding)
    gate.let()
    gate.wait()
    b = engine.run([1, 1, 1, 1, 1, 1, 4])
    gate.open()
    assert collect([a, b]) == [[4, 5, 6, 7, 8, 9], [5, 6, 7, 8, 9]]


def test_dropped_stream(together):
    """H-33: consumer drops its stream → others unaffected, slot reused at the next step."""
    engine, gate, [a, b] = together([1], [2], max_num_seqs=2)
    c = engine.run([3])
    del a
    gate.open()
    assert collect([b, c]) == [[3, 4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 9]]
    assert gate.shapes[:2] == [(2, 1), (2, 2)], "c has the place of a in the very next step"


class Broken(Next):
    def forward(self, tokens):
        super().forward(tokens)
        raise RuntimeError("out of order")


def test_model_raises(crate):
    """H-34: model raises → every stream of that batch gets the exception, the engine keeps serving, the process lives.

    Ours asks each row alone first: only those that raise alone get it (see test_faults.py).
    """
    engine = crate(Broken())
    for _ in range(2):
        streams = [engine.run([i]) for i in range(3)]
        for s in streams:
            with pytest.raises(ModelError, match="RuntimeError: out of order") as caught:
                s.collect()
            assert isinstance(caught.value.__cause__, RuntimeError)
            assert s.finish_reason == Finish.ERROR
    assert engine.stats().failed == 6


def test_wrong_row_count(crate):
    """H-35: wrong row count → error naming expected/actual."""

    class Short(Next):
        def forward(self, tokens):
            return super().forward(tokens)[:0]

    with pytest.raises(InvalidModelOutput, match=r"Short.forward must return shape \(1,\); got \(0,\)"):
        crate(Short()).run([1]).collect()


def test_first_come_first_served(together):
    """H-36: FIFO: with S=2 and 3 requests, the third starts only after one finishes; ≥ 2 forwards."""
    engine, gate, streams = together([1], [7], [5], max_num_seqs=2)
    assert engine.stats().waiting == 1
    gate.open()
    assert collect(streams)[2] == [6, 7, 8, 9]
    assert gate.shapes[:3] == [(2, 1), (2, 2), (2, 3)]  # 7 is done after two steps


def test_one_forward_for_the_first_step(together):
    """H-37: 3 queued requests, S=4 → exactly one forward for the first step."""
    engine, gate, streams = together([1], [2], [3])
    gate.let()
    assert ints([next(s) for s in streams]) == [2, 3, 4]
    gate.wait()
    assert gate.shapes == [(3, 1)] and engine.stats().steps == 2  # the plug's and ours


def test_no_requests(crate):
    """H-38: no requests → zero forwards."""
    model = Next()
    with crate(model):
        pass
    assert model.shapes == []


# H-39 and H-40 are in test_worker.py.


def test_stop_token_is_delivered(crate):
    """H-41: stop token is the last item of the stream (crate behaviour; make it switchable)."""
    engine = crate()
    assert collect([engine.run([6]), engine.run([6], include_stop=False)]) == [[7, 8, 9], [7, 8]]
    silent = engine.run([8], include_stop=False)
    assert collect([silent]) == [[]] and silent.finish_reason == Finish.STOP


def test_the_batch_is_trimmed(together):
    """H-42: longest finishes → tensor trimmed to the longest remaining."""
    _, gate, streams = together([1, 1, 1, 1, 8], [1, 2, 5])
    gate.open()
    assert collect(streams) == [[9], [6, 7, 8, 9]]
    assert gate.shapes == [(2, 5), (1, 4), (1, 5), (1, 6)]


# ---- section 6: what the crate was seen to do --------------------------------------------------------------------


def test_empty_prompt(crate):
    """Empty prompt: the crate shows the model a (1, 0) batch. Ours refuses it, to the caller only."""
    engine = crate()
    for empty in ([], np.zeros(0, int), np.zeros((0, 2), int)):
        with pytest.raises(InvalidRequest, match="at least one token"):
            engine.run(empty)
    assert collect([engine.run([7])]) == [[8, 9]]


# ---- the rest of the face ----------------------------------------------------------------------------------------


def test_prompts_are_copied(together):
    """The caller may reuse its array at once."""
    prompt = np.array([1, 2, 3])
    engine, gate, _ = together([1])
    stream = engine.run(prompt)
    prompt[:] = 7
    gate.open()
    assert ints(stream.collect()) == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    "prompt, why",
    [
        (np.zeros((2, 3), int), r"The padding token must have the shape of one token, \(3,\) .*got \(1,\)"),
        (np.array(["a"]), "must hold numbers"),
        ([[1, 2], [3]], "equal rows"),
        (None, "must have the shape"),
    ],
)
def test_prompts_of_another_kind(crate, prompt, why):
    """The engine's own tokens must fit those of a prompt; a misfit is told so, and nobody else notices."""
    engine = crate()
    other = engine.run([6])
    with pytest.raises(InvalidRequest, match=why):
        engine.run(prompt)
    assert ints(other.collect()) == [7, 8, 9]


def test_a_model_that_is_none():
    """A model needs one rung of the ladder."""
    with pytest.raises(ConfigError, match=r"`forward\(tokens\)`.*object has none"):
        AutoregressiveBatchInference(object(), stop_token=STOP)


def test_finished_requests_are_counted(crate):
    """Whoever has seen the end of its stream sees it in the statistics."""
    engine = crate()
    for n in range(1, 20):
        engine.run([6]).collect()
        stats = engine.stats()
        assert (stats.finished, stats.running, stats.waiting, stats.new_tokens) == (n, 0, 0, 3 * n)
        assert (stats.steps, stats.prompt_tokens) == (3 * n, n)


def test_a_stream_closed_before_the_engine_saw_it_leaves_no_trace(together):
    """Closing a request that is still in the inbox: it never runs, and the queue's length stays right."""
    engine, gate, [a] = together([1])
    for _ in range(5):
        engine.run([2]).close()
    gate.open()
    assert ints(a.collect()) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert engine.drain(PATIENCE)
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.finished) == (0, 0, 7)  # with the plug
    assert {n for n, _ in gate.shapes} == {1}
