"""What goes wrong stays with the request that it concerns; the others, the engine and the process live on."""

import asyncio
import gc

import numpy as np
import pytest

from hibachi import (
    ConfigError,
    EngineClosed,
    EngineFailed,
    InvalidModelOutput,
    InvalidRequest,
    ModelError,
    NonFiniteOutput,
    PromptTooLong,
    RequestError,
    SamplingParams,
    StopRule,
)
from hibachi.testing.toys import Count, Halve, SumLogits, SumTokens, expected

from .serving import PARTS

pytestmark = pytest.mark.promise("faults stay alone", parts=PARTS)

PAD, POISON = 7, 0  # the sums of these prompts never lead to POISON
PROMPTS = [1, 2], [3, 3, 1, 5, 8], [6], [2, 5, 1], [8, 5], [1, 2, 5], [5, 1, 1, 5, 1], [2]


class Poison(Exception):
    pass


class PoisonedTokens(SumTokens):
    """Raises if anybody in the batch has the token POISON."""

    def forward(self, tokens, lengths):
        if (self.backend.get(tokens) == POISON).any():
            raise Poison("cannot compute this")
        return super().forward(tokens, lengths)


class PoisonedLogits(SumLogits):
    def logits(self, tokens, lengths):
        if (self.backend.get(tokens) == POISON).any():
            raise Poison("cannot compute this")
        return super().logits(tokens, lengths)


class LatePoisonedTokens(PoisonedTokens):
    async def forward(self, tokens, lengths):
        await asyncio.sleep(0)
        return super().forward(tokens, lengths)


class Spoilt:
    """A toy whose output passes through `spoil`, which may be replaced while it runs."""

    def __init__(self, model, spoil=lambda out: out):
        self.backend, self.model, self.spoil = model.backend, model, spoil
        if hasattr(model, "vocab_size"):
            self.vocab_size = model.vocab_size
            self.logits = lambda tokens, lengths: self.spoil(model.logits(tokens, lengths))

    def forward(self, tokens):
        return self.spoil(self.model.forward(tokens))


def still_serves(serve, engine):
    serve.expect(engine.run([1, 2], max_tokens=3), expected([1, 2], 3))


# the model


def test_a_model_that_raises_fails_the_guilty_request_alone(serve):
    """H-34: one of eight, and two of eight."""
    for kind in (PoisonedTokens, PoisonedLogits, LatePoisonedTokens):
        for guilty, padding in (({3}, PAD), ({0, 6}, PAD), ({4}, None)):
            engine = serve(kind(serve.backend), padding_token=padding, max_num_seqs=8)
            prompts = [[*p, POISON] if i in guilty else p for i, p in enumerate(PROMPTS)]
            gate = serve.hold(engine, [2])
            streams = [engine.run(prompt, max_tokens=3) for prompt in prompts]
            gate.open()
            for i, stream in enumerate(streams):
                if i in guilty:
                    serve.expect(stream, [], "ModelError")
                else:
                    serve.expect(stream, expected(prompts[i], 3))
            still_serves(serve, engine)
            assert engine.stats().failed == len(guilty)


def test_the_error_of_a_request_names_what_the_model_raised(serve):
    """H-34."""
    stream = serve(PoisonedTokens(serve.backend)).run([1, POISON])
    serve.expect(stream, [], "ModelError")
    with pytest.raises(ModelError, match="Poison: cannot compute this") as caught:
        stream.collect()
    assert isinstance(caught.value.__cause__, Poison)
    assert stream.finish_reason == "error" and stream.error is caught.value


def test_tokens_before_an_error_are_delivered(serve):
    class NoSeven(Count):
        def forward(self, tokens):
            if (self.backend.get(tokens) == 7).any():
                raise Poison
            return super().forward(tokens)

    streams = serve.together(serve(NoSeven(serve.backend)), [[1], [4], [21]], max_tokens=8)
    serve.expect(streams[0], [2, 3, 4, 5, 6, 7], "ModelError")
    serve.expect(streams[1], [5, 6, 7], "ModelError")
    serve.expect(streams[2], range(22, 30))


