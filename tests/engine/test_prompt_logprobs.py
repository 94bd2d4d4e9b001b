"""Log-probabilities of the tokens of a prompt, at level 2."""

import itertools

import numpy as np
import pytest

from hibachi import LLM, AutoregressiveBatchInference, InvalidRequest, NonFiniteOutput, NumpyBackend, SamplingParams
from hibachi.engine.runners import heads
from hibachi.testing.toys import SumBoth, SumLogits, SumPaged, SumState, TinyDecoder, tiny_weights
from hibachi_jax import JaxBackend
from hibachi_torch import TorchBackend

from ..decode.reference import log_softmax
from .models import GatedNumpy, Soft

NUMPY = NumpyBackend()
BACKENDS = {"numpy": NUMPY, "torch": TorchBackend("cpu"), "jax": JaxBackend("cpu")}
PROMPTS = [[1, 2, 3], [5], [7, 7, 30, 2, 9, 11, 4, 4, 12, 0, 3, 25, 6, 8, 10, 1, 2, 2, 31, 17], [9, 8]]


class PlainPaged(Soft, SumPaged):
    pass


class PlainState(Soft, SumState):
    pass


class PlainBoth(Soft, SumBoth):
    pass


def scored(n=0, **params):
    return SamplingParams(temperature=0, prompt_logprobs=n, **{"max_tokens": 3} | params)


def log_probs_of_sums(prompt):
    """What the toys say of the tokens of a prompt: {token: log-probability} of all ten."""
    rows = [[2.0 * (i == (sum(prompt[:at]) + 1) % 10) for i in range(10)] for at in range(1, len(prompt))]
    return [dict(enumerate(log_softmax(row))) for row in rows]


KINDS = [PlainPaged, PlainState, PlainBoth]
EACH = [
    pytest.param(
        *case,
        marks=pytest.mark.slow if case[2] == "jax" and case[:2] != (5, PlainBoth) else (),
        id=f"{case[0]}-{case[1].__name__}-{case[2]}",
    )
    for case in itertools.product([64, 5], KINDS, BACKENDS)
]


@pytest.mark.parametrize("budget, kind, name", EACH)
def test_every_token_but_the_first_is_scored(name, kind, budget):
    """In chunks or at once, beside requests that ask for nothing; what is generated is the same."""
    prompts = [[1, 2, 3], [5], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9], [6, 6]]
    options = dict(max_num_seqs=4, max_model_len=32, block_size=8, max_num_batched_tokens=budget)
    with AutoregressiveBatchInference(kind(BACKENDS[name]), backend=BACKENDS[name], **options) as engine:
        silent = [engine.run(p, SamplingParams(temperature=0, max_tokens=3)) for p in prompts]
        streams = [engine.run(p, scored(n)) for n, p in enumerate(prompts)]
        for n, (prompt, stream, other) in enumerate(zip(prompts, streams, silent, strict=True)):
            assert stream.collect() == other.collect() and other.prompt_logprobs is None
            first, *found = stream.prompt_logprobs
            assert first is None and len(found) == len(prompt) - 1
            for token, got, logs in zip(prompt[1:], found, log_probs_of_sums(prompt), strict=True):
                assert token in got and len(got) in (n, n + 1)
                assert got == pytest.approx({i: logs[i] for i in got}, abs=1e-5)
                if n:
                    assert max(logs, key=logs.get) in got


@pytest.mark.parametrize("name", ["numpy", "torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_they_are_the_logprobs_of_generating_it(name):
    """A decoder: of each prefix, computed alone."""
    backend = BACKENDS[name]
    model = TinyDecoder(backend, tiny_weights())
    with AutoregressiveBatchInference(model, backend=backend, max_num_seqs=4, block_size=4) as engine:
        for prompt in PROMPTS:
            stream = engine.run(prompt, scored(3, max_tokens=1))
            stream.collect()
            for at in range(1, len(prompt)):
                one = engine.run(prompt[:at], SamplingParams(temperature=0, max_tokens=1, logprobs=32))
                one.collect()
                [logs] = one.logprobs
                got = stream.prompt_logprobs[at]
                assert got == pytest.approx({i: logs[i] for i in got}, abs=2e-4)
                assert {prompt[at], *list(logs)[:3]} == {*got}


@pytest.mark.parametrize("kind", [PlainPaged, PlainState])
@pytest.mark.parametrize("room", [1, 17, 50])
def test_few_outputs_at_a_time(kind, room, monkeypatch):
    """Logits of a whole prompt take much memory, so a step makes several calls."""
    monkeypatch.setattr(heads.Sampled, "most_outputs", lambda self: room)
    asked, shapes = [], []

    class Watched(kind):
        def step(self, params, cache, x):
            asked.append(len(x.last))
            shapes.append((np.diff(x.cu_q) > 1).tolist())
            return super().step(params, cache, x)

    prompts = [[1, 2, 3], [5], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9], [6, 6, 1], [2] * 20]
    backend = GatedNumpy()
    options = dict(max_num_seqs=8, max_model_len=32, block_size=8)
    with AutoregressiveBatchInference(Watched(backend), backend=backend, **options) as engine:
        first = engine.run([1], scored())
        backend.wait()
        streams = [engine.run(p, scored(2)) for p in prompts]
        backend.open()
        first.collect()
        for prompt, stream in zip(prompts, streams, strict=True):
            stream.collect()
            logs = log_probs_of_sums(prompt)
            for got, row in zip(stream.prompt_logprobs[1:], logs, strict=True):
                assert got == pytest.approx({i: row[i] for i in got}, abs=1e-5)
    assert shapes == [sorted(shape) for shape in shapes]  # single-token rows come first
    rows = len(prompts)
    assert max(asked) <= max(room, rows) + rows


def test_nan_within_a_prompt_ends_that_request_only():
    class Poisoned(PlainPaged):
        def step(self, params, cache, x):
            logits, cache = super().step(params, cache, x)
            logits[x.tok[x.last] == 9] = np.nan
            return logits, cache

    with AutoregressiveBatchInference(Poisoned(NUMPY), max_num_seqs=4, max_model_len=32, block_size=8) as engine:
        bad, good, silent = engine.run([1, 9, 2], scored()), engine.run([1, 2], scored()), engine.run([1, 9, 2])
        with pytest.raises(NonFiniteOutput):
            bad.collect()
        assert len(good.collect()) == 3 and good.prompt_logprobs[1] is not None
        silent.close()


def test_without_a_cache_it_is_refused_by_name():
    message = r"prompt_logprobs needs a model with a cache \(level 2\).*got prompt_logprobs=0 for one without"
    engine = AutoregressiveBatchInference(SumLogits(NUMPY), max_model_len=9)
    with engine, pytest.raises(InvalidRequest, match=message):
        engine.run([1, 2], scored(0))


def test_language_models_give_them_with_the_first_choice():
    with LLM("tiny") as llm:
        [out] = llm.generate("She was a very good", scored(2, logprobs=0).with_(n=2))
        assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(out.prompt_token_ids) > 3
        ids = out.prompt_token_ids
        for at in (1, len(ids) - 1):
            [one] = llm.generate(ids[:at], SamplingParams(temperature=0, max_tokens=1, logprobs=2048))
            logs = one.logprobs[0]
            got = out.prompt_logprobs[at]
            assert got == pytest.approx({i: logs[i] for i in got}, abs=1e-4) and ids[at] in got
        [silent] = llm.generate(ids, SamplingParams(temperature=0, max_tokens=1))
        assert silent.prompt_logprobs is None and silent.token_ids == out.token_ids[:1]
