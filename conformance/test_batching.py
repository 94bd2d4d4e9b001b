"""Requests join and leave the batch at every step, and nobody can tell who else is in it (levels 0 and 1)."""

import asyncio
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from hibachi import SamplingParams, StopRule
from hibachi.testing.toys import Count, Halve, SumLogits, SumTokens, Toy, expected

from .serving import PARTS

pytestmark = pytest.mark.promise("continuous batching", parts=PARTS)

PROMPTS = [1, 2], [3, 3, 1, 5, 8], [6], [2, 5, 1]
FRAMES = [[1, 2, 3]], [[1, 0, 5], [3, 6, 2], [1, 1, 1]], [[0, 2, 6], [3, 1, 5]]  # tokens of three codes
PAD = 7


def rungs(serve, **options):
    """Engines for levels 0 and 1, each without a padding token and with one."""
    for kind in (SumTokens, SumLogits):
        for padding in (None, PAD):
            yield serve(kind(serve.backend), padding_token=padding, **options)


def passes(model):
    """The shapes of the batches that a model saw."""
    return [tokens.shape for tokens, _ in model.seen]


# mixed lengths


def test_mixed_lengths_in_any_order_stream_what_each_streams_alone(serve):
    """H-31."""
    for order in (PROMPTS, PROMPTS[::-1], PROMPTS[1:] + PROMPTS[:1]):
        for engine in rungs(serve):
            for prompt, stream in zip(order, serve.together(engine, order, max_tokens=5), strict=True):
                serve.expect(stream, expected(prompt, 5))


def join(serve, first, second):
    """`second` comes while the engine computes the third token of `first`."""
    for kind in (SumTokens, SumLogits):
        for padding in (None, PAD):
            model = kind(serve.backend)
            engine, gate = serve(model, padding_token=padding), serve.gate(step=3)
            running = engine.run(first, max_tokens=6, stop_rule=gate)
            gate.wait(running)
            joiner = engine.run(second, max_tokens=4)
            gate.open()
            serve.expect(running, expected(first, 6))
            serve.expect(joiner, expected(second, 4))
            assert padding is None or len(model.seen) == engine.stats().steps == 7, "they do not share their passes"


def test_a_longer_request_joins_a_running_batch(serve):
    """H-32."""
    join(serve, [1, 2], [3, 3, 1, 5, 8, 1, 2, 5, 8])


def test_a_request_longer_by_exactly_one_joins_a_batch_of_one(serve):
    """H-32: here the crate gave wrong tokens without a word."""
    join(serve, [1, 2], [3, 3, 1, 5, 8, 6])


def test_a_shorter_request_joins_a_running_batch(serve):
    """H-31."""
    join(serve, [3, 3, 1, 5, 8], [6])


def own_tokens(prompts, n):
    """What may stand in a row: each prompt with its first tokens, up to n - 1."""
    return {tuple(p) + tuple(expected(p, k)) for p in prompts for k in range(n)}


def test_without_a_padding_token_nothing_is_padded(serve):
    """H-31: rows of equal length go together."""
    for kind in (SumTokens, SumLogits):
        model = kind(serve.backend)
        streams = serve.together(serve(model), PROMPTS, max_tokens=4)
        for prompt, stream in zip(PROMPTS, streams, strict=True):
            serve.expect(stream, expected(prompt, 4))
        for tokens, lengths in model.seen:
            assert lengths is not None
            assert {*map(tuple, tokens.tolist())} <= own_tokens(PROMPTS, 4), f"the model saw {tokens.tolist()}"
            assert {*lengths.tolist()} == {tokens.shape[1]}


def test_a_padding_token_pads_on_the_left_and_lengths_count_the_rest(serve):
    """H-31: the newest token is always the last one of its row."""
    for kind in (SumTokens, SumLogits):
        model = kind(serve.backend)
        streams = serve.together(serve(model, padding_token=PAD), PROMPTS, max_tokens=4)
        for prompt, stream in zip(PROMPTS, streams, strict=True):
            serve.expect(stream, expected(prompt, 4))
        for tokens, lengths in model.seen:
            assert lengths is not None
            assert lengths.shape == tokens.shape[:1] and lengths.dtype == np.int32
            for row, own in zip(tokens.tolist(), lengths.tolist(), strict=True):
                padding = len(row) - own
                assert tuple(row[padding:]) in own_tokens(PROMPTS, 4), f"the model saw {row}, {own} of them its own"
                assert row[:padding] == [PAD] * padding, f"the model saw {row}, {own} of them its own"