def test_a_model_that_fails_once_harms_nobody(serve):
    """Guilty is who fails twice, the second time alone."""
    for prompts in ([[1, 2]], [[1, 2], [6], [2, 5, 1]]):
        model = Spoilt(SumLogits(serve.backend))
        engine = serve(model, padding_token=PAD)
        troubles: list[BaseException] = []

        def once(out, troubles=troubles):
            if troubles:
                raise troubles.pop()
            return out

        model.spoil = once
        gate = serve.hold(engine, [2])
        streams = [engine.run(prompt, max_tokens=3) for prompt in prompts]
        troubles.append(Poison("the network is down"))
        gate.open()
        for prompt, stream in zip(prompts, streams, strict=True):
            serve.expect(stream, expected(prompt, 3))


def test_if_everybody_is_guilty_all_fail_and_the_next_are_served(serve):
    """H-34."""
    for kind in (PoisonedTokens, PoisonedLogits):
        engine = serve(kind(serve.backend), padding_token=PAD)
        gate = serve.hold(engine, [2])
        streams = [engine.run([*prompt, POISON]) for prompt in PROMPTS[:4]]
        later = engine.run([1, 2], max_tokens=3)
        gate.open()
        for stream in streams:
            serve.expect(stream, [], "ModelError")
        serve.expect(later, expected([1, 2], 3))


def test_a_token_that_is_not_finite_fails_its_request_alone(serve):
    """NaN or infinity in one element is enough."""
    backend = serve.backend
    for bad in (np.nan, np.inf, -np.inf):
        place = backend.put(np.array([[bad, 1]], "float32"))
        model = Spoilt(Halve(backend), lambda out, place=place: backend.xp.where(out == 1, place, out))
        engine = serve(model)
        prompts = [np.array([p], "float32") for p in ([8, 6], [2, 6], [6, 6])]
        streams = serve.together(engine, prompts[::-1], max_tokens=4)[::-1]
        serve.expect(streams[0], [[4, 3], [2, 1.5]], "NonFiniteOutput")
        serve.expect(streams[1], [], "NonFiniteOutput")
        serve.expect(streams[2], [[3, 3], [1.5, 1.5], [0.75, 0.75], [0.375, 0.375]])
        serve.expect(engine.run(prompts[2], max_tokens=1), [[3, 3]])


def test_logits_that_are_not_finite_fail_their_request_alone(serve):
    backend = serve.backend
    for bad in (np.nan, np.inf):
        place = np.ones((1, 10), "float32")
        place[0, 8] = bad  # the logit of token 8, where that is the right one
        place = backend.put(place)
        model = Spoilt(SumLogits(backend), lambda out, place=place: backend.xp.where(out > 0, place, out) * 1000)
        streams = serve.together(serve(model, padding_token=PAD), [[2], [1, 2], [7]], max_tokens=2)
        serve.expect(streams[0], [3, 6])
        serve.expect(streams[1], [4], "NonFiniteOutput")
        serve.expect(streams[2], [], "NonFiniteOutput")


def wrong(serve, model, prompts, spoils):
    """Each of these outputs fails all who were in the step, and nobody after it."""
    spoilt = Spoilt(model)
    engine = serve(spoilt, padding_token=np.zeros_like(prompts[0][:1]))
    for says, spoil in spoils.items():
        spoilt.spoil = lambda out: out
        gate = serve.hold(engine, prompts[0])
        spoilt.spoil = spoil
        streams = [engine.run(prompt, max_tokens=2) for prompt in prompts]
        gate.open()
        for stream in streams:
            serve.expect(stream, [], "InvalidModelOutput")
            assert says in str(stream.error), f"no {says!r} in: {stream.error}"
    spoilt.spoil = lambda out: out
    assert len(serve.read(engine.run(prompts[0], max_tokens=2))[0]) == 2


