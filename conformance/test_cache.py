"""Models with a cache (level 2): the engine's blocks and states hold what the model would compute again.

The toys read the sum of all tokens back from what the engine kept for them, so that `expected` is right only if every
token was written once, to a place that nobody else had.
"""

from contextlib import suppress
from dataclasses import fields

import numpy as np
import pytest

from hibachi import PromptTooLong, Terms
from hibachi.testing.toys import SURE, VOCAB, SumBoth, SumFrames, SumPaged, SumState, expected, one_hot

from .serving import BLOCK, PARTS

pytestmark = pytest.mark.promise("paged and recurrent cache", parts=PARTS)

LONG = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]  # sum 61
PROMPTS = [1, 2], LONG, [6], [*LONG[:5], 8], [2, 5, 1]
SMALL = 4 * BLOCK * 12  # bytes of a cache of four blocks: SumPaged keeps three float32 of a token


def check(serve, engine, prompts, n=5):
    """All of them at once stream what each streams alone."""
    for prompt, stream in zip(prompts, serve.together(engine, prompts, max_tokens=n), strict=True):
        serve.expect(stream, expected(prompt, n))
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.free_blocks) == (0, 0, stats.blocks)


def held_at(serve, engine, prompt, step, **options):
    """A request, and the gate that holds the engine in this step of it."""
    gate = serve.gate(step)
    stream = engine.run(prompt, stop_rule=gate, **options)
    gate.wait(stream)
    return stream, gate


# what a cache is for


def test_mixed_lengths_stream_what_each_streams_alone_from_the_cache(serve):
    """H-31: of keys and values, or of recurrent states."""
    for kind in (SumPaged, SumState):
        check(serve, serve.cached(kind), PROMPTS)


def test_long_prompts_are_computed_in_chunks_beside_the_others(serve):
    """H-31: the result is the same with few tokens a step."""
    for kind in (SumPaged, SumState):
        check(serve, serve.cached(kind, max_num_batched_tokens=5), PROMPTS)


def test_a_model_may_have_paged_and_recurrent_layers(serve):
    check(serve, serve.cached(SumBoth, max_num_seqs=2, max_num_batched_tokens=6), [[1, 2], LONG, [6]], n=3)


def test_a_step_computes_no_more_tokens_than_it_may(serve):
    """A prompt of 13 takes 4 steps of 4 tokens (the last has one); then each token takes a step."""
    engine = serve.cached(SumPaged, max_num_batched_tokens=4)
    serve.expect(engine.run(LONG, max_tokens=5), expected(LONG, 5))
    assert engine.stats().steps == 4 + 4


def test_blocks_may_have_any_size(serve):
    for size in (3, 16) if serve.backend.shapes.compiled else (1, 3, 4, 16):
        engine = serve.cached(SumPaged, block_size=size, max_model_len=8, max_num_seqs=2, max_num_batched_tokens=4)
        check(serve, engine, [[1, 2], [3, 1, 4, 1, 2], [6]], n=3)


def test_longer_and_shorter_requests_join_a_running_batch_with_a_cache(serve):
    """H-32."""
    for kind in (SumPaged, SumState):
        engine = serve.cached(kind, max_num_batched_tokens=6)
        running, gate = held_at(serve, engine, [1, 2], 3, max_tokens=9)
        joiners = [engine.run(prompt, max_tokens=4) for prompt in (LONG, [6], [2, 5])]
        gate.open()
        serve.expect(running, expected([1, 2], 9))
        for prompt, stream in zip((LONG, [6], [2, 5]), joiners, strict=True):
            serve.expect(stream, expected(prompt, 4))


def test_rows_and_blocks_are_used_again_and_again(serve):
    """H-36: nothing of an earlier request shows."""
    check(serve, serve.cached(SumPaged), PROMPTS * 4, n=3)