def test_what_stands_in_the_padding_changes_nothing(serve):
    for garbage in (0, 3, 99, -1):
        for kind in (SumTokens, SumLogits):
            streams = serve.together(serve(kind(serve.backend), padding_token=garbage), PROMPTS, max_tokens=3)
            for prompt, stream in zip(PROMPTS, streams, strict=True):
                serve.expect(stream, expected(prompt, 3))


def test_a_model_that_looks_at_the_last_token_needs_no_lengths(serve):
    """The model of the crate's tests: one more than the last token, padding 0, stop 9."""
    engine = serve(Count(serve.backend), padding_token=0, stop_token=9)
    streams = serve.together(engine, [[1, 1, 1, 1, 6], [1, 2, 5], [7], [1, 2]])
    for stream, first in zip(streams, (7, 6, 8, 3), strict=True):
        serve.expect(stream, range(first, 10), "stop")


# the batch


def test_an_idle_engine_computes_nothing(serve):
    """H-24, H-38, H-39: and serves a request that comes later at once."""
    model = Count(serve.backend)
    engine = serve(model)
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.steps, model.seen) == (0, 0, 0, [])
    for n in (1, 3):
        serve.expect(engine.run([5], max_tokens=n), range(6, 6 + n))
    assert len(model.seen) == engine.stats().steps == 4


def test_requests_in_the_queue_share_their_first_forward_pass(serve):
    """H-27, H-28, H-37."""
    model = Count(serve.backend)
    prompts = [[*range(n, n + 10)] for n in (10, 20, 30)]
    for stream, prompt in zip(serve.together(serve(model), prompts, max_tokens=2), prompts, strict=True):
        serve.expect(stream, [prompt[-1] + 1, prompt[-1] + 2])
    assert passes(model) == [(1, 10), (3, 10), (3, 11)]


def test_rows_of_equal_length_share_a_pass_where_nothing_is_padded(serve):
    model = Count(serve.backend)
    for stream in serve.together(serve(model), [[1, 2], [4], [7, 8]], max_tokens=2):
        serve.read(stream)
    assert sorted(passes(model)[1:]) == [(1, 1), (1, 2), (2, 2), (2, 3)]


def test_a_free_row_is_taken_at_the_next_step(serve):
    """H-36: nobody waits while there is a free row."""
    model = Count(serve.backend)
    engine = serve(model, max_num_seqs=2, padding_token=0)
    gate = serve.hold(engine, [0])
    streams = [engine.run([10 * i], max_tokens=n) for i, n in enumerate((1, 3, 2, 1, 2))]
    gate.open()
    for i, (stream, n) in enumerate(zip(streams, (1, 3, 2, 1, 2), strict=True)):
        serve.expect(stream, range(10 * i + 1, 10 * i + 1 + n))
    assert [rows for rows, _ in passes(model)[1:]] == [2, 2, 2, 2, 1]


def test_requests_start_in_the_order_in_which_they_came(serve):
    """H-36."""
    model = Count(serve.backend)
    engine = serve(model, max_num_seqs=2)
    gate = serve.hold(engine, [0])
    prompts = [[20], [50, 51, 52], [10], [40, 41], [30]]
    streams = [engine.run(prompt, max_tokens=2) for prompt in prompts]
    gate.open()
    for prompt, stream in zip(prompts, streams, strict=True):
        serve.expect(stream, [prompt[-1] + 1, prompt[-1] + 2])
    started = dict.fromkeys(row[0] for tokens, _ in model.seen[1:] for row in tokens.tolist())
    order = [first for first in started if first]
    assert [sorted(order[:2]), *order[2:]] == [[20, 50], 10, 40, 30]


