"""A failure belongs to a request: whoever is guilty gets the error, and nobody else notices."""

import asyncio
import gc
from weakref import ref

import numpy as np
import pytest

from hibachi import (
    AutoregressiveBatchInference,
    EngineFailed,
    FeedforwardBatchInference,
    Finish,
    InternalError,
    InvalidModelOutput,
    InvalidRequest,
    ModelError,
    NonFiniteOutput,
    NumpyBackend,
    SamplingParams,
    StopRule,
)
from hibachi.backend.nine import OPERATIONS
from hibachi.testing.toys import SumBoth, SumLogits, SumPaged, SumState, SumTokens, expected

from ..lib.inside import built
from .models import PATIENCE, Background, Gate, GatedNumpy, Next, ints, until

NUMPY = NumpyBackend()
GREEDY = SamplingParams(temperature=0, max_tokens=None)
POISON = 7  # the toys never draw it from the prompts below
GOOD = [[1, 2], [3, 3, 3, 3], [5], [1, 2, 3, 4, 5, 6], [8, 9], [2], [0] * 11]


class Laid:
    """A toy with a trap: `trap(tokens)` is called before every pass, with all tokens of the pass on the host."""

    def __init__(self, toy, trap):
        self.toy, self.trap = toy, trap
        method = {SumTokens: "forward", SumLogits: "logits"}.get(type(toy), "step")
        setattr(self, method, getattr(self, f"_{method}"))

    def _forward(self, tokens, lengths):
        self.trap(tokens)
        return self.toy.forward(tokens, lengths)

    def _logits(self, tokens, lengths):
        self.trap(tokens)
        return self.toy.logits(tokens, lengths)

    def _step(self, params, cache, x):
        out = self.toy.step(params, cache, x)  # a real failure comes after part of the cache was written
        self.trap(x.tok)
        return out

    def __getattr__(self, name):
        return getattr(self.toy, name)


TOYS = [SumTokens, SumLogits, SumPaged, SumState, SumBoth]
every_toy = pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.__name__)


def trap_poison(tokens):
    if (tokens == POISON).any():
        raise RuntimeError("poisoned")


class Once:
    """Fails in the `at`-th pass, and never again."""

    def __init__(self, at, error=RuntimeError):
        self.at, self.error, self.passes = at, error, 0

    def __call__(self, tokens):
        self.passes += 1
        if self.passes == self.at:
            raise self.error("a bad moment")


@pytest.fixture
def batch(serve):
    """batch(model, prompts): the streams of prompts that all start in one step."""

    def start(model, prompts, *, limit=5, backend=None, **options):
        gated = GatedNumpy() if backend is None else backend
        options = {"deterministic": False} | options  # no steps but those of the requests
        engine = serve(model, backend=gated, max_num_seqs=len(prompts), **options)
        params = None if hasattr(model, "forward") else GREEDY
        plug = engine.run(np.zeros_like(prompts[0])[:1], params, max_tokens=1)
        gated.wait()
        streams = [engine.run(p, params, max_tokens=limit) for p in prompts]
        plug.close()
        gated.open()
        return engine, streams

    return start


def check_good(streams, n=5):
    for s, p in zip(streams, GOOD, strict=True):
        assert ints(s.collect()) == expected(p, n), p


# ---- the guilty request, and nobody else -------------------------------------------------------------------------


@every_toy
@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_poisoned_request(batch, toy, place):
    model = Laid(toy(NUMPY), trap_poison)
    prompts = [*GOOD[:place], [1, POISON, 1], *GOOD[place:]]
    engine, streams = batch(model, prompts)
    with pytest.raises(ModelError, match="The model raised RuntimeError: poisoned") as caught:
        streams.pop(place).collect()
    assert isinstance(caught.value.__cause__, RuntimeError)
    check_good(streams)
    assert engine.stats().failed == 1


def test_one_guilty_row_of_eight_costs_few_passes(batch):
    model = Next()
    model.forward = lambda tokens, forward=model.forward: (forward(tokens), trap_poison(tokens))[0]
    _, streams = batch(model, [[1], [1], [1], [1], [1], [POISON], [1], [1]], limit=1)
    with pytest.raises(ModelError):
        streams[5].collect()
    assert [ints(s.collect()) for s in streams if s is not streams[5]] == [[2]] * 7
    assert [n for n, _ in model.shapes][1:] == [8, 4, 4, 2, 1, 1, 2]


