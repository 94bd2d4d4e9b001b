"""Models with a cache of their own: a request that begins like another starts with a copy of what that one computed."""

import gc
import logging
import random

import numpy as np
import pytest

import hibachi
from hibachi import (
    AutoregressiveBatchInference,
    ModelError,
    NonFiniteOutput,
    NumpyBackend,
    OwnCache,
    SamplingParams,
    Terms,
)
from hibachi.engine.recording.replay import read, replay
from hibachi.engine.runners.owncache.layout import Layout, Past
from hibachi.engine.scheduler.copies import CopySource
from hibachi.engine.scheduler.sequence import Seq
from hibachi.testing.toys import SumOwn, SumOwnState, expected

from .frames import OwnFrames
from .models import Turnstile, until
from .test_own_cache import Attends, Poisoned, told

NUMPY = NumpyBackend()
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def ids(n, seed=0):
    return np.random.default_rng(seed).integers(0, 10, n).tolist()


def computed(model):
    """Tokens that the model was given since the last call."""
    n = sum(tokens.size for tokens, _ in model.seen)
    model.seen.clear()
    return n


def kept_by(engine):
    """Blocks that are kept for requests to come."""
    return engine.core.runner.prefixes


def answer(engine, prompt, params=GREEDY, **terms):
    stream = engine.run(prompt, params, terms=Terms(**terms))
    return stream.collect(), stream.reused


@pytest.fixture
def own(serve):
    """own(model, **options): an engine of blocks of 4 positions, whose model has seen no trial."""

    def make(model=None, **options):
        model = SumOwn(NUMPY) if model is None else model
        engine = serve(model, **{"max_model_len": 60, "block_size": 4} | options)
        if hasattr(model, "seen"):
            model.seen.clear()
        return engine

    return make


class Slow(SumOwn):
    gate = None

    def step(self, tokens, lengths, past):
        if self.gate is not None:
            self.gate.arrive()
        return super().step(tokens, lengths, past)


def gated(own, **options):
    """An engine that takes one step at a time, what lets it, and its model."""
    model = Slow(NUMPY)
    engine, model.gate = own(model, **options), Turnstile()
    return engine, model.gate, model


# ---- what is found ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_only", [False, True])
def test_a_second_identical_prompt_computes_its_end_only(own, new_only):
    model = SumOwn(NUMPY, new_only)
    engine = own(model)
    assert answer(engine, ids(21)) == (expected(ids(21), 8), 0) and computed(model) == 21 + 7
    assert answer(engine, ids(21)) == (expected(ids(21), 8), 20) and computed(model) == 1 + 7
    until(lambda: len(kept_by(engine)) == engine.stats().cached_blocks == 7)  # of 28 positions, computed and full
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (42, 20) and stats.free_blocks == stats.blocks
    # A view would keep the whole past.
    arrays = [array for _, arrays in kept_by(engine).kept.values() for array in arrays]
    assert all(a.shape == (1, 1, 4) and a.base is None for a in arrays)


TURN = [*ids(10), *expected(ids(10), 8)]


@pytest.mark.parametrize(
    "prompts, options, reused",
    [
        ((ids(20), ids(20)), {}, (0, 16)),  # the last token of a prompt is always computed
        ((ids(10), [*TURN, 3]), {}, (0, 16)),  # what was generated is found by the next turn
        ((ids(30), ids(30), ids(30) + ids(9, 1), ids(30)[:17]), {"max_num_batched_tokens": 6}, (0, 28, 28, 16)),
        ((ids(21), ids(21)), {"enable_prefix_caching": False}, (0, 0)),
    ],
)
def test_what_prompts_have_in_common_is_found(own, prompts, options, reused):
    engine = own(**options)
    assert [answer(engine, p) for p in prompts] == [(expected(p, 8), n) for p, n in zip(prompts, reused, strict=True)]
    assert bool(engine.stats().cached_blocks) is bool(any(reused)) is (kept_by(engine) is not None)