def test_the_batch_is_as_wide_as_its_longest_row(serve):
    """H-42: who leaves takes its width along."""
    model = Count(serve.backend)
    engine = serve(model, padding_token=0)
    gate = serve.hold(engine, [0])
    streams = [engine.run([1, 1, 1, 1, 6], max_tokens=1), engine.run([2, 5], max_tokens=3)]
    gate.open()
    serve.expect(streams[0], [7])
    serve.expect(streams[1], [6, 7, 8])
    assert passes(model)[1:] == [(2, 5), (1, 3), (1, 4)]


def test_the_engine_counts_what_waits_and_runs(serve):
    """H-25, H-29."""
    engine = serve(Count(serve.backend), max_num_seqs=2)
    gate = serve.gate(step=2)
    first = engine.run(np.full((3, 10), 5), max_tokens=4, stop_rule=gate)
    gate.wait(first)
    others = [engine.run(np.full((n, 10), 5), max_tokens=2) for n in (1, 2)]
    stats = engine.stats()
    assert (stats.running, stats.prompt_tokens, stats.new_tokens, stats.finished) == (1, 3, 1, 0)
    gate.open()
    serve.expect(first, [[n] * 10 for n in (6, 7, 8, 9)])
    for stream in others:
        serve.expect(stream, [[6] * 10, [7] * 10])
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.prompt_tokens, stats.new_tokens) == (0, 0, 6, 8)
    assert (stats.max_num_seqs, stats.finished, stats.failed) == (2, 3, 0)


def test_a_cancelled_request_gives_its_row_to_the_next(serve):
    """H-33: at the next step."""
    for model in (SumTokens(serve.backend), SumLogits(serve.backend)):
        engine = serve(model, max_num_seqs=1)
        gate = serve.gate(step=2)
        running = engine.run([1, 2], stop_rule=gate)
        gate.wait(running)
        waiting = engine.run([6], max_tokens=3)
        running.close()
        gate.open()
        serve.expect(waiting, expected([6], 3))
        assert serve.read(running)[1] == "cancelled"
        assert len(model.seen) == 2 + 3


def test_a_request_cancelled_in_the_queue_never_runs(serve):
    model = Count(serve.backend)
    engine = serve(model, max_num_seqs=1)
    gate = serve.hold(engine, [1])
    given_up, waiting = engine.run([50], max_tokens=3), engine.run([20], max_tokens=2)
    given_up.close()
    gate.open()
    serve.expect(waiting, [21, 22])
    serve.expect(given_up, [], "cancelled")
    assert 50 not in {token for tokens, _ in model.seen for token in tokens.ravel().tolist()}


# tokens


def test_tokens_may_be_frames_of_several_codes(serve):
    """H-31: with a padding token of the same shape, or without."""
    for padding in (None, np.full((1, 3), PAD)):
        engine = serve(SumTokens(serve.backend), padding_token=padding)
        prompts = [np.array(frames) for frames in FRAMES]
        for prompt, stream in zip(prompts, serve.together(engine, prompts, max_tokens=4), strict=True):
            serve.expect(stream, expected(prompt, 4))


def test_tokens_may_have_any_rank(serve):
    for shape in ((1,), (2, 3), (2, 1, 2)):
        prompts = [np.arange(n * np.prod(shape)).reshape(n, *shape) % 10 for n in (3, 1, 2)]
        engine = serve(SumTokens(serve.backend), padding_token=np.full((1, *shape), PAD))
        for prompt, stream in zip(prompts, serve.together(engine, prompts, max_tokens=3), strict=True):
            serve.expect(stream, expected(prompt, 3))


def test_tokens_may_be_continuous(serve):
    for padding in (None, np.zeros((1, 2), "float32")):
        engine = serve(Halve(serve.backend), padding_token=padding)
        prompts = [np.array(p, "float32") for p in ([[8, 4]], [[9, 9], [1, 3]], [[5, 5], [5, 5], [0.5, -2]])]
        for prompt, stream in zip(prompts, serve.together(engine, prompts, max_tokens=3), strict=True):
            serve.expect(stream, [(prompt[-1] / 2**n).tolist() for n in (1, 2, 3)])


class Flip(Toy):
    def forward(self, tokens):
        self._see(tokens)
        return ~tokens[:, -1]


