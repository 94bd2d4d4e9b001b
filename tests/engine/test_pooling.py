"""Embeddings: pooled hidden states, against transformers, whatever the batch and the chunks."""

import itertools
from functools import cache

import numpy as np
import pytest
import torch
import transformers

import hibachi
import hibachi.llm.own
from hibachi import AutoregressiveBatchInference, SamplingParams, Terms
from hibachi.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    NonFiniteOutput,
    QueueFull,
    RequestError,
    UnsupportedOperation,
)
from hibachi.llm.remote.llm import RemoteLLM

from .models import until

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
PROMPTS = [np.random.default_rng(0).integers(3, 97, n) for n in (1, 5, 40, 2, 27)]
CONFIGS = {
    "llama": transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    ),
    "mamba": transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=8),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """model(kind): a folder, and the hidden states of each prompt by transformers."""

    @cache
    def make(kind):
        folder = tmp_path_factory.mktemp("model")
        torch.manual_seed(0)
        reference = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()
        reference.save_pretrained(folder)
        with torch.no_grad():
            states = [reference.base_model(torch.tensor(p)[None])[0][0].numpy() for p in PROMPTS]
        return folder, states

    return make


POOLED = {"mean": lambda h: h.mean(0), "last": lambda h: h[-1], "cls": lambda h: h[0]}


EACH = [
    pytest.param(
        *case,
        marks=pytest.mark.slow if case[2] == "jax" and case != ("llama", "mean", "jax") else (),
        id="-".join(case),
    )
    for case in itertools.product(CONFIGS, POOLED, ("numpy", "torch", "jax"))
]


@pytest.mark.parametrize("kind, pooling, library", EACH)
def test_vectors_are_those_of_transformers_in_chunks_and_side_by_side(model, kind, pooling, library):
    folder, states = model(kind)
    options = dict(max_num_seqs=3, max_num_batched_tokens=11, max_model_len=64, backend=library)
    backend = hibachi.load_backend(library)
    with AutoregressiveBatchInference(hibachi.load_model(folder, backend), **options) as engine:
        items = [engine.embed(p, pooling=pooling) for p in PROMPTS]
        for item, h in zip(items, states, strict=True):
            vector = backend.get(item.result())
            assert vector.dtype == np.float32
            np.testing.assert_allclose(vector, POOLED[pooling](h), atol=1e-4)


class Flaky:
    """Hidden states that are the token itself; a call fails or gives NaN when it meets the token `bad`."""

    vocab_size, params = 97, None

    def cache_spec(self):
        return [hibachi.Paged(1, 2, 2)]

    def step(self, params, cache, x):
        return np.eye(97, dtype=np.float32)[x.tok[x.last]], cache

    def hidden(self, params, cache, x):
        if (x.tok == 13).any():
            raise ZeroDivisionError("thirteen")
        out = np.repeat(x.tok[x.last].astype(np.float32)[:, None], 4, axis=1)
        return np.where(out == 14, np.float32(np.nan), out), cache


@pytest.mark.parametrize("bad, error", [(13, ModelError), (14, NonFiniteOutput)])
def test_a_prompt_that_fails_harms_no_other(bad, error):
    options = dict(max_model_len=64, max_num_batched_tokens=7, max_num_seqs=4, backend="numpy")
    with AutoregressiveBatchInference(Flaky(), **options) as engine:
        good = [list(range(20, 20 + n)) for n in (3, 12, 30)]
        streams = [engine.run([bad, 5], GREEDY, max_tokens=4), engine.run([7], GREEDY, max_tokens=40)]
        items = [engine.embed(p, pooling="mean") for p in (good[0], [20, bad, 20, 21, 22], *good[1:])]
        with pytest.raises(error):
            items[1].result()
        assert streams[0].collect() == [5] * 4 and streams[1].collect() == [7] * 40
        for item, prompt in zip([items[0], *items[2:]], good, strict=True):
            assert item.result() == pytest.approx(np.mean(prompt))