def test_another_salt_finds_nothing(own):
    engine = own()
    assert [answer(engine, ids(21), cache_salt=salt)[1] for salt in ("a", "b", None, "b")] == [0, 0, 0, 20]


def test_a_burst_with_a_common_prefix_computes_it_once(own):
    model = SumOwn(NUMPY)
    engine = own(model, max_num_seqs=8)
    prompts = [ids(24) + ids(5, 1 + i) for i in range(8)]
    streams = [engine.run(prompt, GREEDY) for prompt in prompts]
    assert [stream.collect() for stream in streams] == [expected(prompt, 8) for prompt in prompts]
    assert sorted(stream.reused for stream in streams) == [0] + [24] * 7
    assert computed(model) == 24 + 8 * 5 + 8 * 7


def test_a_running_request_lends_what_it_has(own):
    engine, gate, _ = gated(own)
    first = engine.run(ids(21), SamplingParams(temperature=0, max_tokens=30))
    gate.wait()
    gate.let()
    gate.wait()
    second = engine.run(ids(21), GREEDY)
    gate.open()
    assert second.collect() == expected(ids(21), 8) and second.reused == 20
    assert first.collect() == expected(ids(21), 30) and first.reused == 0


def test_who_comes_at_once_after_another_finds_what_that_one_had(own):
    engine, gate, model = gated(own, max_num_seqs=1)
    streams = [engine.run(ids(21), GREEDY) for _ in range(3)]
    gate.open()
    assert [stream.collect() for stream in streams] == [expected(ids(21), 8)] * 3
    assert [stream.reused for stream in streams] == [0, 20, 20]
    assert computed(model) == 21 + 7 + 2 * (1 + 7)


def test_a_preempted_request_goes_on_from_what_is_left_of_it(own):
    tokens = []
    for reuse in (False, True):
        engine, gate, model = gated(own, max_num_seqs=4, cache_tokens=80, enable_prefix_caching=reuse)
        prompts = [ids(15, i) for i in range(4)]
        long = SamplingParams(temperature=0, max_tokens=30)
        streams = [engine.run(prompt, long) for prompt in prompts]
        gate.open()
        assert [stream.collect() for stream in streams] == [expected(prompt, 30) for prompt in prompts]
        stats = engine.stats()
        assert stats.preemptions and stats.free_blocks == stats.blocks
        tokens.append(computed(model))
    assert tokens[1] < tokens[0]


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_what_is_kept_makes_room_for_what_runs(own):
    engine = own(cache_tokens=64, max_num_seqs=2)
    for i in range(12):
        prompt = ids(21, i)
        assert answer(engine, prompt) == (expected(prompt, 8), 0)
        kept = kept_by(engine)
        until(lambda kept=kept: len(kept) == engine.stats().cached_blocks)
        assert len(kept) <= 16
    stats = engine.stats()
    assert stats.evictions > 0 and stats.free_blocks == stats.blocks == 16
    assert answer(engine, ids(21, 11))[1] == 20 and answer(engine, ids(21, 0))[1] == 0  # the newest is there


def test_dropped_prefixes_are_freed(own):
    engine = own()
    answer(engine, ids(21))
    engine.reset_cache()
    until(lambda: not len(kept_by(engine)))
    assert answer(engine, ids(21))[1] == 0


