"""`load_model(x)` goes into the engine as it is; so does a class of one's own that says which ids end a text."""

import threading

import numpy as np
import pytest

from hibachi import (
    LLM,
    AutoregressiveBatchInference,
    ConfigError,
    NumpyBackend,
    PromptTooLong,
    SamplingParams,
    load_backend,
    load_model,
)
from hibachi.cli.main import main

from ..lib.inside import built
from .models import PATIENCE, ints

PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
WHOLE = GREEDY.with_(ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return load_model("tiny", "numpy")


@pytest.fixture(scope="module")
def expected():
    """What `LLM` gives for the same ids."""
    with LLM("tiny", backend="numpy") as llm:
        return [llm.generate([PROMPT], p)[0].token_ids for p in (WHOLE, WHOLE.with_(temperature=1, seed=7))]


@pytest.fixture
def ending(model, expected):
    """The model, of which the fourth token that it writes is an end."""
    before, model.eos_ids = model.eos_ids, (expected[0][3],)
    yield model
    model.eos_ids = before


def cut(ids, *, delivered):
    end = ids.index(ids[3])
    return ids[: end + delivered]


# ---- as it is --------------------------------------------------------------------------------------------------------


def test_it_gives_what_llm_gives(model, expected):
    with AutoregressiveBatchInference(model) as engine:
        assert (engine.max_model_len, engine.facts.dtype, engine.facts.cached) == (model.max_model_len, "float32", True)
        assert engine.facts.eos_ids == tuple(model.eos_ids) and engine.facts.vocab_size == model.vocab_size
        assert [engine.run(PROMPT, p).collect() for p in (WHOLE, WHOLE.with_(temperature=1, seed=7))] == expected


@pytest.mark.parametrize("library, dtype", [("numpy", None), ("torch", "bfloat16"), ("torch", None), ("jax", None)])
def test_backend_and_dtype_are_the_models(library, dtype):
    pytest.importorskip(library)
    model = load_model("tiny", library, dtype=dtype, max_model_len=64)
    with AutoregressiveBatchInference(model) as engine:
        assert engine.facts.dtype == model.dtype == (dtype or "float32")
        assert engine.facts.fingerprint == load_backend(library).fingerprint()
        ids = engine.run(PROMPT, WHOLE).collect()
        cached = [layer.keys.dtype for layer in built(engine).runner.memory.cache]
        assert cached and all(str(d).removeprefix("torch.") == model.dtype for d in cached)
        with pytest.raises(PromptTooLong, match="64"):
            engine.run([3] * 64, WHOLE)
    with LLM("tiny", backend=library, dtype=model.dtype, max_model_len=64) as llm:
        assert llm.generate([PROMPT], WHOLE)[0].token_ids == ids


def test_options_of_the_engine_take_precedence(model):
    with AutoregressiveBatchInference(model, max_model_len=16, max_num_seqs=2) as engine:
        assert engine.max_model_len == 16
        stream = engine.run([3] * 10, SamplingParams(temperature=0, ignore_eos=True))
        assert len(stream.collect()) == 6 and stream.finish_reason == "length"


# ---- its own ends ----------------------------------------------------------------------------------------------------


def test_its_ends_end_requests_as_those_of_llm_do(ending, expected):
    whole = expected[0]
    with AutoregressiveBatchInference(ending) as engine:
        shown, hidden = engine.run(PROMPT, GREEDY), engine.run(PROMPT, GREEDY, include_stop=False)
        assert shown.collect() == cut(whole, delivered=True) and hidden.collect() == cut(whole, delivered=False)
        assert (shown.finish_reason, hidden.finish_reason, hidden.stop_token) == ("stop", "stop", whole[3])
        assert engine.run(PROMPT, WHOLE).collect() == whole
        other = GREEDY.with_(stop_token_ids=[whole[1]])
        assert engine.run(PROMPT, other).collect() == whole[: whole.index(whole[1]) + 1]
        late = engine.run(PROMPT, GREEDY.with_(min_tokens=6)).collect()
        assert len(late) >= 6 and whole[3] not in late[:6]
    with LLM("tiny", backend="numpy") as llm:
        llm.eos_ids = ending.eos_ids  # of a text, which does not show its end
        done = llm.generate([PROMPT], GREEDY)[0]
        assert (done.token_ids, done.finish_reason) == (cut(whole, delivered=False), "stop")
        assert done.choices[0].stopped_by.reason is None and done.choices[0].stopped_by.token == whole[3]


class Count:
    """Level 1: the next token is the last one plus 1."""

    vocab_size, max_model_len = 20, 64

    def logits(self, tokens, lengths):
        last = np.asarray(tokens)[np.arange(len(lengths)), np.asarray(lengths) - 1]
        return np.eye(20, dtype=np.float32)[(last + 1) % 20]


class Cached:
    """Level 2, without layers: likewise."""

    vocab_size, max_model_len, params = 20, 64, None

    def cache_spec(self):
        return ()

    def step(self, params, cache, x):
        return np.eye(20, dtype=np.float32)[(np.asarray(x.tok)[x.last] + 1) % 20], cache


def with_ends(base, ends):
    return type("Own", (base,), {"eos_ids": ends})()


@pytest.mark.parametrize("ends", [5, (5,), [9, 5], {5}, frozenset({5, 9}), np.array([5]), np.int64(5), range(5, 6)])
@pytest.mark.parametrize("base", [Count, Cached])
def test_ends_of_ones_own_class(serve, base, ends):
    with serve(with_ends(base, ends), max_model_len=64) as engine:
        assert engine.run([2], GREEDY).collect() == [3, 4, 5]
        assert engine.run([2], GREEDY, include_stop=False).collect() == [3, 4]
        assert engine.run([2], GREEDY, stop_rule=4).collect() == [3, 4]
        assert engine.run([2], WHOLE).collect() == list(range(3, 15))
        assert engine.run([2], GREEDY.with_(max_tokens=None)).collect() == [3, 4, 5]


@pytest.mark.parametrize("ends", [None, (), []])
@pytest.mark.parametrize("base", [Count, Cached])
def test_no_ends(serve, base, ends):
    with serve(with_ends(base, ends)) as engine:
        assert engine.facts.eos_ids == () and engine.run([2], GREEDY).collect() == list(range(3, 15))


@pytest.mark.parametrize("ends", [20, -1, [5, 20], 5.0, "5", ["5"], [None], True, [True], object(), [[[5], [20]]]])
@pytest.mark.parametrize("base", [Count, Cached])
def test_wrong_ends_are_refused(base, ends):
    with pytest.raises(ConfigError, match=r"^Own\.eos_ids must be token ids from 0 to 19; got "):
        AutoregressiveBatchInference(with_ends(base, ends), backend="numpy", deterministic=False)


class Next:
    """Level 0."""

    max_model_len, eos_ids = 64, (5,)

    def forward(self, tokens):
        return tokens[:, -1] + 1


class CachedTokens(Cached):
    """Level 2 that returns tokens."""

    vocab_size, eos_ids = None, (5,)

    def step(self, params, cache, x):
        return np.asarray(x.tok)[x.last] + 1, cache


@pytest.mark.parametrize("base", [Next, CachedTokens])
def test_those_of_a_model_that_returns_tokens_are_stop_tokens(serve, base):
    with serve(base(), backend=NumpyBackend()) as engine:
        assert engine.facts.eos_ids == () and ints(engine.run([2], max_tokens=4)) == [3, 4, 5]


# ---- what `run(p)` means ---------------------------------------------------------------------------------------------


def test_run_is_run_with_the_defaults(serve):
    assert SamplingParams().max_tokens is None
    with serve(Count(), max_model_len=30) as engine:
        alone, default = engine.run([2]), engine.run([2], SamplingParams(seed=1))
        plain = SamplingParams(temperature=0)
        assert len(alone.collect()) == len(default.collect()) == 29  # to the end of the context
        assert (alone.finish_reason, default.finish_reason) == ("length", "length")
        assert engine.run([2], plain, max_tokens=3).collect() == [3, 4, 5]
        assert engine.run([2], plain.with_(max_tokens=5), max_tokens=3).collect() == [3, 4, 5]
        assert engine.run([2], plain.with_(max_tokens=3)).collect() == [3, 4, 5]


@pytest.mark.parametrize("of_params", [None, True, False])
@pytest.mark.parametrize("of_run", [None, True, False])
@pytest.mark.parametrize("way", ["stop_token_ids", "stop_rule", "eos_ids", "stop_token"])
def test_include_stop_means_one_thing(serve, way, of_run, of_params):
    """Whatever ends a stream. What `run` is told takes precedence; None in both means True."""
    model = with_ends(Count, 5 if way == "eos_ids" else ())
    params = SamplingParams(
        temperature=0, include_stop=of_params, stop_token_ids=[5] if way == "stop_token_ids" else ()
    )
    rule = {"stop_rule": 5} if way == "stop_rule" else {}
    delivered = of_params if of_run is None else of_run
    with serve(model, **({"stop_token": 5} if way == "stop_token" else {})) as engine:
        stream = engine.run([2], params, include_stop=of_run, **rule)
        assert stream.collect() == ([3, 4] if delivered is False else [3, 4, 5])
        assert (stream.finish_reason, stream.stop_token) == ("stop", 5)


# ---- what a class says of its requests -------------------------------------------------------------------------------


class Frames:
    """Level 0: the next frame is the last one more. Requests end at 5s; rows of all lengths share a call."""

    token, stop_token, padding_token, max_model_len = np.zeros(2, np.int16), (5, 5), (0, 0), 64
    rows = 0

    def __init__(self, begin=None):
        self.begin = begin

    def forward(self, tokens, lengths):
        assert tokens.dtype == np.int16 and (self.begin is None or self.begin.wait(PATIENCE))
        self.rows = max(self.rows, len(tokens))
        return tokens[:, -1] + 1


class Ruled(Next):
    eos_ids = (7,)

    def stop_rule(self, now):
        return now >= 5


class Greedy(Count):
    max_model_len, default_params = 64, SamplingParams(temperature=0, max_tokens=3)


def test_what_a_class_says_of_its_requests_holds_and_what_the_caller_says_goes_before(serve):
    engine = serve(Frames(begin := threading.Event()), max_num_seqs=4)
    streams = [engine.run(np.full((n, 2), n)) for n in (1, 2, 3)]
    begin.set()
    assert [[int(frame[0]) for frame in stream] for stream in streams] == [[2, 3, 4, 5], [3, 4, 5], [4, 5]]
    assert engine.model.rows > 1 and engine.facts.token == ((2,), "int16")
    assert len(serve(Frames(), stop_token=[4, 4]).run([[1, 1]]).collect()) == 3
    assert ints(serve(Ruled()).run([2])) == [3, 4, 5] and ints(serve(Ruled(), stop_rule=[4]).run([2])) == [3, 4]
    assert serve(Greedy()).run([2]).collect() == [3, 4, 5]
    assert serve(Greedy()).run([2], GREEDY.with_(max_tokens=5)).collect() == [3, 4, 5, 6, 7]
    layers = type("Layers", (Frames,), {"stop_token": np.sin})()  # a layer may have such a name, and is no token
    assert len(serve(layers, stop_rule=[[4, 4]]).run([[1, 1]]).collect()) == 3


def test_the_command_reads_it_too(capsys):
    for name, n in (("Ruled", "9"), ("Greedy", "4")):
        assert main(["generate", "--model", f"{__name__}:{name}", "--prompt", "2", "--max-tokens", n]) == 0
    assert capsys.readouterr().out.split() == ["3", "4", "5", "3", "4", "5", "6"]
