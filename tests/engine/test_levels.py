"""Every rung of the ladder gives the tokens of a solo run, whoever shares the batch. Toys: the sum of all, plus 1."""

import asyncio
from functools import partial

import numpy as np
import pytest

from hibachi import (
    AutoregressiveBatchInference,
    ConfigError,
    FeedforwardBatchInference,
    Finish,
    InvalidModelOutput,
    InvalidRequest,
    NumpyBackend,
    OwnCache,
    PromptTooLong,
    SamplingParams,
    StopRule,
)
from hibachi.testing.toys import SumBoth, SumLogits, SumOwn, SumOwnState, SumPaged, SumState, SumTokens, expected

from ..lib.inside import rules
from .models import PATIENCE, GatedNumpy, Next, ints, until

NUMPY = NumpyBackend()
GREEDY = SamplingParams(temperature=0, max_tokens=None)
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, 10, int(n)).tolist() for n in RNG.integers(1, 40, 14)]


class Rung:
    """How to serve one toy."""

    def __init__(self, name, model, params=GREEDY, **options):
        self.name, self.model, self.params, self.options = name, model, params, options

    def __repr__(self):
        return self.name


LEVEL_0 = Rung("level 0 padded", SumTokens, None, padding_token=7)
LEVEL_1 = Rung("level 1", SumLogits)
PAGED = Rung("paged", SumPaged, block_size=4)
RUNGS = [
    LEVEL_0,
    Rung("level 0 grouped", SumTokens, None),
    LEVEL_1,
    Rung("level 1 padded", SumLogits, padding_token=3),
    PAGED,
    Rung("paged in chunks", SumPaged, block_size=3, max_num_batched_tokens=7),
    Rung("paged, little memory", SumPaged, block_size=4, kv_cache_memory_bytes=12 * 4 * 16),  # 16 blocks of 4 positions
    Rung("own cache", SumOwn),
    Rung("own cache, new positions", partial(SumOwn, new_only=True), deterministic=False),
    Rung("own cache in chunks", SumOwn, max_num_batched_tokens=7, deterministic=False),
    Rung("own cache, little memory", SumOwn, block_size=4, kv_cache_memory_bytes=4 * 4 * 16, deterministic=False),
    Rung("own cache, alone", SumOwn, max_num_batched_tokens=7, deterministic=True),
    Rung("own state", SumOwnState, deterministic=False),
    Rung("own state in chunks", SumOwnState, max_num_batched_tokens=7, deterministic=False),
    Rung("state", SumState),
    Rung("state in chunks", SumState, max_num_batched_tokens=7),
    Rung("both", SumBoth, block_size=4),
    Rung("both in chunks", SumBoth, block_size=5, max_num_batched_tokens=6),
]
every_rung = pytest.mark.parametrize("rung", RUNGS, ids=repr)
one_of_each = pytest.mark.parametrize("rung", [LEVEL_0, LEVEL_1, PAGED], ids=repr)


@pytest.fixture
def gated(serve):
    """gated(rung): an engine and its turnstile."""

    def make(rung, **options):
        backend = GatedNumpy()
        model = rung.model(backend)
        backend.free = True  # a model with a cache of its own is tried when the engine is made
        engine = serve(model, backend=backend, **rung.options | options)
        backend.free = False
        return engine, backend

    return make


# ---- mixed lengths -----------------------------------------------------------------------------------------------


@every_rung
def test_mixed_lengths(serve, rung):
    engine = serve(rung.model(NUMPY), max_num_seqs=5, max_model_len=60, **rung.options)
    limits = [1 + i % 9 for i in range(len(PROMPTS))]
    streams = [engine.run(p, rung.params, max_tokens=n) for p, n in zip(PROMPTS, limits, strict=True)]
    assert [ints(s.collect()) for s in streams] == [expected(p, n) for p, n in zip(PROMPTS, limits, strict=True)]
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.blocks)