def test_a_copy_is_not_the_lenders_array(own):
    """The model may write into the past that it is given."""

    class Scribbles(SumOwn):
        def step(self, tokens, lengths, past):
            logits, new = super().step(tokens, lengths, past)
            if past is not None:
                past["layers"][0][0][:] = 7
            return logits, new

    engine = own(Scribbles(NUMPY))
    for _ in range(3):
        assert answer(engine, ids(5))[0] == expected(ids(5), 8)
    streams = [engine.run(ids(5), GREEDY) for _ in range(4)]
    assert [stream.collect() for stream in streams] == [expected(ids(5), 8)] * 4


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault, error", [("raises", ModelError), ("nan", NonFiniteOutput)])
def test_nothing_of_a_request_that_failed_is_found(own, fault, error):
    model = Poisoned(fault)
    engine = own(model)
    model.armed = True
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 9]
    assert answer(engine, prompt[:11], SamplingParams(temperature=0, max_tokens=1)) == (expected(prompt[:11], 1), 0)
    stream = engine.run(prompt, GREEDY)  # it starts with what the one before computed, and spoils it
    with pytest.raises(error):
        stream.collect()
    assert stream.reused == 8
    model.armed = False
    assert answer(engine, prompt) == (expected(prompt, 8), 0)


@pytest.mark.parametrize("running", [False, True])
def test_what_is_not_finite_is_not_copied_though_nobody_noticed(own, running):
    """A nine writes NaN into all that its row has, and the outputs stay finite."""

    class Quiet(Slow):
        def step(self, tokens, lengths, past):
            with np.errstate(invalid="ignore"):
                logits, new = super().step(tokens, lengths, past)
            seen = new["layers"][0][0]
            if self.armed:
                seen[(np.isnan(seen) | (seen == 9)).any(axis=(1, 2))] = np.nan
            return np.nan_to_num(logits), new

        armed = False

    model = Quiet(NUMPY)
    engine = own(model)
    model.armed, common = True, [1, 2, 3, 4, 5, 6, 7, 8]
    gate = model.gate = Turnstile()
    first = engine.run([*common, 9], SamplingParams(temperature=0, max_tokens=40 if running else 4))
    gate.wait()
    gate.let(2)
    if running:
        next(first)
    else:
        gate.open()
        first.collect()
    model.armed = False
    second = engine.run([*common, 1], GREEDY)
    gate.open()
    assert second.collect() == expected([*common, 1], 8) and second.reused == 8
    first.close()


def test_a_past_that_a_failed_step_has_taken_along_is_not_kept(own):
    class Once(SumOwn):
        fails = False

        def step(self, tokens, lengths, past):
            if past is not None and self.fails:
                self.fails = False
                past["layers"][0][0][:] = 5
                raise RuntimeError("once")
            return super().step(tokens, lengths, past)

    model = Once(NUMPY)
    engine = own(model)
    answer(engine, ids(21))
    for _ in range(3):
        model.fails = True
        assert answer(engine, ids(21))[0] == expected(ids(21), 8)
    model.fails = True
    assert answer(engine, ids(21) + ids(6, 2))[0] == expected(ids(21) + ids(6, 2), 8)


def test_without_memory_for_a_copy_the_tokens_are_computed(own, monkeypatch):
    model = SumOwn(NUMPY)
    engine = own(model)
    answer(engine, ids(21))

    def no_memory(*args):
        raise MemoryError

    monkeypatch.setattr(Layout, "begun", no_memory)
    assert answer(engine, ids(21)) == (expected(ids(21), 8), 20)
    computed(model)
    monkeypatch.setattr(Layout, "cut", no_memory)
    assert answer(engine, ids(21, 3)) == (expected(ids(21, 3), 8), 0)


def test_cancelled_in_its_prompt_nothing_is_kept_that_nobody_heard_of(own):
    engine, gate, _ = gated(own, max_num_batched_tokens=6)
    stream = engine.run(ids(40), GREEDY)
    gate.wait()
    gate.let()
    gate.wait()
    stream.close()
    gate.open()
    assert answer(engine, ids(40)) == (expected(ids(40), 8), 0)


