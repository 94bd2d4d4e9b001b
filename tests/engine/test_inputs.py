"""Inputs that stay with a request, and what a step knows of it."""

import numpy as np
import pytest

from hibachi import (
    ConfigError,
    Input,
    InvalidRequest,
    ModelError,
    NumpyBackend,
    Paged,
    SamplingParams,
    Terms,
)
from hibachi.request import Request
from hibachi.testing.toys import SumOwn, SumPaged

from .frames import Told, ToldWhole

HOURS = np.arange(40, dtype=np.int32) * 10


def given(i, hours=HOURS):
    return {"speaker": [i, 0.5], "hours": hours}


def rows(stream):
    return np.array([np.asarray(item) for item in stream.collect()])


LIBRARIES = ["numpy", "torch", "jax"]
PROMPTS = [np.zeros((n, 5), np.float32) for n in (2, 5, 3, 7)]


class Seeded(Told):
    draws = 1


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_step_knows_its_requests(library, serve):
    """Prompt's length, seed, what is new, and inputs of the request and of the position."""
    engine = serve(Seeded(library), backend=library, max_num_seqs=3, max_model_len=60)
    streams = [
        engine.run(p, SamplingParams(seed=100 + i + 2**31 * i, max_tokens=4), inputs=given(i))
        for i, p in enumerate(PROMPTS)
    ]
    for i, (prompt, stream) in enumerate(zip(PROMPTS, streams, strict=True)):
        n = len(prompt)
        want = [[n, 100 + i, float(t > 0), i + 0.5, 10 * (n - 1 + t)] for t in range(4)]
        assert rows(stream).tolist() == want


@pytest.mark.parametrize("library", LIBRARIES)
def test_level_0_knows_them_as_arguments(library, serve):
    engine = serve(ToldWhole(library), backend=library, max_model_len=60)
    streams = [engine.run(p, max_tokens=3, inputs=given(i)) for i, p in enumerate(PROMPTS)]
    for i, (prompt, stream) in enumerate(zip(PROMPTS, streams, strict=True)):
        n, got = len(prompt), rows(stream)
        assert got[:, 0].tolist() == [n] * 3 and got[:, 3].tolist() == [i + 0.5] * 3
        assert got[:, 4].tolist() == [float(HOURS[: n + t].sum()) for t in range(3)]


def test_rows_are_padded_without_inputs(serve):
    engine = serve(ToldWhole(), padding_token=np.zeros((1, 5), np.float32), max_model_len=60)
    streams = [engine.run(p, max_tokens=2, inputs=given(i)) for i, p in enumerate(PROMPTS)]
    sums = [float(HOURS[: len(p)].sum()) for p in PROMPTS]
    assert [rows(stream)[0, 4] for stream in streams] == sums


def test_a_cache_of_its_own_gets_them_too(serve):
    """The new positions of a call only, chunk by chunk."""
    seen = []

    class Own(SumOwn):
        inputs = {"shift": Input((), "int32"), "bonus": Input((), "int32", per="position")}  # noqa: RUF012

        def step(self, tokens, lengths, past, shift, bonus, prompt_len):
            seen.append((np.asarray(bonus).shape, np.asarray(tokens).shape))
            return super().step((tokens + shift[:, None] + bonus) % 10, lengths, past)

    few = {"max_model_len": 40, "max_num_batched_tokens": 4}
    plain, engine = (serve(model(NumpyBackend()), **few) for model in (SumOwn, Own))
    greedy = SamplingParams(temperature=0, max_tokens=1)
    bonus = np.arange(30) % 10
    for prompt in ([1, 2, 3], [4] * 9):
        moved = [(t + 3 + b) % 10 for t, b in zip(prompt, bonus.tolist(), strict=False)]
        want = plain.run(moved, greedy).collect()
        assert engine.run(prompt, greedy, inputs={"shift": 3, "bonus": bonus}).collect() == want
    assert all(a == b for a, b in seen)


