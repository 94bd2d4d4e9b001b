"""Is it worth asking more? A stage needs those before it. Whether tokens are the right ones is left to the others."""

import numpy as np
import pytest

from hibachi.testing.toys import Count, SumLogits, SumPaged

from .cases import sample
from .serving import raise_error


def stage(look):
    return pytest.mark.promise("smoke", look=look)


@stage("put(a, dtype), which takes a NumPy array, and at owns(t)")
def test_an_array_can_be_put(backend):
    for dtype in ("float32", "int32", "bool"):
        there = backend.put(sample((2, 3), dtype))
        assert backend.owns(there), f"put gave a {type(there).__qualname__}, which the backend does not own"


@stage("get(t), which gives a NumPy array")
def test_it_comes_back(backend):
    for dtype in ("float32", "int32", "bool"):
        x = sample((2, 3), dtype)
        got = backend.get(backend.put(x))
        assert isinstance(got, np.ndarray), f"get gave a {type(got).__qualname__}"
        assert got.shape == x.shape and (got == x).all(), f"get gave {got.tolist()} for {x.tolist()}"


class Twice:
    def forward(self, x):
        return x + x


@stage("copy(t) and guard(), and at what xp.isfinite, xp.reshape and xp.all give")
def test_a_model_computes_an_input(serve):
    item = serve.single(Twice()).run(np.ones(3, "float32"))
    assert serve.backend.owns(item.result(serve.patience)), "the output is no array of the backend"


def first_token(serve, stream):
    """That there is one: the error of the stream, if it has failed."""
    items, ending = serve.read(stream)
    if not items:
        raise_error(stream)
    assert len(items) == 1, f"a stream gave {items} and ended with {ending}; expected one token"


@stage("copy(t) and get(t); a model returns tokens here")
def test_an_engine_takes_a_step_at_level_0(serve):
    first_token(serve, serve(Count(serve.backend)).run([1, 2], max_tokens=1))


@stage("compile(fn, donate), take(t, idx) and what xp gives to sampling; a model returns logits here")
def test_an_engine_takes_a_step_at_level_1(serve):
    first_token(serve, serve(SumLogits(serve.backend)).run([1, 2], max_tokens=1))


@stage("put_all, make_cache, write_cache, scatter_rows and attend; a model has a paged cache here")
def test_an_engine_takes_a_step_at_level_2(serve):
    first_token(serve, serve.cached(SumPaged).run([1, 2], max_tokens=1))