def test_tokens_keep_their_dtype(serve):
    """Integers, floats and bools; int64 may be narrower, where a library has none."""
    for kind, dtype in ((Count, "int32"), (Count, "int64"), (Halve, "float32"), (Flip, "bool")):
        model, prompt = kind(serve.backend), np.array([0, 1], dtype)
        engine = serve(model, padding_token=prompt[:1])
        kept = serve.backend.get(serve.backend.put(prompt)).dtype
        stream = serve.together(engine, [prompt, prompt[:1]], max_tokens=2)[0]
        assert {serve.backend.get(item).dtype for item in stream} == {kept}
        assert {tokens.dtype for tokens, _ in model.seen} == {kept}


def test_items_are_native_arrays_of_the_shape_of_a_token(serve):
    """The batch dimension is removed on every backend; with logits, items are Python's integers."""
    for shape in ((), (3,), (2, 3)):
        engine = serve(Count(serve.backend))
        for item in engine.run(np.ones((2, *shape), int), max_tokens=2):
            assert serve.backend.owns(item), f"an item is a {type(item)}"
            assert tuple(item.shape) == shape
    assert {type(item) for item in serve(SumLogits(serve.backend)).run([1, 2], max_tokens=3)} == {int}


def test_prompts_may_be_lists_host_arrays_or_native_arrays(serve):
    for engine in rungs(serve):
        for prompt in ([1, 2], (1, 2), np.array([1, 2], "int32"), serve.backend.put(np.array([1, 2], "int32"))):
            serve.expect(engine.run(prompt, max_tokens=3), expected([1, 2], 3))


class Bound:
    """Returns an array over memory of the host that it uses again, as a model of ONNX Runtime may do."""

    def __init__(self, backend):
        self.backend, self.buffer = backend, np.zeros(16, "int32")

    def forward(self, tokens):
        batch = self.backend.get(tokens)
        n = len(batch)
        self.buffer[:n] = batch.reshape(n, -1)[:, -1] + 1
        return self.backend.put(self.buffer[:n])


def test_a_model_may_use_the_memory_of_its_output_again(serve):
    """Streams that are read late give what was computed for them."""
    engine = serve(Bound(serve.backend))
    streams = [engine.run(np.array(p, "int32"), max_tokens=6) for p in ([1], [3, 5], [20])]
    assert engine.drain(serve.patience)
    for first, stream in zip((2, 6, 21), streams, strict=True):
        serve.expect(stream, range(first, first + 6))
    engine = serve.single(Bound(serve.backend))
    items = [engine.run(np.array(n, "int32")) for n in range(9)]
    assert engine.drain(serve.patience)
    assert [serve.host(item.result(serve.patience)) for item in items] == [*range(1, 10)]


class Untidy(SumLogits):
    """Writes into what it was given, where the library has arrays that can be written to."""

    def logits(self, tokens, lengths):
        out = super().logits(tokens, lengths)
        for array in (tokens, lengths):
            with suppress(Exception):  # each library has an error of its own for it
                array[...] = self.backend.put(np.array(1, "int32"))
        return out


def test_a_model_may_write_into_what_it_is_given(serve):
    """The lengths decide when a stop token may come: 1 2 -> 4, 8, 6, 2, 4, 8, ..."""
    if serve.backend.immutable:
        return  # there is nothing to write to
    for padding in (None, PAD):
        engine = serve(Untidy(serve.backend), padding_token=padding)
        params = SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(6,))
        serve.expect(engine.run([1, 2], params), [4, 8, 6], "stop")


def test_what_happens_to_a_prompt_later_changes_nothing(serve):
    engine = serve(SumTokens(serve.backend))
    gate, prompt = serve.hold(engine, [1]), np.array([1, 2])
    stream = engine.run(prompt, max_tokens=3)
    prompt[:] = 5
    gate.open()
    serve.expect(stream, expected([1, 2], 3))


# when requests end


def test_the_stop_token_is_the_last_item_unless_it_is_not_wanted(serve):
    """H-41."""
    engine = serve(Count(serve.backend), stop_token=9)
    serve.expect(engine.run([1, 2, 5]), [6, 7, 8, 9], "stop")
    serve.expect(engine.run([1, 2, 5], include_stop=False), [6, 7, 8], "stop")
    serve.expect(engine.run([8], include_stop=False), [], "stop")
    serve.expect(serve(SumLogits(serve.backend), stop_token=2).run([1, 2]), [4, 8, 6, 2], "stop")


