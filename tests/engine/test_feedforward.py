"""Feed-forward models: one input, one output, batched. The model answers with twice its input."""

import asyncio

import numpy as np
import pytest

from hibachi import (
    ConfigError,
    EngineClosed,
    FeedforwardBatchInference,
    InvalidModelOutput,
    InvalidRequest,
    ModelError,
    NonFiniteOutput,
)
from hibachi.errors import RequestError
from hibachi.testing.verify import Subject, verify

from ..lib.inside import is_closing
from .models import PATIENCE, Background, Turnstile, until


class Double:
    def __init__(self):
        super().__init__()
        self.shapes = []

    def forward(self, x):
        self.shapes.append(x.shape)
        if (x == -7).any():
            raise RuntimeError("minus seven")
        return x * 2


class GatedDouble(Turnstile, Double):
    def forward(self, x):
        self.arrive()
        return super().forward(x)


@pytest.fixture
def serve():
    engines = []

    def make(model=None, **options):
        engines.append((FeedforwardBatchInference(model or Double(), **options), model))
        return engines[-1][0]

    yield make
    for engine, model in engines:
        if isinstance(model, Turnstile):
            model.open()
        engine.close()


@pytest.fixture
def together(serve):
    """together(inputs): their items, all of one batch, and the model."""

    def start(*inputs, **options):
        model = GatedDouble()
        engine = serve(model, **options)
        plug = engine.run(np.zeros(1))
        model.wait()
        items = [engine.run(i) for i in inputs]
        model.let()
        plug.result(PATIENCE)
        model.wait()
        model.shapes.clear()
        model.open()
        return engine, model, items

    return start


# ---- facts -------------------------------------------------------------------------------------------------------


def test_inputs_go_together(together):
    """H-43: input (3,4) ×2 → model sees (2,3,4), each result is its row, batch empty afterwards."""
    a, b = np.ones((3, 4)), np.arange(12.0).reshape(3, 4)
    engine, model, items = together(a, b)
    assert [i.result(PATIENCE).tolist() for i in items] == [(a * 2).tolist(), (b * 2).tolist()]
    assert model.shapes == [(2, 3, 4)]
    until(lambda: engine.stats().finished == 3)
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


def test_a_misfit_harms_nobody(together):
    """H-44: feedforward shape mismatch → error only for the misfit.

    Here it is none: inputs of each shape and dtype get a forward pass of their own.
    """
    _, model, items = together(np.ones(2), np.ones(3), np.ones(2, np.float32), np.ones(2))
    assert [i.result(PATIENCE).shape for i in items] == [(2,), (3,), (2,), (2,)]
    assert model.shapes == [(2, 2), (1, 3), (1, 2)]
    assert items[2].result().dtype == np.float32


def test_an_item_resolves_or_raises(together):
    """H-46: Item resolves with its value; dropped sender → error."""
    engine, _, [item] = together(np.ones(2))
    assert item.result(PATIENCE).tolist() == [2, 2]
    engine.close()
    assert item.result().tolist() == [2, 2]


def test_at_most_max_batch_size_at_once(together):
    """Section 6: 6 × (2,) with S = 4 → forwards (4,2) then (2,2); results in order."""
    _, model, items = together(*[np.full(2, i) for i in range(6)], max_batch_size=4)
    assert [i.result(PATIENCE).tolist() for i in items] == [[2 * i] * 2 for i in range(6)]
    assert model.shapes == [(4, 2), (2, 2)]


# ---- items -------------------------------------------------------------------------------------------------------


def test_await(serve):
    engine = serve()

    async def main():
        first = engine.run(np.ones(2))
        items = [engine.run(np.full(2, i)) for i in range(20)]
        return (await first).tolist(), [r.tolist() for r in await asyncio.gather(*items)]

    assert asyncio.run(main()) == ([2, 2], [[2 * i] * 2 for i in range(20)])


def test_done_and_timeout(serve):
    model = GatedDouble()
    item = serve(model).run(np.ones(2))
    model.wait()
    for _ in range(3):
        with pytest.raises(TimeoutError, match=r"within 0\.001 s"):
            item.result(0.001)
    assert not item.done()
    model.let()
    assert item.result(PATIENCE).tolist() == [2, 2] and item.done()


@pytest.mark.parametrize("how", ["cancel", "drop", "timeout", "cancelled task"])
def test_leaving_an_item_cancels_it(serve, how):
    model = GatedDouble()
    engine = serve(model, max_batch_size=1)
    first, item, last = (engine.run(np.full(2, i)) for i in range(3))
    model.wait()

    async def give_up():
        with pytest.raises((TimeoutError, asyncio.CancelledError)):
            if how == "timeout":
                await asyncio.wait_for(item, 0.01)
            else:
                task = asyncio.ensure_future(item)
                await asyncio.sleep(0)
                task.cancel()
                await task

    if how == "drop":
        del item
    elif how == "cancel":
        item.cancel()
    else:
        asyncio.run(give_up())
    if how != "drop":
        with pytest.raises(RequestError, match="cancelled"):
            item.result(PATIENCE)
    model.open()
    assert (first.result(PATIENCE).tolist(), last.result(PATIENCE).tolist()) == ([0, 0], [4, 4])
    assert len(model.shapes) == 2