def test_a_row_is_given_with_a_fresh_state(serve):
    check(serve, serve.cached(SumState), [[6], [1, 2], [6], [2, 5], [1, 2]], n=3)


def test_a_model_with_a_cache_may_return_tokens_itself(serve):
    """Frames of three codes, with stop frames of their own."""
    frames = [np.array(f) for f in ([[1, 2, 3]], [[1, 0, 5], [3, 6, 2], [1, 1, 1], [0, 1, 2], [7, 5, 8]], [[0, 2, 6]])]
    engine = serve.cached(SumFrames, max_num_batched_tokens=4)
    for prompt, stream in zip(frames, serve.together(engine, frames, max_tokens=5), strict=True):
        serve.expect(stream, expected(prompt, 5))
    for item in engine.run(frames[0], max_tokens=2):
        assert serve.backend.owns(item) and tuple(item.shape) == (3,)
    stop = expected(frames[0], 3)[-1]
    serve.expect(engine.run(frames[0], stop_rule=[stop]), expected(frames[0], 3), "stop")
    serve.expect(engine.run(frames[0], stop_rule=[stop], include_stop=False), expected(frames[0], 2), "stop")


class UntidyPaged(SumPaged):
    """Writes into its inputs, where the library has arrays that can be written to, and into the list of caches."""

    def step(self, params, cache, x):
        out = super().step(params, cache, x)
        for field in fields(x):
            with suppress(Exception):  # each library has an error of its own for it
                getattr(x, field.name)[...] = self.backend.put(np.array(1, "int32"))
        cache.clear()
        return out


def test_a_step_may_write_into_its_inputs(serve):
    if serve.backend.immutable:
        return  # there is nothing to write to, and a step more to compile
    engine = serve.cached(UntidyPaged, max_num_batched_tokens=5)
    check(serve, engine, PROMPTS)
    serve.expect(engine.run(LONG, max_tokens=5), expected(LONG, 5))


class NoCache(SumPaged):
    """Forgets to return its cache, until it is told."""

    forgets = True

    def step(self, params, cache, x):
        out, cache = super().step(params, cache, x)
        return out, [] if self.forgets else cache


def test_a_step_that_returns_no_cache_fails_and_the_next_are_served(serve):
    model = NoCache(serve.backend)
    engine = serve.cached(model)
    serve.expect(engine.run([1, 2], max_tokens=3), [], "InvalidModelOutput")
    model.forgets = False
    serve.expect(engine.run([1, 2], max_tokens=3), expected([1, 2], 3))


# when requests end


def test_requests_with_a_cache_end_at_a_stop_token_a_limit_or_the_context(serve):
    """H-41."""
    engine = serve.cached(SumPaged, stop_token=2)
    serve.expect(engine.run([1, 2]), [4, 8, 6, 2], "stop")
    serve.expect(engine.run([1, 2], include_stop=False), [4, 8, 6], "stop")
    serve.expect(engine.run([1, 2], stop_rule=8), [4, 8], "stop")
    serve.expect(engine.run([1, 2], max_tokens=3), [4, 8, 6])
    serve.expect(engine.run([1] * 13 + [0] * (4 * BLOCK - 16)), [4, 8, 6])
    serve.expect(engine.run([1] * 13 + [0] * (4 * BLOCK - 14), max_tokens=9), [4])


# who gets the cache


def test_a_cache_that_is_too_small_for_all_makes_them_wait_their_turn(serve):
    """H-36: none fails, and nobody overtakes."""
    engine = serve.cached(SumPaged, kv_cache_memory_bytes=SMALL, reserve_all=True)
    assert engine.stats().blocks == 4
    running, gate = held_at(serve, engine, [1, 2], 2, max_tokens=6)  # 1 block
    before = []

    def see(tokens):
        before.append(running.finish_reason)
        return np.zeros(tokens.shape[0], bool)

    large = engine.run(LONG, max_tokens=14)  # 4 blocks
    small = engine.run([6], max_tokens=3, stop_rule=see)  # 1 block, which is free
    stats = engine.stats()
    assert (stats.running, stats.free_blocks) == (1, 3)
    gate.open()
    serve.expect(running, expected([1, 2], 6))
    serve.expect(large, expected(LONG, 14))
    serve.expect(small, expected([6], 3))
    assert before[0] == "length", "the last in the queue overtook the first"
    check(serve, engine, PROMPTS * 2, n=4)


