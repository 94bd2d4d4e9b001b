"""Arrays that cross the model's border: reused output buffers, arguments that are written to, outputs of a wrong kind.

NumPy and PyTorch arrays can be written to, so both are tried. Findings are numbered as in the review of the engine.
"""

import threading
from contextlib import contextmanager
from copy import copy
from dataclasses import fields

import numpy as np
import pytest
import torch

import hibachi
from hibachi import (
    AutoregressiveBatchInference,
    EngineError,
    InvalidModelOutput,
    InvalidRequest,
    ModelError,
    Paged,
    SamplingParams,
)
from hibachi.common.shapes import CallShapes
from hibachi.engine.streams.merge import amerge, await_any, merge, wait_any
from hibachi.testing.toys import SumBoth, SumFrames, SumPaged, SumState, expected

from ..engine.models import PATIENCE, Turnstile, ints

GREEDY = SamplingParams(temperature=0, max_tokens=None)
POISON = 7  # the toys never draw it from the prompts below
GOOD = [[1, 2], [3, 3, 3, 3], [5], [1, 2, 3, 4, 5, 6], [8, 9], [2]]
every_toy = pytest.mark.parametrize("toy", [SumPaged, SumState, SumBoth], ids=lambda toy: toy.__name__)


@pytest.fixture(params=["numpy", "torch"])
def library(request):
    return hibachi.load_backend(request.param, device="cpu").plain()  # models here look into their caches


@pytest.fixture
def serve(serve, library):
    return lambda model, **options: serve(model, **{"backend": library, "max_model_len": 200} | options)


@pytest.fixture
def together(serve):
    """together(model, prompts, **options): an engine, and the streams of prompts that all start in one step.

    The model calls `self.door()` at the beginning of every pass. plug: the prompt of a request that comes first.
    """

    def start(model, prompts, *, params=None, limit=5, plug=None, **options):
        gate = Turnstile()
        model.door = gate.arrive
        if hasattr(model, "cache_spec"):
            options = {"deterministic": False} | options  # no pass but those of the requests
        engine = serve(model, max_num_seqs=len(prompts), **options)
        first = engine.run(np.zeros_like(prompts[0])[:1] if plug is None else plug, params, max_tokens=1)
        gate.wait()
        streams = [engine.run(p, params, max_tokens=limit) for p in prompts]
        gate.open()
        first.collect()
        return engine, streams

    return start


def host(array):
    return np.asarray(array)


def read(stream):
    """What came, and the error that it ended with, or None."""
    items = []
    try:
        for item in stream:
            items.append(item)
    except hibachi.HibachiError as e:
        return items, e
    return items, None


# ---- C4: outputs that share memory with the step before ----------------------------------------------------------


class Buffered:
    """Writes its output into one buffer, as `out=`, the static output of a CUDA graph and an ONNX binding do."""

    def __init__(self, library, shape, dtype="int64"):
        self.backend = library
        self.buffer = library.zeros((16, *shape), dtype)

    def out(self, values):
        n = values.shape[0]
        self.buffer[:n] = values
        return self.buffer[:n]


class BufferedNext(Buffered):
    """Level 0: the last token and 1."""

    def forward(self, tokens):
        return self.out(tokens[:, -1] + 1)


class BufferedFrames(SumFrames):
    """Level 2 that returns tokens."""

    def __init__(self, library):
        super().__init__(library)
        self.into = Buffered(library, (3,), "int32")

    def step(self, params, cache, x):
        out, cache = super().step(params, cache, x)
        return self.into.out(out), cache


def until_done(engine, n):
    """Let all requests end before anything is read."""
    assert engine.drain(PATIENCE) and engine.stats().finished == n


def test_c4_outputs_that_reuse_a_buffer_at_level_2(serve, library):
    engine = serve(BufferedFrames(library), max_model_len=64)
    prompts = [[[1, 2, 3]], [[1, 0, 5], [3, 6, 2], [1, 1, 1]], [[0, 2, 6], [3, 1, 5]]]
    streams = [engine.run(np.array(p, np.int32), max_tokens=6) for p in prompts]
    until_done(engine, len(prompts))
    for prompt, stream in zip(prompts, streams, strict=True):
        assert [host(item).tolist() for item in stream] == expected(prompt, 6)