@every_rung
def test_join_and_leave_mid_flight(gated, rung):
    engine, gate = gated(rung, max_num_seqs=3, max_model_len=60)
    a = engine.run([1, 2, 3], rung.params, max_tokens=6)
    gate.wait()
    gate.let()
    gate.wait()
    b = engine.run(PROMPTS[0], rung.params, max_tokens=20)
    gate.let()
    gate.wait()
    c = engine.run([5], rung.params, max_tokens=4)
    d = engine.run([7] * 9, rung.params, max_tokens=4)  # waits for a row
    gate.let()
    gate.wait()
    b.close()  # in the midst of its prompt, where steps are short
    gate.open()
    assert ints(a.collect()) == expected([1, 2, 3], 6)
    assert ints(c.collect()) == expected([5], 4)
    assert ints(d.collect()) == expected([7] * 9, 4)
    assert b.finish_reason == Finish.CANCELLED
    assert engine.drain(PATIENCE)
    assert engine.stats().free_blocks == engine.stats().blocks


class Doubtful(SumPaged):
    """The right token's logit is 5 instead of 1000, the others' is 0."""

    def step(self, params, cache, x):
        logits, cache = super().step(params, cache, x)
        return logits / 200, cache


def test_logprobs_come_with_the_tokens_that_are_delivered(serve):
    engine = serve(Doubtful(NUMPY))
    stream = engine.run([1, 2], GREEDY.with_(logprobs=1, stop_token_ids=[6]), include_stop=False)
    assert stream.collect() == [4, 8]
    [first, second] = stream.logprobs
    assert list(first) == [4] and list(second) == [8] and first[4] == pytest.approx(-np.log(1 + 9 * np.exp(-5)))


# ---- tokens of any shape -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [None, np.array([[7, 7, 7]])], ids=["grouped", "padded"])
def test_multi_codebook_tokens(serve, padding):
    """Three codebooks: each element is a sequence of its own."""
    engine = serve(SumTokens(NUMPY), padding_token=padding, max_num_seqs=3)
    prompts = [np.stack([p, p[::-1], np.roll(p, 1) * 0], axis=1) for p in map(np.array, PROMPTS[:6])]
    streams = [engine.run(p, max_tokens=5) for p in prompts]
    for p, s in zip(prompts, streams, strict=True):
        got = s.collect()
        assert [g.shape for g in got] == [(3,)] * 5
        assert np.array(got).T.tolist() == [expected(p[:, k].tolist(), 5) for k in range(3)]


class Halve:
    """Continuous tokens of two numbers: half the last one."""

    def forward(self, tokens):
        return tokens[:, -1] / 2


class HalveCached:
    """The same on level 2: `step` returns the tokens, so the engine does not sample."""

    vocab_size = None
    params = None

    def cache_spec(self):
        return []

    def step(self, params, cache, x):
        return x.tok[x.last] / 2, cache


@pytest.mark.parametrize("model", [Halve, HalveCached])
def test_continuous_tokens_until_a_predicate_holds(serve, model):
    engine = serve(model(), stop_token=None)
    small = StopRule(where=lambda batch: (abs(batch) < 1).all(axis=1))
    a = engine.run([[0.0, 0.0], [8.0, 1.0]], stop_rule=small)
    b = engine.run([[2.0, 2.0]], stop_rule=small, include_stop=False)
    assert [x.tolist() for x in a] == [[4, 0.5], [2, 0.25], [1, 0.125], [0.5, 0.0625]]
    assert [x.tolist() for x in b] == [[1, 1]]
    assert {a.finish_reason, b.finish_reason} == {Finish.STOP}


# ---- when to stop ------------------------------------------------------------------------------------------------


@one_of_each
@pytest.mark.parametrize("include_stop", [True, False])
def test_stop_tokens(serve, rung, include_stop):
    """1 2 → 4 8 6 2 4 8 6 2 …"""
    engine = serve(rung.model(NUMPY), stop_token=2, max_num_seqs=8, **rung.options)
    stops = [None, 6, [6, 8], StopRule([8]), lambda batch: batch == 6]
    streams = [engine.run([1, 2], rung.params, stop_rule=s, include_stop=include_stop) for s in stops]
    full = [[4, 8, 6, 2], [4, 8, 6], [4, 8], [4, 8], [4, 8, 6]]
    assert [ints(s.collect()) for s in streams] == [f if include_stop else f[:-1] for f in full]
    assert {s.finish_reason for s in streams} == {Finish.STOP}


def test_stop_token_ids_of_the_parameters(serve):
    engine = serve(SumLogits(NUMPY), stop_token=2)
    run = engine.run([1, 2], GREEDY.with_(stop_token_ids=[6, 9]))
    assert run.collect() == [4, 8, 6]
    assert engine.run([1, 2], GREEDY.with_(stop_token_ids=[9]), stop_rule=8).collect() == [4, 8]
    assert engine.run([1, 2], GREEDY.with_(stop_token_ids=[9])).collect() == [4, 8, 6, 2]


