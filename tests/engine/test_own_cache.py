"""Models that keep a cache of their own: rows join, part, fail and come back, and none notices the others."""

import dataclasses
import types

import numpy as np
import pytest

import hibachi
from hibachi import (
    AutoregressiveBatchInference,
    ConfigError,
    InvalidModelOutput,
    InvalidRequest,
    ModelError,
    NonFiniteOutput,
    NumpyBackend,
    OwnCache,
    PromptTooLong,
    SamplingParams,
)
from hibachi.backend.nested import arrays_in, with_arrays
from hibachi.engine.runners.owncache.layout import Past
from hibachi.testing.toys import SumLogits, SumOwn, SumOwnState, expected

from .models import until

NUMPY = NumpyBackend()
GREEDY = SamplingParams(temperature=0, max_tokens=8)
RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(0, 10, int(n)).tolist() for n in RNG.integers(1, 30, 12)]


def answers(engine, prompts=PROMPTS, params=GREEDY):
    return [stream.collect() for stream in [engine.run(prompt, params) for prompt in prompts]]


def right(prompts=PROMPTS, n=8):
    return [expected(prompt, n) for prompt in prompts]


class Attends:
    """Attention with weights: rounding differs with the width of the past and the number of rows."""

    vocab_size, max_model_len, past = 50, 64, OwnCache()

    def __init__(self, seed=0):
        draw = np.random.default_rng(seed).normal
        self.tokens, self.places = draw(size=(50, 16)).astype("f"), draw(size=(64, 16)).astype("f")
        self.weights = [draw(size=(16, 16)).astype("f") / 4 for _ in range(3)]

    def step(self, tokens, lengths, past):
        place = lengths[:, None] - tokens.shape[1] + np.arange(tokens.shape[1])
        x = self.tokens[tokens] + self.places[place]
        q, k, v = (x @ w for w in self.weights)
        if past is not None:
            k, v = np.concatenate([past[0], k], 1), np.concatenate([past[1], v], 1)
        column = np.arange(k.shape[1]) - (k.shape[1] - lengths[:, None])
        seen = (column[:, None] >= 0) & (column[:, None] <= place[..., None])
        scores = np.where(seen, q @ k.swapaxes(1, 2), -1e30)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        x = x + (share / share.sum(-1, keepdims=True)) @ v
        return x[:, -1] @ self.tokens.T, (k, v)


# ---- any nesting -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layer:
    keys: np.ndarray
    note: str = "as it is"


class Cache:
    """As libraries write them: layers in a list, and counters beside."""

    def __init__(self):
        self.layers, self.config, self.seen = [], types.SimpleNamespace(heads=2), 0


class Slots:
    __slots__ = ("keys",)


def in_object(seen, past):
    cache = Cache() if past is None else past
    layer = Slots()
    layer.keys = seen
    cache.layers, cache.seen = [layer, None], seen.shape[2]
    return cache


NESTINGS = {
    "array": (lambda seen, past: seen, lambda past: past),
    "tuple": (lambda seen, past: ((seen, "k"), None), lambda past: past[0][0]),
    "list": (lambda seen, past: [[seen]], lambda past: past[0][0]),
    "dict": (lambda seen, past: {"a": {"b": seen}, "n": 3}, lambda past: past["a"]["b"]),
    "dataclass": (lambda seen, past: (Layer(seen),), lambda past: past[0].keys),
    "object": (in_object, lambda past: past.layers[0].keys),
}


class Nested(SumOwn):
    def __init__(self, how):
        super().__init__(NUMPY)
        self.put, self.get = NESTINGS[how]

    def step(self, tokens, lengths, past):
        inner = None if past is None else {"layers": [(self.get(past),)]}
        logits, found = super().step(tokens, lengths, inner)
        return logits, self.put(found["layers"][0][0], past)


@pytest.mark.parametrize("how", NESTINGS)
def test_a_past_may_be_nested_in_any_way(serve, how):
    assert answers(serve(Nested(how), max_num_seqs=4, max_model_len=60)) == right()