def test_an_output_of_the_wrong_shape_fails_its_step_only(serve):
    """H-35: the error names the shape that was wanted and the one that came, here of one request on its own."""
    tokens = {
        "(1,); got (0,)": lambda out: out[:0],
        "(1,); got (2,)": lambda out: serve.backend.xp.concat([out, out[:1]]),
        "(1,); got (1, 1)": lambda out: out[:, None],
        "(1,); got ()": lambda out: serve.backend.xp.sum(out),
    }
    wrong(serve, Count(serve.backend), [np.array([1, 2]), np.array([4])], tokens)
    frames = {
        "(1, 3); got (1, 2)": lambda out: out[:, :2],
        "(1, 3); got (1,)": lambda out: out[:, 0],
    }
    wrong(serve, Count(serve.backend), [np.ones((2, 3), int), np.ones((1, 3), int)], frames)
    logits = {
        "10); got": lambda out: out[:, :9],
        ", 1, 10)": lambda out: out[:, None, :],
    }
    wrong(serve, SumLogits(serve.backend), [np.array([1, 2]), np.array([5])], logits)


def test_an_output_of_the_wrong_dtype_fails_its_step_only(serve):
    as_floats = {"must return integer tokens": serve.backend.float32}
    wrong(serve, Count(serve.backend), [np.array([1, 2]), np.array([4])], as_floats)
    as_integers = {"must return floating-point tokens": lambda out: out > 0}
    wrong(serve, Halve(serve.backend), [np.ones(2, "float32"), np.ones(1, "float32")], as_integers)


def test_an_output_that_is_no_array_fails_its_step_only(serve):
    outputs = {
        "got builtins.tuple": lambda out: (out,),
        "got builtins.list": lambda out: serve.backend.get(out).tolist(),
        "got builtins.dict": lambda out: {"tokens": out},
        "got builtins.NoneType": lambda out: None,
        "got builtins.int": lambda out: 3,
    }
    wrong(serve, Count(serve.backend), [np.array([1, 2]), np.array([4])], outputs)
    wrong(serve, SumLogits(serve.backend), [np.array([1, 2]), np.array([5])], outputs)


class Abort(BaseException):
    pass


def abort(out):
    if (out == 4).any():
        raise Abort("no exception that a model should raise")
    return out


def test_what_is_no_exception_fails_its_request_alone(serve):
    """As SystemExit, CancelledError or the panic of a library, when a model raises them."""
    engine = serve(Spoilt(Count(serve.backend), lambda out: abort(serve.backend.get(out)) is None or out))
    streams = serve.together(engine, [[1], [10], [3]], max_tokens=4)
    serve.expect(streams[0], [2, 3], "ModelError")
    serve.expect(streams[1], [11, 12, 13, 14])
    serve.expect(streams[2], [], "ModelError")
    assert isinstance(streams[0].error.__cause__, Abort)
    serve.expect(engine.run([5], max_tokens=2), [6, 7])


def test_an_engine_that_fails_tells_every_stream(serve):
    """Here because its device is lost."""
    model = Spoilt(Count(serve.backend))
    engine = serve(model, max_num_seqs=1)
    gate = serve.gate(step=2)
    running = engine.run([1], stop_rule=gate)
    gate.wait(running)
    waiting = engine.run([5])
    model.spoil = lambda out: abort(serve.backend.get(out))
    serve.backend.fatal = lambda error: isinstance(error, Abort)
    try:
        gate.open()
        serve.expect(running, [2, 3], "EngineFailed")
        serve.expect(waiting, [], "EngineFailed")
    finally:
        del serve.backend.fatal
    assert isinstance(running.error.__cause__, Abort)
    with pytest.raises(EngineFailed):
        engine.run([5])


# the stop rule


def test_a_stop_predicate_that_raises_fails_its_own_requests_alone(serve):
    """Of several that share it, those that it cannot judge."""
    backend = serve.backend

    def picky(tokens):
        if (backend.get(tokens) == 6).any():
            raise Poison("cannot judge this")
        return tokens == 5

    engine, rule = serve(Count(backend)), StopRule(where=picky)
    gate = serve.hold(engine, [0])
    streams = [engine.run([n], stop_rule=rule, max_tokens=3) for n in (1, 4, 7)]
    plain = engine.run([5], max_tokens=2)
    gate.open()
    serve.expect(streams[0], [2, 3, 4])
    serve.expect(streams[1], [5], "stop")
    serve.expect(streams[2], [8, 9, 10])
    serve.expect(plain, [6, 7])
    streams = serve.together(engine, [[3], [5], [10]], stop_rule=rule, max_tokens=2)
    serve.expect(streams[0], [4, 5], "stop")
    serve.expect(streams[1], [], "InvalidRequest")
    assert "Poison: cannot judge this" in str(streams[1].error)
    serve.expect(streams[2], [11, 12])


