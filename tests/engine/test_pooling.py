"""Embeddings: pooled hidden states, against transformers, whatever the batch and the chunks."""

import itertools
from functools import cache

import numpy as np
import pytest
import torch
import transformers

import hibachi
from hibachi.engine.pooling import PoolingBatchInference
from hibachi.errors import ConfigError, InvalidRequest, ModelError, NonFiniteOutput

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
    options = dict(max_batch_size=3, max_batch_tokens=11, max_model_len=64, backend=library)
    backend = hibachi.load(library)
    with PoolingBatchInference(hibachi.load_model(folder, backend), pooling=pooling, **options) as engine:
        items = [engine.embed(p) for p in PROMPTS]
        for item, h in zip(items, states, strict=True):
            vector = backend.get(item.result())
            assert vector.dtype == np.float32
            np.testing.assert_allclose(vector, POOLED[pooling](h), atol=1e-4)


class Flaky:
    """Hidden states that are the token itself; a call fails or gives NaN when it meets the token `bad`."""

    vocab_size, params, fails = 97, None, True

    def cache_spec(self):
        return [hibachi.Paged(1, 2, 2)]

    def hidden(self, params, cache, x):
        if self.fails and (x.tok == 13).any():
            raise ZeroDivisionError("thirteen")
        out = np.repeat(x.tok[x.last].astype(np.float32)[:, None], 4, axis=1)
        return np.where(out == 14, np.float32(np.nan), out), cache


@pytest.mark.parametrize("bad, error", [(13, ModelError), (14, NonFiniteOutput)])
def test_a_prompt_that_fails_harms_no_other(bad, error):
    options = dict(max_model_len=64, max_batch_tokens=7, max_batch_size=4, backend="numpy")
    with PoolingBatchInference(Flaky(), pooling="mean", **options) as engine:
        good = [list(range(20, 20 + n)) for n in (3, 12, 30)]
        items = [engine.embed(p) for p in (good[0], [20, bad, 20, 21, 22], *good[1:])]
        with pytest.raises(error):
            items[1].result()
        for item, prompt in zip([items[0], *items[2:]], good, strict=True):
            assert item.result() == pytest.approx(np.mean(prompt))


def test_what_cannot_be_pooled_is_refused():
    with pytest.raises(ConfigError, match="pooling must be 'mean', 'last' or 'cls'; got 'max'"):
        PoolingBatchInference(Flaky(), pooling="max", max_model_len=8)
    with pytest.raises(ConfigError, match="no method `hidden"):
        PoolingBatchInference(object(), max_model_len=8)
    with PoolingBatchInference(Flaky(), max_model_len=8, backend="numpy") as engine:
        with pytest.raises(InvalidRequest, match="at least one token"):
            engine.embed([])
        with pytest.raises(hibachi.PromptTooLong):
            engine.embed([1] * 8)