def test_who_loses_its_memory_goes_on_as_if_nothing_had_happened(serve):
    """V-05."""
    engine = serve.cached(SumPaged, kv_cache_memory_bytes=SMALL)
    prompts = [[1, 2], [6], [2, 5, 1], [7, 7]]
    streams = serve.together(engine, prompts, max_tokens=12)
    for prompt, stream in zip(prompts, streams, strict=True):
        serve.expect(stream, expected(prompt, 12))
    assert engine.stats().preemptions > 0, "there was memory for all"
    assert engine.stats().free_blocks == 4


def test_what_requests_have_in_common_is_computed_once(serve):
    """V-08, V-09, V-11: also if they start in the same step; the last token of a prompt is always computed."""
    for kind in (SumPaged, SumState, SumBoth):
        engine = serve.cached(kind)
        common = [1, 2, 5, 3, 0, 4, 7, 1] * 2
        prompts = [common, [*common, 6], [*common, 2, 5], [*[6] * BLOCK, *common[BLOCK:], 3]]  # the last ends alike
        for _ in range(2):
            streams = serve.together(engine, prompts, max_tokens=3)
            for prompt, stream in zip(prompts, streams, strict=True):
                serve.expect(stream, expected(prompt, 3))
        assert engine.stats().prefix_hits >= 4 * BLOCK, "nothing was shared"


def test_requests_of_different_salts_share_nothing(serve):
    """V-10."""
    engine = serve.cached(SumPaged)
    for salt in ("a", "b"):
        serve.expect(engine.run([1] * 20, max_tokens=3, terms=Terms(cache_salt=salt)), expected([1] * 20, 3))
    assert engine.stats().prefix_hits == 0


def test_a_request_that_can_never_fit_is_refused_at_the_call(serve):
    engine = serve.cached(SumPaged, kv_cache_memory_bytes=SMALL, max_model_len=5 * BLOCK)
    running, gate = held_at(serve, engine, [1, 2], 2, max_tokens=4)
    for prompt, n in ((LONG, 21), ([1, 2], 32), ([1] * 33, 1), ([1, 2], None)):
        with pytest.raises(PromptTooLong, match="cache"):
            engine.run(prompt, max_tokens=n)
    longest = engine.run([1, 2], max_tokens=31)  # the last token is never written
    gate.open()
    serve.expect(running, expected([1, 2], 4))
    serve.expect(longest, expected([1, 2], 31))


def test_a_cancelled_request_gives_its_blocks_to_the_next(serve):
    """H-33."""
    engine = serve.cached(SumPaged, kv_cache_memory_bytes=SMALL, reserve_all=True)
    running, gate = held_at(serve, engine, [1, 2], 3)  # all four blocks
    waiting = engine.run(LONG, max_tokens=3)
    assert engine.stats().free_blocks == 0
    running.close()
    gate.open()
    serve.expect(waiting, expected(LONG, 3))
    assert engine.stats().free_blocks == 4


def cancel_within_the_prompt(serve, kind, prompt):
    """`prompt` is given up when six of its tokens are computed; the next request gets its blocks, or its row."""
    engine = serve.cached(kind, max_num_batched_tokens=4)
    first, second = serve.hold(engine, [6]), serve.gate(step=2)
    other = engine.run([6], max_tokens=4, stop_rule=second)
    given_up = engine.run(prompt, max_tokens=3)
    first.open()
    second.wait(other)
    given_up.close()
    short, long = (engine.run(each, max_tokens=3) for each in ([1, 2], LONG))
    second.open()
    serve.expect(short, expected([1, 2], 3))
    serve.expect(long, expected(LONG, 3))
    serve.expect(other, expected([6], 4))
    stats = engine.stats()
    assert (stats.new_tokens, stats.free_blocks) == (1 + 4 + 3 + 3, stats.blocks)


