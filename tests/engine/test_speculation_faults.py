"""Proposed tokens and what fails: a request gets the tokens that it gets without proposals, then its error."""

import numpy as np
import pytest

from hibachi import InvalidRequest, ModelError, NonFiniteOutput
from hibachi.engine.recording.replay import ReplayDiffers, read, replay
from hibachi.testing.toys import SumBoth, SumPaged, SumState, expected

from ..guide.toyguides import rule
from .test_speculation import GREEDY, Oracle, Random, engine


class NotFinite(SumPaged):
    """Outputs behind a 6 are not finite."""

    def step(self, params, cache, x):
        out, cache = super().step(params, cache, x)
        out = out.copy()
        out[x.tok[x.last] == 6] = np.nan
        return out, cache


def until_it_fails(stream):
    got = []
    with pytest.raises((ModelError, NonFiniteOutput, InvalidRequest)) as caught:
        for token in stream:
            got.append(token)
    return got, type(caught.value), str(caught.value)


def raises_at(n):
    def process(ids, logits):
        if len(ids) == n:
            raise ArithmeticError("planted")
        return logits

    return process


KINDS = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.0001},
    "a processor raises": {"logits_processors": [raises_at(3)]},
    "nothing is left": {"structured_outputs": rule([4], [8], [6], [2], most=9), "allowed_token_ids": [4, 8, 6]},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "drafter", [Oracle(), Oracle(2), Oracle(0), Random()], ids=["right", "half", "wrong", "random"]
)
def test_the_tokens_before_a_failure_come(kind, drafter):
    model = SumPaged if kind in ("a processor raises", "nothing is left") else NotFinite
    found = []
    for each, k in ((drafter, 0), (drafter, 4)):
        with engine(each, k, model=model) as e:
            streams = [e.run([1, 2], GREEDY.with_(**KINDS[kind])), e.run([4, 0], GREEDY.with_(max_tokens=1))]
            found.append(until_it_fails(streams[0]))
            assert streams[1].collect() == expected([4, 0], 1)
            e.core.scheduler.check()
    assert found[0] == found[1] and found[0][0] == [4, 8, 6]


class NowAndThen(SumPaged):
    """Memory runs out in some steps of several rows."""

    steps = 0

    def step(self, params, cache, x):
        self.steps += 1
        if self.steps % 9 == 0 and len(x.tok) > 1:
            raise MemoryError("no more")
        return super().step(params, cache, x)


def test_a_recording_with_proposals_can_be_played_again(tmp_path):
    """Also where memory runs out, rows are preempted and readers are slow."""
    path = tmp_path / "record.jsonl"
    small = dict(cache_tokens=192, block_size=4, max_num_seqs=8, pause_after=3, record=path)
    with engine(Random(3), model=NowAndThen, **small) as e:
        streams = [e.run([i % 10, 1, 2], GREEDY) for i in range(40)]
        streams.pop(7).close()
        assert all(len(stream.collect()) == 20 for stream in streams)
        stats, drafted = e.stats(), e.core.drafting.drafted
    recorded = read(path)
    kinds = [event["event"] for event in recorded["events"]]
    assert drafted.accepted and stats.preemptions and {"draft", "limit", "pause"} <= {*kinds}
    assert replay(recorded) >= stats.steps
    without = [event for event in recorded["events"] if event["event"] != "draft"]
    with pytest.raises(ReplayDiffers):
        replay({**recorded, "events": without})


class Sevens:
    def propose(self, keys, tokens, most):
        return [[7] * n for n in most]


@pytest.mark.parametrize("toy", [SumPaged, SumState, SumBoth], ids=lambda toy: toy.__name__)
@pytest.mark.parametrize("why", ["a token", "memory"])
def test_no_request_fails_for_its_proposals(toy, why):
    """The model raises for a token that nobody is given unless it is proposed; it has memory for two tokens a row."""

    class Fails(toy):
        def step(self, params, cache, x):
            if why == "a token" and (x.tok == 7).any():
                raise ValueError("no such token")
            if why == "memory" and len(x.tok) > 2 * len(x.row):
                raise MemoryError("no more")
            return super().step(params, cache, x)

    with engine(Sevens() if why == "a token" else Oracle(), model=Fails) as e:
        streams = [e.run([i, 2 - i], GREEDY) for i in range(3)]
        assert [stream.collect() for stream in streams] == [expected([i, 2 - i], 20) for i in range(3)]
        assert e.core.drafting.drafted.proposed
        e.core.scheduler.check()
