"""Requests that wait for their caller after each token.

Whatever is fed, each item is what a fresh request behind the same tokens gives, and nobody is in anybody's way.
"""

import asyncio
import importlib.util
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hibachi import (
    AutoregressiveBatchInference,
    DeadlineExceeded,
    Guidance,
    InvalidCall,
    InvalidRequest,
    NumpyBackend,
    RequestError,
    SamplingParams,
    Terms,
    Trie,
)
from hibachi.engine.conversions import to_host
from hibachi.engine.recording.replay import replay
from hibachi.testing.toys import Halve, SumBoth, SumLogits, SumOwn, SumOwnState, SumPaged, SumState, SumTokens, expected
from hibachi_torch import TorchBackend

from .frames import DrawnState, OwnFrames, StateFrames, WholeFrames
from .models import Background, until
from .test_overlap import Late

spec = importlib.util.spec_from_file_location("nine_numpy", Path(__file__).parents[2] / "examples" / "nine_numpy.py")
nine_numpy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nine_numpy)
IDS = ((), 10, np.int32)  # shape of a token, numbers below, dtype
SEEDED = partial(SamplingParams, temperature=1.3, top_k=5)
SOFT = partial(SamplingParams, temperature=400.0)  # of the toys, whose margin is 1000


class Asynchronous(NumpyBackend):
    """Level 0 keeps its inputs where the model computes."""

    asynchronous = True


def toy(model, backend=NumpyBackend, **options):
    return lambda: dict(model=model(backend()), **options)


CASES = {
    "level 0": (toy(SumTokens, padding_token=7), None, IDS),
    "level 0, any shape": (toy(SumTokens), None, ((2, 3), 10, np.int64)),
    "level 0, floats": (toy(Halve), None, ((3,), 1.0, np.float32)),
    "level 0, kept on the device": (toy(SumTokens, Asynchronous), None, ((2,), 10, np.int64)),
    "level 0, nine operations": (
        lambda: dict(model=nine_numpy.Next(), backend=nine_numpy.Nine()), None, ((2,), 10, np.int64),
    ),
    "level 0, torch": (toy(SumTokens, TorchBackend), None, ((2,), 10, np.int64)),
    "level 1": (toy(SumLogits), SOFT, IDS),
    "level 1, frames": (lambda: dict(model=WholeFrames()), SEEDED, ((3,), 7, np.int32)),
    "own cache": (toy(SumOwn, max_num_batched_tokens=4), SOFT, IDS),
    "own cache, alone": (toy(SumOwn, deterministic=True), SOFT, IDS),
    "own state": (toy(SumOwnState), SOFT, IDS),
    "own cache, frames": (lambda: dict(model=OwnFrames()), SEEDED, ((3,), 7, np.int32)),
    "paged": (toy(SumPaged, max_num_batched_tokens=4, max_num_seqs=3, block_size=4), SOFT, IDS),
    "paged, little memory": (toy(SumPaged, cache_tokens=52, block_size=4, max_num_seqs=4), SOFT, IDS),
    "paged, overlapping": (toy(SumPaged, Late, overlap=True, block_size=4), SOFT, IDS),
    "paged, proposals": (
        toy(SumPaged, speculative_config={"method": "ngram", "num_speculative_tokens": 3}), SOFT, IDS,
    ),
    "state": (toy(SumState, max_num_batched_tokens=4, max_num_seqs=2), SOFT, IDS),
    "both": (toy(SumBoth, block_size=4, max_num_seqs=2), SOFT, IDS),
    "state, frames": (lambda: dict(model=StateFrames(), max_num_seqs=2), SEEDED, ((3,), 7, np.int32)),
    "draws itself": (lambda: dict(model=DrawnState(), max_num_seqs=2), SamplingParams, ((2,), 1.0, np.float32)),
}  # fmt: skip


@pytest.mark.parametrize("make, params, kind", CASES.values(), ids=CASES)
def test_each_item_is_what_a_fresh_request_gives(make, params, kind):
    """Five at once beside two that nobody feeds, with rows for three at most: each in a thread of its own."""
    shape, below, dtype = kind

    def tokens(rng, n):
        return (rng.random((n, *shape)) * below).astype(dtype)

    def how(i):
        return None if params is None else params(seed=i)

    def company(engine):
        rng = np.random.default_rng(9)
        return [engine.run(tokens(rng, 3 + i), how(i), max_tokens=30) for i in range(2)]

    def play(engine, i):
        rng, told = np.random.default_rng(i), []
        stand = tokens(rng, 1 + 2 * i)
        end = len(stand) + 24
        stream = engine.run(stand, how(i), max_tokens=24, fed=True)
        for item in stream:
            told.append((stand, to_host(item)))
            given = tokens(rng, rng.integers(1, 6))[: end - 1 - len(stand)]
            if not len(given) or rng.random() < 0.3:
                stream.feed()
                given = to_host(item)[None]
            else:
                stream.feed(given[0] if len(given) == 1 else given)
            stand = np.concatenate([stand, given])
        assert stream.finish_reason == "length" and len(stand) == end
        return told

    with AutoregressiveBatchInference(**{"max_model_len": 60, "max_num_seqs": 3} | make()) as engine:
        others = company(engine)
        players = [Background(partial(play, engine, i)) for i in range(5)]
        told = [player.result() for player in players]
        beside = [[to_host(item) for item in stream.collect()] for stream in others]
        until(lambda: engine.stats().running == engine.stats().waiting == 0)
        engine.core.scheduler.check()
        assert not (dump := engine.dump())["complete"] or replay(dump)
    with AutoregressiveBatchInference(**{"max_model_len": 60} | make()) as alone:
        for i, items in enumerate(told):
            for stand, item in items[:: 1 + i]:
                assert np.array_equal(to_host(alone.run(stand, how(i), max_tokens=1).collect()[0]), item)
        for stream, items in zip(company(alone), beside, strict=True):
            assert all(np.array_equal(to_host(a), b) for a, b in zip(stream.collect(), items, strict=True))