def test_a_request_may_be_cancelled_within_its_prompt(serve):
    """H-33."""
    for kind in (SumPaged, SumState):
        cancel_within_the_prompt(serve, kind, LONG[::-1])


# faults


class NanPaged(SumPaged):
    """The token 0 is NaN: in the cache, and in all logits after it."""

    def step(self, params, cache, x):
        sums, layer = self._sums(nan_for_zero(self.backend, x.tok), cache[0], x)
        return logits_or_nan(self.backend, sums[:, 0]), [layer]


class NanState(SumState):
    """The token 0 is NaN: in the state, and in all logits after it."""

    def step(self, params, cache, x):
        xp, (state,) = self.backend.xp, cache
        tokens = xp.reshape(nan_for_zero(self.backend, x.tok), (state.shape[0], -1))
        sums = state + xp.cumulative_sum(tokens, axis=1)
        return logits_or_nan(self.backend, self.backend.take(xp.reshape(sums, (-1,)), x.last)), [sums[:, -1:]]


def nan_for_zero(backend, tokens, zero=0):
    nan = backend.put(np.full(1, np.nan, "float32"))
    return backend.xp.where(tokens == zero, nan, backend.float32(tokens))


def logits_or_nan(backend, sums):
    bad = sums != sums
    right = one_hot(backend, (backend.xp.where(bad, backend.xp.zeros_like(sums), sums) + 1) % VOCAB)
    return backend.xp.where(bad[:, None], sums[:, None], right * SURE)


def test_nan_in_a_cache_fails_its_request_alone_and_never_reaches_the_next(serve):
    """Attention multiplies what it may not see by 0, which NaN would survive."""
    for kind in (NanPaged, NanState):
        engine = serve.cached(kind)
        for guilty in ([0], [2, 5, 1, 8, 5, 0]):
            streams = serve.together(engine, [[1, 2], guilty, [2, 5, 1]], max_tokens=3)
            serve.expect(streams[0], expected([1, 2], 3))
            serve.expect(streams[1], [], "NonFiniteOutput")
            serve.expect(streams[2], expected([2, 5, 1], 3))
        check(serve, engine, [[1, 2], LONG, [2, 5, 1]], n=3)


def test_nan_that_a_cancelled_request_left_never_reaches_the_next(serve):
    cancel_within_the_prompt(serve, NanPaged, [2, 5, 1, 8, 0, *LONG])


class HiddenNan(SumFrames):
    """A code that is never drawn, VOCAB, is NaN in the cache; what is drawn from NaN is the code 9."""

    def step(self, params, cache, x):
        sums, layer = self._sums(nan_for_zero(self.backend, x.tok, VOCAB), cache[0], x)
        xp = self.backend.xp
        return xp.astype(xp.where(sums != sums, xp.full_like(sums, 9), (sums + 1) % VOCAB), x.tok.dtype), [layer]