def test_results_beside_the_cache_are_left_out(serve):
    class More(SumOwn):
        past = OwnCache(only="seen")

        def step(self, tokens, lengths, past):
            assert past is None or past["scores"] == [None, 3]
            inner = None if past is None else {"layers": [(past["seen"],)]}
            logits, new = super().step(tokens, lengths, inner)
            width = new["layers"][0][0].shape[2]
            return logits, {"seen": new["layers"][0][0], "scores": [np.zeros((len(tokens), width, width)), 3]}

    assert answers(serve(More(NUMPY), max_num_seqs=4, max_model_len=60)) == right()
    with pytest.raises(ConfigError, match="found none"):
        More.past = OwnCache(only="keys")
        AutoregressiveBatchInference(More(NUMPY), backend="numpy")


def test_arrays_are_found_and_replaced_in_one_order():
    shared = [np.ones(2)]
    circle = Cache()
    circle.layers, circle.itself = [shared, shared, Layer(np.zeros(3))], circle
    owns = NUMPY.owns
    found = arrays_in(circle, owns)
    assert [place for place, _ in found] == [".layers[0][0]", ".layers[2].keys"]
    other = with_arrays(circle, owns, [np.ones(5), np.ones(6)])
    assert other is not circle and other.layers[0] is other.layers[1] and other.config is circle.config
    assert other.layers[2] == dataclasses.replace(other.layers[2]) and other.layers[2].note == "as it is"
    assert [a.shape for _, a in arrays_in(other, owns)] == [(5,), (6,)]
    assert [a.shape for _, a in found] == [(2,), (3,)] == [a.shape for _, a in arrays_in(circle, owns)]


def test_the_past_comes_back_as_it_is_while_no_row_comes_or_goes(serve):
    class Same(SumOwn):
        last, same = None, 0

        def step(self, tokens, lengths, past):
            self.same += past is not None and past is self.last
            logits, self.last = super().step(tokens, lengths, past)
            return logits, self.last

    model = Same(NUMPY)
    engine = serve(model, max_model_len=60)
    model.same = 0  # in trials
    assert engine.run([1, 2], GREEDY).collect() == expected([1, 2], 8) and model.same == 7


# ---- how calls are made ----------------------------------------------------------------------------------------------


def test_decoding_rows_share_a_call_and_nothing_but_the_past_is_padded(serve):
    model = SumOwn(NUMPY)
    engine = serve(model, max_num_seqs=16, max_model_len=60)
    model.seen.clear()
    assert answers(engine) == right()
    decoding = [tokens.shape for tokens, _ in model.seen if tokens.shape[1] == 1 and len(tokens) > 1]
    assert max(decoding)[0] >= len(PROMPTS) - 4  # the first may be under way when the last comes
    for tokens, lengths in model.seen:
        assert tokens.shape[1] <= lengths.min(), "no token is padding"


def test_a_model_without_lengths_gets_rows_of_one_length(serve):
    class Blind(SumOwn):
        """It takes every position for a real one."""

        def step(self, tokens, past):
            width = tokens.shape[1] + (0 if past is None else past["layers"][0][0].shape[2])
            return super().step(tokens, np.full(len(tokens), width), past)

    engine = serve(Blind(NUMPY), max_num_seqs=12, max_model_len=60)
    assert answers(engine) == right()
    same = [[i, 3, 4] for i in range(10)]
    assert answers(engine, same) == right(same)


@pytest.mark.parametrize("limit", [5, 24, None])
def test_prompts_come_in_chunks_and_rows_are_preempted(serve, limit):
    engine = serve(SumOwn(NUMPY), max_num_seqs=5, max_model_len=60, max_num_batched_tokens=limit or 99, cache_tokens=64)
    assert answers(engine) == right()
    assert engine.stats().preemptions or limit == 5
    assert engine.stats().free_blocks == engine.stats().blocks


def test_a_past_never_has_more_positions_than_the_cache(serve):
    class Counts(SumOwn):
        most = 0

        def step(self, tokens, lengths, past):
            logits, new = super().step(tokens, lengths, past)
            rows, _, width = new["layers"][0][0].shape
            self.most = max(self.most, rows * width)
            return logits, new

    model = Counts(NUMPY)
    engine = serve(model, max_num_seqs=12, max_model_len=60, cache_tokens=96, block_size=4)
    prompts = [[1] * 40, *([i] for i in range(8))]  # one is long: side by side they would take 9 * 48
    assert answers(engine, prompts) == right(prompts) and model.most <= 96


