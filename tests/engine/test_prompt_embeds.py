"""Prompts given as embeddings: the same as their tokens, whoever shares the batch, and what is refused."""

import numpy as np
import pytest
import torch
import transformers

import hibachi
from hibachi import AutoregressiveBatchInference, SamplingParams
from hibachi.errors import InvalidRequest

from .test_pooling import CONFIGS as KINDS

PROMPTS = [np.random.default_rng(0).integers(3, 97, n) for n in (3, 30, 1, 12)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, repetition_penalty=1.0)


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """Of a model, a Llama unless a test names another kind."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(KINDS[getattr(request, "param", "llama")])
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0, 1)
    model.save_pretrained(folder)
    return folder


def embedded(model, backend, prompt):
    with backend.guard():
        return backend.get(backend.weight_rows(model.params["embed"], backend.put(prompt.astype(np.int32))))


def of_tokens_and_of_embeddings(folder, library, prompts, **options):
    backend = hibachi.load_backend(library)
    model = hibachi.load_model(folder, backend)
    with AutoregressiveBatchInference(model, max_model_len=64, backend=backend, **options) as engine:
        wanted = [stream.collect() for stream in [engine.run(p, GREEDY) for p in prompts]]
        streams = [  # half of them in tokens, beside the others
            engine.run(None, GREEDY, prompt_embeds=embedded(model, backend, p)) if i % 2 else engine.run(p, GREEDY)
            for i, p in enumerate(prompts)
        ]
        assert [stream.collect() for stream in streams] == wanted
        others = [engine.run(None, GREEDY, prompt_embeds=-embedded(model, backend, p)) for p in prompts]
        assert [stream.collect() for stream in others] != wanted


@pytest.mark.parametrize("library", ["numpy", "torch", pytest.param("jax", marks=pytest.mark.slow)])
@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_embeddings_of_tokens_give_what_the_tokens_give(folder, library):
    of_tokens_and_of_embeddings(folder, library, PROMPTS, max_num_seqs=3, max_num_batched_tokens=10, block_size=8)


def test_embeddings_of_tokens_give_what_the_tokens_give_in_few_shapes_on_jax(folder):
    of_tokens_and_of_embeddings(folder, "jax", PROMPTS[1::2], max_num_seqs=2, max_num_batched_tokens=16, block_size=64)


@pytest.mark.parametrize(
    "prompt, shape, change, says",
    [
        (None, (3, 31), {}, r"must be floats of shape \(sequence, 32\)"),
        (None, (32,), {}, r"got shape \(32,\)"),
        (None, (0, 32), {}, r"got shape \(0, 32\)"),
        ([1], (3, 32), {}, "and the prompt None"),
        (None, (3, 32), {"prompt_logprobs": 0}, "prompt_logprobs needs a prompt of tokens"),
    ],
)
def test_what_is_no_prompt_is_refused(folder, prompt, shape, change, says):
    with AutoregressiveBatchInference(hibachi.load_model(folder), max_model_len=64) as engine:
        with pytest.raises(InvalidRequest, match=says):
            engine.run(prompt, GREEDY.with_(**change), prompt_embeds=np.zeros(shape, np.float32))
        with pytest.raises(InvalidRequest, match="must be finite"):
            engine.run(None, GREEDY, prompt_embeds=np.full((2, 32), np.nan))
        assert len(engine.run([1, 2], GREEDY).collect()) == 8


def test_a_model_that_knows_no_embeddings_refuses_them():
    class Two:
        vocab_size, max_model_len, params = 2, 8, None

        def cache_spec(self):
            return []

        def step(self, params, cache, x):
            return np.zeros((len(x.last), 2), np.float32), cache

    with (
        AutoregressiveBatchInference(Two(), backend="numpy") as engine,
        pytest.raises(InvalidRequest, match="takes a model with an attribute `embed_size`"),
    ):
        engine.run(None, prompt_embeds=np.zeros((2, 4), np.float32))


def test_llm_takes_them_beside_texts():
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with hibachi.LLM("tiny") as llm:
        ids = np.array(llm.tokenizer.encode("She was perfectly"))
        embeds = {"prompt_embeds": embedded(llm.model, llm.backend, ids)}
        text, given = llm.generate(["She was perfectly", embeds], params)
        assert given.token_ids == text.token_ids and given.prompt_token_ids == [] and given.text.strip()
        [alone] = llm.generate(embeds, params)
        assert alone.token_ids == text.token_ids
        with llm.stream(embeds, params) as stream:
            assert "".join(piece.text for piece in stream) == given.text
        for call in (llm.embed, lambda prompt: llm.score(prompt, " x")):
            with pytest.raises(InvalidRequest, match="a text or a list of token ids"):
                call(embeds)
        with pytest.raises(InvalidRequest, match=r"must be \{\"prompt_embeds\": array\}; got the keys \['text'\]"):
            llm.generate({"text": "x"})