@pytest.mark.parametrize("rung", RUNGS, ids=repr)
def test_a_predicate_sees_native_tokens_of_all_rows_that_share_it(gated, rung):
    engine, gate = gated(rung, max_num_seqs=4, max_model_len=60)
    seen = []

    def where(batch):
        seen.append(batch)
        return batch == 6

    plug = engine.run([0], rung.params, max_tokens=1)
    gate.wait()
    streams = [engine.run([1, 2], rung.params, max_tokens=9, stop_rule=where) for _ in range(2)]
    other = engine.run([1, 2], rung.params, max_tokens=3)
    gate.open()
    assert [ints(s.collect()) for s in (*streams, other)] == [[4, 8, 6]] * 3
    plug.collect()
    assert all(isinstance(b, np.ndarray) and b.dtype.kind == "i" for b in seen)
    assert [b.tolist() for b in seen] == [[4, 4], [8, 8], [6, 6]]


def test_equal_rules_are_judged_once_a_step_and_forgotten_with_their_requests(gated):
    """Even if each request brings its own: 64 different rule objects would cost more than the step."""
    engine, gate = gated(LEVEL_0, max_num_seqs=8)
    streams = [engine.run([1, 2], stop_rule=6) for _ in range(8)]
    assert len(rules(engine)) == 1
    gate.open()
    assert all(ints(s.collect()) == [4, 8, 6] for s in streams)
    del streams
    assert engine.drain(PATIENCE)
    until(lambda: not rules(engine))


@one_of_each
def test_without_a_limit_a_request_runs_to_the_end_of_the_context(serve, rung):
    engine = serve(rung.model(NUMPY), max_model_len=7, **rung.options)
    stream = engine.run([1, 2], rung.params)
    assert ints(stream.collect()) == [4, 8, 6, 2, 4] and stream.finish_reason == Finish.LENGTH
    assert ints(engine.run([1, 2], rung.params, max_tokens=99).collect()) == [4, 8, 6, 2, 4]
    with pytest.raises(PromptTooLong, match="at most 6 tokens; got 7"):
        engine.run([1] * 7, rung.params)


def test_a_request_larger_than_the_cache(serve):
    engine = serve(SumPaged(NUMPY), max_model_len=100, block_size=4, kv_cache_memory_bytes=12 * 4 * 3)
    with pytest.raises(PromptTooLong, match=r"12 positions.* may need 13"):
        engine.run([1] * 4, GREEDY, max_tokens=10)
    assert engine.run([1] * 4, GREEDY, max_tokens=9).collect() == expected([1] * 4, 9)


# ---- construction ------------------------------------------------------------------------------------------------


def test_a_request_that_never_stops_must_end_somewhere():
    with pytest.raises(ConfigError, match=r"Pass max_model_len=N"):
        AutoregressiveBatchInference(Next())
    AutoregressiveBatchInference(Next(), stop_token=9).close()
    AutoregressiveBatchInference(SumPaged(NUMPY)).close()  # knows its own max_model_len


def test_a_model_with_a_cache_needs_a_length():
    class Endless(HalveCached):
        vocab_size = 3

    with pytest.raises(ConfigError, match=r"needs max_model_len=N"):
        AutoregressiveBatchInference(Endless(), stop_token=2)


def test_the_highest_rung_is_used(serve):
    class Two(SumLogits):
        def forward(self, tokens):
            raise AssertionError("the lower rung was used")

    assert serve(Two(NUMPY)).run([1, 2], GREEDY, max_tokens=2).collect() == [4, 8]


def test_logits_need_a_vocabulary():
    class Nameless:
        def logits(self, tokens, lengths): ...

    with pytest.raises(ConfigError, match="vocab_size"):
        AutoregressiveBatchInference(Nameless(), max_model_len=9)


def test_parameters_are_for_models_that_return_logits(serve):
    with pytest.raises(InvalidRequest, match="samples by itself"):
        serve(SumTokens(NUMPY)).run([1], GREEDY)


@pytest.mark.parametrize("ids", [[10], [-1], [3, 99]])
def test_token_ids_outside_of_the_vocabulary(serve, ids):
    with pytest.raises(InvalidRequest, match="from 0 to 9"):
        serve(SumPaged(NUMPY)).run(ids, GREEDY)