def test_pasts_are_freed_with_their_requests(serve):
    engine = serve(SumOwn(NUMPY), max_model_len=60)
    stream = engine.run([1, 2, 3], SamplingParams(temperature=0, max_tokens=50))
    next(stream)
    stream.close()
    until(lambda: not engine.core.runner.pasts.of)
    assert answers(engine) == right()
    until(lambda: not engine.core.runner.pasts.of)


def test_a_row_that_another_request_has_got_is_not_taken_for_the_one_before(serve):
    """Three rows shared a past; the last ended, and a new request has its row and a past of its own."""
    pasts = serve(SumOwn(NUMPY)).core.runner.pasts

    def past(rows, numbers):
        array = np.array(numbers, np.float32).reshape(len(rows), 1, -1)
        return Past({"layers": [(array,)]}, [array], rows, [2] * len(rows), 2, len(rows))

    before, new = past([0, 1, 2], [[1, 1], [2, 2], [3, 3]]), past([2], [[7, 7]])
    pasts.of = {0: before, 1: before, 2: new}
    assert pasts.gathered([0, 1, 2], [2, 2, 2], 3).arrays[0].tolist() == [[[1, 1]], [[2, 2]], [[7, 7]]]


# ---- faults stay alone -----------------------------------------------------------------------------------------------


class Poisoned(SumOwn):
    """Writes into the past that it is given, and then fails at a token."""

    def __init__(self, fault):
        super().__init__(NUMPY)
        self.fault, self.armed = fault, False

    def step(self, tokens, lengths, past):
        with np.errstate(invalid="ignore"):
            logits, new = super().step(tokens, lengths, past)
        logits[np.isnan(new["layers"][0][0]).any(axis=(1, 2))] = np.nan
        if self.armed and (hit := (tokens == 9).any(axis=1)).any():
            if self.fault == "raises":
                if past is not None:
                    past["layers"][0][0][:] = 5
                raise RuntimeError("nine")
            logits[hit] = np.nan
            new["layers"][0][0][hit] = np.nan
        return logits, new


@pytest.mark.parametrize("fault, error", [("raises", ModelError), ("nan", NonFiniteOutput)])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 6}, {"deterministic": True}])
def test_a_fault_ends_its_own_request_only(serve, fault, error, options):
    model = Poisoned(fault)
    engine = serve(model, max_num_seqs=6, max_model_len=60, **options)
    model.armed = True
    prompts = [[i % 9, *PROMPTS[i]] for i in range(12)]
    streams = [engine.run(prompt, GREEDY) for prompt in prompts]
    failed = 0
    for prompt, stream in zip(prompts, streams, strict=True):
        shown = [*prompt, *expected(prompt, 8)][: len(prompt) + 7]
        if 9 in shown:
            failed += 1
            with pytest.raises(error):
                stream.collect()
        else:
            assert stream.collect() == expected(prompt, 8)
    assert 0 < failed < 12


def test_a_call_that_fails_once_harms_nobody(serve):
    class Once(SumOwn):
        calls = -98  # those of the start

        def step(self, tokens, lengths, past):
            self.calls += 1
            if past is not None and self.calls > 0 and self.calls % 7 == 0:
                past["layers"][0][0][:] = 5
                raise RuntimeError("sometimes")
            return super().step(tokens, lengths, past)

    assert answers(serve(Once(NUMPY), max_num_seqs=5, max_model_len=60)) == right()