def test_a_stop_predicate_of_the_wrong_shape_fails_its_own_request_alone(serve):
    engine = serve(Count(serve.backend))
    gate = serve.hold(engine, [[0, 0]])
    wrong = engine.run([[1, 2]], stop_rule=lambda tokens: tokens == 5)
    right = engine.run([[1, 2]], max_tokens=2)
    gate.open()
    serve.expect(wrong, [], "InvalidRequest")
    assert "(1,)" in str(wrong.error) and "(1, 2)" in str(wrong.error)
    serve.expect(right, [[2, 3], [3, 4]])


# the consumer


def close_it(held):
    held[0].close()


def drop_it(held):
    held.clear()
    gc.collect()


def leave_the_loop(held):
    for _ in held[0]:
        break


def leave_the_context(held):
    with held[0]:
        pass


def leave_the_async_loop(held):
    async def main():
        async for _ in held[0]:
            break

    asyncio.run(main())


def cancel_the_task(held):
    async def read():
        await anext(stream := held.pop())  # there is one item
        await anext(stream)

    async def main():
        task = asyncio.create_task(read())
        while held:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())
    gc.collect()


def test_whoever_drops_a_stream_gives_its_row_away_and_disturbs_nobody(serve):
    """H-33: nothing is computed for it from the next step on."""
    for leave in (close_it, drop_it, leave_the_loop, leave_the_context, leave_the_async_loop, cancel_the_task):
        model = Count(serve.backend)
        engine = serve(model, max_num_seqs=2)
        first, second = serve.hold(engine, [0]), serve.gate(step=2)
        other, held = engine.run([40], max_tokens=6, stop_rule=second), [engine.run([10])]
        first.open()
        second.wait(other)
        leave(held)
        waiting = engine.run([20], max_tokens=3)
        second.open()
        serve.expect(waiting, [21, 22, 23])
        serve.expect(other, range(41, 47))
        rows = [row for tokens, _ in model.seen for row in tokens.tolist() if row[0] == 10]
        assert rows == [[10], [10, 11]], f"after {leave.__name__} the model saw {rows}"


# what is refused


def refuses(error, call, *args, **options):
    try:
        got = call(*args, **options)
    except error as e:
        assert len(str(e)) > 30, f"this says too little: {e}"
    except Exception as e:
        raise AssertionError(f"{args} {options} let {type(e).__name__} out: {e}") from e
    else:
        raise AssertionError(f"{args} {options} was accepted and gave {got!r}")


def test_a_bad_prompt_is_refused_at_the_call_and_touches_nobody(serve):
    """H-26."""
    anywhere = [5, np.array(5), [], np.zeros((0,), int), None, "abc", ["a"], [[1], [2, 3]], object(), [[1, 2]]]
    for kind, more in ((Count, []), (SumLogits, [[1.5], [10], [3, -1], [2**40]])):
        engine = serve(kind(serve.backend), padding_token=PAD)
        gate = serve.gate(step=2)
        running = engine.run([1, 2], max_tokens=4, stop_rule=gate)
        gate.wait(running)
        for prompt in (*anywhere, *more):
            refuses(InvalidRequest, engine.run, prompt, max_tokens=2)
        for n in (64, 65, 1000):
            refuses(PromptTooLong, engine.run, [1] * n, max_tokens=2)
        stats = engine.stats()
        gate.open()
        assert (stats.waiting, stats.running) == (0, 1)
        serve.expect(running, [3, 4, 5, 6] if kind is Count else expected([1, 2], 4))
        assert engine.stats().finished == 1