@every_toy
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_a_model_that_fails_once_harms_nobody(batch, toy, at):
    """A step is idempotent: its halves are run again, over what the failed one has written."""
    trap = Once(at)
    engine, streams = batch(Laid(toy(NUMPY), trap), GOOD)
    check_good(streams)
    assert trap.passes > at and engine.stats().failed == 0


# ---- not finite --------------------------------------------------------------------------------------------------


class NanLogits(SumLogits):
    """The logits of a row that holds the poison are NaN."""

    deterministic = False  # no calls but those of requests

    def logits(self, tokens, lengths):
        out = super().logits(tokens, lengths)
        out[(tokens == POISON).any(axis=1)] = np.nan
        return out


class NanValues(SumPaged):
    """The poison's value in the cache is NaN, as after an overflow in a layer."""

    def step(self, params, cache, x):
        values = np.where(x.tok == POISON, np.nan, x.tok).astype(np.float32).reshape(-1, 1, 1)
        zeros = np.zeros((len(x.tok), 1, 2), np.float32)
        mean, layer = self.backend.attend(zeros, zeros, values, cache[0], x)
        total = (mean.reshape(-1) * (x.pos + 1))[x.last]
        bad = ~np.isfinite(total)
        out = np.eye(10, dtype=np.float32)[(np.rint(np.where(bad, 0, total)).astype(int) + 1) % 10]
        out[bad] = np.nan
        return out, [layer]


@pytest.mark.parametrize("model", [NanLogits, NanValues])
def test_nan_in_one_row(batch, model):
    engine, streams = batch(model(NUMPY), [*GOOD[:3], [1, POISON], *GOOD[3:]])
    with pytest.raises(NonFiniteOutput):
        streams.pop(3).collect()
    check_good(streams)
    assert engine.stats().failed == 1


# ---- not what was asked for --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "output, why",
    [
        (lambda x: x, r"must return shape \(1,\); got \(1, 2\)"),
        (lambda x: np.asarray(x[:, -1].sum()), r"must return shape \(1,\); got \(\)"),
        (lambda x: x[:, -1] / 2, "must return integer tokens, as the prompt's are; got float64"),
        (lambda x: (x[:, -1], None), "must return an array of numpy; got builtins.tuple"),
        (lambda x: None, "must return an array of numpy; got builtins.NoneType"),
        (lambda x: x[:, -1].tolist(), "must return an array of numpy; got builtins.list"),
    ],
)
def test_wrong_outputs(serve, output, why):
    class Wrong:
        def forward(self, tokens):
            return output(tokens)

    with pytest.raises(InvalidModelOutput, match=f"Wrong.forward {why}"):
        serve(Wrong()).run([1, 2], max_tokens=2).collect()


# ---- async models ------------------------------------------------------------------------------------------------


class Async(Next):
    async def forward(self, tokens):
        await asyncio.sleep(0)
        trap_poison(tokens)
        return super().forward(tokens)


class Awaitable(np.ndarray):
    """An array of a library whose arrays can be awaited as well."""

    def __await__(self):
        raise AssertionError("an array was awaited")


class OnlyNine:
    name = "only_nine"

    def __getattr__(self, name):
        if name not in OPERATIONS:
            raise AttributeError(name)
        return getattr(NUMPY, name)


@pytest.mark.parametrize("level, library", [(0, NUMPY), (0, OnlyNine()), (1, NUMPY)])
def test_arrays_that_could_be_awaited_are_arrays_and_a_coroutine_is_awaited(level, library):
    method, honest = ("logits", SumLogits(NUMPY).logits) if level else ("forward", Next().forward)

    def answer(*args):
        return honest(*args).view(Awaitable)

    async def later(*args):
        return answer(*args)

    for call in (answer, later):
        model = type("Model", (), {method: staticmethod(call), "vocab_size": 10, "max_model_len": 64})()
        with AutoregressiveBatchInference(model, backend=library) as engine:
            want = expected([1, 2], 3) if level else [3, 4, 5]
            assert ints(engine.run(np.array([1, 2]), max_tokens=3).collect()) == want
        if not level:
            with FeedforwardBatchInference(model, backend=library) as engine:
                assert engine.run(np.array([[1, 2]])).result(PATIENCE).tolist() == [2, 3]


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_the_event_loop_of_an_async_model_is_closed_with_the_engine(serve):
    loops = []

    class Looped(Async):
        async def forward(self, tokens):
            loops.append(asyncio.get_running_loop())
            return await super().forward(tokens)

    engine = serve(Looped())
    engine.run([1], max_tokens=1).collect()
    engine.close()
    assert loops[0].is_closed()