OF_SHAPE = r"past whose array \['layers'\]\[0\]\[0\] has shape .* and dtype float32: 1 rows, \d+ positions.*; got "
ODD = {
    "none": (
        lambda logits, seen: (logits, None),
        r"arrays at \['layers'\]\[0\]\[0\]; got none\. Return \(logits, past\)",
    ),
    "alone": (lambda logits, seen: logits, r"a pair \(logits, past\); got ndarray"),
    "three": (lambda logits, seen: (logits, seen, 3), r"a pair \(logits, past\); got tuple"),
    "two more": (lambda logits, seen: (logits, past_of(np.concatenate([seen, seen[..., -1:]], 2))), OF_SHAPE),
    "empty": (lambda logits, seen: (logits, past_of(seen[..., :0])), OF_SHAPE),
    "dtype": (
        lambda logits, seen: (logits, past_of(seen.astype(np.float64))),
        r"float64\. Return the past that was given",
    ),
    "axes": (lambda logits, seen: (logits, past_of(seen.transpose(0, 2, 1))), OF_SHAPE),
    "a row more": (lambda logits, seen: (logits, past_of(np.concatenate([seen, seen[:1]]))), OF_SHAPE),
    "a row less": (lambda logits, seen: (logits, past_of(seen[1:])), OF_SHAPE),
    "place": (lambda logits, seen: (logits, {"layer": [(seen,)]}), r"got \['layer'\]\[0\]\[0\]"),
    "another": (
        lambda logits, seen: (logits, past_of(seen, seen)),
        r"got \['layers'\]\[0\]\[0\], \['layers'\]\[0\]\[1\]",
    ),
    "lists": (lambda logits, seen: (logits, past_of(seen.tolist())), "got none"),
    "logits": (lambda logits, seen: (logits[:, None], past_of(seen)), r"shape \(1, 10\); got \(1, 1, 10\)"),
}


def past_of(*arrays):
    return {"layers": [arrays]}


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 6}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("how", ODD)
def test_a_wrong_past_is_named_and_ends_its_own_request_only(serve, how, options):
    change, words = ODD[how]

    class Odd(SumOwn):
        """Wrong as soon as a token of a call is 9; what it was given is written to as well."""

        armed = False

        def step(self, tokens, lengths, past):
            logits, new = super().step(tokens, lengths, past)
            if not self.armed or not (tokens == 9).any():
                return logits, new
            if past is not None:
                past["layers"][0][0][:] = 5
            return change(logits, new["layers"][0][0])

    model = Odd(NUMPY)
    engine = serve(model, max_num_seqs=6, max_model_len=60, **options)
    model.armed = True
    prompts = [[i % 9, *PROMPTS[i]] for i in range(12)]
    failed = 0
    for prompt, stream in zip(prompts, [engine.run(prompt, GREEDY) for prompt in prompts], strict=True):
        if 9 in [*prompt, *expected(prompt, 7)]:
            failed += 1
            with pytest.raises(InvalidModelOutput, match=rf"Odd\.step must return .*{words}"):
                stream.collect()
        else:
            assert stream.collect() == expected(prompt, 8)
    assert 0 < failed < 12


# ---- what is refused when the engine is made -------------------------------------------------------------------------


class Made:
    """A model whose past is what a function of (rows, tokens) says."""

    vocab_size, max_model_len, past = 10, 60, OwnCache()

    def __init__(self, made, past=None):
        self.made = made
        self.past = past or OwnCache()

    def step(self, tokens, lengths, past):
        return np.zeros((len(tokens), 10)), self.made(*tokens.shape)


@pytest.mark.parametrize(
    "made, words",
    [
        (lambda b, n: None, "found none"),
        (lambda b, n: np.zeros((4, n)), "no array of the past has an axis of rows"),
        (lambda b, n: np.zeros((b * 2, n)), r"as long in one axis as there are rows; got shape \(4, 3\) for 2 and"),
        (lambda b, n: np.zeros((b, 2 * n)), "as long in one axis as there are tokens"),
        (lambda b, n: np.zeros((b * n,)), "as long in one axis as there are rows"),
        (lambda b, n: [np.zeros((b, n))] * n, "the same arrays in every call; got 3, 3 and 4"),
        (lambda b, n: np.zeros((b,) * n), "as long in one axis|as many dimensions"),
    ],
)
def test_a_past_without_rows_and_positions_is_refused(made, words):
    with pytest.raises(ConfigError, match=words):
        AutoregressiveBatchInference(Made(made), backend="numpy")


class Buffered(Attends):
    """The array of all calls, as where memory for the longest text is made once."""

    buffer = np.zeros((8, 64, 16), np.float32)

    def step(self, tokens, lengths, past):
        logits, (k, v) = super().step(tokens, lengths, past)
        view = self.buffer[: len(k), : k.shape[1]]
        view[...] = k
        return logits, (view, v)