def test_rows_that_stop_together_leave_together(serve):
    """H-30."""
    engine = serve(Count(serve.backend), stop_token=9)
    for _ in range(2):
        for stream in serve.together(engine, [[1, 7], [2, 7], [3, 7]]):
            serve.expect(stream, [8, 9], "stop")
        assert engine.stats().running == 0


def test_a_request_may_bring_its_own_stop_rule(serve):
    """A token, several, a rule or a predicate; the engine's own stop token holds as well."""
    engine = serve(Count(serve.backend), stop_token=9)

    def is_eight(tokens):
        return tokens == 8

    stops: tuple[Any, ...] = (
        8,
        [8, 30],
        [30, 8],
        StopRule([8]),
        StopRule(where=is_eight),
        is_eight,
        StopRule([30], where=is_eight),
    )
    streams = [engine.run([5], stop_rule=stop) for stop in stops]
    for stream in streams:
        serve.expect(stream, [6, 7, 8], "stop")
    others: tuple[Any, ...] = (30, [], StopRule(where=lambda tokens: tokens == 30))
    for stop in others:
        serve.expect(engine.run([5], stop_rule=stop), [6, 7, 8, 9], "stop")


def test_a_stop_token_of_several_codes_must_match_in_all_of_them(serve):
    for stop in (np.array([8, 4]), np.array([[8, 4]])):
        engine = serve(Count(serve.backend), stop_token=stop)
        serve.expect(engine.run([[6, 2]]), [[7, 3], [8, 4]], "stop")
        serve.expect(engine.run([[6, 1]], max_tokens=3), [[7, 2], [8, 3], [9, 4]])
        serve.expect(engine.run([[6, 1]], stop_rule=[[9, 9], [8, 3]]), [[7, 2], [8, 3]], "stop")


def test_a_stop_token_of_floats_may_be_off_by_atol(serve):
    engine, prompt = serve(Halve(serve.backend)), np.array([[8, 4]], "float32")
    near = [np.array([1.01, 0.49], "float32")]
    serve.expect(engine.run(prompt, stop_rule=StopRule(near, atol=0.02)), [[4, 2], [2, 1], [1, 0.5]], "stop")
    serve.expect(engine.run(prompt, stop_rule=StopRule(near), max_tokens=4), [[4, 2], [2, 1], [1, 0.5], [0.5, 0.25]])


def test_a_stop_predicate_sees_the_new_tokens_of_all_its_rows_at_once(serve):
    """As a native array (rows, *token), once a step."""
    backend, seen = serve.backend, []

    def small(tokens):
        assert backend.owns(tokens)
        seen.append(backend.get(tokens).tolist())
        return tokens[:, 0] < 1.5

    engine, rule = serve(Halve(backend)), StopRule(where=small)
    prompts = [np.array([p], "float32") for p in ([8, 4], [4, 4], [2, 4])]
    streams = serve.together(engine, prompts, stop_rule=rule)
    serve.expect(streams[0], [[4, 2], [2, 1], [1, 0.5]], "stop")
    serve.expect(streams[1], [[2, 2], [1, 1]], "stop")
    serve.expect(streams[2], [[1, 2]], "stop")
    assert seen == [[[4, 2], [2, 2], [1, 2]], [[2, 1], [1, 1]], [[1, 0.5]]]


def test_max_new_tokens_is_the_number_of_tokens(serve):
    for engine in rungs(serve):
        for n in (1, 2, 5):
            serve.expect(engine.run([1, 2], max_tokens=n), expected([1, 2], n))


def test_a_request_ends_where_the_context_ends(serve):
    """Prompt and tokens are max_model_len together, whatever was asked for."""
    for engine in rungs(serve, max_model_len=6):
        serve.expect(engine.run([1, 2]), expected([1, 2], 4))
        serve.expect(engine.run([1, 2], max_tokens=100), expected([1, 2], 4))
        serve.expect(engine.run([1, 2, 5, 3, 2]), expected([1, 2, 5, 3, 2], 1))