SPECULATING = {"method": "ngram", "num_speculative_tokens": 3}
GREEDY = SamplingParams(temperature=0)


def waiting(engine, n=1):
    until(lambda: engine.core.paused == n and not engine.stats().waiting)


def test_it_waits_with_one_item_and_goes_on_in_its_row(serve):
    """1 2 -> 4, for which 7 stands -> 1, behind 1 5 5 -> 2 ..., none of which a proposal brings forward."""
    engine = serve(SumPaged(NumpyBackend()), speculative_config=SPECULATING)
    stream = engine.run([1, 2], GREEDY, fed=True)
    assert next(stream) == 4
    waiting(engine)
    assert engine.health().state == "idle" and stream.come() == [] and engine.stats().steps == 1
    stream.feed(7)
    assert next(stream) == 1
    stream.feed([1, 5, 5])
    assert next(stream) == 2
    for want in expected([1, 2, 7, 1, 5, 5, 2], 9):  # it repeats, so that n-grams are found
        stream.feed()
        assert next(stream) == want
        waiting(engine)
        assert stream.come() == []
    assert engine.stats().steps == 12 and not engine.stats().preemptions


@pytest.mark.parametrize("model", [SumTokens, SumLogits, SumOwn, SumPaged, SumState])
def test_nobody_waits_for_who_waits(model, serve):
    """One row: others start and end while it waits, and it computes again what prefix caching does not have."""
    engine = serve(model(NumpyBackend()), max_num_seqs=1, block_size=4)
    how = None if model is SumTokens else GREEDY
    fed = [engine.run(np.array([1] * 9 + [i]), how, max_tokens=9, fed=True) for i in range(3)]
    assert [int(next(stream)) for stream in fed] == [0, 1, 2]
    assert [int(t) for t in engine.run(np.array([3]), how, max_tokens=5).collect()] == expected([3], 5)
    before = engine.meters().computed
    for i, stream in enumerate(fed):
        stream.feed(np.array([i, 2]))
    assert [int(next(stream)) for stream in fed] == [(9 + i + i + 2 + 1) % 10 for i in range(3)]
    assert engine.meters().computed - before == 3 * (12 if model in (SumTokens, SumLogits) else 4)
    assert {"feed", "room"} <= {event["event"] for event in engine.dump()["events"]} and replay(engine.dump())


@pytest.mark.parametrize("rows", [2, 5])
def test_linked_rows_are_fed(rows, serve):
    """Continuations apart, one that is guided and the row that guides it alike."""
    engine = serve(SumPaged(NumpyBackend()), max_num_seqs=rows)
    streams = engine.run_many([1, 2], GREEDY, 4, max_tokens=4, fed=True)
    assert [next(stream) for stream in streams] == [4] * 4
    for i, stream in enumerate(streams):
        stream.feed([i, i])
    assert [next(stream) for stream in streams] == [(4 + 2 * i) % 10 for i in range(4)]
    for stream in streams:
        stream.feed()
    assert [stream.collect() for stream in streams] == [expected([1, 2, i, i], 2)[1:] for i in range(4)]
    stream = engine.run([1, 2], GREEDY, guidance=Guidance(0, prompt=[4, 4, 1]), fed=True)  # the other row is all
    assert next(stream) == 0
    stream.feed([5, 6])
    assert next(stream) == 1