# ---- stop predicates ---------------------------------------------------------------------------------------------


def raises(batch):
    raise ZeroDivisionError("by zero")


@pytest.mark.parametrize(
    "where, why",
    [
        (raises, "The stop predicate raised ZeroDivisionError: by zero"),
        (lambda batch: batch == batch[:, None], r"one bool for each of 1 rows, shape \(1,\); got shape \(1, 1\)"),
        (lambda batch: True, r"got shape \(\)"),
        (lambda batch: None, r"got shape \(\)"),
    ],
)
@pytest.mark.parametrize("toy", [SumTokens, SumLogits, SumPaged], ids=lambda toy: toy.__name__)
def test_a_bad_predicate_harms_only_its_request(serve, toy, where, why):
    params = None if toy is SumTokens else GREEDY
    engine = serve(toy(NUMPY))
    good = engine.run([1, 2], params, max_tokens=30)
    bad = engine.run([1, 2], params, max_tokens=30, stop_rule=StopRule(where=where))
    with pytest.raises(InvalidRequest, match=why):
        bad.collect()
    assert bad.finish_reason == Finish.ERROR
    assert ints(good.collect()) == expected([1, 2], 30)


# ---- a cache that is lost ----------------------------------------------------------------------------------------


class Losing(GatedNumpy):
    """As with donated buffers: a step that fails has taken the cache with it."""

    def __init__(self):
        super().__init__()
        self.lost = self.donates = False
        self.caches = 0

    def compile(self, fn, *, donate=()):
        if getattr(fn, "__name__", "") in ("step", "_recurrent_piece"):
            self.donates = bool(donate)
        return fn

    def make_cache(self, spec, **sizes):
        self.lost = False
        self.caches += 1
        return super().make_cache(spec, **sizes)

    def usable(self, cache):
        return not self.lost


def losing(toy, trap):
    """A model on a losing backend: if `trap` raises, the cache is garbage."""
    backend = Losing()

    class Spoils(toy):
        def step(self, params, cache, x):
            try:
                trap(x.tok)
            except (RuntimeError, MemoryError):
                if backend.donates:
                    backend.lost = True
                    for layer in cache:
                        for half in layer if isinstance(layer, tuple) else [layer]:
                            half[:] = np.nan
                raise
            return super().step(params, cache, x)

    return Spoils(backend), backend


@pytest.mark.parametrize("toy", [SumPaged, SumState, SumBoth])
@pytest.mark.parametrize("at", [2, 3, 5])
@pytest.mark.parametrize("budget", [2048, 9])
@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_lost_cache_is_built_again_and_nobody_notices(batch, toy, at, budget, error):
    """Where memory ran out, it is still donated: keeping two takes more."""
    model, backend = losing(toy, Once(at, error))
    engine, streams = batch(model, GOOD, backend=backend, block_size=4, max_num_batched_tokens=budget)
    check_good(streams)
    memory = engine.core.runner.memory
    made = len(memory.cache) + sum(kept is not None for kept in memory.kept)
    assert backend.caches == 2 * made and engine.stats().failed == 0
    assert memory.donating == (error is MemoryError)


@pytest.mark.parametrize("toy", [SumPaged, SumState, SumBoth])
@pytest.mark.parametrize("honest", [True, False])
def test_a_guilty_request_that_takes_the_cache_with_it(batch, toy, honest):
    """The first failure loses the cache; afterwards it is kept, so that the next one can be pinned on a row."""
    model, backend = losing(toy, trap_poison)
    if not honest:
        backend.usable = lambda cache: False  # says so after every failure: that must not go on for ever
    _, streams = batch(model, [*GOOD[:3], [1, POISON, 1], *GOOD[3:]], backend=backend, block_size=4)
    with pytest.raises(ModelError, match="poisoned"):
        Background(streams.pop(3).collect).result()
    check_good(streams)