def test_only_what_is_there_is_copied(own):
    """Whatever the scheduler believes: a past may have gone with a failed step."""
    engine = own()
    answer(engine, ids(21))
    runner, pool = engine.core.runner, engine.core.scheduler.pool
    made = runner.prefixes
    until(lambda: len(made) == 7)
    blocks = pool.match(None, [np.array(ids(21)[at : at + 4], np.int32).tobytes() for at in (0, 4)], 2)[0]
    nodes = [pool.node(block) for block in blocks]
    assert len(nodes) == 2 and set(nodes) <= set(made.kept)
    array = np.arange(6, dtype=np.float32).reshape(1, 1, 6)
    short = Past({"layers": [(array,)]}, [array], [3], [6], 6, 1)
    assert made.past(0, [CopySource(nodes[0], 3), CopySource(nodes[1], 3)], {3: short}, 8) is None
    assert made.past(0, [CopySource(nodes[0], 3)], {}, 4) is None
    found = made.past(0, [CopySource(nodes[0], 3)], {3: short}, 4)
    assert found.arrays[0].tolist() == [[[0, 1, 2, 3]]] and found.counts == [4] and found.rows == [0]
    made.clear()
    assert made.past(0, [CopySource(nodes[0], -1)], {}, 4) is None
    made.keep(short, 3, [(0, blocks[0], nodes[0]), (1, blocks[1], nodes[1]), (0, blocks[1], nodes[0] + 99)])
    assert [*made.kept] == [nodes[0]] and runner.layout.uncut == ""
    runner.rebuild(keep=True)
    assert not len(made)


def test_the_past_of_another_request_is_not_kept(own):
    engine = own()
    answer(engine, ids(21))
    core, array = engine.core, np.zeros((1, 1, 8), np.float32)
    made, pool, copies = core.runner.prefixes, core.scheduler.pool, core.scheduler.copies
    until(lambda: len(made) == 7)  # the engine has nothing more to keep
    made.clear()
    block = pool.match(None, [np.array(ids(21)[:4], np.int32).tobytes()], 1)[0][0]
    pasts = {0: Past({"layers": [(array,)]}, [array], [0], [8], 8, 1)}
    for whose, kept in ((Seq(8, 1), 0), (None, 1)):
        gone = Seq(8, 1)
        copies.leave(gone, 0, [block])
        made.keep_left(pasts, {0: whose or gone})
        assert len(made) == kept


# ---- which models ----------------------------------------------------------------------------------------------------


class Counts(SumOwn):
    """All positions of the past say how many calls there were, and several tokens come in the first two only."""

    def step(self, tokens, lengths, past):
        logits, new = super().step(tokens, lengths, past)
        calls, width = 1 if past is None else past["calls"].max() + 1, new["layers"][0][0].shape[2]
        many = calls > 2 and tokens.shape[1] > 1
        return self.changed(logits, many), new | {"calls": np.full((len(tokens), width), calls)}

    def changed(self, logits, now):
        return np.roll(logits, now, axis=1)


class CountsALittle(Counts):
    def changed(self, logits, now):
        return logits * np.float32(1 + 1e-6 * now)


class Whole(SumOwn):
    """It sees all of a prompt from each of its tokens, and so may what it keeps of them."""

    def step(self, tokens, lengths, past, prompt_len):
        return super().step(tokens, lengths, past)


@pytest.mark.parametrize(
    "make, options, why",
    [
        (SumOwnState, {}, "the array the cache itself of its past is a state"),
        (Counts, {}, "more in it than positions"),
        (CountsALittle, {"deterministic": None}, "a copy changes its bits"),
        (Whole, {}, "what each request has of its own: prompt_len"),
        (SumOwn, {"deterministic": True}, "each row is computed by itself"),
    ],
)
def test_where_nothing_is_reused_the_log_says_why(own, caplog, make, options, why, monkeypatch):
    if options.get("deterministic"):
        monkeypatch.setattr(hibachi.engine.runners.owncache.runner.OwnCacheRunner, "selfcheck", lambda self: 1 / 0)
    with caplog.at_level(logging.INFO, "hibachi.engine"):
        engine = own(make(NUMPY), max_num_seqs=1, **options)
    found = [record for record in caplog.records if "begins with what others" in record.getMessage()]
    assert engine.deterministic is (options.get("deterministic", False) is not False)
    assert len(found) == 1 and why in found[0].getMessage() and found[0].levelno == logging.INFO
    assert [answer(engine, ids(21)) for _ in range(2)] == [(expected(ids(21), 8), 0)] * 2


