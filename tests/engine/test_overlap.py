"""A step begins before the tokens of the last one are read: nobody notices, whatever happens meanwhile."""

import random
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from hibachi import (
    EngineFailed,
    Finish,
    NumpyBackend,
    SamplingParams,
)
from hibachi.engine.recording.replay import replay
from hibachi.testing.toys import SumPaged, SumState, expected

from ..lib.inside import flights
from .models import step_with_nan, until

GREEDY = SamplingParams(temperature=0, max_tokens=None)
OTHERS = [  # what the host must see before the next step
    SamplingParams(temperature=0, logprobs=2, max_tokens=None),
    SamplingParams(temperature=1, top_p=0.9, max_tokens=None),
    SamplingParams(temperature=0, logit_bias={3: 1e-3}, max_tokens=None),
]


class Lost(Exception):
    """The device is gone."""


class Late(NumpyBackend):
    """Copies to the host end when they are asked for: with the values of then, or with an error.

    ahead: how many steps were begun before the one before was read, of so many `steps`.
    """

    name = "numpy"

    def __init__(self, trouble=lambda: None):
        super().__init__()
        self.trouble = trouble
        self.steps, self.ahead = 0, 0
        self.newest_read = True

    def fetch(self, arrays):
        self.ahead += not self.newest_read
        self.steps, self.newest_read = self.steps + 1, False
        number = self.steps
        held = [np.asarray(a).copy() for a in arrays]

        def read():
            self.newest_read |= number == self.steps
            if (error := self.trouble()) is not None:
                raise error
            return held

        return read

    def fatal(self, error):
        return isinstance(error, Lost)


def served(serve, backend, toy=SumPaged, **options):
    options = dict(max_num_seqs=4, max_num_batched_tokens=24, block_size=4, overlap=True) | options
    return serve(toy(backend), backend=backend, **options)


def finish(engine):
    """All blocks have come back, and the plans can be made again."""
    until(lambda: engine.stats().running == engine.stats().waiting == 0 and not flights(engine))
    stats = engine.stats()
    assert stats.free_blocks == stats.blocks
    engine.core.scheduler.check()
    if (dump := engine.dump())["complete"]:
        replay(dump)
    return stats


def test_steps_begin_before_the_last_one_is_read(serve):
    backend = Late()
    engine = served(serve, backend)
    assert list(engine.run([1, 2], GREEDY, max_tokens=20)) == expected([1, 2], 20)
    assert backend.ahead >= 18
    finish(engine)


@pytest.mark.parametrize("overlap", [None, False])
def test_not_where_the_backend_waits_anyway_or_nobody_wants_it(serve, overlap):
    backend = Late()
    engine = served(serve, backend, overlap=overlap)
    assert list(engine.run([1, 2], GREEDY, max_tokens=20)) == expected([1, 2], 20)
    assert backend.ahead == 0


@pytest.mark.parametrize("params", OTHERS, ids=["logprobs", "top_p", "logit_bias"])
def test_what_the_host_must_see_first_is_waited_for(serve, params):
    backend = Late()
    engine = served(serve, backend)
    streams = [engine.run([1, 2], params, max_tokens=12), engine.run([3], GREEDY, max_tokens=30)]
    assert [list(s) for s in streams] == [expected([1, 2], 12), expected([3], 30)]
    assert 10 <= backend.ahead < 30  # once it is alone
    finish(engine)


def test_models_with_a_state_are_waited_for(serve):
    backend = Late()
    engine = served(serve, backend, SumState)
    assert list(engine.run([1, 2], GREEDY, max_tokens=9)) == expected([1, 2], 9)
    assert backend.ahead == 0


def test_a_stop_token_ends_a_request_whose_next_step_has_begun(serve):
    backend = Late()
    engine = served(serve, backend)
    stream = engine.run([1, 2], GREEDY, max_tokens=30, stop_rule=2)
    other = engine.run([3], GREEDY, max_tokens=30)
    want = expected([1, 2], 30)
    assert list(stream) == want[: want.index(2) + 1] and stream.finish_reason is Finish.STOP
    assert list(other) == expected([3], 30)
    finish(engine)


def test_a_stop_predicate_sees_every_token_before_the_next_step(serve):
    backend = Late()
    engine = served(serve, backend)
    want = expected([1, 2], 30)
    got = list(engine.run([1, 2], GREEDY, max_tokens=30, stop_rule=lambda tokens: tokens == want[5]))
    assert got == want[: want.index(want[5]) + 1] and backend.ahead == 0


def test_no_step_is_made_for_rows_at_their_limit(serve):
    backend = Late()
    engine = served(serve, backend)
    list(engine.run([1, 2], GREEDY, max_tokens=5))
    assert backend.steps == 5


@pytest.mark.parametrize("bound", [1, 2, 3, 8])
def test_who_consumes_slowly_is_never_more_than_the_bound_behind(serve, bound):
    backend = Late()
    engine = served(serve, backend, pause_after=bound)
    stream = engine.run([1, 2], GREEDY, max_tokens=30)
    until(lambda: engine.health().paused == 1 and not flights(engine))
    assert len(stream.channel.buffer) == bound
    assert backend.ahead == bound - 1
    assert list(stream) == expected([1, 2], 30)
    finish(engine)