def test_a_stop_token_at_the_limit_counts_as_a_stop(serve):
    engine = serve(Count(serve.backend), stop_token=9)
    serve.expect(engine.run([7], max_tokens=2), [8, 9], "stop")
    serve.expect(engine.run([6], max_tokens=2), [7, 8])


# asyncio


class LateTokens(SumTokens):
    async def forward(self, tokens, lengths):
        await asyncio.sleep(0)
        return super().forward(tokens, lengths)


class LateLogits(SumLogits):
    async def logits(self, tokens, lengths):
        await asyncio.sleep(0)
        return super().logits(tokens, lengths)


def test_a_model_may_be_async(serve):
    for kind in (LateTokens, LateLogits):
        streams = serve.together(serve(kind(serve.backend), padding_token=PAD), PROMPTS, max_tokens=3)
        for prompt, stream in zip(PROMPTS, streams, strict=True):
            serve.expect(stream, expected(prompt, 3))


def test_streams_can_be_read_in_a_running_event_loop(serve):
    engine = serve(SumTokens(serve.backend), padding_token=PAD)

    async def read(prompt):
        return [serve.host(item) async for item in engine.run(prompt, max_tokens=4)]

    async def everybody():
        return await asyncio.wait_for(asyncio.gather(*map(read, PROMPTS)), serve.patience)

    assert asyncio.run(everybody()) == [expected(prompt, 4) for prompt in PROMPTS]


# feed-forward


class Double:
    """Twice its input; waits in its first forward pass until the gate opens."""

    def __init__(self, gate):
        self.shapes, self.gate = [], gate

    def forward(self, x):
        self.shapes.append(tuple(x.shape))
        self.gate(x)
        return x + x


def doubled(serve, items, **options):
    """What comes of single items that queue while a first one is computed, and the shapes of the batches."""
    model = Double(serve.gate())
    engine = serve.single(model, **options)
    first = engine.run(np.zeros(1))
    model.gate.wait(first)
    results = [engine.run(item) for item in items]
    model.gate.open()
    assert serve.host(first.result(serve.patience)) == [0.0]
    return [serve.host(each.result(serve.patience)) for each in results], model.shapes[1:]


def test_single_inputs_are_batched_and_each_gets_its_row(serve):
    """H-43, H-46."""
    items = [np.arange(12, dtype="float32").reshape(3, 4) + n for n in (0, 100)]
    got, shapes = doubled(serve, items)
    assert got == [(2 * item).tolist() for item in items]
    assert shapes == [(2, 3, 4)]


def test_single_inputs_beyond_the_batch_size_wait_for_the_next_batch(serve):
    """H-43: in the order in which they came."""
    got, shapes = doubled(serve, [np.array([n, n + 0.5], "float32") for n in range(6)], max_batch_size=4)
    assert got == [[2 * n, 2 * n + 1] for n in range(6)]
    assert shapes == [(4, 2), (2, 2)]


def test_single_inputs_of_different_shapes_are_never_mixed(serve):
    """H-44."""
    items = [np.array(x, "float32") for x in ([1, 2], [1, 2, 3], [3, 4], 5, [4, 5, 6])]
    got, shapes = doubled(serve, items, max_batch_size=8)
    assert got == [(2 * item).tolist() for item in items]
    assert sorted(shapes) == [(1,), (2, 2), (2, 3)]


def test_single_inputs_of_different_dtypes_are_never_mixed(serve):
    got, shapes = doubled(serve, [np.array([1, 2], "int32"), np.array([1.5, 2], "float32")])
    assert got == [[2, 4], [3.0, 4.0]] and type(got[0][0]) is int
    assert shapes == [(1, 2), (1, 2)]


def test_the_result_of_a_single_input_can_be_awaited(serve):
    """H-46."""

    class Sum:
        async def forward(self, x):
            await asyncio.sleep(0)
            return serve.backend.xp.sum(x, axis=1)

    engine = serve.single(Sum())

    async def main():
        items = [engine.run(np.array([n, 1.0, 2.0], "float32")) for n in range(5)]
        return [await asyncio.wait_for(item, serve.patience) for item in items]

    got = asyncio.run(main())
    assert [serve.host(item) for item in got] == [3.0, 4.0, 5.0, 6.0, 7.0]
    assert all(serve.backend.owns(item) and tuple(item.shape) == () for item in got)
