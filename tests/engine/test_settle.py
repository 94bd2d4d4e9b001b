"""What a lazy library has put off is computed before it leaves the engine's thread: `ArrayBackend.settle`."""

import threading
from functools import partial

import numpy as np
import pytest
from typing_extensions import override

from hibachi import AutoregressiveBatchInference, FeedforwardBatchInference, NumpyBackend, SamplingParams
from hibachi.backend.infer import settle_model
from hibachi.engine.runners.runner import Part, joined
from hibachi.testing.toys import SumFrames, SumPaged, SumState, SumTokens, TinyDecoder, Toy, tiny_weights

GREEDY = SamplingParams(temperature=0, max_tokens=4)


class Lazy(NumpyBackend):
    """Remembers what was settled, and in which thread."""

    def __init__(self):
        super().__init__()
        self.settled = []

    @override
    def settle(self, arrays):
        todo = [arrays]
        while todo:
            value = todo.pop()
            if isinstance(value, (list, tuple)):
                todo += value
            else:
                assert isinstance(value, np.ndarray)
                self.settled.append((value, threading.current_thread()))

    def has_settled(self, array):
        """Not here, but in another thread?"""
        mine = threading.current_thread()
        return any(each is array and thread is not mine for each, thread in self.settled)


@pytest.fixture
def lazy():
    return Lazy()


@pytest.mark.parametrize(
    "model, prompt", [(SumTokens, np.ones(3, int)), (SumFrames, np.ones((3, SumFrames.codes), int))]
)
def test_tokens_that_a_model_returns(lazy, model, prompt):
    with AutoregressiveBatchInference(model(lazy), backend=lazy, max_model_len=16) as engine:
        items = list(engine.run(prompt, max_tokens=3))
    assert len(items) == 3 and all(lazy.has_settled(item.base) for item in items)


def test_tokens_of_several_calls(lazy):
    parts = [Part(np.arange(2), np.ones(2, int), np.ones(2, int), np.zeros(2, bool)) for _ in range(2)]
    whole = joined(parts, np.arange(0), lazy)
    assert any(value is whole.batch for value, _ in lazy.settled)


def test_outputs_without_a_sequence(lazy):
    class Twice(Toy):
        def forward(self, x):
            return x * 2

    with FeedforwardBatchInference(Twice(lazy), backend=lazy) as engine:
        assert lazy.has_settled(engine.run([1, 2]).result().base)


def test_vectors(lazy):
    model = TinyDecoder(lazy, tiny_weights())
    model.hidden = lambda params, cache, x: model.step(params, cache, x)
    with AutoregressiveBatchInference(model, backend=lazy, max_model_len=16, deterministic=False) as engine:
        assert lazy.has_settled(engine.embed([1, 2, 3]).result().base)


@pytest.mark.parametrize("overlap", [False, True])
def test_caches_after_a_chunk_whose_outputs_nobody_wants(lazy, overlap):
    seen = []

    class Counting(SumPaged):
        @override
        def step(self, params, cache, x):
            seen.append(any(value is cache[0][0] for value, _ in lazy.settled))
            return super().step(params, cache, x)

    options = dict(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, overlap=overlap)
    with AutoregressiveBatchInference(Counting(lazy), backend=lazy, **options) as engine:
        assert len(list(engine.run([1] * 50, GREEDY))) == 4
    assert not seen[0] and all(seen[1:4])


def test_states_and_those_that_are_kept(lazy):
    with AutoregressiveBatchInference(SumState(lazy), backend=lazy, max_model_len=1024, block_size=4) as engine:
        list(engine.run([1] * 600, GREEDY))
        memory = engine.core.runner.memory
        assert lazy.has_settled(memory.cache[0]) and lazy.has_settled(memory.kept[0])


def test_a_model_when_an_engine_starts_in_the_thread_that_starts_it(lazy):
    class Held(SumTokens):
        def __init__(self, backend):
            super().__init__(backend)
            self.table = np.arange(3)
            self.layers = [{"weight": np.ones(2)}, (np.zeros(2), "a name")]
            self.layers.append(self.layers)  # round and round

    model = Held(lazy)
    model.params = {"w": np.ones(1)}
    AutoregressiveBatchInference(model, backend=lazy, max_model_len=16).close()
    here = {id(value) for value, thread in lazy.settled if thread is threading.current_thread()}
    layers = model.layers
    wanted = [model.table, layers[0]["weight"], layers[1][0], model.params["w"]]
    assert {id(value) for value in wanted} <= here


def test_a_model_of_one_pass_when_an_engine_starts(lazy):
    class Held(Toy):
        def forward(self, x):
            return x * self.scale

    model = Held(lazy)
    model.scale = np.ones(1)
    FeedforwardBatchInference(model).close()
    assert [value is model.scale for value, _ in lazy.settled] == [True]


@pytest.mark.parametrize(
    "engine", [partial(AutoregressiveBatchInference, max_model_len=4), FeedforwardBatchInference], ids=["tokens", "one"]
)
def test_a_model_whose_library_the_first_request_tells(lazy, monkeypatch, engine):
    monkeypatch.setattr("hibachi.backend.infer.backend_for", lambda array: lazy)

    class Held:
        def __init__(self):
            self.one = np.ones(1, int)

        def forward(self, tokens):
            return tokens[:, -1] + self.one

    model = Held()
    with engine(model) as e:
        assert not lazy.settled
        e.run(np.ones(2, int))
        assert lazy.settled[0][0] is model.one and lazy.settled[0][1] is threading.current_thread()


def test_a_model_that_is_a_dict(lazy):
    class Module(dict):
        pass

    module = Module(weight=np.ones(2), inner=Module(weight=np.zeros(2)))
    module["parent"] = module
    settle_model(module, lazy)
    assert len(lazy.settled) == 2