@pytest.mark.parametrize("seeded", [False, True])
def test_drawn_tokens_are_the_same_with_and_without(serve, seeded):
    """A toy without certainty: the logits are flat, so the random number decides, and that one's place in the text."""

    class Flat(SumPaged):
        def step(self, params, cache, x):
            out, cache = super().step(params, cache, x)
            return out * 0.001, cache

    params = SamplingParams(temperature=0.7 if seeded else 0, seed=3 if seeded else None, max_tokens=None)
    got = []
    for overlap in (False, True):
        backend = Late()
        engine = served(serve, backend, Flat, overlap=overlap)
        streams = [engine.run([k], params, max_tokens=10 + k) for k in range(7)]
        got.append([list(s) for s in streams])
        assert (backend.ahead > 10) == overlap
    assert got[0] == got[1]


@pytest.mark.parametrize("error", [Lost("off the bus"), MemoryError("no more"), RuntimeError("a bad moment")], ids=repr)
@pytest.mark.parametrize("at", [0, 1, 7])
def test_an_error_that_shows_when_tokens_are_read_takes_both_steps_back(serve, error, at):
    reads = iter(range(1000))
    backend = Late(lambda: error if next(reads) == at else None)
    engine = served(serve, backend, restart="on_failure")
    streams = [engine.run([k, 2], GREEDY, max_tokens=12 + k) for k in range(6)]
    assert [list(s) for s in streams] == [expected([k, 2], 12 + k) for k in range(6)]
    assert backend.steps > at + 1
    finish(engine)


def test_a_device_that_is_lost_ends_every_stream_if_we_may_not_begin_again(serve):
    backend = Late(lambda: Lost("off the bus"))
    engine = served(serve, backend)
    streams = [engine.run([0], GREEDY, max_tokens=12)]
    with suppress(EngineFailed):  # who comes later may be told at the call
        streams += [engine.run([k], GREEDY, max_tokens=12) for k in (1, 2)]
    for stream in streams:
        with pytest.raises(EngineFailed, match="off the bus"):
            list(stream)


def troubled(seed, toy=SumPaged):
    """A toy for which now and then a step goes wrong, and a backend for which it shows later; 7 raises, 5 makes NaN."""
    rng = random.Random(seed)

    def trouble():
        luck = rng.random()
        return (
            MemoryError("late") if luck < 0.01 else Lost("late") if luck < 0.02 else RuntimeError("late")
        ) if luck < 0.03 else None  # fmt: skip

    class Troubled(toy):
        luck = 1.0

        def step(self, params, cache, x):
            before, self.luck = self.luck, rng.random()
            luck = self.luck if before > 0.05 else 1.0
            if luck < 0.02:
                raise MemoryError("no more")
            if luck < 0.03:
                raise Lost("off the bus")
            if luck < 0.05:
                raise RuntimeError("a bad moment")
            if (x.tok == 7).any():
                raise ValueError("poisoned")
            return step_with_nan(super().step, x.tok == 5, params, cache, x)

    return Troubled, Late(trouble)


def right(prompt, n):
    """What comes before the error, and whether there is one."""
    every = [*prompt, *expected(prompt, n)]
    first = min([i for i, token in enumerate(every) if token in (5, 7)], default=len(every))
    return every[len(prompt) : max(first + 1, len(prompt))], first < len(every) - 1


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_other_libraries_give_the_same_tokens(library):
    hibachi = pytest.importorskip("hibachi")
    pytest.importorskip(library)
    prompts = [[1, 2, 3], [4, 5], list(range(40)), [7], [9, 9, 9, 9], [3, 1, 4, 1, 5, 9, 2, 6]]
    params = [SamplingParams(max_tokens=10 + k, temperature=0 if k % 2 else 0.8, seed=k) for k in range(6)]
    got = []
    for overlap in (False, True):
        with hibachi.LLM("tiny", backend=library, max_num_seqs=4, overlap=overlap, deterministic=True) as llm:
            got.append([out.token_ids for out in llm.generate(prompts, params)])
    assert got[0] == got[1]


@pytest.mark.parametrize("recorded", [False, True])
def test_the_cuda_backend_overlaps_and_replays(recorded):
    hibachi = pytest.importorskip("hibachi")
    pytest.importorskip("torch")
    from hibachi_torch.cuda import CudaTorchBackend

    class Recorder:
        def record(self, launch):
            out, cache = launch()
            return (out, cache), lambda: out.copy_(launch()[0])

    prompts = [[1, 2, 3], [4, 5], list(range(40)), [7], [9, 9, 9, 9], [3, 1, 4, 1, 5, 9, 2, 6]]
    got = []
    for overlap in (False, True):
        backend = CudaTorchBackend("cpu", recorder=Recorder if recorded else None)
        assert backend.asynchronous
        make = partial(hibachi.LLM, "tiny", backend=backend, deterministic=False, block_size=16)
        with make(overlap=None if overlap else False) as llm:
            got.append([o.token_ids for o in llm.generate(prompts, SamplingParams(max_tokens=30, temperature=0))])
    assert got[0] == got[1]