def changed(before=lambda new, lengths, past: (lengths, past), after=lambda logits, seen, past: (logits, seen)):
    """A model that changes what it is given, or what it returns."""

    class Changed(SumOwn):
        def __init__(self):
            super().__init__(NUMPY)

        def step(self, tokens, lengths, past):
            logits, new = super().step(tokens, *before(np.full_like(lengths, tokens.shape[1]), lengths, past))
            logits, seen = after(logits, new["layers"][0][0], past)
            return logits, past_of(seen)

    return Changed


@pytest.mark.parametrize(
    "make",
    [
        Buffered,
        changed(after=lambda logits, seen, past: (logits, seen[::-1].copy())),
        changed(after=lambda logits, seen, past: (logits, np.broadcast_to(seen[:1], seen.shape))),
        changed(before=lambda new, lengths, past: (new, None)),
        changed(before=lambda new, lengths, past: (lengths, past and past_of(past["layers"][0][0][::-1]))),
        changed(after=lambda logits, seen, past: (logits if past is None else np.roll(logits, 1, axis=1), seen)),
    ],
    ids=["in one buffer", "turned", "of one row", "ignores the past", "mixes its rows", "is wrong"],
)
def test_a_model_that_does_not_go_on_from_its_past_is_refused(make):
    words = rf"{make.__name__}\.step must go on from the past.*return its rows in the order of.*eval"
    with pytest.raises(ConfigError, match=words):
        AutoregressiveBatchInference(make(), backend="numpy", deterministic=False)


def test_states_that_come_back_in_another_order_are_refused():
    class Wrong(SumOwnState):
        def step(self, tokens, past):
            logits, sums = super().step(tokens, past)
            return logits, sums[::-1]

    with pytest.raises(ConfigError, match=r"Wrong\.step must go on from the past"):
        AutoregressiveBatchInference(Wrong(NUMPY), backend="numpy", deterministic=False)


def test_rows_of_one_length_only_share_calls_where_a_longer_one_is_seen(caplog):
    class Looks(SumOwn):
        def step(self, tokens, lengths, past):
            logits, new = super().step(tokens, lengths, past)
            return np.roll(logits, int(new["layers"][0][0].shape[2] - lengths.min()), axis=1), new

    with AutoregressiveBatchInference(Looks(NUMPY), backend="numpy", max_model_len=60) as engine:
        assert answers(engine) == right()
    assert "Looks.step: rows of one length only share calls, as a row beside a longer one gets other" in caplog.text


def test_declared_axes_must_fit():
    def right_axes(b, n):
        return np.zeros((2, b, 5, n))

    AutoregressiveBatchInference(Made(right_axes, OwnCache(batch=1, position=-1)), backend="numpy").close()
    for given, real in (
        *(({"batch": axis}, "batch=1") for axis in (0, 5, -7, 2**31, 2**63)),
        *(({"position": axis}, "position=3") for axis in (2, 7, -2)),
    ):
        with pytest.raises(ConfigError, match=f"does not fit .* expected {real}"):
            AutoregressiveBatchInference(Made(right_axes, OwnCache(**given)), backend="numpy")


@pytest.mark.parametrize(
    "given", [*({name: value} for name in ("batch", "position") for value in (np.nan, 1e300, True, "0")), {"only": 5}]
)
def test_an_axis_is_an_integer(given):
    with pytest.raises(ConfigError, match=r"OwnCache\(.*=\.\.\.\) must be"):
        AutoregressiveBatchInference(Made(lambda b, n: np.zeros((b, n)), OwnCache(**given)), backend="numpy")


@pytest.mark.parametrize("level", [SumOwn, SumLogits])
@pytest.mark.parametrize("examples", [[], 5, lambda: []])
def test_examples_are_prompts(level, examples):
    model = level(NUMPY)
    model.example_prompts = examples
    with pytest.raises(ConfigError, match="example_prompts must be prompts of ids, at least one"):
        AutoregressiveBatchInference(model, backend="numpy", max_model_len=20)