# ---- the engine's own loop ---------------------------------------------------------------------------------------


def exits(engine, monkeypatch):
    """From the next step on, the scheduler fails."""

    def schedule(now):
        raise SystemExit("bye")

    monkeypatch.setattr(built(engine).scheduler, "schedule", schedule)


def test_a_failure_of_the_loop_reaches_every_stream(serve, monkeypatch):
    model = Gate()
    engine = serve(model, max_num_seqs=2)
    running = [engine.run([1]) for _ in range(2)]
    model.wait()
    waiting = [engine.run([1]) for _ in range(3)]
    reader = Background(list, running[0])
    until(lambda: running[0].channel._waiters)
    exits(engine, monkeypatch)
    model.let(2)
    for s in (*running[1:], *waiting):
        with pytest.raises(EngineFailed, match=r"failed with SystemExit: bye.*make a new engine") as caught:
            s.collect()
        assert isinstance(caught.value.__cause__, SystemExit) and s.finish_reason == Finish.ERROR
    with pytest.raises(EngineFailed):
        reader.result()
    for _ in range(2):
        with pytest.raises(EngineFailed, match="SystemExit"):
            engine.run([1])
    assert engine.drain(PATIENCE) is False
    assert engine.stats().failed == 5


def test_a_failure_of_the_scheduler_reaches_every_stream(serve, monkeypatch):
    """Also if the scheduler fails again when its requests are taken away."""
    engine = serve(Gate())
    a = engine.run([1])
    engine.model.wait()
    b, c = engine.run([2]), engine.run([3])  # still in the inbox

    def broken(*args):
        raise IndexError("a defect")

    for name in ("schedule", "cancel", "add"):
        monkeypatch.setattr(built(engine).scheduler, name, broken)
    engine.model.let()
    with pytest.raises(EngineFailed, match=r"IndexError: a defect.*please report it"):
        a.collect()
    for s in (b, c):  # each could not be added
        with pytest.raises(InternalError, match=r"IndexError: a defect.*Please report it"):
            s.collect()


def test_each_stream_has_an_error_of_its_own(serve, monkeypatch):
    """One object raised by several threads would mix up their tracebacks, and keep growing."""
    model = Gate()
    engine = serve(model)
    streams = [engine.run([1]) for _ in range(3)]
    exits(engine, monkeypatch)
    model.open()
    until(lambda: all(s.finish_reason for s in streams))
    assert len({id(s.error) for s in streams}) == 3


# ---- what is left behind -----------------------------------------------------------------------------------------


@every_toy
def test_nothing_holds_a_request_that_ended(serve, toy):
    """It is freed at once, without the garbage collector: prompts can be large."""
    backend = GatedNumpy()
    engine = serve(toy(backend), backend=backend)
    gc.disable()
    try:
        stream = engine.run([1, 2], None if toy is SumTokens else GREEDY, max_tokens=2)
        backend.wait()
        prompt = ref(next(iter(engine.core.live())).request.prompt)
        assert prompt() is not None
        backend.open()
        stream.collect()
        del stream
        until(lambda: prompt() is None)
    finally:
        gc.enable()


# ---- Ctrl-C ------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_the_self_check_of_a_model(serve):
    """It runs in the main thread, before there is an engine's: there an interrupt is no fault of a row."""

    class Interrupted(SumPaged):
        calls = 0

        def step(self, params, cache, x):
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt
            return super().step(params, cache, x)

    with pytest.raises(KeyboardInterrupt):
        serve(Interrupted(NUMPY), backend=NUMPY, deterministic=True).run([1], GREEDY, max_tokens=1)


# ---- words -------------------------------------------------------------------------------------------------------


def test_logits_from_forward_are_told_where_they_belong(serve):
    class Net:
        max_model_len = 8

        def forward(self, tokens):
            return np.zeros((len(tokens), 10), np.float32)

    with pytest.raises(InvalidModelOutput) as e:
        serve(Net(), backend=NUMPY).run([1], max_tokens=1).collect()
    assert str(e.value) == (
        "Net.forward must return shape (1,); got (1, 10). If these are logits, call the method `logits(self, tokens, "
        "lengths)` and set `vocab_size`: then the engine draws the token. `forward` returns the next token of each row."
    )