def test_a_table_beside_the_rows_is_no_hindrance(own):
    class Table(SumOwn):
        def step(self, tokens, lengths, past):
            assert past is None or past["table"].tolist() == [1, 2, 3]
            logits, new = super().step(tokens, lengths, past)
            return logits, new | {"table": np.array([1, 2, 3])}

    engine = own(Table(NUMPY))
    assert [answer(engine, ids(21)) for _ in range(2)] == [(expected(ids(21), 8), n) for n in (0, 20)]


def test_bits_are_the_same_with_and_without():
    """A model whose bits do not depend on who shares a call, on chunks, or on padding: in integers."""

    class Sums(Attends):
        def step(self, tokens, lengths, past):
            new = tokens.astype(np.float32)[:, :, None]
            seen = new if past is None else np.concatenate([past[0], new], 1)
            real = np.arange(seen.shape[1]) >= seen.shape[1] - lengths[:, None]
            total = (seen[:, :, 0] * real).sum(1)
            return np.sin(total[:, None] + np.arange(50)).astype(np.float32), (seen,)

    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=10, logprobs=3) for i in range(8)]
    prompts = [[*range(9), *np.random.default_rng(i).integers(0, 50, i).tolist()] for i in range(8)]
    found, hits = [], []
    for reuse in (True, False):
        with AutoregressiveBatchInference(Sums(), backend="numpy", enable_prefix_caching=reuse, block_size=4) as engine:
            assert engine.deterministic and not engine.core.runner.apart
            found += [told([engine.run(*each) for each in zip(prompts, params, strict=True)]) for _ in range(2)]
            hits.append(engine.stats().prefix_hits)
    assert found[1:] == [found[0]] * 3 and hits[0] > 100 and hits[1] == 0


# ---- whatever comes --------------------------------------------------------------------------------------------------


class Exact:
    """Keys and values that a sum over all real positions is made of, on any library; integers, so bits agree.

    new_only: the new positions only are returned.
    """

    vocab_size, max_model_len, past = 50, 64, OwnCache()

    def __init__(self, backend, new_only):
        self.backend, self.new_only = backend, new_only

    def step(self, tokens, lengths, past):
        b, xp = self.backend, self.backend.xp
        keys = b.float32(tokens)[:, None, :, None]
        values = b.float32(tokens)[:, :, None] * 3 + 1
        new = keys, values
        if past is not None:
            keys, values = xp.concat([past[0], keys], axis=2), xp.concat([past[1], values], axis=1)
        width = values.shape[1]
        place = xp.reshape(b.put(np.arange(width, dtype=np.int32)), (1, -1)) - (width - xp.reshape(lengths, (-1, 1)))
        weight = xp.where(place >= 0, b.float32(place % 7 + 1), 0 * b.float32(place))
        total = xp.sum(weight * (keys[:, 0, :, 0] + values[:, :, 0]), axis=1)
        total = xp.reshape(b.float32(total % 50), (-1, 1))
        logits = -xp.abs(total - xp.reshape(b.float32(b.put(np.arange(50, dtype=np.int32))), (1, -1)))
        return logits, (new if self.new_only else (keys, values))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("new_only", [False, True])