def test_limits_stops_and_ends(serve):
    engine = serve(SumPaged(NumpyBackend()))
    stream = engine.run([1, 2], GREEDY, max_tokens=4, fed=True)
    assert next(stream) == 4
    stream.feed([1, 1, 1])
    assert next(stream) == 7
    until(lambda: stream.finish_reason == "length")
    stream.feed(1)  # behind the last item
    with pytest.raises(RequestError, match=r"has ended \(length\)"):
        stream.feed(1)
    assert stream.collect() == []
    with pytest.raises(InvalidRequest, match=r"^The guidance of the request: A prompt must hold at least one token"):
        engine.run([1, 2], GREEDY, guidance=Guidance(prompt=[]))
    guidance = Guidance(0, prompt=[4])
    for more in {}, {"guidance": guidance}:
        stream = engine.run([1, 2], GREEDY, max_tokens=4, fed=True, **more)
        assert next(stream) is not None
        stream.feed([1, 1, 1, 1])  # no room for another item
        assert stream.collect() == [] and stream.finish_reason == "length"
    until(lambda: engine.stats().running == 0)
    stream = engine.run([1, 2], GREEDY, stop_rule=[8], fed=True)
    assert next(stream) == 4
    stream.feed(8)  # the caller's tokens stop nothing
    assert next(stream) == 2
    stream.feed([2, 4, 8])  # 1 2 8 2 4 8 -> 6
    assert next(stream) == 6
    stream.feed(1)
    assert next(stream) == 7
    stream.feed([7, 4])
    assert next(stream) == 8
    stream.feed()
    assert stream.collect() == [] and stream.finish_reason == "stop"


def test_what_is_wrong_is_said_at_the_call_and_harms_nothing(serve):
    engine = serve(SumPaged(NumpyBackend()))
    stream = engine.run([1, 2], GREEDY, fed=True)
    with pytest.raises(InvalidRequest, match="none was read since the last time"):
        stream.feed(3)
    assert next(stream) == 4
    for given, message in (
        (10, "from 0 to 9"), (-1, "from 0 to 9"), ([3, 10], "from 0 to 9"), (1.5, "integers of shape"),
        ([[1]], "integers of shape"), ([], "at least one token"), ("a", "must hold numbers"), ([1, [2]], "equal rows"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match=message):
            stream.feed(given)
    stream.feed(3)
    with pytest.raises(InvalidRequest, match="none was read since the last time"):
        stream.feed(3)
    assert next(stream) == 7
    with pytest.raises(InvalidCall, match=r"make this one with run\(..., fed=True\)"):
        engine.run([1], GREEDY, max_tokens=1).feed()
    with pytest.raises(InvalidRequest, match="fed must be True or False; got 1"):
        engine.run([1], GREEDY, fed=1)
    floats = serve(Halve(NumpyBackend())).run(np.zeros((1, 3), np.float32), fed=True)
    next(floats)
    for given, message in (np.zeros(4), "shape"), (np.array([1, 2, 3]), "float32"), ([1e300, 0, 0], "cannot hold"):
        with pytest.raises(InvalidRequest, match=message):
            floats.feed(given)
    floats.feed([8.0, 4, 2])
    assert next(floats).tolist() == [4, 2, 1]


def test_it_ends_while_it_waits(serve):
    """By its time, by its caller, by what is fed too late, and with the engine."""
    engine = serve(SumPaged(NumpyBackend()), max_num_seqs=2)
    late = engine.run([1], GREEDY, terms=Terms(timeout=0.05), fed=True)
    left, dropped, closed = (engine.run([1, 2], GREEDY, fed=True) for _ in range(3))
    assert [next(stream) for stream in (late, left, dropped, closed)] == [2, 4, 4, 4]
    with pytest.raises(DeadlineExceeded, match="feed it sooner, as it waited for that"):
        next(late)
    with pytest.raises(RequestError, match=r"ended \(error\)"):
        late.feed()
    left.feed()
    left.close()
    with pytest.raises(RequestError, match=r"ended \(cancelled\)"):
        left.feed()
    del dropped
    until(lambda: engine.stats().running + engine.stats().waiting == 1)
    engine.core.scheduler.check()
    engine.close()
    with pytest.raises(RequestError, match=r"ended \(closed\)"):
        closed.feed()


def test_tasks_feed_too(serve):
    engine = serve(SumPaged(NumpyBackend()), max_num_seqs=2)

    async def play(i):
        got, stream = [], engine.run([1, i], GREEDY, max_tokens=6, fed=True)
        async for token in stream:
            got.append(token)
            stream.feed(i)
        return got

    async def all_of_them():
        return await asyncio.gather(*(play(i) for i in range(6)))

    assert asyncio.run(all_of_them()) == [[(2 + i + i * n) % 10 for n in range(6)] for i in range(6)]


def test_a_form_goes_on_behind_what_is_fed(serve):
    """The guide was told what was drawn; behind what is fed it is where that leads, or the request fails by name."""
    paths = Trie([[4, 1, 2, 3], [5, 6, 6, 7], [5, 6, 8, 9]])
    engine = serve(SumPaged(NumpyBackend()), speculative_config=SPECULATING)
    stream = engine.run([1, 2], GREEDY, allowed=paths, fed=True)
    assert next(stream) == 4
    stream.feed([5, 6])
    assert next(stream) in (6, 8)
    stream.feed(8)
    assert next(stream) == 9 and stream.collect() == [] and stream.finish_reason == "stop"
    stream = engine.run([1, 2], GREEDY, allowed=paths, fed=True)
    next(stream)
    stream.feed(7)
    with pytest.raises(InvalidRequest, match="no path of `allowed` has there"):
        next(stream)