def test_nan_that_no_output_shows_never_reaches_the_next(serve):
    """All blocks are full of it when the next requests get them. Tokens that the model draws are no place to see it."""
    cells = 4 * BLOCK * 4 * (2 + HiddenNan.codes)  # bytes of four blocks
    engine = serve.cached(HiddenNan, enable_prefix_caching=False, kv_cache_memory_bytes=cells, max_num_batched_tokens=6)
    for prompts in ([[[1, 2, 3]], [[3, 6, 2]]], [[[2, 5, 1]] * 9, [[6, 1, 1]]]):
        serve.read(engine.run(np.full((3 * BLOCK, 3), VOCAB), max_tokens=BLOCK))
        streams = [engine.run(np.array(prompt), max_tokens=2) for prompt in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            serve.expect(stream, expected(np.array(prompt), 2))


class Crowded(Exception):
    pass


class FussyPaged(SumPaged):
    """Cannot compute more than 64 tokens in a step; a library that compiles steps says so while it does."""

    max_model_len, most = 96, 64

    def step(self, params, cache, x):
        if x.tok.shape[0] > self.most:
            raise Crowded("too many tokens")
        return super().step(params, cache, x)


class FussyState(SumState):
    """Cannot compute 64 tokens of a row at once."""

    max_model_len, most = 96, 63

    def step(self, params, cache, x):
        if x.tok.shape[0] > self.most:
            raise Crowded("too many tokens")
        return super().step(params, cache, x)


def test_a_step_that_raises_fails_the_guilty_request_alone(serve):
    """H-34: the others compute their part of the step again, and nothing twice."""
    for kind in (FussyPaged, FussyState):
        # Without a prefix cache, for which prompts with a state are cut.
        engine = serve.cached(kind, max_model_len=96, block_size=3 * BLOCK, enable_prefix_caching=False)
        running, gate = held_at(serve, engine, [1, 2], 3, max_tokens=8)
        streams = [engine.run(prompt, max_tokens=3) for prompt in ([1] * 70, [6, 5])]
        gate.open()
        serve.expect(running, expected([1, 2], 8))
        serve.expect(streams[0], [], "ModelError")
        assert isinstance(streams[0].error.__cause__, Crowded)
        serve.expect(streams[1], expected([6, 5], 3))
        check(serve, engine, [[1, 2], [6]], n=3)


class Broken(SumPaged):
    broken = True

    def step(self, params, cache, x):
        if self.broken:
            raise Crowded("too many tokens")
        return super().step(params, cache, x)


def test_if_a_step_raises_for_everybody_all_fail_and_the_next_are_served(serve):
    """H-34."""
    model = Broken(serve.backend)
    engine = serve.cached(model)
    for stream in [engine.run(prompt, max_tokens=3) for prompt in PROMPTS]:
        serve.expect(stream, [], "ModelError")
    model.broken = False
    check(serve, engine, [[1, 2], [6]], n=3)


def test_a_stop_predicate_that_raises_fails_alone_with_a_cache_too(serve):
    """What it could not judge is computed again, and nobody notices."""

    def never(tokens):
        raise Crowded("too many tokens")

    for kind in (SumPaged, SumState):
        engine = serve.cached(kind)
        other, gate = held_at(serve, engine, [2, 5], 2, max_tokens=5)
        guilty = engine.run([1, 2], stop_rule=never)
        gate.open()
        serve.expect(guilty, [], "InvalidRequest")
        serve.expect(other, expected([2, 5], 5))


class WrongLogits(SumPaged):
    def step(self, params, cache, x):
        logits, cache = super().step(params, cache, x)
        return logits[:, :9], cache


class WrongState(SumState):
    def step(self, params, cache, x):
        logits, (state,) = super().step(params, cache, x)
        return logits, [state[:, 0]]


class WrongFrames(SumFrames):
    def step(self, params, cache, x):
        frames, cache = super().step(params, cache, x)
        return self.backend.float32(frames), cache


def test_a_step_with_an_output_of_the_wrong_shape_or_dtype_fails_its_requests(serve):
    """H-35: the error names what was wanted and what came."""
    for kind, prompt, says in (
        (WrongLogits, [1, 2], ("10)", "9)")),
        (WrongState, [1, 2], ("layer 0", ", 1)")),
        (WrongFrames, [[1, 2, 3]], ("integer", "float32")),
    ):
        stream = serve.cached(kind).run(prompt, max_tokens=3)
        serve.expect(stream, [], "InvalidModelOutput")
        for word in says:
            assert word in str(stream.error), f"no {word!r} in: {stream.error}"
