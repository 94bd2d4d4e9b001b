"""The kind of a token, its shape and dtype, belongs to its request."""

import numpy as np
import pytest

import hibachi
from hibachi import AutoregressiveBatchInference, ConfigError, FeedforwardBatchInference, InvalidRequest
from hibachi.testing.verify import Subject

from ..lib.inside import built
from ..lib.leaks import kept
from .models import ints


class Next:
    """Level 0. Notes what each call is shown."""

    def __init__(self):
        self.shown = []

    def forward(self, tokens):
        self.shown.append((tokens.shape, tokens.dtype))
        return tokens[:, -1] + 1


@pytest.fixture
def engine(serve):
    return lambda **options: serve(Next(), **options)


class Notes(Next):
    example_prompts = example_inputs = ([1.0, 2.0], [3, 0.5])


@pytest.mark.parametrize("name, dtype", [("numpy", "float64"), ("torch", "float32"), ("jax", "float32")])
def test_lists_of_floats_are_of_the_default_dtype_of_their_library(serve, name, dtype):
    model = Notes()
    for given in ([1.0, 2.5], (1, 2.5), [[1.0], [2.5]], [[[1, 2.5]]]):
        serve(model, backend=name).run(given, max_tokens=1).collect()
        FeedforwardBatchInference(model, backend=name).run(given).result()
    FeedforwardBatchInference(model, backend=name, token=[0.0, 0.0]).run([1.0, 2.0]).result()
    assert {str(kind).rpartition(".")[2] for _, kind in model.shown} == {dtype}
    assert serve(Notes(), backend=name, token=0.5).facts.token == ((), dtype)
    for feedforward in (False, True):
        subject = Subject(Notes(), hibachi.load_backend(name), feedforward=feedforward)
        assert subject.driver.tokens["a"].dtype == dtype
        subject.close()
    if dtype == "float32":
        with pytest.raises(InvalidRequest, match=r"float32.* cannot hold 1e\+300"):
            serve(Notes(), backend=name).run([1e300])


def test_requests_of_several_kinds_never_share_a_call(engine):
    one = engine(max_num_seqs=8)
    prompts = [[1, 2], [3.0, 4.0], [[1, 2], [3, 4]], [5, 6], np.array([7, 8], np.int16), [7.0, 8.0]]
    streams = [one.run(prompt, max_tokens=30) for prompt in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        last = np.asarray(prompt)[-1]
        assert [np.asarray(t).tolist() for t in stream.collect()] == [(last + i).tolist() for i in range(1, 31)]
    kinds = {(shape[2:], str(dtype)) for shape, dtype in one.model.shown}
    assert kinds == {((), "int64"), ((), "float64"), ((2,), "int64"), ((), "int16")}


def test_tables_of_kinds_that_nobody_has_any_more_are_dropped(engine):
    one, held = engine(max_num_seqs=2), []
    for n in range(1, 40):
        one.run(np.zeros((2, n), int), max_tokens=1).collect()
        held.append(kept(built(one).runner.tables))
    assert held[-1] <= max(held[:5])


def test_token_fixes_the_kind_for_all(engine):
    one = engine(token=0)
    assert ints(one.run(np.array([5], np.int16), max_tokens=1).collect()) == [6]
    for prompt in ([[1, 2]], [1.5], [[1], [2]]):
        with pytest.raises(InvalidRequest, match=r"takes prompts of tokens of shape \(\) and int64; got"):
            one.run(prompt)
    frames = engine(token=np.zeros(3, np.float32))
    assert frames.run([[1, 2, 3.5]], max_tokens=1).collect()[0].tolist() == [2, 3, 4.5]
    with pytest.raises(InvalidRequest, match="without a dimension for the batch"):
        frames.run([1.0])
    with pytest.raises(ConfigError, match="token must be one token"):
        engine(token="a")
    with pytest.raises(InvalidRequest, match="stop token"):
        engine(token=0, stop_token=[1, 2])


def test_a_stop_token_without_a_limit_has_a_bound():
    with AutoregressiveBatchInference(Next(), stop_token=3) as engine:
        assert engine.max_model_len == 2**20
        assert ints(engine.run([1]).collect()) == [2, 3]


def test_kinds_of_a_cached_model_that_returns_tokens(serve):
    """Level 2: the calls are apart, and so is what may be shared."""

    class Sums:
        params, vocab_size, max_model_len = None, None, 64

        def __init__(self):
            self.backend, self.shown = hibachi.NumpyBackend(), []

        def cache_spec(self):
            return [hibachi.State(shape=(1,))]

        def step(self, params, cache, x):
            self.shown.append(x.tok.shape[1:])
            tokens = x.tok.reshape(len(cache[0]), -1, *x.tok.shape[1:])
            return tokens[:, -1] + 1, cache

    model = Sums()
    engine = serve(model, backend=None, max_num_seqs=4)
    streams = [engine.run(p, max_tokens=3) for p in ([1, 2], [[1, 2]], [4], [[3, 3]])]
    assert [[np.asarray(t).tolist() for t in s.collect()] for s in streams] == [
        [3, 4, 5], [[2, 3], [3, 4], [4, 5]], [5, 6, 7], [[4, 4], [5, 5], [6, 6]],
    ]  # fmt: skip
    assert {*model.shown} == {(), (2,)}