def test_what_the_model_raises_when_it_is_tried_is_told():
    def broken(b, n):
        raise KeyError("layers")

    with pytest.raises(ConfigError, match=r"Made\.step failed when it was tried on a few tokens.*KeyError: 'layers'"):
        AutoregressiveBatchInference(Made(broken), backend="numpy")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"max_model_len": None}, "max_model_len"),
        ({"vocab_size": None}, "returns tokens, and nothing says of what kind: expected token=, one token"),
        ({"vocab_size": "10"}, "has `past`, so it also needs `vocab_size`"),
        ({"vocab_size": 0}, "has `past`, so it also needs `vocab_size`, an integer >= 1"),
        ({"vocab_size": -1}, "has `past`, so it also needs `vocab_size`"),
        ({"step": lambda tokens: 0}, r"step is called as `step\(tokens, past\)`"),
        ({"step": lambda tokens, lengths, past, more: 0}, "missing a required argument: 'more'"),
    ],
)
def test_a_model_that_lacks_something_is_refused(changes, words):
    model = SumOwn(NUMPY)
    for name, value in changes.items():
        setattr(model, name, value)
    with pytest.raises(ConfigError, match=words):
        AutoregressiveBatchInference(model, backend="numpy")


def test_what_takes_a_cache_of_the_engine_is_refused_by_name(serve):
    engine = serve(SumOwn(NUMPY), max_model_len=60)
    with pytest.raises(InvalidRequest, match="prompt_logprobs needs a model with a cache"):
        engine.run([1], SamplingParams(prompt_logprobs=1))
    with pytest.raises(hibachi.UnsupportedOperation):
        engine.embed([1])
    with pytest.raises(PromptTooLong):
        engine.run([1] * 60)


# ---- the promise -----------------------------------------------------------------------------------------------------


def told(streams):
    return [(stream.collect(), stream.logprobs) for stream in streams]


def test_alone_in_company_in_chunks_and_preempted_the_bits_are_the_same():
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=10, logprobs=3) for i in range(8)]
    prompts = [RNG.integers(0, 50, int(n)).tolist() for n in RNG.integers(1, 25, 8)]
    found = []
    for options in ({"max_num_seqs": 1}, {}, {"max_num_batched_tokens": 8}, {"cache_tokens": 64}):
        with AutoregressiveBatchInference(Attends(), backend="numpy", deterministic=True, **options) as engine:
            assert engine.deterministic
            found.append(told([engine.run(*each) for each in zip(prompts, params, strict=True)]))
            assert bool(engine.stats().preemptions) is ("cache_tokens" in options)
    assert found[1:] == [found[0]] * 3


def test_a_model_whose_bits_do_not_depend_on_the_batch_shares_calls_and_keeps_the_promise():
    with AutoregressiveBatchInference(SumOwn(NUMPY)) as engine:
        assert engine.deterministic and engine.selfcheck() == 16
        assert not engine.core.runner.apart and answers(engine) == right()


def test_a_model_whose_bits_depend_on_the_batch_says_so(caplog):
    class Mixes(SumOwn):
        def step(self, tokens, lengths, past):
            logits, new = super().step(tokens, lengths, past)
            return logits + len(tokens) * 1e-3, new

    with AutoregressiveBatchInference(Mixes(NUMPY)) as engine:
        assert not engine.deterministic and answers(engine) == right()
        with pytest.raises(hibachi.NotDeterministic, match="they differ by up to"):
            engine.selfcheck()
    assert "deterministic=False for Mixes.step" in caplog.text
    with AutoregressiveBatchInference(Mixes(NUMPY), deterministic=True) as engine:
        assert engine.deterministic and engine.core.runner.apart and answers(engine) == right()
    assert "computes each row by itself" in caplog.text


def test_a_state_that_needs_no_lengths_is_promised_for(serve):
    with AutoregressiveBatchInference(SumOwnState(NUMPY)) as engine:
        assert engine.deterministic and answers(engine) == right()


# ---- other libraries -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["torch", "jax", "array_api_strict"])
@pytest.mark.parametrize("make", [SumOwn, SumOwnState])
def test_every_library(library, make):
    pytest.importorskip(library)
    backend = hibachi.load_backend(library) if library != "array_api_strict" else strict()
    model = make(backend)
    with AutoregressiveBatchInference(model, backend=backend, max_num_seqs=4, deterministic=False) as engine:
        model.seen.clear()
        assert answers(engine, PROMPTS[:6]) == right(PROMPTS[:6])
        if backend.shapes.compiled:
            assert len({tokens.shape for tokens, _ in model.seen}) <= 12, "few shapes"


def strict():
    import array_api_strict

    return hibachi.ArrayBackend(array_api_strict, name="array_api_strict")
