"""Level 0 and feed-forward run on the nine operations alone: engines get an object that has nothing else."""

import threading

import numpy as np
import pytest

from hibachi import ConfigError, InvalidRequest, StopRule
from hibachi.testing.toys import expected

from .nine import OPERATIONS, Host

pytestmark = pytest.mark.promise("nine operations alone", parts=["nine operations"])


def total(tokens):
    return (tokens.sum(1) + 1) % 10


def last(tokens):
    return tokens[:, -1] + 1


PROMPTS = [1, 2], [3, 3, 1, 5, 8], [6], [2, 5, 1]


def test_rows_of_equal_length_go_together_and_nothing_is_padded(nine):
    """H-25 to H-31."""
    engine = nine.engine(total, max_num_seqs=8)
    got = nine.read(nine.run(engine, *PROMPTS, [4, 4], max_tokens=3))
    assert got == [(expected(p, 3), "length") for p in (*PROMPTS, [4, 4])]
    assert (2, 2) in nine.model.shown, "rows of equal length did not share a call"


def test_shorter_rows_are_padded_in_front_and_trimmed_when_the_longest_leaves(nine):
    """H-31, H-32, H-42: the model of the crate's tests."""
    engine = nine.engine(last, stop_token=9, padding_token=[0])
    got = nine.read(nine.run(engine, [1, 1, 1, 1, 6], [1, 2, 5], [7], [1, 2]))
    assert got == [(list(range(first, 10)), "stop") for first in (7, 6, 8, 3)]
    assert (4, 5) in nine.model.shown, "rows of several lengths did not share a call"
    assert nine.model.shown[-1][1] < 11, "the padding was never trimmed"


def test_the_engine_asks_for_each_of_the_nine_and_for_nothing_else(nine):
    engine = nine.engine(last, stop_token=9, padding_token=[0])
    nine.read(nine.run(engine, [1, 1, 1, 1, 6], [1, 2, 5], [7], [1, 2], [4], [3, 3]))
    missing = set(OPERATIONS) - set(nine.ops.calls)
    assert not missing, f"no call of {sorted(missing)}"


def test_a_stop_token_may_be_left_out_and_requests_bring_rules_of_their_own(nine):
    """H-41."""
    engine = nine.engine(last, stop_token=9)
    streams = [
        engine.run(nine.put([6]), include_stop=False),
        engine.run(nine.put([1]), stop_rule=nine.put(4)),
        engine.run(
            nine.put([1]), stop_rule=StopRule(where=lambda t: nine.backend.put(np.array(nine.backend.get(t) == 3)))
        ),
    ]
    assert nine.read(streams) == [([7, 8], "stop"), ([2, 3, 4], "stop"), ([2, 3], "stop")]


def test_tokens_of_several_kinds_share_an_engine_and_no_call(nine):
    """Each request has its own kind."""
    engine = nine.engine(total)
    frames = [[1, 2, 3], [1, 0, 5]]
    got = nine.read(nine.run(engine, [1, 2], frames, [1.5, 2.0], max_tokens=2))
    assert got[0] == (expected([1, 2], 2), "length") and got[1] == (expected(frames, 2), "length")
    assert got[2] == ([4.5, 9.0], "length")


def test_nan_ends_its_own_row(nine):
    """It is the only number that is not equal to itself."""
    engine = nine.engine(lambda t: np.where(t[:, -1] > 2, np.nan, t[:, -1] + 1))
    got = nine.read(nine.run(engine, [1.0], [2.5], [0.5], max_tokens=2))
    assert got == [([2.0, 3.0], "length"), ([], "NonFiniteOutput"), ([1.5, 2.5], "length")]


def test_a_model_that_raises_ends_the_guilty_request_alone(nine):
    """H-34, H-35."""

    def guilty(tokens):
        if (tokens == 7).any():
            raise RuntimeError("cannot compute this")
        return total(tokens)

    engine = nine.engine(guilty)
    got = nine.read(nine.run(engine, [1, 2], [7, 2], [2, 2], [4, 4], max_tokens=2))
    assert got[1] == ([], "ModelError")
    assert [got[i][0] for i in (0, 2, 3)] == [expected(p, 2) for p in ([1, 2], [2, 2], [4, 4])]
    short = nine.engine(lambda t: t[:-1, -1] if len(t) > 1 else t[:0, -1])
    assert nine.read([short.run(nine.put([1]), max_tokens=1)]) == [([], "InvalidModelOutput")]


def test_a_model_may_write_into_what_it_is_shown_and_use_its_output_again(nine):
    kept = dict[str, object]()

    def write(tokens):
        try:
            tokens[...] = 9
        except Exception:  # these arrays cannot be written to
            return

    class Writes(Host):
        def forward(self, tokens):
            out = super().forward(tokens)
            write(tokens)
            if "out" in kept:
                write(kept["out"])
            kept["out"] = out
            return out

    engine = nine.engine(total)
    model = Writes(nine.backend, total)
    engine = nine.serving(model, backend=nine.ops)
    prompt = nine.put([1, 2])
    stream = engine.run(prompt, max_tokens=4)
    write(prompt)
    assert nine.read([stream]) == [(expected([1, 2], 4), "length")]


def test_who_leaves_disturbs_nobody_and_a_row_is_used_again(nine):
    """H-33, H-36."""
    engine = nine.engine(total, max_num_seqs=3)
    third, closed, steps = threading.Event(), threading.Event(), []

    def wait(tokens):
        steps.append(tokens)
        if len(steps) == 3:
            third.set()
            closed.wait(nine.serving.patience)
        return [False] * nine.ops.shape(tokens)[0]

    streams = nine.run(engine, [1, 2], [2, 2], [4, 4], [5, 5], max_tokens=30, stop_rule=wait)
    assert third.wait(nine.serving.patience), "the engine never took three steps"
    streams[1].close()
    closed.set()
    got = nine.read([streams[0], *streams[2:]])
    assert got == [(expected(p, 30), "length") for p in ([1, 2], [4, 4], [5, 5])]


def test_inputs_of_a_feedforward_model_are_joined_by_shape(nine):
    """H-43, H-44."""
    model = Host(nine.backend, lambda x: x * 2)
    engine = nine.serving.single(model, backend=nine.ops)
    items = [engine.run(nine.put(x)) for x in ([1, 2], [3, 4], [1, 2, 3], [1.5, 2.5])]
    assert [nine.backend.get(i.result(nine.serving.patience)).tolist() for i in items] == [
        [2, 4], [6, 8], [2, 4, 6], [3.0, 5.0],
    ]  # fmt: skip


def test_what_is_no_array_of_the_backend_is_refused_at_the_call(nine):
    """H-26."""
    engine = nine.engine(last, stop_token=9, padding_token=[0])
    nothing = nine.ops.slice(nine.put([1]), 0, 0, 0)
    for prompt in ([1, 2], 5, None, "abc", object(), nine.put(3), nothing, nine.put([[1, 2]])):
        with pytest.raises(InvalidRequest):
            engine.run(prompt)
    assert nine.read([engine.run(nine.put([7]))]) == [([8, 9], "stop")]


def test_higher_levels_are_refused_with_what_they_need(nine):
    class Logits:
        vocab_size, max_model_len = 10, 64

        def logits(self, tokens, lengths):
            raise AssertionError

    with pytest.raises(ConfigError, match=r"level 1.*hibachi\.ArrayBackend"):
        nine.serving(Logits(), backend=nine.ops)
    with pytest.raises(ConfigError, match="8 of the nine"):
        del nine.ops.pop
        nine.serving.single(Host(nine.backend, total), backend=nine.ops)