@pytest.mark.parametrize(
    "stop, why",
    [("x", "number"), ([1, 2.5], "hold integers"), (np.zeros((2, 2)), "shape of one token"), ([None], "number")],
)
def test_bad_stop_tokens(serve, stop, why):
    with pytest.raises(InvalidRequest, match=why):
        serve(SumTokens(NUMPY)).run([1], stop_rule=stop)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_model_len", "max_num_batched_tokens", "block_size"])
@pytest.mark.parametrize("value", [0, 1.5, "4", True])
def test_bad_sizes(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be an integer"):
        AutoregressiveBatchInference(SumPaged(NUMPY), **{name: value})


def test_a_cache_too_small_for_a_block():
    with pytest.raises(ConfigError, match="cache block needs 192 bytes; got kv_cache_memory_bytes=100"):
        AutoregressiveBatchInference(SumPaged(NUMPY), backend=NUMPY, kv_cache_memory_bytes=100)


def test_a_backend_by_name_by_model_and_by_array(serve):
    for model, how in ((SumPaged(NUMPY), None), (Next(), "numpy"), (Next(), None)):
        engine = serve(model, backend=how)
        assert len(engine.run(np.array([1]), max_tokens=1).collect()) == 1
        assert engine.facts.fingerprint.startswith("numpy")
    with pytest.raises(ConfigError, match=r"got object with 0 of the nine operations: it lacks shape"):
        AutoregressiveBatchInference(Next(), max_model_len=5, backend=object())


def test_training_mode_is_told(caplog):
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):
        vocab_size = 5

        def __init__(self):
            super().__init__()
            self.embed, self.drop, self.head = torch.nn.Embedding(5, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 5)

        def logits(self, tokens, lengths):
            return self.head(self.drop(self.embed(tokens)))[torch.arange(len(tokens)), lengths - 1]

    net = Net()
    for _ in range(2):
        with AutoregressiveBatchInference(net, backend="torch", max_model_len=8, deterministic=False):
            net.eval()
    [told] = [r.getMessage() for r in caplog.records if "mode" in r.getMessage()]
    assert told.startswith("Net is in training mode (Dropout), in which outputs may be others in every call.")


# ---- what a beginner writes ------------------------------------------------------------------------------------------


class Wrong:
    vocab_size, max_model_len = 20, 30

    def __init__(self, out):
        self.logits = lambda tokens, lengths: out(tokens)


class WrongStep(Wrong):
    past = OwnCache()

    def step(self, tokens, lengths, past):
        return self.logits(tokens, lengths), tokens


@pytest.mark.parametrize("model", [Wrong, WrongStep])
@pytest.mark.parametrize(
    "out, told",
    [
        (lambda t: np.zeros((*t.shape, 20)), r"axis of time too many.*`logits\[:, -1\]`"),
        (lambda t: t[:, -1], "If these are token ids, (name the method `forward|set `vocab_size = None`)"),
        (lambda t: np.zeros((len(t), 9)), "`vocab_size` says 20 ids, and .* gives 9"),
    ],
)
def test_logits_of_a_wrong_shape(serve, model, out, told):
    with pytest.raises((InvalidModelOutput, ConfigError), match=told):  # the latter of a cache, which is tried at once
        serve(model(out)).run([1, 2, 3]).collect()


def test_a_class_for_an_object_and_a_model_of_transformers():
    for make, engine in ((SumOwn, AutoregressiveBatchInference), (SumTokens, FeedforwardBatchInference)):
        with pytest.raises(ConfigError, match=rf"got the class {make.__name__} itself.*: {make.__name__}\(\)"):
            engine(make)
    hf = pytest.importorskip("transformers")
    tiny = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1)).eval()
    with pytest.raises(ConfigError, match=r"of the library transformers.*`past` and `step`"):
        AutoregressiveBatchInference(tiny, max_model_len=9)


def test_several_prompts_in_one_call_and_a_stream_that_is_awaited(serve):
    engine = serve(SumLogits(NUMPY))
    for prompts in ([[1, 2], [3, 4, 5]], [[1, 2], [3, 4]]):
        with pytest.raises(InvalidRequest, match="call `run` once for each"):
            engine.run(prompts)

    async def main():
        await engine.run([1], GREEDY)

    with pytest.raises(TypeError, match=r"expected `await stream.acollect\(\)`"):
        asyncio.run(main())