def test_what_cannot_be_pooled_is_refused():
    class NoHidden(Flaky):
        hidden = None

    engine = AutoregressiveBatchInference(NoHidden(), max_model_len=8, backend="numpy")
    with engine, pytest.raises(UnsupportedOperation, match="expected a method `hidden"):
        engine.embed([1])
    with AutoregressiveBatchInference(Flaky(), max_model_len=8, backend="numpy") as engine:
        for wrong in ("max", None, 3, [], np.zeros(2)):
            with pytest.raises(InvalidRequest, match="pooling must be 'mean', 'last' or 'cls'; got "):
                engine.embed([1], pooling=[] if wrong is None else wrong)
        with pytest.raises(InvalidRequest, match="at least one token"):
            engine.embed([])
        with pytest.raises(hibachi.PromptTooLong):
            engine.embed([1] * 8)


TEXTS = ["Emma was pleased.", "She", "It is a truth universally acknowledged, that a single man in possession of"]
MAKERS = {"here": hibachi.LLM, "there": RemoteLLM}


@pytest.mark.parametrize("where", MAKERS)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_vectors_and_texts_side_by_side_have_the_bits_that_they_have_alone(where, library):
    options = dict(backend=library, dtype="float32", max_num_seqs=4, max_num_batched_tokens=16, deterministic=True)
    sampled = SamplingParams(max_tokens=30, seed=5, ignore_eos=True, logprobs=2)
    with MAKERS[where]("tiny", **options) as llm:
        alone = [llm.embed(t, pooling=p)[0].embedding for t in TEXTS for p in ("mean", "last", "cls")]
        text = llm.generate(TEXTS[2], sampled)[0]
        streams = llm.submit([TEXTS[2], TEXTS[0]], sampled)
        items = [
            llm.submit_vectors([llm.tokenizer.encode(t)], pooling=p) for t in TEXTS for p in ("mean", "last", "cls")
        ]
        for want, (item,) in zip(alone, items, strict=True):
            np.testing.assert_array_equal(item.result(), want)
        streams[1].close()
        assert "".join(p.text for p in streams[0]) == text.text
        beside = streams[0].completion()
        assert (beside.text, beside.choices[0].logprobs) == (text.text, text.choices[0].logprobs)
        until(lambda: llm.stats().running == 0)
        assert llm.stats().free_blocks == llm.stats().blocks


@pytest.fixture(params=MAKERS)
def few(request):
    with MAKERS[request.param]("tiny", max_num_seqs=2, max_num_queued_reqs=2, max_num_batched_tokens=16) as llm:
        yield llm


def test_vectors_count_as_requests_do(few):
    with pytest.raises(QueueFull, match=r"at most 4 requests here .* got 0 and 5 more"):
        few.embed(["a"] * 5)
    held = few.submit(["Once upon a time"], GREEDY.with_(max_tokens=400, n=4))
    with pytest.raises(QueueFull, match=r"got 4 and 1 more"):
        few.embed("a")
    held[0].close()
    until(lambda: few.engine.health().state == "idle")
    assert len(few.embed(["a"] * 4)) == 4


def test_who_cancels_a_vector_leaves_nothing(few):
    long = list(range(5, 200))
    for item in few.submit_vectors([long] * 4):
        item.cancel()
        with pytest.raises(RequestError, match="cancelled"):
            item.result()
    until(lambda: few.stats().running == few.stats().waiting == 0)
    until(lambda: few.engine.health().state == "idle")
    assert len(few.embed(["a"] * 4)) == 4, "their places are free"


def test_terms_hold_for_vectors(few):
    with pytest.raises(DeadlineExceeded):
        few.embed([list(range(5, 200))] * 4, terms=Terms(timeout=1e-6))


def test_a_model_of_ones_own_with_hidden_states_gives_vectors_too():
    with hibachi.llm.own.open_texts(f"{__name__}:Flaky", max_model_len=64) as texts:
        [found] = texts.embed([[3, 4, 8]], pooling="mean", normalize=False)
        np.testing.assert_array_equal(found.embedding, [5.0] * 4)