def test_bad_options_are_refused_at_the_call(serve):
    for kind in (Count, SumLogits):
        engine = serve(kind(serve.backend), padding_token=PAD)
        for limit in (0, -1, 1.5, True, "3"):
            refuses(InvalidRequest, engine.run, [1, 2], max_tokens=limit)
        for stop in ("abc", [[1, 2]], np.zeros((2, 2)), StopRule([1.5]), StopRule([object()])):
            refuses(InvalidRequest, engine.run, [1, 2], max_tokens=3, stop_rule=stop)
        for params in ("greedy", {"temperature": 0}, 0.5):
            refuses(InvalidRequest, engine.run, [1, 2], params)
        assert engine.stats().steps == 0
    refuses(InvalidRequest, serve(Count(serve.backend)).run, [1, 2], SamplingParams())  # it does not sample


def test_bad_settings_are_refused_where_the_engine_is_made(serve):
    """H-21, H-22; the crate takes a batch size of 0 and hangs."""
    model = Count(serve.backend)
    refuses(InvalidRequest, serve(model, padding_token=serve.backend.put(np.array(0))).run, [[1, 2]], max_tokens=3)
    refuses(InvalidRequest, serve(model, padding_token=np.zeros((2, 10), int)).run, [1, 2], max_tokens=3)
    for name in ("max_num_seqs", "max_model_len"):
        for value in (0, -1, 1.5, "4", True):
            refuses(ConfigError, serve, model, **{name: value})
    refuses(ConfigError, serve, model, max_model_len=None)  # nothing would ever end
    refuses(ConfigError, serve.single, model, max_batch_size=0)


def test_a_stop_or_padding_token_of_another_shape_than_the_tokens_is_refused(serve):
    """H-23: as soon as the shape of the tokens is known."""
    for name in ("stop_token", "padding_token"):
        for bad in (np.zeros((1, 2), int), np.zeros((1, 1), int), np.array([0.5])):
            refuses(InvalidRequest, serve(Count(serve.backend), **{name: bad}).run, [1, 2])
        refuses(InvalidRequest, serve(Count(serve.backend), **{name: np.zeros((1,), int)}).run, [[1, 2]])
        refuses((ConfigError, InvalidRequest), serve, SumLogits(serve.backend), **{name: np.zeros((1, 2), int)})


# the end


def test_closing_finishes_the_running_step_and_ends_every_stream_once(serve):
    """H-40: whoever runs and whoever waits; what was delivered can still be read."""
    engine = serve(Count(serve.backend), max_num_seqs=2)
    steps = []

    def close_in_the_third_step(tokens):
        steps.append(tokens)
        if len(steps) == 3:
            engine.close()  # from within the engine: certainly in the midst of a step
        return np.zeros(tokens.shape[0], bool)

    gate = serve.hold(engine, [0])
    streams = [engine.run([n], stop_rule=StopRule(where=close_in_the_third_step)) for n in (1, 2)]
    waiting = engine.run([3])
    gate.open()
    serve.expect(streams[0], [2, 3, 4], "closed")
    serve.expect(streams[1], [3, 4, 5], "closed")
    serve.expect(waiting, [], "closed")
    assert len(steps) == 3
    refuses(EngineClosed, engine.run, [1])
    engine.close()
    for stream in (*streams, waiting):
        serve.expect(stream, [], "closed")
        assert stream.error is None


def test_closing_from_outside_ends_a_request_that_would_run_on(serve):
    """H-40: leaving the context closes as well; closing twice is fine."""
    engine = serve(Count(serve.backend), max_model_len=10**9)
    with engine:
        stream = engine.run([1])
        assert serve.host(next(stream)) == 2
    items, ending = serve.read(stream)
    assert (items, ending) == ([*range(3, 3 + len(items))], "closed")
    engine.close()
    refuses(EngineClosed, engine.run, [1])

    async def main():
        async with serve(Count(serve.backend), max_model_len=10**9) as engine:
            stream = engine.run([1])
            await anext(stream)
        return stream

    assert asyncio.run(main()).finish_reason == "closed"


def test_an_engine_that_never_ran_can_be_closed(serve):
    for engine in (serve(Count(serve.backend)), serve.single(Count(serve.backend))):
        engine.close()
        engine.close()
        refuses(EngineClosed, engine.run, [1])