@pytest.mark.parametrize(
    "library", ["numpy", *(pytest.param(name, marks=pytest.mark.slow) for name in ("torch", "jax"))]
)
def test_whatever_comes_each_stream_is_that_of_a_solo_run(library, new_only, seed):
    backend = hibachi.load_backend(library)
    rng = random.Random(f"{seed} {new_only}")
    heads = [[rng.randrange(50) for _ in range(24)] for _ in range(3)]
    prompts = []
    for _ in range(40):
        head = rng.choice(heads)
        prompts.append(head[: rng.randrange(1, 25)] + [rng.randrange(50) for _ in range(rng.randrange(6))])
    params = SamplingParams(temperature=0, max_tokens=20)
    with AutoregressiveBatchInference(
        Exact(backend, new_only), backend=backend, max_num_seqs=1, enable_prefix_caching=False, deterministic=False
    ) as engine:
        solo = {tuple(prompt): engine.run(prompt, params).collect() for prompt in prompts}
    options = {
        "max_num_seqs": rng.choice((3, 6)),
        "cache_tokens": rng.choice((100, 160)),
        "block_size": rng.choice((1, 3, 4)),
        "max_num_batched_tokens": rng.choice((8, 64)),
    }
    with AutoregressiveBatchInference(
        Exact(backend, new_only), backend=backend, deterministic=False, **options
    ) as engine:
        streams = []
        for prompt in prompts:
            stream = engine.run(prompt, params, terms=Terms(cache_salt=rng.choice((None, None, "a"))))
            if rng.random() < 0.2:
                next(stream)
                stream.close()
            elif rng.random() < 0.3:
                assert stream.collect() == solo[tuple(prompt)]
            else:
                streams.append((prompt, stream))
        for prompt, stream in streams:
            assert stream.collect() == solo[tuple(prompt)]
        stats = engine.stats()
        until(lambda: engine.stats().free_blocks == engine.stats().blocks)
        assert stats.prefix_hits > 50
        until(lambda: len(kept_by(engine)) <= engine.stats().cached_blocks)
    gc.collect()


def test_requests_with_other_inputs_share_nothing(own):
    class Shifts(SumOwn):
        """The next token is moved by what the request brings."""

        def __init__(self):
            super().__init__(NUMPY)
            self.inputs = {"shift": hibachi.Input((), "int32")}

        def step(self, tokens, lengths, past, shift):
            logits, new = super().step(tokens, lengths, past)
            moved = np.stack([np.roll(row, int(n)) for row, n in zip(logits, shift, strict=True)])
            return moved, new

    engine = own(Shifts())
    found = []
    for shift in (0, 1, 1, 0):
        stream = engine.run(ids(21), GREEDY, inputs={"shift": np.int32(shift)})
        found.append((stream.collect(), stream.reused))
    assert [reused for _, reused in found] == [0, 0, 20, 20]
    assert found[0][0] == found[3][0] == expected(ids(21), 8) and found[1][0] == found[2][0] != found[0][0]


def test_frames_are_tried_as_ids_are_and_found_too(own):
    engine = own(OwnFrames(), deterministic=None)
    assert engine.deterministic and engine.selfcheck() == 16
    prompt = np.random.default_rng(0).integers(0, OwnFrames.vocab_size, (21, OwnFrames.codebooks))
    found = []
    for _ in range(2):
        stream = engine.run(prompt, GREEDY)
        found.append(([np.asarray(frame).tolist() for frame in stream], stream.reused))
    assert [reused for _, reused in found] == [0, 20] and found[0][0] == found[1][0]


def test_a_recording_can_be_played_again(own, tmp_path):
    engine = own(max_num_seqs=3, cache_tokens=80, record=tmp_path / "steps.jsonl")
    prompts = [ids(12) + ids(i % 5, 1 + i) for i in range(9)]
    streams = [engine.run(prompt, SamplingParams(temperature=0, max_tokens=20)) for prompt in prompts]
    assert [stream.collect() for stream in streams] == [expected(prompt, 20) for prompt in prompts]
    stats = engine.stats()
    engine.close()
    assert stats.prefix_hits and replay(read(tmp_path / "steps.jsonl")) == stats.steps