def test_c4_views_into_the_cache(serve, library):
    """The block of a request that has ended goes to the next one, while the first one's tokens wait to be read."""

    class Shows:
        vocab_size, params = None, None

        def cache_spec(self):
            return [Paged(1, 1, 1)]

        def step(self, params, cache, x):
            keys, values = cache[0]
            at = int(x.slot[0])
            values.reshape(-1)[at] = float(x.tok[-1]) + 1
            return values.reshape(-1)[at : at + 1], [(keys, values)]

    engine = serve(
        Shows(),
        max_model_len=4,
        block_size=4,
        kv_cache_memory_bytes=4 * 8 * 2,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    first = engine.run(np.array([1.0], np.float32), max_tokens=3)
    second = engine.run(np.array([50.0], np.float32), max_tokens=3)
    until_done(engine, 2)
    assert ints(first.collect()) == [2, 3, 4] and ints(second.collect()) == [51, 52, 53]


def test_c4_logits_that_reuse_a_buffer_in_several_calls_of_a_step(serve, library):
    """Where calls have few shapes, a step is several of them, and their outputs may be read together."""
    few = copy(library)
    few.shapes = CallShapes(few="all", sizes=(4,), tiles=(1, 1))

    class Steps(SumPaged):
        into = Buffered(library, (10,), "float32")

        def step(self, params, cache, x):
            out, cache = super().step(params, cache, x)
            return self.into.out(out), cache

    engine = serve(Steps(few), backend=few, max_model_len=64, max_num_seqs=8)
    streams = [engine.run(p, GREEDY, max_tokens=6) for p in GOOD]
    assert [s.collect() for s in streams] == [expected(p, 6) for p in GOOD]


@pytest.mark.parametrize("level", [1, 2])
def test_the_layout_of_outputs_changes_no_bit(together, library, level):
    """`(w @ x.T).T` lies column by column in memory, but for a single row; libraries sum it in another order."""
    table = np.random.default_rng(0).normal(size=(300, 10)).astype(np.float32)

    class Columns(SumPaged):
        vocab_size = 300
        of = library.put(table)

        def _turned(self, tokens):
            return library.xp.matrix_transpose(library.copy(self.of[:, tokens]))

        def logits(self, tokens, lengths=None):
            self.door()
            return self._turned(tokens[:, -1] % 10)

        def step(self, params, cache, x):
            self.door()
            out, cache = super().step(params, cache, x)
            return self._turned(library.xp.argmax(out, axis=-1)), cache

    class Level1:
        vocab_size, of, _turned, logits = 300, Columns.of, Columns._turned, Columns.logits

    model = Level1() if level == 1 else Columns(library)
    options = dict(padding_token=np.zeros(1, int)) if level == 1 else {}
    params = SamplingParams(seed=1, logprobs=2, max_tokens=None)
    prompts, alone = [[i] for i in range(9)], []
    for prompt in prompts:
        _, (stream,) = together(model, [prompt], params=params, **options)
        alone.append((stream.collect(), stream.logprobs))
    _, streams = together(model, prompts, params=params, **options)
    assert [(s.collect(), s.logprobs) for s in streams] == alone


# ---- M1: arguments that are written to ---------------------------------------------------------------------------


class Zeroes(SumPaged):
    """Writes into all that it was given, but for weights and cache."""

    def step(self, params, cache, x):
        out = super().step(params, cache, x)
        assert not shared(x), shared(x)
        for field in fields(x):
            if (array := getattr(x, field.name)) is not None:
                array[...] = 0
        return out


def shared(x):
    """The fields of `x` that share memory with another."""
    named = {f.name: host(a) for f in fields(x) if (a := getattr(x, f.name)) is not None}
    return [(a, b) for a in named for b in named if a < b and np.shares_memory(named[a], named[b])]


@pytest.mark.parametrize("overlap", [False, True])
def test_m1_a_model_that_writes_into_the_inputs_of_a_step(serve, library, overlap):
    for options in ({}, {"max_num_batched_tokens": 7}):
        engine = serve(Zeroes(library), max_model_len=64, block_size=4, overlap=overlap, max_num_seqs=4, **options)
        streams = [engine.run(p, GREEDY, max_tokens=12) for p in GOOD * 2]
        for prompt, stream in zip(GOOD * 2, streams, strict=True):
            assert stream.collect() == expected(prompt, 12)
        until_done(engine, len(streams))
        assert engine.stats().free_blocks == engine.stats().blocks


class Traps:
    """A toy of level 2. In calls that hold the poison, `after(cache, out, new)` gives what the step returns."""

    def __init__(self, toy, after):
        self.toy, self.after = toy, after
        self.params, self.vocab_size, self.backend = toy.params, toy.vocab_size, toy.backend
        self.max_model_len, self.cache_spec = toy.max_model_len, toy.cache_spec
        self.door = lambda: None

    def step(self, params, cache, x):
        self.door()
        hostile = bool((x.tok == POISON).any())
        out, new = self.toy.step(params, list(cache), x)
        return self.after(cache, out, new) if hostile else (out, new)


# ---- Low: outputs of a wrong kind --------------------------------------------------------------------------------

NOT_NUMBERS = {
    "objects": lambda n: np.array([2] * n, object),
    "strings": lambda n: np.array(["2"] * n),
    "bytes": lambda n: np.array([b"2"] * n),
    "complex": lambda n: np.full(n, 2 + 0j),
    "dates": lambda n: np.full(n, 2, "datetime64[s]"),
    "times": lambda n: np.full(n, 2, "timedelta64[s]"),
    "structures": lambda n: np.zeros(n, [("token", int)]),
    "void": lambda n: np.zeros(n, "V8"),
    "bools": lambda n: np.ones(n, bool),
    "floats": lambda n: np.ones(n),
    "masked": lambda n: np.ma.masked_array(np.ones(n, int), mask=[True] * n),
}
NOT_DENSE = {
    "sparse": lambda n: torch.ones(n, dtype=torch.int64).to_sparse(),
    "without data": lambda n: torch.ones(n, dtype=torch.int64, device="meta"),
    "quantized": lambda n: torch.quantize_per_tensor(torch.ones(n), 1.0, 0, torch.qint32),
    "complex": lambda n: torch.ones(n, dtype=torch.complex64),
    "bools": lambda n: torch.ones(n, dtype=torch.bool),
}


def kinds(library):
    return NOT_NUMBERS if library.name == "numpy" else NOT_DENSE


class Odd:
    """Level 0: `make(rows)` is the output of calls that hold the poison."""

    def __init__(self, make, fits=lambda out: out):
        self.make, self.fits = make, fits
        self.door = lambda: None

    def forward(self, tokens):
        self.door()
        if (tokens == POISON).any():
            return self.make(tokens.shape[0])
        return self.fits(tokens[:, -1] + 10)


@pytest.mark.filterwarnings("ignore")  # torch says which of its features are old
def test_low_outputs_that_are_no_numbers(together, library):
    for what, make in kinds(library).items():
        engine, streams = together(Odd(make), [[1], [POISON], [2]], limit=2)
        items, error = read(streams.pop(1))
        assert not items and isinstance(error, InvalidModelOutput), (what, items, error)
        assert [ints(s.collect()) for s in streams] == [[11, 21], [12, 22]], what
        assert engine.stats().failed == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_low_logits_of_a_step_that_are_no_numbers(together, library, overlap):
    model = Traps(SumPaged(library), lambda cache, out, new: (out + 0j, new))
    _, streams = together(model, [*GOOD, [POISON]], params=GREEDY, overlap=overlap)
    items, error = read(streams.pop())
    assert not items and isinstance(error, InvalidModelOutput) and "must return floats; got" in str(error)
    assert [s.collect() for s in streams] == [expected(p, 5) for p in GOOD]


def test_low_integers_may_be_logits(serve, library):
    class Whole:
        vocab_size = 10

        def logits(self, tokens, lengths):
            return library.put(np.eye(10, dtype=np.int64)[(host(tokens)[:, -1] + 1) % 10])

    assert serve(Whole()).run([1], GREEDY, max_tokens=3).collect() == [2, 3, 4]


def test_low_bools_where_tokens_are_bools(serve, library):
    class Flips:
        def forward(self, tokens):
            return ~tokens[:, -1]

    class Numbers:
        def forward(self, tokens):
            return library.put(np.ones(tokens.shape[0], np.int64))

    assert ints(serve(Flips()).run(np.array([True]), max_tokens=3).collect()) == [0, 1, 0]
    with pytest.raises(InvalidModelOutput, match=r"must return bool tokens, as the prompt's are; got .*int64"):
        serve(Numbers()).run(np.array([True]), max_tokens=3).collect()


# ---- Low: tokens that the history cannot hold --------------------------------------------------------------------


class Grows:
    """Level 0, int64: the last token times `factor`; at first the shape of each call is kept."""

    def __init__(self, library, factor=100, dtype="int64"):
        self.backend, self.factor, self.dtype = library, factor, dtype
        self.calls = []
        self.door = lambda: None

    def forward(self, tokens):
        self.door()
        self.calls.append(tokens.shape[0])
        return self.backend.put(host(tokens)[:, -1].astype(self.dtype) * self.factor)


def test_low_a_token_that_its_history_cannot_hold(together, library):
    model = Grows(library)
    prompts = [np.array([n], np.int32) for n in (1, 147, -300, 2)]
    engine, streams = together(model, prompts, limit=4)
    for i, value in ((1, 14700000000), (2, -3000000000)):
        items, error = read(streams[i])
        assert ints(items) == [v for v in (14700, 1470000, 147000000, -30000, -3000000, -300000000) if v * value > 0]
        assert isinstance(error, InvalidModelOutput) and f"{value}" in str(error) and "int32" in str(error)
    assert ints(streams[0].collect()) == [100, 10_000, 1_000_000, 100_000_000]
    assert ints(streams[3].collect()) == [200, 20_000, 2_000_000, 200_000_000]
    assert model.calls == [1, 4, 4, 4, 4] and engine.stats().failed == 2  # no call was made again


def test_low_a_float_that_its_history_cannot_hold(together, library):
    """What is finite in float64 and not in float32 is an overflow of the history; what is rounded is no fault."""
    model = Grows(library, 1e20, "float64")
    prompts = [np.array([[1e-30, x]], np.float32) for x in (1e-20, 1e10, 1.1e-30)]
    _, streams = together(model, prompts, limit=2)
    items, error = read(streams[1])
    assert len(items) == 1 and isinstance(error, InvalidModelOutput)
    assert "1.0000000" in str(error) and "e+50" in str(error) and "float32" in str(error)
    assert [len(streams[i].collect()) for i in (0, 2)] == [2, 2]


def test_low_a_prompt_that_the_engine_cannot_hold(serve, library):
    """token= decides the dtype; a prompt that does not fit is refused and not wrapped."""
    engine = serve(Grows(library, 1), token=np.int32(0))
    assert ints(engine.run(np.array([5], np.int64), max_tokens=1).collect()) == [5]
    with pytest.raises(InvalidRequest, match="cannot hold 14700000000, token 1 of the prompt"):
        engine.run(np.array([1, 14700000000]), max_tokens=1)
    floats = serve(Grows(library, 1, "float32"), token=np.float32(0))
    with pytest.raises(InvalidRequest, match=r"cannot hold 1e\+50, token 0 of the prompt"):
        floats.run(np.array([1e50]), max_tokens=1)
    assert len(floats.run(np.array([np.inf, 0.1]), max_tokens=1).collect()) == 1  # which float32 has as well


# ---- Low: caches of a wrong kind ---------------------------------------------------------------------------------


def wrong_caches(library, toy):
    """What a step may return wrongly as its cache, given the right one."""
    wrong = {
        "none": lambda new: None,
        "no layers": lambda new: [],
        "one too many": lambda new: [*new, new[0]],
        "an array": lambda new: new[0][0],
        "a layer that is none": lambda new: [*new[:-1], None],
        "a layer of another shape": lambda new: [*new[:-1], cut(new[-1])],
        "a layer of Python lists": lambda new: [*new[:-1], lists(new[-1])],
        "a dict": lambda new: dict(enumerate(new)),
    }
    if toy is not SumState:
        wrong |= {
            "values that are masked or sparse": lambda new: [(new[0][0], odd(new[0][1])), *new[1:]],
            "keys alone": lambda new: [(new[0][0],), *new[1:]],
            "keys and an array of another library": lambda new: [(new[0][0], foreign(library, new[0][1])), *new[1:]],
        }
    return wrong


def cut(layer):
    return (layer[0], layer[1][:1]) if isinstance(layer, tuple) else layer[:0]


def lists(layer):
    return tuple(half.tolist() for half in layer) if isinstance(layer, tuple) else layer.tolist()


def odd(array):
    return np.ma.masked_array(array) if isinstance(array, np.ndarray) else array.to_sparse()


def foreign(library, array):
    return torch.from_numpy(array) if library.name == "numpy" else array.numpy()


@every_toy
def test_low_a_cache_of_a_wrong_kind(together, library, toy):
    for what, wrong in wrong_caches(library, toy).items():
        model = Traps(toy(library), lambda cache, out, new, wrong=wrong: (out, wrong(new)))
        engine, streams = together(model, [*GOOD[:3], [POISON, 1], *GOOD[3:]], params=GREEDY)
        items, error = read(streams.pop(3))
        assert not items and isinstance(error, InvalidModelOutput), (what, items, error)
        assert [s.collect() for s in streams] == [expected(p, 5) for p in GOOD], what
        assert engine.run([1], GREEDY, max_tokens=5).collect() == expected([1], 5)
        assert engine.stats().failed == 1


def test_low_a_cache_of_a_wrong_kind_from_a_compiled_step():
    """It is looked at while the step is traced, before the cache is given away: nothing has to be computed again."""
    library = hibachi.load_backend("jax", device="cpu").plain()

    class Wrong(SumPaged):
        def step(self, params, cache, x):
            out, cache = super().step(params, cache, x)
            return out, [None]

    with AutoregressiveBatchInference(Wrong(library), max_model_len=64, max_num_seqs=2) as engine:
        with pytest.raises(InvalidModelOutput, match="layer 0 of the cache as 2 arrays, as it was given; got NoneType"):
            engine.run([1], GREEDY, max_tokens=3).collect()
        assert engine.meters().failed == 0  # steps that failed as a whole


# ---- Low: a model that waits for its own engine ------------------------------------------------------------------


class Asks:
    """Level 0: the last token and 1; for the poison it asks, with the 50 that `ask(stream)` is to wait for."""

    def __init__(self, ask, of=lambda model: model.engine):
        self.ask, self.of, self.engine = ask, of, None

    def forward(self, tokens):
        if (tokens[:, -1] == POISON).any():
            with asked(self.of(self)) as stream:
                self.ask(stream)
        return tokens[:, -1] + 1


class AsksLater(Asks):
    async def forward(self, tokens):
        if (tokens[:, -1] == POISON).any():
            with asked(self.of(self)) as stream:
                await self.ask(stream)
        return tokens[:, -1] + 1


@contextmanager
def asked(engine):
    """A stream that ends after a while, if nothing else happens: where nobody refuses to wait, the test goes on."""
    stream = engine.run([50], max_tokens=2)
    guard = threading.Timer(PATIENCE / 4, stream.close)
    guard.start()
    try:
        yield stream
    finally:
        guard.cancel()


async def each(stream):
    return [item async for item in stream]


WAITS = {
    "for": lambda stream: [item for item in stream],
    "next": next,
    "collect": lambda stream: stream.collect(),
    "merge": lambda stream: list(merge([stream])),
    "wait_any": lambda stream: wait_any([stream]),
}
WAITS_LATER = {
    "async for": each,
    "acollect": lambda stream: stream.acollect(),
    "amerge": lambda stream: amerge([stream], lambda i, items: None),
    "await_any": lambda stream: await_any([stream]),
}


def refused(engine):
    """A request of the poison fails with the reason, the others and the engine go on."""
    good, bad = engine.run([20], max_tokens=3), engine.run([POISON], max_tokens=3)
    items, error = read(bad)
    assert not items and isinstance(error, ModelError), (items, error)
    assert isinstance(error.__cause__, EngineError) and "own thread" in str(error)
    assert ints(good.collect()) == [21, 22, 23]
    assert ints(engine.run([30], max_tokens=2).collect()) == [31, 32]


@pytest.mark.parametrize("how", WAITS)
def test_low_a_model_that_waits_for_its_own_engine(serve, library, how):
    model = Asks(WAITS[how])
    model.engine = serve(model)
    refused(model.engine)


@pytest.mark.parametrize("how", [*WAITS_LATER, *WAITS])
def test_low_an_async_model_that_waits_for_its_own_engine(serve, library, how):
    async def blocks(stream):
        WAITS[how](stream)

    model = AsksLater(WAITS_LATER.get(how, blocks))
    model.engine = serve(model)
    refused(model.engine)


def test_low_a_stop_predicate_that_waits_for_its_own_engine(serve, library):
    engine = serve(BufferedNext(library, ()))

    def where(tokens):
        with asked(engine) as stream:
            return stream.collect() == []

    with pytest.raises(InvalidRequest, match="own thread"):
        engine.run([1], max_tokens=2, stop_rule=where).collect()
    assert ints(engine.run([1], max_tokens=2).collect()) == [2, 3]


def test_low_a_model_may_wait_for_another_engine(serve, library):
    """And for items of its own engine that have come already."""
    other = serve(BufferedNext(library, ()))
    got = []
    for kind, ask in ((Asks, lambda s: got.extend(ints(s.collect()))), (AsksLater, WAITS_LATER["async for"])):
        engine = serve(kind(ask, of=lambda model: other))
        assert ints(engine.run([POISON], max_tokens=2).collect()) == [POISON + 1, POISON + 2]
    assert got == [51, 52]