def test_draining_finishes_what_came_and_takes_nothing_new(serve):
    engine = serve(Count(serve.backend), max_num_seqs=2)
    gate = serve.hold(engine, [0])
    streams = [engine.run([10 * n], max_tokens=3) for n in range(5)]
    assert not engine.drain(timeout=0)
    refuses(EngineClosed, engine.run, [1])
    gate.open()
    assert engine.drain(serve.patience)
    for n, stream in enumerate(streams):
        assert stream.finish_reason == "length"
        serve.expect(stream, range(10 * n + 1, 10 * n + 4))


# feed-forward


class Divide:
    """1 / x; raises if anybody has a 7, and spoils its output as told."""

    def __init__(self, serve):
        self.backend, self.gate, self.spoil = serve.backend, serve.gate(), lambda out: out

    def forward(self, x):
        self.gate(x)
        if (self.backend.get(x) == 7).any():
            raise Poison("cannot divide this")
        with np.errstate(divide="ignore"):
            return self.spoil(1 / x)


def endings(serve, items):
    """What becomes of each: its value, or the class of its error."""
    out = []
    for item in items:
        try:
            out.append(serve.host(item.result(serve.patience)))
        except Exception as e:
            out.append(type(e))
    return out


def divided(serve, model, inputs):
    """The items of inputs that queued while the model computed a first one, and the engine."""
    engine = serve.single(model, max_batch_size=8)
    first = engine.run(np.ones(1, "float32"))
    model.gate.wait(first)
    items = [engine.run(np.array(x, "float32")) for x in inputs]
    model.gate.open()
    assert endings(serve, [first]) == [[1.0]]
    return items, engine


def test_a_single_input_that_makes_the_model_raise_fails_alone(serve):
    """H-44, H-46."""
    items, _ = divided(serve, Divide(serve), [[2, 4], [7, 1], [1, 2], [[1, 7]], [[1, 8]]])
    assert endings(serve, items) == [[0.5, 0.25], ModelError, [1.0, 0.5], ModelError, [[1.0, 0.125]]]


def test_a_single_output_that_is_not_finite_fails_alone(serve):
    items, _ = divided(serve, Divide(serve), [[2, 4], [0, 1], [1, 2]])
    assert endings(serve, items) == [[0.5, 0.25], NonFiniteOutput, [1.0, 0.5]]


def test_single_outputs_of_the_wrong_type_or_number_fail_their_step_only(serve):
    total = serve.backend.xp.sum
    for spoil in (lambda out: out[:0, ...], lambda out: total(out), lambda out: (out, None), lambda out: None):
        model = Divide(serve)
        _, engine = divided(serve, model, [])
        model.spoil = spoil
        assert endings(serve, [engine.run(np.ones(2, "float32"))]) == [InvalidModelOutput]
        model.spoil = lambda out: out
        assert endings(serve, [engine.run(np.array([4, 2], "float32"))]) == [[0.25, 0.5]]


def test_a_single_input_that_is_no_numbers_is_refused_at_the_call(serve):
    engine = serve.single(Divide(serve))
    for item in ("abc", None, ["a"], [[1], [2, 3]], object()):
        refuses(InvalidRequest, engine.run, item)
    assert engine.stats().steps == 0


def test_a_single_input_may_be_cancelled_and_closing_ends_the_others(serve):
    """H-46."""
    model = Divide(serve)
    engine = serve.single(model, max_batch_size=1)
    first, given_up, waiting = (engine.run(np.full(1, n, "float32")) for n in (1, 2, 4))
    model.gate.wait(first)
    given_up.cancel()
    model.gate.open()
    assert endings(serve, [first, given_up, waiting]) == [[1.0], RequestError, [0.25]]
    engine.close()
    refuses(EngineClosed, engine.run, np.ones(1, "float32"))

    def close(x):
        engine.close()  # in the midst of a step
        return x

    model = Divide(serve)
    model.spoil = close
    engine = serve.single(model, max_batch_size=1)
    items = [engine.run(np.full(1, n, "float32")) for n in (2, 4)]
    model.gate.wait(items[0])
    model.gate.open()
    assert endings(serve, items) == [[0.5], EngineClosed]