def test_an_input_per_position_limits_what_is_generated(serve):
    engine = serve(Told())
    stream = engine.run(PROMPTS[1], inputs=given(0, HOURS[:8]))
    assert len(rows(stream)) == 4 and stream.finish_reason == "length"  # positions 4 to 7 give a token each
    assert len(rows(engine.run(PROMPTS[1], max_tokens=4, inputs=given(0, HOURS[:8])))) == 4
    for hours, how in ((HOURS[:8], {"max_tokens": 5}), (HOURS[:4], {})):
        with pytest.raises(InvalidRequest, match=r"inputs\['hours'\] must reach over the 5 tokens of the prompt"):
            engine.run(PROMPTS[1], inputs=given(0, hours), **how)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (None, "inputs must have the arrays speaker, hours; got none"),
        ({}, "inputs must have the arrays speaker, hours; got none"),
        ({"speaker": [1, 2]}, "must have the arrays speaker, hours; got speaker"),
        (given(0) | {"more": 1}, "got speaker, hours, more"),
        (3, "inputs must be a mapping"),
        (given(0) | {"speaker": [1, 2, 3]}, r"inputs\['speaker'\] must have the shape \(2\).*got \(3,\)"),
        (given(0) | {"speaker": 1.0}, r"must have the shape \(2\).*got \(\)"),
        (given(0) | {"speaker": [1, np.nan]}, "must be finite"),
        (given(0) | {"speaker": [1, np.inf]}, "must be finite"),
        (given(0) | {"speaker": [1, 1e300]}, "holds 1e\\+300, which float32 cannot"),
        (given(0) | {"speaker": ["a", "b"]}, "numbers of float32; got"),
        (given(0) | {"speaker": [[1], [2, 3]]}, "must be an array of numbers"),
        (given(0) | {"hours": [1.5] * 20}, "numbers of int32; got .* of float64"),
        (given(0) | {"hours": [2**40] * 20}, "which int32 cannot"),
        (given(0) | {"hours": np.zeros((20, 1), int)}, r"shape \(positions\)"),
        (given(0) | {"hours": []}, "numbers of int32|must reach over"),
    ],
    ids=str,
)
def test_wrong_inputs_are_refused_at_the_call_and_harm_nobody(inputs, message, serve):
    engine = serve(Told())
    beside = engine.run(PROMPTS[0], max_tokens=30, inputs=given(1))
    with pytest.raises(InvalidRequest, match=message):
        engine.run(PROMPTS[0], max_tokens=2, inputs=inputs)
    assert len(rows(beside)) == 30


def test_the_callers_array_may_change_afterwards(serve):
    engine, mine = serve(Told()), np.array([1.0, 2.0], np.float32)
    stream = engine.run(PROMPTS[0], max_tokens=30, inputs={"speaker": mine, "hours": HOURS})
    mine[:] = 50
    assert {row[3] for row in rows(stream).tolist()} == {3.0}


def test_arrays_of_another_library_are_taken(serve):
    import torch

    stream = serve(Told()).run(PROMPTS[0], max_tokens=1, inputs={"speaker": torch.ones(2), "hours": torch.arange(9)})
    assert rows(stream)[0, 3] == 2.0


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"speaker": (2,)}, r"must be a hibachi\.Input"),
        ([Input((2,))], "must be a mapping"),
        ({"seed": Input()}, "expected a name of its own"),
        ({"tokens": Input()}, "expected a name of its own"),
        ({"a b": Input()}, "expected a name of its own"),
        ({"a": Input((-1,))}, "shape must be a tuple of sizes"),
        ({"a": Input(3)}, "shape must be a tuple of sizes"),
        ({"a": Input((), "float33")}, "dtype must be a name of NumPy's"),
        ({"a": Input((), "str")}, "dtype must be a name of NumPy's"),
        ({"a": Input((), per="row")}, "per must be 'request' or 'position'"),
        ({"a": Input((None,), per="position")}, "an input per position has a fixed shape"),
        ({"a": Input((2,), example=[1.0])}, r"example must have the shape"),
        ({"a": Input((2,), example=[[1], [1, 2]])}, r"example must be an array that NumPy can read"),
        ({"a": Input((None,))}, "has any size, .*expected a method `encode`"),
    ],
    ids=str,
)
def test_wrong_declarations_are_refused(inputs, message, serve):
    class Wrong(Told):
        pass

    Wrong.inputs = inputs
    with pytest.raises(ConfigError, match=message):
        serve(Wrong())


def test_an_input_that_no_method_takes_is_refused(serve):
    class Unused(ToldWhole):
        def forward(self, tokens, speaker):
            return tokens[:, -1]

    with pytest.raises(ConfigError, match="inputs has 'hours', but no method has a parameter of that name"):
        serve(Unused())


# ---- prefixes --------------------------------------------------------------------------------------------------------


class Counting:
    """Level 2, keys and values of its own making: counts the tokens that it computes."""

    vocab_size, params, max_model_len = 10, None, 200
    inputs = {"shift": Input((), "int32")}  # noqa: RUF012

    def __init__(self):
        self.inner, self.computed = SumPaged(NumpyBackend()), 0
        self.backend = "numpy"

    def cache_spec(self):
        return self.inner.cache_spec()

    def step(self, params, cache, x):
        self.computed += len(x.tok)
        return self.inner.step(self.inner.params, cache, x)