async def awaited(item):
    return await item


def test_closing_the_engine(serve):
    model = GatedDouble()
    engine = serve(model, max_batch_size=1)
    a, b = engine.run(np.ones(2)), engine.run(np.ones(2))
    model.wait()
    closing = Background(engine.close)
    until(lambda: is_closing(engine))
    model.let()
    closing.result()
    assert a.result().tolist() == [2, 2]  # the running step finishes
    with pytest.raises(EngineClosed):
        b.result()
    with pytest.raises(EngineClosed):
        asyncio.run(awaited(b))
    with pytest.raises(EngineClosed):
        engine.run(np.ones(2))


# ---- failures ----------------------------------------------------------------------------------------------------


def test_the_guilty_input_only(together):
    _, _, items = together(*[np.full(2, i) for i in (1, 2, -7, 3, 4)])
    with pytest.raises(ModelError, match="minus seven"):
        items.pop(2).result(PATIENCE)
    assert [i.result(PATIENCE).tolist() for i in items] == [[2, 2], [4, 4], [6, 6], [8, 8]]


def test_nan(together):
    _, _, items = together(np.ones(2), np.array([1, np.inf]))
    with pytest.raises(NonFiniteOutput):
        items[1].result(PATIENCE)
    assert items[0].result(PATIENCE).tolist() == [2, 2]


@pytest.mark.parametrize(
    "output, why",
    [
        (lambda x: x[:0], r"Bad.forward must return shape \(1, any\); got \(0, 2\)"),
        (lambda x: np.asarray(x.sum()), r"must return shape \(1,\); got \(\)"),
        (lambda x: None, "must return an array of numpy"),
        (lambda x: (), r"Bad.forward must return an array of numpy; got builtins.tuple"),
        (lambda x: (x, x.sum()), r"Bad.forward\[1\] must return shape \(1,\); got \(\)"),
        (
            lambda x: {"a": x, "b": [np.zeros((3, 2))]},
            r"Bad.forward\['b'\]\[0\] must return shape \(1, any\); got \(3,",
        ),
        (lambda x: {"a": x, "b": 1}, r"Bad.forward\['b'\] must return an array of numpy; got builtins.int"),
    ],
)
def test_wrong_outputs(serve, output, why):
    class Bad:
        def forward(self, x):
            return output(x)

    with pytest.raises(InvalidModelOutput, match=why):
        serve(Bad()).run(np.ones(2)).result(PATIENCE)


class Several:
    async def forward(self, x):
        return {"sum": x.sum(axis=1), "both": (x, [np.where(x == 6, np.nan, x)])}


def test_several_outputs(serve):
    engine = serve(type("Layers", (Several,), {"inputs": [1]})(), backend="numpy")  # an attribute of some library's
    items = [engine.run([float(i), 1.0]) for i in range(8)]
    with pytest.raises(NonFiniteOutput):
        items.pop(6).result(PATIENCE)
    for i, item in zip([0, 1, 2, 3, 4, 5, 7], items, strict=True):
        out = item.result(PATIENCE)
        assert out["sum"] == i + 1 and isinstance(out["both"], tuple) and isinstance(out["both"][1], list)
        assert out["both"][0].tolist() == out["both"][1][0].tolist() == [i, 1]
    report = verify(Subject(Several(), examples=[[1.0, 2.0], [3.0, 4.0]], feedforward=True))
    assert report.good, report.lines()


def test_an_async_model(serve):
    class Async:
        async def forward(self, x):
            await asyncio.sleep(0)
            return x.sum(axis=1)

    engine = serve(Async())
    assert [float(engine.run(np.full(3, i)).result(PATIENCE)) for i in range(3)] == [0, 3, 6]


# ---- the face ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [1.5, [1, 2], np.float32(3), np.ones((2, 2), np.complex64), np.array(True)])
def test_inputs_of_any_kind(serve, x):
    class Same:
        def forward(self, batch):
            return batch

    got = serve(Same()).run(x).result(PATIENCE)
    assert got.dtype == np.asarray(x).dtype and got.tolist() == np.asarray(x).tolist()


def test_an_input_that_is_no_number(serve):
    with pytest.raises(InvalidRequest, match="must hold numbers"):
        serve().run("text")


def test_a_model_without_forward():
    with pytest.raises(ConfigError, match="needs `forward\\(x\\)`"):
        FeedforwardBatchInference(object())


@pytest.mark.parametrize("n", [0, -1, 1.5, True, None])
def test_a_bad_size(n):
    with pytest.raises(ConfigError, match="max_batch_size must be an integer >= 1"):
        FeedforwardBatchInference(Double(), max_batch_size=n)