def test_prefixes_are_shared_between_equal_inputs_only(serve):
    model = Counting()
    engine = serve(model, block_size=4, max_num_seqs=2)
    greedy, prompt = SamplingParams(temperature=0, max_tokens=2), [1, 2, 3, 4] * 5

    def ask(shift, salt=None):
        before = model.computed
        stream = engine.run(prompt, greedy, inputs={"shift": shift}, terms=Terms(cache_salt=salt))
        stream.collect()
        return model.computed - before, stream.reused

    whole, reused = ask(1)
    assert (whole, reused) == (21, 0)
    assert ask(2) == (21, 0)
    again, reused = ask(1)
    assert again < 8 and reused >= 16
    assert ask(1, "salt") == (21, 0)


class Segments:
    """Level 2: caches whether a position was generated, as an embedding of segments does."""

    vocab_size, max_model_len, params, knows = 10, 128, None, ("prompt_len",)

    def __init__(self):
        self.library = NumpyBackend()
        self.backend = "numpy"

    def cache_spec(self):
        return [Paged(1, 2, 1)]

    def step(self, params, cache, x):
        value = (x.tok + 3 * x.new).astype(np.float32)[:, None, None]
        nothing = np.zeros((len(value), 1, 2), np.float32)
        mean, layer = self.library.attend(nothing, nothing, value, cache[0], x)
        total = np.rint(mean[:, 0, 0] * (x.pos + 1)) % 10
        return np.eye(10, dtype=np.float32)[total[x.last].astype(int)], [layer]


def test_what_is_cached_with_a_prompts_length_is_not_shared(serve):
    """Else a prompt that ends in what another request generated would find it cached as generated."""
    greedy, engine = SamplingParams(temperature=0, max_tokens=20), serve(Segments(), block_size=4)
    prompt = [1, 2, 3, 4, *engine.run([1, 2, 3, 4], greedy).collect()[:16]]
    alone = serve(Segments(), block_size=4, enable_prefix_caching=False).run(prompt, greedy).collect()
    stream = engine.run(prompt, greedy)
    assert stream.collect() == alone and stream.reused == 0
    assert engine.facts.remarks == ("no prefix is shared, as what it caches may depend on prompt_len",)


def test_a_step_gets_only_what_its_model_says_that_it_knows(serve):
    class Silent(Segments):
        knows = ()

    with pytest.raises(ModelError, match=r'must declare knows = \("prompt_len",\)'):
        serve(Silent()).run([1], max_tokens=1).collect()


@pytest.mark.parametrize("knows", ["prompt_len", ("prompt",), (3,), 3, [[]]], ids=str)
def test_a_wrong_declaration_of_what_a_step_knows_is_refused(knows, serve):
    class Wrong(Segments):
        pass

    Wrong.knows = knows
    with pytest.raises(ConfigError, match=r"Wrong\.knows must be a tuple of names of prompt_len, seed"):
        serve(Wrong())


# ---- what callers of all kinds send ----------------------------------------------------------------------------------


def test_of_an_input_per_position_no_more_is_kept_than_a_request_can_have(serve):
    """This one would take four terabytes."""
    engine = serve(Told(), max_model_len=30)
    request = Request(PROMPTS[0], inputs=given(0, np.broadcast_to(np.int32(10), (10**12,))))
    job = engine.check(request)
    assert job.request.inputs["hours"].shape == (30,)
    assert len(rows(engine.submit(job))) == 28


class Wide:
    """Level 0: returns an input of a dtype that some libraries lack."""

    max_model_len = 20

    def __init__(self, dtype):
        self.inputs = {"wide": Input((), dtype)}

    def forward(self, tokens, wide):
        return tokens[:, -1] * 0 + wide


@pytest.mark.parametrize(("dtype", "value"), [("int64", 2**40), ("float64", 1e300)])
def test_a_number_that_the_library_cannot_hold_is_refused(dtype, value, serve):
    """JAX has 32 bits, and would make another number of it without a word."""
    kind = np.dtype(dtype)
    for library, fine in (("numpy", True), ("jax", False)):
        engine = serve(Wide(dtype), backend=library)
        if fine:
            assert engine.run(np.ones(1, kind), max_tokens=1, inputs={"wide": value}).collect()[0] == value
            continue
        with pytest.raises(InvalidRequest, match=f"holds .*, which {dtype[:-2]}32 cannot"):
            engine.run(np.ones(1, kind), max_tokens=1, inputs={"wide": value})
        assert engine.run(np.ones(1, kind), max_tokens=1, inputs={"wide": 3}).collect()[0] == 3


def test_a_dtype_that_the_library_lacks_is_refused_when_the_engine_is_made(serve):
    with pytest.raises(ConfigError, match=r"Wide\.inputs\['wide'\]: dtype must be one that torch has; got longdouble"):
        serve(Wide("longdouble"), backend="torch")
    big = serve(Wide(">f4"), backend="jax")
    assert big.run([1.0], max_tokens=1, inputs={"wide": 2}).collect()[0] == 2
